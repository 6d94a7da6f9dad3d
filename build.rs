//! A plain build compiles nothing but Rust. With the feature `bindgen`, the Rust view of include/hotset.h is made anew into OUT_DIR,
//! where tests/bindings.rs compares it with the committed src/abi/bindings.rs.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "bindgen")]
    bindings();
}

#[cfg(feature = "bindgen")]
fn bindings() {
    println!("cargo:rerun-if-changed=include/hotset.h");
    let out = std::path::PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("bindings.rs");
    let bindings = bindgen::Builder::default()
        .header("include/hotset.h")
        .allowlist_item("(hotset|HOTSET)_.*")
        .allowlist_type("hotset")
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .use_core()
        .derive_default(true)
        .generate_comments(false)
        .rust_edition(bindgen::RustEdition::Edition2024)
        .rust_target(bindgen::RustTarget::stable(85, 0).unwrap_or_default())
        .raw_line("// Made from include/hotset.h by bindgen; see build.rs and tests/bindings.rs. Not to be edited.")
        .generate()
        .expect("bindgen reads include/hotset.h")
        .to_string()
        // The header's enums are values for int32_t members; C leaves an enum without negative values unsigned.
        .replace("= ::core::ffi::c_uint;", "= ::core::ffi::c_int;");
    std::fs::write(out, bindings).expect("OUT_DIR can be written");
}
