//! The calls of each MoE layer.

use super::bindings as c;
use super::guard::{self, on_handle};
use super::rows::Strided;
use crate::error::{Result, err};
use crate::hook::{Batch, Outcome, Placed};
use crate::model::Projection;
use crate::route::ScoreSpace;
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

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_wait(h: *mut c::hotset, layer: u32, slot: i32, projection: u32) -> i32 {
    // SAFETY: the header asks for a live handle or NULL.
    unsafe {
        on_handle(h, |handle| {
            let index = handle.experts.layer_index(layer)?;
            let wanted = match projection as i32 {
                c::HOTSET_ALL => None,
                c::HOTSET_GATE => Some(Projection::Gate),
                c::HOTSET_UP => Some(Projection::Up),
                c::HOTSET_GATE_UP => Some(Projection::GateUp),
                c::HOTSET_DOWN => Some(Projection::Down),
                _ => {
                    return Err(err!(
                        Range,
                        "projection {projection} is none of HOTSET_GATE, _UP, _GATE_UP, _DOWN, _ALL"
                    ));
                }
            };
            let tensors = &handle.experts.layers[index].tensors;
            if wanted.is_some_and(|w| tensors.iter().all(|t| t.projection != w)) {
                return Err(err!(Range, "block {layer} has no tensor of projection {projection}"));
            }
            match (slot, wanted) {
                // With the page-cache backing nothing is ever in flight.
                _ if handle.store.slots() == 0 => {}
                (-1, _) => handle.store.wait_layer(index)?,
                (slot, None) => handle.store.wait(index, slot_number(slot)?, None)?,
                (slot, Some(w)) => {
                    for (i, _) in tensors.iter().enumerate().filter(|(_, t)| t.projection == w) {
                        handle.store.wait(index, slot_number(slot)?, Some(i))?;
                    }
                }
            }
            Ok(c::HOTSET_OK)
        })
    }
}

fn slot_number(slot: i32) -> Result<u32> {
    u32::try_from(slot).map_err(|_| err!(Range, "slot {slot}: neither a slot nor -1 for all"))
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
