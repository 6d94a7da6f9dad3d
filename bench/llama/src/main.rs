//! `hotset-llama`: stock llama.cpp, with hotset attached the way any engine would attach it: by the C ABI and the ggml adapter.
//!
//! It is the proof that the two work on a real engine (the logits through slots are those of the resident run, bit for bit), and the
//! tool that decodes, records traces and measures perplexity under every setting.

mod args;
mod decode;
mod engine;
mod ffi;
mod fnv;
mod hook;
mod lazy_map;
mod perplexity;
mod quality;
mod report;
mod text;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
// Of its Rust only the bootstrap of `quality` is called; this keeps its extern "C" functions in the program.
use hotset as _;

const EXAMPLES: &str = "\
Examples:
  The engine alone, and through 24 slots of each layer's 64 experts. The logits are the same, bit for bit:
    hotset-llama decode -m model.gguf -p \"In the beginning\" -n 100 --no-hook
    hotset-llama decode -m model.gguf -p \"In the beginning\" -n 100 --slots 24

  A cache of 7.5 GB, reranking and cold drop on, the routing recorded:
    hotset-llama decode -m model.gguf -f prompt.txt -n 500 --cache-bytes 7.5G --lambda 0.1 --drop 0.5 --trace run.q4rt

  What do the policies cost in quality?
    hotset-llama perplexity -m model.gguf -f text.txt --no-hook
    hotset-llama perplexity -m model.gguf -f text.txt --slots 24 --lambda 0.1 --drop 0.5

  The same for many settings at once, token by token against the unmodified model:
    hotset-llama quality -m model.gguf -f text.txt --slots 24 --drops 0,0.5,0.75,1 --lambdas 0,0.12

  An experiment within one decode, and its log:
    hotset-llama decode -m model.gguf -p \"In the beginning\" -n 4000 --slots 24 --schedule plan.json --metrics run.csv

  For programs: one JSON object on stdout
    hotset-llama decode -m model.gguf -p Hello -n 32 --slots 24 --json | jq .logits_fnv

The environment (HOTSET_SLOTS, HOTSET_LAMBDA, ...: see hotset_params_from_env in hotset.h) is read first; flags win.
Exit status: 0 success, 1 failure, 2 wrong usage.";

/// llama.cpp decoding a Mixture-of-Experts model whose experts hotset keeps.
#[derive(Parser)]
#[command(version, after_help = EXAMPLES, max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Continue a prompt
    Decode(Box<decode::Decode>),
    /// Measure how well a text is foretold, one token a pass
    Perplexity(Box<perplexity::Perplexity>),
    /// Compare settings with the unmodified model: perplexity, divergence, agreement
    Quality(Box<quality::Quality>),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Decode(args) => decode::run(&args),
        Command::Perplexity(args) => perplexity::run(&args),
        Command::Quality(args) => quality::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
