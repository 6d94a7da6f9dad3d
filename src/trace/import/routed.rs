//! A route_trace v1 file read as what its run routed, not turned into a trace: weights as they are written, what was resident and
//! what was read for each slot, and every token that a layer has, be it only some layers'.

use std::io::{BufRead, Seek};

use super::passes::Tokens;
use super::route_csv::{Scan, for_each_pass};
use super::{ImportOptions, row::Row};
use crate::error::Result;
use crate::trace::block::Phase;

/// What all cells of a file have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutedShape {
    /// Blocks of the model that have experts: the layers.
    pub blocks: Vec<u32>,
    pub n_experts: u16,
    /// Experts of a token in a layer.
    pub k: usize,
    /// Of one expert, by layer; empty where the file does not say it.
    pub expert_bytes: Vec<u64>,
    /// The file tells what was resident.
    pub residency: bool,
}

/// One token in one layer, the slots by falling weight (in their own order where one is not known).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RoutedCell {
    /// Counts the passes of the file from 0.
    pub pass: usize,
    pub step: u32,
    /// Among the shape's.
    pub layer: usize,
    pub ids: Vec<u16>,
    /// NaN = not known.
    pub weights: Vec<f32>,
    /// ln(weight), as an import has it; all of them the lowest where a weight is not known.
    pub scores: Vec<half::f16>,
    /// 0 miss, 1 hit, 2 first use of a prefetched expert.
    pub residency: Vec<u8>,
    /// What was read for each.
    pub bytes: Vec<u64>,
}

impl RoutedCell {
    fn fill(&mut self, rows: &mut [Row]) {
        let unknown = rows.iter().any(|row| row.weight.is_nan());
        if !unknown {
            rows.sort_by(|a, b| b.weight.total_cmp(&a.weight));
        }
        let lowest = half::f16::MIN;
        self.ids.clear();
        self.ids.extend(rows.iter().map(|row| row.expert));
        self.weights.clear();
        self.weights.extend(rows.iter().map(|row| row.weight));
        self.scores.clear();
        self.scores.extend(rows.iter().map(|row| if unknown { lowest } else { row.score }));
        self.residency.clear();
        self.residency.extend(rows.iter().map(|row| row.residency));
        self.bytes.clear();
        self.bytes.extend(rows.iter().map(|row| row.expert_bytes));
    }
}

/// Reads a file to its end, a pass at a time: `give` has each pass's cells layer by layer, steps in order within. A file at fault
/// is the error, with line and column, and what was given until then is of no use.
pub fn routed_csv(
    input: &mut (impl BufRead + Seek),
    mut give: impl FnMut(Phase, &RoutedCell) -> Result<()>,
) -> Result<RoutedShape> {
    let scan = Scan::of(input, ImportOptions::default())?;
    let wanted = Tokens { layers: &scan.layers, k: scan.k };
    let mut cell = RoutedCell::default();
    let mut rows = Vec::new();
    for_each_pass(input, &scan.facts, |pass| {
        rows.clear();
        rows.extend_from_slice(pass.rows());
        let Some(facts) = pass.finish(&wanted, |_| Ok(()))? else { return Ok(None) };
        rows.sort_by_key(|row| (row.layer, row.step, row.slot));
        for rows in rows.chunks_mut(scan.k) {
            (cell.step, cell.layer) = (rows[0].step, scan.layers.range(..rows[0].layer).count());
            cell.fill(rows);
            give(facts.phase, &cell)?;
        }
        cell.pass += 1;
        Ok(None)
    })?;
    Ok(RoutedShape {
        blocks: scan.layers.iter().map(|&layer| layer.into()).collect(),
        n_experts: scan.n_experts,
        k: scan.k,
        expert_bytes: scan.expert_bytes(),
        residency: !scan.facts.no_residency,
    })
}
