//! The recorder's writing side: what happens on the writer thread.
//!
//! Each block that comes through the spool is one token: its records, its row ranges if they are recorded, and a
//! [`TokenMeta`]. Records and ranges are appended to their files; the meta data extend the sidecar's token ranges. What
//! has no place in a block, because it is rare and of any size (what was resident, settings, counts), the recorder
//! leaves in [`Pending`]; it is folded in when the token to which it belongs comes by, so the sidecar only ever
//! describes tokens that were written.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::error::{Error, Result, err};
use crate::trace::block::{Layout, TokenMeta, placement_of};
use crate::trace::config::reason;
use crate::trace::file_sink::FileSink;
use crate::trace::q4rt::{HEADER_BYTES, N_TOKENS_OFFSET};
use crate::trace::sidecar::{Resident, SettingsFrom, Sidecar, TokenRange};
use crate::trace::spool::Sink;

/// What the recorder has to say besides tokens. Its lock is held for moments only, and taken only at gaps.
#[derive(Default)]
pub(super) struct Pending {
    pub state: Mutex<PendingState>,
    /// Tokens sent so far.
    pub sent: AtomicU64,
    /// The sidecar has grown to what a reader accepts: no more gaps can be recorded.
    pub full: AtomicBool,
}

#[derive(Default)]
pub(super) struct PendingState {
    /// By rising token.
    pub events: Vec<Event>,
    /// Tokens left out since the beginning.
    pub left_out: Vec<(&'static str, u64)>,
}

/// Something that holds from a token on.
pub(super) enum Event {
    Resident(Resident),
    Settings(SettingsFrom),
    /// What the scores from this token on are.
    ScoreSpace(u64, &'static str),
}

impl Event {
    fn token(&self) -> u64 {
        match self {
            Self::Resident(resident) => resident.before_token,
            Self::Settings(from) => from.token,
            Self::ScoreSpace(token, _) => *token,
        }
    }
}

/// The files of one recording.
pub(super) struct TraceSink {
    pub layout: Layout,
    pub records: FileSink,
    pub ranges: Option<FileSink>,
    pub pending: Arc<Pending>,
    pub sidecar: Sidecar,
    pub sidecar_path: PathBuf,
    tokens: u64,
    events: VecDeque<Event>,
    /// The sidecar's file is older than the sidecar, and by a gap.
    changed: bool,
    gap_unwritten: bool,
    written_at: Instant,
    /// About how long the sidecar's text is, and how long it was when written.
    size: u64,
    written_size: u64,
    error: Option<Error>,
}

impl TraceSink {
    /// Above this (a guess of the text's length, well under what readers take) no gap is recorded any more.
    const SIDECAR_LIMIT: u64 = 40 << 20;
    /// How often the sidecar follows the tokens when nothing else happens.
    const REFRESH: Duration = Duration::from_secs(2);

    pub fn new(
        layout: Layout,
        records: FileSink,
        ranges: Option<FileSink>,
        pending: Arc<Pending>,
        sidecar: Sidecar,
        sidecar_path: PathBuf,
    ) -> Self {
        Self {
            layout,
            records,
            ranges,
            pending,
            sidecar,
            sidecar_path,
            tokens: 0,
            events: VecDeque::new(),
            changed: false,
            gap_unwritten: false,
            written_at: Instant::now(),
            size: 0,
            written_size: 0,
            error: None,
        }
    }

