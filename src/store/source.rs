//! The model's files, opened for reading: directly where the file system lets it, else through the page cache, and which of
//! the two it is. A [`SourceFile`] is opened once and shared by all lanes; `reader` reads from it.
//!
//! `SourceFile::open` tries a direct open and one direct read at the alignment the system names, since some file systems
//! refuse only then. Later it names what went wrong with a read: a file that is not as it was at open is `Changed`, whatever
//! the system says.

use std::fs::{File, Metadata};
use std::io::{self, IoSliceMut};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::reader::{Bounce, MAX_BLOCK};
use super::sys;
use crate::error::{Error, Result, err};

/// How slices are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum IoMode {
    /// Past the page cache, so that it holds no second copy of what the slots hold.
    #[default]
    Direct,
    /// Through the page cache.
    Buffered,
}

impl IoMode {
    pub fn name(self) -> &'static str {
        match self {
            IoMode::Direct => "direct",
            IoMode::Buffered => "buffered",
        }
    }
}

/// Who makes the reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum ReadBy {
    /// One thread with an io_uring, where the system has one and lets us; else threads.
    #[default]
    Ring,
    /// A thread a lane.
    Threads,
}

impl ReadBy {
    pub fn name(self) -> &'static str {
        match self {
            ReadBy::Ring => "io_uring",
            ReadBy::Threads => "threads",
        }
    }
}

/// What the files' systems agreed to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IoReport {
    pub requested: IoMode,
    /// `Direct` only if all files are read so.
    pub in_effect: IoMode,
    /// Why it is not what was requested, with the file; empty if it is.
    pub reason: String,
    /// Bytes: the largest alignment of memory that direct reads need; 1 if there are none.
    pub mem_align: usize,
    /// Bytes: the same for offsets and lengths.
    pub offset_align: usize,
    /// Bytes of all experts that direct reads bring straight into slots, but for what does not fill a block at either end; and
    /// of those whose place in the file is out of step with their place in the slot: they are copied once more. Both 0 where
    /// nothing is read directly.
    pub straight_bytes: u64,
    pub bounced_bytes: u64,
    /// In effect; and why it is threads, empty if it is not.
    pub by: ReadBy,
    pub by_reason: String,
}

impl IoReport {
    /// Of all bytes of experts, the share that direct reads bring straight into slots: 0 where reads are buffered.
    pub fn straight_share(&self) -> f64 {
        self.straight_bytes as f64 / (self.straight_bytes + self.bounced_bytes).max(1) as f64
    }
}

/// Where bytes come from: a file, or a test that fails on purpose.
pub trait ReadAt: Send + Sync {
    /// Fills the buffers in turn from `offset`, as `preadv` does: the count may be short, 0 is the end.
    fn read_at(&self, bufs: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize>;
    /// Bytes of the file now.
    fn len(&self) -> io::Result<u64>;
    fn is_empty(&self) -> io::Result<bool> {
        self.len().map(|n| n == 0)
    }
    /// What tells whether somebody has written to the file.
    fn stamp(&self) -> io::Result<Stamp> {
        Ok(Stamp { len: self.len()?, written: None })
    }
    /// The open file, if reads may be made of it without `read_at`: by an io_uring. None: only `read_at` reads.
    fn file(&self) -> Option<&File> {
        None
    }
    /// What a read of `file` at this offset came to. A test may say something else.
    fn completed(&self, _offset: u64, read: io::Result<usize>) -> io::Result<usize> {
        read
    }
    /// A hint that the range will be wanted in the page cache. Returns at once.
    fn prefetch(&self, _offset: u64, _bytes: u64) {}
}

impl ReadAt for File {
    fn read_at(&self, bufs: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize> {
        match bufs {
            [one] => FileExt::read_at(self, one, offset),
            many => sys::read_vectored_at(self, many, offset),
        }
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn file(&self) -> Option<&File> {
        Some(self)
    }

    fn stamp(&self) -> io::Result<Stamp> {
        let meta = self.metadata()?;
        Ok(Stamp { len: meta.len(), written: Some((meta.mtime(), meta.mtime_nsec())) })
    }

    fn prefetch(&self, offset: u64, bytes: u64) {
        sys::prefetch(self, offset, bytes);
    }
}

/// A file's length and time of the last write (seconds and nanoseconds; None where the source does not know).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    pub len: u64,
    pub written: Option<(i64, i64)>,
}

/// Device, number on it, seconds and nanoseconds of the last write.
pub(super) type Identity = (u64, u64, i64, i64);

fn identity(m: &Metadata) -> Identity {
    (m.dev(), m.ino(), m.mtime(), m.mtime_nsec())
}

/// One model file, open for reading.
pub(super) struct SourceFile {
    pub path: PathBuf,
    /// At open; every later difference is a change.
    pub len: u64,
    /// Which file this name was at open, and when it had been written to.
    pub identity: Identity,
    /// The same of the open file itself, whatever its name stands for later.
    pub stamp: Stamp,
    pub source: Box<dyn ReadAt>,
    pub mode: IoMode,
    /// Why `mode` is not what was asked for.
    pub reason: String,
    pub mem_align: usize,
    pub offset_align: usize,
}

impl SourceFile {
    /// Opens the file, which must have `len` bytes. `wrap` may put something between the store and the file.
    pub fn open(
        path: &Path,
        len: u64,
        mode: IoMode,
        wrap: impl FnOnce(Box<dyn ReadAt>) -> Box<dyn ReadAt>,
    ) -> Result<SourceFile> {
        let mut reason = String::new();
        let mut direct = None;
        if mode == IoMode::Direct {
            match open_probed(path) {
                Ok(found) => direct = Some(found),
                Err(why) => reason = format!("{}: {why}", path.display()),
            }
        }
        let (file, mode, (mem_align, offset_align)) = match direct {
            Some((file, align)) => (file, IoMode::Direct, align),
            None => {
                let file = File::open(path).map_err(|e| err!(Io, "cannot open {}: {e}", path.display()))?;
                (file, IoMode::Buffered, (1, 1))
            }
        };
        let meta = file.metadata().map_err(|e| err!(Io, "cannot ask for the length of {}: {e}", path.display()))?;
        let found = meta.len();
        if found != len {
            return Err(err!(Changed, "{} has {found} bytes; it had {len} when its header was read", path.display()));
        }
        let (source, identity) = (wrap(Box::new(file)), identity(&meta));
        let stamp = source.stamp().map_err(|e| err!(Io, "cannot ask when {} was written to: {e}", path.display()))?;
        Ok(SourceFile { path: path.to_owned(), len, identity, stamp, source, mode, reason, mem_align, offset_align })
    }

