//! `hotset tiny`: makes a model of random weights.

use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;
use hotset::model::Model;
use hotset::model::quant::{TYPE_F16, TYPE_F32, TYPE_Q2_0};
use hotset::model::tiny::{self, TinyParams};
use serde_json::json;

use crate::output;

/// Make a Mixture-of-Experts model of random weights (qwen3moe, byte tokenizer), which llama.cpp loads
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  hotset tiny -o t.gguf                                   1 MB, made at once
  hotset tiny -o t.gguf --experts 64 --k 6 --layers 8     flags change the default model
  hotset tiny -o big.gguf --preset target-2l              1.5 GB: 512 experts of 3 x 460,800 bytes in 2 layers
  hotset tiny -o s.gguf --shards 3                        s-00001-of-00003.gguf and so on

The same flags and seed give the same bytes. What it says is noise: use it for shapes, speed and tests.")]
pub struct Args {
    /// The file to make; with --shards, the name before -00001-of-0000N
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
    /// Where to start from; the other flags change it
    #[arg(long, value_enum, default_value = "default")]
    preset: Preset,
    /// Layers, all with experts
    #[arg(long, value_name = "N")]
    layers: Option<u32>,
    /// Width of the model (n_embd); a multiple of 64 for q2_0
    #[arg(long, value_name = "N")]
    width: Option<u32>,
    /// Experts of each layer
    #[arg(long, value_name = "N")]
    experts: Option<u32>,
    /// Experts that each token uses
    #[arg(long, value_name = "N")]
    k: Option<u32>,
    /// Width of one expert; a multiple of 64 for q2_0
    #[arg(long, value_name = "N")]
    ffn: Option<u32>,
    /// Attention heads
    #[arg(long, value_name = "N")]
    heads: Option<u32>,
    /// Heads of keys and values; divides --heads
    #[arg(long, value_name = "N")]
    kv_heads: Option<u32>,
    /// Width of one head; even
    #[arg(long, value_name = "N")]
    head_dim: Option<u32>,
    /// Type of the expert weights
    #[arg(long = "type", value_enum, value_name = "TYPE")]
    kind: Option<Kind>,
    /// Context in tokens
    #[arg(long, value_name = "TOKENS")]
    ctx: Option<u32>,
    /// Files; with more than one, the first holds metadata only
    #[arg(long, value_name = "N")]
    shards: Option<u32>,
    /// Seed of the random weights
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Print one JSON object of what was made
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Preset {
    /// 4 layers of 16 experts, 1 MB
    Default,
    /// 2 layers of the target's shape, 1.5 GB
    #[value(name = "target-2l")]
    Target2l,
}

#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    #[value(name = "q2_0")]
    Q2_0,
    F16,
    F32,
}

impl Args {
    fn params(&self) -> TinyParams {
        let base = match self.preset {
            Preset::Default => TinyParams::default(),
            Preset::Target2l => TinyParams::target_2l(),
        };
        let kind = self.kind.map(|k| match k {
            Kind::Q2_0 => TYPE_Q2_0,
            Kind::F16 => TYPE_F16,
            Kind::F32 => TYPE_F32,
        });
        TinyParams {
            name: base.name,
            layers: self.layers.unwrap_or(base.layers),
            width: self.width.unwrap_or(base.width),
            heads: self.heads.unwrap_or(base.heads),
            kv_heads: self.kv_heads.unwrap_or(base.kv_heads),
            head_dim: self.head_dim.unwrap_or(base.head_dim),
            experts: self.experts.unwrap_or(base.experts),
            k: self.k.unwrap_or(base.k),
            ffn: self.ffn.unwrap_or(base.ffn),
            expert_type: kind.unwrap_or(base.expert_type),
            context: self.ctx.unwrap_or(base.context),
            seed: self.seed.unwrap_or(base.seed),
            shards: self.shards.unwrap_or(base.shards),
        }
    }
}

pub fn run(args: &Args) -> Result<()> {
    let params = args.params();
    let style = "{wide_bar} {decimal_bytes} of {decimal_total_bytes}, {decimal_bytes_per_sec}, {eta} left";
    let bar = output::late_bar(params.data_bytes()?, style);
    let made = tiny::write(&params, &args.out, &mut |n| output::advance(&bar, n));
    bar.finish_and_clear();
    let made = made?;
    // Opening what was made is the check that it is sound, and says what it is.
    let model = Model::open(&made[0].0)?;
    let total: u64 = made.iter().map(|(_, bytes)| bytes).sum();
    let experts = &model.experts;
    let expert_bytes = experts.layers[0].expert_bytes();
    if args.json {
        let files: Vec<_> = made.iter().map(|(path, bytes)| json!({"path": path, "bytes": bytes})).collect();
        return output::print_json(&json!({
            "files": files, "bytes": total, "architecture": model.architecture(), "layers": params.layers,
            "width": params.width, "heads": params.heads, "kv_heads": params.kv_heads, "head_dim": params.head_dim,
            "experts": params.experts, "k": params.k, "ffn": params.ffn, "type": experts_type(&params),
            "context": params.context, "seed": params.seed, "expert_bytes": expert_bytes,
            "experts_bytes": experts.total_bytes(),
        }));
    }
    let names: Vec<String> = made.iter().map(|(p, n)| format!("{} ({})", p.display(), output::bytes(*n))).collect();
    output::print(&output::facts(&[
        ("made", names.join("\n      ")),
        (
            "with",
            format!(
                "{} layers of {} experts, {} used a token, {} an expert in {}",
                params.layers,
                params.experts,
                params.k,
                output::bytes(expert_bytes),
                experts_type(&params)
            ),
        ),
    ]))
}

fn experts_type(params: &TinyParams) -> String {
    hotset::model::quant::type_name(params.expert_type)
}
