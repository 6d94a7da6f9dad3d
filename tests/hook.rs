//! The live hook on a random model's real bytes, from the Rust side: decisions, slots' contents, recording, replay, errors.

#[path = "common/hook.rs"]
mod made;
#[path = "common/replay.rs"]
mod replay;

use std::time::Duration;

use hotset::ErrorKind;
use hotset::cache::Policy;
use hotset::hook::{Adjacent, Batch, Config, Hook, Placed};
use hotset::model::tiny::{self, TinyParams};
use hotset::model::{Model, pack_write};
use hotset::replay::{Ranges, recorded};
use hotset::route::{Delta, Drop, Moce, Renormalise};
use hotset::store::{Backing, IoMode};
use hotset::trace::{Phase, Sidecar, Trace};
use made::*;

#[test]
fn slots_hold_the_experts_bytes() {
    let dir = dir();
    let path = model(dir.path());
    for (io, slots) in [(IoMode::Direct, 4), (IoMode::Direct, 9), (IoMode::Buffered, 24)] {
        let mut hook = Hook::open(&path, Config { io, ..config(slots) }).unwrap();
        for t in 0..60 {
            for (l, seen) in pass(&mut hook, t, 1).iter().enumerate() {
                check_bytes(&hook, l, &seen.experts, &seen.slots);
                assert!(seen.slots.iter().all(|&s| (s as u32) < slots));
            }
        }
        let s = hook.stats();
        assert_eq!(s.hits + s.misses, 60 * (LAYERS * K) as u64);
        assert_eq!(s.read_bytes, s.misses * hook.model().experts.layers[0].expert_bytes());
        assert!(s.resident_bytes <= hook.plan().cache_bytes + hook.plan().staging_bytes);
        assert!(s.misses < s.hits || slots < 24, "{s:?}");
    }
}

/// From a pack, whole or in parts: the same slots named, the same bytes in them, the same reads; and what is no pack is refused.
#[test]
fn a_pack_changes_where_experts_are_read_and_nothing_else() {
    let dir = dir();
    let path = model(dir.path());
    let pack = dir.path().join("m.hotset");
    pack_write::pack(&Model::open(&path).unwrap(), &pack, &mut |_| ()).unwrap();
    let moce = Moce { lambda: 0.2, top_j: 2, delta: Delta::TokenTopk };
    let drop = Drop { threshold: 0.5, renormalise: Renormalise::Auto };
    for (io, chunk_bytes) in [(IoMode::Direct, 0), (IoMode::Direct, 64 << 10), (IoMode::Buffered, 64 << 10)] {
        let plain = Config { io, chunk_bytes, moce, drop, ..config(6) };
        let packed = Config { pack: Some(pack.clone()), ..plain.clone() };
        let mut hooks = [plain, packed].map(|c| Hook::open(&path, c).unwrap());
        for t in 0..40 {
            let [a, b] = [0, 1].map(|i| pass(&mut hooks[i], t, 1));
            for (l, (a, b)) in a.iter().zip(&b).enumerate() {
                assert_eq!(
                    (&a.experts, &a.slots, &a.weights, &a.outcome),
                    (&b.experts, &b.slots, &b.weights, &b.outcome)
                );
                let ran: Vec<usize> = (0..K).filter(|&i| b.weights[i] > 0.0).collect();
                let of = |v: &[i32]| ran.iter().map(|&i| v[i]).collect::<Vec<_>>();
                check_bytes(&hooks[0], l, &of(&a.experts), &of(&a.slots));
                check_bytes(&hooks[1], l, &of(&b.experts), &of(&b.slots));
            }
        }
        // a prefill that passes through leaves the cache as it was
        assert_eq!(pass(&mut hooks[1], 100, 40)[0].outcome.placed, Placed::PassThrough);
        let s = hooks[1].stats();
        assert!(s.misses > 0 && s.resident_bytes <= hooks[1].plan().cache_bytes + hooks[1].plan().staging_bytes);
        assert!(hooks[1].describe().contains("m.hotset"));
    }
    let refuse = |c: Config| Hook::open(&path, c).err().unwrap();
    let e = refuse(Config { pack: Some(path.clone()), ..config(6) });
    assert!(e.kind == ErrorKind::Format && e.detail.contains("HOTSETPK"), "{e}");
    let e = refuse(Config { pack: Some(pack.clone()), backing: Backing::PageCache, ..config(6) });
    assert!(e.kind == ErrorKind::Argument && e.detail.contains("m.hotset"), "{e}");
    tiny::write(
        &TinyParams { seed: 9, layers: LAYERS as u32, experts: EXPERTS as u32, k: K as u32, ..TinyParams::default() },
        &path,
        &mut |_| (),
    )
    .unwrap();
    let e = refuse(Config { pack: Some(pack), ..config(6) });
    assert!(e.kind == ErrorKind::Model && e.detail.contains("another model"), "{e}");
}

