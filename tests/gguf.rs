//! The parser against headers: every value type, every contradiction that we know of, cut and mutated bytes.

mod raw;

use std::path::Path;

use hotset::ErrorKind;
use hotset::model::quant::{TYPE_F32, TYPE_Q2_0};
use hotset::model::{ExpertTable, GgufHeader, Value};
use proptest::prelude::*;
use raw::{Raw, refused, string};

#[test]
fn headers_that_contradict_themselves_are_refused() {
    let parse = |b: &[u8]| GgufHeader::parse(b, b.len() as u64, Path::new("x.gguf"));
    let format = ErrorKind::Format;
    let mut raw = Raw::new();
    raw.tensor("a", &[8], TYPE_F32).tensor("b", &[8, 2], TYPE_F32);
    let good = raw.bytes();
    assert_eq!(parse(&good).unwrap().tensors.len(), 2);
    raw.version = 2;
    assert_eq!(parse(&raw.bytes()).unwrap().version, 2);
    assert_eq!(parse(&raw.bytes()).unwrap().tensors, parse(&good).unwrap().tensors);
    raw.version = 3_u32.swap_bytes();
    refused(parse(&raw.bytes()), format, &["big-endian", "x.gguf"]);
    raw.version = 1;
    refused(parse(&raw.bytes()), format, &["version 1"]);
    raw.version = 3;
    refused(parse(b"GGML0000"), format, &["47, 47, 4d, 4c"]);
    refused(parse(b""), format, &["the header is cut"]);

    let with = |f: &dyn Fn(&mut Raw)| {
        let mut r = raw.clone();
        f(&mut r);
        parse(&r.bytes())
    };
    refused(
        with(&|r| {
            r.u32("k", 1).u32("k", 2);
        }),
        format,
        &["key k", "twice"],
    );
    refused(
        with(&|r| {
            r.tensor("a", &[4], TYPE_F32);
        }),
        format,
        &["tensor a", "twice"],
    );
    refused(
        with(&|r| {
            r.u32("general.alignment", 24);
        }),
        format,
        &["general.alignment", "24"],
    );
    refused(
        with(&|r| {
            r.u32("general.alignment", 64);
        }),
        format,
        &["tensor b", "multiple of 64"],
    );
    refused(
        with(&|r| {
            r.tensor("q", &[96], TYPE_Q2_0);
        }),
        format,
        &["tensor q", "96", "64"],
    );
    refused(
        with(&|r| {
            r.tensor("d", &[1; 5], TYPE_F32);
        }),
        format,
        &["tensor d", "5 dimensions"],
    );
    refused(
        with(&|r| {
            r.stored("o", &[1 << 40, 1 << 40], TYPE_F32, 4);
        }),
        format,
        &["tensor o"],
    );
    refused(
        with(&|r| {
            r.stored("o", &[1 << 61], TYPE_F32, 4);
        }),
        format,
        &["tensor o", "ends at", "cut"],
    );
    // An array that says it has 2^61 strings; one nested deeper than is sane.
    let huge = [&8_u32.to_le_bytes()[..], &(1_u64 << 61).to_le_bytes()].concat();
    refused(
        with(&|r| {
            r.put("huge", 9, &huge);
        }),
        format,
        &["key huge", "2305843009213693952"],
    );
    let nest = [&9_u32.to_le_bytes()[..], &1_u64.to_le_bytes()].concat().repeat(9);
    refused(
        with(&|r| {
            r.put("nest", 9, &nest);
        }),
        format,
        &["key nest", "nested"],
    );
    refused(
        with(&|r| {
            r.put("kind", 13, &[0; 8]);
        }),
        format,
        &["key kind", "type 13"],
    );
    // Counts that no file of this size can hold.
    for at in [8, 16] {
        let mut b = good.clone();
        b[at + 7] = 0x7F;
        refused(parse(&b), format, &["cannot be in"]);
    }
}

