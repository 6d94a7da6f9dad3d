//! The live recorder: from the hook's calls in the middle of a pass to a trace on disk.
//!
//! Of each pass: [`Recorder::begin_pass`], then for each layer in order [`Recorder::begin_layer`] and a
//! [`Recorder::push_row`] for each of its rows, then [`Recorder::end_pass`]. A token is one block of the spool; a pass
//! holds as many blocks as it has tokens, layers write into them side by side, and at the end they are sent together.
//! So a pass is in the trace as a whole or not at all, and no layer can be shifted against another. The exception is a
//! pass whose last layers see its last rows only (an engine computes no outputs that nobody asked for): its first
//! tokens are left out.
//!
//! Whatever is left out is counted with its reason, and is a gap: the recorder can no longer say what is resident, so
//! the next recorded pass begins with a snapshot of it. All calls come from one thread, the engine's; none waits for
//! the disk, and none allocates after the first pass, save for a snapshot after a gap.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use half::f16;

use crate::error::{Error, Result, err};
use crate::trace::block::{Layout, Phase, Placement, TokenMeta};
use crate::trace::config::{RecorderConfig, Snapshot, first_sidecar, reason};
use crate::trace::file_sink::FileSink;
use crate::trace::q4rt::{Header, encode_record};
use crate::trace::sidecar::{Resident, Settings, SettingsFrom, range_path, resident_fault, sidecar_path};
use crate::trace::spool::{Block, Sink, Spool};
use crate::trace::writer::{Event, Pending, TraceSink};

/// Records passes into a trace. Dropping it closes it, with errors unseen.
pub struct Recorder {
    spool: Spool,
    pending: Arc<Pending>,
    layout: Layout,
    /// Of each layer.
    n_experts: Vec<u32>,
    record_prefill: bool,
    path: PathBuf,
    /// Those of the pass at hand, one a token.
    blocks: Vec<Block>,
    pass: Option<Pass>,
    /// Why the next recorded pass must begin with a snapshot.
    gap: Option<&'static str>,
    /// The queue ran full and has not drained yet.
    draining: bool,
    sent: u64,
    left_out: u64,
}

/// The pass at hand.
struct Pass {
    phase: Phase,
    position: i64,
    n_tokens: usize,
    /// The first token that all layers so far have seen.
    first: usize,
    /// Layers begun.
    layers: usize,
    /// Rows that the layer at hand sees, and has seen.
    rows: usize,
    row: usize,
    /// Why it cannot be recorded.
    refused: Option<&'static str>,
    /// What was resident before it, if that must be noted, and why.
    snapshot: Option<(Snapshot, &'static str)>,
}

impl Recorder {
    /// Creates the trace, replacing an older one and what lies beside it, and starts the writer thread. Nothing is
    /// recorded before the first pass.
    pub fn create(path: impl AsRef<Path>, config: RecorderConfig) -> Result<Self> {
        Self::create_with(path, config, |sink| sink)
    }

    /// The same, with something put in front of the files: a counter, a disk that is slow or fails.
    pub fn create_with(
        path: impl AsRef<Path>,
        config: RecorderConfig,
        wrap: impl FnOnce(Box<dyn Sink>) -> Box<dyn Sink>,
    ) -> Result<Self> {
        let path = path.as_ref();
        let layout =
            Layout { n_layers: config.n_layers.into(), top_m: config.top_m.into(), row_range: config.row_range };
        let header =
            Header { n_layers: config.n_layers, n_experts: config.n_experts, top_m: config.top_m, n_tokens: 0 };
        let sidecar = first_sidecar(&config)?;
        sidecar.check_header(&header)?;
        let block_bytes = layout.block().ok_or_else(|| err!(Argument, "trace: a token is too large: {header:?}"))?;

        let json = sidecar_path(path);
        remove_old(&json)?;
        let mut records = create_new(path)?;
        records.write(&header.encode())?;
        // at once, so that even a process killed now leaves a trace
        records.flush(false)?;
        let ranges_at = range_path(path);
        let ranges =
            if config.row_range { Some(create_new(&ranges_at)?) } else { remove_old(&ranges_at).map(|()| None)? };
        sidecar.write(&json, false)?;

        let pending = Arc::<Pending>::default();
        let n_experts = sidecar.shape.n_experts.clone();
        let sink = TraceSink::new(layout, records, ranges, pending.clone(), sidecar, json);
        Ok(Self {
            spool: Spool::new("hotset-trace", config.queue_tokens, block_bytes, wrap(Box::new(sink)))?,
            pending,
            layout,
            n_experts,
            record_prefill: config.record_prefill,
            path: path.to_owned(),
            blocks: Vec::with_capacity(config.queue_tokens),
            pass: None,
            gap: Some(reason::START),
            draining: false,
            sent: 0,
            left_out: 0,
        })
    }

