//! Foreign traces: what becomes of small made ones, of files at fault, and of the real ones where they are there.
#![cfg(feature = "tools")]

#[path = "common/shared.rs"]
mod shared;

use std::fs::{self, File};
use std::io::{BufReader, Cursor};

use half::f16;
use hotset::cache::{LayerCache, Placed};
use hotset::trace::import::{self, ImportOptions};
use hotset::trace::{Phase, Sidecar, Trace, reason};
use hotset::{ErrorKind, Result};
use proptest::prelude::*;
use shared::shared;

const HEADING: &str = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n";

fn csv_with(text: &[u8], options: ImportOptions) -> Result<(Trace, Sidecar)> {
    let mut out = Cursor::new(Vec::new());
    let sidecar = import::route_csv(&mut Cursor::new(text), &mut out, options)?;
    Ok((checked(out.into_inner(), &sidecar), sidecar))
}

fn csv(text: &str) -> Result<(Trace, Sidecar)> {
    csv_with(text.as_bytes(), ImportOptions::default())
}

fn jsonl(text: &[u8]) -> Result<(Trace, Sidecar)> {
    let mut out = Cursor::new(Vec::new());
    let sidecar = import::jsonl(&mut Cursor::new(text), &mut out, ImportOptions::default())?;
    Ok((checked(out.into_inner(), &sidecar), sidecar))
}

/// Whatever is imported is a sound trace, with a sidecar that describes it and can be read again.
fn checked(bytes: Vec<u8>, sidecar: &Sidecar) -> Trace {
    let trace = Trace::from_bytes(bytes).unwrap();
    sidecar.check_header(trace.header()).unwrap();
    assert_eq!(trace.verify(0..usize::MAX, 3), []);
    assert_eq!(sidecar.described_tokens(), trace.n_tokens() as u64);
    assert_eq!(u64::from(trace.header().n_tokens), trace.health().found_tokens);
    assert!(sidecar.residency.is_empty() || sidecar.residency.len() == trace.n_tokens());
    assert_eq!(&Sidecar::from_json(&sidecar.to_json()).unwrap(), sidecar);
    trace
}

fn ids(trace: &Trace, token: usize, layer: usize) -> Vec<u16> {
    (0..trace.top_m()).map(|rank| trace.record(token, layer).id(rank)).collect()
}

/// A row a slot: two experts, weights .75 and .25, a hit and a miss.
fn cell(turn: u32, phase: u32, step: u32, layer: u32, experts: [u32; 2]) -> String {
    let [a, b] = experts;
    format!("{turn},{phase},{step},{layer},0,{a},0.75,1,100\n{turn},{phase},{step},{layer},1,{b},0.25,0,100\n")
}

