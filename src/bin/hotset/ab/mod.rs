//! `hotset ab`: experiments on the device. One file per subcommand.

mod child;
mod run;

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
    Run(run::Args),
}

pub fn run(args: &Args) -> Result<()> {
    match &args.command {
        Command::Run(args) => run::run(args),
    }
}
