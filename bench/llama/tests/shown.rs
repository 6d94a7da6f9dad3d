//! What must be shown of hotset in a real engine: outputs equal to the resident run's bit for bit, drops that are safe, and recorded runs
//! that equal their replay. One compute thread throughout: the engine's spin barriers stall on busy cores.

mod common;
#[path = "../../../tests/common/replay.rs"]
mod replay;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{command, json, model, number, shared};
use hotset::model::tiny::{self, TinyParams};
use hotset::trace::{Sidecar, Trace};
use serde_json::Value;
use tempfile::TempDir;

/// Prompts of 1, 5 and 300 tokens: the model's tokens are bytes, and it begins with one of its own.
fn prompts(dir: &TempDir) -> Vec<PathBuf> {
    let text = std::fs::read(model().with_file_name("heldout.txt")).unwrap();
    let write = |n: usize| {
        let path = dir.path().join(format!("prompt-{n}.txt"));
        std::fs::write(&path, &text[..n - 1]).unwrap();
        path
    };
    [1, 5, 300].map(write).to_vec()
}

fn decode(model: &Path, prompt: &Path, n: u32, flags: &str) -> Value {
    json(model, &["decode", "-f", prompt.to_str().unwrap(), "-n", &n.to_string()], flags)
}

#[test]
fn logits_of_200_tokens_are_the_resident_runs() {
    let dir = tempfile::tempdir().unwrap();
    let ways = [
        "--slots 16 --lanes 1",
        "--slots 16 --lanes 4 --poison",
        "--slots 24 --lanes 4",
        "--slots 24 --lanes 1 --io buffered --poison",
        "--slots 64 --lanes 4 --io buffered",
        "--slots 64 --lanes 1",
        "--backing page-cache --slots 24",
    ];
    for (prompt, tokens) in prompts(&dir).iter().zip([1, 5, 300]) {
        let resident = decode(&model(), prompt, 200, "--no-hook");
        assert_eq!((number(&resident, "n_prompt"), resident["finite"].as_bool()), (tokens, Some(true)));
        for way in ways {
            let run = decode(&model(), prompt, 200, way);
            let what = format!("prompt of {tokens}, {way}");
            for key in ["logits_fnv", "text", "tokens"] {
                assert_eq!(run[key], resident[key], "{key}: {what}");
            }
            assert_eq!((number(&run, "dropped"), number(&run, "swapped")), (0, 0), "{what}");
            assert!(number(&run, "misses") > 0 && number(&run, "hits") > 0, "{what}");
            // 300 tokens use more experts than 24 slots hold: they pass through, and decoding goes back to slots.
            let passed = number(&run, "pass_through_rows") > 0;
            assert!(passed || tokens < 300 || way.contains("64"), "{what}");
            assert!(!passed || tokens > 1, "{what}");
            let io = if way.contains("page-cache") || way.contains("buffered") { "buffered" } else { "direct" };
            assert!(
                run["io_mode"] == io || io == "direct" && run["io_reason"] != "as asked for",
                "{what}: {}",
                run["io_mode"]
            );
        }
    }
}

#[test]
fn stepped_perplexity_of_4_kib_is_the_resident_runs() {
    let file = model().with_file_name("heldout.txt");
    let perplexity =
        |flags: &str| json(&model(), &["perplexity", "-f", file.to_str().unwrap(), "--bytes", "4096"], flags);
    let resident = perplexity("--no-hook");
    for way in
        ["--slots 16 --lanes 1", "--slots 24 --lanes 4 --io buffered", "--slots 64", "--backing page-cache --slots 24"]
    {
        let run = perplexity(way);
        for key in ["logits_fnv", "perplexity", "tokens"] {
            assert_eq!(run[key], resident[key], "{key}: {way}");
        }
    }
}

fn tiny_model(dir: &TempDir, shape: TinyParams) -> PathBuf {
    let path = dir.path().join("tiny.gguf");
    tiny::write(&shape, &path, &mut |_| ()).unwrap()[0].0.clone()
}

