//! The calls of each MoE layer.

use super::bindings as c;
use super::guard::{self, on_handle};
use super::handle::Handle;
use super::rows::Strided;
use crate::error::{Result, err};
use crate::hook::{Batch, Outcome, Placed};
use crate::model::{ExpertTensor, Projection};
use crate::route::ScoreSpace;
use crate::store::Store;
use crate::trace::Phase;

fn batch(b: &c::hotset_batch) -> Result<Batch> {
    let known = (c::HOTSET_BATCH_ROUTED | c::HOTSET_BATCH_NORMALISED | c::HOTSET_BATCH_TAIL) as u32;
    let bit = |bit: u32| b.flags & bit != 0;
    if b.flags & !known != 0 || b.reserved != 0 {
        return Err(err!(Argument, "batch: flags {:#x}, reserved {}: bits that have no meaning", b.flags, b.reserved));
    }
    Ok(Batch {
        block: b.layer,
        n_tokens: b.n_tokens as usize,
        n_experts: b.n_experts,
        k: b.k,
        phase: match b.phase {
            c::HOTSET_DECODE => Phase::Decode,
            c::HOTSET_PREFILL => Phase::Prefill,
            v => return Err(err!(Argument, "batch: phase {v} is neither HOTSET_DECODE nor HOTSET_PREFILL")),
        },
        space: match b.score_space {
            c::HOTSET_SCORES_LOGITS => ScoreSpace::Logits,
            c::HOTSET_SCORES_SOFTMAX => ScoreSpace::Softmax,
            c::HOTSET_SCORES_LINEAR => ScoreSpace::Linear,
            v => return Err(err!(Argument, "batch: score_space {v} is none of HOTSET_SCORES_*")),
        },
        routed: bit(c::HOTSET_BATCH_ROUTED as u32),
        normalised: bit(c::HOTSET_BATCH_NORMALISED as u32),
        tail: bit(c::HOTSET_BATCH_TAIL as u32),
        position: b.position,
    })
}

/// Fills in the caller's outcome, if there is one; the status that goes with it.
fn hand_over(outcome: &Outcome, out: Option<&mut c::hotset_outcome>) -> i32 {
    let placement = match outcome.placed {
        Placed::Slots => c::HOTSET_OK,
        Placed::PassThrough | Placed::Mapped => c::HOTSET_PASS_THROUGH,
    };
    if let Some(out) = out {
        let Outcome { hits, misses, dropped, swapped, read_bytes, mass_dropped, mass_swapped, .. } = *outcome;
        let struct_size = out.struct_size;
        *out = c::hotset_outcome {
            struct_size,
            placement,
            hits,
            misses,
            dropped,
            swapped,
            reserved: 0,
            read_bytes,
            mass_dropped,
            mass_swapped,
        };
    }
    placement
}

