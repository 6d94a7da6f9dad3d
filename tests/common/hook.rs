//! A small random model and a live hook on it: passes of made-up scores, and what they did.

#![allow(dead_code)] // each test uses its part

use std::path::{Path, PathBuf};

use hotset::Error;
use hotset::hook::{Adjacent, Batch, Config, Hook, Outcome};
use hotset::model::tiny::{self, TinyParams};
use hotset::route::ScoreSpace;
use hotset::store::Dense;
use hotset::trace::Phase;
use tempfile::TempDir;

pub const LAYERS: usize = 3;
pub const EXPERTS: usize = 24;
pub const K: usize = 4;

pub fn dir() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

pub fn model(dir: &Path) -> PathBuf {
    let path = dir.join("m.gguf");
    let params = TinyParams { layers: LAYERS as u32, experts: EXPERTS as u32, k: K as u32, ..TinyParams::default() };
    tiny::write(&params, &path, &mut |_| ()).unwrap();
    path
}

pub fn config(slots: u32) -> Config {
    Config { slots, dense: Dense::Leave, lanes: 2, top_m: 12, ..Config::default() }
}

pub fn batch(layer: usize, n_tokens: usize) -> Batch {
    Batch {
        block: layer as u32,
        n_tokens,
        n_experts: EXPERTS as u32,
        k: K as u32,
        phase: if n_tokens > 1 { Phase::Prefill } else { Phase::Decode },
        space: ScoreSpace::Logits,
        routed: true,
        normalised: true,
        tail: false,
        position: -1,
    }
}

/// Scores with drift, so that experts come back: deterministic, different by layer and token.
pub fn scores(token: usize, layer: usize) -> Vec<f32> {
    let noise = |x: u64| {
        let mut z = x.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((z ^ (z >> 27)) >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..EXPERTS)
        .map(|e| {
            2.0 * noise((e + 100 * layer + 7000 * (token / 12)) as u64)
                + noise((e + 1000 * layer + 99_991 * token) as u64)
        })
        .collect()
}

pub fn own_top_k(scores: &[f32]) -> Vec<i32> {
    let mut ids: Vec<i32> = (0..scores.len() as i32).collect();
    ids.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]));
    ids.truncate(K);
    ids
}

pub fn softmax(scores: &[f32], ids: &[i32]) -> Vec<f32> {
    let e: Vec<f32> = ids.iter().map(|&i| scores[i as usize].exp()).collect();
    e.iter().map(|x| x / e.iter().sum::<f32>()).collect()
}

pub struct Seen {
    /// By token of the pass and k: what ran, by expert id before slots.
    pub experts: Vec<i32>,
    pub slots: Vec<i32>,
    pub weights: Vec<f32>,
    pub outcome: Outcome,
}

/// One layer of a pass over tokens `first..first + n`.
pub fn layer(hook: &mut Hook, layer: usize, first: usize, n: usize) -> Result<Seen, Error> {
    let b = batch(layer, n);
    let mut z: Vec<f32> = (first..first + n).flat_map(|t| scores(t, layer)).collect();
    let mut ids: Vec<i32> = z.chunks(EXPERTS).flat_map(own_top_k).collect();
    hook.select(&b, &Adjacent { data: &mut z, width: EXPERTS }, &mut Adjacent { data: &mut ids, width: K })?;
    let mut weights: Vec<f32> = ids.chunks(K).zip(z.chunks(EXPERTS)).flat_map(|(i, z)| softmax(z, i)).collect();
    let experts = ids.clone();
    let mut w = Adjacent { data: &mut weights, width: K };
    let outcome = hook.admit(&b, &mut Adjacent { data: &mut ids, width: K }, Some(&mut w))?;
    if hook.store().slots() > 0 {
        hook.store().wait_layer(layer)?;
    }
    Ok(Seen { experts, slots: ids, weights, outcome })
}

pub fn pass(hook: &mut Hook, first: usize, n: usize) -> Vec<Seen> {
    (0..LAYERS).map(|l| layer(hook, l, first, n).unwrap()).collect()
}

/// Every slot named holds exactly the bytes of its expert, in all tensors.
pub fn check_bytes(hook: &Hook, l: usize, experts: &[i32], slots: &[i32]) {
    for (&expert, &slot) in experts.iter().zip(slots) {
        for (i, t) in hook.model().experts.layers[l].tensors.iter().enumerate() {
            let n = t.slice_bytes as usize;
            let bank = hook.store().bank(l, i).unwrap();
            let at = t.offset_bytes as usize + expert as usize * n;
            let wanted = &hook.model().files[t.file].map[at..at + n];
            // SAFETY: the bank's slot is inside the arena, and nothing is in flight.
            let found =
                unsafe { std::slice::from_raw_parts(bank.base.add(slot as usize * bank.stride_bytes as usize), n) };
            assert!(wanted == found, "layer {l} expert {expert} slot {slot} {}", t.name);
        }
    }
}

pub fn distinct(ids: &[i32]) -> bool {
    ids.chunks(K).all(|row| (0..K).all(|i| !row[..i].contains(&row[i])))
}
