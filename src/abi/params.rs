//! Parameters: defaults, the environment, and what the hook makes of them.

use core::ffi::{CStr, c_char};
use std::ffi::CString;
use std::path::PathBuf;
use std::time::Duration;

use super::bindings as c;
use super::guard;
use super::status;
use crate::cache::Policy;
use crate::error::{Result, err};
use crate::hook::{Config, Prefill};
use crate::route::{Delta, Drop, Moce, Renormalise};
use crate::store::{Backing, CHUNK_BYTES, Dense, IoMode, ReadBy};

const _: () = assert!(CHUNK_BYTES == c::HOTSET_CHUNK_BYTES as u64);

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_params_default() -> c::hotset_params {
    let config = Config::default();
    c::hotset_params {
        struct_size: size_of::<c::hotset_params>(),
        top_m: config.top_m,
        lanes: config.lanes as u32,
        chunk_bytes: config.chunk_bytes,
        top_j: config.moce.top_j,
        wait_ms: config.wait.as_millis() as u32,
        queue_tokens: config.queue_tokens as u32,
        ..Default::default()
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_batch_default() -> c::hotset_batch {
    c::hotset_batch { struct_size: size_of::<c::hotset_batch>(), position: -1, ..Default::default() }
}

/// What an enum value means; `Argument` for any other.
pub fn delta(value: i32) -> Result<Delta> {
    match value {
        c::HOTSET_DELTA_TOKEN_TOPK => Ok(Delta::TokenTopk),
        c::HOTSET_DELTA_TOKEN_FULL => Ok(Delta::TokenFull),
        c::HOTSET_DELTA_RUNNING_FULL => Ok(Delta::RunningFull),
        _ => Err(err!(Argument, "delta {value} is none of HOTSET_DELTA_*")),
    }
}

pub fn renormalise(value: i32) -> Result<Renormalise> {
    match value {
        c::HOTSET_RENORMALISE_AUTO => Ok(Renormalise::Auto),
        c::HOTSET_RENORMALISE_ON => Ok(Renormalise::On),
        c::HOTSET_RENORMALISE_OFF => Ok(Renormalise::Off),
        _ => Err(err!(Argument, "renormalise {value} is none of HOTSET_RENORMALISE_*")),
    }
}

/// The policies that can run live, and their values.
const POLICIES: [(Policy, i32); 5] = [
    (Policy::Lru, c::HOTSET_POLICY_LRU),
    (Policy::Lfu, c::HOTSET_POLICY_LFU),
    (Policy::Ema, c::HOTSET_POLICY_EMA),
    (Policy::NearPickEma, c::HOTSET_POLICY_NEAR_PICK_EMA),
    (Policy::InverseRouterEma, c::HOTSET_POLICY_INVERSE_ROUTER_EMA),
];

pub fn policy(value: i32) -> Result<Policy> {
    let found = POLICIES.iter().find(|(_, v)| *v == value).map(|(policy, _)| *policy);
    found.ok_or_else(|| err!(Argument, "policy {value} is none of HOTSET_POLICY_*"))
}

/// -1 for one that has no value.
pub fn policy_value(policy: Policy) -> i32 {
    POLICIES.iter().find(|(p, _)| *p == policy).map_or(-1, |(_, value)| *value)
}

pub fn delta_value(delta: Delta) -> i32 {
    match delta {
        Delta::TokenTopk => c::HOTSET_DELTA_TOKEN_TOPK,
        Delta::TokenFull => c::HOTSET_DELTA_TOKEN_FULL,
        Delta::RunningFull => c::HOTSET_DELTA_RUNNING_FULL,
    }
}

pub fn renormalise_value(renormalise: Renormalise) -> i32 {
    match renormalise {
        Renormalise::Auto => c::HOTSET_RENORMALISE_AUTO,
        Renormalise::On => c::HOTSET_RENORMALISE_ON,
        Renormalise::Off => c::HOTSET_RENORMALISE_OFF,
    }
}

/// A path the caller owns; None for NULL or "".
///
/// # Safety
/// `text` is NULL or ends with a 0.
pub unsafe fn path(text: *const c_char) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt;
    if text.is_null() {
        return None;
    }
    // SAFETY: as the caller promises.
    let bytes = unsafe { CStr::from_ptr(text) }.to_bytes();
    (!bytes.is_empty()).then(|| PathBuf::from(std::ffi::OsStr::from_bytes(bytes)))
}

/// The hook's settings.
///
/// # Safety
/// The paths in `p` are NULL or end with a 0.
pub unsafe fn config(p: &c::hotset_params) -> Result<Config> {
    let or = |value: u32, default: usize| if value == 0 { default } else { value as usize };
    let d = Config::default();
    let known = c::HOTSET_PREFILL_RECORD | c::HOTSET_PREFILL_MOCE | c::HOTSET_PREFILL_DROP;
    let bit = |bit: u32| p.prefill & bit != 0;
    if p.prefill & !(known as u32) != 0 {
        return Err(err!(Argument, "prefill {:#x}: bits that are none of HOTSET_PREFILL_*", p.prefill));
    }
    Ok(Config {
        cache_bytes: p.cache_bytes,
        slots: p.slots,
        k: p.k,
        top_m: or(p.top_m, d.top_m as usize) as u32,
        lanes: or(p.lanes, d.lanes),
        read_ahead: p.read_ahead,
        backing: match p.backing {
            c::HOTSET_BACKING_SLOTS => Backing::Slots,
            c::HOTSET_BACKING_PAGE_CACHE => Backing::PageCache,
            v => return Err(err!(Argument, "backing {v} is none of HOTSET_BACKING_*")),
        },
        io: match p.io {
            c::HOTSET_IO_DIRECT => IoMode::Direct,
            c::HOTSET_IO_BUFFERED => IoMode::Buffered,
            v => return Err(err!(Argument, "io {v} is none of HOTSET_IO_*")),
        },
        read_by: match p.read_by {
            c::HOTSET_READ_BY_RING => ReadBy::Ring,
            c::HOTSET_READ_BY_THREADS => ReadBy::Threads,
            v => return Err(err!(Argument, "read_by {v} is none of HOTSET_READ_BY_*")),
        },
        chunk_bytes: p.chunk_bytes,
        // SAFETY: as the caller promises.
        pack: unsafe { path(p.pack) },
        dense: match p.dense {
            c::HOTSET_DENSE_LOCK => Dense::Lock,
            c::HOTSET_DENSE_WARM => Dense::Warm,
            c::HOTSET_DENSE_LEAVE => Dense::Leave,
            v => return Err(err!(Argument, "dense {v} is none of HOTSET_DENSE_*")),
        },
        policy: policy(p.policy)?,
        moce: Moce { lambda: p.lambda, top_j: p.top_j, delta: delta(p.delta)? },
        drop: Drop { threshold: p.drop, renormalise: renormalise(p.renormalise)? },
        prefill: Prefill {
            record: bit(c::HOTSET_PREFILL_RECORD as u32),
            moce: bit(c::HOTSET_PREFILL_MOCE as u32),
            drop: bit(c::HOTSET_PREFILL_DROP as u32),
        },
        wait: Duration::from_millis(or(p.wait_ms, d.wait.as_millis() as usize) as u64),
        queue_tokens: or(p.queue_tokens, d.queue_tokens),
        // SAFETY: as the caller promises.
        trace: unsafe { path(p.trace) },
        // SAFETY: as the caller promises.
        metrics: unsafe { path(p.metrics) },
        // SAFETY: as the caller promises.
        schedule: unsafe { path(p.schedule) },
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_params_from_env(p: *mut c::hotset_params) -> i32 {
    // SAFETY: the header asks for NULL or a params struct with its size.
    let p = match unsafe { guard::write(p, "params") } {
        Ok(p) => p,
        Err(e) => return status::of(e.kind),
    };
    let mut laid_over = *p;
    // SAFETY: reading the environment; the header says that the paths are valid until it changes.
    let outcome = guard::caught(|| unsafe { from_env(&mut laid_over) }.map(|()| c::HOTSET_OK));
    match outcome {
        Ok(ok) => {
            *p = laid_over;
            ok
        }
        Err(e) => {
            // SAFETY: the caller's buffer with its size.
            unsafe { guard::text_into(p.detail, p.detail_size, e.detail.as_bytes()) };
            status::of(e.kind)
        }
    }
}

/// # Safety
/// The environment does not change meanwhile.
unsafe fn from_env(p: &mut c::hotset_params) -> Result<()> {
    // SAFETY: as the caller promises; names end with a 0.
    let raw = |name: &str| -> Option<*const c_char> {
        let name = CString::new(name).ok()?;
        let value = unsafe { libc::getenv(name.as_ptr()) };
        (!value.is_null() && unsafe { *value } != 0).then_some(value.cast_const())
    };
    let text = |name: &str| -> Result<Option<&str>> {
        // SAFETY: getenv's strings end with a 0.
        let Some(value) = raw(name).map(|v| unsafe { CStr::from_ptr(v) }) else { return Ok(None) };
        value.to_str().map(Some).map_err(|_| err!(Argument, "{name} is not UTF-8: {value:?}"))
    };
    macro_rules! number {
        ($name:literal, $field:expr) => {
            if let Some(value) = text($name)? {
                $field = value.trim().parse().map_err(|e| err!(Argument, "{} = '{value}': {e}", $name))?;
            }
        };
    }
    let choice = |name: &str, words: &[(&str, i32)]| -> Result<Option<i32>> {
        let Some(value) = text(name)? else { return Ok(None) };
        let found = words.iter().find(|(word, _)| *word == value.trim()).map(|(_, v)| *v);
        let all = || words.iter().map(|(word, _)| *word).collect::<Vec<_>>().join(", ");
        found.map(Some).ok_or_else(|| err!(Argument, "{name} = '{value}': it must be one of {}", all()))
    };
    number!("HOTSET_SLOTS", p.slots);
    number!("HOTSET_LANES", p.lanes);
    number!("HOTSET_READ_AHEAD", p.read_ahead);
    number!("HOTSET_TOP_J", p.top_j);
    number!("HOTSET_TOP_M", p.top_m);
    number!("HOTSET_LAMBDA", p.lambda);
    number!("HOTSET_DROP", p.drop);
    // Values that hotset_open would refuse anyway: here the variable can be named.
    for (name, value) in [("HOTSET_LAMBDA", p.lambda), ("HOTSET_DROP", p.drop)] {
        if !value.is_finite() || value < 0.0 {
            return Err(err!(Argument, "{name}: {value} must be a number of 0 or more"));
        }
    }
    if p.lanes > 64 {
        return Err(err!(Argument, "HOTSET_LANES: {} must be 1 to 64", p.lanes));
    }
    for (name, field) in [("HOTSET_CACHE_BYTES", &mut p.cache_bytes), ("HOTSET_CHUNK", &mut p.chunk_bytes)] {
        if let Some(value) = text(name)? {
            *field = parse_bytes(value).ok_or_else(|| {
                err!(Argument, "{name} = '{value}': it must be a number of bytes, or one with K, M or G behind it")
            })?;
        }
    }
    let words = [("slots", c::HOTSET_BACKING_SLOTS), ("page-cache", c::HOTSET_BACKING_PAGE_CACHE)];
    p.backing = choice("HOTSET_BACKING", &words)?.unwrap_or(p.backing);
    p.io =
        choice("HOTSET_IO", &[("direct", c::HOTSET_IO_DIRECT), ("buffered", c::HOTSET_IO_BUFFERED)])?.unwrap_or(p.io);
    let words = [(ReadBy::Ring, c::HOTSET_READ_BY_RING), (ReadBy::Threads, c::HOTSET_READ_BY_THREADS)]
        .map(|(by, v)| (by.name(), v));
    p.read_by = choice("HOTSET_READ_BY", &words)?.unwrap_or(p.read_by);
    let words = [("lock", c::HOTSET_DENSE_LOCK), ("warm", c::HOTSET_DENSE_WARM), ("leave", c::HOTSET_DENSE_LEAVE)];
    p.dense = choice("HOTSET_DENSE", &words)?.unwrap_or(p.dense);
    let words = [
        ("token_topk", c::HOTSET_DELTA_TOKEN_TOPK),
        ("token_full", c::HOTSET_DELTA_TOKEN_FULL),
        ("running_full", c::HOTSET_DELTA_RUNNING_FULL),
    ];
    let names = POLICIES.map(|(policy, value)| (policy.name(), value));
    p.policy = choice("HOTSET_POLICY", &names)?.unwrap_or(p.policy);
    p.delta = choice("HOTSET_DELTA", &words)?.unwrap_or(p.delta);
    let words =
        [("auto", c::HOTSET_RENORMALISE_AUTO), ("on", c::HOTSET_RENORMALISE_ON), ("off", c::HOTSET_RENORMALISE_OFF)];
    p.renormalise = choice("HOTSET_RENORMALISE", &words)?.unwrap_or(p.renormalise);
    if let Some(value) = text("HOTSET_PREFILL")? {
        p.prefill = 0;
        for word in value.split(',').map(str::trim).filter(|w| !w.is_empty()) {
            p.prefill |= match word {
                "record" => c::HOTSET_PREFILL_RECORD,
                "moce" => c::HOTSET_PREFILL_MOCE,
                "drop" => c::HOTSET_PREFILL_DROP,
                _ => return Err(err!(Argument, "HOTSET_PREFILL = '{value}': '{word}' is none of record, moce, drop")),
            } as u32;
        }
    }
    p.pack = raw("HOTSET_PACK").unwrap_or(p.pack);
    p.trace = raw("HOTSET_TRACE").unwrap_or(p.trace);
    p.metrics = raw("HOTSET_METRICS").unwrap_or(p.metrics);
    p.schedule = raw("HOTSET_SCHEDULE").unwrap_or(p.schedule);
    Ok(())
}

/// "512", "7500M", "8G": powers of 1024.
pub fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let (digits, shift) = match text.as_bytes().last()? {
        b'K' | b'k' => (&text[..text.len() - 1], 10),
        b'M' | b'm' => (&text[..text.len() - 1], 20),
        b'G' | b'g' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    digits.trim().parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    #[test]
    fn bytes_have_suffixes() {
        let of = super::parse_bytes;
        assert_eq!(
            [of("512"), of("7500M"), of(" 8 G "), of("1k")],
            [Some(512), Some(7500 << 20), Some(8 << 30), Some(1024)]
        );
        assert_eq!([of(""), of("G"), of("1.5G"), of("-1"), of("99999999999999G")], [None; 5]);
    }
}
