//! `hotset replay`: what policies, capacities and reranking would have done to a trace.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use hotset::cache::Policy;
use hotset::replay::estimate::round;
use hotset::replay::{Estimate, KeepMap, LayerResult, Ranges, Replay, Settings, recorded};
use hotset::route::{Delta, Moce};
use hotset::trace::{Sidecar, Trace};
use serde_json::{Map, Value, json};

use crate::output;

/// Replay a trace under other eviction policies, cache sizes, reranking, or with experts pruned away
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  hotset replay run.q4rt                                    the reference's six policies, 113 slots, k from the sidecar or 10
  hotset replay run.q4rt --policies lru --lambda-moce 0.12  what reranking would save
  hotset replay run.q4rt --policies belady_bypass,random    beyond the reference
  hotset replay run.q4rt --keep-map keep_map.json --json
  hotset replay run.q4rt --as-recorded                      with the sidecar's settings: the misses of the run itself

A replay is a closed loop: what is resident decides what is reranked. The first --warmup tokens are not counted. With a keep map,
misses are those of what is left; picks of experts that are pruned away are the substituted slots, whose cost is not in the misses.")]
pub struct Args {
    /// A Q4RT trace
    trace: PathBuf,
    /// Comma-separated: lru, lfu, ema, near_pick_ema, inverse_router_ema, belady_min, belady_bypass, random. Default: the first six
    /// (with --lambda-moce the first five, since Belady is undefined there)
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    policies: Vec<String>,
    /// Slots of each layer
    #[arg(long, value_name = "N", default_value_t = 113)]
    cache_cap: usize,
    /// Experts that a token uses in a layer [default: the sidecar's, or 10]
    #[arg(long, value_name = "K")]
    k_used: Option<usize>,
    /// The bonus of resident experts, as a share of delta
    #[arg(long, value_name = "LAMBDA", default_value_t = 0.0, allow_negative_numbers = true)]
    lambda_moce: f64,
    /// So many of the router's own first experts have the bonus, too
    #[arg(long, value_name = "J", default_value_t = 3)]
    protect_top_j: u32,
    /// What the bonus is a share of
    #[arg(long, value_enum, default_value = "token_topk")]
    delta: DeltaName,
    /// What is left of a popularity after a token (ema, near_pick_ema, inverse_router_ema)
    #[arg(long, value_name = "DECAY", default_value_t = 0.99)]
    ema_decay: f64,
    /// Candidates that are credited (near_pick_ema)
    #[arg(long, value_name = "N", default_value_t = 48)]
    near_pick_n: usize,
    /// Experts that a pruned model keeps: {"0": [ids], ...}
    #[arg(long, value_name = "FILE")]
    keep_map: Option<PathBuf>,
    /// Tokens that are replayed before counting begins
    #[arg(long, value_name = "N", default_value_t = 64)]
    warmup: usize,
    /// Read what reranking displaced in the background, so that it can come back
    #[arg(long)]
    admit_displaced: bool,
    /// Seed of the policy random
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Replay with the settings, passes and residency that the sidecar tells of
    #[arg(long, conflicts_with_all = ["policies", "lambda_moce", "keep_map", "admit_displaced"])]
    as_recorded: bool,
    #[command(flatten)]
    cost: Cost,
    /// Misses of each layer, too
    #[arg(long)]
    per_layer: bool,
    /// Print one JSON object, with the reference replayer's keys and rounding
    #[arg(long)]
    json: bool,
}

/// What a miss costs.
#[derive(clap::Args)]
pub struct Cost {
    /// Bytes of one expert on disk
    #[arg(long, value_name = "BYTES", default_value_t = 1_382_400.0)]
    expert_bytes: f64,
    /// A token's time with everything resident
    #[arg(long, value_name = "MS", default_value_t = 12.0)]
    compute_ms: f64,
    /// Of the SSD, comma-separated
    #[arg(long, value_name = "GB/S", value_delimiter = ',', default_values_t = [3.9, 6.8])]
    bandwidth: Vec<f64>,
}

