//! Dropping, replayed: the reference's static table on the real traces, the closed loop against a live run, and what must hold of both.
#![cfg(feature = "tools")]

use std::fs::File;
use std::io::{BufReader, Cursor};
use std::path::{Path, PathBuf};

use half::f16;
use hotset::hook::{Adjacent, Batch, Config, Hook};
use hotset::model::tiny::{self, TinyParams};
use hotset::replay::{DropSettings, Replay, Routed, Rule, Settings, Static, Weights, drop_loop, drop_static, observed};
use hotset::route::{Drop, Moce, ScoreSpace, gate};
use hotset::store::Dense;
use hotset::trace::{Header, Phase, Sidecar, Trace, q4rt};
use hotset::{ErrorKind, Result};
use proptest::prelude::*;

/// The folder with real traces, or `None`, which is said.
fn shared(what: &str) -> Option<PathBuf> {
    let given = std::env::var_os("HOTSET_SHARED").map(PathBuf::from);
    let path = given.unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared"));
    if path.join("traces").is_dir() {
        return Some(path);
    }
    println!("skipped: {what}: no real traces (HOTSET_SHARED)");
    None
}

fn real(folder: &Path, name: &str) -> Routed {
    let path = folder.join("traces").join(format!("{name}.route.csv"));
    Routed::from_csv(&mut BufReader::new(File::open(path).unwrap())).unwrap()
}

fn decode(routed: &Routed, rule: Rule) -> Static {
    drop_static(routed, rule, Phase::Decode, Weights::Recorded).unwrap()
}

/// Every cell of the reference's table, as it is printed there: reads avoided in %, mass dropped in %.
#[test]
fn the_references_table() {
    let Some(folder) = shared("static drop replay") else { return };
    let cold = [
        ("qwen", "0.1 5.8 36.8 66.1", "0.00 0.49 4.44 9.46"),
        ("gemma", "1.9 13.3 41.2 67.4", "0.06 0.87 4.09 8.18"),
        ("gptoss", "0.1 1.7 11.6 54.4", "0.01 0.36 4.00 25.19"),
    ];
    let top: [(&str, &[usize], &str, &str); 3] = [
        ("qwen", &[5, 4, 3, 2, 1], "23.2 42.8 58.8 73.5 87.2", "10.60 22.70 36.78 53.38 73.47"),
        ("gemma", &[5, 4, 3, 2, 1], "20.3 39.4 56.1 70.3 84.2", "9.80 20.84 33.56 48.86 68.85"),
        ("gptoss", &[1], "54.4", "42.32"),
    ];
    let joined = |cells: Vec<String>| cells.join(" ");
    for ((name, reads, mass), (_, keep, top_reads, top_mass)) in cold.into_iter().zip(top) {
        let routed = real(&folder, name);
        for (rules, reads, mass) in [
            ([0.25, 0.5, 0.75, 1.0].map(|threshold| Rule::Cold { threshold }).to_vec(), reads, mass),
            (keep.iter().map(|&j| Rule::KeepTop(j)).collect(), top_reads, top_mass),
        ] {
            let seen: Vec<Static> = rules.iter().map(|&rule| decode(&routed, rule)).collect();
            assert_eq!(joined(seen.iter().map(|s| format!("{:.1}", 100.0 * s.avoided())).collect()), reads, "{name}");
            assert_eq!(joined(seen.iter().map(|s| format!("{:.2}", 100.0 * s.lost())).collect()), mass, "{name}");
            for s in &seen {
                assert_eq!(s.surviving.iter().sum::<u64>(), s.rows);
                assert_eq!(s.surviving[0], 0, "the heaviest is pinned");
                let survivors: u64 = s.surviving.iter().zip(0..).map(|(rows, n)| rows * n).sum();
                assert_eq!((survivors + s.dropped, s.unknown), (s.picks, 0));
            }
        }
    }
}

