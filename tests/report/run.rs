//! `hotset report`: what is on the page is what the commands say; hostile input; bounds; the same input, the same bytes.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::browser::Browser;
use crate::program::json;
use crate::shared::shared;
use crate::{flawless, program};

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A made trace, with its sidecar.
fn synth(folder: &Path, tokens: &str) -> PathBuf {
    let path = folder.join("made.q4rt");
    let shape = ["--layers", "4", "--experts", "32", "--k", "4", "--top-m", "16", "--seed", "7", "--tokens", tokens];
    program::ok(program::hotset().args(["trace", "synth"]).arg(&path).args(shape));
    path
}

fn report(inputs: &[&Path]) -> Command {
    let mut command = program::hotset();
    command.arg("report").args(inputs);
    command
}

/// A route_trace v1 file: 2 layers, a prefill of 3 tokens, 40 decode steps; one weight is not known.
fn csv() -> String {
    let mut text = String::from(
        "# route_trace v1\n# model=/a/b/tiny<b>.gguf arch=toy n_layer=2 n_expert=12 n_expert_used=3\n# layer=0 expert_bytes=1000000\n\
         # layer=1 expert_bytes=2000000\nturn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n",
    );
    for step in 0..43u32 {
        for layer in 0..2 {
            let (phase, bytes) = (u32::from(step > 2), 1_000_000 * (layer + 1));
            for (slot, weight) in
                ["0.6", "0.3", if step == 20 && layer == 1 { "nan" } else { "0.1" }].iter().enumerate()
            {
                let expert = slot as u32 * 4 + (step * (layer + 1) / (slot as u32 + 1)) % 4;
                let residency = ((step + slot as u32) % 3).min(1);
                text += &format!("0,{phase},{step},{layer},{slot},{expert},{weight},{residency},{bytes}\n");
            }
        }
    }
    text
}

#[test]
fn the_page_says_what_the_commands_say() {
    let dir = folder();
    let trace = synth(dir.path(), "300");
    let data = json(report(&[&trace]).args([
        "--json",
        "--cache-cap",
        "6,12",
        "--f",
        "0.5,1",
        "--lambda",
        "0,0.2",
        "--warmup",
        "10",
    ]));
    let run = &data["runs"][0];

    let analyzed = json(program::hotset().args(["analyze", "--json"]).arg(&trace));
    for (slots, share) in analyzed["hit_curve"].as_array().unwrap().iter().enumerate() {
        let found = run["cache"]["hit_curve"][slots].as_f64().unwrap();
        assert!((found - share.as_f64().unwrap()).abs() <= 0.5e-4, "{slots} slots: {found}, {share}");
    }
    for slots in [6, 12] {
        let args = ["--json", "--cache-cap", &slots.to_string(), "--warmup", "10"];
        let replayed = json(program::hotset().arg("replay").arg(&trace).args(args));
        for (name, policy) in replayed["policies"].as_object().unwrap() {
            let same = |p: &&Value| p["policy"] == name.as_str() && p["slots"] == slots;
            let found = run["policies"].as_array().unwrap().iter().find(same).unwrap();
            let near = |a: &Value, b: &Value, by: f64| (a.as_f64().unwrap() - b.as_f64().unwrap()).abs() <= by;
            assert!(
                near(&found["misses_per_token"], &policy["total_misses_per_token_48L"], 0.005 + 1e-9),
                "{found} {policy}"
            );
            assert!(near(&found["hit_rate"], &policy["mean_hit_rate"], 0.00005 + 1e-9), "{found} {policy}");
        }
    }
    let args = ["--json", "--cache-cap", "6,12", "--f", "0.5,1", "--lambda", "0,0.2", "--warmup", "10"];
    let dropped = json(program::hotset().arg("drop-replay").arg(&trace).args(args));
    let (loops, fronts) =
        (dropped["runs"][0]["closed_loop"].as_array().unwrap(), run["drop_fronts"].as_array().unwrap());
    assert_eq!((loops.len(), fronts.len()), (12, 12));
    for (one, other) in loops.iter().zip(fronts) {
        assert_eq!([&one["cache_cap"], &one["f"], &one["lambda"]], [&other["slots"], &other["f"], &other["lambda"]]);
        for key in ["misses", "bytes", "mass_lost", "reads_avoided", "front", "dropped", "swapped"] {
            assert_eq!(one[key], other[key], "{key}");
        }
    }
    // Step by step: a replay with LRU in the first number of slots, which has no warm-up.
    let plain = json(program::hotset().args(["drop-replay", "--json", "--cache-cap", "6", "--f", "0"]).arg(&trace));
    let all = &run["steps"]["all"];
    assert_eq!(all["misses"], plain["runs"][0]["closed_loop"][0]["misses"]);
    assert_eq!(all["hits"].as_u64().unwrap() + all["misses"].as_u64().unwrap(), 300 * 4 * 4);
    let by_step = run["steps"]["hits_misses_dropped_by_step"].as_array().unwrap();
    assert_eq!(by_step.iter().map(|s| s[1].as_u64().unwrap()).sum::<u64>(), all["misses"].as_u64().unwrap());
}