impl Cost {
    pub fn estimate(&self) -> Result<Estimate> {
        let numbers = [self.expert_bytes, self.compute_ms];
        if numbers.iter().chain(&self.bandwidth).any(|n| !n.is_finite() || *n < 0.0)
            || self.bandwidth.contains(&0.0)
            || self.compute_ms == 0.0
        {
            bail!("--expert-bytes, --compute-ms and --bandwidth are numbers above 0 (--expert-bytes may be 0)");
        }
        Ok(Estimate {
            expert_bytes: self.expert_bytes,
            compute_ms: self.compute_ms,
            bandwidths_gb_s: self.bandwidth.clone(),
        })
    }
}

#[derive(Clone, Copy, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum DeltaName {
    TokenTopk,
    TokenFull,
    RunningFull,
}

impl DeltaName {
    pub fn delta(self) -> Delta {
        match self {
            Self::TokenTopk => Delta::TokenTopk,
            Self::TokenFull => Delta::TokenFull,
            Self::RunningFull => Delta::RunningFull,
        }
    }
}

/// k as the command line or the sidecar has it.
pub fn k_of(given: Option<usize>, trace: &Path) -> Result<usize> {
    let sidecar = || Ok(Sidecar::read_beside(trace)?.map(|s| s.shape.k as usize).filter(|k| *k > 0));
    given.map_or_else(|| sidecar().map(|k: Option<usize>| k.unwrap_or(10)), Ok)
}

/// The policies of these names; empty ones are passed over.
pub(crate) fn policies(names: &[String]) -> hotset::Result<Vec<Policy>> {
    names.iter().map(|name| name.trim()).filter(|name| !name.is_empty()).map(Policy::by_name).collect()
}

/// What a policy came to over all layers, as the reference adds it up.
struct Sum {
    settings: Settings,
    layers: Vec<LayerResult>,
    misses_per_token: f64,
    hit_rate: f64,
}

impl Sum {
    fn new(settings: &Settings, layers: Vec<LayerResult>) -> Self {
        let misses_per_token = layers.iter().map(LayerResult::misses_per_token).sum();
        let hit_rate = layers.iter().map(LayerResult::hit_rate).sum::<f64>() / layers.len() as f64;
        Self { settings: settings.clone(), layers, misses_per_token, hit_rate }
    }

    /// Something that is counted, of a token in all layers.
    fn per_token(&self, count: impl Fn(&LayerResult) -> u64) -> f64 {
        self.layers.iter().map(|l| count(l) as f64 / l.tokens.max(1) as f64).sum()
    }
}

pub fn run(args: &Args) -> Result<()> {
    let trace = Trace::open(&args.trace)?;
    let estimate = args.cost.estimate()?;
    if trace.health().cut {
        let health = trace.health();
        eprintln!(
            "hotset: the trace is cut: {} whole tokens, {} bytes behind them",
            health.found_tokens, health.stray_bytes
        );
    }
    let ranges = Ranges::beside(&args.trace, &trace)?;
    if args.as_recorded {
        return as_recorded(args, &trace, ranges.as_ref());
    }
    let keep = args.keep_map.as_ref().map(|path| KeepMap::open(path, &trace)).transpose()?;
    let replay = Replay::new(&trace, keep.as_ref(), ranges.as_ref());
    let settings = args.settings()?;
    settings.iter().try_for_each(|s| replay.check(s))?;
    let by_layer = replay.all(&settings)?;
    let of = |i: usize| by_layer.iter().map(|layer| layer[i]).collect();
    let sums: Vec<Sum> = settings.iter().enumerate().map(|(i, s)| Sum::new(s, of(i))).collect();
    if args.json { json(args, &replay, &sums, &estimate) } else { text(args, &replay, &sums, &estimate) }
}