/// A prefill reads an expert once a pass: what one of its tokens still uses is read.
#[test]
fn a_prefill_of_the_real_traces() {
    let Some(folder) = shared("static drop replay of prefills") else { return };
    for name in ["qwen", "gemma", "gptoss"] {
        let routed = real(&folder, name);
        let of = |rule| drop_static(&routed, rule, Phase::Prefill, Weights::Recorded).unwrap();
        let (none, some, all) =
            (of(Rule::Cold { threshold: 0.0 }), of(Rule::Cold { threshold: 1.0 }), of(Rule::KeepTop(1)));
        assert_eq!((none.avoided_bytes, none.dropped), (0, 0), "{name}");
        assert!(none.miss_bytes > 0 && some.avoided_bytes > 0, "{name}");
        // By bytes, tokens share reads: less is avoided than the share of dropped misses.
        assert!(some.avoided() < some.dropped as f64 / some.misses as f64, "{name}");
        assert!(some.avoided_bytes <= all.avoided_bytes && all.avoided_bytes < all.miss_bytes, "{name}");
    }
}

const HEADING: &str = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n";

fn csv(rows: &str) -> Result<Routed> {
    Routed::from_csv(&mut Cursor::new(format!("# n_layer=1 n_expert=9 n_expert_used=3\n{HEADING}{rows}")))
}

#[test]
fn weights_that_are_not_known_are_counted() {
    let rows = "0,1,0,0,0,1,0.6,0,100\n0,1,0,0,1,2,0.3,0,100\n0,1,0,0,2,3,0.1,0,100\n\
                0,1,1,0,0,4,nan,0,100\n0,1,1,0,1,5,0.3,0,100\n0,1,1,0,2,6,0.1,0,100\n";
    let routed = csv(rows).unwrap();
    for (rule, avoided) in [(Rule::Cold { threshold: 1.0 }, 200), (Rule::KeepTop(2), 100)] {
        let s = decode(&routed, rule);
        assert_eq!((s.rows, s.unknown, s.miss_bytes, s.avoided_bytes), (2, 1, 600, avoided), "{rule:?}");
        assert_eq!(s.surviving[3], 1, "the unknown row runs whole");
        assert!((s.mass - 1.0).abs() < 1e-6, "and has no mass");
    }
    for weights in [Weights::Recorded, Weights::OfScores] {
        let settings = DropSettings { capacity: 3, k: 3, threshold: 9.0, weights, ..DropSettings::default() };
        let (all, _) = drop_loop(&routed, &settings, &[]).unwrap();
        assert_eq!((all.rows, all.unknown, all.dropped, all.misses), (2, 1, 0, 6), "{weights:?}");
    }
}

#[test]
fn a_prefetched_expert_is_no_miss() {
    let routed = csv("0,1,0,0,0,1,0.6,1,0\n0,1,0,0,1,2,0.3,2,100\n0,1,0,0,2,3,0.1,0,70\n").unwrap();
    let s = decode(&routed, Rule::Cold { threshold: 1.0 });
    assert_eq!((s.misses, s.prefetched, s.miss_bytes, s.avoided_bytes, s.dropped), (1, 1, 70, 70, 1));
    // A prefill of two tokens: expert 3 is light for both, expert 2 for one only.
    let rows = "0,0,0,0,0,1,0.8,0,10\n0,0,0,0,1,2,0.1,0,20\n0,0,0,0,2,3,0.1,0,40\n\
                0,0,1,0,0,2,0.8,0,0\n0,0,1,0,1,4,0.1,1,0\n0,0,1,0,2,3,0.1,0,0\n";
    let s = drop_static(&csv(rows).unwrap(), Rule::Cold { threshold: 1.0 }, Phase::Prefill, Weights::Recorded).unwrap();
    assert_eq!((s.miss_bytes, s.avoided_bytes, s.dropped), (70, 40, 3));
}

