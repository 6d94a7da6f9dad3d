//! `quality`: what each setting costs. The resident, unmodified model's distributions on a text, one token a pass, against those of each
//! cell (a named setting, as in an experiment's plan): the same text, the same tokens, so that differences are paired.
//!
//! The reference runs first, and its logits are kept (`kept`); then each cell runs through the text from an empty cache, under a schedule of
//! that cell alone, and every token's two distributions are compared (`compare`).

mod compare;
mod kept;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value, json};

use crate::args::{HookArgs, Load, parse_size};
use crate::engine::{Engine, Token};
use crate::hook::Hook;
use crate::report;
use crate::text::{self, Progress, Score};
use compare::Differences;
use kept::{Kept, Rows};

#[derive(Args)]
pub struct Quality {
    #[command(flatten)]
    load: Load,
    /// The text
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// Only so many bytes from the text's beginning
    #[arg(long, value_name = "N")]
    bytes: Option<usize>,
    /// Cells: each of these F ...
    #[arg(long, value_name = "F,...", value_delimiter = ',', required_unless_present_any = ["lambdas", "plan"])]
    drops: Vec<f64>,
    /// ... with each of these lambdas
    #[arg(long, value_name = "LAMBDA,...", value_delimiter = ',')]
    lambdas: Vec<f64>,
    /// The cells of this plan instead, under their names there (so that `hotset ab report` finds them)
    #[arg(long, value_name = "PLAN", conflicts_with_all = ["drops", "lambdas", "schedule"])]
    plan: Option<PathBuf>,
    /// Level of the intervals
    #[arg(long, default_value_t = 0.95, value_parser = parse_level)]
    level: f64,
    /// Memory for the reference's logits, 4 bytes a token and word of the vocabulary; beyond it they go to a temporary file
    #[arg(long, value_name = "BYTES", default_value = "512M", value_parser = parse_size)]
    keep: u64,
    #[command(flatten)]
    hook: HookArgs,
}

/// Of the intervals.
const RESAMPLES: usize = 4000;
const SEED: u64 = 1;

pub fn run(args: &Quality) -> Result<()> {
    if args.hook.no_hook || args.hook.drop.is_some() || args.hook.lambda.is_some() || args.hook.schedule.is_some() {
        bail!("the engine alone is always the reference, and settings come as lists: --drops, --lambdas or --plan");
    }
    let text = text::read(&args.file, args.bytes)?;
    let folder = tempfile::tempdir().context("a folder for plans")?;
    let (plan, cells) = cells(args, folder.path())?;
    let hook = HookArgs { schedule: Some(plan), ..args.hook.clone() };
    // What cannot be opened is to be known before the reference has run.
    drop(Hook::open(&args.load.model, &hook, false)?);

    let mut engine = Engine::open(&args.load, &HookArgs { no_hook: true, ..HookArgs::default() })?;
    let tokens = text::tokens(&engine, &text, &args.file)?;
    let mut reference = Reference {
        kept: Kept::new(tokens.len(), engine.n_vocab(), args.keep)?,
        nll: 0.0,
        fed: 0,
        progress: Progress::new((tokens.len() * (cells.len() + 1)) as u64),
    };
    text::walk(&mut engine, &tokens, 1, false, &mut reference)?;
    let Reference { mut kept, nll, fed, mut progress } = reference;
    drop(engine);

    let mut engine = Engine::open(&args.load, &hook)?;
    let mut measured = Vec::with_capacity(cells.len());
    for (i, cell) in cells.iter().enumerate() {
        let done = (fed * (i + 1)) as u64;
        let rows = kept.rows()?;
        let mut run = CellRun { rows, name: &cell.name, done, differences: Differences::default(), progress };
        let hook = engine.hook.as_ref().context("hotset is open")?;
        hook.set_schedule(&cell.plan)?;
        hook.reset()?;
        text::walk(&mut engine, &tokens, 1, false, &mut run)?;
        progress = run.progress;
        measured.push(Measured::of(&engine, &cell.name, &run.differences, args.level)?);
    }
    progress.end();
    let perplexity = (nll / kept.n_rows() as f64).exp();
    if args.load.json {
        report::line(&as_json(args, kept.n_rows(), perplexity, &measured).to_string())
    } else {
        print(kept.n_rows(), perplexity, args.level, &measured)
    }
}