/// A trace whose sidecar has the settings of the run is shown as that run, dropping and reranking included.
#[test]
fn a_run_is_replayed_with_its_own_settings() {
    let dir = folder();
    let trace = synth(dir.path(), "200");
    let sidecar = dir.path().join("made.q4rt.json");
    let mut value: Value = serde_json::from_str(&std::fs::read_to_string(&sidecar).unwrap()).unwrap();
    value["settings"] = serde_json::json!([{
        "from_token": 0, "lambda": 0.12, "top_j": 3, "delta": "token_topk", "drop": 0.75, "renormalise": "auto", "slots": [9, 9, 9, 9],
        "policy": "lfu", "backing": "slots", "io": "direct", "prefill_moce": false, "prefill_drop": false,
    }]);
    value["resident"] = serde_json::json!([
        { "before_token": 0, "reason": "start", "layers": [[1, 2, 3], [], [30, 31], [0]], "state": null },
    ]);
    std::fs::write(&sidecar, value.to_string()).unwrap();
    let data =
        json(report(&[&trace]).args(["--json", "--cache-cap", "6", "--policies", "lru", "--f", "1", "--lambda", "0"]));
    let (steps, about) = (&data["runs"][0]["steps"], &data["runs"][0]["about"]);
    assert_eq!(steps["source"], "replayed with the run's settings (lfu, 9 slots, lambda 0.12, F 0.75)");
    assert_eq!(about["settings"][0], "from token 0: lfu, 9 slots, lambda 0.12, F 0.75");
    let args = ["--json", "--cache-cap", "9", "--policy", "lfu", "--lambda", "0.12", "--f", "0.75", "--warm"];
    let dropped = json(program::hotset().arg("drop-replay").args(args).arg(&trace));
    let with = &dropped["runs"][0]["closed_loop"][1];
    assert_eq!(with["f"], 0.75);
    for key in ["hits", "misses", "dropped"] {
        assert!(with[key].as_u64().unwrap() > 0);
        assert_eq!(steps["all"][key], with[key], "{key}");
    }
    let of_layers = |key: &str| steps["layers"].as_array().unwrap().iter().map(|l| l[key].clone()).collect::<Vec<_>>();
    assert_eq!(of_layers("misses"), *with["misses_per_layer"].as_array().unwrap());
    assert_eq!(of_layers("dropped"), *with["dropped_per_layer"].as_array().unwrap());
}