#[test]
fn what_cannot_be_is_refused() {
    let routed = csv("0,1,0,0,0,1,0.6,1,0\n0,1,0,0,1,2,0.3,2,100\n0,1,0,0,2,3,0.1,0,70\n").unwrap();
    for rule in [Rule::KeepTop(0), Rule::KeepTop(4), Rule::Cold { threshold: f64::NAN }, Rule::Cold { threshold: -1.0 }]
    {
        let error = drop_static(&routed, rule, Phase::Decode, Weights::Recorded).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Argument, "{rule:?}");
    }
    let none = drop_static(&routed, Rule::KeepTop(1), Phase::Prefill, Weights::Recorded).unwrap_err();
    assert!(none.kind == ErrorKind::Argument && none.detail.contains("prefill"), "{none}");
    let good = DropSettings { capacity: 3, k: 3, ..DropSettings::default() };
    drop_loop(&routed, &good, &[0.5]).unwrap();
    let bad = [
        DropSettings { capacity: 2, ..good.clone() },
        DropSettings { k: 4, capacity: 9, ..good.clone() },
        DropSettings { k: 0, ..good.clone() },
        DropSettings { warmup: 1, ..good.clone() },
        DropSettings { phase: Phase::Prefill, ..good.clone() },
        DropSettings { threshold: f64::INFINITY, ..good.clone() },
        DropSettings { moce: Moce { lambda: -0.1, ..Moce::default() }, ..good.clone() },
        DropSettings { policy: hotset::cache::Policy::BeladyMin, ..good },
    ];
    for settings in bad {
        assert_eq!(drop_loop(&routed, &settings, &[]).unwrap_err().kind, ErrorKind::Argument, "{settings:?}");
    }
    let error = csv("0,1,0,0,0,1,-0.6,1,0\n").unwrap_err();
    assert!(error.detail.contains("line 3, column 13: weight"), "{error}");
}

#[test]
fn metrics_at_fault_are_named() {
    let good = r#"{"phase":"decode","tokens":1,"read_bytes":8,"hits":1,"misses":2,"dropped":0,"swapped":0,"mass_dropped":0,"mass_swapped":0,"pass_through_rows":0,"slots":4,"lambda":0,"drop":0.5}"#;
    let read = |text: String| observed(&mut Cursor::new(text));
    assert_eq!(read(format!("{good}\n{good}\n")).unwrap()[0].misses, 4);
    for (from, to, says) in [
        ("\"misses\":2", "\"misses\":-2", "line 2: misses: a whole number wanted, -2 found"),
        ("\"misses\":2,", "", "line 2: no misses"),
        ("decode", "idle", "line 2: phase"),
        ("\"drop\":0.5", "\"drop\":null", "line 2: drop: a number of 0 or more wanted, null found"),
        ("}", "", "line 2, column"),
    ] {
        let error = read(format!("{good}\n{}\n", good.replace(from, to))).unwrap_err();
        assert!(error.detail.contains(says), "{error} does not say {says}");
    }
    assert!(read("a,b\n1\n".into()).unwrap_err().detail.contains("line 2: 2 fields wanted"));
    assert!(read(String::new()).is_err());
}

const LAYERS: usize = 2;
const EXPERTS: usize = 24;
const K: usize = 4;

/// Scores with drift, all of them numbers of f16: what a trace holds is what the router said.
fn scores(token: usize, layer: usize) -> Vec<f32> {
    let noise = |x: u64| {
        let mut z = x.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((z ^ (z >> 27)) >> 40) as f32 / (1u64 << 24) as f32
    };
    let score = |e: usize| {
        let slow = noise((e + 100 * layer + 7000 * (token / 12)) as u64);
        3.0 * slow + 2.0 * noise((e + 1000 * layer + 99_991 * token) as u64)
    };
    (0..EXPERTS).map(|e| f16::from_f32(score(e)).to_f32()).collect()
}

