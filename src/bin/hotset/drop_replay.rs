//! `hotset drop-replay`: what dropping cold experts would have saved, and cost, on a recorded run: as it was, and as a closed loop.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::ValueEnum;
use hotset::cache::Policy;
use hotset::replay::drop_loop::front;
use hotset::replay::{
    DropLoop, DropSettings, Observed, Routed, Rule, Static, Unchanged, Weights, drop_loop, drop_static, observed,
};
use hotset::route::Moce;
use hotset::trace::{Phase, Sidecar, Trace};
use hotset::{Error, ErrorKind};
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::output;
use crate::replay::k_of;

/// Replay a recorded run with cold experts dropped: static, on what it found resident, and as a closed loop
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  hotset drop-replay qwen.route.csv                             F .25 .5 .75 1 and keep-top on the recorded residency
  hotset drop-replay qwen.route.csv --f 0.6 --keep-top 4,2 --phase decode,prefill
  hotset drop-replay run.q4rt --cache-cap 32,64 --lambda 0,0.12  closed loops: the joint front of F and lambda
  hotset drop-replay run.q4rt --cache-cap 64 --k-used 10,8 --json

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
    /// Print one JSON object
    #[arg(long)]
    json: bool,
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

/// A closed loop, and what it is set against.
struct Row {
    settings: DropSettings,
    all: DropLoop,
    /// With F 0.
    without: DropLoop,
    unchanged: Unchanged,
    front: bool,
}

