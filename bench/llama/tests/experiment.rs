//! Experiments on a real engine: a schedule switches settings within a decode and changes no output that it must not; a scheduled recording
//! equals its replay; and `quality` says what settings cost, nothing where they are off.

mod common;
#[path = "../../../tests/common/replay.rs"]
mod replay;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::{json, model, number, output};
use hotset::trace::{Sidecar, Trace};
use serde_json::{Value, json};

const PROMPT: &str = "In the beginning God created the heaven and";

fn plan(dir: &Path, carry: &str, cells: Value, blocks: &[(&str, u32, u32)]) -> PathBuf {
    let blocks: Vec<_> =
        blocks.iter().map(|(cell, from, n)| json!({ "cell": cell, "from": from, "tokens": n })).collect();
    let plan = json!({ "hotset_schedule": 1, "carry": carry, "washout": 2, "cells": cells, "blocks": blocks });
    let path = dir.join("plan.json");
    std::fs::write(&path, plan.to_string()).unwrap();
    path
}

fn decode(n: u32, flags: &str) -> Value {
    json(&model(), &["decode", "-p", PROMPT, "-n", &n.to_string()], flags)
}

#[test]
fn a_schedule_without_policies_changes_no_logit() {
    let dir = tempfile::tempdir().unwrap();
    let cells = json!([
        { "name": "24", "slots": 24, "lanes": 4 },
        { "name": "8", "slots": 8, "lanes": 1 },
        { "name": "mapped", "backing": "page-cache" },
    ]);
    let blocks =
        [("24", 0, 30), ("8", 30, 20), ("mapped", 50, 20), ("24", 75, 25), ("mapped", 100, 10), ("8", 110, 30)];
    for way in ["", "--step"] {
        let resident = decode(150, &format!("--no-hook {way}"));
        for carry in ["washout", "flush", "restore"] {
            let path = plan(dir.path(), carry, cells.clone(), &blocks);
            let metrics = dir.path().join("m.jsonl");
            let flags = format!("--slots 24 --schedule {} --metrics {} {way}", path.display(), metrics.display());
            let run = decode(150, &flags);
            for key in ["logits_fnv", "text"] {
                assert_eq!(run[key], resident[key], "{key}: {carry} {way}");
            }
            let rows: Vec<Value> = std::fs::read_to_string(&metrics)
                .unwrap()
                .lines()
                .map(|l| serde_json::from_str(l).unwrap())
                .filter(|r: &Value| r["phase"] == "decode")
                .collect();
            for (i, row) in rows.iter().enumerate().take(140) {
                let block = blocks.iter().position(|b| (b.1..b.1 + b.2).contains(&(i as u32)));
                assert_eq!(row["block"].as_u64(), block.map(|b| b as u64), "token {i}");
                let Some(block) = block.map(|b| blocks[b]) else { continue };
                assert_eq!(
                    (row["cell"].as_str(), row["read_bytes"] == 0),
                    (Some(block.0), row["misses"] == 0 || block.0 == "mapped")
                );
                assert_eq!(row["washout"] == 1, (i as u32) < block.1 + 2);
            }
        }
    }
}

#[test]
fn a_schedule_of_one_cell_is_the_plain_run() {
    let dir = tempfile::tempdir().unwrap();
    let (trace, metrics) = (dir.path().join("t.q4rt"), dir.path().join("m.jsonl"));
    let run = |flags: &str| {
        let files = format!("--trace {} --metrics {}", trace.display(), metrics.display());
        let run = decode(80, &format!("--slots 12 {files} {flags}"));
        let mut sidecar = trace.clone().into_os_string();
        sidecar.push(".json");
        (
            run["logits_fnv"].clone(),
            run["misses_per_layer"].clone(),
            std::fs::read(&trace).unwrap(),
            std::fs::read(sidecar).unwrap(),
        )
    };
    let plain = run("--lambda 0.12 --drop 0.75");
    let cells = json!([{ "name": "both", "lambda": 0.12, "drop": 0.75 }]);
    let path = plan(dir.path(), "washout", cells, &[("both", 0, 40), ("both", 40, 1000)]);
    let scheduled = run(&format!("--schedule {}", path.display()));
    assert!(plain == scheduled, "{:?} {:?}", plain.0, scheduled.0);
    assert!(plain.0 != decode(80, "--slots 12")["logits_fnv"]);
}

