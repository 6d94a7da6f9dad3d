//! Reading slices: positioned reads that bypass the page cache where the file system lets them, and plain ones where not.
//!
//! A [`Transfer`] is one read of a [`SourceFile`] under way: it says which call comes next and takes what it came to. A [`Reader`]
//! makes the calls one after the other, `ring` many at a time. A direct read moves whole blocks of the drive to aligned memory, so a
//! slice is taken in one of two ways:
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
use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::source::{IoMode, SourceFile};
use crate::error::{Result, err};

/// Blocks larger than this are read buffered: the smallest bounce buffer holds two.
pub(super) const MAX_BLOCK: usize = 32 << 10;
/// One system call reads no more than this (the systems' own limit is a little under 2 GiB).
const MAX_CALL: usize = 1 << 30;
/// Reads in a row that bring nothing new (interrupted, or cut within a block) before the slice is given up.
const MAX_STALLS: u32 = 64;

/// Sums over all threads. Statistics only: no order between them is implied.
#[derive(Default)]
pub(super) struct ReadCounters {
    pub wanted_bytes: AtomicU64,
    pub device_bytes: AtomicU64,
    pub reads: AtomicU64,
    pub bounce_copies: AtomicU64,
    pub failures: AtomicU64,
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

    pub fn bytes(&mut self) -> &mut [u8] {
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

/// A read of `dest.len()` bytes under way: which call is to be made next, and what the last one came to. Who makes the calls is not its
/// business: [`Reader`] for a thread that waits for each, `ring` for an io_uring.
pub(super) struct Transfer<'a> {
    file: &'a SourceFile,
    offset: u64,
    /// On an error it holds a mixture: it counts as not read.
    dest: &'a mut [u8],
    done: usize,
    stalls: u32,
}

/// Where the bytes of one call go. `before` bytes of the first block are not wanted; then `head` bytes of it, `middle` whole blocks that
/// go straight into `dest`, and what the last block has of it.
#[derive(Clone, Copy)]
struct Parts {
    straight: bool,
    start: u64,
    before: usize,
    head: usize,
    middle: usize,
    tail: usize,
    /// Bytes that the call asks for.
    asked: usize,
}

/// One call to the system: read from `offset` on into these buffers in turn.
pub(super) struct Call<'b> {
    pub offset: u64,
    bufs: [IoSliceMut<'b>; 3],
    used: Range<usize>,
}

impl<'b> Call<'b> {
    pub fn bufs(&mut self) -> &mut [IoSliceMut<'b>] {
        &mut self.bufs[self.used.clone()]
    }
}

impl<'a> Transfer<'a> {
    /// Of `dest.len()` bytes, at least one, at `offset`.
    pub fn new(file: &'a SourceFile, offset: u64, dest: &'a mut [u8], counters: &ReadCounters) -> Transfer<'a> {
        counters.wanted_bytes.fetch_add(dest.len() as u64, Relaxed);
        Transfer { file, offset, dest, done: 0, stalls: 0 }
    }

