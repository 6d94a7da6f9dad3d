//! MoCE (cache-prior reranking): resident experts, and the router's own top J, get a bonus on their score; the top k of
//! the raised scores run. Weights stay the router's own: the engine computes them from the ids.
//!
//! The rule is the reference replayer's `select_moce_top_k`: `z' = z + lambda * delta` for what is resident or of rank
//! below J, `delta = max(1e-4, z[0] - z[k-1])`, order by z' falling, then by rank.

use half::f16;

use crate::error::{Result, err};

/// What the bonus is a share of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Delta {
    /// `z[0] - z[k-1]` of this token: the reference replayer's.
    #[default]
    TokenTopk,
    /// Largest minus smallest score of this token over all experts.
    TokenFull,
    /// The running mean of that range in this layer, over all tokens so far, this one included: the cache-prior paper's
    /// (Skliar et al., arXiv 2412.00099, section 3.2).
    RunningFull,
}

impl Delta {
    pub const ALL: &[Self] = &[Self::TokenTopk, Self::TokenFull, Self::RunningFull];

    /// As the environment, the sidecar and the command line call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::TokenTopk => "token_topk",
            Self::TokenFull => "token_full",
            Self::RunningFull => "running_full",
        }
    }

    /// The one that is called so.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|d| d.name() == name)
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moce {
    /// 0 leaves the router's choice alone.
    pub lambda: f64,
    /// So many of the router's own first experts get the bonus whether resident or not.
    pub top_j: u32,
    pub delta: Delta,
}

impl Default for Moce {
    fn default() -> Self {
        Self { lambda: 0.0, top_j: 3, delta: Delta::TokenTopk }
    }
}

/// The running mean of the full range of one layer's rows (for [`Delta::RunningFull`]).
#[derive(Clone, Copy, Debug, Default)]
pub struct RunningRange {
    mean: f64,
    rows: u64,
}

impl RunningRange {
    /// A mean of so many rows, to go on from.
    pub fn resume(mean: f64, rows: u64) -> Self {
        Self { mean, rows }
    }

    /// Rows whose range is not a finite number (None) leave the mean as it is.
    pub fn push(&mut self, range: Option<f64>) {
        if let Some(range) = range {
            self.rows += 1;
            self.mean += (range - self.mean) / self.rows as f64;
        }
    }

    /// Rows that the mean is of.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// None before the first row.
    pub fn mean(&self) -> Option<f64> {
        (self.rows > 0).then_some(self.mean)
    }
}

impl Moce {
    /// `Argument` where lambda is no number of 0 or more.
    pub fn check(&self) -> Result<()> {
        if !self.lambda.is_finite() || self.lambda < 0.0 {
            return Err(err!(Argument, "lambda {}: it must be a number of 0 or more", self.lambda));
        }
        Ok(())
    }

    /// lambda times delta for this token; None where the token is not to be reranked: lambda 0, not more candidates
    /// than k, a score among the top k that is no number or saturated, or nothing to tell the candidates apart.
    ///
    /// `scores` by falling rank, as a trace holds them: f16, or those numbers widened; `range` is what the mode needs of the whole row ([`super::Row::range`] or the running mean).
    /// The saturated and the flat row are where this departs from the reference, which has no such rows.
    pub fn bonus<Z: Copy + Into<f64>>(&self, scores: &[Z], k: usize, range: Option<f64>) -> Option<f64> {
        if self.lambda.is_nan() || self.lambda <= 0.0 || k == 0 || scores.len() <= k {
            return None;
        }
        let (first, last): (f64, f64) = (scores[0].into(), scores[k - 1].into());
        // NaN, the infinities and the saturated +-65504 are not below it.
        let sound = |z: f64| z.abs() < 65504.0;
        if !sound(first) || !sound(last) || (first == last && scores.iter().all(|&z| z.into() == first)) {
            return None;
        }
        let delta = match self.delta {
            Delta::TokenTopk => first - last,
            Delta::TokenFull | Delta::RunningFull => range?,
        };
        Some(self.lambda * delta.max(1e-4))
    }

    /// The ranks that run, into `chosen` (k of them, by falling raised score), and how many of them are not among the
    /// router's own first k. `raised` is working memory of k places.
    pub fn rerank<Z: Copy + Into<f64>>(
        &self,
        ids: &[u16],
        scores: &[Z],
        bonus: f64,
        resident: impl Fn(u16) -> bool,
        raised: &mut [f64],
        chosen: &mut [u16],
    ) -> u32 {
        let k = chosen.len();
        debug_assert!(raised.len() == k && ids.len() >= k && ids.len() == scores.len());
        // Where scores fall, no candidate comes in behind one that would not with its bonus. (Not so where groups or ties made
        // the router's order.) Without an early exit, so that it is done many scores at a time.
        let behind = &scores[k - 1..];
        let falls = behind.iter().zip(&behind[1..]).fold(true, |falls, (&a, &b)| falls & (a.into() >= b.into()));
        let mut n = 0;
        for (rank, (&id, &z)) in ids.iter().zip(scores).enumerate() {
            let z: f64 = z.into();
            if n == k && falls && z + bonus <= raised[k - 1] {
                break;
            }
            let z = if rank < self.top_j as usize || resident(id) { z + bonus } else { z };
            // Insertion behind everything that is as high: earlier ranks win ties.
            if n == k && z <= raised[k - 1] {
                continue;
            }
            let mut at = n.min(k - 1);
            while at > 0 && z > raised[at - 1] {
                raised[at] = raised[at - 1];
                chosen[at] = chosen[at - 1];
                at -= 1;
            }
            raised[at] = z;
            chosen[at] = rank as u16;
            n = (n + 1).min(k);
        }
        chosen.iter().filter(|&&rank| rank as usize >= k).count() as u32
    }
}

