//! The settings of a store, and what is refused of them.

use std::time::Duration;

use super::reader::Bounce;
use super::source::{IoMode, ReadBy};
use crate::error::{Result, err};
use crate::model::Pack;

/// Where resident experts live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Backing {
    /// In the arena: a known set, bounded, filled by direct reads.
    #[default]
    Slots,
    /// Wherever the system keeps the mapped file's pages: only hints, nothing is known or bounded.
    PageCache,
}

/// The longest read that an expert is cut into by default: six reads of an expert of the target, for drives that need four in flight. See bench/README.md.
pub const CHUNK_BYTES: u64 = 256 << 10; // HOTSET_CHUNK_BYTES in hotset.h
/// Reads in flight by default: more than the four that fast drives need, since a miss alone is cut into six, and a read more costs an
/// io_uring nothing.
pub const LANES: usize = 8;
/// Of I/O threads, or of reads in flight by an io_uring.
pub(super) const MAX_LANES: usize = 64;
/// Shorter reads cost more in calls than they bring.
const MIN_CHUNK_BYTES: u64 = 64 << 10;

/// Settings of a store; `Default` leaves `slots` at 0, which only [`Backing::PageCache`] accepts.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    pub backing: Backing,
    /// Slots of each layer; no more are made than the largest layer has experts.
    pub slots: u32,
    /// Reads in flight, 1 to 64; a thread each where it is not an io_uring that reads.
    pub lanes: usize,
    pub io: IoMode,
    pub read_by: ReadBy,
    /// What is longer is cut into reads of about equal size, at most so long: one miss then keeps several lanes busy. 0: nothing
    /// is cut; else at least 64 KiB.
    pub chunk_bytes: u64,
    /// The model's experts in packed form, to be read instead of its own files.
    pub pack: Option<Pack>,
    /// Bounce buffer of each lane, and one more; rounded up to a multiple of 64 KiB, no larger than a chunk needs, at most 1 GiB.
    pub bounce_bytes: usize,
    /// Jobs (reads) that may wait for a lane, 1 to 1 Mi. When it is full, `fetch` reads for itself.
    pub queue: usize,
    /// The longest any call waits; at most a day.
    pub timeout: Duration,
}

impl Default for StoreConfig {
    fn default() -> Self {
        StoreConfig {
            backing: Backing::Slots,
            slots: 0,
            lanes: LANES,
            io: IoMode::Direct,
            read_by: ReadBy::Ring,
            chunk_bytes: CHUNK_BYTES,
            pack: None,
            bounce_bytes: 1 << 20,
            queue: 4096,
            timeout: Duration::from_secs(30),
        }
    }
}

impl StoreConfig {
    /// The most that bounce buffers will take, in bytes, before anything is opened.
    pub fn plan_staging_bytes(&self) -> u64 {
        match (self.backing, self.io) {
            (Backing::Slots, IoMode::Direct) => (self.lanes as u64 + 1).saturating_mul(self.bounce_size() as u64),
            _ => 0,
        }
    }

    pub(super) fn bounce_size(&self) -> usize {
        // no read of a chunk, with the blocks at its ends, fills more
        let chunk =
            if self.chunk_bytes == 0 { u64::MAX } else { self.chunk_bytes.saturating_add(Bounce::MIN_BYTES as u64) };
        let most = usize::try_from(chunk).unwrap_or(usize::MAX).min(1 << 30);
        self.bounce_bytes.clamp(1, most).next_multiple_of(Bounce::MIN_BYTES)
    }

    pub(super) fn check(&self) -> Result<()> {
        let day = Duration::from_secs(24 * 60 * 60);
        if self.timeout.is_zero() || self.timeout > day {
            return Err(err!(Argument, "a timeout of {:?}: it must be above 0 and at most a day", self.timeout));
        }
        if self.chunk_bytes != 0 && self.chunk_bytes < MIN_CHUNK_BYTES {
            let n = self.chunk_bytes;
            return Err(err!(Argument, "chunks of {n} bytes: they must be at least {MIN_CHUNK_BYTES}, or 0 for none"));
        }
        if self.backing == Backing::PageCache {
            return match &self.pack {
                Some(p) => {
                    Err(err!(Argument, "{}: a pack is read into slots, not through the page cache", p.path.display()))
                }
                None => Ok(()),
            };
        }
        if self.slots == 0 || self.slots > i32::MAX as u32 {
            return Err(err!(Argument, "{} slots a layer: it must be 1 to {}", self.slots, i32::MAX));
        }
        if !(1..=MAX_LANES).contains(&self.lanes) {
            return Err(err!(Argument, "{} I/O lanes: it must be 1 to {MAX_LANES}", self.lanes));
        }
        if !(1..=1 << 20).contains(&self.queue) {
            return Err(err!(Argument, "a queue of {} jobs: it must be 1 to {}", self.queue, 1 << 20));
        }
        if self.bounce_bytes > 1 << 30 {
            return Err(err!(Argument, "a bounce buffer of {} bytes: it must be at most 1 GiB", self.bounce_bytes));
        }
        Ok(())
    }
}
