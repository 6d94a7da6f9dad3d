//! The cache by tables, and against a literal transcription of the reference's rules.

use super::*;
use proptest::prelude::*;

fn token(cache: &mut LayerCache, experts: &[u16]) -> Vec<Placed> {
    assert!(cache.begin_batch(experts.iter().copied()));
    let placed = experts.iter().map(|&e| cache.place(e).unwrap()).collect();
    cache.end_token();
    cache.end_batch();
    placed
}

fn misses(placed: &[Placed]) -> usize {
    placed.iter().filter(|p| matches!(p, Placed::Miss { .. })).count()
}

#[test]
fn a_used_expert_is_not_first_to_go() {
    // "LRU" that is FIFO: A B A C with room for 2, B goes.
    let mut c = LayerCache::lru(4, 2);
    for e in [0, 1, 0] {
        token(&mut c, &[e]);
    }
    assert_eq!(token(&mut c, &[2]), [Placed::Miss { slot: 1, victim: Some(1) }]);
    assert!(c.is_resident(0));
}

#[test]
fn ties_go_to_the_lowest_id() {
    let mut c = LayerCache::lru(8, 3);
    token(&mut c, &[6, 4, 5]);
    assert_eq!(c.resident_oldest_first(), [4, 5, 6]);
    assert!(matches!(token(&mut c, &[7])[0], Placed::Miss { victim: Some(4), .. }));
}

#[test]
fn repeats_in_a_batch_update_the_recency() {
    // One batch of two tokens, {1, 2} then {3, 1}: 1 and 3 are the newest, in that order of use.
    let mut c = LayerCache::lru(8, 5);
    token(&mut c, &[0]);
    assert!(c.begin_batch([1, 2, 3, 1].into_iter()));
    for t in [[1, 2], [3, 1]] {
        t.iter().for_each(|&e| {
            c.place(e).unwrap();
        });
        c.end_token();
    }
    c.end_batch();
    assert_eq!(c.resident_oldest_first(), [0, 2, 1, 3]);
}

#[test]
fn a_batch_that_does_not_fit_changes_nothing() {
    let mut c = LayerCache::lru(8, 4);
    token(&mut c, &[0, 1, 2]);
    let before = c.resident_oldest_first();
    assert!(!c.begin_batch([1, 2, 3, 4, 5].into_iter()));
    assert_eq!(c.resident_oldest_first(), before);
    // capacity 4 and four asked for: fits, and what the batch names is never a victim
    assert!(c.begin_batch([4, 5, 0, 1].into_iter()));
    for e in [4, 5, 0, 1] {
        c.place(e).unwrap();
    }
    c.end_token();
    c.end_batch();
    assert_eq!(c.resident_oldest_first(), [0, 1, 4, 5]);
}

#[test]
fn no_victim_is_an_error_and_overwrites_nothing() {
    // Capacity k, all in use, one more asked for: begin_batch refuses, and place() on top of a full batch has no slot.
    let mut c = LayerCache::lru(8, 2);
    assert!(!c.begin_batch([0, 1, 2].into_iter()));
    assert!(c.begin_batch([0, 1].into_iter()));
    c.place(0).unwrap();
    c.place(1).unwrap();
    c.pinned[2] = true;
    assert_eq!(c.place(2), Err(NoVictim));
    assert!(c.is_resident(0) && c.is_resident(1) && !c.is_resident(2));
}

#[test]
fn a_shrunken_cache_stays_small() {
    let mut c = LayerCache::lru(32, 16);
    for t in 0..4 {
        token(&mut c, &[4 * t, 4 * t + 1, 4 * t + 2, 4 * t + 3]);
    }
    let mut released = Vec::new();
    c.set_capacity(6, |s| released.push(s));
    assert_eq!((c.n_resident(), released.len()), (6, 10));
    for t in 0..4 {
        token(&mut c, &[16 + 4 * t, 17 + 4 * t, 18 + 4 * t, 19 + 4 * t]);
        assert!(c.n_resident() <= 6);
    }
    c.set_capacity(20, |_| unreachable!());
    for t in 0..5 {
        token(&mut c, &[4 * t, 4 * t + 1, 4 * t + 2, 4 * t + 3]);
    }
    assert_eq!(c.n_resident(), 20);
}

#[test]
fn a_forgotten_expert_is_a_miss_again() {
    let mut c = LayerCache::lru(8, 3);
    token(&mut c, &[0, 1, 2]);
    let slot = c.slot_of(1).unwrap();
    assert_eq!(c.expert_in(slot), Some(1));
    c.forget(1);
    assert_eq!(token(&mut c, &[1]), [Placed::Miss { slot, victim: None }]);
}

