//! The store on real files: whatever the alignment, the I/O mode and the number of lanes, a slot holds the file's bytes or
//! the call says why not.

use std::fs::File;
use std::io::{self, IoSliceMut, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use hotset::ErrorKind;
use hotset::model::{ExpertTable, ExpertTensor, MoeLayer, Part, Projection};
use hotset::store::{Backing, IoMode, ReadAt, Store, StoreConfig, page_bytes, plan_slot_bytes};
use memmap2::Mmap;
use proptest::prelude::*;

/// Numbers that look random and are the same every time.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let x = self.0 ^ (self.0 >> 33);
        x.wrapping_mul(0xFF51_AFD7_ED55_8CCD) >> 20
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// A model on disk: files of noise, and a table of what lies where in them.
struct Model {
    _dir: tempfile::TempDir,
    files: Vec<PathBuf>,
    lens: Vec<u64>,
    data: Vec<Vec<u8>>,
    table: ExpertTable,
}

impl Model {
    /// `layers[l][t]` = (bytes to leave out before the tensor, bytes of a slice); `tail` bytes follow the last tensor of
    /// each file. Layers alternate between two files.
    fn new(n_experts: u32, layers: &[Vec<(u64, u64)>], tail: u64) -> Model {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut ends = [0u64; 2];
        let mut table = ExpertTable::default();
        for (i, slices) in layers.iter().enumerate() {
            let file = i % 2;
            let tensors = slices.iter().enumerate().map(|(t, &(gap, slice_bytes))| {
                let offset_bytes = ends[file] + gap;
                ends[file] = offset_bytes + slice_bytes * u64::from(n_experts);
                let projection = [Projection::Gate, Projection::Up, Projection::Down][t % 3];
                let part = if t < 3 { Part::Weight } else { Part::Bias };
                let name = format!("blk.{i}.part{t}");
                ExpertTensor { name, projection, part, ggml_type: 42, file, offset_bytes, slice_bytes }
            });
            table.layers.push(MoeLayer { block: i as u32, n_experts, tensors: tensors.collect() });
        }
        let (mut files, mut data) = (Vec::new(), Vec::new());
        for (i, end) in ends.into_iter().enumerate() {
            let mut rng = Rng(i as u64);
            let bytes: Vec<u8> = (0..end + tail).map(|_| rng.next() as u8).collect();
            let path = dir.path().join(format!("shard-{i}.gguf"));
            let mut f = File::create(&path).unwrap();
            f.write_all(&bytes).unwrap();
            f.sync_all().unwrap();
            files.push(path);
            data.push(bytes);
        }
        Model { _dir: dir, files, lens: data.iter().map(|d| d.len() as u64).collect(), data, table }
    }

    fn open(&self, config: StoreConfig) -> Store {
        Store::open(&self.files, &self.lens, &self.table, vec![], config).unwrap()
    }

    fn open_with<R: ReadAt + 'static>(&self, config: StoreConfig, wrap: impl Fn(Box<dyn ReadAt>) -> R) -> Store {
        Store::open_with(&self.files, &self.lens, &self.table, vec![], config, |_, f| Box::new(wrap(f))).unwrap()
    }

    fn maps(&self) -> Vec<Arc<Mmap>> {
        // SAFETY: the test alone knows these files, and does not change them.
        self.files.iter().map(|f| Arc::new(unsafe { Mmap::map(&File::open(f).unwrap()) }.unwrap())).collect()
    }

    fn slices(&self, layer: usize) -> usize {
        self.table.layers[layer].tensors.len()
    }

    fn expected(&self, layer: usize, slice: usize, expert: u32) -> &[u8] {
        let t = &self.table.layers[layer].tensors[slice];
        &self.data[t.file][(t.offset_bytes + t.slice_bytes * u64::from(expert)) as usize..][..t.slice_bytes as usize]
    }

    /// Whether the slot holds the expert, byte for byte.
    fn holds(&self, store: &Store, layer: usize, slot: u32, expert: u32) -> bool {
        (0..self.slices(layer)).all(|i| slice_of(store, layer, slot, i) == self.expected(layer, i, expert))
    }
}

