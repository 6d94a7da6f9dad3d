//! `hotset analyze`: what the routing of a run looks like.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use hotset::analyze::{
    DeltaShare, Overlap, Popularity, Predicted, Predictor, Reuse, WeightEntropy, hit_curve, predict, working_set,
};
use hotset::replay::{Ranges, estimate::round};
use hotset::trace::{Phase, Routing, Sidecar, Trace, import};
use hotset::{Error, ErrorKind};
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::output;

/// Show what the routing of a run looks like: popularity, reuse, overlap, predictors, working sets, weights, and hits by cache size
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  hotset analyze run.q4rt
  hotset analyze qwen.route.csv --per-layer
  hotset analyze run.q4rt --json | jq .hit_curve

Words:
  predictors    each names k experts of a layer; the share of a decode token's experts that are among them
  gini          0: all experts are used alike; near 1: few have all picks
  reuse         other experts of the layer that were used since; the hit curve is what follows from it for LRU, prefill and decode
                replayed, decode counted, without warm-up
  delta share   z0 - z[k-1] as a share of the whole row's range, where <trace>.range is there: lambda in token_topk is to be
                multiplied by it to be the same in token_full
For one byte budget over all layers: hotset global-replay.")]
pub struct Args {
    /// A Q4RT trace, or a route_trace v1 CSV (.csv)
    trace: PathBuf,
    /// Experts that a token uses in a layer [default: as the trace says]
    #[arg(long, value_name = "K")]
    k_used: Option<usize>,
    /// A line for each layer, too
    #[arg(long)]
    per_layer: bool,
    /// Print one JSON object, with every layer and every capacity
    #[arg(long)]
    json: bool,
}

/// Tokens that are looked back on.
const LAGS: usize = 8;
/// Tokens of a working set.
const WINDOWS: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 128];

/// The routing of a Q4RT trace, or of a route_trace v1 CSV.
pub fn routing_of(path: &Path, k: Option<usize>) -> Result<Routing> {
    let name = || path.display().to_string();
    if !is_csv(path) {
        let trace = Trace::open(path)?;
        return Routing::of_trace(&trace, Sidecar::read_beside(path)?.as_ref(), k).with_context(name);
    }
    let mut input = BufReader::new(File::open(path).with_context(name)?);
    let routing = import::route_csv_routing(&mut input, None).with_context(name)?;
    match k.filter(|k| *k != routing.k) {
        Some(k) => {
            let detail = format!("{}: k {k}, the rows have {} slots", path.display(), routing.k);
            Err(Error::new(ErrorKind::Argument, detail).into())
        }
        None => Ok(routing),
    }
}

fn is_csv(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "csv")
}

/// One layer, looked at.
struct Layer {
    block: u32,
    popularity: Popularity,
    reuse: Reuse,
    entropy: WeightEntropy,
    predicted: [Predicted; 4],
    overlap: Overlap,
    working_sets: Vec<Option<f64>>,
    delta: Option<DeltaShare>,
}

impl Layer {
    fn of(routing: &Routing, layer: usize, ranges: Option<&(Trace, Ranges)>) -> hotset::Result<Self> {
        let delta = ranges.map(|(trace, ranges)| DeltaShare::of(trace, routing.k, ranges, layer));
        Ok(Self {
            block: routing.blocks[layer],
            popularity: Popularity::of(routing, layer),
            reuse: Reuse::of(routing, layer),
            entropy: WeightEntropy::of(routing, layer),
            predicted: predict::predict(routing, layer),
            overlap: predict::overlap(routing, layer, LAGS),
            working_sets: WINDOWS.iter().map(|&window| working_set(routing, layer, window)).collect(),
            delta: delta.transpose()?,
        })
    }

    /// Facts of a layer, or means of layers: a name, what it is, and how many digits it is printed with.
    fn numbers(&self, k: usize) -> Vec<(&'static str, Option<f64>, usize)> {
        let p = &self.popularity;
        let known = self.entropy.rows > 0;
        vec![
            ("distinct", Some(p.distinct() as f64), 1),
            ("gini", Some(p.gini()), 3),
            ("top k %", Some(100.0 * p.share_of_top(k)), 1),
            ("for 50 %", Some(p.experts_for(0.5) as f64), 1),
            ("for 90 %", Some(p.experts_for(0.9) as f64), 1),
            ("bits", Some(p.entropy()), 2),
            ("reuse p50", self.reuse.quantile(0.5).map(|n| n as f64), 1),
            ("reuse p90", self.reuse.quantile(0.9).map(|n| n as f64), 1),
            ("weight bits", known.then_some(self.entropy.bits), 2),
            ("heaviest", known.then_some(self.entropy.heaviest), 3),
            ("delta share", self.delta.filter(|d| d.rows > 0).map(|d| d.mean), 3),
        ]
    }

