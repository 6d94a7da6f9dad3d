//! `hotset replay` and `hotset sweep` as programs: the reference's own output, usage errors, interrupted sweeps.

use std::path::Path;
use std::process::{Command, Output};

use hotset::hook::{Adjacent, Batch, Config, Hook};
use hotset::model::tiny::{self, TinyParams};
use hotset::route::{Moce, ScoreSpace};
use hotset::trace::Phase;
use serde_json::Value;

use crate::golden::data;
use crate::program;
use crate::shared::shared;

pub fn hotset(args: &[&str]) -> Output {
    program::hotset().args(args).output().unwrap()
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
    let ending = hotset(&["sweep", trace, "-o", "/nowhere/sweep.xlsx"]);
    assert_eq!(ending.status.code(), Some(2));
    #[cfg(not(feature = "parquet"))]
    {
        let parquet = hotset(&["sweep", trace, "--k-used", "8", "-o", "/nowhere/sweep.parquet"]);
        assert_eq!(parquet.status.code(), Some(2));
        let said = String::from_utf8(parquet.stderr).unwrap();
        assert!(said.contains("--features parquet"), "{said}");
    }
    let nothing = hotset(&["replay", "/nowhere/trace.q4rt"]);
    assert_eq!(nothing.status.code(), Some(1));
    assert!(hotset(&["replay", trace, "--k-used", "8", "--as-recorded"]).status.code() == Some(1));
    assert!(Path::new(trace).exists());
}

/// A table that was cut off anywhere is gone on with, shards merge to the whole, and threads change nothing.
#[test]
fn sweeps_resume_and_merge() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (trace, keep) = (data("small.q4rt"), data("small.keep_map.json"));
    let (trace, keep) = (trace.to_str().unwrap(), keep.to_str().unwrap());
    let sweep = |out: &str, more: &[&str], threads: &str| {
        let mut command = program::hotset();
        command.args(["sweep", trace, "--k-used", "8", "--cache-caps", "12,24", "--near-pick-n", "16"]);
        command.args(["--keep-map", keep, "--brief-keep-map", keep, "-o", out]).args(more);
        command.env("RAYON_NUM_THREADS", threads).output().unwrap()
    };
    for ending in ["csv", "jsonl"] {
        let whole = path(&format!("whole.{ending}"));
        let done = sweep(&whole, &[], "2");
        assert!(done.status.success(), "{done:?}");
        let said = String::from_utf8(done.stdout).unwrap();
        assert!(said.contains("112 rows") && said.contains("checked: belady_min"), "{said}");
        let text = std::fs::read_to_string(&whole).unwrap();

        let again = path(&format!("again.{ending}"));
        for cut in [0, 10, text.len() / 3, text.len() / 2, text.len() - 1, text.len()] {
            std::fs::write(&again, &text[..cut]).unwrap();
            assert!(sweep(&again, &[], "1").status.success());
            assert_eq!(std::fs::read_to_string(&again).unwrap(), text, "cut at {cut}");
        }
        let other = sweep(&again, &["--warmup", "32"], "1");
        assert!(!other.status.success());
        assert!(String::from_utf8(other.stderr).unwrap().contains("another sweep"));

        let parts: Vec<String> = (1..=3).map(|i| path(&format!("part{i}.{ending}"))).collect();
        for (i, part) in parts.iter().enumerate() {
            assert!(sweep(part, &["--shard", &format!("{}/3", i + 1)], "1").status.success());
        }
        let merged = path(&format!("merged.{ending}"));
        let merge = |parts: &[&String]| {
            let mut args = vec!["sweep", "--merge", "-o", merged.as_str()];
            args.extend(parts.iter().map(|p| p.as_str()));
            hotset(&args)
        };
        assert!(merge(&[&parts[2], &parts[0], &parts[1]]).status.success());
        assert_eq!(std::fs::read_to_string(&merged).unwrap(), text);
        assert!(!merge(&[&parts[0], &parts[2]]).status.success());
    }
    // The golden numbers, by another way.
    let text = std::fs::read_to_string(path("whole.csv")).unwrap();
    let row = text.lines().find(|l| l.contains(",K96,") && l.contains(",12,lru,0.05,2,")).unwrap();
    assert!(row.contains(&format!(",{},", 505 + 506 + 601 + 561)), "{row}");
}

/// A live run on a random model's bytes, recorded, then replayed by the program: the misses that it counted.
#[test]
fn the_misses_of_a_live_run() {
    const EXPERTS: usize = 24;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (model, trace) = (dir.path().join("m.gguf"), dir.path().join("t.q4rt"));
    let shape = TinyParams { layers: 3, experts: EXPERTS as u32, k: 4, ..TinyParams::default() };
    tiny::write(&shape, &model, &mut |_| ()).unwrap();
    let moce = Moce { lambda: 0.2, top_j: 2, ..Moce::default() };
    let config = Config { slots: 9, moce, trace: Some(trace.clone()), queue_tokens: 8192, ..Config::default() };
    let mut hook = Hook::open(&model, config).unwrap();
    let mut rng = fastrand::Rng::with_seed(5);
    for position in 0..300 {
        for block in 0..3 {
            let mut scores: Vec<f32> = (0..EXPERTS).map(|e| 4.0 * rng.f32() - e as f32 / 8.0).collect();
            let batch = Batch {
                block,
                n_tokens: 1,
                n_experts: EXPERTS as u32,
                k: 4,
                phase: Phase::Decode,
                space: ScoreSpace::Logits,
                routed: false,
                normalised: true,
                tail: false,
                position,
            };
            let (mut ids, mut weights) = ([0i32; 4], [0f32; 4]);
            let scores = Adjacent { data: &mut scores, width: EXPERTS };
            let mut ids = Adjacent { data: &mut ids, width: 4 };
            hook.layer(&batch, &scores, &mut ids, &mut Adjacent { data: &mut weights, width: 4 }).unwrap();
        }
    }
    let live = hook.stats().misses;
    hook.close().unwrap();
    let trace = trace.to_str().unwrap();
    let replayed = json(&hotset(&["replay", trace, "--as-recorded", "--json"]));
    assert_eq!((&replayed["misses"], &replayed["tokens"]), (&live.into(), &300.into()));
    assert_eq!(replayed["inexact"], serde_json::json!([]));
    // From a cold start the same settings by hand are the same run; k comes from the sidecar.
    let by_hand = ["--policies", "lru", "--cache-cap", "9", "--lambda-moce", "0.2", "--protect-top-j", "2"];
    let by_hand = json(&hotset(&[&["replay", trace, "--json", "--per-layer", "--warmup", "0"][..], &by_hand].concat()));
    assert_eq!(by_hand["policies"]["lru"]["misses_per_layer"], replayed["misses_per_layer"]);
}
