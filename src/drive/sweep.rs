//! Reads in flight by sizes of read: the table of `hotset io`, and what follows from it.

use super::{Drive, Measured, Way};
use crate::error::{Result, err};
use crate::store::{IoMode, IoReport, LANES, ReadBy};

/// What is measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Reads in flight, ascending.
    pub depths: Vec<usize>,
    /// Sizes of reads; 0 = whole.
    pub chunks: Vec<u64>,
    pub modes: Vec<IoMode>,
    pub by: ReadBy,
    /// Of each measurement.
    pub seconds: f64,
}

/// One throughput.
#[derive(Clone, Debug, PartialEq)]
pub struct Rate {
    pub way: Way,
    pub measured: Measured,
    /// Taken out of the page cache before; None where that was not needed (direct), else why it failed, if it did.
    pub forgotten: Option<Result<(), String>>,
}

/// One or a few misses alone.
#[derive(Clone, Debug, PartialEq)]
pub struct Miss {
    pub way: Way,
    pub n: usize,
    pub measured: Measured,
    pub median_s: f64,
}

/// All that was measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Sweep {
    pub rates: Vec<Rate>,
    pub misses: Vec<Miss>,
    pub io: IoReport,
}

/// What to set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Advice {
    pub lanes: usize,
    pub chunk_bytes: u64,
    /// With them: all lanes busy, and what one miss alone gets.
    pub gb_per_s: f64,
    pub one_miss_gb_per_s: f64,
}

/// Rates this near to the best are as good: measurements of a drive scatter by as much.
const AS_GOOD: f64 = 0.95;

impl Plan {
    /// Of rates, and of misses for the lanes that the rates advise.
    pub fn n_measurements(&self) -> usize {
        self.depths.len() * self.chunks.len() * self.modes.len() + 2 * self.chunks.len()
    }

    /// `step` is told after each measurement how many are done.
    pub fn run(&self, drive: &Drive, step: &mut dyn FnMut(usize)) -> Result<Sweep> {
        let none = || err!(Argument, "nothing to measure: {self:?}");
        let (mut rates, mut io, mut done) = (Vec::new(), None, 0);
        for &mode in &self.modes {
            for &lanes in &self.depths {
                for &chunk_bytes in &self.chunks {
                    let way = Way { lanes, chunk_bytes, io: mode, by: self.by };
                    let buffered =
                        mode == IoMode::Buffered || io.as_ref().is_some_and(|r: &IoReport| r.in_effect != mode);
                    let forgotten = buffered.then(|| drive.forget().map_err(|e| e.detail));
                    let (measured, report) = drive.rate(way, self.seconds)?;
                    io.get_or_insert(report);
                    rates.push(Rate { way, measured, forgotten });
                    done += 1;
                    step(done);
                }
            }
        }
        let mode = *self.modes.first().ok_or_else(none)?;
        let lanes = lanes(&rates, mode);
        let mut misses = Vec::new();
        for &chunk_bytes in &self.chunks {
            for n in [1, 2] {
                let way = Way { lanes, chunk_bytes, io: mode, by: self.by };
                if mode == IoMode::Buffered {
                    drive.forget().ok();
                }
                let (measured, times) = drive.misses(way, n, self.seconds)?;
                misses.push(Miss { way, n, measured, median_s: times[times.len() / 2] });
                done += 1;
                step(done);
            }
        }
        Ok(Sweep { rates, misses, io: io.ok_or_else(none)? })
    }
}

/// The fewest lanes that give as much as any.
fn lanes(rates: &[Rate], mode: IoMode) -> usize {
    let of_mode = || rates.iter().filter(|r| r.way.io == mode);
    let best = of_mode().map(|r| r.measured.gb_per_s()).fold(0.0, f64::max);
    of_mode().filter(|r| r.measured.gb_per_s() >= AS_GOOD * best).map(|r| r.way.lanes).min().unwrap_or(LANES)
}