/// A block's first token, too, has the block's settings: the adapter asks for them before the pass.
#[test]
fn a_scheduled_recording_equals_its_replay_and_switches_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let (trace, metrics) = (dir.path().join("t.q4rt"), dir.path().join("m.jsonl"));
    let cells = json!([
        { "name": "off" },
        { "name": "l", "lambda": 0.4, "top_j": 1 },
        { "name": "few", "slots": 8, "lambda": 0.2 },
        { "name": "d", "drop": 1.2 },
    ]);
    let blocks = [("off", 0, 30), ("l", 30, 30), ("few", 60, 20), ("off", 80, 10), ("l", 90, 20), ("few", 110, 20)];
    for carry in ["washout", "flush", "restore"] {
        let path = plan(dir.path(), carry, cells.clone(), &blocks);
        let flags = format!("--step --slots 14 --schedule {} --trace {}", path.display(), trace.display());
        let run = decode(110, &flags);
        let (t, s) = (Trace::open(&trace).unwrap(), Sidecar::read_beside(&trace).unwrap().unwrap());
        let live: Vec<u64> = run["misses_per_layer"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
        assert_eq!(replay::misses_per_layer(&t, &s), live, "{carry}");
        assert!(number(&run, "swapped") > 0 && s.settings.len() >= 6);
    }
    // not recorded, so that only the settings make the adapter ask for scores and weights
    let blocks = [("off", 0, 40), ("l", 40, 3), ("off", 43, 7), ("d", 50, 3), ("off", 53, 47)];
    let path = plan(dir.path(), "washout", cells, &blocks);
    decode(100, &format!("--step --slots 8 --schedule {} --metrics {}", path.display(), metrics.display()));
    let rows: Vec<Value> =
        std::fs::read_to_string(&metrics).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    for (i, row) in rows.iter().enumerate() {
        let (swapped, dropped) = (row["swapped"] != 0, row["dropped"] != 0);
        assert!((!swapped || (40..43).contains(&i)) && (!dropped || (50..53).contains(&i)), "token {i}: {row}");
        assert!((swapped || i != 40) && (dropped || i != 50), "token {i}: {row}");
    }
}

#[test]
fn bad_plans_are_refused_with_line_and_reason() {
    let dir = tempfile::tempdir().unwrap();
    let path = plan(dir.path(), "washout", json!([{ "name": "a", "slots": 20 }]), &[("a", 0, 40)]);
    let out = output(&model(), &["decode", "-p", "x", "--slots", "10", "--schedule", path.to_str().unwrap()]);
    let message = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(1));
    assert!(message.contains("plan.json: line 1: cell \"a\": 20 slots are"), "{message}");
}

fn quality(flags: &str) -> Value {
    let file = model().with_file_name("heldout.txt");
    json(&model(), &["quality", "-f", file.to_str().unwrap(), "--bytes", "700"], flags)
}

fn cell<'a>(run: &'a Value, name: &str) -> &'a Value {
    run["cells"].as_array().unwrap().iter().find(|c| c["name"] == name).unwrap_or_else(|| panic!("{name}: {run}"))
}

