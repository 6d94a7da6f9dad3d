//! Which experts of a layer are resident, in which slot, and which one goes when room is needed.
//!
//! A batch passes through in four steps: `begin_batch` pins every expert that the batch may use (or says that
//! they do not fit, and nothing has changed), `place` is called for each expert in token order and answers
//! hit or miss with the slot, `end_token` records the use of one token's experts, `end_batch` gives the pinned
//! ones that were not used back to the pool they came from. The live hook and every replay walk these same steps.
//!
//! Rules, as in the reference replayer (`replay_moe_cache.py`): the chosen of a token are never victims, the experts
//! of one token are used at the same time, and ties go to the lowest id. Beyond it: in a batch of several tokens
//! nothing that the batch routes to is a victim, since all of it is computed with at once.

mod belady;
mod belady_bypass;
mod ema;
mod inverse_router;
mod lfu;
mod lru;
mod near_pick;
pub mod policy;
mod pool;
mod random;

pub use belady::NextUses;
pub use lru::Lru;
pub use policy::{AnyPolicy, Build, Policy, Spec};

use crate::error::{Result, err};

/// A number that no expert has.
pub const NO_EXPERT: u16 = u16::MAX;
const NO_SLOT: u32 = u32::MAX;

/// `Argument` where a layer has more experts than ids can name.
pub fn check_experts(n_experts: usize) -> Result<()> {
    if n_experts >= usize::from(NO_EXPERT) {
        return Err(err!(Argument, "{n_experts} experts: at most {}", NO_EXPERT - 1));
    }
    Ok(())
}

/// How a victim is chosen. One policy is one file.
///
/// The cache tells the policy what enters and leaves its pool of victims; the pool never holds an expert
/// that is pinned by the batch in work.
pub trait Eviction: Send {
    /// `expert` leaves the pool, if it is there: a batch pins it, or it is no longer resident.
    fn remove(&mut self, expert: u16);
    /// `expert`, resident, enters the pool at the place that its uses so far give it.
    fn insert(&mut self, expert: u16);
    /// `remove` of each.
    fn remove_all(&mut self, experts: &[u16]) {
        experts.iter().for_each(|&e| self.remove(e));
    }
    /// `insert` of each.
    fn insert_all(&mut self, experts: &[u16]) {
        experts.iter().for_each(|&e| self.insert(e));
    }
    /// A token's candidates (ids by falling rank, the router's own choice the first k) and their scores, whatever ran. Told before `used`,
    /// where the policy asks for it ([`Build::CANDIDATES`]).
    fn ranked(&mut self, _ids: &[u16], _scores: &[f32], _k: usize) {}
    /// A token used these experts (distinct; in the pool only where it had all of them). `token` counts this layer's tokens from 1.
    fn used(&mut self, experts: &[u16], token: u64);
    /// The expert that goes: taken out of the pool. None when the pool is empty.
    fn victim(&mut self) -> Option<u16>;
    /// Whether this missed expert of the token in work had better not be kept, in place of a victim.
    fn refuses(&self, _expert: u16) -> bool {
        false
    }
    /// The pool from the next victim to the last.
    fn order(&self) -> Vec<u16>;
    /// Forgets everything.
    fn clear(&mut self);
}

/// Where an expert is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placed {
    /// Resident, in this slot.
    Hit { slot: u32 },
    /// Not resident until now: its bytes are to be read into this slot, which `victim` has left (if there was one).
    Miss { slot: u32, victim: Option<u16> },
}

impl Placed {
    pub fn slot(self) -> u32 {
        match self {
            Placed::Hit { slot } | Placed::Miss { slot, .. } => slot,
        }
    }
}

/// No slot could be had for an expert: every resident one is pinned by the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoVictim;

/// The resident experts of one layer.
pub struct LayerCache<P = Lru> {
    policy: P,
    /// By expert id.
    slot_of: Vec<u32>,
    pinned: Vec<bool>,
    /// Pinned by this batch, in order of first appearance.
    batch: Vec<u16>,
    token_experts: Vec<u16>,
    /// Slots without an expert, the lowest on top.
    free: Vec<u32>,
    capacity: u32,
    n_resident: u32,
    tokens: u64,
}

impl LayerCache<Lru> {
    /// An empty cache with least recently used eviction, for `n_experts` experts and `capacity` slots.
    pub fn lru(n_experts: usize, capacity: u32) -> Self {
        Self::new(Lru::new(n_experts), n_experts, capacity)
    }
}

impl<P: Eviction> LayerCache<P> {
    pub fn new(policy: P, n_experts: usize, capacity: u32) -> Self {
        assert!(n_experts < NO_EXPERT as usize, "expert ids are u16");
        let capacity = capacity.min(n_experts as u32);
        Self {
            policy,
            slot_of: vec![NO_SLOT; n_experts],
            pinned: vec![false; n_experts],
            batch: Vec::with_capacity(n_experts),
            token_experts: Vec::with_capacity(n_experts),
            // Room for every expert, so that growing later moves nothing on the decode path.
            free: {
                let mut free = Vec::with_capacity(n_experts);
                free.extend((0..capacity).rev());
                free
            },
            capacity,
            n_resident: 0,
            tokens: 0,
        }
    }

    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    pub fn n_experts(&self) -> usize {
        self.slot_of.len()
    }

