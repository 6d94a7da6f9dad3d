//! Route analysis and the global budget: small made routings, properties, and the real traces where they are there.
#![cfg(feature = "tools")]

mod global;
mod made;
#[path = "../common/shared.rs"]
mod shared;

use std::io::Cursor;

use half::f16;
use hotset::ErrorKind;
use hotset::analyze::{DeltaShare, Popularity, Predicted, Reuse, WeightEntropy, predict, working_set};
use hotset::replay::global::{Batches, GlobalPolicy, Scope};
use hotset::replay::{Ranges, Replay, Settings};
use hotset::trace::q4rt::{encode_record, write_header};
use hotset::trace::routing::{LayerRows, RoutedPass};
use hotset::trace::sidecar::Shape;
use hotset::trace::{Header, Phase, Placement, Routing, Sidecar, TokenRange, Trace, import};
use proptest::prelude::*;

use made::{HEADING, csv, decode, percent, real, routings};

/// Adds up over layers what each predictor got right.
fn predicted(routing: &Routing) -> [Predicted; 4] {
    let layers = (0..routing.layers.len()).map(|layer| predict::predict(routing, layer));
    layers.fold(Default::default(), |sum: [Predicted; 4], one| std::array::from_fn(|i| sum[i].plus(one[i])))
}

#[test]
fn predictors_on_the_real_traces() {
    for (name, previous, run, prompt) in
        [("qwen", "38.0", "37.6", "17.9"), ("gemma", "35.7", "39.6", "26.8"), ("gptoss", "17.9", "26.7", "8.2")]
    {
        let Some(routing) = real(name) else { return };
        let shares = predicted(&routing).map(|p| percent(p.share().unwrap()));
        let random = percent(routing.k as f64 / 128.0);
        assert_eq!(shares, [random.as_str(), previous, run, prompt], "{name}");
        let at_1 = (0..routing.layers.len()).map(|layer| predict::overlap(&routing, layer, 1).at_lag[0]);
        assert_eq!(at_1.fold(Predicted::default(), Predicted::plus), predicted(&routing)[1]);
    }
}

#[test]
fn predictors_by_hand() {
    // a prompt of two tokens, three steps, and another turn without a prompt
    let pass = |phase, turn| RoutedPass { phase, turn };
    let routing = Routing {
        n_experts: 8,
        k: 2,
        blocks: vec![0],
        expert_bytes: vec![1],
        unknown_weights: 0,
        passes: vec![
            pass(Phase::Prefill, 0),
            pass(Phase::Decode, 0),
            pass(Phase::Decode, 0),
            pass(Phase::Decode, 0),
            pass(Phase::Decode, 1),
            pass(Phase::Decode, 1),
        ],
        layers: vec![LayerRows {
            ids: vec![6, 1, 1, 2, /**/ 6, 0, 0, 3, 3, 1, /**/ 5, 3, 7, 5],
            weights: vec![0.5; 14],
            residency: vec![],
            ends: vec![4, 6, 8, 10, 12, 14],
        }],
    };
    let [random, previous, run, prompt] = predict::predict(&routing, 0);
    assert_eq!((random.right, random.guesses), (2.5, 10));
    // 0; 3; then the turn changes; 5
    assert_eq!((previous.right, previous.guesses), (3.0, 6));
    // 3 (three times), then of 0 and 5 with two each the one that came first
    assert_eq!((run.right, run.guesses), (3.0, 6));
    // 1 (twice), then 6, which came before 2
    assert_eq!((prompt.right, prompt.guesses), (2.0, 6));
    let overlap = predict::overlap(&routing, 0, 3);
    let of = |p: &[Predicted]| p.iter().map(|p| (p.right, p.guesses)).collect::<Vec<_>>();
    assert_eq!(of(&overlap.at_lag), [(3.0, 6), (0.0, 2), (0.0, 0)]);
    assert_eq!(of(&overlap.within), [(3.0, 6), (1.0, 2), (0.0, 0)]);
    assert_eq!(working_set(&routing, 0, 1), Some(2.0));
    // {6 0 3}, {0 3 1}, {5 3 7}
    assert_eq!(working_set(&routing, 0, 2), Some(3.0));
    assert_eq!(working_set(&routing, 0, 3), Some(4.0));
    assert_eq!((working_set(&routing, 0, 4), working_set(&routing, 0, 0)), (None, None));
}

