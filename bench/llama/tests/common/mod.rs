//! Runs the program as a person would, without what that person's environment has set.

#![allow(dead_code)] // each test file uses its part

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// The trained model: 6 layers, 64 experts, top 6, one expert 20,736 bytes.
pub fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/model/tiny-moe-q2_0.gguf")
}

pub fn command(model: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hotset-llama"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("HOTSET_")) {
        command.env_remove(name);
    }
    command.arg(arguments[0]).arg("-m").arg(model).args(&arguments[1..]);
    // With the patched engine every test is one of the waits inside of its matmuls.
    if cfg!(feature = "fork") && !arguments.contains(&"--no-hook") {
        command.arg("--fork");
    }
    command
}

pub fn output(model: &Path, arguments: &[&str]) -> Output {
    command(model, arguments).output().unwrap()
}

/// The object that `--json` prints; `flags` are separated by blanks.
pub fn json(model: &Path, arguments: &[&str], flags: &str) -> Value {
    let arguments: Vec<&str> = arguments.iter().copied().chain(flags.split_whitespace()).chain(["--json"]).collect();
    let output = output(model, &arguments);
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {log}");
    serde_json::from_slice(&output.stdout).unwrap()
}

pub fn number(run: &Value, key: &str) -> u64 {
    run[key].as_u64().unwrap_or_else(|| panic!("{key}: {}", run[key]))
}

/// Where the reference data is, or the word that says why the test does nothing.
pub fn shared(file: &str) -> Option<PathBuf> {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared");
    let path = std::env::var_os("HOTSET_SHARED").map_or_else(beside, PathBuf::from).join(file);
    if path.exists() {
        return Some(path);
    }
    println!("skipped: {file} is not there (HOTSET_SHARED names the folder that has it)");
    None
}
