//! What runs: pure functions from scores, weights and residency to expert ids. No I/O, no clock, no state.
//!
//! `candidates` ranks one token's experts (what a trace records), `moce` takes k of them with a bonus for the resident
//! ones, `drop` leaves out what is a miss and barely weighted. Live decode and replay call the same functions on the same
//! numbers: scores rounded to f16, arithmetic in f64, ties by rank.

pub mod candidates;
pub mod drop;
mod gate;
pub mod moce;
pub mod top;

pub use candidates::{Row, ScoreSpace, Scratch};
pub use drop::{Drop, Renormalise};
pub use gate::gate;
pub use moce::{Delta, Moce};
