//! Decaying popularity by the router's scores: every candidate is credited (z - z_last) / max(1e-4, z_first - z_last), and 1 more
//! where its rank is below k.

use super::Spec;
use super::ema::Credit;

pub struct InverseRouter;

impl Credit for InverseRouter {
    const NAME: &str = "inverse_router_ema";
    const CANDIDATES: bool = true;

    fn build(_: &Spec) -> Self {
        Self
    }

    fn ranked(&mut self, ids: &[u16], scores: &[f32], k: usize, mut add: impl FnMut(u16, f64)) {
        let (Some(&first), Some(&last)) = (scores.first(), scores.last()) else { return };
        let (first, last) = (f64::from(first), f64::from(last));
        let span = (first - last).max(1e-4);
        for (rank, (&e, &z)) in ids.iter().zip(scores).enumerate() {
            let mut credit = (f64::from(z) - last) / span;
            if rank < k {
                credit += 1.0;
            }
            // A popularity that is no number could not be compared.
            if credit.is_finite() {
                add(e, credit);
            }
        }
    }
}
