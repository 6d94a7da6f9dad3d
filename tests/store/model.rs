//! A model on disk for the store's tests, and ways to look at slots.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hotset::model::{ExpertTable, ExpertTensor, MoeLayer, Part, Projection};
use hotset::store::{IoMode, ReadAt, ReadBy, Store, StoreConfig, page_bytes};
use memmap2::Mmap;

/// Numbers that look random and are the same every time.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let x = self.0 ^ (self.0 >> 33);
        x.wrapping_mul(0xFF51_AFD7_ED55_8CCD) >> 20
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// A model on disk: files of noise, and a table of what lies where in them.
pub struct Model {
    _dir: tempfile::TempDir,
    pub files: Vec<PathBuf>,
    pub lens: Vec<u64>,
    pub data: Vec<Vec<u8>>,
    pub table: ExpertTable,
}

impl Model {
    /// `layers[l][t]` = (bytes to leave out before the tensor, bytes of a slice); `tail` bytes follow the last tensor of
    /// each file. Layers alternate between two files.
    pub fn new(n_experts: u32, layers: &[Vec<(u64, u64)>], tail: u64) -> Model {
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

    pub fn open(&self, config: StoreConfig) -> Store {
        Store::open(&self.files, &self.lens, &self.table, vec![], config).unwrap()
    }

    pub fn open_with<R: ReadAt + 'static>(&self, config: StoreConfig, wrap: impl Fn(Box<dyn ReadAt>) -> R) -> Store {
        Store::open_with(&self.files, &self.lens, &self.table, vec![], config, |_, f| Box::new(wrap(f))).unwrap()
    }

    pub fn maps(&self) -> Vec<Arc<Mmap>> {
        // SAFETY: the test alone knows these files, and does not change them.
        self.files.iter().map(|f| Arc::new(unsafe { Mmap::map(&File::open(f).unwrap()) }.unwrap())).collect()
    }

    pub fn slices(&self, layer: usize) -> usize {
        self.table.layers[layer].tensors.len()
    }

    pub fn expected(&self, layer: usize, slice: usize, expert: u32) -> &[u8] {
        let t = &self.table.layers[layer].tensors[slice];
        &self.data[t.file][(t.offset_bytes + t.slice_bytes * u64::from(expert)) as usize..][..t.slice_bytes as usize]
    }

    /// Whether the slot holds the expert, byte for byte.
    pub fn holds(&self, store: &Store, layer: usize, slot: u32, expert: u32) -> bool {
        (0..self.slices(layer)).all(|i| slice_of(store, layer, slot, i) == self.expected(layer, i, expert))
    }
}

/// The bytes of a slice in a slot, as an engine sees them.
pub fn slice_of(store: &Store, layer: usize, slot: u32, slice: usize) -> &[u8] {
    let b = store.bank(layer, slice).unwrap();
    assert!(slot < b.slots);
    let at = b.base.wrapping_add((b.stride_bytes * u64::from(slot)) as usize);
    assert_eq!(at as u64 % hotset::store::SLICE_ALIGN, 0);
    // SAFETY: inside the bank; the tests read a slot only while nothing is in flight in it.
    unsafe { std::slice::from_raw_parts(at, b.slice_bytes as usize) }
}

/// All bytes of a slot.
pub fn slot_of(store: &Store, layer: usize, slot: u32) -> &[u8] {
    let (region, bytes) = store.region().unwrap();
    let stride = store.slot_stride(layer).unwrap();
    let first = store.bank(layer, 0).unwrap();
    let before = (first.base as usize - region as usize) as u64 / page_bytes() * page_bytes();
    let start = before + stride * u64::from(slot);
    assert!(start + stride <= bytes);
    // SAFETY: inside the region; the first slice begins in the first page of its slot.
    unsafe { std::slice::from_raw_parts(region.wrapping_add(start as usize), stride as usize) }
}

/// Waits for what another thread does, with a bound.
pub fn until(done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// How reads are made.
pub type How = (IoMode, ReadBy);
/// Where the system permits no io_uring this is `THREADS` once more: `ring` says so.
pub const RING: How = (IoMode::Direct, ReadBy::Ring);
pub const THREADS: How = (IoMode::Direct, ReadBy::Threads);
pub const BUFFERED: How = (IoMode::Buffered, ReadBy::Threads);
pub const ALL: [How; 3] = [RING, THREADS, BUFFERED];

pub fn config(slots: u32, lanes: usize, (io, read_by): How) -> StoreConfig {
    // the smallest chunks, so that slices are cut where they can be
    let chunk_bytes = 64 << 10;
    StoreConfig { slots, lanes, io, read_by, chunk_bytes, timeout: Duration::from_secs(20), ..StoreConfig::default() }
}

/// Two slices of different sizes in one layer, a third size in the other.
pub fn small() -> Model {
    Model::new(6, &[vec![(32, 9000), (0, 4096)], vec![(100, 700)]], 11)
}
