//! The command line. One file per subcommand: each has `Args`, which clap fills, and `run`, which does the work by
//! calling the library and prints. To add one: a module, a line in `Command`, a line in `run`.
//!
//! Exit codes: 0 done, 1 failed, 2 the command line asks for what cannot be; others are a subcommand's own.

mod ab;
mod analyze;
mod doctor;
mod drop_replay;
mod global_replay;
mod inspect;
mod io;
mod output;
mod pack;
mod replay;
mod report;
mod sweep;
mod tiny;
mod trace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use hotset::ErrorKind;

/// Which experts of a Mixture-of-Experts model run and stay resident.
#[derive(Parser)]
#[command(version, max_term_width = 110, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Ab(ab::Args),
    Analyze(analyze::Args),
    Doctor(doctor::Args),
    #[command(name = "global-replay")]
    GlobalReplay(global_replay::Args),
    DropReplay(drop_replay::Args),
    Inspect(inspect::Args),
    Io(io::Args),
    Pack(pack::Args),
    Replay(replay::Args),
    Report(report::Args),
    Sweep(sweep::Args),
    Tiny(tiny::Args),
    Trace(trace::Args),
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    let done = match command {
        Command::Ab(args) => return ab::run(&args),
        Command::Analyze(args) => analyze::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::GlobalReplay(args) => global_replay::run(&args),
        Command::DropReplay(args) => drop_replay::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Io(args) => io::run(&args),
        Command::Pack(args) => pack::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Sweep(args) => sweep::run(&args),
        Command::Tiny(args) => tiny::run(&args),
        Command::Trace(args) => trace::run(&args),
    };
    done.map(|()| ExitCode::SUCCESS)
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(code) => code,
        Err(e) => {
            eprintln!("hotset: {e:#}");
            let usage = e.downcast_ref::<hotset::Error>().is_some_and(|e| e.kind == ErrorKind::Argument);
            ExitCode::from(if usage { 2 } else { 1 })
        }
    }
}
