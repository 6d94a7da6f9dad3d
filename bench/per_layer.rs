//! What the hook costs an engine at each MoE layer: the two per-layer calls through the C ABI, and where their time goes.
//!
//! `cargo bench --bench per_layer`. The shape is the target's: 512 experts, k 10, 64 candidates; all experts resident, so that no read is
//! timed. One iteration is one layer of one token: the layers of a pass follow one another as in a decode.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use half::f16;
use half::slice::HalfFloatSliceExt;
use hotset::abi::bindings::{self as c, hotset_batch, hotset_params};
use hotset::cache::{LayerCache, Policy, Spec};
use hotset::hook::{Adjacent, Batch, Config, Hook};
use hotset::model::tiny::{self, TinyParams};
use hotset::route::{Drop, Moce, ScoreSpace, candidates};
use hotset::store::Dense;
use hotset::trace::Phase;

const LAYERS: u32 = 8;
const EXPERTS: usize = 512;
const K: usize = 10;
const TOKENS: usize = 64;

/// Probabilities of a softmax router, different for each token.
fn rows() -> Vec<Vec<f32>> {
    let mut rng = fastrand::Rng::with_seed(7);
    let row = |_| {
        let z: Vec<f32> = (0..EXPERTS).map(|_| (rng.f32() + rng.f32() + rng.f32() + rng.f32() - 2.0) * 2.0).collect();
        let sum: f32 = z.iter().map(|z| z.exp()).sum();
        z.iter().map(|z| z.exp() / sum).collect()
    };
    (0..TOKENS).map(row).collect()
}

fn top_k(row: &[f32]) -> [i32; K] {
    let mut ids: Vec<i32> = (0..EXPERTS as i32).collect();
    ids.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]));
    std::array::from_fn(|i| ids[i])
}

/// A model of the target's number of experts, which are small: none is read while timing.
fn model() -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("model.gguf");
    let shape = TinyParams {
        layers: LAYERS,
        width: 64,
        ffn: 64,
        experts: EXPERTS as u32,
        k: K as u32,
        ..TinyParams::default()
    };
    tiny::write(&shape, &path, &mut |_| ()).unwrap();
    (dir, path)
}

fn both_calls(bench: &mut Criterion) {
    let (dir, path) = model();
    let gguf = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    let trace = std::ffi::CString::new(dir.path().join("t.q4rt").to_str().unwrap()).unwrap();
    let rows = rows();
    let chosen: Vec<[i32; K]> = rows.iter().map(|r| top_k(r)).collect();

    let mut group = bench.benchmark_group("select + admit through the C ABI");
    for (name, record, lambda, drop) in [
        ("cache only (admit)", false, 0.0, 0.0),
        ("recording", true, 0.0, 0.0),
        ("lambda .12", false, 0.12, 0.0),
        ("recording, lambda .12, drop .75", true, 0.12, 0.75),
    ] {
        let mut h = std::ptr::null_mut();
        // SAFETY: as hotset.h has it; strings and rows live through the calls.
        let params = unsafe {
            hotset_params {
                slots: EXPERTS as u32,
                dense: c::HOTSET_DENSE_LEAVE,
                lambda,
                drop,
                trace: if record { trace.as_ptr() } else { std::ptr::null() },
                ..c::hotset_params_default()
            }
        };
        // SAFETY: as above.
        assert_eq!(unsafe { c::hotset_open(gguf.as_ptr(), &params, &mut h) }, 0);
        let call = |i: usize| {
            let (layer, token) = (i as u32 % LAYERS, i / LAYERS as usize % TOKENS);
            let mut ids = chosen[token];
            let mut weights = [0.1f32; K];
            let batch = hotset_batch {
                struct_size: size_of::<hotset_batch>(),
                layer,
                n_tokens: 1,
                n_experts: EXPERTS as u32,
                k: K as u32,
                score_space: c::HOTSET_SCORES_SOFTMAX,
                flags: (c::HOTSET_BATCH_ROUTED | c::HOTSET_BATCH_NORMALISED) as u32,
                position: -1,
                ..Default::default()
            };
            let (row, at) = (rows[token].as_ptr(), ids.as_mut_ptr());
            // SAFETY: one row of EXPERTS scores, K ids and K weights.
            unsafe {
                if record || lambda > 0.0 {
                    assert_eq!(c::hotset_select(h, &batch, row, EXPERTS * 4, at, K * 4), 0);
                }
                assert_eq!(c::hotset_admit(h, &batch, at, K * 4, weights.as_mut_ptr(), K * 4, std::ptr::null_mut()), 0);
                assert_eq!(c::hotset_wait(h, layer, -1, c::HOTSET_ALL as u32), 0);
            }
            black_box(ids);
        };
        (0..4 * LAYERS as usize * TOKENS).for_each(call); // everything is resident from here on
        let mut i = 0;
        group.bench_function(name, |b| {
            b.iter(|| {
                call(i);
                i += 1;
            })
        });
        // SAFETY: the last use of it.
        unsafe { c::hotset_close(h) };
    }
    group.finish();
}

