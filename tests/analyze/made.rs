//! Routings for the tests: made by hand, drawn, and the real ones.

use std::fs::File;
use std::io::{BufReader, Cursor};

use hotset::trace::routing::{LayerRows, RoutedPass};
use hotset::trace::{Phase, Routing, import};
use proptest::prelude::*;

use crate::shared::shared;

pub const HEADING: &str = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n";

/// A real trace by its name, or `None`, which is said.
pub fn real(name: &str) -> Option<Routing> {
    let file = File::open(shared(&format!("traces/{name}.route.csv"))?).unwrap();
    Some(import::route_csv_routing(&mut BufReader::new(file), None).unwrap())
}

pub fn csv(text: &str) -> hotset::Result<Routing> {
    import::route_csv_routing(&mut Cursor::new(text.as_bytes()), None)
}

/// To the digit that is printed.
pub fn percent(rate: f64) -> String {
    format!("{:.1}", 100.0 * rate)
}

/// One token a pass, all decode: by layer, by token.
pub fn decode(n_experts: usize, layers: &[Vec<Vec<u16>>]) -> Routing {
    let k = layers[0][0].len();
    let n = layers[0].len();
    let rows = |tokens: &Vec<Vec<u16>>| LayerRows {
        ids: tokens.concat(),
        weights: vec![1.0 / k as f32; n * k],
        residency: Vec::new(),
        ends: (1..=n).map(|token| token * k).collect(),
    };
    Routing {
        n_experts,
        k,
        blocks: (0..layers.len() as u32).collect(),
        expert_bytes: (0..layers.len() as u64).map(|layer| 10 + layer).collect(),
        unknown_weights: 0,
        passes: vec![RoutedPass { phase: Phase::Decode, turn: 0 }; n],
        layers: layers.iter().map(rows).collect(),
    }
}

/// Rows of two layers with two experts a token, of which the first passes are batches.
pub fn routings() -> impl Strategy<Value = Routing> {
    let row = proptest::sample::subsequence((0..7u16).collect::<Vec<_>>(), 2).prop_shuffle();
    let tokens = proptest::collection::vec([row.clone(), row], 4..24);
    (tokens, 1..4usize, any::<bool>()).prop_map(|(tokens, rows, ragged)| {
        let of_layer = |layer: usize| tokens.iter().map(|t| t[layer].clone()).collect::<Vec<_>>();
        let mut routing = decode(7, &[of_layer(0), of_layer(1)]);
        // the first tokens are one prefill
        routing.passes.drain(..rows - 1);
        routing.passes[0].phase = Phase::Prefill;
        routing.layers.iter_mut().for_each(|l| drop(l.ends.drain(..rows - 1)));
        if ragged {
            // of which the last layer saw the last token only
            let last = &mut routing.layers[1];
            last.ids.drain(..2 * (rows - 1));
            last.weights.drain(..2 * (rows - 1));
            last.ends.iter_mut().for_each(|end| *end -= 2 * (rows - 1));
        }
        routing
    })
}
