//! What the hook keeps of one layer between calls, and the working memory that all layers share.

use half::f16;

use super::stats::LayerStats;
use crate::cache::{AnyPolicy, LayerCache, Policy, Spec};
use crate::model::MoeLayer;
use crate::route::candidates;
use crate::route::moce::RunningRange;

pub struct Layer {
    pub block: u32,
    pub n_experts: u32,
    /// On disk, companions included.
    pub expert_bytes: u64,
    pub cache: LayerCache<AnyPolicy>,
    /// By slot that the cache has set aside: the expert that was read into it ahead and has not been wanted yet.
    pub ahead: Vec<Option<u16>>,
    /// Mean range of the scores, for the running_full delta.
    pub range: RunningRange,
    /// Of the last `select`: experts that reranking put in, and the mass that it cost.
    pub swapped: u32,
    pub mass_swapped: f64,
    pub stats: LayerStats,
}

impl Layer {
    pub fn new(layer: &MoeLayer, slots: u32, policy: Policy) -> Self {
        let n_experts = layer.n_experts as usize;
        Self {
            block: layer.block,
            n_experts: layer.n_experts,
            expert_bytes: layer.expert_bytes(),
            cache: LayerCache::new(policy.build(&Spec::new(n_experts)), n_experts, slots),
            ahead: Vec::new(),
            range: RunningRange::default(),
            swapped: 0,
            mass_swapped: 0.0,
            stats: LayerStats::default(),
        }
    }

    pub fn reset(&mut self) {
        self.cache.clear();
        self.ahead.fill(None);
        self.range = RunningRange::default();
        (self.swapped, self.mass_swapped) = (0, 0.0);
        self.stats = LayerStats::default();
    }
}

/// Working memory of the per-layer calls: grows to the largest batch once.
pub struct Scratch {
    pub ranking: candidates::Scratch,
    /// top_m candidates of a row.
    pub ids: Vec<u16>,
    pub scores: Vec<f16>,
    /// The scores, widened: exactly what a trace has of them.
    pub wide: Vec<f32>,
    /// For a policy that wants them: the candidates of the layer that was selected last, and which that was.
    pub ranked: Ranked,
    /// k places each.
    pub raised: Vec<f64>,
    pub chosen: Vec<u16>,
    /// The batch's ids, k a row, checked.
    pub batch: Vec<u16>,
    /// Which of them are dropped.
    pub dropped: Vec<bool>,
    /// By expert: the number of the row that named it last, for finding repeats.
    pub seen: Vec<u64>,
    pub row_number: u64,
    pub own: Own,
}

/// The candidates of a batch, kept from `select` to `admit`.
#[derive(Default)]
pub struct Ranked {
    pub layer: Option<usize>,
    /// `top_m` a row, by falling rank.
    pub ids: Vec<u16>,
    pub scores: Vec<f32>,
}

impl Ranked {
    /// Of one token; none where this layer's batch was not selected with as many rows.
    pub fn row(&self, layer: usize, token: usize, n_tokens: usize) -> (&[u16], &[f32]) {
        if self.layer != Some(layer) || n_tokens == 0 || self.ids.len() % n_tokens != 0 {
            return (&[], &[]);
        }
        let m = self.ids.len() / n_tokens;
        (&self.ids[token * m..][..m], &self.scores[token * m..][..m])
    }
}

/// Ids and weights of `Hook::layer` until it has succeeded.
#[derive(Default)]
pub struct Own {
    pub ids: Vec<i32>,
    pub weights: Vec<f32>,
}

impl Scratch {
    pub fn new(top_m: usize, k: usize, n_experts: usize) -> Self {
        Self {
            ranking: candidates::Scratch::default(),
            ids: vec![0; top_m],
            scores: vec![f16::ZERO; top_m],
            wide: vec![0.0; top_m],
            ranked: Ranked::default(),
            raised: vec![0.0; k],
            chosen: vec![0; k],
            batch: Vec::with_capacity(k),
            dropped: Vec::with_capacity(k),
            seen: vec![0; n_experts],
            row_number: 0,
            own: Own::default(),
        }
    }
}
