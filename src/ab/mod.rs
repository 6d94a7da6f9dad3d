//! Experiments: which setting is faster on this machine, and what cannot be told.
//!
//! [`plan`] makes a schedule that the hook follows (`hook::schedule`): blocks of tokens under each cell, in a balanced order that is drawn by lot
//! ([`order`]). The engine decodes; each row of the metrics log has its cell and block. [`analyze`] reads such logs ([`log`]), makes blocks and
//! pairs of neighbours of them ([`blocks`]), and says for each pair of cells how much slower one is than the other, with an interval
//! over pairs of blocks ([`paired`]) and one over tokens ([`bootstrap`], [`politis_white`]), a randomisation test
//! ([`permutation`]), looks that pay for themselves ([`sequential`]) and a sentence ([`verdict`]). Beside it stands what else happened: [`drift`], [`tells`].
//!
//! Logs without a schedule, one run a cell, are analysed over tokens alone, and said to be confounded with the order of the runs.
//! [`simulate`] makes sessions whose truth is known, for the tests. Nothing here prints.

pub mod blocks;
pub mod bootstrap;
pub mod cells;
pub mod drift;
mod json;
pub mod log;
pub mod order;
pub mod paired;
pub mod permutation;
pub mod plan;
pub mod politis_white;
pub mod quality;
pub mod sequential;
pub mod session;
pub mod simulate;
pub mod tells;
pub mod verdict;

use std::path::PathBuf;

use rand::SeedableRng;
use rand_pcg::Pcg64Mcg;

use crate::error::{Result, err};
use crate::hook::schedule::Schedule;
use blocks::Block;
use bootstrap::{Interval, log_ratio_of_means};
use cells::Cell;
use paired::Paired;
use permutation::Randomisation;
use session::Session;
use verdict::{Number, Verdict};

/// How logs are analysed.
#[derive(Clone, Debug)]
pub struct Options {
    /// Of every interval; 1 - level is the chance of a false alarm among all pairs.
    pub level: f64,
    pub resamples: usize,
    /// Of the resampling: the same seed gives the same numbers.
    pub seed: u64,
    /// Tokens left out at the beginning of each run without a schedule.
    pub skip: usize,
    /// Compare all cells with this one only, instead of each with each.
    pub baseline: Option<String>,
    /// The schedule that was run: how many blocks were planned, how many looks, which cells are equal.
    pub plan: Option<Schedule>,
    /// Which of how many planned looks this is; None: as the plan says, else the only one.
    pub look: Option<Number>,
}

impl Default for Options {
    fn default() -> Self {
        let (level, resamples, seed, skip) = (0.95, 4000, 1, 50);
        Self { level, resamples, seed, skip, baseline: None, plan: None, look: None }
    }
}

impl Options {
    fn check(&self) -> Result<()> {
        if !(0.5..=0.9999).contains(&self.level) {
            return Err(err!(Argument, "a level of {}: 0.5 to 0.9999 wanted", self.level));
        }
        if !(100..=1_000_000).contains(&self.resamples) {
            return Err(err!(Argument, "{} resamples: 100 to 1000000 wanted", self.resamples));
        }
        if let Some((number, of)) = self.look.filter(|&(number, of)| !(1..=of.min(100)).contains(&number)) {
            return Err(err!(Argument, "look {number} of {of}: 1/1 to 100/100 wanted"));
        }
        Ok(())
    }
}

/// How the cells took turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Design {
    /// Blocks of a schedule.
    Blocks,
    /// One run after the other, each under one cell: whatever changed between the runs looks like a difference of the cells.
    Runs,
}