#[test]
fn a_prefill_passes_through_and_the_cache_is_as_it_was() {
    let dir = dir();
    let mut hook = Hook::open(&model(dir.path()), config(8)).unwrap();
    for t in 0..10 {
        pass(&mut hook, t, 1);
    }
    let before: Vec<_> = (0..LAYERS as u32).map(|b| hook.resident(b).unwrap()).collect();
    for seen in pass(&mut hook, 10, 40) {
        assert_eq!(seen.outcome.placed, Placed::PassThrough);
        assert_eq!(seen.slots, seen.experts, "ids stay experts");
    }
    assert_eq!(before, (0..LAYERS as u32).map(|b| hook.resident(b).unwrap()).collect::<Vec<_>>());
    // Two tokens whose experts fit go through slots together.
    for (l, seen) in pass(&mut hook, 50, 2).iter().enumerate() {
        assert_eq!(seen.outcome.placed, Placed::Slots);
        check_bytes(&hook, l, &seen.experts, &seen.slots);
    }
    assert_eq!(hook.stats().pass_through_rows, 40 * LAYERS as u64);
}

/// A recorded run's misses equal those of its replay: from cold, after a prefill through slots, and after one that passed through.
#[test]
fn a_recorded_run_equals_its_replay() {
    for lambda in [0.0, 0.12, 0.4] {
        for prefill in [0, 2, 40] {
            let dir = dir();
            let trace = dir.path().join("t.q4rt");
            let moce = Moce { lambda, top_j: 2, delta: Delta::TokenTopk };
            let config = Config { moce, trace: Some(trace.clone()), queue_tokens: 8192, ..config(9) };
            let mut hook = Hook::open(&model(dir.path()), config).unwrap();
            if prefill > 0 {
                pass(&mut hook, 0, prefill);
            }
            let mut live = [0u64; LAYERS];
            for t in prefill..prefill + 150 {
                pass(&mut hook, t, 1).iter().enumerate().for_each(|(l, s)| live[l] += u64::from(s.outcome.misses));
            }
            assert_eq!(lambda > 0.0, hook.stats().swapped > 0);
            hook.close().unwrap();
            let (t, s) = (Trace::open(&trace).unwrap(), Sidecar::read_beside(&trace).unwrap().unwrap());
            assert_eq!((t.n_tokens(), s.resident.len(), s.score_space.as_str()), (150, 1, "logit"));
            assert_eq!(s.resident[0].layers[0].is_empty(), prefill != 2);
            assert_eq!(replay::misses_per_layer(&t, &s), live, "lambda {lambda} prefill {prefill}");
        }
    }
}

