//! The C side, as a user's engine has it: the header in C99, C11 and C++17, and `tests/c/host.c` linked with `libhotset.a`, built
//! without features, and the system libraries that the README names; once plainly, once under the sanitisers.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// What `libhotset.a` needs from the system, as README.md says.
const SYSTEM_LIBRARIES: &[&str] = if cfg!(target_os = "macos") { &[] } else { &["-lpthread", "-ldl", "-lm"] };

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A folder of its own for each test, made anew.
fn scratch(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("c_host").join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn compiler(variable: &str, default: &str) -> Command {
    Command::new(std::env::var_os(variable).unwrap_or_else(|| default.into()))
}

fn run(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

#[track_caller]
fn succeed(command: &mut Command) -> String {
    let output = run(command);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{text}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

/// Under an emulator the compilers here make code for another machine than the one these tests were built for.
fn foreign() -> Option<String> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let version = succeed(Command::new(rustc).arg("-vV"));
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).unwrap();
    (!host.starts_with(std::env::consts::ARCH)).then(|| format!("built for {}, on {host}", std::env::consts::ARCH))
}

/// `libhotset.a` as an engine builds it, in a folder of its own; built once for all tests of this file.
fn lean_library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("lean");
        succeed(
            Command::new(env!("CARGO"))
                .args([
                    "build",
                    "--quiet",
                    "--release",
                    "--lib",
                    "--no-default-features",
                    "--package",
                    "hotset",
                    "--target-dir",
                ])
                .arg(&target)
                .current_dir(root())
                .env_remove("CARGO_ENCODED_RUSTFLAGS")
                .env_remove("RUSTFLAGS")
                .env_remove("CARGO_BUILD_TARGET"),
        );
        let library = target.join("release/libhotset.a");
        assert!(library.is_file(), "{} was not built", library.display());
        library
    })
}

/// The trained model, which has all that host.c asks for.
fn model() -> Option<PathBuf> {
    let shared = std::env::var_os("HOTSET_SHARED").map(PathBuf::from).unwrap_or_else(|| root().join("../shared"));
    [root().join("tests/data/model"), shared.join("model")]
        .into_iter()
        .map(|folder| folder.join("tiny-moe-q2_0.gguf"))
        .find(|file| file.is_file())
}

fn build_host(folder: &Path, flags: &[&str]) -> Result<PathBuf, String> {
    build(folder, "host", flags)
}

/// A program of tests/c.
fn build(folder: &Path, name: &str, flags: &[&str]) -> Result<PathBuf, String> {
    let host = folder.join(name);
    let mut cc = compiler("CC", "cc");
    cc.args(["-std=c11", "-g", "-Wall", "-Wextra", "-Werror", "-pedantic"]).args(flags);
    cc.arg("-I")
        .arg(root().join("include"))
        .arg(root().join("tests/c").join(name).with_extension("c"))
        .arg(lean_library());
    cc.args(SYSTEM_LIBRARIES).arg("-o").arg(&host);
    let output = run(&mut cc);
    if output.status.success() { Ok(host) } else { Err(format!("{cc:?}\n{}", String::from_utf8_lossy(&output.stderr))) }
}

/// Runs the host in `folder`, without any setting that the caller's environment may hold.
fn run_host(host: &Path, model: &Path, folder: &Path) {
    let pack = folder.join("model.hotset");
    let made = hotset::model::Model::open(model).unwrap();
    hotset::model::pack_write::pack(&made, &pack, &mut |_| ()).unwrap();
    let mut command = Command::new(host);
    command.arg(model).arg(folder).arg(&pack);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("HOTSET_") {
            command.env_remove(name);
        }
    }
    command
        .env("ASAN_OPTIONS", "detect_stack_use_after_return=1")
        .env("UBSAN_OPTIONS", "halt_on_error=1:print_stacktrace=1");
    let text = succeed(&mut command);
    assert!(text.ends_with(" checks passed\n"), "{text}");
}

