//! Closed loops side by side: the cross product of slots, experts a token, lambda and F, which of them are on the front of their number of
//! slots, and the two questions that are put to a front: which reads least within so much mass lost, and which loses least within so many reads.

use super::drop_loop::{DropLoop, DropSettings, Unchanged, drop_loop};
use super::routed::Routed;
use crate::error::{Result, err};

/// A closed loop, and what it is set against.
#[derive(Clone, Debug)]
pub struct DropRow {
    pub settings: DropSettings,
    pub all: DropLoop,
    /// With F 0.
    pub without: DropLoop,
    /// What F would have dropped of that, and changed nothing.
    pub unchanged: Unchanged,
    /// No other row of as many slots reads no more and loses no more mass.
    pub front: bool,
}

/// `base` with every number of slots, of experts a token, and lambda: by slots, k, lambda.
pub fn caches(base: &DropSettings, capacities: &[usize], ks: &[usize], lambdas: &[f64]) -> Vec<DropSettings> {
    let mut caches = Vec::with_capacity(capacities.len() * ks.len() * lambdas.len());
    for &capacity in capacities {
        for &k in ks {
            for &lambda in lambdas {
                let mut one = DropSettings { capacity, k, ..base.clone() };
                one.moce.lambda = lambda;
                caches.push(one);
            }
        }
    }
    caches
}

/// One cache under F 0, and then under each of `thresholds` in their order.
pub fn rows(routed: &Routed, cache: &DropSettings, thresholds: &[f64]) -> Result<Vec<DropRow>> {
    let mut fs: Vec<f64> = thresholds.iter().copied().filter(|f| *f != 0.0).collect();
    fs.insert(0, 0.0);
    let (without, unchanged) = drop_loop(routed, &DropSettings { threshold: 0.0, ..cache.clone() }, &fs)?;
    let row = |unchanged: Unchanged| {
        let settings = DropSettings { threshold: unchanged.threshold, ..cache.clone() };
        let all = if settings.threshold == 0.0 { without.clone() } else { drop_loop(routed, &settings, &[])?.0 };
        Ok(DropRow { settings, all, without: without.clone(), unchanged, front: false })
    };
    unchanged.into_iter().map(row).collect()
}

/// Marks the front of each number of slots; rows of one number stand together.
pub fn mark_fronts(rows: &mut [DropRow]) {
    for of_capacity in by_slots_mut(rows) {
        let points: Vec<(u64, f64)> = of_capacity.iter().map(DropRow::point).collect();
        of_capacity.iter_mut().zip(front(&points)).for_each(|(row, on)| row.front = on);
    }
}

fn by_slots_mut(rows: &mut [DropRow]) -> impl Iterator<Item = &mut [DropRow]> {
    rows.chunk_by_mut(|a, b| a.settings.capacity == b.settings.capacity)
}

/// The rows of each number of slots.
pub fn by_slots(rows: &[DropRow]) -> impl Iterator<Item = &[DropRow]> {
    rows.chunk_by(|a, b| a.settings.capacity == b.settings.capacity)
}

impl DropRow {
    /// Bytes read, and the share of the routing weight that is lost.
    pub fn point(&self) -> (u64, f64) {
        (self.all.bytes, self.all.mass_lost())
    }

    /// Tokens that were counted: rows over layers.
    pub fn tokens(&self, layers: usize) -> f64 {
        (self.all.rows as f64 / layers.max(1) as f64).max(1.0)
    }
}

/// Which of some results, two costs each (bytes read and mass lost, say), are on the front: no other one costs no more in both, unless it
/// is the same. So at an equal one of the two the front has the least of the other.
pub fn front<A: PartialOrd + Copy, B: PartialOrd + Copy>(results: &[(A, B)]) -> Vec<bool> {
    let beaten = |&(a, b): &(A, B)| results.iter().any(|by| by.0 <= a && by.1 <= b && (by.0 < a || by.1 < b));
    results.iter().map(|result| !beaten(result)).collect()
}

