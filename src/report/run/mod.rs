//! The report of runs: data that `analyze`, `replay` and metrics logs gave, and the page (or the JSON) that is made of it. Nothing is
//! computed here that decides anything: numbers come from the code behind the commands, so that both say the same.

mod cache;
mod fronts;
mod steps;
mod times;

use std::collections::BTreeMap;

use serde_json::{Value, json};

pub use cache::{CacheViews, PolicyRow};
pub use steps::{Fates, Steps};
pub use times::Times;

use super::{Axis, Line, LinePlot, Page, Section, Table, number};
use crate::error::Result;
use crate::replay::DropRow;
use crate::trace::{Phase, Routing, Sidecar};

/// What a run was, in words and numbers.
#[derive(Clone, Debug, Default)]
pub struct About {
    /// What kind of file it is read from.
    pub format: &'static str,
    pub model: String,
    pub n_layers: usize,
    pub n_experts: usize,
    pub k: usize,
    pub prefill_tokens: usize,
    pub decode_tokens: usize,
    /// Weights that are not known (NaN).
    pub unknown_weights: u64,
    /// Of one expert, least and most over the layers; None = not known.
    pub expert_bytes: Option<(u64, u64)>,
    /// Settings, from which token they hold on.
    pub settings: Vec<String>,
    /// Tokens that are not in the trace, by reason.
    pub left_out: BTreeMap<String, u64>,
}

/// One run. What could not be had is None or empty, and `notes` says why.
#[derive(Clone, Debug, Default)]
pub struct RunReport {
    pub name: String,
    pub about: Option<About>,
    pub steps: Option<Steps>,
    pub cache: Option<CacheViews>,
    pub policies: Vec<PolicyRow>,
    /// Tokens that policies and fronts do not count.
    pub warmup: usize,
    /// By slots, marked.
    pub fronts: Vec<DropRow>,
    pub times: Option<Times>,
    pub notes: Vec<String>,
}

impl About {
    pub fn of(format: &'static str, routing: &Routing, sidecar: Option<&Sidecar>) -> Self {
        let bytes = routing.expert_bytes.iter().copied().filter(|&n| n > 0);
        Self {
            format,
            model: sidecar.map_or(String::new(), model),
            n_layers: routing.layers.len(),
            n_experts: routing.n_experts,
            k: routing.k,
            prefill_tokens: routing.tokens(Phase::Prefill),
            decode_tokens: routing.tokens(Phase::Decode),
            unknown_weights: routing.unknown_weights,
            expert_bytes: bytes.clone().min().zip(bytes.max()),
            settings: sidecar.map_or(Vec::new(), settings),
            left_out: sidecar.map(|s| s.left_out.clone()).unwrap_or_default(),
        }
    }

    fn json(&self) -> Value {
        json!({
            "format": self.format, "model": self.model, "n_layers": self.n_layers, "n_experts": self.n_experts, "k": self.k,
            "tokens_prefill": self.prefill_tokens, "tokens_decode": self.decode_tokens, "unknown_weights": self.unknown_weights,
            "expert_bytes": self.expert_bytes.map(|(least, most)| json!({ "least": least, "most": most })),
            "settings": self.settings, "left_out": self.left_out,
        })
    }
}

/// The model's file and architecture, as far as the sidecar has them. Of a path only the name.
fn model(sidecar: &Sidecar) -> String {
    let import = sidecar.more.get("import").and_then(|import| import["model"].as_str());
    let file = sidecar.model.files.first().map(|f| f.name.as_str()).or(import).unwrap_or_default();
    let file = file.rsplit(['/', '\\']).next().unwrap_or_default();
    let parts = [file, sidecar.model.architecture.as_str()];
    parts.into_iter().filter(|p| !p.is_empty()).collect::<Vec<_>>().join(", ")
}

fn settings(sidecar: &Sidecar) -> Vec<String> {
    let all = sidecar.settings.iter().map(|from| {
        let s = &from.settings;
        let slots = match (s.slots.iter().min(), s.slots.iter().max()) {
            (Some(a), Some(b)) if a == b => format!("{a} slots"),
            (Some(a), Some(b)) => format!("{a} to {b} slots"),
            _ => s.backing.clone(),
        };
        format!("from token {}: {}, {slots}, lambda {}, F {}", from.token, s.policy, s.lambda, s.drop)
    });
    all.collect()
}

impl RunReport {
    /// The data behind the page.
    pub fn json(&self) -> Value {
        let layers = self.about.as_ref().map_or(0, |a| a.n_layers);
        json!({
            "name": self.name, "about": self.about.as_ref().map(About::json), "steps": self.steps.as_ref().map(Steps::json),
            "cache": self.cache.as_ref().map(CacheViews::json),
            "policies": self.policies.iter().map(PolicyRow::json).collect::<Value>(), "warmup": self.warmup,
            "drop_fronts": fronts::json(&self.fronts, layers), "times": self.times.as_ref().map(Times::json),
            "notes": self.notes,
        })
    }

