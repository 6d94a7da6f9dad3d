//! Waiting as late as possible: whatever is waited for when, the logits are those of the resident run, and a layer without misses is not
//! interrupted.

mod common;

use common::{json, model, number};
use hotset::model::{Model, pack_write};
use serde_json::Value;

fn decode(flags: &str) -> Value {
    let prompt = "In the beginning God created the heaven and";
    json(&model(), &["decode", "-p", prompt, "-n", "60", "--step"], flags)
}

#[test]
fn every_wait_gives_the_resident_runs_logits() {
    let resident = decode("--no-hook");
    for wait in ["latest", "projection", "layer"] {
        for slots in ["6", "12", "64"] {
            for way in ["--lanes 1", "--lanes 4 --io buffered", "--lanes 8"] {
                let flags = format!("--wait {wait} --slots {slots} --poison {way}");
                let run = decode(&flags);
                assert_eq!(run["logits_fnv"], resident["logits_fnv"], "{flags}");
                assert_eq!(run["settings"]["wait"], wait);
                assert_eq!(number(&run, "dropped") + number(&run, "swapped"), 0, "{flags}");
            }
        }
    }
}

#[test]
fn only_layers_with_misses_are_interrupted() {
    for slots in ["12", "64"] {
        let whole = decode(&format!("--slots {slots} --wait layer"));
        let late = decode(&format!("--slots {slots} --wait projection"));
        assert_eq!(late["misses_per_layer"], whole["misses_per_layer"]);
        let more = number(&late, "stops") - number(&whole, "stops");
        // Two more stops at most, in no more layers than there were misses.
        let (misses, layers) = (number(&late, "misses"), 6 * number(&late, "passes"));
        assert!(more > 0 && more <= 2 * misses.min(layers), "{slots} slots: {more} more stops, {misses} misses");
        if slots == "64" {
            assert!(more < layers, "all is resident in the end: {more} more stops in {layers} layers");
        }
    }
}

#[test]
fn reading_ahead_changes_no_logits_and_no_decision() {
    for slots in ["6", "12", "24"] {
        let plain = decode(&format!("--slots {slots}"));
        for ahead in ["1", "6"] {
            let run = decode(&format!("--slots {slots} --read-ahead {ahead} --poison"));
            for key in ["logits_fnv", "hits_per_layer", "misses_per_layer"] {
                assert_eq!(run[key], plain[key], "{slots} slots, {ahead} aside: {key}");
            }
            // The next layer's router sees nearly what it will see: far more guesses come true than of any six of 64 experts.
            let (issued, adopted) = (number(&run, "ahead_issued"), number(&run, "ahead_adopted"));
            assert!(issued > 100 && 4 * adopted > issued, "{slots} slots: {adopted} of {issued}");
        }
    }
}

/// Everything on the way of a miss, alone and together.
#[test]
fn every_way_of_a_miss_gives_the_same_logits() {
    let dir = tempfile::tempdir().unwrap();
    let pack = dir.path().join("model.hotset");
    pack_write::pack(&Model::open(&model()).unwrap(), &pack, &mut |_| ()).unwrap();
    let plain = decode("--slots 12");
    let pack = format!("--pack {}", pack.display());
    let ways = [
        &pack,
        "--read-ahead 5",
        "--chunk-bytes 64K",
        "--chunk-bytes 0",
        "--lanes 1",
        "--io buffered",
        "--wait layer",
        "--read-by threads",
    ];
    for chosen in 1u32..1 << ways.len() {
        // Alone, all but one, and all; two that say opposite things do not go together.
        let n = chosen.count_ones() as usize;
        if n != 1 && n < ways.len() - 2 || chosen & 0b1100 == 0b1100 {
            continue;
        }
        let flags: Vec<&str> = (0..ways.len()).filter(|i| chosen >> i & 1 == 1).map(|i| ways[i]).collect();
        let run = decode(&format!("--slots 12 --poison {}", flags.join(" ")));
        for key in ["logits_fnv", "misses_per_layer"] {
            assert_eq!(run[key], plain[key], "{key}: {flags:?}");
        }
    }
}

/// With the patched engine the stops are those of the cache alone, once each layer has seen that the engine asks.
#[cfg(feature = "fork")]
#[test]
fn waits_inside_of_the_matmul_need_no_stops() {
    let whole = decode("--slots 12 --wait layer");
    let inside = decode("--slots 12");
    assert_eq!(inside["misses_per_layer"], whole["misses_per_layer"]);
    let more = number(&inside, "stops") - number(&whole, "stops");
    assert!(more <= 2 * 6, "{more} more stops");
}

#[test]
fn routing_is_the_traces_with_and_without_hotset() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("run.q4rt");
    let recorded = decode(&format!("--slots 12 --trace {}", trace.display()));
    // Its own routing forced upon it changes nothing; another text's, shifted by a token, does.
    let route = format!("--route {}", trace.display());
    for way in ["--no-hook", "--slots 12", "--slots 12 --lambda 0 --read-ahead 4"] {
        assert_eq!(decode(&format!("{way} {route}"))["logits_fnv"], recorded["logits_fnv"], "{way}");
    }
    let mut bytes = std::fs::read(&trace).unwrap();
    // header 16 bytes; a record: 64 ids, 64 scores, 6 layers a token
    let token = 6 * 64 * 4;
    let shifted = [&bytes[..16], &bytes[16 + token..]].concat();
    std::fs::write(&trace, shifted).unwrap();
    let (resident, slots) = (decode(&format!("--no-hook {route}")), decode(&format!("--slots 12 {route}")));
    assert_eq!(resident["logits_fnv"], slots["logits_fnv"]);
    assert_ne!(resident["logits_fnv"], recorded["logits_fnv"]);
    // Ids that no router gives end the decode, before a kernel sees them.
    for (what, id) in [("of 64", 64u16), ("a second time", u16::from_le_bytes([bytes[18], bytes[19]]))] {
        bytes[16..18].copy_from_slice(&id.to_le_bytes());
        std::fs::write(&trace, &bytes).unwrap();
        let path = trace.to_str().unwrap();
        let out = common::output(&model(), &["decode", "-p", "x", "-n", "4", "--step", "--no-hook", "--route", path]);
        let log = String::from_utf8_lossy(&out.stderr);
        assert!(
            out.status.code() == Some(1) && log.contains("--route: token 0, layer 0") && log.contains(what),
            "{log}"
        );
    }
}