#[test]
fn restore_keeps_the_order_and_the_newest() {
    let mut c = LayerCache::lru(8, 3);
    c.restore(&[7, 1, 5, 0]);
    assert_eq!(c.resident_oldest_first(), [1, 5, 0]);
}

#[test]
fn restoring_reads_what_is_missing_and_leaves_the_rest_in_its_slots() {
    let mut c = LayerCache::lru(8, 3);
    token(&mut c, &[2, 3, 4]);
    let slot = c.slot_of(3).unwrap();
    let mut read = Vec::new();
    c.restore_with(&[5, 3, 1], |e, slot| {
        read.push((e, slot));
        e != 1
    });
    assert_eq!((c.resident_oldest_first(), c.slot_of(3)), (vec![5, 3], Some(slot)));
    assert_eq!(read.iter().map(|r| r.0).collect::<Vec<_>>(), [5, 1]);
    assert_eq!(c.slot_of(5), Some(read[0].1));
    assert_eq!(c.n_resident(), 2);
    // the slot of what could not be read is free
    token(&mut c, &[6]);
    assert_eq!(c.resident_oldest_first(), [5, 3, 6]);
    assert!(matches!(token(&mut c, &[7])[..], [Placed::Miss { victim: Some(5), .. }]));
}

#[test]
fn a_cleared_cache_keeps_its_slots_until_it_shrinks() {
    let mut c = LayerCache::lru(16, 8);
    token(&mut c, &[0, 1, 2, 3]);
    token(&mut c, &[4, 5, 6, 7]);
    c.set_capacity(4, |_| ());
    let mut kept: Vec<u32> = (4..8).map(|e| c.slot_of(e).unwrap()).collect();
    c.clear();
    let placed = token(&mut c, &[8, 9, 10, 11]);
    let mut slots: Vec<u32> = placed.iter().map(|p| p.slot()).collect();
    kept.sort_unstable();
    slots.sort_unstable();
    assert_eq!(slots, kept);
    c.clear();
    let mut released = Vec::new();
    c.set_capacity(0, |slot| released.push(slot));
    released.sort_unstable();
    assert_eq!(released, kept);
}

/// The reference's LRU, word for word: a set, last_used by token, min over (last_used, id) of what was not chosen.
fn reference_misses(tokens: &[Vec<u16>], n: usize, cap: usize) -> usize {
    let (mut set, mut last, mut misses) = (std::collections::BTreeSet::new(), vec![0usize; n], 0);
    for (t, chosen) in tokens.iter().enumerate() {
        for &e in chosen {
            if !set.contains(&e) {
                misses += 1;
                if set.len() >= cap {
                    let victim =
                        *set.iter().filter(|c| !chosen.contains(c)).min_by_key(|&&c| (last[c as usize], c)).unwrap();
                    set.remove(&victim);
                }
                set.insert(e);
            }
            last[e as usize] = t + 1;
        }
    }
    misses
}

proptest! {
    #[test]
    fn lru_is_the_references(tokens in prop::collection::vec(prop::sample::subsequence((0u16..24).collect::<Vec<_>>(), 5).prop_shuffle(), 1..80), cap in 5u32..24) {
        let mut c = LayerCache::lru(24, cap);
        let live: usize = tokens.iter().map(|t| misses(&token(&mut c, t))).sum();
        prop_assert_eq!(live, reference_misses(&tokens, 24, cap as usize));
        // every resident expert has a slot of its own below the capacity
        let mut slots: Vec<u32> = (0..24).filter_map(|e| c.slot_of(e)).collect();
        slots.sort_unstable();
        slots.dedup();
        prop_assert_eq!(slots.len() as u32, c.n_resident());
        prop_assert!(slots.iter().all(|&s| s < cap));
    }
}

