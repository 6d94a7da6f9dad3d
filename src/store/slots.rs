//! What each slot holds: whose bytes, which slices are there, and how to wait for those that are not yet.
//!
//! A slot's word counts its reads in flight (the pieces of its expert). Whoever moves that count from 0 has the claim on the
//! slot, the sole right to write to its memory: `fetch` takes it for all pieces at once and each lane gives one part back when
//! its read is over. A slice counts the pieces that it waits for, in the same way.
//!
//! ```text
//! empty ── claim ──> n in flight ── finish × n ──> filled, or filled with a failure
//!   ^                                                 │ next claim (fetch), or reset (release, clear_failed)
//!   └─────────────────────────────────────────────────┘
//! ```
//!
//! Readers of the state need no lock: a slice is there if its own count has come to 0. A waiter that finds it is not sleeps
//! on its layer's condition variable, and whatever comes to 0 wakes that layer. A finish changes the atomics first and takes
//! the layer's lock afterwards, so a waiter either sees the change or is already asleep when it is woken.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::*};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Result, err};

const IN_FLIGHT: u32 = 0xFFFF;
const FILLED: u32 = 1 << 16;
const FAILED: u32 = 1 << 17;
/// Of a slot that was read ahead and is nobody's yet: the layer does not wait for it, nor fail with it.
const AHEAD: u32 = 1 << 19;
const NOBODY: u32 = u32::MAX;

/// No more pieces than a slot's word can count.
pub(super) const MAX_PIECES: usize = IN_FLIGHT as usize;

/// Of one slice in one slot: its pieces in flight (`IN_FLIGHT`), and `FAILED` or `EMPTY` where it cannot be used all the same.
const READY: u32 = 0;
const EMPTY: u32 = 1 << 18;

struct Slot {
    /// Pieces in flight, and the flags.
    word: AtomicU32,
    expert: AtomicU32,
    /// Its pages take memory.
    committed: AtomicBool,
}

struct Failure {
    slot: u32,
    slices: Range<u32>,
    error: Error,
    /// `take_failed` has named it.
    taken: bool,
}

/// The slots of one layer.
pub(super) struct LayerSlots {
    layer: usize,
    n_pieces: u32,
    /// By slice, the pieces that it waits for.
    of_slice: Vec<u32>,
    slots: Vec<Slot>,
    /// Slot after slot.
    slices: Vec<AtomicU32>,
    /// Pieces in flight in the whole layer, but those read ahead.
    in_flight: AtomicU32,
    /// Failures that `take_failed` has not named yet.
    untaken: AtomicU32,
    failures: Mutex<Vec<Failure>>,
    changed: Condvar,
}

impl LayerSlots {
    /// `n_pieces` reads fill a slot, `of_slice` of which each slice waits for.
    pub fn new(layer: usize, slots: u32, n_pieces: usize, of_slice: &[u32]) -> LayerSlots {
        let slot =
            || Slot { word: AtomicU32::new(0), expert: AtomicU32::new(NOBODY), committed: AtomicBool::new(false) };
        LayerSlots {
            layer,
            n_pieces: n_pieces as u32,
            of_slice: of_slice.to_vec(),
            slots: (0..slots).map(|_| slot()).collect(),
            slices: (0..slots as usize * of_slice.len()).map(|_| AtomicU32::new(EMPTY)).collect(),
            in_flight: AtomicU32::new(0),
            untaken: AtomicU32::new(0),
            failures: Mutex::new(Vec::new()),
            changed: Condvar::new(),
        }
    }

    pub fn len(&self) -> u32 {
        self.slots.len() as u32
    }

    /// The expert whose bytes are all there.
    pub fn expert(&self, slot: u32) -> Option<u32> {
        let s = &self.slots[slot as usize];
        let there = s.word.load(Acquire) == FILLED;
        there.then(|| s.expert.load(Relaxed)).filter(|&e| e != NOBODY)
    }

