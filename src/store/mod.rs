//! Bytes: the room that moves experts from the SSD into slots and says when they are there.
//!
//! ```text
//! fetch(layer, expert, slot) ── claims the slot (slots) ── a job a piece (pieces) ─> lanes (or ring) ── reader ─> arena
//! wait(layer, slot, slice)   <── state and wake-up (slots) <── end of each read ─────────┘
//! bank(layer, slice)         ── where an engine finds the slices (arena)
//! ```
//!
//! Which expert goes into which slot is decided elsewhere (`cache`); here a slot is a number and bytes. The other backing,
//! [`Backing::PageCache`], has no slots: the engine reads the mapped file, and `hint` asks the system to read ahead.
//!
//! All calls may come from any thread. Two rules are the caller's: nobody reads a slot between its `fetch` and the end of
//! the `wait` for it, and nobody waits for an expert before its `fetch` has returned.

mod arena;
mod config;
mod dense;
mod lanes;
mod pieces;
mod reader;
mod ring;
mod shared;
mod slots;
mod source;
mod sys;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use memmap2::Mmap;
use parking_lot::Mutex;

pub use arena::{Bank, SLICE_ALIGN, plan_slot_bytes};
pub use config::{Backing, CHUNK_BYTES, LANES, StoreConfig};
pub use dense::{Dense, DenseHold, DenseReport};
pub use source::{IoMode, IoReport, ReadAt, ReadBy, Stamp};
pub use sys::machine::{Machine, MachineState};
#[cfg(feature = "tools")]
pub use sys::{drop_cached, machine::disk_read_bytes};
pub use sys::{memory_bytes, page_bytes};

use crate::error::{Result, err};
use crate::model::{ExpertTable, ExpertTensor, MoeLayer, PackedLayer};
use arena::Arena;
use lanes::Lanes;
use pieces::{LayerPieces, Run};
use reader::{Bounce, ReadCounters, Reader};
use shared::Shared;
use slots::LayerSlots;
use source::SourceFile;

/// Sums since open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreCounters {
    /// Bytes whose read into slots was begun: of slices, and of a pack's padding.
    pub wanted_bytes: u64,
    /// Bytes the drive (or the page cache) delivered, with what alignment adds.
    pub device_bytes: u64,
    /// Read calls made to the system.
    pub reads: u64,
    /// Copies from a bounce buffer into a slot.
    pub bounce_copies: u64,
    /// Reads of slices, or of parts of them, that failed.
    pub failures: u64,
    /// Time that callers of `wait` and `wait_layer` slept, in ns, summed over the threads.
    pub wait_ns: u64,
}

/// The store of one open model.
pub struct Store {
    // before `shared`: the lanes end first
    lanes: Lanes,
    shared: Arc<Shared>,
    /// For reads that `fetch` makes itself.
    own: Mutex<Reader>,
    io: IoReport,
    staging_bytes: u64,
}

impl Store {
    /// Opens the files for reading, reserves the arena and starts the lanes. `lens` are the files' lengths as their headers
    /// were read; `maps` the mapped files, for the page-cache backing and pass-through: one a file, or none at all.
    pub fn open(
        files: &[PathBuf],
        lens: &[u64],
        table: &ExpertTable,
        maps: Vec<Arc<Mmap>>,
        config: StoreConfig,
    ) -> Result<Store> {
        Store::open_with(files, lens, table, maps, config, |_, file| file)
    }

