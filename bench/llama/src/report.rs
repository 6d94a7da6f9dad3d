//! What a run did, in words for a person and as JSON for a program. Both subcommands share it.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

use crate::args::{Backing, Delta, Dense, HookArgs, Io, Load, Policy, Prefill, ReadBy, Renormalise, Wait};
use crate::engine::Engine;
use crate::ffi;
use crate::fnv::Fnv;
use crate::hook::{Hook, text};

/// Logits, seen one row after the other.
pub struct Digest {
    fnv: Fnv,
    pub finite: bool,
}

impl Digest {
    pub fn new() -> Self {
        Digest { fnv: Fnv::new(), finite: true }
    }

    pub fn add(&mut self, logits: &[f32]) {
        self.fnv.floats(logits);
        self.finite &= logits.iter().all(|x| x.is_finite());
    }

    pub fn hex(&self) -> String {
        self.fnv.hex()
    }
}

/// 0 where no time was measured, so that JSON stays JSON.
pub fn per_second(n: usize, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { n as f64 / time.as_secs_f64() }
}

pub fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

/// A reason, where there is one.
fn bracketed(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(" ({text})") }
}

/// hotset's numbers at the end of a run.
pub struct Outcome {
    stats: ffi::hotset_stats,
    shape: ffi::hotset_shape,
    io_reason: String,
    read_by_reason: String,
    dense_reason: String,
    stops: u64,
    hits_per_layer: Vec<u64>,
    misses_per_layer: Vec<u64>,
}

impl Outcome {
    /// Waited for reads, in all passes.
    pub fn wait_ns(&self) -> u64 {
        self.stats.wait_ns
    }

    /// None without hotset. Whatever is recorded is in the files afterwards.
    pub fn of(engine: &Engine) -> Result<Option<Outcome>> {
        engine.hook.as_ref().map(Outcome::of_hook).transpose()
    }

    fn of_hook(hook: &Hook) -> Result<Outcome> {
        let shape = hook.shape()?;
        if shape.recording != 0 {
            hook.flush()?;
        }
        let (mut hits_per_layer, mut misses_per_layer) = (Vec::new(), Vec::new());
        for block in hook.blocks()? {
            let (hits, misses) = hook.layer_stats(block)?;
            hits_per_layer.push(hits);
            misses_per_layer.push(misses);
        }
        // SAFETY: owned by the handle, which is open.
        let [io_reason, read_by_reason, dense_reason] =
            unsafe { [shape.io_reason, shape.read_by_reason, shape.dense_reason].map(|s| text(s)) };
        let stats = hook.stats()?;
        Ok(Outcome {
            stats,
            shape,
            io_reason,
            read_by_reason,
            dense_reason,
            stops: hook.stops(),
            hits_per_layer,
            misses_per_layer,
        })
    }

    fn hit_rate(&self) -> f64 {
        ratio(self.stats.hits as f64, (self.stats.hits + self.stats.misses + self.stats.dropped) as f64)
    }

    fn tokens(&self) -> f64 {
        (self.stats.decode_tokens + self.stats.prefill_tokens) as f64
    }

    /// Of a decoded token, all layers together; where prefill takes part its mass is in the sum, and its tokens are in the count.
    fn mass_per_token(&self, sum: f64) -> f64 {
        let takes_part = self.shape.prefill & (ffi::HOTSET_PREFILL_MOCE | ffi::HOTSET_PREFILL_DROP) != 0;
        ratio(sum, if takes_part { self.tokens() } else { self.stats.decode_tokens as f64 })
    }

    /// Two to four lines.
    pub fn print(&self) {
        let (s, shape) = (&self.stats, &self.shape);
        eprintln!(
            "experts: {:.1} % hits ({} hits, {} misses), {} dropped, {} swapped, {:.3} MB read per token, {} waiting",
            100.0 * self.hit_rate(),
            s.hits,
            s.misses,
            s.dropped,
            s.swapped,
            ratio(s.read_bytes as f64, self.tokens()) / 1e6,
            seconds(Duration::from_nanos(s.wait_ns)),
        );
        if s.dropped + s.swapped > 0 {
            eprintln!(
                "lost:    router mass per token, all layers: {:.4} dropped, {:.4} swapped",
                self.mass_per_token(s.mass_dropped),
                self.mass_per_token(s.mass_swapped)
            );
        }
        eprintln!(
            "modes:   backing {}, {} slots of {} per layer by {}, io {}{} by {}{}, dense {}{}, lambda {} of {}, F {}",
            Backing::text_of(shape.backing),
            shape.slots,
            shape.n_experts,
            Policy::text_of(shape.policy),
            Io::text_of(shape.io),
            bracketed(&self.io_reason),
            ReadBy::text_of(shape.read_by),
            bracketed(&self.read_by_reason),
            Dense::text_of(shape.dense),
            bracketed(&self.dense_reason),
            shape.lambda,
            Delta::text_of(shape.delta),
            shape.drop,
        );
        if shape.recording != 0 {
            eprintln!("trace:   {} tokens recorded, {} left out", s.recorded_tokens, s.left_out_tokens);
        }
    }