    /// Claims a slot for reading an expert's pieces; each must be finished once. Waits, at most `timeout`, for reads that
    /// are still in flight in it. Whether its memory had been given back before is the answer. `ahead`: until `adopt`, nobody
    /// waits for it with the layer, and as a whole it is not ready.
    pub fn claim_for_fetch(&self, slot: u32, expert: u32, ahead: bool, timeout: Duration) -> Result<bool> {
        self.claim(slot, self.n_pieces, timeout)?;
        if !ahead {
            self.in_flight.fetch_add(self.n_pieces, Relaxed);
        }
        for (slice, &n) in self.slices(slot).iter().zip(&self.of_slice) {
            slice.store(n, Relaxed);
        }
        let s = &self.slots[slot as usize];
        s.expert.store(expert, Relaxed);
        s.word.fetch_or(if ahead { FILLED | AHEAD } else { FILLED }, Release);
        Ok(!s.committed.swap(true, Relaxed))
    }

    /// A slot that was read ahead, or is being read, is one like any other from here on. Any other stays as it is.
    pub fn adopt(&self, slot: u32) {
        let before = self.slots[slot as usize].word.fetch_and(!AHEAD, AcqRel);
        if before & AHEAD != 0 {
            // A piece that ends in between is taken off before it is counted: for whoever called, the sum is right on return.
            self.in_flight.fetch_add(before & IN_FLIGHT, AcqRel);
        }
    }

    /// The end of one piece's read, for which `slices` waited. The lane's writes happen before anybody sees them as ready.
    pub fn finish(&self, slot: u32, slices: Range<u32>, outcome: Result<()>) {
        let s = &self.slots[slot as usize];
        let waiting = &self.slices(slot)[slices.start as usize..slices.end as usize];
        if let Err(error) = outcome {
            // recorded before it shows, so that whoever sees the state finds the error
            let mut failures = self.failures.lock();
            failures.push(Failure { slot, slices, error, taken: false });
            self.untaken.fetch_add(1, Release);
            s.word.fetch_or(FAILED, Release);
            for slice in waiting {
                slice.fetch_or(FAILED, Release);
            }
        }
        let mut over = false;
        for slice in waiting {
            over |= slice.fetch_sub(1, AcqRel) & IN_FLIGHT == 1;
        }
        // only now: whoever claims the slot next may set the slices' counts
        let before = s.word.fetch_sub(1, AcqRel);
        over |= before & IN_FLIGHT == 1;
        if before & AHEAD == 0 {
            over |= self.in_flight.fetch_sub(1, AcqRel) == 1;
        }
        // nobody waits for less than a slice: a part of one wakes nobody
        if over {
            self.wake();
        }
    }

    /// Claims a slot, runs `f` on it as its only user, and leaves it empty. `f` is told whether the slot takes memory, and
    /// says whether it does afterwards. Refused while reads are in flight in it.
    pub fn reset(&self, slot: u32, timeout: Duration, f: impl FnOnce(bool) -> Result<bool>) -> Result<()> {
        let n = self.slices(slot).iter().filter(|slice| slice.load(Acquire) & IN_FLIGHT > 0).count();
        if n > 0 {
            return Err(err!(State, "layer {} slot {slot}: {n} slices are in flight in it", self.layer));
        }
        // what may still be counted is a lane between the last two steps of a finish
        self.claim(slot, 1, timeout)?;
        let s = &self.slots[slot as usize];
        self.slices(slot).iter().for_each(|slice| slice.store(EMPTY, Relaxed));
        s.expert.store(NOBODY, Relaxed);
        let outcome = f(s.committed.load(Relaxed)).map(|committed| s.committed.store(committed, Relaxed));
        s.word.store(0, Release);
        self.wake();
        outcome
    }

    /// Forgets a slot's failure and leaves it empty. A slot without one stays as it is.
    pub fn clear_failed(&self, slot: u32, timeout: Duration) -> Result<()> {
        if self.slots[slot as usize].word.load(Acquire) & FAILED == 0 {
            return Ok(());
        }
        self.reset(slot, timeout, Ok)
    }

    /// The slots that failed since the last call, each once. Allocates only if there are any.
    pub fn take_failed(&self) -> Vec<u32> {
        if self.untaken.load(Acquire) == 0 {
            return Vec::new();
        }
        let mut failures = self.failures.lock();
        let mut slots: Vec<u32> = failures.iter().filter(|f| !f.taken).map(|f| f.slot).collect();
        failures.iter_mut().for_each(|f| f.taken = true);
        self.untaken.store(0, Relaxed);
        slots.sort_unstable();
        slots.dedup();
        slots
    }

