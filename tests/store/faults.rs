//! Reads that fail, are cut, come late, or find another file: every one is loud, and none outlives its cause.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use hotset::ErrorKind;
use hotset::store::{ReadAt, Store, StoreConfig};

use crate::model::{ALL, Model, RING, config, slice_of, small, until};

/// A source whose next reads fail, are cut, or take their time.
struct Faulty {
    file: Box<dyn ReadAt>,
    plan: Arc<Plan>,
}

impl Faulty {
    /// What becomes of a read of so many bytes.
    fn outcome(&self, asked: usize, read: impl FnOnce() -> io::Result<usize>) -> io::Result<usize> {
        let n = self.plan.reads.fetch_add(1, SeqCst);
        std::thread::sleep(Duration::from_millis(self.plan.delay_ms.load(SeqCst)));
        let errno = self.plan.errno.load(SeqCst) as i32;
        if errno != 0 && asked as u64 >= self.plan.from_bytes.load(SeqCst) {
            return Err(io::Error::from_raw_os_error(errno));
        }
        assert!(!self.plan.panic.load(SeqCst), "as planned");
        let got = read()?;
        // every other read loses its second half
        Ok(if self.plan.cut.load(SeqCst) && n % 2 == 0 { got.div_ceil(2) } else { got })
    }
}

#[derive(Default)]
struct Plan {
    errno: AtomicU32,
    /// Only reads of at least this much fail.
    from_bytes: AtomicU64,
    cut: AtomicBool,
    panic: AtomicBool,
    delay_ms: AtomicU64,
    reads: AtomicU64,
}

impl ReadAt for Faulty {
    fn read_at(&self, bufs: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize> {
        self.outcome(bufs.iter().map(|b| b.len()).sum(), || self.file.read_at(bufs, offset))
    }

    fn file(&self) -> Option<&File> {
        self.file.file()
    }

    fn completed(&self, _offset: u64, read: io::Result<usize>) -> io::Result<usize> {
        self.outcome(*read.as_ref().unwrap_or(&0), || read)
    }

    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }
}

fn faulty(m: &Model, config: StoreConfig) -> (Store, Arc<Plan>) {
    let plan = Arc::new(Plan::default());
    (m.open_with(config, |file| Faulty { file, plan: plan.clone() }), plan)
}

