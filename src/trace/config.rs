//! What a recorder is told: its configuration, what is resident, and the reasons that the sidecar counts by.

use serde_json::Value;

use crate::error::{Result, err};
use crate::trace::sidecar::{Model, Settings, SettingsFrom, Shape, Sidecar};

/// Why tokens are not in a trace, or why what is resident had to be noted: the words that the sidecar uses. The hook
/// may have others.
pub mod reason {
    /// Recording began.
    pub const START: &str = "start";
    /// All blocks were with the writer: the disk is slower than the tokens come.
    pub const QUEUE_FULL: &str = "queue full";
    /// A batch of more tokens than there are blocks.
    pub const BATCH_TOO_LARGE: &str = "batch larger than the queue";
    pub const PREFILL: &str = "prefill not recorded";
    pub const FEWER_TOKENS: &str = "layer saw fewer tokens";
    pub const MORE_TOKENS: &str = "layer saw more tokens";
    /// A layer out of order, left out, or twice.
    pub const LAYER_ORDER: &str = "layers not in order";
    /// A row missing, out of order, or without its top_m candidates.
    pub const ROWS: &str = "rows not complete";
    pub const ABORTED: &str = "pass aborted";
    pub const NO_CANDIDATES: &str = "router gave no candidates";
    pub const SETTINGS: &str = "settings changed";
    pub const RESET: &str = "reset";
    pub const WRITE_FAILED: &str = "write failed";
    pub const SIDECAR_FULL: &str = "sidecar full";
    /// What was said to be resident names no layer's experts: a fault of the caller.
    pub const SNAPSHOT: &str = "snapshot not valid";
}

/// What a recorder needs to know.
#[derive(Clone, Debug)]
pub struct RecorderConfig {
    /// Layers with experts.
    pub n_layers: u16,
    /// The most experts that a layer has.
    pub n_experts: u16,
    /// Candidates a record: no more than the experts of the smallest layer.
    pub top_m: u16,
    /// Blocks in the spool, `n_layers * (4 * top_m + 5)` bytes each. A pass needs one a token, so with `record_prefill`
    /// at least the engine's batch; for decoding 64 are plenty.
    pub queue_tokens: usize,
    /// Record prefill passes too.
    pub record_prefill: bool,
    /// Record the range of each whole row of scores, to `<trace>.range`.
    pub row_range: bool,
    pub sidecar: SidecarInit,
}

impl Default for RecorderConfig {
    fn default() -> Self {
        Self {
            n_layers: 0,
            n_experts: 0,
            top_m: 64,
            queue_tokens: 64,
            record_prefill: false,
            row_range: false,
            sidecar: SidecarInit::default(),
        }
    }
}

/// What the sidecar says from the beginning.
#[derive(Clone, Debug, Default)]
pub struct SidecarInit {
    pub model: Model,
    /// The model's block index of each layer; empty = 0, 1, ...
    pub blocks: Vec<u32>,
    /// Experts of each layer; empty = `n_experts` in each.
    pub n_experts: Vec<u32>,
    /// Experts that a token uses.
    pub k: u32,
    pub score_space: String,
    pub settings: Settings,
}

/// What is resident at a moment: of each layer the experts, oldest use first, and what else a replay needs to go on
/// from there (`null` if nothing).
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    pub layers: Vec<Vec<u16>>,
    pub state: Value,
}

impl From<Vec<Vec<u16>>> for Snapshot {
    fn from(layers: Vec<Vec<u16>>) -> Self {
        Self { layers, state: Value::Null }
    }
}

/// The sidecar before the first token, if the configuration makes sense.
pub(super) fn first_sidecar(config: &RecorderConfig) -> Result<Sidecar> {
    let RecorderConfig { n_layers, n_experts, top_m, .. } = *config;
    let init = &config.sidecar;
    let or = |given: &[u32], default: fn(u32, u32) -> u32| match given {
        [] => (0..n_layers.into()).map(|layer| default(layer, n_experts.into())).collect(),
        given => given.to_vec(),
    };
    let shape = Shape {
        blocks: or(&init.blocks, |layer, _| layer),
        n_experts: or(&init.n_experts, |_, n| n),
        k: init.k,
        top_m: top_m.into(),
    };
    if n_layers == 0 || top_m == 0 || config.queue_tokens == 0 {
        let queue = config.queue_tokens;
        return Err(err!(Argument, "trace: {n_layers} layers, top_m {top_m}, queue of {queue} tokens: none may be 0"));
    }
    if shape.blocks.len() != shape.n_experts.len() {
        let (blocks, layers) = (shape.blocks.len(), shape.n_experts.len());
        return Err(err!(Argument, "trace: {blocks} blocks, n_experts of {layers} layers"));
    }
    if let Some(layer) = shape.n_experts.iter().position(|&n| n < top_m.into()) {
        return Err(err!(Argument, "trace: top_m {top_m}, {} experts in layer {layer}", shape.n_experts[layer]));
    }
    init.settings.check(shape.n_experts.len())?;
    Ok(Sidecar {
        model: init.model.clone(),
        shape,
        score_space: init.score_space.clone(),
        settings: vec![SettingsFrom { token: 0, settings: init.settings.clone() }],
        row_range: config.row_range,
        ..Sidecar::default()
    })
}
