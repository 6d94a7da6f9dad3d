//! `<trace>.range`: largest minus smallest score of each whole row, an f32 (little endian) per token and layer, tokens outermost. Two of
//! the delta modes are a share of it. NaN where the row had no finite range.

use std::path::Path;

use crate::error::{Result, err};
use crate::trace::{Trace, sidecar};

pub struct Ranges {
    n_layers: usize,
    values: Vec<f32>,
}

impl Ranges {
    /// Those beside a trace; None where there is no such file, `Format` where it has fewer than the trace has rows.
    pub fn beside(path: &Path, trace: &Trace) -> Result<Option<Self>> {
        if !sidecar::range_path(path).exists() {
            return Ok(None);
        }
        let values = sidecar::read_ranges(path, trace.n_layers())?;
        Self::new(values, trace.n_layers(), trace.n_tokens()).map(Some)
    }

    /// `values`: a token after the other, of each layer.
    pub fn new(values: Vec<f32>, n_layers: usize, n_tokens: usize) -> Result<Self> {
        let (rows, n) = (n_layers * n_tokens, values.len());
        if n < rows {
            return Err(err!(Format, "ranges: {n} numbers, {n_tokens} tokens in {n_layers} layers have {rows}"));
        }
        Ok(Self { n_layers, values })
    }

    /// Of one layer, by token; None where the row had no finite range.
    pub fn layer(&self, layer: usize) -> LayerRanges<'_> {
        LayerRanges { ranges: self, layer }
    }
}

#[derive(Clone, Copy)]
pub struct LayerRanges<'a> {
    ranges: &'a Ranges,
    layer: usize,
}

impl LayerRanges<'_> {
    pub fn at(&self, token: usize) -> Option<f64> {
        let range = self.ranges.values[token * self.ranges.n_layers + self.layer];
        range.is_finite().then_some(f64::from(range))
    }
}
