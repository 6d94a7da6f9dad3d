//! `hotset trace synth`: a made trace.

use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;
use hotset::trace::q4rt::write_header;
use hotset::trace::sidecar::{Resident, Shape};
use hotset::trace::synth::{Synth, SynthLayer, SynthParams};
use hotset::trace::{Phase, Placement, Sidecar, TokenRange};
use serde_json::json;

use super::files::NewFile;
use crate::output;

/// Make a trace: seeded, with popularity, topics, momentum and noise
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  hotset trace synth target.q4rt --preset qwen4exp --tokens 8192
  hotset trace synth uniform.q4rt --popularity 0 --topic 0 --momentum 0

The score of an expert is the sum of four normal parts, whose standard deviations are the options' values: popularity never
changes, a topic lasts --topic-tokens on average, momentum keeps --rho of itself from token to token, noise is new each time.
The same options give the same bytes.

Preset qwen4exp is fitted so that replays of it at 113 slots a layer miss about as often as was published for the model. It
is good for tests, for speed and for sizes, and is no evidence for a policy: its layers know nothing of each other. Uniform
traffic (only noise) is no test of a cache: no policy can be better than another.")]
pub struct Args {
    /// The new trace; an older one is replaced
    out: PathBuf,
    /// What the other options start from
    #[arg(long, value_enum, default_value = "small")]
    preset: Preset,
    #[arg(long, value_name = "N")]
    tokens: Option<u32>,
    #[arg(long, value_name = "N")]
    layers: Option<u16>,
    /// Experts of each layer
    #[arg(long, value_name = "N")]
    experts: Option<u16>,
    /// Candidates in a record
    #[arg(long, value_name = "N")]
    top_m: Option<u16>,
    /// Experts that a token uses: noted in the sidecar
    #[arg(long, value_name = "N")]
    k: Option<u16>,
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Standard deviation of what never changes
    #[arg(long, value_name = "SD")]
    popularity: Option<f32>,
    /// Standard deviation of a topic
    #[arg(long, value_name = "SD")]
    topic: Option<f32>,
    /// Tokens of a topic on average
    #[arg(long, value_name = "N")]
    topic_tokens: Option<u32>,
    /// Standard deviation of the autocorrelated part
    #[arg(long, value_name = "SD")]
    momentum: Option<f32>,
    /// What is left of it after a token, from 0 to below 1
    #[arg(long, value_name = "SHARE")]
    rho: Option<f32>,
    /// Standard deviation of what is new at each token
    #[arg(long, value_name = "SD")]
    noise: Option<f32>,
    /// Threads; else one a core. The bytes do not depend on it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    /// Print one JSON object of what was made
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Preset {
    /// 4 layers of 64 experts, k 4, 1024 tokens: 0.5 MB
    Small,
    /// 48 layers of 512 experts, k 10, 8192 tokens: 101 MB
    Qwen4exp,
}

impl Args {
    fn params(&self) -> SynthParams {
        let base = match self.preset {
            Preset::Small => SynthParams::default(),
            Preset::Qwen4exp => SynthParams::qwen4exp(),
        };
        SynthParams {
            layers: self.layers.unwrap_or(base.layers),
            experts: self.experts.unwrap_or(base.experts),
            top_m: self.top_m.unwrap_or(base.top_m),
            k: self.k.unwrap_or(base.k),
            tokens: self.tokens.unwrap_or(base.tokens),
            seed: self.seed.unwrap_or(base.seed),
            popularity: self.popularity.unwrap_or(base.popularity),
            topic: self.topic.unwrap_or(base.topic),
            topic_tokens: self.topic_tokens.unwrap_or(base.topic_tokens),
            momentum: self.momentum.unwrap_or(base.momentum),
            rho: self.rho.unwrap_or(base.rho),
            noise: self.noise.unwrap_or(base.noise),
        }
    }
}

pub fn run(args: &Args) -> Result<()> {
    let params = args.params();
    let mut synth = Synth::new(params.clone())?;
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.threads.map_or_else(cores, usize::from);
    let mut new = NewFile::create(&args.out)?;
    write_header(new.out(), &params.header())?;
    let bar = output::late_bar(params.tokens.into(), "{wide_bar} {pos} of {len} tokens, {eta} left");
    // as many tokens at a time as 8 MB hold
    let at_once = ((8 << 20) / params.header().token_bytes()).clamp(1, 256) as usize;
    let mut block = vec![0; at_once * params.header().token_bytes() as usize];
    let mut done = 0;
    while done < params.tokens {
        let n = at_once.min((params.tokens - done) as usize);
        for token in in_order(&mut synth, &mut block, n, threads, params.header().record_bytes()) {
            new.write(token)?;
        }
        done += n as u32;
        output::advance(&bar, done.into());
    }
    bar.finish_and_clear();
    new.finish_trace(Some(&sidecar(&params)), None)?;
    let bytes = 16 + u64::from(params.tokens) * params.header().token_bytes();
    if args.json {
        return output::print_json(&json!({ "trace": args.out, "bytes": bytes, "synth": facts(&params) }));
    }
    let SynthParams { layers, experts, k, top_m, tokens, seed, .. } = params;
    output::print(&output::facts(&[
        ("made", format!("{} ({})", args.out.display(), output::bytes(bytes))),
        ("with", format!("{tokens} tokens, {layers} layers of {experts} experts, k {k}, top_m {top_m}, seed {seed}")),
    ]))
}

/// The records of the next `n` tokens: computed layer by layer, given out token by token.
fn in_order<'a>(
    synth: &mut Synth,
    block: &'a mut [u8],
    n: usize,
    threads: usize,
    record: usize,
) -> impl Iterator<Item = &'a [u8]> + use<'a> {
    let layers = synth.layers_mut();
    let n_layers = layers.len();
    let each = n_layers.div_ceil(threads);
    let fill = |layers: &mut [SynthLayer], bytes: &mut [u8]| {
        for (layer, bytes) in layers.iter_mut().zip(bytes.chunks_exact_mut(n * record)) {
            bytes.chunks_exact_mut(record).for_each(|record| layer.next_record(record));
        }
    };
    let used = &mut block[..n_layers * n * record];
    std::thread::scope(|scope| {
        for (layers, bytes) in layers.chunks_mut(each).zip(used.chunks_mut(each * n * record)) {
            scope.spawn(move || fill(layers, bytes));
        }
    });
    let used: &'a [u8] = &block[..n_layers * n * record];
    (0..n).flat_map(move |token| (0..n_layers).map(move |layer| &used[(layer * n + token) * record..][..record]))
}

