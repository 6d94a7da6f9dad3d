//! Every policy against the literal model, on random traces; and what the replay has beyond the reference.

use hotset::cache::Policy;
use hotset::replay::{Column, KeepMap, Ranges, Replay, Settings};
use hotset::route::{Delta, Moce};
use proptest::prelude::*;

use crate::model::{self, Row};
use crate::{replay, settings, trace_of};

/// Rows of `m` distinct experts of n, scores from a coarse grid (many ties), or finer, by falling score.
fn rows(n: usize, m: usize, tokens: std::ops::Range<usize>) -> impl Strategy<Value = Vec<Row>> {
    let grid = prop_oneof![Just(0.5), Just(0.0625), Just(0.0)];
    let row = (
        prop::collection::vec(-64i32..64, m),
        prop::sample::subsequence((0..n as u16).collect::<Vec<_>>(), m).prop_shuffle(),
    );
    (grid, prop::collection::vec(row, tokens)).prop_map(|(grid, rows)| {
        let row = |(mut z, ids): (Vec<i32>, Vec<u16>)| {
            z.sort_by_key(|z| -z);
            // Hot experts: low ids are likelier, so that the cache has something to keep.
            let mut ids = ids;
            ids.sort_by_key(|&e| (u32::from(e) * 7919 + z[0] as u32 % 5) % (3 + u32::from(e)));
            ids.into_iter().zip(z).map(|(e, z)| (e, f64::from(z) * grid)).collect()
        };
        rows.into_iter().map(row).collect()
    })
}

