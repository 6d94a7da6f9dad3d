//! Layer-steps a second of a replay, one thread: one layer-step is one token in one layer.
//!
//! The trace is made in memory, of the target's shape: 48 layers of 512 experts, 64 candidates, k 10, 113 slots. Its popularity, drifting
//! topics and noise give LRU a hit rate near the published one, so that as many victims are chosen as in a real trace.
//!
//! `cargo bench --bench replay`; HOTSET_BENCH_TOKENS (2048) tokens. Gathering the layer from the trace is part of what is measured in `one`, as in
//! `hotset replay --policies X`; in `sweep` the settings share it.

use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group};
use half::f16;
use hotset::cache::Policy;
use hotset::replay::{Column, Replay, Settings};
use hotset::route::Moce;
use hotset::trace::{Header, Trace, q4rt};

const LAYERS: u16 = 48;
const EXPERTS: u16 = 512;
const TOP_M: u16 = 64;

/// Scores: popularity + topics that change every 256 tokens + a part that stays from token to token + noise.
fn bytes(tokens: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(1);
    let mut normal = move || (0..4).map(|_| rng.f32() - 0.5).sum::<f32>() * 1.73;
    let header = Header { n_layers: LAYERS, n_experts: EXPERTS, top_m: TOP_M, n_tokens: 0 };
    let mut bytes = Vec::with_capacity(16 + tokens * header.token_bytes() as usize);
    q4rt::write_header(&mut bytes, &header).unwrap();
    let n = usize::from(LAYERS) * usize::from(EXPERTS);
    let mut fill = |scale: f32| (0..n).map(|_| normal() * scale).collect::<Vec<f32>>();
    let (popular, mut topic, mut stays) = (fill(0.6), fill(1.0), fill(1.0));
    let mut record = vec![0; header.record_bytes()];
    for token in 0..tokens {
        if token % 256 == 0 {
            topic = fill(1.0);
        }
        let noise = fill(1.0);
        stays.iter_mut().zip(&noise).for_each(|(s, z)| *s = 0.88 * *s + 0.475 * z);
        let noise = fill(0.6);
        for layer in 0..usize::from(LAYERS) {
            let at = layer * usize::from(EXPERTS)..(layer + 1) * usize::from(EXPERTS);
            let mut row: Vec<(f16, u16)> = at
                .enumerate()
                .map(|(e, i)| (f16::from_f32(popular[i] + topic[i] + stays[i] + noise[i]), e as u16))
                .collect();
            row.select_nth_unstable_by(usize::from(TOP_M), |a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            row.truncate(TOP_M.into());
            row.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            let (scores, ids): (Vec<f16>, Vec<u16>) = row.into_iter().unzip();
            q4rt::encode_record(&ids, &scores, &mut record).unwrap();
            bytes.extend_from_slice(&record);
        }
    }
    bytes
}

fn settings(policy: Policy, lambda: f64) -> Settings {
    Settings { policy, moce: Moce { lambda, ..Moce::default() }, ..Settings::default() }
}

fn replay(c: &mut Criterion) {
    let tokens = std::env::var("HOTSET_BENCH_TOKENS").ok().and_then(|t| t.parse().ok()).unwrap_or(2048);
    let trace = Trace::from_bytes(bytes(tokens)).unwrap();
    let replay = Replay::new(&trace, None, None);
    let steps = (tokens * trace.n_layers()) as u64;
    let mut group = c.benchmark_group("replay, one");
    group.sample_size(10).measurement_time(Duration::from_secs(3)).warm_up_time(Duration::from_secs(1));
    group.throughput(Throughput::Elements(steps));
    for &policy in Policy::ALL {
        for lambda in [0.0, 0.12] {
            if policy.needs_future() && lambda > 0.0 {
                continue;
            }
            let s = [settings(policy, lambda)];
            let layers = replay.all(&s).unwrap();
            let misses: f64 = layers.iter().map(|l| l[0].misses_per_token()).sum();
            let name = if lambda > 0.0 { format!("{} + {lambda}", policy.name()) } else { policy.name().to_owned() };
            group.bench_function(format!("{name} ({misses:.1} misses/token)"), |b| b.iter(|| replay.all(&s).unwrap()));
        }
    }
    group.finish();
    let mut all: Vec<Settings> = Policy::REFERENCE.iter().map(|&p| settings(p, 0.0)).collect();
    for policy in [Policy::Lru, Policy::NearPickEma, Policy::InverseRouterEma] {
        for lambda in [0.05, 0.09, 0.12] {
            all.extend(
                [2, 3].map(|top_j| Settings {
                    moce: Moce { lambda, top_j, ..Moce::default() },
                    ..settings(policy, lambda)
                }),
            );
        }
    }
    let mut group = c.benchmark_group("replay, sweep");
    group.sample_size(10).measurement_time(Duration::from_secs(3)).warm_up_time(Duration::from_secs(1));
    group.throughput(Throughput::Elements(steps * all.len() as u64));
    group.bench_function("24 settings of one variant", |b| b.iter(|| replay.all(&all).unwrap()));
    group.throughput(Throughput::Elements(steps));
    let mut column = Column::default();
    group.bench_function("gathering alone", |b| {
        b.iter(|| (0..trace.n_layers()).for_each(|l| column.gather(&trace, l, 0..tokens, None, 10, true).unwrap()))
    });
    group.finish();
}

criterion_group!(benches, replay);

fn main() {
    // For measurements from outside: only write the trace.
    if let Some(path) = std::env::var_os("HOTSET_BENCH_WRITE") {
        let tokens = std::env::var("HOTSET_BENCH_TOKENS").ok().and_then(|t| t.parse().ok()).unwrap_or(8192);
        std::fs::write(path, bytes(tokens)).expect("the trace is written");
        return;
    }
    benches();
    Criterion::default().configure_from_args().final_summary();
}