#[test]
fn settings_that_are_off_cost_nothing_and_others_are_seen() {
    let run = quality("--slots 8 --drops 0,1 --lambdas 0,0.4");
    let file = model().with_file_name("heldout.txt");
    let resident = json(&model(), &["perplexity", "-f", file.to_str().unwrap(), "--bytes", "700"], "--no-hook");
    assert_eq!((&run["quality"], &run["tokens"]), (&json!(1), &resident["tokens"]));
    assert_eq!(run["reference"]["perplexity"], resident["perplexity"]);
    let off = cell(&run, "F0 L0");
    assert_eq!(off["perplexity"], resident["perplexity"]);
    for (key, wanted) in [
        ("ratio", 1.0),
        ("ratio_low", 1.0),
        ("ratio_high", 1.0),
        ("kl_mean", 0.0),
        ("kl_p99", 0.0),
        ("top1_agreement", 1.0),
        ("mass_lost", 0.0),
        ("swap_rate", 0.0),
        ("drop_rate", 0.0),
        ("drop", 0.0),
        ("lambda", 0.0),
    ] {
        assert_eq!(off[key].as_f64(), Some(wanted), "{key}");
    }
    let number = |name: &str, key: &str| cell(&run, name)[key].as_f64().unwrap();
    for (name, drops, swaps) in [("F1 L0", true, false), ("F0 L0.4", false, true), ("F1 L0.4", true, true)] {
        assert!(number(name, "kl_mean") > 1e-4 && number(name, "kl_p99") > number(name, "kl_mean"), "{name}");
        assert_eq!((number(name, "drop_rate") > 0.0, number(name, "swap_rate") > 0.0), (drops, swaps), "{name}");
        assert!(
            number(name, "top1_agreement") < 1.0 && number(name, "mass_lost") > 0.0 && number(name, "mass_lost") < 1.0
        );
        let (low, ratio, high) = (number(name, "ratio_low"), number(name, "ratio"), number(name, "ratio_high"));
        assert!(low < ratio && ratio < high, "{name}: {low} {ratio} {high}");
        let by_hand = number(name, "perplexity") / run["reference"]["perplexity"].as_f64().unwrap();
        assert!((ratio / by_hand - 1.0).abs() < 1e-9, "{name}");
    }
    // each cell is as the same setting by itself, and as a run of the other subcommand
    let alone = quality("--slots 8 --drops 1 --lambdas 0.4 --keep 0");
    assert_eq!(cell(&alone, "F1 L0.4"), cell(&run, "F1 L0.4"), "and from a temporary file");
    let plain = json(
        &model(),
        &["perplexity", "-f", file.to_str().unwrap(), "--bytes", "700"],
        "--slots 8 --drop 1 --lambda 0.4",
    );
    assert_eq!(cell(&alone, "F1 L0.4")["perplexity"], plain["perplexity"]);
}

#[test]
fn the_cells_of_a_plan_keep_their_names() {
    let dir = tempfile::tempdir().unwrap();
    let cells = json!([{ "name": "A" }, { "name": "few", "slots": 7, "drop": 0.9 }, { "name": "mapped", "backing": "page-cache", "drop": 0.9 }]);
    let path = plan(dir.path(), "flush", cells, &[("few", 5, 9)]);
    let run = quality(&format!("--slots 12 --plan {}", path.display()));
    assert_eq!(run["cells"].as_array().unwrap().len(), 3);
    assert_eq!(cell(&run, "A")["kl_mean"], 0.0);
    assert!(cell(&run, "few")["drop_rate"].as_f64() > cell(&run, "mapped")["drop_rate"].as_f64());
    assert!(cell(&run, "mapped")["drop_rate"].as_f64() > Some(0.0));
    // and what is wrong is known before anything runs
    for (flags, code, says) in [
        ("--drops 0 --slots 5", 1, "6 slots"),
        ("--slots 8", 2, "--drops"),
        ("--drops 0 --no-hook", 1, "always the reference"),
        ("--drops=-1 --slots 8", 1, "cell"),
        ("--drops 0 --slots 8 --level 2", 2, "0.5 to 0.9999"),
    ] {
        let file = model().with_file_name("heldout.txt");
        let mut arguments = vec!["quality", "-f", file.to_str().unwrap()];
        arguments.extend(flags.split_whitespace());
        let out = output(&model(), &arguments);
        let message = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(code), "{flags}: {message}");
        assert!(message.contains(says), "{flags}: {message}");
    }
}

