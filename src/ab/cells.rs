//! What each cell's tokens were like, by themselves.

use rand_pcg::Pcg64Mcg;

use super::blocks::Run;
use super::bootstrap::{Means, quantile};
use super::log::{self, COUNTS, Row};
use super::politis_white::Dependence;
use super::verdict::z;

#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    pub name: String,
    /// Measured, without washout.
    pub tokens: u64,
    /// Time per token, in ms.
    pub mean_ms: f64,
    pub p50_ms: f64,
    pub p95_ms: f64,
    pub p99_ms: f64,
    /// Half widths of the interval of the mean: as if tokens were independent, and by blocks of `dependence.block` tokens.
    pub independent_half_ms: f64,
    pub block_half_ms: f64,
    pub dependence: Dependence,
    /// Mean per token, by [`COUNTS`]; NaN: not in the log.
    pub counts: [f64; COUNTS.len()],
    /// Of the passes that say so.
    pub compute_ms: Option<f64>,
    /// Of the time per token, resampled in blocks of `dependence.block`.
    pub(super) means: Means,
}

impl Cell {
    pub fn tokens_per_second(&self) -> f64 {
        1e3 / self.mean_ms
    }
}

/// Rows of a cell that count, over all runs, in order.
pub fn measured(runs: &[Run], cell: usize) -> Vec<&Row> {
    runs.iter().flat_map(|run| &run.rows).filter(|r| r.cell == Some(cell) && !r.washout).collect()
}

/// The time per token of each of these passes, in ms.
pub fn times_ms(rows: &[&Row]) -> Vec<f64> {
    rows.iter().map(|r| r.wall_ns / 1e6 / f64::from(r.tokens)).collect()
}

/// None where nothing was measured.
pub fn cell(name: &str, rows: &[&Row], level: f64, resamples: usize, rng: &mut Pcg64Mcg) -> Option<Cell> {
    let times = times_ms(rows);
    let tokens = log::tokens(rows.iter().copied());
    let mut ascending = times.clone();
    ascending.sort_by(f64::total_cmp);
    if ascending.is_empty() {
        return None;
    }
    let mut counts = [0.0; COUNTS.len()];
    for row in rows {
        counts.iter_mut().zip(row.counts).for_each(|(sum, n)| *sum += n);
    }
    let dependence = Dependence::of(&times);
    let means = Means::of(&times, dependence.block, resamples, rng);
    let compute: Option<f64> = rows.iter().map(|r| r.compute_ns).sum();
    Some(Cell {
        name: name.to_owned(),
        tokens,
        mean_ms: rows.iter().map(|r| r.wall_ns).sum::<f64>() / 1e6 / tokens as f64,
        p50_ms: quantile(&ascending, 0.5),
        p95_ms: quantile(&ascending, 0.95),
        p99_ms: quantile(&ascending, 0.99),
        independent_half_ms: z(0.5 + level / 2.0) * (dependence.variance / times.len() as f64).sqrt(),
        block_half_ms: means.half_width(level),
        dependence,
        counts: counts.map(|sum| sum / tokens as f64),
        compute_ms: compute.map(|ns| ns / 1e6 / tokens as f64),
        means,
    })
}