    /// As `open`, with something between the store and its files: `wrap` gets each file's index and source. For tests that
    /// make reads fail, and for engines that count or throttle them.
    pub fn open_with(
        files: &[PathBuf],
        lens: &[u64],
        table: &ExpertTable,
        maps: Vec<Arc<Mmap>>,
        config: StoreConfig,
        mut wrap: impl FnMut(usize, Box<dyn ReadAt>) -> Box<dyn ReadAt>,
    ) -> Result<Store> {
        config.check()?;
        if files.len() != lens.len() || !(maps.is_empty() || maps.len() == files.len()) {
            let (f, l, m) = (files.len(), lens.len(), maps.len());
            return Err(err!(Argument, "{f} files, {l} lengths, {m} maps: there must be one each"));
        }
        if config.backing == Backing::PageCache && maps.is_empty() {
            return Err(err!(Argument, "the page-cache backing needs the mapped files"));
        }
        shared::check_table(table, lens)?;

        let in_slots = config.backing == Backing::Slots;
        let mode = if in_slots { config.io } else { IoMode::Buffered };
        // with a pack nothing is read from the model's files: they are only watched
        let own_mode = if config.pack.is_some() { IoMode::Buffered } else { mode };
        let open = |(i, path): (usize, &PathBuf)| SourceFile::open(path, lens[i], own_mode, |file| wrap(i, file));
        let mut sources: Vec<SourceFile> = files.iter().enumerate().map(open).collect::<Result<_>>()?;
        // the files that slots are read from
        let mut read_from = 0..sources.len();
        if let Some(pack) = &config.pack {
            shared::check_pack(table, pack)?;
            let i = sources.len();
            sources.push(SourceFile::open(&pack.path, pack.file_bytes, mode, |file| wrap(i, file))?);
            read_from = i..i + 1;
        }
        let mut io = source::report(mode, &sources[read_from.clone()]);

        let bounce = if source::needs_bounce(&sources) { config.bounce_size() } else { 0 };
        let n_lanes = if in_slots { config.lanes } else { 0 };
        let staging_bytes = if in_slots { (n_lanes as u64 + 1) * bounce as u64 } else { 0 };
        let own = Mutex::new(Reader::new(Bounce::new(bounce)?));

        // more slots than experts would never be filled
        let n_slots = config.slots.min(table.n_experts());
        let arena = if in_slots { Some(Arena::new(table, config.pack.as_ref(), n_slots)?) } else { None };
        let mut pieces = Vec::new();
        for (i, (arena, layer)) in arena.iter().flat_map(|a| table.layers.iter().map(move |l| (a, l))).enumerate() {
            let slices = arena.slices(i);
            let packed = config.pack.as_ref().map(|p| (sources.len() - 1, &p.layers[i]));
            let runs = runs(layer, packed, &slices, &sources);
            pieces.push(LayerPieces::new(runs, &slices, config.chunk_bytes)?);
            if io.in_effect == IoMode::Direct {
                let (straight, bounced) = pieces[i].straight_and_bounced(layer.n_experts);
                io.straight_bytes += straight;
                io.bounced_bytes += bounced;
            }
        }
        let new_slots = |(i, p): (usize, &LayerPieces)| LayerSlots::new(i, n_slots, p.len(), &p.of_slice);
        let slots = pieces.iter().enumerate().map(new_slots).collect();
        let queue = config.queue;
        let shared = Arc::new(Shared {
            layers: table.layers.clone(),
            files: sources,
            maps,
            config,
            arena,
            slots,
            pieces,
            counters: ReadCounters::default(),
            wait_ns: AtomicU64::new(0),
            committed: AtomicU64::new(0),
            closing: AtomicBool::new(false),
        });
        let lanes = match ring::open(shared.config.read_by, &shared.files[read_from], n_lanes) {
            _ if !in_slots => Lanes::none(),
            Ok(uring) => {
                io.by = ReadBy::Ring;
                let bounces = (0..n_lanes).map(|_| Bounce::new(bounce)).collect::<Result<_>>()?;
                let (bell, shared) = (uring.bell(), shared.clone());
                Lanes::start_one(n_lanes, queue, bell, move |intake| ring::serve(&shared, uring, bounces, intake))?
            }
            Err(why) => {
                io.by_reason = why;
                Lanes::start(n_lanes, queue, || {
                    let (shared, mut reader) = (shared.clone(), Reader::new(Bounce::new(bounce)?));
                    Ok(move |job| shared.run(job, &mut reader))
                })?
            }
        };
        Ok(Store { lanes, shared, own, io, staging_bytes })
    }

    /// Starts reading all pieces of an expert into a slot; what the slot held is gone. Returns before they are there, unless
    /// the queue is full. Waits, bounded, for reads that an abandoned pass left in flight in this slot. On Err the slot is
    /// as it was; a read that fails later is the error of `wait`.
    pub fn fetch(&self, layer: usize, expert: u32, slot: u32) -> Result<()> {
        let s = &*self.shared;
        self.claim(layer, expert, slot, false)?;
        for job in s.jobs(layer, expert, slot) {
            if let Err(job) = self.lanes.submit(job) {
                match self.own.try_lock_for(s.config.timeout) {
                    Some(mut reader) => s.run(job, &mut reader),
                    None => s.finish(job, Err(err!(Timeout, "the queue is full, and its reads take too long"))),
                }
            }
        }
        Ok(())
    }