fn parts(bench: &mut Criterion) {
    let rows = rows();
    let chosen: Vec<[u16; K]> = rows.iter().map(|r| top_k(r).map(|e| e as u16)).collect();
    let mut group = bench.benchmark_group("parts");
    let mut i = 0;
    let mut next = move || {
        i += 1;
        i % TOKENS
    };
    let (mut scratch, mut ids, mut scores) = (candidates::Scratch::default(), [0u16; 64], [f16::ZERO; 64]);
    group.bench_function("candidates: 64 of 512", |b| {
        b.iter(|| {
            let t = next();
            candidates::select(&rows[t], ScoreSpace::Softmax, &chosen[t], &mut scratch, &mut ids, &mut scores)
        })
    });
    let moce = Moce { lambda: 0.12, ..Moce::default() };
    let (mut raised, mut ranks, mut wide) = ([0.0; K], [0u16; K], [0f32; 64]);
    group.bench_function("moce: 10 of 64", |b| {
        b.iter(|| {
            scores.convert_to_f32_slice(&mut wide);
            let bonus = moce.bonus(&wide, K, None).unwrap();
            moce.rerank(&ids, &wide, bonus, |e| e % 4 == 0, &mut raised, &mut ranks)
        })
    });
    let mut cache = LayerCache::lru(EXPERTS, EXPERTS as u32);
    group.bench_function("cache: a token of 10 hits", |b| {
        b.iter(|| {
            let token = &chosen[next()];
            assert!(cache.begin_batch(token.iter().copied()));
            token.iter().for_each(|&e| {
                black_box(cache.place(e).unwrap());
            });
            cache.end_token();
            cache.end_batch();
        })
    });
    let mut cache = LayerCache::lru(EXPERTS, 113);
    group.bench_function("cache: a token of 10, 113 slots", |b| {
        b.iter(|| {
            let token = &chosen[next()];
            assert!(cache.begin_batch(token.iter().copied()));
            token.iter().for_each(|&e| {
                black_box(cache.place(e).unwrap());
            });
            cache.end_token();
            cache.end_batch();
        })
    });
    // As the hook holds it.
    let mut cache = LayerCache::new(Policy::Lru.build(&Spec::new(EXPERTS)), EXPERTS, 113);
    group.bench_function("cache: the same, any policy: lru", |b| {
        b.iter(|| {
            let token = &chosen[next()];
            assert!(cache.begin_batch(token.iter().copied()));
            token.iter().for_each(|&e| {
                black_box(cache.place(e).unwrap());
            });
            cache.end_token();
            cache.end_batch();
        })
    });
    let drop = Drop { threshold: 0.75, ..Drop::default() };
    let (weights, mut dropped) = ([0.3, 0.2, 0.1, 0.1, 0.08, 0.07, 0.05, 0.04, 0.03, 0.03f32], [false; K]);
    group.bench_function("drop: decide on 10", |b| b.iter(|| drop.decide(&weights, |i| i % 3 > 0, 113, &mut dropped)));
    group.finish();
}

/// The same without the C border: what the border costs.
fn hook(bench: &mut Criterion) {
    let (dir, path) = model();
    let config = Config {
        slots: EXPERTS as u32,
        dense: Dense::Leave,
        trace: Some(dir.path().join("t.q4rt")),
        ..Config::default()
    };
    let mut hook = Hook::open(&path, config).unwrap();
    let mut rows = rows();
    let chosen: Vec<[i32; K]> = rows.iter().map(|r| top_k(r)).collect();
    let mut call = |i: usize| {
        let (layer, token) = (i as u32 % LAYERS, i / LAYERS as usize % TOKENS);
        let batch = Batch {
            block: layer,
            n_tokens: 1,
            n_experts: EXPERTS as u32,
            k: K as u32,
            phase: Phase::Decode,
            space: ScoreSpace::Softmax,
            routed: true,
            normalised: true,
            tail: false,
            position: -1,
        };
        let mut ids = chosen[token];
        let scores = Adjacent { data: &mut rows[token], width: EXPERTS };
        hook.select(&batch, &scores, &mut Adjacent { data: &mut ids, width: K }).unwrap();
        hook.admit(&batch, &mut Adjacent { data: &mut ids, width: K }, None::<&mut Adjacent<f32>>).unwrap();
    };
    (0..4 * LAYERS as usize * TOKENS).for_each(&mut call);
    let mut i = 0;
    bench.bench_function("select + admit in Rust, recording", |b| {
        b.iter(|| {
            call(i);
            i += 1;
        })
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(60).measurement_time(std::time::Duration::from_secs(3));
    targets = both_calls, hook, parts
}
criterion_main!(benches);