#[test]
#[cfg_attr(miri, ignore)]
fn failed_reads_are_loud_and_do_not_last() {
    let m = small();
    for how in ALL {
        let (store, plan) = faulty(&m, config(2, 2, how));
        for (errno, kind) in [(libc::EIO, ErrorKind::Io), (libc::ENOMEM, ErrorKind::Memory)] {
            plan.errno.store(errno as u32, SeqCst);
            // the large slice fails, the smaller one of the same slot still comes
            plan.from_bytes.store(8500, SeqCst);
            store.fetch(0, 3, 1).unwrap();
            store.wait(0, 1, Some(1)).unwrap();
            assert_eq!(slice_of(&store, 0, 1, 1), m.expected(0, 1, 3));
            for slice in [Some(0), None] {
                let e = store.wait(0, 1, slice).unwrap_err();
                assert_eq!(e.kind, kind);
                let t = &m.table.layers[0].tensors[0];
                let offset = format!("offset {}, wanted 9000 bytes, found 0", t.offset_bytes + 3 * 9000);
                for part in ["layer 0 expert 3 slot 1 slice 0 (blk.0.part0)", "shard-0.gguf", offset.as_str()] {
                    assert!(e.detail.contains(part), "{part}: {e}");
                }
            }
            assert!(!store.is_ready(0, 1, None) && store.expert_in(0, 1).is_none());
            assert_eq!(store.wait_layer(0).unwrap_err().kind, kind);
            assert_eq!(store.take_failed(0), [1]);
            assert!(store.take_failed(0).is_empty() && store.take_failed(1).is_empty());
            store.clear_failed(0, 1).unwrap();
            assert_eq!(store.wait(0, 1, None).unwrap_err().kind, ErrorKind::State);
            plan.errno.store(0, SeqCst);
            store.fetch(0, 3, 1).unwrap();
            store.wait(0, 1, None).unwrap();
            assert!(m.holds(&store, 0, 1, 3));
            store.wait_layer(0).unwrap();
        }
        assert_eq!(store.counters().failures, 2);
        // a panic in the source is a failure like the others, and its lane lives on
        plan.panic.store(true, SeqCst);
        store.fetch(1, 0, 0).unwrap();
        assert_eq!(store.wait(1, 0, None).unwrap_err().kind, ErrorKind::Internal);
        plan.panic.store(false, SeqCst);
        for slot in [0, 1, 0, 1] {
            store.fetch(1, 2, slot).unwrap();
            store.wait(1, slot, None).unwrap();
            assert!(m.holds(&store, 1, slot, 2));
        }
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn cut_reads_are_continued() {
    let m = Model::new(3, &[vec![(32, 90_001), (64, 8192)], vec![(7, 300_000)]], 1);
    for how in ALL {
        let (store, plan) = faulty(&m, config(3, 2, how));
        plan.cut.store(true, SeqCst);
        for (layer, expert) in (0..2).flat_map(|l| (0..3).map(move |e| (l, e))) {
            store.fetch(layer, expert, expert).unwrap();
            store.wait(layer, expert, None).unwrap();
            assert!(m.holds(&store, layer, expert, expert), "{how:?} {layer} {expert}");
        }
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn a_file_cut_or_replaced_after_open_is_changed() {
    let m = small();
    for how in ALL {
        std::fs::write(&m.files[0], &m.data[0]).unwrap();
        let store = m.open(config(2, 1, how));
        store.check_files().unwrap();
        // cut within the last expert's second slice
        let cut = m.lens[0] - 11 - 100;
        File::options().write(true).open(&m.files[0]).unwrap().set_len(cut).unwrap();
        store.fetch(0, 5, 0).unwrap();
        // its bytes are all there, but who knows from which version of the file
        let e = store.wait(0, 0, Some(0)).unwrap_err();
        assert!(e.kind == ErrorKind::Changed && e.detail.contains("was written to"), "{e}");
        let e = store.wait(0, 0, Some(1)).unwrap_err();
        assert_eq!(e.kind, ErrorKind::Changed, "{e}");
        assert!(e.detail.contains("wanted 4096 bytes, found 3996"), "{e}");
        assert!(e.detail.contains(&format!("had {} bytes at open, now {cut}", m.lens[0])), "{e}");
        assert_eq!(store.check_files().unwrap_err().kind, ErrorKind::Changed);
        let again = Store::open(&m.files, &m.lens, &m.table, vec![], config(2, 1, how)).err().unwrap();
        assert_eq!(again.kind, ErrorKind::Changed, "{again}");
    }
    std::fs::write(&m.files[0], &m.data[0]).unwrap();
    let store = m.open(config(2, 1, RING));
    let other = m.files[0].with_extension("new");
    std::fs::write(&other, &m.data[0]).unwrap();
    std::fs::rename(&other, &m.files[0]).unwrap();
    // the opened file is still there: reads go on, and a check tells
    store.fetch(0, 5, 0).unwrap();
    store.wait(0, 0, None).unwrap();
    assert!(m.holds(&store, 0, 0, 5));
    assert_eq!(store.check_files().unwrap_err().kind, ErrorKind::Changed);
}

#[test]
#[cfg_attr(miri, ignore)]
fn a_file_overwritten_in_place_is_changed() {
    let m = small();
    for how in ALL {
        let store = m.open(config(2, 2, how));
        store.fetch(0, 3, 0).unwrap();
        store.wait(0, 0, None).unwrap();
        // times of writing have the grain of the kernel's clock
        std::thread::sleep(Duration::from_millis(20));
        let file = File::options().write(true).open(&m.files[0]).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &m.data[0][..100], 0).unwrap();
        store.fetch(0, 5, 1).unwrap();
        let e = store.wait(0, 1, None).unwrap_err();
        assert!(e.kind == ErrorKind::Changed && e.detail.contains("was written to"), "{e}");
        assert!(!store.is_ready(0, 1, None));
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn waits_end_and_late_reads_still_land() {
    let m = small();
    for how in ALL {
        let short = StoreConfig { timeout: Duration::from_millis(60), ..config(2, 2, how) };
        let (store, plan) = faulty(&m, short);
        plan.delay_ms.store(400, SeqCst);
        let start = Instant::now();
        store.fetch(1, 4, 1).unwrap();
        assert!(start.elapsed() < Duration::from_millis(60), "fetch does not wait for the read");
        let e = store.wait(1, 1, None).unwrap_err();
        assert_eq!(e.kind, ErrorKind::Timeout);
        assert!(e.detail.contains("layer 1 expert 4 slot 1") && e.detail.contains("60 ms"), "{e}");
        // a slot with reads in flight is neither fetched over nor released
        let e = store.fetch(1, 5, 1).unwrap_err();
        assert_eq!(e.kind, ErrorKind::Timeout);
        assert_eq!(store.release(1, 1).unwrap_err().kind, ErrorKind::State);
        assert_eq!(store.poison(1, 1, 0).unwrap_err().kind, ErrorKind::State);
        assert_eq!(store.wait_layer(1).unwrap_err().kind, ErrorKind::Timeout);
        assert!(start.elapsed() < Duration::from_millis(390));
        assert!(store.wait_ns() >= 100_000_000);
        while !store.is_ready(1, 1, None) {
            assert!(start.elapsed() < Duration::from_secs(20));
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(m.holds(&store, 1, 1, 4));
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn a_slot_fetched_again_while_in_flight_holds_the_second_expert() {
    let m = small();
    for how in ALL {
        let (store, plan) = faulty(&m, config(1, 4, how));
        plan.delay_ms.store(10, SeqCst);
        for expert in [0, 5, 2, 2, 4] {
            store.fetch(0, (expert + 1) % 6, 0).unwrap();
            store.fetch(0, expert, 0).unwrap();
            store.wait(0, 0, None).unwrap();
            assert!(m.holds(&store, 0, 0, expert));
        }
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn a_full_queue_makes_the_caller_read() {
    let m = small();
    for how in ALL {
        let (store, plan) = faulty(&m, StoreConfig { queue: 1, ..config(6, 1, how) });
        plan.delay_ms.store(5, SeqCst);
        (0..6).for_each(|slot| store.fetch(0, slot, slot).unwrap());
        assert!(plan.reads.load(SeqCst) >= 9, "of 12 slices, 1 may be queued and 1 be with the lane");
        for slot in 0..6 {
            store.wait(0, slot, None).unwrap();
            assert!(m.holds(&store, 0, slot, slot));
        }
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn dropping_a_busy_store_is_clean() {
    let m = small();
    for how in ALL {
        let (store, plan) = faulty(&m, config(6, 2, how));
        plan.delay_ms.store(3, SeqCst);
        for slot in 0..6 {
            store.fetch(0, slot, slot).unwrap();
            store.fetch(1, slot, slot).unwrap();
        }
        let before = plan.reads.load(SeqCst);
        drop(store);
        assert!(plan.reads.load(SeqCst) <= before + 2, "what was queued is not read");
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn several_threads_wait_for_one_slot() {
    let m = small();
    for how in ALL {
        let (store, plan) = faulty(&m, config(1, 2, how));
        plan.delay_ms.store(2, SeqCst);
        for expert in (0..6).cycle().take(30) {
            store.fetch(0, expert, 0).unwrap();
            std::thread::scope(|s| {
                for slice in [None, Some(0), Some(1), None] {
                    let (store, m) = (&store, &m);
                    s.spawn(move || {
                        store.wait(0, 0, slice).unwrap();
                        let i = slice.unwrap_or(0);
                        assert_eq!(slice_of(store, 0, 0, i), m.expected(0, i, expert));
                    });
                }
            });
        }
    }
}

/// What is read ahead and fails, or takes long, is nobody's business until it is wanted.
#[test]
#[cfg_attr(miri, ignore)]
fn a_read_ahead_that_fails_or_lasts_harms_nobody() {
    let m = small();
    for how in ALL {
        let (store, plan) = faulty(&m, config(4, 2, how));
        plan.errno.store(libc::EIO as u32, SeqCst);
        assert!(store.fetch_ahead(1, 2, 3).unwrap());
        until(|| store.is_over(1, 3, None).unwrap());
        store.wait_layer(1).unwrap();
        store.adopt(1, 3).unwrap();
        assert_eq!(store.wait_layer(1).unwrap_err().kind, ErrorKind::Io);
        assert_eq!(store.take_failed(1), [3]);
        store.clear_failed(1, 3).unwrap();
        plan.errno.store(0, SeqCst);

        plan.delay_ms.store(300, SeqCst);
        assert!(store.fetch_ahead(1, 2, 3).unwrap());
        assert!(!store.fetch_ahead(1, 1, 3).unwrap(), "reads are in flight in the slot");
        store.wait_layer(1).unwrap();
        assert!(!store.is_over(1, 3, None).unwrap(), "the layer did not wait for it");
        store.adopt(1, 3).unwrap();
        store.wait_layer(1).unwrap();
        assert_eq!(store.expert_in(1, 3), Some(2));
        plan.delay_ms.store(0, SeqCst);
    }
}
