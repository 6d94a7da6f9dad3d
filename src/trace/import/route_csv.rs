//! route_trace v1: what llama.cpp runs of another project wrote about their routing, as CSV.
//!
//! `#` lines carry `key=value` facts (model, arch, n_layer, n_expert, n_expert_used; layer, expert_bytes, dense_bytes),
//! then comes the heading and a row for each slot: `turn,phase,step,layer,slot,expert,weight,residency,expert_bytes`.
//! phase 0 is prefill, 1 decode; residency 0 miss, 1 hit, 2 first use of a prefetched expert; expert_bytes is what was
//! read. With the fact `residency=unknown` that column says nothing.
//!
//! A weight becomes the score ln(weight), which differs from the logit by a constant a token where the model's gating is a
//! softmax. A weight of `nan` is not known: the record gets the lowest score throughout, which reranking leaves alone, and
//! is counted (`more.import.unknown_weights`). Layers without any row are dense ones: the trace has no layer for them, and
//! the sidecar's `shape.blocks` says which those it has are. Residency goes to the sidecar's `residency`, the bytes of an
//! expert by layer to `expert_bytes` (from the facts, else the most that a row of the layer says); `more.import.turns`
//! tells the first token of each turn.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, Seek, Write};

use serde_json::json;

use super::lines::{Lines, short};
use super::passes::{Pass, PassFacts, Tokens};
use super::row::{Facts, HEADING, LayerBytes, Row};
use super::{ImportOptions, Output};
use crate::error::{Result, err};
use crate::trace::block::Phase;
use crate::trace::config::reason;
use crate::trace::routing::{LayerRows, RoutedPass, Routing, check_size};
use crate::trace::sidecar::Sidecar;

/// Digits of residency that a sidecar may hold.
const MAX_RESIDENCY: usize = 32 << 20;

/// Reads a route_trace v1 file and writes a trace. Returns what goes beside it.
pub fn route_csv(
    input: &mut (impl BufRead + Seek),
    out: &mut (impl Write + Seek),
    options: ImportOptions,
) -> Result<Sidecar> {
    options.check()?;
    let scan = Scan::of(input, options)?;
    let wanted = Tokens { layers: &scan.layers, k: scan.k };
    // once for the faults, before anything is written
    for_each_pass(input, &scan.facts, |pass| pass.finish(&wanted, |_| Ok(())))?;

    let mut output = Output::new(out, scan.layers.len(), scan.n_experts, scan.k as u16)?;
    let mut residency = Residency { tokens: Vec::new(), cells: 0, n_layers: scan.layers.len(), digits: 0 };
    let mut left_out = BTreeMap::new();
    let mut turns: Vec<(u32, u64)> = Vec::new();
    for_each_pass(input, &scan.facts, |pass| {
        let skip = !options.prefill && pass.phase() == Some(Phase::Prefill);
        let facts = pass.finish(&wanted, |cell| {
            if skip {
                return Ok(());
            }
            if options.residency && !scan.facts.no_residency {
                residency.push(cell.residency)?;
            }
            output.record(cell.ids, cell.scores)
        })?;
        let Some(PassFacts { turn, phase, first, n_tokens, left_out: before }) = facts else { return Ok(None) };
        let mut count = |why: &str, n: u64| *left_out.entry(why.to_owned()).or_default() += n;
        if skip {
            count(reason::PREFILL, n_tokens + u64::from(before));
        } else {
            if before > 0 {
                count(reason::FEWER_TOKENS, before.into());
            }
            if turns.last().is_none_or(|&(last, _)| last != turn) {
                turns.push((turn, output.tokens));
            }
            output.end_pass(n_tokens, phase, first.into(), before)?;
        }
        Ok(None)
    })?;
    if output.tokens == 0 {
        return Err(err!(Format, "no token to import: all are prefill"));
    }
    let sidecar = output.finish(&scan.layers, "log_weight")?;
    let facts = &scan.facts;
    let turns: Vec<_> = turns.iter().map(|(turn, first)| json!({ "turn": turn, "first": first })).collect();
    let import = json!({
        "format": "route_trace v1",
        "model": facts.model,
        "n_layer": facts.n_layers,
        "dense_bytes": scan.of_layers(|layer| layer.dense),
        "unknown_weights": scan.unknown_weights,
        "turns": turns,
    });
    Ok(Sidecar {
        model: crate::trace::sidecar::Model {
            architecture: facts.architecture.clone().unwrap_or_default(),
            ..Default::default()
        },
        left_out,
        expert_bytes: scan.expert_bytes(),
        residency: residency.tokens,
        more: [("import".to_owned(), import)].into_iter().collect(),
        ..sidecar
    })
}