/// The bytes of a slice in a slot, as an engine sees them.
fn slice_of(store: &Store, layer: usize, slot: u32, slice: usize) -> &[u8] {
    let b = store.bank(layer, slice).unwrap();
    assert!(slot < b.slots);
    let at = b.base.wrapping_add((b.stride_bytes * u64::from(slot)) as usize);
    assert_eq!(at as usize % 64, 0);
    // SAFETY: inside the bank; the tests read a slot only while nothing is in flight in it.
    unsafe { std::slice::from_raw_parts(at, b.slice_bytes as usize) }
}

/// All bytes of a slot.
fn slot_of(store: &Store, layer: usize, slot: u32) -> &[u8] {
    let (region, bytes) = store.region().unwrap();
    let stride = store.slot_stride(layer).unwrap();
    let first = store.bank(layer, 0).unwrap();
    let before = (first.base as usize - region as usize) as u64 / page_bytes() * page_bytes();
    let start = before + stride * u64::from(slot);
    assert!(start + stride <= bytes);
    // SAFETY: inside the region; the first slice begins in the first page of its slot.
    unsafe { std::slice::from_raw_parts(region.wrapping_add(start as usize), stride as usize) }
}

fn config(slots: u32, lanes: usize, io: IoMode) -> StoreConfig {
    StoreConfig { slots, lanes, io, timeout: Duration::from_secs(20), ..StoreConfig::default() }
}

/// Two slices of different sizes in one layer, a third size in the other.
fn small() -> Model {
    Model::new(6, &[vec![(32, 9000), (0, 4096)], vec![(100, 700)]], 11)
}

