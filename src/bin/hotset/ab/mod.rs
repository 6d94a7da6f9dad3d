//! `hotset ab`: experiments on the device. One file per subcommand; `shown` is how an analysis is printed.

mod analyze;
mod child;
mod plan;
mod report;
mod run;
mod shown;

use std::process::ExitCode;

use anyhow::Result;
use clap::Subcommand;

/// Experiments on this machine: which setting is faster, by how much, and what cannot be told
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Analyze(analyze::Args),
    Plan(plan::Args),
    Report(report::Args),
    Run(run::Args),
}

pub fn run(args: &Args) -> Result<ExitCode> {
    match &args.command {
        Command::Analyze(args) => return analyze::run(args),
        Command::Plan(args) => plan::run(args)?,
        Command::Report(args) => report::run(args)?,
        Command::Run(args) => run::run(args)?,
    }
    Ok(ExitCode::SUCCESS)
}
