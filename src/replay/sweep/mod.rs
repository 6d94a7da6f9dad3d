//! Sweeps: the cross product of policies, capacities, lambdas, protected ranks and keep maps over traces, one row a setting.
//!
//! [`Axes::points`] says which settings and in which order; the order of the rows is theirs, whatever computed them. A row
//! ([`row`]) begins with what identifies it, so that a table that was cut off can be gone on with ([`table`]), and shards can be put together.
//! [`check`] looks for what cannot be in a table.

pub mod check;
#[cfg(feature = "parquet")]
pub mod parquet;
pub mod row;
pub mod table;

use super::Settings;
use crate::cache::Policy;
use crate::error::{Result, err};
use crate::route::{Delta, Moce};

/// What is varied. The defaults, with no keep map, three keep maps and six brief ones, are the 120 settings of the audited sweep: for each
/// full variant six policies, of which three with every lambda and J (27), for each brief one LRU and near_pick_ema plain (2).
#[derive(Clone, Debug, PartialEq)]
pub struct Axes {
    pub policies: Vec<Policy>,
    /// Those of the policies that are replayed with every lambda and J; the others without reranking.
    pub reranked: Vec<Policy>,
    /// Those that brief variants are replayed with, without reranking.
    pub brief: Vec<Policy>,
    pub capacities: Vec<usize>,
    pub lambdas: Vec<f64>,
    pub top_js: Vec<u32>,
    pub delta: Delta,
}

impl Default for Axes {
    fn default() -> Self {
        Self {
            policies: Policy::REFERENCE.to_vec(),
            reranked: vec![Policy::Lru, Policy::NearPickEma, Policy::InverseRouterEma],
            brief: vec![Policy::Lru, Policy::NearPickEma],
            capacities: vec![113],
            lambdas: vec![0.0, 0.05, 0.09, 0.12],
            top_js: vec![2, 3],
            delta: Delta::TokenTopk,
        }
    }
}

impl Axes {
    /// The settings of one variant of one trace, in the order of their rows: capacity, policy, lambda, J.
    pub fn points(&self, brief: bool, base: &Settings) -> Result<Vec<Settings>> {
        let top_j = self.top_js.last().copied().unwrap_or(base.moce.top_j);
        let mut points = Vec::new();
        for &capacity in &self.capacities {
            for &policy in if brief { &self.brief } else { &self.policies } {
                let mut push = |lambda, top_j| {
                    let moce = Moce { lambda, top_j, delta: self.delta };
                    points.push(Settings { policy, capacity, moce, ..base.clone() });
                };
                if brief || !self.reranked.contains(&policy) {
                    push(0.0, top_j);
                    continue;
                }
                for &lambda in &self.lambdas {
                    self.top_js.iter().for_each(|&top_j| push(lambda, top_j));
                }
            }
        }
        if points.is_empty() {
            return Err(err!(Argument, "sweep: policies, capacities, lambdas and top Js: none may be empty"));
        }
        Ok(points)
    }
}

/// The settings that differ in what they do, and for each of `points` which of them it is: without reranking J and delta
/// mean nothing.
pub fn distinct(points: &[Settings]) -> (Vec<Settings>, Vec<usize>) {
    let mut distinct: Vec<Settings> = Vec::new();
    let which = points.iter().map(|point| {
        let mut point = point.clone();
        if point.moce.lambda <= 0.0 {
            point.moce = Moce::default();
        }
        distinct.iter().position(|d| *d == point).unwrap_or_else(|| {
            distinct.push(point);
            distinct.len() - 1
        })
    });
    let which = which.collect();
    (distinct, which)
}

/// Of `n` rows those of shard `i` of `shards` (from 1): neighbours, so that they share what is gathered.
pub fn shard(n: usize, i: usize, shards: usize) -> std::ops::Range<usize> {
    let at = |i: usize| (n as u128 * i as u128 / shards.max(1) as u128) as usize;
    at(i.saturating_sub(1))..at(i)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_audits_settings() {
        let (axes, base) = (Axes::default(), Settings::default());
        let (full, brief) = (axes.points(false, &base).unwrap(), axes.points(true, &base).unwrap());
        assert_eq!((full.len(), brief.len(), 4 * full.len() + 6 * brief.len()), (27, 2, 120));
        assert!(full.iter().all(|s| !(s.policy.needs_future() && s.moce.lambda > 0.0)));
        let (distinct, which) = distinct(&full);
        assert_eq!((distinct.len(), which.len()), (24, 27));
        assert_eq!(distinct[which[0]], distinct[which[1]]);
        let none = Axes { capacities: vec![], ..axes };
        assert!(none.points(false, &base).is_err());
    }

    #[test]
    fn shards_cover_everything_once() {
        for (n, shards) in [(120, 7), (3, 5), (0, 2), (10, 1)] {
            let all: Vec<usize> = (1..=shards).flat_map(|i| shard(n, i, shards)).collect();
            assert_eq!(all, (0..n).collect::<Vec<_>>());
        }
    }
}
