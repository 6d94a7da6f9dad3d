//! hotset through its C ABI: one open model and the adapter that the engine calls. Nothing of the Rust crate is used here.

use std::ffi::{CStr, CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, anyhow, bail};
use llama_cpp_sys_2::ggml_backend_buffer_type_t;

use crate::args::HookArgs;
use crate::ffi;

pub struct Hook {
    h: *mut ffi::hotset,
    g: *mut ffi::hotset_ggml,
}

impl Hook {
    /// The defaults, over them the environment, over it the flags.
    pub fn open(model: &Path, args: &HookArgs, verbose: bool) -> Result<Hook> {
        // SAFETY: no arguments.
        let (built, header) = (unsafe { ffi::hotset_abi_version() }, ffi::HOTSET_ABI_VERSION);
        if built != header {
            bail!("the library speaks ABI version {built}, its header version {header}");
        }
        let mut detail = [0 as c_char; 1024];
        // SAFETY: no arguments.
        let mut params = unsafe { ffi::hotset_params_default() };
        params.detail = detail.as_mut_ptr();
        params.detail_size = detail.len();
        params.log = Some(log_line);
        // Not a pointer: a flag that travels in one.
        params.log_user = ptr::without_provenance_mut(usize::from(verbose));
        // SAFETY: params is a struct of the library's own making, detail outlives both calls.
        let status = unsafe { ffi::hotset_params_from_env(&mut params) };
        if status < 0 {
            bail!("{}", explain(status, &detail));
        }
        // All must live until hotset_open has copied them.
        let trace = args.trace.as_deref().map(c_path).transpose()?;
        let pack = args.pack.as_deref().map(c_path).transpose()?;
        if let Some(path) = &pack {
            params.pack = path.as_ptr();
        }
        let metrics = args.metrics.as_deref().map(c_path).transpose()?;
        if let Some(path) = &trace {
            params.trace = path.as_ptr();
        }
        if let Some(path) = &metrics {
            params.metrics = path.as_ptr();
        }
        let schedule = args.schedule.as_deref().map(c_path).transpose()?;
        if let Some(path) = &schedule {
            params.schedule = path.as_ptr();
        }
        lay_over(&mut params, args);

        let path = c_path(model)?;
        let mut h = ptr::null_mut();
        // SAFETY: every pointer is valid for the call; h receives the handle.
        let status = unsafe { ffi::hotset_open(path.as_ptr(), &params, &mut h) };
        if status < 0 {
            bail!("{}", explain(status, &detail));
        }
        OPENED.store(true, Ordering::Relaxed);
        let mut hook = Hook { h, g: ptr::null_mut() };
        // SAFETY: no arguments.
        let mut adapter = unsafe { ffi::hotset_ggml_params_default() };
        // This program asks for logits of the last token of a batch, or of all its tokens.
        adapter.tail_outputs = true;
        adapter.wait = args.wait.map_or(adapter.wait, |w| w.number());
        // SAFETY: h is open, and freed after g (see Drop).
        let status = unsafe { ffi::hotset_ggml_init(hook.h, &adapter, &mut hook.g) };
        if status < 0 {
            bail!("the adapter: {}", hook.explain_handle(status));
        }
        Ok(hook)
    }

    pub fn adapter(&self) -> *mut c_void {
        self.g.cast()
    }

    pub fn buffer_type(&self) -> ggml_backend_buffer_type_t {
        // SAFETY: g is alive as long as self.
        unsafe { ffi::hotset_ggml_buffer_type(self.g) }
    }

    /// The adapter's first error, in words.
    pub fn error(&self) -> Option<String> {
        // SAFETY: g is alive; the text is its own and is copied at once.
        unsafe {
            let status = ffi::hotset_ggml_status(self.g);
            if status >= 0 {
                return None;
            }
            let (detail, own) = (text(ffi::hotset_ggml_error(self.g)), text(ffi::hotset_last_error(self.h)));
            // The adapter's text usually contains the library's.
            let rest = if detail.is_empty() { own } else { detail };
            Some(format!("{} ({rest})", text(ffi::hotset_strerror(status))))
        }
    }