    /// Begins a pass of `n_tokens`, the first at `position` (negative = not known). `snapshot` says what is resident
    /// now, before the pass changes it; it is called only when that must be noted. Returns whether the pass is being
    /// recorded: if not, the calls up to `end_pass` do nothing and may be spared.
    pub fn begin_pass<S: Into<Snapshot>>(
        &mut self,
        phase: Phase,
        position: i64,
        n_tokens: usize,
        snapshot: impl FnOnce() -> S,
    ) -> bool {
        // the engine gave the last one up without a word
        self.abort_pass();
        // no tokens: nothing to record, and nothing that changes
        if n_tokens == 0 {
            return false;
        }
        if let Err(why) = self.reserve(phase, n_tokens) {
            self.blocks.clear();
            self.leave_out(n_tokens, why);
            return false;
        }
        let snapshot = self.gap.take().map(|why| (snapshot().into(), why));
        // one bad id would make the whole sidecar unreadable
        let sound = |layers: &[Vec<u16>]| {
            layers.len() == self.n_experts.len()
                && layers.iter().zip(&self.n_experts).all(|(ids, &n)| resident_fault(ids, n).is_none())
        };
        let refused = snapshot.as_ref().filter(|(now, _)| !sound(&now.layers)).map(|_| reason::SNAPSHOT);
        self.pass = Some(Pass { phase, position, n_tokens, first: 0, layers: 0, rows: 0, row: 0, refused, snapshot });
        refused.is_none()
    }

    /// A block for each token, or why not.
    fn reserve(&mut self, phase: Phase, n_tokens: usize) -> Result<(), &'static str> {
        if phase == Phase::Prefill && !self.record_prefill {
            return Err(reason::PREFILL);
        }
        if self.spool.failed() {
            return Err(reason::WRITE_FAILED);
        }
        if self.pending.full.load(Ordering::Relaxed) {
            return Err(reason::SIDECAR_FULL);
        }
        if n_tokens > self.spool.n_blocks() || u32::try_from(n_tokens).is_err() {
            return Err(reason::BATCH_TOO_LARGE);
        }
        // each gap costs a snapshot: after one, let the queue drain, so that they come by the half queue at most
        if self.draining && self.spool.n_free() < n_tokens.max(self.spool.n_blocks() / 2) {
            return Err(reason::QUEUE_FULL);
        }
        self.draining = false;
        for _ in 0..n_tokens {
            match self.spool.take() {
                Some(block) => self.blocks.push(block),
                None => {
                    self.draining = true;
                    return Err(reason::QUEUE_FULL);
                }
            }
        }
        Ok(())
    }

    /// Begins a layer, the next in order, that sees `rows` of the pass's tokens. Fewer than the pass has are taken to be
    /// the last ones if `tail`; else which they are is not known, and the pass is left out. Returns whether the pass is
    /// (still) being recorded.
    pub fn begin_layer(&mut self, layer: usize, rows: usize, tail: bool) -> bool {
        let Some(pass) = self.pass.as_mut().filter(|pass| pass.refused.is_none()) else { return false };
        if pass.row != pass.rows {
            pass.refused = Some(reason::ROWS);
        } else if layer != pass.layers || layer >= self.layout.n_layers {
            pass.refused = Some(reason::LAYER_ORDER);
        } else if rows > pass.n_tokens {
            pass.refused = Some(reason::MORE_TOKENS);
        } else if rows == 0 || (rows < pass.n_tokens && !tail) {
            pass.refused = Some(reason::FEWER_TOKENS);
        } else {
            pass.first = pass.first.max(pass.n_tokens - rows);
        }
        pass.layers += 1;
        (pass.rows, pass.row) = (rows, 0);
        pass.refused.is_none()
    }