/// A named setting, and the file of the plan that has it alone.
struct Cell {
    name: String,
    plan: PathBuf,
}

/// The plan of all cells, for opening what they need, and each by itself.
fn cells(args: &Quality, folder: &Path) -> Result<(PathBuf, Vec<Cell>)> {
    // More tokens than any text has.
    let block = |cell: &Value| json!({ "cell": cell["name"], "from": 0, "tokens": 1u64 << 48 });
    let write = |file: &str, cells: &[Value]| -> Result<PathBuf> {
        let plan = json!({ "hotset_schedule": 1, "cells": cells, "blocks": [block(&cells[0])] });
        let path = folder.join(file);
        std::fs::write(&path, plan.to_string()).with_context(|| path.display().to_string())?;
        Ok(path)
    };
    let (all, cells): (PathBuf, Vec<Value>) = match &args.plan {
        Some(path) => {
            // Its faults are named by the library.
            let text = std::fs::read(path).with_context(|| path.display().to_string())?;
            hotset::hook::Schedule::parse(&text).with_context(|| path.display().to_string())?;
            let plan: Value = serde_json::from_slice(&text)?;
            (path.clone(), plan["cells"].as_array().cloned().unwrap_or_default())
        }
        None => {
            // As `hotset ab plan` names and orders them; what is not listed stays as it was set.
            let all =
                |list: &[f64]| if list.is_empty() { vec![None] } else { list.iter().copied().map(Some).collect() };
            let (drops, lambdas) = (all(&args.drops), all(&args.lambdas));
            let pairs = lambdas.iter().flat_map(|l| drops.iter().map(move |f| (*f, *l)));
            let cells: Vec<Value> = pairs.map(|(drop, lambda)| listed(drop, lambda)).collect();
            (write("cells.json", &cells)?, cells)
        }
    };
    let alone = |(i, cell): (usize, &Value)| {
        let name = cell["name"].as_str().unwrap_or_default().to_owned();
        Ok(Cell { name, plan: write(&format!("cell-{i}.json"), std::slice::from_ref(cell))? })
    };
    let cells = cells.iter().enumerate().map(alone).collect::<Result<_>>()?;
    Ok((all, cells))
}

/// A cell of the lists.
fn listed(drop: Option<f64>, lambda: Option<f64>) -> Value {
    let names = [drop.map(|f| format!("F{f}")), lambda.map(|l| format!("L{l}"))];
    let mut cell = json!({ "name": names.into_iter().flatten().collect::<Vec<_>>().join(" ") });
    for (key, value) in [("drop", drop), ("lambda", lambda)] {
        if let Some(value) = value {
            cell[key] = json!(value);
        }
    }
    cell
}

struct Reference {
    kept: Kept,
    nll: f64,
    fed: usize,
    progress: Progress,
}

impl Score for Reference {
    fn score(&mut self, logits: &[f32], target: Token) -> Result<()> {
        finite(logits)?;
        self.nll += text::surprise(logits, target as usize);
        self.kept.push(logits)
    }

    fn decoded(&mut self, tokens: usize, _: std::time::Duration) {
        self.fed += tokens;
        self.progress.at(self.fed as u64, "reference".into());
    }
}

struct CellRun<'a> {
    rows: Rows<'a>,
    name: &'a str,
    done: u64,
    differences: Differences,
    progress: Progress,
}

impl Score for CellRun<'_> {
    fn score(&mut self, logits: &[f32], target: Token) -> Result<()> {
        finite(logits)?;
        self.differences.add(self.rows.next()?, logits, target as usize);
        Ok(())
    }

    fn decoded(&mut self, tokens: usize, _: std::time::Duration) {
        self.done += tokens as u64;
        self.progress.at(self.done, self.name.to_owned());
    }
}

fn finite(logits: &[f32]) -> Result<()> {
    match logits.iter().find(|x| x.is_nan() || **x == f32::INFINITY) {
        None => Ok(()),
        Some(x) => bail!("a logit of {x}: there is no distribution to compare"),
    }
}