impl Args {
    fn settings(&self) -> Result<Vec<Settings>> {
        let policies = if self.policies.is_empty() {
            let defined = |p: &Policy| !(p.needs_future() && self.lambda_moce > 0.0);
            Policy::REFERENCE.iter().copied().filter(defined).collect()
        } else {
            policies(&self.policies)?
        };
        let k = k_of(self.k_used, &self.trace)?;
        let moce = Moce { lambda: self.lambda_moce, top_j: self.protect_top_j, delta: self.delta.delta() };
        let one = |policy| Settings {
            policy,
            capacity: self.cache_cap,
            k,
            moce,
            decay: self.ema_decay,
            near_pick_n: self.near_pick_n,
            warmup: self.warmup,
            seed: self.seed,
            admit_displaced: self.admit_displaced,
        };
        Ok(policies.into_iter().map(one).collect())
    }
}

fn text(args: &Args, replay: &Replay, sums: &[Sum], estimate: &Estimate) -> Result<()> {
    let Some(first) = sums.first().map(|s| &s.settings) else { bail!("--policies names none") };
    let mut text = format!(
        "{} layers of {} experts, {} tokens ({} counted), k {}, {} slots",
        replay.n_layers(),
        replay.n_experts(),
        replay.n_tokens(),
        replay.n_tokens().saturating_sub(first.warmup),
        first.k,
        first.capacity
    );
    if first.moce.lambda > 0.0 {
        text += &format!(", lambda {} of {}, top {}", first.moce.lambda, first.moce.delta.name(), first.moce.top_j);
    }
    text += "\n\n";
    let speeds: Vec<String> = estimate.bandwidths_gb_s.iter().map(|b| format!("tok/s at {b} GB/s")).collect();
    let any = |count: fn(&LayerResult) -> u64| sums.iter().any(|s| s.layers.iter().any(|l| count(l) > 0));
    type Count = fn(&LayerResult) -> u64;
    let extra: [(&str, Count); 5] = [
        ("swapped", |l| l.swapped),
        ("background", |l| l.background),
        ("not kept", |l| l.refused),
        ("forced", |l| l.forced),
        ("substituted", |l| l.substituted),
    ];
    let extra: Vec<_> = extra.into_iter().filter(|(_, count)| any(*count)).collect();
    let mut heading = vec!["policy", "misses/token", "hit rate", "MB/token"];
    heading.extend(speeds.iter().map(String::as_str));
    heading.extend(extra.iter().map(|(name, _)| *name));
    let rows: Vec<Vec<String>> = sums
        .iter()
        .map(|s| {
            let mb = estimate.mb_per_token(s.misses_per_token);
            let mut row = vec![s.settings.policy.name().to_owned()];
            row.extend([format!("{:.2}", s.misses_per_token), format!("{:.4}", s.hit_rate), format!("{mb:.2}")]);
            row.extend(estimate.bandwidths_gb_s.iter().map(|&b| format!("{:.2}", estimate.tokens_per_second(mb, b))));
            row.extend(extra.iter().map(|(_, count)| format!("{:.2}", s.per_token(count))));
            row
        })
        .collect();
    text += &output::table(&heading, &rows);
    if extra.len() > 1 || !extra.is_empty() && extra[0].0 != "swapped" {
        text += "\nswapped to substituted are per token over all layers, as misses are\n";
    }
    text += &advantage(sums);
    if args.per_layer {
        let mut heading = vec!["layer: misses"];
        heading.extend(sums.iter().map(|s| s.settings.policy.name()));
        let row = |layer: usize| {
            let misses = sums.iter().map(|s| s.layers[layer].misses.to_string());
            std::iter::once(layer.to_string()).chain(misses).collect()
        };
        let rows: Vec<Vec<String>> = (0..replay.n_layers()).map(row).collect();
        text += &format!("\n{}", output::table(&heading, &rows));
    }
    output::print(&text)
}

/// Where Belady's advantage over LRU comes from, where all that it takes has been replayed.
fn advantage(sums: &[Sum]) -> String {
    let of = |policy| sums.iter().find(|s| s.settings.policy == policy).map(|s| s.misses_per_token);
    let (Some(lru), Some(min)) = (of(Policy::Lru), of(Policy::BeladyMin)) else { return String::new() };
    let Some(bypass) = of(Policy::BeladyBypass) else { return String::new() };
    format!(
        "\nBelady's advantage over lru: {:.2} misses a token by the choice of victims, {:.2} more by not keeping every newcomer\n",
        lru - min,
        min - bypass
    )
}

