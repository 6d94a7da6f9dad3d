//! Any bytes as JSONL of ids: an error, or a sound trace with a sidecar that fits it.
#![no_main]

use std::io::Cursor;

use hotset::trace::import::{self, ImportOptions};
use hotset::trace::{Sidecar, Trace};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    let mut out = Cursor::new(Vec::new());
    let Ok(sidecar) = import::jsonl(&mut Cursor::new(text), &mut out, ImportOptions::default()) else { return };
    let trace = Trace::from_bytes(out.into_inner()).expect("what was imported is a trace");
    sidecar.check_header(trace.header()).expect("of the same shape");
    assert_eq!(trace.verify(0..usize::MAX, 1), []);
    assert_eq!(sidecar.described_tokens(), trace.n_tokens() as u64);
    assert_eq!(Sidecar::from_json(&sidecar.to_json()).expect("what was made can be read"), sidecar);
});