/// What a cell came to. Rates are shares of the routed experts; mass is a mean over tokens and layers.
struct Measured {
    name: String,
    drop: f64,
    lambda: f64,
    perplexity: f64,
    /// Of the perplexities, and its interval.
    ratio: [f64; 3],
    kl_mean: f64,
    kl_p99: f64,
    top1_agreement: f64,
    mass_lost: f64,
    swap_rate: f64,
    drop_rate: f64,
}

impl Measured {
    fn of(engine: &Engine, name: &str, d: &Differences, level: f64) -> Result<Self> {
        let hook = engine.hook.as_ref().context("hotset is open")?;
        let (shape, s) = (hook.shape()?, hook.stats()?);
        let picks = (s.hits + s.misses + s.dropped) as f64;
        let ratio = hotset::ab::bootstrap::mean(&d.surprise, level, RESAMPLES, SEED);
        Ok(Measured {
            name: name.to_owned(),
            drop: shape.drop,
            lambda: shape.lambda,
            perplexity: d.perplexity(),
            ratio: [ratio.estimate, ratio.low, ratio.high].map(f64::exp),
            kl_mean: d.kl_mean(),
            kl_p99: d.kl_quantile(0.99),
            top1_agreement: d.top1_agreement(),
            mass_lost: report::ratio(
                s.mass_dropped + s.mass_swapped,
                s.decode_tokens as f64 * f64::from(shape.n_layers),
            ),
            swap_rate: report::ratio(s.swapped as f64, picks),
            drop_rate: report::ratio(s.dropped as f64, picks),
        })
    }
}

fn as_json(args: &Quality, tokens: usize, perplexity: f64, cells: &[Measured]) -> Value {
    let cell = |m: &Measured| {
        json!({
            "name": m.name, "drop": m.drop, "lambda": m.lambda, "perplexity": m.perplexity,
            "ratio": m.ratio[0], "ratio_low": m.ratio[1], "ratio_high": m.ratio[2],
            "kl_mean": m.kl_mean, "kl_p99": m.kl_p99, "top1_agreement": m.top1_agreement,
            "mass_lost": m.mass_lost, "swap_rate": m.swap_rate, "drop_rate": m.drop_rate,
        })
    };
    json!({
        "quality": 1,
        "model": args.load.model.display().to_string(),
        "text": args.file.display().to_string(),
        "tokens": tokens,
        "level": args.level,
        "reference": { "perplexity": perplexity },
        "cells": cells.iter().map(cell).collect::<Vec<_>>(),
    })
}

fn print(tokens: usize, perplexity: f64, level: f64, cells: &[Measured]) -> Result<()> {
    report::line(&format!("reference: perplexity {perplexity:.4} over {tokens} tokens, resident and unmodified\n"))?;
    let wide = cells.iter().map(|m| m.name.chars().count()).max().unwrap_or(0).max(4);
    let title = format!("ratio ({} %)", level * 100.0);
    report::line(&format!(
        "{:wide$}  perplexity  {title:25}     KL mean      KL p99   top 1  mass lost   swaps   drops",
        "cell"
    ))?;
    for m in cells {
        let [ratio, low, high] = m.ratio;
        let interval = format!("{ratio:.4} ({low:.4} to {high:.4})");
        let percent = |share: f64, digits: usize| format!("{:.digits$} %", share * 100.0);
        report::line(&format!(
            "{:wide$}  {:10.4}  {interval:25}  {:10.6}  {:10.6}  {:>7}  {:>8}  {:>6}  {:>6}",
            m.name,
            m.perplexity,
            m.kl_mean,
            m.kl_p99,
            percent(m.top1_agreement, 1),
            percent(m.mass_lost, 2),
            percent(m.swap_rate, 1),
            percent(m.drop_rate, 1)
        ))?;
    }
    report::line(
        "\nKL: of the next token's distribution, reference to cell, in nats. mass lost: of the routing weight, by drops and swaps.",
    )
}

fn parse_level(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|x| (0.5..=0.9999).contains(x)).ok_or("a level is a number from 0.5 to 0.9999".to_owned())
}
