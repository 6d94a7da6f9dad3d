//! The second call of a layer: drop what is cold and light, give the rest its slots, start the reads, and put slots (or
//! expert ids, with the page-cache backing) in the place of ids.

use super::pass::Stage;
use super::rows::{Adjacent, Rows, RowsMut};
use super::stats::{Outcome, Placed};
use super::{Batch, Hook};
use crate::cache;
use crate::error::{Error, Result, err};
use crate::route::{drop, gate};
use crate::store::Backing;
use crate::trace::Phase;

impl Hook {
    /// `ids`: rows of k expert ids, out: slots. `weights`: the final routing weights, or None where nothing can be dropped.
    /// Reads are in flight when it returns. An error leaves ids and weights as they were.
    pub fn admit<I: RowsMut<i32>, W: RowsMut<f32>>(
        &mut self,
        batch: &Batch,
        ids: &mut I,
        weights: Option<&mut W>,
    ) -> Result<Outcome> {
        let layer = self.check_batch(batch)?;
        self.check_ids(batch, ids)?;
        self.enter(layer, Stage::Admit, batch);
        let l = &self.layers[layer];
        let mut outcome = Outcome { swapped: l.swapped, mass_swapped: l.mass_swapped, ..Outcome::default() };
        if batch.n_tokens > 0 {
            self.forget_failed(layer);
            let prefill = self.pass.as_ref().is_some_and(|p| p.phase == Phase::Prefill);
            let dropping = self.live.drop.threshold > 0.0 && (!prefill || self.config.prefill.drop);
            let weights = weights.filter(|_| dropping);
            if self.layers[layer].cache.begin_batch(self.scratch.batch.iter().copied()) {
                let placed = self.place(layer, batch, weights.as_deref(), &mut outcome);
                self.layers[layer].cache.end_batch();
                placed?;
                self.hand_back(layer, batch, ids, weights);
                if self.live.backing != self.config.backing {
                    outcome.placed = Placed::Mapped;
                }
            } else {
                outcome.placed = Placed::PassThrough;
            }
        }
        (self.layers[layer].swapped, self.layers[layer].mass_swapped) = (0, 0.0);
        self.leave(layer, batch.n_tokens, &outcome);
        Ok(outcome)
    }

    /// `select`, the weights of the chosen, and `admit`, for an engine without a graph. `ids` and `weights` are out (with `batch.routed`
    /// ids are in, too); an error leaves both as they were.
    pub fn layer(
        &mut self,
        batch: &Batch,
        scores: &impl Rows<f32>,
        ids: &mut impl RowsMut<i32>,
        weights: &mut impl RowsMut<f32>,
    ) -> Result<Outcome> {
        // The gate sums to 1.
        let batch = &Batch { normalised: true, ..*batch };
        let k = batch.k as usize;
        self.check_batch(batch)?;
        let mut own = std::mem::take(&mut self.scratch.own);
        own.ids.resize(batch.n_tokens * k, 0);
        own.weights.resize(batch.n_tokens * k, 0.0);
        for token in 0..batch.n_tokens {
            own.ids[token * k..][..k].copy_from_slice(ids.row(token));
        }
        let (mut own_ids, mut own_weights) =
            (Adjacent { data: &mut own.ids, width: k }, Adjacent { data: &mut own.weights, width: k });
        let outcome = self.select(batch, scores, &mut own_ids).and_then(|()| {
            for token in 0..batch.n_tokens {
                gate(scores.row(token), own_ids.row(token), batch.space, own_weights.row_mut(token));
            }
            self.admit(batch, &mut own_ids, Some(&mut own_weights))
        });
        if outcome.is_ok() {
            for token in 0..batch.n_tokens {
                ids.row_mut(token).copy_from_slice(own_ids.row(token));
                weights.row_mut(token).copy_from_slice(own_weights.row(token));
            }
        }
        self.scratch.own = own;
        outcome
    }