#[test]
fn header_compiles_alone_in_each_language() {
    let folder = scratch("header");
    for (tool, default, standard, language) in
        [("CC", "cc", "c99", "c"), ("CC", "cc", "c11", "c"), ("CXX", "c++", "c++17", "c++")]
    {
        // twice, for its guard; alone, for what it includes itself
        let source = folder.join("header.c");
        std::fs::write(
            &source,
            "#include \"hotset.h\"\n#include \"hotset.h\"\nint use(void) { return (int) HOTSET_ABI_VERSION; }\n",
        )
        .unwrap();
        let mut command = compiler(tool, default);
        command.arg(format!("-std={standard}")).args([
            "-Wall",
            "-Wextra",
            "-Werror",
            "-pedantic",
            "-fsyntax-only",
            "-x",
            language,
            "-I",
        ]);
        succeed(command.arg(root().join("include")).arg(&source));
    }
}

#[test]
fn host_passes_its_checks() {
    if let Some(reason) = foreign() {
        println!("skipped: C host: {reason}");
        return;
    }
    let Some(model) = model() else {
        println!("skipped: C host: no trained model in tests/data/model");
        return;
    };
    let folder = scratch("plain");
    let host = build_host(&folder, &["-O2"]).unwrap_or_else(|error| panic!("{error}"));
    run_host(&host, &model, &folder);
}

#[test]
fn host_passes_its_checks_under_the_sanitisers() {
    if let Some(reason) = foreign() {
        println!("skipped: C host under the sanitisers: {reason}");
        return;
    }
    let Some(model) = model() else {
        println!("skipped: C host under the sanitisers: no trained model in tests/data/model");
        return;
    };
    let folder = scratch("sanitised");
    // is there a runtime for it, and can it start here?
    let (probe, flags) = (folder.join("probe"), ["-O1", "-fsanitize=address,undefined", "-fno-omit-frame-pointer"]);
    std::fs::write(folder.join("probe.c"), "int main(void) { return 0; }\n").unwrap();
    let compiled = run(compiler("CC", "cc").args(flags).arg(folder.join("probe.c")).arg("-o").arg(&probe));
    if !compiled.status.success() || !run(&mut Command::new(&probe)).status.success() {
        println!("skipped: C host under the sanitisers: this machine's cc has none that run");
        return;
    }
    let host = build_host(&folder, &flags).unwrap_or_else(|error| panic!("{error}"));
    run_host(&host, &model, &folder);
}