#[test]
fn a_recorded_run_and_its_log() {
    let dir = folder();
    let (trace, log) = (dir.path().join("run.route.csv"), dir.path().join("run.jsonl"));
    std::fs::write(&trace, csv()).unwrap();
    let line = |pass: u32| {
        let wall = if pass == 0 { "null".to_owned() } else { (2_000_000 + 10_000 * pass).to_string() };
        let (phase, tokens) = if pass == 0 { ("prefill", 3) } else { ("decode", 1) };
        format!(
            "{{\"pass\":{pass},\"phase\":\"{phase}\",\"tokens\":{tokens},\"wall_ns\":{wall},\"pass_ns\":9000000,\"wait_ns\":500000,\"read_bytes\":10,\
             \"hits\":4,\"misses\":2,\"dropped\":0,\"swapped\":0,\"mass_dropped\":0,\"mass_swapped\":0,\"pass_through_rows\":0,\"slots\":6,\
             \"lambda\":0,\"drop\":0}}\n"
        )
    };
    std::fs::write(&log, (0..41).map(line).collect::<String>()).unwrap();
    let page = dir.path().join("report.html");
    let data = json(report(&[&trace, &log]).arg("-o").arg(&page).args(["--json", "--cache-cap", "4,6"]));
    assert_eq!(data["runs"].as_array().unwrap().len(), 1, "the log belongs to the trace before it");
    let run = &data["runs"][0];
    assert_eq!(run["about"]["unknown_weights"], 1);
    assert_eq!(run["about"]["model"], "tiny<b>.gguf, toy");
    let counted = csv().lines().filter(|l| l.starts_with("0,1,") && l.split(',').nth(7) == Some("0")).count();
    assert_eq!(run["steps"]["all"]["misses"], counted);
    let dropped = json(program::hotset().args(["drop-replay", "--json"]).arg(&trace));
    assert_eq!(run["steps"]["all"]["misses"], dropped["runs"][0]["static"][0]["misses"]);
    assert!(
        run["drop_fronts"].as_array().unwrap().iter().all(|row| row["unknown_rows"] == 1),
        "counted, not taken for 0"
    );
    assert_eq!(run["times"]["decode"]["wall_ms_quantiles"][2], 2.2, "the median of 2.01 to 2.40");
    assert_eq!(run["times"]["prefill"]["wall_ms_quantiles"][2], 3.0, "a first pass has the time of the pass itself");
    assert_eq!(run["times"]["decode"]["misses"], 80);

    let html = std::fs::read_to_string(&page).unwrap();
    assert!(html.contains("1 weights are not known") && html.contains("tiny&lt;b&gt;.gguf") && !html.contains("<b>"));
    // Once more, named by --metrics: the same bytes.
    let again = dir.path().join("again.html");
    program::ok(report(&[&trace]).arg("--metrics").arg(&log).arg("-o").arg(&again).args(["--cache-cap", "4,6"]));
    assert!(html == std::fs::read_to_string(&again).unwrap(), "the same input, the same bytes");
    if let Some(mut browser) = Browser::start() {
        flawless(&mut browser, &page, 9);
    }
}

#[test]
fn several_runs_on_one_page() {
    let dir = folder();
    let (made, recorded, ids) = (synth(dir.path(), "20"), dir.path().join("r.csv"), dir.path().join("ids.jsonl"));
    std::fs::write(&recorded, csv()).unwrap();
    let line =
        |tok: u32| format!("{{\"tok\": {tok}, \"layers\": [[{}, {}], [], [7, {}]]}}\n", tok % 5, 5 + tok % 3, tok % 7);
    std::fs::write(&ids, (0..30).map(line).collect::<String>()).unwrap();
    let page = dir.path().join("report.html");
    let data = json(report(&[&made, &recorded, &ids]).arg("-o").arg(&page).args(["--json", "--cache-cap", "8"]));
    let names: Vec<&Value> = data["runs"].as_array().unwrap().iter().map(|run| &run["name"]).collect();
    assert_eq!(names, ["made.q4rt", "r.csv", "ids.jsonl"]);
    assert!(data["runs"][2]["drop_fronts"].as_array().unwrap().is_empty(), "no weights, no fronts");
    assert!(data["runs"][2]["notes"].to_string().contains("not known what is light"));
    assert_eq!(data["runs"][2]["steps"]["n_steps"], 30);
    if let Some(mut browser) = Browser::start() {
        flawless(&mut browser, &page, 1 + 7 + 7 + 6);
    }
}

