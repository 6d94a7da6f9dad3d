//! The arena: one reserved region with a fixed number of slots for each layer. A slot holds all slices of one expert,
//! side by side, so that filling it is local and giving it back is whole pages.
//!
//! ```text
//! region | layer 0: slot 0 | slot 1 | … | layer 1: slot 0 | …      slot strides are whole pages, a layer has its own
//! slot   | gate.weight | up.weight | down.weight | companions | pad    each at a multiple of 32
//! ```
//!
//! From a GGUF file each slice has a place of its own choice; from a pack a slot has the pack's layout, so that one read fills it.
//!
//! The planning functions need only the expert table: memory is known before any is taken. The arena itself keeps no
//! record of what a slot holds; `slots` does that, and only its claim on a slot makes writing to it sound.

use std::ops::Range;

use super::sys;
use crate::error::{Result, err};
use crate::model::{ExpertTable, MoeLayer, Pack, PackedLayer};

/// What kernels may expect of the address of a matrix: the alignment that GGUF files have by default.
pub const SLICE_ALIGN: u64 = 32;

/// Where the same slice of every slot of a layer lies: an engine sets its tensor's data to `base`, the distance between
/// matrices to `stride_bytes`, and their number to `slots`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bank {
    /// The slice of slot 0.
    pub base: *mut u8,
    /// Bytes from a slot to the next.
    pub stride_bytes: u64,
    pub slots: u32,
    /// Bytes of the slice in each slot.
    pub slice_bytes: u64,
}

// SAFETY: a bank is an address and sizes; using the address is the business of whoever dereferences it.
unsafe impl Send for Bank {}
// SAFETY: as above; it has no interior mutability.
unsafe impl Sync for Bank {}

/// Bytes from one slot of this layer to the next: what a resident expert takes, read from the model's own file or, if there is
/// one, from its pack. Saturates at `u64::MAX` for sizes that no memory could hold.
pub fn plan_slot_bytes(layer: &MoeLayer, packed: Option<&PackedLayer>, page_bytes: u64) -> u64 {
    SlotPlan::new(layer, packed, page_bytes).map_or(u64::MAX, |p| p.stride)
}

/// The inside of a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SlotPlan {
    /// From the slot's start to each slice, in the order of the layer's tensors.
    pub offsets: Vec<u64>,
    pub stride: u64,
}

impl SlotPlan {
    /// None if the sizes overflow.
    pub fn new(layer: &MoeLayer, packed: Option<&PackedLayer>, page_bytes: u64) -> Option<SlotPlan> {
        if let Some(packed) = packed {
            let stride = packed.stride_bytes.checked_next_multiple_of(page_bytes)?;
            return Some(SlotPlan { offsets: packed.slices.iter().map(|s| s.offset_bytes).collect(), stride });
        }
        let mut offsets = Vec::with_capacity(layer.tensors.len());
        let mut end = 0u64;
        for t in &layer.tensors {
            // Where all experts of a tensor lie at the same place within a block of the drive, the slice is put at that
            // place within a page too: a direct read then goes straight into the slot but for its first and last block.
            let block = (1u64 << t.slice_bytes.trailing_zeros().min(63)).min(page_bytes).max(SLICE_ALIGN);
            let place = if t.offset_bytes % SLICE_ALIGN == 0 { t.offset_bytes % block } else { 0 };
            let step = if t.offset_bytes % SLICE_ALIGN == 0 { block } else { SLICE_ALIGN };
            // the first offset at or after `end` that is `place` past a multiple of `step`
            let at = end.checked_add((place.wrapping_sub(end)) & (step - 1))?;
            offsets.push(at);
            end = at.checked_add(t.slice_bytes)?;
        }
        Some(SlotPlan { offsets, stride: end.checked_next_multiple_of(page_bytes)?.max(page_bytes) })
    }
}

struct LayerRegion {
    /// From the region's start to the layer's slot 0.
    start: u64,
    plan: SlotPlan,
    slice_bytes: Vec<u64>,
}

/// The reserved region.
pub(super) struct Arena {
    base: *mut u8,
    bytes: usize,
    slots: u32,
    layers: Vec<LayerRegion>,
}

// SAFETY: the arena hands out addresses only; who may write where is decided by the claims in `slots`.
unsafe impl Send for Arena {}
// SAFETY: as above; nothing in it changes after `new`.
unsafe impl Sync for Arena {}

impl Arena {
    /// Reserves `slots` slots for every layer of the table. A pack has the table's layers, with their slices.
    pub fn new(table: &ExpertTable, pack: Option<&Pack>, slots: u32) -> Result<Arena> {
        let page = sys::page_bytes();
        let mut layers = Vec::with_capacity(table.layers.len());
        let mut end = 0u64;
        for (i, layer) in table.layers.iter().enumerate() {
            let packed = pack.map(|p| &p.layers[i]);
            let too_large = || {
                let bytes = plan_slot_bytes(layer, packed, page);
                err!(Memory, "layer {i} (block {}): {slots} slots of {bytes} bytes fit no memory", layer.block)
            };
            let plan = SlotPlan::new(layer, packed, page).ok_or_else(too_large)?;
            let size = plan.stride.checked_mul(slots.into()).ok_or_else(too_large)?;
            let slice_bytes = layer.tensors.iter().map(|t| t.slice_bytes).collect();
            layers.push(LayerRegion { start: end, plan, slice_bytes });
            end = end.checked_add(size).ok_or_else(too_large)?;
        }
        // ptr arithmetic inside one mapping needs sizes that an isize holds
        let bytes = isize::try_from(end).map_err(|_| err!(Memory, "an arena of {end} bytes fits no address space"))?;
        let bytes = bytes.unsigned_abs().max(page as usize);
        let base = sys::reserve(bytes).map_err(|e| {
            err!(Memory, "no room for an arena of {bytes} bytes ({} layers x {slots} slots): {e}", layers.len())
        })?;
        // SAFETY: the reservation is whole, ours, and nobody uses it yet.
        unsafe { sys::prefer_large_pages(base, bytes) };
        Ok(Arena { base, bytes, slots, layers })
    }