    fn overview(&self, mut section: Section) -> Section {
        if let Some(a) = &self.about {
            let mut facts = vec![
                ("model", if a.model.is_empty() { "not recorded".into() } else { a.model.clone() }),
                ("layers", a.n_layers.to_string()),
                ("experts a layer", a.n_experts.to_string()),
                ("used by a token", a.k.to_string()),
                ("decode tokens", a.decode_tokens.to_string()),
                ("prefill tokens", a.prefill_tokens.to_string()),
            ];
            if let Some((least, most)) = a.expert_bytes {
                let mb = |n: u64| number(n as f64 / 1e6);
                let size = if least == most { mb(most) } else { format!("{} to {}", mb(least), mb(most)) };
                facts.push(("an expert, MB", size));
            }
            if let Some(steps) = &self.steps {
                let rate = steps.sum().hit_rate();
                facts.push(("hit rate", rate.map_or("not known".into(), |r| format!("{:.1} %", 100.0 * r))));
                facts.push(("misses a token", number(steps.misses_per_token())));
            }
            section.facts(&facts);
            section.text(&format!("Read from a {}.", a.format));
            for settings in &a.settings {
                section.text(&format!("Settings {settings}."));
            }
            if a.unknown_weights > 0 {
                section.note(&format!(
                    "{} weights are not known. They are counted, and taken for nothing.",
                    a.unknown_weights
                ));
            }
            for (why, n) in &a.left_out {
                section.note(&format!("{n} tokens are not among those that policies are replayed over: {why}."));
            }
        }
        if let Some(steps) = &self.steps {
            section.note(&format!("Hit rate and misses: {} tokens, {}.", steps.phase.as_str(), steps.source));
        }
        for note in &self.notes {
            section.note(note);
        }
        section
    }

    /// Adds the sections of this run. `alone`: their titles need not say whose they are.
    fn sections(&self, page: &mut Page, alone: bool) -> Result<()> {
        let begin = |what: &str| match alone {
            true => Section::new(what),
            false => Section::inner(format!("{}: {}", self.name, what.to_lowercase())),
        };
        let first = if alone { Section::new("The run") } else { Section::new(self.name.clone()) };
        page.section(self.overview(first));
        if let Some(steps) = &self.steps {
            page.section(steps.section(begin("Step by layer"))?);
        }
        if let Some(times) = &self.times {
            page.section(times.section(begin("Time"))?);
        }
        if let Some(cache) = &self.cache {
            for section in cache.sections(begin, &self.policies, self.warmup)? {
                page.section(section);
            }
        }
        if let (false, Some(a)) = (self.fronts.is_empty(), &self.about) {
            let known = a.expert_bytes.is_some();
            page.section(fronts::section(begin("Dropping"), &self.fronts, a.n_layers, known)?);
        }
        Ok(())
    }
}

/// What a warm-up leaves out, as the end of a sentence.
fn uncounted(warmup: usize) -> String {
    if warmup == 0 { String::new() } else { format!(", of which the first {warmup} are not counted") }
}

/// The page of some runs.
pub fn page(runs: &[RunReport]) -> Result<Page> {
    let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
    let mut page = Page::new(match names.as_slice() {
        [one] => format!("Run {one}"),
        many => format!("{} runs", many.len()),
    });
    page.lead("What was routed, what a cache makes of it, and what dropping would buy. Made by hotset report.");
    if runs.len() > 1 {
        page.section(compared(runs)?);
    }
    for run in runs {
        run.sections(&mut page, runs.len() == 1)?;
    }
    Ok(page)
}

/// A row a run, and their hit curves on one scale.
fn compared(runs: &[RunReport]) -> Result<Section> {
    let mut section = Section::new("Runs");
    let mut table =
        Table::new(["run", "model", "layers", "experts", "k", "decode tokens", "hit rate", "misses a token"]);
    let y = Axis::new("decode hit rate").percent().from(0.0).to(1.0);
    let mut plot =
        LinePlot::new("Hits by share of the experts that slots hold", Axis::new("slots, of the experts").percent(), y);
    for run in runs {
        let Some(a) = &run.about else {
            table.row([run.name.as_str(), "a metrics log alone"]);
            continue;
        };
        let mut row = vec![run.name.clone(), a.model.clone()];
        row.extend([a.n_layers, a.n_experts, a.k, a.decode_tokens].map(|n| n.to_string()));
        if let Some(steps) = &run.steps {
            row.push(steps.sum().hit_rate().map_or("-".into(), |r| format!("{:.1} %", 100.0 * r)));
            row.push(number(steps.misses_per_token()));
        }
        table.row(row);
        if let Some(curve) = run.cache.as_ref().and_then(CacheViews::hit_curve) {
            let x = |slots: usize| slots as f64 / a.n_experts as f64;
            let points = (a.k..curve.len()).map(|slots| (x(slots), curve[slots])).collect();
            plot.lines.push(Line { name: run.name.clone(), points, ..Line::default() });
        }
    }
    section.table(&table);
    if plot.lines.len() > 1 {
        section.plot(&plot, "LRU, each layer with so many slots, from an empty cache; decode tokens.")?;
    }
    Ok(section)
}
