//! What the routing of a run looks like, and what that means for a cache: how unequal experts are, how soon they come back, what the last tokens
//! say of the next one, and what a cache of any size would hit.
//!
//! Everything here looks at a [`Routing`](crate::trace::Routing) layer by layer; a file is one question. Nothing decides: what a policy would do is `replay`'s,
//! and the one number that both have (hits in LRU order, [`reuse`]) is the same in both.

pub mod popularity;
pub mod predict;
pub mod reuse;
pub mod weights;
pub mod window;

pub use popularity::Popularity;
pub use predict::{Overlap, Predicted, Predictor};
pub use reuse::{Reuse, hit_curve};
pub use weights::{DeltaShare, WeightEntropy};
pub use window::working_set;
