//! Any bytes as a GGUF file: a header or an error, and no expert that lies outside the file.
//! Run with `cargo +nightly fuzz run gguf`.
#![no_main]

use std::path::Path;

use hotset::model::{ExpertTable, GgufHeader};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let (name, len) = (Path::new("fuzz"), bytes.len() as u64);
    let Ok(header) = GgufHeader::parse(bytes, len, name) else { return };
    assert!(header.tensors.iter().all(|t| t.bytes.is_none() || t.end_bytes() <= len));
    let Ok(table) = ExpertTable::find(&header.tensors, &[name]) else { return };
    for layer in &table.layers {
        for t in &layer.tensors {
            assert!(t.offset_bytes + t.slice_bytes * u64::from(layer.n_experts) <= len);
        }
    }
});
