//! Any text as a sidecar: an error, or one that is the same after writing and reading it again.
#![no_main]

use hotset::trace::Sidecar;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    let Ok(sidecar) = Sidecar::from_slice(text) else { return };
    let _ = sidecar.described_tokens();
    let mut again = Vec::new();
    sidecar.write_to(&mut again).expect("memory takes it");
    assert_eq!(Sidecar::from_slice(&again).expect("what was read can be written"), sidecar);
});
