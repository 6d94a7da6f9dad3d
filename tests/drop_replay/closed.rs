//! The closed loop: against a live run, against the plain replay, and what must hold of any.

use std::fs::File;
use std::io::{BufReader, Cursor};

use half::f16;
use hotset::hook::{Adjacent, Batch, Config, Hook};
use hotset::model::tiny::{self, TinyParams};
use hotset::replay::{
    DropSettings, Replay, Routed, Rule, Settings, Weights, drop_loop, drop_loop_by_row, drop_static, observed,
};
use hotset::route::{Drop, Moce, ScoreSpace, gate};
use hotset::store::Dense;
use hotset::trace::{Header, Phase, Sidecar, Trace, q4rt};
use proptest::prelude::*;

use crate::HEADING;

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

/// Row by row the loop shows what it adds up.
#[test]
fn rows_add_up() {
    let mut csv = HEADING.to_owned();
    for step in 0..60 {
        for (slot, (expert, weight)) in [(step % 5, 0.5), (5 + step % 4, 0.3), (9 + step % 3, 0.2)].iter().enumerate() {
            csv += &format!("0,1,{step},0,{slot},{expert},{weight},0,100\n");
        }
    }
    let routed = Routed::from_csv(&mut std::io::Cursor::new(csv)).unwrap();
    let settings = DropSettings { capacity: 6, k: 3, threshold: 0.8, ..DropSettings::default() };
    let (mut fates, mut rows) = ([0u64; 4], Vec::new());
    let (all, _) = drop_loop_by_row(&routed, &settings, &[], &mut |ran| {
        ran.picks.iter().for_each(|(_, fate)| fates[*fate as usize] += 1);
        rows.push((ran.layer, ran.row, ran.phase));
    })
    .unwrap();
    assert_eq!(all, drop_loop(&routed, &settings, &[]).unwrap().0);
    assert_eq!(fates, [all.hits, all.misses, all.dropped, 0]);
    assert!(all.hits > 0 && all.misses > 0 && all.dropped > 0);
    assert_eq!(rows, (0..60).map(|row| (0, row, Phase::Decode)).collect::<Vec<_>>());
}
