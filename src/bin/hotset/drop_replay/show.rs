//! What `hotset drop-replay` prints: its tables, and the same as JSON.

use hotset::replay::estimate::round;
use hotset::replay::{DropRow, Limit, Observed, Rule, Static};
use serde_json::{Value, json};

use crate::output;

fn percent(share: f64, digits: usize) -> String {
    format!("{:.digits$} %", 100.0 * share)
}

pub(super) fn static_table(statics: &[(Rule, Static)], k: usize) -> String {
    let surviving: Vec<String> = (1..=k).map(|n| format!("{n} run")).collect();
    let mut heading = vec!["rule", "reads avoided", "mass dropped", "picks dropped"];
    heading.extend(surviving.iter().map(String::as_str));
    let row = |(rule, s): &(Rule, Static)| {
        let name = match rule {
            Rule::Cold { threshold } => format!("F {threshold}"),
            Rule::KeepTop(j) => format!("keep top {j}"),
        };
        let picks = s.dropped as f64 / s.picks.max(1) as f64;
        let mut row = vec![name, percent(s.avoided(), 1), percent(s.lost(), 2), percent(picks, 1)];
        row.extend(s.surviving.iter().skip(1).map(|&rows| percent(rows as f64 / s.rows.max(1) as f64, 1)));
        row
    };
    output::table(&heading, &statics.iter().map(row).collect::<Vec<_>>())
}

pub(super) fn loop_table(loops: &[DropRow], layers: usize) -> String {
    let heading = [
        "slots",
        "k",
        "lambda",
        "F",
        "misses/token",
        "MB/token",
        "avoided",
        "static",
        "dropped/token",
        "swapped/token",
        "mass dropped",
        "swapped",
        "cut",
        "lost",
        "front",
    ];
    let row = |row: &DropRow| {
        let (s, all) = (&row.settings, &row.all);
        let tokens = row.tokens(layers);
        let known = all.rows.saturating_sub(all.unknown).max(1) as f64;
        let mass = |sum: f64| percent(sum / known, 2);
        vec![
            s.capacity.to_string(),
            s.k.to_string(),
            s.moce.lambda.to_string(),
            s.threshold.to_string(),
            format!("{:.2}", all.misses as f64 / tokens),
            format!("{:.2}", all.bytes as f64 / 1e6 / tokens),
            percent(all.avoided(&row.without), 1),
            percent(row.unchanged.avoided(), 1),
            format!("{:.2}", all.dropped as f64 / tokens),
            format!("{:.2}", all.swapped as f64 / tokens),
            mass(all.mass_dropped),
            mass(all.mass_swapped),
            mass(all.mass_cut),
            percent(all.mass_lost(), 2),
            if row.front { "*".to_owned() } else { String::new() },
        ]
    };
    output::table(&heading, &loops.iter().map(row).collect::<Vec<_>>())
}

/// The best row of a number of slots within a limit.
pub(super) struct Answer<'a> {
    pub(super) limit: Limit,
    pub(super) slots: usize,
    pub(super) best: Option<&'a DropRow>,
}

impl Answer<'_> {
    fn limit(&self) -> String {
        match self.limit {
            Limit::Mass(share) => format!("mass lost <= {} %", round(100.0 * share, 4)),
            Limit::ReadsPerToken(n) => format!("reads/token <= {n}"),
            Limit::BytesPerToken(n) => format!("MB/token <= {}", n / 1e6),
        }
    }

    pub(super) fn json(&self, layers: usize) -> Value {
        let (name, limit) = match self.limit {
            Limit::Mass(share) => ("max_mass", share),
            Limit::ReadsPerToken(n) => ("max_reads_per_token", n),
            Limit::BytesPerToken(n) => ("max_bytes_per_token", n),
        };
        let best = self.best.map(|row| {
            let (s, tokens) = (&row.settings, row.tokens(layers));
            json!({
                "k": s.k, "lambda": s.moce.lambda, "f": s.threshold, "misses_per_token": row.all.misses as f64 / tokens,
                "bytes_per_token": row.all.bytes as f64 / tokens, "mass_lost": row.all.mass_lost(),
            })
        });
        json!({ name: limit, "cache_cap": self.slots, "row": best })
    }
}

