//! `hotset drop-replay`: what dropping cold experts would have saved, and cost, on a recorded run: as it was, and as a closed loop.

mod show;

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::ValueEnum;
use hotset::cache::Policy;
use hotset::replay::drop_front::{self, by_slots};
use hotset::replay::{DropRow, DropSettings, Limit, Observed, Routed, Rule, Static, Weights, drop_static, observed};
use hotset::route::Moce;
use hotset::trace::{Phase, Sidecar, Trace};
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::output;
use crate::replay::k_of;
use crate::trace::files::usage;
use show::{Answer, answer_table, loop_json, loop_table, observed_json, observed_table, static_json, static_table};

/// Replay a recorded run with cold experts dropped: static, on what it found resident, and as a closed loop
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  hotset drop-replay qwen.route.csv                             F .25 .5 .75 1 and keep-top on the recorded residency
  hotset drop-replay qwen.route.csv --f 0.6 --keep-top 4,2 --phase decode,prefill
  hotset drop-replay run.q4rt --cache-cap 32,64 --lambda 0,0.12  closed loops: the joint front of F and lambda
  hotset drop-replay run.q4rt --cache-cap 64 --k-used 10,8 --json
  hotset drop-replay run.q4rt --cache-cap 32,64 --lambda 0,0.12 --max-mass 5% --max-bytes 20M
                                                                what reads least at 5 % of the mass, what loses least at 20 MB a token

Static: each token is judged on what was resident when it ran; what is dropped changes nothing behind it. Closed loop: what is
dropped is not read, so it is not resident afterwards either. 'static' in the loop's table is what F would have dropped of the loop
with F 0 in the same row's cache, so the two columns differ by that compounding only. A '*' is on the front of its number of
slots: no other row reads no more and loses no more mass.

