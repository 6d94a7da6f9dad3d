//! `hotset global-replay`: all layers share one byte budget.

use std::path::PathBuf;

use anyhow::Result;
use hotset::replay::estimate::round;
use hotset::replay::global::{Batches, GlobalPolicy, GlobalResult, Scope};
use serde_json::{Value, json};

use crate::{analyze, output};

/// What one byte budget for the experts of all layers would hit, by policy; and the same bytes as partitions, one a layer
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  hotset global-replay qwen.route.csv --budget-mib 250,500,1000,2000,3000,4000,6000
  hotset global-replay run.q4rt --expert-bytes 1382400

A pass is one batch in each layer. It looks up each of its experts once; after it, what is over the budget goes, but nothing that it used.
A budget per layer that does not hold one token's experts has no row of numbers: no run could be made with it.
Bytes of an expert come from the trace, layer by layer. A what-if: live, each layer has its own slots.")]
pub struct Args {
    /// A Q4RT trace, or a route_trace v1 CSV (.csv)
    trace: PathBuf,
    /// Comma-separated
    #[arg(long, value_name = "MIB", value_delimiter = ',', default_values_t = [250, 500, 1000, 2000, 3000, 4000, 6000])]
    budget_mib: Vec<u64>,
    /// Comma-separated: lru, lfu, belady, random
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_values_t = ["lru", "lfu", "belady", "random"].map(String::from))]
    policies: Vec<String>,
    /// Experts that a token uses in a layer [default: as the trace says]
    #[arg(long, value_name = "K")]
    k_used: Option<usize>,
    /// Bytes of one expert in every layer [default: as the trace says]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1..))]
    expert_bytes: Option<u64>,
    /// Seed of the policy random
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let routing = analyze::routing_of(&args.trace, args.k_used)?;
    let names = args.policies.iter().map(|name| name.trim());
    let policies = names.map(GlobalPolicy::by_name).collect::<hotset::Result<Vec<_>>>()?;
    let bytes = args.expert_bytes.map(|bytes| vec![bytes; routing.layers.len()]);
    let batches = Batches::new(&routing, bytes)?;
    let scopes = [Scope::Shared, Scope::PerLayer];
    let settings = scopes.iter().flat_map(|&scope| policies.iter().map(move |&policy| (scope, policy)));
    let mut rows = Vec::new();
    for (scope, policy) in settings {
        for &mib in &args.budget_mib {
            let result = batches.replay(mib.saturating_mul(1 << 20), policy, scope, args.seed);
            rows.push((scope, policy, mib, result));
        }
    }
    let step = batches.step_bytes(routing.k);
    if args.json {
        let rows: Vec<Value> = rows
            .iter()
            .map(|(scope, policy, mib, result)| {
                let mut value = json!({ "scope": scope.name(), "policy": policy.name(), "budget_mib": mib });
                value["result"] = result_json(result);
                value
            })
            .collect();
        return output::print_json(&json!({
            "expert_bytes_total": batches.total_bytes(),
            "expert_bytes_of_a_token": step,
            "recorded": batches.recorded().as_ref().map(phases_json),
            "rows": rows,
        }));
    }
    let mut text = format!(
        "{} layers of {} experts, k {}: {} in all, one token uses {}\n",
        routing.layers.len(),
        routing.n_experts,
        routing.k,
        output::bytes(batches.total_bytes()),
        output::bytes(step)
    );
    if let Some(run) = batches.recorded() {
        let (all, decode) = (100.0 * run.all().hit_rate(), 100.0 * run.decode.hit_rate());
        text += &format!("the run itself hit {all:.1} %, in decode {decode:.1} %\n");
    }
    let cells = |(scope, policy, mib, result): &(Scope, GlobalPolicy, u64, GlobalResult)| {
        let percent = |rate: f64| format!("{:.1}", 100.0 * rate);
        let (scope, policy, mib) = (*scope, policy.name().to_owned(), *mib);
        if scope == Scope::PerLayer && mib.saturating_mul(1 << 20) < step {
            let none = || "-".to_owned();
            return vec![scope.name().to_owned(), policy, mib.to_string(), none(), none(), none(), "all".to_owned()];
        }
        vec![
            scope.name().to_owned(),
            policy,
            mib.to_string(),
            percent(result.decode.hit_rate()),
            percent(result.all().hit_rate()),
            output::bytes(result.decode.read),
            result.over_budget.to_string(),
        ]
    };
    let heading = ["budget", "policy", "MiB", "decode hit %", "all hit %", "decode reads", "batches over it"];
    text += &format!("\n{}", output::table(&heading, &rows.iter().map(cells).collect::<Vec<_>>()));
    output::print(&text)
}

fn result_json(result: &GlobalResult) -> Value {
    let mut value = phases_json(result);
    value["over_budget"] = json!(result.over_budget);
    value["differs_from_the_run"] = json!(result.differs);
    value
}

fn phases_json(result: &GlobalResult) -> Value {
    let of = |l: hotset::replay::global::Lookups| json!({ "lookups": l.lookups, "hits": l.hits, "hit_rate": round(l.hit_rate(), 4), "bytes_read": l.read });
    json!({
        "decode": of(result.decode),
        "prefill": of(result.prefill),
        "all": of(result.all()),
    })
}