impl Sweep {
    /// The fewest lanes that give as much as any, and the chunk by which one and two misses alone come soonest; of those that are as good
    /// the largest, since each read costs a call.
    pub fn advice(&self) -> Option<Advice> {
        let mode = self.misses.first()?.way.io;
        let lanes = lanes(&self.rates, mode);
        let chunks = self.misses.iter().map(|m| m.way.chunk_bytes);
        let time = |chunk: u64| -> f64 {
            // a layer of the target has 1.76 misses: between one and two
            self.misses.iter().filter(|m| m.way.chunk_bytes == chunk).map(|m| m.median_s).sum()
        };
        let best = chunks.clone().map(time).fold(f64::INFINITY, f64::min);
        let size = |chunk: &u64| if *chunk == 0 { u64::MAX } else { *chunk };
        let chunk_bytes = chunks.filter(|c| time(*c) * AS_GOOD <= best).max_by_key(size)?;
        let rate =
            self.rates.iter().find(|r| (r.way.lanes, r.way.chunk_bytes, r.way.io) == (lanes, chunk_bytes, mode))?;
        let miss = self.misses.iter().find(|m| m.n == 1 && m.way.chunk_bytes == chunk_bytes)?;
        Some(Advice {
            lanes,
            chunk_bytes,
            gb_per_s: rate.measured.gb_per_s(),
            one_miss_gb_per_s: miss.measured.gb_per_s(),
        })
    }

    /// Whether anything that counts for the advice may have come from the page cache.
    pub fn doubtful(&self) -> bool {
        self.misses.iter().any(|m| m.measured.doubtful())
            || self.rates.iter().any(|r| r.way.io == IoMode::Direct && r.measured.doubtful())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(gb_per_s: f64) -> Measured {
        Measured {
            bytes: (gb_per_s * 1e9) as u64,
            seconds: 1.0,
            asked_bytes: 100,
            disk_bytes: Some(100),
            ..Measured::default()
        }
    }

    fn sweep(rates: &[(usize, u64, f64)], misses: &[(u64, f64)]) -> Sweep {
        let way = |lanes, chunk_bytes| Way { lanes, chunk_bytes, io: IoMode::Direct, by: ReadBy::Ring };
        let rate = |&(lanes, chunk, gb)| Rate { way: way(lanes, chunk), measured: measured(gb), forgotten: None };
        let miss = |&(chunk, median_s)| Miss { way: way(4, chunk), n: 1, measured: measured(1.0), median_s };
        let io = IoReport {
            requested: IoMode::Direct,
            in_effect: IoMode::Direct,
            reason: String::new(),
            mem_align: 512,
            offset_align: 512,
            straight_bytes: 1,
            bounced_bytes: 0,
            by: ReadBy::Threads,
            by_reason: String::new(),
        };
        Sweep { rates: rates.iter().map(rate).collect(), misses: misses.iter().map(miss).collect(), io }
    }

    #[test]
    fn advice_is_the_fewest_lanes_and_the_largest_chunk_that_are_as_good() {
        let rates = [(1, 0, 1.0), (1, 65536, 0.9), (4, 0, 1.93), (4, 65536, 1.95), (16, 0, 2.0), (16, 65536, 1.99)];
        let a = sweep(&rates, &[(0, 1e-3), (65536, 0.5e-3)]).advice().unwrap();
        assert_eq!((a.lanes, a.chunk_bytes, a.gb_per_s), (4, 65536, 1.95));
        let a = sweep(&rates, &[(0, 0.51e-3), (65536, 0.5e-3)]).advice().unwrap();
        assert_eq!((a.lanes, a.chunk_bytes), (4, 0));
        assert_eq!(sweep(&rates, &[]).advice(), None);
    }

    #[test]
    fn what_the_page_cache_served_is_doubtful() {
        let mut s = sweep(&[(1, 0, 1.0)], &[(0, 1.0)]);
        assert!(!s.doubtful());
        s.misses[0].measured.disk_bytes = Some(90);
        assert!(s.doubtful());
        s.misses[0].measured.disk_bytes = None;
        assert!(s.doubtful());
    }
}
