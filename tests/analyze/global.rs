//! One byte budget for all layers: against the rules told a second time, and on the real traces.

use hotset::ErrorKind;
use hotset::replay::global::{Batches, GlobalPolicy, Scope};
use hotset::trace::{Phase, Routing};
use proptest::prelude::*;

use super::made::{HEADING, csv, decode, percent, real, routings};

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
        // to the last lookup, not only in sum
        assert_eq!(replayed, recorded, "{name}");
        assert_eq!(replayed.differs, Some(0), "{name}");
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
            if let Some(at) = held.iter().position(|h| *h == key) {
                hits += 1;
                held.remove(at);
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