/// Tokens `first..first + n` in one layer, with weights that are a softmax over the chosen: misses, hits, dropped, swapped, mass dropped.
fn live(hook: &mut Hook, layer: usize, first: usize, n: usize) -> ([u64; 4], f64) {
    let mut z: Vec<f32> = (first..first + n).flat_map(|t| scores(t, layer)).collect();
    let top = |z: &[f32]| {
        let mut ids: Vec<i32> = (0..EXPERTS as i32).collect();
        ids.sort_by(|&a, &b| z[b as usize].total_cmp(&z[a as usize]));
        ids.truncate(K);
        ids
    };
    let mut ids: Vec<i32> = z.chunks(EXPERTS).flat_map(top).collect();
    let batch = Batch {
        block: layer as u32,
        n_tokens: n,
        n_experts: EXPERTS as u32,
        k: K as u32,
        phase: if n > 1 { Phase::Prefill } else { Phase::Decode },
        space: ScoreSpace::Logits,
        routed: true,
        normalised: true,
        tail: false,
        position: -1,
    };
    let rows = Adjacent { data: &mut z, width: EXPERTS };
    hook.select(&batch, &rows, &mut Adjacent { data: &mut ids, width: K }).unwrap();
    let mut weights = vec![0.0; n * K];
    for ((ids, z), w) in ids.chunks(K).zip(z.chunks(EXPERTS)).zip(weights.chunks_mut(K)) {
        gate(z, ids, ScoreSpace::Logits, w);
    }
    let mut w = Adjacent { data: &mut weights, width: K };
    let seen = hook.admit(&batch, &mut Adjacent { data: &mut ids, width: K }, Some(&mut w)).unwrap();
    hook.store().wait_layer(layer).unwrap();
    ([seen.misses, seen.hits, seen.dropped, seen.swapped].map(u64::from), seen.mass_dropped)
}

/// A run with dropping on, replayed from its trace with the same settings, drops and misses what it did, layer by layer.
#[test]
fn the_closed_loop_is_the_live_run() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let model = dir.path().join("m.gguf");
    let params = TinyParams { layers: LAYERS as u32, experts: EXPERTS as u32, k: K as u32, ..TinyParams::default() };
    tiny::write(&params, &model, &mut |_| ()).unwrap();
    for (i, (lambda, threshold, prefill, record)) in [
        (0.0, 0.75, 0, true),
        (0.0, 1.0, 2, true),
        (0.2, 0.75, 0, true),
        (0.2, 1.0, 40, true),
        (0.2, 1.0, 2, false),
        (0.0, 0.0, 0, true),
    ]
    .into_iter()
    .enumerate()
    {
        let path = dir.path().join(format!("{i}.q4rt"));
        let moce = Moce { lambda, top_j: 2, ..Moce::default() };
        let drop = Drop { threshold, ..Drop::default() };
        let mut config = Config { slots: 9, dense: Dense::Leave, lanes: 2, top_m: 12, moce, drop, ..Config::default() };
        (config.trace, config.queue_tokens, config.prefill.record) = (Some(path.clone()), 8192, record);
        let metrics = dir.path().join(format!("{i}.{}", if record { "csv" } else { "jsonl" }));
        config.metrics = Some(metrics.clone());
        let mut hook = Hook::open(&model, config).unwrap();
        let (mut per_layer, mut mass) = ([[0; 4]; LAYERS], 0.0);
        if prefill > 0 {
            (0..LAYERS).for_each(|layer| {
                live(&mut hook, layer, 0, prefill);
            });
        }
        for token in prefill..prefill + 200 {
            for (layer, sums) in per_layer.iter_mut().enumerate() {
                let (seen, lost) = live(&mut hook, layer, token, 1);
                sums.iter_mut().zip(seen).for_each(|(sum, n)| *sum += n);
                mass += lost;
            }
        }
        hook.close().unwrap();
        let (trace, sidecar) = (Trace::open(&path).unwrap(), Sidecar::read_beside(&path).unwrap().unwrap());
        let routed = Routed::from_trace(&trace, Some(&sidecar), None).unwrap();
        let warm = !record;
        assert_eq!(warm, !routed.layers[0].resident.is_empty());
        let settings = DropSettings { capacity: 9, k: K, moce, threshold, warm, ..DropSettings::default() };
        let (all, _) = drop_loop(&routed, &settings, &[]).unwrap();
        let at = format!("lambda {lambda} F {threshold} prefill {prefill}");
        assert_eq!(all.misses_per_layer, per_layer.map(|l| l[0]), "{at}");
        assert_eq!(all.dropped_per_layer, per_layer.map(|l| l[2]), "{at}");
        let sum = |i: usize| per_layer.iter().map(|l| l[i]).sum::<u64>();
        assert_eq!((all.rows, all.hits, all.swapped), (400, sum(1), sum(3)), "{at}");
        // The run's own metrics log says the same.
        let seen = observed(&mut BufReader::new(File::open(&metrics).unwrap())).unwrap();
        let seen = seen.iter().find(|o| o.phase == Phase::Decode).unwrap();
        assert_eq!((seen.slots, seen.lambda, seen.drop, seen.tokens), (9, lambda, threshold, 200), "{at}");
        assert_eq!((seen.hits, seen.misses, seen.dropped, seen.swapped), (sum(1), sum(0), sum(2), sum(3)), "{at}");
        assert!((seen.mass_dropped - all.mass_dropped).abs() < 1e-6 && seen.mass_lost(LAYERS) < 1.0, "{at}");
        assert!((all.mass_dropped - mass).abs() < 1e-9, "{at}: {} {mass}", all.mass_dropped);
        assert_eq!((threshold > 0.0, lambda > 0.0), (sum(2) > 20, sum(3) > 20), "{at}");
    }
}

