//! Reading ahead changes when bytes are read, and nothing else: decisions, slots' contents and replays are those without it.

#[path = "common/hook.rs"]
mod made;
#[path = "common/replay.rs"]
mod replay;

use hotset::ErrorKind;
use hotset::hook::{Config, Hook};
use hotset::store::Backing;
use hotset::trace::{Sidecar, Trace};
use made::*;

/// What the layer is going to choose for this token, the second half replaced by others.
fn half_right(t: usize, l: usize) -> Vec<i32> {
    let mut guess = own_top_k(&scores(t, l));
    guess.truncate(K / 2);
    let others = (0..EXPERTS as i32).filter(|e| (*e as usize * 7 + t) % 5 == 0);
    guess.extend(others.collect::<Vec<_>>().into_iter().filter(|e| !guess.contains(e)).take(K).collect::<Vec<_>>());
    guess
}

#[test]
fn decisions_and_bytes_are_those_without() {
    let dir = dir();
    let path = model(dir.path());
    for (slots, lanes, read_ahead, drop) in [(4, 1, 1, 0.0), (6, 2, 3, 0.0), (9, 4, 8, 0.0), (6, 2, 3, 0.9)] {
        let trace = dir.path().join("t.q4rt");
        let mut c = Config { lanes, trace: Some(trace.clone()), queue_tokens: 8192, ..config(slots) };
        c.drop.threshold = drop;
        let mut plain = Hook::open(&path, Config { trace: None, ..c.clone() }).unwrap();
        let mut ahead = Hook::open(&path, Config { read_ahead, ..c }).unwrap();
        assert_eq!((ahead.plan().read_ahead, plain.plan().read_ahead), (read_ahead, 0));
        let mut live = [0u64; LAYERS];
        for t in 0..120 {
            for (l, live) in live.iter_mut().enumerate() {
                assert_eq!(plain.read_ahead(l as u32, &half_right(t, l)).unwrap(), 0, "no slots are set aside");
                ahead.read_ahead(l as u32, &half_right(t, l)).unwrap();
                let (a, b) = (layer(&mut plain, l, t, 1).unwrap(), layer(&mut ahead, l, t, 1).unwrap());
                assert_eq!((a.outcome, a.weights), (b.outcome, b.weights.clone()), "token {t} layer {l}");
                let run: Vec<usize> = (0..K).filter(|&i| b.weights[i] > 0.0).collect();
                let pick = |from: &[i32]| run.iter().map(|&i| from[i]).collect::<Vec<_>>();
                check_bytes(&ahead, l, &pick(&b.experts), &pick(&b.slots));
                assert!(distinct(&b.slots) && b.slots.iter().all(|&s| (s as usize) < EXPERTS));
                *live += u64::from(b.outcome.misses);
            }
        }
        for b in 0..LAYERS as u32 {
            assert_eq!(plain.resident(b).unwrap(), ahead.resident(b).unwrap());
        }
        let s = ahead.stats();
        assert!(s.ahead_issued > s.ahead_adopted && s.ahead_adopted > 20 && s.ahead_wasted_bytes > 0, "{s:?}");
        assert!(
            s.resident_bytes <= (ahead.plan().slots + read_ahead) as u64 * s_bytes(&ahead) + ahead.plan().staging_bytes
        );
        ahead.close().unwrap();
        if drop == 0.0 {
            let (t, side) = (Trace::open(&trace).unwrap(), Sidecar::read_beside(&trace).unwrap().unwrap());
            assert_eq!(replay::misses_per_layer(&t, &side), live);
        }
    }
}

fn s_bytes(hook: &Hook) -> u64 {
    hook.plan().slot_bytes
}

#[test]
fn settings_may_change_and_bad_guesses_are_refused() {
    let dir = dir();
    let path = model(dir.path());
    let mut hook = Hook::open(&path, Config { read_ahead: 4, ..config(10) }).unwrap();
    for (round, slots) in [10, 20, 5, 14].into_iter().enumerate() {
        hook.set(|live| live.slots = slots).unwrap();
        for t in 40 * round..40 * round + 40 {
            for l in 0..LAYERS {
                hook.read_ahead(l as u32, &half_right(t, l)).unwrap();
                let seen = layer(&mut hook, l, t, 1).unwrap();
                check_bytes(&hook, l, &seen.experts, &seen.slots);
            }
        }
        assert!(hook.stats().resident <= (slots as usize * LAYERS) as u64);
    }
    // All of it, less what is set aside.
    hook.set(|live| live.slots = EXPERTS as u32).unwrap();
    assert_eq!(hook.live().slots, EXPERTS as u32 - 4);
    let before = hook.stats();
    for bad in [-1, EXPERTS as i32, i32::MAX] {
        assert_eq!(hook.read_ahead(1, &[0, bad]).unwrap_err().kind, ErrorKind::Range);
    }
    assert_eq!(hook.read_ahead(99, &[0]).unwrap_err().kind, ErrorKind::Range);
    assert_eq!(hook.stats().ahead_issued, before.ahead_issued);
    hook.reset();
    for l in 0..LAYERS {
        hook.read_ahead(l as u32, &half_right(0, l)).unwrap();
        let seen = layer(&mut hook, l, 0, 1).unwrap();
        check_bytes(&hook, l, &seen.experts, &seen.slots);
    }
}

#[test]
fn where_nothing_can_be_set_aside_nothing_is_read() {
    let dir = dir();
    let path = model(dir.path());
    let all = Config { read_ahead: 4, ..config(EXPERTS as u32) };
    let page_cache = Config { backing: Backing::PageCache, read_ahead: 4, ..config(8) };
    for c in [all, page_cache] {
        let mut hook = Hook::open(&path, c).unwrap();
        assert_eq!((hook.plan().read_ahead, hook.read_ahead(0, &[1, 2]).unwrap()), (0, 0));
    }
    // As many bytes as hold the slots alone do not hold these as well.
    let plan = Hook::open(&path, Config { read_ahead: 3, ..config(8) }).unwrap().plan().to_owned();
    let bytes = |slots: u64| plan.slot_bytes * slots + plan.staging_bytes;
    let open = |cache_bytes| Hook::open(&path, Config { cache_bytes, slots: 0, read_ahead: 3, ..config(0) });
    assert_eq!(open(bytes(11)).unwrap().plan().slots, 8);
    assert_eq!(open(bytes(K as u64 + 3) - 1).err().unwrap().kind, ErrorKind::Budget);
    assert_eq!(plan.min_bytes, bytes(K as u64 + 3));
}
