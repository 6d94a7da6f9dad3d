//! One byte budget for the experts of all layers, which have the sizes that they have: what it would hit, and where the cliff is. A what-if, no live mode:
//! live each layer has its own slots, because layers are visited in a fixed order, and a shared cache in LRU order that holds less than one
//! token's experts has always just dropped what comes next.
//!
//! The rules are those of the runs in the real traces, and in LRU order they give the residency of those runs to the last lookup: layer by layer a pass is one batch;
//! it looks up each expert that it uses once, as of its last use (tokens in order, places in order); what it misses comes in; then, while the experts held are more than
//! the budget, the policy's victim goes, never one that the batch used. A batch that is larger than the budget by itself stays until the next, and is counted.

use std::collections::BTreeSet;

use fastrand::Rng;

use crate::error::{Result, err};
use crate::trace::{Phase, Routing};

/// Who goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GlobalPolicy {
    Lru,
    /// By batches that used it since the beginning, resident or not; ties by last use.
    Lfu,
    /// The one whose layer needs it again in the most batches' time; ties by last use. Where sizes differ this is no bound: a larger one might better go.
    Belady,
    Random,
}

impl GlobalPolicy {
    pub const ALL: &[Self] = &[Self::Lru, Self::Lfu, Self::Belady, Self::Random];

    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Lfu => "lfu",
            Self::Belady => "belady",
            Self::Random => "random",
        }
    }

    /// `Argument`, with the names there are, for another one.
    pub fn by_name(name: &str) -> Result<Self> {
        Self::ALL.iter().copied().find(|p| p.name() == name).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|p| p.name()).collect();
            err!(Argument, "policy '{name}': it must be one of {}", names.join(", "))
        })
    }
}

/// What the budget is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All layers together.
    Shared,
    /// Each layer has the room of as many of its experts as any other.
    PerLayer,
}

impl Scope {
    pub fn name(self) -> &'static str {
        match self {
            Self::Shared => "shared",
            Self::PerLayer => "per layer",
        }
    }
}

/// Of one phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lookups {
    pub hits: u64,
    pub lookups: u64,
    /// Bytes of what was missed.
    pub read: u64,
}

impl Lookups {
    /// 0..1; 0 where there was none.
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / self.lookups.max(1) as f64
    }

    fn add(&mut self, hit: bool, bytes: u64) {
        self.lookups += 1;
        self.hits += u64::from(hit);
        self.read = self.read.saturating_add(if hit { 0 } else { bytes });
    }
}

/// What a budget came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GlobalResult {
    pub prefill: Lookups,
    pub decode: Lookups,
    /// Batches that were larger than the budget by themselves.
    pub over_budget: u64,
    /// Lookups that came out otherwise than in the run itself; None where that is not known.
    pub differs: Option<u64>,
}

impl GlobalResult {
    /// Both phases.
    pub fn all(&self) -> Lookups {
        let (a, b) = (self.prefill, self.decode);
        Lookups { hits: a.hits + b.hits, lookups: a.lookups + b.lookups, read: a.read.saturating_add(b.read) }
    }

    fn of(&mut self, phase: Phase) -> &mut Lookups {
        match phase {
            Phase::Prefill => &mut self.prefill,
            Phase::Decode => &mut self.decode,
        }
    }
}

/// The batches of a routing: what each looks up. Made once for any number of budgets.
pub struct Batches {
    n_experts: usize,
    /// Bytes of an expert by layer.
    bytes: Vec<u64>,
    batches: Vec<Batch>,
    /// Of all batches, side by side.
    experts: Vec<u16>,
    /// The batch in which it is used next; `u64::MAX` = none.
    next: Vec<u64>,
    /// What the run itself hit, where it is known.
    recorded: Option<Vec<bool>>,
}

struct Batch {
    phase: Phase,
    layer: usize,
    end: usize,
}

