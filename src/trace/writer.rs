//! The recorder's writing side: what happens on the writer thread.
//!
//! Each block that comes through the spool is one token: its records, its row ranges if they are recorded, and a
//! [`TokenMeta`]. Records and ranges are appended to their files; the meta data extend the sidecar's token ranges. What
//! has no place in a block, because it is rare and of any size (what was resident, settings, counts), the recorder
//! leaves in [`Pending`]; it is folded in when the token to which it belongs comes by, so the sidecar only ever
//! describes tokens that were written.

use std::collections::VecDeque;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::error::{Error, Result, err};
use crate::trace::q4rt::{HEADER_BYTES, N_TOKENS_OFFSET};
use crate::trace::recorder::reason;
use crate::trace::sidecar::{Phase, Placement, Resident, SettingsFrom, Sidecar, TokenRange};
use crate::trace::spool::{FileSink, Sink};

/// Where the parts of a block lie: records, ranges, meta data.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub n_layers: usize,
    pub top_m: usize,
    pub row_range: bool,
}

impl Layout {
    pub fn record_bytes(&self) -> usize {
        4 * self.top_m
    }

    /// Bytes of a token's records, which are the block's first.
    pub fn records(&self) -> usize {
        self.n_layers * self.record_bytes()
    }

    /// Bytes of a token's row ranges, which follow.
    pub fn ranges(&self) -> usize {
        if self.row_range { 4 * self.n_layers } else { 0 }
    }

    /// Bytes of a whole block, or `None` if no machine word holds them.
    pub fn block(&self) -> Option<usize> {
        self.n_layers
            .checked_mul(self.record_bytes().checked_add(5)?)?
            .checked_add(TokenMeta::FIXED)
            .filter(|&n| n <= isize::MAX as usize)
            .map(|_| self.records() + self.ranges() + TokenMeta::FIXED + self.n_layers)
    }

    #[inline]
    pub fn record(&self, layer: usize) -> Range<usize> {
        let size = self.record_bytes();
        layer * size..(layer + 1) * size
    }

    #[inline]
    pub fn range(&self, layer: usize) -> Range<usize> {
        let at = self.records() + 4 * layer;
        at..at + 4
    }
}

/// What a block says about its token, for the sidecar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TokenMeta {
    pub phase: Phase,
    /// This token's; negative = not known.
    pub position: i64,
    pub tokens_per_pass: u32,
    /// This token's place in its pass.
    pub index: u32,
    /// The first token of the pass that is recorded.
    pub first: u32,
}

impl TokenMeta {
    const FIXED: usize = 1 + 8 + 4 + 4 + 4;

    /// Into the end of a block: the fixed part, then a byte a layer for the placement.
    pub fn encode(&self, placement: &[Placement], out: &mut [u8]) {
        let (fixed, layers) = out.split_at_mut(Self::FIXED);
        fixed[0] = (self.phase == Phase::Decode).into();
        fixed[1..9].copy_from_slice(&self.position.to_le_bytes());
        fixed[9..13].copy_from_slice(&self.tokens_per_pass.to_le_bytes());
        fixed[13..17].copy_from_slice(&self.index.to_le_bytes());
        fixed[17..21].copy_from_slice(&self.first.to_le_bytes());
        let code = |p: &Placement| *p as u8;
        match placement {
            [one] => layers.fill(code(one)),
            each => layers.iter_mut().zip(each).for_each(|(out, p)| *out = code(p)),
        }
    }

    /// The same back, with the placement's bytes. `None` if there are too few.
    pub fn decode(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (fixed, layers) = bytes.split_at_checked(Self::FIXED)?;
        let u32_at = |at: usize| Some(u32::from_le_bytes(*fixed[at..].first_chunk()?));
        let meta = Self {
            phase: if fixed[0] == 1 { Phase::Decode } else { Phase::Prefill },
            position: i64::from_le_bytes(*fixed[1..].first_chunk()?),
            tokens_per_pass: u32_at(9)?,
            index: u32_at(13)?,
            first: u32_at(17)?,
        };
        Some((meta, layers))
    }
}

fn placement_of(code: u8) -> Placement {
    [Placement::Slots, Placement::PassThrough, Placement::Mapped][usize::from(code.min(2))]
}

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
}

impl Event {
    fn token(&self) -> u64 {
        match self {
            Self::Resident(resident) => resident.before_token,
            Self::Settings(from) => from.token,
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
        if placement.iter().all(|p| *p == placement[0]) {
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