#[test]
fn passes_and_turns() {
    // two prefill passes, the last layer of the second with its last step only; decode; another turn
    let mut text =
        "# route_trace v1\n# model=/a/b.gguf arch=x n_layer=5 n_expert=9 n_expert_used=2 future=1\n".to_owned();
    text += "# layer=1 expert_bytes=100 dense_bytes=7\r\n# layer=3 expert_bytes=200 dense_bytes=8\n# a remark\n";
    text += HEADING;
    for layer in [1, 3] {
        (0..2).for_each(|step| text += &cell(0, 0, step, layer, [step, 8]));
    }
    (2..5).for_each(|step| text += &cell(0, 0, step, 1, [step, 8]));
    text += &cell(0, 0, 4, 3, [4, 8]);
    for step in 5..8 {
        text += &cell(0, 1, step, 1, [step, 8]);
        text += &cell(0, 1, step, 3, [step, 7 - step]);
    }
    text += &(cell(1, 1, 0, 1, [3, 4]) + &cell(1, 1, 0, 3, [5, 6]));
    let (trace, sidecar) = csv(&text).unwrap();
    assert_eq!((trace.n_layers(), trace.n_experts(), trace.top_m(), trace.n_tokens()), (2, 9, 2, 7));
    let spans: Vec<_> =
        sidecar.ranges.iter().map(|r| (r.first, r.n_tokens, r.phase, r.position, r.left_out_before)).collect();
    let (prefill, decode) = (Phase::Prefill, Phase::Decode);
    assert_eq!(spans, [(0, 2, prefill, 0, 0), (2, 1, prefill, 4, 2), (3, 3, decode, 5, 0), (6, 1, decode, 0, 0)]);
    assert_eq!(sidecar.ranges.iter().map(|r| r.tokens_per_pass).collect::<Vec<_>>(), [2, 3, 1, 1]);
    assert_eq!(sidecar.left_out, [(reason::FEWER_TOKENS.to_owned(), 2)].into());
    assert_eq!((ids(&trace, 2, 1), ids(&trace, 4, 1), ids(&trace, 6, 0)), (vec![4, 8], vec![6, 1], vec![3, 4]));
    assert_eq!(trace.record(0, 0).score(0), f16::from_f64(0.75f64.ln()));
    assert_eq!(
        (sidecar.shape.blocks.as_slice(), sidecar.expert_bytes.as_slice()),
        ([1, 3].as_slice(), [100, 200].as_slice())
    );
    assert_eq!(sidecar.residency[3], "1010");
    assert_eq!((sidecar.score_space.as_str(), sidecar.model.architecture.as_str()), ("log_weight", "x"));
    let import = &sidecar.more["import"];
    assert_eq!(import["turns"], serde_json::json!([{ "turn": 0, "first": 0 }, { "turn": 1, "first": 6 }]));
    assert_eq!((&import["dense_bytes"], &import["model"]), (&serde_json::json!([7, 8]), &"/a/b.gguf".into()));

    let options = ImportOptions { prefill: false, residency: false, n_experts: Some(20) };
    let (trace, sidecar) = csv_with(text.as_bytes(), options).unwrap();
    assert_eq!((trace.n_tokens(), trace.n_experts(), ids(&trace, 0, 0)), (4, 20, vec![5, 8]));
    assert_eq!((sidecar.left_out[reason::PREFILL], sidecar.residency.len()), (5, 0));
}

#[test]
fn weights_that_are_not_known_are_counted_and_are_no_zero() {
    let rows = "0,1,0,0,0,1,0.5,0,9\n0,1,0,0,1,2,nan,0,9\n0,1,1,0,0,3,0,0,9\n0,1,1,0,1,4,0.25,0,9\n";
    let (trace, sidecar) = csv(&format!("{HEADING}{rows}")).unwrap();
    assert_eq!(sidecar.more["import"]["unknown_weights"], 1);
    assert_eq!(
        (ids(&trace, 0, 0), trace.record(0, 0).score(0), trace.record(0, 0).score(1)),
        (vec![1, 2], f16::MIN, f16::MIN)
    );
    // a weight of 0 is the lowest score, and what is heavier comes first
    assert_eq!((ids(&trace, 1, 0), trace.record(1, 0).score(1)), (vec![4, 3], f16::MIN));
    // no facts: the shape is the rows', and the bytes are the most that a row says
    assert_eq!((trace.n_experts(), sidecar.expert_bytes.as_slice()), (5, [9].as_slice()));
}

