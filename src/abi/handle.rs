//! The handle: a hook behind a lock for the calls of one thread at a time, beside it what `hotset_wait` needs without the lock, and
//! the strings that the header lends out.

use core::ffi::{c_char, c_void};
use std::ffi::{CStr, CString};
use std::sync::Arc;

use parking_lot::Mutex;

use super::bindings as c;
use crate::error::Error;
use crate::hook::Hook;
use crate::model::{ExpertTable, MoeLayer};
use crate::store::Store;

/// What a `struct hotset *` points to.
pub struct Handle {
    pub hook: Mutex<Hook>,
    pub store: Arc<Store>,
    /// The model's, for calls that do not wait for the hook.
    pub experts: ExpertTable,
    /// By layer, the names of its tensors.
    pub tensor_names: Vec<Vec<CString>>,
    pub io_reason: CString,
    pub read_by_reason: CString,
    pub dense_reason: CString,
    pub architecture: CString,
    pub log: Log,
    last_error: Mutex<CString>,
}

impl Handle {
    pub fn new(hook: Hook, log: Log) -> Self {
        let experts = hook.model().experts.clone();
        let names = |l: &MoeLayer| l.tensors.iter().map(|t| c_string(&t.name)).collect();
        Self {
            store: hook.store().clone(),
            tensor_names: experts.layers.iter().map(names).collect(),
            experts,
            io_reason: c_string(reason(&hook.store().io_mode().reason)),
            read_by_reason: c_string(reason(&hook.store().io_mode().by_reason)),
            dense_reason: c_string(reason(&hook.dense().report().reason)),
            architecture: c_string(hook.model().architecture().unwrap_or_default()),
            log,
            last_error: Mutex::new(CString::default()),
            hook: Mutex::new(hook),
        }
    }

    /// # Safety
    /// `h` is NULL or came from `hotset_open` and was not closed.
    pub unsafe fn from_ptr<'a>(h: *const c::hotset) -> Option<&'a Handle> {
        // SAFETY: hotset_open gave out a boxed Handle under this name.
        unsafe { h.cast::<Handle>().as_ref() }
    }

    pub fn into_ptr(self) -> *mut c::hotset {
        Box::into_raw(Box::new(self)).cast()
    }

    /// # Safety
    /// As for `from_ptr`, not NULL, and the last use of it.
    pub unsafe fn from_ptr_owned(h: *mut c::hotset) -> Box<Handle> {
        // SAFETY: `into_ptr` made it.
        unsafe { Box::from_raw(h.cast()) }
    }

    pub fn fail(&self, e: &Error) {
        *self.last_error.lock() = c_string(&e.detail);
        self.log.line(c::HOTSET_LOG_ERROR, &e.detail);
    }

    pub fn last_error(&self) -> *const c_char {
        self.last_error.lock().as_ptr()
    }

    pub fn copy_last_error(&self) -> CString {
        self.last_error.lock().clone()
    }
}

/// What the header lends out where nothing had to be explained.
fn reason(text: &str) -> &str {
    if text.is_empty() { "as asked for" } else { text }
}

pub fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', " ")).unwrap_or_default()
}

/// The caller's log function.
pub struct Log {
    call: c::hotset_log_fn,
    user: *mut c_void,
}

// SAFETY: it is called only within calls of the header's functions, on their threads; the header says so, and what `user`
// points to is the caller's to guard.
unsafe impl Send for Log {}
// SAFETY: as above.
unsafe impl Sync for Log {}

impl Log {
    pub fn new(call: c::hotset_log_fn, user: *mut c_void) -> Self {
        Self { call, user }
    }

    pub fn line(&self, level: core::ffi::c_int, text: &str) {
        if let Some(call) = self.call {
            let text: &CStr = &c_string(text);
            // SAFETY: the caller's function of the header's type; the text lives through the call.
            unsafe { call(level, text.as_ptr(), self.user) };
        }
    }
}
