//! What was measured, token by token: the hook's metrics log (CSV or JSON lines; `hook::metrics`), or a bmoe_metrics v1 CSV, which another
//! runtime writes (`#` lines of facts, then `step,...,wall_ms,...`). Only decode passes whose time is known are kept. A log is untrusted: a
//! fault is named with its line.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Seek};
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{Error, Result, err};
use crate::trace::import::Lines;

/// What is summed per token, by [`Row::counts`].
pub const COUNTS: [&str; 8] =
    ["read_bytes", "hits", "misses", "dropped", "swapped", "mass_lost", "major_faults", "disk_bytes"];

/// Index in [`COUNTS`].
pub const READ_BYTES: usize = 0;
pub const HITS: usize = 1;
pub const MISSES: usize = 2;
pub const DROPPED: usize = 3;
pub const SWAPPED: usize = 4;
pub const MASS_LOST: usize = 5;
pub const MAJOR_FAULTS: usize = 6;

/// A pass that takes longer is none: 11 days.
const MAX_NS: f64 = 1e15;

/// One decode pass.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Index in [`Log::cells`]; None: between blocks, or no schedule.
    pub cell: Option<usize>,
    pub block: Option<u64>,
    /// The cache is still that of the block before.
    pub washout: bool,
    pub tokens: u32,
    /// Of the pass.
    pub wall_ns: f64,
    /// What of it was not waiting for reads.
    pub compute_ns: Option<f64>,
    /// Of the pass; NaN: the log does not say. `mass_lost`: sum over rows and layers of shares of the routing weight.
    pub counts: [f64; COUNTS.len()],
    pub slots: Option<u32>,
    /// 0 nominal .. 3 critical.
    pub thermal_level: Option<u8>,
}

/// Of these passes together.
pub fn tokens<'a>(rows: impl IntoIterator<Item = &'a Row>) -> u64 {
    rows.into_iter().map(|r| u64::from(r.tokens)).sum()
}

/// Where the name is among those that have appeared; a new one is added.
pub(super) fn index_of(names: &mut Vec<String>, name: &str) -> usize {
    names.iter().position(|n| n == name).unwrap_or_else(|| {
        names.push(name.to_owned());
        names.len() - 1
    })
}

/// A run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Log {
    /// The file's name without its ending.
    pub name: String,
    /// Names of the cells, as they first appear. Empty: a run without a schedule.
    pub cells: Vec<String>,
    /// `#` lines: what `key=value` words say.
    pub facts: BTreeMap<String, String>,
    pub rows: Vec<Row>,
}

impl Log {
    /// `Io` where the file cannot be read, else `Format`: `FILE: line N: reason`.
    pub fn load(path: &Path) -> Result<Self> {
        let here = |e: Error| Error::new(e.kind, format!("{}: {}", path.display(), e.detail));
        let file = File::open(path).map_err(|e| err!(Io, "{}: {e}", path.display()))?;
        let name = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
        Self::parse(&mut BufReader::new(file), name).map_err(here)
    }

    pub fn parse(input: &mut (impl BufRead + Seek), name: String) -> Result<Self> {
        let mut log = Self { name, ..Self::default() };
        let mut heading: Option<Vec<String>> = None;
        let mut lines = Lines::new(input)?;
        while let Some((number, line)) = lines.next()? {
            let text = std::str::from_utf8(line)
                .map_err(|e| err!(Format, "line {number}, column {}: {e}", e.valid_up_to() + 1))?;
            if let Some(facts) = text.strip_prefix('#') {
                let pairs = facts.split_whitespace().filter_map(|word| word.split_once('='));
                log.facts.extend(pairs.map(|(key, value)| (key.to_owned(), value.to_owned())));
            } else if text.starts_with('{') {
                let fields: Map<String, Value> = serde_json::from_str(text)
                    .map_err(|e| err!(Format, "line {number}, column {}: {e}", e.column()))?;
                log.push(&Line { number, fields: Fields::Json(&fields) })?;
            } else if let Some(names) = &heading {
                let found: Vec<&str> = text.split(',').collect();
                if found.len() == names.len() {
                    log.push(&Line { number, fields: Fields::Csv(names, &found) })?;
                } else if !text.is_empty() {
                    let (n, wanted) = (found.len(), names.len());
                    return Err(err!(Format, "line {number}: {wanted} fields wanted, as in the heading, {n} found"));
                }
            } else if !text.is_empty() {
                heading = Some(text.split(',').map(str::to_owned).collect());
            }
        }
        if log.rows.is_empty() {
            return Err(err!(Format, "no decode pass with a time in it"));
        }
        Ok(log)
    }

