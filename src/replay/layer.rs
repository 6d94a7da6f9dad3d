//! The replay of one layer under one setting: for each token choose, place, count. The steps are the live hook's.

use std::sync::Arc;

use super::column::Column;
use super::ranges::LayerRanges;
use super::{Settings, column::Row};
use crate::cache::{AnyPolicy, LayerCache, NextUses, Placed};
use crate::error::{Result, err};
use crate::route::{Delta, moce::RunningRange};

/// What one layer came to, after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerResult {
    /// Picks that were not resident, places that no candidate filled (`forced`) included.
    pub misses: u64,
    /// k a token.
    pub picks: u64,
    /// Tokens that were counted.
    pub tokens: u64,
    /// Of the misses: places that stayed empty because fewer than k candidates are left.
    pub forced: u64,
    /// Of the router's own first k: those that the keep map has pruned away. What runs in their place is counted as any pick; what it
    /// costs in quality is not in the misses.
    pub substituted: u64,
    /// Picks that reranking put in another's place.
    pub swapped: u64,
    /// Of the misses: read, used, and not kept.
    pub refused: u64,
    /// Displaced experts that were read in the background.
    pub background: u64,
}

impl LayerResult {
    pub fn misses_per_token(&self) -> f64 {
        self.misses as f64 / self.tokens.max(1) as f64
    }

    /// 0..1.
    pub fn hit_rate(&self) -> f64 {
        1.0 - self.misses as f64 / self.picks.max(1) as f64
    }
}

/// One layer under one setting, on its way through the trace.
pub struct LayerReplay<'a> {
    /// None where the capacity holds every expert: nothing is ever missed.
    cache: Option<LayerCache<AnyPolicy>>,
    settings: &'a Settings,
    ranges: Option<LayerRanges<'a>>,
    range: RunningRange,
    raised: Vec<f64>,
    ranks: Vec<u16>,
    /// What runs, then what is read behind it.
    experts: Vec<u16>,
    refuses: bool,
    ranked: bool,
    /// Tokens that are over.
    tokens: usize,
    result: LayerResult,
}

impl<'a> LayerReplay<'a> {
    /// An empty cache. `settings` have been checked ([`super::Replay::check`]); `next_uses` are for policies that need the
    /// future, `ranges` for the delta modes that need them.
    pub fn new(
        n_experts: usize,
        settings: &'a Settings,
        next_uses: Option<Arc<NextUses>>,
        ranges: Option<LayerRanges<'a>>,
    ) -> Self {
        let policy = settings.policy;
        let cache = (settings.capacity < n_experts).then(|| {
            let policy = policy.build(&settings.spec(n_experts, next_uses));
            LayerCache::new(policy, n_experts, settings.capacity as u32)
        });
        // k is at most the capacity: without a cache it may be any number.
        let k = if cache.is_some() { settings.k } else { 0 };
        Self {
            cache,
            settings,
            ranges,
            range: RunningRange::default(),
            raised: vec![0.0; k],
            ranks: vec![0; k],
            experts: Vec::with_capacity(2 * k),
            refuses: policy.refuses(),
            ranked: policy.needs_candidates(),
            tokens: 0,
            result: LayerResult::default(),
        }
    }

    /// Goes on with the next tokens. `Format` where one would run an expert twice.
    pub fn run(&mut self, column: &Column) -> Result<()> {
        for row in column.rows() {
            if self.tokens == self.settings.warmup {
                self.result = LayerResult::default();
            }
            if self.cache.is_some() {
                self.token(self.tokens, row)?;
            } else {
                self.result.substituted += u64::from(row.substituted);
            }
            self.tokens += 1;
        }
        Ok(())
    }

    /// What was counted so far.
    pub fn result(&self) -> LayerResult {
        let tokens = self.tokens.saturating_sub(self.settings.warmup).max(1) as u64;
        LayerResult { tokens, picks: tokens.saturating_mul(self.settings.k as u64), ..self.result }
    }

