//! The one place where a file is mapped. Everything above it sees a byte slice.

use std::fs::File;
use std::io;

use memmap2::{Mmap, MmapOptions};

/// Maps a whole file for reading. Nothing is read ahead: a page is read when it is first touched, so that opening a
/// model larger than memory costs its header only.
pub(crate) fn map_file(file: &File) -> io::Result<Mmap> {
    // SAFETY: the mapping is private to this process and read only. The bytes can change under us only if someone
    // writes to the model's file while it is open; we treat every byte as untrusted, keep no references that depend on
    // its value, and `ModelFile::check_unchanged` reports such a change. A file that is cut while mapped raises
    // SIGBUS on access to the missing part, as with any mapped model.
    unsafe { MmapOptions::new().map(file) }
}
