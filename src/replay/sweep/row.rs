//! One row of a sweep: what identifies it, and what it came to. As a line of CSV or of JSONL, with the same columns in the same order.

use std::fmt::Write as _;

use crate::replay::{Estimate, LayerResult, Settings};

/// A value of a column.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    Text(String),
    Whole(u64),
    /// Finite; written with as many digits as say it exactly.
    Number(f64),
}

/// How rows are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Csv,
    Jsonl,
}

/// Columns and their values, in order.
pub type Cells = Vec<(String, Cell)>;

/// Where a row is in its sweep.
#[derive(Clone, Debug)]
pub struct Place<'a> {
    /// Number of the row, from 0, and of how many.
    pub setting: usize,
    pub of: usize,
    pub trace: &'a str,
    pub variant: &'a str,
    pub n_layers: usize,
    pub n_experts: usize,
    pub n_tokens: usize,
}

/// What identifies a row: known before anything is computed.
pub fn key(place: &Place, s: &Settings) -> Cells {
    let whole = |n: usize| Cell::Whole(n as u64);
    let cells = [
        ("setting", whole(place.setting)),
        ("of", whole(place.of)),
        ("trace", Cell::Text(place.trace.to_owned())),
        ("variant", Cell::Text(place.variant.to_owned())),
        ("n_layers", whole(place.n_layers)),
        ("n_experts", whole(place.n_experts)),
        ("n_tokens", whole(place.n_tokens)),
        ("warmup", whole(s.warmup)),
        ("k_used", whole(s.k)),
        ("cache_cap", whole(s.capacity)),
        ("policy", Cell::Text(s.policy.name().to_owned())),
        ("lambda_moce", Cell::Number(s.moce.lambda)),
        ("protect_top_j", Cell::Whole(s.moce.top_j.into())),
        ("delta", Cell::Text(s.moce.delta.name().to_owned())),
        ("ema_decay", Cell::Number(s.decay)),
        ("near_pick_n", whole(s.near_pick_n)),
    ];
    cells.into_iter().map(|(name, cell)| (name.to_owned(), cell)).collect()
}

/// What a setting came to, over all layers. Per token means of one token in all layers.
pub fn values(layers: &[LayerResult], estimate: &Estimate) -> Cells {
    let misses_per_token: f64 = layers.iter().map(LayerResult::misses_per_token).sum();
    let hit_rate = layers.iter().map(LayerResult::hit_rate).sum::<f64>() / layers.len().max(1) as f64;
    let per_token =
        |count: fn(&LayerResult) -> u64| layers.iter().map(|l| count(l) as f64 / l.tokens.max(1) as f64).sum::<f64>();
    let mb = estimate.mb_per_token(misses_per_token);
    let mut cells = vec![
        ("misses".to_owned(), Cell::Whole(layers.iter().map(|l| l.misses).sum())),
        ("misses_per_token".to_owned(), Cell::Number(misses_per_token)),
        ("hit_rate".to_owned(), Cell::Number(hit_rate)),
        ("substituted_per_token".to_owned(), Cell::Number(per_token(|l| l.substituted))),
        ("swapped_per_token".to_owned(), Cell::Number(per_token(|l| l.swapped))),
        ("expert_bytes".to_owned(), Cell::Number(estimate.expert_bytes)),
        ("compute_ms".to_owned(), Cell::Number(estimate.compute_ms)),
        ("ssd_mb_per_token".to_owned(), Cell::Number(mb)),
    ];
    for &b in &estimate.bandwidths_gb_s {
        cells.push((format!("tok_s_{b}GBs"), Cell::Number(estimate.tokens_per_second(mb, b))));
    }
    cells
}

/// The first line of a file, where the format has one.
pub fn heading(key: &Cells, values: &Cells, format: Format) -> Option<String> {
    let names = || key.iter().chain(values).map(|(name, _)| csv_text(name)).collect::<Vec<_>>().join(",");
    (format == Format::Csv).then(names)
}

/// The line of a row, without its end. With no values: what every line with this key begins with.
pub fn line(key: &Cells, values: &Cells, format: Format) -> String {
    let mut line = String::new();
    for (name, cell) in key.iter().chain(values) {
        let _ = match (format, cell) {
            (Format::Csv, Cell::Text(text)) => write!(line, "{},", csv_text(text)),
            (Format::Csv, Cell::Whole(n)) => write!(line, "{n},"),
            (Format::Csv, Cell::Number(n)) => write!(line, "{n},"),
            (Format::Jsonl, cell) => {
                let begin = if line.is_empty() { '{' } else { ',' };
                let value = match cell {
                    Cell::Text(text) => serde_json::Value::from(text.as_str()),
                    Cell::Whole(n) => (*n).into(),
                    Cell::Number(n) => (*n).into(),
                };
                write!(line, "{begin}{}:{value}", serde_json::Value::from(name.as_str()))
            }
        };
    }
    if !values.is_empty() {
        match format {
            Format::Csv => _ = line.pop(),
            Format::Jsonl => line.push('}'),
        }
    }
    line
}

/// Quoted where RFC 4180 asks for it.
pub(super) fn csv_text(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text.to_owned() }
}
