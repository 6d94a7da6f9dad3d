//! `hotset trace info`: what a trace holds, and what is known of its tokens.

use std::path::{Path, PathBuf};

use anyhow::Result;
use hotset::trace::sidecar::SettingsFrom;
use hotset::trace::{Phase, Sidecar, TokenRange, Trace};
use serde_json::{Value, json};

use super::files;
use crate::output;

/// Show a trace's shape, its tokens, what was left out, and the state of its file
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  hotset trace info run.q4rt
  hotset trace info run.q4rt --json | jq .tokens

Without a sidecar (<trace>.json) only shape, tokens and the state of the file are known.")]
pub struct Args {
    /// A trace
    trace: PathBuf,
    /// Show all ranges and settings, not only the first 12 of each
    #[arg(long)]
    all: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let (trace, sidecar) = files::open(&args.trace)?;
    if args.json {
        return output::print_json(&value(&args.trace, &trace, sidecar.as_ref()));
    }
    let rows = if args.all { usize::MAX } else { 12 };
    output::print(&text(&args.trace, &trace, sidecar.as_ref(), rows))
}

fn text(path: &Path, trace: &Trace, sidecar: Option<&Sidecar>, rows: usize) -> String {
    let header = trace.header();
    let health = files::health(&trace.health());
    let data = trace.n_tokens() as u64 * header.token_bytes();
    let mut facts = vec![
        ("trace", path.display().to_string()),
        ("layers", trace.n_layers().to_string()),
        ("experts", trace.n_experts().to_string()),
        ("candidates", format!("{} (top_m)", trace.top_m())),
        (
            "tokens",
            format!(
                "{}, {} each, {} in all",
                trace.n_tokens(),
                output::bytes(header.token_bytes()),
                output::bytes(data)
            ),
        ),
        ("file", if health.is_empty() { "sound".to_owned() } else { health.join("\n            ") }),
    ];
    let Some(sidecar) = sidecar else {
        facts.push(("sidecar", "none".to_owned()));
        return output::facts(&facts);
    };
    let files: Vec<String> =
        sidecar.model.files.iter().map(|f| format!("{} ({})", f.name, output::bytes(f.length))).collect();
    let model = if files.is_empty() { or_not_said(&sidecar.model.architecture) } else { files.join("\n            ") };
    facts.push(("model", model));
    facts.push(("k", sidecar.shape.k.to_string()));
    facts.push(("scores", or_not_said(&sidecar.score_space)));
    facts.push(("described", described(trace, sidecar)));
    facts.push(("left out", left_out(sidecar)));
    facts.push((
        "ended",
        match (&sidecar.error, sidecar.closed) {
            (Some(error), _) => format!("with an error: {error}"),
            (None, true) => "as it should".to_owned(),
            (None, false) => "not yet, or its writer was stopped".to_owned(),
        },
    ));
    if let Some((min, max)) = spread(sidecar.expert_bytes.iter().copied()) {
        let text =
            if min == max { output::bytes(min) } else { format!("{} to {}", output::bytes(min), output::bytes(max)) };
        facts.push(("an expert", text));
    }
    if !sidecar.residency.is_empty() {
        facts.push(("residency", format!("of {} tokens, as the imported run had it", sidecar.residency.len())));
    }
    if !sidecar.more.is_empty() {
        let keys: Vec<&str> = sidecar.more.keys().map(String::as_str).collect();
        facts.push(("more", format!("{} (see --json)", keys.join(", "))));
    }
    let mut text = output::facts(&facts);
    let heading = ["tokens", "phase", "position", "a pass", "placement", "left out before"];
    section(&mut text, "ranges", &heading, &sidecar.ranges.iter().map(range_row).collect::<Vec<_>>(), rows);
    let heading = ["settings from", "lambda", "J", "delta", "drop", "policy", "slots", "backing"];
    section(&mut text, "settings", &heading, &sidecar.settings.iter().map(settings_row).collect::<Vec<_>>(), rows);
    let resident = sidecar.resident.iter().map(|r| {
        let experts = spread(r.layers.iter().map(|layer| layer.len() as u64)).map_or(String::new(), show);
        vec![r.before_token.to_string(), r.reason.clone(), experts]
    });
    section(
        &mut text,
        "resident",
        &["resident before", "why noted", "experts a layer"],
        &resident.collect::<Vec<_>>(),
        rows,
    );
    text
}

