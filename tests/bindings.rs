//! The committed src/abi/bindings.rs is what bindgen makes of include/hotset.h. Run with `--features bindgen`; to bring the committed file
//! up to date after a change to the header: `HOTSET_UPDATE_BINDINGS=1 cargo test --features bindgen --test bindings`.
#![cfg(feature = "bindgen")]

#[test]
fn the_bindings_are_the_headers() {
    let made = include_str!(concat!(env!("OUT_DIR"), "/bindings.rs"));
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/abi/bindings.rs");
    if std::env::var_os("HOTSET_UPDATE_BINDINGS").is_some() {
        std::fs::write(path, made).unwrap();
    }
    let committed = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        made == committed,
        "src/abi/bindings.rs is not what include/hotset.h says: run with HOTSET_UPDATE_BINDINGS=1 and commit"
    );
}
