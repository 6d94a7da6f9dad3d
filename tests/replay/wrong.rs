//! What cannot be replayed: errors with the numbers, never a panic or a large allocation.

use hotset::cache::Policy;
use hotset::replay::{Column, KeepMap, Replay, Settings, recorded};
use hotset::route::Moce;
use hotset::trace::{Phase, Placement, Sidecar, TokenRange, Trace, sidecar};

use crate::{settings, trace_of};

fn detail(trace: &Trace, keep: Option<&KeepMap>, s: &Settings) -> String {
    Replay::new(trace, keep, None).all(std::slice::from_ref(s)).unwrap_err().detail
}

#[track_caller]
fn says(detail: &str, words: &[&str]) {
    assert!(words.iter().all(|w| detail.contains(w)), "{detail}");
}

#[test]
fn settings_that_the_reference_leaves_undefined() {
    let trace = trace_of(&[vec![vec![(0, 3.0), (1, 2.0), (2, 1.0)]; 70]], 8);
    let s = |policy, capacity, k, lambda| settings(policy, capacity, k, lambda, 3);
    says(&detail(&trace, None, &s(Policy::Lru, 1, 2, 0.0)), &["capacity 1", "2 experts"]);
    says(&detail(&trace, None, &s(Policy::Lru, 1, 0, 0.0)), &["k is 0"]);
    says(&detail(&trace, None, &Settings { warmup: 70, ..s(Policy::Lru, 2, 2, 0.0) }), &["70 tokens", "takes 70"]);
    says(&detail(&trace, None, &s(Policy::BeladyMin, 2, 2, 0.12)), &["belady_min", "0.12", "no such future"]);
    for lambda in [-0.1, f64::NAN, f64::INFINITY] {
        says(&detail(&trace, None, &s(Policy::Lru, 2, 2, lambda)), &["lambda"]);
    }
    for decay in [0.0, -1.0, 1.5, f64::NAN] {
        says(&detail(&trace, None, &Settings { decay, ..s(Policy::Ema, 2, 2, 0.0) }), &["decay"]);
    }
    assert!(Policy::by_name("lur").unwrap_err().detail.contains("inverse_router_ema"));
}

