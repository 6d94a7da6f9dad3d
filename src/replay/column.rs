//! Tokens of one layer of a trace, gathered from the records that lie a token apart in the file: rows side by side, ids renumbered by the keep
//! map, scores widened to f32 (exact). Everything that a file can get wrong about ids is checked here, once.

use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::keep_map::{KeepMap, PRUNED};
use crate::error::{Result, err};
use crate::trace::{Record, Trace};

/// Rows of one layer. Memory is kept from one `gather` to the next.
#[derive(Default)]
pub struct Column {
    /// `width` places a row.
    ids: Vec<u16>,
    /// The same, or empty where only the first k ids were asked for.
    scores: Vec<f32>,
    rows: Vec<Extent>,
    width: usize,
    record_ids: Vec<u16>,
    record_scores: Vec<f16>,
    wide: Vec<f32>,
}

#[derive(Clone, Copy)]
struct Extent {
    /// Candidates that are left.
    len: u16,
    /// Of the router's own first k, those that are pruned away.
    substituted: u16,
}

/// One token's candidates by falling rank.
#[derive(Clone, Copy)]
pub struct Row<'a> {
    pub ids: &'a [u16],
    /// As many, or none where only the first k ids were gathered.
    pub scores: &'a [f32],
    /// Of the router's own first k experts, those that the keep map has pruned away.
    pub substituted: u32,
}

impl<'a> Row<'a> {
    /// The router's own choice of what is left: k, or all where they are fewer.
    #[inline]
    pub fn first(&self, k: usize) -> &'a [u16] {
        &self.ids[..k.min(self.ids.len())]
    }
}

impl Column {
    /// Gathers tokens of a layer: all candidates with their scores, or only the first k ids. `Format` for an id that the
    /// trace's header does not have.
    pub fn gather(
        &mut self,
        trace: &Trace,
        layer: usize,
        tokens: Range<usize>,
        keep: Option<&KeepMap>,
        k: usize,
        all: bool,
    ) -> Result<()> {
        Self::gather_block(std::slice::from_mut(self), trace, layer, tokens, keep, k, all)
    }

    /// Gathers neighbouring layers, from `first` on, one into each column: their records lie side by side, so that memory is
    /// read in longer runs.
    pub fn gather_block(
        columns: &mut [Self],
        trace: &Trace,
        first: usize,
        tokens: Range<usize>,
        keep: Option<&KeepMap>,
        k: usize,
        all: bool,
    ) -> Result<()> {
        columns.iter_mut().for_each(|c| c.make_room(trace, tokens.len(), k, all));
        for (row, token) in tokens.enumerate() {
            for (column, layer) in columns.iter_mut().zip(first..) {
                let new_ids = keep.map(|k| k.layer(layer));
                if let Err(id) = column.take(row, trace.record(token, layer), trace.header().n_experts, new_ids, k) {
                    let n = trace.n_experts();
                    return Err(err!(Format, "token {token} layer {layer}: expert {id}, the header says {n}"));
                }
            }
        }
        Ok(())
    }

    /// Memory that a row takes.
    pub fn row_bytes(trace: &Trace, k: usize, all: bool) -> usize {
        size_of::<Extent>() + if all { 6 * trace.top_m() } else { 2 * k.min(trace.top_m()) }
    }

    fn make_room(&mut self, trace: &Trace, n_rows: usize, k: usize, all: bool) {
        let m = trace.top_m();
        self.width = if all { m } else { k.min(m) };
        self.ids.resize(n_rows * self.width, 0);
        self.scores.resize(if all { n_rows * self.width } else { 0 }, 0.0);
        self.rows.clear();
        self.rows.resize(n_rows, Extent { len: self.width as u16, substituted: 0 });
        self.record_ids.resize(m, 0);
        self.record_scores.resize(m, f16::ZERO);
        self.wide.resize(m, 0.0);
    }

    /// Takes in one record. An id that the header does not have is the error.
    #[inline]
    fn take(
        &mut self,
        row: usize,
        record: Record<'_>,
        n_experts: u16,
        new_ids: Option<&[u16]>,
        k: usize,
    ) -> Result<(), u16> {
        let at = row * self.width..(row + 1) * self.width;
        let all = !self.scores.is_empty();
        let Some(new_ids) = new_ids else {
            let ids = &mut self.ids[at.clone()];
            record.copy_ids(ids);
            let highest = ids.iter().fold(0, |high, &id| high.max(id));
            if highest >= n_experts {
                return Err(highest);
            }
            if all {
                record.copy_scores(&mut self.record_scores);
                self.record_scores.convert_to_f32_slice(&mut self.scores[at]);
            }
            return Ok(());
        };
        record.copy_ids(&mut self.record_ids);
        record.copy_scores(&mut self.record_scores);
        self.record_scores.convert_to_f32_slice(&mut self.wide);
        let mut extent = Extent { len: 0, substituted: 0 };
        for (rank, (&old, &z)) in self.record_ids.iter().zip(&self.wide).enumerate() {
            let new = *new_ids.get(usize::from(old)).ok_or(old)?;
            if new == PRUNED {
                extent.substituted += u16::from(rank < k);
            } else if usize::from(extent.len) < self.width {
                self.ids[at.start + usize::from(extent.len)] = new;
                if all {
                    self.scores[at.start + usize::from(extent.len)] = z;
                }
                extent.len += 1;
            }
        }
        self.rows[row] = extent;
        Ok(())
    }

    pub fn n_tokens(&self) -> usize {
        self.rows.len()
    }

    #[inline]
    pub fn row(&self, token: usize) -> Row<'_> {
        let row = self.rows[token];
        let at = token * self.width..token * self.width + usize::from(row.len);
        let scores = if self.scores.is_empty() { &[] } else { &self.scores[at.clone()] };
        Row { ids: &self.ids[at], scores, substituted: row.substituted.into() }
    }

    pub fn rows(&self) -> impl Iterator<Item = Row<'_>> + Clone {
        (0..self.n_tokens()).map(|token| self.row(token))
    }
}
