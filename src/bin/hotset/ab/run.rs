//! `hotset ab run`: an experiment from beginning to end. The plan goes to the engine by its environment (HOTSET_SCHEDULE, HOTSET_METRICS), so
//! any program that links the library and takes its settings from there can be the engine; what it logs is analysed when it has ended.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use hotset::ab::log::{self, Log};
use hotset::ab::session::Session;
use hotset::ab::{self, Options};
use hotset::hook::Schedule;
use serde_json::json;

use super::child::{self, Engine};
use super::plan::Design;
use super::shown;
use crate::output;

/// Run an engine under a plan, once or several times, and say which cells can be told apart
#[derive(clap::Args)]
#[command(after_help = "\
The engine is any program that links hotset and calls hotset_params_from_env: it gets HOTSET_SCHEDULE and HOTSET_METRICS, and has only to decode
as many tokens as the plan has. Every other setting (HOTSET_SLOTS, ...) is passed on as it is.

Examples:
  HOTSET_SLOTS=24 hotset ab run --plan plan.json --out exp1 -- hotset-llama decode -m model.gguf -p \"In the beginning\" -n 4000 --ignore-eos
  hotset ab run --plan plan.json --out exp2 --runs 3 -- ./my-engine model.gguf
  hotset ab run --drop 0,0.5,0.75,1 --lambda 0,0.12 --tokens 24000 --out exp3 -- ./my-engine model.gguf

Cells and order come from --plan, or are planned here (`hotset ab plan --help` says how). DIR gets the plan (plan.json), a log and the engine's output for each run (run-1.csv, run-1.txt, ...) and analysis.json; it must not hold any yet.
When this is ended the engine is, too, and what it has logged stays. Exit codes: 0 done, 1 failed, 2 the command line asks for what cannot be.")]
pub struct Args {
    /// Cells and blocks, as `hotset ab plan` writes them
    #[arg(long, value_name = "FILE", conflicts_with_all = ["tokens", "cell", "drop", "lambda", "again", "pilot"])]
    plan: Option<PathBuf>,
    /// Without --plan: decode tokens in all, washout included
    #[arg(long, value_name = "N", required_unless_present = "plan")]
    tokens: Option<u64>,
    #[command(flatten)]
    design: Design,
    /// Folder for what comes out, made anew
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Start the engine so many times, one after the other
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Compare all cells with this one only
    #[arg(long, value_name = "CELL")]
    baseline: Option<String>,
    /// Print exactly one JSON object instead
    #[arg(long)]
    json: bool,
    /// The engine and its arguments
    #[arg(last = true, required = true, value_name = "ENGINE")]
    engine: Vec<OsString>,
}

pub fn run(args: &Args) -> Result<()> {
    let mut schedule = args.schedule()?;
    schedule.ab.insert("runs".into(), json!(args.runs));
    make_folder(&args.out)?;
    // the engine may change its folder
    let out = args.out.canonicalize().with_context(|| args.out.display().to_string())?;
    let plan = out.join("plan.json");
    fs::write(&plan, schedule.to_json()).with_context(|| plan.display().to_string())?;
    child::catch_signals()?;
    let mut logs = Vec::new();
    for number in 1..=args.runs {
        logs.push(one(args, &schedule, &out, number)?);
    }
    let options = Options {
        level: args.design.level,
        baseline: args.baseline.clone(),
        plan: Some(schedule),
        ..Options::default()
    };
    let analysis = ab::analyze_session(&Session::of(logs, options.skip)?, &options)?;
    let result = out.join("analysis.json");
    fs::write(&result, format!("{:#}\n", analysis.to_json())).with_context(|| result.display().to_string())?;
    if args.json { output::print_json(&analysis.to_json()) } else { output::print(&shown::text(&analysis)) }
}

impl Args {
    fn schedule(&self) -> Result<Schedule> {
        if let Some(path) = &self.plan {
            return Ok(Schedule::load(path)?);
        }
        let (planned, _, said) = self.design.plan(self.tokens.unwrap_or(0))?;
        if !self.json {
            eprintln!("{}", said.trim_end());
        }
        Ok(planned.schedule)
    }
}

/// One run of the engine; its log.
fn one(args: &Args, schedule: &Schedule, out: &Path, number: u32) -> Result<Log> {
    let (log, output) = (out.join(format!("run-{number}.csv")), out.join(format!("run-{number}.txt")));
    let engine = Engine {
        command: &args.engine,
        env: &[("HOTSET_SCHEDULE", out.join("plan.json")), ("HOTSET_METRICS", log.clone())],
        output: &output,
        log: &log,
        tokens: schedule.blocks.last().map_or(0, |b| b.end()),
        name: format!("run {number} of {}", args.runs),
    };
    let ended = engine.run()?;
    if ended.is_none() {
        let tokens = if log.exists() { Log::load(&log).map_or(0, |l| log::tokens(&l.rows)) } else { 0 };
        bail!("{}: ended from outside after {tokens} tokens; the logs so far are in {}", engine.name, out.display());
    }
    if !log.exists() {
        bail!(
            "{}: the engine wrote no metrics log to HOTSET_METRICS ({}): it must call hotset_params_from_env, and set no log of its own",
            engine.name,
            log.display()
        );
    }
    let read = Log::load(&log)?;
    let tokens = log::tokens(&read.rows);
    if read.cells.is_empty() {
        bail!("{}: {}: no token is in a block of the plan ({tokens} decode tokens)", engine.name, log.display());
    }
    if tokens + 1 < engine.tokens {
        eprintln!("hotset: {}: the engine decoded {tokens} of the plan's {} tokens", engine.name, engine.tokens);
    }
    Ok(read)
}

/// An empty folder; an error where there is something in it.
fn make_folder(out: &Path) -> Result<()> {
    fs::create_dir_all(out).with_context(|| out.display().to_string())?;
    let mut entries = fs::read_dir(out).with_context(|| out.display().to_string())?;
    if entries.next().is_some() {
        bail!("{} is not empty: what an earlier experiment left there is kept, give another folder", out.display());
    }
    Ok(())
}
