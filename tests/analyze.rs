//! Route analysis and the global budget: small made routings, properties, and the real traces where they are there.
#![cfg(feature = "tools")]

use std::fs::File;
use std::io::{BufReader, Cursor};
use std::path::PathBuf;

use half::f16;
use hotset::ErrorKind;
use hotset::analyze::{DeltaShare, Popularity, Predicted, Reuse, WeightEntropy, predict, working_set};
use hotset::replay::global::{Batches, GlobalPolicy, Scope};
use hotset::replay::{Ranges, Replay, Settings};
use hotset::trace::q4rt::{encode_record, write_header};
use hotset::trace::routing::{LayerRows, RoutedPass};
use hotset::trace::{Header, Phase, Routing, Sidecar, Trace, import};
use proptest::prelude::*;

const HEADING: &str = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n";

/// A real trace by its name, or `None`, which is said.
fn real(name: &str) -> Option<Routing> {
    let given = std::env::var_os("HOTSET_SHARED").map(PathBuf::from);
    let shared = given.unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared"));
    let Ok(file) = File::open(shared.join("traces").join(name).with_extension("route.csv")) else {
        println!("skipped: {name}: no real traces (HOTSET_SHARED)");
        return None;
    };
    Some(import::route_csv_routing(&mut BufReader::new(file), None).unwrap())
}

fn csv(text: &str) -> hotset::Result<Routing> {
    import::route_csv_routing(&mut Cursor::new(text.as_bytes()), None)
}

/// To the digit that is printed.
fn percent(rate: f64) -> String {
    format!("{:.1}", 100.0 * rate)
}

/// One token a pass, all decode: by layer, by token.
fn decode(n_experts: usize, layers: &[Vec<Vec<u16>>]) -> Routing {
    let k = layers[0][0].len();
    let n = layers[0].len();
    let rows = |tokens: &Vec<Vec<u16>>| LayerRows {
        ids: tokens.concat(),
        weights: vec![1.0 / k as f32; n * k],
        residency: Vec::new(),
        ends: (1..=n).map(|token| token * k).collect(),
    };
    Routing {
        n_experts,
        k,
        blocks: (0..layers.len() as u32).collect(),
        expert_bytes: (0..layers.len() as u64).map(|layer| 10 + layer).collect(),
        unknown_weights: 0,
        passes: vec![RoutedPass { phase: Phase::Decode, turn: 0 }; n],
        layers: layers.iter().map(rows).collect(),
    }
}

#[test]
fn a_csv_keeps_what_not_all_layers_saw() {
    let mut text = format!("# route_trace v1\n# layer=0 expert_bytes=100\n# layer=1 expert_bytes=200\n{HEADING}");
    for (phase, step, layer, a, b) in
        [(0, 0, 0, 1, 2), (0, 1, 0, 2, 3), (0, 1, 1, 5, 4), (1, 2, 0, 3, 1), (1, 2, 1, 4, 5)]
    {
        text += &format!("0,{phase},{step},{layer},0,{a},0.75,1,0\n0,{phase},{step},{layer},1,{b},nan,0,0\n");
    }
    let routing = csv(&text).unwrap();
    assert_eq!((routing.n_experts, routing.k, routing.unknown_weights), (6, 2, 5));
    assert_eq!(routing.layers[0].ids, [1, 2, 2, 3, 3, 1]);
    assert_eq!(routing.layers[0].ends, [4, 6]);
    assert_eq!(routing.layers[1].ids, [5, 4, 4, 5]);
    assert_eq!(routing.layers[1].ends, [2, 4]);
    assert_eq!(routing.expert_bytes, [100, 200]);
    assert!(routing.layers[0].weights[1].is_nan() && routing.layers[0].weights[0] == 0.75);
    let rows: Vec<_> = routing.rows(0).map(|(pass, ids)| (pass.phase, ids.to_vec())).collect();
    assert_eq!(rows, [(Phase::Prefill, vec![1, 2]), (Phase::Prefill, vec![2, 3]), (Phase::Decode, vec![3, 1])]);

    let batches = Batches::new(&routing, None).unwrap();
    // prefill: 1, 2, 3 of layer 0 (2 was read and found), 5 and 4 of layer 1; decode: 3, 1 and 4, 5
    let recorded = batches.recorded().unwrap();
    assert_eq!((recorded.prefill.lookups, recorded.prefill.hits, recorded.prefill.read), (5, 2, 400));
    assert_eq!((recorded.decode.lookups, recorded.decode.hits), (4, 2));
    // 700 bytes hold all five; 699 lose the oldest use, expert 1, which decode asks for, and then 2 for it
    let at = |budget| batches.replay(budget, GlobalPolicy::Lru, Scope::Shared, 0);
    assert_eq!((at(700).decode.hits, at(700).prefill.hits, at(700).prefill.read), (4, 0, 700));
    assert_eq!((at(699).decode.hits, at(0).decode.hits, at(0).over_budget), (3, 0, 4));
    assert_eq!(batches.total_bytes(), 1800);
    assert_eq!(batches.step_bytes(2), 600);

    let twice = text.replace("0,1,2,1,1,5,", "0,1,2,1,1,4,");
    assert!(csv(&twice).unwrap_err().detail.contains("line 14: turn 0, step 2, layer 1: expert 4 twice"));
    let no_bytes = Routing { expert_bytes: vec![100, 0], ..routing };
    let fault = Batches::new(&no_bytes, None).err().unwrap();
    assert_eq!(fault.kind, ErrorKind::Argument);
    assert_eq!(fault.detail, "bytes of an expert are known of 1 layers of 2: a budget needs all");
}

