//! `hotset ab analyze`: what the logs of an experiment tell apart.

use std::process::ExitCode;

use anyhow::Result;

use super::shown::{self, Logs};
use crate::output;

/// Say what the logs of an experiment tell apart, by how much, and how sure that is
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  hotset ab analyze run-1.csv --plan plan.json
  hotset ab analyze run-*.csv --plan plan.json --baseline F0 --json
  hotset ab analyze f000.csv f050.csv f075.csv f100.csv            one run a cell: confounded with the order of the runs

Logs: the hook's metrics logs (HOTSET_METRICS), CSV or JSON lines, with the cells of a schedule; or without, one run a cell. Also
bmoe_metrics v1 CSV.

How: times of neighbouring blocks of two cells are paired; the interval is that of a bootstrap over pairs, with the drift kept out. The
randomisation test turns units of the order round, as the lot could have. A pair of cells is told apart only if both say so (where there were
too few lots for the second, the first alone). The interval by blocks of tokens (circular, Politis-White length) looks at each cell by itself,
drift included. docs/ab.md explains all of it.

Exit codes: 0 done (with --exit-code: some pair was told apart), 1 failed, 2 the command line asks for what cannot be,
3 with --exit-code: no pair was told apart.")]
pub struct Args {
    #[command(flatten)]
    logs: Logs,
    /// Exit with 3 where no pair was told apart
    #[arg(long)]
    exit_code: bool,
    /// Print exactly one JSON object instead
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let analysis = args.logs.analyze()?;
    if args.json {
        output::print_json(&analysis.to_json())?;
    } else {
        output::print(&shown::text(&analysis))?;
    }
    let told_apart = analysis.comparisons.iter().any(|c| c.verdict.told_apart());
    Ok(if args.exit_code && !told_apart { ExitCode::from(3) } else { ExitCode::SUCCESS })
}