/// The command line, built beside this program with the same flags.
fn hotset() -> Command {
    let profile = Path::new(env!("CARGO_BIN_EXE_hotset-llama")).parent().unwrap();
    let built = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--release", "--package", "hotset", "--bin", "hotset", "--target-dir"])
        .arg(profile.parent().unwrap())
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."))
        .status()
        .unwrap();
    assert!(built.success());
    let mut command = Command::new(profile.join("hotset"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("HOTSET_")) {
        command.env_remove(name);
    }
    command
}

/// The short form of bench/ab.sh: eight cells on the trained model, with slots few enough to matter; speed is analysed, quality measured, under the
/// same names. How large the differences are is not looked at: tokens are few, and the machine is shared.
#[test]
fn an_experiment_from_plan_to_quality() {
    let dir = tempfile::tempdir().unwrap();
    let (plan, out) = (dir.path().join("plan.json"), dir.path().join("out"));
    let (drops, lambdas) = ([0.0, 0.5, 0.75, 1.0], [0.0, 0.12]);
    let cell = |drop: f64, lambda: f64| hotset::hook::schedule::Cell {
        name: format!("F{drop} L{lambda}"),
        drop: Some(drop),
        lambda: Some(lambda),
        ..Default::default()
    };
    let wanted = hotset::ab::plan::Wanted {
        cells: drops.iter().flat_map(|f| lambdas.iter().map(|l| cell(*f, *l))).collect(),
        tokens: 1300,
        seed: 3,
        carry: hotset::hook::Carry::Washout,
        block: Some(20),
        washout: Some(4),
        turnover: None,
        spread: Default::default(),
        looks: 1,
        again: false,
        alpha: 0.05,
    };
    let schedule = hotset::ab::plan::plan(&wanted).unwrap().schedule;
    let tokens = schedule.blocks.last().unwrap().end();
    std::fs::write(&plan, schedule.to_json()).unwrap();
    let text = model().with_file_name("heldout.txt");
    let mut command = hotset();
    command.args(["ab", "run", "--json", "--plan"]).arg(&plan).arg("--out").arg(&out).arg("--");
    command.arg(env!("CARGO_BIN_EXE_hotset-llama")).arg("perplexity").arg("-m").arg(model()).arg("-f").arg(&text);
    command.args(["--bytes", &tokens.to_string(), "--slots", "10"]);
    let done = command.output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
    assert!(!said.contains("of the plan's"), "all of the plan: {said}");
    let analysis: Value = serde_json::from_slice(&done.stdout).unwrap();
    let cells = analysis["cells"].as_array().unwrap();
    assert_eq!((cells.len(), analysis["comparisons"].as_array().unwrap().len()), (8, 28), "{analysis}");

    let log = std::fs::read_to_string(out.join("run-1.csv")).unwrap();
    let mut lines = log.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let heading = lines.next().unwrap();
    let column = |name: &str| heading.iter().position(|h| *h == name).unwrap();
    let (cell, misses, dropped, swapped, drop, lambda) =
        (column("cell"), column("misses"), column("dropped"), column("swapped"), column("drop"), column("lambda"));
    for row in lines.filter(|row| !row[cell].is_empty()) {
        assert_eq!(row[cell], format!("F{} L{}", row[drop], row[lambda]));
        assert!((row[dropped] == "0" || row[drop] != "0") && (row[swapped] == "0" || row[lambda] != "0"), "{row:?}");
        assert!(row[misses].parse::<u32>().is_ok());
    }
    let quality = quality(&format!("--slots 10 --plan {}", plan.display()));
    let names = |list: &Value| list["cells"].as_array().unwrap().iter().map(|c| c["name"].clone()).collect::<Vec<_>>();
    assert_eq!(names(&quality), schedule.cells.iter().map(|c| json!(c.name)).collect::<Vec<_>>());
    assert!(names(&analysis).iter().all(|name| names(&quality).contains(name)));
    let parsed = hotset::ab::quality::Quality::parse(&quality.to_string()).unwrap();
    assert_eq!(parsed.of("F0 L0").unwrap().ratio_high, 1.0);
    assert!(parsed.of("F1 L0").unwrap().drop_rate > parsed.of("F0.5 L0").unwrap().drop_rate);
}
