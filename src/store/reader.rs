//! Reading slices: positioned reads that bypass the page cache where the file system lets them, and plain ones where not.
//!
//! A [`SourceFile`] is one model file, opened once and shared by all lanes. A [`Reader`] is what one thread needs to read
//! from it: a bounce buffer. A direct read moves whole blocks of the drive to aligned memory, so a slice is taken in one
//! of two ways:
//!
//! ```text
//! file   ….[======|==================|===]….       | = block borders, [ ] = the slice
//! straight   |  a  |        b         |  c  |         one call: b into the slot, a and c into the bounce buffer,
//!                                                     from which the slice's part of them is copied
//! bounced    |              a               |         where b would land on an unaligned address: all of it through the
//!                                                     bounce buffer, in pieces of its size
//! ```
//!
//! A read that comes back short is continued. One that fails is an error with the file, the offset and both lengths.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fs::{File, Metadata};
use std::io::{self, IoSliceMut};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::sys;
use crate::error::{Error, Result, err};

/// Blocks larger than this are read buffered: the smallest bounce buffer holds two.
const MAX_BLOCK: usize = 32 << 10;
/// One system call reads no more than this (the systems' own limit is a little under 2 GiB).
const MAX_CALL: usize = 1 << 30;
/// Reads in a row that bring nothing new (interrupted, or cut within a block) before the slice is given up.
const MAX_STALLS: u32 = 64;

/// How slices are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum IoMode {
    /// Past the page cache, so that it holds no second copy of what the slots hold.
    #[default]
    Direct,
    /// Through the page cache.
    Buffered,
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

    fn prefetch(&self, offset: u64, bytes: u64) {
        sys::prefetch(self, offset, bytes);
    }
}

/// Sums over all threads. Statistics only: no order between them is implied.
#[derive(Default)]
pub(super) struct ReadCounters {
    pub wanted_bytes: AtomicU64,
    pub device_bytes: AtomicU64,
    pub reads: AtomicU64,
    pub bounce_copies: AtomicU64,
    pub failures: AtomicU64,
}

/// Device, number on it, seconds and nanoseconds of the last write.
type Identity = (u64, u64, i64, i64);

fn identity(m: &Metadata) -> Identity {
    (m.dev(), m.ino(), m.mtime(), m.mtime_nsec())
}

/// One model file, open for reading.
pub(super) struct SourceFile {
    path: PathBuf,
    /// At open; every later difference is a change.
    len: u64,
    /// Which file this name was at open, and when it had been written to.
    identity: Identity,
    source: Box<dyn ReadAt>,
    mode: IoMode,
    /// Why `mode` is not what was asked for.
    reason: String,
    mem_align: usize,
    offset_align: usize,
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
        Ok(SourceFile { path: path.to_owned(), len, identity, source, mode, reason, mem_align, offset_align })
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

    pub fn prefetch(&self, offset: u64, bytes: u64) {
        self.source.prefetch(offset, bytes);
    }

