//! What the hook counts: of a batch in one layer (`Outcome`), of a pass, and since it was opened (`Stats`).

use crate::store::StoreCounters;

/// What `admit` did with the batch's ids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placed {
    /// Ids are slots; with the page-cache backing they are expert ids.
    #[default]
    Slots,
    /// The batch uses more experts than there are slots: ids are as they came.
    PassThrough,
    /// The model was opened with slots, and the page-cache backing is in force: ids are expert ids.
    Mapped,
}

/// One batch in one layer, or a sum of such. The fields are those of `hotset_outcome` in hotset.h.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    pub placed: Placed,
    pub hits: u32,
    pub misses: u32,
    pub dropped: u32,
    pub swapped: u32,
    pub read_bytes: u64,
    pub mass_dropped: f64,
    pub mass_swapped: f64,
}

impl Outcome {
    pub fn add(&mut self, other: &Outcome) {
        self.hits += other.hits;
        self.misses += other.misses;
        self.dropped += other.dropped;
        self.swapped += other.swapped;
        self.read_bytes += other.read_bytes;
        self.mass_dropped += other.mass_dropped;
        self.mass_swapped += other.mass_swapped;
    }
}

/// Sums of one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerStats {
    pub hits: u64,
    pub misses: u64,
    pub dropped: u64,
}

/// Sums over all layers. The fields are those of `hotset_stats` in hotset.h.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    pub passes: u64,
    pub aborted_passes: u64,
    pub decode_tokens: u64,
    pub prefill_tokens: u64,
    pub pass_through_rows: u64,
    pub hits: u64,
    pub misses: u64,
    pub dropped: u64,
    pub swapped: u64,
    pub mass_dropped: f64,
    pub mass_swapped: f64,
    pub bad_rows: u64,
    pub read_bytes: u64,
    pub device_bytes: u64,
    pub reads: u64,
    pub failed_reads: u64,
    pub wait_ns: u64,
    pub resident: u64,
    pub resident_bytes: u64,
    pub recorded_tokens: u64,
    pub left_out_tokens: u64,
    pub lost_metrics: u64,
}

impl Stats {
    pub fn add(&mut self, outcome: &Outcome) {
        self.hits += u64::from(outcome.hits);
        self.misses += u64::from(outcome.misses);
        self.dropped += u64::from(outcome.dropped);
        self.swapped += u64::from(outcome.swapped);
        self.mass_dropped += outcome.mass_dropped;
        self.mass_swapped += outcome.mass_swapped;
        self.read_bytes += outcome.read_bytes;
    }

    /// The store's counters since `base`, which were its counters at the last reset.
    pub fn with_store(mut self, now: StoreCounters, base: StoreCounters) -> Self {
        self.device_bytes = now.device_bytes - base.device_bytes;
        self.reads = now.reads - base.reads;
        self.failed_reads = now.failures - base.failures;
        self.wait_ns = now.wait_ns - base.wait_ns;
        self
    }
}
