//! `hotset trace cut`: some of a trace's tokens, as a trace of its own.

use std::path::PathBuf;

use anyhow::Result;
use hotset::trace::Header;
use hotset::trace::q4rt::write_header;
use hotset::trace::sidecar::read_ranges;
use serde_json::json;

use super::files::{self, NewFile};
use crate::output;

/// Copy a range of tokens to a new trace, with a sidecar that is true of them
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  hotset trace cut run.q4rt 100..500 part.q4rt
  hotset trace cut run.q4rt 100.. rest.q4rt

What was resident before the first token is known only where the trace notes it there (see `hotset trace info`); else a
replay of the part begins with an empty cache.")]
pub struct Args {
    /// A trace
    trace: PathBuf,
    /// Tokens from START to before END, counted from 0; either may be left out
    #[arg(value_name = "START..END", value_parser = files::token_range)]
    tokens: (Option<u64>, Option<u64>),
    /// The new trace; an older one is replaced
    out: PathBuf,
    /// Print one JSON object of what was made
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let (trace, sidecar) = files::open(&args.trace)?;
    let n_tokens = trace.n_tokens() as u64;
    let (start, end) = (args.tokens.0.unwrap_or(0), args.tokens.1.unwrap_or(n_tokens));
    if start >= end || end > n_tokens {
        let name = args.trace.display();
        return Err(files::usage(format!("tokens {start}..{end} of {name}, which has {n_tokens}")));
    }
    let ranges = match &sidecar {
        Some(sidecar) if sidecar.row_range => {
            let n = trace.n_layers();
            let all = read_ranges(&args.trace, n)?;
            let part = all.get(start as usize * n..end as usize * n);
            let part = part.ok_or_else(|| anyhow::anyhow!("{}.range ends too early", args.trace.display()))?;
            Some(part.to_vec())
        }
        _ => None,
    };
    let mut new = NewFile::create(&args.out)?;
    // a count that u32 does not hold: from the length
    let header = Header { n_tokens: u32::try_from(end - start).unwrap_or(0), ..*trace.header() };
    write_header(new.out(), &header)?;
    new.write(trace.raw(start as usize..end as usize))?;
    let sidecar = sidecar.map(|sidecar| sidecar.cut(start..end, n_tokens));
    new.finish_trace(sidecar.as_ref(), ranges.as_deref())?;
    // described, or nothing is known at all
    let known = sidecar.is_some_and(|s| s.resident.first().is_some_and(|r| r.before_token == 0));
    if args.json {
        return output::print_json(&json!({ "trace": args.out, "tokens": end - start, "resident_known": known }));
    }
    output::print(&output::facts(&[
        ("made", args.out.display().to_string()),
        ("tokens", format!("{} ({start}..{end} of {n_tokens})", end - start)),
        ("resident at its start", if known { "known" } else { "not known" }.to_owned()),
    ]))
}
