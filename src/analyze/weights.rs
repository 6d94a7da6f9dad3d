//! What the weights say: how evenly a token's experts share it, and how large one unit of a delta mode is in another.

use crate::error::{Result, err};
use crate::replay::Ranges;
use crate::trace::{Routing, Trace};

/// How evenly the tokens of a layer weigh their experts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WeightEntropy {
    /// Mean over rows with known weights, in bits: 0 where one expert has all, log2 k where all have the same.
    pub bits: f64,
    /// Mean share of the heaviest expert.
    pub heaviest: f64,
    /// Rows with known weights.
    pub rows: u64,
    /// Rows in which a weight is not known, or all are 0: not in the means.
    pub unknown: u64,
}

impl WeightEntropy {
    pub fn of(routing: &Routing, layer: usize) -> Self {
        let mut all = Self::default();
        for row in routing.layers[layer].weights.chunks_exact(routing.k) {
            let sum: f64 = row.iter().map(|&w| f64::from(w)).sum();
            if !(sum > 0.0 && sum.is_finite()) {
                all.unknown += 1;
                continue;
            }
            let shares = || row.iter().map(|&w| f64::from(w) / sum).filter(|p| *p > 0.0);
            all.bits += shares().map(|p| -p * p.log2()).sum::<f64>().max(0.0);
            all.heaviest += shares().fold(0.0, f64::max);
            all.rows += 1;
        }
        let n = all.rows.max(1) as f64;
        Self { bits: all.bits / n, heaviest: all.heaviest / n, ..all }
    }
}

/// The share of the whole row's range that `z0 - z[k-1]` is: with it a lambda of `token_topk` is so many times smaller in `token_full`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DeltaShare {
    /// Mean over rows.
    pub mean: f64,
    pub least: f64,
    pub most: f64,
    pub rows: u64,
    /// Rows without a finite range, or with a score among the first k that says nothing: not counted.
    pub unknown: u64,
}

impl DeltaShare {
    /// Of one layer, with the scores of the trace and the ranges beside it.
    pub fn of(trace: &Trace, k: usize, ranges: &Ranges, layer: usize) -> Result<Self> {
        if k == 0 || k > trace.top_m() {
            return Err(err!(Argument, "k {k}: from 1 to {} wanted", trace.top_m()));
        }
        let of_layer = ranges.layer(layer);
        let mut all = Self { least: f64::INFINITY, ..Self::default() };
        for token in 0..trace.n_tokens() {
            let record = trace.record(token, layer);
            let (first, last) = (record.score(0).to_f64(), record.score(k - 1).to_f64());
            let sound = [first, last].iter().all(|z| z.abs() < half::f16::MAX.to_f64());
            match of_layer.at(token).filter(|range| *range > 0.0 && sound) {
                Some(range) => {
                    let share = (first - last) / range;
                    all.mean += share;
                    all.least = all.least.min(share);
                    all.most = all.most.max(share);
                    all.rows += 1;
                }
                None => all.unknown += 1,
            }
        }
        let least = if all.rows == 0 { 0.0 } else { all.least };
        Ok(Self { mean: all.mean / all.rows.max(1) as f64, least, ..all })
    }
}
