//! Least recently used: the pool is a doubly linked list over expert ids, ordered by (last use, id).
//!
//! The reference takes `min((last_used, id))`. All experts of a token have the same last use, so a token's experts
//! come back to the list in ascending id order, and the list's head is that minimum: O(1) a use, no search.

use super::{Build, Eviction, Spec};

pub struct Lru {
    /// By id; entry `n` is the list's anchor: its next is the oldest, its previous the newest.
    next: Vec<u16>,
    prev: Vec<u16>,
    linked: Vec<bool>,
    last_used: Vec<u64>,
}

impl Lru {
    pub fn new(n_experts: usize) -> Self {
        let anchor = n_experts as u16;
        Self {
            next: vec![anchor; n_experts + 1],
            prev: vec![anchor; n_experts + 1],
            linked: vec![false; n_experts],
            last_used: vec![0; n_experts],
        }
    }

    fn anchor(&self) -> u16 {
        self.linked.len() as u16
    }

    fn link_before(&mut self, expert: u16, at: u16) {
        let before = self.prev[at as usize];
        self.next[expert as usize] = at;
        self.prev[expert as usize] = before;
        self.next[before as usize] = expert;
        self.prev[at as usize] = expert;
        self.linked[expert as usize] = true;
    }
}

impl Build for Lru {
    const NAME: &str = "lru";

    fn build(spec: &Spec) -> Self {
        Self::new(spec.n_experts)
    }
}

impl Eviction for Lru {
    fn remove(&mut self, expert: u16) {
        if std::mem::replace(&mut self.linked[expert as usize], false) {
            let (before, after) = (self.prev[expert as usize], self.next[expert as usize]);
            self.next[before as usize] = after;
            self.prev[after as usize] = before;
        }
    }

    fn insert(&mut self, expert: u16) {
        if self.linked[expert as usize] {
            return;
        }
        // From the newest end: what was just used belongs there.
        let key = (self.last_used[expert as usize], expert);
        let mut at = self.prev[self.anchor() as usize];
        while at != self.anchor() && (self.last_used[at as usize], at) > key {
            at = self.prev[at as usize];
        }
        self.link_before(expert, self.next[at as usize]);
    }

    fn used(&mut self, experts: &[u16], token: u64) {
        for &e in experts {
            self.last_used[e as usize] = token;
        }
    }

    fn victim(&mut self) -> Option<u16> {
        let oldest = self.next[self.anchor() as usize];
        (oldest != self.anchor()).then(|| {
            self.remove(oldest);
            oldest
        })
    }

    fn order(&self) -> Vec<u16> {
        let mut order = Vec::new();
        let mut at = self.next[self.anchor() as usize];
        while at != self.anchor() {
            order.push(at);
            at = self.next[at as usize];
        }
        order
    }

    fn clear(&mut self) {
        let anchor = self.anchor();
        self.next[anchor as usize] = anchor;
        self.prev[anchor as usize] = anchor;
        self.linked.fill(false);
        self.last_used.fill(0);
    }
}
