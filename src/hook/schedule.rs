//! A schedule: which settings hold for which tokens, so that an experiment runs inside one decode.
//!
//! The plan is a JSON file of cells (named settings) and blocks (so many decode tokens under a cell). [`Schedule::load`] reads one and
//! refuses what is wrong with it, with file, line and reason; [`Schedule::check`] does the same for what only an open model
//! can tell; [`Schedule::to_json`] writes it, a line a cell and block. How the hook follows a schedule is in `follow`.
//!
//! ```text
//! { "hotset_schedule": 1, "carry": "washout", "washout": 16,
//!   "cells":  [ {"name": "F0"}, {"name": "F.5", "drop": 0.5} ],
//!   "blocks": [ {"cell": "F0", "from": 0, "tokens": 64}, {"cell": "F.5", "from": 64, "tokens": 64} ] }
//! ```

use std::fmt::Write;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::located::Located;
use super::{Live, Plan};
use crate::error::{Error, ErrorKind, Result, err};
use crate::route::{Delta, Drop, Moce};
use crate::store::Backing;

/// The value of the key `hotset_schedule`.
pub const VERSION: u64 = 1;

/// A longer file is refused.
pub const MAX_BYTES: u64 = 4 << 20;

pub const MAX_CELLS: usize = 256;

/// Bytes of a cell's name, which is in every row of the metrics log.
pub const MAX_NAME_BYTES: usize = 64;

/// What a block's cache begins with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Carry {
    /// What the block before left.
    #[default]
    Washout,
    /// Nothing.
    Flush,
    /// What the first block with as many slots and the same backing began with.
    Restore,
}

impl Carry {
    pub const ALL: &[Self] = &[Self::Washout, Self::Flush, Self::Restore];

    pub fn name(self) -> &'static str {
        match self {
            Self::Washout => "washout",
            Self::Flush => "flush",
            Self::Restore => "restore",
        }
    }
}

/// Named settings; None: as the engine has set it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cell {
    /// 1 to `MAX_NAME_BYTES` bytes, without control characters, `"`, `,` and `\`.
    pub name: String,
    /// F of the cold drop.
    pub drop: Option<f64>,
    pub lambda: Option<f64>,
    pub top_j: Option<u32>,
    pub delta: Option<Delta>,
    /// Per layer.
    pub slots: Option<u32>,
    /// I/O threads at work.
    pub lanes: Option<u32>,
    pub backing: Option<Backing>,
    /// In the file that it was read from, from 1; 0: made otherwise.
    pub line: usize,
}

impl Cell {
    /// The engine's settings with this cell's over them.
    pub fn over(&self, own: Live) -> Live {
        let moce = Moce {
            lambda: self.lambda.unwrap_or(own.moce.lambda),
            top_j: self.top_j.unwrap_or(own.moce.top_j),
            delta: self.delta.unwrap_or(own.moce.delta),
        };
        Live {
            moce,
            drop: Drop { threshold: self.drop.unwrap_or(own.drop.threshold), ..own.drop },
            slots: self.slots.unwrap_or(own.slots),
            lanes: self.lanes.unwrap_or(own.lanes),
            backing: self.backing.unwrap_or(own.backing),
        }
    }
}

/// Decode tokens `from .. from + tokens`, counted since the schedule began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Index in `Schedule::cells`.
    pub cell: usize,
    pub from: u64,
    pub tokens: u64,
}

