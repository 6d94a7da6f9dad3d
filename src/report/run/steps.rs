//! Step by layer: what became of the experts that each token chose. Over the whole run as sums and bins, and expert by expert for a window of steps, so that
//! the page of a long run is no larger than that of a short one.

use std::ops::Range;

use serde_json::{Value, json};

use crate::error::Result;
use crate::replay::{Fate, RanRow, Routed};
use crate::report::{Axis, HeatMap, Line, LinePlot, Section, Table, number};
use crate::trace::Phase;

/// Cells of a window, and columns of the whole run: what bounds the page.
const WINDOW_CELLS: usize = 6200;
const BINS: usize = 120;

/// What a token's choice came to in a layer, or many of them together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fates {
    pub hits: u64,
    pub misses: u64,
    pub dropped: u64,
    pub passed_through: u64,
}

impl Fates {
    fn add(&mut self, fate: Fate) {
        *match fate {
            Fate::Hit => &mut self.hits,
            Fate::Miss => &mut self.misses,
            Fate::Dropped => &mut self.dropped,
            Fate::PassedThrough => &mut self.passed_through,
        } += 1;
    }

    fn plus(self, other: Self) -> Self {
        Self {
            hits: self.hits + other.hits,
            misses: self.misses + other.misses,
            dropped: self.dropped + other.dropped,
            passed_through: self.passed_through + other.passed_through,
        }
    }

    /// Hits as a share of all that were routed to and went through slots, 0..1; None where none did.
    pub fn hit_rate(&self) -> Option<f64> {
        let all = self.hits + self.misses + self.dropped;
        (all > 0).then(|| self.hits as f64 / all as f64)
    }

    fn json(&self) -> Value {
        json!({
            "hits": self.hits, "misses": self.misses, "dropped": self.dropped, "passed_through": self.passed_through,
            "hit_rate": self.hit_rate(),
        })
    }
}

/// The steps of one phase of a run.
#[derive(Clone, Debug)]
pub struct Steps {
    /// Where it is known from: "as recorded", or the settings of a replay.
    pub source: String,
    pub phase: Phase,
    /// The model's block of each layer.
    pub blocks: Vec<u32>,
    /// Steps that are kept expert by expert.
    pub window: Range<usize>,
    /// Of the phase, by layer and step.
    layers: Vec<Vec<Fates>>,
    /// By layer and step of the window.
    picks: Vec<Vec<Vec<(u16, Fate)>>>,
    /// Of the other phase, all layers together.
    pub other: Fates,
}

impl Steps {
    /// Nothing yet. `from` is the first step that is kept expert by expert.
    pub fn new(source: String, phase: Phase, routed: &Routed, from: usize) -> Self {
        let blocks: Vec<u32> = routed.layers.iter().map(|l| l.block).collect();
        let n = blocks.len();
        let window = from..from.saturating_add((WINDOW_CELLS / n.max(1)).clamp(16, 128));
        let (layers, picks) = (vec![Vec::new(); n], vec![Vec::new(); n]);
        Self { source, phase, blocks, window, layers, picks, other: Fates::default() }
    }

    /// What the run recorded itself. The first use of a prefetched expert is a hit: it was there.
    pub fn recorded(routed: &Routed, phase: Phase, from: usize) -> Self {
        let mut steps = Self::new("as the run recorded it".into(), phase, routed, from);
        let mut picks = Vec::with_capacity(routed.k);
        for (layer, of_layer) in routed.layers.iter().enumerate() {
            for pass in &of_layer.passes {
                for row in pass.rows.clone() {
                    let seen = routed.row(layer, row);
                    let fate = |digit: u8| if digit == 0 { Fate::Miss } else { Fate::Hit };
                    picks.clear();
                    picks.extend(seen.ids.iter().zip(seen.residency).map(|(&id, &digit)| (id, fate(digit))));
                    steps.take(RanRow { layer, row, phase: pass.phase, picks: &picks });
                }
            }
        }
        steps
    }

    /// Takes in a row, in the order in which they ran in a layer.
    pub fn take(&mut self, ran: RanRow<'_>) {
        let mut fates = Fates::default();
        ran.picks.iter().for_each(|&(_, fate)| fates.add(fate));
        if ran.phase != self.phase {
            self.other = self.other.plus(fates);
            return;
        }
        let step = self.layers[ran.layer].len();
        self.layers[ran.layer].push(fates);
        if self.window.contains(&step) {
            self.picks[ran.layer].push(ran.picks.to_vec());
        }
    }

