//! `hotset ab plan`: from cells and a budget of tokens to a schedule, and what it can tell apart.

use std::path::PathBuf;

use anyhow::{Context, Result};
use hotset::ab::log::Log;
use hotset::ab::plan::{self, Pilot, Planned, Spread, Wanted};
use hotset::hook::schedule::{Carry, Cell, backing_name};
use hotset::route::Delta;
use hotset::store::Backing;
use serde_json::json;

use crate::output;
use crate::trace::files::usage;

/// Make a schedule: cells in blocks of tokens, in a balanced order drawn by lot, and say what it can tell apart
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  hotset ab plan --drop 0,0.5,0.75,1 --tokens 20000 -o plan.json
  hotset ab plan --drop 0,0.5 --lambda 0,0.12 --tokens 40000 --again -o plan.json        four cells and the first once more
  hotset ab plan --cell name=s16,slots=16 --cell name=s24,slots=24 --tokens 8000 --pilot run.csv --layers 48 -o plan.json
Then: HOTSET_SCHEDULE=plan.json HOTSET_METRICS=run.csv your-engine ..., or: hotset ab run --plan plan.json --out DIR -- your-engine ...

A cell is name=NAME and any of drop=F, lambda=L, top_j=J, delta=token_topk|token_full|running_full, slots=N, lanes=N,
backing=slots|page-cache; what is left out stays as the engine has set it.

Washout: tokens at each block's start that are not measured, because the cache is still the other cell's: by default its turnover, slots
over misses per token and layer (of --pilot with --layers, or --turnover), else 16. Block: five washouts, at least 40 tokens.")]
pub struct Args {
    #[command(flatten)]
    design: Design,
    /// Decode tokens in all, washout included
    #[arg(long, value_name = "N")]
    tokens: u64,
    /// The plan; an older one is replaced [default: standard output]
    #[arg(short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print the plan's facts as one JSON object (wants -o)
    #[arg(long, requires = "output")]
    json: bool,
}

/// What a plan is made of, but for the tokens: `hotset ab run` can plan, too.
#[derive(clap::Args)]
pub struct Design {
    /// A cell (again for each)
    #[arg(long, value_name = "KEY=VALUE,...")]
    cell: Vec<String>,
    /// Thresholds F: a cell for each, with each of --lambda
    #[arg(long, value_name = "F", value_delimiter = ',')]
    drop: Vec<f64>,
    /// Bonuses lambda: a cell for each, with each of --drop
    #[arg(long, value_name = "LAMBDA", value_delimiter = ',')]
    lambda: Vec<f64>,
    /// Of the lots
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,
    /// Tokens of a block, washout included
    #[arg(long, value_name = "N")]
    block: Option<u64>,
    /// Tokens at the start of each block that are not measured
    #[arg(long, value_name = "N")]
    washout: Option<u64>,
    /// What a block's cache begins with: what the block before left (washout), nothing (flush), or what the first block began with (restore)
    #[arg(long, value_name = "CARRY", default_value = "washout")]
    carry: String,
    /// Add the first cell once more: the two must not be told apart
    #[arg(long)]
    again: bool,
    /// Looks at the logs, equally far apart, the end included
    #[arg(long, value_name = "N", default_value_t = 1)]
    looks: u32,
    /// A log of a run before: how times spread, and (with --layers) how fast the caches turn over
    #[arg(long, value_name = "LOG")]
    pilot: Option<PathBuf>,
    /// Tokens left out at the pilot's beginning
    #[arg(long, value_name = "N", default_value_t = 50)]
    skip: usize,
    /// Layers with experts, for the pilot's misses
    #[arg(long, value_name = "N")]
    layers: Option<u32>,
    /// Tokens after which a layer's cache holds other experts
    #[arg(long, value_name = "TOKENS", conflicts_with = "layers")]
    turnover: Option<f64>,
    /// Of the intervals
    #[arg(long, value_name = "LEVEL", default_value_t = 0.95)]
    pub level: f64,
}

pub fn run(args: &Args) -> Result<()> {
    let (planned, wanted, said) = args.design.plan(args.tokens)?;
    let text = planned.schedule.to_json();
    match &args.output {
        Some(path) => {
            std::fs::write(path, text).with_context(|| path.display().to_string())?;
            if args.json { output::print_json(&facts(&planned, &wanted)) } else { output::print(&said) }
        }
        None => {
            eprint!("{said}");
            output::print(&text)
        }
    }
}

impl Design {
    /// The plan for so many tokens, what it was made of, and both in words.
    pub fn plan(&self, tokens: u64) -> Result<(Planned, Wanted, String)> {
        if !(0.5..=0.9999).contains(&self.level) {
            return Err(usage(format!("--level {}: 0.5 to 0.9999 wanted", self.level)));
        }
        let pilot =
            self.pilot.as_deref().map(|path| plan::pilot(&Log::load(path)?, self.skip, self.layers)).transpose()?;
        let carry = Carry::ALL.iter().copied().find(|c| c.name() == self.carry);
        let wanted = Wanted {
            cells: self.cells()?,
            tokens,
            seed: self.seed,
            carry: carry.ok_or_else(|| usage(format!("--carry {}: washout, flush or restore wanted", self.carry)))?,
            block: self.block,
            washout: self.washout,
            turnover: self.turnover.or(pilot.and_then(|p| p.turnover)),
            spread: pilot.map_or_else(Spread::default, |p| p.spread),
            looks: self.looks,
            again: self.again,
            alpha: 1.0 - self.level,
        };
        let planned = plan::plan(&wanted)?;
        let said = words(&planned, &wanted, pilot.as_ref());
        Ok((planned, wanted, said))
    }

