//! Dropping as a closed loop: what is dropped is not read, so it is not resident for the next token either, and that token finds more
//! misses that are light. The steps are the live hook's, pass by pass: choose (with MoCE), begin the batch, then token by token
//! decide, place, end; end the batch. The cache begins empty, or with what was resident when recording began; every layer is on its own.
//!
//! Beside each loop stands what the same threshold would have dropped had it changed nothing (the static view), on the residency of
//! the same cache with F = 0. The difference between the two is the compounding.

use super::drop_static::{PassReads, share};
use super::routed::{Routed, RoutedPass, Weights};
use crate::cache::{AnyPolicy, LayerCache, Placed, Policy, Spec, check_experts};
use crate::error::{Result, err};
use crate::route::drop::Dropped;
use crate::route::{Delta, Drop, Moce, moce};
use crate::trace::Phase;

/// What is replayed.
#[derive(Clone, Debug, PartialEq)]
pub struct DropSettings {
    pub policy: Policy,
    /// Slots of each layer.
    pub capacity: usize,
    /// Experts that a token uses in a layer: the run's, or fewer.
    pub k: usize,
    pub moce: Moce,
    /// F.
    pub threshold: f64,
    pub weights: Weights,
    /// The phase in which dropping and reranking take part, and which is counted. The other one fills the cache, as live.
    pub phase: Phase,
    /// Tokens of that phase that are replayed before counting begins.
    pub warmup: usize,
    /// Begin with what was resident when recording began, as far as it is recorded and the slots hold it, not with nothing.
    pub warm: bool,
}

impl Default for DropSettings {
    fn default() -> Self {
        Self {
            policy: Policy::Lru,
            capacity: 0,
            k: 0,
            moce: Moce::default(),
            threshold: 0.0,
            weights: Weights::default(),
            phase: Phase::Decode,
            warmup: 0,
            warm: false,
        }
    }
}

/// What a loop came to, over the rows of the counted phase.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DropLoop {
    /// Tokens times layers that went through slots.
    pub rows: u64,
    /// Those of passes that the slots did not hold: computed from the mapped file, not counted elsewhere.
    pub pass_through_rows: u64,
    /// Rows with a weight that is not known: nothing is dropped, and nothing of them is in the masses.
    pub unknown: u64,
    pub hits: u64,
    pub misses: u64,
    pub bytes: u64,
    /// Picks that did not run.
    pub dropped: u64,
    /// Picks that reranking put in another's place.
    pub swapped: u64,
    /// Sums over the known rows of shares of the routing weight: beyond the first k, where k is less than the run's; of what is left, lost
    /// by swapping; of what was chosen, dropped.
    pub mass_cut: f64,
    pub mass_swapped: f64,
    pub mass_dropped: f64,
    /// The sum of what a row lost by the three together, as a share of the weight that the router's own choice has.
    pub lost: f64,
    /// By layer.
    pub misses_per_layer: Vec<u64>,
    pub dropped_per_layer: Vec<u64>,
}

impl DropLoop {
    /// Share of the routing weight that did not take part, 0..1, in the mean over the known rows.
    pub fn mass_lost(&self) -> f64 {
        share(self.lost, self.rows.saturating_sub(self.unknown) as f64)
    }

    /// Share of the reads of a loop without dropping that this one avoids. Below 0 where it reads more, which no rule forbids.
    pub fn avoided(&self, without: &Self) -> f64 {
        share(without.bytes as f64 - self.bytes as f64, without.bytes as f64)
    }
}

/// What a threshold would have dropped of a loop that it did not change.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Unchanged {
    pub threshold: f64,
    pub miss_bytes: u64,
    pub avoided_bytes: u64,
    pub dropped: u64,
    /// Sum over the known rows of the share of the row's weight.
    pub mass_dropped: f64,
}

impl Unchanged {
    /// Share of the miss bytes that is not read, 0..1.
    pub fn avoided(&self) -> f64 {
        share(self.avoided_bytes as f64, self.miss_bytes as f64)
    }
}