    /// `fetch` by lanes that have nothing else to do. False, and nothing has changed, where that is not to be had without waiting: reads are
    /// in flight in the slot, or too many are queued. One thread at a time. Until `adopt` the slot is nobody's: `wait_layer` does not wait
    /// for it, and is not an error where its read has failed.
    pub fn fetch_ahead(&self, layer: usize, expert: u32, slot: u32) -> Result<bool> {
        let s = &*self.shared;
        if !s.slot_in(layer, slot)?.is_over(slot, None) || self.lanes.room_ahead() < s.pieces[layer].len() {
            return Ok(false);
        }
        self.claim(layer, expert, slot, true)?;
        for job in s.jobs(layer, expert, slot) {
            // There was room for all, and nobody else takes it.
            if let Err(job) = self.lanes.submit_ahead(job) {
                s.finish(job, Err(err!(State, "the queue of what is read ahead is full")));
            }
        }
        Ok(true)
    }

    /// Makes a slot that `fetch_ahead` has filled, or is filling, one that `fetch` has.
    pub fn adopt(&self, layer: usize, slot: u32) -> Result<()> {
        self.shared.slot_in(layer, slot)?.adopt(slot);
        Ok(())
    }

    /// Makes a slot the expert's, to be filled piece by piece.
    fn claim(&self, layer: usize, expert: u32, slot: u32, ahead: bool) -> Result<()> {
        let s = &*self.shared;
        let (slots, arena) = (s.slot_in(layer, slot)?, s.arena()?);
        let n_experts = s.layers[layer].n_experts;
        if expert >= n_experts {
            return Err(err!(Range, "layer {layer} has {n_experts} experts; expert {expert} was asked for"));
        }
        if slots.claim_for_fetch(slot, expert, ahead, s.config.timeout)? {
            s.committed.fetch_add(s.stride(layer), Relaxed);
            // SAFETY: layer and slot were checked, and the claim is ours until the last piece is finished.
            unsafe { arena.reuse(layer, slot) };
        }
        Ok(())
    }

    /// Waits until a slice, or with None the whole expert, is in the slot: one or two loads if it is. Err if its read failed
    /// (again at every call, until `clear_failed` or the next `fetch`), if nothing was fetched into the slot, or after the
    /// configured timeout.
    pub fn wait(&self, layer: usize, slot: u32, slice: Option<usize>) -> Result<()> {
        let slots = self.shared.slot_in(layer, slot)?;
        if let Some(i) = slice {
            self.shared.tensor(layer, i)?;
        }
        let slice = slice.map(|i| i as u32);
        if slots.is_ready(slot, slice) {
            return Ok(());
        }
        self.timed(|timeout| slots.wait(slot, slice, timeout))
    }

    /// Waits until nothing is in flight in the layer, but what is read ahead. Err after the timeout, or with a failure that is recorded in the layer;
    /// in the latter case nothing is in flight either.
    pub fn wait_layer(&self, layer: usize) -> Result<()> {
        let slots = self.shared.layer(layer)?;
        if !slots.is_idle() {
            self.timed(|timeout| slots.wait_idle(timeout))?;
        }
        slots.first_failure()
    }

    /// Whether `wait` would return at once: nothing of it is in flight, however its reads ended.
    pub fn is_over(&self, layer: usize, slot: u32, slice: Option<usize>) -> Result<bool> {
        let slots = self.shared.slot_in(layer, slot)?;
        if let Some(i) = slice {
            self.shared.tensor(layer, i)?;
        }
        Ok(slots.is_over(slot, slice.map(|i| i as u32)))
    }

    /// Whether nothing is in flight in the layer, but what is read ahead.
    pub fn is_idle(&self, layer: usize) -> Result<bool> {
        Ok(self.shared.layer(layer)?.is_idle())
    }