    /// Takes in what holds from the token that comes next; at the end also what lies beyond.
    fn fold_events(&mut self, at_end: bool) {
        self.events.extend(std::mem::take(&mut self.pending.state.lock().events));
        while self.events.front().is_some_and(|event| at_end || event.token() <= self.tokens) {
            match self.events.pop_front() {
                // what was resident before a token that was never written is of no use
                Some(Event::Resident(resident)) if resident.before_token <= self.tokens => {
                    let ids: usize = resident.layers.iter().map(|ids| 6 * ids.len() + 3).sum();
                    self.size += 200 + ids as u64 + resident.state.to_string().len() as u64;
                    self.sidecar.resident.push(resident);
                    self.gap_unwritten = true;
                }
                Some(Event::Settings(mut from)) => {
                    from.token = from.token.min(self.tokens);
                    self.size += 500 + 11 * from.settings.slots.len() as u64;
                    // no token was run under the settings that these follow at once
                    match self.sidecar.settings.last_mut() {
                        Some(last) if last.token == from.token => *last = from,
                        _ => self.sidecar.settings.push(from),
                    }
                }
                Some(Event::ScoreSpace(_, name)) => name.clone_into(&mut self.sidecar.score_space),
                _ => {}
            }
            self.changed = true;
        }
        if self.size > Self::SIDECAR_LIMIT {
            self.pending.full.store(true, Ordering::Relaxed);
        }
    }

    /// Extends the ranges by the token that comes next.
    fn describe(&mut self, meta: TokenMeta, placement: &[u8]) {
        let token = self.tokens;
        let after_gap = self.sidecar.resident.last().is_some_and(|r| r.before_token == token);
        // a pass that has lost tokens stays a range of its own
        let begins_pass = meta.index == meta.first;
        if let Some(last) = self.sidecar.ranges.last_mut() {
            let follows = if last.position < 0 {
                meta.position < 0
            } else {
                last.position.checked_add_unsigned(last.n_tokens) == Some(meta.position)
            };
            let alike = last.phase == meta.phase
                && last.tokens_per_pass == meta.tokens_per_pass
                && match last.placement.as_slice() {
                    [one] => placement.iter().all(|&code| placement_of(code) == *one),
                    each => placement.iter().zip(each).all(|(&code, p)| placement_of(code) == *p),
                };
            let whole = last.left_out_before == 0 && meta.first == 0;
            if follows && alike && !after_gap && last.end() == token && (whole || !begins_pass) {
                last.n_tokens += 1;
                return;
            }
        }
        let mut placement: Vec<_> = placement.iter().map(|&code| placement_of(code)).collect();
        if placement.windows(2).all(|pair| pair[0] == pair[1]) {
            placement.truncate(1);
        }
        self.size += 200 + 15 * placement.len() as u64;
        self.sidecar.ranges.push(TokenRange {
            first: token,
            n_tokens: 1,
            phase: meta.phase,
            position: meta.position,
            tokens_per_pass: meta.tokens_per_pass,
            placement,
            left_out_before: if begins_pass { meta.first } else { 0 },
        });
    }

    fn append(&mut self, block: &[u8]) -> Result<()> {
        let layout = self.layout;
        let parts = block.split_at_checked(layout.records()).and_then(|(records, rest)| {
            let (ranges, meta) = rest.split_at_checked(layout.ranges())?;
            Some((records, ranges, TokenMeta::decode(meta)?))
        });
        let Some((records, ranges, (meta, placement))) = parts else {
            return Err(err!(Internal, "recorder: block of {} bytes, {:?} wanted", block.len(), layout.block()));
        };
        self.records.write(records)?;
        if let Some(file) = &mut self.ranges {
            file.write(ranges)?;
        }
        self.describe(meta, placement);
        self.tokens += 1;
        self.changed = true;
        Ok(())
    }

    fn flush_files(&mut self, durable: bool) -> Result<()> {
        self.records.flush(durable)?;
        self.ranges.as_mut().map_or(Ok(()), |file| file.flush(durable))
    }

    /// The sidecar follows the tokens it describes, so those are handed on first.
    fn write_sidecar(&mut self, durable: bool) -> Result<()> {
        self.flush_files(durable)?;
        self.take_counts();
        self.written_size = self.sidecar.write(&self.sidecar_path, durable)?;
        self.written_at = Instant::now();
        (self.changed, self.gap_unwritten) = (false, false);
        Ok(())
    }

    fn take_counts(&mut self) {
        for &(reason, n) in &self.pending.state.lock().left_out {
            self.sidecar.left_out.insert(reason.to_owned(), n);
        }
    }

