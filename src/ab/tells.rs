//! What else happened in a session: how times moved whatever the cell, and the signs that something other than the cells was measured.

use super::blocks::{Block, Run};
use super::cells::{Cell, measured};
use super::drift::{Spearman, spearman};
use super::log::MAJOR_FAULTS;
use super::session::{Session, finished, planned};
use super::verdict::digits;
use super::{Analysis, Design, Options, order, sequential};
use crate::hook::schedule::Schedule;

/// Successive tokens of one cell, beside that cell's mean.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    pub run: usize,
    pub cell: usize,
    /// Place in the run, 0..1.
    pub share: f64,
    pub ms: f64,
    /// ln(time / mean of the cell), and of the part that was not waiting.
    pub off: f64,
    pub compute_off: Option<f64>,
}

/// Times under one thermal level.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Thermal {
    pub level: u8,
    pub tokens: u64,
    /// Mean of time / mean of the cell.
    pub ratio: f64,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Drift {
    pub points: Vec<Point>,
    /// Time against place in the session.
    pub wall: Option<Spearman>,
    pub compute: Option<Spearman>,
    /// By how many percent the last third of the session is slower than the first.
    pub wall_percent: f64,
    pub compute_percent: f64,
    pub thermal: Vec<Thermal>,
}

/// Of blocks where there are some, else of stretches of each run that are as long as times depend on each other. All count
/// cells as `cells` does.
pub fn drift(runs: &[Run], blocks: &[Block], cells: &[Cell]) -> Drift {
    let compute_mean = |cell: usize| cells[cell].compute_ms.filter(|ms| *ms > 0.0);
    let point = |run, cell: usize, share, ms: f64, compute_ms: Option<f64>| Point {
        run,
        cell,
        share,
        ms,
        off: (ms / cells[cell].mean_ms).ln(),
        compute_off: compute_ms.zip(compute_mean(cell)).map(|(ms, mean)| (ms / mean).ln()).filter(|x| x.is_finite()),
    };
    let mut points: Vec<Point> = blocks.iter().map(|b| point(b.run, b.cell, b.share, b.ms, b.compute_ms)).collect();
    if blocks.is_empty() {
        for (number, run) in runs.iter().enumerate() {
            let Some(cell) = run.rows.first().and_then(|r| r.cell) else { continue };
            let length = cells[cell].dependence.block.max(16);
            for (i, rows) in run.rows.chunks_exact(length).enumerate() {
                let tokens: f64 = rows.iter().map(|r| f64::from(r.tokens)).sum();
                let mean = |sum: f64| sum / 1e6 / tokens;
                let compute: Option<f64> = rows.iter().map(|r| r.compute_ns).sum();
                let share = (i as f64 + 0.5) * length as f64 / run.rows.len() as f64;
                points.push(point(number, cell, share, mean(rows.iter().map(|r| r.wall_ns).sum()), compute.map(mean)));
            }
        }
    }
    let against_place = |of: fn(&Point) -> Option<f64>| {
        let both: Vec<(f64, f64)> = points.iter().filter_map(|p| Some((p.share, of(p)?))).collect();
        let (share, off): (Vec<f64>, Vec<f64>) = both.iter().copied().unzip();
        let mean = |within: std::ops::Range<f64>| {
            let some: Vec<f64> = both.iter().filter(|(s, _)| within.contains(s)).map(|(_, off)| *off).collect();
            some.iter().sum::<f64>() / some.len().max(1) as f64
        };
        (spearman(&share, &off), ((mean(2.0 / 3.0..2.0) - mean(-1.0..1.0 / 3.0)).exp() - 1.0) * 100.0)
    };
    let (wall, wall_percent) = against_place(|p| Some(p.off));
    let (compute, compute_percent) = against_place(|p| p.compute_off);
    Drift { wall, compute, wall_percent, compute_percent, thermal: thermal(runs, cells), points }
}

fn thermal(runs: &[Run], cells: &[Cell]) -> Vec<Thermal> {
    let mut levels = std::collections::BTreeMap::<u8, (u64, f64)>::new();
    for (i, cell) in cells.iter().enumerate() {
        for row in measured(runs, i) {
            let Some(level) = row.thermal_level else { continue };
            let (tokens, times) = levels.entry(level).or_default();
            *tokens += u64::from(row.tokens);
            *times += row.wall_ns / 1e6 / cell.mean_ms;
        }
    }
    levels.into_iter().map(|(level, (tokens, times))| Thermal { level, tokens, ratio: times / tokens as f64 }).collect()
}

/// A sign, by a name for programs, in words for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tell {
    pub name: &'static str,
    pub words: String,
}

pub(super) fn tells(analysis: &Analysis, runs: &[Run], session: &Session, options: &Options) -> Vec<Tell> {
    let mut all = Vec::new();
    let mut tell = |name, words: String| all.push(Tell { name, words });
    let cells = &analysis.cells;
    if analysis.design == Design::Runs && cells.len() > 1 {
        let words = "one run a cell: heat, other programs or a longer context that changed between the runs look the same as a difference \
                     of the cells; only blocks in a balanced order (hotset ab plan) tell them from each other";
        tell("confounded", words.to_owned());
    }
    for c in analysis.comparisons.iter().filter(|c| c.paired.is_some_and(|p| p.one_sided)) {
        let (a, b) = (&cells[c.a].name, &cells[c.b].name);
        tell("order", format!("{a} and {b} always come in the same order: a drift looks the same as a difference"));
    }
    for c in analysis.comparisons.iter().filter(|c| c.equal && c.verdict.told_apart()) {
        let (a, b) = (&cells[c.a].name, &cells[c.b].name);
        tell(
            "equal cells",
            format!("{a} and {b} have the same settings and are told apart: do not trust this session"),
        );
    }
    order_and_looks(analysis, session, options, &mut tell);
    memory(cells, &mut tell);
    heat(analysis, runs, &mut tell);
    all
}