A CSV is route_trace v1: its weights are the run's own; its rows have k candidates, and reranking has something to choose from
only where fewer experts are used (--k-used). A trace's weights are a softmax over the scores of the chosen. The cache begins
empty (--warm: as recorded); a trace of a run that began like that, with softmax weights and that run's settings, gives its drops and misses.")]
pub struct Args {
    /// Q4RT traces, or route_trace v1 files (.csv)
    #[arg(required = true, value_name = "TRACE|CSV")]
    inputs: Vec<PathBuf>,
    /// Thresholds: a miss that weighs less than F times its token's mean weight is dropped
    #[arg(long, value_name = "F", value_delimiter = ',', default_values_t = [0.25, 0.5, 0.75, 1.0])]
    f: Vec<f64>,
    /// Static: drop all but the heaviest so many [default: from k - 1 to 1]
    #[arg(long, value_name = "J", value_delimiter = ',')]
    keep_top: Vec<usize>,
    /// Where dropping takes part, and what is counted
    #[arg(long, value_enum, value_delimiter = ',', default_value = "decode")]
    phase: Vec<PhaseName>,
    /// Closed loops with so many slots of each layer
    #[arg(long, value_name = "N", value_delimiter = ',')]
    cache_cap: Vec<usize>,
    /// Closed loops with this bonus of resident experts, as a share of z[0] - z[k-1]
    #[arg(long, value_name = "LAMBDA", value_delimiter = ',', default_value = "0", allow_negative_numbers = true)]
    lambda: Vec<f64>,
    /// So many of the router's own first experts have the bonus, too
    #[arg(long, value_name = "J", default_value_t = 3)]
    protect_top_j: u32,
    /// Closed loops with so many experts used by a token [default: the run's]
    #[arg(long, value_name = "K", value_delimiter = ',')]
    k_used: Vec<usize>,
    /// Experts that a trace's run used for a token [default: the sidecar's, or 10]
    #[arg(long, value_name = "K")]
    k: Option<usize>,
    /// Of the closed loops' caches
    #[arg(long, value_name = "NAME", default_value = "lru")]
    policy: String,
    /// Tokens that closed loops replay before counting begins
    #[arg(long, value_name = "N", default_value_t = 0)]
    warmup: usize,
    /// Begin closed loops with what was resident when recording began, as far as the slots hold it
    #[arg(long)]
    warm: bool,
    /// Where weights come from
    #[arg(long, value_enum, default_value = "recorded")]
    weights: WeightsName,
    /// Bytes of one expert, where the run does not say it
    #[arg(long, value_name = "BYTES", default_value_t = 1_382_400)]
    expert_bytes: u64,
    /// The run's metrics log (.csv or .jsonl): what it did itself, beside the replays (with one trace)
    #[arg(long, value_name = "FILE")]
    metrics: Option<PathBuf>,
    /// Which closed loop reads least and loses no more of the routing weight than this: 5% or 0.05
    #[arg(long, value_name = "SHARE", value_parser = share)]
    max_mass: Option<f64>,
    /// Which closed loop loses least mass and reads no more experts a token than this
    #[arg(long, value_name = "N")]
    max_reads: Option<f64>,
    /// The same with bytes a token: 20M, 1.5G (decimal), or a plain number
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    max_bytes: Option<f64>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn share(text: &str) -> Result<f64, String> {
    let share = output::parse_share(text.trim()).filter(|n| (0.0..=1.0).contains(n));
    share.ok_or_else(|| "a share wanted: 0% to 100%, or 0 to 1".into())
}

/// A number of bytes, with k, M or G for powers of 1000.
fn bytes(text: &str) -> Result<f64, String> {
    let text = text.trim();
    let units = [('k', 1e3), ('M', 1e6), ('G', 1e9)];
    let unit = units.into_iter().find_map(|(unit, of)| Some((text.strip_suffix(unit)?, of)));
    let (number, of) = unit.unwrap_or((text, 1.0));
    let bytes = number.trim().parse::<f64>().map(|n| n * of).ok().filter(|n| n.is_finite() && *n >= 0.0);
    bytes.ok_or_else(|| "a number of bytes wanted: 1500000, 1.5M, 20M".into())
}

#[derive(Clone, Copy, ValueEnum)]
enum PhaseName {
    Decode,
    Prefill,
}

#[derive(Clone, Copy, ValueEnum)]
enum WeightsName {
    /// The run's own, where they are recorded; else of the scores
    Recorded,
    /// A softmax over the scores of the chosen
    Softmax,
}

pub fn run(args: &Args) -> Result<()> {
    if args.metrics.is_some() && args.inputs.len() > 1 {
        let n = args.inputs.len();
        return Err(usage(format!("--metrics is one run's: {n} runs given")));
    }
    if !args.limits().is_empty() && args.cache_cap.is_empty() {
        let why = "--max-mass, --max-reads and --max-bytes ask among closed loops: say --cache-cap";
        return Err(usage(why.to_owned()));
    }
    args.limits().into_iter().try_for_each(Limit::check)?;
    let mut runs = Vec::new();
    for path in &args.inputs {
        let routed = args.open(path).with_context(|| path.display().to_string())?;
        for phase in &args.phase {
            let phase = match phase {
                PhaseName::Decode => Phase::Decode,
                PhaseName::Prefill => Phase::Prefill,
            };
            let run = args.one(path, &routed, phase).with_context(|| path.display().to_string())?;
            if !args.json {
                output::print(&run.0)?;
            }
            runs.push(run.1);
        }
    }
    if args.json { output::print_json(&json!({ "runs": runs })) } else { Ok(()) }
}

/// What a Q4RT trace or a route_trace v1 CSV has routed. `k` is a trace's: as the command line has it.
pub(crate) fn routed_of(path: &Path, k: Option<usize>) -> Result<Routed> {
    if path.extension().is_some_and(|e| e == "csv") {
        return Ok(Routed::from_csv(&mut BufReader::with_capacity(1 << 20, File::open(path)?))?);
    }
    let trace = Trace::open(path)?;
    Ok(Routed::from_trace(&trace, Sidecar::read_beside(path)?.as_ref(), Some(k_of(k, path)?))?)
}

/// The closed loops of these caches over the cores, each under F 0 and `fs`, with their fronts. `done` is called after each cache.
pub(crate) fn front_rows(
    routed: &Routed,
    caches: &[DropSettings],
    fs: &[f64],
    done: impl Fn() + Sync,
) -> Result<Vec<DropRow>> {
    let rows = caches.par_iter().map(|cache| {
        let rows = drop_front::rows(routed, cache, fs);
        done();
        rows
    });
    let rows: Vec<Vec<DropRow>> = rows.collect::<hotset::Result<_>>()?;
    let mut rows: Vec<DropRow> = rows.into_iter().flatten().collect();
    drop_front::mark_fronts(&mut rows);
    Ok(rows)
}

impl Args {
    fn open(&self, path: &Path) -> Result<Routed> {
        let mut routed = routed_of(path, self.k)?;
        routed.assume_expert_bytes(self.expert_bytes);
        if !routed.has_residency() && self.cache_cap.is_empty() {
            let why = "what the run found resident is not recorded: say --cache-cap for closed loops";
            return Err(usage(why.to_owned()));
        }
        Ok(routed)
    }

    fn weights(&self) -> Weights {
        match self.weights {
            WeightsName::Recorded => Weights::Recorded,
            WeightsName::Softmax => Weights::OfScores,
        }
    }