    /// Whether the file under this name is still the one that was opened, and nobody has written to it.
    pub fn check(&self) -> Result<()> {
        let here = self.path.display();
        let now = std::fs::metadata(&self.path).map_err(|e| err!(Changed, "{here} is not there any more: {e}"))?;
        if now.len() != self.len {
            return Err(err!(Changed, "{here} had {} bytes at open, now {}", self.len, now.len()));
        }
        if identity(&now) != self.identity {
            let (then, now) = (self.identity, identity(&now));
            return Err(err!(
                Changed,
                "{here} was replaced or written to: (device, inode, mtime) {then:?}, now {now:?}"
            ));
        }
        Ok(())
    }

    /// Whether nobody has written to the open file since it was opened: asked after every slice, since bytes that came from two
    /// versions of a file must not be computed with. One system call.
    pub fn check_unwritten(&self) -> Result<()> {
        let here = self.path.display();
        let now = self.source.stamp().map_err(|e| err!(Io, "cannot ask when {here} was written to: {e}"))?;
        if now != self.stamp {
            let (then, now) = (self.stamp, now);
            return Err(err!(Changed, "{here} was written to: {then:?} at open, now {now:?}"));
        }
        Ok(())
    }

    pub fn prefetch(&self, offset: u64, bytes: u64) {
        self.source.prefetch(offset, bytes);
    }

    /// The error for a read at `offset` that brought `found` of `wanted` bytes. A file whose length is not what it was is
    /// named as changed, whatever the system said.
    pub fn failure(&self, offset: u64, wanted: usize, found: usize, cause: &str, system: Option<&io::Error>) -> Error {
        let here = self.path.display();
        let numbers = format!("{here}: offset {offset}, wanted {wanted} bytes, found {found}: {cause}");
        match self.source.len() {
            Ok(now) if now != self.len => {
                err!(Changed, "{numbers}; the file had {} bytes at open, now {now}", self.len)
            }
            _ if system.is_some_and(|e| e.raw_os_error() == Some(libc::ENOMEM)) => err!(Memory, "{numbers}"),
            _ => err!(Io, "{numbers}"),
        }
    }
}

/// The report for all files together; what is straight and what bounced, and who reads, is the store's to add.
pub(super) fn report(requested: IoMode, files: &[SourceFile]) -> IoReport {
    let fell_back = files.iter().find(|f| f.mode != requested);
    IoReport {
        requested,
        in_effect: fell_back.map_or(requested, |f| f.mode),
        reason: fell_back.map_or_else(String::new, |f| f.reason.clone()),
        mem_align: files.iter().map(|f| f.mem_align).max().unwrap_or(1),
        offset_align: files.iter().map(|f| f.offset_align).max().unwrap_or(1),
        straight_bytes: 0,
        bounced_bytes: 0,
        by: ReadBy::Threads,
        by_reason: String::new(),
    }
}

/// Whether any file needs bounce buffers.
pub(super) fn needs_bounce(files: &[SourceFile]) -> bool {
    files.iter().any(|f| f.mode == IoMode::Direct)
}

/// Opens a file for direct reads and makes one, since some file systems refuse only then. Err says why not.
fn open_probed(path: &Path) -> Result<(File, (usize, usize)), String> {
    let file = sys::open_direct(path).map_err(|e| format!("direct open refused: {e}"))?;
    let asked = sys::direct_align(&file).map(|(mem, offset)| (mem.max(1), offset));
    let mut why = String::new();
    for (mem, block) in asked.into_iter().chain([(4096, 4096)]) {
        if block > MAX_BLOCK || mem > MAX_BLOCK {
            why = format!("direct reads need blocks of {block} bytes at multiples of {mem}, more than {MAX_BLOCK}");
            continue;
        }
        let mut buf = Bounce::new(2 * MAX_BLOCK).map_err(|e| e.detail)?;
        // at the smallest multiple of `mem`, so that an alignment promised too small shows here
        match FileExt::read_at(&file, &mut buf.bytes()[mem..mem + block], 0) {
            Ok(_) => return Ok((file, (mem, block))),
            Err(e) => why = format!("direct read of {block} bytes refused: {e}"),
        }
    }
    Err(why)
}
