//! Tests of the format: prefixes, counts, faults.

use super::*;

/// A trace of 2 layers, 9 experts, top_m 3.
fn made(n_tokens: u32, header_tokens: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    write_header(&mut bytes, &Header { n_layers: 2, n_experts: 9, top_m: 3, n_tokens: header_tokens }).unwrap();
    for token in 0..n_tokens as u16 {
        for layer in 0..2 {
            let ids = [token % 9, (token + 1) % 9, (token + 2 + layer) % 9];
            let at = bytes.len();
            bytes.resize(at + 12, 0);
            encode_record(&ids, &[f16::ONE, f16::ZERO, f16::NEG_INFINITY], &mut bytes[at..]).unwrap();
        }
    }
    bytes
}

#[test]
fn every_prefix_is_read_or_refused() {
    for header_tokens in [0, 7] {
        let whole = made(7, header_tokens);
        for n in 0..=whole.len() {
            match Trace::from_bytes(whole[..n].to_vec()) {
                Err(_) => assert!(n < HEADER_BYTES),
                Ok(trace) => {
                    assert_eq!(trace.n_tokens(), (n - HEADER_BYTES) / 24);
                    let stray = (n - HEADER_BYTES) % 24;
                    assert_eq!(trace.health().stray_bytes, stray as u64);
                    let cut = if header_tokens == 0 { stray > 0 } else { n < whole.len() };
                    assert_eq!(trace.health().cut, cut);
                    assert!(trace.verify(0..7, 3).is_empty());
                }
            }
        }
    }
}

#[test]
fn the_header_counts_unless_the_length_holds_less() {
    for (header_tokens, n) in [(0, 5), (3, 3), (5, 5), (6, 5), (u32::MAX, 5)] {
        let trace = Trace::from_bytes(made(5, header_tokens)).unwrap();
        assert_eq!(trace.n_tokens(), n);
        assert_eq!(trace.health().cut, header_tokens > 5);
    }
}

#[test]
fn another_file_is_refused_with_what_was_found() {
    let refused = |at: usize, byte: u8| {
        let mut bytes = made(1, 1);
        bytes[at] = byte;
        Trace::from_bytes(bytes).unwrap_err().detail
    };
    assert!(refused(0, b'G').contains("G4RT"));
    assert!(refused(4, 2).contains("2 found"));
    for (at, name) in [(6, "n_layers 0"), (8, "n_experts 0"), (10, "top_m 0")] {
        assert!(refused(at, 0).contains(name));
    }
    assert!(Trace::from_bytes(b"Q4RT".to_vec()).unwrap_err().detail.contains("4 found"));
}

#[test]
fn verify_names_what_is_wrong() {
    let mut bytes = made(4, 4);
    let record = |token: usize, layer: usize| HEADER_BYTES + (token * 2 + layer) * 12;
    bytes[record(1, 0)] = 9;
    bytes[record(1, 1) + 2] = bytes[record(1, 1)];
    bytes[record(2, 0) + 6..][..2].copy_from_slice(&f16::NAN.to_bits().to_le_bytes());
    bytes[record(3, 1) + 8..][..2].copy_from_slice(&f16::from_f32(2.0).to_bits().to_le_bytes());
    let trace = Trace::from_bytes(bytes).unwrap();
    let found: Vec<_> = trace.verify(0..4, 9).iter().map(ToString::to_string).collect();
    let expected = [
        "token 1, layer 0, rank 0: expert 9 of 9",
        "token 1, layer 1, rank 1: expert 1 a second time",
        "token 2, layer 0, rank 0: score is NaN",
        "token 3, layer 1, rank 1: score 2 after 1",
    ];
    assert_eq!(found, expected);
    assert_eq!(trace.verify(0..4, 2).len(), 2);
    assert_eq!(trace.verify(2..3, 9).len(), 1);
}

#[test]
fn scores_saturate() {
    assert_eq!(saturating_f16(1e9), f16::MAX);
    assert_eq!(saturating_f16(f32::NEG_INFINITY), f16::MIN);
    // rounds to 65504, not to infinity
    assert_eq!(saturating_f16(65519.0), f16::MAX);
    assert!(saturating_f16(f32::NAN).is_nan());
}

#[test]
fn the_largest_shape_is_only_numbers() {
    let header = Header { n_layers: u16::MAX, n_experts: u16::MAX, top_m: u16::MAX, n_tokens: u32::MAX };
    let trace = Trace::from_bytes(header.encode().to_vec()).unwrap();
    assert_eq!((trace.n_tokens(), header.token_bytes()), (0, 65535 * 65535 * 4));
    assert!(encode_record(&[1], &[], &mut [0; 4]).is_err());
}