#[test]
fn a_random_model_in_3_shards_is_the_same_through_slots() {
    let dir = tempfile::tempdir().unwrap();
    let shape = TinyParams { layers: 5, experts: 24, k: 3, shards: 3, seed: 11, ..TinyParams::default() };
    let first = tiny_model(&dir, shape);
    assert!(first.to_str().unwrap().ends_with("-00001-of-00003.gguf"));
    let file = model().with_file_name("heldout.txt");
    let perplexity =
        |flags: &str| json(&first, &["perplexity", "-f", file.to_str().unwrap(), "--bytes", "4096"], flags);
    let resident = perplexity("--no-hook");
    for way in ["--slots 5 --lanes 1 --poison", "--slots 5 --io buffered", "--backing page-cache --slots 9"] {
        assert_eq!(perplexity(way)["logits_fnv"], resident["logits_fnv"], "perplexity, {way}");
    }
    for (prompt, tokens) in prompts(&dir).iter().zip([1, 5, 300]) {
        let resident = decode(&first, prompt, 200, "--no-hook --ignore-eos");
        for way in
            ["--slots 5 --poison", "--slots 5 --lanes 1 --io buffered", "--slots 24", "--backing page-cache --slots 9"]
        {
            let run = decode(&first, prompt, 200, &format!("{way} --ignore-eos"));
            if !way.contains("page-cache") {
                assert_eq!(number(&run, "pass_through_rows") > 0, tokens > 1 && way.contains("--slots 5"), "{way}");
            }
            assert_eq!((&run["logits_fnv"], &run["finite"]), (&resident["logits_fnv"], &Value::Bool(true)), "{way}");
            assert!(number(&run, "misses") > 0, "{way}");
        }
    }
}

#[test]
fn drops_are_gated() {
    let dir = tempfile::tempdir().unwrap();
    let prompt = &prompts(&dir)[1];
    // Below any weight that can be: no byte changes, nothing is dropped.
    let resident = decode(&model(), prompt, 100, "--no-hook");
    let run = decode(&model(), prompt, 100, "--slots 16 --drop 1e-9");
    assert_eq!((&run["logits_fnv"], number(&run, "dropped")), (&resident["logits_fnv"], 0));
    // Full strength against 1.5 x k slots: constant eviction, nothing that was not read is computed with.
    let run = decode(&model(), prompt, 200, "--slots 9 --drop 1 --poison --step");
    assert_eq!(run["finite"], true);
    let (dropped, routed) =
        (number(&run, "dropped"), number(&run, "hits") + number(&run, "misses") + number(&run, "dropped"));
    assert!(dropped > routed / 10, "{dropped} of {routed}");
    // The top expert of every token and layer ran, so at least one of six did.
    assert!(number(&run, "hits") + number(&run, "misses") >= routed / 6);
    assert_ne!(run["logits_fnv"], decode(&model(), prompt, 200, "--no-hook --step")["logits_fnv"]);
    // k = 1: the top expert is all there is.
    let one = tiny_model(&dir, TinyParams { experts: 16, k: 1, ..TinyParams::default() });
    let resident = decode(&one, prompt, 60, "--no-hook --ignore-eos");
    let run = decode(&one, prompt, 60, "--slots 2 --drop 1 --ignore-eos");
    assert_eq!((&run["logits_fnv"], number(&run, "dropped")), (&resident["logits_fnv"], 0));
    assert!(number(&run, "misses") > 20);
}

