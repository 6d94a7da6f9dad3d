//! Settings that change while the handle is open, statistics, and flushing.

use core::ffi::c_char;
use std::time::Duration;

use super::bindings as c;
use super::guard::{self, on_handle};
use super::params;
use crate::error::{Error, err};
use crate::hook::{Schedule, Stats};
use crate::route::{Drop, Moce};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_set_drop(h: *mut c::hotset, drop: f64, renormalise: i32) -> i32 {
    // SAFETY: the header asks for a live handle or NULL.
    unsafe {
        on_handle(h, |handle| {
            let renormalise = params::renormalise(renormalise)?;
            handle.hook.lock().set(|live| live.drop = Drop { threshold: drop, renormalise })?;
            Ok(c::HOTSET_OK)
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_set_moce(h: *mut c::hotset, lambda: f64, top_j: u32, delta: i32) -> i32 {
    // SAFETY: the header asks for a live handle or NULL.
    unsafe {
        on_handle(h, |handle| {
            let delta = params::delta(delta)?;
            handle.hook.lock().set(|live| live.moce = Moce { lambda, top_j, delta })?;
            Ok(c::HOTSET_OK)
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_set_cache_bytes(h: *mut c::hotset, cache_bytes: u64) -> i32 {
    // SAFETY: the header asks for a live handle or NULL.
    unsafe {
        on_handle(h, |handle| {
            let mut hook = handle.hook.lock();
            let slots = hook.slots_for(cache_bytes)?;
            hook.set(|live| live.slots = slots)?;
            Ok(c::HOTSET_OK)
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_set_slots(h: *mut c::hotset, slots: u32) -> i32 {
    // SAFETY: the header asks for a live handle or NULL.
    unsafe {
        on_handle(h, |handle| {
            handle.hook.lock().set(|live| live.slots = slots)?;
            Ok(c::HOTSET_OK)
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_set_schedule(h: *mut c::hotset, path: *const c_char) -> i32 {
    // SAFETY: the header asks for a live handle or NULL, and NULL or a string.
    unsafe {
        on_handle(h, |handle| {
            let path = params::path(path);
            let schedule = path.as_deref().map(Schedule::load).transpose()?;
            let in_file = |e: Error| match &path {
                Some(path) => Error::new(e.kind, format!("{}: {}", path.display(), e.detail)),
                None => e,
            };
            handle.hook.lock().set_schedule(schedule).map_err(in_file)?;
            Ok(c::HOTSET_OK)
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_reset(h: *mut c::hotset) -> i32 {
    // SAFETY: the header asks for a live handle or NULL.
    unsafe {
        on_handle(h, |handle| {
            handle.hook.lock().reset();
            Ok(c::HOTSET_OK)
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_stats(h: *mut c::hotset, out: *mut c::hotset_stats) -> i32 {
    // SAFETY: the header asks for a live handle or NULL, and a stats struct.
    unsafe {
        on_handle(h, |handle| {
            let out = guard::write(out, "stats")?;
            let stats = handle.hook.lock().stats();
            guard::fill!(out, hotset_stats, Stats = stats, {
                passes, aborted_passes, decode_tokens, prefill_tokens, pass_through_rows, hits, misses, dropped, swapped,
                mass_dropped, mass_swapped, bad_rows, read_bytes, device_bytes, reads, failed_reads, wait_ns, resident,
                resident_bytes, recorded_tokens, left_out_tokens, lost_metrics,
            }, {});
            Ok(c::HOTSET_OK)
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_layer_stats(
    h: *mut c::hotset,
    layer: u32,
    hits: *mut u64,
    misses: *mut u64,
    dropped: *mut u64,
) -> i32 {
    // SAFETY: the header asks for a live handle or NULL, and places for numbers or NULL.
    unsafe {
        on_handle(h, |handle| {
            let stats = handle.hook.lock().layer_stats(layer)?;
            for (out, value) in [(hits, stats.hits), (misses, stats.misses), (dropped, stats.dropped)] {
                if !out.is_null() {
                    if !out.is_aligned() {
                        return Err(err!(Argument, "{out:p} is no place for a u64"));
                    }
                    *out = value;
                }
            }
            Ok(c::HOTSET_OK)
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_trace_flush(h: *mut c::hotset, timeout_ms: u32) -> i32 {
    // SAFETY: the header asks for a live handle or NULL.
    unsafe {
        on_handle(h, |handle| {
            let timeout = Duration::from_millis(if timeout_ms == 0 { 30_000 } else { timeout_ms.into() });
            handle.hook.lock().flush(timeout)?;
            Ok(c::HOTSET_OK)
        })
    }
}