fn json(args: &Args, replay: &Replay, sums: &[Sum], estimate: &Estimate) -> Result<()> {
    let default = Estimate::default();
    let mut policies = Map::new();
    for s in sums {
        let mb = estimate.mb_per_token(s.misses_per_token);
        let mut value = json!({
            "total_misses_per_token_48L": round(s.misses_per_token, 2),
            "mean_hit_rate": round(s.hit_rate, 4),
            "ssd_mb_per_token_q2_0": round(mb, 2),
        });
        for &bandwidth in &estimate.bandwidths_gb_s {
            let threads = [(3.9, "1th"), (6.8, "4th")].into_iter().find(|(b, _)| *b == bandwidth);
            let key = match threads.filter(|_| *estimate == default) {
                Some((_, threads)) => format!("est_m5_air_decode_tok_s_{threads}_{bandwidth}GBs"),
                None => format!("est_decode_tok_s_{bandwidth}GBs"),
            };
            value[key] = round(estimate.tokens_per_second(mb, bandwidth), 2).into();
        }
        // Beyond the reference's keys, where they say something.
        let counts: [(&str, u64, f64); 4] = [
            ("swapped_per_token", s.layers.iter().map(|l| l.swapped).sum(), s.per_token(|l| l.swapped)),
            ("background_reads_per_token", s.layers.iter().map(|l| l.background).sum(), s.per_token(|l| l.background)),
            ("not_kept_per_token", s.layers.iter().map(|l| l.refused).sum(), s.per_token(|l| l.refused)),
            (
                "substituted_slots_per_token",
                s.layers.iter().map(|l| l.substituted).sum(),
                s.per_token(|l| l.substituted),
            ),
        ];
        for (key, _, per_token) in counts.iter().filter(|(_, count, _)| *count > 0) {
            value[*key] = round(*per_token, 2).into();
        }
        if args.per_layer {
            value["misses_per_layer"] = s.layers.iter().map(|l| l.misses).collect();
        }
        policies.insert(s.settings.policy.name().to_owned(), value);
    }
    output::print_json(&json!({
        "n_tokens": replay.n_tokens(),
        "n_experts": replay.n_experts(),
        "cache_cap": args.cache_cap,
        "lambda_moce": args.lambda_moce,
        "protect_top_j": args.protect_top_j,
        "policies": policies,
    }))
}

fn as_recorded(args: &Args, trace: &Trace, ranges: Option<&Ranges>) -> Result<()> {
    let sidecar =
        Sidecar::read_beside(&args.trace)?.context("there is no sidecar <trace>.json to say how it was recorded")?;
    let run = recorded(trace, &sidecar, ranges)?;
    let misses: u64 = run.misses.iter().sum();
    if args.json {
        return output::print_json(&Value::from_iter([
            ("tokens", json!(run.tokens)),
            ("picks", json!(run.picks)),
            ("misses", json!(misses)),
            ("misses_per_layer", json!(run.misses)),
            ("inexact", json!(run.inexact)),
        ]));
    }
    let mut text = output::facts(&[
        ("tokens", run.tokens.to_string()),
        ("picks through slots", run.picks.to_string()),
        ("misses", misses.to_string()),
        ("misses a token", format!("{:.2}", misses as f64 / run.tokens.max(1) as f64)),
    ]);
    for why in &run.inexact {
        text += &format!("not exact: {why}\n");
    }
    if args.per_layer {
        let rows: Vec<Vec<String>> =
            run.misses.iter().enumerate().map(|(layer, m)| vec![layer.to_string(), m.to_string()]).collect();
        text += &format!("\n{}", output::table(&["layer", "misses"], &rows));
    }
    output::print(&text)
}