    /// Whether the slice, or the whole slot, is there. One load.
    pub fn is_ready(&self, slot: u32, slice: Option<u32>) -> bool {
        match slice {
            Some(i) => self.slices(slot)[i as usize].load(Acquire) == READY,
            None => self.slots[slot as usize].word.load(Acquire) == FILLED,
        }
    }

    /// Whether nothing of the slice, or of the whole slot, is in flight.
    pub fn is_over(&self, slot: u32, slice: Option<u32>) -> bool {
        match slice {
            Some(i) => self.slices(slot)[i as usize].load(Acquire) & IN_FLIGHT == 0,
            None => self.slots[slot as usize].word.load(Acquire) & IN_FLIGHT == 0,
        }
    }

    /// Waits until the slice, or the whole slot, is there. Err if its read failed, if nobody asked for it, or if it is not
    /// there after `timeout`.
    pub fn wait(&self, slot: u32, slice: Option<u32>, timeout: Duration) -> Result<()> {
        let over = self.sleep_until(|| self.is_over(slot, slice), timeout);
        if self.is_ready(slot, slice) {
            return Ok(());
        }
        let (layer, s) = (self.layer, &self.slots[slot as usize]);
        let of = slice.map_or_else(String::new, |i| format!(" slice {i}"));
        if !over {
            let (expert, n) = (s.expert.load(Relaxed), s.word.load(Relaxed) & IN_FLIGHT);
            return Err(err!(
                Timeout,
                "layer {layer} expert {expert} slot {slot}{of}: not read after {} ms, {n} reads in flight",
                timeout.as_millis()
            ));
        }
        let failures = self.failures.lock();
        match failures.iter().find(|f| f.slot == slot && slice.is_none_or(|i| f.slices.contains(&i))) {
            Some(f) => Err(f.error.clone()),
            None => Err(err!(State, "layer {layer} slot {slot}{of}: nothing was read into it")),
        }
    }

    /// Waits until nothing is in flight in the layer, but what is read ahead.
    pub fn wait_idle(&self, timeout: Duration) -> Result<()> {
        if self.sleep_until(|| self.is_idle(), timeout) {
            return Ok(());
        }
        let n = self.in_flight.load(Relaxed);
        Err(err!(Timeout, "layer {}: {n} reads not over after {} ms", self.layer, timeout.as_millis()))
    }

    /// Err with the first recorded failure, if there is one; those of what was read ahead are none.
    pub fn first_failure(&self) -> Result<()> {
        let wanted = |f: &&Failure| self.slots[f.slot as usize].word.load(Acquire) & AHEAD == 0;
        self.failures.lock().iter().find(wanted).map_or(Ok(()), |f| Err(f.error.clone()))
    }

    /// Whether nothing is in flight in the layer, but what is read ahead.
    pub fn is_idle(&self) -> bool {
        self.in_flight.load(Acquire) == 0
    }

