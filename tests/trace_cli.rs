//! `hotset trace` from outside: every subcommand, on sound traces and on files that lie.
#![cfg(feature = "cli")]

#[path = "common/program.rs"]
mod program;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use hotset::trace::{Phase, Sidecar, Trace};
use serde_json::{Value, json};
use tempfile::TempDir;

fn hotset(args: &[&str]) -> Command {
    let mut command = program::hotset();
    command.arg("trace").args(args);
    command
}

fn ok(args: &[&str]) -> String {
    program::ok(&mut hotset(args))
}

fn ok_json(args: &[&str]) -> Value {
    serde_json::from_str(&ok(&[args, &["--json"]].concat())).unwrap()
}

fn fails(args: &[&str], code: i32, says: &str) -> String {
    program::fails(&mut hotset(args), code, says)
}

fn small() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/small.q4rt").to_str().unwrap().to_owned()
}

struct Dir(TempDir);

impl Dir {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn put(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        fs::write(self.0.path().join(name), bytes).unwrap();
        self.path(name)
    }

    fn names(&self) -> Vec<String> {
        let names = fs::read_dir(self.0.path()).unwrap();
        let mut names: Vec<_> = names.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn sidecar(trace: &str) -> Sidecar {
    Sidecar::read_beside(&PathBuf::from(trace)).unwrap().unwrap()
}

#[test]
fn help_has_examples() {
    for command in ["info", "verify", "head", "cut", "cat", "import", "export", "synth"] {
        let help = ok(&[command, "--help"]);
        assert!(help.contains("Examples:") && help.contains(&format!("hotset trace {command}")), "{command}");
    }
    fails(&["info"], 2, "required");
    fails(&["info", "/nowhere.q4rt"], 1, "/nowhere.q4rt: No such file");
}

#[test]
fn info_of_the_made_trace() {
    let text = ok(&["info", &small()]);
    for says in
        ["layers      4", "experts     96", "40 (top_m)", "480, 640 B each", "3 stray bytes", "sidecar     none"]
    {
        assert!(text.contains(says), "{text} does not say {says}");
    }
    let value = ok_json(&["info", &small()]);
    assert_eq!((&value["tokens"], &value["layers"], &value["sidecar"]), (&json!(480), &json!(4), &Value::Null));
    assert_eq!((&value["health"]["stray_bytes"], &value["health"]["cut"]), (&json!(3), &json!(true)));
}

#[test]
fn verify_names_the_first_problems() {
    assert!(ok(&["verify", &small()]).contains("sound: 480 tokens, 4 layers, 40 candidates"));
    assert!(fails(&["verify", &small(), "--strict"], 1, "2 problems").contains("3 stray bytes"));
    let dir = Dir::new();
    let mut bytes = fs::read(small()).unwrap();
    // token 1, layer 2, rank 3: an id that no layer has; token 2, layer 0, rank 1: a score above the first
    let record = |token: usize, layer: usize| 16 + (token * 4 + layer) * 160;
    bytes[record(1, 2) + 6..][..2].copy_from_slice(&500u16.to_le_bytes());
    bytes[record(2, 0) + 80 + 2..][..2].copy_from_slice(&0x7bffu16.to_le_bytes());
    let path = dir.put("a.q4rt", &bytes);
    let text = fails(&["verify", &path], 1, "2 problems");
    assert!(text.contains("token 1, layer 2, rank 3: expert 500 of 96"), "{text}");
    assert!(text.contains("token 2, layer 0, rank 1: score 65504 after"), "{text}");
    let value: Value = serde_json::from_str(&fails(&["verify", &path, "--json"], 1, "2 problems")).unwrap();
    assert_eq!(value["problems"][0]["kind"], "id out of range");
    assert_eq!((&value["problems"][1]["token"], &value["problems"][1]["rank"]), (&json!(2), &json!(1)));
    assert!(!fails(&["verify", &path, "--limit", "1"], 1, "--limit").contains("token 2"));

    // a sidecar of another trace, and one that is none
    let trace = dir.path("b.q4rt");
    ok(&["synth", &trace, "--tokens", "50"]);
    let mut lying = sidecar(&trace);
    lying.ranges[0].n_tokens = 51;
    lying.write(Path::new(&format!("{trace}.json")), false).unwrap();
    assert!(fails(&["verify", &trace], 1, "1 problems").contains("up to 51, the trace has 50"));
    dir.put("b.q4rt.json", "{}");
    assert!(fails(&["verify", &trace], 1, "1 problems").contains("hotset_sidecar"));
    fails(&["info", &trace], 1, "hotset_sidecar");
}

#[test]
fn head_shows_rows() {
    let text = ok(&["head", &small(), "-n", "2", "--top", "3"]);
    assert_eq!(text.lines().count(), 1 + 2 * 4);
    let cells: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!((&cells[..4], cells.len()), (&["0", "-", "-", "0"][..], 7));
    assert!(cells[4].starts_with("18:"));
    let rows = ok_json(&["head", &small(), "--skip", "478", "-n", "9", "--layer", "3"]);
    assert_eq!(rows.as_array().unwrap().len(), 2);
    assert_eq!((&rows[1]["token"], &rows[1]["layer"]), (&json!(479), &json!(3)));
    assert_eq!(rows[0]["candidates"].as_array().unwrap().len(), 10);
    fails(&["head", &small(), "--layer", "4"], 2, "layers 0 to 3");
}

#[test]
fn parts_put_together_are_the_whole() {
    let dir = Dir::new();
    let (a, b, both) = (dir.path("a.q4rt"), dir.path("b.q4rt"), dir.path("both.q4rt"));
    ok(&["cut", &small(), "..100", &a]);
    let value = ok_json(&["cut", &small(), "100..480", &b]);
    assert_eq!((&value["tokens"], &value["resident_known"]), (&json!(380), &json!(false)));
    assert_eq!(ok_json(&["cat", &a, &b, "--out", &both])["tokens"], 480);
    let (whole, joined) = (fs::read(small()).unwrap(), fs::read(&both).unwrap());
    assert_eq!(joined[16..], whole[16..whole.len() - 3]);
    assert_eq!(joined[12..16], 480u32.to_le_bytes());
    for wrong in ["5..5", "9..3", "0..481", "481.."] {
        fails(&["cut", &small(), wrong, &a], 2, "which has 480");
    }
    fails(&["cut", &small(), "7", &a], 2, "START..END wanted");
    fails(&["cut", &small(), "x..", &a], 2, "invalid digit");
    let other = dir.path("other.q4rt");
    ok(&["synth", &other]);
    fails(&["cat", &a, &other, "--out", &both], 2, "layers, experts, top_m differ");
    assert_eq!(fs::read(&both).unwrap(), joined, "a failure leaves the older file");
    assert_eq!(dir.names(), ["a.q4rt", "b.q4rt", "both.q4rt", "other.q4rt", "other.q4rt.json"]);
    // into itself
    ok(&["cut", &both, "10..20", &both]);
    assert_eq!(fs::read(&both).unwrap()[16..], whole[16 + 6400..16 + 12800]);
}

#[test]
fn sidecars_go_with_the_tokens() {
    let dir = Dir::new();
    let (whole, a, b, joined) = (dir.path("w.q4rt"), dir.path("a.q4rt"), dir.path("b.q4rt"), dir.path("j.q4rt"));
    ok(&["synth", &whole, "--tokens", "300"]);
    ok(&["cut", &whole, "0..120", &a]);
    ok(&["cut", &whole, "120..300", &b]);
    assert_eq!(sidecar(&a).resident.len(), 1);
    let part = sidecar(&b);
    assert_eq!((part.resident.len(), part.ranges[0].position, part.described_tokens()), (0, 120, 180));
    assert_eq!((&part.more["cut"]["start"], &part.more["cut"]["of_tokens"]), (&json!(120), &json!(300)));
    ok(&["cat", &a, &b, "-o", &joined]);
    assert_eq!(fs::read(&joined).unwrap(), fs::read(&whole).unwrap());
    let all = sidecar(&joined);
    assert_eq!((all.described_tokens(), all.ranges[1].position, all.closed), (300, 120, true));
    assert_eq!(all.more["joined"][1]["resident_known"], false);
    ok(&["cat", &b, &a, "-o", &joined]);
    let all = sidecar(&joined);
    assert_eq!((all.resident[0].before_token, all.resident[0].reason.as_str()), (180, "joined: start"));
    ok(&["verify", &joined, "--strict"]);
    assert!(ok(&["info", &joined]).contains("joined: start"));
    // one part without a sidecar: its tokens are not described
    fs::remove_file(format!("{a}.json")).unwrap();
    ok(&["cat", &b, &a, "-o", &joined]);
    assert_eq!(ok_json(&["info", &joined])["sidecar"]["tokens"]["decode"], 180);
    assert!(ok(&["info", &joined]).contains("120 tokens not described"));
}

#[test]
fn csv_and_arrays() {
    let dir = Dir::new();
    let (csv, npz) = (dir.path("a.csv"), dir.path("a.npz"));
    ok(&["export", &small(), &csv, "--tokens", "3..5", "--top", "2"]);
    let text = fs::read_to_string(&csv).unwrap();
    assert_eq!(text, ok(&["export", &small(), "-", "--tokens", "3..5", "--top", "2"]));
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!((lines[0], lines.len()), ("token,phase,position,layer,block,rank,expert,score", 1 + 2 * 4 * 2));
    let trace = Trace::open(small()).unwrap();
    let record = trace.record(4, 3);
    assert_eq!(lines[16], format!("4,,,3,3,1,{},{}", record.id(1), record.score(1)));

    ok(&["export", &small(), &npz, "--tokens", "478.."]);
    let bytes = fs::read(&npz).unwrap();
    let at = bytes.windows(7).position(|w| w == b"ids.npy").unwrap() + 7;
    assert_eq!(&bytes[at..at + 6], b"\x93NUMPY");
    let head = String::from_utf8_lossy(&bytes[at + 10..at + 128]);
    assert!(head.contains("'<u2'") && head.contains("(2, 4, 40,)"), "{head}");
    let ids: Vec<u16> = (0..4)
        .flat_map(|layer| (0..40).map(move |rank| (layer, rank)))
        .map(|(layer, rank)| trace.record(478, layer).id(rank))
        .collect();
    let found: Vec<u16> =
        bytes[at + 128..].chunks_exact(2).take(160).map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
    assert_eq!(found, ids);
    fails(&["export", &small(), "-", "--format", "npz"], 2, "needs a file");
    fails(&["export", &small(), "a.parquet"], 2, "say --format");
    fails(&["export", &small(), &csv, "--tokens", "0..999"], 2, "has 480");
    assert_eq!(dir.names(), ["a.csv", "a.npz"]);
}

#[test]
fn what_is_exported_is_imported_again() {
    let dir = Dir::new();
    let (csv, first, second) = (dir.path("a.csv"), dir.path("a.q4rt"), dir.path("b.q4rt"));
    // ids and order of what is used; scores up to a constant a token, as these are logits
    ok(&["export", &small(), &csv, "--format", "route-csv", "--top", "6"]);
    ok(&["import", &csv, &first]);
    let (a, b) = (Trace::open(small()).unwrap(), Trace::open(&first).unwrap());
    assert_eq!((b.n_tokens(), b.n_layers(), b.n_experts(), b.top_m()), (480, 4, 96, 6));
    for token in 0..480 {
        for layer in 0..4 {
            let (a, b) = (a.record(token, layer), b.record(token, layer));
            let ids = |record: &hotset::trace::Record| -> Vec<u16> { (0..6).map(|rank| record.id(rank)).collect() };
            let (mut a_ids, mut b_ids) = (ids(&a), ids(&b));
            let differ = (a.score(0).to_f32() - a.score(5).to_f32()) - (b.score(0).to_f32() - b.score(5).to_f32());
            assert!(differ.abs() < 0.02, "token {token}, layer {layer}: {differ}");
            a_ids.sort_unstable();
            b_ids.sort_unstable();
            assert_eq!(a_ids, b_ids);
        }
    }
    assert!(sidecar(&first).residency.is_empty());
    // what came from weights goes back byte for byte, with passes and residency
    let mut text = "# route_trace v1\n# arch=x n_layer=3 n_expert=9 n_expert_used=2\n".to_owned();
    text += "# layer=0 expert_bytes=5\n# layer=2 expert_bytes=6\n";
    text += "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n";
    let mut cell = |phase: u32, step: u32, layer: u32| {
        text += &format!("0,{phase},{step},{layer},0,{},0.6,{},0\n", step % 9, step % 3);
        text +=
            &format!("0,{phase},{step},{layer},1,{},{},1,0\n", (step + 3) % 9, if step == 5 { "nan" } else { "0.31" });
    };
    for (first, n) in [(0, 4), (4, 2)] {
        [0, 2].iter().for_each(|&layer| (first..first + n).for_each(|step| cell(0, step, layer)));
    }
    (6..12).for_each(|step| [0, 2].iter().for_each(|&layer| cell(1, step, layer)));
    let made = ok_json(&["import", &dir.put("c.csv", text), &first]);
    assert_eq!((&made["tokens"], &made["blocks"], &made["unknown_weights"]), (&json!(12), &json!([0, 2]), &json!(2)));
    ok(&["export", &first, &csv, "--format", "route-csv"]);
    ok(&["import", &csv, &second]);
    assert_eq!(fs::read(&first).unwrap(), fs::read(&second).unwrap());
    let (a, b) = (sidecar(&first), sidecar(&second));
    assert_eq!(
        (&a.ranges, &a.residency, &a.expert_bytes, &a.shape),
        (&b.ranges, &b.residency, &b.expert_bytes, &b.shape)
    );
    assert_eq!((a.ranges[0].phase, a.ranges[0].tokens_per_pass, a.residency[1].as_str()), (Phase::Prefill, 4, "1111"));
}

#[test]
fn imports_at_fault_leave_nothing_behind() {
    let dir = Dir::new();
    let heading = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n";
    let out = dir.path("a.q4rt");
    let csv = dir.put("a.csv", format!("{heading}0,1,0,0,0,70000,0.5,0,1\n"));
    fails(&["import", &csv, &out], 1, "a.csv: line 2, column 11: expert");
    let lines = dir.put("a.jsonl", "{\"tok\":0,\"layers\":[[1],[2]]}\n{\"tok\":1,\"layers\":[[1],[x]]}\n");
    fails(&["import", &lines, &out], 1, "a.jsonl: line 2, column 25: a whole number");
    fails(&["import", &csv, &out, "--format", "jsonl"], 1, "line 1, column 1: \"{\" wanted");
    fails(&["import", &dir.put("a.txt", ""), &out], 2, "say --format");
    fails(&["import", &dir.path("none.csv"), &out], 1, "No such file");
    fails(&["import", &csv, &out, "--experts", "0"], 2, "--experts");
    assert_eq!(dir.names(), ["a.csv", "a.jsonl", "a.txt"]);
}

#[test]
fn synth_gives_the_same_bytes_again() {
    let dir = Dir::new();
    let (a, b) = (dir.path("a.q4rt"), dir.path("b.q4rt"));
    let made = ok_json(&["synth", &a, "--layers", "5", "--tokens", "700", "--threads", "1"]);
    assert_eq!((&made["bytes"], &made["synth"]["seed"]), (&json!(16 + 700 * 5 * 128), &json!(1)));
    ok(&["synth", &b, "--layers", "5", "--tokens", "700", "--threads", "3"]);
    assert_eq!(fs::read(&a).unwrap(), fs::read(&b).unwrap());
    ok(&["synth", &b, "--layers", "5", "--tokens", "700", "--seed", "2"]);
    assert_ne!(fs::read(&a).unwrap(), fs::read(&b).unwrap());
    assert_eq!(sidecar(&a).more["synth"]["layers"], 5);
    let mut library = Vec::new();
    let params = hotset::trace::synth::SynthParams { layers: 5, tokens: 700, ..Default::default() };
    hotset::trace::synth::Synth::new(params).unwrap().write(&mut library).unwrap();
    assert_eq!(fs::read(&a).unwrap(), library);
    let preset = ok_json(&["synth", &b, "--preset", "qwen4exp", "--tokens", "3"]);
    assert_eq!((&preset["synth"]["layers"], &preset["synth"]["top_m"]), (&json!(48), &json!(64)));
    fails(&["synth", &a, "--top-m", "65"], 2, "top_m 65");
    fails(&["synth", &a, "--rho", "1"], 2, "rho");
    fails(&["synth", &a, "--noise", "x"], 2, "invalid");
}

#[test]
fn traces_cut_at_every_byte() {
    let dir = Dir::new();
    let whole = dir.path("w.q4rt");
    ok(&["synth", &whole, "--layers", "2", "--experts", "6", "--k", "2", "--top-m", "3", "--tokens", "2"]);
    fs::remove_file(format!("{whole}.json")).unwrap();
    let bytes = fs::read(&whole).unwrap();
    assert_eq!(bytes.len(), 16 + 2 * 24);
    for length in 0..bytes.len() + 3 {
        let mut cut = bytes.clone();
        cut.resize(length, 7);
        let path = dir.put("c.q4rt", cut);
        if length < 16 {
            fails(&["info", &path], 1, &format!("16 bytes wanted, {length} found"));
            continue;
        }
        let tokens = (length - 16) / 24;
        let value = ok_json(&["info", &path]);
        assert_eq!((&value["tokens"], &value["health"]["stray_bytes"]), (&json!(tokens), &json!((length - 16) % 24)));
        assert_eq!(value["health"]["cut"], tokens < 2);
        if length % 5 == 0 {
            ok(&["verify", &path]);
            assert_eq!(ok(&["head", &path, "-n", "9"]).lines().count(), 1 + 2 * tokens);
            assert_eq!(ok(&["export", &path, "-"]).lines().count(), 1 + 6 * tokens);
            ok(&["cat", &path, &path, "-o", &dir.path("d.q4rt")]);
            assert_eq!(fs::metadata(dir.path("d.q4rt")).unwrap().len() as usize, 16 + 48 * tokens);
        }
    }
}

#[test]
fn headers_that_lie() {
    let dir = Dir::new();
    let header = |layers: u16, experts: u16, top_m: u16, tokens: u32| {
        let mut bytes = b"Q4RT\x01\0".to_vec();
        [layers, experts, top_m].iter().for_each(|n| bytes.extend(n.to_le_bytes()));
        bytes.extend(tokens.to_le_bytes());
        bytes.extend([1; 64]);
        bytes
    };
    for shape in [(0, 8, 4), (2, 0, 4), (2, 8, 0)] {
        let path = dir.put("z.q4rt", header(shape.0, shape.1, shape.2, 1));
        for command in ["info", "verify", "head"] {
            fails(&[command, &path], 1, "none may be 0");
        }
    }
    // a token of 16 GiB, four thousand million of them
    let path = dir.put("z.q4rt", header(u16::MAX, u16::MAX, u16::MAX, u32::MAX));
    let value = ok_json(&["info", &path]);
    assert_eq!((&value["tokens"], &value["token_bytes"]), (&json!(0), &json!(65535u64 * 65535 * 4)));
    ok(&["verify", &path]);
    assert_eq!(ok(&["head", &path]).lines().count(), 1);
    assert_eq!(ok(&["export", &path, "-"]).lines().count(), 1);
    fails(&["cut", &path, "0..1", &dir.path("o.q4rt")], 2, "which has 0");
    ok(&["export", &path, &dir.path("o.npz")]);
    ok(&["cat", &path, &path, "-o", &dir.path("o.q4rt")]);
    // more candidates than experts can be read, and is a problem
    let path = dir.put("z.q4rt", header(1, 2, 4, 0));
    assert_eq!(ok_json(&["info", &path])["tokens"], 4);
    fails(&["verify", &path], 1, "problems");
    for (at, byte, says) in [(0, b'X', "trace magic"), (4, 2, "trace version: 1 wanted, 2 found")] {
        let mut bytes = header(1, 2, 4, 0);
        bytes[at] = byte;
        fails(&["info", &dir.put("z.q4rt", bytes)], 1, says);
    }
    fails(&["info", dir.0.path().to_str().unwrap()], 1, "not a regular file");
}

/// A recording with whole-row ranges, prefills and a gap: cut where nothing is known, and where the gap is.
#[test]
fn a_recording_keeps_what_lies_beside_it() {
    use half::f16;
    use hotset::trace::sidecar::read_ranges;
    use hotset::trace::{Placement, Recorder, RecorderConfig, SidecarInit, reason};

    let dir = Dir::new();
    let (whole, a, b, joined) = (dir.path("w.q4rt"), dir.path("a.q4rt"), dir.path("b.q4rt"), dir.path("j.q4rt"));
    let config = RecorderConfig {
        n_layers: 2,
        n_experts: 9,
        top_m: 3,
        record_prefill: true,
        row_range: true,
        sidecar: SidecarInit { k: 2, score_space: "logit".into(), ..SidecarInit::default() },
        ..RecorderConfig::default()
    };
    let mut recorder = Recorder::create(&whole, config).unwrap();
    let mut position = 0;
    for n in [4, 4, 1, 1, 1, 1] {
        let phase = if n == 4 { Phase::Prefill } else { Phase::Decode };
        if position == 10 {
            recorder.mark_gap(reason::RESET);
        }
        recorder.begin_pass(phase, position, n, || vec![vec![position as u16 % 9]; 2]);
        for layer in 0..2 {
            recorder.begin_layer(layer, n, false);
            for row in 0..n {
                let scores = [3.0, 2.0, 1.0].map(f16::from_f32);
                recorder.push_row(layer, row, &[0, 1, 2], &scores, (position + row as i64) as f32);
            }
        }
        assert!(recorder.end_pass(&[Placement::Slots]));
        position += n as i64;
    }
    recorder.close().unwrap();

    assert_eq!(ok_json(&["cut", &whole, "..10", &a])["resident_known"], true);
    assert_eq!(ok_json(&["cut", &whole, "10..", &b])["resident_known"], true);
    assert_eq!(read_ranges(Path::new(&b), 2).unwrap(), [10.0, 10.0, 11.0, 11.0]);
    assert_eq!(sidecar(&b).resident[0].layers, vec![vec![1]; 2]);
    ok(&["cat", &a, &b, "--out", &joined]);
    for beside in ["", ".range"] {
        let read = |trace: &str| fs::read(format!("{trace}{beside}")).unwrap();
        assert_eq!(read(&joined), read(&whole));
    }
    let (old, new) = (sidecar(&whole), sidecar(&joined));
    assert_eq!(new.ranges.iter().map(|r| r.n_tokens).collect::<Vec<_>>(), [8, 2, 2]);
    assert_eq!((&new.resident[1].layers, new.resident[1].before_token), (&old.resident[1].layers, 10));
    assert_eq!(new.resident[1].reason, "joined: reset");

    // through a pass: what its first token here found resident is not known
    assert_eq!(ok_json(&["cut", &whole, "6..9", &b])["resident_known"], false);
    assert_eq!((sidecar(&b).ranges[0].left_out_before, sidecar(&b).ranges[0].position), (2, 6));
    ok(&["verify", &b, "--strict"]);
    // without the ranges nothing is cut that would need them
    fs::write(format!("{whole}.range"), [0; 40]).unwrap();
    fails(&["cut", &whole, "6..9", &b], 1, ".range ends too early");
    fails(&["cat", &whole, &a, "-o", &joined], 1, ".range ends too early");
    // a new trace in the place of one with ranges leaves none of them behind
    ok(&["synth", &joined, "--tokens", "3"]);
    assert!(!Path::new(&format!("{joined}.range")).exists());
}
