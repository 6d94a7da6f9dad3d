//! `hotset trace import`: a foreign trace becomes a Q4RT.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::ValueEnum;
use hotset::trace::import::{self, ImportOptions};
use serde_json::json;

use super::files::{self, NewFile};
use crate::output;

/// Read a route_trace v1 CSV, or JSONL of ids, into a trace with a sidecar
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  hotset trace import qwen.route.csv qwen.q4rt
  hotset trace import qwen.route.csv decode.q4rt --no-prefill
  hotset trace import kimi.jsonl kimi.q4rt --experts 256

Formats:
  route-csv  '#' lines of key=value, then turn,phase,step,layer,slot,expert,weight,residency,expert_bytes. Weights become
             scores, ln(weight); what the run found resident goes to the sidecar's \"residency\", a string of digits a token.
  jsonl      {\"tok\": 0, \"layers\": [[3, 17, ...], ...]} a line. No scores: all are recorded as equal, and reranking leaves
             such rows alone.")]
pub struct Args {
    /// The foreign trace
    input: PathBuf,
    /// The new trace; an older one is replaced
    out: PathBuf,
    /// What the input is; else its name says it: .csv, .jsonl
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// Experts of each layer; else what the file says, or its highest id and one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    experts: Option<u16>,
    /// Leave prefill tokens out
    #[arg(long)]
    no_prefill: bool,
    /// Do not keep what the run found resident
    #[arg(long)]
    no_residency: bool,
    /// Print one JSON object of what was made
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    RouteCsv,
    Jsonl,
}

fn format_of(path: &Path) -> Result<Format> {
    match path.extension().and_then(|e| e.to_str()) {
        Some("csv") => Ok(Format::RouteCsv),
        Some("jsonl") => Ok(Format::Jsonl),
        _ => Err(files::usage(format!("{}: neither .csv nor .jsonl: say --format", path.display()))),
    }
}

pub fn run(args: &Args) -> Result<()> {
    let format = args.format.map_or_else(|| format_of(&args.input), Ok)?;
    let options = ImportOptions { prefill: !args.no_prefill, residency: !args.no_residency, n_experts: args.experts };
    let name = || args.input.display().to_string();
    let file = File::open(&args.input).with_context(name)?;
    let length = file.metadata().with_context(name)?.len();
    let mut input = BufReader::with_capacity(1 << 20, file);
    let mut new = NewFile::create(&args.out)?;
    let sidecar = match format {
        Format::RouteCsv => import::route_csv(&mut input, new.out(), options),
        Format::Jsonl => import::jsonl(&mut input, new.out(), options),
    };
    let mut sidecar = sidecar.with_context(name)?;
    if let Some(import) = sidecar.more.get_mut("import").and_then(|import| import.as_object_mut()) {
        import.insert("file".into(), json!(args.input.file_name().map(|name| name.to_string_lossy())));
        import.insert("file_bytes".into(), length.into());
    }
    new.finish_trace(Some(&sidecar), None)?;
    let tokens: u64 = sidecar.ranges.iter().map(|range| range.n_tokens).sum();
    let unknown = sidecar.more["import"]["unknown_weights"].as_u64().unwrap_or(0);
    let shape = &sidecar.shape;
    let n_experts = shape.n_experts.first().copied().unwrap_or(0);
    if args.json {
        return output::print_json(&json!({
            "trace": args.out, "layers": shape.n_layers(), "blocks": shape.blocks, "experts": n_experts, "k": shape.k,
            "tokens": tokens, "left_out": sidecar.left_out, "unknown_weights": unknown,
            "residency_tokens": sidecar.residency.len(),
        }));
    }
    let left_out: Vec<String> = sidecar.left_out.iter().map(|(reason, n)| format!("{n}: {reason}")).collect();
    output::print(&output::facts(&[
        ("made", args.out.display().to_string()),
        ("shape", format!("{} layers of {n_experts} experts, {} used a token", shape.n_layers(), shape.k)),
        ("tokens", tokens.to_string()),
        ("left out", if left_out.is_empty() { "nothing".to_owned() } else { left_out.join(", ") }),
        ("weights not known", unknown.to_string()),
    ]))
}
