//! A recorded run, replayed as it was: with the settings, the passes and the residency that the sidecar tells of, token by token and
//! pass by pass. Its misses are those that the run counted live.
//!
//! Not everything can be known again. Cold drop decides on routing weights, which a trace does not hold. Where a pass changed
//! what was resident and is not in the trace, its traces are lost. What a policy counts (uses, popularity) begins anew wherever the
//! sidecar notes what was resident. The first is an error, the others make the result inexact, and it says so.

use half::f16;

use super::ranges::{LayerRanges, Ranges};
use crate::cache::{LayerCache, Placed, Policy, Spec};
use crate::error::{Result, err};
use crate::route::{Delta, Moce, moce::RunningRange};
use crate::trace::{Phase, Placement, Settings, Sidecar, TokenRange, Trace};

/// What a recorded run came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recorded {
    /// By layer.
    pub misses: Vec<u64>,
    /// Tokens that went through slots, all layers together, times k.
    pub picks: u64,
    /// Tokens of the trace that the sidecar describes, and so were replayed.
    pub tokens: u64,
    /// Why the misses may differ from the live run's, if they may.
    pub inexact: Vec<String>,
}

/// Replays all that the sidecar describes. `Format` where the two files do not belong together, `Argument` where the run decided
/// by what is not recorded.
pub fn recorded(trace: &Trace, sidecar: &Sidecar, ranges: Option<&Ranges>) -> Result<Recorded> {
    sidecar.check_header(trace.header())?;
    let (k, m) = (sidecar.shape.k as usize, trace.top_m());
    if k == 0 || k > m {
        return Err(err!(Format, "sidecar: k {k}, the trace has {m} candidates"));
    }
    let tokens = sidecar.described_tokens().min(trace.n_tokens() as u64);
    let mut all = Recorded { tokens, ..Recorded::default() };
    for s in &sidecar.settings {
        let s = &s.settings;
        if s.drop > 0.0 {
            return Err(err!(
                Argument,
                "the run dropped cold experts (F {}), by routing weights, which a trace does not hold",
                s.drop
            ));
        }
        if moce_of(s)?.delta != Delta::TokenTopk && s.lambda > 0.0 && ranges.is_none() {
            return Err(err!(Argument, "the run's delta is {}, and there is no <trace>.range", s.delta));
        }
        if Policy::by_name(&s.policy)? != Policy::Lru && sidecar.resident.len() > 1 {
            all.inexact.push(format!("{} begins anew after each of {} gaps", s.policy, sidecar.resident.len() - 1));
        }
    }
    let lost = |r: &&TokenRange| r.left_out_before > 0 && r.placement.contains(&Placement::Slots);
    if let Some(range) = sidecar.ranges.iter().find(lost) {
        all.inexact.push(format!("{} tokens before token {} are not recorded", range.left_out_before, range.first));
    }
    for layer in 0..trace.n_layers() {
        let mut run = Layer {
            trace,
            layer,
            k,
            cache: None,
            policy: Policy::Lru,
            moce: Moce::default(),
            prefill_moce: false,
            range: RunningRange::default(),
            ranges: ranges.map(|r| r.layer(layer)),
            ids: vec![0; m],
            scores: vec![f16::ZERO; m],
            wide: Vec::new(),
            chosen: Vec::new(),
            misses: 0,
            picks: 0,
        };
        run.replay(sidecar, tokens).map_err(|e| crate::Error::new(e.kind, format!("layer {layer}: {e}")))?;
        all.misses.push(run.misses);
        all.picks += run.picks;
    }
    Ok(all)
}

fn moce_of(s: &Settings) -> Result<Moce> {
    let delta = Delta::by_name(&s.delta).ok_or_else(|| err!(Format, "sidecar: delta '{}'", s.delta))?;
    Ok(Moce { lambda: s.lambda, top_j: s.top_j, delta })
}

struct Layer<'a> {
    trace: &'a Trace,
    layer: usize,
    k: usize,
    cache: Option<LayerCache<crate::cache::AnyPolicy>>,
    policy: Policy,
    moce: Moce,
    prefill_moce: bool,
    range: RunningRange,
    ranges: Option<LayerRanges<'a>>,
    ids: Vec<u16>,
    scores: Vec<f16>,
    /// Scores of the pass's rows, where the policy wants them.
    wide: Vec<f32>,
    /// k a row.
    chosen: Vec<u16>,
    misses: u64,
    picks: u64,
}