#[test]
fn keep_maps_that_are_none() {
    let parse = |text: &str| KeepMap::parse(text.as_bytes(), 2, 8).err().map(|e| e.detail).unwrap_or_default();
    says(&parse(r#"{"0": [1, 2]}"#), &["layer 1", "missing"]);
    says(&parse(r#"{"0": [1, 2], "1": [1, 1]}"#), &["layer 1", "expert 1 twice"]);
    says(&parse(r#"{"0": [1, 8], "1": [1, 2]}"#), &["layer 0", "expert 8", "below 8"]);
    says(&parse(r#"{"0": [1, 2], "1": [1, 2, 3]}"#), &["layer 1", "3", "2"]);
    says(&parse(r#"{"0": [], "1": []}"#), &["at least 1"]);
    for bad in [r#"{"0": [1.5], "1": [1]}"#, r#"{"0": [-1], "1": [1]}"#, r#"{"0": 3, "1": [1]}"#, "[]", "{", ""] {
        assert!(!parse(bad).is_empty(), "{bad}");
    }
    assert_eq!(parse(r#"{"0": [7, 2], "1": [3, 1], "2": "not ours"}"#), "");
}

#[test]
fn ids_that_the_model_does_not_have() {
    let mut rows = vec![vec![(0, 3.0), (1, 2.0), (2, 1.0)]; 70];
    rows[66][2].0 = 8;
    let trace = trace_of(&[rows.clone()], 8);
    says(&detail(&trace, None, &settings(Policy::Lru, 2, 2, 0.1, 3)), &["token 66", "layer 0", "expert 8"]);
    let keep = KeepMap::parse(br#"{"0": [0, 1, 2, 3]}"#, 1, 8).unwrap();
    says(&detail(&trace, Some(&keep), &settings(Policy::Lru, 2, 2, 0.0, 3)), &["token 66", "expert 8"]);
    rows[66] = vec![(1, 3.0), (1, 2.0), (2, 1.0)];
    let trace = trace_of(&[rows], 8);
    says(&detail(&trace, None, &settings(Policy::Lru, 2, 2, 0.0, 3)), &["layer 0", "token 66", "twice"]);
}

#[test]
fn scores_that_are_no_numbers() {
    let mut rows = vec![vec![(0, 3.0), (1, 2.0), (2, 1.0), (3, 0.0)]; 80];
    for (i, bad) in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 65504.0].into_iter().enumerate() {
        rows[70][i].1 = bad;
        rows[71 + i] = vec![(4, bad), (1, bad), (5, bad), (0, bad)];
    }
    let trace = trace_of(&[rows], 8);
    for &policy in Policy::ALL {
        let lambda = if policy.needs_future() { 0.0 } else { 0.2 };
        let s = settings(policy, 3, 2, lambda, 3);
        assert!(Replay::new(&trace, None, None).all(&[s]).is_ok(), "{policy:?}");
    }
}

/// A trace cut at every byte, with stray bytes behind it and with headers that lie: as many whole tokens as there are, or an error.
#[test]
fn cut_anywhere() {
    let rows = || vec![vec![(0u16, 3.0), (1, 2.0), (2, 1.0)]; 3];
    let layers = [rows(), rows()];
    let mut bytes = b"Q4RT\x01\x00\x02\x00\x08\x00\x03\x00\x00\x00\x00\x00".to_vec();
    for token in 0..3 {
        for layer in &layers {
            layer[token].iter().for_each(|c| bytes.extend_from_slice(&c.0.to_le_bytes()));
            layer[token].iter().for_each(|c| bytes.extend_from_slice(&half::f16::from_f64(c.1).to_le_bytes()));
        }
    }
    let s =
        Settings { warmup: 0, moce: Moce { lambda: 0.1, ..Moce::default() }, ..settings(Policy::Lru, 2, 2, 0.1, 3) };
    for said in [0u32, 1, 3, u32::MAX] {
        bytes[12..16].copy_from_slice(&said.to_le_bytes());
        for length in 0..=bytes.len() + 7 {
            let mut file = bytes.clone();
            file.resize(length, 0xff);
            let Ok(trace) = Trace::from_bytes(file) else {
                assert!(length < 16);
                continue;
            };
            let whole = (length - 16) / 24;
            assert_eq!(trace.n_tokens(), if said == 0 { whole } else { whole.min(said as usize) });
            let outcome = Replay::new(&trace, None, None).all(std::slice::from_ref(&s));
            assert_eq!(outcome.is_ok(), trace.n_tokens() > 0, "{length} bytes, {said} tokens said");
        }
    }
    // n_layers * top_m beyond any file, no layers, no experts, no candidates
    for (at, value) in [(6, 0xffffu16), (6, 0), (8, 0), (10, 0), (10, 0xffff)] {
        let mut file = bytes.clone();
        file[at..at + 2].copy_from_slice(&value.to_le_bytes());
        if let Ok(trace) = Trace::from_bytes(file) {
            assert_eq!(trace.n_tokens(), 0);
            assert!(Replay::new(&trace, None, None).all(std::slice::from_ref(&s)).is_err());
        }
    }
}

/// Sidecars of runs that a trace cannot bring back, or that do not fit it.
#[test]
fn recorded_runs_that_are_none() {
    let trace = trace_of(&[vec![vec![(0, 3.0), (1, 2.0), (2, 1.0)]; 5]], 8);
    let from = |settings: sidecar::Settings| Sidecar {
        shape: sidecar::Shape { blocks: vec![0], n_experts: vec![8], k: 2, top_m: 3 },
        settings: vec![sidecar::SettingsFrom { token: 0, settings }],
        ranges: vec![TokenRange {
            first: 0,
            n_tokens: 9,
            phase: Phase::Decode,
            position: 0,
            tokens_per_pass: 1,
            placement: vec![Placement::Slots],
            left_out_before: 0,
        }],
        ..Sidecar::default()
    };
    let sound = || sidecar::Settings {
        delta: "token_topk".to_owned(),
        policy: "lru".to_owned(),
        slots: vec![2],
        ..sidecar::Settings::default()
    };
    let run = recorded(&trace, &from(sound()), None).unwrap();
    assert_eq!((run.misses, run.tokens, run.picks), (vec![2], 5, 10));
    let wrong = |s: sidecar::Settings| recorded(&trace, &from(s), None).unwrap_err().detail;
    says(&wrong(sidecar::Settings { drop: 0.5, ..sound() }), &["F 0.5", "weights"]);
    says(&wrong(sidecar::Settings { slots: vec![], ..sound() }), &["no slots"]);
    says(&wrong(sidecar::Settings { slots: vec![1], ..sound() }), &["1 slots", "k 2"]);
    says(&wrong(sidecar::Settings { policy: "belady_min".to_owned(), ..sound() }), &["belady_min"]);
    says(&wrong(sidecar::Settings { policy: "mru".to_owned(), ..sound() }), &["mru"]);
    says(&wrong(sidecar::Settings { delta: "most".to_owned(), ..sound() }), &["most"]);
    let mut passed = from(sound());
    passed.ranges[0].placement = vec![Placement::PassThrough];
    says(&recorded(&trace, &passed, None).unwrap_err().detail, &["token 0", "2 slots"]);
    let mut other = from(sound());
    other.shape.top_m = 4;
    says(&recorded(&trace, &other, None).unwrap_err().detail, &["top_m 4"]);
    other.shape = sidecar::Shape { blocks: vec![0], n_experts: vec![2], k: 2, top_m: 3 };
    says(&recorded(&trace, &other, None).unwrap_err().detail, &["expert 2"]);
    assert!(recorded(&trace, &Sidecar::default(), None).is_err());
}

#[test]
fn a_replay_has_one_k() {
    let trace = trace_of(&[vec![vec![(0, 3.0), (1, 2.0), (2, 1.0)]; 70]], 8);
    let both = [settings(Policy::Lru, 2, 1, 0.0, 3), settings(Policy::Lru, 2, 2, 0.0, 3)];
    assert!(Replay::new(&trace, None, None).layer(0, &both, &mut Column::default()).is_err());
    assert!(Replay::new(&trace, None, None).layer(0, &[], &mut Column::default()).unwrap().is_empty());
}
