//! Reading slices: positioned reads that bypass the page cache where the file system lets them, and plain ones where not.
//!
//! A [`Reader`] is what one thread needs to read from a [`SourceFile`]: a bounce buffer. A direct read moves whole blocks of
//! the drive to aligned memory, so a slice is taken in one of two ways:
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
        file.check_unwritten()
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
