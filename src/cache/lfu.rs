//! Least frequently used: uses are counted from the beginning, and what has been used the fewest times goes. The count of an
//! expert outlives its residency. Ties: the oldest last use, then the lowest id.

use super::pool::Pool;
use super::{Build, Eviction, Spec};

pub struct Lfu {
    pool: Pool,
    uses: Vec<u64>,
    last_used: Vec<u64>,
}

impl Build for Lfu {
    const NAME: &str = "lfu";

    fn build(spec: &Spec) -> Self {
        let n = spec.n_experts;
        Self { pool: Pool::new(n), uses: vec![0; n], last_used: vec![0; n] }
    }
}

impl Eviction for Lfu {
    fn remove(&mut self, expert: u16) {
        self.pool.remove(expert);
    }

    fn insert(&mut self, expert: u16) {
        self.pool.insert(expert);
    }

    fn used(&mut self, experts: &[u16], token: u64) {
        for &e in experts {
            self.uses[e as usize] += 1;
            self.last_used[e as usize] = token;
        }
    }

    fn victim(&mut self) -> Option<u16> {
        self.pool.take_lowest(|e| self.uses[e as usize], |e| self.last_used[e as usize])
    }

    fn order(&self) -> Vec<u16> {
        self.pool.order(|e| self.uses[e as usize], |e| self.last_used[e as usize])
    }

    fn clear(&mut self) {
        self.pool.clear();
        self.uses.fill(0);
        self.last_used.fill(0);
    }
}
