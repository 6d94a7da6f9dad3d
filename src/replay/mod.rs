//! What a policy, a capacity, a lambda or a pruned model would have done to a recorded trace.
//!
//! A replay is a closed loop: what is resident at a token decides the reranking of that token, layer by layer, each on its own.
//! The decisions are those of [`crate::route`] and [`crate::cache`], the code that runs live. A layer's records are gathered from
//! the mapped trace into a [`Column`], some tokens at a time, and every setting is replayed on it ([`Replay::block`]).
//!
//! The rules, and the numbers to the last miss, are those of the reference replayer `replay_moe_cache.py`: the cache begins
//! empty; the first `warmup` tokens are replayed and not counted; a token with fewer candidates than k (a pruned model)
//! counts the places that stay empty as misses and picks; a cache that holds all experts misses nothing. The two exceptions are rows that live
//! reranking leaves alone too: a saturated score among the top k, or all candidates equal (see [`crate::route::Moce::bonus`]).

pub mod column;
pub mod drop_front;
pub mod drop_loop;
pub mod drop_static;
pub mod estimate;
pub mod global;
pub mod keep_map;
pub mod layer;
pub mod observed;
pub mod ranges;
pub mod recorded;
pub mod routed;
pub mod sweep;

pub use column::Column;
pub use drop_front::{DropRow, Limit};
pub use drop_loop::{DropLoop, DropSettings, Fate, RanRow, Unchanged, drop_loop, drop_loop_by_row};
pub use drop_static::{Rule, Static, drop_static};
pub use estimate::Estimate;
pub use global::{GlobalPolicy, GlobalResult, Scope};
pub use keep_map::KeepMap;
pub use layer::{LayerReplay, LayerResult};
pub use observed::{Observed, PassTime, observed, observed_passes};
pub use ranges::Ranges;
pub use recorded::{Recorded, recorded};
pub use routed::{Routed, Weights};

use std::sync::Arc;

use crate::cache::{NextUses, Policy, Spec, check_experts, policy};
use crate::error::{Result, err};
use crate::route::{Delta, Moce};
use crate::trace::Trace;

/// What is replayed. The defaults are the reference's.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    pub policy: Policy,
    /// Slots of each layer.
    pub capacity: usize,
    /// Experts that a token uses in a layer.
    pub k: usize,
    pub moce: Moce,
    /// Of the popularities; above 0, at most 1.
    pub decay: f64,
    /// Candidates that near_pick_ema credits.
    pub near_pick_n: usize,
    /// Tokens that are replayed before counting begins.
    pub warmup: usize,
    /// Of the policy `random`.
    pub seed: u64,
    /// What reranking displaced is read all the same, behind what runs, so that it can come back: it enters the cache as used by
    /// its token, where there is room beside what runs, and is counted as a background read, not as a miss.
    pub admit_displaced: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            policy: Policy::Lru,
            capacity: 113,
            k: 10,
            moce: Moce::default(),
            decay: policy::DECAY,
            near_pick_n: policy::NEAR_PICK_N,
            warmup: 64,
            seed: 0,
            admit_displaced: false,
        }
    }
}

impl Settings {
    /// `Argument`, with the numbers, for what the reference refuses or leaves undefined.
    pub fn check(&self, n_experts: usize, n_tokens: usize) -> Result<()> {
        let Self { capacity, k, warmup, .. } = *self;
        if k == 0 {
            return Err(err!(Argument, "k is 0: a token uses at least 1 expert"));
        }
        if capacity < k {
            return Err(err!(Argument, "capacity {capacity}: a token uses {k} experts, and all of them must fit"));
        }
        if n_tokens <= warmup {
            return Err(err!(
                Argument,
                "the trace has {n_tokens} tokens and the warm-up takes {warmup}: nothing is left to count"
            ));
        }
        self.moce.check()?;
        if self.policy.needs_future() && self.moce.lambda > 0.0 {
            return Err(err!(
                Argument,
                "{} with lambda {}: it knows the next uses of the router's own choice, and under reranking what runs depends on what \
                 is resident, so there is no such future to know",
                self.policy.name(),
                self.moce.lambda
            ));
        }
        check_experts(n_experts)?;
        self.spec(n_experts, None).check()
    }

    fn spec(&self, n_experts: usize, next_uses: Option<Arc<NextUses>>) -> Spec {
        Spec { n_experts, decay: self.decay, near_pick_n: self.near_pick_n, seed: self.seed, next_uses }
    }

    /// More of a record than the first k ids decides.
    fn needs_candidates(&self) -> bool {
        self.moce.lambda > 0.0 || self.policy.needs_candidates()
    }
}

