//! What the lanes and the callers of a store share: the tables, the files, the arena and the slots' states; and the way of
//! one job: read the piece, then say how it went. Everything that comes from outside is checked here, once.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use memmap2::Mmap;

use super::arena::Arena;
use super::config::StoreConfig;
use super::lanes::Job;
use super::pieces::LayerPieces;
use super::reader::{ReadCounters, Reader, Transfer};
use super::slots::{LayerSlots, MAX_PIECES};
use super::source::SourceFile;
use crate::error::{Error, Result, err};
use crate::model::{ExpertTable, ExpertTensor, MoeLayer, Pack};

pub(super) struct Shared {
    pub layers: Vec<MoeLayer>,
    /// The model's, and behind them the pack.
    pub files: Vec<SourceFile>,
    pub maps: Vec<Arc<Mmap>>,
    pub config: StoreConfig,
    /// None with the page-cache backing; `slots` is empty then.
    pub arena: Option<Arena>,
    pub slots: Vec<LayerSlots>,
    /// By layer: what a fetch reads. Empty with the page-cache backing.
    pub pieces: Vec<LayerPieces>,
    pub counters: ReadCounters,
    pub wait_ns: AtomicU64,
    /// Bytes of the slots whose pages take memory. Changed under the claim of the slot, so that it never counts one twice.
    pub committed: AtomicU64,
    /// The store is being dropped: jobs still queued end unread.
    pub closing: AtomicBool,
}

/// A panic (in a wrapped source) is a failure like any other.
pub(super) fn caught<T>(read: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|_| Err(err!(Internal, "the read panicked")))
}

impl Shared {
    /// Does a job. Whatever happens, the piece is finished.
    pub fn run(&self, job: Job, reader: &mut Reader) {
        self.finish(job, caught(|| reader.read(self.begin(job)?, &self.counters)));
    }

    /// A job's read, with no call made yet.
    pub fn begin(&self, job: Job) -> Result<Transfer<'_>> {
        if self.closing.load(Relaxed) {
            return Err(err!(State, "the store is closing"));
        }
        let layer = job.layer as usize;
        let (run, offset, in_slot, bytes) = self.pieces[layer].place(job.piece, job.expert);
        let (start, len) = self.arena()?.span(layer, job.slot);
        debug_assert!(in_slot + bytes <= len as u64);
        // SAFETY: the piece lies in its slot (`pieces` is made of the arena's own layout), and the slot in the arena, whose memory
        // was zeroed by the system, so it is initialised. `fetch` has claimed the slot, this job is the only one for this
        // piece, and pieces do not overlap: nobody else uses it.
        let dest = unsafe { std::slice::from_raw_parts_mut(start.add(in_slot as usize), bytes as usize) };
        Ok(Transfer::new(&self.files[run.file], offset, dest, &self.counters))
    }

    /// Ends a job, with the numbers of what it was about.
    pub fn finish(&self, job: Job, outcome: Result<()>) {
        let Job { layer, expert, slot, piece } = job;
        let piece = self.pieces[layer as usize].get(piece);
        let outcome = outcome.map_err(|e| {
            self.counters.failures.fetch_add(1, Relaxed);
            let name = |i: u32| &self.layers[layer as usize].tensors[i as usize].name;
            let (first, last) = (piece.slices.start, piece.slices.end - 1);
            let of = if first == last {
                format!("slice {first} ({})", name(first))
            } else {
                format!("slices {first} to {last} ({} to {})", name(first), name(last))
            };
            let part = match piece.number {
                (_, 1) => String::new(),
                (i, n) => format!(" read {} of {n}", i + 1),
            };
            Error::new(e.kind, format!("layer {layer} expert {expert} slot {slot} {of}{part}: {}", e.detail))
        });
        self.slots[layer as usize].finish(slot, piece.slices.clone(), outcome);
    }

    pub fn arena(&self) -> Result<&Arena> {
        self.arena.as_ref().ok_or_else(|| err!(State, "the page-cache backing has no slots"))
    }

    /// The reads that fill a slot.
    pub fn jobs(&self, layer: usize, expert: u32, slot: u32) -> impl Iterator<Item = Job> {
        let n = self.pieces[layer].len() as u32;
        (0..n).map(move |piece| Job { layer: layer as u32, expert, slot, piece })
    }

    pub fn layer(&self, layer: usize) -> Result<&LayerSlots> {
        self.arena()?;
        self.slots.get(layer).ok_or_else(|| self.no_layer(layer))
    }

    /// The layer's slots, of which `slot` is one.
    pub fn slot_in(&self, layer: usize, slot: u32) -> Result<&LayerSlots> {
        let slots = self.layer(layer)?;
        if slot < slots.len() {
            return Ok(slots);
        }
        Err(err!(Range, "layer {layer} has {} slots; slot {slot} was asked for", slots.len()))
    }

    pub fn tensor(&self, layer: usize, slice: usize) -> Result<&ExpertTensor> {
        let l = self.layers.get(layer).ok_or_else(|| self.no_layer(layer))?;
        let none = || err!(Range, "layer {layer} has {} expert tensors; number {slice} was asked for", l.tensors.len());
        l.tensors.get(slice).ok_or_else(none)
    }

    pub fn no_layer(&self, layer: usize) -> Error {
        err!(Range, "there are {} layers with experts; layer {layer} was asked for", self.layers.len())
    }

    /// Bytes from a slot to the next; 0 without slots. The layer is in range.
    pub fn stride(&self, layer: usize) -> u64 {
        self.arena.as_ref().map_or(0, |a| a.slot_stride(layer))
    }

    /// The address of a range of a tensor's file in its map.
    pub fn mapped(&self, t: &ExpertTensor, offset: u64, bytes: u64) -> Result<*const u8> {
        let Some(map) = self.maps.get(t.file) else {
            return Err(err!(State, "{}: the store was opened without mapped files", t.name));
        };
        let end = offset.checked_add(bytes).filter(|&end| end <= map.len() as u64);
        if end.is_none() {
            let len = map.len();
            return Err(err!(Changed, "{}: {bytes} bytes at {offset} are not in the map of {len} bytes", t.name));
        }
        // SAFETY: the offset is inside the map.
        Ok(unsafe { map.as_ptr().add(offset as usize) })
    }
}