impl Batches {
    /// `bytes`: of an expert by layer, where the routing does not know it or is not to be believed.
    pub fn new(routing: &Routing, bytes: Option<Vec<u64>>) -> Result<Self> {
        let n_layers = routing.layers.len();
        let bytes = bytes.unwrap_or_else(|| routing.expert_bytes.clone());
        if bytes.len() != n_layers || bytes.contains(&0) {
            let n = bytes.iter().filter(|b| **b > 0).count();
            return Err(err!(Argument, "bytes of an expert are known of {n} layers of {n_layers}: a budget needs all"));
        }
        let total = bytes.iter().try_fold(0u64, |sum, &b| sum.checked_add(b.checked_mul(routing.n_experts as u64)?));
        total.ok_or_else(|| err!(Format, "{n_layers} layers of {} experts: too many bytes", routing.n_experts))?;
        let known = routing.layers.iter().all(|l| l.residency.len() == l.ids.len() && !l.ids.is_empty());
        let mut recorded = Vec::new();
        let (mut batches, mut experts) = (Vec::new(), Vec::new());
        // of each expert the place of its last use in the batch, and whether any place of it was a read
        let (mut last, mut missed) = (vec![usize::MAX; routing.n_experts], vec![false; routing.n_experts]);
        for (i, pass) in routing.passes.iter().enumerate() {
            for (layer, rows) in routing.layers.iter().enumerate() {
                let places = rows.places(i);
                for place in places.clone() {
                    let e = usize::from(rows.ids[place]);
                    last[e] = place;
                    missed[e] |= known && rows.residency[place] == 0;
                }
                let begin = experts.len();
                experts.extend(places.clone().filter(|&p| last[usize::from(rows.ids[p])] == p).map(|p| rows.ids[p]));
                for &e in &experts[begin..] {
                    recorded.push(!std::mem::take(&mut missed[usize::from(e)]));
                }
                batches.push(Batch { phase: pass.phase, layer, end: experts.len() });
            }
        }
        let mut this = Self {
            n_experts: routing.n_experts,
            bytes,
            batches,
            next: vec![u64::MAX; experts.len()],
            experts,
            recorded: known.then_some(recorded),
        };
        this.look_ahead();
        Ok(this)
    }

    fn look_ahead(&mut self) {
        let mut next_use = vec![u64::MAX; self.bytes.len() * self.n_experts];
        for (i, batch) in self.batches.iter().enumerate().rev() {
            let begin = i.checked_sub(1).map_or(0, |before| self.batches[before].end);
            for at in begin..batch.end {
                let key = batch.layer * self.n_experts + usize::from(self.experts[at]);
                self.next[at] = std::mem::replace(&mut next_use[key], i as u64);
            }
        }
    }

    /// What the run itself found resident, an expert of a batch counted once; None where it is not known.
    pub fn recorded(&self) -> Option<GlobalResult> {
        let hits = self.recorded.as_ref()?;
        let mut result = GlobalResult { differs: Some(0), ..GlobalResult::default() };
        let mut begin = 0;
        for batch in &self.batches {
            let of_batch = &hits[begin..batch.end];
            of_batch.iter().for_each(|&hit| result.of(batch.phase).add(hit, self.bytes[batch.layer]));
            begin = batch.end;
        }
        Some(result)
    }

    /// Bytes of all experts.
    pub fn total_bytes(&self) -> u64 {
        self.bytes.iter().map(|b| b * self.n_experts as u64).sum()
    }

    /// Bytes of the experts that one token uses in all layers. A shared budget in LRU order that is smaller by a batch or more hits nothing in decode.
    pub fn step_bytes(&self, k: usize) -> u64 {
        self.bytes.iter().map(|b| b * k.min(self.n_experts) as u64).sum()
    }

