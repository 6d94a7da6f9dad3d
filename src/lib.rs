//! hotset decides, at each Mixture-of-Experts layer of a decode, which experts run and which of them are in memory.
//!
//! The rooms, in the order in which a token passes through them:
//!
//! - [`abi`]: extern "C", what an engine calls; the only room that knows C.
//! - [`hook`]: the live runtime, which composes the rooms below.
//! - [`route`]: candidates, MoCE reranking, cold drop: pure functions.
//! - [`cache`]: which experts of a layer are resident, and which one goes.
//! - [`store`]: bytes: the slot arena, direct reads, I/O lanes.
//! - [`model`]: what is on disk: GGUF, types, where each expert lies.
//! - [`trace`]: Q4RT files, the live recorder, the sidecar.
//! - `drive` (feature `tools`): what the drive gives on the way of a miss.
//! - `replay` (feature `tools`): what other settings would have done to a trace.
//! - `analyze` (feature `tools`): what the routing of a run looks like.
//! - `ab` (feature `tools`): experiments on the device: plans, and what their logs tell apart.
//! - `report` (feature `tools`): pages that show it.
//!
//! `model`, `cache`, `route` and `trace` know nothing of each other; `store` reads `model`'s expert table.

#[cfg(feature = "tools")]
pub mod ab;
pub mod abi;
#[cfg(feature = "tools")]
pub mod analyze;
pub mod cache;
#[cfg(feature = "tools")]
pub mod drive;
pub mod error;
pub mod hook;
pub mod model;
#[cfg(feature = "tools")]
pub mod replay;
#[cfg(feature = "tools")]
pub mod report;
pub mod route;
pub mod store;
pub mod trace;

pub use error::{Error, ErrorKind, Result};