/// What became of an expert that a token chose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Hit,
    Miss,
    Dropped,
    /// The slots did not hold its pass.
    PassedThrough,
}

/// A token in a layer, as the loop ran it.
#[derive(Clone, Copy, Debug)]
pub struct RanRow<'a> {
    pub layer: usize,
    /// Of the layer, in [`Routed`].
    pub row: usize,
    pub phase: Phase,
    /// What was chosen, in the order in which it was.
    pub picks: &'a [(u16, Fate)],
}

/// Replays a run under `settings`; beside it, what each of `thresholds` would have dropped and changed nothing.
/// `Argument` where the settings cannot be.
pub fn drop_loop(routed: &Routed, settings: &DropSettings, thresholds: &[f64]) -> Result<(DropLoop, Vec<Unchanged>)> {
    drop_loop_by_row(routed, settings, thresholds, &mut |_| ())
}

/// The same, and every row (of both phases, the warm-up too) is shown to `ran`: layer by layer, in the order in which they ran.
pub fn drop_loop_by_row(
    routed: &Routed,
    settings: &DropSettings,
    thresholds: &[f64],
    ran: &mut dyn FnMut(RanRow<'_>),
) -> Result<(DropLoop, Vec<Unchanged>)> {
    settings.check(routed, thresholds)?;
    let unchanged = thresholds.iter().map(|&threshold| Unchanged { threshold, ..Unchanged::default() }).collect();
    let n = routed.n_experts;
    let k = settings.k;
    let mut run = Loop {
        routed,
        settings,
        drop: Drop { threshold: settings.threshold, ..Drop::default() },
        layer: 0,
        cache: LayerCache::new(settings.policy.build(&Spec::new(n)), n, settings.capacity.min(n) as u32),
        ranks: Vec::new(),
        swaps: Vec::new(),
        seen: 0,
        raised: vec![0.0; k],
        chosen: vec![0; k],
        weights: vec![0.0; routed.k],
        dropped: vec![false; k],
        would: vec![false; k],
        wide: Vec::new(),
        reads: thresholds.iter().map(|_| PassReads::default()).collect(),
        unchanged,
        picks: Vec::with_capacity(k),
        all: DropLoop::default(),
    };
    for layer in 0..routed.layers.len() {
        let (misses, dropped) = (run.all.misses, run.all.dropped);
        (run.layer, run.seen) = (layer, 0);
        run.cache = LayerCache::new(settings.policy.build(&Spec::new(n)), n, settings.capacity.min(n) as u32);
        if settings.warm {
            run.cache.restore(&routed.layers[layer].resident);
        }
        for pass in &routed.layers[layer].passes {
            run.pass(pass, ran).map_err(|e| err!(Format, "layer {layer}: {e}"))?;
        }
        run.all.misses_per_layer.push(run.all.misses - misses);
        run.all.dropped_per_layer.push(run.all.dropped - dropped);
    }
    Ok((run.all, run.unchanged))
}

impl DropSettings {
    fn check(&self, routed: &Routed, thresholds: &[f64]) -> Result<()> {
        let Self { capacity, k, moce, .. } = *self;
        if k == 0 || k > routed.k {
            return Err(err!(Argument, "k {k}: from 1 to the run's {} wanted", routed.k));
        }
        if capacity < k {
            return Err(err!(Argument, "capacity {capacity}: a token uses {k} experts, and all of them must fit"));
        }
        check_experts(routed.n_experts)?;
        moce.check()?;
        if moce.delta != Delta::TokenTopk {
            return Err(err!(Argument, "delta {}: a drop replay knows token_topk only", moce.delta.name()));
        }
        if self.policy.needs_future() {
            let name = self.policy.name();
            return Err(err!(Argument, "{name}: what runs depends on what is resident, so there is no future to know"));
        }
        for &threshold in thresholds.iter().chain([&self.threshold]) {
            Drop { threshold, ..Drop::default() }.check()?;
        }
        let (phase, tokens, warmup) = (self.phase.as_str(), routed.tokens(self.phase), self.warmup);
        if tokens <= warmup {
            return Err(err!(
                Argument,
                "{phase}: the run has {tokens} tokens of it and the warm-up takes {warmup}: nothing is left to count"
            ));
        }
        // Without dropping, reranking and leaving out nothing is weighed: hits and misses are known of ids alone.
        let weighs = thresholds.iter().chain([&self.threshold]).any(|f| *f > 0.0);
        if weighs || moce.lambda > 0.0 || k < routed.k { routed.check_weights() } else { Ok(()) }
    }
}

struct Loop<'a> {
    routed: &'a Routed,
    settings: &'a DropSettings,
    drop: Drop,
    layer: usize,
    cache: LayerCache<AnyPolicy>,
    /// What the pass chose, k ranks a row.
    ranks: Vec<i32>,
    /// By row of the pass: what was swapped in, and the share of the own choice's mass that it cost.
    swaps: Vec<(u64, f64)>,
    /// Rows of the layer that dropping took part in.
    seen: usize,
    raised: Vec<f64>,
    chosen: Vec<u16>,
    weights: Vec<f32>,
    dropped: Vec<bool>,
    would: Vec<bool>,
    wide: Vec<f32>,
    reads: Vec<PassReads>,
    unchanged: Vec<Unchanged>,
    picks: Vec<(u16, Fate)>,
    all: DropLoop,
}

