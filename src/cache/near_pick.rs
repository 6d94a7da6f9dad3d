//! Decaying popularity of the router's first N, whatever ran: those of rank below k by 1, the others by
//! 0.35 * (1 - (rank - k) / max(1, n - k)), n = min(N, candidates).

use super::Spec;
use super::ema::Credit;

pub struct NearPick {
    limit: usize,
    /// By rank, for the shape that the last token had.
    credits: Vec<f64>,
    k: usize,
}

impl Credit for NearPick {
    const NAME: &str = "near_pick_ema";
    const CANDIDATES: bool = true;

    fn build(spec: &Spec) -> Self {
        Self { limit: spec.near_pick_n, credits: Vec::with_capacity(spec.near_pick_n.min(spec.n_experts)), k: 0 }
    }

    fn ranked(&mut self, ids: &[u16], _: &[f32], k: usize, mut add: impl FnMut(u16, f64)) {
        let n = self.limit.min(ids.len());
        if (self.credits.len(), self.k) != (n, k) {
            let width = n.saturating_sub(k).max(1) as f64;
            let credit = |rank: usize| if rank < k { 1.0 } else { 0.35 * (1.0 - (rank - k) as f64 / width) };
            self.credits.clear();
            self.credits.extend((0..n).map(credit));
            self.k = k;
        }
        ids.iter().zip(&self.credits).for_each(|(&e, &credit)| add(e, credit));
    }
}
