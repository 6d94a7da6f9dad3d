//! Does what an engine's own build would do: compiles the adapter against the engine's ggml headers. And makes Rust declarations
//! of hotset's two headers, so that the program sees exactly what a C host sees.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

fn main() {
    if let Err(message) = build() {
        // A panic would bury the message in a backtrace.
        eprintln!("error: {message}");
        std::process::exit(1);
    }
}

fn build() -> Result<(), String> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR").map_err(|e| e.to_string())?).join("../..");
    let out = PathBuf::from(env::var("OUT_DIR").map_err(|e| e.to_string())?);
    let include = root.join("include");
    let adapter = root.join("src/ggml/hotset_ggml.c");
    let engine = engine_out()?;
    let ggml_public = need(engine.join("include"), "ggml.h")?;
    let ggml_internal = need(engine_source(&engine)?.join("ggml/src"), "ggml-backend-impl.h")?;

    println!("cargo:rerun-if-changed=build.rs");
    // For tests/recipe.rs, which builds an engine's program in C.
    println!("cargo:rustc-env=HOTSET_ENGINE_OUT={}", engine.display());
    println!("cargo:rustc-env=HOTSET_ENGINE_GGML_SRC={}", ggml_internal.display());
    println!("cargo:rerun-if-changed={}", adapter.display());
    for header in ["hotset.h", "hotset_ggml.h"] {
        println!("cargo:rerun-if-changed={}", include.join(header).display());
    }

    cc::Build::new()
        .file(&adapter)
        .include(&include)
        .include(&ggml_public)
        .include(&ggml_internal)
        .warnings(true)
        .extra_warnings(true)
        .try_compile("hotset_ggml")
        .map_err(|e| format!("{} does not compile: {e}", adapter.display()))?;

    bindgen::Builder::default()
        .header(include.join("hotset_ggml.h").display().to_string())
        .clang_arg(format!("-I{}", include.display()))
        .clang_arg(format!("-I{}", ggml_public.display()))
        .allowlist_item("(hotset|HOTSET)_.*")
        .allowlist_type("hotset")
        // ggml's types are those of llama-cpp-sys-2: the same declarations, hence the same layout.
        .allowlist_recursively(false)
        .raw_line("use llama_cpp_sys_2::*;")
        .prepend_enum_name(false)
        .generate_cstr(true)
        .derive_default(true)
        .layout_tests(false)
        .rust_edition(bindgen::RustEdition::Edition2024)
        .generate()
        .map_err(|e| format!("no declarations from hotset_ggml.h: {e}"))?
        .write_to_file(out.join("hotset.rs"))
        .map_err(|e| format!("cannot write {}: {e}", out.join("hotset.rs").display()))?;

    if env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux") {
        // See src/lazy_map.rs.
        for symbol in ["mmap", "posix_madvise", "posix_fadvise"] {
            println!("cargo:rustc-link-arg-bins=-Wl,--wrap={symbol}");
        }
    }
    Ok(())
}

/// Where llama-cpp-sys-2 built and installed llama.cpp: its OUT_DIR, two levels above the cmake package that it tells its dependents of.
fn engine_out() -> Result<PathBuf, String> {
    let cmake = env::var("DEP_LLAMA_GGML_CMAKE_DIR")
        .map_err(|_| "llama-cpp-sys-2 did not say where it installed ggml (DEP_LLAMA_GGML_CMAKE_DIR)".to_string())?;
    let out = Path::new(&cmake).ancestors().nth(2);
    out.map(Path::to_path_buf).ok_or(format!("{cmake} is no path of the form OUT_DIR/lib/cmake"))
}

/// The sources that llama.cpp was built from: the adapter needs one header that is not installed (ggml-backend-impl.h).
fn engine_source(engine: &Path) -> Result<PathBuf, String> {
    let cache = engine.join("build/CMakeCache.txt");
    let text = fs::read_to_string(&cache).map_err(|e| format!("cannot read {}: {e}", cache.display()))?;
    let key = "CMAKE_HOME_DIRECTORY:INTERNAL=";
    let home = text.lines().find_map(|line| line.strip_prefix(key));
    home.map(PathBuf::from).ok_or(format!("{} does not say {key}", cache.display()))
}

fn need(dir: PathBuf, file: &str) -> Result<PathBuf, String> {
    if dir.join(file).is_file() { Ok(dir) } else { Err(format!("{file} is not in {}", dir.display())) }
}