    fn json(&self, to: &mut Map<String, Value>) {
        let s = &self.stats;
        let mut put = |key: &str, value: Value| to.insert(key.to_string(), value);
        put("hits", json!(s.hits));
        put("misses", json!(s.misses));
        put("hit_rate", json!(self.hit_rate()));
        put("hits_per_layer", json!(self.hits_per_layer));
        put("misses_per_layer", json!(self.misses_per_layer));
        put("dropped", json!(s.dropped));
        put("swapped", json!(s.swapped));
        put("mass_lost", json!(self.mass_per_token(s.mass_dropped + s.mass_swapped)));
        put("mass_dropped", json!(self.mass_per_token(s.mass_dropped)));
        put("mass_swapped", json!(self.mass_per_token(s.mass_swapped)));
        put("bytes_read", json!(s.read_bytes));
        put("device_bytes", json!(s.device_bytes));
        put("reads", json!(s.reads));
        put("failed_reads", json!(s.failed_reads));
        put("wait_ms", json!(s.wait_ns as f64 / 1e6));
        put("stops", json!(self.stops));
        put("passes", json!(s.passes));
        put("decode_tokens", json!(s.decode_tokens));
        put("prefill_tokens", json!(s.prefill_tokens));
        put("pass_through_rows", json!(s.pass_through_rows));
        put("bad_rows", json!(s.bad_rows));
        put("recorded_tokens", json!(s.recorded_tokens));
        put("left_out_tokens", json!(s.left_out_tokens));
        put("lost_metrics", json!(s.lost_metrics));
        put("ahead_issued", json!(s.ahead_issued));
        put("ahead_adopted", json!(s.ahead_adopted));
        put("ahead_wasted_bytes", json!(s.ahead_wasted_bytes));
        put("resident", json!(s.resident));
        put("resident_bytes", json!(s.resident_bytes));
        put("backing", json!(Backing::text_of(self.shape.backing)));
        put("io_mode", json!(Io::text_of(self.shape.io)));
        put("io_reason", json!(self.io_reason));
        put("read_by", json!(ReadBy::text_of(self.shape.read_by)));
        put("read_by_reason", json!(self.read_by_reason));
        put("slots", json!(self.shape.slots));
        put("slot_bytes", json!(self.shape.slot_bytes));
        put("dense_reason", json!(self.dense_reason));
        put("dense_bytes", json!(self.shape.dense_bytes));
        put("dense_locked_bytes", json!(self.shape.dense_locked_bytes));
    }
}

/// The keys without hotset, so that a reader finds all of them in every run.
const ABSENT: [&str; 16] = [
    "hits",
    "misses",
    "hit_rate",
    "hits_per_layer",
    "misses_per_layer",
    "dropped",
    "swapped",
    "mass_lost",
    "mass_dropped",
    "mass_swapped",
    "bytes_read",
    "wait_ms",
    "stops",
    "recorded_tokens",
    "pass_through_rows",
    "slots",
];

/// Adds hotset's part to a run's object, and the settings that were in effect.
pub fn add_json(to: &mut Map<String, Value>, load: &Load, args: &HookArgs, engine: &Engine, outcome: Option<&Outcome>) {
    let mut settings = Map::new();
    settings.insert("model".into(), json!(load.model.display().to_string()));
    settings.insert("description".into(), json!(engine.description()));
    settings.insert("threads".into(), json!(load.threads));
    settings.insert("ctx".into(), json!(engine.n_ctx));
    settings.insert("ubatch".into(), json!(load.ubatch));
    settings.insert("route".into(), json!(load.route.as_ref().map(|r| r.display().to_string())));
    settings.insert("hook".into(), json!(outcome.is_some()));
    if let Some(outcome) = outcome {
        outcome.json(to);
        let shape = &outcome.shape;
        settings.insert("n_layers".into(), json!(shape.n_layers));
        settings.insert("n_experts".into(), json!(shape.n_experts));
        settings.insert("k".into(), json!(shape.k));
        settings.insert("top_m".into(), json!(shape.top_m));
        settings.insert("read_ahead".into(), json!(shape.read_ahead));
        settings.insert("pack".into(), json!(args.pack.as_ref().map(|p| p.display().to_string())));
        settings.insert("lanes".into(), json!(shape.lanes));
        settings.insert("cache_bytes".into(), json!(shape.cache_bytes));
        settings.insert("policy".into(), json!(Policy::text_of(shape.policy)));
        settings.insert("lambda".into(), json!(shape.lambda));
        settings.insert("top_j".into(), json!(shape.top_j));
        settings.insert("delta".into(), json!(Delta::text_of(shape.delta)));
        settings.insert("drop".into(), json!(shape.drop));
        settings.insert("renormalise".into(), json!(Renormalise::text_of(shape.renormalise)));
        settings.insert("dense".into(), json!(Dense::text_of(shape.dense)));
        settings.insert("prefill".into(), json!(Prefill::texts(shape.prefill)));
        settings.insert("recording".into(), json!(shape.recording != 0));
        settings.insert("wait".into(), json!(args.wait.map_or("latest", |w| Wait::text_of(w.number()))));
        settings.insert("fork".into(), json!(args.fork));
        settings.insert("poison".into(), json!(args.poison));
    } else {
        for key in ABSENT {
            to.insert(key.into(), Value::Null);
        }
        to.insert("backing".into(), json!("none"));
        to.insert("io_mode".into(), json!("mmap"));
        to.insert("io_reason".into(), json!("the engine alone"));
        to.insert("read_by".into(), json!("mmap"));
        to.insert("read_by_reason".into(), json!("the engine alone"));
    }
    to.insert("load_ms".into(), json!(engine.load_time.as_secs_f64() * 1e3));
    to.insert("settings".into(), Value::Object(settings));
}

/// A line on stdout. A reader that has gone away is an error, not a panic.
pub fn line(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}").and_then(|()| out.flush()).context("stdout")
}

/// "1.25 s", "12.5 ms".
pub fn seconds(time: Duration) -> String {
    let s = time.as_secs_f64();
    if s < 1.0 { format!("{:.1} ms", s * 1e3) } else { format!("{s:.2} s") }
}