fn order_and_looks(
    analysis: &Analysis,
    session: &Session,
    options: &Options,
    tell: &mut impl FnMut(&'static str, String),
) {
    if analysis.design != Design::Blocks {
        return;
    }
    for (number, blocks) in analysis.blocks.chunk_by(|a, b| a.run == b.run).enumerate() {
        let order: Vec<usize> = blocks.iter().map(|b| b.cell).collect();
        if analysis.cells.len() > 1 && order::recognise(&order, analysis.cells.len()).is_none() {
            let words =
                "is not one of hotset ab plan's: the randomisation test takes each row of cells as drawn by itself";
            tell("order", format!("the order of blocks of run {} {words}", number + 1));
        }
    }
    let alpha = (1.0 - analysis.level) / analysis.comparisons.len().max(1) as f64;
    let level = sequential::look(alpha, analysis.look.0, analysis.look.1).level;
    if let Some(lots) = analysis.comparisons.iter().filter_map(|c| c.randomisation).find(|r| r.least > level) {
        let (units, least) = (lots.units, lots.least);
        let words = format!(
            "lots were drawn {units} times only: the least p is {least:.2}, so the verdict rests on the pairs alone"
        );
        tell("few lots", words);
    }
    let unplanned = |plan: &&Schedule| options.look.is_none() && planned(plan).0 == 1;
    if let Some(plan) = options.plan.as_ref().filter(unplanned) {
        let (found, blocks) = (finished(&session.runs, plan).len(), planned(plan).1);
        if found < blocks {
            let words = "an early look that was not planned: the level holds only if you would have stopped here whatever it says";
            tell("unplanned look", format!("{found} of {blocks} planned blocks are there: {words}"));
        }
    }
}

/// Faults per token from which on the pages of other things than slots are read from the disk as well.
const FAULTS: f64 = 1.0;

fn memory(cells: &[Cell], tell: &mut impl FnMut(&'static str, String)) {
    let faults = |c: &Cell| c.counts[MAJOR_FAULTS];
    if cells.iter().any(|c| faults(c) >= FAULTS) {
        let each: Vec<String> = cells.iter().map(|c| format!("{} {}", c.name, digits(faults(c)))).collect();
        let words = "the system takes memory away and reads it back, which is measured with the cells";
        tell("major faults", format!("major faults per token: {}: {words}", each.join(", ")));
    }
}

fn heat(analysis: &Analysis, runs: &[Run], tell: &mut impl FnMut(&'static str, String)) {
    let drift = &analysis.drift;
    let balanced =
        if analysis.design == Design::Blocks { "; the order of blocks takes it out of the comparisons" } else { "" };
    let moves = |s: &Option<Spearman>, percent: f64| s.filter(|s| s.p < 0.01 && percent.abs() >= 3.0);
    if let Some(s) = moves(&drift.wall, drift.wall_percent) {
        let (by, rho) = (drift.wall_percent, s.rho);
        tell(
            "drift",
            format!(
                "from the first to the last third times changed by {by:+.0} % (rank correlation {rho:+.2}){balanced}"
            ),
        );
    }
    if let Some(s) = moves(&drift.compute, drift.compute_percent) {
        let (by, rho) = (drift.compute_percent, s.rho);
        let words = format!("which no cell decides: heat, or another load{balanced}");
        tell("compute", format!("compute time changed by {by:+.0} % (rank correlation {rho:+.2}), {words}"));
    }
    let hot: u64 = drift.thermal.iter().filter(|t| t.level > 0).map(|t| t.tokens).sum();
    let all: u64 = drift.thermal.iter().map(|t| t.tokens).sum();
    if hot > 0 {
        let share = 100.0 * hot as f64 / all as f64;
        let mean = |cell: usize| {
            let levels = measured(runs, cell).into_iter().filter_map(|r| r.thermal_level);
            let (sum, n) = levels.fold((0.0, 0.0), |(sum, n), level| (sum + f64::from(level), n + 1.0));
            sum / f64::max(n, 1.0)
        };
        let means: Vec<f64> = (0..analysis.cells.len()).map(mean).collect();
        let each: Vec<String> = analysis.cells.iter().zip(&means).map(|(c, m)| format!("{} {m:.2}", c.name)).collect();
        let spread = means.iter().fold(0.0, |s: f64, m| s.max(*m)) - means.iter().fold(f64::MAX, |s: f64, m| s.min(*m));
        let apart = if spread > 0.25 { ": not alike for all cells" } else { "" };
        tell(
            "thermal",
            format!(
                "{share:.0} % of the tokens ran above the nominal thermal level; mean level {}{apart}",
                each.join(", ")
            ),
        );
    }
}