/// Two cells.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Indices in [`Analysis::cells`]; ratios are of b's time over a's.
    pub a: usize,
    pub b: usize,
    /// Over pairs of blocks; None: runs, or too few.
    pub paired: Option<Paired>,
    /// Over tokens, each cell's resampled in blocks.
    pub tokens: Interval,
    pub randomisation: Option<Randomisation>,
    /// What is held against `level`: of the pairs, or where the randomisation test can reach the level and says more, of that.
    pub p: f64,
    pub level: f64,
    pub verdict: Verdict,
    /// The sentence.
    pub words: String,
    /// Measured tokens of these two cells that would tell apart a difference as large as the estimate, and one of 5 %.
    pub tokens_for_this: Option<u64>,
    pub tokens_for_5_percent: Option<u64>,
    /// The plan gave both cells the same settings.
    pub equal: bool,
}

impl Comparison {
    /// The one that the verdict rests on.
    pub fn interval(&self) -> &Interval {
        self.paired.as_ref().map_or(&self.tokens, |p| &p.interval)
    }
}

/// What the logs say.
#[derive(Clone, Debug, PartialEq)]
pub struct Analysis {
    pub design: Design,
    pub level: f64,
    pub look: Number,
    /// Names of the runs, with their tokens.
    pub runs: Vec<(String, u64)>,
    pub cells: Vec<Cell>,
    pub comparisons: Vec<Comparison>,
    pub blocks: Vec<Block>,
    pub drift: tells::Drift,
    pub tells: Vec<tells::Tell>,
}

/// Analyses the logs of one experiment: of one or several runs under a schedule, or of one run a cell. `Argument` for options that
/// cannot be, `Format` for logs that cannot be read or do not belong together, each with its numbers.
pub fn analyze(logs: &[PathBuf], options: &Options) -> Result<Analysis> {
    options.check()?;
    let logs = logs.iter().map(|path| log::Log::load(path)).collect::<Result<Vec<_>>>()?;
    analyze_session(&Session::of(logs, options.skip)?, options)
}

/// The same of what is in memory.
pub fn analyze_session(session: &Session, options: &Options) -> Result<Analysis> {
    options.check()?;
    let mut rng = Pcg64Mcg::seed_from_u64(options.seed);
    let (look, mut runs, early) = session::at_look(session, options);
    let design = session.design;
    let mut cells = Vec::new();
    let mut of_name = Vec::new(); // index in the session, of each cell that was measured
    for (i, name) in as_planned(&session.cells, options.plan.as_ref()) {
        let rows = cells::measured(&runs, i);
        if let Some(cell) = cells::cell(name, &rows, options.level, options.resamples, &mut rng) {
            cells.push(cell);
            of_name.push(i);
        }
    }
    if cells.is_empty() {
        return Err(err!(Format, "no token was measured outside of the washout"));
    }
    // from here on rows count cells as the analysis does
    for row in runs.iter_mut().flat_map(|run| &mut run.rows) {
        row.cell = row.cell.and_then(|cell| of_name.iter().position(|&of| of == cell));
    }
    let blocks = if design == Design::Blocks { blocks::blocks(&runs) } else { Vec::new() };
    let mut comparisons = Vec::new();
    for (a, b) in which(&cells, options.baseline.as_deref())? {
        comparisons.push(compare(&cells, (a, b), &blocks, options, &mut rng));
    }
    decide(&mut comparisons, &cells, options, look, design, early);
    let drift = tells::drift(&runs, &blocks, &cells);
    let mut analysis = Analysis {
        design,
        level: options.level,
        look,
        runs: runs.iter().map(|run| (run.name.clone(), log::tokens(&run.rows))).collect(),
        cells,
        comparisons,
        blocks,
        drift,
        tells: Vec::new(),
    };
    analysis.tells = tells::tells(&analysis, &runs, session, options);
    Ok(analysis)
}

/// The cells, with their numbers: in the plan's order, else as they first appear.
fn as_planned<'a>(names: &'a [String], plan: Option<&Schedule>) -> Vec<(usize, &'a String)> {
    let mut cells: Vec<(usize, &String)> = names.iter().enumerate().collect();
    if let Some(plan) = plan {
        cells.sort_by_key(|(_, name)| plan.cells.iter().position(|c| c.name == **name).unwrap_or(usize::MAX));
    }
    cells
}