/// A limit, within which the best row of each number of slots is asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limit {
    /// Share of the routing weight that may be lost, 0..1: which row reads least?
    Mass(f64),
    /// Reads (misses) a token: which row loses least mass?
    ReadsPerToken(f64),
    /// Bytes read a token: the same.
    BytesPerToken(f64),
}

impl Limit {
    /// `Argument` for what is no limit.
    pub fn check(self) -> Result<()> {
        match self {
            Self::Mass(share) if !(0.0..=1.0).contains(&share) => {
                Err(err!(Argument, "mass lost {share}: a share from 0 to 1 wanted"))
            }
            Self::ReadsPerToken(n) | Self::BytesPerToken(n) if !(n >= 0.0 && n.is_finite()) => {
                Err(err!(Argument, "{n} a token: a number of 0 or more wanted"))
            }
            _ => Ok(()),
        }
    }

    /// The best of these rows (of one number of slots, and as many layers) within the limit; of equals the one that is better in the other
    /// respect, then the first. None where no row is within it.
    pub fn best(self, rows: &[DropRow], layers: usize) -> Option<&DropRow> {
        let within = |row: &&DropRow| match self {
            Self::Mass(share) => row.all.mass_lost() <= share,
            Self::ReadsPerToken(n) => row.all.misses as f64 / row.tokens(layers) <= n,
            Self::BytesPerToken(n) => row.all.bytes as f64 / row.tokens(layers) <= n,
        };
        rows.iter().filter(within).min_by(|a, b| {
            let ((bytes_a, mass_a), (bytes_b, mass_b)) = (a.point(), b.point());
            let (bytes, mass) = (bytes_a.cmp(&bytes_b), mass_a.total_cmp(&mass_b));
            if matches!(self, Self::Mass(_)) { bytes.then(mass) } else { mass.then(bytes) }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_front_is_what_nothing_beats() {
        let results = [(100, 0.0), (80, 0.1), (80, 0.2), (90, 0.1), (50, 0.5), (50, 0.5), (120, 0.0)];
        assert_eq!(front(&results), [true, true, false, false, true, true, false]);
    }

    /// 10 tokens in 2 layers each, 100 bytes a read.
    fn row(misses: u64, lost: f64) -> DropRow {
        let all = DropLoop { rows: 20, misses, bytes: 100 * misses, lost: 20.0 * lost, ..DropLoop::default() };
        let settings = DropSettings { threshold: lost, ..DropSettings::default() };
        DropRow { settings, without: all.clone(), all, unchanged: Unchanged::default(), front: false }
    }

    #[test]
    fn the_best_within_a_limit() {
        let rows = [row(100, 0.0), row(80, 0.125), row(80, 0.25), row(90, 0.125), row(50, 0.5)];
        let best = |limit: Limit| limit.best(&rows, 2).map(|row| (row.all.misses, row.all.mass_lost()));
        assert_eq!(best(Limit::Mass(0.0)), Some((100, 0.0)));
        assert_eq!(best(Limit::Mass(0.125)), Some((80, 0.125)));
        assert_eq!(best(Limit::Mass(0.3)), Some((80, 0.125)));
        assert_eq!(best(Limit::Mass(1.0)), Some((50, 0.5)));
        // reads a token
        assert_eq!(best(Limit::ReadsPerToken(8.0)), Some((80, 0.125)));
        assert_eq!(best(Limit::ReadsPerToken(9.5)), Some((80, 0.125)));
        assert_eq!(best(Limit::ReadsPerToken(7.9)), Some((50, 0.5)));
        assert_eq!(best(Limit::ReadsPerToken(4.9)), None);
        assert_eq!(best(Limit::BytesPerToken(999.0)), Some((80, 0.125)));
        assert_eq!(best(Limit::BytesPerToken(1000.0)), Some((100, 0.0)));
        let refused =
            [Limit::Mass(1.5), Limit::Mass(f64::NAN), Limit::ReadsPerToken(-1.0), Limit::BytesPerToken(f64::NAN)];
        assert!(refused.iter().all(|limit| limit.check().is_err()));
    }
}
