//! Starts a program that was built with the tests. Under an emulator (tests/cross.sh) the kernel cannot start it by itself:
//! HOTSET_TEST_RUNNER then says what does.

#![allow(dead_code)] // each test uses its part

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
pub fn hotset() -> Command {
    command(env!("CARGO_BIN_EXE_hotset"))
}

/// What it prints, of a run that succeeds.
pub fn ok(command: &mut Command) -> String {
    let out = command.output().unwrap();
    assert!(out.status.success(), "{command:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

/// The value that it prints.
pub fn json(command: &mut Command) -> serde_json::Value {
    serde_json::from_str(&ok(command)).unwrap()
}

/// A run that fails with this code (no panic, no signal) and says this; what it printed all the same.
pub fn fails(command: &mut Command, code: i32, says: &str) -> String {
    let out = command.output().unwrap();
    let error = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(code), "{command:?}: {error}");
    assert!(error.contains(says), "{command:?}: {error:?} does not say {says:?}");
    String::from_utf8(out.stdout).unwrap()
}