    /// When the sidecar may be written again: all of it is rewritten each time, and the drive is needed for experts, so
    /// it gets no more than 1 MB/s (a byte a microsecond).
    fn next_write(&self) -> Instant {
        self.written_at + Duration::from_micros(self.written_size)
    }

    fn keep<T>(&mut self, result: Result<T>) -> Result<T> {
        if let Err(e) = &result {
            self.error.get_or_insert_with(|| e.clone());
        }
        result
    }

    /// After a failed write: whole tokens only, the same in all files. Returns their number.
    fn cut(&mut self) -> Result<u64> {
        let (head, token) = (HEADER_BYTES as u64, self.layout.records() as u64);
        let mut n = self.records.cut_to_units(head, token, self.tokens)?;
        if let Some(file) = &mut self.ranges {
            n = file.cut_to_units(0, self.layout.ranges() as u64, n)?;
            n = self.records.cut_to_units(head, token, n)?;
        }
        self.sidecar.ranges.retain(|range| range.first < n);
        if let Some(last) = self.sidecar.ranges.last_mut() {
            last.n_tokens = last.n_tokens.min(n - last.first);
        }
        self.sidecar.resident.retain(|resident| resident.before_token <= n);
        self.sidecar.settings.iter_mut().for_each(|from| from.token = from.token.min(n));
        self.tokens = n;
        Ok(n)
    }

    fn finish(&mut self) -> Result<()> {
        self.fold_events(true);
        if self.error.is_none() {
            let result = self.flush_files(false);
            // kept as the error that the sidecar names; what follows then saves what there is
            let _ = self.keep(result);
        }
        if self.error.is_some() {
            self.cut()?;
        }
        // a count that u32 does not hold stays 0, which means: from the length
        let n_tokens = u32::try_from(self.tokens).unwrap_or(0);
        self.records.patch(N_TOKENS_OFFSET, &n_tokens.to_le_bytes())?;
        self.flush_files(true)?;
        self.take_counts();
        let lost = self.pending.sent.load(Ordering::Acquire).saturating_sub(self.tokens);
        if lost > 0 {
            *self.sidecar.left_out.entry(reason::WRITE_FAILED.to_owned()).or_default() += lost;
            let unnamed = || format!("{lost} tokens were not written");
            self.sidecar.error = Some(self.error.as_ref().map_or_else(unnamed, Error::to_string));
        }
        self.sidecar.closed = true;
        self.sidecar.write(&self.sidecar_path, true)?;
        Ok(())
    }
}

impl Sink for TraceSink {
    fn write(&mut self, block: &[u8]) -> Result<()> {
        self.fold_events(false);
        if self.gap_unwritten && Instant::now() >= self.next_write() {
            let result = self.write_sidecar(false);
            self.keep(result)?;
        }
        let result = self.append(block);
        self.keep(result)
    }

    fn flush(&mut self, durable: bool) -> Result<()> {
        self.fold_events(false);
        let result = self.write_sidecar(durable);
        self.keep(result)
    }

    fn idle(&mut self) -> Result<Option<Duration>> {
        let result = self.flush_files(false);
        self.keep(result)?;
        self.fold_events(false);
        if !self.changed {
            return Ok(None);
        }
        let refresh = if self.gap_unwritten { Duration::ZERO } else { Self::REFRESH };
        let due = self.next_write().max(self.written_at + refresh);
        let wait = due.saturating_duration_since(Instant::now());
        if !wait.is_zero() {
            return Ok(Some(wait));
        }
        let result = self.write_sidecar(false);
        self.keep(result)?;
        Ok(None)
    }

