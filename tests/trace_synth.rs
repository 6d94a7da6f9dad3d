//! Made traces: the same bytes for the same seed, scores as they should be, and a cache that finds in them what it should.
#![cfg(feature = "tools")]

use half::f16;
use hotset::ErrorKind;
use hotset::cache::{LayerCache, Placed};
use hotset::route::{Delta, Moce};
use hotset::trace::Trace;
use hotset::trace::synth::{Synth, SynthParams};

fn bytes(params: &SynthParams) -> Vec<u8> {
    let mut out = Vec::new();
    Synth::new(params.clone()).unwrap().write(&mut out).unwrap();
    out
}

fn trace(params: &SynthParams) -> Trace {
    Trace::from_bytes(bytes(params)).unwrap()
}

#[test]
fn the_same_seed_gives_the_same_bytes() {
    let params = SynthParams { tokens: 100, ..SynthParams::default() };
    let made = bytes(&params);
    assert_eq!(made.len(), 16 + 100 * 4 * 4 * 32);
    assert_eq!(made, bytes(&params));
    assert_ne!(made, bytes(&SynthParams { seed: 2, ..params.clone() }));
    // a longer one begins alike, and so does one of fewer layers in its own
    let longer = bytes(&SynthParams { tokens: 101, ..params.clone() });
    assert_eq!(longer[16..made.len()], made[16..]);
    let one = bytes(&SynthParams { layers: 1, ..params.clone() });
    assert_eq!(one[16..16 + 128], made[16..16 + 128]);
    // not only here and now: the generator is a promise to those who compare traces
    let fnv = made.iter().fold(0xcbf2_9ce4_8422_2325_u64, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    assert_eq!(fnv, 0x4dc5_6334_6ea6_b208, "{fnv:#x}");
    let trace = Trace::from_bytes(made).unwrap();
    assert_eq!(trace.verify(0..100, 5), []);
}

#[test]
fn edges_of_the_shape() {
    for (layers, experts, top_m, k) in [(1, 1, 1, 1), (3, 5, 5, 2), (2, 7, 1, 7)] {
        let params = SynthParams { layers, experts, top_m, k, tokens: 20, topic_tokens: 1, ..SynthParams::default() };
        let trace = trace(&params);
        assert_eq!(trace.verify(0..20, 5), []);
        assert_eq!(trace.n_tokens(), 20);
    }
    let good = SynthParams::default();
    for wrong in [
        SynthParams { layers: 0, ..good.clone() },
        SynthParams { tokens: 0, ..good.clone() },
        SynthParams { top_m: 65, ..good.clone() },
        SynthParams { k: 65, ..good.clone() },
        SynthParams { experts: u16::MAX, ..good.clone() },
        SynthParams { rho: 1.0, ..good.clone() },
        SynthParams { rho: f32::NAN, ..good.clone() },
        SynthParams { noise: -1.0, ..good.clone() },
        SynthParams { topic: f32::INFINITY, ..good.clone() },
        SynthParams { topic_tokens: 0, ..good.clone() },
    ] {
        assert_eq!(Synth::new(wrong).err().unwrap().kind, ErrorKind::Argument);
    }
}

/// The scores of one expert that is a candidate throughout.
fn series(params: &SynthParams) -> Vec<f64> {
    let params = SynthParams { layers: 1, experts: 16, top_m: 16, tokens: 4000, ..params.clone() };
    let trace = trace(&params);
    let rank = |token, expert| (0..16).find(|&rank| trace.record(token, 0).id(rank) == expert).unwrap();
    (0..4000).map(|token| trace.record(token, 0).score(rank(token, 3)).to_f64()).collect()
}

fn correlation(x: &[f64], lag: usize) -> f64 {
    let mean = x.iter().sum::<f64>() / x.len() as f64;
    let product = |lag: usize| x.iter().zip(&x[lag..]).map(|(a, b)| (a - mean) * (b - mean)).sum::<f64>();
    product(lag) / product(0)
}

#[test]
fn parts_are_what_they_are_called() {
    let none = SynthParams { popularity: 0.0, topic: 0.0, momentum: 0.0, noise: 0.0, ..SynthParams::default() };
    let noise = series(&SynthParams { noise: 2.0, ..none.clone() });
    let sd = (noise.iter().map(|x| x * x).sum::<f64>() / noise.len() as f64).sqrt();
    assert!((sd - 2.0).abs() < 0.1, "{sd}");
    assert!(correlation(&noise, 1).abs() < 0.06);
    let momentum = series(&SynthParams { momentum: 1.0, rho: 0.8, ..none.clone() });
    assert!((correlation(&momentum, 1) - 0.8).abs() < 0.06, "{}", correlation(&momentum, 1));
    assert!((correlation(&momentum, 3) - 0.512).abs() < 0.12, "{}", correlation(&momentum, 3));
    let mut popularity = series(&SynthParams { popularity: 1.0, ..none.clone() });
    popularity.dedup();
    assert_eq!(popularity.len(), 1);
    let mut topics = series(&SynthParams { topic: 1.0, topic_tokens: 100, ..none });
    topics.dedup();
    assert!((25..60).contains(&topics.len()), "{} topics in 4000 tokens", topics.len());
}

/// Misses a token of two layers, least recently used, 113 slots, after a warm-up of 64 tokens.
fn misses(trace: &Trace, lambda: f64) -> f64 {
    let (k, m) = (10, trace.top_m());
    let moce = Moce { lambda, top_j: 3, delta: Delta::TokenTopk };
    let mut misses = 0;
    for layer in 0..trace.n_layers() {
        let mut cache = LayerCache::lru(trace.n_experts(), 113);
        let (mut ids, mut scores) = (vec![0; m], vec![f16::ZERO; m]);
        for token in 0..trace.n_tokens() {
            trace.record(token, layer).copy_ids(&mut ids);
            trace.record(token, layer).copy_scores(&mut scores);
            let mut ranks: Vec<u16> = (0..k as u16).collect();
            if let Some(bonus) = moce.bonus(&scores, k, None) {
                moce.rerank(&ids, &scores, bonus, |e| cache.is_resident(e), &mut vec![0.0; k], &mut ranks);
            }
            assert!(cache.begin_batch(ranks.iter().map(|&rank| ids[rank as usize])));
            for &rank in &ranks {
                let miss = matches!(cache.place(ids[rank as usize]).unwrap(), Placed::Miss { .. });
                misses += u32::from(miss && token >= 64);
            }
            cache.end_token();
            cache.end_batch();
        }
    }
    f64::from(misses) / (trace.n_tokens() - 64) as f64
}

/// Loosely: two layers of 48, a quarter of the tokens.
#[test]
fn a_cache_misses_about_as_often_as_was_published() {
    let preset = SynthParams { layers: 2, tokens: 2048, ..SynthParams::qwen4exp() };
    let made = trace(&preset);
    for (lambda, published) in [(0.0, 84.6), (0.12, 63.2)] {
        let found = misses(&made, lambda) * 24.0;
        assert!((found / published - 1.0).abs() < 0.15, "lambda {lambda}: {found:.1}, published {published}");
    }
    // uniform traffic: 113 of 512 experts are there, whatever a policy does
    let uniform = SynthParams { popularity: 0.0, topic: 0.0, momentum: 0.0, tokens: 512, ..preset };
    let share = misses(&trace(&uniform), 0.0) / 20.0;
    assert!((share - (1.0 - 113.0 / 512.0)).abs() < 0.02, "{share}");
}