impl Loop<'_> {
    fn pass(&mut self, pass: &RoutedPass, ran: &mut dyn FnMut(RanRow<'_>)) -> Result<()> {
        let takes_part = pass.phase == self.settings.phase;
        let (routed, layer, k) = (self.routed, self.layer, self.settings.k);
        self.ranks.clear();
        self.swaps.clear();
        for row in pass.rows.clone() {
            let swap = self.choose(row, takes_part);
            self.swaps.push(swap);
        }
        let first = self.seen;
        self.seen += if takes_part { pass.rows.len() } else { 0 };
        let counted = |in_pass: usize| takes_part && first + in_pass >= self.settings.warmup;
        let expert = |(i, &rank): (usize, &i32)| routed.row(layer, pass.rows.start + i / k).ids[rank as usize];
        if !self.cache.begin_batch(self.ranks.iter().enumerate().map(expert)) {
            self.all.pass_through_rows += (0..pass.rows.len()).filter(|&i| counted(i)).count() as u64;
            for (ranks, row) in self.ranks.chunks_exact(k).zip(pass.rows.clone()) {
                let ids = routed.row(layer, row).ids;
                self.picks.clear();
                self.picks.extend(ranks.iter().map(|&rank| (ids[rank as usize], Fate::PassedThrough)));
                ran(RanRow { layer, row, phase: pass.phase, picks: &self.picks });
            }
            return Ok(());
        }
        for (i, row) in pass.rows.clone().enumerate() {
            self.place(row, i, takes_part, counted(i))?;
            ran(RanRow { layer, row, phase: pass.phase, picks: &self.picks });
        }
        self.cache.end_batch();
        for (reads, unchanged) in self.reads.iter_mut().zip(&mut self.unchanged) {
            let (bytes, avoided) = reads.finish();
            unchanged.miss_bytes = unchanged.miss_bytes.saturating_add(bytes);
            unchanged.avoided_bytes = unchanged.avoided_bytes.saturating_add(avoided);
        }
        Ok(())
    }

    /// Adds the ranks that a row runs to `ranks`. How many of them were swapped in, and the mass that it cost.
    fn choose(&mut self, row: usize, rerank: bool) -> (u64, f64) {
        let (k, row) = (self.settings.k, self.routed.row(self.layer, row));
        let bonus = if rerank { self.settings.moce.bonus(row.scores, k, None) } else { None };
        let Some(bonus) = bonus else {
            self.ranks.extend(0..k as i32);
            return (0, 0.0);
        };
        let (cache, chosen) = (&self.cache, &mut self.chosen);
        let swapped =
            self.settings.moce.rerank(row.ids, row.scores, bonus, |e| cache.is_resident(e), &mut self.raised, chosen);
        self.ranks.extend(chosen.iter().map(|&rank| i32::from(rank)));
        let mass = if swapped > 0 { moce::mass_lost(row.scores, chosen, !self.routed.linear) } else { 0.0 };
        (swapped.into(), mass)
    }

    /// Decides (where dropping takes part) and places one row; what came of it goes into the sums if it is `counted`.
    fn place(&mut self, row: usize, in_pass: usize, takes_part: bool, counted: bool) -> Result<()> {
        let (routed, settings, token) = (self.routed, self.settings, row);
        let (k, row) = (settings.k, routed.row(self.layer, row));
        let (ranks, (swapped, mass_swapped)) = (&self.ranks[in_pass * k..][..k], self.swaps[in_pass]);
        let bytes = routed.layers[self.layer].expert_bytes;
        let expert = |i: usize| row.ids[ranks[i] as usize];
        if (1..k).any(|i| (0..i).any(|j| expert(i) == expert(j))) {
            return Err(err!(Format, "row {token}: an expert twice among {:?}", row.ids));
        }
        let (cache, all) = (&mut self.cache, &mut self.all);
        self.dropped.fill(false);
        let space = routed.space();
        if takes_part {
            let weights = &mut self.weights[..k];
            let known = row.weigh(ranks, settings.weights, space, &mut self.wide, weights);
            let resident = |i: usize| cache.is_resident(expert(i));
            if counted {
                for (reads, unchanged) in self.reads.iter_mut().zip(&mut self.unchanged) {
                    self.would.fill(false);
                    if known {
                        let drop = Drop { threshold: unchanged.threshold, ..Drop::default() };
                        let would = drop.decide(weights, resident, cache.n_resident(), &mut self.would);
                        unchanged.dropped += u64::from(would.count);
                        unchanged.mass_dropped += would.mass_lost;
                    }
                    for (i, &would) in self.would.iter().enumerate() {
                        reads.take(expert(i), if resident(i) { 0 } else { bytes }, would);
                    }
                }
            }
            let mut seen = Dropped::default();
            if known {
                seen = self.drop.decide(weights, resident, cache.n_resident(), &mut self.dropped);
            }
            if counted {
                all.rows += 1;
                all.unknown += u64::from(!known);
                all.dropped += u64::from(seen.count);
                all.swapped += swapped;
            }
            if counted && known {
                let cut = if k < routed.k {
                    let own: Vec<i32> = (0..routed.k as i32).collect();
                    row.weigh(&own, settings.weights, space, &mut self.wide, &mut self.weights);
                    let sum = |w: &[f32]| w.iter().map(|&w| f64::from(w)).sum::<f64>();
                    share(sum(&self.weights[k..]), sum(&self.weights))
                } else {
                    0.0
                };
                all.mass_cut += cut;
                all.mass_swapped += mass_swapped;
                all.mass_dropped += seen.mass_lost;
                all.lost += 1.0 - (1.0 - cut) * (1.0 - mass_swapped) * (1.0 - seen.mass_lost);
            }
        }
        self.picks.clear();
        for i in 0..k {
            let fate = if self.dropped[i] {
                Fate::Dropped
            } else {
                match cache.place(expert(i)) {
                    Ok(Placed::Hit { .. }) => Fate::Hit,
                    Ok(Placed::Miss { .. }) => Fate::Miss,
                    Err(_) => return Err(err!(Internal, "row {token}: no slot for expert {}", expert(i))),
                }
            };
            self.picks.push((expert(i), fate));
            all.hits += u64::from(counted && fate == Fate::Hit);
            if counted && fate == Fate::Miss {
                all.misses += 1;
                all.bytes = all.bytes.saturating_add(bytes);
            }
        }
        if settings.policy.needs_candidates() {
            self.wide.clear();
            self.wide.extend(row.scores.iter().map(|z| z.to_f32()));
            cache.ranked(row.ids, &self.wide, k);
        }
        cache.end_token();
        Ok(())
    }
}
