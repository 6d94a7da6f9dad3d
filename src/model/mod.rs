//! What is on disk: a GGUF file (or its shards), the block arithmetic of ggml's types, and where each expert's bytes lie.
//!
//! `Model::open` parses the headers (bounded: every length is checked against the file before it is used), then
//! `experts` finds the expert tensors by name and shape. No architecture table: what the file says is what counts.

pub mod experts;

pub use experts::{ExpertTable, ExpertTensor, MoeLayer, Part, Projection};
