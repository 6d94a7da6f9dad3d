//! Replays against the reference: its golden numbers, its own self-test and its command line where they are there, a literal
//! model of its rules on random traces, and files that lie.

mod cli;
mod golden;
mod model;
#[cfg(feature = "parquet")]
mod parquet;
#[path = "../common/program.rs"]
mod program;
mod rules;
#[path = "../common/shared.rs"]
mod shared;
mod wrong;

use half::f16;
use hotset::cache::Policy;
use hotset::replay::{KeepMap, LayerResult, Replay, Settings};
use hotset::route::Moce;
use hotset::trace::{Header, Trace, q4rt};
use model::Row;

/// A trace of these layers' rows (by layer, then token; all of the same length).
pub fn trace_of(layers: &[Vec<Row>], n_experts: usize) -> Trace {
    let top_m = layers[0][0].len();
    let header =
        Header { n_layers: layers.len() as u16, n_experts: n_experts as u16, top_m: top_m as u16, n_tokens: 0 };
    let mut bytes = Vec::new();
    q4rt::write_header(&mut bytes, &header).unwrap();
    let mut record = vec![0; header.record_bytes()];
    for token in 0..layers[0].len() {
        for layer in layers {
            let (ids, scores): (Vec<u16>, Vec<f16>) = layer[token].iter().map(|&(e, z)| (e, f16::from_f64(z))).unzip();
            q4rt::encode_record(&ids, &scores, &mut record).unwrap();
            bytes.extend_from_slice(&record);
        }
    }
    Trace::from_bytes(bytes).unwrap()
}

/// One setting over all layers.
pub fn replay(trace: &Trace, keep: Option<&KeepMap>, settings: &Settings) -> Vec<LayerResult> {
    let all = Replay::new(trace, keep, None).all(std::slice::from_ref(settings)).unwrap();
    all.into_iter().map(|layer| layer[0]).collect()
}

pub fn settings(policy: Policy, capacity: usize, k: usize, lambda: f64, top_j: u32) -> Settings {
    Settings { policy, capacity, k, moce: Moce { lambda, top_j, ..Moce::default() }, ..Settings::default() }
}