    /// The error for a read at `offset` that brought `found` of `wanted` bytes. A file whose length is not what it was is
    /// named as changed, whatever the system said.
    fn failure(&self, offset: u64, wanted: usize, found: usize, cause: &str, system: Option<&io::Error>) -> Error {
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

/// The report for all files together.
pub(super) fn report(requested: IoMode, files: &[SourceFile]) -> IoReport {
    let fell_back = files.iter().find(|f| f.mode != requested);
    IoReport {
        requested,
        in_effect: fell_back.map_or(requested, |f| f.mode),
        reason: fell_back.map_or_else(String::new, |f| f.reason.clone()),
        mem_align: files.iter().map(|f| f.mem_align).max().unwrap_or(1),
        offset_align: files.iter().map(|f| f.offset_align).max().unwrap_or(1),
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

/// Memory aligned for any direct read, of a size fixed when it is made.
pub(super) struct Bounce {
    start: NonNull<u8>,
    layout: Option<Layout>,
}

// SAFETY: it owns its memory, as a Box<[u8]> does.
unsafe impl Send for Bounce {}

impl Bounce {
    /// The smallest size that serves every direct read.
    pub const MIN_BYTES: usize = 2 * MAX_BLOCK;

    pub fn new(bytes: usize) -> Result<Bounce> {
        if bytes == 0 {
            return Ok(Bounce { start: NonNull::dangling(), layout: None });
        }
        let layout = Layout::from_size_align(bytes, MAX_BLOCK)
            .map_err(|_| err!(Memory, "a bounce buffer of {bytes} bytes is impossible"))?;
        // SAFETY: the layout's size is not 0.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })
            .ok_or_else(|| err!(Memory, "no room for a bounce buffer of {bytes} bytes"))?;
        Ok(Bounce { start, layout: Some(layout) })
    }

    pub fn len(&self) -> usize {
        self.layout.map_or(0, |l| l.size())
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: `len` bytes from `start` are ours, were written as zeros, and are borrowed as long as `self`.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len()) }
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        if let Some(layout) = self.layout {
            // SAFETY: allocated in `new` with this layout.
            unsafe { dealloc(self.start.as_ptr(), layout) }
        }
    }
}

/// What one thread needs to read slices. It holds no state between reads: after a failure the next read is as good.
pub(super) struct Reader {
    bounce: Bounce,
}

impl Reader {
    pub fn new(bounce: Bounce) -> Reader {
        Reader { bounce }
    }

    /// Reads `dest.len()` bytes at `offset`. On an error `dest` holds a mixture: it counts as not read.
    pub fn read(&mut self, file: &SourceFile, offset: u64, dest: &mut [u8], counters: &ReadCounters) -> Result<()> {
        counters.wanted_bytes.fetch_add(dest.len() as u64, Relaxed);
        let wanted = dest.len();
        let mut done = 0;
        let mut stalls = 0;
        while done < wanted {
            let at = offset + done as u64;
            counters.reads.fetch_add(1, Relaxed);
            let step = match file.mode {
                IoMode::Buffered => {
                    let rest = &mut dest[done..];
                    let upto = rest.len().min(MAX_CALL);
                    file.source.read_at(&mut [IoSliceMut::new(&mut rest[..upto])], at).map(|n| (n, n))
                }
                IoMode::Direct => self.read_direct(file, at, &mut dest[done..], counters),
            };
            match step {
                Ok((_, 0)) => return Err(file.failure(offset, wanted, done, "the file ends there", None)),
                Ok((landed, brought)) => {
                    counters.device_bytes.fetch_add(brought as u64, Relaxed);
                    // a source that claims more than it was asked for must not make us leave the slice
                    done += landed.min(wanted - done);
                    stalls = if landed == 0 { stalls + 1 } else { 0 };
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => stalls += 1,
                Err(e) => return Err(file.failure(offset, wanted, done, &e.to_string(), Some(&e))),
            }
            if stalls > MAX_STALLS {
                return Err(file.failure(
                    offset,
                    wanted,
                    done,
                    "reads come back cut or interrupted again and again",
                    None,
                ));
            }
        }
        Ok(())
    }

    /// One direct read towards `dest`, whose bytes lie at `offset`. Returns how many of them are there now, from the
    /// first on, and how many bytes the drive brought.
    fn read_direct(
        &mut self,
        file: &SourceFile,
        offset: u64,
        dest: &mut [u8],
        counters: &ReadCounters,
    ) -> io::Result<(usize, usize)> {
        let block = file.offset_align;
        // bytes before the slice in its first block
        let before = (offset % block as u64) as usize;
        let start = offset - before as u64;
        let head = if before == 0 { 0 } else { (block - before).min(dest.len()) };
        let middle = ((dest.len() - head) / block * block).min(MAX_CALL);
        let straight = middle > 0 && (dest.as_ptr() as usize + head) % file.mem_align == 0;
        let bounce = self.bounce.bytes();

        if !straight {
            let end = (before + dest.len()).div_ceil(block) * block;
            let size = end.min(bounce.len() / block * block);
            let brought = file.source.read_at(&mut [IoSliceMut::new(&mut bounce[..size])], start)?.min(size);
            let landed = brought.saturating_sub(before).min(dest.len());
            dest[..landed].copy_from_slice(&bounce[before..before + landed]);
            counters.bounce_copies.fetch_add(1, Relaxed);
            return Ok((landed, brought));
        }

        let (head_dest, rest) = dest.split_at_mut(head);
        let (middle_dest, tail_dest) = rest.split_at_mut(middle);
        let (head_block, tail_block) = bounce.split_at_mut(block);
        let tail = tail_dest.len().min(block);
        let from = usize::from(head == 0);
        let to = if tail == 0 { 2 } else { 3 };
        let mut bufs =
            [IoSliceMut::new(head_block), IoSliceMut::new(middle_dest), IoSliceMut::new(&mut tail_block[..block])];
        let asked: usize = bufs[from..to].iter().map(|b| b.len()).sum();
        let brought = file.source.read_at(&mut bufs[from..to], start)?.min(asked);

        let landed = brought.saturating_sub(before).min(head + middle + tail);
        let head_landed = landed.min(head);
        let tail_landed = landed.saturating_sub(head + middle);
        head_dest[..head_landed].copy_from_slice(&head_block[before..before + head_landed]);
        tail_dest[..tail_landed].copy_from_slice(&tail_block[..tail_landed]);
        counters.bounce_copies.fetch_add(u64::from(head_landed > 0) + u64::from(tail_landed > 0), Relaxed);
        Ok((landed, brought))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use std::sync::Mutex;

    /// A file in memory with direct reads' rules: offsets, lengths and addresses are checked, and a script says what the
    /// next reads do instead.
    struct Fake {
        data: Vec<u8>,
        mem: usize,
        block: usize,
        script: Mutex<Vec<Fault>>,
        len_now: Mutex<Option<u64>>,
    }

    enum Fault {
        Errno(i32),
        Short(usize),
    }

    impl ReadAt for Fake {
        fn read_at(&self, bufs: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize> {
            let aligned = offset as usize % self.block == 0
                && bufs.iter().all(|b| b.len() % self.block == 0 && b.as_ptr() as usize % self.mem == 0);
            if !aligned {
                return Err(io::Error::from_raw_os_error(libc::EINVAL));
            }
            let limit = match self.script.lock().unwrap().pop() {
                Some(Fault::Errno(e)) => return Err(io::Error::from_raw_os_error(e)),
                Some(Fault::Short(n)) => n,
                None => usize::MAX,
            };
            let mut rest = &self.data[(offset as usize).min(self.data.len())..];
            rest = &rest[..rest.len().min(limit)];
            let mut n = 0;
            for b in bufs {
                let part = b.len().min(rest.len());
                b[..part].copy_from_slice(&rest[..part]);
                rest = &rest[part..];
                n += part;
            }
            Ok(n)
        }
        fn len(&self) -> io::Result<u64> {
            Ok(self.len_now.lock().unwrap().unwrap_or(self.data.len() as u64))
        }
    }

    const LEN: usize = 10_007;

    fn file(mem: usize, block: usize, mut script: Vec<Fault>) -> SourceFile {
        script.reverse();
        let data = (0..LEN as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        SourceFile {
            path: "fake.gguf".into(),
            len: LEN as u64,
            identity: (0, 0, 0, 0),
            source: Box::new(Fake { data, mem, block, script: Mutex::new(script), len_now: Mutex::new(None) }),
            mode: if block == 1 { IoMode::Buffered } else { IoMode::Direct },
            reason: String::new(),
            mem_align: mem,
            offset_align: block,
        }
    }

    fn expected(offset: usize, len: usize) -> Vec<u8> {
        (offset as u32..(offset + len) as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
    }

    /// Reads into aligned memory at `shift`, and checks the slice and what lies around it.
    fn read(file: &SourceFile, reader: &mut Reader, offset: usize, len: usize, shift: usize) -> Result<ReadCounters> {
        let counters = ReadCounters::default();
        let mut room = Bounce::new(32 << 10).unwrap();
        room.bytes().fill(0xA5);
        reader.read(file, offset as u64, &mut room.bytes()[shift..shift + len], &counters)?;
        let room = room.bytes();
        assert!(room[shift..shift + len] == expected(offset, len), "offset {offset} len {len} shift {shift}");
        assert!(room[..shift].iter().chain(&room[shift + len..]).all(|&b| b == 0xA5));
        Ok(counters)
    }

    fn reader() -> Reader {
        // far below what slices need here, so that they take several pieces
        Reader::new(Bounce::new(2048).unwrap())
    }

    #[test]
    fn every_alignment_gives_the_files_bytes() {
        let mut reader = reader();
        for (mem, block) in [(1, 1), (4, 512), (512, 512), (1024, 1024)] {
            let file = file(mem, block, vec![]);
            for offset in [0, 1, 64, 511, 512, 513, 1024, 5000, LEN - 1025, LEN - 1] {
                for len in [1, 63, 511, 512, 513, 1024, 4096, 4097, LEN] {
                    for shift in [0, 4, 64, 448, 512, 1024] {
                        let len = len.min(LEN - offset);
                        read(&file, &mut reader, offset, len, shift).unwrap();
                    }
                }
            }
        }
    }

    #[test]
    fn a_slice_in_step_with_its_slot_is_one_read_and_two_small_copies() {
        let file = file(512, 512, vec![]);
        let c = read(&file, &mut reader(), 512 + 64, 8192, 64).unwrap();
        assert_eq!((c.reads.into_inner(), c.bounce_copies.into_inner()), (1, 2));
        assert_eq!((c.wanted_bytes.into_inner(), c.device_bytes.into_inner()), (8192, 8192 + 512));
        let c = read(&file, &mut reader(), 512, 8192, 0).unwrap();
        assert_eq!((c.reads.into_inner(), c.bounce_copies.into_inner()), (1, 0));
    }

    #[test]
    fn short_and_interrupted_reads_are_continued() {
        for (mem, block) in [(1, 1), (4, 512)] {
            for cut in [1, 511, 512, 700, 1024, 4000] {
                for shift in [0, 2] {
                    let faults =
                        vec![Fault::Short(cut), Fault::Errno(libc::EINTR), Fault::Short(cut), Fault::Short(cut)];
                    read(&file(mem, block, faults), &mut reader(), 100, 6000, shift).unwrap();
                }
            }
        }
    }

    #[test]
    fn failures_have_their_numbers_and_do_not_outlive_their_read() {
        let mut reader = reader();
        for (errno, kind) in [(libc::EIO, ErrorKind::Io), (libc::ENOMEM, ErrorKind::Memory)] {
            for block in [1, 512] {
                let file = file(1, block, vec![Fault::Short(512 + 100), Fault::Errno(errno)]);
                let e = read(&file, &mut reader, 100, 3000, 0).err().unwrap();
                assert_eq!(e.kind, kind);
                let found = if block == 1 { 612 } else { 512 };
                let numbers = format!("fake.gguf: offset 100, wanted 3000 bytes, found {found}");
                assert!(e.detail.contains(&numbers), "{e}");
                read(&file, &mut reader, 100, 200, 0).unwrap();
            }
        }
    }

    #[test]
    fn the_end_of_the_file_and_endless_cuts_are_errors() {
        for block in [1, 512] {
            let e = read(&file(1, block, vec![]), &mut reader(), LEN - 10, 11, 0).err().unwrap();
            assert_eq!(e.kind, ErrorKind::Io);
            assert!(e.detail.contains("wanted 11 bytes, found 10"), "{e}");
        }
        let cuts = (0..200).map(|_| Fault::Short(5)).collect();
        let e = read(&file(4, 512, cuts), &mut reader(), 100, 300, 0).err().unwrap();
        assert!(e.detail.contains("again and again"), "{e}");
    }

    #[test]
    fn a_file_of_another_length_is_named_as_changed() {
        let file = file(1, 1, vec![Fault::Errno(libc::EIO)]);
        let fake = Fake { data: vec![], mem: 1, block: 1, script: Mutex::new(vec![]), len_now: Mutex::new(Some(77)) };
        let file = SourceFile { source: Box::new(fake), ..file };
        let e = read(&file, &mut reader(), 100, 300, 0).err().unwrap();
        assert_eq!(e.kind, ErrorKind::Changed);
        assert!(e.detail.contains("now 77"), "{e}");
    }
}