    /// Replays all batches from an empty cache. `seed` is that of [`GlobalPolicy::Random`].
    pub fn replay(&self, budget: u64, policy: GlobalPolicy, scope: Scope, seed: u64) -> GlobalResult {
        let n_keys = self.bytes.len() * self.n_experts;
        let rounds: u64 = self.bytes.iter().sum::<u64>().max(1);
        let rooms: Vec<u64> = match scope {
            Scope::Shared => vec![budget],
            Scope::PerLayer => self.bytes.iter().map(|b| budget / rounds * b).collect(),
        };
        let mut pools: Vec<Pool> = rooms.iter().map(|_| Pool::new(policy, seed)).collect();
        let mut used = vec![0; rooms.len()];
        let mut resident = vec![false; n_keys];
        let mut ranks = vec![(0, 0); n_keys];
        let (mut uses, mut clock, mut begin) = (vec![0u64; n_keys], 0, 0);
        let mut result = GlobalResult { differs: self.recorded.as_ref().map(|_| 0), ..GlobalResult::default() };
        for batch in &self.batches {
            let at = if scope == Scope::Shared { 0 } else { batch.layer };
            let (pool, bytes) = (&mut pools[at], self.bytes[batch.layer]);
            let key = |i: usize| batch.layer * self.n_experts + usize::from(self.experts[i]);
            for i in begin..batch.end {
                let key = key(i);
                result.of(batch.phase).add(resident[key], bytes);
                if let (Some(differs), Some(hits)) = (&mut result.differs, &self.recorded) {
                    *differs += u64::from(hits[i] != resident[key]);
                }
                if resident[key] {
                    pool.remove(key, ranks[key]);
                } else {
                    resident[key] = true;
                    used[at] += bytes;
                }
                uses[key] += 1;
                clock += 1;
                ranks[key] = match policy {
                    GlobalPolicy::Lru | GlobalPolicy::Random => (clock, 0),
                    GlobalPolicy::Lfu => (uses[key], clock),
                    GlobalPolicy::Belady => (u64::MAX - self.next[i], clock),
                };
            }
            while used[at] > rooms[at] {
                let Some(victim) = pool.victim() else { break };
                resident[victim] = false;
                used[at] -= self.bytes[victim / self.n_experts];
            }
            result.over_budget += u64::from(used[at] > rooms[at]);
            (begin..batch.end).map(key).for_each(|key| pool.insert(key, ranks[key]));
            begin = batch.end;
        }
        result
    }
}

/// What may go: the resident experts that the batch in work does not use.
enum Pool {
    /// The lowest rank goes.
    Ranked(BTreeSet<((u64, u64), usize)>),
    Random {
        keys: Vec<usize>,
        at: std::collections::HashMap<usize, usize>,
        rng: Rng,
    },
}

impl Pool {
    fn new(policy: GlobalPolicy, seed: u64) -> Self {
        match policy {
            GlobalPolicy::Random => {
                Self::Random { keys: Vec::new(), at: Default::default(), rng: Rng::with_seed(seed) }
            }
            _ => Self::Ranked(BTreeSet::new()),
        }
    }

    fn insert(&mut self, key: usize, rank: (u64, u64)) {
        match self {
            Self::Ranked(set) => drop(set.insert((rank, key))),
            Self::Random { keys, at, .. } => {
                at.insert(key, keys.len());
                keys.push(key);
            }
        }
    }

    fn remove(&mut self, key: usize, rank: (u64, u64)) {
        match self {
            Self::Ranked(set) => drop(set.remove(&(rank, key))),
            Self::Random { keys, at, .. } => {
                let Some(place) = at.remove(&key) else { return };
                keys.swap_remove(place);
                if let Some(&moved) = keys.get(place) {
                    at.insert(moved, place);
                }
            }
        }
    }

    fn victim(&mut self) -> Option<usize> {
        match self {
            Self::Ranked(set) => set.pop_first().map(|(_, key)| key),
            Self::Random { keys, rng, .. } => {
                let key = *keys.get(rng.usize(..keys.len().max(1)))?;
                self.remove(key, (0, 0));
                Some(key)
            }
        }
    }
}