    fn push(&mut self, line: &Line) -> Result<()> {
        let row = if line.has("wall_ms") { Some(line.foreign()?) } else { line.own(&mut self.cells)? };
        self.rows.extend(row);
        Ok(())
    }
}

/// The fields of a line, by name.
enum Fields<'a> {
    Csv(&'a [String], &'a [&'a str]),
    Json(&'a Map<String, Value>),
}

struct Line<'a> {
    number: u64,
    fields: Fields<'a>,
}

impl Line<'_> {
    /// As text; None: not there, empty or null.
    fn text(&self, name: &str) -> Option<std::borrow::Cow<'_, str>> {
        match &self.fields {
            Fields::Csv(names, found) => {
                let at = names.iter().position(|n| n == name)?;
                Some(found[at]).filter(|s| !s.is_empty()).map(Into::into)
            }
            Fields::Json(map) => match map.get(name)? {
                Value::Null => None,
                Value::String(text) => Some(text.as_str()).filter(|s| !s.is_empty()).map(Into::into),
                Value::Bool(yes) => Some(if *yes { "1" } else { "0" }.into()),
                other => Some(other.to_string().into()),
            },
        }
    }

    fn has(&self, name: &str) -> bool {
        match &self.fields {
            Fields::Csv(names, _) => names.iter().any(|n| n == name),
            Fields::Json(map) => map.contains_key(name),
        }
    }

    /// A number of 0 or more; None: not there.
    fn number(&self, name: &str) -> Result<Option<f64>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        let number = text.parse().ok().filter(|x: &f64| x.is_finite() && *x >= 0.0);
        let short: String = text.chars().take(40).collect();
        number
            .map(Some)
            .ok_or_else(|| err!(Format, "line {}: {name}: a number of 0 or more wanted, {short} found", self.number))
    }

    fn wanted(&self, name: &str) -> Result<f64> {
        self.number(name)?.ok_or_else(|| err!(Format, "line {}: no {name}", self.number))
    }

    fn bounded(&self, name: &str, found: f64, most: f64) -> Result<()> {
        if found <= most {
            return Ok(());
        }
        Err(err!(Format, "line {}: {name}: at most {most:e} wanted, {found:e} found", self.number))
    }

    /// A pass as the hook writes it; None: a prefill, or without a time.
    fn own(&self, cells: &mut Vec<String>) -> Result<Option<Row>> {
        let phase = self.text("phase").ok_or_else(|| err!(Format, "line {}: no phase", self.number))?;
        let tokens = self.wanted("tokens")? as u32;
        if phase != "decode" || tokens == 0 {
            return Ok(None);
        }
        let Some(wall_ns) = self.number("wall_ns")?.filter(|ns| *ns > 0.0) else { return Ok(None) };
        self.bounded("wall_ns", wall_ns, MAX_NS)?;
        let mut counts = [f64::NAN; COUNTS.len()];
        for (count, name) in counts.iter_mut().zip(COUNTS) {
            *count = self.number(name)?.unwrap_or(f64::NAN);
        }
        if let (Some(dropped), Some(swapped)) = (self.number("mass_dropped")?, self.number("mass_swapped")?) {
            counts[MASS_LOST] = dropped + swapped;
        }
        let cell = self.text("cell").map(|name| index_of(cells, &name));
        Ok(Some(Row {
            cell,
            block: self.number("block")?.map(|n| n as u64),
            washout: self.number("washout")?.is_some_and(|n| n > 0.0),
            tokens,
            wall_ns,
            compute_ns: self.number("wait_ns")?.map(|wait| (wall_ns - wait).max(0.0)),
            counts,
            slots: self.number("slots")?.map(|n| n as u32),
            thermal_level: self.number("thermal_level")?.map(|n| n as u8),
        }))
    }

    /// A token as bmoe_metrics v1 has it.
    fn foreign(&self) -> Result<Row> {
        let wall_ms = self.wanted("wall_ms")?;
        self.bounded("wall_ms", wall_ms, MAX_NS / 1e6)?;
        if wall_ms == 0.0 {
            return Err(err!(Format, "line {}: wall_ms: a number above 0 wanted, 0 found", self.number));
        }
        let mut counts = [f64::NAN; COUNTS.len()];
        counts[READ_BYTES] = self.number("read_bytes")?.unwrap_or(f64::NAN);
        counts[MAJOR_FAULTS] = self.number("majflt")?.unwrap_or(f64::NAN);
        Ok(Row {
            cell: None,
            block: None,
            washout: false,
            tokens: 1,
            wall_ns: wall_ms * 1e6,
            compute_ns: self.number("compute_ms")?.map(|ms| ms * 1e6),
            counts,
            slots: None,
            thermal_level: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    fn parse(text: &str) -> Result<Log> {
        Log::parse(&mut Cursor::new(text), "x".into())
    }

    const HEADING: &str =
        "pass,phase,tokens,wall_ns,wait_ns,read_bytes,mass_dropped,mass_swapped,cell,block,washout,thermal_mc\n";

    #[test]
    fn csv_and_json_lines_say_the_same() {
        let csv =
            parse(&format!("{HEADING}0,prefill,9,,1,2,0,0,,,,\n1,decode,1,90,30,4096,.25,.5,F0,3,1,41000\n")).unwrap();
        let json = concat!(
            r#"{"phase":"prefill","tokens":9,"wall_ns":null}"#,
            "\n",
            r#"{"phase":"decode","tokens":1,"wall_ns":90,"wait_ns":30,"read_bytes":4096,"mass_dropped":0.25,"mass_swapped":0.5,"#,
            r#""cell":"F0","block":3,"washout":1,"thermal_mc":41000,"thermal_level":null}"#,
        );
        let json = parse(json).unwrap();
        assert_eq!(format!("{csv:?}"), format!("{json:?}"));
        let row = &csv.rows[0];
        assert_eq!((csv.rows.len(), csv.cells.as_slice(), row.cell), (1, &["F0".to_owned()][..], Some(0)));
        assert_eq!((row.wall_ns, row.compute_ns, row.block, row.washout), (90.0, Some(60.0), Some(3), true));
        assert_eq!((row.counts[READ_BYTES], row.counts[MASS_LOST]), (4096.0, 0.75));
        assert!(row.counts[HITS].is_nan());
    }

    #[test]
    fn a_foreign_log() {
        let log = parse(
            "# bmoe_metrics v1\n# arch=x drop_cold_frac=0.5\nstep,wall_ms,compute_ms,majflt\n1,2.5,2,7\n# tok/s=9\n",
        )
        .unwrap();
        assert_eq!((log.facts["drop_cold_frac"].as_str(), log.facts["tok/s"].as_str()), ("0.5", "9"));
        assert_eq!(
            (log.rows[0].wall_ns, log.rows[0].compute_ns, log.rows[0].counts[MAJOR_FAULTS]),
            (2.5e6, Some(2e6), 7.0)
        );
    }

    #[test]
    fn faults_are_named() {
        let cases = [
            ("", "no decode pass"),
            ("pass,phase\n1\n", "line 2: 2 fields wanted, as in the heading, 1 found"),
            ("{\"phase\":\n", "line 1, column"),
            ("{\"tokens\":1}\n", "line 1: no phase"),
            ("phase,tokens,wall_ns\ndecode,1,-5\n", "line 2: wall_ns: a number of 0 or more wanted, -5 found"),
            ("phase,tokens,wall_ns\ndecode,1,inf\n", "wall_ns"),
            ("phase,tokens,wall_ns\ndecode,1,1e300\n", "line 2: wall_ns: at most 1e15 wanted, 1e300 found"),
            ("step,wall_ms\n1,0\n", "line 2: wall_ms: a number above 0 wanted"),
            ("step,wall_ms\n1,\n", "line 2: no wall_ms"),
        ];
        for (text, says) in cases {
            let error = parse(text).unwrap_err();
            assert!(error.detail.contains(says), "{text:?}: {error}");
        }
        assert!(
            Log::parse(&mut Cursor::new(b"a,b\n\xff\n"), String::new())
                .unwrap_err()
                .detail
                .contains("line 2, column 1")
        );
    }
}