    pub fn file(&self) -> &'a SourceFile {
        self.file
    }

    /// The call that is to be made now. Direct reads need `bounce`, the same one until the transfer has ended.
    pub fn call<'b>(&'b mut self, bounce: &'b mut Bounce, counters: &ReadCounters) -> Call<'b> {
        counters.reads.fetch_add(1, Relaxed);
        let p = self.parts(bounce.len());
        let (rest, bounce) = (&mut self.dest[self.done..], bounce.bytes());
        let empty = || IoSliceMut::new(&mut []);
        if !p.straight {
            return Call {
                offset: p.start,
                bufs: [IoSliceMut::new(&mut bounce[..p.asked]), empty(), empty()],
                used: 0..1,
            };
        }
        let middle = IoSliceMut::new(&mut rest[p.head..p.head + p.middle]);
        let block = self.file.offset_align;
        let (mut bufs, mut used) = ([empty(), middle, empty()], 1..2);
        if p.head > 0 || p.tail > 0 {
            let (head_block, tail_block) = bounce.split_at_mut(block);
            if p.head > 0 {
                (bufs[0], used.start) = (IoSliceMut::new(head_block), 0);
            }
            if p.tail > 0 {
                (bufs[2], used.end) = (IoSliceMut::new(&mut tail_block[..block]), 3);
            }
        }
        Call { offset: p.start, bufs, used }
    }

    /// What that call came to. None: another is to be made.
    pub fn came(
        &mut self,
        outcome: io::Result<usize>,
        bounce: &mut Bounce,
        counters: &ReadCounters,
    ) -> Option<Result<()>> {
        let wanted = self.dest.len();
        match outcome {
            Ok(0) => return self.failure("the file ends there", None),
            Ok(brought) => {
                let p = self.parts(bounce.len());
                // a source that claims more than it was asked for must not make us leave the slice
                let brought = brought.min(p.asked);
                counters.device_bytes.fetch_add(brought as u64, Relaxed);
                let landed = brought.saturating_sub(p.before).min(wanted - self.done);
                self.keep(&p, landed, bounce.bytes(), counters);
                self.done += landed;
                self.stalls = if landed == 0 { self.stalls + 1 } else { 0 };
            }
            Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => self.stalls += 1,
            Err(e) => return self.failure(&e.to_string(), Some(&e)),
        }
        if self.done == wanted {
            return Some(self.file.check_unwritten());
        }
        if self.stalls > MAX_STALLS {
            return self.failure("reads come back cut or interrupted again and again", None);
        }
        None
    }

    fn failure(&self, cause: &str, system: Option<&io::Error>) -> Option<Result<()>> {
        Some(Err(self.file.failure(self.offset, self.dest.len(), self.done, cause, system)))
    }

    fn parts(&self, bounce_len: usize) -> Parts {
        let (offset, rest) = (self.offset + self.done as u64, &self.dest[self.done..]);
        if self.file.mode == IoMode::Buffered {
            let middle = rest.len().min(MAX_CALL);
            return Parts { straight: true, start: offset, before: 0, head: 0, middle, tail: 0, asked: middle };
        }
        let block = self.file.offset_align;
        let before = (offset % block as u64) as usize;
        let start = offset - before as u64;
        let head = if before == 0 { 0 } else { (block - before).min(rest.len()) };
        let middle = ((rest.len() - head) / block * block).min(MAX_CALL);
        if middle > 0 && (rest.as_ptr() as usize + head) % self.file.mem_align == 0 {
            let tail = (rest.len() - head - middle).min(block);
            let asked = middle + block * (usize::from(head > 0) + usize::from(tail > 0));
            return Parts { straight: true, start, before, head, middle, tail, asked };
        }
        let whole = (before + rest.len()).div_ceil(block) * block;
        Parts { straight: false, start, before, head, middle, tail: 0, asked: whole.min(bounce_len / block * block) }
    }

    /// Copies what `landed` bytes have in the bounce buffer to where they belong.
    fn keep(&mut self, p: &Parts, landed: usize, bounce: &[u8], counters: &ReadCounters) {
        let dest = &mut self.dest[self.done..][..landed];
        if !p.straight {
            dest.copy_from_slice(&bounce[p.before..p.before + landed]);
            counters.bounce_copies.fetch_add(1, Relaxed);
            return;
        }
        let head = landed.min(p.head);
        let tail = landed.saturating_sub(p.head + p.middle);
        if head > 0 {
            dest[..head].copy_from_slice(&bounce[p.before..p.before + head]);
        }
        if tail > 0 {
            dest[landed - tail..].copy_from_slice(&bounce[self.file.offset_align..][..tail]);
        }
        counters.bounce_copies.fetch_add(u64::from(head > 0) + u64::from(tail > 0), Relaxed);
    }
}

/// What one thread needs to read slices and to wait for each. It holds no state between reads: after a failure the next read is as good.
pub(super) struct Reader {
    bounce: Bounce,
}

impl Reader {
    pub fn new(bounce: Bounce) -> Reader {
        Reader { bounce }
    }

    /// Makes all of a transfer's calls.
    pub fn read(&mut self, mut transfer: Transfer, counters: &ReadCounters) -> Result<()> {
        loop {
            let source = &transfer.file().source;
            let mut call = transfer.call(&mut self.bounce, counters);
            let at = call.offset;
            let outcome = source.read_at(call.bufs(), at);
            if let Some(ended) = transfer.came(outcome, &mut self.bounce, counters) {
                return ended;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::store::source::ReadAt;
    use crate::store::source::Stamp;
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
            stamp: Stamp { len: LEN as u64, written: None },
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
        reader.read(Transfer::new(file, offset as u64, &mut room.bytes()[shift..shift + len], &counters), &counters)?;
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
