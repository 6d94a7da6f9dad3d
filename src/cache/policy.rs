//! The eviction policies by name, and one type that is any of them. A new policy is its own file, which implements [`Eviction`] and
//! [`Build`], its `mod` line, and its line in the list at the end of this one.

use std::sync::Arc;

use super::{Eviction, NextUses};
use super::{belady, belady_bypass, ema, inverse_router, lfu, lru, near_pick, random};
use crate::error::{Result, err};

/// What policies are made from. Each takes what concerns it.
#[derive(Clone, Debug)]
pub struct Spec {
    pub n_experts: usize,
    /// What is left of a popularity after one token, above 0 and at most 1 (ema, near_pick_ema, inverse_router_ema).
    pub decay: f64,
    /// Candidates that are credited (near_pick_ema).
    pub near_pick_n: usize,
    /// Of the random numbers (random).
    pub seed: u64,
    /// When each expert is used (belady_min, belady_bypass); without it nothing is ever used again.
    pub next_uses: Option<Arc<NextUses>>,
}

/// The reference's default.
pub const DECAY: f64 = 0.99;
/// The reference's default.
pub const NEAR_PICK_N: usize = 48;

impl Spec {
    pub fn new(n_experts: usize) -> Self {
        Self { n_experts, decay: DECAY, near_pick_n: NEAR_PICK_N, seed: 0, next_uses: None }
    }

    /// `Argument` where the decay is no number above 0 and at most 1.
    pub fn check(&self) -> Result<()> {
        if !(self.decay > 0.0 && self.decay <= 1.0) {
            return Err(err!(Argument, "ema decay {}: it must be above 0 and at most 1", self.decay));
        }
        Ok(())
    }
}

/// How a policy is named and made.
pub trait Build: Eviction {
    /// As in the reference replayer, where it has it.
    const NAME: &str;
    /// It must know what comes, so it cannot run live.
    const FUTURE: bool = false;
    /// It is to be told of every token's candidates ([`Eviction::ranked`]).
    const CANDIDATES: bool = false;
    /// It may refuse an expert ([`Eviction::refuses`]).
    const REFUSES: bool = false;

    fn build(spec: &Spec) -> Self;
}

macro_rules! registry {
    ($($(#[$doc:meta])* $variant:ident($type:ty)),+ $(,)?) => {
        /// An eviction policy.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Policy { $($(#[$doc])* $variant),+ }

        impl Policy {
            pub const ALL: &[Policy] = &[$(Policy::$variant),+];

            pub fn name(self) -> &'static str {
                match self { $(Policy::$variant => <$type as Build>::NAME),+ }
            }

            /// It must know what comes, so it cannot run live, and means nothing under reranking.
            pub fn needs_future(self) -> bool {
                match self { $(Policy::$variant => <$type as Build>::FUTURE),+ }
            }

            /// It is to be told of every token's candidates.
            pub fn needs_candidates(self) -> bool {
                match self { $(Policy::$variant => <$type as Build>::CANDIDATES),+ }
            }

            /// It may leave an expert out of the cache.
            pub fn refuses(self) -> bool {
                match self { $(Policy::$variant => <$type as Build>::REFUSES),+ }
            }

            pub fn build(self, spec: &Spec) -> AnyPolicy {
                match self { $(Policy::$variant => AnyPolicy::$variant(<$type as Build>::build(spec))),+ }
            }
        }

        /// Any of the policies. A call is one jump; those that a token makes take all of its experts at once.
        pub enum AnyPolicy { $($variant($type)),+ }

        impl Eviction for AnyPolicy {
            fn remove(&mut self, expert: u16) { match self { $(Self::$variant(p) => p.remove(expert)),+ } }
            fn insert(&mut self, expert: u16) { match self { $(Self::$variant(p) => p.insert(expert)),+ } }
            #[inline]
            fn remove_all(&mut self, experts: &[u16]) { match self { $(Self::$variant(p) => p.remove_all(experts)),+ } }
            #[inline]
            fn insert_all(&mut self, experts: &[u16]) { match self { $(Self::$variant(p) => p.insert_all(experts)),+ } }
            #[inline]
            fn ranked(&mut self, ids: &[u16], scores: &[f32], k: usize) {
                match self { $(Self::$variant(p) => p.ranked(ids, scores, k)),+ }
            }
            #[inline]
            fn used(&mut self, experts: &[u16], token: u64) { match self { $(Self::$variant(p) => p.used(experts, token)),+ } }
            #[inline]
            fn victim(&mut self) -> Option<u16> { match self { $(Self::$variant(p) => p.victim()),+ } }
            fn refuses(&self, expert: u16) -> bool { match self { $(Self::$variant(p) => p.refuses(expert)),+ } }
            fn order(&self) -> Vec<u16> { match self { $(Self::$variant(p) => p.order()),+ } }
            fn clear(&mut self) { match self { $(Self::$variant(p) => p.clear()),+ } }
        }
    };
}

registry! {
    /// Least recently used.
    Lru(lru::Lru),
    /// Least frequently used.
    Lfu(lfu::Lfu),
    /// Decaying popularity of what ran.
    Ema(ema::Ema<ema::Chosen>),
    /// Decaying popularity of the router's first `near_pick_n`.
    NearPickEma(ema::Ema<near_pick::NearPick>),
    /// Decaying popularity by the router's scores.
    InverseRouterEma(ema::Ema<inverse_router::InverseRouter>),
    /// Belady's MIN: what is needed last goes.
    BeladyMin(belady::Belady),
    /// Belady's MIN, which may leave the newcomer out.
    BeladyBypass(belady_bypass::BeladyBypass),
    /// Any, by a seeded generator: what choosing well is worth is the distance from it.
    Random(random::Random),
}

impl Policy {
    /// The reference's six, in its order.
    pub const REFERENCE: &[Policy] =
        &[Policy::Lru, Policy::Lfu, Policy::Ema, Policy::NearPickEma, Policy::InverseRouterEma, Policy::BeladyMin];

    /// `Argument`, with the names there are, for another one.
    pub fn by_name(name: &str) -> Result<Self> {
        Self::ALL.iter().copied().find(|p| p.name() == name).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|p| p.name()).collect();
            err!(Argument, "policy '{name}': it must be one of {}", names.join(", "))
        })
    }
}