fn shape() -> impl Strategy<Value = (usize, usize, usize, usize)> {
    // n experts, m candidates, k, capacity
    (1usize..40).prop_flat_map(|n| {
        (Just(n), 1..=n).prop_flat_map(|(n, m)| {
            (1..=m.min(9)).prop_flat_map(move |k| {
                let capacity = prop_oneof![Just(k), Just(n), k..=n];
                (Just(n), Just(m), Just(k), capacity)
            })
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_policy_is_the_references(
        ((n, m, k, capacity), rows) in shape().prop_flat_map(|s| (Just(s), rows(s.0, s.1, 6..60))),
        lambda in prop_oneof![Just(0.0), 0.0f64..0.5],
        top_j in 0u32..5,
        decay in prop_oneof![Just(0.99), Just(0.5), Just(1e-60), Just(1.0)],
        near_pick_n in 0usize..40,
        warmup in 0usize..6,
    ) {
        prop_assume!(capacity >= k);
        let trace = trace_of(std::slice::from_ref(&rows), n);
        prop_assert_eq!(trace.top_m(), m);
        for &policy in Policy::REFERENCE {
            let lambda = if policy.needs_future() { 0.0 } else { lambda };
            let s = Settings { decay, near_pick_n, warmup, ..settings(policy, capacity, k, lambda, top_j) };
            let found = replay(&trace, None, &s)[0];
            prop_assert_eq!(found.misses, model::misses(&rows, n, &s), "{:?}", s);
            prop_assert_eq!(found.picks, (rows.len() - warmup) as u64 * k as u64);
        }
    }

    /// A keep map is a filter and new numbers, in the order of its lists.
    #[test]
    fn keep_maps_filter_and_renumber(
        rows in rows(24, 16, 10..40),
        kept in prop::sample::subsequence((0..24u16).collect::<Vec<_>>(), 6..24).prop_shuffle(),
        lambda in prop_oneof![Just(0.0), 0.0f64..0.5],
    ) {
        let trace = trace_of(std::slice::from_ref(&rows), 24);
        let keep = KeepMap::parse(serde_json::json!({ "0": kept }).to_string().as_bytes(), 1, 24).unwrap();
        let new = |e: u16| kept.iter().position(|&old| old == e).map(|i| i as u16);
        let filtered: Vec<Row> =
            rows.iter().map(|row| row.iter().filter_map(|&(e, z)| Some((new(e)?, z))).collect()).collect();
        let pruned = |row: &Row| row.iter().take(4).filter(|c| new(c.0).is_none()).count() as u64;
        for &policy in Policy::REFERENCE {
            let lambda = if policy.needs_future() { 0.0 } else { lambda };
            let s = Settings { warmup: 3, ..settings(policy, 5, 4, lambda, 2) };
            let found = replay(&trace, Some(&keep), &s)[0];
            prop_assert_eq!(found.misses, model::misses(&filtered, kept.len(), &s), "{:?}", s);
            prop_assert_eq!(found.substituted, rows[3..].iter().map(pruned).sum::<u64>());
        }
    }

    /// Nothing that keeps what a token uses misses less than Belady's MIN, and it misses no more when it may leave out the newcomer.
    #[test]
    fn belady_is_the_least(rows in rows(20, 8, 10..60), capacity in 4usize..19) {
        let trace = trace_of(std::slice::from_ref(&rows), 20);
        let misses = |policy| {
            replay(&trace, None, &Settings { warmup: 0, ..settings(policy, capacity, 4, 0.0, 3) })[0].misses
        };
        let least = misses(Policy::BeladyMin);
        prop_assert!(misses(Policy::BeladyBypass) <= least);
        for &policy in Policy::ALL.iter().filter(|p| !p.needs_future()) {
            prop_assert!(least <= misses(policy), "{:?}", policy);
        }
    }
}

fn mixed(tokens: usize) -> Vec<Row> {
    let mut state = 1u64;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as f64 / f64::from(1u32 << 31)
    };
    let row = |_| {
        let mut row: Row = (0..32).map(|e| (e, (4.0 * next() - f64::from(e) / 10.0) * 4.0)).collect();
        row.iter_mut().for_each(|c| c.1 = c.1.round() / 4.0);
        row.sort_by(|a, b| b.1.total_cmp(&a.1));
        row.truncate(16);
        row
    };
    (0..tokens).map(row).collect()
}

#[test]
fn delta_modes_take_their_share_of_the_rows_range() {
    let rows = mixed(200);
    let trace = trace_of(std::slice::from_ref(&rows), 32);
    let with = |delta| Settings { moce: Moce { lambda: 0.2, top_j: 3, delta }, ..settings(Policy::Lru, 8, 4, 0.2, 3) };
    let missing = Replay::new(&trace, None, None).check(&with(Delta::RunningFull)).unwrap_err();
    assert!(missing.detail.contains("<trace>.range"), "{missing}");
    // Where the range is what token_topk takes, the modes are the same.
    let same: Vec<f32> = rows.iter().map(|r| (r[0].1 - r[3].1) as f32).collect();
    let ranges = Ranges::new(same, 1, 200).unwrap();
    let of = |ranges: &Ranges, delta| Replay::new(&trace, None, Some(ranges)).all(&[with(delta)]).unwrap()[0][0];
    assert_eq!(of(&ranges, Delta::TokenFull), of(&ranges, Delta::TokenTopk));
    let constant = Ranges::new(vec![3.0; 200], 1, 200).unwrap();
    assert_eq!(of(&constant, Delta::TokenFull), of(&constant, Delta::RunningFull));
    assert_ne!(of(&constant, Delta::TokenFull), of(&constant, Delta::TokenTopk));
    assert!(Ranges::new(vec![3.0; 199], 1, 200).is_err());
}

#[test]
fn displaced_experts_can_come_back() {
    // 2 is resident and takes the place of 1, again and again; once 1 has been read it wins by its own score.
    let mut rows = vec![vec![(0, 4.0), (1, 3.0), (2, 2.9), (3, 0.0)]; 20];
    rows[0] = vec![(0, 4.0), (2, 3.0), (5, 0.0), (6, 0.0)];
    let trace = trace_of(&[rows], 8);
    let s = Settings { warmup: 0, ..settings(Policy::Lru, 4, 2, 0.5, 1) };
    let plain = replay(&trace, None, &s)[0];
    assert_eq!((plain.misses, plain.swapped, plain.background), (2, 19, 0));
    let admitted = replay(&trace, None, &Settings { admit_displaced: true, ..s })[0];
    assert_eq!((admitted.misses, admitted.swapped, admitted.background), (2, 1, 1));
    // No room beside what runs: nothing is read behind.
    let trace = trace_of(&[mixed(400)], 32);
    let tight = Settings { admit_displaced: true, ..settings(Policy::Lru, 4, 4, 0.3, 1) };
    let tight = replay(&trace, None, &tight)[0];
    assert!(tight.swapped > 0 && tight.background == 0, "{tight:?}");
}

#[test]
fn random_repeats_itself() {
    let trace = trace_of(&[mixed(300)], 32);
    let misses = |seed| replay(&trace, None, &Settings { seed, ..settings(Policy::Random, 8, 4, 0.0, 3) })[0].misses;
    assert_eq!(misses(7), misses(7));
    assert!((0..8).map(misses).any(|m| m != misses(7)));
}

#[test]
fn forced_misses_are_misses_and_picks() {
    // Two of three are pruned away: one place of two stays empty in each token.
    let row = vec![(0, 2.0), (1, 1.0), (2, 0.0)];
    let trace = trace_of(&[vec![row; 10]], 3);
    let keep = KeepMap::parse(br#"{"0": [1]}"#, 1, 3).unwrap();
    let s = Settings { warmup: 4, ..settings(Policy::Lru, 2, 2, 0.0, 3) };
    // capacity >= n: no misses, whatever is missing
    let found = replay(&trace, Some(&keep), &s)[0];
    assert_eq!((found.misses, found.picks, found.substituted, found.hit_rate()), (0, 12, 6, 1.0));
    let keep = KeepMap::parse(br#"{"0": [1, 3, 4, 5]}"#, 1, 6).unwrap();
    let trace = trace_of(&[vec![vec![(0, 2.0), (1, 1.0), (2, 0.0)]; 10]], 6);
    let found = replay(&trace, Some(&keep), &s)[0];
    assert_eq!((found.misses, found.forced, found.picks, found.substituted), (6, 6, 12, 6));
    assert_eq!(found.hit_rate(), 0.5);
}

/// All layers together are gone through in pieces, one layer alone at once.
#[test]
fn pieces_change_nothing() {
    let rows = mixed(3100);
    let layers: Vec<Vec<Row>> = (0..16).map(|l| rows[l * 100..l * 100 + 1600].to_vec()).collect();
    let trace = trace_of(&layers, 32);
    let with = |policy: Policy| {
        let lambda = if policy.needs_future() { 0.0 } else { 0.1 };
        Settings { warmup: 1400, ..settings(policy, 10, 4, lambda, 2) }
    };
    let all: Vec<Settings> = Policy::ALL.iter().map(|&policy| with(policy)).collect();
    let replay = Replay::new(&trace, None, None);
    let mut columns: Vec<Column> = (0..layers.len()).map(|_| Column::default()).collect();
    let together = replay.block(0, &all, &mut columns).unwrap();
    assert_eq!(together, replay.all(&all).unwrap());
    let mut column = Column::default();
    for (layer, found) in together.iter().enumerate() {
        assert_eq!(*found, replay.layer(layer, &all, &mut column).unwrap(), "layer {layer}");
        assert_eq!(found[0].tokens, 200);
    }
    // One policy without its candidates: only the first k are gathered.
    let lru = [settings(Policy::Lru, 10, 4, 0.0, 2)];
    assert_eq!(replay.all(&lru).unwrap()[3], replay.layer(3, &lru, &mut column).unwrap());
    assert_eq!(together[0][0].misses, model::misses(&layers[0], 32, &all[0]));
}
