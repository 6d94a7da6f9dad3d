//! `decode`: continues a prompt.

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Map, Value, json};

use crate::args::{HookArgs, Load};
use crate::engine::{Engine, Logits, Token};
use crate::report::{self, Digest, Outcome, per_second, seconds};

#[derive(Args)]
#[group(id = "text", required = true, multiple = false, args = ["prompt", "file"])]
pub struct Decode {
    #[command(flatten)]
    load: Load,
    /// The text to continue
    #[arg(short, long, value_name = "TEXT")]
    prompt: Option<String>,
    /// A file with the text to continue
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// How many tokens to generate
    #[arg(short, value_name = "N", default_value_t = 64)]
    n: usize,
    /// Go on after the model's end of text
    #[arg(long)]
    ignore_eos: bool,
    /// Leave the first N generated tokens out of tok/s: those that fill the cache
    #[arg(long, value_name = "N", default_value_t = 0)]
    warmup: usize,
    /// The prompt, too, one token a pass, as in decoding
    #[arg(long)]
    step: bool,
    /// Sample at this temperature; 0 takes the likeliest token
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true, value_parser = parse_temperature)]
    temp: f64,
    /// Of the sampling's random numbers
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    hook: HookArgs,
}

pub fn run(args: &Decode) -> Result<()> {
    let prompt = match (&args.prompt, &args.file) {
        (Some(text), _) => text.clone().into_bytes(),
        (None, Some(path)) => std::fs::read(path).with_context(|| path.display().to_string())?,
        (None, None) => bail!("no prompt"),
    };
    let mut engine = Engine::open(&args.load, &args.hook)?;
    let tokens = engine.tokenize(&prompt)?;
    if tokens.is_empty() {
        bail!("the prompt is empty, and the model has no beginning of text to start from");
    }
    if tokens.len() + args.n > engine.n_ctx as usize {
        bail!(
            "a prompt of {} tokens and {} more do not fit the context of {} tokens: see --ctx and -n",
            tokens.len(),
            args.n,
            engine.n_ctx
        );
    }
    engine.restart();
    let run = Run::new(args).go(&mut engine, &tokens)?;
    let outcome = Outcome::of(&engine)?;
    if args.load.json {
        report::line(&run.json(&engine, tokens.len(), outcome.as_ref()).to_string())
    } else {
        report::line("")?;
        run.print(&engine, tokens.len(), outcome.as_ref());
        Ok(())
    }
}

struct Run<'a> {
    args: &'a Decode,
    random: Random,
    digest: Digest,
    generated: Vec<Token>,
    text: Vec<u8>,
    /// Generated tokens that went back into the model: one less than there are, unless the end came first.
    fed: usize,
    prompt_time: Duration,
    /// Of each of them: decoding it, and choosing the one after it.
    times: Vec<Duration>,
    /// Of hotset's waits for reads: what had been waited when the first measured token began.
    waited_before: Duration,
}

impl<'a> Run<'a> {
    fn new(args: &'a Decode) -> Self {
        Run {
            args,
            random: Random(args.seed),
            digest: Digest::new(),
            generated: Vec::with_capacity(args.n),
            text: Vec::new(),
            fed: 0,
            prompt_time: Duration::ZERO,
            times: Vec::with_capacity(args.n),
            waited_before: Duration::ZERO,
        }
    }

    fn go(mut self, engine: &mut Engine, prompt: &[Token]) -> Result<Self> {
        let start = Instant::now();
        if self.args.step {
            for token in prompt {
                engine.decode(&[*token], Logits::Last, false)?;
            }
        } else {
            engine.decode(prompt, Logits::Last, true)?;
        }
        self.prompt_time = start.elapsed();
        let mut next = self.choose(engine)?;
        while self.generated.len() < self.args.n {
            if engine.is_end(next) && !self.args.ignore_eos {
                break;
            }
            self.take(engine, next)?;
            if self.generated.len() == self.args.n {
                break;
            }
            if let (true, Some(hook)) = (self.times.len() == self.args.warmup, &engine.hook) {
                self.waited_before = Duration::from_nanos(hook.stats()?.wait_ns);
            }
            let start = Instant::now();
            engine.decode(&[next], Logits::Last, false)?;
            self.times.push(start.elapsed());
            self.fed += 1;
            next = self.choose(engine)?;
        }
        Ok(self)
    }

    /// The next token. The digest of the logits is not part of the measured time.
    fn choose(&mut self, engine: &mut Engine) -> Result<Token> {
        let logits = engine.logits(-1)?;
        self.digest.add(logits);
        let start = Instant::now();
        let token = pick(logits, self.args.temp, &mut self.random);
        if let Some(last) = self.times.last_mut() {
            *last += start.elapsed();
        }
        Ok(token as Token)
    }

    /// Tokens per second after the warm-up, and the median time of a token in ms.
    fn speed(&self) -> (f64, f64) {
        let mut measured = self.times[self.args.warmup.min(self.times.len())..].to_vec();
        let total: Duration = measured.iter().sum();
        measured.sort_unstable();
        let median = measured.get(measured.len() / 2).map_or(0.0, |t| t.as_secs_f64() * 1e3);
        (per_second(measured.len(), total), median)
    }