    /// Whether a slice, or with None the whole expert, is in the slot now. Out of range is false.
    pub fn is_ready(&self, layer: usize, slot: u32, slice: Option<usize>) -> bool {
        let in_range = slice.is_none_or(|i| self.shared.tensor(layer, i).is_ok());
        in_range && self.shared.slot_in(layer, slot).is_ok_and(|s| s.is_ready(slot, slice.map(|i| i as u32)))
    }

    /// The expert whose bytes are all in the slot.
    pub fn expert_in(&self, layer: usize, slot: u32) -> Option<u32> {
        self.shared.slot_in(layer, slot).ok()?.expert(slot)
    }

    /// The slots of the layer in which a read failed and that this call has not named before; their failures stay recorded.
    /// Allocates only if there are any. Out of range has none.
    pub fn take_failed(&self, layer: usize) -> Vec<u32> {
        self.shared.layer(layer).map_or_else(|_| Vec::new(), LayerSlots::take_failed)
    }

    /// Forgets a slot's failure; the slot is empty afterwards. A slot without a failure stays as it is. Err while reads are
    /// in flight in it.
    pub fn clear_failed(&self, layer: usize, slot: u32) -> Result<()> {
        self.shared.slot_in(layer, slot)?.clear_failed(slot, self.shared.config.timeout)
    }

    /// Empties a slot and gives its memory back. Err while reads are in flight in it. The bank stays where it is: reading
    /// the slot gives bytes without meaning until the next `fetch`.
    pub fn release(&self, layer: usize, slot: u32) -> Result<()> {
        let s = &*self.shared;
        let (slots, arena) = (s.slot_in(layer, slot)?, s.arena()?);
        slots.reset(slot, s.config.timeout, |took_memory| {
            // SAFETY: layer and slot were checked, and `reset` has claimed the slot for us.
            unsafe { arena.release(layer, slot) }.map_err(|e| {
                err!(Memory, "layer {layer} slot {slot}: {} bytes cannot be given back: {e}", s.stride(layer))
            })?;
            if took_memory {
                s.committed.fetch_sub(s.stride(layer), Relaxed);
            }
            Ok(false)
        })
    }

    /// For tests: fills a slot, with the gaps between its slices, and leaves it empty. Err while reads are in flight in it.
    pub fn poison(&self, layer: usize, slot: u32, byte: u8) -> Result<()> {
        let s = &*self.shared;
        let (slots, arena) = (s.slot_in(layer, slot)?, s.arena()?);
        slots.reset(slot, s.config.timeout, |took_memory| {
            if !took_memory {
                s.committed.fetch_add(s.stride(layer), Relaxed);
            }
            let (start, len) = arena.span(layer, slot);
            // SAFETY: the span is this slot, which `reset` has claimed for us.
            unsafe { start.write_bytes(byte, len) };
            Ok(true)
        })
    }

    /// Where a slice lies in each slot of the layer. The same for as long as the store lives.
    pub fn bank(&self, layer: usize, slice: usize) -> Result<Bank> {
        self.shared.tensor(layer, slice)?;
        Ok(self.shared.arena()?.bank(layer, slice))
    }

    /// Start and bytes of the region in which all banks lie, page-aligned.
    pub fn region(&self) -> Result<(*mut u8, u64)> {
        Ok(self.shared.arena()?.region())
    }

    /// Bytes from a slot of the layer to the next.
    pub fn slot_stride(&self, layer: usize) -> Result<u64> {
        self.shared.layer(layer)?;
        Ok(self.shared.stride(layer))
    }

    /// Slots of each layer: those of the configuration, but no more than the largest layer has experts. 0 with the
    /// page-cache backing.
    pub fn slots(&self) -> u32 {
        self.shared.slots.first().map_or(0, LayerSlots::len)
    }

    /// The tensor in the mapped file, all experts of it: start and bytes. Valid as long as the store.
    pub fn mapped_slice(&self, layer: usize, slice: usize) -> Result<(*const u8, u64)> {
        let t = self.shared.tensor(layer, slice)?;
        let bytes = t.slice_bytes * u64::from(self.shared.layers[layer].n_experts);
        self.shared.mapped(t, t.offset_bytes, bytes).map(|p| (p, bytes))
    }

