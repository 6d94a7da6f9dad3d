//! Rows of a route_trace, gathered into passes and turned into whole tokens.
//!
//! In a prefill rows come layer by layer, each layer with all steps of its batch; in decode step by step. A pass ends where
//! the layer goes back, turn or phase change, or (in decode) the step does. It is taken apart as the live recorder would have it:
//! layers may hold its last steps only, as an engine computes only the outputs asked for, and the steps before are left out.

use std::collections::BTreeSet;

use half::f16;

use super::row::Row;
use crate::error::{Result, err};
use crate::trace::block::Phase;

/// Rows that a pass may have: 160 MB of them.
const MAX_ROWS: usize = 1 << 22;

/// What the tokens of all passes must have in common.
pub struct Tokens<'a> {
    /// Layers that have rows.
    pub layers: &'a BTreeSet<u16>,
    pub k: usize,
}

/// A pass, gathered.
#[derive(Default)]
pub struct Pass {
    rows: Vec<Row>,
    /// Turn and last step of the pass before.
    before: Option<(u32, u32)>,
}

/// What a pass was.
pub struct PassFacts {
    pub turn: u32,
    pub phase: Phase,
    /// The first step that all layers have.
    pub first: u32,
    /// Tokens from there on.
    pub n_tokens: u64,
    /// Tokens before it.
    pub left_out: u32,
}

/// One token in one layer, by falling score.
pub struct Cell<'a> {
    pub ids: &'a [u16],
    pub scores: &'a [f16],
    pub residency: &'a [u8],
}

impl Pass {
    /// Whether a row is of another pass than those gathered.
    pub fn ends_before(&self, row: &Row) -> bool {
        self.rows.last().is_some_and(|last| {
            (last.turn, last.phase) != (row.turn, row.phase)
                || row.layer < last.layer
                || (row.phase == Phase::Decode && row.step != last.step)
        })
    }

    /// The rows gathered, as they came.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Of the rows gathered; `None` if there are none.
    pub fn phase(&self) -> Option<Phase> {
        self.rows.first().map(|row| row.phase)
    }

    pub fn push(&mut self, row: Row) -> Result<()> {
        if self.rows.len() == MAX_ROWS {
            return Err(err!(Format, "line {}: a pass of more than {MAX_ROWS} rows", row.line));
        }
        self.rows.push(row);
        Ok(())
    }

    /// Checks the rows gathered, and sorts them by layer, step and slot: then each layer has cells of k rows. `None` if there
    /// are no rows.
    fn check(&mut self, wanted: &Tokens) -> Result<Option<PassFacts>> {
        let Some(&Row { line, turn, phase, .. }) = self.rows.first() else { return Ok(None) };
        let last_line = self.rows.last().map_or(line, |row| row.line);
        let rows = &mut self.rows;
        rows.sort_by_key(|row| (row.layer, row.step, row.slot));
        let at = |row: &Row| format!("line {}: turn {turn}, step {}, layer {}", row.line, row.step, row.layer);
        check_cells(rows, wanted.k, &at)?;

        let (mut low, mut high) = (u32::MAX, 0);
        rows.iter().for_each(|row| (low, high) = (low.min(row.step), high.max(row.step)));
        if let Some((_, step)) = self.before.filter(|&(before, step)| before == turn && step + 1 != low) {
            return Err(err!(Format, "line {line}: turn {turn}: step {low} after step {step}: steps are missing"));
        }
        // the first step that all layers so far have
        let mut first = low;
        for of_layer in rows.chunk_by(|a, b| a.layer == b.layer) {
            let begin = of_layer[0].step;
            if let Some((row, want)) = of_layer.chunks(wanted.k).zip(begin..).find(|(cell, s)| cell[0].step != *s) {
                return Err(err!(Format, "{}: step {want} is missing", at(&row[0])));
            }
            let end = &of_layer[of_layer.len() - 1];
            if end.step != high {
                return Err(err!(Format, "{}: the layer ends here, others of the pass at step {high}", at(end)));
            }
            first = first.max(begin);
        }
        let found: BTreeSet<u16> = rows.iter().map(|row| row.layer).collect();
        if let Some(layer) = wanted.layers.difference(&found).next() {
            let (n, of) = (found.len(), wanted.layers.len());
            return Err(err!(
                Format,
                "line {last_line}: turn {turn}, step {high}: layer {layer} missing, {n} of {of} there"
            ));
        }
        self.before = Some((turn, high));
        let (n_tokens, left_out) = (u64::from(high - first) + 1, first - low);
        Ok(Some(PassFacts { turn, phase, first, n_tokens, left_out }))
    }

    /// Checks the rows gathered, gives them out layer by layer (those too that not all layers have: steps, then slots), and
    /// starts anew. `None` if there are no rows.
    pub fn finish_ragged(&mut self, wanted: &Tokens, mut give: impl FnMut(&[Row])) -> Result<Option<PassFacts>> {
        let facts = self.check(wanted)?;
        self.rows.chunk_by(|a, b| a.layer == b.layer).for_each(&mut give);
        self.rows.clear();
        Ok(facts)
    }

    /// Checks the rows gathered, gives out their tokens cell by cell (steps outermost), and starts anew. `None` if there
    /// are no rows.
    pub fn finish(&mut self, wanted: &Tokens, mut give: impl FnMut(&Cell) -> Result<()>) -> Result<Option<PassFacts>> {
        let Some(facts) = self.check(wanted)? else { return Ok(None) };
        let (rows, first) = (&mut self.rows, facts.first);
        rows.retain(|row| row.step >= first);
        rows.sort_by_key(|row| (row.step, row.layer, row.slot));
        let k = wanted.k;
        let (mut ids, mut scores, mut residency) = (vec![0; k], vec![f16::ZERO; k], vec![0; k]);
        for cell in rows.chunks_mut(k) {
            if cell.iter().any(|row| row.score.is_nan()) {
                // as the live recorder has it: a row that nothing can be told of
                cell.iter_mut().for_each(|row| row.score = f16::MIN);
            }
            // stable: equal weights stay in the order of their slots
            cell.sort_by(|a, b| b.score.total_cmp(&a.score));
            for (i, row) in cell.iter().enumerate() {
                (ids[i], scores[i], residency[i]) = (row.expert, row.score, row.residency);
            }
            give(&Cell { ids: &ids, scores: &scores, residency: &residency })?;
        }
        rows.clear();
        Ok(Some(facts))
    }
}

/// Each cell has its k slots, and k experts in them. `rows` by layer, step and slot.
fn check_cells(rows: &[Row], k: usize, at: &impl Fn(&Row) -> String) -> Result<()> {
    let mut experts = Vec::with_capacity(k);
    for cell in rows.chunk_by(|a, b| (a.layer, a.step) == (b.layer, b.step)) {
        if let Some(two) = cell.windows(2).find(|two| two[0].slot == two[1].slot) {
            return Err(err!(Format, "{}: slot {} twice", at(&two[1]), two[1].slot));
        }
        if cell.len() != k {
            return Err(err!(Format, "{}: {} of {k} slots", at(&cell[cell.len() - 1]), cell.len()));
        }
        experts.clear();
        experts.extend(cell.iter().map(|row| row.expert));
        experts.sort_unstable();
        if let Some(two) = experts.windows(2).find(|two| two[0] == two[1]) {
            return Err(err!(Format, "{}: expert {} twice", at(&cell[k - 1]), two[0]));
        }
    }
    Ok(())
}