/// Every policy that can run live, and every delta mode, chooses the same victims and experts in the replay of its own trace.
#[test]
fn every_live_policy_equals_its_replay() {
    let mut misses = std::collections::BTreeMap::new();
    for &policy in Policy::ALL {
        for (lambda, delta) in
            [(0.0, Delta::TokenTopk), (0.2, Delta::TokenTopk), (0.1, Delta::TokenFull), (0.1, Delta::RunningFull)]
        {
            let dir = dir();
            let trace = dir.path().join("t.q4rt");
            let moce = Moce { lambda, top_j: 2, delta };
            let config = Config { policy, moce, trace: Some(trace.clone()), queue_tokens: 8192, ..config(9) };
            if policy.needs_future() {
                assert_eq!(Hook::open(&model(dir.path()), config).err().unwrap().kind, ErrorKind::Argument);
                continue;
            }
            let mut hook = Hook::open(&model(dir.path()), config).unwrap();
            let mut live = [0u64; LAYERS];
            for t in 0..200 {
                pass(&mut hook, t, 1).iter().enumerate().for_each(|(l, s)| live[l] += u64::from(s.outcome.misses));
            }
            hook.close().unwrap();
            let (t, s) = (Trace::open(&trace).unwrap(), Sidecar::read_beside(&trace).unwrap().unwrap());
            assert_eq!(s.settings[0].settings.policy, policy.name());
            let ranges = Ranges::beside(&trace, &t).unwrap();
            assert_eq!(ranges.is_some(), delta != Delta::TokenTopk);
            let replayed = recorded(&t, &s, ranges.as_ref()).unwrap();
            assert_eq!(replayed.misses, live, "{policy:?} {moce:?}");
            assert!(replayed.inexact.is_empty());
            if lambda == 0.0 {
                misses.insert(live.iter().sum::<u64>(), policy);
            }
        }
    }
    assert!(misses.len() > 3, "the policies differ: {misses:?}");
}

#[test]
fn changed_settings_and_recorded_prefills_replay_too() {
    let dir = dir();
    let trace = dir.path().join("t.q4rt");
    let mut c = Config { trace: Some(trace.clone()), queue_tokens: 8192, ..config(9) };
    c.prefill.record = true;
    let mut hook = Hook::open(&model(dir.path()), c).unwrap();
    let mut live = [0u64; LAYERS];
    let run = |hook: &mut Hook, first: usize, n: usize, passes: usize, live: &mut [u64; LAYERS]| {
        for p in 0..passes {
            pass(hook, first + p * n, n).iter().enumerate().for_each(|(l, s)| live[l] += u64::from(s.outcome.misses));
        }
    };
    run(&mut hook, 0, 30, 1, &mut live);
    run(&mut hook, 30, 2, 5, &mut live);
    run(&mut hook, 40, 1, 40, &mut live);
    hook.set(|s| (s.slots, s.moce.lambda) = (6, 0.2)).unwrap();
    assert!(hook.stats().resident <= 6 * LAYERS as u64);
    run(&mut hook, 80, 1, 40, &mut live);
    hook.reset();
    run(&mut hook, 120, 1, 20, &mut live);
    hook.close().unwrap();
    let (t, s) = (Trace::open(&trace).unwrap(), Sidecar::read_beside(&trace).unwrap().unwrap());
    assert_eq!(t.n_tokens(), 140);
    assert_eq!(s.ranges.iter().map(|r| r.n_tokens).sum::<u64>(), 140);
    assert_eq!(replay::misses_per_layer(&t, &s), live);
}