    /// Begins the experiment in this plan file.
    pub fn set_schedule(&self, plan: &Path) -> Result<()> {
        let plan = c_path(plan)?;
        // SAFETY: h is open, the path lives for the call.
        self.check(unsafe { ffi::hotset_set_schedule(self.h, plan.as_ptr()) }).map(drop)
    }

    /// Forgets what is resident and counted.
    pub fn reset(&self) -> Result<()> {
        // SAFETY: h is open, no decode is in progress: it would borrow the engine that owns self.
        self.check(unsafe { ffi::hotset_reset(self.h) }).map(drop)
    }

    pub fn set_phase(&self, prefill: bool) {
        let phase = if prefill { ffi::HOTSET_PREFILL } else { ffi::HOTSET_DECODE };
        // SAFETY: g is alive, no decode is in progress: it would borrow the engine that owns self.
        unsafe { ffi::hotset_ggml_set_phase(self.g, phase as i32) };
    }

    pub fn set_position(&self, position: i64) {
        // SAFETY: as in set_phase.
        unsafe { ffi::hotset_ggml_set_position(self.g, position) };
    }

    pub fn stops(&self) -> u64 {
        // SAFETY: g is alive.
        unsafe { ffi::hotset_ggml_stops(self.g) }
    }

    pub fn stats(&self) -> Result<ffi::hotset_stats> {
        let mut stats = ffi::hotset_stats { struct_size: size_of::<ffi::hotset_stats>(), ..Default::default() };
        // SAFETY: h is open, the struct says its size.
        self.check(unsafe { ffi::hotset_stats(self.h, &mut stats) })?;
        Ok(stats)
    }

    pub fn shape(&self) -> Result<ffi::hotset_shape> {
        let mut shape = ffi::hotset_shape { struct_size: size_of::<ffi::hotset_shape>(), ..Default::default() };
        // SAFETY: h is open, the struct says its size.
        self.check(unsafe { ffi::hotset_shape(self.h, &mut shape) })?;
        Ok(shape)
    }

    /// The block numbers of the layers with experts.
    pub fn blocks(&self) -> Result<Vec<u32>> {
        // SAFETY: h is open; n = 0 asks for the count alone.
        let n = self.check(unsafe { ffi::hotset_blocks(self.h, ptr::null_mut(), 0) })?;
        let mut blocks = vec![0; n];
        // SAFETY: room for n.
        self.check(unsafe { ffi::hotset_blocks(self.h, blocks.as_mut_ptr(), n) })?;
        Ok(blocks)
    }

    /// Hits and misses of one layer.
    pub fn layer_stats(&self, block: u32) -> Result<(u64, u64)> {
        let (mut hits, mut misses) = (0, 0);
        // SAFETY: h is open, both are written, NULL is allowed for the third.
        self.check(unsafe { ffi::hotset_layer_stats(self.h, block, &mut hits, &mut misses, ptr::null_mut()) })?;
        Ok((hits, misses))
    }

    /// Until what was recorded is in the files, so that a full disk is an error and not a short trace.
    pub fn flush(&self) -> Result<()> {
        // SAFETY: h is open.
        self.check(unsafe { ffi::hotset_trace_flush(self.h, 0) }).map(drop)
    }

    /// 0xFF into every expert's slice of every slot, before anything is in them. Returns the bytes written. As floats they are NaNs, so
    /// a slot that is computed with before it is filled shows in the logits.
    pub fn poison(&self) -> Result<u64> {
        let shape = self.shape()?;
        let mut written = 0;
        for block in self.blocks()? {
            // SAFETY: n = 0 asks for the count alone.
            let n = self.check(unsafe { ffi::hotset_banks(self.h, block, ptr::null_mut(), 0) })?;
            let first = ffi::hotset_bank { struct_size: size_of::<ffi::hotset_bank>(), ..Default::default() };
            let mut banks = vec![first; n];
            // SAFETY: room for n, and the first element says its size.
            self.check(unsafe { ffi::hotset_banks(self.h, block, banks.as_mut_ptr(), n) })?;
            for bank in banks.iter().filter(|bank| !bank.base.is_null()) {
                // bank.slots counts addresses; memory is held, at first, by as many as were asked for.
                for slot in 0..u64::from(bank.slots.min(shape.slots)) {
                    // SAFETY: the slice of a slot of this bank: inside of the arena, writable, and nothing is in flight
                    // because nothing was decoded yet.
                    unsafe {
                        let start = bank.base.cast::<u8>().add((slot * bank.stride_bytes) as usize);
                        ptr::write_bytes(start, 0xFF, bank.slice_bytes as usize);
                    }
                    written += bank.slice_bytes;
                }
            }
        }
        if written == 0 {
            bail!("there are no slots to poison: the backing has none");
        }
        Ok(written)
    }