/// Reads a route_trace v1 file as the routing that it tells of: every row, those of a prefill too that not all layers have.
/// `n_experts` of each layer; `None` = as the file says, or the highest id and one.
pub fn route_csv_routing(input: &mut (impl BufRead + Seek), n_experts: Option<u16>) -> Result<Routing> {
    let options = ImportOptions { n_experts, ..ImportOptions::default() };
    options.check()?;
    let scan = Scan::of(input, options)?;
    check_size(scan.layers.len(), scan.n_experts.into())?;
    let wanted = Tokens { layers: &scan.layers, k: scan.k };
    let mut routing = Routing {
        n_experts: scan.n_experts.into(),
        k: scan.k,
        blocks: scan.layers.iter().map(|&layer| layer.into()).collect(),
        expert_bytes: scan.expert_bytes(),
        unknown_weights: scan.unknown_weights,
        passes: Vec::new(),
        layers: vec![LayerRows::default(); scan.layers.len()],
    };
    for_each_pass(input, &scan.facts, |pass| {
        let mut layers = routing.layers.iter_mut();
        // as many layers as are wanted, in their order: the pass is checked
        let facts = pass.finish_ragged(&wanted, |rows| {
            let Some(layer) = layers.next() else { return };
            layer.ids.extend(rows.iter().map(|row| row.expert));
            layer.weights.extend(rows.iter().map(|row| row.weight));
            if !scan.facts.no_residency {
                layer.residency.extend(rows.iter().map(|row| row.residency));
            }
            layer.ends.push(layer.ids.len());
        })?;
        routing.passes.extend(facts.iter().map(|f| RoutedPass { phase: f.phase, turn: f.turn }));
        Ok(facts)
    })?;
    Ok(routing)
}

/// What must be known of a whole file before its tokens can be written.
pub(super) struct Scan {
    pub facts: Facts,
    pub layers: BTreeSet<u16>,
    pub n_experts: u16,
    pub k: usize,
    unknown_weights: u64,
    /// By layer the most bytes that a row says were read.
    read: BTreeMap<u16, u64>,
}

impl Scan {
    pub fn of(input: &mut (impl BufRead + Seek), options: ImportOptions) -> Result<Self> {
        let mut facts = Facts::default();
        let mut lines = Lines::new(input)?;
        // facts first: they bound the rows
        while let Some((number, line)) = lines.next()? {
            if line.starts_with(b"#") {
                facts.take(number, line)?;
            }
        }
        facts.n_experts = options.n_experts.map(u64::from).or(facts.n_experts);
        let (mut layers, mut read) = (BTreeSet::new(), BTreeMap::<u16, u64>::new());
        let (mut slots, mut experts, mut unknown_weights) = (0, 0, 0);
        each_row(input, &facts, |row| {
            layers.insert(row.layer);
            let most = read.entry(row.layer).or_default();
            *most = row.expert_bytes.max(*most);
            slots = slots.max(usize::from(row.slot) + 1);
            experts = experts.max(row.expert + 1);
            unknown_weights += u64::from(row.score.is_nan());
            Ok(())
        })?;
        if layers.is_empty() {
            return Err(err!(Format, "no rows, and so no tokens"));
        }
        // below 65535 each, as parsed
        let k = facts.k.map_or(slots, |k| k as usize);
        let n_experts = facts.n_experts.map_or(experts, |n| n as u16);
        Ok(Self { facts, layers, n_experts, k, unknown_weights, read })
    }

    /// A fact of each layer, where all of them have it.
    fn of_layers(&self, take: fn(&LayerBytes) -> Option<u64>) -> Option<Vec<u64>> {
        self.layers.iter().map(|layer| self.facts.layers.get(layer).and_then(take)).collect()
    }

    /// Bytes of an expert by layer, from the facts, else the most that was read; empty = not known.
    pub fn expert_bytes(&self) -> Vec<u64> {
        let read =
            || self.layers.iter().map(|layer| self.read.get(layer).copied().filter(|&bytes| bytes > 0)).collect();
        self.of_layers(|layer| layer.expert).or_else(read).unwrap_or_default()
    }
}

/// The rows of a file, in order.
fn each_row(input: &mut (impl BufRead + Seek), facts: &Facts, mut take: impl FnMut(Row) -> Result<()>) -> Result<()> {
    let mut lines = Lines::new(input)?;
    let mut heading = false;
    while let Some((number, line)) = lines.next()? {
        if line.is_empty() || line.starts_with(b"#") {
            continue;
        }
        if !heading {
            if line != HEADING.as_bytes() {
                return Err(err!(Format, "line {number}: the heading \"{HEADING}\" wanted, {} found", short(line)));
            }
            heading = true;
            continue;
        }
        take(Row::parse(number, line, facts)?)?;
    }
    Ok(())
}

pub(super) fn for_each_pass(
    input: &mut (impl BufRead + Seek),
    facts: &Facts,
    mut take: impl FnMut(&mut Pass) -> Result<Option<PassFacts>>,
) -> Result<()> {
    let mut pass = Pass::default();
    each_row(input, facts, |row| {
        if pass.ends_before(&row) {
            take(&mut pass)?;
        }
        pass.push(row)
    })?;
    take(&mut pass).map(drop)
}

/// Digits, gathered a token at a time.
struct Residency {
    tokens: Vec<String>,
    cells: usize,
    n_layers: usize,
    digits: usize,
}

impl Residency {
    fn push(&mut self, cell: &[u8]) -> Result<()> {
        self.digits += cell.len();
        if self.digits > MAX_RESIDENCY {
            let n = self.tokens.len();
            return Err(err!(
                Argument,
                "the residency of more than {n} tokens is too long for a sidecar: leave it out"
            ));
        }
        if self.cells % self.n_layers == 0 {
            self.tokens.push(String::with_capacity(self.n_layers * cell.len()));
        }
        self.cells += 1;
        if let Some(token) = self.tokens.last_mut() {
            token.extend(cell.iter().map(|&digit| char::from(b'0' + digit)));
        }
        Ok(())
    }
}
