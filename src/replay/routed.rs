//! What a run routed, layer by layer, with weights: the input of every drop replay. It comes from a route_trace v1 CSV (weights and
//! residency as written there) or from a trace (weights made of its scores, residency if the sidecar has it).

use std::io::{BufRead, Seek};
use std::ops::Range;

use half::f16;

use crate::error::{Result, err};
use crate::route::{ScoreSpace, gate};
use crate::trace::{Phase, Sidecar, Trace, import};

/// Where a layer's weights come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Weights {
    /// As recorded where the file has them, else of the scores.
    #[default]
    Recorded,
    /// A softmax over the scores of the chosen (their share, where scores are proportional to weight).
    OfScores,
}

/// All that a run routed.
#[derive(Clone, Debug, Default)]
pub struct Routed {
    pub layers: Vec<RoutedLayer>,
    pub n_experts: usize,
    /// Experts that the run used for a token in a layer.
    pub k: usize,
    /// Candidates of each row: at least k.
    pub n_candidates: usize,
    /// Scores are proportional to weight, not logarithms.
    pub linear: bool,
    /// Scores say something.
    pub scored: bool,
}

/// The rows of one layer, in the order in which they ran.
#[derive(Clone, Debug, Default)]
pub struct RoutedLayer {
    /// Of the model.
    pub block: u32,
    /// Of one expert; 0 = not known.
    pub expert_bytes: u64,
    pub passes: Vec<RoutedPass>,
    /// What was resident when recording began, oldest use first; empty where that is not recorded.
    pub resident: Vec<u16>,
    ids: Vec<u16>,
    scores: Vec<f16>,
    weights: Vec<f32>,
    residency: Vec<u8>,
    bytes: Vec<u64>,
}

/// Rows that ran together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutedPass {
    pub phase: Phase,
    pub rows: Range<usize>,
}

/// One token in one layer, by falling rank.
#[derive(Clone, Copy, Debug)]
pub struct RoutedRow<'a> {
    /// The candidates; the run used the first k.
    pub ids: &'a [u16],
    pub scores: &'a [f16],
    /// Of the first k, NaN = not known; empty where none are recorded.
    pub weights: &'a [f32],
    /// Of the first k: 0 miss, 1 hit, 2 first use of a prefetched expert; empty where it is not recorded.
    pub residency: &'a [u8],
    /// What was read for each of the first k; empty where only the size of an expert is known.
    pub bytes: &'a [u64],
}

impl Routed {
    /// A route_trace v1 CSV. Its rows have k candidates each, so reranking can choose only among those.
    pub fn from_csv(input: &mut (impl BufRead + Seek)) -> Result<Self> {
        let mut layers: Vec<RoutedLayer> = Vec::new();
        let mut pass_of: Vec<Option<usize>> = Vec::new();
        let shape = import::routed_csv(input, |phase, cell| {
            if layers.len() <= cell.layer {
                layers.resize_with(cell.layer + 1, RoutedLayer::default);
                pass_of.resize(cell.layer + 1, None);
            }
            let layer = &mut layers[cell.layer];
            let row = layer.ids.len() / cell.ids.len();
            if pass_of[cell.layer].replace(cell.pass) != Some(cell.pass) {
                layer.passes.push(RoutedPass { phase, rows: row..row });
            }
            if let Some(pass) = layer.passes.last_mut() {
                pass.rows.end = row + 1;
            }
            layer.ids.extend_from_slice(&cell.ids);
            layer.scores.extend_from_slice(&cell.scores);
            layer.weights.extend_from_slice(&cell.weights);
            layer.residency.extend_from_slice(&cell.residency);
            layer.bytes.extend_from_slice(&cell.bytes);
            Ok(())
        })?;
        for (i, layer) in layers.iter_mut().enumerate() {
            layer.block = shape.blocks[i];
            layer.expert_bytes = shape.expert_bytes.get(i).copied().unwrap_or(0);
            if !shape.residency {
                layer.residency.clear();
            }
        }
        let n_experts = shape.n_experts.into();
        Ok(Self { layers, n_experts, k: shape.k, n_candidates: shape.k, linear: false, scored: true })
    }

