//! Random-weight qwen3moe models of any size, which llama.cpp loads: for tests, benchmarks and demonstrations.
//!
//! `TinyParams` is checked, becomes a list of planned tensors (shape, type, and by what rule the weights are drawn), and
//! `write` streams them to one file or to shards. Every tensor draws from a generator of its own, seeded by the seed
//! and its place in the list, so that the same parameters give the same bytes however the model is split.
//!
//! The spread of each kind of weight is that of a freshly initialised network: activations and logits stay finite, and
//! the router's logits have a standard deviation near 1, so that no expert takes everything.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use fastrand::Rng;
use half::f16;

use super::quant::{Q2_0_BYTES, TYPE_F16, TYPE_F32, TYPE_Q2_0, type_info, type_name};
use super::shard_path;
use super::write::{GgufWriter, MetaValue, TensorSpec};
use crate::error::{Error, Result, err};

/// Tokens of the vocabulary: three special ones, 256 bytes, and the space.
pub const VOCAB: u32 = 260;

/// What model to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TinyParams {
    pub name: String,
    pub layers: u32,
    /// n_embd.
    pub width: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    /// Experts of each layer.
    pub experts: u32,
    /// Experts that each token uses.
    pub k: u32,
    /// Width of one expert.
    pub ffn: u32,
    /// ggml's type number of the expert weights: Q2_0 (42), F16 (1) or F32 (0).
    pub expert_type: u32,
    /// Tokens of context.
    pub context: u32,
    pub seed: u64,
    /// Files; with more than one, the first holds metadata only, as llama.cpp's splitter can write it.
    pub shards: u32,
}

impl Default for TinyParams {
    /// A model of 1 MB that a test makes in a moment.
    fn default() -> Self {
        Self {
            name: "tiny-random".to_owned(),
            layers: 4,
            width: 128,
            heads: 4,
            kv_heads: 2,
            head_dim: 32,
            experts: 16,
            k: 4,
            ffn: 64,
            expert_type: TYPE_Q2_0,
            context: 512,
            seed: 1,
            shards: 1,
        }
    }
}

impl TinyParams {
    /// Two layers of the target's shape: 512 experts, 10 used, one expert 3 x 460,800 bytes; 1.49 GB.
    pub fn target_2l() -> Self {
        Self {
            name: "target-2l".to_owned(),
            layers: 2,
            width: 2560,
            heads: 20,
            kv_heads: 4,
            head_dim: 128,
            experts: 512,
            k: 10,
            ffn: 640,
            context: 4096,
            ..Self::default()
        }
    }

    /// `Argument`, with the reason, where no such model can be.
    pub fn check(&self) -> Result<()> {
        let counts = [
            ("layers", self.layers, 4096),
            ("width", self.width, 1 << 20),
            ("heads", self.heads, 4096),
            ("kv heads", self.kv_heads, 4096),
            ("head dim", self.head_dim, 1 << 16),
            ("experts", self.experts, u16::MAX.into()),
            ("k", self.k, u16::MAX.into()),
            ("ffn", self.ffn, 1 << 20),
            ("context", self.context, 1 << 24),
            ("shards", self.shards, u16::MAX.into()),
        ];
        if let Some((what, n, most)) = counts.into_iter().find(|(_, n, most)| *n == 0 || n > most) {
            return Err(err!(Argument, "{what} is {n}: 1 to {most} are possible"));
        }
        if self.k > self.experts {
            return Err(err!(Argument, "k is {}, but a layer has {} experts", self.k, self.experts));
        }
        if self.heads % self.kv_heads != 0 {
            return Err(err!(Argument, "{} heads cannot share {} kv heads evenly", self.heads, self.kv_heads));
        }
        if self.head_dim % 2 != 0 {
            return Err(err!(Argument, "head dim is {}: rotary positions want an even one", self.head_dim));
        }
        if ![TYPE_Q2_0, TYPE_F16, TYPE_F32].contains(&self.expert_type) {
            return Err(err!(Argument, "experts of {}: q2_0, f16, f32 are possible", type_name(self.expert_type)));
        }
        let block = type_info(self.expert_type).map_or(1, |t| t.block);
        for (what, n) in [("width", self.width), ("ffn", self.ffn)] {
            if n % block != 0 {
                let kind = type_name(self.expert_type);
                return Err(err!(Argument, "{what} is {n}: rows of {kind} are multiples of {block} elements"));
            }
        }
        let tensors = 3 + 12 * self.layers;
        if self.shards > tensors + 1 {
            return Err(err!(Argument, "{} shards for {tensors} tensors and one of metadata", self.shards));
        }
        Ok(())
    }

