//! Traces: what the router wanted, token by token, layer by layer.
//!
//! A live run writes one ([`recorder`], which hands blocks to the writer thread of a [`spool`]); every offline tool
//! reads one ([`q4rt`]). What the format has no room for (model, settings, what was resident, which tokens are missing)
//! lies beside it in a JSON file ([`sidecar`]). With the feature `tools`, foreign traces can be read (`import`), made
//! ones generated (`synth`), the routing of either laid out by layer (`routing`), and sidecars cut and joined with their traces (`splice`). The room knows nothing of models,
//! caches or routers: it moves ids, scores and descriptions that others made.

mod block;
mod config;
mod file_sink;
#[cfg(feature = "tools")]
pub mod import;
pub mod q4rt;
pub mod recorder;
#[cfg(feature = "tools")]
pub mod routing;
pub mod sidecar;
mod sidecar_json;
#[cfg(feature = "tools")]
mod splice;
pub mod spool;
#[cfg(feature = "tools")]
pub mod synth;
mod writer;

pub use block::{Phase, Placement};
pub use config::{RecorderConfig, SidecarInit, Snapshot, reason};
pub use file_sink::FileSink;
pub use q4rt::{Header, Health, Problem, ProblemKind, Record, Trace};
pub use recorder::Recorder;
#[cfg(feature = "tools")]
pub use routing::Routing;
pub use sidecar::{Settings, Sidecar, TokenRange};
pub use spool::{Block, Sink, Spool};
