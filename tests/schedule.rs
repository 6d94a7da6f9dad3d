//! A schedule in the live hook: what it changes and what it must not, the contents that blocks begin with, the rows' labels, a scheduled
//! recording and its replay, and what is refused.

#[path = "common/hook.rs"]
mod made;
#[path = "common/program.rs"]
mod program;

use std::path::{Path, PathBuf};
use std::time::Duration;

use hotset::ErrorKind;
use hotset::hook::{Config, Hook, Placed, Schedule};
use hotset::replay::{Ranges, recorded};
use hotset::route::{Delta, Drop, Moce};
use hotset::store::Backing;
use hotset::trace::{Sidecar, Trace};
use made::*;
use serde_json::{Value, json};

/// A plan in a file.
fn plan(dir: &Path, carry: &str, washout: u64, cells: Value, blocks: &[(&str, u64, u64)]) -> PathBuf {
    let blocks: Vec<_> =
        blocks.iter().map(|(cell, from, n)| json!({ "cell": cell, "from": from, "tokens": n })).collect();
    let plan = json!({ "hotset_schedule": 1, "carry": carry, "washout": washout, "cells": cells, "blocks": blocks });
    let path = dir.join("plan.json");
    std::fs::write(&path, serde_json::to_string_pretty(&plan).unwrap()).unwrap();
    path
}