    fn json(&self, k: usize) -> Value {
        let mut value = json!({ "block": self.block });
        for (name, number, _) in self.numbers(k) {
            value[name.replace(" %", "_percent").replace(' ', "_")] = json!(number.map(|n| round(n, 4)));
        }
        value["rows_with_unknown_weights"] = json!(self.entropy.unknown);
        value["predictors"] = predictors_json(&self.predicted);
        value["overlap_at_lag"] = shares(&self.overlap.at_lag);
        value["working_set"] = self.working_sets.iter().map(|set| set.map(|n| round(n, 2))).collect();
        value["reuse"] = json!({
            "prefill": self.reuse.prefill,
            "decode": self.reuse.decode,
            "first_uses_prefill": self.reuse.first_uses[0],
            "first_uses_decode": self.reuse.first_uses[1],
        });
        if let Some(delta) = &self.delta {
            value["delta"] =
                json!({ "least": delta.least, "most": delta.most, "rows": delta.rows, "unknown": delta.unknown });
        }
        value
    }
}

fn shares(predicted: &[Predicted]) -> Value {
    predicted.iter().map(|p| json!(p.share().map(|s| round(s, 4)))).collect()
}

fn predictors_json(predicted: &[Predicted; 4]) -> Value {
    let pairs = Predictor::ALL.iter().zip(predicted);
    pairs.map(|(p, got)| (p.name().to_owned(), json!(got.share().map(|s| round(s, 4))))).collect()
}

/// All layers together.
struct Whole<'a> {
    routing: &'a Routing,
    layers: &'a [Layer],
}

impl Whole<'_> {
    fn sum(&self, of: impl Fn(&Layer) -> Option<Predicted>) -> Predicted {
        self.layers.iter().filter_map(of).fold(Predicted::default(), Predicted::plus)
    }

    fn predicted(&self) -> [Predicted; 4] {
        std::array::from_fn(|i| self.sum(|l| Some(l.predicted[i])))
    }

    fn overlap(&self) -> Overlap {
        let by_lag = |of: fn(&Overlap) -> &[Predicted]| {
            (0..LAGS).map(|lag| self.sum(|l| of(&l.overlap).get(lag).copied())).collect()
        };
        Overlap { at_lag: by_lag(|o| &o.at_lag), within: by_lag(|o| &o.within) }
    }

    /// Mean over layers, by window.
    fn working_sets(&self) -> Vec<Option<f64>> {
        (0..WINDOWS.len()).map(|i| mean(self.layers.iter().map(|l| l.working_sets[i]))).collect()
    }

    /// Share of decode picks that hit, by slots of each layer from 0 on; None without decode picks.
    fn hit_curve(&self) -> Option<Vec<f64>> {
        hit_curve(self.layers.iter().map(|l| &l.reuse))
    }
}

/// Of those that are known.
fn mean(values: impl Iterator<Item = Option<f64>>) -> Option<f64> {
    let known: Vec<f64> = values.flatten().collect();
    (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64)
}

pub fn run(args: &Args) -> Result<()> {
    let routing = routing_of(&args.trace, args.k_used)?;
    let mut ranges = None;
    if !is_csv(&args.trace) {
        let trace = Trace::open(&args.trace)?;
        ranges = Ranges::beside(&args.trace, &trace)?.map(|ranges| (trace, ranges));
    }
    let layers = (0..routing.layers.len()).into_par_iter();
    let layers =
        layers.map(|layer| Layer::of(&routing, layer, ranges.as_ref())).collect::<hotset::Result<Vec<Layer>>>()?;
    let whole = Whole { routing: &routing, layers: &layers };
    if args.json { json(&whole) } else { text(&whole, args.per_layer) }
}

