//! The live runtime: composes `model`, `store`, `cache`, `route` and `trace` into the two calls of a layer.
//!
//! A pass is one run of the engine's graph over a batch: for each layer `select` (candidates, recording, reranking) and `admit`
//! (dropping, placement, the start of reads), in ascending order of layers. A call that is not behind the last one begins a new
//! pass; `admit` of the last layer ends it. Settings that were changed meanwhile are taken up between passes.
//!
//! One thread at a time calls a `Hook`; waiting for reads goes to the [`Store`] directly, from any thread.

mod admit;
mod ahead;
pub mod config;
mod follow;
mod layer;
mod located;
mod metrics;
mod pass;
pub mod rows;
pub mod schedule;
mod select;
pub mod stats;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use config::{Config, Plan, Prefill, plan};
pub use rows::{Adjacent, Rows, RowsMut};
pub use schedule::{Carry, Schedule};
pub use stats::{LayerStats, Outcome, Placed, Stats};

use crate::error::{Error, Result, err};
use crate::model::Model;
use crate::route::{Drop, Moce, ScoreSpace};
use crate::store::{Backing, DenseHold, IoMode, Store, StoreCounters};
use crate::trace::{Phase, Placement, Recorder};
use follow::Follow;
use layer::{Layer, Scratch};
use metrics::Metrics;
use pass::Pass;

/// One layer's share of a pass, as the engine calls for it.
#[derive(Clone, Copy, Debug)]
pub struct Batch {
    /// The block number in the file.
    pub block: u32,
    /// Rows; 0 is legal.
    pub n_tokens: usize,
    /// Must be the layer's.
    pub n_experts: u32,
    /// Ids per row.
    pub k: u32,
    /// Of the pass: that of its first call counts.
    pub phase: Phase,
    pub space: ScoreSpace,
    /// `ids` hold the router's own choice when `select` is called.
    pub routed: bool,
    /// The model scales its top k weights to a fixed sum.
    pub normalised: bool,
    /// Where the layer has fewer rows than the pass began with, they are its last tokens.
    pub tail: bool,
    /// Of the pass's first token; negative: unknown.
    pub position: i64,
}

/// Settings that may change while the hook is open.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Live {
    pub moce: Moce,
    pub drop: Drop,
    pub slots: u32,
    /// I/O threads at work.
    pub lanes: u32,
    pub backing: Backing,
}

/// One open model with its cache.
pub struct Hook {
    model: Model,
    store: Arc<Store>,
    dense: DenseHold,
    config: Config,
    plan: Plan,
    /// Candidates per row: `config.top_m`, and no more than the smallest layer has experts.
    top_m: usize,
    /// In force.
    live: Live,
    /// As the engine has set it, whatever a schedule lays over it.
    own: Live,
    /// Changed settings that wait for the end of the pass.
    pending: Option<Live>,
    follow: Option<Follow>,
    /// Slots per layer that the memory planned for holds.
    max_slots: u32,
    layers: Vec<Layer>,
    scratch: Scratch,
    pass: Option<Pass>,
    /// Of the pass before, kept for its memory.
    placements: Vec<Placement>,
    /// What the trace's scores are, once a row was recorded.
    score_space: Option<ScoreSpace>,
    last_pass_end: Option<Instant>,
    n_passes: u64,
    recorder: Option<Recorder>,
    metrics: Option<Metrics>,
    stats: Stats,
    /// The store's counters at the last reset.
    base: StoreCounters,
}

