//! An analysis as one JSON object.

use serde_json::{Map, Value, json};

use super::bootstrap::Interval;
use super::drift::Spearman;
use super::log::COUNTS;
use super::{Analysis, Comparison, Design, tells, verdict};

fn interval(i: &Interval) -> Value {
    json!({ "log_ratio": i.estimate, "low": i.low, "high": i.high, "p": i.p })
}

fn spearman(s: &Option<Spearman>) -> Value {
    s.map_or(Value::Null, |s| json!({ "rho": s.rho, "p": s.p, "n": s.n }))
}

impl Analysis {
    /// Times in ms per token; ratios are of times, second cell over first; numbers that the logs do not have are null.
    pub fn to_json(&self) -> Value {
        let cells: Vec<Value> = self.cells.iter().map(cell).collect();
        let comparisons: Vec<Value> = self.comparisons.iter().map(|c| self.comparison(c)).collect();
        let tells: Vec<Value> = self.tells.iter().map(|t| json!({ "tell": t.name, "words": t.words })).collect();
        json!({
            "design": match self.design { Design::Blocks => "blocks", Design::Runs => "runs" },
            "level": self.level,
            "look": { "number": self.look.0, "of": self.look.1 },
            "runs": self.runs.iter().map(|(name, tokens)| json!({ "log": name, "tokens": tokens })).collect::<Vec<_>>(),
            "cells": cells,
            "comparisons": comparisons,
            "multiple": "Holm",
            "drift": self.drift(),
            "tells": tells,
        })
    }

    fn comparison(&self, c: &Comparison) -> Value {
        let paired = c.paired.map_or(Value::Null, |p| {
            let mut value = interval(&p.interval);
            value["pairs"] = json!(p.n_pairs);
            value["standard_error"] = json!(p.error);
            value
        });
        let lots = |r: super::Randomisation| json!({ "p": r.p, "least_p": r.least, "lots": r.units });
        let told = c.verdict.told_apart().then(|| verdict::percent(c.interval()));
        json!({
            "a": self.cells[c.a].name,
            "b": self.cells[c.b].name,
            "by_pairs": paired,
            "by_tokens": interval(&c.tokens),
            "randomisation": c.randomisation.map_or(Value::Null, lots),
            "p": c.p,
            "level": c.level,
            "verdict": c.verdict.name(),
            "faster_percent": told.map(|(from, to)| json!([from, to])),
            "words": c.words,
            "same_settings": c.equal,
            "tokens_for_this": c.tokens_for_this,
            "tokens_for_5_percent": c.tokens_for_5_percent,
        })
    }

    fn drift(&self) -> Value {
        let d = &self.drift;
        let thermal = |t: &tells::Thermal| json!({ "level": t.level, "tokens": t.tokens, "time_ratio": t.ratio });
        json!({
            "wall": spearman(&d.wall),
            "wall_percent": d.wall_percent,
            "compute": spearman(&d.compute),
            "compute_percent": d.compute_percent,
            "thermal": d.thermal.iter().map(thermal).collect::<Vec<_>>(),
        })
    }
}

fn cell(c: &super::Cell) -> Value {
    let per_token: Map<String, Value> =
        COUNTS.iter().zip(c.counts).map(|(name, n)| ((*name).to_owned(), json!(n))).collect();
    json!({
        "name": c.name,
        "tokens": c.tokens,
        "tokens_per_second": c.tokens_per_second(),
        "mean_ms": c.mean_ms,
        "p50_ms": c.p50_ms,
        "p95_ms": c.p95_ms,
        "p99_ms": c.p99_ms,
        "compute_ms": c.compute_ms,
        "half_width_ms": { "independent": c.independent_half_ms, "blocks": c.block_half_ms },
        "cv": c.dependence.cv(),
        "variance_ratio": c.dependence.variance_ratio,
        "block_tokens": c.dependence.block,
        "per_token": per_token,
    })
}
