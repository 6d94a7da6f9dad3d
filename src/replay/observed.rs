//! What a run did, by its metrics log (CSV or JSON lines, as the hook writes them): the sums of its passes, by phase and settings. Beside the
//! replays of the same run's trace this is the third view of dropping: static, closed loop, observed.

use std::io::{BufRead, Seek};

use serde_json::{Map, Value};

use crate::error::{Result, err};
use crate::trace::{Phase, import::Lines};

/// The passes of one phase under the same settings.
#[derive(Clone, Debug, PartialEq)]
pub struct Observed {
    pub phase: Phase,
    pub slots: u64,
    pub lambda: f64,
    /// F.
    pub drop: f64,
    pub tokens: u64,
    pub hits: u64,
    pub misses: u64,
    pub dropped: u64,
    pub swapped: u64,
    pub bytes: u64,
    /// Tokens times layers that passed through.
    pub pass_through_rows: u64,
    /// Sums over rows of shares of the row's routing weight.
    pub mass_dropped: f64,
    pub mass_swapped: f64,
}

/// Reads a metrics log. `Format`, with the line, where a field that is wanted is missing or no such number. Other fields are ignored.
pub fn observed(input: &mut (impl BufRead + Seek)) -> Result<Vec<Observed>> {
    let mut all: Vec<Observed> = Vec::new();
    let mut heading: Option<Vec<String>> = None;
    let mut lines = Lines::new(input)?;
    while let Some((number, line)) = lines.next()? {
        let text = std::str::from_utf8(line)
            .map_err(|e| err!(Format, "line {number}, column {}: {e}", e.valid_up_to() + 1))?;
        if text.is_empty() {
            continue;
        }
        let fields = if text.starts_with('{') {
            serde_json::from_str(text).map_err(|e| err!(Format, "line {number}, column {}: {e}", e.column()))?
        } else {
            let Some(names) = &heading else {
                heading = Some(text.split(',').map(str::to_owned).collect());
                continue;
            };
            of_csv(number, names, text)?
        };
        let one = Line { number, fields }.read()?;
        let same = |a: &&mut Observed| {
            (a.phase, a.slots, a.lambda.to_bits(), a.drop.to_bits())
                == (one.phase, one.slots, one.lambda.to_bits(), one.drop.to_bits())
        };
        match all.iter_mut().find(same) {
            Some(sum) => sum.add(&one),
            None => all.push(one),
        }
    }
    if all.is_empty() {
        return Err(err!(Format, "the metrics log has no passes"));
    }
    Ok(all)
}

fn of_csv(number: u64, names: &[String], text: &str) -> Result<Map<String, Value>> {
    let n = text.split(',').count();
    if n != names.len() {
        return Err(err!(Format, "line {number}: {} fields wanted, as in the heading, {n} found", names.len()));
    }
    let value = |field: &str| serde_json::from_str(field).unwrap_or_else(|_| Value::from(field));
    Ok(names.iter().cloned().zip(text.split(',').map(value)).collect())
}

/// A pass.
struct Line {
    number: u64,
    fields: Map<String, Value>,
}

impl Line {
    fn read(&self) -> Result<Observed> {
        let name = self.get("phase")?.as_str().unwrap_or_default();
        let phase = Phase::from_name(name).ok_or_else(|| self.wrong("phase", "\"decode\" or \"prefill\""))?;
        Ok(Observed {
            phase,
            slots: self.whole("slots")?,
            lambda: self.number("lambda")?,
            drop: self.number("drop")?,
            tokens: self.whole("tokens")?,
            hits: self.whole("hits")?,
            misses: self.whole("misses")?,
            dropped: self.whole("dropped")?,
            swapped: self.whole("swapped")?,
            bytes: self.whole("read_bytes")?,
            pass_through_rows: self.whole("pass_through_rows")?,
            mass_dropped: self.number("mass_dropped")?,
            mass_swapped: self.number("mass_swapped")?,
        })
    }

    fn get(&self, name: &str) -> Result<&Value> {
        self.fields.get(name).ok_or_else(|| err!(Format, "line {}: no {name}", self.number))
    }

    fn whole(&self, name: &str) -> Result<u64> {
        self.get(name)?.as_u64().ok_or_else(|| self.wrong(name, "a whole number"))
    }

    fn number(&self, name: &str) -> Result<f64> {
        let number = self.get(name)?.as_f64().filter(|n| n.is_finite() && *n >= 0.0);
        number.ok_or_else(|| self.wrong(name, "a number of 0 or more"))
    }

    fn wrong(&self, name: &str, wanted: &str) -> crate::Error {
        let found =
            self.fields.get(name).map(|v| v.to_string().chars().take(40).collect::<String>()).unwrap_or_default();
        err!(Format, "line {}: {name}: {wanted} wanted, {found} found", self.number)
    }
}

impl Observed {
    fn add(&mut self, other: &Self) {
        let sums = [
            (&mut self.tokens, other.tokens),
            (&mut self.hits, other.hits),
            (&mut self.misses, other.misses),
            (&mut self.dropped, other.dropped),
            (&mut self.swapped, other.swapped),
            (&mut self.bytes, other.bytes),
            (&mut self.pass_through_rows, other.pass_through_rows),
        ];
        for (sum, n) in sums {
            *sum = sum.saturating_add(n);
        }
        self.mass_dropped += other.mass_dropped;
        self.mass_swapped += other.mass_swapped;
    }

    /// Share of the routing weight that did not run, 0..1, in the mean over the rows of so many layers that went through slots.
    pub fn mass_lost(&self, layers: usize) -> f64 {
        let rows = self.tokens.saturating_mul(layers as u64).saturating_sub(self.pass_through_rows);
        super::drop_static::share(self.mass_dropped + self.mass_swapped, rows as f64)
    }
}
