//! Slices that are read in several parts: each part may fail, come late or be cut, and the slice is there when all of them are.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use hotset::ErrorKind;
use hotset::store::{ReadAt, Stamp, Store, StoreConfig};

use crate::model::{ALL, Model, THREADS, config, slice_of, until};

const CHUNK: u64 = 64 << 10;

/// A source that does something to the reads that touch one byte of the file, and sees how many are in flight.
struct Touchy {
    file: Box<dyn ReadAt>,
    plan: Arc<Plan>,
}

#[derive(Default)]
struct Plan {
    /// Offset in the file; 0: none.
    at: AtomicU64,
    errno: AtomicI64,
    /// So many of the reads fail; then they work.
    times: AtomicI64,
    /// They wait until it is false.
    hold: AtomicBool,
    /// Every third read, wherever it is, loses its second half.
    cut: AtomicBool,
    /// Every read waits until so many were in flight at once.
    meet: AtomicI64,
    reads: AtomicI64,
    in_flight: AtomicI64,
    most: AtomicI64,
}

impl Touchy {
    /// What becomes of a read of so many bytes.
    fn outcome(&self, offset: u64, asked: usize, read: impl FnOnce() -> io::Result<usize>) -> io::Result<usize> {
        let p = &self.plan;
        let touched = p.at.load(SeqCst) > 0 && (offset..offset + asked as u64).contains(&p.at.load(SeqCst));
        if touched && p.times.fetch_sub(1, SeqCst) > 0 {
            return Err(io::Error::from_raw_os_error(p.errno.load(SeqCst) as i32));
        }
        until(|| !(touched && p.hold.load(SeqCst)));
        let n = p.reads.fetch_add(1, SeqCst);
        let short = p.cut.load(SeqCst) && n % 3 == 0;
        read().map(|n| if short { n.div_ceil(2) } else { n })
    }
}

