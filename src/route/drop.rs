//! Cold drop: a routed expert does not run when it is a miss AND weighs less than F times the token's mean weight.
//!
//! The heaviest expert is pinned. A dropped place names a resident expert that the token does not use otherwise, with
//! weight 0: an engine's matmul computes it all the same, so it must be memory that was written (0 times NaN is NaN), and
//! it must be no repeated id (kernels keep one row list an expert). So no more is dropped than such experts can be found.

use crate::error::{Result, err};

/// Whether what is left is scaled back to the sum it had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Renormalise {
    /// As the model does it: on where it normalises its top-k weights.
    #[default]
    Auto,
    On,
    Off,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Drop {
    /// F: 0 drops nothing.
    pub threshold: f64,
    pub renormalise: Renormalise,
}

/// What `decide` did to one token.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Dropped {
    pub count: u32,
    /// Share of the token's routing weight that the dropped experts had, 0..1.
    pub mass_lost: f64,
}

impl Drop {
    /// `Argument` where F is no number of 0 or more.
    pub fn check(&self) -> Result<()> {
        if !self.threshold.is_finite() || self.threshold < 0.0 {
            return Err(err!(Argument, "drop, F {}: it must be a number of 0 or more", self.threshold));
        }
        Ok(())
    }

    /// Marks in `dropped` which of the token's experts do not run.
    ///
    /// `weights` are the engine's final ones; `resident(i)` says whether the i-th expert is a hit; `n_resident` is what
    /// the layer's cache holds now. After the token the cache must hold at least k experts, so that each dropped
    /// place finds a stand-in: a cache that is still filling drops less, the lightest first.
    pub fn decide(
        &self,
        weights: &[f32],
        resident: impl Fn(usize) -> bool,
        n_resident: u32,
        dropped: &mut [bool],
    ) -> Dropped {
        dropped.fill(false);
        let k = weights.len();
        let sum: f64 = weights.iter().map(|&w| w as f64).sum();
        if self.threshold.is_nan() || self.threshold <= 0.0 || !sum.is_finite() || k == 0 {
            return Dropped::default();
        }
        let limit = self.threshold * sum / k as f64;
        let mut heaviest = 0;
        for (i, &w) in weights.iter().enumerate() {
            if w > weights[heaviest] {
                heaviest = i;
            }
        }
        let mut misses = 0;
        let mut count = 0;
        for i in 0..k {
            if !resident(i) {
                misses += 1;
                if i != heaviest && (weights[i] as f64) < limit {
                    dropped[i] = true;
                    count += 1;
                }
            }
        }
        let needed = (k as u32).saturating_sub(n_resident);
        let allowed = u32::saturating_sub(misses, needed);
        while count > allowed {
            // The heaviest of the dropped runs after all; of equals, the router's earlier one.
            let mut back = None;
            for i in 0..k {
                if dropped[i] && back.is_none_or(|b: usize| weights[i] > weights[b]) {
                    back = Some(i);
                }
            }
            let Some(back) = back else { break };
            dropped[back] = false;
            count -= 1;
        }
        let lost: f64 = (0..k).filter(|&i| dropped[i]).map(|i| weights[i] as f64).sum();
        Dropped { count, mass_lost: if sum > 0.0 { lost / sum } else { 0.0 } }
    }

    /// Sets the dropped weights to 0 and, where `model_normalises` or the setting asks for it, scales the others so
    /// that their sum is what it was.
    pub fn apply(&self, weights: &mut [f32], dropped: &[bool], model_normalises: bool) {
        let sum: f64 = weights.iter().map(|&w| w as f64).sum();
        let kept: f64 = weights.iter().zip(dropped).filter(|(_, d)| !**d).map(|(&w, _)| w as f64).sum();
        let on = match self.renormalise {
            Renormalise::Auto => model_normalises,
            Renormalise::On => true,
            Renormalise::Off => false,
        };
        let scale = if on && kept > 0.0 { sum / kept } else { 1.0 };
        for (w, &dropped) in weights.iter_mut().zip(dropped) {
            *w = if dropped { 0.0 } else { (*w as f64 * scale) as f32 };
        }
    }
}

