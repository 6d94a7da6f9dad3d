//! What a hook is opened with, and the memory that it would take: `plan` computes slots and bytes from a model's headers
//! alone, refuses what cannot work, and `Hook::open` allocates what the plan says.

use std::path::PathBuf;
use std::time::Duration;

use super::schedule::Schedule;
use crate::cache::{Policy, check_experts};
use crate::error::{Result, err};
use crate::model::{Model, Pack};
use crate::route::{Drop, Moce};
use crate::store::{
    Backing, CHUNK_BYTES, Dense, IoMode, LANES, ReadBy, StoreConfig, memory_bytes, page_bytes, plan_slot_bytes,
};

/// Which of hotset's services prefill passes take part in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prefill {
    pub record: bool,
    pub moce: bool,
    pub drop: bool,
}

#[derive(Clone, Debug)]
pub struct Config {
    /// Memory for slots and staging, in bytes; 0: see `slots`.
    pub cache_bytes: u64,
    /// Slots per layer; wins over `cache_bytes`. Both 0: half of the machine's memory, less the dense weights.
    pub slots: u32,
    /// Experts per token; 0: the file's.
    pub k: u32,
    /// Candidates per token and layer.
    pub top_m: u32,
    /// Reads in flight.
    pub lanes: usize,
    /// Slots per layer to read ahead into, beside the cache's.
    pub read_ahead: u32,
    pub backing: Backing,
    pub io: IoMode,
    pub read_by: ReadBy,
    /// The longest read that an expert is cut into; 0: nothing is cut.
    pub chunk_bytes: u64,
    /// The model's experts in packed form, to be read instead of its own files.
    pub pack: Option<PathBuf>,
    pub dense: Dense,
    /// How victims are chosen. One that needs the future is refused.
    pub policy: Policy,
    pub moce: Moce,
    pub drop: Drop,
    pub prefill: Prefill,
    /// The longest that any wait for a read takes.
    pub wait: Duration,
    /// Recorded tokens that may wait for the disk.
    pub queue_tokens: usize,
    pub trace: Option<PathBuf>,
    pub metrics: Option<PathBuf>,
    /// The plan file of an experiment ([`super::schedule`]), begun at open.
    pub schedule: Option<PathBuf>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            cache_bytes: 0,
            slots: 0,
            k: 0,
            top_m: 64,
            lanes: LANES,
            read_ahead: 0,
            backing: Backing::Slots,
            io: IoMode::Direct,
            read_by: ReadBy::Ring,
            chunk_bytes: CHUNK_BYTES,
            pack: None,
            dense: Dense::Lock,
            policy: Policy::Lru,
            moce: Moce::default(),
            drop: Drop::default(),
            prefill: Prefill::default(),
            wait: Duration::from_secs(30),
            queue_tokens: 256,
            trace: None,
            metrics: None,
            schedule: None,
        }
    }
}

impl Config {
    /// The schedule, if there is one, read from its file; and what must be opened for all of its cells: the most lanes that any of them has,
    /// and slots if any of them has slots.
    pub fn with_schedule(&self) -> Result<(Self, Option<Schedule>)> {
        let Some(path) = &self.schedule else { return Ok((self.clone(), None)) };
        let schedule = Schedule::load(path)?;
        let lanes = schedule.cells.iter().filter_map(|c| c.lanes).max().unwrap_or(0);
        let in_slots = schedule.cells.iter().any(|c| c.backing == Some(Backing::Slots));
        let backing = if in_slots { Backing::Slots } else { self.backing };
        Ok((Self { lanes: self.lanes.max(lanes as usize), backing, ..self.clone() }, Some(schedule)))
    }
}

/// Memory and slots, all sizes in bytes. The fields are those of `hotset_plan` in hotset.h.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub n_layers: u32,
    pub n_experts: u32,
    pub k: u32,
    pub slots: u32,
    /// Slots per layer beside them, to read ahead into: no more than experts are left.
    pub read_ahead: u32,
    /// One slot in every layer.
    pub slot_bytes: u64,
    pub cache_bytes: u64,
    pub staging_bytes: u64,
    /// The smallest `cache_bytes` that opens.
    pub min_bytes: u64,
    pub expert_bytes: u64,
    pub dense_bytes: u64,
    pub memory_bytes: u64,
}

/// The plan for these settings, whose pack is opened for it. Errors as those of `plan_with`, and of `Pack::open`.
pub fn plan(model: &Model, config: &Config) -> Result<Plan> {
    plan_with(model, config, open_pack(model, config)?.as_ref())
}

/// The pack that the settings name, if they name one.
pub fn open_pack(model: &Model, config: &Config) -> Result<Option<Pack>> {
    config.pack.as_ref().map(|path| Pack::open(path, model)).transpose()
}