/// Refuses a table that does not fit its files, so that nothing later needs to ask.
pub(super) fn check_table(table: &ExpertTable, lens: &[u64]) -> Result<()> {
    for (i, l) in table.layers.iter().enumerate() {
        let at = format!("layer {i} (block {})", l.block);
        let n = l.tensors.len();
        if l.n_experts == 0 || l.n_experts == u32::MAX || n == 0 || n > MAX_PIECES {
            return Err(err!(Model, "{at}: {} experts in {n} tensors cannot be kept in slots", l.n_experts));
        }
        for t in &l.tensors {
            let Some(&len) = lens.get(t.file) else {
                return Err(err!(Model, "{at}: {} lies in file {}, of {}", t.name, t.file, lens.len()));
            };
            let bytes = t.slice_bytes.checked_mul(l.n_experts.into());
            let end = bytes.and_then(|b| b.checked_add(t.offset_bytes));
            if t.slice_bytes == 0 || end.is_none_or(|end| end > len) {
                let (size, start) = (t.slice_bytes, t.offset_bytes);
                return Err(err!(
                    Format,
                    "{at}: {}, {} experts of {size} bytes from {start} on, does not fit file {} of {len} bytes",
                    t.name,
                    l.n_experts,
                    t.file
                ));
            }
        }
    }
    Ok(())
}

/// Refuses a pack whose layers are not the table's. (`Pack::open` has checked the rest.)
pub(super) fn check_pack(table: &ExpertTable, pack: &Pack) -> Result<()> {
    let path = pack.path.display();
    if pack.layers.len() != table.layers.len() {
        let (p, t) = (pack.layers.len(), table.layers.len());
        return Err(err!(Model, "{path}: a pack of {p} layers, the model has {t}"));
    }
    for (p, l) in pack.layers.iter().zip(&table.layers) {
        let same = p.slices.len() == l.tensors.len()
            && p.slices.iter().zip(&l.tensors).all(|(s, t)| s.slice_bytes == t.slice_bytes);
        // what `PackHeader::parse` promises, since memory is written by it
        let inside = p
            .slices
            .windows(2)
            .all(|w| w[0].offset_bytes.checked_add(w[0].slice_bytes).is_some_and(|end| end <= w[1].offset_bytes))
            && p.slices
                .last()
                .is_none_or(|s| s.offset_bytes.checked_add(s.slice_bytes).is_some_and(|end| end <= p.stride_bytes));
        let end = p.stride_bytes.checked_mul(p.n_experts.into()).and_then(|n| n.checked_add(p.offset_bytes));
        if p.n_experts != l.n_experts || !same || !inside || end.is_none_or(|end| end > pack.file_bytes) {
            return Err(err!(
                Model,
                "{path}: block {}: {} experts in strides of {} bytes, from {} on in {} bytes, are not the model's {} experts of {} bytes",
                l.block,
                p.n_experts,
                p.stride_bytes,
                p.offset_bytes,
                pack.file_bytes,
                l.n_experts,
                l.expert_bytes()
            ));
        }
    }
    Ok(())
}