    /// Decides and places the batch token by token, between the cache's `begin_batch` and `end_batch`. Afterwards `scratch.batch`
    /// holds what runs or stands in, all of it resident.
    fn place<W: RowsMut<f32>>(
        &mut self,
        layer: usize,
        batch: &Batch,
        weights: Option<&W>,
        outcome: &mut Outcome,
    ) -> Result<()> {
        let k = batch.k as usize;
        let (l, s) = (&mut self.layers[layer], &mut self.scratch);
        s.dropped.clear();
        s.dropped.resize(batch.n_tokens * k, false);
        for token in 0..batch.n_tokens {
            let experts = &s.batch[token * k..][..k];
            let dropped = &mut s.dropped[token * k..][..k];
            if let Some(w) = weights {
                let cache = &l.cache;
                let resident = |i: usize| cache.is_resident(experts[i]);
                let seen = self.live.drop.decide(w.row(token), resident, cache.n_resident(), dropped);
                outcome.dropped += seen.count;
                outcome.mass_dropped += seen.mass_lost;
            }
            for (&expert, _) in experts.iter().zip(&*dropped).filter(|(_, dropped)| !**dropped) {
                match l.cache.place(expert) {
                    Ok(cache::Placed::Hit { .. }) => outcome.hits += 1,
                    Ok(cache::Placed::Miss { slot, .. }) => {
                        outcome.misses += 1;
                        let started = match self.live.backing {
                            Backing::Slots => {
                                outcome.read_bytes += l.expert_bytes;
                                match l.adopt(expert) {
                                    Some(read_into) => {
                                        self.stats.ahead_adopted += 1;
                                        self.store.adopt(layer, read_into)
                                    }
                                    None => self.store.fetch(layer, expert.into(), slot),
                                }
                            }
                            Backing::PageCache => self.store.hint(layer, expert.into()),
                        };
                        if let Err(e) = started {
                            l.cache.end_batch();
                            l.cache.forget(expert);
                            return Err(e);
                        }
                    }
                    Err(cache::NoVictim) => return Err(no_victim(batch.block, expert, l.cache.capacity())),
                }
            }
            if self.config.policy.needs_candidates() {
                let (ids, scores) = s.ranked.row(layer, token, batch.n_tokens);
                l.cache.ranked(ids, scores, k);
            }
            l.cache.end_token();
        }
        if outcome.dropped > 0 {
            for token in 0..batch.n_tokens {
                let dropped = &s.dropped[token * k..][..k];
                let cache = &l.cache;
                let resident = (0..l.n_experts as u16).filter(|&e| cache.is_resident(e));
                if !drop::fill_in(&mut s.batch[token * k..][..k], dropped, resident) {
                    let n = cache.n_resident();
                    return Err(err!(
                        Internal,
                        "block {}: {n} resident experts do not stand in for the dropped",
                        batch.block
                    ));
                }
            }
        }
        Ok(())
    }

    /// Writes what `place` decided into the engine's memory.
    fn hand_back<W: RowsMut<f32>>(
        &self,
        layer: usize,
        batch: &Batch,
        ids: &mut impl RowsMut<i32>,
        weights: Option<&mut W>,
    ) {
        let k = batch.k as usize;
        let (l, s) = (&self.layers[layer], &self.scratch);
        if self.live.backing == Backing::Slots || s.dropped.contains(&true) {
            for token in 0..batch.n_tokens {
                for (id, &expert) in ids.row_mut(token).iter_mut().zip(&s.batch[token * k..][..k]) {
                    *id = match self.live.backing {
                        Backing::Slots => l.cache.slot_of(expert).map_or(-1, |slot| slot as i32),
                        Backing::PageCache => expert.into(),
                    };
                }
            }
        }
        let Some(weights) = weights else { return };
        for token in 0..batch.n_tokens {
            let dropped = &s.dropped[token * k..][..k];
            if dropped.contains(&true) {
                self.live.drop.apply(weights.row_mut(token), dropped, batch.normalised);
            }
        }
    }

    /// Experts whose reads have failed are not resident.
    pub(super) fn forget_failed(&mut self, layer: usize) {
        for slot in self.store.take_failed(layer) {
            self.layers[layer].forget_aside(slot);
            if let Some(expert) = self.layers[layer].cache.expert_in(slot) {
                self.layers[layer].cache.forget(expert);
            }
            // Reads of an aborted pass may still be in flight in it; then the next fetch into the slot waits for them.
            let _ = self.store.clear_failed(layer, slot);
        }
    }
}

#[cold]
fn no_victim(block: u32, expert: u16, capacity: u32) -> Error {
    err!(Internal, "block {block}: no slot for expert {expert}: all {capacity} are in use by this batch")
}
