//! One line of a route_trace v1 file: a row of numbers, or a `#` line of facts.

use std::collections::BTreeMap;

use half::f16;

use super::MAX_EXPERTS;
use super::lines::short;
use crate::error::{Result, err};
use crate::trace::block::Phase;
use crate::trace::q4rt::saturating_f16;

/// The line that names the columns.
pub const HEADING: &str = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes";

/// A slot of a token in a layer.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub line: u64,
    pub turn: u32,
    pub phase: Phase,
    pub step: u32,
    pub layer: u16,
    pub slot: u16,
    pub expert: u16,
    /// As the file has it; NaN = not known.
    pub weight: f32,
    /// The logarithm of the weight; NaN = not known.
    pub score: f16,
    pub residency: u8,
    /// Bytes that were read for it.
    pub expert_bytes: u64,
}

impl Row {
    pub fn parse(number: u64, line: &[u8], facts: &Facts) -> Result<Self> {
        let mut fields = Fields { line, number, at: 0, count: 0 };
        let turn = fields.whole("turn", u32::MAX.into())? as u32;
        let phase = if fields.whole("phase", 1)? == 0 { Phase::Prefill } else { Phase::Decode };
        let step = fields.whole("step", u64::from(u32::MAX) - 1)? as u32;
        let layer = fields.whole("layer", facts.n_layers.unwrap_or(u16::MAX.into()) - 1)? as u16;
        let slot = fields.whole("slot", facts.k.unwrap_or(MAX_EXPERTS) - 1)? as u16;
        let expert = fields.whole("expert", facts.n_experts.unwrap_or(MAX_EXPERTS) - 1)? as u16;
        let weight = fields.weight()?;
        let row = Self {
            line: number,
            turn,
            phase,
            step,
            layer,
            slot,
            expert,
            weight: weight.clamp(0.0, f32::MAX.into()) as f32,
            // A weight of 0 becomes the lowest score.
            score: saturating_f16(weight.ln() as f32),
            residency: fields.whole("residency", 2)? as u8,
            expert_bytes: fields.whole("expert_bytes", u64::MAX)?,
        };
        match fields.next() {
            None => Ok(row),
            Some((column, _)) => Err(err!(Format, "line {number}, column {column}: a field after the 9 of a row")),
        }
    }
}

/// The fields of a line from left to right.
struct Fields<'a> {
    line: &'a [u8],
    number: u64,
    at: usize,
    count: usize,
}

impl<'a> Fields<'a> {
    /// The next field, and its column.
    fn next(&mut self) -> Option<(usize, &'a [u8])> {
        let rest = self.line.get(self.at..)?;
        let length = rest.iter().position(|&b| b == b',').unwrap_or(rest.len());
        let column = self.at + 1;
        self.at += length + 1;
        self.count += 1;
        Some((column, &rest[..length]))
    }

    fn wanted(&mut self, name: &str) -> Result<(usize, &'a [u8])> {
        let (number, count, end) = (self.number, self.count, self.line.len() + 1);
        self.next().ok_or_else(|| err!(Format, "line {number}, column {end}: no {name}: {count} fields of 9"))
    }

    fn whole(&mut self, name: &str, max: u64) -> Result<u64> {
        let (column, field) = self.wanted(name)?;
        let digits = !field.is_empty() && field.iter().all(u8::is_ascii_digit);
        let value = std::str::from_utf8(field).ok().filter(|_| digits).and_then(|text| text.parse().ok());
        value.filter(|&n: &u64| n <= max).ok_or_else(|| {
            let at = format!("line {}, column {column}: {name}", self.number);
            err!(Format, "{at}: a whole number from 0 to {max} wanted, {} found", short(field))
        })
    }

    fn weight(&mut self) -> Result<f64> {
        let (column, field) = self.wanted("weight")?;
        let value = std::str::from_utf8(field).ok().and_then(|text| text.parse::<f64>().ok());
        // NaN passes: not known
        value.filter(|w| !(*w < 0.0 || w.is_infinite())).ok_or_else(|| {
            err!(
                Format,
                "line {}, column {column}: weight: a finite number, not below 0, or nan wanted, {} found",
                self.number,
                short(field)
            )
        })
    }
}

/// Bytes of an expert, and of the dense weights, of a layer.
#[derive(Clone, Copy, Debug, Default)]
pub struct LayerBytes {
    pub expert: Option<u64>,
    pub dense: Option<u64>,
}

/// What the `#` lines say: `key=value`, and of each layer its bytes.
#[derive(Debug, Default)]
pub struct Facts {
    pub n_layers: Option<u64>,
    pub n_experts: Option<u64>,
    pub k: Option<u64>,
    pub model: Option<String>,
    pub architecture: Option<String>,
    /// `residency=unknown`: that column says nothing.
    pub no_residency: bool,
    pub layers: BTreeMap<u16, LayerBytes>,
}

impl Facts {
    /// Takes a line that begins with `#`. Keys that are not known are ignored, as is what is no `key=value`.
    pub fn take(&mut self, number: u64, line: &[u8]) -> Result<()> {
        let text = String::from_utf8_lossy(line);
        let text = text.trim_start_matches('#').trim_start();
        if let Some(version) = text.strip_prefix("route_trace") {
            if version.trim() != "v1" {
                let found = short(version.trim().as_bytes());
                return Err(err!(Format, "line {number}: route_trace version v1 wanted, {found} found"));
            }
        }
        let (mut layer, mut bytes) = (None, LayerBytes::default());
        for (key, value) in text.split_ascii_whitespace().filter_map(|word| word.split_once('=')) {
            let whole = |max: u64| {
                value.parse().ok().filter(|n| (1..=max).contains(n)).ok_or_else(|| {
                    let column = 1 + offset(line, value);
                    let found = short(value.as_bytes());
                    err!(
                        Format,
                        "line {number}, column {column}: {key}: a number from 1 to {max} wanted, {found} found"
                    )
                })
            };
            match key {
                "n_layer" => self.n_layers = Some(whole(u16::MAX.into())?),
                "n_expert" => self.n_experts = Some(whole(MAX_EXPERTS)?),
                "n_expert_used" => self.k = Some(whole(MAX_EXPERTS)?),
                "model" => self.model = Some(value.to_owned()),
                "arch" => self.architecture = Some(value.to_owned()),
                "residency" => self.no_residency = value == "unknown",
                "layer" => layer = Some(if value == "0" { 0 } else { whole(u64::from(u16::MAX) - 1)? as u16 }),
                "expert_bytes" if value != "0" => bytes.expert = Some(whole(u64::MAX)?),
                "dense_bytes" if value != "0" => bytes.dense = Some(whole(u64::MAX)?),
                _ => {}
            }
        }
        if let Some(layer) = layer {
            self.layers.insert(layer, bytes);
        }
        Ok(())
    }
}

/// Where a value stands in its line.
fn offset(line: &[u8], value: &str) -> usize {
    line.windows(value.len().max(1)).position(|w| w == value.as_bytes()).unwrap_or(0)
}
