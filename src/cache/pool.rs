//! The victims to be, for policies that search for the one to go: a set of experts with O(1) insertion and removal, searched from
//! end to end. A search of some hundred members costs less than keeping them in order while every token changes the keys.

pub(super) struct Pool {
    members: Vec<u16>,
    /// By expert: its place in `members`, or `OUT`.
    at: Vec<u16>,
}

const OUT: u16 = u16::MAX;

impl Pool {
    pub fn new(n_experts: usize) -> Self {
        Self { members: Vec::with_capacity(n_experts), at: vec![OUT; n_experts] }
    }

    pub fn members(&self) -> &[u16] {
        &self.members
    }

    pub fn insert(&mut self, expert: u16) {
        let at = &mut self.at[expert as usize];
        if *at == OUT {
            *at = self.members.len() as u16;
            self.members.push(expert);
        }
    }

    pub fn remove(&mut self, expert: u16) {
        let at = std::mem::replace(&mut self.at[expert as usize], OUT);
        if at != OUT {
            self.members.swap_remove(at as usize);
            if let Some(&moved) = self.members.get(at as usize) {
                self.at[moved as usize] = at;
            }
        }
    }

    pub fn clear(&mut self) {
        self.members.clear();
        self.at.fill(OUT);
    }

    /// Takes out the member of the lowest (key, tie, id). Keys are numbers that compare (no NaN).
    pub fn take_lowest<K: PartialOrd + Copy>(
        &mut self,
        key: impl Fn(u16) -> K,
        tie: impl Fn(u16) -> u64,
    ) -> Option<u16> {
        let (&first, others) = self.members.split_first()?;
        let (mut lowest, mut low) = (first, key(first));
        for &e in others {
            let k = key(e);
            // Rare: of n keys in any order about ln n are the lowest so far.
            if k <= low && (k < low || (tie(e), e) < (tie(lowest), lowest)) {
                (lowest, low) = (e, k);
            }
        }
        self.remove(lowest);
        Some(lowest)
    }

    /// The members by rising (key, tie, id).
    pub fn order<K: PartialOrd + Copy>(&self, key: impl Fn(u16) -> K, tie: impl Fn(u16) -> u64) -> Vec<u16> {
        let mut order = self.members.clone();
        order.sort_by(|&a, &b| {
            let keys = key(a).partial_cmp(&key(b)).unwrap_or(std::cmp::Ordering::Equal);
            keys.then_with(|| (tie(a), a).cmp(&(tie(b), b)))
        });
        order
    }
}
