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

/// SplitMix64's output function (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
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
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        // Every member draws a number, the lowest goes: whatever the order in which they came in.
        let draw = mix(self.state);
        self.pool.take_lowest(|e| mix(draw.wrapping_add(u64::from(e) << 40)), |_| 0)
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
