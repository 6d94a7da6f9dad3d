//! Keeps stock llama.cpp from reading the whole model when it maps it, which on Linux it asks for three times over: MAP_POPULATE,
//! WILLNEED, and a sequential read-ahead. For a model larger than memory that is a long load that evicts itself.
//!
//! build.rs has the linker send the three calls here (`--wrap`). While a model is loaded with hotset, on the thread that loads it, the
//! hints are dropped; everything else, and every other time, goes through unchanged. An engine of one's own would not ask.

pub struct Lazy(());

#[cfg(not(target_os = "linux"))]
impl Lazy {
    /// Other systems map without reading.
    pub fn begin() -> Lazy {
        Lazy(())
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::cell::Cell;
    use std::ffi::{c_int, c_void};

    use super::Lazy;

    thread_local! {
        static LOADING: Cell<bool> = const { Cell::new(false) };
    }

    impl Lazy {
        /// Until it is dropped.
        pub fn begin() -> Lazy {
            LOADING.set(true);
            Lazy(())
        }
    }

    impl Drop for Lazy {
        fn drop(&mut self) {
            LOADING.set(false);
        }
    }

    /// A thread that is ending has no thread-local values left, and loads nothing.
    fn loading() -> bool {
        LOADING.try_with(Cell::get).unwrap_or(false)
    }

    unsafe extern "C" {
        fn __real_mmap(
            addr: *mut c_void,
            len: usize,
            prot: c_int,
            flags: c_int,
            fd: c_int,
            offset: libc::off_t,
        ) -> *mut c_void;
        fn __real_posix_madvise(addr: *mut c_void, len: usize, advice: c_int) -> c_int;
        fn __real_posix_fadvise(fd: c_int, offset: libc::off_t, len: libc::off_t, advice: c_int) -> c_int;
    }

    /// SAFETY: as mmap.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn __wrap_mmap(
        addr: *mut c_void,
        len: usize,
        prot: c_int,
        flags: c_int,
        fd: c_int,
        offset: libc::off_t,
    ) -> *mut c_void {
        let file = fd >= 0 && prot == libc::PROT_READ;
        let flags = if file && loading() { flags & !libc::MAP_POPULATE } else { flags };
        // SAFETY: the caller's own arguments; whether pages are there already changes no meaning.
        unsafe { __real_mmap(addr, len, prot, flags, fd, offset) }
    }

    /// SAFETY: as posix_madvise.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn __wrap_posix_madvise(addr: *mut c_void, len: usize, advice: c_int) -> c_int {
        if advice == libc::POSIX_MADV_WILLNEED && loading() {
            return 0;
        }
        // SAFETY: the caller's own arguments.
        unsafe { __real_posix_madvise(addr, len, advice) }
    }

    /// SAFETY: as posix_fadvise.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn __wrap_posix_fadvise(
        fd: c_int,
        offset: libc::off_t,
        len: libc::off_t,
        advice: c_int,
    ) -> c_int {
        if advice == libc::POSIX_FADV_SEQUENTIAL && loading() {
            return 0;
        }
        // SAFETY: the caller's own arguments.
        unsafe { __real_posix_fadvise(fd, offset, len, advice) }
    }
}
