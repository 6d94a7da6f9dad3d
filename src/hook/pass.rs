//! The pass in work: where it begins and ends, what is added up over its layers, and what is checked of every call.

use std::time::Instant;

use super::follow::Scheduled;
use super::rows::Rows;
use super::stats::{Outcome, Placed};
use super::{Batch, Hook, metrics};
use crate::error::{Result, err};
use crate::route::{Renormalise, ScoreSpace};
use crate::store::Backing;
use crate::trace::{self, Phase, Placement, RecorderConfig, SidecarInit, Snapshot};

/// The two calls of a layer, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    Select,
    Admit,
}

pub struct Pass {
    pub phase: Phase,
    position: i64,
    /// Rows of the first layer.
    pub n_tokens: usize,
    /// The last call.
    cursor: (usize, Stage),
    begun: Instant,
    wait_ns: u64,
    reads: u64,
    outcome: Outcome,
    pass_through_rows: u64,
    /// One a layer that was admitted.
    placements: Vec<Placement>,
    /// Its place in the schedule; None where there is none, or this pass began before it.
    pub scheduled: Option<Scheduled>,
}

impl Hook {
    /// The layer's index, if the batch can be one of this model's.
    pub(super) fn check_batch(&self, batch: &Batch) -> Result<usize> {
        let index = self.layer_index(batch.block)?;
        let layer = &self.layers[index];
        let Batch { block, n_experts, k, .. } = *batch;
        if n_experts != layer.n_experts {
            return Err(err!(Argument, "block {block}: n_experts {n_experts}, the model has {}", layer.n_experts));
        }
        if k == 0 || k > self.plan.k {
            return Err(err!(Argument, "block {block}: k = {k}, opened for 1 to {}", self.plan.k));
        }
        Ok(index)
    }

    /// Copies the batch's ids to `scratch.batch`, if all are experts of the layer and none comes twice in a row.
    pub(super) fn check_ids(&mut self, batch: &Batch, ids: &impl Rows<i32>) -> Result<()> {
        let s = &mut self.scratch;
        s.batch.clear();
        for token in 0..batch.n_tokens {
            s.row_number += 1;
            for &id in ids.row(token) {
                let n = batch.n_experts;
                if id < 0 || id as u32 >= n {
                    return Err(err!(Range, "block {} row {token}: expert {id}, there are {n}", batch.block));
                }
                if std::mem::replace(&mut s.seen[id as usize], s.row_number) == s.row_number {
                    return Err(err!(Range, "block {} row {token}: expert {id} comes twice", batch.block));
                }
                s.batch.push(id as u16);
            }
        }
        Ok(())
    }

    /// Moves the pass on to this call, or begins a new one.
    pub(super) fn enter(&mut self, layer: usize, stage: Stage, batch: &Batch) {
        if self.pass.as_ref().is_none_or(|p| (layer, stage) <= p.cursor) {
            self.begin_pass(batch);
        }
        if let Some(pass) = &mut self.pass {
            pass.cursor = (layer, stage);
        }
    }

    fn begin_pass(&mut self, batch: &Batch) {
        self.abort_pass();
        let scheduled = self.begin_scheduled(batch.phase);
        self.scratch.ranked.layer = None;
        if let Some(r) = &mut self.recorder {
            let layers = &self.layers;
            r.begin_pass(batch.phase, batch.position, batch.n_tokens, || Snapshot {
                layers: layers.iter().map(|l| l.cache.resident_oldest_first()).collect(),
                state: serde_json::json!({ "running_range": layers.iter().map(|l| l.range.mean()).collect::<Vec<_>>(),
                    "rows": layers.iter().map(|l| l.range.rows()).collect::<Vec<_>>() }),
            });
        }
        self.pass = Some(Pass {
            phase: batch.phase,
            position: batch.position,
            n_tokens: batch.n_tokens,
            cursor: (0, Stage::Select),
            begun: Instant::now(),
            wait_ns: self.store.wait_ns(),
            reads: self.store.counters().reads,
            outcome: Outcome::default(),
            pass_through_rows: 0,
            placements: std::mem::take(&mut self.placements),
            scheduled,
        });
    }

    /// Ends a pass that was cut off, if there is one.
    pub(super) fn abort_pass(&mut self) {
        let Some(mut pass) = self.pass.take() else { return };
        self.stats.aborted_passes += 1;
        self.last_pass_end = None;
        if let Some(r) = &mut self.recorder {
            r.abort_pass();
        }
        pass.placements.clear();
        self.placements = pass.placements;
    }

    /// Adds a layer's outcome to the pass, and ends the pass with the last layer.
    pub(super) fn leave(&mut self, layer: usize, n_tokens: usize, outcome: &Outcome) {
        self.stats.add(outcome);
        let l = &mut self.layers[layer];
        l.stats.hits += u64::from(outcome.hits);
        l.stats.misses += u64::from(outcome.misses);
        l.stats.dropped += u64::from(outcome.dropped);
        let Some(pass) = &mut self.pass else { return };
        pass.outcome.add(outcome);
        pass.placements.push(match (outcome.placed, self.live.backing) {
            (Placed::PassThrough, _) => Placement::PassThrough,
            (Placed::Slots, Backing::Slots) => Placement::Slots,
            (Placed::Mapped, _) | (Placed::Slots, Backing::PageCache) => Placement::Mapped,
        });
        if outcome.placed == Placed::PassThrough {
            pass.pass_through_rows += n_tokens as u64;
            self.stats.pass_through_rows += n_tokens as u64;
        }
        if layer + 1 == self.layers.len() {
            self.end_pass();
        }
    }

