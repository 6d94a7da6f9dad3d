//! What a run routed, as plain rows by layer: for tools that look at routing and need neither records nor mapped files.
//!
//! A Q4RT trace has every token in all layers. A route_trace CSV may have prefill tokens that the last layers did not see (an engine computes only
//! the outputs asked for): they are here ([`super::import::route_csv_routing`]), so layers may differ in rows. Rows belong to passes: a prefill is
//! one pass of many rows, a decode step mostly one of one.

use super::block::Phase;
use super::{Sidecar, Trace};
use crate::error::{Result, err};

/// Routing by layer. No token has an expert twice, and every id is below `n_experts`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routing {
    pub n_experts: usize,
    /// Experts that a token uses in a layer.
    pub k: usize,
    /// The model's block index of each layer.
    pub blocks: Vec<u32>,
    /// Bytes of one expert by layer; empty = not known.
    pub expert_bytes: Vec<u64>,
    /// Weights that are not known (NaN).
    pub unknown_weights: u64,
    pub passes: Vec<RoutedPass>,
    pub layers: Vec<LayerRows>,
}

/// A batch that went through all layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutedPass {
    pub phase: Phase,
    /// Passes of one turn follow each other without a gap.
    pub turn: u32,
}

/// The rows of a layer, k places each, in the order of the tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerRows {
    pub ids: Vec<u16>,
    /// As many; NaN = not known.
    pub weights: Vec<f32>,
    /// What the run found resident (0 miss, 1 hit, 2 first use of a prefetched expert), as many; empty = not known.
    pub residency: Vec<u8>,
    /// Where the places of each pass end.
    pub ends: Vec<usize>,
}

/// Experts of all layers that a routing may have: tools hold a few numbers for each.
const MAX_EXPERTS: usize = 1 << 22;

/// `Format` where they are more. Real models have some ten thousand.
pub(super) fn check_size(n_layers: usize, n_experts: usize) -> Result<()> {
    match n_layers.saturating_mul(n_experts) {
        n if n > MAX_EXPERTS => {
            Err(err!(Format, "{n_layers} layers of {n_experts} experts: at most {MAX_EXPERTS} in all wanted"))
        }
        _ => Ok(()),
    }
}

impl LayerRows {
    /// The places of a pass.
    pub fn places(&self, pass: usize) -> std::ops::Range<usize> {
        let begin = pass.checked_sub(1).map_or(0, |before| self.ends[before]);
        begin..self.ends[pass]
    }
}

impl Routing {
    /// The rows of a layer, each with its pass.
    pub fn rows(&self, layer: usize) -> impl Iterator<Item = (RoutedPass, &[u16])> {
        let rows = &self.layers[layer];
        let of_pass = |(i, pass): (usize, &RoutedPass)| {
            let pass = *pass;
            rows.ids[rows.places(i)].chunks_exact(self.k).map(move |row| (pass, row))
        };
        self.passes.iter().enumerate().flat_map(of_pass)
    }

    /// Tokens of a phase: of the layer that has most of them (of a prefill the last may have fewer).
    pub fn tokens(&self, phase: Phase) -> usize {
        let of_layer = |layer| self.rows(layer).filter(|(pass, _)| pass.phase == phase).count();
        (0..self.layers.len()).map(of_layer).max().unwrap_or(0)
    }

