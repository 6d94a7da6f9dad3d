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

/// How long a pass took, as far as its line says so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PassTime {
    /// From the end of the pass before this one to the end of this one.
    pub wall_ns: Option<u64>,
    /// From the pass's first call to its last.
    pub pass_ns: Option<u64>,
    /// Spent waiting for reads.
    pub wait_ns: Option<u64>,
}

/// Reads a metrics log and sums it up. `Format`, with line and column, where a field that is wanted is missing or no such number. Other
/// fields are ignored.
pub fn observed(input: &mut (impl BufRead + Seek)) -> Result<Vec<Observed>> {
    let mut all: Vec<Observed> = Vec::new();
    observed_passes(input, |one, _| {
        let same = |a: &&mut Observed| {
            (a.phase, a.slots, a.lambda.to_bits(), a.drop.to_bits())
                == (one.phase, one.slots, one.lambda.to_bits(), one.drop.to_bits())
        };
        match all.iter_mut().find(same) {
            Some(sum) => sum.add(&one),
            None => all.push(one),
        }
    })?;
    Ok(all)
}

/// The same, pass by pass.
pub fn observed_passes(input: &mut (impl BufRead + Seek), mut take: impl FnMut(Observed, PassTime)) -> Result<()> {
    let mut passes = 0u64;
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
        let line = Line { number, text, names: heading.as_deref(), fields };
        take(line.read()?, line.time()?);
        passes += 1;
    }
    if passes == 0 {
        return Err(err!(Format, "the metrics log has no passes"));
    }
    Ok(())
}

fn of_csv(number: u64, names: &[String], text: &str) -> Result<Map<String, Value>> {
    let n = text.split(',').count();
    if n != names.len() {
        let wanted = names.len();
        let column = if n > wanted { text.split(',').take(wanted).map(|f| f.len() + 1).sum() } else { text.len() } + 1;
        return Err(err!(
            Format,
            "line {number}, column {column}: {wanted} fields wanted, as in the heading, {n} found"
        ));
    }
    let value = |field: &str| serde_json::from_str(field).unwrap_or_else(|_| Value::from(field));
    Ok(names.iter().cloned().zip(text.split(',').map(value)).collect())
}

/// A pass.
struct Line<'a> {
    number: u64,
    text: &'a str,
    /// Of the columns, if it is CSV.
    names: Option<&'a [String]>,
    fields: Map<String, Value>,
}

impl Line<'_> {
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

    fn time(&self) -> Result<PassTime> {
        let of = |name: &str| match self.fields.get(name) {
            // CSV leaves out what JSON calls null.
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(empty)) if empty.is_empty() => Ok(None),
            Some(_) => self.whole(name).map(Some),
        };
        Ok(PassTime { wall_ns: of("wall_ns")?, pass_ns: of("pass_ns")?, wait_ns: of("wait_ns")? })
    }

    fn get(&self, name: &str) -> Result<&Value> {
        self.fields.get(name).ok_or_else(|| {
            let (line, column) = (self.number, self.text.len() + 1);
            err!(Format, "line {line}, column {column}: no {name}")
        })
    }

    /// Where a field lies, from 1, in bytes.
    fn column(&self, name: &str) -> usize {
        let before = match self.names {
            Some(names) => {
                let fields = names.iter().zip(self.text.split(',')).take_while(|(n, _)| *n != name);
                Some(fields.map(|(_, field)| field.len() + 1).sum())
            }
            None => self.text.find(&format!("\"{name}\"")),
        };
        before.unwrap_or(0) + 1
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
        let (line, column) = (self.number, self.column(name));
        err!(Format, "line {line}, column {column}: {name}: {wanted} wanted, {found} found")
    }
}

impl Observed {
    /// Adds the sums of other passes of this phase.
    pub fn add(&mut self, other: &Self) {
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
