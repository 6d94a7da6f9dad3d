//! The replay of one layer under one setting: for each token choose, place, count. The steps are the live hook's.

use std::sync::Arc;

use super::column::Column;
use super::ranges::LayerRanges;
use super::{Settings, column::Row};
use crate::cache::{LayerCache, NextUses, Placed};
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
    /// A cache that holds every expert.
    pub(super) fn all_resident(settings: &Settings, n_tokens: usize, substituted: u64) -> Self {
        let tokens = n_tokens.saturating_sub(settings.warmup).max(1) as u64;
        Self { tokens, picks: tokens.saturating_mul(settings.k as u64), substituted, ..Self::default() }
    }

    pub fn misses_per_token(&self) -> f64 {
        self.misses as f64 / self.tokens.max(1) as f64
    }

    /// 0..1.
    pub fn hit_rate(&self) -> f64 {
        1.0 - self.misses as f64 / self.picks.max(1) as f64
    }
}

/// Replays a gathered layer. `settings` have been checked ([`super::Replay::check`]); `next_uses` are for policies that need the
/// future, `ranges` for the delta modes that need them. `Format` where a token would run an expert twice.
pub fn replay_layer(
    column: &Column,
    n_experts: usize,
    settings: &Settings,
    next_uses: Option<Arc<NextUses>>,
    ranges: Option<LayerRanges<'_>>,
) -> Result<LayerResult> {
    let (k, warmup) = (settings.k, settings.warmup);
    if settings.capacity >= n_experts {
        let substituted = column.rows().skip(warmup).map(|row| u64::from(row.substituted)).sum();
        return Ok(LayerResult::all_resident(settings, column.n_tokens(), substituted));
    }
    let policy = settings.policy;
    let cache =
        LayerCache::new(policy.build(&settings.spec(n_experts, next_uses)), n_experts, settings.capacity as u32);
    let mut layer = Layer {
        cache,
        settings,
        ranges,
        range: RunningRange::default(),
        raised: vec![0.0; k],
        ranks: vec![0; k],
        experts: Vec::with_capacity(2 * k),
        refuses: policy.refuses(),
        ranked: policy.needs_candidates(),
        result: LayerResult::default(),
    };
    for (token, row) in column.rows().enumerate().take(warmup) {
        layer.token(token, row)?;
    }
    layer.result = LayerResult::default();
    for (token, row) in column.rows().enumerate().skip(warmup) {
        layer.token(token, row)?;
    }
    let tokens = (column.n_tokens() - warmup) as u64;
    Ok(LayerResult { tokens, picks: tokens * k as u64, ..layer.result })
}

struct Layer<'a> {
    cache: LayerCache<crate::cache::AnyPolicy>,
    settings: &'a Settings,
    ranges: Option<LayerRanges<'a>>,
    range: RunningRange,
    raised: Vec<f64>,
    ranks: Vec<u16>,
    /// What runs, then what is read behind it.
    experts: Vec<u16>,
    refuses: bool,
    ranked: bool,
    result: LayerResult,
}

impl Layer<'_> {
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
        match self.cache.token(experts, candidates) {
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
        if !self.cache.begin_batch(experts.iter().copied()) {
            // What runs fits, since the capacity is at least k.
            experts = &experts[..n_run];
            self.cache.begin_batch(experts.iter().copied());
        }
        if self.cache.n_pinned() != experts.len() {
            self.cache.end_batch();
            return Err(err!(Format, "token {token}: an expert twice among {experts:?}"));
        }
        let r = &mut self.result;
        for (i, &e) in experts.iter().enumerate() {
            if self.refuses && !self.cache.is_resident(e) && self.cache.refuses(e) {
                self.cache.pass_over(e);
                r.refused += 1;
                r.misses += 1;
                continue;
            }
            match self.cache.place(e) {
                Ok(Placed::Hit { .. }) => {}
                Ok(Placed::Miss { .. }) if i < n_run => r.misses += 1,
                Ok(Placed::Miss { .. }) => r.background += 1,
                Err(_) => return Err(err!(Internal, "token {token}: no slot for expert {e}")),
            }
        }
        if let Some((ids, scores, k)) = candidates {
            self.cache.ranked(ids, scores, k);
        }
        self.cache.end_token();
        self.cache.end_batch();
        Ok(())
    }

    /// What runs into `experts`, behind it what it displaced and is to be read; the number of the former.
    #[inline]
    fn rerank(&mut self, row: Row<'_>, bonus: f64) -> usize {
        let Settings { k, moce, admit_displaced, .. } = *self.settings;
        let (cache, ranks) = (&self.cache, &mut self.ranks);
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
