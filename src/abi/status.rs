//! Status codes and what they say.

use core::ffi::{CStr, c_char};

use super::bindings as c;
use super::guard;
use super::handle::Handle;
use crate::error::ErrorKind;

/// The status that stands for an error of this kind.
pub fn of(kind: ErrorKind) -> i32 {
    match kind {
        ErrorKind::Argument => c::HOTSET_E_ARGUMENT,
        ErrorKind::Range => c::HOTSET_E_RANGE,
        ErrorKind::Io => c::HOTSET_E_IO,
        ErrorKind::Format => c::HOTSET_E_FORMAT,
        ErrorKind::Model => c::HOTSET_E_MODEL,
        ErrorKind::Changed => c::HOTSET_E_CHANGED,
        ErrorKind::Budget => c::HOTSET_E_BUDGET,
        ErrorKind::Memory => c::HOTSET_E_MEMORY,
        ErrorKind::State => c::HOTSET_E_STATE,
        ErrorKind::Timeout => c::HOTSET_E_TIMEOUT,
        ErrorKind::Internal => c::HOTSET_E_INTERNAL,
    }
}

fn text(status: i32) -> &'static CStr {
    match status {
        c::HOTSET_OK => c"success",
        c::HOTSET_PASS_THROUGH => c"the batch passes through: its experts do not fit the slots",
        c::HOTSET_IN_FLIGHT => c"not there yet",
        c::HOTSET_E_ARGUMENT => c"an argument that cannot be",
        c::HOTSET_E_RANGE => c"no such layer, expert, slot or projection, or an expert twice in a token",
        c::HOTSET_E_IO => c"the system refused a file operation",
        c::HOTSET_E_FORMAT => c"a file is not what its format says",
        c::HOTSET_E_MODEL => c"not a model whose experts can be kept in slots",
        c::HOTSET_E_CHANGED => c"a file changed while it was in use",
        c::HOTSET_E_BUDGET => c"fewer slots than one token needs",
        c::HOTSET_E_MEMORY => c"the system has no memory left",
        c::HOTSET_E_STATE => c"not possible in this state",
        c::HOTSET_E_TIMEOUT => c"a bounded wait ran out",
        c::HOTSET_E_INTERNAL => c"a bug in hotset",
        _ => c"no status of hotset",
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_abi_version() -> u32 {
    c::HOTSET_ABI_VERSION
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_version() -> *const c_char {
    const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
        Ok(v) => v,
        Err(_) => c"",
    };
    VERSION.as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_strerror(status: i32) -> *const c_char {
    text(status).as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_last_error(h: *const c::hotset) -> *const c_char {
    // SAFETY: the header asks for a live handle or NULL.
    unsafe { Handle::from_ptr(h) }.map_or(c"".as_ptr(), Handle::last_error)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hotset_copy_last_error(h: *const c::hotset, buffer: *mut c_char, size: usize) {
    // SAFETY: the header asks for a live handle or NULL, and for a buffer of so many bytes.
    unsafe {
        let text = Handle::from_ptr(h).map(Handle::copy_last_error).unwrap_or_default();
        guard::text_into(buffer, size, text.as_bytes());
    }
}