fn facts(p: &SynthParams) -> serde_json::Value {
    json!({
        "seed": p.seed, "layers": p.layers, "experts": p.experts, "top_m": p.top_m, "k": p.k, "tokens": p.tokens,
        "popularity": p.popularity, "topic": p.topic, "topic_tokens": p.topic_tokens, "momentum": p.momentum,
        "rho": p.rho, "noise": p.noise,
    })
}

fn sidecar(p: &SynthParams) -> Sidecar {
    let n = usize::from(p.layers);
    Sidecar {
        shape: Shape {
            blocks: (0..p.layers.into()).collect(),
            n_experts: vec![p.experts.into(); n],
            k: p.k.into(),
            top_m: p.top_m.into(),
        },
        score_space: "logit".to_owned(),
        ranges: vec![TokenRange {
            first: 0,
            n_tokens: p.tokens.into(),
            phase: Phase::Decode,
            position: 0,
            tokens_per_pass: 1,
            placement: vec![Placement::Slots],
            left_out_before: 0,
        }],
        resident: vec![Resident { reason: "start".to_owned(), layers: vec![Vec::new(); n], ..Resident::default() }],
        closed: true,
        more: [("synth".to_owned(), facts(p))].into_iter().collect(),
        ..Sidecar::default()
    }
}
