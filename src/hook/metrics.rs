//! The metrics log: one line a pass, as JSON lines or CSV, through the same kind of bounded spool as the trace. A row that
//! finds the queue full is counted as lost; the decode never waits for it. A row says what the pass did, under which settings (and which cell and
//! block of a schedule), and in what state the machine was when it ended.

use std::fmt::{self, Display, Formatter};
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use super::follow::Label;
use super::stats::Outcome;
use crate::error::{Error, Result, err};
use crate::store::{Machine, MachineState};
use crate::trace::{FileSink, Phase, Spool};

/// One pass.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// From 0, counted since open.
    pub pass: u64,
    pub phase: Phase,
    /// Of the first token; negative: unknown.
    pub position: i64,
    pub tokens: u32,
    /// From the end of the pass before this one to the end of this one: a token's whole time when the engine does nothing else.
    /// None for the first.
    pub wall_ns: Option<u64>,
    /// From the pass's first call to its last.
    pub pass_ns: u64,
    /// Spent waiting for reads.
    pub wait_ns: u64,
    /// Read calls to the system.
    pub reads: u64,
    pub outcome: Outcome,
    /// Rows (over all layers) that passed through.
    pub pass_through_rows: u64,
    pub slots: u32,
    pub lambda: f64,
    pub drop: f64,
    /// None: in no block of a schedule.
    pub label: Option<Label<'a>>,
}

/// `major_faults` and `disk_bytes` are differences since the row before, the first since the log was created.
const COLUMNS: &str = "pass,phase,position,tokens,wall_ns,pass_ns,wait_ns,reads,read_bytes,hits,misses,dropped,swapped,\
mass_dropped,mass_swapped,pass_through_rows,slots,lambda,drop,cell,block,washout,major_faults,rss_bytes,disk_bytes,\
thermal_level,thermal_mc\n";
const BLOCK_BYTES: usize = 1280;
const BLOCKS: usize = 1024;

/// A value, or what stands for none.
struct Or<T>(Option<T>, &'static str);

impl<T: Display> Display for Or<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(value) => value.fmt(f),
            None => f.write_str(self.1),
        }
    }
}

pub struct Metrics {
    spool: Spool,
    csv: bool,
    lost: u64,
    machine: Machine,
    /// At the row before.
    before: MachineState,
}

impl Metrics {
    /// Creates the file, replacing an older one. CSV where the name ends in `.csv`.
    pub fn create(path: &Path) -> Result<Self> {
        let mut file = File::create(path).map_err(|e| err!(Io, "{}: cannot be created: {e}", path.display()))?;
        let csv = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("csv"));
        if csv {
            file.write_all(COLUMNS.as_bytes()).map_err(|e| err!(Io, "{}: cannot be written: {e}", path.display()))?;
        }
        let sink = Box::new(FileSink::new(file, path));
        let mut machine = Machine::open();
        let before = machine.read();
        Ok(Self { spool: Spool::new("hotset-metrics", BLOCKS, BLOCK_BYTES, sink)?, csv, lost: 0, machine, before })
    }

    /// Rows that found the queue full, or did not fit a block.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    pub fn push(&mut self, row: &Row) {
        let Some(mut block) = self.spool.take() else {
            self.lost += 1;
            return;
        };
        block.set_used(0);
        let now = self.machine.read();
        match self.write(row, &now, &mut block) {
            Ok(()) => {
                self.before = now;
                self.spool.send(block);
            }
            Err(_) => self.lost += 1,
        }
    }

    fn write(&self, row: &Row, now: &MachineState, out: &mut impl Write) -> std::io::Result<()> {
        let Row { pass, position, tokens, pass_ns, wait_ns, reads, pass_through_rows, slots, lambda, drop, .. } = *row;
        let Outcome { hits, misses, dropped, swapped, read_bytes, mass_dropped, mass_swapped, .. } = row.outcome;
        let phase = row.phase.as_str();
        let label = row.label;
        let (cell, block) = (label.map(|l| l.cell), label.map(|l| l.block));
        let washout = u8::from(label.is_some_and(|l| l.washout));
        let major_faults = now.major_faults.saturating_sub(self.before.major_faults);
        let disk_bytes = now.disk_bytes.zip(self.before.disk_bytes).map(|(now, before)| now.saturating_sub(before));
        let MachineState { rss_bytes, thermal_level, thermal_mc, .. } = *now;
        if self.csv {
            let wall_ns = Or(row.wall_ns, "");
            writeln!(
                out,
                "{pass},{phase},{position},{tokens},{wall_ns},{pass_ns},{wait_ns},{reads},{read_bytes},{hits},{misses},{dropped},{swapped},{mass_dropped},{mass_swapped},\
                 {pass_through_rows},{slots},{lambda},{drop},{},{},{washout},{major_faults},{},{},{},{}",
                Or(cell, ""),
                Or(block, ""),
                Or(rss_bytes, ""),
                Or(disk_bytes, ""),
                Or(thermal_level, ""),
                Or(thermal_mc, "")
            )
        } else {
            let wall_ns = Or(row.wall_ns, "null");
            // a name has nothing that JSON would want escaped
            let quote = if cell.is_some() { "\"" } else { "" };
            writeln!(
                out,
                r#"{{"pass":{pass},"phase":"{phase}","position":{position},"tokens":{tokens},"wall_ns":{wall_ns},"pass_ns":{pass_ns},"wait_ns":{wait_ns},"reads":{reads},"read_bytes":{read_bytes},"hits":{hits},"misses":{misses},"dropped":{dropped},"swapped":{swapped},"mass_dropped":{mass_dropped},"mass_swapped":{mass_swapped},"pass_through_rows":{pass_through_rows},"slots":{slots},"lambda":{lambda},"drop":{drop},"cell":{quote}{}{quote},"block":{},"washout":{washout},"major_faults":{major_faults},"rss_bytes":{},"disk_bytes":{},"thermal_level":{},"thermal_mc":{}}}"#,
                Or(cell, "null"),
                Or(block, "null"),
                Or(rss_bytes, "null"),
                Or(disk_bytes, "null"),
                Or(thermal_level, "null"),
                Or(thermal_mc, "null")
            )
        }
    }

    pub fn flush(&self, timeout: Duration) -> Result<()> {
        self.spool.flush(timeout, false)
    }

    pub fn close(self) -> Result<(), Error> {
        self.spool.close()
    }
}
