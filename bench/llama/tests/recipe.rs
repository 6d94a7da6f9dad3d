//! The README's recipe is a program: tests/c/recipe.c and the adapter, compiled by the C compiler against the engine's headers, linked with
//! libhotset.a and the engine's libraries as an engine's own build would do it, and run.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::{json, model};

fn run(command: &mut Command) -> (String, String) {
    let out = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(out.status.success(), "{command:?}: {}\n{}{}", out.status, text(&out.stdout), text(&out.stderr));
    (text(&out.stdout), text(&out.stderr))
}

#[test]
fn the_recipe_builds_and_decodes_what_the_engine_alone_decodes() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let out = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("recipe");
    let engine = Path::new(env!("HOTSET_ENGINE_OUT"));
    std::fs::create_dir_all(&out).unwrap();
    let lean = ["build", "--release", "--lib", "--no-default-features", "-p", "hotset", "--target-dir"];
    run(Command::new(env!("CARGO")).current_dir(&root).args(lean).arg(out.join("lean")).env_remove("RUSTFLAGS"));

    let program = out.join("recipe");
    let mut cc = Command::new(std::env::var_os("CC").unwrap_or("cc".into()));
    cc.args(["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&program);
    cc.arg(root.join("tests/c/recipe.c")).arg(root.join("src/ggml/hotset_ggml.c"));
    cc.arg("-I")
        .arg(root.join("include"))
        .arg("-I")
        .arg(engine.join("include"))
        .arg("-I")
        .arg(env!("HOTSET_ENGINE_GGML_SRC"));
    cc.arg(out.join("lean/release/libhotset.a"));
    for folder in ["lib", "lib64"] {
        cc.arg("-L").arg(engine.join(folder));
    }
    cc.args(["-lllama", "-lggml", "-lggml-cpu", "-lggml-base"]);
    if cfg!(target_os = "macos") {
        cc.args(["-lc++", "-framework", "Accelerate"]);
    } else {
        cc.args(["-lstdc++", "-lpthread", "-ldl", "-lm"]);
    }
    run(&mut cc);

    let prompt = "And God said, Let there be";
    let alone = json(&model(), &["decode", "-p", prompt, "-n", "60"], "--no-hook");
    let recipe = |slots: &str| {
        let mut command = Command::new(&program);
        command.arg(model()).args([prompt, "60"]).env("HOTSET_SLOTS", slots);
        command
    };
    let (text, log) = run(&mut recipe("16"));
    assert_eq!(text.trim_end_matches('\n'), alone["text"].as_str().unwrap());
    assert!(log.contains("misses") && !log.contains("misses 0"), "{log}");
    // Too few slots: refused with the number that is needed.
    let refused = recipe("5").output().unwrap();
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && message.contains("at least 6 slots"), "{message}");
}