impl Block {
    pub fn end(&self) -> u64 {
        self.from.saturating_add(self.tokens)
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Schedule {
    /// Of the order of the blocks; nothing is decided by it.
    pub seed: Option<u64>,
    pub carry: Carry,
    /// Decode tokens at the start of each block that are marked: the cache is still that of the block before.
    pub washout: u64,
    pub cells: Vec<Cell>,
    /// Ascending, not overlapping; between them the engine's own settings hold.
    pub blocks: Vec<Block>,
    /// What the planner notes for the analysis; nothing here is decided by it.
    pub ab: Map<String, Value>,
}

impl Schedule {
    /// From a file. `Io` where it cannot be read, else `Format`: `FILE: line N: reason`.
    pub fn load(path: &Path) -> Result<Self> {
        let here = path.display();
        let io = |e| err!(Io, "{here}: {e}");
        let mut text = Vec::new();
        File::open(path).map_err(io)?.take(MAX_BYTES + 1).read_to_end(&mut text).map_err(io)?;
        Self::parse(&text).map_err(|e| Error::new(e.kind, format!("{here}: {}", e.detail)))
    }

    /// From the file's text. `Format`: `line N: reason`.
    pub fn parse(text: &[u8]) -> Result<Self> {
        if text.len() as u64 > MAX_BYTES {
            return Err(err!(Format, "line 1: a schedule of more than {MAX_BYTES} bytes"));
        }
        let keys = &["hotset_schedule", "seed", "carry", "washout", "cells", "blocks", "ab"];
        let root = Object::new(Located::parse(text)?, "a schedule", keys)?;
        let version: u64 = root.whole("hotset_schedule")?.ok_or_else(|| root.lacks("hotset_schedule"))?;
        if version != VERSION {
            return Err(root.fault("hotset_schedule", &format!("version {VERSION} wanted, {version} found")));
        }
        let mut schedule = Self {
            seed: root.whole("seed")?,
            carry: root.named("carry", Carry::ALL, |c| c.name())?.unwrap_or_default(),
            washout: root.whole("washout")?.unwrap_or(0),
            ab: match root.get("ab").map(|at| at.value()) {
                None => Map::new(),
                Some(Value::Object(map)) => map,
                Some(_) => return Err(root.fault("ab", "an object wanted")),
            },
            ..Self::default()
        };
        let cells = root.list("cells")?;
        if cells.len() > MAX_CELLS {
            return Err(err!(Format, "line {}: more than {MAX_CELLS} cells", cells[MAX_CELLS].line()));
        }
        for at in cells {
            let keys = &["name", "drop", "lambda", "top_j", "delta", "slots", "lanes", "backing"];
            schedule.push_cell(&Object::new(at, "a cell", keys)?)?;
        }
        for at in root.list("blocks")? {
            schedule.push_block(&Object::new(at, "a block", &["cell", "from", "tokens"])?)?;
        }
        Ok(schedule)
    }

    fn push_cell(&mut self, o: &Object) -> Result<()> {
        let name = o.text("name")?.ok_or_else(|| o.lacks("name"))?;
        let strange = |c: char| c.is_control() || matches!(c, '"' | ',' | '\\');
        if name.is_empty() || name.len() > MAX_NAME_BYTES || name.contains(strange) {
            let why = format!("1 to {MAX_NAME_BYTES} bytes without control characters, \", comma and \\ wanted");
            return Err(o.fault("name", &why));
        }
        if let Some(first) = self.cells.iter().find(|c| c.name == name) {
            return Err(o.fault("name", &format!("cell \"{name}\" is already in line {}", first.line)));
        }
        let cell = Cell {
            name,
            drop: o.float("drop")?,
            lambda: o.float("lambda")?,
            top_j: o.whole("top_j")?,
            delta: o.named("delta", Delta::ALL, |d| d.name())?,
            slots: o.whole("slots")?,
            lanes: o.whole("lanes")?,
            backing: o.named("backing", &[Backing::Slots, Backing::PageCache], backing_name)?,
            line: o.at.line(),
        };
        if cell.slots == Some(0) {
            return Err(o.fault("slots", "1 or more wanted"));
        }
        if cell.lanes.is_some_and(|n| !(1..=64).contains(&n)) {
            return Err(o.fault("lanes", "1 to 64 wanted"));
        }
        self.cells.push(cell);
        Ok(())
    }

    fn push_block(&mut self, o: &Object) -> Result<()> {
        let name = o.text("cell")?.ok_or_else(|| o.lacks("cell"))?;
        let cell = self.cells.iter().position(|c| c.name == name);
        let cell = cell.ok_or_else(|| o.fault("cell", &format!("there is no cell \"{}\"", short(&name))))?;
        let from: u64 = o.whole("from")?.ok_or_else(|| o.lacks("from"))?;
        let tokens: u64 = o.whole("tokens")?.ok_or_else(|| o.lacks("tokens"))?;
        if tokens == 0 {
            return Err(o.fault("tokens", "1 or more wanted"));
        }
        if self.washout >= tokens {
            let why = format!("a block of {tokens} tokens with a washout of {}: nothing is left", self.washout);
            return Err(o.fault("tokens", &why));
        }
        if from.checked_add(tokens).is_none() {
            return Err(o.fault("from", "from + tokens is more than 64 bits hold"));
        }
        if let Some((i, before)) = self.blocks.iter().enumerate().next_back().filter(|(_, b)| from < b.end()) {
            let why = format!("begins at token {from}, block {i} (from {}) ends at {}", before.from, before.end());
            return Err(o.fault("from", &why));
        }
        self.blocks.push(Block { cell, from, tokens });
        Ok(())
    }

    /// Whether this model can be run so. `n_experts`: of the layer that has most; `plan`: the memory at open, whose slots are the most
    /// that a cell may have; `slots_can`: whether the store has slots at all. `Budget` for too few or too many slots, else `Argument`:
    /// `line N: reason`.
    pub fn check(&self, plan: &Plan, max_slots: u32, max_lanes: u32, has_slots: bool) -> Result<()> {
        for cell in &self.cells {
            let fault = |kind, why: String| {
                let line = if cell.line > 0 { format!("line {}: ", cell.line) } else { String::new() };
                Err(Error::new(kind, format!("{line}cell \"{}\": {why}", cell.name)))
            };
            if let Some(slots) = cell.slots {
                if slots < plan.k {
                    let why = format!("{slots} slots, and a token uses {} experts of a layer", plan.k);
                    return fault(ErrorKind::Budget, why);
                }
                if slots > plan.n_experts {
                    return fault(ErrorKind::Budget, format!("{slots} slots for {} experts", plan.n_experts));
                }
                if slots > max_slots {
                    let bytes = |n: u32| u64::from(n) * plan.slot_bytes;
                    let why = format!(
                        "{slots} slots are {} bytes; the memory planned for holds {max_slots} ({} bytes)",
                        bytes(slots),
                        bytes(max_slots)
                    );
                    return fault(ErrorKind::Budget, why);
                }
            }
            if cell.lanes.is_some_and(|n| n > max_lanes) {
                let n = cell.lanes.unwrap_or(0);
                return fault(ErrorKind::Argument, format!("{n} lanes; {max_lanes} were started at open"));
            }
            if cell.backing == Some(Backing::Slots) && !has_slots {
                return fault(ErrorKind::Argument, "slots; the model was opened with the page-cache backing".into());
            }
        }
        Ok(())
    }

    /// The file's text: a line a cell and block.
    pub fn to_json(&self) -> String {
        let mut text = format!("{{ \"hotset_schedule\": {VERSION},\n");
        if let Some(seed) = self.seed {
            let _ = writeln!(text, "  \"seed\": {seed},");
        }
        let (carry, washout) = (self.carry.name(), self.washout);
        let _ = writeln!(text, "  \"carry\": \"{carry}\",\n  \"washout\": {washout},");
        if !self.ab.is_empty() {
            let _ = writeln!(text, "  \"ab\": {},", Value::Object(self.ab.clone()));
        }
        let lines = |each: Vec<String>| each.join(",\n    ");
        let cells = lines(self.cells.iter().map(Cell::to_json).collect());
        let block = |b: &Block| {
            let name = json!(self.cells.get(b.cell).map_or("", |c| &c.name));
            format!("{{\"cell\": {name}, \"from\": {}, \"tokens\": {}}}", b.from, b.tokens)
        };
        let blocks = lines(self.blocks.iter().map(block).collect());
        let _ = writeln!(text, "  \"cells\": [\n    {cells}\n  ],\n  \"blocks\": [\n    {blocks}\n  ] }}");
        text
    }
}

impl Cell {
    /// On one line, the name first.
    fn to_json(&self) -> String {
        let mut text = format!("{{\"name\": {}", json!(self.name));
        let members = [
            ("drop", self.drop.map(|x| json!(x))),
            ("lambda", self.lambda.map(|x| json!(x))),
            ("top_j", self.top_j.map(|n| json!(n))),
            ("delta", self.delta.map(|d| json!(d.name()))),
            ("slots", self.slots.map(|n| json!(n))),
            ("lanes", self.lanes.map(|n| json!(n))),
            ("backing", self.backing.map(|b| json!(backing_name(b)))),
        ];
        for (key, value) in members {
            if let Some(value) = value {
                let _ = write!(text, ", \"{key}\": {value}");
            }
        }
        text.push('}');
        text
    }
}

/// As a schedule calls it.
pub fn backing_name(backing: Backing) -> &'static str {
    match backing {
        Backing::Slots => "slots",
        Backing::PageCache => "page-cache",
    }
}

/// An object of the text: only known keys in it, and none twice.
struct Object<'a> {
    at: Located<'a>,
    what: &'static str,
    members: Vec<(String, Located<'a>)>,
}

impl<'a> Object<'a> {
    fn new(at: Located<'a>, what: &'static str, known: &[&str]) -> Result<Self> {
        let Some(members) = at.members() else {
            let found = short(&at.value().to_string());
            return Err(err!(Format, "line {}: {what} is an object; {found} found", at.line()));
        };
        for (i, (key, value)) in members.iter().enumerate() {
            if !known.contains(&key.as_str()) {
                let (line, key, all) = (value.line(), short(key), known.join(", "));
                return Err(err!(Format, "line {line}: {what} has no \"{key}\": its keys are {all}"));
            }
            if members[..i].iter().any(|(k, _)| k == key) {
                return Err(err!(Format, "line {}: {what} has \"{key}\" twice", value.line()));
            }
        }
        Ok(Self { at, what, members })
    }