    /// Of the measured tokens: ms waited for reads, a token.
    fn waited_ms(&self, outcome: Option<&Outcome>) -> f64 {
        let measured = self.times.len().saturating_sub(self.args.warmup);
        let waited = outcome.map_or(0, |o| o.wait_ns()) as f64 - self.waited_before.as_nanos() as f64;
        if measured == 0 { 0.0 } else { waited / 1e6 / measured as f64 }
    }

    fn take(&mut self, engine: &Engine, token: Token) -> Result<()> {
        self.generated.push(token);
        let piece = engine.piece(token);
        if !self.args.load.json {
            let mut out = std::io::stdout().lock();
            out.write_all(&piece).and_then(|()| out.flush()).context("stdout")?;
        }
        self.text.extend(piece);
        Ok(())
    }

    fn print(&self, engine: &Engine, n_prompt: usize, outcome: Option<&Outcome>) {
        eprintln!(
            "\nspeed:   {:.1} tok/s decode ({} tokens), {:.1} tok/s prompt ({} tokens{}), loaded in {}",
            self.speed().0,
            self.fed,
            per_second(n_prompt, self.prompt_time),
            n_prompt,
            if self.args.step { ", stepped" } else { "" },
            seconds(engine.load_time),
        );
        match outcome {
            Some(outcome) => outcome.print(),
            None => eprintln!("modes:   the engine alone, without hotset"),
        }
        if !self.digest.finite {
            eprintln!("warning: not all logits are finite");
        }
    }

    fn json(&self, engine: &Engine, n_prompt: usize, outcome: Option<&Outcome>) -> Value {
        let mut object = Map::new();
        let mut put = |key: &str, value: Value| object.insert(key.to_string(), value);
        put("text", json!(String::from_utf8_lossy(&self.text)));
        put("tokens", json!(self.generated));
        put("n_prompt", json!(n_prompt));
        put("n_decode", json!(self.fed));
        let (tok_s, median_ms) = self.speed();
        put("tok_s", json!(tok_s));
        put("token_ms_p50", json!(median_ms));
        put("token_wait_ms", json!(self.waited_ms(outcome)));
        put("prompt_tok_s", json!(per_second(n_prompt, self.prompt_time)));
        put("logits_fnv", json!(self.digest.hex()));
        put("finite", json!(self.digest.finite));
        report::add_json(&mut object, &self.args.load, &self.args.hook, engine, outcome);
        if let Some(Value::Object(settings)) = object.get_mut("settings") {
            settings.insert("n".into(), json!(self.args.n));
            settings.insert("step".into(), json!(self.args.step));
            settings.insert("temp".into(), json!(self.args.temp));
            settings.insert("seed".into(), json!(self.args.seed));
            settings.insert("ignore_eos".into(), json!(self.args.ignore_eos));
        }
        Value::Object(object)
    }
}

/// The index of the next token. NaNs are never chosen; where there is nothing else it is 0.
fn pick(logits: &[f32], temperature: f64, random: &mut Random) -> usize {
    let likeliest = (0..logits.len()).fold(None, |best: Option<usize>, i| match best {
        _ if logits[i].is_nan() => best,
        Some(b) if logits[b] >= logits[i] => best,
        _ => Some(i),
    });
    let Some(likeliest) = likeliest else { return 0 };
    if temperature <= 0.0 {
        return likeliest;
    }
    let top = f64::from(logits[likeliest]);
    let weight = |x: f32| if x.is_nan() { 0.0 } else { ((f64::from(x) - top) / temperature).exp() };
    let mut left = random.next() * logits.iter().map(|&x| weight(x)).sum::<f64>();
    for (i, &x) in logits.iter().enumerate() {
        left -= weight(x);
        if left < 0.0 {
            return i;
        }
    }
    // Reached through rounding, or an infinite logit.
    likeliest
}

/// splitmix64: the same tokens from the same seed on every machine.
struct Random(u64);

impl Random {
    /// In 0..1.
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

fn parse_temperature(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(t) if t.is_finite() && t >= 0.0 => Ok(t),
        _ => Err("a temperature is a number >= 0".to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::{Random, pick};

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        let mut random = Random(0);
        assert_eq!(pick(&[0.0, 3.0, 3.0, f32::NAN], 0.0, &mut random), 1);
        assert_eq!(pick(&[f32::NAN, f32::NEG_INFINITY], 0.0, &mut random), 1);
        assert_eq!(pick(&[f32::NAN, f32::NAN], 0.0, &mut random), 0);
    }

    #[test]
    fn sampling_follows_the_distribution_and_the_seed() {
        let logits = [0.0, 1.0f32.ln(), 2.0f32.ln(), f32::NEG_INFINITY];
        let draw = |seed| {
            let mut random = Random(seed);
            let mut counts = [0; 4];
            (0..4000).for_each(|_| counts[pick(&logits, 1.0, &mut random)] += 1);
            counts
        };
        let counts = draw(1);
        assert_eq!(counts, draw(1));
        assert_ne!(counts, draw(2));
        assert_eq!(counts[3], 0);
        for (count, share) in counts.into_iter().zip([0.25, 0.25, 0.5]) {
            assert!((f64::from(count) / 4000.0 - share).abs() < 0.03, "{counts:?}");
        }
    }
}
