//! `hotset doctor`: what to expect of a model on a machine, and what to set, before anything is loaded.
//!
//! Shape and memory come from the hook's own plan, the drive from `drive` (or from the command line), misses from a trace, replayed
//! by `replay`; without a trace from a made one. What is measured, replayed, made or published is called so.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use hotset::drive::sweep::{Advice, Plan as IoPlan};
use hotset::drive::{Drive, Way};
use hotset::hook::{self, Config};
use hotset::model::{Model, Pack};
use hotset::replay::{DropSettings, Estimate, Routed, Weights, drop_loop};
use hotset::route::Moce;
use hotset::store::{CHUNK_BYTES, IoMode, IoReport, ReadBy, memory_bytes};
use hotset::trace::Trace;
use hotset::trace::synth::{Synth, SynthParams};
use hotset::{Error, ErrorKind};
use indicatif::ProgressBar;
use serde_json::{Value, json};

use crate::drop_replay::routed_of;
use crate::io::{alignment, measure};
use crate::output;
use crate::trace::files::usage;

/// Say what to expect of a model on this machine, and what to set, before anything is loaded
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  hotset doctor model.gguf                                   this machine's memory and drive; reads for some 3 seconds
  hotset doctor model.gguf --memory 16G --read-gbps 6.8      another machine: nothing is measured
  hotset doctor model.gguf --trace run.q4rt --compute-ms 12  with the misses of a recorded run
  hotset doctor model.gguf --pack model.hotset --json