    fn token(&mut self, token: usize, row: Row<'_>) -> Result<()> {
        let own = row.first(self.settings.k);
        let bonus = if self.settings.moce.lambda > 0.0 { self.bonus(token, row) } else { None };
        let n_run = match bonus {
            Some(bonus) => self.rerank(row, bonus),
            None => own.len(),
        };
        let experts = if bonus.is_some() { self.experts.as_slice() } else { own };
        let forced = self.settings.k.saturating_sub(n_run) as u64;
        self.result.forced += forced;
        self.result.misses += forced;
        self.result.substituted += u64::from(row.substituted);
        let candidates = self.ranked.then_some((row.ids, row.scores, self.settings.k));
        if self.refuses || experts.len() > n_run {
            let experts = experts.to_vec();
            return self.step_by_step(token, &experts, n_run, candidates);
        }
        let Some(cache) = &mut self.cache else { return Ok(()) };
        match cache.token(experts, candidates) {
            Some(misses) => self.result.misses += u64::from(misses),
            None => return Err(err!(Format, "token {token}: an expert twice among {experts:?}")),
        }
        Ok(())
    }

    /// The same for what `token` does not do: experts that are refused, and those behind the first `n_run`, which are read in the background.
    #[cold]
    fn step_by_step(
        &mut self,
        token: usize,
        mut experts: &[u16],
        n_run: usize,
        candidates: Option<(&[u16], &[f32], usize)>,
    ) -> Result<()> {
        let Some(cache) = &mut self.cache else { return Ok(()) };
        if !cache.begin_batch(experts.iter().copied()) {
            // What runs fits, since the capacity is at least k.
            experts = &experts[..n_run];
            cache.begin_batch(experts.iter().copied());
        }
        if cache.n_pinned() != experts.len() {
            cache.end_batch();
            return Err(err!(Format, "token {token}: an expert twice among {experts:?}"));
        }
        let r = &mut self.result;
        for (i, &e) in experts.iter().enumerate() {
            if self.refuses && !cache.is_resident(e) && cache.refuses(e) {
                cache.pass_over(e);
                r.refused += 1;
                r.misses += 1;
                continue;
            }
            match cache.place(e) {
                Ok(Placed::Hit { .. }) => {}
                Ok(Placed::Miss { .. }) if i < n_run => r.misses += 1,
                Ok(Placed::Miss { .. }) => r.background += 1,
                Err(_) => return Err(err!(Internal, "token {token}: no slot for expert {e}")),
            }
        }
        if let Some((ids, scores, k)) = candidates {
            cache.ranked(ids, scores, k);
        }
        cache.end_token();
        cache.end_batch();
        Ok(())
    }

    /// What runs into `experts`, behind it what it displaced and is to be read; the number of the former.
    #[inline]
    fn rerank(&mut self, row: Row<'_>, bonus: f64) -> usize {
        let Settings { k, moce, admit_displaced, .. } = *self.settings;
        let Some(cache) = &self.cache else { return 0 };
        let ranks = &mut self.ranks;
        let swapped = moce.rerank(row.ids, row.scores, bonus, |e| cache.is_resident(e), &mut self.raised, ranks);
        self.result.swapped += u64::from(swapped);
        self.experts.clear();
        self.experts.extend(ranks.iter().map(|&rank| row.ids[usize::from(rank)]));
        if admit_displaced && swapped > 0 {
            let displaced = (0..k).filter(|&rank| !ranks.contains(&(rank as u16)));
            self.experts.extend(displaced.map(|rank| row.ids[rank]));
        }
        k
    }

    fn bonus(&mut self, token: usize, row: Row<'_>) -> Option<f64> {
        let range = match self.settings.moce.delta {
            Delta::TokenTopk => None,
            Delta::TokenFull => self.ranges.and_then(|r| r.at(token)),
            Delta::RunningFull => {
                self.range.push(self.ranges.and_then(|r| r.at(token)));
                self.range.mean()
            }
        };
        self.settings.moce.bonus(row.scores, self.settings.k, range)
    }
}