    pub fn n_resident(&self) -> u32 {
        self.n_resident
    }

    pub fn is_resident(&self, expert: u16) -> bool {
        self.slot_of.get(expert as usize).is_some_and(|&s| s != NO_SLOT)
    }

    pub fn slot_of(&self, expert: u16) -> Option<u32> {
        self.slot_of.get(expert as usize).copied().filter(|&s| s != NO_SLOT)
    }

    /// The resident experts, the next victim first. Between batches only.
    pub fn resident_oldest_first(&self) -> Vec<u16> {
        debug_assert!(self.batch.is_empty());
        self.policy.order()
    }

    /// Pins every expert of `experts` (ids below `n_experts`, repeats allowed) until `end_batch`.
    ///
    /// False when they are more than the slots hold: nothing has changed, and the batch is to pass through.
    pub fn begin_batch(&mut self, experts: impl Iterator<Item = u16>) -> bool {
        debug_assert!(self.batch.is_empty());
        for e in experts {
            if !self.pinned[e as usize] {
                if self.batch.len() == self.capacity as usize {
                    self.batch.iter().for_each(|&p| self.pinned[p as usize] = false);
                    self.batch.clear();
                    return false;
                }
                self.pinned[e as usize] = true;
                self.batch.push(e);
            }
        }
        self.policy.remove_all(&self.batch);
        true
    }

    /// Experts that the batch in work has pinned, each counted once.
    pub fn n_pinned(&self) -> usize {
        self.batch.len()
    }

    /// Gives `expert`, which `begin_batch` has pinned, its slot. The caller reads its bytes on a miss.
    pub fn place(&mut self, expert: u16) -> Result<Placed, NoVictim> {
        debug_assert!(self.pinned[expert as usize], "place() of an expert that begin_batch() was not told of");
        self.token_experts.push(expert);
        if let Some(slot) = self.slot_of(expert) {
            return Ok(Placed::Hit { slot });
        }
        let (slot, victim) = self.admit(expert)?;
        Ok(Placed::Miss { slot, victim })
    }

    /// Makes an expert resident: in a free slot, or in the victim's.
    #[inline]
    fn admit(&mut self, expert: u16) -> Result<(u32, Option<u16>), NoVictim> {
        let (slot, victim) = if self.n_resident < self.capacity {
            let slot = self.free.pop().ok_or(NoVictim)?;
            self.n_resident += 1;
            (slot, None)
        } else {
            let victim = self.policy.victim().ok_or(NoVictim)?;
            (std::mem::replace(&mut self.slot_of[victim as usize], NO_SLOT), Some(victim))
        };
        self.slot_of[expert as usize] = slot;
        Ok((slot, victim))
    }

    /// A batch of one token, all of it at once, for a caller that only counts: `begin_batch`, `place` of each, `ranked` (where
    /// candidates are given: ids, scores, k), `end_token`, `end_batch`. Returns the misses; None, and nothing has changed, where an
    /// expert comes twice or they do not fit.
    pub fn token(&mut self, experts: &[u16], candidates: Option<(&[u16], &[f32], usize)>) -> Option<u32> {
        debug_assert!(self.batch.is_empty());
        let (mut twice, mut misses) = (experts.len() > self.capacity as usize, 0);
        for &e in experts {
            twice |= std::mem::replace(&mut self.pinned[e as usize], true);
            misses += u32::from(self.slot_of[e as usize] == NO_SLOT);
        }
        experts.iter().for_each(|&e| self.pinned[e as usize] = false);
        if twice {
            return None;
        }
        // Without a miss nothing goes, so nothing need be kept from going.
        if misses > 0 {
            self.policy.remove_all(experts);
            for &e in experts {
                if self.slot_of[e as usize] == NO_SLOT {
                    // They fit, and none of them is in the pool: there is a slot.
                    let admitted = self.admit(e);
                    debug_assert!(admitted.is_ok());
                }
            }
        }
        if let Some((ids, scores, k)) = candidates {
            self.policy.ranked(ids, scores, k);
        }
        self.tokens += 1;
        self.policy.used(experts, self.tokens);
        if misses > 0 {
            self.policy.insert_all(experts);
        }
        Some(misses)
    }

    /// Whether the policy would rather not keep this expert, which `begin_batch` has pinned and which is not resident. Then
    /// [`Self::pass_over`] it, or `place` it all the same.
    pub fn refuses(&self, expert: u16) -> bool {
        self.n_resident == self.capacity && self.policy.refuses(expert)
    }

    /// The token uses `expert` without a slot.
    pub fn pass_over(&mut self, expert: u16) {
        self.token_experts.push(expert);
    }

    /// The candidates of the token in work, for a policy that wants them ([`Policy::needs_candidates`]): before its `end_token`.
    #[inline]
    pub fn ranked(&mut self, ids: &[u16], scores: &[f32], k: usize) {
        self.policy.ranked(ids, scores, k);
    }