#[test]
fn rows_at_fault_are_named() {
    let good = cell(0, 1, 0, 0, [1, 2]) + &cell(0, 1, 0, 1, [1, 2]);
    csv(&format!("{HEADING}{good}")).unwrap();
    let facts = "# n_layer=2 n_expert=9 n_expert_used=2\n";
    let two = |rest: &str| format!("{HEADING}{good}{rest}");
    let one_layer = |rest: &str| format!("{facts}{HEADING}{}{rest}", cell(0, 1, 0, 0, [1, 2]));
    let faults = [
        (String::new(), "no rows"),
        ("# route_trace v2\n".to_owned(), "line 1: route_trace version v1 wanted, \"v2\" found"),
        ("# n_layer=0\n".to_owned(), "line 1, column 11: n_layer: a number from 1 to 65535 wanted, \"0\" found"),
        ("# n_expert=70000\n".to_owned(), "line 1, column 12: n_expert: a number from 1 to 65535"),
        ("turn,phase\n".to_owned(), "line 1: the heading"),
        (HEADING.to_owned(), "no rows"),
        (two("0,1,1,0,0,1,0.5,0\n"), "line 6, column 18: no expert_bytes: 8 fields of 9"),
        (two("0,1,1,0,0,1,0.5,0,1,2\n"), "line 6, column 21: a field after the 9"),
        (
            two("-1,1,1,0,0,1,0.5,0,1\n"),
            "line 6, column 1: turn: a whole number from 0 to 4294967295 wanted, \"-1\" found",
        ),
        (two("0,2,1,0,0,1,0.5,0,1\n"), "line 6, column 3: phase"),
        (two("0,1,1,65535,0,1,0.5,0,1\n"), "line 6, column 7: layer"),
        (two("0,1,1,0,0,65535,0.5,0,1\n"), "line 6, column 11: expert: a whole number from 0 to 65534 wanted"),
        (two("0,1,1,0,0,123456789012345678901,0.5,0,1\n"), "line 6, column 11: expert"),
        (two("0,1,1,0,0,1,-0.5,0,1\n"), "line 6, column 13: weight: a finite number, not below 0, or nan wanted"),
        (two("0,1,1,0,0,1,inf,0,1\n"), "line 6, column 13: weight"),
        (two("0,1,1,0,0,1,,0,1\n"), "line 6, column 13: weight"),
        (two("0,1,1,0,0,1,0.5,3,1\n"), "line 6, column 17: residency"),
        (two(&cell(0, 1, 2, 0, [1, 2])), "line 6: turn 0: step 2 after step 0: steps are missing"),
        (two(&cell(0, 1, 1, 0, [1, 2])), "line 7: turn 0, step 1: layer 1 missing, 1 of 2 there"),
        (two("0,1,1,0,0,1,0.5,0,1\n"), "line 6: turn 0, step 1, layer 0: 1 of 2 slots"),
        (two("0,1,1,0,1,1,0.5,0,1\n0,1,1,0,1,2,0.5,0,1\n"), "line 7: turn 0, step 1, layer 0: slot 1 twice"),
        (two("0,1,1,0,0,1,0.5,0,1\n0,1,1,0,1,1,0.5,0,1\n"), "line 7: turn 0, step 1, layer 0: expert 1 twice"),
        (one_layer("0,1,0,2,0,1,0.5,0,1\n"), "line 5, column 7: layer: a whole number from 0 to 1 wanted"),
        (one_layer("0,1,0,1,2,1,0.5,0,1\n"), "line 5, column 9: slot: a whole number from 0 to 1 wanted"),
        (one_layer("0,1,0,1,0,9,0.5,0,1\n"), "line 5, column 11: expert: a whole number from 0 to 8 wanted"),
        (
            format!("{HEADING}{}{}{}", cell(0, 0, 0, 0, [1, 2]), cell(0, 0, 1, 0, [1, 2]), cell(0, 0, 0, 1, [1, 2])),
            "line 7: turn 0, step 0, layer 1: the layer ends here, others of the pass at step 1",
        ),
        (
            format!("{HEADING}{}{}", cell(0, 0, 0, 0, [1, 2]), cell(0, 0, 2, 0, [1, 2])),
            "line 4: turn 0, step 2, layer 0: step 1 is missing",
        ),
    ];
    for (text, says) in faults {
        let error = csv(&text).err().unwrap_or_else(|| panic!("no error, but not {says}")).detail;
        assert!(error.contains(says), "{error:?} does not say {says:?}");
    }
    let long = format!("{HEADING}{}", "1".repeat(import::MAX_LINE + 1));
    assert!(csv(&long).unwrap_err().detail.contains("line 2: longer than 16777216 bytes"));
    let options = ImportOptions { n_experts: Some(0), ..ImportOptions::default() };
    assert_eq!(csv_with(b"", options).unwrap_err().kind, ErrorKind::Argument);
    let prefill = format!("{HEADING}{}", cell(0, 0, 0, 0, [1, 2]));
    let options = ImportOptions { prefill: false, ..ImportOptions::default() };
    assert!(csv_with(prefill.as_bytes(), options).unwrap_err().detail.contains("all are prefill"));
    assert!(csv_with(b"\xff\xfe\n", ImportOptions::default()).unwrap_err().detail.contains("line 1"));
}

#[test]
fn ids_alone() {
    let text = b"{\"tok\": 7, \"layers\": [[5, 2], [], [0,1]]}\n\n {\"x\":{\"y\":[1,\"\\\"]\"]},\"layers\":[[1,2],[],[4,3]],\"tok\":8}\r\n";
    let (trace, sidecar) = jsonl(text).unwrap();
    assert_eq!((trace.n_layers(), trace.n_experts(), trace.n_tokens()), (2, 6, 2));
    assert_eq!((ids(&trace, 0, 0), ids(&trace, 1, 1)), (vec![5, 2], vec![4, 3]));
    assert_eq!((trace.record(1, 1).score(0), trace.record(1, 1).score(1)), (f16::ZERO, f16::ZERO));
    assert_eq!((sidecar.score_space.as_str(), sidecar.shape.blocks.as_slice()), ("none", [0, 2].as_slice()));
    assert_eq!((sidecar.ranges.len(), sidecar.ranges[0].position), (1, 7));
}

