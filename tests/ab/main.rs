//! The statistics of experiments: on sessions whose truth is known, on a phone's logs, and from the command line.

#[allow(dead_code)] // not all that it sees is asked about here
#[path = "../report/browser.rs"]
mod browser;
#[path = "../common/program.rs"]
mod program;
#[path = "../common/shared.rs"]
mod shared;

mod cli;
mod device;
mod hostile;
mod made;
mod simulated;