    /// Of a trace: the router's first `k` of each record (else the sidecar's k), in the passes that the sidecar tells of. Without a sidecar each token
    /// is a decode step, and scores are taken for logits.
    pub fn of_trace(trace: &Trace, sidecar: Option<&Sidecar>, k: Option<usize>) -> Result<Self> {
        let (n_layers, n_experts, m) = (trace.n_layers(), trace.n_experts(), trace.top_m());
        check_size(n_layers, n_experts)?;
        sidecar.map_or(Ok(()), |s| s.check_header(trace.header()))?;
        let said = sidecar.map(|s| s.shape.k as usize).filter(|&k| k > 0);
        let k = k.or(said).ok_or_else(|| err!(Argument, "no sidecar says how many experts a token uses: give k"))?;
        if k == 0 || k > m {
            return Err(err!(Argument, "k {k}: from 1 to {m} wanted, as many as a record has candidates"));
        }
        let space = Space::by_name(sidecar.map_or("logit", |s| &s.score_space));
        let mut layers = vec![LayerRows::default(); n_layers];
        let (mut unknown_weights, mut weights) = (0, Vec::with_capacity(k));
        // the last token that named an expert in the layer in work
        let mut named = vec![usize::MAX; n_experts];
        for (layer, rows) in layers.iter_mut().enumerate() {
            named.fill(usize::MAX);
            for token in 0..trace.n_tokens() {
                let record = trace.record(token, layer);
                for id in (0..k).map(|rank| record.id(rank)) {
                    match named.get_mut(usize::from(id)) {
                        Some(last) if *last != token => *last = token,
                        Some(_) => return Err(err!(Format, "token {token} layer {layer}: expert {id} twice")),
                        None => {
                            return Err(err!(
                                Format,
                                "token {token} layer {layer}: expert {id}, the header says {n_experts}"
                            ));
                        }
                    }
                    rows.ids.push(id);
                }
                weights.clear();
                weights.extend((0..k).map(|rank| record.score(rank).to_f32()));
                if !space.weigh(&mut weights) {
                    weights.fill(f32::NAN);
                    unknown_weights += k as u64;
                }
                rows.weights.extend_from_slice(&weights);
            }
        }
        let (passes, ends) = passes(sidecar, trace.n_tokens());
        layers.iter_mut().for_each(|rows| rows.ends = ends.iter().map(|end| end * k).collect());
        let tokens = sidecar.map_or(&[][..], |s| &s.residency);
        for token in tokens.iter().take(trace.n_tokens()).map(String::as_bytes) {
            for (rows, digits) in layers.iter_mut().zip(token.chunks_exact(m)) {
                rows.residency.extend(digits.iter().take(k).map(|digit| digit.saturating_sub(b'0')));
            }
        }
        if layers.iter().any(|rows| rows.residency.len() != rows.ids.len()) {
            layers.iter_mut().for_each(|rows| rows.residency.clear());
        }
        let blocks = sidecar.map(|s| s.shape.blocks.clone()).filter(|b| b.len() == n_layers);
        Ok(Self {
            n_experts,
            k,
            blocks: blocks.unwrap_or_else(|| (0..n_layers as u32).collect()),
            expert_bytes: sidecar.map(|s| s.expert_bytes.clone()).unwrap_or_default(),
            unknown_weights,
            passes,
            layers,
        })
    }
}

/// The passes, and the token at which each ends.
fn passes(sidecar: Option<&Sidecar>, n_tokens: usize) -> (Vec<RoutedPass>, Vec<usize>) {
    let (mut passes, mut ends) = (Vec::new(), Vec::<usize>::new());
    let (mut turn, mut position) = (0, None);
    for range in sidecar.map_or(&[][..], |s| &s.ranges) {
        let begins = range.position.checked_sub(i64::from(range.left_out_before)).filter(|&p| p >= 0);
        if position.is_some() && begins != position {
            turn += 1;
        }
        position = range.position.checked_add_unsigned(range.n_tokens).filter(|_| range.position >= 0);
        let end = usize::try_from(range.end()).unwrap_or(usize::MAX).min(n_tokens);
        let per_pass = (range.tokens_per_pass as usize).max(1);
        // of the first pass some may be left out
        let mut rows = per_pass.saturating_sub(range.left_out_before as usize).max(1);
        let mut at = ends.last().copied().unwrap_or(0);
        while at < end {
            at = at.saturating_add(rows).min(end);
            rows = per_pass;
            passes.push(RoutedPass { phase: range.phase, turn });
            ends.push(at);
        }
    }
    // what no range tells of
    for token in ends.last().copied().unwrap_or(0)..n_tokens {
        passes.push(RoutedPass { phase: Phase::Decode, turn });
        ends.push(token + 1);
    }
    (passes, ends)
}

/// How scores become weights.
enum Space {
    Logarithm,
    Proportional,
    Unknown,
}

impl Space {
    fn by_name(name: &str) -> Self {
        match name {
            "logit" | "log_prob" | "log_weight" => Self::Logarithm,
            "linear" => Self::Proportional,
            _ => Self::Unknown,
        }
    }

    /// Turns scores by falling rank into weights whose sum is 1. False where they say nothing.
    fn weigh(&self, scores: &mut [f32]) -> bool {
        let top = scores[0];
        if scores.iter().any(|z| z.is_nan()) || top.abs() >= half::f16::MAX.to_f32() {
            return false;
        }
        match self {
            Self::Logarithm => scores.iter_mut().for_each(|z| *z = (*z - top).exp()),
            Self::Proportional if scores.iter().all(|z| *z >= 0.0 && z.is_finite()) => {}
            _ => return false,
        }
        let sum: f32 = scores.iter().sum();
        scores.iter_mut().for_each(|z| *z /= sum);
        sum > 0.0 && sum.is_finite()
    }
}