fn or_not_said(text: &str) -> String {
    if text.is_empty() { "not said".to_owned() } else { text.to_owned() }
}

fn described(trace: &Trace, sidecar: &Sidecar) -> String {
    let of = |phase| phase_tokens(sidecar, phase);
    let (decode, prefill) = (of(Phase::Decode), of(Phase::Prefill));
    let rest = (trace.n_tokens() as u64).saturating_sub(decode + prefill);
    let rest = if rest > 0 { format!(", {rest} tokens not described") } else { String::new() };
    format!("decode {decode}, prefill {prefill}{rest}")
}

fn left_out(sidecar: &Sidecar) -> String {
    let each: Vec<String> = sidecar.left_out.iter().map(|(reason, n)| format!("{n}: {reason}")).collect();
    if each.is_empty() { "nothing".to_owned() } else { each.join(", ") }
}

fn phase_tokens(sidecar: &Sidecar, phase: Phase) -> u64 {
    sidecar.ranges.iter().filter(|range| range.phase == phase).fold(0, |n, range| n.saturating_add(range.n_tokens))
}

fn spread(values: impl Iterator<Item = u64> + Clone) -> Option<(u64, u64)> {
    values.clone().min().zip(values.max())
}

fn show((min, max): (u64, u64)) -> String {
    if min == max { min.to_string() } else { format!("{min} to {max}") }
}

fn section(text: &mut String, name: &str, heading: &[&str], rows: &[Vec<String>], limit: usize) {
    if rows.is_empty() {
        return;
    }
    *text += "\n";
    *text += &output::table(heading, &rows[..rows.len().min(limit)]);
    if rows.len() > limit {
        *text += &format!("... and {} more {name} (--all)\n", rows.len() - limit);
    }
}

fn range_row(range: &TokenRange) -> Vec<String> {
    let placement = match range.placement.as_slice() {
        [one] => one.as_str().to_owned(),
        each if each.windows(2).all(|two| two[0] == two[1]) => each.first().map_or("", |p| p.as_str()).to_owned(),
        _ => "differs by layer".to_owned(),
    };
    let position = if range.position < 0 { "not known".to_owned() } else { range.position.to_string() };
    let tokens = format!("{}..{}", range.first, range.end());
    let (per_pass, left_out) = (range.tokens_per_pass.to_string(), range.left_out_before.to_string());
    vec![tokens, range.phase.as_str().to_owned(), position, per_pass, placement, left_out]
}

fn settings_row(from: &SettingsFrom) -> Vec<String> {
    let s = &from.settings;
    let slots = spread(s.slots.iter().map(|&n| n.into())).map_or("none".to_owned(), show);
    let numbers = [from.token.to_string(), s.lambda.to_string(), s.top_j.to_string()];
    let [token, lambda, top_j] = numbers;
    vec![token, lambda, top_j, s.delta.clone(), s.drop.to_string(), s.policy.clone(), slots, s.backing.clone()]
}

fn value(path: &Path, trace: &Trace, sidecar: Option<&Sidecar>) -> Value {
    let (header, health) = (trace.header(), trace.health());
    let sidecar_value = sidecar.map(|sidecar| {
        let mut value = sidecar.to_json();
        // thousands of ids: how many there are is what is of use here
        value["resident"] = sidecar
            .resident
            .iter()
            .map(|r| {
                let experts: Vec<usize> = r.layers.iter().map(Vec::len).collect();
                json!({ "before_token": r.before_token, "reason": r.reason, "experts": experts })
            })
            .collect();
        if let Some(map) = value.as_object_mut() {
            map.remove("residency");
        }
        value["residency_tokens"] = sidecar.residency.len().into();
        value["tokens"] = json!({
            "decode": phase_tokens(sidecar, Phase::Decode),
            "prefill": phase_tokens(sidecar, Phase::Prefill),
            "described_from_the_first_on": sidecar.described_tokens(),
        });
        value
    });
    json!({
        "path": path,
        "layers": header.n_layers,
        "experts": header.n_experts,
        "top_m": header.top_m,
        "tokens": trace.n_tokens(),
        "token_bytes": header.token_bytes(),
        "health": {
            "header_tokens": health.header_tokens,
            "found_tokens": health.found_tokens,
            "stray_bytes": health.stray_bytes,
            "cut": health.cut,
            "notes": files::health(&health),
        },
        "sidecar": sidecar_value,
    })
}
