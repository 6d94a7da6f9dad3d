//! What caches would hit: the curve over all capacities, layers apart, and policies at given numbers of slots; and what makes it so, how popular experts are.

use serde_json::{Value, json};

use crate::analyze::{Popularity, Reuse, hit_curve, popularity};
use crate::error::Result;
use crate::replay::LayerResult;
use crate::report::{Axis, BarPlot, Bars, HeatMap, Line, LinePlot, Section, number};
use crate::trace::Routing;

/// Columns of a map at most.
const MAX_COLUMNS: usize = 256;

/// The routing of a run, as a cache sees it.
#[derive(Clone, Debug, Default)]
pub struct CacheViews {
    pub n_experts: usize,
    pub k: usize,
    pub blocks: Vec<u32>,
    pub reuse: Vec<Reuse>,
    pub popularity: Vec<Popularity>,
    /// Picks by expert id, by layer.
    pub picks: Vec<Vec<u64>>,
}

/// A policy with some slots, replayed over all tokens of the trace.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyRow {
    pub policy: &'static str,
    /// It knows the future: nothing that runs live beats it.
    pub bound: bool,
    pub slots: usize,
    pub misses_per_token: f64,
    /// Mean over layers, 0..1.
    pub hit_rate: f64,
}

impl PolicyRow {
    /// All layers of a replay together, as `hotset replay` adds them up.
    pub fn of(policy: crate::cache::Policy, slots: usize, layers: &[LayerResult]) -> Self {
        Self {
            policy: policy.name(),
            bound: policy.needs_future(),
            slots,
            misses_per_token: layers.iter().map(LayerResult::misses_per_token).sum(),
            hit_rate: layers.iter().map(LayerResult::hit_rate).sum::<f64>() / layers.len().max(1) as f64,
        }
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "policy": self.policy, "bound": self.bound, "slots": self.slots, "misses_per_token": self.misses_per_token,
            "hit_rate": self.hit_rate,
        })
    }
}

impl CacheViews {
    pub fn of(routing: &Routing) -> Self {
        let layers = 0..routing.layers.len();
        Self {
            n_experts: routing.n_experts,
            k: routing.k,
            blocks: routing.blocks.clone(),
            picks: layers.clone().map(|layer| popularity::counts(routing, layer)).collect(),
            reuse: layers.clone().map(|layer| Reuse::of(routing, layer)).collect(),
            popularity: layers.map(|layer| Popularity::of(routing, layer)).collect(),
        }
    }

    /// Share of decode picks that hit in LRU order, by slots from 0 on.
    pub fn hit_curve(&self) -> Option<Vec<f64>> {
        hit_curve(&self.reuse)
    }

    pub(super) fn json(&self) -> Value {
        let layer = |i: usize| {
            let p = &self.popularity[i];
            json!({
                "block": self.blocks[i], "hit_curve": hit_curve([&self.reuse[i]]), "picks": self.picks[i], "distinct": p.distinct(),
                "gini": p.gini(), "experts_for_half_the_picks": p.experts_for(0.5),
            })
        };
        json!({ "hit_curve": self.hit_curve(), "layers": (0..self.reuse.len()).map(layer).collect::<Value>() })
    }

    pub(super) fn sections(
        &self,
        begin: impl Fn(&str) -> Section,
        policies: &[PolicyRow],
        warmup: usize,
    ) -> Result<Vec<Section>> {
        let mut section = begin("Caches");
        if let Some(curve) = self.hit_curve() {
            let note = "LRU, each layer with so many slots, from an empty cache; decode tokens. The band is from the worst layer to the best.";
            section.plot(&self.curve_plot(&curve), note)?;
            section.plot(&self.by_layer_and_slots(), "The same, layer by layer.")?;
        } else {
            section.note("There are no decode tokens, and so no hit curve.");
        }
        if policies.is_empty() {
            section.note("No policy was replayed.");
        } else {
            let best: Vec<String> = policies.chunk_by(|a, b| a.slots == b.slots).filter_map(advantage).collect();
            let note = format!(
                "All tokens of the trace, one by one{}. A policy marked as bound knows the future, and cannot run live. {}",
                super::uncounted(warmup),
                best.join(" ")
            );
            section.plot(&bars(policies), &note)?;
        }
        let mut experts = begin("Experts");
        let half = self.popularity.iter().map(|p| p.experts_for(0.5) as f64);
        let used = self.popularity.iter().map(|p| p.distinct() as f64);
        let mean =
            |values: &mut dyn Iterator<Item = f64>| number(values.sum::<f64>() / self.popularity.len().max(1) as f64);
        experts.text(&format!(
            "Of {} experts a layer, {} are used at all and {} have half of the picks (means over layers).",
            self.n_experts,
            mean(&mut { used }),
            mean(&mut { half }),
        ));
        let bin = self.n_experts.div_ceil(MAX_COLUMNS).max(1);
        let note = match bin {
            1 => "All tokens, prefill too. 1 is what every expert would have if all were used alike.".to_owned(),
            _ => format!(
                "All tokens, prefill too. A column is the mean of {bin} neighbouring experts; 1 is an even share."
            ),
        };
        experts.plot(&self.popularity_map(bin), &note)?;
        Ok(vec![section, experts])
    }

