//! Everything of the store that is the system's business: mapping, locking, positioned reads, and the little that
//! differs between platforms. The rest of the store calls these functions and knows no platform.
//!
//! Shared by all unixes here; `linux` and `macos` hold the same items each, and other unixes get the plain versions
//! at the end of this file.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::AsRawFd;
use std::ptr;

pub mod machine;
pub mod uring;

#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "linux")]
use linux as platform;
#[cfg(target_os = "macos")]
mod macos;
#[cfg(target_os = "macos")]
use macos as platform;

#[cfg(feature = "tools")]
pub use platform::drop_cached;
pub(super) use platform::{direct_align, discard, open_direct, prefer_large_pages, prefetch, reuse};

/// Bytes of a page of memory: 16 KiB on Apple silicon.
pub fn page_bytes() -> u64 {
    // SAFETY: sysconf has no preconditions.
    let n = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(n).ok().filter(|n| n.is_power_of_two()).unwrap_or(4096)
}

/// Memory of the machine, in bytes; 0 where the system does not say.
pub fn memory_bytes() -> u64 {
    // SAFETY: sysconf has no preconditions.
    let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
    u64::try_from(pages).unwrap_or(0).saturating_mul(page_bytes())
}

/// Reserves zeroed private memory. Pages take room only once they are written.
pub fn reserve(bytes: usize) -> io::Result<*mut u8> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANON | platform::RESERVE_FLAGS;
    // SAFETY: a new anonymous mapping at an address of the system's choice touches no existing memory.
    let p = unsafe { libc::mmap(ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if p == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(p.cast()) }
}

/// Gives a reservation back.
///
/// # Safety
/// `base` and `bytes` are those of one `reserve`, and nobody uses that memory any more.
pub unsafe fn unreserve(base: *mut u8, bytes: usize) {
    // SAFETY: the caller hands over a whole mapping that is no longer in use.
    unsafe { libc::munmap(base.cast(), bytes) };
}

/// One positioned read into several buffers in turn; the file's own position stays.
pub fn read_vectored_at(file: &File, bufs: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize> {
    let too_far = || io::Error::from_raw_os_error(libc::EINVAL);
    let offset = libc::off_t::try_from(offset).map_err(|_| too_far())?;
    let count = libc::c_int::try_from(bufs.len()).map_err(|_| too_far())?;
    // SAFETY: IoSliceMut is laid out as iovec on unix; the buffers are exclusively borrowed for the call.
    let n = unsafe { libc::preadv(file.as_raw_fd(), bufs.as_mut_ptr().cast::<libc::iovec>(), count, offset) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Asks for a mapped range to be read ahead; returns at once.
///
/// # Safety
/// The range is page-aligned at its start and lies inside one mapping.
pub unsafe fn advise_willneed(start: *const u8, bytes: usize) -> io::Result<()> {
    // SAFETY: WILLNEED changes no contents; the range is mapped as the caller says.
    check(unsafe { libc::madvise(start.cast_mut().cast(), bytes, libc::MADV_WILLNEED) })
}

/// Holds a mapped range in memory; reads what is not there yet.
///
/// # Safety
/// The range is page-aligned at its start and lies inside one mapping.
pub unsafe fn lock(start: *const u8, bytes: usize) -> io::Result<()> {
    // SAFETY: locking changes no contents; the range is mapped as the caller says.
    check(unsafe { libc::mlock(start.cast(), bytes) })
}

/// Undoes `lock`.
///
/// # Safety
/// The range is page-aligned at its start and lies inside one mapping.
pub unsafe fn unlock(start: *const u8, bytes: usize) {
    // SAFETY: as for `lock`. A refusal leaves pages locked until the mapping goes: nothing to act on.
    unsafe { libc::munlock(start.cast(), bytes) };
}

/// Raises the limit of locked memory as far as this process may; returns what is in effect (`u64::MAX`: none).
pub fn raise_lock_limit() -> u64 {
    let mut lim = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `lim` is a valid place for the answer.
    if unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut lim) } != 0 {
        return 0;
    }
    if lim.rlim_cur != lim.rlim_max {
        let raised = libc::rlimit { rlim_cur: lim.rlim_max, rlim_max: lim.rlim_max };
        // SAFETY: `raised` is a valid limit; raising the soft one to the hard one needs no privilege.
        if unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raised) } == 0 {
            lim = raised;
        }
    }
    if lim.rlim_cur == libc::RLIM_INFINITY { u64::MAX } else { lim.rlim_cur }
}

fn check(status: libc::c_int) -> io::Result<()> {
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Unixes without a version of their own: buffered reads, and hints that are always right to leave out.
#[cfg(not(any(target_os = "linux", target_os = "macos")))]
mod platform {
    use std::fs::File;
    use std::io;
    use std::path::Path;

    pub const RESERVE_FLAGS: libc::c_int = 0;

    pub fn open_direct(_path: &Path) -> io::Result<File> {
        Err(io::Error::from(io::ErrorKind::Unsupported))
    }

    pub fn direct_align(_file: &File) -> Option<(usize, usize)> {
        None
    }

    pub unsafe fn discard(start: *mut u8, bytes: usize) -> io::Result<()> {
        // SAFETY: the caller owns the range, and its contents are of no use any more.
        super::check(unsafe { libc::madvise(start.cast(), bytes, libc::MADV_FREE) })
    }

    pub unsafe fn reuse(_start: *mut u8, _bytes: usize) {}

    pub unsafe fn prefer_large_pages(_start: *mut u8, _bytes: usize) {}

    #[cfg(feature = "tools")]
    pub fn drop_cached(_file: &File) -> io::Result<()> {
        Err(io::Error::from(io::ErrorKind::Unsupported))
    }

    pub fn prefetch(_file: &File, _offset: u64, _bytes: u64) {}
}
