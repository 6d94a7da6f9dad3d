//! Belady's MIN where the newcomer may be the victim: a missed expert that is needed again later than everything in the pool
//! is read, used, and not kept. What it saves over `belady_min` is what a good decision on admission is worth.

use super::belady::Belady;
use super::{Build, Eviction, Spec};

pub struct BeladyBypass(Belady);

impl Build for BeladyBypass {
    const NAME: &str = "belady_bypass";
    const FUTURE: bool = true;
    const REFUSES: bool = true;

    fn build(spec: &Spec) -> Self {
        Self(Belady::build(spec))
    }
}

impl Eviction for BeladyBypass {
    fn remove(&mut self, expert: u16) {
        self.0.remove(expert);
    }

    fn insert(&mut self, expert: u16) {
        self.0.insert(expert);
    }

    fn used(&mut self, experts: &[u16], token: u64) {
        self.0.used(experts, token);
    }

    fn victim(&mut self) -> Option<u16> {
        self.0.victim()
    }

    fn refuses(&self, expert: u16) -> bool {
        self.0.is_needed_last(expert)
    }

    fn order(&self) -> Vec<u16> {
        self.0.order()
    }

    fn clear(&mut self) {
        self.0.clear();
    }
}