/// The pairs of cells that are asked about.
fn which(cells: &[Cell], baseline: Option<&str>) -> Result<Vec<(usize, usize)>> {
    let n = cells.len();
    let Some(name) = baseline else {
        return Ok((0..n).flat_map(|a| (a + 1..n).map(move |b| (a, b))).collect());
    };
    let names = || cells.iter().map(|c| c.name.as_str()).collect::<Vec<_>>().join(", ");
    let a = cells.iter().position(|c| c.name == name);
    let a = a.ok_or_else(|| err!(Argument, "no cell \"{name}\" was measured: there are {}", names()))?;
    Ok((0..n).filter(|&b| b != a).map(|b| (a, b)).collect())
}

fn compare(
    cells: &[Cell],
    (a, b): (usize, usize),
    blocks: &[Block],
    options: &Options,
    rng: &mut Pcg64Mcg,
) -> Comparison {
    let tokens = log_ratio_of_means(&cells[a].means, &cells[b].means, options.level);
    let pairs = blocks::pairs(blocks, a, b);
    let settings = |name: &str| {
        let cell = options.plan.as_ref()?.cells.iter().find(|c| c.name == name)?;
        Some(crate::hook::schedule::Cell { name: String::new(), line: 0, ..cell.clone() })
    };
    let (one, other) = (settings(&cells[a].name), settings(&cells[b].name));
    Comparison {
        a,
        b,
        paired: paired::paired(&pairs, 1.0 - options.level, options.resamples, rng),
        tokens,
        randomisation: permutation::randomisation(&pairs, options.resamples, rng),
        p: 1.0,
        level: 1.0 - options.level,
        verdict: Verdict::TooFew,
        words: String::new(),
        tokens_for_this: None,
        tokens_for_5_percent: None,
        equal: one.is_some() && one == other,
    }
}

/// A cell with fewer tokens says nothing over tokens alone.
const LEAST_TOKENS: u64 = 50;

fn decide(all: &mut [Comparison], cells: &[Cell], options: &Options, look: Number, design: Design, early: bool) {
    let alpha = 1.0 - options.level;
    let tightest = sequential::look(alpha / all.len().max(1) as f64, look.0, look.1).level;
    for c in all.iter_mut() {
        let enough = match design {
            Design::Blocks => c.paired.is_some(),
            Design::Runs => cells[c.a].tokens.min(cells[c.b].tokens) >= LEAST_TOKENS,
        };
        if enough && !early {
            c.verdict = Verdict::NotToldApart;
            c.p = c.interval().p;
            if let Some(lots) = c.randomisation.filter(|r| r.least <= tightest) {
                c.p = c.p.max(lots.p);
            }
        } else if early {
            c.verdict = Verdict::TooEarly;
        }
    }
    let ps: Vec<f64> = all.iter().map(|c| c.p).collect();
    for (c, (level, below)) in all.iter_mut().zip(verdict::holm(&ps, alpha, look)) {
        c.level = level;
        let interval = *c.interval();
        if below && c.verdict == Verdict::NotToldApart {
            c.verdict = if interval.estimate < 0.0 { Verdict::Faster } else { Verdict::Slower };
        }
        c.words = verdict::words(c.verdict, &cells[c.a].name, &cells[c.b].name, &interval);
        let tokens = cells[c.a].tokens + cells[c.b].tokens;
        let error = match &c.paired {
            Some(p) => p.error,
            None => (interval.high - interval.low) / (2.0 * verdict::z(1.0 - alpha / 2.0)),
        };
        if matches!(c.verdict, Verdict::NotToldApart | Verdict::Faster | Verdict::Slower) {
            c.tokens_for_this = verdict::tokens_for(interval.estimate, tokens, error, level);
            c.tokens_for_5_percent = verdict::tokens_for(1.05_f64.ln(), tokens, error, level);
        }
    }
}
