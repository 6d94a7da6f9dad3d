//! What the drive gives on the way of a miss: experts of a model, at random, read into slots by the store itself.
//!
//! A [`Drive`] is opened on a model, or on its pack. `rate` keeps as many reads in flight as it is told and counts what arrives;
//! `misses` times a token's case, one or a few experts fetched and waited for with nothing else in flight. Both say what the
//! system says came from the drive ([`Measured::from_drive`]), so that no page cache is taken for one.
//!
//! `sweep` goes through reads in flight and chunks, and `Sweep::advice` says which to use. `fio` asks fio for its own figure at the
//! same size and depth.

pub mod fio;
pub mod sweep;

use std::fs::File;
use std::time::{Duration, Instant};

use fastrand::Rng;

use crate::error::{Result, err};
use crate::model::{Model, Pack};
use crate::store::{Backing, IoMode, IoReport, ReadBy, Store, StoreConfig, disk_read_bytes, drop_cached};

/// Slots of a measurement take no more memory than this.
const MAX_SLOT_BYTES: u64 = 1 << 30;

/// Slots of each layer that misses alone go into: as in a cache, their memory is not what the last read has just touched, and large
/// enough for large pages.
const SLOTS_OF_MISSES: usize = 32;

/// How experts are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// Reads in flight at most.
    pub lanes: usize,
    /// As in [`StoreConfig`]; 0: whole slices, or whole packed experts.
    pub chunk_bytes: u64,
    pub io: IoMode,
    pub by: ReadBy,
}

/// What came in some time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measured {
    /// Bytes of experts.
    pub bytes: u64,
    pub seconds: f64,
    pub experts: u64,
    /// Read calls to the system, those of warming up included.
    pub reads: u64,
    /// Bytes asked of the system meanwhile, warming up included; and what it says the drive delivered. None: it does not say.
    pub asked_bytes: u64,
    pub disk_bytes: Option<u64>,
}

impl Measured {
    pub fn gb_per_s(&self) -> f64 {
        self.bytes as f64 / 1e9 / self.seconds.max(1e-9)
    }

    /// The share of what was asked for that the drive delivered, as the system counts it: below 1 where the page cache served, or
    /// where the file has holes. None where the system does not count.
    pub fn from_drive(&self) -> Option<f64> {
        self.disk_bytes.map(|disk| disk as f64 / self.asked_bytes.max(1) as f64)
    }

    /// Less than 95 % came from the drive, or nobody knows.
    pub fn doubtful(&self) -> bool {
        self.from_drive().is_none_or(|share| share < 0.95)
    }
}

/// A model, or its pack, to be measured.
pub struct Drive<'a> {
    pub model: &'a Model,
    pub pack: Option<&'a Pack>,
    pub seed: u64,
}