pub(super) fn answer_table(answers: &[Answer], layers: usize) -> String {
    let heading = ["within", "slots", "best: k", "lambda", "F", "misses/token", "MB/token", "lost"];
    let row = |answer: &Answer| {
        let mut cells = vec![answer.limit(), answer.slots.to_string()];
        match answer.best {
            Some(row) => {
                let (s, tokens) = (&row.settings, row.tokens(layers));
                cells.extend([s.k.to_string(), s.moce.lambda.to_string(), s.threshold.to_string()]);
                cells.push(format!("{:.2}", row.all.misses as f64 / tokens));
                cells.push(format!("{:.2}", row.all.bytes as f64 / 1e6 / tokens));
                cells.push(percent(row.all.mass_lost(), 2));
            }
            None => cells.push("none".into()),
        }
        cells
    };
    output::table(&heading, &answers.iter().map(row).collect::<Vec<_>>())
}

pub(super) fn observed_table(seen: &[Observed], layers: usize) -> String {
    let heading =
        ["slots", "lambda", "F", "tokens", "misses/token", "MB/token", "dropped/token", "swapped/token", "lost"];
    let row = |o: &Observed| {
        let per_token = |n: f64| format!("{:.2}", n / o.tokens.max(1) as f64);
        vec![
            o.slots.to_string(),
            o.lambda.to_string(),
            o.drop.to_string(),
            o.tokens.to_string(),
            per_token(o.misses as f64),
            per_token(o.bytes as f64 / 1e6),
            per_token(o.dropped as f64),
            per_token(o.swapped as f64),
            percent(o.mass_lost(layers), 2),
        ]
    };
    output::table(&heading, &seen.iter().map(row).collect::<Vec<_>>())
}

pub(super) fn observed_json(o: &Observed, layers: usize) -> Value {
    json!({
        "slots": o.slots, "lambda": o.lambda, "f": o.drop, "tokens": o.tokens, "hits": o.hits, "misses": o.misses,
        "bytes": o.bytes, "dropped": o.dropped, "swapped": o.swapped, "pass_through_rows": o.pass_through_rows,
        "sum_mass_dropped": o.mass_dropped, "sum_mass_swapped": o.mass_swapped, "mass_lost": o.mass_lost(layers),
    })
}

pub(super) fn static_json((rule, s): &(Rule, Static)) -> Value {
    let (f, keep_top) = match rule {
        Rule::Cold { threshold } => (Some(threshold), None),
        Rule::KeepTop(j) => (None, Some(j)),
    };
    json!({
        "f": f, "keep_top": keep_top, "rows": s.rows, "unknown_rows": s.unknown, "picks": s.picks, "misses": s.misses,
        "prefetched": s.prefetched, "dropped": s.dropped, "miss_bytes": s.miss_bytes, "avoided_bytes": s.avoided_bytes,
        "reads_avoided": s.avoided(), "mass_dropped": s.lost(), "surviving_rows": s.surviving,
    })
}

pub(super) fn loop_json(row: &DropRow) -> Value {
    let (s, all) = (&row.settings, &row.all);
    json!({
        "cache_cap": s.capacity, "k": s.k, "lambda": s.moce.lambda, "f": s.threshold, "policy": s.policy.name(),
        "rows": all.rows, "pass_through_rows": all.pass_through_rows, "unknown_rows": all.unknown, "hits": all.hits,
        "misses": all.misses, "bytes": all.bytes, "dropped": all.dropped, "swapped": all.swapped,
        "sum_mass_dropped": all.mass_dropped, "sum_mass_swapped": all.mass_swapped, "sum_mass_cut": all.mass_cut,
        "mass_lost": all.mass_lost(), "reads_avoided": all.avoided(&row.without),
        "static_reads_avoided": row.unchanged.avoided(), "static_dropped": row.unchanged.dropped,
        "static_sum_mass_dropped": row.unchanged.mass_dropped, "front": row.front,
        "misses_per_layer": all.misses_per_layer, "dropped_per_layer": all.dropped_per_layer,
    })
}
