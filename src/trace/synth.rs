//! Made traces: a seeded generator of router scores, for tests and measurements where no recorded trace is at hand.
//!
//! The score of an expert, at a token, in a layer, is a sum of four parts, each a normal variable times its weight:
//!
//! - popularity: drawn once for each expert of each layer, and never changed;
//! - topic: drawn anew for all experts every few hundred tokens, in all layers at the same token;
//! - momentum: an autocorrelated part, `x' = rho x + sqrt(1 - rho^2) n`, by which an expert that is used stays near for a
//!   few tokens;
//! - noise: drawn anew at each token.
//!
//! A record holds the `top_m` highest scores, as a recorder would have written them. Every layer draws from a generator of
//! its own, seeded by the seed and its number: the same parameters give the same bytes, whoever computes the layers and in
//! which order. Only additions, multiplications and one square root are used, so they are the same on every machine.
//!
//! What it is good for: [`SynthParams::qwen4exp`] is fitted so that four cache replays of it come near the figures that
//! were published for the model it is named after. So the volume of misses, and how policies and reranking stand to each
//! other at that cache size, are realistic; traces for speed, memory and plumbing can be made at any size. What it is not:
//! evidence for a policy. Layers are alike and know nothing of each other, experts have no partners, prefill and decode do
//! not differ. With no popularity, topics and momentum the traffic is uniform, and no cache policy can then be better than
//! another: uniform traffic is no test of a cache.

use std::io::Write;

use fastrand::Rng;
use half::f16;

use crate::error::{Result, err};
use crate::trace::q4rt::{Header, encode_record, saturating_f16, write_header};

/// What trace to make.
#[derive(Clone, Debug, PartialEq)]
pub struct SynthParams {
    pub layers: u16,
    pub experts: u16,
    /// Candidates in a record.
    pub top_m: u16,
    /// Experts that a token uses: for the sidecar only.
    pub k: u16,
    pub tokens: u32,
    pub seed: u64,
    /// Standard deviation of the part that never changes.
    pub popularity: f32,
    /// Standard deviation of the part that a topic brings.
    pub topic: f32,
    /// How long a topic lasts: from 1/2 to 3/2 of this, evenly distributed.
    pub topic_tokens: u32,
    /// Standard deviation of the autocorrelated part.
    pub momentum: f32,
    /// How much of it is left after a token: 0 (nothing) to below 1.
    pub rho: f32,
    /// Standard deviation of the part that is new at each token.
    pub noise: f32,
}

impl Default for SynthParams {
    /// A trace of 500 kB that a test makes in a moment.
    fn default() -> Self {
        Self { layers: 4, experts: 64, top_m: 32, k: 4, tokens: 1024, ..Self::qwen4exp() }
    }
}

impl SynthParams {
    /// 48 layers of 512 experts, k = 10, fitted at 113 slots a layer over 8192 tokens. Misses per token in all layers, after
    /// a warm-up of 64 tokens (published / made): LRU 84.61 / 84.12, LFU 155 / 155.29, Belady 42.81 / 42.08, LRU reranked with
    /// lambda .12 63.21 / 63.77. Over 4096 tokens, and with other seeds, within 3 % of these.
    pub fn qwen4exp() -> Self {
        Self {
            layers: 48,
            experts: 512,
            top_m: 64,
            k: 10,
            tokens: 8192,
            seed: 1,
            popularity: 0.5,
            topic: 0.93,
            topic_tokens: 220,
            momentum: 1.0,
            rho: 0.7,
            noise: 0.54,
        }
    }

    /// The header of its file.
    pub fn header(&self) -> Header {
        Header { n_layers: self.layers, n_experts: self.experts, top_m: self.top_m, n_tokens: self.tokens }
    }

    fn check(&self) -> Result<()> {
        let Self { layers, experts, top_m, k, tokens, .. } = *self;
        if layers == 0 || tokens == 0 || top_m == 0 || top_m > experts || k == 0 || k > experts || experts == u16::MAX {
            return Err(err!(
                Argument,
                "synth: {layers} layers, {experts} experts, top_m {top_m}, k {k}, {tokens} tokens: at least 1 each, \
                 top_m and k at most the experts, below 65535 experts"
            ));
        }
        let weights = [self.popularity, self.topic, self.momentum, self.noise];
        if let Some(w) = weights.into_iter().find(|w| !(0.0..=1000.0).contains(w)) {
            return Err(err!(Argument, "synth: weights are 0 to 1000, {w} found"));
        }
        if !(0.0..1.0).contains(&self.rho) {
            return Err(err!(Argument, "synth: rho is 0 to below 1, {} found", self.rho));
        }
        if self.topic_tokens == 0 || self.topic_tokens > 1 << 30 {
            return Err(err!(Argument, "synth: topics of {} tokens: 1 to 2^30 wanted", self.topic_tokens));
        }
        Ok(())
    }
}

/// A trace in the making.
pub struct Synth {
    params: SynthParams,
    layers: Vec<SynthLayer>,
}

