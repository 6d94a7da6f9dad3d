//! Opening and closing, and what is open.

use core::ffi::{c_char, c_void};
use std::path::PathBuf;

use super::bindings as c;
use super::guard::{self, on_handle};
use super::handle::{Handle, Log};
use super::{params, status};
use crate::error::{Error, Result, err};
use crate::hook::{Hook, Plan, plan};
use crate::model::{Model, Part, Projection};
use crate::store::{Backing, Dense, IoMode, ReadBy};

/// The path and the parameters, and a failure's detail to where they say.
///
/// # Safety
/// `gguf` is NULL or ends with a 0; `p` is NULL or a params struct.
unsafe fn with_params(
    gguf: *const c_char,
    p: *const c::hotset_params,
    call: impl FnOnce(PathBuf, &c::hotset_params) -> Result<i32>,
) -> i32 {
    // SAFETY: as the caller promises.
    let p = match unsafe { guard::read(p, "params") } {
        Ok(p) => p,
        Err(e) => return status::of(e.kind),
    };
    let outcome = guard::caught(|| {
        // SAFETY: as the caller promises.
        let path = unsafe { params::path(gguf) }.ok_or_else(|| err!(Argument, "the model's path is NULL or empty"))?;
        call(path, p)
    });
    outcome.unwrap_or_else(|e: Error| {
        // SAFETY: the caller's buffer with its size.
        unsafe { guard::text_into(p.detail, p.detail_size, e.detail.as_bytes()) };
        // Said once: who asked for the detail has it.
        if p.detail.is_null() {
            Log::new(p.log, p.log_user).line(c::HOTSET_LOG_ERROR, &e.detail);
        }
        status::of(e.kind)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_open(gguf: *const c_char, p: *const c::hotset_params, out: *mut *mut c::hotset) -> i32 {
    if out.is_null() {
        return c::HOTSET_E_ARGUMENT;
    }
    // SAFETY: not NULL; the header asks for a place for a pointer.
    unsafe { *out = std::ptr::null_mut() };
    // SAFETY: the header asks for a string and a params struct.
    unsafe {
        with_params(gguf, p, |path, p| {
            let hook = Hook::open(&path, params::config(p)?)?;
            let log = Log::new(p.log, p.log_user);
            log.line(c::HOTSET_LOG_INFO, &format!("{}: {}", path.display(), hook.describe()));
            let io = hook.store().io_mode();
            if io.requested != io.in_effect {
                log.line(c::HOTSET_LOG_WARN, &format!("direct reads are not possible: {}", io.reason));
            }
            let dense = hook.dense().report();
            if dense.policy == Dense::Lock && dense.locked_bytes < dense.wanted_bytes {
                let (locked, wanted) = (dense.locked_bytes, dense.wanted_bytes);
                let line =
                    format!("{locked} of {wanted} bytes of dense weights are locked in memory: {}", dense.reason);
                log.line(c::HOTSET_LOG_WARN, &line);
            }
            *out = Handle::new(hook, log).into_ptr();
            Ok(c::HOTSET_OK)
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_close(h: *mut c::hotset) {
    if h.is_null() {
        return;
    }
    // SAFETY: the header asks for a live handle and no other use of it from here on.
    let handle = unsafe { Handle::from_ptr_owned(h) };
    let closed = guard::caught(|| {
        let Handle { hook, log, .. } = *handle;
        if let Err(e) = hook.into_inner().close() {
            log.line(c::HOTSET_LOG_ERROR, &e.detail);
        }
        Ok(c::HOTSET_OK)
    });
    // Nobody is left to tell of a panic while closing.
    drop(closed);
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_plan(gguf: *const c_char, p: *const c::hotset_params, out: *mut c::hotset_plan) -> i32 {
    // SAFETY: the header asks for a string, a params struct and a plan struct.
    unsafe {
        with_params(gguf, p, |path, p| {
            let out = guard::write(out, "plan")?;
            let (config, _) = params::config(p)?.with_schedule()?;
            let planned = plan(&Model::open(&path)?, &config)?;
            guard::fill!(out, hotset_plan, Plan = planned, {
                n_layers, n_experts, k, slots, read_ahead, slot_bytes, cache_bytes, staging_bytes, min_bytes, expert_bytes, dense_bytes,
                memory_bytes,
            }, { min_slots: k });
            Ok(c::HOTSET_OK)
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_shape(h: *const c::hotset, out: *mut c::hotset_shape) -> i32 {
    // SAFETY: the header asks for a live handle or NULL.
    unsafe {
        on_handle(h, |handle| {
            let out = guard::write(out, "shape")?;
            let hook = handle.hook.lock();
            let (plan, config, live) = (hook.plan(), hook.config(), hook.live());
            let (io, dense) = (handle.store.io_mode(), hook.dense().report());
            let slots = config.backing == Backing::Slots;
            let flag = |on: bool, bit: i32| if on { bit as u32 } else { 0 };
            let prefill = config.prefill;
            *out = c::hotset_shape {
                struct_size: out.struct_size,
                n_layers: plan.n_layers,
                n_experts: plan.n_experts,
                k: plan.k,
                top_m: hook.top_m() as u32,
                slots: live.slots,
                lanes: if slots { live.lanes } else { 0 },
                backing: if slots { c::HOTSET_BACKING_SLOTS } else { c::HOTSET_BACKING_PAGE_CACHE },
                io: if io.in_effect == IoMode::Direct { c::HOTSET_IO_DIRECT } else { c::HOTSET_IO_BUFFERED },
                read_by: match io.by {
                    ReadBy::Ring => c::HOTSET_READ_BY_RING,
                    ReadBy::Threads => c::HOTSET_READ_BY_THREADS,
                },
                dense: match dense.policy {
                    Dense::Lock => c::HOTSET_DENSE_LOCK,
                    Dense::Warm => c::HOTSET_DENSE_WARM,
                    Dense::Leave => c::HOTSET_DENSE_LEAVE,
                },
                delta: params::delta_value(live.moce.delta),
                renormalise: params::renormalise_value(live.drop.renormalise),
                top_j: live.moce.top_j,
                lambda: live.moce.lambda,
                drop: live.drop.threshold,
                prefill: flag(prefill.record, c::HOTSET_PREFILL_RECORD)
                    | flag(prefill.moce, c::HOTSET_PREFILL_MOCE)
                    | flag(prefill.drop, c::HOTSET_PREFILL_DROP),
                recording: hook.recording().into(),
                expert_bytes: handle.experts.layers.iter().map(|l| l.expert_bytes()).max().unwrap_or(0),
                slot_bytes: plan.slot_bytes,
                cache_bytes: plan.slot_bytes * u64::from(live.slots),
                staging_bytes: plan.staging_bytes,
                dense_bytes: dense.wanted_bytes,
                dense_locked_bytes: dense.locked_bytes,
                straight_bytes: io.straight_bytes,
                bounced_bytes: io.bounced_bytes,
                io_reason: handle.io_reason.as_ptr(),
                read_by_reason: handle.read_by_reason.as_ptr(),
                dense_reason: handle.dense_reason.as_ptr(),
                architecture: handle.architecture.as_ptr(),
                policy: params::policy_value(config.policy),
                read_ahead: plan.read_ahead,
            };
            Ok(c::HOTSET_OK)
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_blocks(h: *const c::hotset, out: *mut u32, n: usize) -> i32 {
    // SAFETY: the header asks for a live handle or NULL.
    unsafe {
        on_handle(h, |handle| {
            if n > 0 && (out.is_null() || !out.is_aligned()) {
                return Err(err!(Argument, "blocks: {out:p} is no array of {n}"));
            }
            for (i, layer) in handle.experts.layers.iter().enumerate().take(n) {
                *out.add(i) = layer.block;
            }
            Ok(handle.experts.layers.len() as i32)
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_banks(h: *mut c::hotset, layer: u32, out: *mut c::hotset_bank, n: usize) -> i32 {
    // SAFETY: the header asks for a live handle or NULL, and n structs of the first one's size.
    unsafe {
        on_handle(h, |handle| {
            let index = handle.experts.layer_index(layer)?;
            let stride = if n > 0 { guard::write(out, "banks[0]")?.struct_size } else { 0 };
            if n > 0 && stride % align_of::<c::hotset_bank>() != 0 {
                return Err(err!(Argument, "banks[0]: struct_size {stride} is no size of such a struct"));
            }
            let hook = handle.hook.lock();
            let moe = &handle.experts.layers[index];
            for (i, tensor) in moe.tensors.iter().enumerate().take(n) {
                let (mapped, _) = handle.store.mapped_slice(index, i)?;
                let bank = match hook.config().backing {
                    Backing::Slots => Some(handle.store.bank(index, i)?),
                    Backing::PageCache => None,
                };
                let bank = c::hotset_bank {
                    struct_size: stride,
                    name: handle.tensor_names[index][i].as_ptr(),
                    projection: match tensor.projection {
                        Projection::Gate => c::HOTSET_GATE,
                        Projection::Up => c::HOTSET_UP,
                        Projection::GateUp => c::HOTSET_GATE_UP,
                        Projection::Down => c::HOTSET_DOWN,
                    },
                    part: match tensor.part {
                        Part::Weight => c::HOTSET_WEIGHT,
                        Part::Bias => c::HOTSET_BIAS,
                        Part::Scale => c::HOTSET_SCALE,
                    },
                    ggml_type: tensor.ggml_type,
                    slots: moe.n_experts,
                    slice_bytes: tensor.slice_bytes,
                    stride_bytes: bank.as_ref().map_or(0, |b| b.stride_bytes),
                    base: bank.map_or(std::ptr::null_mut::<c_void>(), |b| b.base.cast()),
                    mapped: mapped.cast(),
                };
                out.byte_add(i * stride).write(bank);
            }
            Ok(moe.tensors.len() as i32)
        })
    }
}
