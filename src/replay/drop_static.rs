//! Dropping, replayed on what a run found resident: each token is judged as it was, and what is dropped changes nothing behind it.
//! Exact and cheap, and neither an upper nor a lower bound: the closed loop ([`super::drop_loop()`]) is what would
//! have happened.
//!
//! A miss is residency 0; the first use of a prefetched expert (2) is no miss. Reads avoided are bytes, as a share of the
//! bytes of all misses. A pass reads an expert once, so a read is avoided where no token of the pass still uses the expert. Mass is
//! the weight dropped, as a share of all routing weight. Rows with a weight that is not known drop nothing and are counted.

use super::routed::{Routed, Weights};
use crate::error::{Result, err};
use crate::route::Drop;
use crate::trace::Phase;

/// What is dropped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// Misses that weigh less than F times the token's mean weight, but never the heaviest.
    Cold { threshold: f64 },
    /// All but the heaviest so many, resident or not.
    KeepTop(usize),
}

/// What a rule came to, over the rows of one phase.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Static {
    /// Tokens times layers.
    pub rows: u64,
    /// Of them: with a weight that is not known.
    pub unknown: u64,
    pub picks: u64,
    pub misses: u64,
    /// First uses of prefetched experts.
    pub prefetched: u64,
    pub dropped: u64,
    /// Bytes of all misses, and of those that are not read any more.
    pub miss_bytes: u64,
    pub avoided_bytes: u64,
    /// Routing weight of the known rows, and of what was dropped.
    pub mass: f64,
    pub mass_dropped: f64,
    /// Rows by the number of experts that still run, 0 to k.
    pub surviving: Vec<u64>,
}

impl Static {
    /// Share of the miss bytes that is not read, 0..1.
    pub fn avoided(&self) -> f64 {
        share(self.avoided_bytes as f64, self.miss_bytes as f64)
    }

    /// Share of the routing weight that is dropped, 0..1.
    pub fn lost(&self) -> f64 {
        share(self.mass_dropped, self.mass)
    }
}

/// 0 of nothing.
pub(super) fn share(part: f64, of: f64) -> f64 {
    if of > 0.0 { part / of } else { 0.0 }
}

/// Which experts a pass reads, and which of those reads dropping would have spared.
#[derive(Default)]
pub(super) struct PassReads {
    /// By expert: bytes of its read (None before it is routed to), and whether a token still uses it.
    experts: Vec<Option<(u64, bool)>>,
    touched: Vec<u16>,
}

impl PassReads {
    /// A token routes to `expert`, which costs a read of so many bytes if it is a miss.
    pub fn take(&mut self, expert: u16, miss_bytes: u64, dropped: bool) {
        if self.experts.len() <= usize::from(expert) {
            self.experts.resize(usize::from(expert) + 1, None);
        }
        let place = &mut self.experts[usize::from(expert)];
        match place {
            Some((bytes, used)) => (*bytes, *used) = (miss_bytes.max(*bytes), *used || !dropped),
            None => {
                *place = Some((miss_bytes, !dropped));
                self.touched.push(expert);
            }
        }
    }

    /// The pass is over: bytes of its misses, and of those avoided.
    pub fn finish(&mut self) -> (u64, u64) {
        let (mut all, mut avoided) = (0u64, 0u64);
        for expert in self.touched.drain(..) {
            if let Some((bytes, used)) = self.experts[usize::from(expert)].take() {
                all = all.saturating_add(bytes);
                avoided = avoided.saturating_add(if used { 0 } else { bytes });
            }
        }
        (all, avoided)
    }
}

/// Applies a rule to every row of a phase. `Argument` where residency or weights are not recorded.
pub fn drop_static(routed: &Routed, rule: Rule, phase: Phase, weights: Weights) -> Result<Static> {
    if !routed.has_residency() {
        return Err(err!(
            Argument,
            "what the run found resident is not recorded: a closed loop can be replayed, no more"
        ));
    }
    routed.check_weights()?;
    if routed.tokens(phase) == 0 {
        return Err(err!(Argument, "{}: the run has no tokens of it", phase.as_str()));
    }
    match rule {
        Rule::Cold { threshold } => Drop { threshold, ..Drop::default() }.check()?,
        Rule::KeepTop(j) if j == 0 || j > routed.k => {
            return Err(err!(Argument, "keep the top {j}: from 1 to {} wanted", routed.k));
        }
        _ => {}
    }
    let k = routed.k;
    let mut all = Static { surviving: vec![0; k + 1], ..Static::default() };
    let (mut reads, mut wide) = (PassReads::default(), Vec::new());
    let (mut w, mut dropped) = (vec![0.0; k], vec![false; k]);
    let ranks: Vec<i32> = (0..k as i32).collect();
    for (i, layer) in routed.layers.iter().enumerate() {
        for pass in layer.passes.iter().filter(|pass| pass.phase == phase) {
            for row in pass.rows.clone().map(|row| routed.row(i, row)) {
                let known = row.weigh(&ranks, weights, routed.space(), &mut wide, &mut w);
                dropped.fill(false);
                if known {
                    rule.mark(&w, row.residency, &mut dropped);
                    all.mass += w.iter().map(|&w| f64::from(w)).sum::<f64>();
                    all.mass_dropped += (0..k).filter(|&r| dropped[r]).map(|r| f64::from(w[r])).sum::<f64>();
                }
                let count = dropped.iter().filter(|d| **d).count();
                all.rows += 1;
                all.unknown += u64::from(!known);
                all.picks += k as u64;
                all.dropped += count as u64;
                all.surviving[k - count] += 1;
                for (rank, &dropped) in dropped.iter().enumerate() {
                    let miss = row.residency[rank] == 0;
                    all.misses += u64::from(miss);
                    all.prefetched += u64::from(row.residency[rank] == 2);
                    let bytes = row.bytes.get(rank).copied().unwrap_or(layer.expert_bytes);
                    reads.take(row.ids[rank], if miss { bytes } else { 0 }, dropped);
                }
            }
            let (bytes, avoided) = reads.finish();
            all.miss_bytes = all.miss_bytes.saturating_add(bytes);
            all.avoided_bytes = all.avoided_bytes.saturating_add(avoided);
        }
    }
    Ok(all)
}

impl Rule {
    /// `weights` by falling rank, all known.
    fn mark(self, weights: &[f32], residency: &[u8], dropped: &mut [bool]) {
        match self {
            Rule::Cold { threshold } => {
                let drop = Drop { threshold, ..Drop::default() };
                // The run's cache is full of others: stand-ins are no question here.
                drop.decide(weights, |rank| residency[rank] != 0, u32::MAX, dropped);
            }
            Rule::KeepTop(j) => dropped.iter_mut().skip(j).for_each(|d| *d = true),
        }
    }
}