impl Hook {
    /// Opens the model, reserves the slots, starts the I/O lanes, begins recording.
    pub fn open(gguf: &Path, config: Config) -> Result<Self> {
        let model = Model::open(gguf)?;
        // Before the schedule's cells: what the engine's own settings are.
        let (lanes, backing) = (config.lanes as u32, config.backing);
        let (config, schedule) = config.with_schedule()?;
        let pack = config::open_pack(&model, &config)?;
        let plan = config::plan_with(&model, &config, pack.as_ref())?;
        let fewest = model.experts.layers.iter().map(|l| l.n_experts).min().unwrap_or(0);
        let top_m = config.top_m.max(plan.k).min(fewest) as usize;

        let paths: Vec<_> = model.files.iter().map(|f| f.path.clone()).collect();
        let lens: Vec<_> = model.files.iter().map(|f| f.len_bytes).collect();
        let maps: Vec<_> = model.files.iter().map(|f| f.map.clone()).collect();
        // A slot number for every expert, so that the cache can grow; memory is taken by the slots in use only.
        let reserved = plan.n_experts;
        let store_config = config::store_config(&config, pack, reserved);
        let store = Store::open(&paths, &lens, &model.experts, maps.clone(), store_config)?;
        let dense = DenseHold::new(config.dense, &model.dense_ranges(), maps);

        let own = Live { moce: config.moce, drop: config.drop, slots: plan.slots, lanes, backing };
        store.set_lanes(lanes as usize);
        let mut layers: Vec<_> =
            model.experts.layers.iter().map(|l| Layer::new(l, plan.slots, config.policy)).collect();
        layers.iter_mut().for_each(|l| l.set_aside(plan.read_ahead));
        let scratch = Scratch::new(top_m, plan.k as usize, plan.n_experts as usize);
        let mut hook = Self {
            store: Arc::new(store),
            dense,
            plan,
            top_m,
            live: own,
            own,
            pending: None,
            follow: None,
            max_slots: plan.slots,
            layers,
            scratch,
            pass: None,
            placements: Vec::with_capacity(plan.n_layers as usize),
            score_space: None,
            last_pass_end: None,
            n_passes: 0,
            recorder: None,
            metrics: None,
            stats: Stats::default(),
            base: StoreCounters::default(),
            model,
            config,
        };
        if let Some(path) = &hook.config.schedule {
            let here = path.display().to_string();
            hook.set_schedule(schedule).map_err(|e| Error::new(e.kind, format!("{here}: {}", e.detail)))?;
        }
        if let Some(path) = hook.config.trace.clone() {
            hook.recorder = Some(Recorder::create(path, hook.recorder_config()?)?);
        }
        if let Some(path) = &hook.config.metrics {
            hook.metrics = Some(Metrics::create(path)?);
        }
        Ok(hook)
    }