#[test]
fn dropping_keeps_ids_distinct_and_bytes_written() {
    let dir = dir();
    let path = model(dir.path());
    for renormalise in [Renormalise::Auto, Renormalise::Off] {
        let mut hook = Hook::open(&path, Config { drop: Drop { threshold: 1.0, renormalise }, ..config(6) }).unwrap();
        for t in 0..100 {
            for (l, seen) in pass(&mut hook, t, 1).iter().enumerate() {
                assert!(distinct(&seen.slots));
                let heaviest = (0..K).max_by(|&a, &b| seen.weights[a].total_cmp(&seen.weights[b])).unwrap();
                let zeros = seen.weights.iter().filter(|w| **w == 0.0).count() as u32;
                assert_eq!(zeros, seen.outcome.dropped);
                // The router's first is never dropped, and names its own expert's bytes.
                assert!(seen.weights[0] > 0.0 && heaviest == 0);
                for i in (0..K).filter(|&i| seen.weights[i] > 0.0) {
                    check_bytes(&hook, l, &seen.experts[i..=i], &seen.slots[i..=i]);
                }
                // A stand-in is resident: its slot belongs to an expert whose bytes are there.
                for &slot in &seen.slots {
                    let expert = hook.store().expert_in(l, slot as u32).expect("a slot without bytes");
                    check_bytes(&hook, l, &[expert as i32], &[slot]);
                }
                let sum: f32 = seen.weights.iter().sum();
                assert_eq!((sum - 1.0).abs() < 1e-5, renormalise == Renormalise::Auto || seen.outcome.dropped == 0);
            }
        }
        let s = hook.stats();
        assert!(s.dropped > 100 && s.mass_dropped > 1.0, "{s:?}");
    }
    // Below any weight that can be, nothing is dropped.
    let mut hook =
        Hook::open(&path, Config { drop: Drop { threshold: 1e-12, ..Drop::default() }, ..config(6) }).unwrap();
    (0..40).for_each(|t| drop(pass(&mut hook, t, 1)));
    assert_eq!(hook.stats().dropped, 0);
}

#[test]
fn prefill_takes_part_only_when_asked() {
    let dir = dir();
    let path = model(dir.path());
    for asked in [false, true] {
        let mut c = Config {
            drop: Drop { threshold: 2.0, ..Drop::default() },
            moce: Moce { lambda: 0.5, ..Moce::default() },
            ..config(12)
        };
        (c.prefill.moce, c.prefill.drop) = (asked, asked);
        let mut hook = Hook::open(&path, c).unwrap();
        (0..30).for_each(|t| drop(pass(&mut hook, 2 * t, 2)));
        let s = hook.stats();
        assert_eq!((s.swapped > 0, s.dropped > 0), (asked, asked), "{s:?}");
        assert_eq!((s.prefill_tokens, s.decode_tokens), (60, 0));
    }
}

#[test]
fn bad_calls_change_nothing() {
    let dir = dir();
    let mut hook = Hook::open(&model(dir.path()), config(6)).unwrap();
    (0..5).for_each(|t| drop(pass(&mut hook, t, 1)));
    let before = (hook.resident(0).unwrap(), hook.stats());
    let mut bad = |ids: [i32; K], b: Batch| {
        let mut ids_now = ids;
        let mut z = scores(0, 0);
        let rows = Adjacent { data: &mut z, width: EXPERTS };
        let s = hook.select(&b, &rows, &mut Adjacent { data: &mut ids_now, width: K }).unwrap_err();
        let a = hook.admit(&b, &mut Adjacent { data: &mut ids_now, width: K }, None::<&mut Adjacent<f32>>).unwrap_err();
        assert_eq!(ids_now, ids);
        assert_eq!(s.kind, a.kind);
        a
    };
    for id in [-1, EXPERTS as i32, i32::MIN, i32::MAX, 3] {
        let e = bad([3, 7, id, 9], batch(0, 1));
        assert_eq!(e.kind, ErrorKind::Range);
        assert!(e.detail.contains(&id.to_string()), "{e}");
    }
    assert_eq!(bad([0, 1, 2, 3], Batch { block: LAYERS as u32, ..batch(0, 1) }).kind, ErrorKind::Range);
    assert_eq!(bad([0, 1, 2, 3], Batch { n_experts: 23, ..batch(0, 1) }).kind, ErrorKind::Argument);
    assert_eq!(bad([0, 1, 2, 3], Batch { k: K as u32 + 1, ..batch(0, 1) }).kind, ErrorKind::Argument);
    assert_eq!(hook.set(|s| s.slots = 3).unwrap_err().kind, ErrorKind::Budget);
    assert_eq!(hook.set(|s| s.moce.lambda = f64::NAN).unwrap_err().kind, ErrorKind::Argument);
    assert_eq!(hook.set(|s| s.drop.threshold = -1.0).unwrap_err().kind, ErrorKind::Argument);
    assert_eq!(before, (hook.resident(0).unwrap(), hook.stats()));
    assert_eq!(hook.flush(Duration::from_secs(1)).unwrap_err().kind, ErrorKind::State);
}

