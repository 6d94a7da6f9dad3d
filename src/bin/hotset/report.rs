//! `hotset report`: one HTML file of runs. Here files are read and settings chosen; what is computed is `analyze`'s and `replay`'s, what the page is like is
//! `hotset::report`'s.

use std::fs::File;
use std::io::{BufRead, BufReader, Cursor, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use hotset::cache::Policy;
use hotset::replay::drop_front::{self, DropRow};
use hotset::replay::{DropSettings, Replay, Routed, Settings, drop_loop_by_row, observed_passes};
use hotset::report::run::{About, CacheViews, PolicyRow, RunReport, Steps, Times, page};
use hotset::route::{Delta, Moce};
use hotset::trace::import::{self, ImportOptions};
use hotset::trace::{Phase, Routing, Sidecar, Trace};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use crate::drop_replay::front_rows;
use crate::output;
use crate::replay::policies;
use crate::sweep;
use crate::trace::files::{NewFile, usage};

/// Make one HTML page of recorded runs: hits and misses step by step, hit curves, policies, what dropping would buy, time
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  hotset report run.q4rt -o report.html                     with the run's own slots and settings, if a sidecar has them
  hotset report run.q4rt run.jsonl -o report.html           with its metrics log: time per token
  hotset report qwen.route.csv gemma.route.csv -o report.html --cache-cap 16,32,48
  hotset report run.q4rt -o report.html --f 0,0.5,1 --lambda 0,0.12 --policies lru,lfu,belady_min
  hotset report run.q4rt --json | jq .runs[0].drop_fronts

Inputs are told apart by what is in them: Q4RT traces (with their sidecars), route_trace v1 CSV, JSONL of ids, and metrics logs
(.jsonl, .csv), each of which belongs to the trace before it. The page has everything in it and asks the network for nothing.

Hits and misses are those that a run recorded; else the run is replayed: with the settings that its sidecar tells of, or with LRU in
the fewest slots of --cache-cap. Policies are replayed as by 'hotset replay', fronts as by 'hotset drop-replay'.")]
pub struct Args {
    /// Traces, and metrics logs of the trace before
    #[arg(required = true, value_name = "TRACE|RUN")]
    inputs: Vec<PathBuf>,
    /// The page; an older one is replaced
    #[arg(short, long, value_name = "FILE", required_unless_present = "json")]
    output: Option<PathBuf>,
    /// The run's metrics log (with one trace)
    #[arg(long, value_name = "FILE")]
    metrics: Option<PathBuf>,
    /// Slots of each layer that policies and fronts are shown for [default: the run's, else an eighth, a quarter and half of the experts]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    cache_cap: Vec<usize>,
    /// Experts that a token uses [default: the sidecar's]
    #[arg(long, value_name = "K")]
    k: Option<usize>,
    /// Policies to compare
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    policies: Vec<String>,
    /// Thresholds of the fronts; 0 is always among them
    #[arg(long, value_name = "F", value_delimiter = ',', default_values_t = [0.25, 0.5, 0.75, 1.0])]
    f: Vec<f64>,
    /// Bonuses of resident experts, of the fronts
    #[arg(long, value_name = "LAMBDA", value_delimiter = ',', default_values_t = [0.0, 0.06, 0.12], allow_negative_numbers = true)]
    lambda: Vec<f64>,
    /// Tokens that policies and fronts replay before counting begins
    #[arg(long, value_name = "N", default_value_t = 0)]
    warmup: usize,
    /// The first step that is shown expert by expert
    #[arg(long, value_name = "STEP", default_value_t = 0)]
    from_step: usize,
    /// Bytes of one expert, where the run does not say it
    #[arg(long, value_name = "BYTES", default_value_t = 1_382_400)]
    expert_bytes: u64,
    /// Print the data behind the page as one JSON object
    #[arg(long)]
    json: bool,
}

/// Layers that are shown: they are rows of pictures. Real models have some hundred.
const MAX_LAYERS: usize = 512;

/// What an input is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Trace,
    RouteCsv,
    Jsonl,
    Metrics,
}

