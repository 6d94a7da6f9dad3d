//! `hotset trace verify`: looks through every record for what no router gives.

use std::path::PathBuf;

use anyhow::Result;
use hotset::trace::{Problem, ProblemKind, Sidecar, Trace};
use serde_json::{Value, json};

use super::files;
use crate::output;

/// Check a trace: ids within the experts and each once, scores falling and numbers, sidecar and file as they should be
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  hotset trace verify run.q4rt
  hotset trace verify run.q4rt --strict --json | jq .problems

Exit code 1 if there are problems.")]
pub struct Args {
    /// A trace
    trace: PathBuf,
    /// Stop after so many problems
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    /// A cut file, stray bytes and tokens that the sidecar does not describe are problems too
    #[arg(long)]
    strict: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let trace = Trace::open(&args.trace)?;
    let records = trace.verify(0..trace.n_tokens(), args.limit as usize);
    let notes = files::health(&trace.health());
    let mut others = Vec::new();
    match Sidecar::read_beside(&args.trace) {
        Ok(Some(sidecar)) => others.extend(beside(&trace, &sidecar, args.strict)),
        Ok(None) => {}
        Err(e) => others.push(e.to_string()),
    }
    if args.strict {
        others.extend(notes.iter().cloned());
    }
    let n = records.len() + others.len();
    if args.json {
        output::print_json(&json!({
            "path": args.trace,
            "tokens": trace.n_tokens(),
            "records": trace.n_tokens() as u64 * trace.n_layers() as u64,
            "sound": n == 0,
            "problems": records.iter().map(problem).chain(others.iter().map(|o| json!({ "detail": o }))).collect::<Value>(),
            "limit": args.limit,
            "notes": notes,
        }))?;
    } else {
        let mut text = String::new();
        records.iter().for_each(|problem| text += &format!("{problem}\n"));
        others.iter().for_each(|other| text += &format!("{other}\n"));
        if !args.strict {
            notes.iter().for_each(|note| text += &format!("note: {note}\n"));
        }
        if n == 0 {
            text += &format!(
                "sound: {} tokens, {} layers, {} candidates each\n",
                trace.n_tokens(),
                trace.n_layers(),
                trace.top_m()
            );
        }
        output::print(&text)?;
    }
    if records.len() >= args.limit as usize {
        anyhow::bail!("{}: {n} problems found, and then the search ended (--limit)", args.trace.display());
    }
    anyhow::ensure!(n == 0, "{}: {n} problems", args.trace.display());
    Ok(())
}

/// What the sidecar says that cannot be true of this trace.
fn beside(trace: &Trace, sidecar: &Sidecar, strict: bool) -> Vec<String> {
    let n_tokens = trace.n_tokens() as u64;
    let mut problems: Vec<String> =
        sidecar.check_header(trace.header()).err().map(|e| e.to_string()).into_iter().collect();
    let end = sidecar.ranges.last().map_or(0, |range| range.end());
    if end > n_tokens {
        problems.push(format!("the sidecar describes tokens up to {end}, the trace has {n_tokens}"));
    }
    if let Some(range) = sidecar.ranges.iter().find(|range| range.n_tokens == 0) {
        problems.push(format!("the sidecar has a range of no tokens at {}", range.first));
    }
    let residency = sidecar.residency.len() as u64;
    if residency != 0 && residency != n_tokens {
        problems.push(format!("the sidecar has the residency of {residency} tokens, the trace has {n_tokens}"));
    }
    if sidecar.shape.k > sidecar.shape.top_m {
        problems.push(format!("the sidecar's k is {}, its top_m {}", sidecar.shape.k, sidecar.shape.top_m));
    }
    if strict && sidecar.described_tokens() < n_tokens {
        problems.push(format!("the sidecar describes {} of {n_tokens} tokens", sidecar.described_tokens()));
    }
    if strict && !sidecar.closed {
        problems.push("the sidecar was not closed".to_owned());
    }
    problems
}

fn problem(problem: &Problem) -> Value {
    let kind = match problem.kind {
        ProblemKind::IdRange { .. } => "id out of range",
        ProblemKind::Repeated { .. } => "id repeated",
        ProblemKind::Rising { .. } => "score rising",
        ProblemKind::NotANumber => "score not a number",
    };
    let Problem { token, layer, rank, .. } = *problem;
    json!({ "token": token, "layer": layer, "rank": rank, "kind": kind, "detail": problem.to_string() })
}
