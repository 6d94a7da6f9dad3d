//! Least recently used: a log of uses, whose oldest entry that still holds is the victim.
//!
//! Every token appends the experts that it used; an expert's newest entry holds, its older ones are stale. So a use costs one
//! entry and nothing is moved; taking a victim skips what is stale at the log's old end, each entry once. The reference takes
//! `min((last_used, id))`, and the experts of a token have the same last use: they are sorted when their turn comes, when few
//! of them still hold. The log is compacted when it is full, to at most one entry an expert: O(1) a use, by and large.

use super::{Build, Eviction, Spec};

pub struct Lru {
    /// token << 16 | expert, by rising token; those before `head` are done with.
    log: Vec<u64>,
    head: usize,
    /// Of the token at the old end: its experts whose entry held when their turn came, the lowest id last. The first `n_front` places
    /// are in use; there is one more than there are experts.
    front: Vec<u16>,
    n_front: usize,
    front_token: u64,
    experts: Vec<Expert>,
}

#[derive(Clone, Copy, Default)]
struct Expert {
    last_used: u64,
    in_pool: bool,
    /// An entry of the token `last_used` is in the log or the front.
    logged: bool,
}

impl Build for Lru {
    const NAME: &str = "lru";

    fn build(spec: &Spec) -> Self {
        Self::new(spec.n_experts)
    }
}

impl Lru {
    pub fn new(n_experts: usize) -> Self {
        Self {
            log: Vec::with_capacity(4 * n_experts),
            head: 0,
            front: vec![0; n_experts + 1],
            n_front: 0,
            front_token: 0,
            experts: vec![Expert::default(); n_experts],
        }
    }

    /// Leaves in the log what still holds.
    #[cold]
    fn compact(&mut self) {
        let experts = &self.experts;
        self.log.drain(..self.head);
        self.head = 0;
        self.log.retain(|&entry| {
            let e = &experts[(entry & 0xffff) as usize];
            e.logged && e.last_used == entry >> 16
        });
    }

    /// Begins the log anew, with all experts of the pool: for one that enters it without a use.
    #[cold]
    fn rebuild(&mut self) {
        let order = self.order();
        self.log.clear();
        self.n_front = 0;
        self.head = 0;
        self.experts.iter_mut().for_each(|e| e.logged = false);
        for e in order {
            let expert = &mut self.experts[e as usize];
            expert.logged = true;
            self.log.push(expert.last_used << 16 | u64::from(e));
        }
    }
}

impl Eviction for Lru {
    fn remove(&mut self, expert: u16) {
        self.experts[expert as usize].in_pool = false;
    }

    fn insert(&mut self, expert: u16) {
        let e = &mut self.experts[expert as usize];
        e.in_pool = true;
        if !e.logged {
            self.rebuild();
        }
    }

    fn used(&mut self, experts: &[u16], token: u64) {
        if self.log.len() + experts.len() > 4 * self.experts.len() {
            self.compact();
        }
        for &e in experts {
            let expert = &mut self.experts[e as usize];
            expert.last_used = token;
            expert.logged = true;
            self.log.push(token << 16 | u64::from(e));
        }
    }

    fn victim(&mut self) -> Option<u16> {
        loop {
            while self.n_front > 0 {
                self.n_front -= 1;
                let e = self.front[self.n_front];
                let expert = &mut self.experts[e as usize];
                if expert.last_used == self.front_token {
                    // What is pinned is about to be used, and logged again; if it is not, its insertion finds that it is not.
                    expert.logged = false;
                    if std::mem::replace(&mut expert.in_pool, false) {
                        return Some(e);
                    }
                }
            }
            self.front_token = self.log.get(self.head)? >> 16;
            let mut n = 0;
            while let Some(&entry) = self.log.get(self.head).filter(|e| **e >> 16 == self.front_token) {
                let e = (entry & 0xffff) as u16;
                // Whether an entry still holds cannot be foreseen: it is written in any case, and counted if it does.
                self.front[n] = e;
                n += usize::from(self.experts[e as usize].last_used == self.front_token);
                self.head += 1;
            }
            // Mostly there are one to three.
            for i in 1..n {
                let e = self.front[i];
                let mut at = i;
                while at > 0 && self.front[at - 1] < e {
                    self.front[at] = self.front[at - 1];
                    at -= 1;
                }
                self.front[at] = e;
            }
            self.n_front = n;
        }
    }

    fn order(&self) -> Vec<u16> {
        let mut order: Vec<u16> =
            (0..self.experts.len() as u16).filter(|&e| self.experts[e as usize].in_pool).collect();
        order.sort_by_key(|&e| (self.experts[e as usize].last_used, e));
        order
    }

    fn clear(&mut self) {
        self.log.clear();
        self.n_front = 0;
        self.head = 0;
        self.experts.fill(Expert::default());
    }
}