/// The share of the router's own top-k mass that the chosen ranks do not have, 0..1. `exponential` says that the scores
/// are logits or logarithms, whose mass is their exponential.
pub fn mass_lost(scores: &[f16], chosen: &[u16], exponential: bool) -> f64 {
    let first = scores[0].to_f64();
    let mass = |z: f16| if exponential { (z.to_f64() - first).exp() } else { z.to_f64().max(0.0) };
    let own: f64 = scores[..chosen.len()].iter().map(|&z| mass(z)).sum();
    let taken: f64 = chosen.iter().map(|&rank| mass(scores[rank as usize])).sum();
    if own > 0.0 { (1.0 - taken / own).clamp(0.0, 1.0) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn scores(z: &[f32]) -> Vec<f16> {
        z.iter().map(|&z| f16::from_f32(z)).collect()
    }

    fn moce(lambda: f64, top_j: u32) -> Moce {
        Moce { lambda, top_j, delta: Delta::TokenTopk }
    }

    fn choose(m: &Moce, ids: &[u16], z: &[f16], k: usize, resident: &[u16]) -> Vec<u16> {
        let own: Vec<u16> = ids[..k.min(ids.len())].to_vec();
        let Some(bonus) = m.bonus(z, k, None) else { return own };
        let (mut raised, mut chosen) = (vec![0.0; k], vec![0; k]);
        m.rerank(ids, z, bonus, |e| resident.contains(&e), &mut raised, &mut chosen);
        chosen.iter().map(|&rank| ids[rank as usize]).collect()
    }

    #[test]
    fn a_resident_expert_just_below_the_line_comes_in() {
        let z = scores(&[4.0, 3.0, 2.0, 1.9, 0.0]);
        let ids = [10, 11, 12, 13, 14];
        // bonus .2 on rank 0 (J = 1) and on 13: 13 passes 12
        assert_eq!(choose(&moce(0.1, 1), &ids, &z, 3, &[13]), [10, 11, 13]);
        assert_eq!(choose(&moce(0.1, 3), &ids, &z, 3, &[13]), [10, 11, 12]);
        assert_eq!(choose(&moce(0.0, 1), &ids, &z, 3, &[13]), [10, 11, 12]);
    }

    #[test]
    fn bad_rows_keep_the_routers_order() {
        let m = moce(0.3, 0);
        for z in [[65504.0, 1.0, 0.0, -1.0], [1.0, -65504.0, -65504.0, -65504.0], [2.0; 4], [-65504.0; 4]] {
            assert_eq!(m.bonus(&scores(&z), 2, None), None, "{z:?}");
        }
        assert_eq!(m.bonus(&scores(&[f32::NAN, 1.0, 0.0]), 2, None), None);
        assert_eq!(moce(f64::NAN, 0).bonus(&scores(&[3.0, 2.0, 1.0]), 2, None), None);
        let mut running = RunningRange::default();
        [Some(2.0), None, Some(4.0)].into_iter().for_each(|r| running.push(r));
        assert_eq!(running.mean(), Some(3.0));
        let full = Moce { delta: Delta::RunningFull, ..m };
        assert_eq!(full.bonus(&scores(&[3.0, 2.0, 1.0]), 2, None), None);
        assert_eq!(full.bonus(&scores(&[3.0, 2.0, 1.0]), 2, running.mean()), Some(0.3 * 3.0));
    }

    #[test]
    fn mass_lost_is_a_share_of_the_routers_own() {
        let z = scores(&[0.0, 0.0, 0.0]);
        assert_eq!(mass_lost(&z, &[0, 2], true), 0.0);
        let z = scores(&[3.0, 1.0, 0.5]);
        assert!((mass_lost(&z, &[0, 2], false) - 0.125).abs() < 1e-9);
    }

    proptest! {
        /// The reference's sort, word for word: (z', -rank) falling.
        #[test]
        fn is_the_references(mut z in prop::collection::vec(-8f32..8.0, 4..40), k in 1usize..8, lambda in 0.0f64..0.6, j in 0u32..4, seed in any::<u64>(), grouped in any::<bool>()) {
            // A router that chooses by groups has an order of its own.
            if !grouped {
                z.sort_by(|a, b| b.total_cmp(a));
            }
            let z = scores(&z);
            let ids: Vec<u16> = (0..z.len() as u16).map(|i| i * 3).collect();
            let resident: Vec<u16> = ids.iter().copied().filter(|&e| seed >> (e % 64) & 1 == 1).collect();
            let m = moce(lambda, j);
            let mut wanted: Vec<u16> = ids[..k.min(ids.len())].to_vec();
            if lambda > 0.0 && ids.len() > k && z.iter().any(|&x| x != z[0]) {
                let bonus = lambda * (z[0].to_f64() - z[k - 1].to_f64()).max(1e-4);
                let mut all: Vec<(f64, i64, u16)> = ids.iter().zip(&z).enumerate().map(|(r, (&e, z))| {
                    (z.to_f64() + if r < j as usize || resident.contains(&e) { bonus } else { 0.0 }, -(r as i64), e)
                }).collect();
                all.sort_by(|a, b| b.partial_cmp(a).unwrap());
                wanted = all[..k].iter().map(|x| x.2).collect();
            }
            prop_assert_eq!(choose(&m, &ids, &z, k.min(ids.len()), &resident), wanted);
        }
    }
}