fn text(whole: &Whole, per_layer: bool) -> Result<()> {
    let (routing, layers) = (whole.routing, whole.layers);
    let mut text = format!(
        "{} layers of {} experts, k {}, tokens: {} prefill, {} decode\n",
        layers.len(),
        routing.n_experts,
        routing.k,
        routing.tokens(Phase::Prefill),
        routing.tokens(Phase::Decode)
    );
    if routing.unknown_weights > 0 {
        text += &format!("weights that are not known: {}\n", routing.unknown_weights);
    }
    let percent = |share: Option<f64>| share.map_or("-".to_owned(), |s| format!("{:.1}", 100.0 * s));

    let rows: Vec<_> = Predictor::ALL
        .iter()
        .zip(whole.predicted())
        .map(|(predictor, got)| vec![predictor.name().to_owned(), percent(got.share()), got.guesses.to_string()])
        .collect();
    text += &format!("\n{}", output::table(&["predictor", "right %", "guesses"], &rows));

    let overlap = whole.overlap();
    let rows: Vec<_> = (0..LAGS)
        .map(|i| vec![(i + 1).to_string(), percent(overlap.at_lag[i].share()), percent(overlap.within[i].share())])
        .collect();
    text += &format!("\n{}", output::table(&["tokens before", "in that one %", "in any since %"], &rows));

    let sets = whole.working_sets();
    let rows: Vec<_> = WINDOWS
        .iter()
        .zip(&sets)
        .filter_map(|(window, set)| set.map(|set| vec![window.to_string(), format!("{set:.1}")]))
        .collect();
    text += &format!("\n{}", output::table(&["decode tokens", "experts a layer"], &rows));

    if let Some(curve) = whole.hit_curve() {
        let mut slots: Vec<usize> = (0..).map(|i| routing.k << i).take_while(|&n| n < routing.n_experts).collect();
        slots.extend([routing.n_experts / 4, routing.n_experts / 2, 3 * routing.n_experts / 4, routing.n_experts]);
        slots.retain(|&n| n >= routing.k);
        slots.sort_unstable();
        slots.dedup();
        let rows: Vec<_> = slots.iter().map(|&n| vec![n.to_string(), percent(Some(curve[n]))]).collect();
        text += &format!("\n{}", output::table(&["slots a layer", "decode hit %, lru"], &rows));
    }

    let numbers: Vec<_> = layers.iter().map(|l| l.numbers(routing.k)).collect();
    let Some(first) = numbers.first() else { return output::print(&text) };
    let shown: Vec<usize> = (0..first.len()).filter(|&i| numbers.iter().any(|n| n[i].1.is_some())).collect();
    let mut heading = vec!["layer"];
    heading.extend(shown.iter().map(|&i| first[i].0));
    let cell = |value: Option<f64>, digits: usize| value.map_or("-".to_owned(), |v| format!("{v:.digits$}"));
    let row = |label: String, value: &dyn Fn(usize) -> Option<f64>| -> Vec<String> {
        std::iter::once(label).chain(shown.iter().map(|&i| cell(value(i), first[i].2))).collect()
    };
    let of = |i: usize| numbers.iter().filter_map(move |n| n[i].1);
    let mut rows = vec![
        row("mean".into(), &|i| mean(numbers.iter().map(|n| n[i].1))),
        row("least".into(), &|i| of(i).reduce(f64::min)),
        row("most".into(), &|i| of(i).reduce(f64::max)),
    ];
    if per_layer {
        rows.extend(layers.iter().zip(&numbers).map(|(layer, n)| row(layer.block.to_string(), &|i| n[i].1)));
    }
    text += &format!("\n{}", output::table(&heading, &rows));
    output::print(&text)
}

fn json(whole: &Whole) -> Result<()> {
    let (routing, overlap) = (whole.routing, whole.overlap());
    let windows = WINDOWS.iter().zip(whole.working_sets());
    output::print_json(&json!({
        "n_layers": whole.layers.len(),
        "n_experts": routing.n_experts,
        "k": routing.k,
        "tokens_prefill": routing.tokens(Phase::Prefill),
        "tokens_decode": routing.tokens(Phase::Decode),
        "unknown_weights": routing.unknown_weights,
        "predictors": predictors_json(&whole.predicted()),
        "overlap_at_lag": shares(&overlap.at_lag),
        "overlap_within": shares(&overlap.within),
        "windows": windows.map(|(tokens, experts)| json!({ "tokens": tokens, "experts": experts.map(|n| round(n, 2)) })).collect::<Value>(),
        "hit_curve": whole.hit_curve().map(|curve| curve.iter().map(|&share| round(share, 4)).collect::<Vec<_>>()),
        "layers": whole.layers.iter().map(|l| l.json(routing.k)).collect::<Value>(),
    }))
}
