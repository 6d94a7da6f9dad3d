//! A random victim, by a seeded generator: the same seed and trace give the same misses.

use super::pool::Pool;
use super::{Build, Eviction, Spec};

pub struct Random {
    pool: Pool,
    seed: u64,
    state: u64,
}

impl Build for Random {
    const NAME: &str = "random";

    fn build(spec: &Spec) -> Self {
        Self { pool: Pool::new(spec.n_experts), seed: spec.seed, state: spec.seed }
    }
}

impl Random {
    /// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

impl Eviction for Random {
    fn remove(&mut self, expert: u16) {
        self.pool.remove(expert);
    }

    fn insert(&mut self, expert: u16) {
        self.pool.insert(expert);
    }

    fn used(&mut self, _: &[u16], _: u64) {}

    fn victim(&mut self) -> Option<u16> {
        let n = self.pool.members().len() as u64;
        if n == 0 {
            return None;
        }
        // A pool has fewer than 2^16 members: the remainder's bias is below 2^-48.
        let at = (self.next() % n) as usize;
        let victim = self.pool.members()[at];
        self.pool.remove(victim);
        Some(victim)
    }

    /// By id: there is no order that is known beforehand.
    fn order(&self) -> Vec<u16> {
        self.pool.order(|_| 0, |_| 0)
    }

    fn clear(&mut self) {
        self.pool.clear();
        self.state = self.seed;
    }
}