    /// A trace, with what its sidecar knows: k, passes, phases, bytes, residency. Without one `k` must be given; all tokens are
    /// decode tokens then. `Format` where the two do not belong together.
    pub fn from_trace(trace: &Trace, sidecar: Option<&Sidecar>, k: Option<usize>) -> Result<Self> {
        if let Some(sidecar) = sidecar {
            sidecar.check_header(trace.header())?;
        }
        let m = trace.top_m();
        let k = k.or(sidecar.map(|s| s.shape.k as usize)).unwrap_or(0);
        if k == 0 || k > m {
            return Err(err!(Argument, "k {k}: from 1 to the trace's {m} candidates wanted"));
        }
        let (n_layers, n_tokens) = (trace.n_layers(), trace.n_tokens());
        let passes = passes(sidecar, n_tokens);
        let recorded: &[String] = sidecar.map_or(&[], |s| &s.residency);
        if let Some((token, digits)) = recorded.iter().enumerate().find(|(_, d)| d.len() < n_layers * k) {
            let (wanted, found) = (n_layers * k, digits.len());
            return Err(err!(Format, "sidecar: residency of token {token}: {wanted} digits wanted, {found} found"));
        }
        if !recorded.is_empty() && recorded.len() < n_tokens {
            return Err(err!(Format, "sidecar: residency of {} tokens, the trace has {n_tokens}", recorded.len()));
        }
        let mut layers = Vec::with_capacity(n_layers);
        for i in 0..n_layers {
            let mut layer = RoutedLayer {
                block: sidecar.and_then(|s| s.shape.blocks.get(i).copied()).unwrap_or(i as u32),
                expert_bytes: sidecar.and_then(|s| s.expert_bytes.get(i).copied()).unwrap_or(0),
                passes: passes.clone(),
                resident: sidecar.map_or(Vec::new(), |s| resident(s, i)),
                ids: vec![0; n_tokens * m],
                scores: vec![f16::ZERO; n_tokens * m],
                ..RoutedLayer::default()
            };
            if let Some(id) = layer.resident.iter().find(|id| usize::from(**id) >= trace.n_experts()) {
                let n = trace.n_experts();
                return Err(err!(Format, "sidecar: layer {i}: expert {id} resident, the header says {n}"));
            }
            for token in 0..n_tokens {
                let record = trace.record(token, i);
                let ids = &mut layer.ids[token * m..][..m];
                record.copy_ids(ids);
                record.copy_scores(&mut layer.scores[token * m..][..m]);
                if let Some(id) = ids.iter().find(|id| usize::from(**id) >= trace.n_experts()) {
                    let n = trace.n_experts();
                    return Err(err!(Format, "token {token} layer {i}: expert {id}, the header says {n}"));
                }
                if let Some(digits) = recorded.get(token) {
                    let width = digits.len() / n_layers;
                    let of_layer = &digits.as_bytes()[i * width..][..k];
                    layer.residency.extend(of_layer.iter().map(|digit| digit.wrapping_sub(b'0')));
                }
            }
            layers.push(layer);
        }
        let space = sidecar.map_or("logit", |s| s.score_space.as_str());
        let (linear, scored) = (space == "linear", space != "none");
        Ok(Self { layers, n_experts: trace.n_experts(), k, n_candidates: m, linear, scored })
    }

    /// Of one layer.
    pub fn row(&self, layer: usize, row: usize) -> RoutedRow<'_> {
        let (l, k, m) = (&self.layers[layer], self.k, self.n_candidates);
        fn of<T>(all: &[T], width: usize, row: usize) -> &[T] {
            if all.is_empty() { &[] } else { &all[row * width..][..width] }
        }
        RoutedRow {
            ids: of(&l.ids, m, row),
            scores: of(&l.scores, m, row),
            weights: of(&l.weights, k, row),
            residency: of(&l.residency, k, row),
            bytes: of(&l.bytes, k, row),
        }
    }

    /// What was resident is recorded.
    pub fn has_residency(&self) -> bool {
        self.layers.iter().any(|l| !l.residency.is_empty())
    }

    /// Tokens of a phase: of the layer that has most of them (of a prefill the last may have fewer).
    pub fn tokens(&self, phase: Phase) -> usize {
        let of_layer = |l: &RoutedLayer| l.passes.iter().filter(|p| p.phase == phase).map(|p| p.rows.len()).sum();
        self.layers.iter().map(of_layer).max().unwrap_or(0)
    }

    /// How the gate reads the scores.
    pub fn space(&self) -> ScoreSpace {
        if self.linear { ScoreSpace::Linear } else { ScoreSpace::Logits }
    }

    /// `Argument` where weights cannot be had.
    pub fn check_weights(&self) -> Result<()> {
        if !self.scored && self.layers.iter().any(|l| l.weights.is_empty()) {
            return Err(err!(Argument, "neither weights nor scores are recorded: what is light is not known"));
        }
        Ok(())
    }

    /// Gives layers of which it is not known the bytes of an expert.
    pub fn assume_expert_bytes(&mut self, bytes: u64) {
        self.layers.iter_mut().filter(|l| l.expert_bytes == 0).for_each(|l| l.expert_bytes = bytes);
    }
}

impl RoutedRow<'_> {
    /// The routing weights of the experts at `ranks`. False where they are not known: a recorded one is NaN, or the row was
    /// recorded as one that nothing can be told of. `wide` is working memory.
    pub fn weigh(&self, ranks: &[i32], from: Weights, space: ScoreSpace, wide: &mut Vec<f32>, out: &mut [f32]) -> bool {
        if from == Weights::Recorded && !self.weights.is_empty() {
            out.iter_mut().zip(ranks).for_each(|(w, &rank)| *w = self.weights[rank as usize]);
            // Of the row, not only of those chosen: what is not known may be any share of it.
            return self.weights.iter().all(|w| w.is_finite());
        }
        wide.clear();
        wide.extend(self.scores.iter().map(|z| z.to_f32()));
        gate(wide, ranks, space, out);
        // The lowest score throughout is how a row is recorded that is not known.
        self.scores.first().is_some_and(|z| z.is_finite() && *z > f16::MIN)
    }
}

/// What the sidecar says was resident in a layer before the first token.
fn resident(sidecar: &Sidecar, layer: usize) -> Vec<u16> {
    let begin = sidecar.resident.first().filter(|r| r.before_token == 0);
    begin.and_then(|r| r.layers.get(layer)).cloned().unwrap_or_default()
}

/// The passes that the sidecar tells of; without one each token is a decode pass.
fn passes(sidecar: Option<&Sidecar>, n_tokens: usize) -> Vec<RoutedPass> {
    let Some(sidecar) = sidecar else {
        return (0..n_tokens).map(|t| RoutedPass { phase: Phase::Decode, rows: t..t + 1 }).collect();
    };
    let mut passes = Vec::new();
    for range in &sidecar.ranges {
        let end = range.end().min(n_tokens as u64) as usize;
        let mut first = (range.first as usize).min(end);
        while first < end {
            let next = first.saturating_add(range.tokens_per_pass.max(1) as usize).min(end);
            passes.push(RoutedPass { phase: range.phase, rows: first..next });
            first = next;
        }
    }
    passes
}