#[test]
fn popularity_by_hand() {
    let even = decode(4, &[vec![vec![0, 1], vec![2, 3]]]);
    let p = Popularity::of(&even, 0);
    assert_eq!((p.distinct(), p.experts_for(0.5), p.gini(), p.entropy()), (4, 2, 0.0, 2.0));
    let skew = Popularity::of(&decode(4, &[vec![vec![3]; 5]]), 0);
    assert_eq!((skew.distinct(), skew.experts_for(0.9), skew.gini(), skew.entropy()), (1, 1, 0.75, 0.0));
    assert_eq!((skew.share_of_top(1), p.share_of_top(3)), (1.0, 0.75));
}

#[test]
fn weights_that_are_not_known_are_counted() {
    let mut routing = decode(4, &[vec![vec![0, 1], vec![2, 3], vec![0, 3], vec![1, 2]]]);
    routing.layers[0].weights = vec![0.5, 0.5, 1.0, 0.0, f32::NAN, 0.5, 0.0, 0.0];
    let entropy = WeightEntropy::of(&routing, 0);
    assert_eq!(entropy, WeightEntropy { bits: 0.5, heaviest: 0.75, rows: 2, unknown: 2 });
}

/// A trace of one layer with these rows.
fn trace(n_experts: u16, rows: &[(Vec<u16>, Vec<f32>)]) -> Trace {
    let header = Header { n_layers: 1, n_experts, top_m: rows[0].0.len() as u16, n_tokens: rows.len() as u32 };
    let mut bytes = Vec::new();
    write_header(&mut bytes, &header).unwrap();
    let mut record = vec![0; header.record_bytes()];
    for (ids, scores) in rows {
        let scores: Vec<f16> = scores.iter().map(|&z| f16::from_f32(z)).collect();
        encode_record(ids, &scores, &mut record).unwrap();
        bytes.extend_from_slice(&record);
    }
    Trace::from_bytes(bytes).unwrap()
}

#[test]
fn a_q4rt_becomes_rows() {
    let low = f16::MIN.to_f32();
    let made = trace(5, &[(vec![4, 0, 1], vec![2.0, 2.0, -3.0]), (vec![1, 2, 0], vec![low; 3])]);
    let routing = Routing::of_trace(&made, None, Some(2)).unwrap();
    assert_eq!((routing.layers[0].ids.as_slice(), routing.unknown_weights), (&[4, 0, 1, 2][..], 2));
    assert_eq!(routing.layers[0].weights[..2], [0.5, 0.5]);
    assert!(routing.layers[0].weights[2..].iter().all(|w| w.is_nan()));
    assert_eq!(routing.passes, [RoutedPass { phase: Phase::Decode, turn: 0 }; 2]);

    let fault = |k| Routing::of_trace(&made, None, k).unwrap_err();
    assert_eq!(fault(None).kind, ErrorKind::Argument);
    assert_eq!(fault(Some(4)).detail, "k 4: from 1 to 3 wanted, as many as a record has candidates");
    let at_fault = |ids: Vec<u16>| {
        let made = trace(5, &[(vec![0, 1], vec![0.0; 2]), (ids, vec![0.0; 2])]);
        Routing::of_trace(&made, None, Some(2)).unwrap_err().detail
    };
    assert_eq!(at_fault(vec![3, 3]), "token 1 layer 0: expert 3 twice");
    assert_eq!(at_fault(vec![3, 5]), "token 1 layer 0: expert 5, the header says 5");

    // (2 - -3) of 10; a row without a range, one whose scores say nothing
    let made = trace(5, &[(vec![4, 1], vec![2.0, -3.0]), (vec![4, 1], vec![1.0, 0.0]), (vec![1, 2], vec![low; 2])]);
    let ranges = Ranges::new(vec![10.0, f32::NAN, 10.0], 1, 3).unwrap();
    let share = DeltaShare::of(&made, 2, &ranges, 0).unwrap();
    assert_eq!(share, DeltaShare { mean: 0.5, least: 0.5, most: 0.5, rows: 1, unknown: 2 });
    assert!(DeltaShare::of(&made, 3, &ranges, 0).is_err());
}