proptest! {
    /// `token` is the four steps, for every policy.
    #[test]
    fn a_token_at_once_is_its_steps(tokens in prop::collection::vec(prop::sample::subsequence((0u16..24).collect::<Vec<_>>(), 8).prop_shuffle(), 1..80), cap in 4u32..24) {
        let uses = std::sync::Arc::new(NextUses::new(24, tokens.iter().map(|t| &t[..4])));
        for &policy in Policy::ALL {
            let spec = Spec { next_uses: Some(uses.clone()), decay: 0.9, ..Spec::new(24) };
            let make = || LayerCache::new(policy.build(&spec), 24, cap);
            let (mut once, mut steps) = (make(), make());
            let scores = [3.0, 2.5, 2.0, 1.0, 0.5, 0.25, 0.0, -1.0];
            for (i, token) in tokens.iter().enumerate() {
                // Two of three run the router's own, as a token of hits often does again.
                let experts = if i % 3 < 2 { &token[..4] } else { &tokens[i - 1][..4] };
                let candidates = policy.needs_candidates().then_some((token.as_slice(), scores.as_slice(), 4));
                prop_assert!(steps.begin_batch(experts.iter().copied()));
                let placed: Vec<Placed> = experts.iter().map(|&e| steps.place(e).unwrap()).collect();
                candidates.into_iter().for_each(|(ids, z, k)| steps.ranked(ids, z, k));
                steps.end_token();
                steps.end_batch();
                prop_assert_eq!(once.token(experts, candidates), Some(misses(&placed) as u32));
                prop_assert_eq!(once.resident_oldest_first(), steps.resident_oldest_first(), "{:?}", policy);
            }
            prop_assert_eq!(once.token(&[1, 2, 1], None), None);
            prop_assert_eq!(once.resident_oldest_first(), steps.resident_oldest_first());
        }
    }
}

/// What a run does to a cache.
#[derive(Clone, Debug)]
enum Step {
    /// Tokens of (expert, dropped); whether the last token's use is recorded, or the batch broken off before.
    Batch(Vec<Vec<(u16, bool)>>, bool),
    Forget(u16),
    Capacity(u32),
}

fn step() -> impl Strategy<Value = Step> {
    let experts = prop::sample::subsequence((0u16..20).collect::<Vec<_>>(), 3).prop_shuffle();
    let token = (experts, prop::array::uniform3(prop::bool::weighted(0.15)));
    let token = token.prop_map(|(experts, dropped)| experts.into_iter().zip(dropped).collect());
    prop_oneof![
        8 => (prop::collection::vec(token, 1..4), prop::bool::weighted(0.9)).prop_map(|(t, whole)| Step::Batch(t, whole)),
        1 => (0u16..20).prop_map(Step::Forget),
        1 => (3u32..20).prop_map(Step::Capacity),
    ]
}

proptest! {
    /// Batches of several tokens, drops, batches broken off, failed reads and changed capacities: always the oldest (last use, id) goes.
    #[test]
    fn lru_by_its_definition(steps in prop::collection::vec(step(), 1..120)) {
        let mut c = LayerCache::lru(20, 8);
        let (mut resident, mut last, mut token, mut capacity) =
            (std::collections::BTreeSet::new(), [0u64; 20], 0, 8usize);
        let oldest = |of: &mut dyn Iterator<Item = u16>, last: &[u64; 20]| of.min_by_key(|&e| (last[e as usize], e)).unwrap();
        for step in steps {
            match step {
                Step::Batch(tokens, whole) => {
                    let all: std::collections::BTreeSet<u16> = tokens.iter().flatten().map(|t| t.0).collect();
                    let fits = c.begin_batch(tokens.iter().flatten().map(|t| t.0));
                    prop_assert_eq!(fits, all.len() <= capacity);
                    if !fits {
                        continue;
                    }
                    for (i, experts) in tokens.iter().enumerate() {
                        for &(e, _) in experts.iter().filter(|t| !t.1) {
                            let placed = c.place(e).unwrap();
                            prop_assert_eq!(matches!(placed, Placed::Hit { .. }), resident.contains(&e));
                            if !resident.contains(&e) && resident.len() == capacity {
                                let victim = oldest(&mut resident.iter().copied().filter(|e| !all.contains(e)), &last);
                                let went = matches!(placed, Placed::Miss { victim: Some(v), .. } if v == victim);
                                prop_assert!(went, "{:?}, {} wanted", placed, victim);
                                resident.remove(&victim);
                            }
                            resident.insert(e);
                        }
                        if whole || i + 1 < tokens.len() {
                            token += 1;
                            experts.iter().filter(|t| !t.1).for_each(|t| last[t.0 as usize] = token);
                            c.end_token();
                        }
                    }
                    c.end_batch();
                }
                Step::Forget(e) => {
                    c.forget(e);
                    resident.remove(&e);
                }
                Step::Capacity(n) => {
                    c.set_capacity(n, |_| ());
                    capacity = n as usize;
                    while resident.len() > capacity {
                        let victim = oldest(&mut resident.iter().copied(), &last);
                        resident.remove(&victim);
                    }
                }
            }
            let mut order: Vec<u16> = resident.iter().copied().collect();
            order.sort_by_key(|&e| (last[e as usize], e));
            prop_assert_eq!(c.resident_oldest_first(), order);
        }
    }
}
