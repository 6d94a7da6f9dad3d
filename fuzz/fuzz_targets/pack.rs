//! Any bytes as a pack's header: an error, or layers that lie in the file and apart, with their slices inside their strides. The checksum is
//! made right first, or nothing would ever come past it. Run with `cargo +nightly fuzz run pack`.
#![no_main]

use hotset::model::pack::{PACK_ALIGN, PackHeader};
use libfuzzer_sys::fuzz_target;

fn crc32<'a>(bytes: impl Iterator<Item = &'a u8>) -> u32 {
    !bytes.fold(!0_u32, |c, &b| {
        (0..8).fold(c ^ u32::from(b), |c, _| if c & 1 == 1 { (c >> 1) ^ 0xEDB8_8320 } else { c >> 1 })
    })
}

fuzz_target!(|input: (u64, &[u8])| {
    let (file_len, body) = input;
    // magic, version, and a header of whole pages
    let n = (64 + body.len()).next_multiple_of(PACK_ALIGN as usize);
    let mut bytes = b"HOTSETPK\x01\0\0\0\0\0\0\0".to_vec();
    bytes.extend((n as u64).to_le_bytes());
    bytes.extend(body);
    bytes.resize(n, 0);
    let table = u64::from_le_bytes(bytes[32..40].try_into().unwrap());
    let end = usize::try_from(table).unwrap_or(0).clamp(16, n);
    let crc = crc32(bytes[..12].iter().chain(&bytes[16..end]));
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());

    let Ok(header) = PackHeader::parse(&bytes, file_len.max(n as u64)) else { return };
    let mut end = header.header_bytes;
    for l in &header.layers {
        assert!(l.offset_bytes == end && l.stride_bytes % PACK_ALIGN == 0);
        end = l.offset_bytes + l.stride_bytes * u64::from(l.n_experts);
        let mut taken = 0;
        for s in &l.slices {
            assert!(s.offset_bytes >= taken && s.slice_bytes > 0);
            taken = s.offset_bytes + s.slice_bytes;
        }
        assert!(taken <= l.stride_bytes);
    }
    assert!(end == header.file_bytes);
    let _ = header.table(&bytes);
});
