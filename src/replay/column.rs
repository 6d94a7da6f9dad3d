//! One layer of a trace, gathered from the records that lie a token apart in the file: rows side by side, ids renumbered by the keep
//! map, scores widened to f32 (exact). Everything that a file can get wrong about ids is checked here, once.

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::keep_map::{KeepMap, PRUNED};
use crate::error::{Result, err};
use crate::trace::Trace;

/// The rows of one layer. Memory is kept from one `gather` to the next.
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
    /// Gathers a layer: all candidates with their scores, or only the first k ids. `Format` for an id that the trace's header
    /// does not have.
    pub fn gather(
        &mut self,
        trace: &Trace,
        layer: usize,
        keep: Option<&KeepMap>,
        k: usize,
        candidates: bool,
    ) -> Result<()> {
        let (n_tokens, m) = (trace.n_tokens(), trace.top_m());
        self.width = if candidates { m } else { k.min(m) };
        let width = self.width;
        self.ids.resize(n_tokens * width, 0);
        self.scores.resize(if candidates { n_tokens * width } else { 0 }, 0.0);
        self.rows.clear();
        self.rows.resize(n_tokens, Extent { len: width as u16, substituted: 0 });
        self.record_ids.resize(m, 0);
        self.record_scores.resize(m, f16::ZERO);
        self.wide.resize(m, 0.0);
        let n_experts = trace.header().n_experts;
        let unknown = |token: usize, ids: &[u16]| {
            let (rank, id) = ids.iter().enumerate().find(|(_, id)| **id >= n_experts).unwrap_or((0, &0));
            err!(Format, "token {token} layer {layer} rank {rank}: expert {id}, the header says {n_experts}")
        };
        let new_ids = keep.map(|k| k.layer(layer));
        for token in 0..n_tokens {
            let record = trace.record(token, layer);
            let at = token * width..(token + 1) * width;
            let Some(new_ids) = new_ids else {
                let ids = &mut self.ids[at.clone()];
                record.copy_ids(ids);
                if ids.iter().fold(0, |high, &id| high.max(id)) >= n_experts {
                    return Err(unknown(token, ids));
                }
                if candidates {
                    record.copy_scores(&mut self.record_scores);
                    self.record_scores.convert_to_f32_slice(&mut self.scores[at]);
                }
                continue;
            };
            record.copy_ids(&mut self.record_ids);
            record.copy_scores(&mut self.record_scores);
            self.record_scores.convert_to_f32_slice(&mut self.wide);
            let mut row = Extent { len: 0, substituted: 0 };
            for (rank, (&old, &z)) in self.record_ids.iter().zip(&self.wide).enumerate() {
                let Some(&new) = new_ids.get(usize::from(old)) else {
                    return Err(unknown(token, &self.record_ids));
                };
                if new == PRUNED {
                    row.substituted += u16::from(rank < k);
                } else if usize::from(row.len) < width {
                    self.ids[at.start + usize::from(row.len)] = new;
                    if candidates {
                        self.scores[at.start + usize::from(row.len)] = z;
                    }
                    row.len += 1;
                }
            }
            self.rows[token] = row;
        }
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