#[test]
fn bad_scores_keep_the_routers_choice() {
    let dir = dir();
    let mut hook =
        Hook::open(&model(dir.path()), Config { moce: Moce { lambda: 0.9, ..Moce::default() }, ..config(8) }).unwrap();
    (0..20).for_each(|t| drop(pass(&mut hook, t, 1)));
    let good = scores(20, 0);
    let own = own_top_k(&good);
    let mut one_nan = good.clone();
    one_nan[own[3] as usize] = f32::NAN;
    let mut infinite = good.clone();
    infinite[own[0] as usize] = f32::INFINITY;
    for mut z in [one_nan, vec![f32::NAN; EXPERTS], infinite, vec![1.5; EXPERTS]] {
        let mut ids = own.clone();
        hook.select(
            &batch(0, 1),
            &Adjacent { data: &mut z, width: EXPERTS },
            &mut Adjacent { data: &mut ids, width: K },
        )
        .unwrap();
        assert_eq!(ids, own);
    }
    assert_eq!(hook.stats().bad_rows, 4);
}

#[test]
fn opening_refuses_what_cannot_work() {
    let dir = dir();
    let path = model(dir.path());
    let refused = |c: Config, kind: ErrorKind, words: &[&str]| {
        let e = Hook::open(&path, c).err().expect("refused");
        assert_eq!(e.kind, kind, "{e}");
        words.iter().for_each(|w| assert!(e.detail.contains(w), "{e}: no {w}"));
    };
    refused(config(3), ErrorKind::Budget, &["3 slots", "at least 4"]);
    // 4 layers, k = 2, 7 slots in all: the bytes needed are named. Here 3 layers, k = 4, room for 11 of 12.
    let hook = Hook::open(&path, config(4)).unwrap();
    let (per_layer, min) = (hook.plan().slot_bytes / LAYERS as u64, hook.plan().min_bytes);
    let bytes = 11 * per_layer + hook.plan().staging_bytes;
    refused(Config { slots: 0, cache_bytes: bytes, ..config(0) }, ErrorKind::Budget, &["3 slots", &min.to_string()]);
    refused(Config { slots: 0, cache_bytes: 1, ..config(0) }, ErrorKind::Budget, &[&min.to_string()]);
    let fits = Hook::open(&path, Config { slots: 0, cache_bytes: min, ..config(0) }).unwrap();
    assert_eq!(fits.live().slots, 4);
    refused(Config { k: 25, ..config(24) }, ErrorKind::Argument, &["k = 25"]);
    refused(
        Config { moce: Moce { lambda: f64::INFINITY, ..Moce::default() }, ..config(9) },
        ErrorKind::Argument,
        &["lambda"],
    );
}

#[test]
fn two_models_know_nothing_of_each_other() {
    let (dir_a, dir_b) = (dir(), dir());
    let path = model(dir_a.path());
    let alone: Vec<_> = {
        let mut a = Hook::open(&path, config(6)).unwrap();
        (0..30).flat_map(|t| pass(&mut a, t, 1)).map(|s| (s.slots, s.outcome.hits)).collect()
    };
    let mut a = Hook::open(&path, config(6)).unwrap();
    let other = dir_b.path().join("b.gguf");
    tiny::write(&TinyParams { experts: 10, k: 2, layers: 1, ..TinyParams::default() }, &other, &mut |_| ()).unwrap();
    let mut b = Hook::open(&other, Config { k: 2, ..config(3) }).unwrap();
    let mut together = Vec::new();
    for t in 0..30 {
        together.extend(pass(&mut a, t, 1).into_iter().map(|s| (s.slots, s.outcome.hits)));
        let mut ids = [(t % 10) as i32, ((t + 3) % 10) as i32];
        let one = Batch { n_experts: 10, k: 2, ..batch(0, 1) };
        b.admit(&one, &mut Adjacent { data: &mut ids, width: 2 }, None::<&mut Adjacent<f32>>).unwrap();
    }
    assert_eq!(alone, together);
}

