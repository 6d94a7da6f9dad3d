//! Following a schedule: which block the next pass is in, its settings, what its cache begins with, and the label of its metrics row.
//!
//! A schedule's clock counts decode tokens. A pass belongs to the block that its first token is in, prefill passes to the one in which the next
//! decode token will be; between blocks the engine's own settings hold. After a pass the settings of the next one are known at
//! once (`advance_schedule`), so that an engine that asks sees them; they are taken up when that pass begins, since until then
//! the engine may still compute with the slots of this one. Then, with a block's first decode pass, its cache is made ready.

use std::time::Instant;

use super::pass::Pass;
use super::schedule::{Carry, Schedule};
use super::{Hook, Live};
use crate::error::Result;
use crate::route::Delta;
use crate::store::{Backing, Store};
use crate::trace::Phase;

/// Why a trace notes what is resident: the words that its sidecar uses.
const FLUSHED: &str = "cache flushed by schedule";
const RESTORED: &str = "cache restored by schedule";

/// A schedule in work.
pub struct Follow {
    schedule: Schedule,
    /// Decode tokens since it began.
    token: u64,
    /// The first block that ends behind `token`.
    block: usize,
    /// The last block whose cache was made ready.
    ready: Option<usize>,
    /// What blocks began with, for `Carry::Restore`.
    kept: Vec<Kept>,
}

/// Contents of all layers, oldest use first.
struct Kept {
    slots: u32,
    backing: Backing,
    layers: Vec<Vec<u16>>,
}

/// Where a pass is in the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheduled {
    /// None between blocks, and of a prefill.
    block: Option<usize>,
    washout: bool,
}

/// What a metrics row says of the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label<'a> {
    pub cell: &'a str,
    pub block: usize,
    pub washout: bool,
}

impl Follow {
    pub fn new(schedule: Schedule) -> Self {
        Self { schedule, token: 0, block: 0, ready: None, kept: Vec::new() }
    }

    /// The block that the next decode token is in.
    fn current(&self) -> Option<usize> {
        self.schedule.blocks.get(self.block).filter(|b| b.from <= self.token).map(|_| self.block)
    }

    /// Those of the next pass, over the engine's own.
    pub fn settings(&self, own: Live) -> Live {
        self.current().map_or(own, |b| self.schedule.cells[self.schedule.blocks[b].cell].over(own))
    }

    /// Of a pass there.
    pub fn label(&self, at: Scheduled) -> Option<Label<'_>> {
        let block = at.block?;
        let cell = &self.schedule.cells[self.schedule.blocks[block].cell].name;
        Some(Label { cell, block, washout: at.washout })
    }

    fn advance(&mut self, tokens: u64) {
        self.token += tokens;
        while self.schedule.blocks.get(self.block).is_some_and(|b| b.end() <= self.token) {
            self.block += 1;
        }
    }
}

impl Hook {
    /// Begins a schedule with the next pass, or ends the one in work (None). `Budget` or `Argument`, and nothing changes, where the model
    /// was not opened for it.
    pub fn set_schedule(&mut self, schedule: Option<Schedule>) -> Result<()> {
        if let Some(s) = &schedule {
            s.check(&self.plan, self.max_slots, self.config.lanes as u32, self.config.backing == Backing::Slots)?;
        }
        self.follow = schedule.map(Follow::new);
        self.pending = Some(self.wanted());
        match &mut self.pass {
            Some(pass) => pass.scheduled = None,
            None => self.take_up_settings(),
        }
        Ok(())
    }

    /// The settings of the next pass: the engine's own, under those of the schedule's cell.
    pub(super) fn wanted(&self) -> Live {
        self.follow.as_ref().map_or(self.own, |f| f.settings(self.own))
    }

    /// Whether a replay will need the ranges of whole rows.
    pub(super) fn needs_ranges(&self) -> bool {
        let deltas = self.follow.iter().flat_map(|f| &f.schedule.cells).filter_map(|c| c.delta);
        deltas.chain([self.own.moce.delta]).any(|d| d != Delta::TokenTopk)
    }

    /// Before a pass: settings that were changed meanwhile, and the cache of a block that begins.
    pub(super) fn begin_scheduled(&mut self, phase: Phase) -> Option<Scheduled> {
        let Some(mut follow) = self.follow.take() else {
            self.take_up_settings();
            return None;
        };
        let begun = Instant::now();
        self.take_up_settings();
        let block = follow.current().filter(|_| phase == Phase::Decode);
        if block.is_some() && follow.ready != block {
            follow.ready = block;
            self.make_ready(&mut follow);
        }
        let washout = block.is_some_and(|b| follow.token - follow.schedule.blocks[b].from < follow.schedule.washout);
        self.follow = Some(follow);
        // What that took is not the token's: the row's wall time leaves it out.
        self.last_pass_end = self.last_pass_end.map(|end| end + begun.elapsed());
        Some(Scheduled { block, washout })
    }

    /// The cache of a block that begins. Waits, with the store's bound, for what is read.
    fn make_ready(&mut self, follow: &mut Follow) {
        let (slots, backing) = (self.live.slots, self.live.backing);
        let why = match follow.schedule.carry {
            Carry::Washout => return,
            Carry::Flush => {
                self.layers.iter_mut().for_each(|l| l.cache.clear());
                FLUSHED
            }
            Carry::Restore => {
                let Some(kept) = follow.kept.iter().find(|k| (k.slots, k.backing) == (slots, backing)) else {
                    let layers = self.layers.iter().map(|l| l.cache.resident_oldest_first()).collect();
                    follow.kept.push(Kept { slots, backing, layers });
                    return;
                };
                let store: &Store = &self.store;
                for (i, (layer, experts)) in self.layers.iter_mut().zip(&kept.layers).enumerate() {
                    let read = |expert: u16, slot| match backing {
                        Backing::Slots => store.fetch(i, expert.into(), slot).is_ok(),
                        Backing::PageCache => store.hint(i, expert.into()).is_ok(),
                    };
                    layer.cache.restore_with(experts, read);
                }
                if backing == Backing::Slots {
                    for layer in 0..self.layers.len() {
                        // What fails is not resident, and a miss at its next use.
                        let _ = self.store.wait_layer(layer);
                        self.forget_failed(layer);
                    }
                }
                RESTORED
            }
        };
        if let Some(r) = &mut self.recorder {
            r.mark_gap(why);
        }
    }

    /// After a pass that was part of the schedule.
    pub(super) fn advance_schedule(&mut self, pass: &Pass) {
        if pass.scheduled.is_none() || pass.phase != Phase::Decode {
            return;
        }
        if let Some(follow) = &mut self.follow {
            follow.advance(pass.n_tokens as u64);
            self.pending = Some(self.wanted());
        }
    }
}