    /// One row of the layer begun last, rows in order: its `top_m` candidates by falling score, and the range
    /// (max - min) of the whole row, which is used only with `row_range`. Two copies; no lock, no allocation.
    #[inline]
    pub fn push_row(&mut self, layer: usize, row: usize, ids: &[u16], scores: &[f16], range: f32) {
        let Some(pass) = self.pass.as_mut().filter(|pass| pass.refused.is_none()) else { return };
        let in_order = layer + 1 == pass.layers && row == pass.row && row < pass.rows;
        // rows that fewer tokens have are the last ones of the pass
        let token = (pass.n_tokens + row).wrapping_sub(pass.rows);
        match self.blocks.get_mut(token) {
            Some(block) if in_order && ids.len() == self.layout.top_m && scores.len() == ids.len() => {
                let bytes = block.bytes_mut();
                if encode_record(ids, scores, &mut bytes[self.layout.record(layer)]).is_err() {
                    pass.refused = Some(reason::ROWS);
                }
                if self.layout.row_range {
                    bytes[self.layout.range(layer)].copy_from_slice(&range.to_le_bytes());
                }
                pass.row += 1;
            }
            _ => pass.refused = Some(reason::ROWS),
        }
    }

    /// Ends the pass and sends it to the writer. `placement`: one for all layers, or one a layer. Returns whether any of
    /// its tokens were recorded.
    pub fn end_pass(&mut self, placement: &[Placement]) -> bool {
        let Some(pass) = self.pass.take() else { return false };
        let mut refused = pass.refused;
        if pass.layers != self.layout.n_layers || (placement.len() != 1 && placement.len() != pass.layers) {
            refused = refused.or(Some(reason::LAYER_ORDER));
        } else if pass.row != pass.rows {
            refused = refused.or(Some(reason::ROWS));
        }
        if let Some(why) = refused {
            self.give_up(&pass, why);
            return false;
        }
        if let Some((now, why)) = pass.snapshot {
            let resident =
                Resident { before_token: self.sent, reason: why.to_owned(), layers: now.layers, state: now.state };
            self.pending.state.lock().events.push(Event::Resident(resident));
        }
        let meta_at = self.layout.records() + self.layout.ranges();
        for (i, mut block) in self.blocks.drain(..).enumerate().skip(pass.first) {
            let position =
                if pass.position < 0 { pass.position } else { pass.position.saturating_add_unsigned(i as u64) };
            // reserve() refused what u32 does not hold
            let meta = TokenMeta {
                phase: pass.phase,
                position,
                tokens_per_pass: pass.n_tokens as u32,
                index: i as u32,
                first: pass.first as u32,
            };
            meta.encode(placement, &mut block.bytes_mut()[meta_at..]);
            block.set_used(usize::MAX);
            self.spool.send(block);
        }
        self.sent += (pass.n_tokens - pass.first) as u64;
        self.pending.sent.store(self.sent, Ordering::Release);
        if pass.first > 0 {
            // the layers before saw all tokens, and their caches moved on
            self.leave_out(pass.first, reason::FEWER_TOKENS);
        }
        true
    }

    /// Gives up the pass at hand: an error in the engine or the hook. Does nothing between passes.
    pub fn abort_pass(&mut self) {
        self.refuse(reason::ABORTED);
    }

    /// A pass that cannot be recorded, or cannot be recorded further: counts `n_tokens` as left out, or those of the
    /// pass at hand if there is one.
    pub fn skip_pass(&mut self, n_tokens: usize, why: &'static str) {
        if self.pass.is_some() {
            self.refuse(why);
        } else if n_tokens > 0 {
            self.leave_out(n_tokens, why);
        }
    }

    fn refuse(&mut self, why: &'static str) {
        if let Some(pass) = self.pass.take() {
            self.give_up(&pass, pass.refused.unwrap_or(why));
        }
    }

    fn give_up(&mut self, pass: &Pass, why: &'static str) {
        self.blocks.clear();
        // its snapshot is lost with it, but not the reason for it
        self.gap = pass.snapshot.as_ref().map(|(_, first)| *first);
        self.leave_out(pass.n_tokens, why);
    }