#[test]
fn a_shared_budget_below_a_token_hits_nothing_in_lru_order() {
    // every token the same: only the order of the layers is against it
    let routing = decode(4, &vec![vec![vec![0, 1]; 20]; 5]);
    let batches = Batches::new(&routing, Some(vec![10; 5])).unwrap();
    let hits = |budget, policy, scope| batches.replay(budget, policy, scope, 1).decode.hits;
    // eviction comes after the batch: what is missing may be as much as a batch
    assert_eq!(hits(80, GlobalPolicy::Lru, Scope::Shared), 0);
    assert_eq!(hits(100, GlobalPolicy::Lru, Scope::Shared), 190);
    assert_eq!(hits(100, GlobalPolicy::Lru, Scope::PerLayer), 190);
    assert!(hits(90, GlobalPolicy::Belady, Scope::Shared) > 100);
    assert!(GlobalPolicy::by_name("mru").unwrap_err().detail.contains("lru, lfu, belady, random"));
}

#[test]
fn global_budgets_on_the_real_traces() {
    let Some(qwen) = real("qwen") else { return };
    let batches = Batches::new(&qwen, None).unwrap();
    let wanted = [
        (250, "0.0", "17.1", "27.5"),
        (500, "0.0", "26.6", "45.3"),
        (1000, "37.7", "40.2", "62.7"),
        (2000, "56.5", "58.6", "79.4"),
        (3000, "70.6", "71.3", "87.8"),
        (4000, "80.3", "80.8", "92.7"),
        (6000, "92.1", "92.0", "96.6"),
    ];
    for (mib, lru, lfu, belady) in wanted {
        for (policy, wanted) in [(GlobalPolicy::Lru, lru), (GlobalPolicy::Lfu, lfu), (GlobalPolicy::Belady, belady)] {
            let result = batches.replay(mib << 20, policy, Scope::Shared, 0);
            assert_eq!(percent(result.decode.hit_rate()), wanted, "{mib} MiB {}", policy.name());
        }
    }
    // the runs' own: what was recorded, and the replay of it
    for (name, mib, wanted) in [("gptoss", 3000, "32.4"), ("qwen", 4000, "74.9"), ("gemma", 4000, "76.8")] {
        let Some(routing) = real(name) else { return };
        let batches = Batches::new(&routing, None).unwrap();
        let recorded = batches.recorded().unwrap();
        let replayed = batches.replay(mib << 20, GlobalPolicy::Lru, Scope::Shared, 0);
        assert_eq!(percent(recorded.all().hit_rate()), wanted, "{name}");
        assert_eq!((replayed.decode, replayed.prefill), (recorded.decode, recorded.prefill), "{name}");
    }
}

