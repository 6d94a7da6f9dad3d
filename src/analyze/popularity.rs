//! How unequal the experts of a layer are: how many are used at all, and how few make up most of the picks.

use crate::trace::Routing;

/// Of one layer, all its rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Popularity {
    /// Picks by expert, most first.
    pub counts: Vec<u64>,
    pub picks: u64,
}

/// Picks of a layer by expert id, all its rows.
pub fn counts(routing: &Routing, layer: usize) -> Vec<u64> {
    let mut counts = vec![0; routing.n_experts];
    routing.layers[layer].ids.iter().for_each(|&id| counts[usize::from(id)] += 1);
    counts
}

impl Popularity {
    pub fn of(routing: &Routing, layer: usize) -> Self {
        let mut counts = counts(routing, layer);
        counts.sort_unstable_by(|a, b| b.cmp(a));
        Self { counts, picks: routing.layers[layer].ids.len() as u64 }
    }

    /// Experts that are used at all.
    pub fn distinct(&self) -> usize {
        self.counts.iter().take_while(|n| **n > 0).count()
    }

    /// The fewest experts that have at least this share of the picks.
    pub fn experts_for(&self, share: f64) -> usize {
        let wanted = share * self.picks as f64;
        let mut sum = 0;
        let enough = self.counts.iter().position(|n| {
            sum += n;
            sum as f64 >= wanted
        });
        enough.map_or(0, |at| at + 1).min(self.distinct())
    }

    /// Share of the picks that the most popular `n` have.
    pub fn share_of_top(&self, n: usize) -> f64 {
        self.counts.iter().take(n).sum::<u64>() as f64 / self.picks.max(1) as f64
    }

    /// The Gini coefficient: 0 where all experts are used alike, near 1 where one is used alone.
    pub fn gini(&self) -> f64 {
        let n = self.counts.len() as f64;
        // most first, so that the weights fall from n - 1 to 1 - n
        let weighted: f64 =
            self.counts.iter().zip(0u32..).map(|(&c, i)| (n - 1.0 - 2.0 * f64::from(i)) * c as f64).sum();
        if self.picks == 0 { 0.0 } else { weighted / (n * self.picks as f64) }
    }

    /// Entropy of the picks in bits; log2 of the experts where all are used alike.
    pub fn entropy(&self) -> f64 {
        let share = |n: &u64| *n as f64 / self.picks.max(1) as f64;
        self.counts.iter().filter(|n| **n > 0).map(share).map(|p| -p * p.log2()).sum::<f64>().max(0.0)
    }
}
