//! Reading ahead: experts that a layer is likely to want soon are read into slots set aside, by lanes that have nothing else to do. Who
//! guesses is the caller (the ggml adapter applies the next layer's router to this layer's input).
//!
//! ```text
//! read_ahead(layer, guess) ── not resident, not aside yet ──> a slot set aside ── store::fetch_ahead
//! admit: a miss whose expert is aside ── adopt ──> its slot and the one that the cache gave change places; no read
//! ```
//!
//! Which experts are resident, and who goes next, is what it would be without: a miss that was guessed is a miss. So the output does
//! not change, nor does a replay; the read has only begun earlier.

use super::Hook;
use super::layer::Layer;
use crate::error::{Result, err};
use crate::store::Backing;

impl Hook {
    /// Starts reading those of `experts` (the likeliest first) that are neither resident nor aside, as far as slots are set aside in
    /// which no read is in flight. How many were started. `Range` for an expert that the layer does not have.
    pub fn read_ahead(&mut self, block: u32, experts: &[i32]) -> Result<u32> {
        let index = self.layer_index(block)?;
        let n = self.layers[index].n_experts;
        if let Some(bad) = experts.iter().find(|&&e| e < 0 || e as u32 >= n) {
            return Err(err!(Range, "block {block}: expert {bad} was to be read ahead, there are {n}"));
        }
        if self.live.backing != Backing::Slots || self.layers[index].ahead.is_empty() {
            return Ok(0);
        }
        self.forget_failed(index);
        let (store, l) = (&self.store, &mut self.layers[index]);
        let mut started = 0;
        for &e in experts {
            let expert = e as u16;
            if l.cache.is_resident(expert) || l.ahead.contains(&Some(expert)) {
                continue;
            }
            // What is guessed again stays; so does what is still being read.
            let stays = |held: &Option<u16>| held.is_some_and(|h| experts.contains(&h.into()));
            let free =
                |&i: &usize| !stays(&l.ahead[i]) && store.is_over(index, l.cache.aside()[i], None).unwrap_or(false);
            let Some(place) = (0..l.ahead.len()).find(free) else { break };
            if !store.fetch_ahead(index, expert.into(), l.cache.aside()[place])? {
                break;
            }
            let wasted = l.ahead[place].replace(expert).is_some();
            self.stats.ahead_wasted_bytes += if wasted { l.expert_bytes } else { 0 };
            self.stats.ahead_issued += 1;
            started += 1;
        }
        Ok(started)
    }
}

impl Layer {
    /// Sets slots aside, as many as there are experts beyond the cache's own.
    pub fn set_aside(&mut self, n: u32) {
        self.cache.set_aside(n);
        self.ahead = vec![None; self.cache.aside().len()];
    }

    /// Gives `expert`, which was just placed as a miss, the slot into which it was read ahead, if it was: its bytes are there, or will be.
    pub fn adopt(&mut self, expert: u16) -> Option<u32> {
        let i = self.ahead.iter().position(|&held| held == Some(expert))?;
        self.cache.take_aside(expert, i);
        self.ahead[i] = None;
        self.cache.slot_of(expert)
    }

    /// Nothing is known of what is in this slot, if it is one of those aside.
    pub fn forget_aside(&mut self, slot: u32) {
        if let Some(i) = self.cache.aside().iter().position(|&s| s == slot) {
            self.ahead[i] = None;
        }
    }
}