pub fn run(args: &Args) -> Result<()> {
    if args.metrics.is_some() && args.inputs.len() > 1 {
        let n = args.inputs.len();
        return Err(Error::new(ErrorKind::Argument, format!("--metrics is one run's: {n} runs given")).into());
    }
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

impl Args {
    fn open(&self, path: &Path) -> Result<Routed> {
        let mut routed = if path.extension().is_some_and(|e| e == "csv") {
            Routed::from_csv(&mut BufReader::with_capacity(1 << 20, File::open(path)?))?
        } else {
            let trace = Trace::open(path)?;
            Routed::from_trace(&trace, Sidecar::read_beside(path)?.as_ref(), Some(k_of(self.k, path)?))?
        };
        routed.assume_expert_bytes(self.expert_bytes);
        if !routed.has_residency() && self.cache_cap.is_empty() {
            let why = "what the run found resident is not recorded: say --cache-cap for closed loops";
            return Err(Error::new(ErrorKind::Argument, why).into());
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
        let seen = self.observed(phase)?;
        if !seen.is_empty() {
            text += &format!("\nobserved\n\n{}", observed_table(&seen, layers));
        }
        let json = json!({
            "file": path, "phase": phase.as_str(), "layers": layers, "experts": n, "k": k,
            "static": statics.iter().map(static_json).collect::<Vec<_>>(),
            "closed_loop": loops.iter().map(loop_json).collect::<Vec<_>>(),
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

    /// By slots, k, lambda; within these F from 0.
    fn loops(&self, routed: &Routed, phase: Phase) -> Result<Vec<Row>> {
        let policy = Policy::by_name(&self.policy)?;
        let ks = if self.k_used.is_empty() { vec![routed.k] } else { self.k_used.clone() };
        let mut caches = Vec::new();
        for &capacity in &self.cache_cap {
            for &k in &ks {
                for &lambda in &self.lambda {
                    let moce = Moce { lambda, top_j: self.protect_top_j, ..Moce::default() };
                    let weights = self.weights();
                    let (warmup, warm) = (self.warmup, self.warm);
                    caches.push(DropSettings {
                        policy,
                        capacity,
                        k,
                        moce,
                        threshold: 0.0,
                        weights,
                        phase,
                        warmup,
                        warm,
                    });
                }
            }
        }
        let cache = |settings: &DropSettings| {
            let mut fs: Vec<f64> = self.f.iter().copied().filter(|f| *f != 0.0).collect();
            fs.insert(0, 0.0);
            let (without, unchanged) = drop_loop(routed, settings, &fs)?;
            let row = |unchanged: Unchanged| {
                let settings = DropSettings { threshold: unchanged.threshold, ..settings.clone() };
                let (all, _) = drop_loop(routed, &settings, &[])?;
                Ok(Row { settings, all, without: without.clone(), unchanged, front: false })
            };
            unchanged.into_iter().map(row).collect()
        };
        let rows: Vec<Vec<Row>> = caches.par_iter().map(cache).collect::<hotset::Result<_>>()?;
        let mut rows: Vec<Row> = rows.into_iter().flatten().collect();
        for of_capacity in rows.chunk_by_mut(|a, b| a.settings.capacity == b.settings.capacity) {
            let points: Vec<(u64, f64)> = of_capacity.iter().map(|row| (row.all.bytes, row.all.mass_lost())).collect();
            of_capacity.iter_mut().zip(front(&points)).for_each(|(row, on)| row.front = on);
        }
        Ok(rows)
    }
}

fn percent(share: f64, digits: usize) -> String {
    format!("{:.digits$} %", 100.0 * share)
}

fn static_table(statics: &[(Rule, Static)], k: usize) -> String {
    let surviving: Vec<String> = (1..=k).map(|n| format!("{n} run")).collect();
    let mut heading = vec!["rule", "reads avoided", "mass dropped", "picks dropped"];
    heading.extend(surviving.iter().map(String::as_str));
    let row = |(rule, s): &(Rule, Static)| {
        let name = match rule {
            Rule::Cold { threshold } => format!("F {threshold}"),
            Rule::KeepTop(j) => format!("keep top {j}"),
        };
        let picks = s.dropped as f64 / s.picks.max(1) as f64;
        let mut row = vec![name, percent(s.avoided(), 1), percent(s.lost(), 2), percent(picks, 1)];
        row.extend(s.surviving.iter().skip(1).map(|&rows| percent(rows as f64 / s.rows.max(1) as f64, 1)));
        row
    };
    output::table(&heading, &statics.iter().map(row).collect::<Vec<_>>())
}

fn loop_table(loops: &[Row], layers: usize) -> String {
    let heading = [
        "slots",
        "k",
        "lambda",
        "F",
        "misses/token",
        "MB/token",
        "avoided",
        "static",
        "dropped/token",
        "swapped/token",
        "mass dropped",
        "swapped",
        "cut",
        "lost",
        "front",
    ];
    let row = |row: &Row| {
        let (s, all) = (&row.settings, &row.all);
        let tokens = (all.rows as f64 / layers.max(1) as f64).max(1.0);
        let known = all.rows.saturating_sub(all.unknown).max(1) as f64;
        let mass = |sum: f64| percent(sum / known, 2);
        vec![
            s.capacity.to_string(),
            s.k.to_string(),
            s.moce.lambda.to_string(),
            s.threshold.to_string(),
            format!("{:.2}", all.misses as f64 / tokens),
            format!("{:.2}", all.bytes as f64 / 1e6 / tokens),
            percent(all.avoided(&row.without), 1),
            percent(row.unchanged.avoided(), 1),
            format!("{:.2}", all.dropped as f64 / tokens),
            format!("{:.2}", all.swapped as f64 / tokens),
            mass(all.mass_dropped),
            mass(all.mass_swapped),
            mass(all.mass_cut),
            percent(all.mass_lost(), 2),
            if row.front { "*".to_owned() } else { String::new() },
        ]
    };
    output::table(&heading, &loops.iter().map(row).collect::<Vec<_>>())
}

fn observed_table(seen: &[Observed], layers: usize) -> String {
    let heading =
        ["slots", "lambda", "F", "tokens", "misses/token", "MB/token", "dropped/token", "swapped/token", "lost"];
    let row = |o: &Observed| {
        let per_token = |n: f64| format!("{:.2}", n / o.tokens.max(1) as f64);
        vec![
            o.slots.to_string(),
            o.lambda.to_string(),
            o.drop.to_string(),
            o.tokens.to_string(),
            per_token(o.misses as f64),
            per_token(o.bytes as f64 / 1e6),
            per_token(o.dropped as f64),
            per_token(o.swapped as f64),
            percent(o.mass_lost(layers), 2),
        ]
    };
    output::table(&heading, &seen.iter().map(row).collect::<Vec<_>>())
}

fn observed_json(o: &Observed, layers: usize) -> Value {
    json!({
        "slots": o.slots, "lambda": o.lambda, "f": o.drop, "tokens": o.tokens, "hits": o.hits, "misses": o.misses,
        "bytes": o.bytes, "dropped": o.dropped, "swapped": o.swapped, "pass_through_rows": o.pass_through_rows,
        "sum_mass_dropped": o.mass_dropped, "sum_mass_swapped": o.mass_swapped, "mass_lost": o.mass_lost(layers),
    })
}

fn static_json((rule, s): &(Rule, Static)) -> Value {
    let (f, keep_top) = match rule {
        Rule::Cold { threshold } => (Some(threshold), None),
        Rule::KeepTop(j) => (None, Some(j)),
    };
    json!({
        "f": f, "keep_top": keep_top, "rows": s.rows, "unknown_rows": s.unknown, "picks": s.picks, "misses": s.misses,
        "prefetched": s.prefetched, "dropped": s.dropped, "miss_bytes": s.miss_bytes, "avoided_bytes": s.avoided_bytes,
        "reads_avoided": s.avoided(), "mass_dropped": s.lost(), "surviving_rows": s.surviving,
    })
}

fn loop_json(row: &Row) -> Value {
    let (s, all) = (&row.settings, &row.all);
    json!({
        "cache_cap": s.capacity, "k": s.k, "lambda": s.moce.lambda, "f": s.threshold, "policy": s.policy.name(),
        "rows": all.rows, "pass_through_rows": all.pass_through_rows, "unknown_rows": all.unknown, "hits": all.hits,
        "misses": all.misses, "bytes": all.bytes, "dropped": all.dropped, "swapped": all.swapped,
        "sum_mass_dropped": all.mass_dropped, "sum_mass_swapped": all.mass_swapped, "sum_mass_cut": all.mass_cut,
        "mass_lost": all.mass_lost(), "reads_avoided": all.avoided(&row.without),
        "static_reads_avoided": row.unchanged.avoided(), "static_dropped": row.unchanged.dropped,
        "static_sum_mass_dropped": row.unchanged.mass_dropped, "front": row.front,
        "misses_per_layer": all.misses_per_layer, "dropped_per_layer": all.dropped_per_layer,
    })
}