    /// Asks the system to read an expert's pages of the mapped file ahead. Returns at once, promises nothing.
    pub fn hint(&self, layer: usize, expert: u32) -> Result<()> {
        let s = &*self.shared;
        let Some(l) = s.layers.get(layer) else { return Err(s.no_layer(layer)) };
        if expert >= l.n_experts {
            return Err(err!(Range, "layer {layer} has {} experts; expert {expert} was hinted at", l.n_experts));
        }
        let page = sys::page_bytes() as usize;
        for t in &l.tensors {
            let offset = t.offset_bytes + t.slice_bytes * u64::from(expert);
            let start = s.mapped(t, offset, t.slice_bytes)?;
            // a map starts at a page border, so rounding down stays inside it
            let slack = start as usize % page;
            // SAFETY: `mapped` checked the range; the store keeps the map.
            let hinted = unsafe { sys::advise_willneed(start.sub(slack), slack + t.slice_bytes as usize) };
            hinted.map_err(|e| err!(Io, "layer {layer} expert {expert}: the hint for {} was refused: {e}", t.name))?;
            s.files[t.file].prefetch(offset, t.slice_bytes);
        }
        Ok(())
    }

    /// So many of the lanes that were started read from here on, at least one.
    pub fn set_lanes(&self, n: usize) {
        self.lanes.set_active(n);
    }

    /// How the files are read.
    pub fn io_mode(&self) -> &IoReport {
        &self.io
    }

    /// Whether all files are still the ones that were opened: name, length, identity and last write. One system call a
    /// file: not for every pass.
    pub fn check_files(&self) -> Result<()> {
        self.shared.files.iter().try_for_each(SourceFile::check)
    }

    /// Bytes of memory held now: slots in use and all bounce buffers.
    pub fn held_bytes(&self) -> u64 {
        self.shared.committed.load(Relaxed) + self.staging_bytes
    }

    /// What `held_bytes` can reach: all slots and all bounce buffers.
    pub fn max_bytes(&self) -> u64 {
        let s = &*self.shared;
        let slots = u64::from(self.slots());
        (0..s.slots.len()).map(|l| s.stride(l) * slots).sum::<u64>() + self.staging_bytes
    }

    pub fn counters(&self) -> StoreCounters {
        let c = &self.shared.counters;
        StoreCounters {
            wanted_bytes: c.wanted_bytes.load(Relaxed),
            device_bytes: c.device_bytes.load(Relaxed),
            reads: c.reads.load(Relaxed),
            bounce_copies: c.bounce_copies.load(Relaxed),
            failures: c.failures.load(Relaxed),
            wait_ns: self.wait_ns(),
        }
    }

    /// `counters().wait_ns` alone.
    pub fn wait_ns(&self) -> u64 {
        self.shared.wait_ns.load(Relaxed)
    }

    fn timed(&self, wait: impl FnOnce(Duration) -> Result<()>) -> Result<()> {
        let start = Instant::now();
        let outcome = wait(self.shared.config.timeout);
        self.shared.wait_ns.fetch_add(start.elapsed().as_nanos() as u64, Relaxed);
        outcome
    }
}

/// What of an expert lies together: each slice in its file, or all of it in the pack (which number among the files, and where).
fn runs(
    layer: &MoeLayer,
    packed: Option<(usize, &PackedLayer)>,
    slices: &[Range<u64>],
    files: &[SourceFile],
) -> Vec<Run> {
    let run = |file: usize, offset_bytes, stride_bytes, len_bytes, in_slot| {
        let (block, mem_align) = (files[file].offset_align as u64, files[file].mem_align as u64);
        Run { file, offset_bytes, stride_bytes, len_bytes, in_slot, block, mem_align }
    };
    match packed {
        // up to the stride's end: whole blocks need no bounce buffer
        Some((file, p)) => vec![run(file, p.offset_bytes, p.stride_bytes, p.stride_bytes, 0)],
        None => {
            let of = |(t, at): (&ExpertTensor, &Range<u64>)| {
                run(t.file, t.offset_bytes, t.slice_bytes, t.slice_bytes, at.start)
            };
            layer.tensors.iter().zip(slices).map(of).collect()
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // what is still queued is not read any more
        self.shared.closing.store(true, Relaxed);
    }
}
