use super::*;

const SOUND: &str = r#"{ "hotset_schedule": 1,
  "seed": 7, "carry": "restore", "washout": 16,
  "ab": {"anything": [1, {"name": 2}]},
  "cells": [
    {"name": "F0"},
    {"name": "F.5 λ", "drop": 0.5, "lambda": 0.12, "top_j": 2, "delta": "running_full", "slots": 24, "lanes": 2, "backing": "slots"},
    {"name": "pc", "backing": "page-cache"}
  ],
  "blocks": [
    {"cell": "F0", "from": 0, "tokens": 64},
    {"cell": "F.5 λ", "from": 70, "tokens": 17},
    {"cell": "pc", "from": 87, "tokens": 18446744073709551528}
  ] }"#;

#[test]
fn a_schedule_is_read_and_written() {
    let s = Schedule::parse(SOUND.as_bytes()).unwrap();
    assert_eq!((s.seed, s.carry, s.washout, s.cells.len(), s.blocks.len()), (Some(7), Carry::Restore, 16, 3, 3));
    assert_eq!(s.cells[0], Cell { name: "F0".into(), line: 5, ..Cell::default() });
    assert_eq!((s.cells[1].delta, s.cells[1].drop, s.cells[1].line), (Some(Delta::RunningFull), Some(0.5), 6));
    assert_eq!((s.cells[2].backing, s.blocks[1].cell, s.blocks[1].from), (Some(Backing::PageCache), 1, 70));
    let again = Schedule::parse(s.to_json().as_bytes()).unwrap();
    let unplaced = |s: &Schedule| {
        let mut s = s.clone();
        s.cells.iter_mut().for_each(|c| c.line = 0);
        s
    };
    assert_eq!(unplaced(&again), unplaced(&s));
    assert_eq!(again.to_json(), s.to_json());
    // the least that works
    let least = r#"{"hotset_schedule":1,"cells":[{"name":"a"}],"blocks":[{"cell":"a","from":0,"tokens":1}]}"#;
    let s = Schedule::parse(least.as_bytes()).unwrap();
    assert_eq!((s.seed, s.carry, s.washout, s.ab.len()), (None, Carry::Washout, 0, 0));
}

#[test]
fn a_cell_lies_over_the_engines_own_settings() {
    let own = Live {
        moce: Moce { lambda: 0.2, top_j: 5, delta: Delta::TokenFull },
        drop: Drop { threshold: 0.7, renormalise: crate::route::Renormalise::On },
        slots: 9,
        lanes: 3,
        backing: Backing::Slots,
    };
    let s = Schedule::parse(SOUND.as_bytes()).unwrap();
    assert_eq!(s.cells[0].over(own), own);
    let live = s.cells[1].over(own);
    assert_eq!(live.moce, Moce { lambda: 0.12, top_j: 2, delta: Delta::RunningFull });
    assert_eq!((live.drop, live.slots, live.lanes), (Drop { threshold: 0.5, ..own.drop }, 24, 2));
    assert_eq!(s.cells[2].over(own), Live { backing: Backing::PageCache, ..own });
}

