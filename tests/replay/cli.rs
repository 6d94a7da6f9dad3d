//! `hotset replay` and `hotset sweep` as programs: the reference's own output, usage errors, interrupted sweeps.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use crate::golden::{data, shared};

pub fn hotset(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_hotset")).args(args).output().unwrap()
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn prints_what_the_reference_prints() {
    let Some(script) = shared("reference/replay_moe_cache.py") else { return };
    if Command::new("python3").arg("--version").output().is_err() {
        eprintln!("skipped: no python3");
        return;
    }
    let trace = data("small.q4rt");
    let keep = data("small.keep_map.json");
    let keep = ["--keep-map", keep.to_str().unwrap()];
    let ways: [&[&str]; 5] = [
        &["--k-used", "8", "--cache-cap", "24"],
        &["--k-used", "8", "--cache-cap", "12", "--lambda-moce", "0.12", "--protect-top-j", "2"],
        &["--k-used", "8", "--cache-cap", "24", "--near-pick-n", "16", "--ema-decay", "0.9", keep[0], keep[1]],
        &["--k-used", "6", "--cache-cap", "20", "--policies", "lru, ema"],
        &["--cache-cap", "96", keep[0], keep[1]],
    ];
    for way in ways {
        let reference = Command::new("python3").arg(&script).arg("--trace").arg(&trace).args(way).output().unwrap();
        let mut args = vec!["replay", trace.to_str().unwrap(), "--json"];
        args.extend(way);
        let mut found = json(&hotset(&args));
        // Beside the misses, which the reference does not say.
        for policy in found["policies"].as_object_mut().unwrap().values_mut() {
            let policy = policy.as_object_mut().unwrap();
            policy.remove("swapped_per_token");
            policy.remove("substituted_slots_per_token");
        }
        assert_eq!(found, json(&reference), "{way:?}");
    }
}

#[test]
fn what_cannot_be_is_a_usage_error() {
    let trace = data("small.q4rt");
    let trace = trace.to_str().unwrap();
    for (args, words) in [
        (vec!["--k-used", "8", "--cache-cap", "7"], "capacity 7"),
        (vec!["--k-used", "8", "--cache-cap", "24", "--policies", "lur"], "inverse_router_ema"),
        (vec!["--k-used", "8", "--warmup", "480"], "480"),
        (vec!["--k-used", "8", "--policies", "belady_min", "--lambda-moce", "0.1"], "no such future"),
        (vec!["--k-used", "8", "--lambda-moce", "0.1", "--delta", "token_full"], "<trace>.range"),
    ] {
        let output = hotset(&[&["replay", trace][..], &args].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains(words), "{said}");
    }
    let nothing = hotset(&["replay", "/nowhere/trace.q4rt"]);
    assert_eq!(nothing.status.code(), Some(1));
    assert!(hotset(&["replay", trace, "--k-used", "8", "--as-recorded"]).status.code() == Some(1));
    assert!(Path::new(trace).exists());
}
