//! `hotset trace`: look at traces, take them apart, bring them in and out, make them. One file per subcommand; [`files`] is
//! how all of them open a trace and put one down.

mod cat;
mod cut;
mod export;
pub mod files;
mod head;
mod import;
mod info;
mod npz;
mod synth;
mod verify;

use anyhow::Result;
use clap::Subcommand;

/// Show, check, cut, join, import, export and make traces of router candidates
#[derive(clap::Args)]
#[command(after_help = "\
A trace (.q4rt) holds, token by token and layer by layer, the ids and scores of the experts that the router ranked
highest. What the format has no room for lies beside it, in <trace>.json.

Exit codes: 0 done, 1 failed or problems found, 2 the command line asks for what cannot be.")]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Info(info::Args),
    Verify(verify::Args),
    Head(head::Args),
    Cut(cut::Args),
    Cat(cat::Args),
    Import(import::Args),
    Export(export::Args),
    Synth(synth::Args),
}

pub fn run(args: &Args) -> Result<()> {
    match &args.command {
        Command::Info(args) => info::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Head(args) => head::run(args),
        Command::Cut(args) => cut::run(args),
        Command::Cat(args) => cat::run(args),
        Command::Import(args) => import::run(args),
        Command::Export(args) => export::run(args),
        Command::Synth(args) => synth::run(args),
    }
}