#[test]
fn a_bad_schedule_is_refused_with_line_and_reason() {
    // what of the sound one is replaced, by what; the line and what the error must say
    let faults = [
        (r#""hotset_schedule": 1"#, r#""hotset_schedule": 2"#, 1, "version 1 wanted, 2 found"),
        (r#""hotset_schedule": 1,"#, "", 1, "a schedule without \"hotset_schedule\""),
        (r#""seed": 7"#, r#""seed": -7"#, 2, "seed -7: a whole number in range wanted"),
        (r#""seed": 7"#, r#""sed": 7"#, 2, "a schedule has no \"sed\": its keys are"),
        (r#""seed": 7"#, "\"seed\": 7,\n\"seed\": 8", 3, "has \"seed\" twice"),
        (r#""carry": "restore""#, r#""carry": "keep""#, 2, "carry \"keep\": one of washout, flush, restore wanted"),
        (r#""washout": 16"#, r#""washout": 1.5"#, 2, "washout 1.5: a whole number"),
        (r#""washout": 16"#, r#""washout": 17"#, 11, "a block of 17 tokens with a washout of 17: nothing is left"),
        (r#"{"anything": [1, {"name": 2}]}"#, "3", 3, "ab 3: an object wanted"),
        (r#"{"name": "F0"},"#, r#"{},"#, 5, "a cell without \"name\""),
        (r#"{"name": "F0"},"#, r#"["F0"],"#, 5, "a cell is an object; [\"F0\"] found"),
        (r#"{"name": "F0"},"#, r#"{"name": ""},"#, 5, "name \"\": 1 to 64 bytes"),
        (r#"{"name": "F0"},"#, r#"{"name": "a,b"},"#, 5, "name \"a,b\": 1 to 64 bytes"),
        (r#"{"name": "F0"},"#, r#"{"name": "a\nb"},"#, 5, "without control characters"),
        (r#"{"name": "F0"},"#, r#"{"name": "a\\b"},"#, 5, "without control characters"),
        (r#"{"name": "pc""#, r#"{"name": "F0""#, 7, "cell \"F0\" is already in line 5"),
        (r#""drop": 0.5"#, r#""drop": -0.5"#, 6, "drop -0.5: a number of 0 or more wanted"),
        (r#""drop": 0.5"#, r#""drop": NaN"#, 6, "expected value"),
        (r#""drop": 0.5"#, r#""drop": 1e999"#, 6, "number out of range"),
        (r#""drop": 0.5"#, r#""drop": null"#, 6, "drop null: a number of 0 or more wanted"),
        (r#""drop": 0.5"#, r#""F": 0.5"#, 6, "a cell has no \"F\": its keys are name, drop"),
        (r#""lambda": 0.12"#, r#""lambda": ".12""#, 6, "lambda \".12\": a number"),
        (r#""top_j": 2"#, r#""top_j": 4294967296"#, 6, "top_j 4294967296: a whole number in range"),
        (r#""delta": "running_full""#, r#""delta": "full""#, 6, "delta \"full\": one of token_topk, token_full"),
        (r#""slots": 24"#, r#""slots": 0"#, 6, "slots 0: 1 or more wanted"),
        (r#""slots": 24"#, r#""slots": [24]"#, 6, "slots [24]: a whole number"),
        (r#""lanes": 2"#, r#""lanes": 65"#, 6, "lanes 65: 1 to 64 wanted"),
        (r#""backing": "slots""#, r#""backing": "page_cache""#, 6, "one of slots, page-cache wanted"),
        (r#"{"cell": "pc""#, r#"{"cell": "pd""#, 12, "there is no cell \"pd\""),
        (r#"{"cell": "pc", "#, r#"{"#, 12, "a block without \"cell\""),
        (r#""from": 0, "#, "", 10, "a block without \"from\""),
        (r#", "tokens": 64"#, "", 10, "a block without \"tokens\""),
        (r#""tokens": 64"#, r#""tokens": 0"#, 10, "tokens 0: 1 or more wanted"),
        (r#""tokens": 64"#, r#""tokens": 16"#, 10, "a block of 16 tokens with a washout of 16"),
        (r#""tokens": 64"#, r#""tokens": 71"#, 11, "begins at token 70, block 0 (from 0) ends at 71"),
        (r#""from": 0"#, r#""from": 1000"#, 11, "begins at token 70, block 0 (from 1000)"),
        (r#""from": 87"#, r#""from": 88"#, 12, "from + tokens is more than 64 bits hold"),
        (r#""from": 87"#, r#""from": 87, "x": 1"#, 12, "a block has no \"x\""),
        ("\n  ] }", "\n  ] }}", 13, "trailing characters"),
        ("\n  ] }", "\n  ]", 13, "EOF"),
    ];
    for (what, by, line, says) in faults {
        let text = SOUND.replacen(what, by, 1);
        assert_ne!(text, SOUND, "{what}");
        let e = Schedule::parse(text.as_bytes()).expect_err(by);
        assert!(e.detail.starts_with(&format!("line {line}: ")) && e.detail.contains(says), "{by}: {e}");
        assert_eq!(e.kind, ErrorKind::Format, "{e}");
    }
    for (text, says) in [
        ("[]", "a schedule is an object; [] found"),
        (r#"{"hotset_schedule":1,"cells":[],"blocks":[]}"#, "cells []: a list of at least one wanted"),
        (r#"{"hotset_schedule":1,"cells":[{"name":"a"}],"blocks":{}}"#, "blocks {}: a list of at least one wanted"),
        (r#"{"hotset_schedule":1,"cells":[{"name":"a"}]}"#, "a schedule without \"blocks\""),
        (&"[".repeat(100_000), "recursion limit"),
    ] {
        let e = Schedule::parse(text.as_bytes()).unwrap_err();
        assert!(e.detail.contains(says), "{e}");
    }
    let many: Vec<_> = (0..=MAX_CELLS).map(|i| format!("{{\"name\":\"{i}\"}}")).collect();
    let text = format!("{{\"hotset_schedule\":1,\"cells\":[{}],\"blocks\":[]}}", many.join(",\n"));
    let e = Schedule::parse(text.as_bytes()).unwrap_err();
    assert_eq!(e.detail, "line 257: more than 256 cells");
    let e = Schedule::parse(&vec![b' '; MAX_BYTES as usize + 1]).unwrap_err();
    assert!(e.detail.contains("more than 4194304 bytes"), "{e}");
}

#[test]
fn files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("plan.json");
    assert_eq!(Schedule::load(&path).unwrap_err().kind, ErrorKind::Io);
    std::fs::write(&path, "{\n]").unwrap();
    let e = Schedule::load(&path).unwrap_err();
    assert!(e.detail.starts_with(&format!("{}: line 2: ", path.display())), "{e}");
    std::fs::write(&path, SOUND).unwrap();
    Schedule::load(&path).unwrap();
}

#[test]
fn what_the_model_cannot_do_is_refused_with_the_line() {
    let plan = Plan { k: 4, n_experts: 32, slots: 24, slot_bytes: 100, ..Plan::default() };
    let s = Schedule::parse(SOUND.as_bytes()).unwrap();
    s.check(&plan, 24, 4, true).unwrap();
    let refused = |plan: &Plan, max_slots, lanes, slots| s.check(plan, max_slots, lanes, slots).unwrap_err();
    let e = refused(&plan, 23, 4, true);
    assert_eq!(e.kind, ErrorKind::Budget);
    let says = "line 6: cell \"F.5 λ\": 24 slots are 2400 bytes; the memory planned for holds 23 (2300 bytes)";
    assert_eq!(e.detail, says);
    let e = refused(&Plan { n_experts: 23, ..plan }, 23, 4, true);
    assert!(e.detail.ends_with("24 slots for 23 experts"), "{e}");
    let e = refused(&Plan { k: 25, ..plan }, 24, 4, true);
    assert!(e.detail.ends_with("24 slots, and a token uses 25 experts of a layer"), "{e}");
    let e = refused(&plan, 24, 1, true);
    assert!(e.detail.ends_with("2 lanes; 1 were started at open"), "{e}");
    let e = refused(&plan, 24, 4, false);
    assert!(e.detail.ends_with("the model was opened with the page-cache backing"), "{e}");
}

mod damaged {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// A sound text with bytes put in, taken out or changed: an error that names one of its lines, or a schedule that is the same after
        /// writing and reading it again.
        #[test]
        fn texts_are_refused_by_line_or_read(
            edits in prop::collection::vec((0..SOUND.len(), 0..3u8, prop::sample::select(&b"{}[]\",:\\\n 0-19eE.nulltruef\xff\0"[..])), 1..6),
        ) {
            let mut text = SOUND.as_bytes().to_vec();
            for (at, what, byte) in edits {
                let at = at.min(text.len() - 1);
                match what {
                    0 => text[at] = byte,
                    1 => text.insert(at, byte),
                    _ => drop(text.remove(at)),
                }
            }
            match Schedule::parse(&text) {
                Err(e) => {
                    let line = e.detail.strip_prefix("line ").and_then(|d| d.split(':').next()?.parse::<usize>().ok());
                    let lines = 1 + text.iter().filter(|&&b| b == b'\n').count();
                    prop_assert!(line.is_some_and(|n| (1..=lines).contains(&n)), "{}", e);
                }
                Ok(s) => {
                    let written = s.to_json();
                    prop_assert_eq!(Schedule::parse(written.as_bytes()).unwrap().to_json(), written);
                }
            }
        }
    }
}