    /// Steps of the phase: of the layer that has most.
    pub fn n_steps(&self) -> usize {
        self.layers.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// All layers and steps of the phase.
    pub fn sum(&self) -> Fates {
        (0..self.layers.len()).map(|layer| self.of_layer(layer)).fold(Fates::default(), Fates::plus)
    }

    pub fn of_layer(&self, layer: usize) -> Fates {
        self.layers[layer].iter().copied().fold(Fates::default(), Fates::plus)
    }

    /// Misses of a token in all layers together.
    pub fn misses_per_token(&self) -> f64 {
        self.sum().misses as f64 / self.n_steps().max(1) as f64
    }

    pub(super) fn json(&self) -> Value {
        let layer = |i: usize| {
            let mut value = self.of_layer(i).json();
            value["block"] = self.blocks[i].into();
            value
        };
        let steps: Vec<Value> = (0..self.n_steps())
            .map(|step| {
                let of = self.layers.iter().filter_map(|l| l.get(step)).copied().fold(Fates::default(), Fates::plus);
                json!([of.hits, of.misses, of.dropped])
            })
            .collect();
        json!({
            "source": self.source, "phase": self.phase.as_str(), "n_steps": self.n_steps(), "all": self.sum().json(),
            "other_phase": self.other.json(), "misses_per_token": self.misses_per_token(),
            "layers": (0..self.layers.len()).map(layer).collect::<Value>(),
            "hits_misses_dropped_by_step": steps,
        })
    }

    pub(super) fn section(&self, mut section: Section) -> Result<Section> {
        let (sum, n) = (self.sum(), self.n_steps());
        let phase = self.phase.as_str();
        section.text(&format!(
            "Hits, misses and drops {}: {n} {phase} tokens in {} layers. {} of what was routed to was resident.",
            self.source,
            self.layers.len(),
            sum.hit_rate().map_or("Nothing is known".into(), |share| format!("{} %", number(100.0 * share))),
        ));
        let mut table = Table::new(["", "hits", "misses", "dropped", "passed through", "hit rate"]);
        let other = if self.phase == Phase::Decode { Phase::Prefill } else { Phase::Decode };
        for (name, fates) in [(phase, sum), (other.as_str(), self.other)] {
            let rate = fates.hit_rate().map_or("-".into(), |share| format!("{:.1} %", 100.0 * share));
            let counts = [fates.hits, fates.misses, fates.dropped, fates.passed_through].map(|n| n.to_string());
            table.row(std::iter::once(name.to_owned()).chain(counts).chain([rate]));
        }
        section.table(&table);
        let window = self.window.start.min(n)..self.window.end.min(n);
        if window.len() < n {
            let bin = n.div_ceil(BINS).max(1);
            let note = match bin {
                1 => "A column is a step.".into(),
                _ => format!("{n} steps are too many to show each: a column is the mean of {bin}."),
            };
            section.plot(&self.overview(bin), &note)?;
        }
        if !window.is_empty() {
            let cut = match window.len() == n {
                true => String::new(),
                false => {
                    format!(" Steps {} to {} of {n}; for others say --from-step.", window.start, window.end - 1)
                }
            };
            let note = format!("Point at a cell for its experts: * was a miss, - was dropped, ~ passed through.{cut}");
            section.plot(&self.matrix(window), &note)?;
        }
        section.plot(&self.by_layer(), "")?;
        Ok(section)
    }

    fn names(&self) -> Vec<String> {
        self.blocks.iter().map(u32::to_string).collect()
    }

    fn overview(&self, bin: usize) -> HeatMap {
        let value = Axis::new("misses a token").from(0.0);
        let mut map = HeatMap::new("Misses by step and layer, the whole run", "step", "layer", value);
        let n = self.n_steps().div_ceil(bin);
        map.columns = (0..n).map(|i| (i * bin).to_string()).collect();
        map.rows = self.names();
        for steps in &self.layers {
            let mean = |of: &[Fates]| of.iter().map(|f| f.misses).sum::<u64>() as f64 / of.len() as f64;
            let mut cells: Vec<Option<f64>> = steps.chunks(bin).map(|of| Some(mean(of))).collect();
            cells.resize(n, None);
            map.cells.extend(cells);
        }
        map
    }

    fn matrix(&self, window: Range<usize>) -> HeatMap {
        let value = Axis::new("misses").from(0.0).whole();
        let mut map = HeatMap::new("Experts, hits, misses and drops by step and layer", "step", "layer", value);
        map.columns = window.clone().map(|step| step.to_string()).collect();
        map.rows = self.names();
        let mut dropped = Vec::new();
        for (layer, picks) in self.layers.iter().zip(&self.picks) {
            for (i, step) in window.clone().enumerate() {
                let fates = layer.get(step);
                map.cells.push(fates.map(|f| f.misses as f64));
                dropped.push(fates.is_some_and(|f| f.dropped > 0));
                map.details.push(picks.get(i).map_or(String::new(), |picks| words(picks)));
            }
        }
        map.flagged = Some(("at least one was dropped".into(), dropped));
        map
    }

    fn by_layer(&self) -> LinePlot {
        let y = Axis::new("hit rate").percent().from(0.0).to(1.0);
        let title = format!("Hit rate by layer, {}", self.phase.as_str());
        let mut plot = LinePlot::new(title, Axis::new("layer").whole(), y);
        let rate = |i: usize| self.of_layer(i).hit_rate().unwrap_or(f64::NAN);
        let points = (0..self.layers.len()).map(|i| (f64::from(self.blocks[i]), rate(i))).collect();
        plot.lines.push(Line { name: "hit rate".into(), points, ..Line::default() });
        plot
    }
}

/// Experts, each with a sign for what became of it.
fn words(picks: &[(u16, Fate)]) -> String {
    let word = |&(id, fate): &(u16, Fate)| {
        let sign = match fate {
            Fate::Hit => "",
            Fate::Miss => "*",
            Fate::Dropped => "-",
            Fate::PassedThrough => "~",
        };
        format!("{id}{sign}")
    };
    picks.iter().map(word).collect::<Vec<_>>().join(" ")
}
