//! Keep maps: which experts of each layer a pruned model would still have. `{"0": [ids], "1": [ids], ...}`, the same count in each
//! layer. An expert's number in the pruned model is its place in the list.

use std::path::Path;

use crate::error::{Result, err};
use crate::trace::Trace;

/// No longer file is read: 1,024 layers of 65,535 ids take less.
const MAX_BYTES: u64 = 1 << 29;
/// The number of an expert that is not kept.
pub const PRUNED: u16 = u16::MAX;

pub struct KeepMap {
    n_kept: usize,
    /// By layer and the expert's old number: the new one, or `PRUNED`.
    new_ids: Vec<Vec<u16>>,
}

impl KeepMap {
    /// Reads a file for a trace.
    pub fn open(path: impl AsRef<Path>, trace: &Trace) -> Result<Self> {
        let path = path.as_ref();
        let name = path.display();
        let length = std::fs::metadata(path).map_err(|e| err!(Io, "{name}: {e}"))?.len();
        if length > MAX_BYTES {
            return Err(err!(Format, "{name}: {length} bytes, a keep map has at most {MAX_BYTES}"));
        }
        let text = std::fs::read(path).map_err(|e| err!(Io, "{name}: {e}"))?;
        Self::parse(&text, trace.n_layers(), trace.n_experts()).map_err(|e| err!(Format, "{name}: {e}"))
    }

    /// `Format` where a layer below `n_layers` is missing, has no list of ids, has an id twice or out of range, or has
    /// another count than layer 0. Further layers are ignored.
    pub fn parse(text: &[u8], n_layers: usize, n_experts: usize) -> Result<Self> {
        let map: serde_json::Map<String, serde_json::Value> =
            serde_json::from_slice(text).map_err(|e| err!(Format, "keep map: {e}"))?;
        let mut keep = Self { n_kept: 0, new_ids: Vec::new() };
        for layer in 0..n_layers {
            let Some(list) = map.get(&layer.to_string()) else {
                return Err(err!(Format, "keep map: layer {layer} of {n_layers} is missing"));
            };
            let Some(list) = list.as_array() else {
                return Err(err!(Format, "keep map: layer {layer} is no list of ids"));
            };
            if layer == 0 {
                keep.n_kept = list.len();
            }
            if list.is_empty() || list.len() != keep.n_kept {
                return Err(err!(
                    Format,
                    "keep map: layer {layer} keeps {} experts, layer 0 keeps {}: all must keep the same number, at least 1",
                    list.len(),
                    keep.n_kept
                ));
            }
            let mut new_ids = vec![PRUNED; n_experts];
            for (new, old) in list.iter().enumerate() {
                let Some(at) = old.as_u64().and_then(|old| new_ids.get_mut(usize::try_from(old).ok()?)) else {
                    return Err(err!(Format, "keep map: layer {layer} keeps expert {old}: ids are below {n_experts}"));
                };
                if *at != PRUNED {
                    return Err(err!(Format, "keep map: layer {layer} keeps expert {old} twice"));
                }
                // Distinct ids below n_experts, which is a u16, are fewer than 65,536.
                *at = new as u16;
            }
            keep.new_ids.push(new_ids);
        }
        Ok(keep)
    }

    /// Experts that each layer keeps.
    pub fn n_kept(&self) -> usize {
        self.n_kept
    }

    /// Of a layer, by old number: the new one, or [`PRUNED`].
    pub fn layer(&self, layer: usize) -> &[u16] {
        &self.new_ids[layer]
    }
}