    /// The files that `write` makes for that `out`: itself, or `out` with `-00001-of-0000N` before its `.gguf`.
    pub fn paths(&self, out: &Path) -> Result<Vec<PathBuf>> {
        if self.shards == 1 {
            return Ok(vec![out.to_owned()]);
        }
        let name = super::file_name(out)?;
        let stem = name.strip_suffix(".gguf").unwrap_or(name);
        let dir = out.parent().unwrap_or(Path::new(""));
        Ok((0..self.shards).map(|i| shard_path(dir, stem, i, self.shards)).collect())
    }

    /// Bytes of all tensors, for a progress bar; padding and headers come on top.
    pub fn data_bytes(&self) -> Result<u64> {
        Ok(self.plan()?.iter().map(|p| p.spec.bytes).sum())
    }

    /// All tensors, in the order of the trained model that the project's tests use.
    fn plan(&self) -> Result<Vec<Planned>> {
        self.check()?;
        let [d, f, e, v] = [self.width, self.ffn, self.experts, VOCAB].map(u64::from);
        let q = u64::from(self.heads) * u64::from(self.head_dim);
        let kv = u64::from(self.kv_heads) * u64::from(self.head_dim);
        let hd = u64::from(self.head_dim);
        let fan_in = |n: u64| 1.0 / (n as f32).sqrt();
        // What is added to the residual stream shrinks with depth.
        let residual = 1.0 / (2.0 * self.layers as f32).sqrt();
        let mut plan = Vec::new();
        let mut add = |name: String, ne: &[u64], kind: u32, rule: Rule| -> Result<()> {
            plan.push(Planned { spec: TensorSpec::new(name, ne, kind)?, rule });
            Ok(())
        };
        add("token_embd.weight".into(), &[d, v], TYPE_F16, Rule::Normal(0.4))?;
        add("output_norm.weight".into(), &[d], TYPE_F32, Rule::Ones)?;
        add("output.weight".into(), &[d, v], TYPE_F16, Rule::Normal(0.5 * fan_in(d)))?;
        for i in 0..self.layers {
            let name = |n: &str| format!("blk.{i}.{n}.weight");
            add(name("attn_norm"), &[d], TYPE_F32, Rule::Ones)?;
            add(name("ffn_norm"), &[d], TYPE_F32, Rule::Ones)?;
            add(name("attn_q_norm"), &[hd], TYPE_F32, Rule::Ones)?;
            add(name("attn_k_norm"), &[hd], TYPE_F32, Rule::Ones)?;
            add(name("ffn_gate_inp"), &[d, e], TYPE_F32, Rule::Normal(fan_in(d)))?;
            add(name("attn_q"), &[d, q], TYPE_F16, Rule::Normal(fan_in(d)))?;
            add(name("attn_k"), &[d, kv], TYPE_F16, Rule::Normal(fan_in(d)))?;
            add(name("attn_v"), &[d, kv], TYPE_F16, Rule::Normal(fan_in(d)))?;
            add(name("attn_output"), &[q, d], TYPE_F16, Rule::Normal(fan_in(q) * residual))?;
            add(name("ffn_gate_exps"), &[d, f, e], self.expert_type, Rule::Normal(fan_in(d)))?;
            add(name("ffn_up_exps"), &[d, f, e], self.expert_type, Rule::Normal(fan_in(d)))?;
            add(name("ffn_down_exps"), &[f, d, e], self.expert_type, Rule::Normal(fan_in(f) * residual))?;
        }
        Ok(plan)
    }

