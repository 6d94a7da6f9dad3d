//! `hotset analyze` and `hotset global-replay` from outside.
#![cfg(feature = "cli")]

#[path = "common/program.rs"]
mod program;

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

fn hotset(args: &[&str]) -> Command {
    let mut command = program::hotset();
    command.args(args);
    command
}

fn ok(args: &[&str]) -> String {
    program::ok(&mut hotset(args))
}

fn ok_json(args: &[&str]) -> Value {
    serde_json::from_str(&ok(&[args, &["--json"]].concat())).unwrap()
}

fn fails(args: &[&str], code: i32, says: &str) {
    program::fails(&mut hotset(args), code, says);
}

fn small() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/small.q4rt").to_str().unwrap().to_owned()
}

#[test]
fn analyze_agrees_with_replay() {
    let small = small();
    let found = ok_json(&["analyze", &small, "--k-used", "10"]);
    assert_eq!((&found["n_layers"], &found["n_experts"], &found["k"]), (&json!(4), &json!(96), &json!(10)));
    assert_eq!((&found["tokens_prefill"], &found["tokens_decode"]), (&json!(0), &json!(480)));
    for slots in [10, 24, 48, 95] {
        let args = [
            "replay",
            &small,
            "--k-used",
            "10",
            "--policies",
            "lru",
            "--warmup",
            "0",
            "--cache-cap",
            &slots.to_string(),
        ];
        let replayed = ok_json(&args);
        assert_eq!(found["hit_curve"][slots], replayed["policies"]["lru"]["mean_hit_rate"], "{slots} slots");
    }
    assert_eq!(found["predictors"]["prompt's hottest"], Value::Null);
    assert_eq!(found["predictors"]["previous token"], found["overlap_at_lag"][0]);
    assert_eq!(found["overlap_within"].as_array().unwrap().len(), 8);
    assert_eq!(found["windows"][0], json!({ "tokens": 1, "experts": 10.0 }));
    assert_eq!(found["layers"].as_array().unwrap().len(), 4);
    assert_eq!(found["layers"][0]["delta_share"], Value::Null);
    let text = ok(&["analyze", &small, "--k-used", "10", "--per-layer"]);
    for says in ["previous token", "tokens before", "slots a layer", "weight bits", "\n3  "] {
        assert!(text.contains(says), "{text}");
    }
}

#[test]
fn what_lies_beside_a_trace_is_used() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.q4rt");
    fs::copy(small(), &path).unwrap();
    let path = path.to_str().unwrap();
    // every range so large that the shares are small; one row without
    let mut ranges: Vec<u8> = (0..480 * 4).flat_map(|_| 1000f32.to_le_bytes()).collect();
    ranges[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(format!("{path}.range"), &ranges).unwrap();
    let found = ok_json(&["analyze", path, "--k-used", "10"]);
    let share = found["layers"][0]["delta_share"].as_f64().unwrap();
    assert!(share > 0.0 && share < 0.1, "{share}");
    assert_eq!(
        (&found["layers"][0]["delta"]["rows"], &found["layers"][0]["delta"]["unknown"]),
        (&json!(479), &json!(1))
    );
    assert!(ok(&["analyze", path, "--k-used", "10"]).contains("delta share"));
    fs::write(format!("{path}.range"), &ranges[..100]).unwrap();
    fails(&["analyze", path, "--k-used", "10"], 1, "ranges: 24 numbers");
}

#[test]
fn a_csv_with_weights_that_are_not_known() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.csv");
    let heading = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes";
    let mut text = format!("# n_expert=4 n_expert_used=2\n# layer=0 expert_bytes=1048576\n{heading}\n");
    for step in 0..4 {
        text += &format!("0,1,{step},0,0,{step},nan,0,1048576\n0,1,{step},0,1,{},0.5,1,0\n", (step + 1) % 4);
    }
    fs::write(&path, &text).unwrap();
    let path = path.to_str().unwrap();
    let found = ok_json(&["analyze", path]);
    assert_eq!((&found["unknown_weights"], &found["layers"][0]["weight_bits"]), (&json!(4), &Value::Null));
    assert_eq!(found["layers"][0]["rows_with_unknown_weights"], 4);
    assert!(ok(&["analyze", path]).contains("weights that are not known: 4"));

    let found = ok_json(&["global-replay", path, "--budget-mib", "3,1", "--policies", "lru,belady"]);
    assert_eq!(found["rows"].as_array().unwrap().len(), 8);
    assert_eq!(found["recorded"]["decode"], json!({ "lookups": 8, "hits": 4, "hit_rate": 0.5, "bytes_read": 4 << 20 }));
    // each token has one of the token before, and the last has the first's, too
    assert_eq!(found["rows"][0]["result"]["decode"]["hits"], 3);
    assert_eq!(found["rows"][2]["result"]["decode"]["hits"], 4);
    // room for one expert in the layer: no row of numbers
    let table = ok(&["global-replay", path, "--budget-mib", "1"]);
    assert!(table.contains("the run itself hit 50.0 %"), "{table}");
    assert!(table.contains("per layer     lru    1             -"), "{table}");

    fails(&["analyze", path, "--k-used", "3"], 2, "k 3, the rows have 2 slots");
    fails(&["global-replay", path, "--policies", "mru"], 2, "it must be one of lru, lfu, belady, random");
    fails(&["global-replay", path, "--expert-bytes", "18446744073709551615"], 1, "too many bytes");
    fs::write(path, text.replacen("nan", "x", 1)).unwrap();
    fails(&["analyze", path], 1, "a.csv: line 4, column 13: weight");
    fails(&["analyze", &small()], 2, "no sidecar says how many experts a token uses");
    fails(&["global-replay", &small(), "--k-used", "10"], 2, "bytes of an expert are known of 0 layers of 4");
    assert!(ok(&["global-replay", &small(), "--k-used", "10", "--expert-bytes", "100000"]).contains("shared"));
    fails(&["analyze", "no-such-file.q4rt"], 1, "no-such-file.q4rt");
}