    fn cells(&self) -> Result<Vec<Cell>> {
        let mut cells = self.cell.iter().map(|text| cell(text)).collect::<Result<Vec<_>>>()?;
        let all = |given: &[f64]| -> Vec<Option<f64>> {
            if given.is_empty() { vec![None] } else { given.iter().copied().map(Some).collect() }
        };
        if self.drop.is_empty() && self.lambda.is_empty() {
            return Ok(cells);
        }
        for lambda in all(&self.lambda) {
            for drop in all(&self.drop) {
                if let Some(bad) = drop.into_iter().chain(lambda).find(|x| !x.is_finite() || *x < 0.0) {
                    return Err(usage(format!("F or lambda {bad}: a number of 0 or more wanted")));
                }
                let names = [drop.map(|f| format!("F{f}")), lambda.map(|l| format!("L{l}"))];
                let name = names.into_iter().flatten().collect::<Vec<_>>().join(" ");
                cells.push(Cell { name, drop, lambda, ..Cell::default() });
            }
        }
        Ok(cells)
    }
}

/// `name=F0,drop=0`: what a cell of a plan file holds, by the same names.
fn cell(text: &str) -> Result<Cell> {
    let wrong = |why: String| usage(format!("--cell {text}: {why}"));
    let mut cell = Cell::default();
    for part in text.split(',') {
        let (key, value) = part.split_once('=').ok_or_else(|| wrong(format!("key=value wanted, {part} found")))?;
        let number = || -> Result<f64> {
            let number = value.parse().ok().filter(|x: &f64| x.is_finite() && *x >= 0.0);
            number.ok_or_else(|| wrong(format!("{key}: a number of 0 or more wanted, {value} found")))
        };
        let whole = || -> Result<u32> {
            value.parse().map_err(|_| wrong(format!("{key}: a whole number wanted, {value} found")))
        };
        match key.trim() {
            "name" => cell.name = value.trim().to_owned(),
            "drop" => cell.drop = Some(number()?),
            "lambda" => cell.lambda = Some(number()?),
            "top_j" => cell.top_j = Some(whole()?),
            "slots" => cell.slots = Some(whole()?),
            "lanes" => cell.lanes = Some(whole()?),
            "delta" => {
                let found = Delta::by_name(value);
                cell.delta = Some(found.ok_or_else(|| wrong(format!("there is no delta {value}")))?);
            }
            "backing" => {
                let found = [Backing::Slots, Backing::PageCache].into_iter().find(|b| backing_name(*b) == value);
                let why = || wrong(format!("backing: slots or page-cache wanted, {value} found"));
                cell.backing = Some(found.ok_or_else(why)?);
            }
            other => return Err(wrong(format!("a cell has no {other}"))),
        }
    }
    if cell.name.is_empty() {
        return Err(wrong("a name wanted (name=...)".to_owned()));
    }
    Ok(cell)
}

fn facts(planned: &Planned, wanted: &Wanted) -> serde_json::Value {
    let s = &planned.schedule;
    json!({
        "cells": s.cells.iter().map(|c| c.name.as_str()).collect::<Vec<_>>(),
        "blocks": s.blocks.len(),
        "block_tokens": s.blocks[0].tokens,
        "washout": s.washout,
        "tokens": s.blocks.len() as u64 * s.blocks[0].tokens,
        "measured_tokens_per_cell": planned.measured_tokens,
        "unit_blocks": planned.unit_blocks,
        "lots": planned.lots,
        "looks": wanted.looks,
        "cv": wanted.spread.cv,
        "variance_ratio": wanted.spread.variance_ratio,
        "detectable_percent": 100.0 * planned.detectable,
        "drift_left_percent": 100.0 * planned.drift_left,
    })
}

fn words(planned: &Planned, wanted: &Wanted, pilot: Option<&Pilot>) -> String {
    let s = &planned.schedule;
    let (n, tokens, blocks) = (s.cells.len(), s.blocks[0].tokens, s.blocks.len());
    let names: Vec<&str> = s.cells.iter().map(|c| c.name.as_str()).collect();
    let order = if n == 2 { "Thue-Morse" } else { "Williams squares" };
    let Spread { cv, variance_ratio } = wanted.spread;
    let why_washout = match (wanted.washout, wanted.turnover) {
        (Some(_), _) => "as given".to_owned(),
        (None, Some(t)) => format!("a cache's turnover is {t:.1} tokens"),
        (None, None) => "the default: no turnover is known".to_owned(),
    };
    let spread = match pilot {
        Some(p) => format!("of the pilot's {} tokens", p.tokens),
        None => "assumed, as of a phone with much noise; a pilot says what it is here".to_owned(),
    };
    let pairs = n * (n - 1) / 2;
    let among = if pairs > 1 { format!(", {pairs} pairs sharing the chance of a false alarm") } else { String::new() };
    let looks = if wanted.looks > 1 {
        format!("\n{} looks, after every {} blocks", wanted.looks, blocks / wanted.looks as usize)
    } else {
        String::new()
    };
    format!(
        "{n} cells: {}\n{blocks} blocks of {tokens} tokens ({} in all), washout {} ({why_washout}): {} measured tokens a cell\n\
         order: {order}, units of {} blocks, {} lots drawn with seed {}; a heat drift of 25 % leaves {:.2} % in a difference at most{looks}\n\
         a token's time: coefficient of variation {cv:.2}, variance ratio {variance_ratio:.1} ({spread})\n\
         a difference of {:.1} % is told apart with a chance of 80 %{among}\n",
        names.join(", "),
        blocks as u64 * tokens,
        s.washout,
        planned.measured_tokens,
        planned.unit_blocks,
        planned.lots,
        wanted.seed,
        100.0 * planned.drift_left,
        100.0 * planned.detectable,
    )
}