How the speeds are made: a token reads misses x bytes of an expert. Taking turns it takes reads / bandwidth + compute, overlapped perfectly the
longer of the two; a run comes between. Bandwidth is what two misses of a layer alone get (turns), or what the drive gives with all lanes busy (overlapped).
Misses are replayed, in as many slots as the memory holds, on --trace; without it on a made trace of the model's shape, whose statistics were
fitted to another model (512 experts, k 10): then they are a guess, and called so. Compute is not measured: --compute-ms.")]
pub struct Args {
    /// A GGUF file, or any shard of a split one
    model: PathBuf,
    /// Packed experts of this model
    #[arg(long, value_name = "FILE")]
    pack: Option<PathBuf>,
    /// Memory of the machine (K, M, G: powers of 1024) [default: this one's]; half of it, less the dense weights, is for experts
    #[arg(long, value_name = "BYTES", value_parser = output::parse_bytes)]
    memory: Option<u64>,
    /// Slots of each layer, whatever the memory
    #[arg(long, value_name = "N")]
    slots: Option<u32>,
    /// The drive's bandwidth; nothing is measured then
    #[arg(long, value_name = "GB/S")]
    read_gbps: Option<f64>,
    /// A token's time with everything resident; the default is the target's
    #[arg(long, value_name = "MS", default_value_t = 12.0)]
    compute_ms: f64,
    /// A run of this model to take misses from: Q4RT, or a route_trace v1 CSV
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Experts that a token uses [default: the file's]
    #[arg(long, value_name = "K")]
    k: Option<u32>,
    /// MoCE: bonus of resident experts in the rows that have it
    #[arg(long, value_name = "LAMBDA", default_value_t = 0.12)]
    lambda: f64,
    /// Cold drop: F in the rows that have it
    #[arg(long, value_name = "F", default_value_t = 0.75)]
    drop: f64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What was published for the target's shape, misses a token with 113 slots.
const PUBLISHED_SLOTS: u32 = 113;
const PUBLISHED: [(&str, f64); 2] = [("lru", 84.61), ("lru, lambda .12", 63.21)];

/// Tokens of the made trace, and those of them that only fill the cache.
const MADE_TOKENS: u32 = 2048;
const MADE_WARMUP: usize = 512;

/// One row of the prediction.
struct Row {
    name: String,
    source: &'static str,
    misses_per_token: f64,
    mb_per_token: f64,
    /// Of the routing weight; None where nobody knows.
    mass_lost: Option<f64>,
    turns_tok_s: f64,
    overlapped_tok_s: f64,
}

/// The drive, as measured or as told.
struct Bandwidth {
    measured: Option<Advice>,
    doubtful: bool,
    turns_gb_per_s: f64,
    overlapped_gb_per_s: f64,
}

pub fn run(args: &Args) -> Result<()> {
    args.check()?;
    let model = Model::open(&args.model)?;
    let (config, memory) = args.config(&model)?;
    let pack = hook::config::open_pack(&model, &config)?;
    let mut plan = hook::config::plan_with(&model, &config, pack.as_ref())?;
    plan.memory_bytes = memory;
    let drive = Drive { model: &model, pack: pack.as_ref(), seed: 1 };
    let io = drive.report(Way { lanes: 1, chunk_bytes: 0, io: IoMode::Direct, by: ReadBy::Ring })?;
    let bandwidth = args.bandwidth(&drive)?;
    let rows = args.rows(&model, &plan, pack.as_ref(), &bandwidth)?;
    let found = Found { args, model: &model, pack: pack.as_ref(), plan, io, bandwidth, rows };
    if args.json { output::print_json(&found.json()) } else { output::print(&found.text()) }
}

impl Args {
    fn check(&self) -> Result<()> {
        for (name, value) in [("--read-gbps", self.read_gbps), ("--compute-ms", Some(self.compute_ms))] {
            if let Some(v) = value.filter(|v| !(v.is_finite() && *v > 0.0)) {
                return Err(usage(format!("{name} {v}: a number above 0 is wanted")));
            }
        }
        for (name, v) in [("--lambda", self.lambda), ("--drop", self.drop)] {
            if !(v.is_finite() && v >= 0.0) {
                return Err(usage(format!("{name} {v}: a number of 0 or more is wanted")));
            }
        }
        Ok(())
    }

    /// The settings that a run would have, and the memory they are made for.
    fn config(&self, model: &Model) -> Result<(Config, u64)> {
        let memory = self.memory.unwrap_or_else(memory_bytes);
        let dense = model.dense_bytes();
        let cache_bytes = hook::config::default_cache_bytes(memory, dense);
        if cache_bytes == 0 && self.slots.is_none() {
            let half = memory / 2;
            let what = format!(
                "{memory} bytes of memory: half of it, {half}, does not hold the {dense} bytes of dense weights"
            );
            return Err(Error::new(ErrorKind::Budget, what).into());
        }
        let config = Config {
            cache_bytes,
            slots: self.slots.unwrap_or(0),
            k: self.k.unwrap_or(0),
            pack: self.pack.clone(),
            ..Config::default()
        };
        Ok((config, memory))
    }

    fn bandwidth(&self, drive: &Drive) -> Result<Bandwidth> {
        if let Some(told) = self.read_gbps {
            return Ok(Bandwidth { measured: None, doubtful: false, turns_gb_per_s: told, overlapped_gb_per_s: told });
        }
        drive.forget().ok();
        let plan = IoPlan {
            depths: vec![1, 4, 8],
            chunks: vec![0, CHUNK_BYTES],
            modes: vec![IoMode::Direct],
            by: ReadBy::Ring,
            seconds: 0.3,
        };
        let sweep = measure(&plan, drive)?;
        let advice = sweep.advice().context("nothing was measured")?;
        let two = sweep.misses.iter().find(|m| m.n == 2 && m.way.chunk_bytes == advice.chunk_bytes);
        Ok(Bandwidth {
            measured: Some(advice),
            doubtful: sweep.doubtful(),
            turns_gb_per_s: two.map_or(advice.one_miss_gb_per_s, |m| m.measured.gb_per_s()),
            overlapped_gb_per_s: advice.gb_per_s,
        })
    }

    fn rows(&self, model: &Model, plan: &hook::Plan, pack: Option<&Pack>, bandwidth: &Bandwidth) -> Result<Vec<Row>> {
        let (routed, source, warmup) = match &self.trace {
            Some(path) => (self.recorded(path, plan)?, "replayed", 64),
            None => (made(plan)?, "made trace", MADE_WARMUP),
        };
        // what a miss of each layer reads
        let bytes: Vec<u64> = match pack {
            Some(p) => p.layers.iter().map(|l| l.stride_bytes).collect(),
            None => model.experts.layers.iter().map(|l| l.expert_bytes()).collect(),
        };
        let estimate = |name: String, source, misses: f64, mb: f64, mass_lost| {
            let e = Estimate { compute_ms: self.compute_ms, ..Estimate::default() };
            Row {
                name,
                source,
                misses_per_token: misses,
                mb_per_token: mb,
                mass_lost,
                turns_tok_s: e.tokens_per_second(mb, bandwidth.turns_gb_per_s),
                overlapped_tok_s: e.tokens_per_second_overlapped(mb, bandwidth.overlapped_gb_per_s),
            }
        };
        let (lambda, f) = (self.lambda, self.drop);
        let arms = [(0.0, 0.0), (lambda, 0.0), (0.0, f), (lambda, f)];
        let mut rows = Vec::new();
        for (lambda, threshold) in arms {
            let settings = DropSettings {
                capacity: plan.slots as usize,
                k: plan.k as usize,
                moce: Moce { lambda, ..Moce::default() },
                threshold,
                weights: Weights::OfScores,
                warmup,
                ..DropSettings::default()
            };
            let (all, _) = drop_loop(&routed, &settings, &[])?;
            let tokens = (all.rows as f64 / routed.layers.len().max(1) as f64).max(1.0);
            let read: f64 = all.misses_per_layer.iter().zip(&bytes).map(|(&n, &b)| n as f64 * b as f64).sum();
            let name = match (lambda > 0.0, threshold > 0.0) {
                (false, false) => "lru".to_owned(),
                (true, false) => format!("lru, lambda {lambda}"),
                (false, true) => format!("lru, drop {threshold}"),
                (true, true) => format!("lru, lambda {lambda}, drop {threshold}"),
            };
            rows.push(estimate(name, source, all.misses as f64 / tokens, read / 1e6 / tokens, Some(all.mass_lost())));
        }
        let target = (plan.n_layers, plan.n_experts, plan.k, plan.slots) == (48, 512, 10, PUBLISHED_SLOTS);
        if target {
            let each = bytes.iter().sum::<u64>() as f64 / bytes.len() as f64;
            let published = PUBLISHED
                .iter()
                .map(|(name, misses)| estimate((*name).to_owned(), "published", *misses, misses * each / 1e6, None));
            rows.extend(published);
        }
        Ok(rows)
    }

    /// A run's routing; refused where it is of another shape.
    fn recorded(&self, path: &Path, plan: &hook::Plan) -> Result<Routed> {
        let routed = routed_of(path, self.k.map(|k| k as usize))?;
        let (layers, n) = (routed.layers.len(), routed.n_experts);
        if layers != plan.n_layers as usize || n > plan.n_experts as usize || routed.k < plan.k as usize {
            return Err(usage(format!(
                "{}: {layers} layers of {n} experts, k {}; the model has {} of {}, k {}: the trace is of another model",
                path.display(),
                routed.k,
                plan.n_layers,
                plan.n_experts,
                plan.k
            )));
        }
        Ok(routed)
    }
}

/// A made trace of the model's shape, with the statistics that were fitted to the target.
fn made(plan: &hook::Plan) -> Result<Routed> {
    let (Ok(layers), Ok(experts), Ok(k)) =
        (u16::try_from(plan.n_layers), u16::try_from(plan.n_experts), u16::try_from(plan.k))
    else {
        return Err(usage(format!("{} layers of {} experts: no trace holds them", plan.n_layers, plan.n_experts)));
    };
    let top_m = 64.max(k).min(experts);
    let params = SynthParams { layers, experts, k, top_m, tokens: MADE_TOKENS, ..SynthParams::qwen4exp() };
    let bytes = 16 + u64::from(params.tokens) * params.header().token_bytes();
    let bar = output::late_bar(bytes, "{wide_bar} {pos} of {len} bytes of a made trace");
    let mut made = Watched { bytes: Vec::with_capacity(bytes as usize), bar: &bar };
    let written = Synth::new(params)?.write(&mut made);
    bar.finish_and_clear();
    written?;
    Ok(Routed::from_trace(&Trace::from_bytes(made.bytes)?, None, Some(usize::from(k)))?)
}

/// What is written is kept, and moves a bar.
struct Watched<'a> {
    bytes: Vec<u8>,
    bar: &'a ProgressBar,
}

impl Write for Watched<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        output::advance(self.bar, self.bytes.len() as u64);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// All that is to be said.
struct Found<'a> {
    args: &'a Args,
    model: &'a Model,
    pack: Option<&'a Pack>,
    plan: hook::Plan,
    io: IoReport,
    bandwidth: Bandwidth,
    rows: Vec<Row>,
}

