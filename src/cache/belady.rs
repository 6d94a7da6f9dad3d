//! Belady's MIN: the expert that is needed again last goes, those that are never needed before all others; ties go to the
//! lowest id. It knows the whole trace, so it is the fewest misses that any policy can have which keeps what a token uses, and
//! it is defined only where the cache does not change what runs (lambda 0).

use std::sync::Arc;

use super::pool::Pool;
use super::{Build, Eviction, Spec};

/// Never: behind every token.
const NEVER: u32 = u32::MAX;

/// When each expert is used: for each the tokens, from 0, in rising order.
#[derive(Debug, Default)]
pub struct NextUses {
    /// By expert, and one more: where its tokens begin in `tokens`.
    begin: Vec<usize>,
    tokens: Vec<u32>,
}

impl NextUses {
    /// Of the experts that each token uses (ids below `n_experts`; fewer than 2^32 - 1 tokens).
    pub fn new<'a>(n_experts: usize, rows: impl Iterator<Item = &'a [u16]> + Clone) -> Self {
        let mut begin = vec![0; n_experts + 1];
        rows.clone().flatten().for_each(|&e| begin[e as usize + 1] += 1);
        for e in 0..n_experts {
            begin[e + 1] += begin[e];
        }
        let (mut tokens, mut at) = (vec![0; begin[n_experts]], begin.clone());
        for (token, row) in rows.enumerate() {
            for &e in row {
                tokens[at[e as usize]] = token as u32;
                at[e as usize] += 1;
            }
        }
        Self { begin, tokens }
    }

    fn of(&self, expert: u16) -> &[u32] {
        let e = expert as usize;
        if e + 1 < self.begin.len() { &self.tokens[self.begin[e]..self.begin[e + 1]] } else { &[] }
    }
}

pub struct Belady {
    pool: Pool,
    uses: Arc<NextUses>,
    /// By expert: how many of its uses are over, and the token of the next.
    over: Vec<u32>,
    next: Vec<u32>,
    /// Tokens that are over.
    now: u32,
}

impl Build for Belady {
    const NAME: &str = "belady_min";
    const FUTURE: bool = true;

    fn build(spec: &Spec) -> Self {
        let uses = spec.next_uses.clone().unwrap_or_default();
        let n = spec.n_experts;
        let mut belady = Self { pool: Pool::new(n), uses, over: vec![0; n], next: vec![NEVER; n], now: 0 };
        belady.clear();
        belady
    }
}

impl Belady {
    /// The first use of `expert` after `token`, and how many are over then.
    fn next_after(&self, expert: u16, token: u32) -> (u32, u32) {
        let uses = self.uses.of(expert);
        let mut over = self.over[expert as usize];
        while uses.get(over as usize).is_some_and(|&t| t <= token) {
            over += 1;
        }
        (over, uses.get(over as usize).copied().unwrap_or(NEVER))
    }

    /// Whether the token in work is followed by a use of every expert in the pool before the next use of this one.
    pub(super) fn is_needed_last(&self, expert: u16) -> bool {
        let next = self.next_after(expert, self.now).1;
        self.pool.members().iter().all(|&e| self.next[e as usize] < next)
    }
}

impl Eviction for Belady {
    fn remove(&mut self, expert: u16) {
        self.pool.remove(expert);
    }

    fn insert(&mut self, expert: u16) {
        self.pool.insert(expert);
    }

    fn used(&mut self, experts: &[u16], token: u64) {
        // `token` counts from 1, the uses from 0.
        self.now = u32::try_from(token).unwrap_or(NEVER);
        for &e in experts {
            (self.over[e as usize], self.next[e as usize]) = self.next_after(e, self.now - 1);
        }
    }

    fn victim(&mut self) -> Option<u16> {
        self.pool.take_lowest(|e| !self.next[e as usize], |_| 0)
    }

    fn order(&self) -> Vec<u16> {
        self.pool.order(|e| !self.next[e as usize], |_| 0)
    }

    fn clear(&mut self) {
        self.pool.clear();
        self.over.fill(0);
        self.now = 0;
        for e in 0..self.next.len() {
            self.next[e] = self.uses.of(e as u16).first().copied().unwrap_or(NEVER);
        }
    }
}