    fn get(&self, key: &str) -> Option<Located<'a>> {
        self.members.iter().find(|(k, _)| k == key).map(|(_, at)| *at)
    }

    fn lacks(&self, key: &str) -> Error {
        err!(Format, "line {}: {} without \"{key}\"", self.at.line(), self.what)
    }

    /// A fault of a member, with its line and what stands there.
    fn fault(&self, key: &str, why: &str) -> Error {
        let at = self.get(key).unwrap_or(self.at);
        err!(Format, "line {}: {key} {}: {why}", at.line(), short(&at.value().to_string()))
    }

    /// None where the key is not there.
    fn typed<T>(&self, key: &str, wanted: &str, take: impl Fn(&Value) -> Option<T>) -> Result<Option<T>> {
        let Some(at) = self.get(key) else { return Ok(None) };
        take(&at.value()).map(Some).ok_or_else(|| self.fault(key, &format!("{wanted} wanted")))
    }

    fn whole<T: TryFrom<u64>>(&self, key: &str) -> Result<Option<T>> {
        self.typed(key, "a whole number in range", |v| T::try_from(v.as_u64()?).ok())
    }

    fn float(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number of 0 or more", |v| v.as_f64().filter(|x| x.is_finite() && *x >= 0.0))
    }

    fn text(&self, key: &str) -> Result<Option<String>> {
        self.typed(key, "a string", |v| v.as_str().map(str::to_owned))
    }

    fn named<T: Copy>(&self, key: &str, all: &[T], name: impl Fn(T) -> &'static str) -> Result<Option<T>> {
        let names = || all.iter().map(|&t| name(t)).collect::<Vec<_>>().join(", ");
        let find = |v: &Value| all.iter().copied().find(|&t| Some(name(t)) == v.as_str());
        self.typed(key, &format!("one of {}", names()), find)
    }

    /// At least one element.
    fn list(&self, key: &str) -> Result<Vec<Located<'a>>> {
        let elements = self.get(key).ok_or_else(|| self.lacks(key))?.elements();
        elements.filter(|list| !list.is_empty()).ok_or_else(|| self.fault(key, "a list of at least one wanted"))
    }
}

/// As a message can hold it.
fn short(text: &str) -> String {
    let mut short: String = text.chars().take(60).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if short.len() < text.len() {
        short.push_str("...");
    }
    short
}

#[cfg(test)]
#[path = "schedule_tests.rs"]
mod tests;