#[test]
fn lines_at_fault_are_named() {
    let deep = format!("{{\"x\":{}", "[".repeat(100));
    let faults: [(&str, &str); 24] = [
        ("", "no lines"),
        ("[]", "line 1, column 1: \"{\" wanted"),
        ("{", "line 1, column 2: \"\"\" wanted, the end of the line found"),
        ("{}", "line 1, column 3: a key \"tok\" wanted"),
        ("{\"tok\":1}", "column 10: a key \"layers\" wanted"),
        ("{\"tok\":1,\"tok\":2}", "column 10: each key once wanted"),
        ("{\"tok\":-1,\"layers\":[[1]]}", "column 8: a whole number from 0 to 9223372036854775806 wanted"),
        ("{\"tok\":1.5,\"layers\":[[1]]}", "column 8: a whole number"),
        ("{\"tok\":1,\"layers\":[[65535]]}", "column 21: a whole number from 0 to 65534 wanted, \"65535]]}\" found"),
        ("{\"tok\":1,\"layers\":[[1,null]]}", "column 23: a whole number"),
        ("{\"tok\":1,\"layers\":[1]}", "column 20: \"[\" wanted"),
        ("{\"tok\":1,\"layers\":[[1 2]]}", "column 23: \",\" or \"]\" wanted"),
        ("{\"tok\":1,\"layers\":[[1]]", "column 24: \",\" or \"}\" wanted"),
        ("{\"tok\":1,\"layers\":[[1]]} x", "column 26: the end of the line wanted"),
        ("{\"tok\":1,\"layers\":[]}", "line 1: 0 layers of 0 ids"),
        ("{\"tok\":1,\"layers\":[[],[]]}", "line 1: 2 layers of 0 ids"),
        ("{\"tok\":1,\"layers\":[[1,2],[3]]}", "column 26: layer 1: 2 ids wanted, 1 found"),
        ("{\"tok\":1,\"layers\":[[1,2],[3,3]]}", "column 26: layer 1: expert 3 twice"),
        ("{\"tok\":1,\"layers\":[[1]]}\n{\"tok\":3,\"layers\":[[1]]}", "line 2: \"tok\" 3 after 1: tokens are missing"),
        (
            "{\"tok\":1,\"layers\":[[1]]}\n{\"tok\":2,\"layers\":[[1],[2]]}",
            "line 2: 1 layers wanted, as in line 1, 2 found",
        ),
        (
            "{\"tok\":1,\"layers\":[[1],[]]}\n{\"tok\":2,\"layers\":[[1],[2]]}",
            "line 2, column 24: layer 1: 0 ids wanted, 1",
        ),
        ("{\"x\":tru?}", "column 9: \",\" or \"}\" wanted"),
        ("{\"x\": \"abc}", "column 12: a string that ends wanted"),
        (&deep, "column 70: fewer brackets within brackets wanted"),
    ];
    for (text, says) in faults {
        let error = jsonl(text.as_bytes()).err().unwrap_or_else(|| panic!("no error, but not {says}")).detail;
        assert!(error.contains(says), "{error:?} does not say {says:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// A sound file with some bytes changed, or any text: an error, or a sound trace.
    #[test]
    fn any_bytes(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6), cut in any::<prop::sample::Index>()) {
        let mut text = format!("# n_layer=2 n_expert=9 n_expert_used=2\n{HEADING}");
        for step in 0..3 {
            text += &(cell(0, 1, step, 0, [step, 8]) + &cell(0, 1, step, 1, [step, 8]));
        }
        let lines = "{\"tok\": 7, \"layers\": [[5, 2], [], [0,1]]}\n{\"tok\":8,\"x\":[],\"layers\":[[1,2],[],[4,3]]}\n";
        for (text, csv) in [(text, true), (lines.to_owned(), false)] {
            let mut bytes = text.into_bytes();
            for (at, byte) in &changes {
                let at = at.index(bytes.len());
                // half of them digits and the like, which get further
                bytes[at] = if byte & 1 == 0 { b"0123456789,.\n[]{}\":-"[usize::from(*byte) % 20] } else { *byte };
            }
            if !changes.is_empty() {
                bytes.truncate(cut.index(bytes.len()) + 1);
            }
            let done = if csv { csv_with(&bytes, ImportOptions::default()) } else { jsonl(&bytes) };
            prop_assert!(done.is_ok() || !changes.is_empty());
        }
    }
}

fn real(folder: &std::path::Path, name: &str, options: ImportOptions) -> (Trace, Sidecar) {
    let mut out = Cursor::new(Vec::new());
    let mut input = BufReader::new(File::open(folder.join(name)).unwrap());
    let done = match name.ends_with(".csv") {
        true => import::route_csv(&mut input, &mut out, options),
        false => import::jsonl(&mut input, &mut out, options),
    };
    let sidecar = done.unwrap();
    (checked(out.into_inner(), &sidecar), sidecar)
}

#[test]
fn the_real_traces() {
    let Some(folder) = shared("traces") else { return };
    // layers, experts, k, tokens of decode, of prefill, left out of prefill
    let wanted = [
        ("qwen.route.csv", 48, 128, 6, 128, 1, 27),
        ("gemma.route.csv", 30, 128, 6, 128, 29, 0),
        ("gptoss.route.csv", 36, 128, 2, 64, 1, 84),
        ("kimi.jsonl", 26, 256, 8, 300, 0, 0),
        ("olmoe.jsonl", 16, 64, 8, 299, 0, 0),
    ];
    for (name, layers, experts, k, decode, prefill, left_out) in wanted {
        let (trace, sidecar) = real(&folder, name, ImportOptions::default());
        assert_eq!((trace.n_layers(), trace.n_experts(), trace.top_m()), (layers, experts, k), "{name}");
        let of = |phase| sidecar.ranges.iter().filter(|r| r.phase == phase).map(|r| r.n_tokens).sum::<u64>();
        assert_eq!((of(Phase::Decode), of(Phase::Prefill)), (decode, prefill), "{name}");
        assert_eq!(sidecar.left_out.values().sum::<u64>(), left_out, "{name}");
        if name.ends_with(".csv") {
            assert_eq!((sidecar.residency.len(), sidecar.expert_bytes.len()), (trace.n_tokens(), layers), "{name}");
        }
        let two_sizes = sidecar.expert_bytes.iter().any(|&bytes| bytes != sidecar.expert_bytes[0]);
        assert_eq!(two_sizes, name.starts_with("gemma") || name.starts_with("qwen"), "{name}");
    }
}

/// The reference's misses over the imported decode tokens, least recently used.
#[test]
fn the_real_traces_miss_as_often_as_in_the_reference() {
    let (Some(folder), Some(golden)) = (shared("traces"), shared("reference/golden_replay.json")) else { return };
    let golden: serde_json::Value = serde_json::from_slice(&fs::read(golden).unwrap()).unwrap();
    let options = ImportOptions { prefill: false, ..ImportOptions::default() };
    for name in ["qwen.route.csv", "gemma.route.csv", "gptoss.route.csv", "kimi.jsonl", "olmoe.jsonl"] {
        let (trace, _) = real(&folder, name, options);
        let golden = &golden[name.split('.').next().unwrap()];
        assert_eq!(golden["n_tokens"], trace.n_tokens(), "{name}");
        for capacity in ["8", "16", "32", "64"] {
            let wanted = golden["misses"][capacity]["lru"].as_u64().unwrap();
            let misses: u64 = (0..trace.n_layers()).map(|layer| misses(&trace, layer, capacity.parse().unwrap())).sum();
            assert_eq!(misses, wanted, "{name}, {capacity} slots");
        }
    }
}

fn misses(trace: &Trace, layer: usize, capacity: u32) -> u64 {
    if capacity as usize >= trace.n_experts() {
        return 0;
    }
    let mut cache = LayerCache::lru(trace.n_experts(), capacity);
    let mut misses = 0;
    for token in 0..trace.n_tokens() {
        let ids = ids(trace, token, layer);
        assert!(cache.begin_batch(ids.iter().copied()));
        for id in ids {
            let miss = matches!(cache.place(id).unwrap(), Placed::Miss { .. });
            misses += u64::from(miss && token >= 16);
        }
        cache.end_token();
        cache.end_batch();
    }
    misses
}
