//! `perplexity`: how well the model foretells a text. Stepped one token a pass, so that every token meets the policies.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use serde_json::{Map, Value, json};

use crate::args::{HookArgs, Load};
use crate::engine::{Engine, Token};
use crate::report::{self, Digest, Outcome, per_second, seconds};
use crate::text::{self, Progress, Score};

#[derive(Args)]
pub struct Perplexity {
    #[command(flatten)]
    load: Load,
    /// The text
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// Only so many bytes from the text's beginning
    #[arg(long, value_name = "N")]
    bytes: Option<usize>,
    /// The ordinary way: micro-batches as prefill, which the policies leave alone unless --prefill says otherwise
    #[arg(long)]
    batch: bool,
    #[command(flatten)]
    hook: HookArgs,
}

pub fn run(args: &Perplexity) -> Result<()> {
    let text = text::read(&args.file, args.bytes)?;
    let mut engine = Engine::open(&args.load, &args.hook)?;
    let tokens = text::tokens(&engine, &text, &args.file)?;
    let mut run = Run {
        prefill: args.batch,
        digest: Digest::new(),
        nll: 0.0,
        scored: 0,
        fed: 0,
        windows: 0,
        time: Duration::ZERO,
        progress: Progress::new(tokens.len() as u64),
    };
    let batch = if args.batch { args.load.ubatch as usize } else { 1 };
    run.windows = text::walk(&mut engine, &tokens, batch, args.batch, &mut run)?;
    run.progress.end();
    let outcome = Outcome::of(&engine)?;
    if args.load.json {
        report::line(&run.json(args, &engine, text.len(), outcome.as_ref()).to_string())
    } else {
        run.print(&engine, text.len(), outcome.as_ref())
    }
}

struct Run {
    prefill: bool,
    digest: Digest,
    nll: f64,
    scored: usize,
    fed: usize,
    windows: usize,
    time: Duration,
    progress: Progress,
}

impl Score for Run {
    fn score(&mut self, logits: &[f32], target: Token) -> Result<()> {
        self.digest.add(logits);
        self.nll += text::surprise(logits, target as usize);
        self.scored += 1;
        Ok(())
    }

    fn decoded(&mut self, tokens: usize, time: Duration) {
        self.fed += tokens;
        self.time += time;
        let perplexity = self.perplexity();
        self.progress.at(self.fed as u64, format!("perplexity {perplexity:.3}"));
    }
}

impl Run {
    fn mean(&self) -> f64 {
        self.nll / self.scored.max(1) as f64
    }

    fn perplexity(&self) -> f64 {
        self.mean().exp()
    }

    fn bits_per_byte(&self, bytes: usize) -> f64 {
        self.nll / std::f64::consts::LN_2 / bytes.max(1) as f64
    }

    fn print(&self, engine: &Engine, bytes: usize, outcome: Option<&Outcome>) -> Result<()> {
        report::line(&format!(
            "perplexity {:.4} over {} tokens (nll {:.5} per token, {:.4} bits per byte)",
            self.perplexity(),
            self.scored,
            self.mean(),
            self.bits_per_byte(bytes)
        ))?;
        eprintln!(
            "speed:   {:.1} tok/s ({}), {} windows of {} tokens, loaded in {}",
            per_second(self.fed, self.time),
            if self.prefill { "micro-batches" } else { "one token a pass" },
            self.windows,
            engine.n_ctx,
            seconds(engine.load_time),
        );
        match outcome {
            Some(outcome) => outcome.print(),
            None => eprintln!("modes:   the engine alone, without hotset"),
        }
        if !self.digest.finite {
            eprintln!("warning: not all logits are finite");
        }
        Ok(())
    }

    fn json(&self, args: &Perplexity, engine: &Engine, bytes: usize, outcome: Option<&Outcome>) -> Value {
        let mut object = Map::new();
        let mut put = |key: &str, value: Value| object.insert(key.to_string(), value);
        put("perplexity", json!(self.perplexity()));
        put("nll", json!(self.mean()));
        put("bits_per_byte", json!(self.bits_per_byte(bytes)));
        put("tokens", json!(self.scored));
        put("fed", json!(self.fed));
        put("bytes", json!(bytes));
        put("windows", json!(self.windows));
        put("tok_s", json!(per_second(self.fed, self.time)));
        put("logits_fnv", json!(self.digest.hex()));
        put("finite", json!(self.digest.finite));
        report::add_json(&mut object, &args.load, &args.hook, engine, outcome);
        if let Some(Value::Object(settings)) = object.get_mut("settings") {
            settings.insert("batch".into(), json!(args.batch));
        }
        Value::Object(object)
    }
}