/// An engine that knows nothing of experiments is experimented with: `hotset ab run` on tests/c/decode.c and a random model. Where nothing is
/// dropped and nothing reranked, the bytes that it computed with are those of a plain run, wherever they lay.
#[test]
#[cfg(feature = "cli")]
fn an_experiment_with_a_c_program() {
    if let Some(reason) = foreign() {
        println!("skipped: experiment with a C program: {reason}");
        return;
    }
    let folder = scratch("experiment");
    let engine = build(&folder, "decode", &["-O2"]).unwrap_or_else(|error| panic!("{error}"));
    let model = folder.join("m.gguf");
    let shape = hotset::model::tiny::TinyParams { layers: 3, experts: 24, k: 4, ..Default::default() };
    hotset::model::tiny::write(&shape, &model, &mut |_| ()).unwrap();
    let plan = |name: &str, cells: &str, carry: &str| {
        let names: Vec<&str> = cells.split("\"name\": \"").skip(1).map(|c| c.split('"').next().unwrap()).collect();
        // forward and back, twice
        let order: Vec<usize> = (0..4)
            .flat_map(|turn| (0..names.len()).map(move |i| (turn, i)))
            .map(|(turn, i)| if turn % 2 == 0 { i } else { names.len() - 1 - i })
            .collect();
        let block = |(i, cell): (usize, &usize)| {
            format!("{{\"cell\": \"{}\", \"from\": {}, \"tokens\": 30}}", names[*cell], 30 * i)
        };
        let blocks: Vec<String> = order.iter().enumerate().map(block).collect();
        let text = format!(
            "{{\"hotset_schedule\": 1, \"washout\": 4, \"carry\": \"{carry}\",\n\"cells\": [{cells}],\n\"blocks\": [{}]}}",
            blocks.join(",\n")
        );
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let hotset_ = |command: &mut Command| {
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("HOTSET_")) {
            command.env_remove(name);
        }
        succeed(command.env("HOTSET_SLOTS", "8").env("HOTSET_DENSE", "leave"))
    };
    let run = |plan: &Path, out: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hotset"));
        command.args(["ab", "run", "--json", "--plan"]).arg(plan).arg("--out").arg(folder.join(out)).arg("--");
        let text = hotset_(command.arg(&engine).arg(&model).arg("480"));
        let analysis: serde_json::Value = serde_json::from_str(&text).unwrap();
        (analysis, std::fs::read_to_string(folder.join(out).join("run-1.txt")).unwrap())
    };
    let plain = hotset_(Command::new(&engine).arg(&model).arg("480"));
    assert!(plain.starts_with("480 tokens, sum "), "{plain}");

    let places = r#"{"name": "8"}, {"name": "5", "slots": 5, "lanes": 1}, {"name": "mapped", "backing": "page-cache"}, {"name": "6 lanes", "lanes": 6}"#;
    for carry in ["washout", "flush", "restore"] {
        let (analysis, printed) = run(&plan("places.json", places, carry), carry);
        assert_eq!(printed, plain, "{carry}");
        let names: Vec<_> = analysis["cells"].as_array().unwrap().iter().map(|c| c["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["8", "5", "mapped", "6 lanes"]);
        assert_eq!(analysis["comparisons"].as_array().unwrap().len(), 6);
        assert!(analysis["cells"].as_array().unwrap().iter().all(|c| c["tokens"] == 4 * 26), "{analysis}");
    }
    let policies = r#"{"name": "off"}, {"name": "F 1", "drop": 1.0}, {"name": "lambda .3", "lambda": 0.3}, {"name": "both", "drop": 1.0, "lambda": 0.3}"#;
    let (_, printed) = run(&plan("policies.json", policies, "washout"), "policies");
    assert_ne!(printed, plain);
    let log = std::fs::read_to_string(folder.join("policies/run-1.csv")).unwrap();
    let mut lines = log.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let heading = lines.next().unwrap();
    let column = |name: &str| heading.iter().position(|h| *h == name).unwrap();
    let rows: Vec<_> = lines.collect();
    let any = |cell: &str, name: &str| rows.iter().any(|r| r[column("cell")] == cell && r[column(name)] != "0");
    for (cell, dropped, swapped) in
        [("off", false, false), ("F 1", true, false), ("lambda .3", false, true), ("both", true, true)]
    {
        assert_eq!((any(cell, "dropped"), any(cell, "swapped")), (dropped, swapped), "{cell}");
    }
}

/// The README's list of libraries is the whole of it: nothing undefined is left, and no more is linked than the system's own.
#[test]
#[cfg(target_os = "linux")]
fn host_needs_no_other_library() {
    if let Some(reason) = foreign() {
        println!("skipped: libraries of the C host: {reason}");
        return;
    }
    let folder = scratch("libraries");
    let host = build_host(&folder, &["-O0"]).unwrap_or_else(|error| panic!("{error}"));
    let Ok(output) = Command::new("readelf").arg("--dynamic").arg(&host).env("LC_ALL", "C").output() else {
        println!("skipped: libraries of the C host: no readelf here");
        return;
    };
    let needed: Vec<String> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter(|line| line.contains("(NEEDED)"))
        .filter_map(|line| Some(line.split_once('[')?.1.split_once(']')?.0.to_owned()))
        .collect();
    assert!(!needed.is_empty());
    for library in &needed {
        let stem = library.split('.').next().unwrap();
        let known = [
            "libc",
            "libm",
            "libpthread",
            "libdl",
            "libgcc_s",
            "librt",
            "libutil",
            "ld-linux-x86-64",
            "ld-linux-aarch64",
        ];
        assert!(known.contains(&stem), "the C host needs {library}, of {needed:?}");
    }
}