    /// Moves the slot's count from 0 to `n`, and forgets what it held. On Err nothing has changed.
    fn claim(&self, slot: u32, n: u32, timeout: Duration) -> Result<()> {
        let word = &self.slots[slot as usize].word;
        let deadline = Instant::now() + timeout;
        loop {
            let free = |w: u32| (w & IN_FLIGHT == 0).then_some(n);
            match word.fetch_update(AcqRel, Acquire, free) {
                Ok(before) if before & FAILED != 0 => {
                    let mut failures = self.failures.lock();
                    let untaken = failures.iter().filter(|f| f.slot == slot && !f.taken).count();
                    failures.retain(|f| f.slot != slot);
                    self.untaken.fetch_sub(untaken as u32, Relaxed);
                    return Ok(());
                }
                Ok(_) => return Ok(()),
                Err(_) => {}
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if !self.sleep_until(|| word.load(Acquire) & IN_FLIGHT == 0, left) {
                let (layer, n, ms) = (self.layer, word.load(Relaxed) & IN_FLIGHT, timeout.as_millis());
                return Err(err!(Timeout, "layer {layer} slot {slot}: {n} earlier reads not over after {ms} ms"));
            }
        }
    }

    /// The counts of a slot's slices.
    fn slices(&self, slot: u32) -> &[AtomicU32] {
        let n = self.of_slice.len();
        &self.slices[slot as usize * n..][..n]
    }

    fn wake(&self) {
        drop(self.failures.lock());
        self.changed.notify_all();
    }

    /// Sleeps until `done`, at most `timeout`; whether it is done.
    fn sleep_until(&self, done: impl Fn() -> bool, timeout: Duration) -> bool {
        if done() {
            return true;
        }
        let deadline = Instant::now() + timeout;
        let mut lock = self.failures.lock();
        while !done() {
            if self.changed.wait_until(&mut lock, deadline).timed_out() {
                return done();
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    const SOON: Duration = Duration::from_millis(20);
    const LATER: Duration = Duration::from_secs(20);

    fn filled(l: &LayerSlots, slot: u32, expert: u32) {
        l.claim_for_fetch(slot, expert, false, SOON).unwrap();
        (0..l.n_pieces).for_each(|i| l.finish(slot, i..i + 1, Ok(())));
    }

    #[test]
    fn a_slot_from_empty_to_filled_and_back() {
        let l = LayerSlots::new(3, 2, 2, &[1, 1]);
        assert_eq!(l.wait(0, None, SOON).unwrap_err().kind, ErrorKind::State);
        assert!(l.claim_for_fetch(0, 7, false, SOON).unwrap());
        let e = l.wait(0, Some(1), SOON).unwrap_err();
        assert_eq!(e.kind, ErrorKind::Timeout);
        assert!(e.detail.starts_with("layer 3 expert 7 slot 0 slice 1: not read after 20 ms"), "{e}");
        l.finish(0, 1..2, Ok(()));
        l.wait(0, Some(1), SOON).unwrap();
        assert_eq!(l.wait(0, None, SOON).unwrap_err().kind, ErrorKind::Timeout);
        assert_eq!(l.wait_idle(SOON).unwrap_err().kind, ErrorKind::Timeout);
        assert_eq!(l.expert(0), None);
        l.finish(0, 0..1, Ok(()));
        l.wait(0, None, SOON).unwrap();
        l.wait_idle(SOON).unwrap();
        assert_eq!((l.expert(0), l.expert(1)), (Some(7), None));
        for took_memory in [true, false] {
            let mut was = None;
            l.reset(0, SOON, |w| {
                was = Some(w);
                Ok(false)
            })
            .unwrap();
            assert_eq!(was, Some(took_memory));
        }
        assert_eq!(l.expert(0), None);
        assert_eq!(l.wait(0, Some(0), SOON).unwrap_err().kind, ErrorKind::State);
    }

    #[test]
    fn a_failure_stays_until_cleared_or_fetched_over() {
        let l = LayerSlots::new(0, 2, 2, &[1, 1]);
        for clear in [true, false] {
            l.claim_for_fetch(1, 4, false, SOON).unwrap();
            l.finish(1, 0..1, Ok(()));
            l.finish(1, 1..2, Err(err!(Io, "broken")));
            l.wait(1, Some(0), SOON).unwrap();
            for _ in 0..2 {
                assert_eq!(l.wait(1, Some(1), SOON).unwrap_err().detail, "broken");
                assert_eq!(l.wait(1, None, SOON).unwrap_err().detail, "broken");
                assert_eq!(l.first_failure().unwrap_err().detail, "broken");
            }
            assert_eq!(l.expert(1), None);
            if clear {
                assert_eq!(l.take_failed(), [1]);
                assert!(l.take_failed().is_empty());
                l.clear_failed(1, SOON).unwrap();
                assert_eq!(l.wait(1, Some(0), SOON).unwrap_err().kind, ErrorKind::State);
            } else {
                filled(&l, 1, 5);
                assert!(l.take_failed().is_empty());
                l.clear_failed(1, SOON).unwrap();
                assert_eq!(l.expert(1), Some(5), "no failure: nothing cleared");
            }
            l.first_failure().unwrap();
        }
    }

    #[test]
    fn a_claim_waits_for_what_is_in_flight_and_changes_nothing_if_it_must_give_up() {
        let l = LayerSlots::new(0, 1, 1, &[1]);
        l.claim_for_fetch(0, 1, false, SOON).unwrap();
        assert_eq!(l.claim_for_fetch(0, 2, false, SOON).unwrap_err().kind, ErrorKind::Timeout);
        assert_eq!(l.reset(0, LATER, |_| unreachable!()).unwrap_err().kind, ErrorKind::State);
        std::thread::scope(|s| {
            s.spawn(|| l.claim_for_fetch(0, 3, false, LATER).unwrap());
            std::thread::sleep(Duration::from_millis(5));
            l.finish(0, 0..1, Ok(()));
        });
        l.finish(0, 0..1, Ok(()));
        assert_eq!(l.expert(0), Some(3));
    }

    #[test]
    fn a_slice_is_there_when_all_its_pieces_are() {
        // three pieces: the second holds the end of slice 0 and all of slice 1, the third the end of slice 2
        let l = LayerSlots::new(0, 1, 3, &[2, 1, 2]);
        let pieces = [0..1, 0..3, 2..3];
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
            for failing in [None, Some(0), Some(1), Some(2)] {
                l.claim_for_fetch(0, 6, false, SOON).unwrap();
                for (done, &i) in order.iter().enumerate() {
                    assert_eq!(l.wait(0, None, Duration::ZERO).unwrap_err().kind, ErrorKind::Timeout);
                    let failed = failing == Some(i);
                    let outcome = if failed { Err(err!(Io, "piece {i} is broken")) } else { Ok(()) };
                    l.finish(0, pieces[i].clone(), outcome);
                    let over = &order[..=done];
                    for slice in 0..3u32 {
                        let mine: Vec<usize> = (0..3).filter(|&p| pieces[p].contains(&slice)).collect();
                        let there = mine.iter().all(|p| over.contains(p));
                        let good = there && !mine.iter().any(|p| failing == Some(*p));
                        assert_eq!(l.is_ready(0, Some(slice)), good, "{order:?} {failing:?} {i} {slice}");
                        match l.wait(0, Some(slice), Duration::ZERO) {
                            Ok(()) => assert!(good),
                            Err(e) if there => assert!(e.detail.ends_with("is broken"), "{e}"),
                            Err(e) => assert_eq!(e.kind, ErrorKind::Timeout),
                        }
                    }
                }
                assert_eq!(l.expert(0), failing.is_none().then_some(6));
                assert_eq!(l.take_failed().len(), usize::from(failing.is_some()));
                l.wait_idle(Duration::ZERO).unwrap();
            }
        }
    }

    #[test]
    fn what_is_read_ahead_is_nobodys_until_it_is_adopted() {
        let l = LayerSlots::new(0, 2, 2, &[1, 1]);
        let read = |fail: bool| l.finish(0, 1..2, if fail { Err(err!(Io, "broken")) } else { Ok(()) });
        for (fail, early) in [(false, false), (false, true), (true, false), (true, true)] {
            l.claim_for_fetch(0, 7, true, SOON).unwrap();
            l.finish(0, 0..1, Ok(()));
            if !early {
                read(fail);
            }
            // the layer has nothing to do with it, whether it is there, fails, or is still being read
            assert!(l.is_idle() && !l.is_ready(0, None) && l.is_over(0, None) != early);
            l.first_failure().unwrap();
            filled(&l, 1, 3);
            l.wait_idle(SOON).unwrap();
            l.adopt(0);
            assert!(l.is_idle() != early);
            if early {
                assert_eq!(l.wait_idle(SOON).unwrap_err().kind, ErrorKind::Timeout);
                read(fail);
            }
            l.wait_idle(SOON).unwrap();
            assert_eq!((l.expert(0), l.first_failure().is_err()), (if fail { None } else { Some(7) }, fail));
            assert_eq!(l.wait(0, None, SOON).is_err(), fail);
            l.adopt(0);
            l.adopt(1);
            assert!(l.is_idle() && l.expert(1) == Some(3), "adopting what was not read ahead changes nothing");
        }
    }

    #[test]
    fn all_waiters_wake() {
        let l = LayerSlots::new(0, 1, 3, &[1, 1, 1]);
        for round in 0..50 {
            l.claim_for_fetch(0, round, false, LATER).unwrap();
            std::thread::scope(|s| {
                for slice in [None, Some(0), Some(1), Some(2)] {
                    let l = &l;
                    s.spawn(move || l.wait(0, slice, LATER).unwrap());
                }
                (0..3).for_each(|i| l.finish(0, i..i + 1, Ok(())));
            });
        }
    }
}