/// The call for engines without a graph: the same choice and slots as the two calls, weights that sum to 1, and an error leaves all as it was.
#[test]
fn one_call_does_what_the_two_do() {
    let dir = dir();
    let path = model(dir.path());
    let c = Config { moce: Moce { lambda: 0.3, ..Moce::default() }, ..config(7) };
    let (mut one, mut two) = (Hook::open(&path, c.clone()).unwrap(), Hook::open(&path, c).unwrap());
    for t in 0..40 {
        for l in 0..LAYERS {
            let (mut z, mut ids, mut weights) = (scores(t, l), vec![-7; K], vec![9.0; K]);
            let b = Batch { routed: false, ..batch(l, 1) };
            let rows = Adjacent { data: &mut z, width: EXPERTS };
            let (i, w) = (&mut Adjacent { data: &mut ids, width: K }, &mut Adjacent { data: &mut weights, width: K });
            let outcome = one.layer(&b, &rows, i, w).unwrap();
            one.store().wait_layer(l).unwrap();
            let seen = layer(&mut two, l, t, 1).unwrap();
            assert_eq!((&ids, outcome), (&seen.slots, seen.outcome));
            assert!(weights.iter().zip(&seen.weights).all(|(a, b)| (a - b).abs() < 1e-6));
        }
    }
    let (mut z, mut ids, mut weights) = (scores(0, 0), vec![3, 3, 4, 5], vec![9.0; K]);
    let rows = Adjacent { data: &mut z, width: EXPERTS };
    let (i, w) = (&mut Adjacent { data: &mut ids, width: K }, &mut Adjacent { data: &mut weights, width: K });
    assert_eq!(one.layer(&batch(0, 1), &rows, i, w).unwrap_err().kind, ErrorKind::Range);
    assert_eq!((ids, weights), (vec![3, 3, 4, 5], vec![9.0; K]));
}

#[test]
fn an_aborted_pass_is_put_in_order() {
    let dir = dir();
    let trace = dir.path().join("t.q4rt");
    let mut hook =
        Hook::open(&model(dir.path()), Config { trace: Some(trace.clone()), queue_tokens: 512, ..config(9) }).unwrap();
    let mut live = [0u64; LAYERS];
    for t in 0..40 {
        if t % 7 == 3 {
            // The decode is given up after the first layer; its reads are still in flight when the next begins.
            layer(&mut hook, 0, 500 + t, 1).unwrap();
        }
        pass(&mut hook, t, 1).iter().enumerate().for_each(|(l, s)| live[l] += u64::from(s.outcome.misses));
    }
    assert_eq!((hook.stats().aborted_passes, hook.stats().passes), (6, 40));
    hook.close().unwrap();
    let (t, s) = (Trace::open(&trace).unwrap(), Sidecar::read_beside(&trace).unwrap().unwrap());
    assert_eq!((t.n_tokens(), s.left_out.get("pass aborted")), (40, Some(&6)));
    assert_eq!(replay::misses_per_layer(&t, &s), live);
}

