//! What the lanes and the callers of a store share: the tables, the files, the arena and the slots' states; and the way of
//! one job: read the slice, then say how it went. Everything that comes from outside is checked here, once.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use memmap2::Mmap;

use super::arena::Arena;
use super::config::StoreConfig;
use super::lanes::Job;
use super::reader::{ReadCounters, Reader};
use super::slots::{LayerSlots, MAX_SLICES};
use super::source::SourceFile;
use crate::error::{Error, Result, err};
use crate::model::{ExpertTable, ExpertTensor, MoeLayer};

pub(super) struct Shared {
    pub layers: Vec<MoeLayer>,
    pub files: Vec<SourceFile>,
    pub maps: Vec<Arc<Mmap>>,
    pub config: StoreConfig,
    /// None with the page-cache backing; `slots` is empty then.
    pub arena: Option<Arena>,
    pub slots: Vec<LayerSlots>,
    pub counters: ReadCounters,
    pub wait_ns: AtomicU64,
    /// Bytes of the slots whose pages take memory. Changed under the claim of the slot, so that it never counts one twice.
    pub committed: AtomicU64,
    /// The store is being dropped: jobs still queued end unread.
    pub closing: AtomicBool,
}

impl Shared {
    /// Does a job. Whatever happens, the slice is finished: a panic (in a wrapped source) is a failure too.
    pub fn run(&self, job: Job, reader: &mut Reader) {
        if self.closing.load(Relaxed) {
            return self.finish(job, Err(err!(State, "the store is closing")));
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| self.read(job, reader)))
            .unwrap_or_else(|_| Err(err!(Internal, "the read panicked")));
        self.finish(job, outcome);
    }

    fn read(&self, job: Job, reader: &mut Reader) -> Result<()> {
        let (layer, slice) = (job.layer as usize, job.slice as usize);
        let t = &self.layers[layer].tensors[slice];
        let (start, len) = self.arena()?.span(layer, job.slot, Some(slice));
        // SAFETY: the span is inside the arena, whose memory was zeroed by the system, so it is initialised. `fetch` has
        // claimed the slot, this job is the only one for this slice, and slices do not overlap: nobody else uses it.
        let dest = unsafe { std::slice::from_raw_parts_mut(start, len) };
        // no overflow: `check_table` did the sum for the last expert
        reader.read(&self.files[t.file], t.offset_bytes + t.slice_bytes * u64::from(job.expert), dest, &self.counters)
    }

    /// Ends a job, with the numbers of what it was about.
    pub fn finish(&self, job: Job, outcome: Result<()>) {
        let Job { layer, expert, slot, slice } = job;
        let outcome = outcome.map_err(|e| {
            self.counters.failures.fetch_add(1, Relaxed);
            let name = &self.layers[layer as usize].tensors[slice as usize].name;
            Error::new(
                e.kind,
                format!("layer {layer} expert {expert} slot {slot} slice {slice} ({name}): {}", e.detail),
            )
        });
        self.slots[layer as usize].finish(slot, slice, outcome);
    }

    pub fn arena(&self) -> Result<&Arena> {
        self.arena.as_ref().ok_or_else(|| err!(State, "the page-cache backing has no slots"))
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
        if l.n_experts == 0 || l.n_experts == u32::MAX || n == 0 || n > MAX_SLICES {
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
