//! `hotset trace head`: the first tokens as rows that can be read.

use std::path::PathBuf;

use anyhow::Result;
use serde_json::{Value, json};

use super::files::{self, Tokens};
use crate::output;

/// Show the first tokens of a trace: each layer's experts by falling score
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  hotset trace head run.q4rt
  hotset trace head run.q4rt -n 20 --layer 3 --top 12
  hotset trace head run.q4rt --json | jq '.[0].candidates[0].expert'

A cell is expert:score. Tokens and layers are counted from 0.")]
pub struct Args {
    /// A trace
    trace: PathBuf,
    /// Tokens
    #[arg(short = 'n', long, value_name = "N", default_value_t = 2)]
    tokens: u64,
    /// Tokens to pass over first
    #[arg(long, value_name = "N", default_value_t = 0)]
    skip: u64,
    /// Only this layer
    #[arg(long, value_name = "LAYER")]
    layer: Option<usize>,
    /// Candidates of each record
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,
    /// Print one JSON list
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let (trace, sidecar) = files::open(&args.trace)?;
    let n_layers = trace.n_layers();
    let layers = match args.layer {
        Some(layer) if layer >= n_layers => {
            return Err(files::usage(format!("--layer {layer}: the trace has layers 0 to {}", n_layers - 1)));
        }
        Some(layer) => layer..layer + 1,
        None => 0..n_layers,
    };
    let end = args.skip.saturating_add(args.tokens).min(trace.n_tokens() as u64);
    let top = args.top.min(trace.top_m());
    let mut tokens = Tokens::new(sidecar.as_ref());
    let (mut rows, mut values) = (Vec::new(), Vec::new());
    for token in args.skip..end {
        let known = tokens.at(token);
        let phase = known.map(|(phase, _)| phase.as_str());
        let position = known.and_then(|(_, position)| position);
        for layer in layers.clone() {
            let record = trace.record(token as usize, layer);
            let cells = (0..top).map(|rank| (record.id(rank), record.score(rank).to_f32()));
            if args.json {
                // JSON has no NaN: null
                let list: Value = cells.map(|(id, score)| json!({ "expert": id, "score": score })).collect();
                values.push(json!({
                    "token": token, "phase": phase, "position": position, "layer": layer, "candidates": list,
                }));
            } else {
                let position = position.map_or("-".to_owned(), |p| p.to_string());
                let mut row = vec![token.to_string(), phase.unwrap_or("-").to_owned(), position, layer.to_string()];
                row.extend(cells.map(|(id, score)| format!("{id}:{score:.3}")));
                rows.push(row);
            }
        }
    }
    if args.json {
        return output::print_json(&values.into());
    }
    let ranks: Vec<String> = (0..top).map(|rank| format!("rank {rank}")).collect();
    let mut heading = vec!["token", "phase", "position", "layer"];
    heading.extend(ranks.iter().map(String::as_str));
    output::print(&output::table(&heading, &rows))
}