/// The same run as CSV and as what `trace import` makes of it: where all layers saw all tokens, the same routing.
#[test]
fn an_imported_trace_has_the_routing_of_its_csv() {
    let mut text = format!("# route_trace v1\n# n_expert=9\n{HEADING}");
    for (phase, step, layer, a, b) in [
        (0, 0, 0, 1, 2),
        (0, 1, 0, 2, 3),
        (0, 0, 1, 5, 4),
        (0, 1, 1, 0, 4),
        (1, 2, 0, 3, 1),
        (1, 2, 1, 4, 5),
        (1, 3, 0, 3, 8),
        (1, 3, 1, 1, 5),
    ] {
        text += &format!("0,{phase},{step},{layer},0,{a},0.75,1,9\n0,{phase},{step},{layer},1,{b},0.25,2,9\n");
    }
    let direct = csv(&text).unwrap();
    let mut out = Cursor::new(Vec::new());
    let options = import::ImportOptions::default();
    let sidecar: Sidecar = import::route_csv(&mut Cursor::new(text.as_bytes()), &mut out, options).unwrap();
    let imported = Trace::from_bytes(out.into_inner()).unwrap();
    let mut imported = Routing::of_trace(&imported, Some(&sidecar), None).unwrap();
    for (a, b) in imported.layers.iter_mut().zip(&direct.layers) {
        // scores are f16
        assert!(a.weights.iter().zip(&b.weights).all(|(a, b)| (a - b).abs() < 1e-3));
        a.weights.clone_from(&b.weights);
    }
    assert_eq!(imported, direct);
}

/// Passes as the sidecar has them: some left out, rows that are not a whole number of passes, a gap, tokens that no range tells of.
#[test]
fn passes_of_a_sidecar() {
    let made = trace(3, &vec![(vec![0, 1], vec![1.0, 0.0]); 12]);
    let range = |first, n_tokens, phase, position, tokens_per_pass, left_out_before| TokenRange {
        first,
        n_tokens,
        phase,
        position,
        tokens_per_pass,
        placement: vec![Placement::Slots],
        left_out_before,
    };
    let sidecar = Sidecar {
        shape: Shape { blocks: vec![7], n_experts: vec![3], k: 2, top_m: 2 },
        score_space: "none".into(),
        ranges: vec![
            range(0, 1, Phase::Prefill, 3, 4, 3),
            range(1, 5, Phase::Prefill, 4, 3, 0),
            range(6, 2, Phase::Decode, 9, 1, 0),
            range(8, 1, Phase::Decode, 0, 1, 0),
        ],
        ..Sidecar::default()
    };
    let routing = Routing::of_trace(&made, Some(&sidecar), None).unwrap();
    let passes: Vec<_> = routing.passes.iter().map(|p| (p.phase == Phase::Decode, p.turn)).collect();
    assert_eq!(routing.layers[0].ends, [2, 8, 12, 14, 16, 18, 20, 22, 24]);
    let prefill = [(false, 0); 3];
    let decode = [(true, 0), (true, 0), (true, 1), (true, 1), (true, 1), (true, 1)];
    assert_eq!(passes, [&prefill[..], &decode].concat());
    assert_eq!((routing.blocks, routing.unknown_weights), (vec![7], 24));
}

/// Hits by capacity from one pass, against the cache's own replay at each.
fn curve_is_the_replays(made: &Trace, k: usize) {
    let routing = Routing::of_trace(made, None, Some(k)).unwrap();
    let reuse = Reuse::of(&routing, 0);
    let hits = reuse.hits(Phase::Decode);
    let replay = Replay::new(made, None, None);
    for (capacity, &hits) in hits.iter().enumerate().take(made.n_experts()).skip(k) {
        let settings = Settings { capacity, k, warmup: 0, ..Settings::default() };
        let all = replay.all(std::slice::from_ref(&settings)).unwrap();
        assert_eq!(hits, all[0][0].picks - all[0][0].misses, "{capacity} slots");
    }
    assert_eq!(reuse.picks(Phase::Decode), (made.n_tokens() * k) as u64);
    let distinct = Popularity::of(&routing, 0).distinct() as u64;
    assert_eq!((reuse.first_uses, hits.last().copied()), ([0, distinct], Some(reuse.picks(Phase::Decode) - distinct)));
}

