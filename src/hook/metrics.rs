//! The metrics log: one line a pass, as JSON lines or CSV, through the same kind of bounded spool as the trace. A row that
//! finds the queue full is counted as lost; the decode never waits for it.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use super::stats::Outcome;
use crate::error::{Error, Result, err};
use crate::trace::{FileSink, Phase, Spool};

/// One pass.
#[derive(Clone, Copy, Debug)]
pub struct Row {
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
}

const COLUMNS: &str = "pass,phase,position,tokens,wall_ns,pass_ns,wait_ns,reads,read_bytes,hits,misses,dropped,swapped,\
mass_dropped,mass_swapped,pass_through_rows,slots,lambda,drop\n";
const BLOCK_BYTES: usize = 768;
const BLOCKS: usize = 1024;

pub struct Metrics {
    spool: Spool,
    csv: bool,
    lost: u64,
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
        Ok(Self { spool: Spool::new("hotset-metrics", BLOCKS, BLOCK_BYTES, sink)?, csv, lost: 0 })
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
        match self.write(row, &mut block) {
            Ok(()) => self.spool.send(block),
            Err(_) => self.lost += 1,
        }
    }

    fn write(&self, row: &Row, out: &mut impl Write) -> std::io::Result<()> {
        let Row { pass, position, tokens, pass_ns, wait_ns, reads, pass_through_rows, slots, lambda, drop, .. } = *row;
        let Outcome { hits, misses, dropped, swapped, read_bytes, mass_dropped, mass_swapped, .. } = row.outcome;
        let phase = row.phase.as_str();
        if self.csv {
            write!(out, "{pass},{phase},{position},{tokens},")?;
            if let Some(ns) = row.wall_ns {
                write!(out, "{ns}")?;
            }
            writeln!(
                out,
                ",{pass_ns},{wait_ns},{reads},{read_bytes},{hits},{misses},{dropped},{swapped},{mass_dropped},{mass_swapped},\
                 {pass_through_rows},{slots},{lambda},{drop}"
            )
        } else {
            write!(out, r#"{{"pass":{pass},"phase":"{phase}","position":{position},"tokens":{tokens},"wall_ns":"#)?;
            match row.wall_ns {
                Some(ns) => write!(out, "{ns}")?,
                None => write!(out, "null")?,
            }
            writeln!(
                out,
                r#","pass_ns":{pass_ns},"wait_ns":{wait_ns},"reads":{reads},"read_bytes":{read_bytes},"hits":{hits},"misses":{misses},"dropped":{dropped},"swapped":{swapped},"mass_dropped":{mass_dropped},"mass_swapped":{mass_swapped},"pass_through_rows":{pass_through_rows},"slots":{slots},"lambda":{lambda},"drop":{drop}}}"#
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