impl ReadAt for Touchy {
    fn read_at(&self, bufs: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize> {
        let p = &self.plan;
        let now = p.in_flight.fetch_add(1, SeqCst) + 1;
        p.most.fetch_max(now, SeqCst);
        until(|| p.most.load(SeqCst) >= p.meet.load(SeqCst));
        let asked = bufs.iter().map(|b| b.len()).sum();
        let outcome = self.outcome(offset, asked, || self.file.read_at(bufs, offset));
        p.in_flight.fetch_sub(1, SeqCst);
        outcome
    }

    fn file(&self) -> Option<&File> {
        self.file.file()
    }

    fn completed(&self, offset: u64, read: io::Result<usize>) -> io::Result<usize> {
        self.outcome(offset, *read.as_ref().unwrap_or(&0), || read)
    }

    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn stamp(&self) -> io::Result<Stamp> {
        self.file.stamp()
    }
}

fn touchy(m: &Model, config: StoreConfig) -> (Store, Arc<Plan>) {
    let plan = Arc::new(Plan::default());
    (m.open_with(config, |file| Touchy { file, plan: plan.clone() }), plan)
}

/// Slices of five and of three chunks, and a companion; another layer in the other file.
fn large() -> Model {
    Model::new(3, &[vec![(96, 300_001), (0, 3 * CHUNK - 4096), (0, 40)], vec![(5, 70_000)]], 99)
}

#[test]
#[cfg_attr(miri, ignore)]
fn one_failed_part_fails_its_slice_alone_and_not_for_long() {
    let m = large();
    let t = &m.table.layers[0].tensors[0];
    let slice = t.offset_bytes + t.slice_bytes;
    for how in ALL {
        let (store, plan) = touchy(&m, config(2, 3, how));
        for (place, errno, kind) in [
            (slice, libc::EIO, ErrorKind::Io),
            (slice + 150_000, libc::EIO, ErrorKind::Io),
            (slice + t.slice_bytes - 1, libc::ENOMEM, ErrorKind::Memory),
        ] {
            plan.at.store(place, SeqCst);
            plan.times.store(1, SeqCst);
            plan.errno.store(errno.into(), SeqCst);
            store.fetch(0, 1, 0).unwrap();
            store.wait(0, 0, Some(2)).unwrap();
            store.wait(0, 0, Some(1)).unwrap();
            assert_eq!(slice_of(&store, 0, 0, 1), m.expected(0, 1, 1));
            let e = store.wait(0, 0, Some(0)).unwrap_err();
            assert_eq!(e.kind, kind);
            for part in ["layer 0 expert 1 slot 0 slice 0 (blk.0.part0) read ", " of 5: ", "offset ", "found 0"] {
                assert!(e.detail.contains(part), "{part}: {e}");
            }
            assert_eq!(store.wait(0, 0, None).unwrap_err().detail, e.detail);
            assert_eq!((store.take_failed(0), store.expert_in(0, 0)), (vec![0], None));
            // the lanes serve what comes next, into the same slot
            store.fetch(0, 1, 0).unwrap();
            store.wait(0, 0, None).unwrap();
            assert!(m.holds(&store, 0, 0, 1));
        }
        assert_eq!(store.counters().failures, 3);
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn interrupted_and_cut_parts_are_continued() {
    let m = large();
    for how in ALL {
        let (store, plan) = touchy(&m, config(3, 4, how));
        plan.cut.store(true, SeqCst);
        let t = &m.table.layers[0].tensors[0];
        plan.at.store(t.offset_bytes + 200_000, SeqCst);
        plan.errno.store(libc::EINTR.into(), SeqCst);
        plan.times.store(20, SeqCst);
        for expert in 0..3 {
            store.fetch(0, expert, expert).unwrap();
            store.fetch(1, expert, expert).unwrap();
        }
        for expert in 0..3 {
            store.wait(0, expert, None).unwrap();
            store.wait(1, expert, None).unwrap();
            assert!(m.holds(&store, 0, expert, expert) && m.holds(&store, 1, expert, expert), "{how:?}");
        }
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn a_slow_part_holds_up_its_own_slice() {
    let m = large();
    let (store, plan) = touchy(&m, StoreConfig { timeout: Duration::from_millis(60), ..config(1, 4, THREADS) });
    // in the last slice but one, so that the others need not queue behind it
    let t = &m.table.layers[0].tensors[1];
    plan.at.store(t.offset_bytes + 2 * t.slice_bytes + CHUNK, SeqCst);
    plan.hold.store(true, SeqCst);
    store.fetch(0, 2, 0).unwrap();
    until(|| store.is_ready(0, 0, Some(0)) && store.is_ready(0, 0, Some(2)));
    assert_eq!(slice_of(&store, 0, 0, 0), m.expected(0, 0, 2));
    let e = store.wait(0, 0, Some(1)).unwrap_err();
    assert_eq!(e.kind, ErrorKind::Timeout);
    assert_eq!(store.fetch(0, 1, 0).unwrap_err().kind, ErrorKind::Timeout);
    plan.hold.store(false, SeqCst);
    until(|| store.is_ready(0, 0, None));
    assert!(m.holds(&store, 0, 0, 2));
}

#[test]
#[cfg_attr(miri, ignore)]
fn one_miss_keeps_all_lanes_busy() {
    let m = Model::new(3, &[vec![(96, 300_001)]], 0);
    for (chunk_bytes, most) in [(0, 1), (CHUNK, 4)] {
        let (store, plan) = touchy(&m, StoreConfig { chunk_bytes, ..config(1, 4, THREADS) });
        plan.meet.store(most, SeqCst);
        store.fetch(0, 2, 0).unwrap();
        store.wait(0, 0, None).unwrap();
        assert!(m.holds(&store, 0, 0, 2));
        assert_eq!(plan.most.load(SeqCst), most);
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn a_file_changed_between_two_parts_is_changed() {
    let m = large();
    let (store, plan) = touchy(&m, config(1, 1, THREADS));
    let t = &m.table.layers[0].tensors[0];
    plan.at.store(t.offset_bytes + 150_000, SeqCst);
    plan.hold.store(true, SeqCst);
    // times of writing have the grain of the kernel's clock
    std::thread::sleep(Duration::from_millis(20));
    store.fetch(0, 0, 0).unwrap();
    until(|| plan.reads.load(SeqCst) == 2);
    // the first parts are there; now others are written under them
    let file = File::options().write(true).open(&m.files[0]).unwrap();
    file.write_all_at(&m.data[0][..100], 0).unwrap();
    plan.hold.store(false, SeqCst);
    for slice in [Some(0), None] {
        let e = store.wait(0, 0, slice).unwrap_err();
        assert!(e.kind == ErrorKind::Changed && e.detail.contains("was written to"), "{e}");
    }
    file.set_len(m.lens[0] - 1_000_000).unwrap();
    store.fetch(0, 2, 0).unwrap();
    let e = store.wait(0, 0, Some(0)).unwrap_err();
    assert_eq!(e.kind, ErrorKind::Changed, "{e}");
}