    /// A count or success, or the error in words.
    fn check(&self, status: i32) -> Result<usize> {
        usize::try_from(status).map_err(|_| anyhow!("{}", self.explain_handle(status)))
    }

    fn explain_handle(&self, status: i32) -> String {
        // SAFETY: both texts are valid here and are copied.
        unsafe { format!("{} ({})", text(ffi::hotset_strerror(status)), text(ffi::hotset_last_error(self.h))) }
    }
}

impl Drop for Hook {
    fn drop(&mut self) {
        // SAFETY: the engine drops its context and its model first; the adapter goes before the handle that it uses.
        unsafe {
            ffi::hotset_ggml_free(self.g);
            ffi::hotset_close(self.h);
        }
    }
}

fn lay_over(params: &mut ffi::hotset_params, args: &HookArgs) {
    /// A flag that was given replaces what is there.
    fn put<T>(to: &mut T, flag: Option<T>) {
        if let Some(value) = flag {
            *to = value;
        }
    }
    put(&mut params.slots, args.slots);
    if let Some(bytes) = args.cache_bytes {
        params.cache_bytes = bytes;
        // A number of slots from the environment would win over it.
        params.slots = 0;
    }
    put(&mut params.policy, args.policy.map(|p| p.number()));
    put(&mut params.lambda, args.lambda);
    put(&mut params.top_j, args.top_j);
    put(&mut params.delta, args.delta.map(|d| d.number()));
    put(&mut params.drop, args.drop);
    put(&mut params.renormalise, args.renormalise.map(|r| r.number()));
    put(&mut params.lanes, args.lanes);
    put(&mut params.read_ahead, args.read_ahead);
    put(&mut params.chunk_bytes, args.chunk_bytes);
    put(&mut params.io, args.io.map(|io| io.number()));
    put(&mut params.read_by, args.read_by.map(|by| by.number()));
    put(&mut params.backing, args.backing.map(|b| b.number()));
    put(&mut params.dense, args.dense.map(|d| d.number()));
    put(&mut params.top_m, args.top_m);
    if let Some(kinds) = &args.prefill {
        params.prefill = kinds.iter().fold(0, |bits, kind| bits | kind.number() as u32);
    }
}

/// A string of the library's, copied; "" for NULL.
///
/// SAFETY: s is NULL, or a C string that nobody changes meanwhile.
pub unsafe fn text(s: *const c_char) -> String {
    if s.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(s) }.to_string_lossy().into_owned()
}

pub fn c_path(path: &Path) -> Result<CString> {
    CString::new(path.as_os_str().as_bytes()).with_context(|| format!("{}: a zero byte in the name", path.display()))
}

/// A status, with the detail that a failing call without a handle left in the buffer.
fn explain(status: i32, detail: &[c_char]) -> String {
    let bytes: Vec<u8> = detail.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
    // SAFETY: static strings.
    let status = unsafe { text(ffi::hotset_strerror(status)) };
    format!("{status} ({})", String::from_utf8_lossy(&bytes))
}

/// What fails before this is the program's one error message already.
static OPENED: AtomicBool = AtomicBool::new(false);

/// SAFETY: called by hotset only, with a C string.
unsafe extern "C" fn log_line(level: i32, line: *const c_char, user: *mut c_void) {
    let verbose = user.addr() != 0;
    let wanted = match level as _ {
        ffi::HOTSET_LOG_ERROR => OPENED.load(Ordering::Relaxed),
        ffi::HOTSET_LOG_WARN => true,
        _ => false,
    };
    if wanted || verbose {
        // SAFETY: valid during the call.
        eprintln!("hotset: {}", unsafe { text(line) });
    }
}