    /// All tables of one run and phase, and the same as JSON.
    fn one(&self, path: &Path, routed: &Routed, phase: Phase) -> Result<(String, Value)> {
        let (layers, n, k) = (routed.layers.len(), routed.n_experts, routed.k);
        let mut text = format!("{}: {layers} layers of {n} experts, k {k}, {}\n", path.display(), phase.as_str());
        let statics = if routed.has_residency() { self.statics(routed, phase)? } else { Vec::new() };
        if let Some((_, first)) = statics.first() {
            let Static { rows, unknown, misses, prefetched, miss_bytes, .. } = first;
            let read = output::bytes(*miss_bytes);
            text += &format!("static: {} tokens, {misses} misses, {read}", rows / layers.max(1) as u64);
            text += &if *prefetched > 0 { format!(", {prefetched} prefetched") } else { String::new() };
            text += &if *unknown > 0 { format!(", {unknown} rows with unknown weights") } else { String::new() };
            text += &format!("\n\n{}", static_table(&statics, k));
        }
        let loops = self.loops(routed, phase)?;
        if !loops.is_empty() {
            text += &format!("\nclosed loop, {}\n\n{}", self.policy, loop_table(&loops, layers));
            let most = loops.iter().map(|row| (row.all.unknown, row.all.pass_through_rows)).max().unwrap_or_default();
            if most.0 > 0 {
                text += &format!("\n{} rows have unknown weights: nothing of them is dropped\n", most.0);
            }
            if loops.iter().any(|row| row.all.pass_through_rows > 0) {
                text += "\nrows of passes whose experts the slots do not hold pass through, and are not counted (--json: how many)\n";
            }
        }
        let answers = self.answers(&loops, layers);
        if !answers.is_empty() {
            text += &format!("\n{}", answer_table(&answers, layers));
        }
        let seen = self.observed(phase)?;
        if !seen.is_empty() {
            text += &format!("\nobserved\n\n{}", observed_table(&seen, layers));
        }
        let json = json!({
            "file": path, "phase": phase.as_str(), "layers": layers, "experts": n, "k": k,
            "static": statics.iter().map(static_json).collect::<Vec<_>>(),
            "closed_loop": loops.iter().map(loop_json).collect::<Vec<_>>(),
            "best": answers.iter().map(|a| a.json(layers)).collect::<Vec<_>>(),
            "observed": seen.iter().map(|seen| observed_json(seen, layers)).collect::<Vec<_>>(),
        });
        Ok((text + "\n", json))
    }

    fn statics(&self, routed: &Routed, phase: Phase) -> Result<Vec<(Rule, Static)>> {
        let keep: Vec<usize> =
            if self.keep_top.is_empty() { (1..routed.k).rev().collect() } else { self.keep_top.clone() };
        let cold = self.f.iter().map(|&threshold| Rule::Cold { threshold });
        let rules = cold.chain(keep.into_iter().map(Rule::KeepTop));
        rules.map(|rule| Ok((rule, drop_static(routed, rule, phase, self.weights())?))).collect()
    }

    /// What the run itself did in a phase, if its metrics log is given.
    fn observed(&self, phase: Phase) -> Result<Vec<Observed>> {
        let Some(path) = &self.metrics else { return Ok(Vec::new()) };
        let name = || path.display().to_string();
        let all = observed(&mut BufReader::new(File::open(path).with_context(name)?)).with_context(name)?;
        Ok(all.into_iter().filter(|seen| seen.phase == phase).collect())
    }

    fn limits(&self) -> Vec<Limit> {
        let mass = self.max_mass.map(Limit::Mass);
        let reads = self.max_reads.map(Limit::ReadsPerToken);
        mass.into_iter().chain(reads).chain(self.max_bytes.map(Limit::BytesPerToken)).collect()
    }

    /// What is best within each limit, by limit and slots.
    fn answers<'a>(&self, loops: &'a [DropRow], layers: usize) -> Vec<Answer<'a>> {
        let limits = self.limits().into_iter();
        let of = |limit: Limit| {
            by_slots(loops).map(move |rows| Answer {
                limit,
                slots: rows[0].settings.capacity,
                best: limit.best(rows, layers),
            })
        };
        limits.flat_map(of).collect()
    }

    /// By slots, k, lambda; within these F from 0.
    fn loops(&self, routed: &Routed, phase: Phase) -> Result<Vec<DropRow>> {
        let policy = Policy::by_name(&self.policy)?;
        let ks = if self.k_used.is_empty() { vec![routed.k] } else { self.k_used.clone() };
        let base = DropSettings {
            policy,
            moce: Moce { top_j: self.protect_top_j, ..Moce::default() },
            weights: self.weights(),
            phase,
            warmup: self.warmup,
            warm: self.warm,
            ..DropSettings::default()
        };
        let caches = drop_front::caches(&base, &self.cache_cap, &ks, &self.lambda);
        front_rows(routed, &caches, &self.f, || ())
    }
}