/// A trace of one layer, candidates by falling score.
fn trace(rows: &[Vec<(u16, f32)>], n_experts: u16, m: usize) -> Trace {
    let header = Header { n_layers: 1, n_experts, top_m: m as u16, n_tokens: rows.len() as u32 };
    let mut bytes = Vec::new();
    q4rt::write_header(&mut bytes, &header).unwrap();
    for row in rows {
        let (ids, z): (Vec<u16>, Vec<f16>) = row.iter().take(m).map(|&(id, z)| (id, f16::from_f32(z))).unzip();
        let at = bytes.len();
        bytes.resize(at + header.record_bytes(), 0);
        q4rt::encode_record(&ids, &z, &mut bytes[at..]).unwrap();
    }
    Trace::from_bytes(bytes).unwrap()
}

fn rows(n_experts: usize) -> impl Strategy<Value = Vec<Vec<(u16, f32)>>> {
    let row = prop::collection::vec(-4f32..4.0, n_experts).prop_map(|z| {
        let mut row: Vec<(u16, f32)> = (0..).zip(z).collect();
        row.sort_by(|a, b| b.1.total_cmp(&a.1));
        row
    });
    prop::collection::vec(row, 1..60)
}

proptest! {
    /// A file with some bytes changed: an error, or a run that can be replayed.
    #[test]
    fn any_bytes(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6), f in 0f64..3.0) {
        let mut text = format!("# n_layer=2 n_expert=9 n_expert_used=2\n{HEADING}");
        for (phase, step, layer) in [(0, 0, 0), (0, 1, 0), (0, 1, 1), (1, 2, 0), (1, 2, 1), (1, 3, 0), (1, 3, 1)] {
            let at = format!("0,{phase},{step},{layer}");
            text += &format!("{at},0,{step},0.75,1,100\n{at},1,8,0.25,0,100\n");
        }
        let mut bytes = text.into_bytes();
        for (at, byte) in &changes {
            let at = at.index(bytes.len());
            bytes[at] = if byte & 1 == 0 { b"0123456789,.\nan#=-"[usize::from(*byte) % 18] } else { *byte };
        }
        let routed = Routed::from_csv(&mut Cursor::new(&bytes));
        prop_assert!(routed.is_ok() || !changes.is_empty());
        if let Ok(routed) = routed {
            for phase in [Phase::Decode, Phase::Prefill] {
                let _ = drop_static(&routed, Rule::Cold { threshold: f }, phase, Weights::Recorded);
                let moce = Moce { lambda: 0.2, ..Moce::default() };
                let settings = DropSettings { capacity: 3, k: 1, moce, phase, threshold: f, ..DropSettings::default() };
                for weights in [Weights::Recorded, Weights::OfScores] {
                    let _ = drop_loop(&routed, &DropSettings { weights, ..settings.clone() }, &[f]);
                }
            }
        }
    }

    /// F = 0 is the plain replay, whatever lambda; and what a threshold would have dropped of it is a share of its reads.
    #[test]
    fn without_dropping_it_is_the_plain_replay(rows in rows(16), capacity in 3usize..15, lambda in prop::sample::select(vec![0.0, 0.1, 0.4]), f in 0f64..3.0, warmup in any::<prop::sample::Index>()) {
        let warmup = warmup.index(rows.len());
        let trace = trace(&rows, 16, 8);
        let mut routed = Routed::from_trace(&trace, None, Some(3)).unwrap();
        routed.assume_expert_bytes(10);
        let moce = Moce { lambda, top_j: 1, ..Moce::default() };
        let settings = DropSettings { capacity, k: 3, moce, warmup, ..DropSettings::default() };
        let (all, unchanged) = drop_loop(&routed, &settings, &[0.0, f]).unwrap();
        let plain = Settings { capacity, k: 3, moce, warmup, ..Settings::default() };
        let wanted = Replay::new(&trace, None, None).all(&[plain]).unwrap()[0][0];
        prop_assert_eq!((all.misses, all.swapped, all.dropped), (wanted.misses, wanted.swapped, 0));
        prop_assert_eq!(all.hits + all.misses, wanted.picks);
        prop_assert_eq!(unchanged[0].avoided_bytes, 0);
        prop_assert_eq!(unchanged[1].miss_bytes, all.bytes);
        prop_assert!((0.0..=1.0).contains(&unchanged[1].avoided()));
    }

    /// Whatever lambda, F and k: what is lost is a share, and one that the parts make up.
    #[test]
    fn mass_lost_is_a_share(rows in rows(12), k in 1usize..4, lambda in 0f64..0.6, f in 0f64..3.0) {
        let mut routed = Routed::from_trace(&trace(&rows, 12, 8), None, Some(3)).unwrap();
        routed.assume_expert_bytes(10);
        let moce = Moce { lambda, top_j: 1, ..Moce::default() };
        let settings = DropSettings { capacity: 5, k, moce, threshold: f, ..DropSettings::default() };
        let (all, _) = drop_loop(&routed, &settings, &[]).unwrap();
        let parts = [all.mass_cut, all.mass_swapped, all.mass_dropped];
        prop_assert!((0.0..1.0).contains(&all.mass_lost()));
        prop_assert!(parts.iter().all(|&part| part >= 0.0));
        prop_assert!(all.lost <= parts.iter().sum::<f64>() + 1e-9);
        prop_assert_eq!(k == 3, all.mass_cut == 0.0);
        prop_assert_eq!(all.bytes, 10 * all.misses);
    }

    /// Under LRU no threshold reads more than none does, and every pick is a hit, a miss or dropped.
    #[test]
    fn reads_avoided_are_not_negative(rows in rows(12), capacity in 3usize..11, f in 0f64..3.0) {
        let mut routed = Routed::from_trace(&trace(&rows, 12, 6), None, Some(3)).unwrap();
        routed.assume_expert_bytes(10);
        let settings = DropSettings { capacity, k: 3, ..DropSettings::default() };
        let (without, _) = drop_loop(&routed, &settings, &[]).unwrap();
        let (with, _) = drop_loop(&routed, &DropSettings { threshold: f, ..settings }, &[]).unwrap();
        prop_assert_eq!(with.hits + with.misses + with.dropped, 3 * rows.len() as u64);
        prop_assert!(with.avoided(&without) >= 0.0, "{:?} {:?}", with, without);
        prop_assert!((0.0..1.0).contains(&with.mass_lost()));
    }
}