    fn close(&mut self) -> Result<()> {
        let result = self.finish();
        self.keep(result)?;
        self.error.clone().map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::Write;

    use super::*;
    use crate::trace::block::{Phase, Placement};
    use crate::trace::q4rt::{Header, Trace};
    use crate::trace::sidecar::{Shape, read_ranges};

    const LAYOUT: Layout = Layout { n_layers: 2, top_m: 3, row_range: true };

    fn block(position: i64) -> Vec<u8> {
        let mut bytes = vec![0; LAYOUT.block().unwrap()];
        bytes[LAYOUT.range(1)].copy_from_slice(&(position as f32).to_le_bytes());
        let meta = TokenMeta { phase: Phase::Decode, position, tokens_per_pass: 1, index: 0, first: 0 };
        meta.encode(&[Placement::Slots], &mut bytes[LAYOUT.records() + LAYOUT.ranges()..]);
        bytes
    }

    fn sink(dir: &std::path::Path) -> TraceSink {
        let trace = dir.join("a.q4rt");
        let mut records = FileSink::new(File::create(&trace).unwrap(), &trace);
        records.write(&Header { n_layers: 2, n_experts: 9, top_m: 3, n_tokens: 0 }.encode()).unwrap();
        let ranges = dir.join("a.q4rt.range");
        let ranges = FileSink::new(File::create(&ranges).unwrap(), &ranges);
        let shape = Shape { blocks: vec![0, 1], n_experts: vec![9, 9], k: 2, top_m: 3 };
        let sidecar = Sidecar { shape, ..Sidecar::default() };
        TraceSink::new(LAYOUT, records, Some(ranges), Arc::default(), sidecar, dir.join("a.q4rt.json"))
    }

    #[test]
    fn after_a_failed_write_the_files_hold_the_same_whole_tokens() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.q4rt");
        let mut sink = sink(dir.path());
        (0..5).for_each(|position| sink.write(&block(position)).unwrap());
        sink.flush(true).unwrap();
        // the disk took two tokens and a half of the records, three tokens and a byte of the ranges
        let head = HEADER_BYTES + LAYOUT.records() * 2 + 7;
        File::options().write(true).open(&path).unwrap().set_len(head as u64).unwrap();
        let ranges = File::options().write(true).open(dir.path().join("a.q4rt.range")).unwrap();
        ranges.set_len(3 * 8 + 1).unwrap();
        sink.pending.sent.store(6, Ordering::Relaxed);
        sink.error = Some(err!(Io, "no space left"));
        assert!(sink.close().is_err());
        let trace = Trace::open(&path).unwrap();
        let health = trace.health();
        assert_eq!((health.header_tokens, health.found_tokens, health.stray_bytes), (2, 2, 0));
        assert_eq!(read_ranges(&path, 2).unwrap(), [0.0, 0.0, 0.0, 1.0]);
        let sidecar = Sidecar::read_beside(&path).unwrap().unwrap();
        assert_eq!((sidecar.described_tokens(), sidecar.left_out[reason::WRITE_FAILED]), (2, 4));
        assert_eq!(sidecar.error.unwrap(), "no space left");
    }

    #[test]
    fn a_sidecar_that_cannot_be_written_is_an_error_and_the_trace_is_sound() {
        let dir = tempfile::tempdir().unwrap();
        let mut sink = sink(dir.path());
        sink.write(&block(0)).unwrap();
        fs::create_dir(dir.path().join("a.q4rt.json")).unwrap();
        assert!(sink.flush(false).is_err());
        assert!(sink.close().is_err());
        assert_eq!(Trace::open(dir.path().join("a.q4rt")).unwrap().health().header_tokens, 1);
        assert!(!dir.path().join("a.q4rt.json.tmp").exists());
    }

    #[test]
    fn a_file_that_takes_nothing_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        File::create(&path).unwrap().write_all(b"123").unwrap();
        let mut file = FileSink::new(File::open(&path).unwrap(), &path);
        file.write(b"45").unwrap();
        let error = file.flush(false).unwrap_err().detail;
        assert!(error.contains("2 bytes at offset 0"), "{error}");
        assert!(file.patch(0, b"x").is_err());
    }

    #[test]
    fn blocks_of_another_size_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut sink = sink(dir.path());
        for n in 0..LAYOUT.block().unwrap() - LAYOUT.n_layers {
            assert!(sink.append(&block(0)[..n]).is_err());
        }
    }
}