    fn end_pass(&mut self) {
        let Some(mut pass) = self.pass.take() else { return };
        let now = Instant::now();
        let ns = |d: std::time::Duration| d.as_nanos() as u64;
        self.stats.passes += 1;
        match pass.phase {
            Phase::Decode => self.stats.decode_tokens += pass.n_tokens as u64,
            Phase::Prefill => self.stats.prefill_tokens += pass.n_tokens as u64,
        }
        if let Some(r) = &mut self.recorder {
            let alike = pass.placements.iter().all(|p| *p == pass.placements[0]);
            r.end_pass(if alike { &pass.placements[..1] } else { &pass.placements });
        }
        if let Some(m) = &mut self.metrics {
            let counters = self.store.counters();
            m.push(&metrics::Row {
                pass: self.n_passes,
                phase: pass.phase,
                position: pass.position,
                tokens: pass.n_tokens as u32,
                wall_ns: self.last_pass_end.map(|end| ns(now - end)),
                pass_ns: ns(now - pass.begun),
                wait_ns: counters.wait_ns - pass.wait_ns,
                reads: counters.reads - pass.reads,
                outcome: pass.outcome,
                pass_through_rows: pass.pass_through_rows,
                slots: self.live.slots,
                lambda: self.live.moce.lambda,
                drop: self.live.drop.threshold,
                label: self.follow.as_ref().zip(pass.scheduled).and_then(|(f, at)| f.label(at)),
            });
        }
        self.advance_schedule(&pass);
        self.n_passes += 1;
        self.last_pass_end = Some(now);
        pass.placements.clear();
        self.placements = pass.placements;
    }

    /// Between passes: what was changed meanwhile holds from here on.
    pub(super) fn take_up_settings(&mut self) {
        let Some(live) = self.pending.take().filter(|l| *l != self.live) else { return };
        let (resized, moved) = (live.slots != self.live.slots, live.backing != self.live.backing);
        if resized || moved {
            let (store, in_slots) = (&self.store, self.live.backing == Backing::Slots);
            for (i, layer) in self.layers.iter_mut().enumerate() {
                let release = |slot| {
                    if in_slots {
                        // Reads that an aborted pass left in flight have to end first; the memory of one that does not is kept.
                        let _ = store.wait(i, slot, None);
                        let _ = store.release(i, slot);
                    }
                };
                if moved {
                    // What is resident with one backing is not with the other.
                    layer.cache.set_capacity(0, release);
                    layer.cache.aside().iter().copied().for_each(release);
                    layer.ahead.fill(None);
                }
                layer.cache.set_capacity(live.slots, release);
            }
        }
        self.store.set_lanes(live.lanes as usize);
        self.live = live;
        self.plan.slots = live.slots;
        self.plan.cache_bytes = self.plan.slot_bytes * u64::from(live.slots);
        let settings = self.trace_settings();
        if let Some(r) = &mut self.recorder {
            // Finite numbers were checked when they were set.
            let _ = r.set_settings(settings);
        }
    }

    pub(super) fn recorder_config(&self) -> Result<RecorderConfig> {
        let layers = &self.layers;
        let small = |what: &str, n: usize| {
            u16::try_from(n).map_err(|_| err!(Model, "{n} {what} are more than a Q4RT trace can hold ({})", u16::MAX))
        };
        let file_name =
            |p: &std::path::Path| p.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
        Ok(RecorderConfig {
            n_layers: small("layers", layers.len())?,
            n_experts: small("experts", self.plan.n_experts as usize)?,
            top_m: small("candidates", self.top_m)?,
            queue_tokens: self.config.queue_tokens,
            record_prefill: self.config.prefill.record,
            row_range: self.needs_ranges(),
            sidecar: SidecarInit {
                model: trace::sidecar::Model {
                    files: self
                        .model
                        .files
                        .iter()
                        .map(|f| trace::sidecar::ModelFile { name: file_name(&f.path), length: f.len_bytes })
                        .collect(),
                    architecture: self.model.architecture().unwrap_or_default().to_owned(),
                },
                blocks: layers.iter().map(|l| l.block).collect(),
                n_experts: layers.iter().map(|l| l.n_experts).collect(),
                k: self.plan.k,
                score_space: String::new(),
                settings: self.trace_settings(),
            },
        })
    }

    fn trace_settings(&self) -> trace::Settings {
        trace::Settings {
            lambda: self.live.moce.lambda,
            top_j: self.live.moce.top_j,
            delta: self.live.moce.delta.name().to_owned(),
            drop: self.live.drop.threshold,
            renormalise: match self.live.drop.renormalise {
                Renormalise::Auto => "auto",
                Renormalise::On => "on",
                Renormalise::Off => "off",
            }
            .to_owned(),
            slots: vec![self.live.slots; self.layers.len()],
            policy: self.config.policy.name().to_owned(),
            backing: if self.live.backing == Backing::Slots { "slots" } else { "page_cache" }.to_owned(),
            io: self.store.io_mode().in_effect.name().to_owned(),
            prefill_moce: self.config.prefill.moce,
            prefill_drop: self.config.prefill.drop,
            ..trace::Settings::default()
        }
    }
}

/// The name that the sidecar has for a score space.
pub(super) fn space_name(space: ScoreSpace) -> &'static str {
    match space {
        ScoreSpace::Logits => "logit",
        ScoreSpace::Softmax => "log_prob",
        ScoreSpace::Linear => "linear",
    }
}
