//! An analysis as text, and the flags that all who analyse share.

use std::path::PathBuf;

use anyhow::Result;
use hotset::ab::cells::Cell;
use hotset::ab::log::{DROPPED, HITS, MAJOR_FAULTS, MASS_LOST, MISSES, READ_BYTES, SWAPPED};
use hotset::ab::verdict::{Verdict, digits, p_value};
use hotset::ab::{self, Analysis, Comparison, Design, Options};
use hotset::hook::Schedule;

use crate::output;
use crate::trace::files::usage;

/// What is analysed, and how.
#[derive(clap::Args)]
pub struct Logs {
    /// Metrics logs of one experiment: of runs under a schedule, or of one run a cell
    #[arg(required = true, value_name = "LOG")]
    logs: Vec<PathBuf>,
    /// The schedule that was run: planned looks, blocks that are missing, cells with the same settings
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    /// This is the Ith of N planned looks [default: as the plan says]
    #[arg(long, value_name = "I/N")]
    look: Option<String>,
    /// Compare all cells with this one only: fewer pairs, so each of them may be told apart sooner
    #[arg(long, value_name = "CELL")]
    baseline: Option<String>,
    /// Of every interval; 1 - LEVEL is the chance of a false alarm among all pairs
    #[arg(long, value_name = "LEVEL", default_value_t = 0.95)]
    level: f64,
    /// Tokens left out at the beginning of a run without a schedule
    #[arg(long, value_name = "N", default_value_t = 50)]
    skip: usize,
    /// Resamples of each bootstrap
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    resamples: usize,
    /// Of the resampling
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,
}

impl Logs {
    pub fn analyze(&self) -> Result<Analysis> {
        let look = self.look.as_deref().map(|text| {
            let parts = text.split_once('/').and_then(|(i, n)| Some((i.trim().parse().ok()?, n.trim().parse().ok()?)));
            parts.ok_or_else(|| usage(format!("--look {text}: a number of looks like 2/5 wanted")))
        });
        let plan = self.plan.as_deref().map(Schedule::load).transpose()?;
        let (level, resamples, seed, skip) = (self.level, self.resamples, self.seed, self.skip);
        let options =
            Options { level, resamples, seed, skip, baseline: self.baseline.clone(), plan, look: look.transpose()? };
        Ok(ab::analyze(&self.logs, &options)?)
    }
}

/// Cells, pairs of them, verdicts, and what else happened.
pub fn text(analysis: &Analysis) -> String {
    let mut text = cells(&analysis.cells);
    if !analysis.comparisons.is_empty() {
        text += "\n";
        text += &comparisons(analysis);
        text += "\n";
    }
    for c in &analysis.comparisons {
        text += &format!("{}\n", sentence(c));
    }
    text += &drift(analysis);
    for tell in &analysis.tells {
        text += &format!("note: {}\n", tell.words);
    }
    text
}

/// Columns that no cell has are left out.
fn cells(cells: &[Cell]) -> String {
    let count = |c: &Cell, i: usize, of: &dyn Fn(f64) -> String| {
        if c.counts[i].is_finite() { of(c.counts[i]) } else { String::new() }
    };
    let hits = |c: &Cell| {
        let (hits, misses) = (c.counts[HITS], c.counts[MISSES]);
        if hits + misses > 0.0 { format!("{:.1} %", 100.0 * hits / (hits + misses)) } else { String::new() }
    };
    type Column<'a> = (&'a str, Box<dyn Fn(&Cell) -> String + 'a>);
    let ms = |x: f64| match x {
        x if x < 1.0 => format!("{x:.3}"),
        x if x < 10.0 => format!("{x:.2}"),
        x => format!("{x:.1}"),
    };
    let columns: Vec<Column> = vec![
        ("cell", Box::new(|c| c.name.clone())),
        ("tokens", Box::new(|c| c.tokens.to_string())),
        ("tok/s", Box::new(|c| format!("{:.2}", c.tokens_per_second()))),
        ("mean ms", Box::new(move |c| ms(c.mean_ms))),
        ("+-", Box::new(move |c| ms(c.block_half_ms))),
        ("p50", Box::new(move |c| ms(c.p50_ms))),
        ("p95", Box::new(move |c| ms(c.p95_ms))),
        ("p99", Box::new(move |c| ms(c.p99_ms))),
        ("MB/token", Box::new(move |c| count(c, READ_BYTES, &|n| format!("{:.3}", n / 1e6)))),
        ("hits", Box::new(hits)),
        ("dropped", Box::new(move |c| count(c, DROPPED, &digits))),
        ("swapped", Box::new(move |c| count(c, SWAPPED, &digits))),
        ("mass lost", Box::new(move |c| count(c, MASS_LOST, &|n| format!("{n:.3}")))),
        ("faults", Box::new(move |c| count(c, MAJOR_FAULTS, &digits))),
    ];
    let known: Vec<&Column> = columns.iter().filter(|(_, of)| cells.iter().any(|c| !of(c).is_empty())).collect();
    let heading: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
    let rows: Vec<Vec<String>> = cells.iter().map(|c| known.iter().map(|(_, of)| of(c)).collect()).collect();
    let mut text = output::table(&heading, &rows);
    let memory: Vec<String> = cells
        .iter()
        .map(|c| format!("{} {:.1} ({})", c.name, c.dependence.variance_ratio, c.dependence.block))
        .collect();
    text += "times in ms per token, counts per token; +-: interval of the mean, by blocks of tokens";
    if heading.contains(&"mass lost") {
        text += "; mass lost: shares of a layer's routing weight, summed over layers";
    }
    text.push('\n');
    text += &format!("variance of a mean over that of independent tokens (block length): {}\n", memory.join(", "));
    text
}

