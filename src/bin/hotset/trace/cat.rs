//! `hotset trace cat`: traces of the same shape, one after the other.

use std::path::PathBuf;

use anyhow::Result;
use hotset::trace::q4rt::write_header;
use hotset::trace::sidecar::read_ranges;
use hotset::trace::{Header, Sidecar, Trace};
use serde_json::json;

use super::files::{self, NewFile};
use crate::output;

/// Join traces of the same shape into one
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  hotset trace cat monday.q4rt tuesday.q4rt --out both.q4rt

Sidecars are joined as well: what was resident when a part began is noted at the joint, if that part knows it. Parts must agree
about model, k and the kind of scores.")]
pub struct Args {
    /// Traces, in order
    #[arg(required = true)]
    traces: Vec<PathBuf>,
    /// The new trace; an older one is replaced
    #[arg(long, short, value_name = "TRACE")]
    out: PathBuf,
    /// Print one JSON object of what was made
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let opened = args.traces.iter().map(|path| files::open(path)).collect::<Result<Vec<_>>>()?;
    let shape = |trace: &Trace| (trace.n_layers(), trace.n_experts(), trace.top_m());
    let wanted = shape(&opened[0].0);
    for ((trace, _), path) in opened.iter().zip(&args.traces) {
        if shape(trace) != wanted {
            let (first, name) = (args.traces[0].display(), path.display());
            let found = shape(trace);
            return Err(files::usage(format!(
                "{first} and {name}: layers, experts, top_m differ: {wanted:?}, {found:?}"
            )));
        }
    }
    let mut parts = Vec::new();
    let mut traces = Vec::new();
    for ((trace, sidecar), path) in opened.into_iter().zip(&args.traces) {
        parts.push((path.display().to_string(), trace.n_tokens() as u64, sidecar));
        traces.push(trace);
    }
    let n_tokens: u64 = parts.iter().map(|part| part.1).sum();
    let sidecar = Sidecar::join(&parts)?;
    let mut ranges = None;
    if sidecar.as_ref().is_some_and(|sidecar| sidecar.row_range) {
        let mut all = Vec::new();
        for (trace, path) in traces.iter().zip(&args.traces) {
            let part = read_ranges(path, trace.n_layers())?;
            let wanted = trace.n_tokens() * trace.n_layers();
            anyhow::ensure!(part.len() >= wanted, "{}.range ends too early", path.display());
            all.extend_from_slice(&part[..wanted]);
        }
        ranges = Some(all);
    }
    let mut new = NewFile::create(&args.out)?;
    // a count that u32 does not hold: from the length
    let header = Header { n_tokens: u32::try_from(n_tokens).unwrap_or(0), ..*traces[0].header() };
    write_header(new.out(), &header)?;
    traces.iter().try_for_each(|trace| new.write(trace.raw(0..trace.n_tokens())))?;
    new.finish_trace(sidecar.as_ref(), ranges.as_deref())?;
    if args.json {
        return output::print_json(&json!({ "trace": args.out, "tokens": n_tokens, "parts": traces.len() }));
    }
    output::print(&output::facts(&[
        ("made", args.out.display().to_string()),
        ("tokens", format!("{n_tokens} of {} traces", traces.len())),
        ("sidecar", if sidecar.is_some() { "joined" } else { "none" }.to_owned()),
    ]))
}