#[test]
fn the_last_layer_may_see_fewer_tokens() {
    let dir = dir();
    for (seen_last, tail, recorded) in [(1usize, true, 1u64), (1, false, 0), (0, true, 0)] {
        let trace = dir.path().join("t.q4rt");
        let mut c = Config { trace: Some(trace.clone()), queue_tokens: 64, ..config(24) };
        c.prefill.record = true;
        let mut hook = Hook::open(&model(dir.path()), c).unwrap();
        for l in 0..LAYERS {
            let n = if l + 1 == LAYERS { seen_last } else { 28 };
            let b = Batch { tail, phase: Phase::Prefill, ..batch(l, n) };
            let mut z: Vec<f32> = (28 - n..28).flat_map(|t| scores(t, l)).collect();
            let mut ids: Vec<i32> = z.chunks(EXPERTS).flat_map(own_top_k).collect();
            hook.select(&b, &Adjacent { data: &mut z, width: EXPERTS }, &mut Adjacent { data: &mut ids, width: K })
                .unwrap();
            hook.admit(&b, &mut Adjacent { data: &mut ids, width: K }, None::<&mut Adjacent<f32>>).unwrap();
        }
        hook.close().unwrap();
        let (t, s) = (Trace::open(&trace).unwrap(), Sidecar::read_beside(&trace).unwrap().unwrap());
        assert_eq!(t.n_tokens() as u64, recorded);
        assert_eq!(s.left_out.values().sum::<u64>(), 28 - recorded);
        for l in (0..LAYERS).filter(|_| recorded == 1) {
            let own: Vec<u16> = own_top_k(&scores(27, l)).iter().map(|&e| e as u16).collect();
            assert_eq!((0..K).map(|r| t.record(0, l).id(r)).collect::<Vec<_>>(), own, "no layer is shifted");
        }
    }
}

#[test]
fn the_page_cache_backing_leaves_ids_alone() {
    let dir = dir();
    let path = model(dir.path());
    let mut hook = Hook::open(&path, Config { backing: Backing::PageCache, ..config(8) }).unwrap();
    let mut slots = Hook::open(&path, config(8)).unwrap();
    for t in 0..40 {
        for (a, b) in pass(&mut hook, t, 1).iter().zip(pass(&mut slots, t, 1)) {
            assert_eq!(a.slots, a.experts);
            assert_eq!((a.outcome.hits, a.outcome.misses), (b.outcome.hits, b.outcome.misses));
        }
    }
    assert_eq!((hook.stats().read_bytes, hook.stats().resident_bytes), (0, 0));
    let mut hook = Hook::open(
        &path,
        Config { backing: Backing::PageCache, drop: Drop { threshold: 1.0, ..Drop::default() }, ..config(6) },
    )
    .unwrap();
    (0..60).for_each(|t| pass(&mut hook, t, 1).iter().for_each(|s| assert!(distinct(&s.slots))));
    assert!(hook.stats().dropped > 0);
}

#[test]
fn the_metrics_log_has_a_line_a_pass() {
    let dir = dir();
    for name in ["m.jsonl", "m.csv"] {
        let path = dir.path().join(name);
        let mut hook = Hook::open(&model(dir.path()), Config { metrics: Some(path.clone()), ..config(8) }).unwrap();
        pass(&mut hook, 0, 40);
        (40..60).for_each(|t| drop(pass(&mut hook, t, 1)));
        let stats = hook.stats();
        hook.flush(Duration::from_secs(10)).unwrap();
        hook.close().unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        if name.ends_with("csv") {
            let mut lines = text.lines();
            let width = lines.next().unwrap().split(',').count();
            assert!(lines.clone().all(|l| l.split(',').count() == width));
            assert_eq!(lines.count(), 21);
            continue;
        }
        let rows: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert_eq!(rows.len(), 21);
        assert_eq!(
            (rows[0]["phase"].as_str(), rows[0]["tokens"].as_u64(), rows[0]["wall_ns"].is_null()),
            (Some("prefill"), Some(40), true)
        );
        let sum = |key: &str| rows.iter().map(|r| r[key].as_u64().unwrap()).sum::<u64>();
        assert_eq!((sum("hits"), sum("misses"), sum("read_bytes")), (stats.hits, stats.misses, stats.read_bytes));
        assert!(rows[1..].iter().all(|r| r["wall_ns"].as_u64().unwrap() >= r["pass_ns"].as_u64().unwrap()));
    }
}
