//! Any bytes as a trace: an error, or whole tokens that can all be read.
#![no_main]

use half::f16;
use hotset::trace::Trace;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(trace) = Trace::from_bytes(bytes.to_vec()) else { return };
    let health = trace.health();
    assert_eq!(16 + health.found_tokens * trace.header().token_bytes() + health.stray_bytes, bytes.len() as u64);
    assert!(trace.n_tokens() as u64 <= health.found_tokens);
    assert!(trace.verify(0..usize::MAX, 8).len() <= 8);
    let (mut ids, mut scores) = (vec![0; trace.top_m()], vec![f16::ZERO; trace.top_m()]);
    for token in 0..trace.n_tokens() {
        for layer in 0..trace.n_layers() {
            let record = trace.record(token, layer);
            assert_eq!(record.copy_ids(&mut ids), record.len());
            assert_eq!(record.copy_scores(&mut scores), record.len());
            assert_eq!(ids[record.len() - 1], record.id(record.len() - 1));
        }
    }
});