    /// Architecture, shape and the byte-level tokenizer.
    fn put_metadata(&self, w: &mut GgufWriter) {
        let file_type = match self.expert_type {
            TYPE_F32 => 0_u32,
            TYPE_F16 => 1,
            _ => 41, // llama.cpp's number for "mostly Q2_0"
        };
        w.put("general.architecture", "qwen3moe").put("general.name", self.name.as_str());
        w.put("general.description", "Random weights, for tests and measurements");
        w.put("general.file_type", file_type).put("general.quantization_version", 2);
        for (key, v) in [
            ("context_length", self.context),
            ("embedding_length", self.width),
            ("block_count", self.layers),
            ("feed_forward_length", self.ffn),
            ("expert_feed_forward_length", self.ffn),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("attention.key_length", self.head_dim),
            ("attention.value_length", self.head_dim),
            ("rope.dimension_count", self.head_dim),
            ("expert_count", self.experts),
            ("expert_used_count", self.k),
            ("vocab_size", VOCAB),
        ] {
            w.put(format!("qwen3moe.{key}"), v);
        }
        w.put("qwen3moe.rope.freq_base", MetaValue::F32(10000.0));
        w.put("qwen3moe.attention.layer_norm_rms_epsilon", MetaValue::F32(1e-6));
        let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
        tokens.extend((0..=255).map(|b| format!("<0x{b:02X}>")));
        tokens.push("\u{2581}".to_owned());
        // 2 unknown, 3 control, 6 byte, 1 normal.
        let kinds = [vec![2, 3, 3], vec![6; 256], vec![1]].concat();
        let (key, n) = (|k: &str| format!("tokenizer.ggml.{k}"), tokens.len());
        w.put(key("model"), "llama").put(key("pre"), "default").put(key("tokens"), MetaValue::Strings(tokens));
        w.put(key("scores"), MetaValue::F32s(vec![0.0; n])).put(key("token_type"), MetaValue::I32s(kinds));
        w.put(key("unknown_token_id"), 0).put(key("bos_token_id"), 1).put(key("eos_token_id"), 2);
        for (k, v) in [("add_bos_token", true), ("add_eos_token", false), ("add_space_prefix", false)] {
            w.put(key(k), MetaValue::Bool(v));
        }
    }
}

/// Makes the model. `progress` is told the tensor bytes written so far, about once a megabyte. Returns each file
/// and its length in bytes. On an error the files begun are removed.
pub fn write(params: &TinyParams, out: &Path, progress: &mut dyn FnMut(u64)) -> Result<Vec<(PathBuf, u64)>> {
    let plan = params.plan()?;
    let paths = params.paths(out)?;
    let mut made = Vec::new();
    let mut total = 0;
    let parts = parts(&plan, params.shards);
    for (no, (path, part)) in paths.iter().zip(parts).enumerate() {
        let result = write_file(params, path, no, plan.len(), &plan[part.clone()], part.start, &mut |n| {
            total += n;
            progress(total);
        });
        match result {
            Ok(bytes) => made.push((path.clone(), bytes)),
            Err(e) => {
                made.iter().for_each(|(p, _)| remove(p));
                return Err(e);
            }
        }
    }
    Ok(made)
}

/// One file: all of the model, or shard `no` with the tensors `plan`, the first of which is number `first`.
fn write_file(
    params: &TinyParams,
    path: &Path,
    no: usize,
    n_tensors: usize,
    plan: &[Planned],
    first: usize,
    progress: &mut dyn FnMut(u64),
) -> Result<u64> {
    let mut w = GgufWriter::new();
    if no == 0 {
        params.put_metadata(&mut w);
    }
    if params.shards > 1 {
        w.put("split.no", MetaValue::U16(no as u16));
        w.put("split.count", MetaValue::U16(params.shards as u16));
        w.put("split.tensors.count", MetaValue::I32(n_tensors as i32));
    }
    for p in plan {
        w.tensor(p.spec.clone());
    }
    let io = |e: std::io::Error| err!(Io, "{}: {e}", path.display());
    let mut file = BufWriter::with_capacity(64 * 1024, File::create(path).map_err(io)?);
    let mut rng = Rng::with_seed(0);
    let bytes = w.write_to(&mut file, |i, offset, chunk| {
        if offset == 0 {
            rng = Rng::with_seed(params.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (first + i) as u64);
        }
        plan[i].fill(&mut rng, chunk);
        progress(chunk.len() as u64);
        Ok(())
    });
    let bytes = bytes.map_err(|e| Error::new(e.kind, format!("{}: {}", path.display(), e.detail)));
    let done = bytes.and_then(|bytes| file.flush().map(|()| bytes).map_err(io));
    if done.is_err() {
        remove(path);
    }
    done
}

