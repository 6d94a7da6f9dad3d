//! `hotset inspect`: what is in a model, and where its bytes go.

use std::path::PathBuf;

use anyhow::Result;
use hotset::model::quant::type_name;
use hotset::model::{Model, MoeLayer, Part};
use serde_json::json;

use crate::output;

/// Show a model's layers, experts and sizes, from the headers alone
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  hotset inspect model.gguf
  hotset inspect model-00001-of-00004.gguf --json | jq .expert_bytes

Of a split model any shard will do. Sizes are decimal: 1 GB = 10^9 bytes.")]
pub struct Args {
    /// A GGUF file, or any shard of a split one
    model: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let model = Model::open(&args.model)?;
    if args.json { json(&model) } else { text(&model) }
}

fn text(model: &Model) -> Result<()> {
    let layers = &model.experts.layers;
    let dense = model.dense_bytes();
    let files: Vec<String> =
        model.files.iter().map(|f| format!("{} ({})", f.path.display(), output::bytes(f.len_bytes))).collect();
    let k = model.n_experts_used().map_or("not said".to_owned(), |k| k.to_string());
    let indent = format!("\n{:18}", "");
    let mut text = output::facts(&[
        ("architecture", model.architecture().unwrap_or("not said").to_owned()),
        ("files", files.join(&indent)),
        ("tensors", model.tensors.len().to_string()),
        ("MoE layers", layers.len().to_string()),
        ("experts a layer", range(layers.iter().map(|l| u64::from(l.n_experts)), |n| n.to_string())),
        ("used a token (k)", k),
        ("bytes an expert", range(layers.iter().map(MoeLayer::expert_bytes), output::bytes)),
        ("all experts", output::bytes(model.experts.total_bytes())),
        ("dense weights", output::bytes(dense)),
    ]);
    // Layers that look alike share one table.
    let mut shown: Vec<(&MoeLayer, Vec<u32>)> = Vec::new();
    for layer in layers {
        match shown.iter_mut().find(|(first, _)| alike(first, layer)) {
            Some((_, blocks)) => blocks.push(layer.block),
            None => shown.push((layer, vec![layer.block])),
        }
    }
    for (layer, blocks) in shown {
        text += &format!("\none expert of block {}, {} in each:\n", list(&blocks), layer.n_experts);
        let rows: Vec<Vec<String>> = layer.tensors.iter().map(|t| row(model, layer, &t.name)).collect();
        text += &output::table(&["tensor", "type", "shape", "bytes", "first at"], &rows);
    }
    output::print(&text)
}

fn row(model: &Model, layer: &MoeLayer, name: &str) -> Vec<String> {
    let Some((t, info)) = layer.tensors.iter().find(|t| t.name == name).zip(model.tensor(name)) else { return vec![] };
    let dims = match t.part {
        Part::Weight => 2,
        Part::Bias => 1,
        Part::Scale => 0,
    };
    let shape: Vec<String> = info.ne[..dims].iter().map(u64::to_string).collect();
    let shape = if dims == 0 { "1".to_owned() } else { shape.join(" x ") };
    vec![name.to_owned(), type_name(t.ggml_type), shape, t.slice_bytes.to_string(), t.offset_bytes.to_string()]
}

fn alike(a: &MoeLayer, b: &MoeLayer) -> bool {
    a.n_experts == b.n_experts
        && a.tensors.len() == b.tensors.len()
        && a.tensors.iter().zip(&b.tensors).all(|(a, b)| {
            (a.projection, a.part, a.ggml_type, a.slice_bytes) == (b.projection, b.part, b.ggml_type, b.slice_bytes)
        })
}

/// `3`, or `3 to 5` where they differ.
fn range(values: impl Iterator<Item = u64> + Clone, show: impl Fn(u64) -> String) -> String {
    match (values.clone().min(), values.max()) {
        (Some(min), Some(max)) if min != max => format!("{} to {}", show(min), show(max)),
        (Some(min), _) => show(min),
        _ => "none".to_owned(),
    }
}

/// `0-2, 5`: ascending numbers, runs joined.
fn list(numbers: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &n in numbers {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(n) => *last = n,
            _ => runs.push((n, n)),
        }
    }
    let runs = runs.iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") });
    runs.collect::<Vec<_>>().join(", ")
}

fn json(model: &Model) -> Result<()> {
    let files: Vec<_> = model.files.iter().map(|f| json!({"path": f.path, "bytes": f.len_bytes})).collect();
    let ranges = model.dense_ranges();
    let layers: Vec<_> = model.experts.layers.iter().map(layer_json).collect();
    let uniform = |values: Vec<u64>| values.windows(2).all(|w| w[0] == w[1]).then(|| values.first().copied()).flatten();
    output::print_json(&json!({
        "architecture": model.architecture(),
        "files": files,
        "n_tensors": model.tensors.len(),
        "n_layers": layers.len(),
        "n_experts": model.experts.n_experts(),
        "k": model.n_experts_used(),
        // null where it differs by layer
        "expert_bytes": uniform(model.experts.layers.iter().map(MoeLayer::expert_bytes).collect()),
        "experts_bytes": model.experts.total_bytes(),
        "dense_bytes": ranges.iter().map(|(_, r)| r.end - r.start).sum::<u64>(),
        "layers": layers,
    }))
}

fn layer_json(l: &MoeLayer) -> serde_json::Value {
    let tensors: Vec<_> = l
        .tensors
        .iter()
        .map(|t| {
            json!({
                "name": t.name, "type": type_name(t.ggml_type), "file": t.file,
                "offset_bytes": t.offset_bytes, "slice_bytes": t.slice_bytes,
            })
        })
        .collect();
    json!({ "block": l.block, "n_experts": l.n_experts, "expert_bytes": l.expert_bytes(), "tensors": tensors })
}

#[cfg(test)]
mod tests {
    #[test]
    fn lists() {
        assert_eq!(super::list(&[0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
        assert_eq!(super::list(&[]), "");
    }
}
