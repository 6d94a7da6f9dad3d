//! Decaying popularity: every token multiplies each expert's popularity by `decay` and credits some experts; the least popular
//! goes. Ties: the oldest last use, then the lowest id. Who is credited, and with how much, is the variant ([`Credit`]).
//!
//! The decay is lazy, as in the reference: instead of all popularities being multiplied by `decay`, what is credited grows by
//! 1 / decay a token, and past 1e100 all are scaled back. The operations and their order are the reference's, so that sums
//! round alike.

use super::pool::Pool;
use super::{Build, Eviction, Spec};

/// Who is credited by a token.
pub trait Credit: Send {
    const NAME: &str;
    /// Candidates are credited, by `ranked`; otherwise what ran, by one each.
    const CANDIDATES: bool;

    fn build(spec: &Spec) -> Self;

    /// Calls `add(expert, credit)` for the candidates (by falling rank, the router's own first k first).
    fn ranked(&mut self, ids: &[u16], scores: &[f32], k: usize, add: impl FnMut(u16, f64));
}

/// What ran is credited by 1.
pub struct Chosen;

impl Credit for Chosen {
    const NAME: &str = "ema";
    const CANDIDATES: bool = false;

    fn build(_: &Spec) -> Self {
        Self
    }

    fn ranked(&mut self, _: &[u16], _: &[f32], _: usize, _: impl FnMut(u16, f64)) {}
}

pub struct Ema<C> {
    pool: Pool,
    credit: C,
    popularity: Vec<f64>,
    /// What a credit of 1 is now.
    unit: f64,
    /// 1 / decay.
    growth: f64,
    last_used: Vec<u64>,
}

impl<C: Credit> Build for Ema<C> {
    const NAME: &str = C::NAME;
    const CANDIDATES: bool = C::CANDIDATES;

    fn build(spec: &Spec) -> Self {
        let n = spec.n_experts;
        Self {
            pool: Pool::new(n),
            credit: C::build(spec),
            popularity: vec![0.0; n],
            unit: 1.0,
            growth: 1.0 / spec.decay,
            last_used: vec![0; n],
        }
    }
}

impl<C> Ema<C> {
    fn decay(&mut self) {
        self.unit *= self.growth;
        if self.unit > 1e100 {
            let scale = 1.0 / self.unit;
            self.popularity.iter_mut().for_each(|p| *p *= scale);
            self.unit = 1.0;
        }
    }
}

impl<C: Credit> Eviction for Ema<C> {
    fn remove(&mut self, expert: u16) {
        self.pool.remove(expert);
    }

    fn insert(&mut self, expert: u16) {
        self.pool.insert(expert);
    }

    fn ranked(&mut self, ids: &[u16], scores: &[f32], k: usize) {
        if C::CANDIDATES {
            self.decay();
            let (popularity, unit) = (&mut self.popularity, self.unit);
            self.credit.ranked(ids, scores, k, |e, credit| popularity[e as usize] += credit * unit);
        }
    }

    fn used(&mut self, experts: &[u16], token: u64) {
        if !C::CANDIDATES {
            self.decay();
            experts.iter().for_each(|&e| self.popularity[e as usize] += self.unit);
        }
        experts.iter().for_each(|&e| self.last_used[e as usize] = token);
    }

    fn victim(&mut self) -> Option<u16> {
        self.pool.take_lowest(|e| self.popularity[e as usize], |e| self.last_used[e as usize])
    }

    fn order(&self) -> Vec<u16> {
        self.pool.order(|e| self.popularity[e as usize], |e| self.last_used[e as usize])
    }

    fn clear(&mut self) {
        self.pool.clear();
        self.popularity.fill(0.0);
        self.unit = 1.0;
        self.last_used.fill(0);
    }
}