impl Drive<'_> {
    /// Takes what is cached of the files out of the page cache, and writes what is still to be written. Err where this system does not do that:
    /// then buffered reads measure nobody knows what.
    pub fn forget(&self) -> Result<()> {
        let packed = self.pack.map(|p| &p.path);
        for path in self.model.files.iter().map(|f| &f.path).chain(packed) {
            let forget = || drop_cached(&File::open(path)?);
            forget().map_err(|e| err!(Io, "{}: cannot be taken out of the page cache: {e}", path.display()))?;
        }
        Ok(())
    }

    /// How the files would be read: nothing is measured.
    pub fn report(&self, way: Way) -> Result<IoReport> {
        Ok(Ring::open(self, way, 1, 1)?.store.io_mode().clone())
    }

    /// Reads at random for `seconds` with all lanes busy, after some reads that do not count.
    pub fn rate(&self, way: Way, seconds: f64) -> Result<(Measured, IoReport)> {
        // twice what the lanes hold: they never wait for us
        let wanted = way.lanes * 2 + 2;
        let layers = self.model.experts.layers.len().clamp(1, wanted);
        let ring = Ring::open(self, way, layers, wanted.div_ceil(layers))?;
        let mut rng = Rng::with_seed(self.seed);
        let begin = ring.counters();
        for i in 0..ring.places.len() {
            ring.fetch(i, &mut rng)?;
        }
        // once around: from here on as much is in flight when the clock starts as when it stops
        for i in 0..ring.places.len() {
            ring.wait(i)?;
            ring.fetch(i, &mut rng)?;
        }
        let start = Instant::now();
        let (mut bytes, mut experts, mut next) = (0, 0, 0);
        while start.elapsed() < Duration::from_secs_f64(seconds) {
            bytes += ring.wait(next)?;
            experts += 1;
            ring.fetch(next, &mut rng)?;
            next = (next + 1) % ring.places.len();
        }
        let seconds = start.elapsed().as_secs_f64();
        (0..ring.places.len()).try_for_each(|i| ring.wait(i).map(drop))?;
        Ok((ring.measured(begin, bytes, experts, seconds), ring.store.io_mode().clone()))
    }

    /// Fetches `n` experts of one layer and waits for all of them, again and again for `seconds`, with nothing else in flight. The
    /// seconds of the answer are those between fetch and the end of the wait; the times of each round, ascending, come with it.
    pub fn misses(&self, way: Way, n: usize, seconds: f64) -> Result<(Measured, Vec<f64>)> {
        let ring = Ring::open(self, way, self.model.experts.layers.len(), n.max(SLOTS_OF_MISSES))?;
        let mut rng = Rng::with_seed(self.seed ^ 1);
        let begin = ring.counters();
        let layers = ring.n_layers;
        let slots = ring.places.len() / layers;
        if slots < n {
            return Err(err!(Argument, "{n} misses of one layer: it has {slots} experts"));
        }
        // memory that is touched for the first time is slower
        for i in 0..ring.places.len() {
            ring.fetch(i, &mut rng)?;
            ring.wait(i)?;
        }
        let start = Instant::now();
        let (mut bytes, mut experts, mut times) = (0, 0, Vec::new());
        while start.elapsed() < Duration::from_secs_f64(seconds) || times.is_empty() {
            let (layer, first) = (rng.usize(..layers), rng.usize(..slots));
            let of_layer = || (first..first + n).map(|slot| slot % slots * layers + layer);
            let from = Instant::now();
            for i in of_layer() {
                ring.fetch(i, &mut rng)?;
            }
            for i in of_layer() {
                bytes += ring.wait(i)?;
                experts += 1;
            }
            times.push(from.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        Ok((ring.measured(begin, bytes, experts, times.iter().sum()), times))
    }
}

/// A store with places (layer, slot) that are filled and waited for in turn.
struct Ring {
    store: Store,
    /// Layer after layer, then the next slot of each.
    places: Vec<(usize, u32)>,
    n_layers: usize,
    /// By layer: experts, and bytes of one.
    layers: Vec<(u32, u64)>,
}

impl Ring {
    /// So many slots in each of so many layers; fewer layers where that is too much memory.
    fn open(drive: &Drive, way: Way, n_layers: usize, slots: usize) -> Result<Ring> {
        let model = drive.model;
        let layers: Vec<_> = model.experts.layers.iter().map(|l| (l.n_experts, l.expert_bytes())).collect();
        let (Some(fewest), Some(largest)) = (layers.iter().map(|l| l.0).min(), layers.iter().map(|l| l.1).max()) else {
            return Err(err!(Model, "no layer has expert tensors (blk.N.ffn_*_exps): there is nothing to read"));
        };
        let slots = slots.min(fewest as usize);
        let n_layers = n_layers.min((MAX_SLOT_BYTES / (largest * slots as u64).max(1)) as usize).max(1);
        let config = StoreConfig {
            backing: Backing::Slots,
            slots: slots as u32,
            lanes: way.lanes,
            io: way.io,
            read_by: way.by,
            chunk_bytes: way.chunk_bytes,
            pack: drive.pack.cloned(),
            ..StoreConfig::default()
        };
        let paths: Vec<_> = model.files.iter().map(|f| f.path.clone()).collect();
        let lens: Vec<_> = model.files.iter().map(|f| f.len_bytes).collect();
        let store = Store::open(&paths, &lens, &model.experts, vec![], config)?;
        let places = (0..n_layers * slots).map(|i| (i % n_layers, (i / n_layers) as u32)).collect();
        Ok(Ring { store, places, n_layers, layers })
    }

    fn fetch(&self, place: usize, rng: &mut Rng) -> Result<()> {
        let (layer, slot) = self.places[place];
        self.store.fetch(layer, rng.u32(..self.layers[layer].0), slot)
    }

    /// The bytes that are there then.
    fn wait(&self, place: usize) -> Result<u64> {
        let (layer, slot) = self.places[place];
        self.store.wait(layer, slot, None)?;
        Ok(self.layers[layer].1)
    }

    fn counters(&self) -> (u64, u64, Option<u64>) {
        let c = self.store.counters();
        (c.reads, c.device_bytes, disk_read_bytes())
    }

    fn measured(&self, begin: (u64, u64, Option<u64>), bytes: u64, experts: u64, seconds: f64) -> Measured {
        let end = self.counters();
        let disk_bytes = end.2.zip(begin.2).map(|(end, begin)| end.saturating_sub(begin));
        Measured { bytes, seconds, experts, reads: end.0 - begin.0, asked_bytes: end.1 - begin.1, disk_bytes }
    }
}