impl Layer<'_> {
    fn replay(&mut self, sidecar: &Sidecar, tokens: u64) -> Result<()> {
        let n_experts = sidecar.shape.n_experts[self.layer] as usize;
        let (mut settings, mut resident) = (sidecar.settings.iter().peekable(), sidecar.resident.iter().peekable());
        for range in &sidecar.ranges {
            let placement = match range.placement.as_slice() {
                [one] => *one,
                each => *each
                    .get(self.layer)
                    .ok_or_else(|| err!(Format, "sidecar: no placement at token {}", range.first))?,
            };
            let mut token = range.first;
            while token < range.end().min(tokens) {
                while let Some(s) = settings.next_if(|s| s.token <= token) {
                    self.take_up(&s.settings, n_experts)?;
                }
                while let Some(r) = resident.next_if(|r| r.before_token <= token) {
                    if let (Some(cache), Some(experts)) = (&mut self.cache, r.layers.get(self.layer)) {
                        cache.restore(experts);
                    }
                    let of_layer = |key: &str| r.state.get(key).and_then(|v| v.get(self.layer));
                    let mean = of_layer("running_range").and_then(serde_json::Value::as_f64);
                    let rows = of_layer("rows").and_then(serde_json::Value::as_u64);
                    self.range = RunningRange::resume(mean.unwrap_or(0.0), rows.unwrap_or(0));
                }
                // All of a pass is chosen before any of it is placed, as live.
                let rows = u64::from(range.tokens_per_pass).max(1).min(range.end().min(tokens) - token);
                self.pass(token as usize, rows as usize, range.phase, placement)?;
                token += rows;
            }
        }
        Ok(())
    }

    fn take_up(&mut self, s: &Settings, n_experts: usize) -> Result<()> {
        let Some(&slots) = s.slots.get(self.layer) else {
            return Err(err!(Argument, "the run had no slots: there is no cache to replay"));
        };
        if (slots as usize) < self.k || n_experts >= usize::from(crate::cache::NO_EXPERT) {
            return Err(err!(Format, "sidecar: {slots} slots, {n_experts} experts, k {}", self.k));
        }
        self.moce = moce_of(s)?;
        self.prefill_moce = s.prefill_moce;
        self.policy = Policy::by_name(&s.policy)?;
        if self.policy.needs_future() {
            return Err(err!(Format, "sidecar: {} cannot have run live", s.policy));
        }
        self.cache = Some(LayerCache::new(self.policy.build(&Spec::new(n_experts)), n_experts, slots));
        Ok(())
    }

    fn pass(&mut self, first: usize, rows: usize, phase: Phase, placement: Placement) -> Result<()> {
        let m = self.ids.len();
        let Some(cache) = &mut self.cache else { return Err(err!(Format, "sidecar: no settings at token {first}")) };
        self.chosen.clear();
        let (mut raised, mut ranks) = (vec![0.0; self.k], vec![0; self.k]);
        let rerank = self.moce.lambda > 0.0 && (phase == Phase::Decode || self.prefill_moce);
        for token in first..first + rows {
            let record = self.trace.record(token, self.layer);
            record.copy_ids(&mut self.ids);
            record.copy_scores(&mut self.scores);
            if let Some(&id) = self.ids.iter().find(|id| usize::from(**id) >= cache.n_experts()) {
                return Err(err!(Format, "token {token}: expert {id}, the layer has {}", cache.n_experts()));
            }
            let bonus = if rerank {
                let range = self.ranges.and_then(|r| r.at(token));
                if self.moce.delta == Delta::RunningFull {
                    self.range.push(range);
                }
                let range = if self.moce.delta == Delta::RunningFull { self.range.mean() } else { range };
                self.moce.bonus(&self.scores, self.k, range)
            } else {
                None
            };
            match bonus {
                Some(bonus) => {
                    let resident = |e| cache.is_resident(e);
                    self.moce.rerank(&self.ids, &self.scores, bonus, resident, &mut raised, &mut ranks);
                    self.chosen.extend(ranks.iter().map(|&rank| self.ids[usize::from(rank)]));
                }
                None => self.chosen.extend_from_slice(&self.ids[..self.k]),
            }
        }
        let fits = cache.begin_batch(self.chosen.iter().copied());
        if fits == (placement == Placement::PassThrough) {
            cache.end_batch();
            let (n, says) = (cache.capacity(), placement.as_str());
            return Err(err!(Format, "token {first}: the sidecar says {says}, {rows} rows in {n} slots say otherwise"));
        }
        if !fits {
            return Ok(());
        }
        for (row, experts) in self.chosen.chunks_exact(self.k).enumerate() {
            for &e in experts {
                match cache.place(e) {
                    Ok(Placed::Hit { .. }) => {}
                    Ok(Placed::Miss { .. }) => self.misses += 1,
                    Err(_) => return Err(err!(Internal, "token {}: no slot for expert {e}", first + row)),
                }
            }
            self.picks += self.k as u64;
            if self.policy.needs_candidates() {
                let record = self.trace.record(first + row, self.layer);
                self.wide.resize(m, 0.0);
                record.copy_ids(&mut self.ids);
                record.copy_scores(&mut self.scores);
                self.wide.iter_mut().zip(&self.scores).for_each(|(wide, z)| *wide = z.to_f32());
                cache.ranked(&self.ids, &self.wide, self.k);
            }
            cache.end_token();
        }
        cache.end_batch();
        Ok(())
    }
}