    fn curve_plot(&self, curve: &[f64]) -> LinePlot {
        let y = Axis::new("decode hit rate").percent().from(0.0).to(1.0);
        let mut plot = LinePlot::new("Hits by number of slots", Axis::new("slots a layer").whole(), y);
        let layers: Vec<Vec<f64>> = self.reuse.iter().filter_map(|r| hit_curve([r])).collect();
        let x = |slots: usize| slots as f64;
        let slots = || (self.k..curve.len()).step_by(curve.len().div_ceil(MAX_COLUMNS).max(1));
        let points = slots().map(|n| (x(n), curve[n])).collect();
        let band = slots().map(|n| {
            let of = || layers.iter().filter_map(|l| l.get(n).copied());
            (x(n), of().fold(f64::INFINITY, f64::min), of().fold(f64::NEG_INFINITY, f64::max))
        });
        plot.lines.push(Line { name: "lru".into(), points, band: band.collect(), ..Line::default() });
        plot
    }

    fn by_layer_and_slots(&self) -> HeatMap {
        let value = Axis::new("decode hit rate").percent().from(0.0).to(1.0);
        let mut map = HeatMap::new("Hits by layer and number of slots", "slots a layer", "layer", value);
        let slots: Vec<usize> = (self.k..=self.n_experts).step_by(self.n_experts.div_ceil(64).max(1)).collect();
        map.columns = slots.iter().map(usize::to_string).collect();
        map.rows = self.blocks.iter().map(u32::to_string).collect();
        for reuse in &self.reuse {
            let curve = hit_curve([reuse]);
            map.cells.extend(slots.iter().map(|&n| curve.as_ref().and_then(|c| c.get(n).copied())));
        }
        map
    }

    fn popularity_map(&self, bin: usize) -> HeatMap {
        let mut map =
            HeatMap::new("Popularity of experts by layer", "expert", "layer", Axis::new("times an even share"));
        map.columns = (0..self.n_experts).step_by(bin).map(|id| id.to_string()).collect();
        map.rows = self.blocks.iter().map(u32::to_string).collect();
        let mut shares: Vec<f64> = Vec::new();
        for counts in &self.picks {
            let even = counts.iter().sum::<u64>() as f64 / self.n_experts.max(1) as f64;
            let share = |c: &[u64]| c.iter().sum::<u64>() as f64 / c.len() as f64 / even.max(f64::MIN_POSITIVE);
            shares.extend(counts.chunks(bin).map(share));
        }
        map.cells = shares.iter().map(|&s| Some(s)).collect();
        // Few experts have many times what the others have: colours are for the others.
        shares.sort_by(f64::total_cmp);
        let high = shares.get(shares.len() * 99 / 100).copied().unwrap_or(1.0);
        map.value = map.value.from(0.0).to(high.max(1.0));
        map
    }
}

/// How far the best policy that runs live is from the bound.
fn advantage(rows: &[PolicyRow]) -> Option<String> {
    let least = |bound: bool| {
        rows.iter().filter(|r| r.bound == bound).min_by(|a, b| a.misses_per_token.total_cmp(&b.misses_per_token))
    };
    let (best, bound) = (least(false)?, least(true)?);
    Some(format!(
        "{} slots: {} has {} misses a token, {} has {}.",
        best.slots,
        best.policy,
        number(best.misses_per_token),
        bound.policy,
        number(bound.misses_per_token)
    ))
}

fn bars(policies: &[PolicyRow]) -> BarPlot {
    let mut names: Vec<(&str, bool)> = Vec::new();
    policies.iter().map(|p| (p.policy, p.bound)).for_each(|name| {
        if !names.contains(&name) {
            names.push(name);
        }
    });
    let series = policies.chunk_by(|a, b| a.slots == b.slots).map(|rows| Bars {
        name: format!("{} slots", rows[0].slots),
        values: names.iter().map(|n| rows.iter().find(|r| r.policy == n.0).map(|r| r.misses_per_token)).collect(),
    });
    BarPlot {
        title: "Misses by policy".into(),
        x: Axis::new("misses a token, all layers").from(0.0),
        names: names.iter().map(|&(name, bound)| format!("{name}{}", if bound { " (bound)" } else { "" })).collect(),
        series: series.collect(),
    }
}
