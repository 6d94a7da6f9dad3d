//! `hotset ab report`: speed and quality of each cell in one table, as text, JSON, and a page.

use std::path::{Path, PathBuf};

use anyhow::Result;
use hotset::ab::Analysis;
use hotset::ab::quality::{Quality, Recommendation, recommend};
use hotset::report::ab::{Beside, page};
use serde_json::{Value, json};

use super::shown::{self, Logs};
use crate::output;
use crate::trace::files::{NewFile, usage};

/// Put speed and quality of an experiment's cells into one table and one page, with the setting to take
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  hotset ab report run-1.csv --plan plan.json -o ab.html
  hotset-llama quality ... --json > quality.json
  hotset ab report run-1.csv --plan plan.json --quality quality.json --limit-perplexity 1% -o ab.html

Recommended is the fastest cell whose perplexity keeps the limit with its whole interval; but of cells that are not told apart from
that one, the one that costs least. The page has everything in it and asks the network for nothing.")]
pub struct Args {
    #[command(flatten)]
    logs: Logs,
    /// The page; an older one is replaced
    #[arg(short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// What each cell costs in quality, of hotset-llama quality --json
    #[arg(long, value_name = "FILE")]
    quality: Option<PathBuf>,
    /// By how much perplexity may rise: 1% or 0.01
    #[arg(long, value_name = "SHARE", default_value = "1%", value_parser = share)]
    limit_perplexity: f64,
    /// Print exactly one JSON object instead of text
    #[arg(long)]
    json: bool,
}

fn share(text: &str) -> Result<f64, String> {
    let share = output::parse_share(text).filter(|x| (0.0..=10.0).contains(x));
    share.ok_or_else(|| "a share like 1% or 0.01 wanted".to_owned())
}

pub fn run(args: &Args) -> Result<()> {
    let analysis = args.logs.analyze()?;
    let quality = args.quality.as_deref().map(|path| known(path, &analysis)).transpose()?;
    let recommendation = quality.as_ref().map(|q| recommend(&analysis, q, args.limit_perplexity));
    let both = quality.as_ref().zip(recommendation.as_ref());
    let beside = both.map(|(quality, recommendation)| Beside { quality, recommendation, limit: args.limit_perplexity });
    if let Some(path) = &args.output {
        let mut new = NewFile::create(path)?;
        new.write(page(&analysis, beside)?.html().as_bytes())?;
        new.finish()?;
    }
    if args.json {
        return output::print_json(&as_json(&analysis, beside));
    }
    let mut text = shown::text(&analysis);
    if let Some((quality, recommendation)) = both {
        text += &format!("\n{}\n{}\n", costs(&analysis, quality), recommendation.words);
    }
    output::print(&text)
}

/// The file, which must know some of the cells.
fn known(path: &Path, analysis: &Analysis) -> Result<Quality> {
    let quality = Quality::load(path)?;
    if !analysis.cells.iter().any(|c| quality.of(&c.name).is_some()) {
        let names = |all: Vec<&str>| all.join(", ");
        let (logs, file) =
            (analysis.cells.iter().map(|c| c.name.as_str()), quality.cells.iter().map(|c| c.name.as_str()));
        let (logs, file) = (names(logs.collect()), names(file.collect()));
        return Err(usage(format!("{}: no cell of the logs ({logs}) is in it ({file})", path.display())));
    }
    Ok(quality)
}

fn costs(analysis: &Analysis, quality: &Quality) -> String {
    let change = |ratio: f64| format!("{:+.2} %", 100.0 * (ratio - 1.0));
    let percent = |share: f64| if share.is_finite() { format!("{:.2} %", 100.0 * share) } else { "-".into() };
    let row = |cell: &hotset::ab::cells::Cell| {
        let mut row = vec![cell.name.clone(), format!("{:.2}", cell.tokens_per_second())];
        match quality.of(&cell.name) {
            None => row.push("not measured".into()),
            Some(q) => {
                row.extend([format!("{:.4}", q.perplexity), change(q.ratio)]);
                row.push(format!("{}..{}", change(q.ratio_low), change(q.ratio_high)));
                row.extend([q.kl_mean, q.kl_p99].map(|kl| format!("{kl:.2e}")));
                row.extend([q.top1_agreement, q.drop_rate, q.swap_rate, q.mass_lost].map(percent));
            }
        }
        row
    };
    let rows: Vec<Vec<String>> = analysis.cells.iter().map(row).collect();
    let heading = [
        "cell",
        "tok/s",
        "perplexity",
        "change",
        "interval",
        "KL mean",
        "KL p99",
        "same first",
        "dropped",
        "swapped",
        "mass lost",
    ];
    output::table(&heading, &rows)
}

fn as_json(analysis: &Analysis, beside: Option<Beside>) -> Value {
    let mut value = analysis.to_json();
    let Some(Beside { quality, recommendation, limit }) = beside else { return value };
    let cell = |c: &hotset::ab::quality::Cell| {
        json!({
            "name": c.name, "perplexity": c.perplexity, "ratio": c.ratio, "ratio_low": c.ratio_low, "ratio_high": c.ratio_high,
            "kl_mean": c.kl_mean, "kl_p99": c.kl_p99, "top1_agreement": c.top1_agreement, "mass_lost": c.mass_lost,
            "swap_rate": c.swap_rate, "drop_rate": c.drop_rate,
            "tokens_per_second": analysis.cells.iter().find(|a| a.name == c.name).map(hotset::ab::cells::Cell::tokens_per_second),
        })
    };
    value["quality"] = json!({
        "model": quality.model, "text": quality.text, "tokens": quality.tokens,
        "reference_perplexity": quality.reference_perplexity, "cells": quality.cells.iter().map(cell).collect::<Vec<_>>(),
    });
    let Recommendation { cell, words } = recommendation;
    value["recommendation"] =
        json!({ "cell": cell.map(|i| analysis.cells[i].name.as_str()), "limit": limit, "words": words });
    value
}