/// # Safety
/// As for `guard::write`; NULL is None.
unsafe fn optional<'a>(out: *mut c::hotset_outcome) -> Result<Option<&'a mut c::hotset_outcome>> {
    // SAFETY: as the caller promises.
    if out.is_null() { Ok(None) } else { unsafe { guard::write(out, "outcome") }.map(Some) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_select(
    h: *mut c::hotset,
    b: *const c::hotset_batch,
    scores: *const f32,
    row_stride: usize,
    ids: *mut i32,
    id_stride: usize,
) -> i32 {
    // SAFETY: the header asks for a live handle or NULL, a batch struct, and rows as its fields say; scores are only read.
    unsafe {
        on_handle(h, |handle| {
            let batch = batch(guard::read(b, "batch")?)?;
            let n_experts = batch.n_experts as usize;
            let scores = Strided::new("scores", scores.cast_mut(), row_stride, n_experts, batch.n_tokens)?;
            let mut ids = Strided::new("ids", ids, id_stride, batch.k as usize, batch.n_tokens)?;
            handle.hook.lock().select(&batch, &scores, &mut ids)?;
            Ok(c::HOTSET_OK)
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_admit(
    h: *mut c::hotset,
    b: *const c::hotset_batch,
    ids: *mut i32,
    id_stride: usize,
    weights: *mut f32,
    w_stride: usize,
    outcome: *mut c::hotset_outcome,
) -> i32 {
    // SAFETY: the header asks for a live handle or NULL, a batch struct, and rows as its fields say.
    unsafe {
        on_handle(h, |handle| {
            let batch = batch(guard::read(b, "batch")?)?;
            let out = optional(outcome)?;
            let k = batch.k as usize;
            let mut ids = Strided::new("ids", ids, id_stride, k, batch.n_tokens)?;
            let mut weights = match weights.is_null() {
                true => None,
                false => Some(Strided::new("weights", weights, w_stride, k, batch.n_tokens)?),
            };
            let done = handle.hook.lock().admit(&batch, &mut ids, weights.as_mut())?;
            Ok(hand_over(&done, out))
        })
    }
}

/// What `hotset_wait` and `hotset_ready` ask about.
enum Awaited<'a> {
    /// Nothing: with the page-cache backing nothing is ever in flight.
    Nothing,
    Layer(usize),
    Slot(usize, u32),
    /// The slot's tensors of one projection.
    Projection(usize, u32, Projection, &'a [ExpertTensor]),
}

impl<'a> Awaited<'a> {
    fn new(handle: &'a Handle, layer: u32, slot: i32, projection: u32) -> Result<Self> {
        let index = handle.experts.layer_index(layer)?;
        let wanted = match projection as i32 {
            c::HOTSET_ALL => None,
            c::HOTSET_GATE => Some(Projection::Gate),
            c::HOTSET_UP => Some(Projection::Up),
            c::HOTSET_GATE_UP => Some(Projection::GateUp),
            c::HOTSET_DOWN => Some(Projection::Down),
            _ => {
                return Err(err!(Range, "projection {projection} is none of HOTSET_GATE, _UP, _GATE_UP, _DOWN, _ALL"));
            }
        };
        let tensors = &handle.experts.layers[index].tensors;
        if wanted.is_some_and(|w| tensors.iter().all(|t| t.projection != w)) {
            return Err(err!(Range, "block {layer} has no tensor of projection {projection}"));
        }
        Ok(match (slot, wanted) {
            _ if handle.store.slots() == 0 => Awaited::Nothing,
            (-1, _) => Awaited::Layer(index),
            (slot, None) => Awaited::Slot(index, slot_number(slot)?),
            (slot, Some(w)) => Awaited::Projection(index, slot_number(slot)?, w, tensors),
        })
    }

    fn wait(&self, store: &Store) -> Result<()> {
        match *self {
            Awaited::Nothing => Ok(()),
            Awaited::Layer(index) => store.wait_layer(index),
            Awaited::Slot(index, slot) => store.wait(index, slot, None),
            Awaited::Projection(index, slot, w, tensors) => {
                slices(w, tensors).try_for_each(|i| store.wait(index, slot, Some(i)))
            }
        }
    }

    /// Whether `wait` would return at once.
    fn is_over(&self, store: &Store) -> Result<bool> {
        match *self {
            Awaited::Nothing => Ok(true),
            Awaited::Layer(index) => store.is_idle(index),
            Awaited::Slot(index, slot) => store.is_over(index, slot, None),
            Awaited::Projection(index, slot, w, tensors) => {
                for i in slices(w, tensors) {
                    if !store.is_over(index, slot, Some(i))? {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
        }
    }
}

fn slices(wanted: Projection, tensors: &[ExpertTensor]) -> impl Iterator<Item = usize> {
    tensors.iter().enumerate().filter(move |(_, t)| t.projection == wanted).map(|(i, _)| i)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_wait(h: *mut c::hotset, layer: u32, slot: i32, projection: u32) -> i32 {
    // SAFETY: the header asks for a live handle or NULL.
    unsafe {
        on_handle(h, |handle| {
            Awaited::new(handle, layer, slot, projection)?.wait(&handle.store)?;
            Ok(c::HOTSET_OK)
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_ready(h: *mut c::hotset, layer: u32, slot: i32, projection: u32) -> i32 {
    // SAFETY: the header asks for a live handle or NULL.
    unsafe {
        on_handle(h, |handle| {
            let awaited = Awaited::new(handle, layer, slot, projection)?;
            if !awaited.is_over(&handle.store)? {
                return Ok(c::HOTSET_IN_FLIGHT);
            }
            // Returns at once: what was read, or how it failed.
            awaited.wait(&handle.store)?;
            Ok(c::HOTSET_OK)
        })
    }
}

fn slot_number(slot: i32) -> Result<u32> {
    u32::try_from(slot).map_err(|_| err!(Range, "slot {slot}: neither a slot nor -1 for all"))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_read_ahead(h: *mut c::hotset, layer: u32, experts: *const i32, n: usize) -> i32 {
    // SAFETY: the header asks for a live handle or NULL, and n adjacent ids.
    unsafe {
        on_handle(h, |handle| {
            let mut hook = handle.hook.lock();
            // No more than a layer has: what is beyond that repeats.
            let n = n.min(hook.plan().n_experts as usize);
            if n > 0 && (experts.is_null() || !experts.is_aligned()) {
                return Err(err!(Argument, "experts at {experts:p}: {n} ids were to be there"));
            }
            let experts = if n == 0 { &[] } else { std::slice::from_raw_parts(experts, n) };
            Ok(hook.read_ahead(layer, experts)? as i32)
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_layer(
    h: *mut c::hotset,
    b: *const c::hotset_batch,
    scores: *const f32,
    row_stride: usize,
    ids: *mut i32,
    id_stride: usize,
    weights: *mut f32,
    w_stride: usize,
    outcome: *mut c::hotset_outcome,
) -> i32 {
    // SAFETY: the header asks for a live handle or NULL, a batch struct, and rows as its fields say; scores are only read.
    unsafe {
        on_handle(h, |handle| {
            let batch = batch(guard::read(b, "batch")?)?;
            let out = optional(outcome)?;
            let k = batch.k as usize;
            let n_experts = batch.n_experts as usize;
            let scores = Strided::new("scores", scores.cast_mut(), row_stride, n_experts, batch.n_tokens)?;
            let mut ids = Strided::new("ids", ids, id_stride, k, batch.n_tokens)?;
            let mut weights = Strided::new("weights", weights, w_stride, k, batch.n_tokens)?;
            let done = handle.hook.lock().layer(&batch, &scores, &mut ids, &mut weights)?;
            Ok(hand_over(&done, out))
        })
    }
}