/// The command line on a small file: its JSON says what the library says, a fault names file and line, and what cannot be exits with 2.
#[cfg(feature = "cli")]
#[test]
fn the_command() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("r.csv");
    let row = |step: u32, experts: [u32; 3]| {
        let [a, b, c] = experts;
        format!("0,1,{step},0,0,{a},0.6,0,100\n0,1,{step},0,1,{b},0.3,0,100\n0,1,{step},0,2,{c},0.1,{},100\n", step % 2)
    };
    let text: String = (0..20).map(|step| row(step, [step % 5, 5 + step % 2, 7 + step % 3])).collect();
    let text = format!("# n_layer=1 n_expert=10 n_expert_used=3\n{HEADING}{text}");
    std::fs::write(&path, &text).unwrap();
    let run = |args: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_hotset"));
        let out = command.arg("drop-replay").args(args).output().unwrap();
        (out.status.code(), String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap())
    };
    let file = path.to_str().unwrap();
    let (code, out, _) =
        run(&[file, "--f", "0.5,1", "--cache-cap", "4", "--k-used", "3,2", "--lambda", "0,0.1", "--json"]);
    assert_eq!(code, Some(0));
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    let routed = Routed::from_csv(&mut Cursor::new(&text)).unwrap();
    let s = decode(&routed, Rule::Cold { threshold: 1.0 });
    assert_eq!(json["runs"][0]["static"][1]["avoided_bytes"], s.avoided_bytes);
    assert_eq!(json["runs"][0]["static"].as_array().unwrap().len(), 4, "two F, keep-top 2 and 1");
    let loops = json["runs"][0]["closed_loop"].as_array().unwrap();
    assert_eq!(loops.len(), 2 * 2 * 3);
    let settings = DropSettings { capacity: 4, k: 3, threshold: 1.0, ..DropSettings::default() };
    let (all, _) = drop_loop(&routed, &settings, &[]).unwrap();
    let same = |row: &&serde_json::Value| row["k"] == 3 && row["lambda"] == 0.0 && row["f"] == 1.0;
    assert_eq!(loops.iter().find(same).unwrap()["misses"], all.misses);
    assert!(loops.iter().any(|row| row["front"] == true));

    let (code, out, _) = run(&[file, "--keep-top", "1", "--cache-cap", "4"]);
    assert_eq!(code, Some(0));
    assert!(out.contains("keep top 1") && out.contains("closed loop, lru") && out.contains("F 0.75"), "{out}");
    assert_eq!(run(&[file, "--cache-cap", "2"]).0, Some(2), "fewer slots than k");
    let metrics = dir.path().join("m.csv");
    let names = "phase,tokens,read_bytes,hits,misses,dropped,swapped,mass_dropped,mass_swapped,pass_through_rows,slots,lambda,drop";
    std::fs::write(&metrics, format!("{names}\ndecode,2,10,1,2,3,0,0.5,0,0,4,0,1\n")).unwrap();
    let (code, out, _) = run(&[file, "--metrics", metrics.to_str().unwrap()]);
    assert!(code == Some(0) && out.contains("observed") && out.contains("25.00 %"), "{out}");
    assert_eq!(run(&[file, file, "--metrics", metrics.to_str().unwrap()]).0, Some(2));
    assert_eq!(run(&[file, "--f", "nan"]).0, Some(2));
    std::fs::write(&path, text.replace("0.3,0,100", "0.3,5,100")).unwrap();
    let (code, _, err) = run(&[file]);
    assert_eq!(code, Some(1));
    assert!(err.contains("r.csv") && err.contains("line 4, column 17: residency"), "{err}");
}
