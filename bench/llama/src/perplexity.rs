//! `perplexity`: how well the model foretells a text. Stepped one token a pass, so that every token meets the policies.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Map, Value, json};

use crate::args::{HookArgs, Load};
use crate::engine::{Engine, Logits, Token};
use crate::report::{self, Digest, Outcome, per_second, seconds};

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
    let mut text = std::fs::read(&args.file).with_context(|| args.file.display().to_string())?;
    if let Some(limit) = args.bytes {
        text.truncate(whole_characters(&text, limit));
    }
    let mut engine = Engine::open(&args.load, &args.hook)?;
    let mut tokens = engine.tokenize(&text)?;
    let bos = engine.bos();
    if bos.is_some() && tokens.first() == bos.as_ref() {
        // Every window begins with its own.
        tokens.remove(0);
    }
    if tokens.len() < 2 {
        bail!("{}: {} tokens are too short a text", args.file.display(), tokens.len());
    }
    let mut run = Run {
        batch: if args.batch { args.load.ubatch as usize } else { 1 },
        prefill: args.batch,
        digest: Digest::new(),
        nll: 0.0,
        scored: 0,
        fed: 0,
        windows: 0,
        time: Duration::ZERO,
        progress: Progress::new(tokens.len() as u64),
    };
    let mut rest = tokens.as_slice();
    while !rest.is_empty() {
        let taken = run.window(&mut engine, bos, rest)?;
        rest = &rest[taken..];
    }
    run.progress.end();
    let outcome = Outcome::of(&engine)?;
    if args.load.json {
        report::line(&run.json(args, &engine, text.len(), outcome.as_ref()).to_string())
    } else {
        run.print(&engine, text.len(), outcome.as_ref())
    }
}

struct Run {
    /// Tokens in one llama_decode.
    batch: usize,
    prefill: bool,
    digest: Digest,
    nll: f64,
    scored: usize,
    fed: usize,
    windows: usize,
    time: Duration,
    progress: Progress,
}

impl Run {
    /// Scores as many of the tokens as a context holds, beginning with an empty one; returns how many. Each token of the text is scored
    /// once, but for the first of a window without a beginning of text, which nothing foretells.
    fn window(&mut self, engine: &mut Engine, bos: Option<Token>, tokens: &[Token]) -> Result<usize> {
        engine.restart();
        self.windows += 1;
        let room = engine.n_ctx as usize;
        // What goes into the model, and what each of its outputs is to foretell.
        let taken = tokens.len().min(if bos.is_some() { room } else { room + 1 });
        let mut input: Vec<Token> = bos.into_iter().chain(tokens[..taken].iter().copied()).collect();
        let targets = input[1..].to_vec();
        // Nothing is left to be foretold after the last.
        input.pop();
        for (input, targets) in input.chunks(self.batch).zip(targets.chunks(self.batch)) {
            let start = Instant::now();
            engine.decode(input, Logits::All, self.prefill)?;
            self.time += start.elapsed();
            self.fed += input.len();
            for (i, &target) in targets.iter().enumerate() {
                let logits = engine.logits(i as i32)?;
                self.digest.add(logits);
                self.nll += surprise(logits, target as usize);
                self.scored += 1;
            }
            let perplexity = self.perplexity();
            self.progress.at(self.fed as u64, perplexity);
        }
        Ok(taken)
    }

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

/// -ln of the probability that the logits give to the target; in f64, with the largest taken out first.
fn surprise(logits: &[f32], target: usize) -> f64 {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - top).exp()).sum();
    sum.ln() - f64::from(logits[target] - top)
}

/// At most `limit` bytes, without cutting a UTF-8 character.
fn whole_characters(text: &[u8], limit: usize) -> usize {
    if limit >= text.len() {
        return text.len();
    }
    // Continuation bytes are 10xxxxxx; a character has at most three. Text in another encoding is cut at the limit.
    (limit.saturating_sub(3)..=limit).rev().find(|&end| text[end] & 0xC0 != 0x80).unwrap_or(limit)
}

/// A bar on a terminal, and only if it takes longer than two seconds.
struct Progress {
    len: u64,
    start: Instant,
    bar: Option<ProgressBar>,
}

impl Progress {
    fn new(len: u64) -> Self {
        Progress { len, start: Instant::now(), bar: None }
    }

    fn at(&mut self, position: u64, perplexity: f64) {
        if self.bar.is_none() && self.start.elapsed() > Duration::from_secs(2) && std::io::stderr().is_terminal() {
            let bar = ProgressBar::new(self.len);
            if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len} tokens, {eta} left, {msg}") {
                bar.set_style(style);
            }
            self.bar = Some(bar);
        }
        if let Some(bar) = &self.bar {
            bar.set_message(format!("perplexity {perplexity:.3}"));
            bar.set_position(position);
        }
    }

    fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{surprise, whole_characters};

    #[test]
    fn surprise_of_known_distributions() {
        assert!((surprise(&[5.0; 8], 3) - 8f64.ln()).abs() < 1e-12);
        assert!((surprise(&[0.0, 1000.0], 1)).abs() < 1e-12);
        assert!((surprise(&[0.0, 1000.0], 0) - 1000.0).abs() < 1e-9);
        assert!(surprise(&[f32::NAN, f32::NAN], 0).is_nan());
    }

    #[test]
    fn characters_stay_whole() {
        let text = "aä€".as_bytes(); // 1, 2 and 3 bytes
        let cut: Vec<usize> = (0..=7).map(|limit| whole_characters(text, limit)).collect();
        assert_eq!(cut, [0, 1, 1, 3, 3, 3, 6, 6]);
        assert_eq!(whole_characters(&[0x80; 9], 5), 5);
    }
}
