//! Replays a recorded run with the settings and the residency that its sidecar tells of.

use hotset::replay::{Ranges, recorded};
use hotset::trace::{Sidecar, Trace};

/// Misses of each layer, of the recorded tokens.
pub fn misses_per_layer(trace: &Trace, sidecar: &Sidecar) -> Vec<u64> {
    recorded(trace, sidecar, None::<&Ranges>).unwrap().misses
}
