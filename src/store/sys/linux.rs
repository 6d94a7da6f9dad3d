//! Linux: O_DIRECT, its alignment by statx, MADV_DONTNEED.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The whole arena is reserved at once; only slots that are filled count.
pub const RESERVE_FLAGS: libc::c_int = libc::MAP_NORESERVE;

/// Opens a file for reads that bypass the page cache; an error where the file system refuses.
pub fn open_direct(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)
}

/// The alignment in bytes that direct reads of this file need, of (memory, offset and length), as the system says;
/// None where it does not say.
pub fn direct_align(file: &File) -> Option<(usize, usize)> {
    let mut st = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the descriptor is open, the path is the empty C string, and `st` has room for the answer.
    let status = unsafe {
        libc::statx(file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN, st.as_mut_ptr())
    };
    if status != 0 {
        return None;
    }
    // SAFETY: all of it was zeroed, and every bit pattern is a statx.
    let st = unsafe { st.assume_init() };
    if st.stx_mask & libc::STATX_DIOALIGN == 0 {
        return None;
    }
    let (mem, offset) = (st.stx_dio_mem_align as usize, st.stx_dio_offset_align as usize);
    (mem.is_power_of_two() && offset.is_power_of_two()).then_some((mem, offset))
}

/// Gives the pages of a range back; they read as zeros afterwards.
///
/// # Safety
/// The range is page-aligned at both ends, the caller's own anonymous memory, and its contents are of no use any more.
pub unsafe fn discard(start: *mut u8, bytes: usize) -> io::Result<()> {
    // SAFETY: as the caller says. Without NOHUGEPAGE the system may fill the gap again, to make one large page of it and
    // its neighbours; a kernel that knows no large pages refuses that advice and needs none.
    unsafe {
        libc::madvise(start.cast(), bytes, libc::MADV_NOHUGEPAGE);
        super::check(libc::madvise(start.cast(), bytes, libc::MADV_DONTNEED))
    }
}

/// Undoes what `discard` asked for: large pages may fill the range again.
///
/// # Safety
/// As for `discard`, but that the contents stay.
pub unsafe fn reuse(start: *mut u8, bytes: usize) {
    // SAFETY: as the caller says.
    unsafe { prefer_large_pages(start, bytes) }
}

/// Lets the system fill a reservation with large pages, 2 MiB on most machines: a direct read of a slice then reaches the drive as one
/// or two pieces of memory, not as one for each 4 KiB, and comes sooner (bench/README.md).
///
/// # Safety
/// The range is page-aligned at its start, and the caller's own anonymous memory.
pub unsafe fn prefer_large_pages(start: *mut u8, bytes: usize) {
    // SAFETY: as the caller says; the advice changes no contents, and a refusal costs only speed.
    unsafe { libc::madvise(start.cast(), bytes, libc::MADV_HUGEPAGE) };
}

/// Writes what is still to be written of the file, and asks for its pages to leave the page cache. Pages that are mapped and in
/// use may stay.
#[cfg(feature = "tools")]
pub fn drop_cached(file: &File) -> io::Result<()> {
    file.sync_all()?;
    // SAFETY: the descriptor is open; the advice changes no contents.
    match unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) } {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// Asks for a range of the file to be read into the page cache; returns at once. A refusal costs only speed.
pub fn prefetch(_file: &File, _offset: u64, _bytes: u64) {
    // MADV_WILLNEED on the mapping, which the caller has given, starts the same reads.
}
