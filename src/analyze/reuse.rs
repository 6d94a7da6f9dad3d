//! How soon an expert comes back, counted in other experts of its layer: its reuse distance. From it follow the hits of a cache in LRU order, for every
//! capacity in one pass: a pick is a hit where at least one slot more than its distance is there.
//!
//! The order is that of [`crate::cache`], one token a batch: the experts of a token are used at the same time, and of equals the lowest id goes first. So the
//! curve is the replay's without warm-up, to the last hit, for capacities of k or more and less than all experts (of those a replay
//! counts no first use either).

use crate::trace::{Phase, Routing};

/// Reuse distances of one layer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reuse {
    /// Picks in prefill, by distance: 0 is the expert that would be the last to go.
    pub prefill: Vec<u64>,
    /// The same, in decode.
    pub decode: Vec<u64>,
    /// First uses in prefill and decode: no capacity hits them.
    pub first_uses: [u64; 2],
}

impl Reuse {
    pub fn of(routing: &Routing, layer: usize) -> Self {
        let n = routing.n_experts;
        let mut reuse = Self { prefill: vec![0; n], decode: vec![0; n], first_uses: [0; 2] };
        // used last, first
        let mut stack: Vec<u16> = Vec::with_capacity(n);
        let mut now = Vec::with_capacity(routing.k);
        let mut of_token = vec![false; n];
        for (pass, row) in routing.rows(layer) {
            let counts = if pass.phase == Phase::Prefill { &mut reuse.prefill } else { &mut reuse.decode };
            for &expert in row {
                of_token[usize::from(expert)] = true;
            }
            let mut found = 0;
            for (distance, &expert) in stack.iter().enumerate() {
                if of_token[usize::from(expert)] {
                    counts[distance] += 1;
                    found += 1;
                    if found == row.len() {
                        break;
                    }
                }
            }
            reuse.first_uses[usize::from(pass.phase == Phase::Decode)] += (row.len() - found) as u64;
            stack.retain(|&expert| !of_token[usize::from(expert)]);
            now.clear();
            now.extend_from_slice(row);
            now.sort_unstable_by(|a, b| b.cmp(a));
            stack.splice(0..0, now.iter().copied());
            row.iter().for_each(|&expert| of_token[usize::from(expert)] = false);
        }
        reuse
    }

    /// Hits in LRU order with 0, 1, ... slots, up to one for each expert.
    pub fn hits(&self, phase: Phase) -> Vec<u64> {
        let counts = if phase == Phase::Prefill { &self.prefill } else { &self.decode };
        let sums = counts.iter().scan(0, |sum, n| {
            *sum += n;
            Some(*sum)
        });
        std::iter::once(0).chain(sums).collect()
    }

    /// Picks of a phase.
    pub fn picks(&self, phase: Phase) -> u64 {
        match phase {
            Phase::Prefill => self.prefill.iter().sum::<u64>() + self.first_uses[0],
            Phase::Decode => self.decode.iter().sum::<u64>() + self.first_uses[1],
        }
    }

    /// The distance within which this share of the decode picks that came back did so; None where none did.
    pub fn quantile(&self, share: f64) -> Option<usize> {
        let hits = self.hits(Phase::Decode);
        let total = *hits.last()?;
        let wanted = (share * total as f64).max(1.0);
        hits.iter().position(|&n| n as f64 >= wanted).filter(|_| total > 0).map(|slots| slots - 1)
    }
}

/// Share of the decode picks of all layers that hit in LRU order, by slots of each layer from 0 on; None without decode picks.
pub fn hit_curve<'a>(layers: impl IntoIterator<Item = &'a Reuse>) -> Option<Vec<f64>> {
    let (mut hits, mut picks) = (Vec::new(), 0);
    for layer in layers {
        let of_layer = layer.hits(Phase::Decode);
        hits.resize(of_layer.len().max(hits.len()), 0);
        hits.iter_mut().zip(of_layer).for_each(|(sum, n): (&mut u64, u64)| *sum += n);
        picks += layer.picks(Phase::Decode);
    }
    (picks > 0).then(|| hits.iter().map(|&n| n as f64 / picks as f64).collect())
}