fn comparisons(analysis: &Analysis) -> String {
    let ratio = |x: f64| format!("{:.3}", x.exp());
    let interval = |i: &ab::bootstrap::Interval| format!("{} {}..{}", ratio(i.estimate), ratio(i.low), ratio(i.high));
    let blocks = analysis.design == Design::Blocks;
    let mut rows = Vec::new();
    for c in &analysis.comparisons {
        let (a, b) = (&analysis.cells[c.a].name, &analysis.cells[c.b].name);
        let mut row = vec![format!("{b} / {a}")];
        if blocks {
            row.push(c.paired.as_ref().map_or("-".into(), |p| interval(&p.interval)));
            row.push(c.paired.as_ref().map_or("-".into(), |p| p.n_pairs.to_string()));
        }
        row.push(interval(&c.tokens));
        if blocks {
            row.push(c.randomisation.map_or("-".into(), |r| p_value(r.p)));
        }
        row.extend([p_value(c.p), p_value(c.level)]);
        rows.push(row);
    }
    let heading: &[&str] = match blocks {
        true => &["time", "by pairs of blocks", "pairs", "by blocks of tokens", "p by lots", "p", "below"],
        false => &["time", "by blocks of tokens", "p", "below"],
    };
    let level = 100.0 * analysis.level;
    let mut text = output::table(heading, &rows);
    text += &format!("{level:.0} % intervals, each by itself; p must be below the number beside it");
    if analysis.comparisons.len() > 1 {
        text += " (Holm: one chance of a false alarm for all pairs)";
    }
    if analysis.look.1 > 1 {
        text += &format!("; look {} of {} (alpha spending, O'Brien and Fleming)", analysis.look.0, analysis.look.1);
    }
    text + "\n"
}

/// The verdict, and how many tokens more would say.
pub fn sentence(c: &Comparison) -> String {
    let thousand = |n: u64| match n {
        0..10_000 => n.to_string(),
        10_000..10_000_000 => format!("{} k", n / 1000),
        _ => format!("{} M", n / 1_000_000),
    };
    let mut text = c.words.clone();
    if c.verdict == Verdict::NotToldApart {
        let size = digits((c.interval().estimate.abs().exp() - 1.0) * 100.0);
        let this = c
            .tokens_for_this
            .map(|n| format!("a difference of this size ({size} %) would take about {} tokens", thousand(n)));
        let five = c.tokens_for_5_percent.map(|n| format!("one of 5 % about {}", thousand(n)));
        let both: Vec<String> = this.into_iter().chain(five).collect();
        if !both.is_empty() {
            text += &format!("; {}", both.join(", "));
        }
    }
    text
}

fn drift(analysis: &Analysis) -> String {
    let d = &analysis.drift;
    let mut text = String::new();
    for (what, s, percent) in [("time", &d.wall, d.wall_percent), ("compute time", &d.compute, d.compute_percent)] {
        if let Some(s) = s {
            text += &format!(
                "drift: {what} {percent:+.1} % from the first to the last third, rank correlation {:+.2} (p {})\n",
                s.rho,
                p_value(s.p)
            );
        }
    }
    if d.thermal.len() > 1 {
        let each: Vec<String> = d
            .thermal
            .iter()
            .map(|t| format!("level {} {:+.1} % ({} tokens)", t.level, 100.0 * (t.ratio - 1.0), t.tokens))
            .collect();
        text += &format!("by thermal level, time against the cell's mean: {}\n", each.join(", "));
    }
    text
}