/// Puts distinct resident experts that the token does not use into its dropped places. `resident` names the layer's
/// resident experts, each once, after the token's own were placed. False when they are too few: `ids` is then unfinished.
pub fn fill_in(ids: &mut [u16], dropped: &[bool], resident: impl Iterator<Item = u16>) -> bool {
    let mut resident = resident;
    for place in 0..ids.len() {
        if dropped[place] {
            // Earlier places hold what runs or a stand-in already found; later ones what runs, unless dropped.
            let used = |e: u16, ids: &[u16]| ids.iter().enumerate().any(|(i, &x)| x == e && (i < place || !dropped[i]));
            match resident.find(|&e| !used(e, ids)) {
                Some(e) => ids[place] = e,
                None => return false,
            }
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decide(threshold: f64, weights: &[f32], resident: &[bool], n_resident: u32) -> (Vec<bool>, Dropped) {
        let mut dropped = vec![true; weights.len()];
        let seen = Drop { threshold, ..Drop::default() }.decide(weights, |i| resident[i], n_resident, &mut dropped);
        (dropped, seen)
    }

    #[test]
    fn only_cold_and_light() {
        let w = [0.4, 0.3, 0.2, 0.1];
        assert_eq!(decide(1.0, &w, &[false; 4], 8).0, [false, false, true, true]);
        assert_eq!(decide(1.0, &w, &[true, true, true, false], 8).0, [false, false, false, true]);
        assert_eq!(decide(0.5, &w, &[false; 4], 8).0, [false, false, false, true]);
        let (dropped, seen) = decide(0.0, &w, &[false; 4], 8);
        assert!(!dropped.contains(&true));
        assert_eq!(seen, Dropped::default());
    }

    #[test]
    fn the_top_expert_stays_at_any_threshold() {
        assert_eq!(decide(1e9, &[0.1, 0.6, 0.3], &[false; 3], 8).0, [true, false, true]);
        assert_eq!(decide(1e9, &[0.25; 4], &[false; 4], 8).0, [false, true, true, true]);
        assert_eq!(decide(1.0, &[1.0], &[false], 8).0, [false], "k = 1");
    }

    #[test]
    fn weights_of_0_divide_nothing() {
        let (dropped, seen) = decide(1.0, &[0.0; 4], &[false; 4], 8);
        assert_eq!((dropped[0], seen.mass_lost), (false, 0.0));
        let mut w = [0.0; 4];
        Drop { threshold: 1.0, renormalise: Renormalise::On }.apply(&mut w, &[false, true, true, true], true);
        assert_eq!(w, [0.0; 4]);
        assert!(!decide(1.0, &[f32::NAN, 0.1], &[false; 2], 8).0.contains(&true));
    }

    #[test]
    fn a_filling_cache_drops_less() {
        // Cold: all four must run, since a dropped place would find no stand-in.
        assert_eq!(decide(9.0, &[0.4, 0.3, 0.2, 0.1], &[false; 4], 0).1.count, 0);
        // Three others resident: four experts after one of these is read, so three places find stand-ins.
        assert_eq!(decide(9.0, &[0.4, 0.3, 0.2, 0.1], &[false; 4], 3).0, [false, true, true, true]);
        assert_eq!(decide(9.0, &[0.4, 0.3, 0.2, 0.1], &[false; 4], 2).0, [false, false, true, true]);
    }

    #[test]
    fn renormalising_keeps_the_sum() {
        let drop = Drop { threshold: 1.0, renormalise: Renormalise::Auto };
        let mut w = [0.5, 0.3, 0.2];
        drop.apply(&mut w, &[false, false, true], true);
        assert_eq!(w, [0.625, 0.375, 0.0]);
        let mut w = [0.5, 0.3, 0.2];
        drop.apply(&mut w, &[false, false, true], false);
        assert_eq!(w, [0.5, 0.3, 0.0]);
    }

    proptest! {
        #[test]
        fn ids_stay_distinct_and_resident(cap in 6u16..12, w in prop::collection::vec(0f32..1.0, 6), hits in prop::collection::vec(any::<bool>(), 6), f in 0f64..4.0, others in 0u16..12) {
            let mut ids: Vec<u16> = (0..6).map(|i| i * 2).collect();
            let n_hits = hits.iter().filter(|h| **h).count() as u16;
            let others = others.min(cap - n_hits);
            let (dropped, seen) = decide(f, &w, &hits, (n_hits + others) as u32);
            prop_assert_eq!(seen.count as usize, dropped.iter().filter(|d| **d).count());
            // What is resident afterwards: the token's own that run, and as many others as the capacity leaves.
            let run = 6 - seen.count as u16;
            let left = others.min(cap - run);
            let resident: Vec<u16> = ids.iter().zip(&dropped).filter(|(_, d)| !**d).map(|(&e, _)| e).chain((0..left).map(|i| 100 + i)).collect();
            prop_assert!(fill_in(&mut ids, &dropped, resident.iter().copied()));
            let mut seen = ids.clone();
            seen.sort_unstable();
            seen.dedup();
            prop_assert_eq!(seen.len(), 6);
            prop_assert!(ids.iter().all(|e| resident.contains(e)));
        }
    }
}