impl Synth {
    /// Nothing is drawn yet, save what the first token needs.
    pub fn new(params: SynthParams) -> Result<Self> {
        params.check()?;
        let layers = (0..params.layers).map(|layer| SynthLayer::new(&params, layer)).collect();
        Ok(Self { params, layers })
    }

    pub fn params(&self) -> &SynthParams {
        &self.params
    }

    /// The layers, which are independent of each other: each gives its records in the order of the tokens.
    pub fn layers_mut(&mut self) -> &mut [SynthLayer] {
        &mut self.layers
    }

    /// Writes the whole trace, one layer after the other in one thread.
    pub fn write(mut self, out: &mut impl Write) -> Result<()> {
        write_header(out, &self.params.header())?;
        let mut record = vec![0; self.params.header().record_bytes()];
        for token in 0..self.params.tokens {
            for layer in &mut self.layers {
                layer.next_record(&mut record);
                out.write_all(&record).map_err(|e| err!(Io, "token {token}: {e}"))?;
            }
        }
        Ok(())
    }
}

/// One layer of a made trace.
pub struct SynthLayer {
    rng: Rng,
    /// Ends topics: the same in every layer.
    clock: Rng,
    topic_tokens: u32,
    /// Tokens until the next topic.
    left: u32,
    topic: f32,
    popularity: Vec<f32>,
    /// Popularity and topic.
    base: Vec<f32>,
    momentum: Vec<f32>,
    rho: f32,
    /// The weight of what is new in the momentum.
    fresh: f32,
    noise: f32,
    keys: Vec<u64>,
    ids: Vec<u16>,
    scores: Vec<f16>,
}

impl SynthLayer {
    fn new(params: &SynthParams, layer: u16) -> Self {
        let (n, m) = (usize::from(params.experts), usize::from(params.top_m));
        let mut rng = Rng::with_seed(mix(params.seed ^ mix(u64::from(layer) + 1)));
        let popularity = (0..n).map(|_| params.popularity * normal(rng.u64(..))).collect();
        let momentum = (0..n).map(|_| params.momentum * normal(rng.u64(..))).collect();
        Self {
            rng,
            clock: Rng::with_seed(mix(params.seed)),
            topic_tokens: params.topic_tokens,
            left: 0,
            topic: params.topic,
            popularity,
            base: vec![0.0; n],
            momentum,
            rho: params.rho,
            fresh: params.momentum * (1.0 - params.rho * params.rho).sqrt(),
            noise: params.noise,
            keys: vec![0; n],
            ids: vec![0; m],
            scores: vec![f16::ZERO; m],
        }
    }

    /// The next token's record.
    ///
    /// # Panics
    /// If `out` is not the `4 * top_m` bytes of a record.
    pub fn next_record(&mut self, out: &mut [u8]) {
        if self.left == 0 {
            self.next_topic();
        }
        self.left -= 1;
        let experts = self.base.iter().zip(&mut self.momentum).zip(&mut self.keys).enumerate();
        for (expert, ((base, momentum), key)) in experts {
            *momentum = self.rho * *momentum + self.fresh * normal(self.rng.u64(..));
            let noise = self.noise * normal(self.rng.u64(..));
            *key = key_of(base + *momentum + noise, expert as u16);
        }
        let m = self.ids.len();
        if m < self.keys.len() {
            self.keys.select_nth_unstable(m - 1);
        }
        self.keys[..m].sort_unstable();
        for ((id, score), &key) in self.ids.iter_mut().zip(&mut self.scores).zip(&self.keys) {
            (*score, *id) = of_key(key);
        }
        assert!(encode_record(&self.ids, &self.scores, out).is_ok(), "{} bytes for a record of {m}", out.len());
    }

    fn next_topic(&mut self) {
        self.left = self.topic_tokens.div_ceil(2) + self.clock.u32(0..=self.topic_tokens);
        for (base, popularity) in self.base.iter_mut().zip(&self.popularity) {
            *base = popularity + self.topic * normal(self.rng.u64(..));
        }
    }
}

/// Sorts by falling score, then by rising id.
fn key_of(score: f32, expert: u16) -> u64 {
    let bits = score.to_bits();
    // rising for rising scores
    let ordered = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(!ordered) << 16 | u64::from(expert)
}

fn of_key(key: u64) -> (f16, u16) {
    let ordered = !((key >> 16) as u32);
    let bits = if ordered >> 31 == 1 { ordered & !(1 << 31) } else { !ordered };
    (saturating_f16(f32::from_bits(bits)), key as u16)
}

/// Spreads neighbouring seeds.
fn mix(x: u64) -> u64 {
    let x = (x ^ x >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^ x >> 32
}

/// A number that is nearly normal, of variance 1: the sum of four even ones of 16 bits. Its tails end at 3.46.
fn normal(bits: u64) -> f32 {
    // two sums of two lanes side by side, then their sum
    let pairs = (bits & 0x0000_ffff_0000_ffff) + (bits >> 16 & 0x0000_ffff_0000_ffff);
    let sum = (pairs & 0xffff_ffff) + (pairs >> 32);
    // less the mean, 4 * 65535 / 2; the variance of one is (2^32 - 1) / 12
    (sum as f32 - 131_070.0) * 2.642_899_8e-5
}