pub fn run(args: &Args) -> Result<()> {
    let mut runs: Vec<RunReport> = Vec::new();
    let mut kinds = Vec::new();
    for path in &args.inputs {
        kinds.push((path, kind(path).with_context(|| path.display().to_string())?));
    }
    let traces = kinds.iter().filter(|(_, kind)| *kind != Kind::Metrics).count();
    if args.metrics.is_some() && traces != 1 {
        return Err(usage(format!("--metrics is one run's: {traces} traces given")));
    }
    let logs = args.metrics.iter().map(|path| (path, Kind::Metrics));
    for (path, kind) in kinds.into_iter().chain(logs) {
        if kind != Kind::Metrics {
            runs.push(args.one(path, kind).with_context(|| path.display().to_string())?);
            continue;
        }
        let times = times(path).with_context(|| path.display().to_string())?;
        match runs.last_mut().filter(|run| run.times.is_none()) {
            Some(run) => run.times = Some(times),
            None => runs.push(RunReport { name: file_name(path), times: Some(times), ..RunReport::default() }),
        }
    }
    if let Some(path) = &args.output {
        let html = page(&runs)?.html();
        let mut new = NewFile::create(path)?;
        new.write(html.as_bytes())?;
        new.finish()?;
        if !args.json {
            let size = output::bytes(html.len() as u64);
            output::print(&format!("{}: {} of {}\n", path.display(), size, plural(runs.len())))?;
        }
    }
    if args.json {
        output::print_json(&json!({ "runs": runs.iter().map(RunReport::json).collect::<Vec<_>>() }))?;
    }
    Ok(())
}