    fn leave_out(&mut self, n_tokens: usize, why: &'static str) {
        self.left_out += n_tokens as u64;
        self.gap.get_or_insert(why);
        let counts = &mut self.pending.state.lock().left_out;
        match counts.iter_mut().find(|(reason, _)| *reason == why) {
            Some((_, n)) => *n += n_tokens as u64,
            None => counts.push((why, n_tokens as u64)),
        }
    }

    /// Something other than a pass has changed what is resident (a reset, another size): the next recorded pass begins
    /// with a snapshot. Within a pass, that pass is left out.
    pub fn mark_gap(&mut self, why: &'static str) {
        match &mut self.pass {
            Some(pass) => pass.refused = pass.refused.or(Some(why)),
            None => {
                self.gap.get_or_insert(why);
            }
        }
    }

    /// The settings that hold from the next token on. A gap as well.
    pub fn set_settings(&mut self, settings: Settings) -> Result<()> {
        settings.check(self.layout.n_layers)?;
        self.mark_gap(reason::SETTINGS);
        // then nothing more is recorded that they could hold for
        if self.pending.full.load(Ordering::Relaxed) {
            return Ok(());
        }
        let from = SettingsFrom { token: self.sent, settings };
        self.pending.state.lock().events.push(Event::Settings(from));
        Ok(())
    }

    /// What the scores are (`logit`, `log_prob`, ...), where that is known only once the engine hands some over.
    pub fn set_score_space(&mut self, name: &'static str) {
        self.pending.state.lock().events.push(Event::ScoreSpace(self.sent, name));
    }

    /// Whether a pass is at hand and being recorded.
    #[inline]
    pub fn in_pass(&self) -> bool {
        self.pass.as_ref().is_some_and(|pass| pass.refused.is_none())
    }

    /// Tokens recorded: sent to the writer.
    pub fn tokens(&self) -> u64 {
        self.sent
    }

    /// Tokens left out, for whatever reason; those that a failed disk lost later are not among them.
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The first error of the writing side. After it nothing more is recorded.
    pub fn error(&self) -> Option<Error> {
        self.spool.error()
    }

    /// Waits, at most `timeout`, until all passes ended so far and the sidecar are written, and on the device if
    /// `durable`.
    pub fn flush(&self, timeout: Duration, durable: bool) -> Result<()> {
        self.spool.flush(timeout, durable)
    }

    /// Writes what is left, the header's count and the sidecar, and waits for that. A pass at hand is left out.
    pub fn close(mut self) -> Result<()> {
        self.abort_pass();
        self.spool.close()
    }
}

/// Removes an older file. Not truncated: somebody may have it mapped. What is no file stays and is an error.
fn remove_old(path: &Path) -> Result<()> {
    let name = path.display();
    match fs::symlink_metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(err!(Io, "{name}: {e}")),
        Ok(meta) if meta.is_file() || meta.is_symlink() => fs::remove_file(path).map_err(|e| err!(Io, "{name}: {e}")),
        Ok(_) => Err(err!(Argument, "{name}: in the way, and not a file")),
    }
}

fn create_new(path: &Path) -> Result<FileSink> {
    remove_old(path)?;
    let file = File::create_new(path).map_err(|e| err!(Io, "{}: {e}", path.display()))?;
    Ok(FileSink::new(file, path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::sidecar::Sidecar;

    /// The hook moves it between the engine's threads.
    const fn may_move<T: Send>() {}
    const _: () = may_move::<Recorder>();

    #[test]
    fn a_full_sidecar_ends_recording() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.q4rt");
        let config = RecorderConfig { n_layers: 1, n_experts: 4, top_m: 1, ..RecorderConfig::default() };
        let mut recorder = Recorder::create(&path, config).unwrap();
        recorder.pending.full.store(true, Ordering::Relaxed);
        assert!(!recorder.begin_pass(Phase::Decode, 0, 1, || vec![vec![]]));
        recorder.set_settings(Settings::default()).unwrap();
        recorder.close().unwrap();
        let sidecar = Sidecar::read_beside(&path).unwrap().unwrap();
        assert_eq!((sidecar.left_out[reason::SIDECAR_FULL], sidecar.settings.len()), (1, 1));
    }
}
