//! The border: no panic crosses it, and every error leaves its detail where the header says.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::bindings as c;
use super::handle::Handle;
use super::status;
use crate::error::{Result, err};

/// Runs a call; a panic in it is an error like any other. What it unwound through is the hook's own state, which is then as far as
/// the call had come: no memory is unsound, and the next pass begins by putting an unfinished one in order.
pub fn caught(call: impl FnOnce() -> Result<i32>) -> Result<i32> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("a panic without text");
        Err(err!(Internal, "{text}"))
    })
}

/// A call on a handle, which `h` must be or NULL.
///
/// # Safety
/// `h` is NULL or came from `hotset_open` and was not closed.
pub unsafe fn on_handle(h: *const c::hotset, call: impl FnOnce(&Handle) -> Result<i32>) -> i32 {
    // SAFETY: as the caller promises.
    let Some(handle) = (unsafe { Handle::from_ptr(h) }) else { return c::HOTSET_E_ARGUMENT };
    match caught(|| call(handle)) {
        Ok(status) => status,
        Err(e) => {
            let code = status::of(e.kind);
            handle.fail(&e);
            code
        }
    }
}

/// A struct of the header, whose first member is its size.
///
/// # Safety
/// `Self` is `repr(C)` and begins with a `size_t struct_size`.
pub unsafe trait Versioned {}

macro_rules! versioned {
    ($($name:ident),+ $(,)?) => {$(
        const _: () = assert!(std::mem::offset_of!(c::$name, struct_size) == 0);
        // SAFETY: made by bindgen from C, and the offset is checked above.
        unsafe impl Versioned for c::$name {}
    )+};
}
versioned!(hotset_params, hotset_plan, hotset_shape, hotset_bank, hotset_batch, hotset_outcome, hotset_stats);

fn check<T: Versioned>(p: *const T, what: &str) -> Result<()> {
    if p.is_null() {
        return Err(err!(Argument, "{what} is NULL"));
    }
    if !p.is_aligned() {
        return Err(err!(Argument, "{what} at {p:p} is not aligned to {} bytes", align_of::<T>()));
    }
    // SAFETY: not NULL, aligned; the header makes the size the first member of whatever version of the struct this is.
    let size = unsafe { *p.cast::<usize>() };
    if size < size_of::<T>() {
        return Err(err!(Argument, "{what}: struct_size {size}, at least {} is needed", size_of::<T>()));
    }
    Ok(())
}

/// The caller's struct, read.
///
/// # Safety
/// `p` is NULL or points to as many bytes as its first member says.
pub unsafe fn read<'a, T: Versioned>(p: *const T, what: &str) -> Result<&'a T> {
    check(p, what)?;
    // SAFETY: checked; a later caller's longer struct begins like this one.
    Ok(unsafe { &*p })
}

/// The caller's struct, to be written.
///
/// # Safety
/// As for `read`, and nobody else uses it during the call.
pub unsafe fn write<'a, T: Versioned>(p: *mut T, what: &str) -> Result<&'a mut T> {
    check(p, what)?;
    // SAFETY: checked.
    Ok(unsafe { &mut *p })
}

/// Fills in a struct of the header whose members are those of the hook's own struct `$of`, and `$more` besides. Both sides are named
/// in full: a member that only one of them has does not compile.
macro_rules! fill {
    ($out:expr, $c:ident, $of:ident = $from:expr, { $($member:ident),+ $(,)? }, { $($more:ident: $value:expr),* }) => {{
        let $of { $($member),+ } = $from;
        *$out = c::$c { struct_size: $out.struct_size, $($member,)+ $($more: $value),* };
    }};
}
pub(super) use fill;

/// A text into the caller's buffer, cut to its size.
///
/// # Safety
/// `buffer` is NULL or has `size` bytes.
pub unsafe fn text_into(buffer: *mut core::ffi::c_char, size: usize, text: &[u8]) {
    if buffer.is_null() || size == 0 {
        return;
    }
    let text: Vec<u8> = text.iter().copied().filter(|&b| b != 0).take(size - 1).collect();
    // SAFETY: at most size bytes are written, the final 0 included.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast(), text.len());
        *buffer.add(text.len()) = 0;
    }
}