#[test]
fn metadata_values() {
    let mut raw = Raw::new();
    let array = |kind: u32, n: u64, items: &[u8]| [&kind.to_le_bytes()[..], &n.to_le_bytes(), items].concat();
    raw.put("i8", 1, &[0xFF]).put("f32", 6, &1.5_f32.to_le_bytes()).put("bool", 7, &[1]);
    raw.put("long", 8, &string(&"x".repeat(70_000))).put("ints", 9, &array(5, 2, &[1, 0, 0, 0, 254, 255, 255, 255]));
    raw.put("big", 9, &array(0, 5000, &[7; 5000])).put("words", 9, &array(8, 2, &[string("a"), string("b")].concat()));
    raw.put("nested", 9, &array(9, 1, &array(9, 1, &array(7, 1, &[1]))));
    let b = raw.bytes();
    let h = GgufHeader::parse(&b, b.len() as u64, Path::new("x")).unwrap();
    let array = |element_type, count, integers| Value::Array { element_type, count, integers };
    assert_eq!(h.metadata["i8"], Value::Signed(-1));
    assert_eq!(h.metadata["f32"], Value::Float(1.5));
    assert_eq!(h.metadata["bool"], Value::Bool(true));
    assert_eq!(h.metadata["long"], Value::LongString(70_000));
    assert_eq!(h.metadata["ints"], array(5, 2, Some(vec![1, -2])));
    assert_eq!(h.metadata["big"], array(0, 5000, None));
    assert_eq!(h.metadata["words"], array(8, 2, None));
    assert_eq!(h.metadata["nested"], array(9, 1, None));
    // k by layer: the largest counts.
    let mut raw = Raw::new();
    raw.metadata.pop();
    let ks = [&5_u32.to_le_bytes()[..], &2_u64.to_le_bytes(), &2_u32.to_le_bytes(), &8_u32.to_le_bytes()].concat();
    assert_eq!(raw.put("any.expert_used_count", 9, &ks).open().unwrap().n_experts_used(), Some(8));
}

#[test]
fn every_prefix_of_a_file_is_refused_without_a_panic() {
    let mut raw = Raw::new();
    raw.put("words", 9, &[&8_u32.to_le_bytes()[..], &1_u64.to_le_bytes(), &string("word")].concat());
    raw.layer(0, 64, 64, 2);
    let bytes = raw.bytes();
    for n in 0..bytes.len() {
        let cut = &bytes[..n];
        assert!(GgufHeader::parse(cut, n as u64, Path::new("x")).is_err(), "{n} of {} bytes", bytes.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Whatever a few bytes of a sound header are changed to: an answer, and a table inside the file.
    #[test]
    fn mutated_headers_do_no_harm(
        edits in prop::collection::vec((0_usize..700, any::<u8>()), 1..6),
        len in prop::option::of(0_usize..4000),
    ) {
        let mut raw = Raw::new();
        raw.u32("general.alignment", 32).layer(0, 64, 64, 2).tensor("blk.0.ffn_up_exps.bias", &[64, 2], TYPE_F32);
        let mut bytes = raw.bytes();
        for (at, b) in edits {
            if let Some(byte) = bytes.get_mut(at) { *byte = b; }
        }
        bytes.truncate(len.unwrap_or(usize::MAX));
        let file_len = bytes.len() as u64;
        if let Ok(h) = GgufHeader::parse(&bytes, file_len, Path::new("x")) {
            prop_assert!(h.tensors.iter().all(|t| t.bytes.is_none() || t.end_bytes() <= file_len));
            if let Ok(table) = ExpertTable::find(&h.tensors, &[Path::new("x")]) {
                for l in &table.layers {
                    for t in &l.tensors {
                        prop_assert!(t.offset_bytes + t.slice_bytes * u64::from(l.n_experts) <= file_len);
                    }
                }
                prop_assert!(table.total_bytes() <= file_len);
            }
        }
    }

    #[test]
    fn any_bytes_do_no_harm(tail in prop::collection::vec(any::<u8>(), 0..200)) {
        let bytes = [&b"GGUF\x03\0\0\0"[..], &tail].concat();
        let _ = GgufHeader::parse(&bytes, bytes.len() as u64, Path::new("x"));
    }
}