proptest! {
    #[test]
    fn the_hit_curve_is_the_replay_at_every_capacity(
        (k, rows) in (1..5usize).prop_flat_map(|k| {
            let row = proptest::sample::subsequence((0..12u16).collect::<Vec<_>>(), k).prop_shuffle();
            (Just(k), proptest::collection::vec(row, 1..60))
        })
    ) {
        let rows: Vec<_> = rows.into_iter().map(|ids| (ids, vec![0.0; k])).collect();
        curve_is_the_replays(&trace(12, &rows), k);
    }

    /// Whatever a CSV says: a fault, or rows that everything can be asked of.
    #[test]
    fn any_csv(
        changes in proptest::collection::vec((0..400usize, any::<u8>()), 0..4),
        cut in 0..400usize,
    ) {
        let mut text = format!("# n_expert=9\n{HEADING}").into_bytes();
        for (phase, step, layer) in [(0, 0, 0), (0, 1, 0), (0, 1, 1), (1, 2, 0), (1, 2, 1), (1, 3, 0), (1, 3, 1)] {
            let row = |slot, expert| format!("0,{phase},{step},{layer},{slot},{expert},0.5,1,9\n");
            text.extend((row(0, step + layer) + &row(1, 8 - step)).into_bytes());
        }
        changes.iter().for_each(|&(at, byte)| if let Some(old) = text.get_mut(at) { *old = byte });
        let keep = text.len() - if changes.is_empty() { 0 } else { cut % 40 };
        text.truncate(keep);
        match import::route_csv_routing(&mut Cursor::new(&text), None) {
            Ok(routing) => {
                for layer in 0..routing.layers.len() {
                    predict::predict(&routing, layer);
                    WeightEntropy::of(&routing, layer);
                    prop_assert_eq!(routing.layers[layer].ends.len(), routing.passes.len());
                    let distinct = Popularity::of(&routing, layer).distinct() as u64;
                    prop_assert_eq!(Reuse::of(&routing, layer).first_uses.iter().sum::<u64>(), distinct);
                }
                if let Ok(batches) = Batches::new(&routing, Some(vec![3; routing.layers.len()])) {
                    for &policy in GlobalPolicy::ALL {
 let all = batches.replay(20, policy, Scope::PerLayer, 0).all();
 prop_assert!(all.hits <= all.lookups);
}
                }
            }
            Err(e) => {
                prop_assert!(!changes.is_empty(), "{e}");
                prop_assert_eq!(e.kind, ErrorKind::Format);
            }
        }
    }

    #[test]
    fn working_sets_and_popularities_agree(routing in routings()) {
        for layer in 0..2 {
            let decode: Vec<Vec<u16>> = routing.rows(layer).filter(|(p, _)| p.phase == Phase::Decode).map(|(_, r)| r.to_vec()).collect();
            for window in 1..5 {
                let sizes: Vec<f64> = decode.windows(window).map(|w| {
                    let mut ids = w.concat();
                    ids.sort_unstable();
                    ids.dedup();
                    ids.len() as f64
                }).collect();
                let wanted = (!sizes.is_empty()).then(|| sizes.iter().sum::<f64>() / sizes.len() as f64);
                prop_assert_eq!(working_set(&routing, layer, window), wanted);
            }
            let p = Popularity::of(&routing, layer);
            let curve = Reuse::of(&routing, layer);
            prop_assert_eq!(p.distinct() as u64, curve.first_uses.iter().sum::<u64>());
            prop_assert!((0.0..1.0).contains(&p.gini()));
            prop_assert!(p.entropy() <= (p.distinct() as f64).log2() + 1e-9);
            prop_assert!(p.experts_for(0.5) <= p.experts_for(0.9) && p.experts_for(1.0) == p.distinct());
        }
    }
}