    /// The whole region, page-aligned: for an engine that must register its memory with a device.
    pub fn region(&self) -> (*mut u8, u64) {
        (self.base, self.bytes as u64)
    }

    /// Bytes from a slot to the next. The layer is in range.
    pub fn slot_stride(&self, layer: usize) -> u64 {
        self.layers[layer].plan.stride
    }

    /// Where each slice lies in a slot of the layer.
    pub fn slices(&self, layer: usize) -> Vec<Range<u64>> {
        let l = &self.layers[layer];
        l.plan.offsets.iter().zip(&l.slice_bytes).map(|(&at, &n)| at..at + n).collect()
    }

    /// The layer and the slice are in range.
    pub fn bank(&self, layer: usize, slice: usize) -> Bank {
        let l = &self.layers[layer];
        Bank {
            base: self.at(l.start + l.plan.offsets[slice]),
            stride_bytes: l.plan.stride,
            slots: self.slots,
            slice_bytes: l.slice_bytes[slice],
        }
    }

    /// Start and length of a slot. Both are in range.
    pub fn span(&self, layer: usize, slot: u32) -> (*mut u8, usize) {
        let l = &self.layers[layer];
        (self.at(l.start + l.plan.stride * u64::from(slot)), l.plan.stride as usize)
    }

    /// Gives a slot's pages back. A slot is whole pages, so a neighbour has none of them.
    ///
    /// # Safety
    /// Layer and slot are in range, and the caller has the claim on the slot.
    pub unsafe fn release(&self, layer: usize, slot: u32) -> std::io::Result<()> {
        let (start, len) = self.span(layer, slot);
        // SAFETY: the span is whole pages of our own mapping, claimed by the caller.
        unsafe { sys::discard(start, len) }
    }

    /// Tells the system that a slot is used for the first time, or again after it was given back.
    ///
    /// # Safety
    /// As for `release`.
    pub unsafe fn reuse(&self, layer: usize, slot: u32) {
        let (start, len) = self.span(layer, slot);
        // SAFETY: as in `release`.
        unsafe { sys::reuse(start, len) }
    }

    fn at(&self, offset: u64) -> *mut u8 {
        debug_assert!(offset <= self.bytes as u64);
        // SAFETY: `new` made the region as large as the end of its last slot, and callers keep to the ranges.
        unsafe { self.base.add(offset as usize) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: one reservation, whole; the store joins its threads before it drops the arena.
        unsafe { sys::unreserve(self.base, self.bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::model::{ExpertTensor, Part, Projection};

    fn layer(slices: &[(u64, u64)]) -> MoeLayer {
        let tensors = slices
            .iter()
            .map(|&(offset_bytes, slice_bytes)| ExpertTensor {
                name: format!("t{offset_bytes}"),
                projection: Projection::Gate,
                part: Part::Weight,
                ggml_type: 42,
                file: 0,
                offset_bytes,
                slice_bytes,
            })
            .collect();
        MoeLayer { block: 0, n_experts: 4, tensors }
    }

    #[test]
    fn slices_are_aligned_apart_and_in_order() {
        for slices in
            [&[(0, 1)][..], &[(7, 100), (1000, 60), (33, 4096)], &[(64, 8192), (4160, 8192), (96, 4), (128, 3)]]
        {
            for page in [4096, 16384] {
                let plan = SlotPlan::new(&layer(slices), None, page).unwrap();
                let mut end = 0;
                for (&at, &(_, len)) in plan.offsets.iter().zip(slices) {
                    assert!(at >= end && at % SLICE_ALIGN == 0, "{slices:?}: {plan:?}");
                    end = at + len;
                }
                assert!(end <= plan.stride && plan.stride % page == 0 && plan.stride < end + page);
            }
        }
    }

    #[test]
    fn whole_blocks_keep_their_place_in_the_page() {
        let plan = SlotPlan::new(&layer(&[(4096 * 5 + 192, 8192), (4096 * 9 + 64, 4096)]), None, 4096).unwrap();
        assert_eq!(plan.offsets, [192, 192 + 8192 + 4096 - 128]);
    }

    #[test]
    fn sizes_that_overflow_are_no_plan() {
        assert_eq!(plan_slot_bytes(&layer(&[(0, u64::MAX - 10), (0, 100)]), None, 4096), u64::MAX);
        let table = ExpertTable { layers: vec![layer(&[(0, 1 << 62)])] };
        let e = Arena::new(&table, None, 1000).err().unwrap();
        assert_eq!(e.kind, ErrorKind::Memory);
        assert!(e.detail.contains("1000 slots"), "{e}");
    }

    #[test]
    #[cfg_attr(miri, ignore)]
    fn an_arena_that_no_memory_holds_is_refused_with_its_size() {
        let table = ExpertTable { layers: vec![layer(&[(0, 1 << 60)])] };
        let e = Arena::new(&table, None, 4).err().unwrap();
        assert_eq!(e.kind, ErrorKind::Memory);
        assert!(e.detail.contains(&(1u64 << 62).to_string()), "{e}");
    }
}
