//! The handle: a hook behind a lock for the calls of one thread at a time, beside it what `hotset_wait` needs without the lock, and
//! the strings that the header lends out.

use core::ffi::{c_char, c_void};
use std::ffi::{CStr, CString};
use std::sync::Arc;

use parking_lot::Mutex;

use super::bindings as c;
use crate::error::{Error, Result, err};
use crate::hook::Hook;
use crate::model::Projection;
use crate::store::Store;

/// What a `struct hotset *` points to.
pub struct Handle {
    pub hook: Mutex<Hook>,
    pub store: Arc<Store>,
    /// By layer: its block, and the projection of each of its tensors.
    pub layers: Vec<LayerNames>,
    pub io_reason: CString,
    pub dense_reason: CString,
    pub architecture: CString,
    pub log: Log,
    last_error: Mutex<CString>,
}

pub struct LayerNames {
    pub block: u32,
    pub projections: Vec<Projection>,
    pub tensors: Vec<CString>,
}

impl Handle {
    pub fn new(hook: Hook, log: Log) -> Self {
        let layers = hook.model().experts.layers.iter();
        Self {
            store: hook.store().clone(),
            layers: layers
                .map(|l| LayerNames {
                    block: l.block,
                    projections: l.tensors.iter().map(|t| t.projection).collect(),
                    tensors: l.tensors.iter().map(|t| c_string(&t.name)).collect(),
                })
                .collect(),
            io_reason: c_string(reason(&hook.store().io_mode().reason)),
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

    /// The layer's index in the store.
    pub fn layer_index(&self, block: u32) -> Result<usize> {
        match self.layers.get(block as usize) {
            Some(l) if l.block == block => Ok(block as usize),
            _ => self.layers.binary_search_by_key(&block, |l| l.block).map_err(|_| {
                err!(Range, "block {block} is no layer with experts; there are {} of them", self.layers.len())
            }),
        }
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