/// Removes a file that we began. Half a model under its final name would look like a model; that it cannot be removed
/// is not the error to report.
fn remove(path: &Path) {
    let _ = std::fs::remove_file(path);
}

/// Which tensors go into which file: none into the first of several, the rest by bytes, at least one each.
fn parts(plan: &[Planned], shards: u32) -> Vec<std::ops::Range<usize>> {
    if shards == 1 {
        return vec![0..plan.len(); 1];
    }
    let files = shards as usize - 1;
    let total: u64 = plan.iter().map(|p| p.spec.bytes).sum();
    let mut parts = vec![0..0; 1];
    let (mut at, mut bytes) = (0, 0);
    for f in 0..files {
        let start = at;
        let goal = total / files as u64 * (f as u64 + 1);
        let last = plan.len() - (files - 1 - f); // one is left for each file that follows
        while at < last && (at == start || bytes < goal || f + 1 == files) {
            bytes += plan[at].spec.bytes;
            at += 1;
        }
        parts.push(start..at);
    }
    parts
}

/// How a tensor's weights are drawn.
#[derive(Clone, Copy, Debug)]
enum Rule {
    Ones,
    /// About normal, mean 0, with that standard deviation.
    Normal(f32),
}

struct Planned {
    spec: TensorSpec,
    rule: Rule,
}

impl Planned {
    fn fill(&self, rng: &mut Rng, chunk: &mut [u8]) {
        match (self.rule, self.spec.ggml_type) {
            (Rule::Normal(std), TYPE_Q2_0) => fill_q2_0(rng, std, chunk),
            (rule, TYPE_F16) => {
                chunk.chunks_exact_mut(2).for_each(|b| b.copy_from_slice(&f16::from_f32(rule.draw(rng)).to_le_bytes()));
            }
            (rule, _) => chunk.chunks_exact_mut(4).for_each(|b| b.copy_from_slice(&rule.draw(rng).to_le_bytes())),
        }
    }
}

impl Rule {
    fn draw(self, rng: &mut Rng) -> f32 {
        match self {
            Self::Ones => 1.0,
            Self::Normal(std) => {
                // The sum of four uniform numbers is close to normal; its variance is 4/12 of their range squared.
                let r = rng.u64(..);
                let sum: u32 = (0..4).map(|i| (r >> (16 * i)) as u32 & 0xFFFF).sum();
                (sum as f32 - 2.0 * 65535.0) / 65535.0 * std * 3.0_f32.sqrt()
            }
        }
    }
}

/// Random blocks: each weight is -d, 0 or d alike, so the mean is 0 and the deviation d * sqrt(2/3); d varies by a
/// quarter about what `std` wants. (Drawing weights and quantising them would cost ten times as long for GBs.)
fn fill_q2_0(rng: &mut Rng, std: f32, chunk: &mut [u8]) {
    for block in chunk.chunks_exact_mut(Q2_0_BYTES) {
        let vary = 0.75 + rng.u8(..) as f32 / 510.0;
        block[..2].copy_from_slice(&f16::from_f32(std * 1.5_f32.sqrt() * vary).to_le_bytes());
        for eight in block[2..].chunks_exact_mut(8) {
            let r = rng.u64(..).to_le_bytes();
            eight.iter_mut().zip(r).for_each(|(b, r)| *b = CODES[usize::from(r)]);
        }
    }
}

/// A uniform byte to four codes of 0, 1 or 2. Entry 255 - i mirrors entry i (2 - code), so the mean is exactly 0.
static CODES: [u8; 256] = {
    let mut table = [0_u8; 256];
    let mut i = 0;
    while i < 128 {
        let (mut n, mut j) = (i * 81 / 256, 0);
        while j < 4 {
            let code = (n % 3) as u8;
            table[i] |= code << (2 * j);
            table[255 - i] |= (2 - code) << (2 * j);
            n /= 3;
            j += 1;
        }
        i += 1;
    }
    table
};