#[test]
fn a_long_run_makes_no_large_page() {
    let dir = folder();
    let size = |tokens: &str| {
        let (trace, page) = (synth(dir.path(), tokens), dir.path().join("report.html"));
        let few = ["--cache-cap", "8", "--policies", "lru", "--f", "1", "--lambda", "0"];
        program::ok(report(&[&trace]).arg("-o").arg(&page).args(few));
        let html = std::fs::read_to_string(&page).unwrap();
        let cut = tokens == "6000";
        assert_eq!(html.contains("6000 steps are too many to show each: a column is the mean of 50."), cut);
        assert_eq!(html.contains("of 6000; for others say --from-step"), cut);
        html.len()
    };
    let (short, long) = (size("300"), size("6000"));
    assert!(long < short + short / 4 && long < 1_000_000, "{short} {long}");
}

#[test]
fn what_cannot_be_is_named() {
    let dir = folder();
    let (path, page) = (dir.path().join("bad.csv"), dir.path().join("report.html"));
    let fails = |text: &str, code: i32, says: &str| {
        std::fs::write(&path, text).unwrap();
        program::fails(report(&[&path]).arg("-o").arg(&page), code, says);
        assert!(!page.exists(), "nothing is written of a file that is at fault");
    };
    fails(&csv().replace("0,1,5,0,1,", "0,1,5,0,1,-"), 1, "bad.csv: line 37, column 11: expert");
    fails(&csv().replace("0,1,5,0,0,1,0.6,1", "0,1,5,0,0,1,0.6,7"), 1, "bad.csv: line 36, column 17: residency");
    fails("turn,phase\n", 1, "bad.csv: ");
    fails("", 1, "bad.csv: ");
    let log = "phase,tokens,misses,read_bytes,hits,dropped,swapped,mass_dropped,mass_swapped,pass_through_rows,slots,lambda,drop\n";
    fails(
        &format!("{log}decode,1,x,0,0,0,0,0,0,0,4,0,0\n"),
        1,
        "bad.csv: line 2, column 10: misses: a whole number wanted",
    );
    let trace = synth(dir.path(), "20");
    let good = || {
        let mut command = report(&[&trace]);
        command.arg("-o").arg(&page);
        command
    };
    program::fails(good().args(["--cache-cap", "2"]), 2, "2 slots: a token uses 4 experts");
    program::fails(good().args(["--policies", "none"]), 2, "policy 'none'");
    program::fails(good().args(["--warmup", "20"]), 2, "nothing is left to count");
    program::fails(good().args(["--f", "-1"]), 2, "");
    program::fails(
        report(&[&trace, &trace]).arg("--metrics").arg(&path).arg("-o").arg(&page),
        2,
        "--metrics is one run's",
    );
    program::fails(&mut report(&[&trace]), 2, "-o");
    program::fails(report(&[&dir.path().join("none.q4rt")]).arg("-o").arg(&page), 1, "none.q4rt");
    std::fs::write(&path, "Q4RT").unwrap();
    program::fails(report(&[&path]).arg("-o").arg(&page), 1, "bad.csv: trace header");
    assert!(!page.exists());
}

/// The real runs: their own hit rates are on the page, and it is sound in a browser.
#[test]
fn real_runs() {
    let dir = folder();
    for name in ["qwen.route.csv", "gemma.route.csv", "gptoss.route.csv", "kimi.jsonl", "olmoe.jsonl"] {
        let Some(path) = shared(&format!("traces/{name}")) else { continue };
        let page = dir.path().join("report.html");
        let data = json(report(&[&path]).arg("-o").arg(&page).arg("--json"));
        let run = &data["runs"][0];
        let size = std::fs::metadata(&page).unwrap().len();
        assert!(size < 1_500_000, "{name}: {size} bytes");
        if name.ends_with(".csv") {
            let dropped = json(program::hotset().args(["drop-replay", "--json"]).arg(&path));
            assert_eq!(run["steps"]["all"]["misses"], dropped["runs"][0]["static"][0]["misses"], "{name}");
        }
        if let Some(mut browser) = Browser::start() {
            let html = std::fs::read_to_string(&page).unwrap();
            flawless(&mut browser, &page, html.matches("<figure").count() as u64);
        }
    }
}