#[test]
#[cfg_attr(miri, ignore)]
fn slots_hold_the_files_bytes_whatever_the_alignment() {
    let shapes: [Vec<Vec<(u64, u64)>>; 5] = [
        // all aligned; a large slice takes several pieces of the bounce buffer when it is not
        vec![vec![(4096, 8192), (0, 4096)], vec![(0, 12288)]],
        vec![vec![(64, 8192), (0, 200_000)], vec![(192, 4096 * 40)]],
        // odd offsets, odd lengths, companions of a few bytes
        vec![vec![(1, 4097), (13, 511), (7, 90_001), (0, 4), (1, 2880)], vec![(31, 1)]],
        vec![vec![(32, 1024 * 18), (32, 1024 * 18), (32, 512)], vec![(96, 100_000)]],
        vec![vec![(512, 512), (0, 1536)], vec![(4000, 65_536 * 3 + 1)]],
    ];
    for (i, shape) in shapes.iter().enumerate() {
        for tail in [0, 1, 5000] {
            let m = Model::new(5, shape, tail);
            for (lanes, io, bounce_bytes) in [
                (1, IoMode::Direct, 1),
                (4, IoMode::Direct, 1 << 20),
                (1, IoMode::Buffered, 0),
                (4, IoMode::Buffered, 0),
            ] {
                let store = m.open(StoreConfig { bounce_bytes, ..config(5, lanes, io) });
                for layer in 0..2 {
                    for slot in 0..5 {
                        store.poison(layer, slot, 0xC7).unwrap();
                    }
                    for slot in 0..5 {
                        store.fetch(layer, 4 - slot, slot).unwrap();
                    }
                    for slot in 0..5 {
                        store.wait(layer, slot, None).unwrap();
                        assert!(m.holds(&store, layer, slot, 4 - slot), "shape {i} tail {tail} {io:?} layer {layer}");
                        assert_eq!(store.expert_in(layer, slot), Some(4 - slot));
                    }
                }
                let (c, wanted) = (store.counters(), 5 * m.table.layers.iter().map(|l| l.expert_bytes()).sum::<u64>());
                assert_eq!((c.wanted_bytes, c.failures), (wanted, 0));
                assert!(c.device_bytes >= wanted && c.reads >= 5);
                assert!(io == IoMode::Direct || c.device_bytes == wanted && c.bounce_copies == 0);
            }
        }
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn the_report_says_what_is_in_effect() {
    let m = small();
    let direct = m.open(config(1, 1, IoMode::Direct));
    let r = direct.io_mode();
    assert_eq!(r.requested, IoMode::Direct);
    assert_eq!(r.in_effect == IoMode::Direct, r.reason.is_empty(), "{r:?}");
    let buffered = m.open(config(1, 1, IoMode::Buffered));
    let r = buffered.io_mode();
    assert_eq!((r.in_effect, r.mem_align, r.offset_align, r.reason.as_str()), (IoMode::Buffered, 1, 1, ""));
    if cfg!(target_os = "linux") && std::path::Path::new("/dev/shm").is_dir() {
        // some systems' tmpfs takes direct reads, some refuses: either way the bytes come and the report agrees
        let path = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        std::fs::write(path.path(), &m.data[0]).unwrap();
        let files = [path.path().to_owned(), m.files[1].clone()];
        let store = Store::open(&files, &m.lens, &m.table, vec![], config(2, 1, IoMode::Direct)).unwrap();
        let r = store.io_mode();
        assert_eq!(r.in_effect == IoMode::Direct, r.reason.is_empty(), "{r:?}");
        assert!(r.reason.is_empty() || r.reason.contains("/dev/shm"), "{r:?}");
        for layer in 0..2 {
            store.fetch(layer, 3, 1).unwrap();
            store.wait(layer, 1, None).unwrap();
            assert!(m.holds(&store, layer, 1, 3));
        }
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn a_fetch_changes_its_slices_and_nothing_else() {
    let m = Model::new(4, &[vec![(32, 5000), (1, 4096), (64, 100)], vec![(0, 64)]], 3);
    for io in [IoMode::Direct, IoMode::Buffered] {
        let store = m.open(config(3, 2, io));
        for layer in 0..2 {
            (0..3).for_each(|slot| store.poison(layer, slot, 0x5A).unwrap());
        }
        store.fetch(0, 2, 1).unwrap();
        store.wait(0, 1, None).unwrap();
        assert!(m.holds(&store, 0, 1, 2));
        for (layer, slot) in [(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)] {
            assert!(slot_of(&store, layer, slot).iter().all(|&b| b == 0x5A));
            assert_eq!(store.wait(layer, slot, None).unwrap_err().kind, ErrorKind::State);
        }
        let mut gaps = slot_of(&store, 0, 1).to_vec();
        let start = slot_of(&store, 0, 1).as_ptr() as usize;
        for i in 0..3 {
            let s = slice_of(&store, 0, 1, i);
            gaps[s.as_ptr() as usize - start..][..s.len()].fill(0x5A);
        }
        assert!(gaps.iter().all(|&b| b == 0x5A), "{io:?}");
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn release_gives_back_one_slot_and_touches_no_neighbour() {
    let m = small();
    let store = m.open(config(3, 2, IoMode::Direct));
    let staging = store.held_bytes();
    let stride = store.slot_stride(0).unwrap();
    for slot in 0..3 {
        store.fetch(0, slot, slot).unwrap();
        store.fetch(1, slot, slot).unwrap();
    }
    (0..3).for_each(|slot| store.wait(0, slot, None).unwrap());
    store.wait_layer(1).unwrap();
    let full = store.held_bytes();
    assert_eq!(full, staging + 3 * (stride + store.slot_stride(1).unwrap()));
    assert_eq!(full, store.max_bytes());
    store.release(0, 1).unwrap();
    assert_eq!(store.held_bytes(), full - stride);
    store.release(0, 1).unwrap();
    assert_eq!(store.held_bytes(), full - stride, "once");
    assert_eq!(store.wait(0, 1, None).unwrap_err().kind, ErrorKind::State);
    assert!(m.holds(&store, 0, 0, 0) && m.holds(&store, 0, 2, 2) && m.holds(&store, 1, 0, 0));
    if cfg!(target_os = "linux") {
        assert!(slot_of(&store, 0, 1).iter().all(|&b| b == 0));
    }
    store.fetch(0, 5, 1).unwrap();
    store.wait(0, 1, None).unwrap();
    assert!(m.holds(&store, 0, 1, 5));
    assert_eq!(store.held_bytes(), full);
}

#[test]
#[cfg_attr(miri, ignore)]
fn two_disjoint_traces_stay_in_the_budget() {
    let m = Model::new(16, &[vec![(0, 30_000), (64, 30_000)], vec![(0, 18_000)]], 0);
    let config = config(4, 2, IoMode::Direct);
    let page = page_bytes();
    let slots: u64 = m.table.layers.iter().map(|l| 4 * plan_slot_bytes(l, page)).sum();
    let budget = slots + config.plan_staging_bytes();
    let store = m.open(config);
    assert!(store.max_bytes() <= budget);
    for trace in [0..8, 8..16u32] {
        for expert in trace {
            for layer in 0..2 {
                store.fetch(layer, expert, expert % 4).unwrap();
                assert!(store.held_bytes() <= budget);
                store.wait(layer, expert % 4, None).unwrap();
                assert!(m.holds(&store, layer, expert % 4, expert));
                assert!(store.held_bytes() <= budget);
            }
        }
    }
    assert_eq!(store.held_bytes(), store.max_bytes());
}

/// A source whose next reads fail, are cut, or take their time.
struct Faulty {
    file: Box<dyn ReadAt>,
    plan: Arc<Plan>,
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
        let n = self.plan.reads.fetch_add(1, SeqCst);
        std::thread::sleep(Duration::from_millis(self.plan.delay_ms.load(SeqCst)));
        let asked: usize = bufs.iter().map(|b| b.len()).sum();
        let errno = self.plan.errno.load(SeqCst) as i32;
        if errno != 0 && asked as u64 >= self.plan.from_bytes.load(SeqCst) {
            return Err(io::Error::from_raw_os_error(errno));
        }
        assert!(!self.plan.panic.load(SeqCst), "as planned");
        let got = self.file.read_at(bufs, offset)?;
        // every other read loses its second half
        Ok(if self.plan.cut.load(SeqCst) && n % 2 == 0 { got.div_ceil(2) } else { got })
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
    for io in [IoMode::Direct, IoMode::Buffered] {
        let (store, plan) = faulty(&m, config(2, 2, io));
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
    for io in [IoMode::Direct, IoMode::Buffered] {
        let (store, plan) = faulty(&m, config(3, 2, io));
        plan.cut.store(true, SeqCst);
        for (layer, expert) in (0..2).flat_map(|l| (0..3).map(move |e| (l, e))) {
            store.fetch(layer, expert, expert).unwrap();
            store.wait(layer, expert, None).unwrap();
            assert!(m.holds(&store, layer, expert, expert), "{io:?} {layer} {expert}");
        }
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn a_file_cut_or_replaced_after_open_is_changed() {
    let m = small();
    for io in [IoMode::Direct, IoMode::Buffered] {
        std::fs::write(&m.files[0], &m.data[0]).unwrap();
        let store = m.open(config(2, 1, io));
        store.check_files().unwrap();
        // cut within the last expert's second slice
        let cut = m.lens[0] - 11 - 100;
        File::options().write(true).open(&m.files[0]).unwrap().set_len(cut).unwrap();
        store.fetch(0, 5, 0).unwrap();
        store.wait(0, 0, Some(0)).unwrap();
        let e = store.wait(0, 0, Some(1)).unwrap_err();
        assert_eq!(e.kind, ErrorKind::Changed, "{e}");
        assert!(e.detail.contains("wanted 4096 bytes, found 3996"), "{e}");
        assert!(e.detail.contains(&format!("had {} bytes at open, now {cut}", m.lens[0])), "{e}");
        assert_eq!(store.check_files().unwrap_err().kind, ErrorKind::Changed);
        let again = Store::open(&m.files, &m.lens, &m.table, vec![], config(2, 1, io)).err().unwrap();
        assert_eq!(again.kind, ErrorKind::Changed, "{again}");
    }
    std::fs::write(&m.files[0], &m.data[0]).unwrap();
    let store = m.open(config(2, 1, IoMode::Direct));
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
fn waits_end_and_late_reads_still_land() {
    let m = small();
    let short = StoreConfig { timeout: Duration::from_millis(60), ..config(2, 2, IoMode::Direct) };
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

#[test]
#[cfg_attr(miri, ignore)]
fn a_slot_fetched_again_while_in_flight_holds_the_second_expert() {
    let m = small();
    let (store, plan) = faulty(&m, config(1, 4, IoMode::Direct));
    plan.delay_ms.store(10, SeqCst);
    for expert in [0, 5, 2, 2, 4] {
        store.fetch(0, (expert + 1) % 6, 0).unwrap();
        store.fetch(0, expert, 0).unwrap();
        store.wait(0, 0, None).unwrap();
        assert!(m.holds(&store, 0, 0, expert));
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn a_full_queue_makes_the_caller_read() {
    let m = small();
    let (store, plan) = faulty(&m, StoreConfig { queue: 1, ..config(6, 1, IoMode::Direct) });
    plan.delay_ms.store(5, SeqCst);
    (0..6).for_each(|slot| store.fetch(0, slot, slot).unwrap());
    assert!(plan.reads.load(SeqCst) >= 9, "of 12 slices, 1 may be queued and 1 be with the lane");
    for slot in 0..6 {
        store.wait(0, slot, None).unwrap();
        assert!(m.holds(&store, 0, slot, slot));
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn dropping_a_busy_store_is_clean() {
    let m = small();
    let (store, plan) = faulty(&m, config(6, 2, IoMode::Direct));
    plan.delay_ms.store(3, SeqCst);
    for slot in 0..6 {
        store.fetch(0, slot, slot).unwrap();
        store.fetch(1, slot, slot).unwrap();
    }
    drop(store);
}

#[test]
#[cfg_attr(miri, ignore)]
fn many_threads_fetch_and_wait() {
    let m = Model::new(24, &[vec![(32, 9001), (0, 4096), (64, 8192)], vec![(5, 700), (0, 16)], vec![(64, 16384)]], 7);
    for (lanes, io, queue) in [(4, IoMode::Direct, 4096), (2, IoMode::Direct, 3), (3, IoMode::Buffered, 64)] {
        let store = m.open(StoreConfig { queue, bounce_bytes: 1, ..config(8, lanes, io) });
        std::thread::scope(|s| {
            for thread in 0..4u32 {
                let (m, store) = (&m, &store);
                s.spawn(move || {
                    // each thread has two slots of every layer; what it shares are lanes, queue and wake-ups
                    let mut rng = Rng(u64::from(thread) + 77);
                    for round in 0..250 {
                        let layer = rng.below(3) as usize;
                        let slot = thread * 2 + rng.below(2) as u32;
                        let expert = rng.below(24) as u32;
                        store.fetch(layer, expert, slot).unwrap();
                        if round % 3 == 0 {
                            for i in (0..m.slices(layer)).rev() {
                                store.wait(layer, slot, Some(i)).unwrap();
                                assert_eq!(slice_of(store, layer, slot, i), m.expected(layer, i, expert));
                            }
                        } else if round % 7 != 1 {
                            store.wait(layer, slot, None).unwrap();
                            assert!(m.holds(store, layer, slot, expert));
                            if round % 5 == 0 {
                                store.release(layer, slot).unwrap();
                            }
                        }
                    }
                });
            }
            // waiters that fetched nothing see either the state or a whole slot
            s.spawn(|| (0..200).for_each(|i| store.wait_layer(i % 3).unwrap()));
        });
        (0..3).for_each(|l| store.wait_layer(l).unwrap());
        assert!(store.held_bytes() <= store.max_bytes());
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn several_threads_wait_for_one_slot() {
    let m = small();
    let (store, plan) = faulty(&m, config(1, 2, IoMode::Direct));
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

#[test]
#[cfg_attr(miri, ignore)]
fn the_page_cache_backing_has_hints_and_the_mapped_file() {
    let m = small();
    let config = StoreConfig { backing: Backing::PageCache, ..StoreConfig::default() };
    let store = Store::open(&m.files, &m.lens, &m.table, m.maps(), config.clone()).unwrap();
    for layer in 0..2 {
        (0..6).for_each(|e| store.hint(layer, e).unwrap());
        for i in 0..m.slices(layer) {
            let (start, bytes) = store.mapped_slice(layer, i).unwrap();
            // SAFETY: what the store says is mapped.
            let tensor = unsafe { std::slice::from_raw_parts(start, bytes as usize) };
            let size = m.table.layers[layer].tensors[i].slice_bytes as usize;
            (0..6).for_each(|e| assert_eq!(&tensor[e * size..][..size], m.expected(layer, i, e as u32)));
        }
    }
    assert_eq!(store.hint(2, 0).unwrap_err().kind, ErrorKind::Range);
    assert_eq!(store.hint(1, 6).unwrap_err().kind, ErrorKind::Range);
    for e in [store.fetch(0, 0, 0), store.wait(0, 0, None), store.release(0, 0), store.bank(0, 0).map(drop)] {
        assert_eq!(e.unwrap_err().kind, ErrorKind::State);
    }
    assert_eq!((store.held_bytes(), store.max_bytes(), store.slots()), (0, 0, 0));
    let e = Store::open(&m.files, &m.lens, &m.table, vec![], config).err().unwrap();
    assert_eq!(e.kind, ErrorKind::Argument);
}

#[test]
#[cfg_attr(miri, ignore)]
fn what_is_out_of_range_is_refused_and_changes_nothing() {
    let m = small();
    let store = m.open(config(2, 1, IoMode::Buffered));
    store.fetch(0, 1, 1).unwrap();
    store.wait(0, 1, None).unwrap();
    let calls = [
        store.fetch(2, 0, 0),
        store.fetch(0, 6, 1),
        store.fetch(0, u32::MAX, 1),
        store.fetch(0, 0, 2),
        store.wait(9, 0, None),
        store.wait(0, 2, None),
        store.wait(0, 1, Some(2)),
        store.wait_layer(usize::MAX),
        store.release(0, u32::MAX),
        store.bank(1, 1).map(drop),
        store.mapped_slice(0, 2).map(drop),
    ];
    for call in calls {
        assert_eq!(call.unwrap_err().kind, ErrorKind::Range);
    }
    assert_eq!(store.mapped_slice(0, 0).unwrap_err().kind, ErrorKind::State);
    assert!(m.holds(&store, 0, 1, 1) && store.expert_in(0, 1) == Some(1));

    let good = config(2, 1, IoMode::Direct);
    let bad = [
        StoreConfig { slots: 0, ..good.clone() },
        StoreConfig { lanes: 0, ..good.clone() },
        StoreConfig { lanes: 65, ..good.clone() },
        StoreConfig { queue: 0, ..good.clone() },
        StoreConfig { bounce_bytes: usize::MAX, ..good.clone() },
        StoreConfig { timeout: Duration::ZERO, ..good.clone() },
        StoreConfig { timeout: Duration::MAX, ..good.clone() },
    ];
    let refused =
        |lens: &[u64], table: &ExpertTable, c| Store::open(&m.files, lens, table, vec![], c).err().unwrap().kind;
    for c in bad {
        assert_eq!(refused(&m.lens, &m.table, c), ErrorKind::Argument);
    }
    assert_eq!(refused(&m.lens[..1], &m.table, good.clone()), ErrorKind::Argument);
    assert_eq!(refused(&[m.lens[0], m.lens[1] + 1], &m.table, good.clone()), ErrorKind::Changed);
    // one byte short of the last expert's end
    assert_eq!(refused(&[m.lens[0] - 12, m.lens[1]], &m.table, good.clone()), ErrorKind::Format);
    let mut table = m.table.clone();
    table.layers[1].tensors[0].file = 2;
    assert_eq!(refused(&m.lens, &table, good.clone()), ErrorKind::Model);
    let huge = StoreConfig { slots: i32::MAX as u32, ..good };
    let mut table = m.table.clone();
    table.layers = vec![table.layers[0].clone(); 100_000];
    assert_eq!(refused(&m.lens, &table, huge), ErrorKind::Memory);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..Default::default() })]
    /// Any gaps, sizes and orders of fetches.
    #[test]
    #[cfg_attr(miri, ignore)]
    fn any_shape_any_order(
        layers in prop::collection::vec(prop::collection::vec((0..5000u64, prop_oneof![1..70_000u64, (1..20u64).prop_map(|n| n * 4096)]), 1..5), 1..4),
        order in prop::collection::vec((any::<prop::sample::Index>(), 0..4u32, 0..3u32), 1..40),
        direct in any::<bool>(),
        lanes in 1..5usize,
    ) {
        let m = Model::new(4, &layers, 17);
        let io = if direct { IoMode::Direct } else { IoMode::Buffered };
        let store = m.open(StoreConfig { bounce_bytes: 1, queue: 5, ..config(3, lanes, io) });
        let mut now = vec![[None; 3]; layers.len()];
        for (layer, expert, slot) in order {
            let layer = layer.index(layers.len());
            store.fetch(layer, expert, slot).unwrap();
            now[layer][slot as usize] = Some(expert);
        }
        for (layer, slots) in now.iter().enumerate() {
            for (slot, expert) in slots.iter().enumerate() {
                if let Some(expert) = expert {
                    store.wait(layer, slot as u32, None).unwrap();
                    prop_assert!(m.holds(&store, layer, slot as u32, *expert));
                } else {
                    prop_assert!(store.wait(layer, slot as u32, None).is_err());
                }
            }
        }
    }
}