fn misses_per_layer(run: &Value) -> Vec<u64> {
    run["misses_per_layer"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect()
}

/// Recorded from cold (the prompt stepped, and recorded too), after a prefill that went through slots, and after one that passed through.
#[test]
fn recorded_runs_equal_their_replay() {
    let dir = tempfile::tempdir().unwrap();
    let prompts = prompts(&dir);
    let cases = [(&prompts[2], "--slots 24 --step"), (&prompts[1], "--slots 40"), (&prompts[2], "--slots 24")];
    for lambda in ["0", "0.12"] {
        for (prompt, way) in cases {
            let trace = dir.path().join("run.q4rt");
            let run = decode(&model(), prompt, 150, &format!("{way} --lambda {lambda} --trace {}", trace.display()));
            let (t, s) = (Trace::open(&trace).unwrap(), Sidecar::read_beside(&trace).unwrap().unwrap());
            assert_eq!(t.n_tokens() as u64, number(&run, "recorded_tokens"), "{way}");
            assert_eq!((s.score_space.as_str(), s.resident.len(), s.closed), ("log_prob", 1, true), "{way}");
            let (stepped, through_slots) = (way.contains("--step"), way.contains("40"));
            let warm = s.resident[0].layers.iter().all(|l| !l.is_empty());
            assert_eq!(warm, through_slots, "{way}: {:?}", s.left_out);
            assert_eq!(s.left_out.is_empty(), stepped, "{way}: {:?}", s.left_out);
            // What the prefill read is not of the recorded tokens.
            let replayed = replay::misses_per_layer(&t, &s);
            let of_prefill: Vec<u64> = s.resident[0].layers.iter().map(|l| l.len() as u64).collect();
            let live: Vec<u64> = misses_per_layer(&run).iter().zip(of_prefill).map(|(n, p)| n - p).collect();
            assert_eq!(replayed, live, "lambda {lambda}, {way}");
            assert_eq!(number(&run, "swapped") > 0, lambda != "0");
            if stepped {
                reference_agrees(&trace, 24, lambda, &live);
            }
        }
    }
}

/// Each policy evicts others, changes no output, and replays.
#[test]
fn every_policy_gives_the_same_output_and_replays() {
    let dir = tempfile::tempdir().unwrap();
    let prompt = &prompts(&dir)[1];
    let resident = decode(&model(), prompt, 120, "--no-hook --step");
    let mut seen = Vec::new();
    for policy in ["lru", "lfu", "ema", "near_pick_ema", "inverse_router_ema"] {
        let trace = dir.path().join("run.q4rt");
        let flags = format!("--slots 16 --step --policy {policy}");
        let alone = decode(&model(), prompt, 120, &flags);
        let run = decode(&model(), prompt, 120, &format!("{flags} --trace {}", trace.display()));
        assert_eq!(run["logits_fnv"], resident["logits_fnv"], "{policy}");
        assert_eq!(misses_per_layer(&run), misses_per_layer(&alone), "recording changes no eviction: {policy}");
        let (t, s) = (Trace::open(&trace).unwrap(), Sidecar::read_beside(&trace).unwrap().unwrap());
        assert_eq!(replay::misses_per_layer(&t, &s), misses_per_layer(&run), "{policy}");
        seen.push(misses_per_layer(&run));
    }
    assert!((1..seen.len()).all(|i| !seen[..i].contains(&seen[i])), "policies differ: {seen:?}");
}

/// The reference replayer reads the trace and counts the same misses.
fn reference_agrees(trace: &Path, slots: u32, lambda: &str, live: &[u64]) {
    let Some(folder) = shared("reference") else { return };
    let program = "import sys, json; sys.path.insert(0, sys.argv[1]); import replay_moe_cache as r\n\
        t = r.parse_trace_file(sys.argv[2])\n\
        print(json.dumps([r.replay_layer(l, t['n_experts'], int(sys.argv[3]), 'lru', 6, float(sys.argv[4]), 3, warmup_tokens=0)['misses'] for l in t['layers_data']]))";
    let (slots, trace) = (slots.to_string(), trace.to_str().unwrap());
    let out = Command::new("python3").args(["-c", program, folder.to_str().unwrap(), trace, &slots, lambda]).output();
    let Ok(out) = out else {
        println!("skipped: the reference replayer's word: no python3");
        return;
    };
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let misses: Vec<u64> = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(misses, live, "the reference, lambda {lambda}");
}

/// A model file written to while it is decoded from: an error that names it, by way of the engine's abort, and no wrong output.
#[test]
fn a_changed_model_ends_the_decode() {
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("model.gguf");
    std::fs::copy(model(), &copy).unwrap();
    let whole = decode(&copy, &prompts(&dir)[1], 400, "--no-hook");
    let arguments = ["decode", "-p", "And", "-n", "100000", "--ctx", "512", "--slots", "6"];
    assert!(!command(&copy, &arguments).output().unwrap().status.success(), "more tokens than the context holds");
    let arguments =
        ["decode", "-f", &prompts(&dir)[1].display().to_string(), "-n", "400", "--slots", "6"].map(str::to_owned);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mut child = command(&copy, &arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut text = vec![0; 20];
    child.stdout.as_mut().unwrap().read_exact(&mut text).unwrap();
    let file = std::fs::File::options().write(true).open(&copy).unwrap();
    file.set_modified(std::time::SystemTime::now() + Duration::from_secs(5)).unwrap();
    let out = child.wait_with_output().unwrap();
    text.extend(out.stdout);
    let (text, log) = (String::from_utf8_lossy(&text).into_owned(), String::from_utf8_lossy(&out.stderr).into_owned());
    assert_eq!(out.status.code(), Some(1), "{log}");
    assert!(log.contains("model.gguf was written to"), "{log}");
    assert!(
        whole["text"].as_str().unwrap().starts_with(text.trim_end_matches('\n')),
        "what was printed before is right: {text}"
    );
}