fn plural(runs: usize) -> String {
    if runs == 1 { "1 run".into() } else { format!("{runs} runs") }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// By the first line that says something; where none does, by the name, and whoever reads it says what is wrong.
fn kind(path: &Path) -> Result<Kind> {
    let mut input = BufReader::new(File::open(path)?).take(64 << 10);
    let mut line = Vec::new();
    while input.read_until(b'\n', &mut line)? > 0 && line.iter().all(u8::is_ascii_whitespace) {
        line.clear();
    }
    let text = String::from_utf8_lossy(&line);
    let has = |name: &str| text.contains(&format!("\"{name}\""));
    Ok(match path.extension().and_then(|e| e.to_str()) {
        _ if line.starts_with(b"Q4RT") => Kind::Trace,
        _ if text.starts_with('{') && has("layers") => Kind::Jsonl,
        _ if text.starts_with('{') && has("phase") && has("misses") => Kind::Metrics,
        _ if text.starts_with('#') || text.starts_with("turn,") => Kind::RouteCsv,
        _ if text.contains("phase,") && text.contains("misses,") => Kind::Metrics,
        Some("csv") => Kind::RouteCsv,
        Some("jsonl") => Kind::Jsonl,
        _ => Kind::Trace,
    })
}

fn times(path: &Path) -> Result<Times> {
    let mut times = Times::new(file_name(path));
    observed_passes(&mut BufReader::new(File::open(path)?), |pass, time| times.take(pass, time))?;
    Ok(times)
}

/// A run, read.
struct Input {
    format: &'static str,
    trace: Trace,
    sidecar: Option<Sidecar>,
    routing: Routing,
    routed: Routed,
}

impl Input {
    fn open(path: &Path, kind: Kind, k: Option<usize>) -> Result<Self> {
        let file = || File::open(path).map(|file| BufReader::with_capacity(1 << 20, file));
        if kind == Kind::Trace {
            let (trace, sidecar) = (Trace::open(path)?, Sidecar::read_beside(path)?);
            let routing = Routing::of_trace(&trace, sidecar.as_ref(), k)?;
            let routed = Routed::from_trace(&trace, sidecar.as_ref(), Some(routing.k))?;
            return Ok(Self { format: "Q4RT trace", trace, sidecar, routing, routed });
        }
        let (mut made, options) = (Cursor::new(Vec::new()), ImportOptions::default());
        let sidecar = match kind {
            Kind::RouteCsv => import::route_csv(&mut file()?, &mut made, options)?,
            _ => import::jsonl(&mut file()?, &mut made, options)?,
        };
        let trace = Trace::from_bytes(made.into_inner())?;
        let (format, routing, routed) = match kind {
            Kind::RouteCsv => {
                let routing = import::route_csv_routing(&mut file()?, None)?;
                ("route_trace v1 CSV", routing, Routed::from_csv(&mut file()?)?)
            }
            _ => {
                let routing = Routing::of_trace(&trace, Some(&sidecar), None)?;
                let routed = Routed::from_trace(&trace, Some(&sidecar), Some(routing.k))?;
                ("JSONL of ids", routing, routed)
            }
        };
        if let Some(k) = k.filter(|k| *k != routing.k) {
            return Err(usage(format!("k {k}, the rows have {} slots", routing.k)));
        }
        Ok(Self { format, trace, sidecar: Some(sidecar), routing, routed })
    }

    /// Decode, if there is any.
    fn phase(&self) -> Phase {
        if self.routed.tokens(Phase::Decode) > 0 { Phase::Decode } else { Phase::Prefill }
    }
}

impl Args {
    fn one(&self, path: &Path, kind: Kind) -> Result<RunReport> {
        let mut input = Input::open(path, kind, self.k)?;
        input.routed.assume_expert_bytes(self.expert_bytes);
        if input.trace.n_layers() > MAX_LAYERS {
            return Err(usage(format!("{} layers: a page shows at most {MAX_LAYERS}", input.trace.n_layers())));
        }
        let about = About::of(input.format, &input.routing, input.sidecar.as_ref());
        let mut report =
            RunReport { name: file_name(path), about: Some(about), warmup: self.warmup, ..RunReport::default() };
        if input.trace.n_tokens() == 0 {
            report.notes.push("The trace has no tokens: there is nothing to show.".into());
            return Ok(report);
        }
        let health = input.trace.health();
        if health.cut {
            report.notes.push(format!(
                "The trace is cut: {} whole tokens, {} bytes behind them.",
                health.found_tokens, health.stray_bytes
            ));
        }
        let slots = self.slots(&input)?;
        report.steps = Some(self.steps(&input, slots[0], &mut report.notes)?);
        report.cache = Some(CacheViews::of(&input.routing));
        report.policies = self.policies(&input, &slots)?;
        report.fronts = self.fronts(&input, &slots, &mut report.notes)?;
        Ok(report)
    }

    /// Slots that policies and fronts are shown for, rising.
    fn slots(&self, input: &Input) -> Result<Vec<usize>> {
        let (n, k) = (input.routing.n_experts, input.routing.k);
        let mut slots = self.cache_cap.clone();
        if slots.is_empty() {
            let said = input.sidecar.iter().flat_map(|s| &s.settings).flat_map(|s| s.settings.slots.iter().max());
            slots.extend(said.map(|&slots| slots as usize).filter(|&slots| (k..=n).contains(&slots)));
        }
        if slots.is_empty() {
            slots.extend([n / 8, n / 4, n / 2].map(|slots| slots.max(k)));
        }
        if let Some(few) = slots.iter().find(|slots| **slots < k) {
            return Err(usage(format!("{few} slots: a token uses {k} experts, and all of them must fit")));
        }
        slots.sort_unstable();
        slots.dedup();
        Ok(slots)
    }

    /// What the run recorded, or a replay of it.
    fn steps(&self, input: &Input, slots: usize, notes: &mut Vec<String>) -> Result<Steps> {
        let (phase, routed) = (input.phase(), &input.routed);
        if routed.has_residency() {
            return Ok(Steps::recorded(routed, phase, self.from_step));
        }
        let own = input.sidecar.as_ref().and_then(|s| own_settings(s, routed));
        let mut source = format!("replayed with lru in {slots} slots a layer");
        let mut settings = DropSettings { capacity: slots, k: routed.k, phase, ..DropSettings::default() };
        if let Some(own) = own {
            source = format!(
                "replayed with the run's settings ({}, {} slots, lambda {}, F {})",
                own.policy.name(),
                own.capacity,
                own.moce.lambda,
                own.threshold
            );
            settings = DropSettings { k: routed.k, phase, warm: true, ..own };
        } else if self.cache_cap.is_empty() {
            notes.push(format!("Neither residency nor one setting for the whole run is recorded: {source}."));
        }
        let mut steps = Steps::new(source, phase, routed, self.from_step);
        drop_loop_by_row(routed, &settings, &[], &mut |ran| steps.take(ran))?;
        Ok(steps)
    }

    fn policies(&self, input: &Input, slots: &[usize]) -> Result<Vec<PolicyRow>> {
        let named = policies(&self.policies)?;
        let policies = if named.is_empty() { Policy::REFERENCE.to_vec() } else { named };
        let one = |&capacity: &usize| {
            let of = |&policy: &Policy| Settings {
                policy,
                capacity,
                k: input.routing.k,
                warmup: self.warmup,
                ..Settings::default()
            };
            policies.iter().map(of).collect::<Vec<_>>()
        };
        let settings: Vec<Settings> = slots.iter().flat_map(one).collect();
        let replay = Replay::new(&input.trace, None, None);
        settings.iter().try_for_each(|s| replay.check(s))?;
        let bar = progress(input.trace.n_layers() * settings.len(), "layers x settings");
        let by_setting = sweep::replay(&replay, &settings, &bar)?;
        bar.finish_and_clear();
        let of = |(s, layers): (&Settings, &Vec<_>)| PolicyRow::of(s.policy, s.capacity, layers);
        Ok(settings.iter().zip(&by_setting).map(of).collect())
    }

    fn fronts(&self, input: &Input, slots: &[usize], notes: &mut Vec<String>) -> Result<Vec<DropRow>> {
        let routed = &input.routed;
        if routed.check_weights().is_err() {
            notes.push("Neither weights nor scores are recorded, so that it is not known what is light: dropping is not shown.".into());
            return Ok(Vec::new());
        }
        let mut lambdas = self.lambda.clone();
        if routed.n_candidates <= routed.k && lambdas.iter().any(|lambda| *lambda != 0.0) {
            notes.push("A row has no more candidates than a token uses: reranking has nothing to choose from, so lambda is 0 throughout.".into());
            lambdas = vec![0.0];
        }
        let base = DropSettings { phase: input.phase(), warmup: self.warmup, ..DropSettings::default() };
        let caches = drop_front::caches(&base, slots, &[routed.k], &lambdas);
        let bar = progress(caches.len(), "closed loops");
        let rows = front_rows(routed, &caches, &self.f, || bar.inc(1))?;
        bar.finish_and_clear();
        Ok(rows)
    }
}

/// The settings of a run that kept them from its beginning to its end, if a replay can have them.
fn own_settings(sidecar: &Sidecar, routed: &Routed) -> Option<DropSettings> {
    let [only] = sidecar.settings.as_slice() else { return None };
    let s = &only.settings;
    let (&first, policy) = (s.slots.first()?, Policy::by_name(&s.policy).ok()?);
    let moce = Moce { lambda: s.lambda, top_j: s.top_j, delta: Delta::TokenTopk };
    let known = s.slots.iter().all(|slots| *slots == first)
        && (s.delta == Delta::TokenTopk.name() || s.lambda == 0.0)
        && (s.drop == 0.0 || routed.check_weights().is_ok())
        && first as usize >= routed.k
        && !policy.needs_future();
    known.then(|| DropSettings { policy, capacity: first as usize, moce, threshold: s.drop, ..DropSettings::default() })
}

fn progress(n: usize, what: &str) -> ProgressBar {
    let bar = ProgressBar::new(n as u64);
    let style = ProgressStyle::with_template(&format!("{{wide_bar}} {{pos}}/{{len}} {what}, {{eta}} left"));
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(Duration::from_millis(250));
    bar
}
