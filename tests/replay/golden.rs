//! The reference's numbers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use hotset::cache::{LayerCache, NextUses, Policy, Spec};
use hotset::replay::{KeepMap, Replay, Settings};
use hotset::route::Moce;
use hotset::trace::Trace;
use serde_json::Value;

use crate::model::{self, Row};
use crate::shared::shared;
use crate::{replay, settings, trace_of};

pub fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn number(v: &Value, key: &str) -> usize {
    v[key].as_u64().unwrap_or_else(|| panic!("{key} in {v}")) as usize
}

#[test]
fn every_layer_of_golden_small() {
    let golden = json(&data("golden_small.json"));
    let trace = Trace::open(data("small.q4rt")).unwrap();
    let keep = KeepMap::open(data("small.keep_map.json"), &trace).unwrap();
    assert_eq!(trace.n_tokens(), number(&golden, "n_tokens"));
    let rows = golden["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 276);
    for with_keep in [false, true] {
        let rows: Vec<&Value> = rows.iter().filter(|r| r["keep_map"].as_bool().unwrap() == with_keep).collect();
        let all: Vec<Settings> = rows
            .iter()
            .map(|row| Settings {
                near_pick_n: number(&golden, "near_pick_n"),
                decay: golden["ema_decay"].as_f64().unwrap(),
                warmup: number(&golden, "warmup_tokens"),
                ..settings(
                    Policy::by_name(row["policy"].as_str().unwrap()).unwrap(),
                    number(row, "cache_cap"),
                    number(&golden, "k_used"),
                    row["lambda_moce"].as_f64().unwrap(),
                    number(row, "protect_top_j") as u32,
                )
            })
            .collect();
        let by_layer = Replay::new(&trace, with_keep.then_some(&keep), None).all(&all).unwrap();
        for (i, row) in rows.iter().enumerate() {
            let misses: Vec<u64> = by_layer.iter().map(|layer| layer[i].misses).collect();
            let wanted: Vec<u64> =
                row["misses_per_layer"].as_array().unwrap().iter().map(|m| m.as_u64().unwrap()).collect();
            assert_eq!(misses, wanted, "{row}");
        }
    }
}

/// `# key=value ...` lines, then `turn,phase,step,layer,slot,expert,weight,...`: decode rows by layer and token, score ln(weight).
fn route_csv(text: &str) -> (Vec<Vec<Row>>, usize) {
    let fact = |key: &str| {
        let at = text.find(key).unwrap() + key.len();
        text[at..].split_whitespace().next().unwrap().parse::<usize>().unwrap()
    };
    let mut layers: BTreeMap<usize, BTreeMap<(u32, u32), Row>> = BTreeMap::new();
    for line in text.lines().filter(|l| l.starts_with(|c: char| c.is_ascii_digit())) {
        let f: Vec<&str> = line.split(',').collect();
        if f[1] == "1" {
            let token = (f[0].parse().unwrap(), f[2].parse().unwrap());
            let row = layers.entry(f[3].parse().unwrap()).or_default().entry(token).or_default();
            row.push((f[5].parse().unwrap(), f[6].parse::<f64>().unwrap().ln()));
        }
    }
    (layers.into_values().map(|l| l.into_values().collect()).collect(), fact("n_expert="))
}

/// `{"tok": n, "layers": [[ids]]}` a line, without scores.
fn jsonl(text: &str) -> Vec<Vec<Row>> {
    let mut layers: Vec<Vec<Row>> = Vec::new();
    for line in text.lines() {
        let token: Value = serde_json::from_str(line).unwrap();
        let of_token = token["layers"].as_array().unwrap();
        layers.resize(of_token.len(), Vec::new());
        for (layer, ids) in layers.iter_mut().zip(of_token) {
            layer.push(ids.as_array().unwrap().iter().map(|id| (id.as_u64().unwrap() as u16, 0.0)).collect());
        }
    }
    layers
}

#[test]
fn real_traces() {
    let Some(golden) = shared("reference/golden_replay.json") else { return };
    let (mut compared, mut skipped) = (0, 0);
    for (name, golden) in json(&golden).as_object().unwrap() {
        let csv = format!("traces/{name}.route.csv");
        let lines = format!("traces/{name}.jsonl");
        let scored = !matches!(name.as_str(), "kimi" | "olmoe");
        let Some(path) = shared(if scored { &csv } else { &lines }) else {
            skipped += 1;
            continue;
        };
        let text = std::fs::read_to_string(path).unwrap();
        let n_experts = number(golden, "n_experts");
        let layers = if scored {
            let (layers, n) = route_csv(&text);
            assert_eq!(n, n_experts);
            layers
        } else {
            jsonl(&text)
        };
        let trace = trace_of(&layers, n_experts);
        let shape = [trace.n_layers(), trace.top_m(), trace.n_tokens()];
        assert_eq!(shape, ["n_layers", "top_m", "n_tokens"].map(|key| number(golden, key)), "{name}");
        for (capacity, policies) in golden["misses"].as_object().unwrap() {
            for (policy, misses) in policies.as_object().unwrap() {
                let policy = Policy::by_name(policy).unwrap();
                let s = settings(policy, capacity.parse().unwrap(), number(golden, "k_used"), 0.0, 3);
                let s = Settings { warmup: 16, ..s };
                let total: u64 = replay(&trace, None, &s).iter().map(|l| l.misses).sum();
                assert_eq!(total, misses.as_u64().unwrap(), "{name} {capacity} {policy:?}");
                compared += 1;
            }
        }
    }
    eprintln!("real traces: {compared} totals compared, {skipped} traces skipped");
}

/// The trace of the reference's self-test, written by its own generator; its scores are no f16 numbers, but only order counts at lambda 0.
const SELF_TEST: &str = r#"
import sys, random, math, json
rng = random.Random(42)
weights = [1.0 / ((i + 1) ** 0.85) for i in range(64)]
hot = [0, 1, 2, 3, 4]
for t in range(400):
    if t % 20 == 0:
        hot = rng.sample(range(64), 6)
    row = sorted(((math.log(weights[e]) + rng.gauss(0, 0.8) + (1.5 if e in hot else 0.0), e) for e in range(64)), reverse=True)
    print(json.dumps([[e, z] for z, e in row[:24]]))
"#;

/// Misses after 40 tokens of `cache` and `route` on scores that no trace has rounded: 64 experts, 24 slots, k 6, J 3.
fn unrounded(rows: &[Row], policy: Policy, lambda: f64) -> u64 {
    const K: usize = 6;
    let own: Vec<Vec<u16>> = rows.iter().map(|row| row[..K].iter().map(|c| c.0).collect()).collect();
    let next_uses = policy.needs_future().then(|| Arc::new(NextUses::new(64, own.iter().map(Vec::as_slice))));
    let mut cache = LayerCache::new(policy.build(&Spec { next_uses, ..Spec::new(64) }), 64, 24);
    let moce = Moce { lambda, top_j: 3, ..Moce::default() };
    let mut misses = 0;
    for (token, row) in rows.iter().enumerate() {
        let (ids, scores): (Vec<u16>, Vec<f64>) = row.iter().copied().unzip();
        let narrow: Vec<f32> = scores.iter().map(|&z| z as f32).collect();
        let mut ranks: Vec<u16> = (0..K as u16).collect();
        if let Some(bonus) = moce.bonus(&scores, K, None) {
            moce.rerank(&ids, &scores, bonus, |e| cache.is_resident(e), &mut [0.0; K], &mut ranks);
        }
        let chosen: Vec<u16> = ranks.iter().map(|&rank| ids[rank as usize]).collect();
        let missed = cache.token(&chosen, Some((&ids, &narrow, K))).unwrap();
        misses += if token >= 40 { u64::from(missed) } else { 0 };
    }
    misses
}

#[test]
fn the_references_self_test() {
    let Ok(made) = Command::new("python3").args(["-c", SELF_TEST]).output() else {
        eprintln!("skipped: no python3");
        return;
    };
    assert!(made.status.success(), "{made:?}");
    let text = String::from_utf8(made.stdout).unwrap();
    let rows: Vec<Row> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let trace = trace_of(std::slice::from_ref(&rows), 64);
    let wanted = [205, 233, 236, 222, 226, 110];
    for (&policy, misses) in Policy::REFERENCE.iter().zip(wanted) {
        let s = Settings { warmup: 40, ..settings(policy, 24, 6, 0.0, 3) };
        assert_eq!(model::misses(&rows, 64, &s), misses, "{policy:?}");
        let found = replay(&trace, None, &s)[0].misses;
        assert_eq!(unrounded(&rows, policy, 0.0), misses, "{policy:?}, with the scores as they are");
        // Differences of scores are credited: f16 makes them others.
        let slack = if policy == Policy::InverseRouterEma { 3 } else { 0 };
        assert!(found.abs_diff(misses) <= slack, "{policy:?}: {found}, {misses} wanted");
    }
    let s = Settings { warmup: 40, ..settings(Policy::NearPickEma, 24, 6, 0.15, 3) };
    assert_eq!(model::misses(&rows, 64, &s), 155);
    assert_eq!(unrounded(&rows, Policy::NearPickEma, 0.15), 155, "with the scores as they are");
    assert!(replay(&trace, None, &s)[0].misses.abs_diff(155) <= 3);
}
