//! What each cell costs in quality, as `hotset-llama quality --json` measured it, and the setting that follows from speed and quality together.

use std::path::Path;

use serde_json::{Map, Value};

use super::Analysis;
use crate::error::{Error, Result, err};

#[derive(Clone, Debug, PartialEq)]
pub struct Quality {
    pub model: String,
    pub text: String,
    pub tokens: u64,
    /// Of the resident, unmodified model.
    pub reference_perplexity: f64,
    pub cells: Vec<Cell>,
}

/// Of one cell against the unmodified model on the same text.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    pub name: String,
    pub perplexity: f64,
    /// Over the reference's, with its interval.
    pub ratio: f64,
    pub ratio_low: f64,
    pub ratio_high: f64,
    /// Of the next token's distribution, in nats.
    pub kl_mean: f64,
    pub kl_p99: f64,
    /// Shares, 0..1; NaN: not in the file.
    pub top1_agreement: f64,
    pub mass_lost: f64,
    pub swap_rate: f64,
    pub drop_rate: f64,
}

impl Quality {
    /// `Io`, or `Format` with file and reason.
    pub fn load(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|e| err!(Io, "{}: {e}", path.display()))?;
        Self::parse(&text).map_err(|e| Error::new(e.kind, format!("{}: {}", path.display(), e.detail)))
    }

    pub fn parse(text: &str) -> Result<Self> {
        let root: Map<String, Value> =
            serde_json::from_str(text).map_err(|e| err!(Format, "line {}: {e}", e.line()))?;
        if root.get("quality").and_then(Value::as_u64) != Some(1) {
            return Err(err!(Format, "\"quality\": 1 wanted (of hotset-llama quality --json)"));
        }
        let text = |name: &str| root.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
        let reference = root.get("reference").and_then(|r| r.get("perplexity")).and_then(Value::as_f64);
        let reference_perplexity = reference.ok_or_else(|| err!(Format, "no reference.perplexity"))?;
        let cells = root.get("cells").and_then(Value::as_array).ok_or_else(|| err!(Format, "no list \"cells\""))?;
        let cells = cells.iter().enumerate().map(|(i, cell)| Cell::parse(i, cell)).collect::<Result<_>>()?;
        let tokens = root.get("tokens").and_then(Value::as_u64).unwrap_or(0);
        Ok(Self { model: text("model"), text: text("text"), tokens, reference_perplexity, cells })
    }

    pub fn of(&self, name: &str) -> Option<&Cell> {
        self.cells.iter().find(|c| c.name == name)
    }
}

impl Cell {
    fn parse(index: usize, value: &Value) -> Result<Self> {
        let name = value.get("name").and_then(Value::as_str).ok_or_else(|| err!(Format, "cells[{index}]: no name"))?;
        let number = |key: &str| value.get(key).and_then(Value::as_f64);
        let wanted = |key: &str| number(key).ok_or_else(|| err!(Format, "cell \"{name}\": no number {key}"));
        let ratio = wanted("ratio")?;
        let rate = |key: &str| number(key).unwrap_or(f64::NAN);
        Ok(Self {
            name: name.to_owned(),
            perplexity: wanted("perplexity")?,
            ratio,
            ratio_low: number("ratio_low").unwrap_or(ratio),
            ratio_high: number("ratio_high").unwrap_or(ratio),
            kl_mean: rate("kl_mean"),
            kl_p99: rate("kl_p99"),
            top1_agreement: rate("top1_agreement"),
            mass_lost: rate("mass_lost"),
            swap_rate: rate("swap_rate"),
            drop_rate: rate("drop_rate"),
        })
    }
}

/// The cell to take, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Recommendation {
    /// Index in [`Analysis::cells`]; None: no cell is known to keep within the limit.
    pub cell: Option<usize>,
    pub words: String,
}

/// The fastest cell whose perplexity ratio is at most 1 + `limit` with its whole interval; but of cells that are not told apart from it, the
/// one that costs least.
pub fn recommend(analysis: &Analysis, quality: &Quality, limit: f64) -> Recommendation {
    let percent = super::verdict::digits(limit * 100.0);
    let ratio = |i: usize| quality.of(&analysis.cells[i].name);
    let within: Vec<usize> =
        (0..analysis.cells.len()).filter(|&i| ratio(i).is_some_and(|q| q.ratio_high <= 1.0 + limit)).collect();
    let fastest =
        within.iter().copied().min_by(|&a, &b| analysis.cells[a].mean_ms.total_cmp(&analysis.cells[b].mean_ms));
    let Some(fastest) = fastest else {
        let words =
            format!("no cell is known to keep perplexity within +{percent} %: a longer text narrows the intervals");
        return Recommendation { cell: None, words };
    };
    let told_apart = |i: usize| {
        let both = |c: &&super::Comparison| (c.a, c.b) == (i, fastest) || (c.b, c.a) == (i, fastest);
        analysis.comparisons.iter().find(both).is_some_and(|c| c.verdict.told_apart())
    };
    let alike = within.iter().copied().filter(|&i| i == fastest || !told_apart(i));
    let cost = |i: usize| ratio(i).map_or(f64::INFINITY, |q| q.ratio);
    let best =
        alike.min_by(|&a, &b| cost(a).total_cmp(&cost(b)).then((a != fastest).cmp(&(b != fastest)))).unwrap_or(fastest);
    let cell = &analysis.cells[best];
    let (name, speed) = (&cell.name, cell.tokens_per_second());
    let why = if best == fastest {
        "the fastest of those that keep the limit".to_owned()
    } else {
        format!(
            "not told apart from {}, the fastest that keeps the limit, and costs less",
            analysis.cells[fastest].name
        )
    };
    let loss = (cost(best) - 1.0) * 100.0;
    let words = format!("{name}: {speed:.2} tok/s at perplexity {loss:+.2} % (limit +{percent} %): {why}");
    Recommendation { cell: Some(best), words }
}
