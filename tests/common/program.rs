//! Starts a program that was built with the tests. Under an emulator (tests/cross.sh) the kernel cannot start it by itself:
//! HOTSET_TEST_RUNNER then says what does.

use std::ffi::OsStr;
use std::process::Command;

/// `program`, ready for its arguments.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let runner = std::env::var("HOTSET_TEST_RUNNER").unwrap_or_default();
    let mut words = runner.split_whitespace();
    let Some(first) = words.next() else { return Command::new(program) };
    let mut command = Command::new(first);
    command.args(words).arg(program);
    command
}

/// The command line.
#[allow(dead_code)] // not every test that starts a program starts this one
pub fn hotset() -> Command {
    command(env!("CARGO_BIN_EXE_hotset"))
}
