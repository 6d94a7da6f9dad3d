//! macOS: F_NOCACHE, F_RDADVISE, MADV_FREE_REUSABLE. Memory pages are 16 KiB on Apple silicon.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Anonymous memory is not reserved ahead here, whatever the flags.
pub const RESERVE_FLAGS: libc::c_int = libc::MAP_NORESERVE;

/// Opens a file for reads that bypass the page cache; an error where the file system refuses.
pub fn open_direct(path: &Path) -> io::Result<File> {
    let file = File::open(path)?;
    // SAFETY: the descriptor is open; both commands take an int.
    unsafe {
        super::check(libc::fcntl(file.as_raw_fd(), libc::F_NOCACHE, 1).min(0))?;
        // Experts are read whole and at random: what lies behind one is not wanted next.
        super::check(libc::fcntl(file.as_raw_fd(), libc::F_RDAHEAD, 0).min(0))?;
    }
    Ok(file)
}

/// The alignment in bytes for direct reads, of (memory, offset and length): the file system's block. The system takes any, but
/// leaves the direct path for those that are not whole blocks.
pub fn direct_align(file: &File) -> Option<(usize, usize)> {
    let block = file.metadata().ok()?.blksize() as usize;
    block.is_power_of_two().then_some((block.max(4096), block.max(4096)))
}

/// Gives the pages of a range back; what they read as afterwards is not defined.
///
/// # Safety
/// The range is page-aligned at both ends, the caller's own anonymous memory, and its contents are of no use any more.
pub unsafe fn discard(start: *mut u8, bytes: usize) -> io::Result<()> {
    // SAFETY: as the caller says. REUSABLE also takes the pages off this process's account at once, which FREE does not.
    unsafe {
        super::check(libc::madvise(start.cast(), bytes, libc::MADV_FREE_REUSABLE))
            .or_else(|_| super::check(libc::madvise(start.cast(), bytes, libc::MADV_FREE)))
    }
}

/// Tells the system that a discarded range is used again, so that it is on this process's account.
///
/// # Safety
/// As for `discard`.
pub unsafe fn reuse(start: *mut u8, bytes: usize) {
    // SAFETY: as the caller says. A refusal concerns the accounting only.
    unsafe { libc::madvise(start.cast(), bytes, libc::MADV_FREE_REUSE) };
}

/// Apple silicon has pages of one size.
///
/// # Safety
/// None is needed: nothing happens.
pub unsafe fn prefer_large_pages(_start: *mut u8, _bytes: usize) {}

/// Pages leave the page cache when the system wants, not when asked: refused, so that nobody trusts it.
#[cfg(feature = "tools")]
pub fn drop_cached(_file: &File) -> io::Result<()> {
    Err(io::Error::from(io::ErrorKind::Unsupported))
}

/// Asks for a range of the file to be read into the page cache; returns at once. A refusal costs only speed.
pub fn prefetch(file: &File, offset: u64, bytes: u64) {
    let Ok(ra_offset) = libc::off_t::try_from(offset) else { return };
    let advice = libc::radvisory { ra_offset, ra_count: libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX) };
    // SAFETY: the descriptor is open, and the command reads one radvisory.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_RDADVISE, &advice) };
}