impl Found<'_> {
    /// Lanes and chunk to set.
    fn lanes_and_chunk(&self) -> (usize, u64) {
        let measured = self.bandwidth.measured;
        measured.map_or((Config::default().lanes, CHUNK_BYTES), |a| (a.lanes, a.chunk_bytes))
    }

    fn env(&self) -> Vec<String> {
        let (lanes, chunk) = self.lanes_and_chunk();
        let mut lines = vec![
            format!("HOTSET_SLOTS={}", self.plan.slots),
            format!("HOTSET_LANES={lanes}"),
            format!("HOTSET_CHUNK={chunk}"),
        ];
        lines.extend(self.pack.map(|p| format!("HOTSET_PACK={}", p.path.display())));
        lines
    }

    fn params(&self) -> Vec<String> {
        let (lanes, chunk) = self.lanes_and_chunk();
        let mut lines = vec![
            format!("p.slots = {};", self.plan.slots),
            format!("p.lanes = {lanes};"),
            format!("p.chunk_bytes = {chunk};"),
        ];
        lines.extend(self.pack.map(|p| format!("p.pack = {:?};", p.path.display().to_string())));
        lines
    }

    fn text(&self) -> String {
        let (p, layers) = (&self.plan, &self.model.experts.layers);
        let expert = layers.iter().map(|l| l.expert_bytes()).max().unwrap_or(0);
        let packed = match self.pack {
            Some(pack) => format!("{} ({})", pack.path.display(), output::bytes(pack.file_bytes)),
            None => "none; 'hotset pack' makes one: each expert one aligned piece".to_owned(),
        };
        let drive = match &self.bandwidth.measured {
            None => format!("{} GB/s, as told", self.bandwidth.turns_gb_per_s),
            Some(a) => format!(
                "{:.2} GB/s with {} lanes busy, {:.2} for two misses alone{}",
                a.gb_per_s,
                a.lanes,
                self.bandwidth.turns_gb_per_s,
                if self.bandwidth.doubtful { "; NOT SURE that it is the drive, see 'hotset io'" } else { "" }
            ),
        };
        let mut text = output::facts(&[
            (
                "model",
                format!(
                    "{}, {}",
                    self.args.model.display(),
                    self.model.architecture().unwrap_or("no architecture named")
                ),
            ),
            (
                "experts",
                format!(
                    "{} layers of {}, {} used a token, {} each",
                    p.n_layers,
                    p.n_experts,
                    p.k,
                    output::bytes(expert)
                ),
            ),
            (
                "on disk",
                format!(
                    "{} of experts, {} of dense weights",
                    output::bytes(p.expert_bytes),
                    output::bytes(p.dense_bytes)
                ),
            ),
            ("memory", format!("{}, half of it less the dense weights for experts", output::bytes(p.memory_bytes))),
            (
                "slots",
                format!(
                    "{} of {} a layer: {} (a slot in every layer {}), {} of read staging",
                    p.slots,
                    p.n_experts,
                    output::bytes(p.cache_bytes),
                    output::bytes(p.slot_bytes),
                    output::bytes(p.staging_bytes)
                ),
            ),
            ("reads", alignment(&self.io)),
            ("pack", packed),
            ("drive", drive),
            ("compute", format!("{} ms a token, as told (--compute-ms)", self.args.compute_ms)),
        ]);
        let heading =
            ["predicted", "misses are", "misses/token", "MB/token", "weight lost", "tok/s in turns", "overlapped"];
        let rows: Vec<Vec<String>> = self
            .rows
            .iter()
            .map(|r| {
                vec![
                    r.name.clone(),
                    r.source.to_owned(),
                    format!("{:.2}", r.misses_per_token),
                    format!("{:.2}", r.mb_per_token),
                    r.mass_lost.map_or_else(String::new, |m| format!("{:.2} %", m * 100.0)),
                    format!("{:.1}", r.turns_tok_s),
                    format!("{:.1}", r.overlapped_tok_s),
                ]
            })
            .collect();
        text += &format!("\n{}", output::table(&heading, &rows));
        text += "tok/s in turns = 1 / (MB/token / bandwidth + compute); overlapped = 1 / max(MB/token / bandwidth, compute); all resident: ";
        text += &format!("{:.1}\n", 1000.0 / self.args.compute_ms);
        if self.args.trace.is_none() {
            text += "misses of a made trace are a guess: its statistics were fitted to another model. Record one (HOTSET_TRACE) and give it by --trace\n";
        }
        text += &format!(
            "\nset in the environment, for a program that calls hotset_params_from_env:\n  {}\n",
            self.env().join(" ")
        );
        text += &format!("or in struct hotset_params p:\n  {}\n", self.params().join(" "));
        text += &format!(
            "for reranking and dropping besides (they change what the model says): HOTSET_LAMBDA={} HOTSET_DROP={}\n",
            self.args.lambda, self.args.drop
        );
        text
    }

    fn json(&self) -> Value {
        let p = &self.plan;
        let (lanes, chunk) = self.lanes_and_chunk();
        let rows: Vec<Value> = self
            .rows
            .iter()
            .map(|r| {
                json!({
                    "name": r.name, "misses_are": r.source, "misses_per_token": r.misses_per_token,
                    "mb_per_token": r.mb_per_token, "mass_lost": r.mass_lost,
                    "tok_s_in_turns": r.turns_tok_s, "tok_s_overlapped": r.overlapped_tok_s,
                })
            })
            .collect();
        json!({
            "model": self.args.model,
            "architecture": self.model.architecture(),
            "n_layers": p.n_layers, "n_experts": p.n_experts, "k": p.k,
            "expert_bytes": p.expert_bytes, "dense_bytes": p.dense_bytes, "memory_bytes": p.memory_bytes,
            "slots": p.slots, "slot_bytes": p.slot_bytes, "cache_bytes": p.cache_bytes, "staging_bytes": p.staging_bytes,
            "min_bytes": p.min_bytes,
            "io": self.io.in_effect.name(), "io_reason": self.io.reason, "read_by": self.io.by.name(), "read_by_reason": self.io.by_reason, "offset_align": self.io.offset_align,
            "mem_align": self.io.mem_align, "straight_bytes": self.io.straight_bytes, "bounced_bytes": self.io.bounced_bytes,
            "pack": self.pack.map(|p| &p.path),
            "drive_measured": self.bandwidth.measured.is_some(),
            "drive_doubtful": self.bandwidth.doubtful,
            "turns_gb_per_s": self.bandwidth.turns_gb_per_s, "overlapped_gb_per_s": self.bandwidth.overlapped_gb_per_s,
            "compute_ms": self.args.compute_ms,
            "formulas": {
                "tok_s_in_turns": "1 / (mb_per_token / (turns_gb_per_s * 1000) + compute_ms / 1000)",
                "tok_s_overlapped": "1 / max(mb_per_token / (overlapped_gb_per_s * 1000), compute_ms / 1000)",
            },
            "predicted": rows,
            "settings": { "slots": p.slots, "lanes": lanes, "chunk_bytes": chunk, "pack": self.pack.map(|p| &p.path) },
            "environment": self.env(),
        })
    }
}