/// The rules again, as they are told: a list of what is held, and a search.
fn told(routing: &Routing, budget: u64, policy: GlobalPolicy) -> (u64, u64) {
    let mut batches: Vec<(usize, Vec<u16>)> = Vec::new();
    for pass in 0..routing.passes.len() {
        for (layer, rows) in routing.layers.iter().enumerate() {
            let ids = &rows.ids[rows.places(pass)];
            let last = |(i, e): (usize, &u16)| (!ids[i + 1..].contains(e)).then_some(*e);
            batches.push((layer, ids.iter().enumerate().filter_map(last).collect()));
        }
    }
    let (mut held, mut hits, mut over): (Vec<(usize, u16)>, u64, u64) = (Vec::new(), 0, 0);
    let mut uses: Vec<(usize, u16)> = Vec::new();
    for (now, (layer, ids)) in batches.iter().enumerate() {
        for &e in ids {
            let key = (*layer, e);
            match held.iter().position(|h| *h == key) {
                Some(at) => {
                    hits += 1;
                    held.remove(at);
                }
                None => {}
            }
            held.push(key);
            uses.push(key);
        }
        let bytes = |held: &[(usize, u16)]| held.iter().map(|h| routing.expert_bytes[h.0]).sum::<u64>();
        while bytes(&held) > budget {
            // oldest use first, so that the first of equals is the oldest
            let may: Vec<_> = held.iter().copied().filter(|h| h.0 != *layer || !ids.contains(&h.1)).collect();
            let next = |h: &(usize, u16)| {
                let later = &batches[now + 1..];
                later.iter().position(|(layer, ids)| *layer == h.0 && ids.contains(&h.1)).unwrap_or(usize::MAX)
            };
            let victim = match policy {
                GlobalPolicy::Lru => may.first().copied(),
                GlobalPolicy::Lfu => may.iter().copied().min_by_key(|h| uses.iter().filter(|u| *u == h).count()),
                _ => may.iter().copied().min_by_key(|h| usize::MAX - next(h)),
            };
            let Some(victim) = victim else { break };
            held.retain(|h| *h != victim);
        }
        over += u64::from(bytes(&held) > budget);
    }
    (hits, over)
}

/// Rows of two layers with two experts a token, of which the first passes are batches.
fn routings() -> impl Strategy<Value = Routing> {
    let row = proptest::sample::subsequence((0..7u16).collect::<Vec<_>>(), 2).prop_shuffle();
    let tokens = proptest::collection::vec([row.clone(), row], 4..24);
    (tokens, 1..4usize, any::<bool>()).prop_map(|(tokens, rows, ragged)| {
        let of_layer = |layer: usize| tokens.iter().map(|t| t[layer].clone()).collect::<Vec<_>>();
        let mut routing = decode(7, &[of_layer(0), of_layer(1)]);
        // the first tokens are one prefill
        routing.passes.drain(..rows - 1);
        routing.passes[0].phase = Phase::Prefill;
        routing.layers.iter_mut().for_each(|l| drop(l.ends.drain(..rows - 1)));
        if ragged {
            // of which the last layer saw the last token only
            let last = &mut routing.layers[1];
            last.ids.drain(..2 * (rows - 1));
            last.weights.drain(..2 * (rows - 1));
            last.ends.iter_mut().for_each(|end| *end -= 2 * (rows - 1));
        }
        routing
    })
}

proptest! {
    #[test]
    fn a_global_budget_is_replayed_by_the_rules(routing in routings(), budget in 0..160u64) {
        let batches = Batches::new(&routing, None).unwrap();
        for &policy in &[GlobalPolicy::Lru, GlobalPolicy::Lfu, GlobalPolicy::Belady] {
            let result = batches.replay(budget, policy, Scope::Shared, 0);
            let all = result.all();
            prop_assert_eq!((all.hits, result.over_budget), told(&routing, budget, policy), "{}", policy.name());
        }
        // with room for everything, each expert is read once, whatever the policy and the scope
        for &policy in GlobalPolicy::ALL {
            for scope in [Scope::Shared, Scope::PerLayer] {
                let result = batches.replay(batches.total_bytes(), policy, scope, budget);
                let distinct: u64 = routing.layers.iter().map(|l| {
                    (0..7).filter(|e| l.ids.contains(e)).count() as u64
                }).sum();
                prop_assert_eq!(result.all().lookups - result.all().hits, distinct);
            }
        }
    }
}

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

/// Hits by capacity from one pass, against the cache's own replay at each.
fn curve_is_the_replays(made: &Trace, k: usize) {
    let routing = Routing::of_trace(made, None, Some(k)).unwrap();
    let reuse = Reuse::of(&routing, 0);
    let hits = reuse.hits(Phase::Decode);
    let replay = Replay::new(made, None, None);
    for capacity in k..made.n_experts() {
        let settings = Settings { capacity, k, warmup: 0, ..Settings::default() };
        let all = replay.all(std::slice::from_ref(&settings)).unwrap();
        assert_eq!(hits[capacity], all[0][0].picks - all[0][0].misses, "{capacity} slots");
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
