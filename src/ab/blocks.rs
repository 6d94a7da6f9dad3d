//! Tokens become blocks (a stretch under one cell, without its washout), and blocks become pairs: two cells' neighbours in time, so that
//! what changes slowly is the same for both.

use super::log::{self, Row};
use super::order;

/// The tokens of a run, in order, with cells counted over all runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Run {
    pub name: String,
    pub rows: Vec<Row>,
}

impl Run {
    /// Tokens in a row under one cell, of one block.
    pub fn stretches(&self) -> impl Iterator<Item = &[Row]> {
        self.rows.chunk_by(|a, b| (a.cell, a.block) == (b.cell, b.block))
    }
}

/// What was measured of one block.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    pub run: usize,
    pub cell: usize,
    /// Tokens measured, without the washout.
    pub tokens: u64,
    /// Its middle, in decode tokens since the run began.
    pub at: f64,
    /// The same as a share of the run, 0..1.
    pub share: f64,
    /// Mean time per token.
    pub ms: f64,
    /// Mean of what was not waiting for reads.
    pub compute_ms: Option<f64>,
    /// What the lot decided about at once: blocks with the same number.
    pub unit: usize,
}

/// The blocks of all runs. One with less than half of the tokens that most have is left out (a run that was cut off).
pub fn blocks(runs: &[Run]) -> Vec<Block> {
    let mut all: Vec<Block> = Vec::new();
    for (number, run) in runs.iter().enumerate() {
        let whole: f64 = run.rows.iter().map(|r| f64::from(r.tokens)).sum();
        let mut from = 0.0;
        for stretch in run.stretches() {
            let begin = from;
            from += stretch.iter().map(|r| f64::from(r.tokens)).sum::<f64>();
            let Some(cell) = stretch[0].cell else { continue };
            let measured: Vec<&Row> = stretch.iter().filter(|r| !r.washout).collect();
            let tokens = log::tokens(measured.iter().copied());
            if tokens == 0 {
                continue;
            }
            let per_token = |sum: f64| sum / tokens as f64;
            let compute: Option<f64> = measured.iter().map(|r| r.compute_ns).sum();
            let at = from - (tokens as f64 / 2.0).min(from - begin);
            all.push(Block {
                run: number,
                cell,
                tokens,
                at,
                share: at / whole,
                ms: per_token(measured.iter().map(|r| r.wall_ns).sum()) / 1e6,
                compute_ms: compute.map(|ns| per_token(ns) / 1e6),
                unit: 0,
            });
        }
    }
    let mut sizes: Vec<u64> = all.iter().map(|b| b.tokens).collect();
    sizes.sort_unstable();
    let usual = sizes.get(sizes.len() / 2).copied().unwrap_or(0);
    all.retain(|b| 2 * b.tokens >= usual);
    number_units(&mut all);
    all
}

/// By the order that is recognised in each run; a run whose order is the beginning of another's, or the same, was drawn with it. Where no order
/// is recognised each row of cells is taken for a unit.
fn number_units(all: &mut [Block]) {
    let mut drawn: Vec<(Vec<usize>, usize)> = Vec::new(); // an order and its first unit's number
    let mut next = 0;
    for blocks in all.chunk_by_mut(|a, b| a.run == b.run) {
        let cells: Vec<usize> = blocks.iter().map(|b| b.cell).collect();
        let mut names = cells.clone();
        names.sort_unstable();
        names.dedup();
        let letters: Vec<usize> = cells.iter().map(|c| names.partition_point(|n| n < c)).collect();
        let unit_blocks = order::recognise(&letters, names.len()).unwrap_or(names.len().max(1));
        let same = drawn.iter().find(|(order, _)| order.starts_with(&cells) || cells.starts_with(order));
        let base = same.map_or(next, |(_, base)| *base);
        for (i, block) in blocks.iter_mut().enumerate() {
            block.unit = base + i / unit_blocks;
            next = next.max(block.unit + 1);
        }
        if same.is_none() {
            drawn.push((cells, base));
        }
    }
}

/// A block of each of two cells.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pair {
    /// Mean times per token.
    pub a_ms: f64,
    pub b_ms: f64,
    /// By how many tokens b lies behind a.
    pub gap: f64,
    /// Where between them, as a share of the run.
    pub share: f64,
    pub unit: usize,
}

/// Of the blocks of cells `a` and `b`, each with its neighbour of the other cell in the same run; a block that has none is left out.
pub fn pairs(blocks: &[Block], a: usize, b: usize) -> Vec<Pair> {
    let mut pairs = Vec::new();
    let mut waiting: Option<&Block> = None;
    for block in blocks.iter().filter(|x| x.cell == a || x.cell == b) {
        match waiting.filter(|w| w.run == block.run && w.cell != block.cell) {
            None => waiting = Some(block),
            Some(before) => {
                let (of_a, of_b) = if block.cell == b { (before, block) } else { (block, before) };
                pairs.push(Pair {
                    a_ms: of_a.ms,
                    b_ms: of_b.ms,
                    gap: of_b.at - of_a.at,
                    share: (of_a.share + of_b.share) / 2.0,
                    unit: block.unit,
                });
                waiting = None;
            }
        }
    }
    pairs
}