/// What is gathered at a time: as much as stays near the processor.
const CHUNK_BYTES: usize = 2 << 20;

/// A trace with what is laid over it. Any number of threads may replay its layers.
pub struct Replay<'a> {
    trace: &'a Trace,
    keep: Option<&'a KeepMap>,
    ranges: Option<&'a Ranges>,
}

impl<'a> Replay<'a> {
    /// `keep` must be a map for this trace ([`KeepMap::parse`]), `ranges` the trace's own.
    pub fn new(trace: &'a Trace, keep: Option<&'a KeepMap>, ranges: Option<&'a Ranges>) -> Self {
        Self { trace, keep, ranges }
    }

    pub fn n_layers(&self) -> usize {
        self.trace.n_layers()
    }

    pub fn n_tokens(&self) -> usize {
        self.trace.n_tokens()
    }

    /// Experts of a layer: those that are kept.
    pub fn n_experts(&self) -> usize {
        self.keep.map_or(self.trace.n_experts(), KeepMap::n_kept)
    }

    /// Whether these settings can be replayed.
    pub fn check(&self, settings: &Settings) -> Result<()> {
        settings.check(self.n_experts(), self.n_tokens())?;
        if settings.moce.lambda > 0.0 && settings.moce.delta != Delta::TokenTopk && self.ranges.is_none() {
            return Err(err!(
                Argument,
                "delta {}: it is a share of the whole row's range, which lies in <trace>.range, and there is none (a run records it \
                 when its own delta is not token_topk)",
                settings.moce.delta.name()
            ));
        }
        Ok(())
    }

    /// Replays one layer under each of the settings (with the same k in all). `column` is working memory.
    pub fn layer(&self, layer: usize, settings: &[Settings], column: &mut Column) -> Result<Vec<LayerResult>> {
        let mut layers = self.block(layer, settings, std::slice::from_mut(column))?;
        Ok(layers.pop().unwrap_or_default())
    }

    /// All layers, on one thread: by layer, then by setting.
    pub fn all(&self, settings: &[Settings]) -> Result<Vec<Vec<LayerResult>>> {
        if settings.iter().any(|s| s.policy.needs_future()) {
            // A layer's next uses are large: one layer after the other they stay near the processor.
            let mut column = Column::default();
            return (0..self.n_layers()).map(|layer| self.layer(layer, settings, &mut column)).collect();
        }
        let mut columns = Vec::new();
        columns.resize_with(self.n_layers(), Column::default);
        self.block(0, settings, &mut columns)
    }

    /// Replays neighbouring layers, from `first` on, one with each column: by layer, then by setting. The trace is gone through from its
    /// beginning to its end, some tokens of all these layers at a time.
    pub fn block(&self, first: usize, settings: &[Settings], columns: &mut [Column]) -> Result<Vec<Vec<LayerResult>>> {
        settings.iter().try_for_each(|s| self.check(s))?;
        let Some(one) = settings.first() else { return Ok(vec![Vec::new(); columns.len()]) };
        let k = one.k;
        if let Some(other) = settings.iter().find(|s| s.k != k) {
            return Err(err!(Argument, "k {k} and {} in one replay", other.k));
        }
        let all = settings.iter().any(Settings::needs_candidates);
        let n_experts = self.n_experts();
        let mut layers = Vec::with_capacity(columns.len());
        for (column, layer) in columns.iter_mut().zip(first..) {
            let uses = if settings.iter().any(|s| s.policy.needs_future()) {
                column.gather(self.trace, layer, 0..self.n_tokens(), self.keep, k, false)?;
                Some(Arc::new(NextUses::new(n_experts, column.rows().map(|row| row.first(k)))))
            } else {
                None
            };
            let ranges = self.ranges.map(|r| r.layer(layer));
            layers.push(
                settings.iter().map(|s| LayerReplay::new(n_experts, s, uses.clone(), ranges)).collect::<Vec<_>>(),
            );
        }
        let row_bytes = Column::row_bytes(self.trace, k, all) * columns.len();
        let chunk = (CHUNK_BYTES / row_bytes.max(1)).max(16);
        for begin in (0..self.n_tokens()).step_by(chunk) {
            let tokens = begin..self.n_tokens().min(begin + chunk);
            Column::gather_block(columns, self.trace, first, tokens, self.keep, k, all)?;
            for ((column, replays), layer) in columns.iter().zip(&mut layers).zip(first..) {
                for replay in replays {
                    replay.run(column).map_err(|e| err!(Format, "layer {layer}: {e}"))?;
                }
            }
        }
        Ok(layers.into_iter().map(|replays| replays.iter().map(LayerReplay::result).collect()).collect())
    }
}