fn rows(path: &Path) -> Vec<Value> {
    std::fs::read_to_string(path).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

fn same(a: &[Seen], b: &[Seen]) -> bool {
    a.iter().zip(b).all(|(a, b)| {
        let bits = |w: &[f32]| w.iter().map(|w| w.to_bits()).collect::<Vec<_>>();
        (&a.experts, &a.slots, bits(&a.weights), a.outcome) == (&b.experts, &b.slots, bits(&b.weights), b.outcome)
    })
}

/// All that a run gives: of each pass what ran, the trace with its sidecar, the metrics without times, labels and the machine's state.
fn run(gguf: &Path, out: &Path, config: Config) -> (Vec<Vec<Seen>>, Vec<Vec<u8>>, Vec<Value>) {
    let (trace, metrics) = (out.join("t.q4rt"), out.join("m.jsonl"));
    let mut hook =
        Hook::open(gguf, Config { trace: Some(trace.clone()), metrics: Some(metrics.clone()), ..config }).unwrap();
    let mut passes = vec![pass(&mut hook, 1000, 8)];
    passes.extend((0..60).map(|t| pass(&mut hook, t, 1)));
    passes.push(pass(&mut hook, 2000, 3));
    passes.extend((60..90).map(|t| pass(&mut hook, t, 1)));
    hook.flush(Duration::from_secs(10)).unwrap();
    hook.close().unwrap();
    let mut ranges = trace.clone().into_os_string();
    ranges.push(".range");
    let mut sidecar = trace.clone().into_os_string();
    sidecar.push(".json");
    let files = [trace.into_os_string(), sidecar, ranges].map(|f| std::fs::read(f).unwrap_or_default());
    let mut rows = rows(&metrics);
    for row in &mut rows {
        for key in [
            "wall_ns",
            "pass_ns",
            "wait_ns",
            "reads",
            "cell",
            "block",
            "washout",
            "major_faults",
            "rss_bytes",
            "disk_bytes",
            "thermal_level",
            "thermal_mc",
        ] {
            row.as_object_mut().unwrap().remove(key).expect(key);
        }
    }
    (passes, files.to_vec(), rows)
}

#[test]
fn a_schedule_of_one_cell_is_no_schedule() {
    let dir = dir();
    let gguf = model(dir.path());
    let moce = Moce { lambda: 0.15, top_j: 1, delta: Delta::RunningFull };
    let wanted = Config { moce, drop: Drop { threshold: 0.8, ..Drop::default() }, lanes: 3, ..config(9) };
    let plain = run(&gguf, dir.path(), wanted.clone());
    assert!(plain.2.iter().any(|r| r["swapped"] != 0) && plain.2.iter().any(|r| r["dropped"] != 0));
    // the engine's settings, named by the cell or not; or only the cell has them
    let named = json!([{ "name": "a", "lambda": 0.15, "top_j": 1, "delta": "running_full", "drop": 0.8, "slots": 9, "lanes": 3,
        "backing": "slots" }]);
    let others = Config { slots: 9, ..config(0) };
    for (own, cells) in [(&wanted, json!([{ "name": "a" }])), (&wanted, named.clone()), (&others, named)] {
        for blocks in [vec![("a", 0, 1000)], vec![("a", 0, 30), ("a", 30, 11), ("a", 41, 500)]] {
            let schedule = Some(plan(dir.path(), "washout", 5, cells.clone(), &blocks));
            let scheduled = run(&gguf, dir.path(), Config { schedule, ..own.clone() });
            assert!(plain.0.iter().zip(&scheduled.0).all(|(a, b)| same(a, b)), "what ran");
            for (i, (a, b)) in plain.1.iter().zip(&scheduled.1).enumerate() {
                assert!(a == b && !a.is_empty(), "file {i} of the trace");
            }
            assert_eq!(plain.2, scheduled.2);
        }
    }
}

#[test]
fn a_switch_changes_nothing_that_was_decoded_before_it() {
    let dir = dir();
    let gguf = model(dir.path());
    let decode = |hook: &mut Hook| (0..50).map(|t| pass(hook, t, 1)).collect::<Vec<_>>();
    let whole = decode(&mut Hook::open(&gguf, config(8)).unwrap());
    let mut differ = 0;
    for (cell, carry) in [
        (json!({ "name": "b", "lambda": 0.3 }), "washout"),
        (json!({ "name": "b", "drop": 1.5 }), "washout"),
        (json!({ "name": "b", "slots": 5 }), "washout"),
        (json!({ "name": "b", "backing": "page-cache" }), "washout"),
        (json!({ "name": "b", "lanes": 1 }), "flush"),
        (json!({ "name": "b" }), "restore"),
    ] {
        let cells = json!([{ "name": "a" }, cell]);
        let schedule = plan(dir.path(), carry, 0, cells, &[("a", 0, 20), ("b", 20, 30)]);
        let passes = decode(&mut Hook::open(&gguf, Config { schedule: Some(schedule), ..config(8) }).unwrap());
        assert!(whole[..20].iter().zip(&passes).all(|(a, b)| same(a, b)), "{cell}");
        differ += usize::from(whole[20..].iter().zip(&passes[20..]).any(|(a, b)| !same(a, b)));
    }
    assert!(differ >= 5, "the second block is felt: {differ}");
}

#[test]
fn the_next_passs_settings_are_known_before_it() {
    let dir = dir();
    let cells =
        json!([{ "name": "a", "lambda": 0.2, "slots": 8 }, { "name": "b", "drop": 0.5, "lanes": 4, "slots": 6 }]);
    let schedule = plan(dir.path(), "washout", 1, cells, &[("a", 2, 3), ("b", 5, 2)]);
    let mut hook = Hook::open(&model(dir.path()), Config { schedule: Some(schedule), ..config(9) }).unwrap();
    let mut seen = Vec::new();
    for t in 0..9 {
        let live = hook.live();
        seen.push((live.moce.lambda, live.drop.threshold, live.slots, live.lanes));
        pass(&mut hook, t, 1);
        assert_eq!(hook.plan().slots, seen[t].2);
        let most = hook.model().experts.layers.iter().map(|l| hook.resident(l.block).unwrap().len()).max();
        assert!(most.unwrap() as u32 <= seen[t].2);
        if t == 3 {
            // holds from the next pass on, where no cell says otherwise
            hook.set(|live| (live.moce.lambda, live.drop.threshold) = (0.7, 0.1)).unwrap();
        }
    }
    let (own, own2) = ((0.0, 0.0, 9, 2), (0.7, 0.1, 9, 2));
    let (a, a2, b) = ((0.2, 0.0, 8, 2), (0.2, 0.1, 8, 2), (0.7, 0.5, 6, 4));
    assert_eq!(seen, [own, own, a, a, a2, b, b, own2, own2]);
    // a new one begins at its own 0, and NULL's ends it
    let text = std::fs::read(dir.path().join("plan.json")).unwrap();
    let mut schedule = Schedule::parse(&text).unwrap();
    schedule.blocks[0].from = 0;
    hook.set_schedule(Some(schedule)).unwrap();
    assert_eq!(hook.live().moce.lambda, 0.2);
    pass(&mut hook, 10, 1);
    hook.set_schedule(None).unwrap();
    let live = hook.live();
    assert_eq!((live.moce.lambda, live.drop.threshold, live.slots, live.lanes), own2);
}

/// What the sidecar says was resident before a token, and why it says so.
fn noted(sidecar: &Sidecar, token: u64) -> (&str, &Vec<Vec<u16>>) {
    let r = sidecar.resident.iter().find(|r| r.before_token == token).unwrap_or_else(|| panic!("nothing at {token}"));
    (&r.reason, &r.layers)
}

#[test]
fn a_scheduled_recording_replays_to_the_live_misses() {
    let dir = dir();
    let gguf = model(dir.path());
    let trace = dir.path().join("t.q4rt");
    let cells = json!([
        { "name": "a" },
        { "name": "l", "lambda": 0.3, "top_j": 1 },
        { "name": "r", "lambda": 0.2, "delta": "running_full", "slots": 7 },
        { "name": "s", "slots": 5 },
        { "name": "p", "backing": "page-cache", "lambda": 0.1 },
    ]);
    let blocks = [
        ("a", 5, 20),
        ("l", 25, 20),
        ("s", 45, 10),
        ("a", 60, 15),
        ("p", 75, 20),
        ("l", 95, 10),
        ("r", 105, 20),
        ("r", 125, 9),
        ("p", 134, 10),
        ("s", 144, 20),
    ];
    for carry in ["washout", "flush", "restore"] {
        let schedule = Some(plan(dir.path(), carry, 3, cells.clone(), &blocks));
        let mut hook = Hook::open(&gguf, Config { schedule, trace: Some(trace.clone()), ..config(9) }).unwrap();
        let mut live = [0u64; LAYERS];
        for t in 0..180 {
            if t % 50 == 48 {
                // passes through, and is not recorded
                pass(&mut hook, 1000 + t, 9);
            }
            for (l, seen) in pass(&mut hook, t, 1).iter().enumerate() {
                live[l] += u64::from(seen.outcome.misses);
                if seen.outcome.placed == Placed::Slots {
                    check_bytes(&hook, l, &seen.experts, &seen.slots);
                }
            }
        }
        assert!(hook.stats().swapped > 0);
        hook.flush(Duration::from_secs(10)).unwrap();
        hook.close().unwrap();
        let (t, s) = (Trace::open(&trace).unwrap(), Sidecar::read_beside(&trace).unwrap().unwrap());
        assert_eq!(t.n_tokens(), 180);
        let replayed = recorded(&t, &s, Ranges::beside(&trace, &t).unwrap().as_ref()).unwrap();
        assert_eq!((&replayed.misses[..], replayed.tokens), (&live[..], 180), "{carry}");
        assert_eq!(replayed.inexact, Vec::<String>::new());
        let said = program::ok(program::hotset().arg("replay").arg(&trace).args(["--as-recorded", "--json"]));
        assert_eq!(serde_json::from_str::<Value>(&said).unwrap()["misses_per_layer"], json!(live));
        let empty = vec![vec![]; LAYERS];
        match carry {
            "washout" => assert_ne!(noted(&s, 25).1, &empty),
            "flush" => {
                assert_eq!(noted(&s, 5), ("cache flushed by schedule", &empty));
                assert!(blocks.iter().all(|b| noted(&s, b.1).1 == &empty));
            }
            _ => {
                // nine slots with lambda or without, but not mapped; seven, five
                let at = |token| noted(&s, token).1;
                assert!(!s.resident.iter().any(|r| r.before_token == 5), "the first contents stay as they are");
                assert_eq!(noted(&s, 125), ("cache restored by schedule", at(105)));
                assert!(at(25) == at(60) && at(25) == at(95) && at(45) == at(144) && at(75) == at(134));
                assert!(at(25) != at(45) && at(25).iter().all(|l| l.len() > K));
                assert_eq!(at(75), &empty, "what is resident with one backing is not with the other");
            }
        }
    }
}

#[test]
fn a_page_cache_cell_gives_the_slots_memory_back() {
    let dir = dir();
    let gguf = model(dir.path());
    let cells = json!([{ "name": "s" }, { "name": "p", "backing": "page-cache" }, { "name": "d", "backing": "page-cache", "drop": 1.5 }]);
    let blocks = [("s", 0, 20), ("p", 20, 10), ("d", 30, 10), ("s", 40, 20)];
    let schedule = Some(plan(dir.path(), "washout", 3, cells, &blocks));
    // opened as it needs to be, whatever the engine asked for
    for backing in [Backing::Slots, Backing::PageCache] {
        let cells = r#"{"name": "s", "backing": "slots"}"#;
        let path = schedule.clone().unwrap();
        let text: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let mut text = text;
        text["cells"][0] = serde_json::from_str(cells).unwrap();
        std::fs::write(&path, text.to_string()).unwrap();
        let mut hook = Hook::open(&gguf, Config { schedule: Some(path), backing, ..config(8) }).unwrap();
        assert_eq!(hook.config().backing, Backing::Slots);
        let before = hook.stats().resident_bytes;
        let mut held = Vec::new();
        let mut dropped = 0;
        for t in 0..60 {
            let mapped = (20..40).contains(&t);
            for (l, seen) in pass(&mut hook, t, 1).iter().enumerate() {
                let placed = if mapped { Placed::Mapped } else { Placed::Slots };
                assert_eq!(seen.outcome.placed, placed, "token {t}");
                if !mapped {
                    check_bytes(&hook, l, &seen.experts, &seen.slots);
                    continue;
                }
                // expert ids, all distinct; others only where one is dropped, with weight 0
                assert!(distinct(&seen.slots) && seen.slots.iter().all(|&e| (e as usize) < EXPERTS));
                let changed = seen.slots.iter().zip(&seen.experts).zip(&seen.weights).filter(|((a, b), _)| a != b);
                changed.clone().for_each(|(_, &w)| assert_eq!(w, 0.0));
                assert_eq!(changed.count(), seen.outcome.dropped as usize);
                assert_eq!(seen.outcome.read_bytes, 0);
                dropped += seen.outcome.dropped;
            }
            held.push(hook.stats().resident_bytes);
        }
        let full = 8 * hook.plan().slot_bytes;
        assert!(dropped > 0 && held[19] > before + full / 2 && held[59] > before + full / 2, "{held:?}");
        assert!(held[20..40].iter().all(|&h| h == before), "{held:?}");
        assert!(hook.stats().pass_through_rows == 0);
    }
}

#[test]
fn a_smaller_cell_after_a_flush_holds_no_more_memory_than_its_slots() {
    let dir = dir();
    let cells = json!([{ "name": "8", "slots": 8 }, { "name": "5", "slots": 5 }]);
    let blocks: Vec<_> = (0..10).map(|i| (if i % 2 == 0 { "8" } else { "5" }, 12 * i, 12)).collect();
    let schedule = Some(plan(dir.path(), "flush", 3, cells, &blocks));
    let mut hook = Hook::open(&model(dir.path()), Config { schedule, ..config(8) }).unwrap();
    let before = hook.stats().resident_bytes;
    for t in 0..120 {
        pass(&mut hook, t, 1);
        let (held, slots) = (hook.stats().resident_bytes - before, hook.live().slots.max(hook.plan().slots));
        assert!(held <= u64::from(slots) * hook.plan().slot_bytes, "token {t}: {held} bytes for {slots} slots");
    }
}

#[test]
fn rows_are_labelled() {
    let dir = dir();
    let gguf = model(dir.path());
    let cells = json!([{ "name": "F 0" }, { "name": "λ .1", "lambda": 0.1 }]);
    let schedule = plan(dir.path(), "restore", 2, cells, &[("F 0", 1, 4), ("λ .1", 5, 3), ("F 0", 8, 3)]);
    for name in ["m.jsonl", "m.csv"] {
        let metrics = dir.path().join(name);
        let config = Config { schedule: Some(schedule.clone()), metrics: Some(metrics.clone()), ..config(8) };
        let mut hook = Hook::open(&gguf, config).unwrap();
        pass(&mut hook, 500, 6);
        for t in 0..13 {
            if t == 6 {
                pass(&mut hook, 600, 2);
                // cut off, and so not counted
                layer(&mut hook, 0, 700, 1).unwrap();
            }
            pass(&mut hook, t, 1);
        }
        hook.flush(Duration::from_secs(10)).unwrap();
        hook.close().unwrap();
        let none = || (Value::Null, Value::Null, json!(0));
        let of = |cell: &str, block: u32, washout: u32| (json!(cell), json!(block), json!(washout));
        let mut wanted = vec![none(), none()];
        wanted.extend([1, 1, 0, 0].map(|w| of("F 0", 0, w)));
        wanted.push(of("λ .1", 1, 1));
        wanted.push(none());
        wanted.extend([1, 0].map(|w| of("λ .1", 1, w)));
        wanted.extend([1, 1, 0].map(|w| of("F 0", 2, w)));
        wanted.extend([none(), none()]);
        let rows: Vec<Value> = if name.ends_with("csv") {
            let text = std::fs::read_to_string(&metrics).unwrap();
            let mut lines = text.lines().map(|l| l.split(',').collect::<Vec<_>>());
            let keys = lines.next().unwrap();
            let value = |key: &str, text: &str| match text {
                "" => Value::Null,
                text if key == "cell" || key == "phase" => json!(text),
                text => serde_json::from_str(text).unwrap(),
            };
            let row = |line: Vec<&str>| {
                assert_eq!(line.len(), keys.len());
                keys.iter().zip(line).map(|(k, v)| (k.to_string(), value(k, v))).collect()
            };
            lines.map(row).map(Value::Object).collect()
        } else {
            rows(&metrics)
        };
        let labels: Vec<_> =
            rows.iter().map(|r| (r["cell"].clone(), r["block"].clone(), r["washout"].clone())).collect();
        assert_eq!(labels, wanted, "{name}");
        for r in &rows {
            let machine = ["major_faults", "rss_bytes", "disk_bytes", "thermal_level", "thermal_mc"];
            machine.iter().for_each(|k| assert!(r.get(*k).is_some_and(|v| v.is_null() || v.is_number()), "{k}: {r}"));
            assert!(r["major_faults"].is_u64());
            assert!(r["wall_ns"].is_null() || r["wall_ns"].as_u64() >= r["pass_ns"].as_u64(), "{r}");
        }
        if cfg!(target_os = "linux") {
            assert!(rows.iter().all(|r| r["rss_bytes"].as_u64().unwrap() > 1 << 20));
        }
    }
}

#[test]
fn what_cannot_be_run_is_refused_with_file_line_and_reason() {
    let dir = dir();
    let gguf = model(dir.path());
    let sound = plan(dir.path(), "washout", 1, json!([{ "name": "a", "lambda": 0.5 }]), &[("a", 0, 90)]);
    let mut hook = Hook::open(&gguf, Config { schedule: Some(sound), ..config(8) }).unwrap();
    let mut mapped = Hook::open(&gguf, Config { backing: Backing::PageCache, ..config(8) }).unwrap();
    let faults = [
        (json!({ "slots": 9 }), ErrorKind::Budget, "9 slots are"),
        (json!({ "slots": 25 }), ErrorKind::Budget, "25 slots for 24 experts"),
        (json!({ "slots": 3 }), ErrorKind::Budget, "3 slots, and a token uses 4 experts"),
        (json!({ "slot": 3 }), ErrorKind::Format, "a cell has no \"slot\""),
    ];
    for (mut cell, kind, says) in faults {
        cell["name"] = json!("b");
        let path = plan(dir.path(), "washout", 1, json!([{ "name": "a" }, cell]), &[("a", 0, 90)]);
        let text = std::fs::read_to_string(&path).unwrap();
        let line = 1 + text.lines().position(|l| l.contains("\"slot")).unwrap();
        let e = Hook::open(&gguf, Config { schedule: Some(path.clone()), ..config(8) }).err().unwrap();
        assert_eq!(e.kind, kind, "{e}");
        // of a whole cell the line is that of its beginning, two keys up
        let lines = [line, line - 1, line - 2].map(|line| format!("{}: line {line}: ", path.display()));
        assert!(lines.iter().any(|l| e.detail.starts_with(l)) && e.detail.contains(says), "{e}");
        if kind == ErrorKind::Budget {
            let e = hook.set_schedule(Some(Schedule::load(&path).unwrap())).unwrap_err();
            assert!(e.detail.starts_with("line ") && e.detail.contains(says), "{e}");
            assert_eq!(hook.live().moce.lambda, 0.5, "the schedule in work stays");
        }
    }
    let lanes = plan(dir.path(), "washout", 1, json!([{ "name": "a", "lanes": 7 }]), &[("a", 0, 90)]);
    assert_eq!(hook.set_schedule(Some(Schedule::load(&lanes).unwrap())).unwrap_err().kind, ErrorKind::Argument);
    // at open there are as many as it needs
    let opened = Hook::open(&gguf, Config { schedule: Some(lanes), ..config(8) }).unwrap();
    assert_eq!((opened.config().lanes, opened.live().lanes), (7, 7));
    let slots = plan(dir.path(), "washout", 1, json!([{ "name": "a", "backing": "slots" }]), &[("a", 0, 90)]);
    let e = mapped.set_schedule(Some(Schedule::load(&slots).unwrap())).unwrap_err();
    assert!(e.detail.contains("opened with the page-cache backing"), "{e}");
    let none = Some(dir.path().join("none.json"));
    let e = Hook::open(&gguf, Config { schedule: none, ..config(8) }).err().unwrap();
    assert!(e.kind == ErrorKind::Io && e.detail.contains("none.json"), "{e}");
}