/// The plan for these settings. `Model` where the file has no experts, `Argument` where k is neither given nor in the file or is
/// more than a layer has, `Budget` where the slots are fewer than k.
pub fn plan_with(model: &Model, config: &Config, pack: Option<&Pack>) -> Result<Plan> {
    let file = || model.files.first().map_or_else(String::new, |f| f.path.display().to_string());
    let layers = &model.experts.layers;
    let Some(fewest) = layers.iter().map(|l| l.n_experts).min() else {
        return Err(err!(Model, "{}: no layer has expert tensors (blk.N.ffn_*_exps)", file()));
    };
    let k = match config.k {
        0 => model.n_experts_used().ok_or_else(|| {
            err!(Argument, "{}: k is not given, and the file has no expert_used_count to take it from", file())
        })?,
        k => k,
    };
    if k == 0 || k > fewest {
        return Err(err!(Argument, "k = {k}: a token must use 1 to {fewest} experts (the fewest that a layer has)"));
    }
    config.moce.check()?;
    config.drop.check()?;
    check_experts(model.experts.n_experts() as usize)?;
    if config.policy.needs_future() {
        return Err(err!(
            Argument,
            "policy {}: it needs to know what comes, so it cannot run live",
            config.policy.name()
        ));
    }
    if config.top_m == 0 || config.queue_tokens == 0 {
        return Err(err!(Argument, "top_m {} and queue_tokens {}: at least 1", config.top_m, config.queue_tokens));
    }
    let slot_bytes: u64 =
        (layers.iter().enumerate()).map(|(i, l)| plan_slot_bytes(l, pack.map(|p| &p.layers[i]), page_bytes())).sum();
    let staging_bytes = store_config(config, None, 1).plan_staging_bytes();
    let mut plan = Plan {
        n_layers: layers.len() as u32,
        n_experts: model.experts.n_experts(),
        k,
        slots: 0,
        read_ahead: if config.backing == Backing::Slots {
            config.read_ahead.min(model.experts.n_experts() - k)
        } else {
            0
        },
        slot_bytes,
        cache_bytes: 0,
        staging_bytes,
        min_bytes: 0,
        expert_bytes: model.experts.total_bytes(),
        dense_bytes: model.dense_bytes(),
        memory_bytes: memory_bytes(),
    };
    plan.min_bytes = slot_bytes.saturating_mul((k + plan.read_ahead).into()).saturating_add(staging_bytes);
    plan.slots = if config.slots > 0 {
        config.slots.min(plan.n_experts)
    } else {
        let budget = match config.cache_bytes {
            0 => default_cache_bytes(plan.memory_bytes, plan.dense_bytes),
            bytes => bytes,
        };
        plan.slots_for(budget)?
    };
    plan.read_ahead = plan.read_ahead.min(plan.n_experts - plan.slots);
    plan.cache_bytes = plan.slot_bytes * u64::from(plan.slots);
    plan.check_slots(plan.slots)?;
    Ok(plan)
}

/// What experts get where nobody says: half of the memory, less what every token uses anyway.
pub fn default_cache_bytes(memory_bytes: u64, dense_bytes: u64) -> u64 {
    (memory_bytes / 2).saturating_sub(dense_bytes)
}

impl Plan {
    /// Slots per layer that `cache_bytes` hold, staging and what is read ahead taken off first. `Budget` below k.
    pub fn slots_for(&self, cache_bytes: u64) -> Result<u32> {
        let aside = self.slot_bytes.saturating_mul(self.read_ahead.into());
        let slots = cache_bytes.saturating_sub(self.staging_bytes).saturating_sub(aside) / self.slot_bytes.max(1);
        if slots < self.k.into() {
            return Err(err!(
                Budget,
                "{cache_bytes} bytes hold {slots} slots in each of {} layers, and a token uses {}: at least {} bytes are needed \
                 ({} slots of {} bytes over all layers, {} bytes of read staging)",
                self.n_layers,
                self.k,
                self.min_bytes,
                self.k,
                self.slot_bytes,
                self.staging_bytes
            ));
        }
        Ok(slots.min(self.n_experts.into()) as u32)
    }

    /// `Budget` where a token's experts do not fit.
    pub fn check_slots(&self, slots: u32) -> Result<()> {
        if slots < self.k {
            return Err(err!(
                Budget,
                "{slots} slots per layer, and a token uses {} experts: at least {} slots, which are {} bytes, are needed",
                self.k,
                self.k,
                self.min_bytes
            ));
        }
        Ok(())
    }
}

/// The store's part of the settings, with `reserved` slot numbers per layer.
pub fn store_config(config: &Config, pack: Option<Pack>, reserved: u32) -> StoreConfig {
    StoreConfig {
        backing: config.backing,
        slots: reserved,
        lanes: config.lanes,
        io: config.io,
        read_by: config.read_by,
        chunk_bytes: config.chunk_bytes,
        pack,
        timeout: config.wait,
        ..StoreConfig::default()
    }
}