    pub fn model(&self) -> &Model {
        &self.model
    }

    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    pub fn dense(&self) -> &DenseHold {
        &self.dense
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    pub fn top_m(&self) -> usize {
        self.top_m
    }

    /// The settings that the next pass will have.
    pub fn live(&self) -> Live {
        self.pending.unwrap_or(self.live)
    }

    pub fn recording(&self) -> bool {
        self.recorder.is_some()
    }

    /// The modes in effect, in one line for a log.
    pub fn describe(&self) -> String {
        let io = self.store.io_mode();
        let dense = self.dense.report();
        let backing = match self.config.backing {
            Backing::Slots => format!(
                "slots, {} per layer of {} ({} bytes, {} bytes of staging)",
                self.live.slots, self.plan.n_experts, self.plan.cache_bytes, self.plan.staging_bytes
            ),
            Backing::PageCache => "page cache".to_owned(),
        };
        let mode = match io.in_effect {
            IoMode::Direct => format!("direct ({:.1} % straight into slots)", io.straight_share() * 100.0),
            IoMode::Buffered => "buffered".to_owned(),
        };
        let from = self.config.pack.as_ref().map_or_else(String::new, |p| format!(" from {}", p.display()));
        format!(
            "backing {backing}; io {mode}{from}{}{}, by {}{}{}; lambda {} J {} {:?}; drop {} renormalise {:?}; dense {:?}, {} of {} bytes locked{}{}; {}",
            if io.reason.is_empty() { "" } else { ": " },
            io.reason,
            io.by.name(),
            if io.by_reason.is_empty() { "" } else { ": " },
            io.by_reason,
            self.live.moce.lambda,
            self.live.moce.top_j,
            self.live.moce.delta,
            self.live.drop.threshold,
            self.live.drop.renormalise,
            dense.policy,
            dense.locked_bytes,
            dense.wanted_bytes,
            if dense.reason.is_empty() { "" } else { ": " },
            dense.reason,
            match &self.recorder {
                Some(r) => format!("recording to {}", r.path().display()),
                None => "not recording".to_owned(),
            }
        )
    }

    /// Changes the engine's own settings: at once between passes, with the next pass within one. What a schedule's cell names stays
    /// as the cell has it. An error changes nothing.
    pub fn set(&mut self, change: impl FnOnce(&mut Live)) -> Result<()> {
        let mut own = self.own;
        change(&mut own);
        own.moce.check()?;
        own.drop.check()?;
        own.slots = own.slots.min(self.plan.n_experts - self.plan.read_ahead);
        self.plan.check_slots(own.slots)?;
        self.own = own;
        self.pending = Some(self.wanted());
        if self.pass.is_none() {
            self.take_up_settings();
        }
        Ok(())
    }

    /// Slots that `cache_bytes` would give; `Budget` below k.
    pub fn slots_for(&self, cache_bytes: u64) -> Result<u32> {
        self.plan.slots_for(cache_bytes)
    }

    /// Forgets what is resident and begins the statistics anew. A pass in work was cut off, and is ended.
    pub fn reset(&mut self) {
        self.abort_pass();
        self.take_up_settings();
        for (i, layer) in self.layers.iter_mut().enumerate() {
            // What an aborted pass has left in flight must be over before its slot is given out again.
            let _ = self.store.wait_layer(i);
            layer.reset();
        }
        if let Some(r) = &mut self.recorder {
            r.mark_gap(crate::trace::reason::RESET);
        }
        self.stats = Stats::default();
        self.base = self.store.counters();
        self.last_pass_end = None;
    }

    pub fn stats(&self) -> Stats {
        let mut stats = self.stats.with_store(self.store.counters(), self.base);
        stats.resident = self.layers.iter().map(|l| u64::from(l.cache.n_resident())).sum();
        stats.resident_bytes = self.store.held_bytes();
        if let Some(r) = &self.recorder {
            (stats.recorded_tokens, stats.left_out_tokens) = (r.tokens(), r.left_out());
        }
        stats.lost_metrics = self.metrics.as_ref().map_or(0, Metrics::lost);
        stats
    }

    pub fn layer_stats(&self, block: u32) -> Result<LayerStats> {
        Ok(self.layers[self.layer_index(block)?].stats)
    }

    /// Experts of a layer that are resident, the next victim first.
    pub fn resident(&self, block: u32) -> Result<Vec<u16>> {
        Ok(self.layers[self.layer_index(block)?].cache.resident_oldest_first())
    }

    /// The index of the layer with this block number.
    pub fn layer_index(&self, block: u32) -> Result<usize> {
        self.model.experts.layer_index(block)
    }

    /// Until everything recorded and logged so far is written. `State` where nothing is.
    pub fn flush(&mut self, timeout: Duration) -> Result<()> {
        if self.recorder.is_none() && self.metrics.is_none() {
            return Err(err!(State, "neither a trace nor a metrics log is being written"));
        }
        if let Some(r) = &self.recorder {
            r.flush(timeout, true)?;
        }
        self.metrics.as_ref().map_or(Ok(()), |m| m.flush(timeout))
    }

    /// Ends recording and logging; the first error of either.
    pub fn close(mut self) -> Result<(), Error> {
        let trace = self.recorder.take().map_or(Ok(()), Recorder::close);
        let metrics = self.metrics.take().map_or(Ok(()), Metrics::close);
        trace.and(metrics)
    }
}