    /// The experts placed since the last `end_token` were one token's.
    pub fn end_token(&mut self) {
        self.tokens += 1;
        self.policy.used(&self.token_experts, self.tokens);
        self.token_experts.clear();
    }

    /// The batch is placed: what it pinned is in the pool again. Not earlier: all of a batch is computed with at once,
    /// so nothing of it may go while it is being placed.
    pub fn end_batch(&mut self) {
        let mut resident = true;
        for &e in &self.batch {
            self.pinned[e as usize] = false;
            resident &= self.slot_of[e as usize] != NO_SLOT;
        }
        if !resident {
            let slot_of = &self.slot_of;
            self.batch.retain(|&e| slot_of[e as usize] != NO_SLOT);
        }
        self.policy.insert_all(&self.batch);
        self.batch.clear();
        self.token_experts.clear();
    }

    /// Forgets `expert`, whose bytes are not in its slot (a read that failed). Between batches only.
    pub fn forget(&mut self, expert: u16) {
        if let Some(slot) = self.slot_of(expert) {
            self.policy.remove(expert);
            self.slot_of[expert as usize] = NO_SLOT;
            self.n_resident -= 1;
            self.give_back(slot);
        }
    }

    /// The expert in `slot`, if any: a search, for error paths.
    pub fn expert_in(&self, slot: u32) -> Option<u16> {
        self.slot_of.iter().position(|&s| s == slot && s != NO_SLOT).map(|e| e as u16)
    }

    /// Changes the number of slots; what no longer fits goes, oldest first, and `released` is told of every slot
    /// that may be given back to the system: what it held is gone, or it was free. Between batches only.
    pub fn set_capacity(&mut self, capacity: u32, mut released: impl FnMut(u32)) {
        debug_assert!(self.batch.is_empty());
        let capacity = capacity.min(self.slot_of.len() as u32);
        while self.n_resident > capacity {
            let Some(victim) = self.policy.victim() else { break };
            let slot = std::mem::replace(&mut self.slot_of[victim as usize], NO_SLOT);
            self.n_resident -= 1;
            released(slot);
        }
        // Slots keep their numbers when the cache shrinks (no expert is moved), so the free ones are those of 0..n_experts
        // without an expert; only capacity - n_resident of them are ever in use at a time.
        let mut taken = vec![false; self.slot_of.len()];
        self.slot_of.iter().filter(|&&s| s != NO_SLOT).for_each(|&s| taken[s as usize] = true);
        let before = self.free.clone();
        self.free.clear();
        self.free.extend((0..self.slot_of.len() as u32).rev().filter(|&s| !taken[s as usize]));
        let spare = self.free.len() - (capacity - self.n_resident) as usize;
        self.free.drain(..spare);
        // A slot that was free may have been in use before: a cleared cache keeps its slots.
        before.into_iter().filter(|slot| !self.is_free(*slot)).for_each(released);
        self.capacity = capacity;
    }

    /// Empties the cache; its slots stay its own.
    pub fn clear(&mut self) {
        self.end_batch();
        self.policy.clear();
        for e in 0..self.slot_of.len() {
            let slot = std::mem::replace(&mut self.slot_of[e], NO_SLOT);
            if slot != NO_SLOT {
                self.give_back(slot);
            }
        }
        self.n_resident = 0;
        self.tokens = 0;
    }

    /// Makes these experts (distinct, below `n_experts`) the resident ones, oldest use first; what does not fit is the oldest.
    /// What a policy counts beside the order (uses, popularity) begins with it. What is resident already stays in its slot; of every other
    /// one `read` is told, with its slot, and one of which it returns false is left out. Between batches only.
    pub fn restore_with(&mut self, oldest_first: &[u16], mut read: impl FnMut(u16, u32) -> bool) {
        let skip = oldest_first.len().saturating_sub(self.capacity as usize);
        let wanted = &oldest_first[skip..];
        self.end_batch();
        self.policy.clear();
        self.tokens = 0;
        wanted.iter().for_each(|&e| self.pinned[e as usize] = true);
        for e in 0..self.slot_of.len() {
            if !std::mem::take(&mut self.pinned[e]) {
                self.forget(e as u16);
            }
        }
        for &e in wanted {
            if !self.begin_batch(std::iter::once(e)) {
                continue;
            }
            let kept = match self.place(e) {
                Ok(Placed::Hit { .. }) => true,
                Ok(Placed::Miss { slot, .. }) => read(e, slot),
                Err(NoVictim) => false,
            };
            if kept {
                self.end_token();
            }
            self.end_batch();
            if !kept {
                self.forget(e);
            }
        }
    }

    /// `restore_with` for a cache that only counts.
    pub fn restore(&mut self, oldest_first: &[u16]) {
        self.restore_with(oldest_first, |_, _| true);
    }

    fn is_free(&self, slot: u32) -> bool {
        self.free.get(self.free.partition_point(|&s| s > slot)) == Some(&slot)
    }

    fn give_back(&mut self, slot: u32) {
        let at = self.free.partition_point(|&s| s > slot);
        self.free.insert(at, slot);
    }
}

#[cfg(test)]
mod tests;
