//! The block arithmetic of ggml's types: how many bytes a row takes; and Q2_0 itself, read and written.
//!
//! A tensor's row of `ne0` elements is stored as `ne0 / block` blocks of a fixed number of bytes. Type numbers are
//! stable across ggml's versions, with one exception known here: Q2_0 (42) exists in files with 128-wide blocks too,
//! which only the offsets in a file reveal (`other_layouts`).

use half::f16;

use crate::error::{Result, err};

pub const TYPE_F32: u32 = 0;
pub const TYPE_F16: u32 = 1;
pub const TYPE_Q2_0: u32 = 42;

/// Elements of one Q2_0 block.
pub const Q2_0_BLOCK: usize = 64;
/// Bytes of one Q2_0 block: an f16 and 64 codes of 2 bits.
pub const Q2_0_BYTES: usize = 18;

/// How one of ggml's types is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TypeInfo {
    /// ggml's type number, as it stands in a file.
    pub number: u32,
    /// ggml's name of it.
    pub name: &'static str,
    /// Elements of one block.
    pub block: u32,
    /// Bytes of one block.
    pub block_bytes: u32,
}

const fn t(number: u32, name: &'static str, block: u32, block_bytes: u32) -> TypeInfo {
    TypeInfo { number, name, block, block_bytes }
}

/// All types that a file may hold, by number. Numbers missing here (4, 5, 31 to 33, 36 to 38) were withdrawn.
const TYPES: [TypeInfo; 35] = [
    t(0, "f32", 1, 4),
    t(1, "f16", 1, 2),
    t(2, "q4_0", 32, 18),
    t(3, "q4_1", 32, 20),
    t(6, "q5_0", 32, 22),
    t(7, "q5_1", 32, 24),
    t(8, "q8_0", 32, 34),
    t(9, "q8_1", 32, 36),
    t(10, "q2_K", 256, 84),
    t(11, "q3_K", 256, 110),
    t(12, "q4_K", 256, 144),
    t(13, "q5_K", 256, 176),
    t(14, "q6_K", 256, 210),
    t(15, "q8_K", 256, 292),
    t(16, "iq2_xxs", 256, 66),
    t(17, "iq2_xs", 256, 74),
    t(18, "iq3_xxs", 256, 98),
    t(19, "iq1_s", 256, 50),
    t(20, "iq4_nl", 32, 18),
    t(21, "iq3_s", 256, 110),
    t(22, "iq2_s", 256, 82),
    t(23, "iq4_xs", 256, 136),
    t(24, "i8", 1, 1),
    t(25, "i16", 1, 2),
    t(26, "i32", 1, 4),
    t(27, "i64", 1, 8),
    t(28, "f64", 1, 8),
    t(29, "iq1_m", 256, 56),
    t(30, "bf16", 1, 2),
    t(34, "tq1_0", 256, 54),
    t(35, "tq2_0", 256, 66),
    t(39, "mxfp4", 32, 17),
    t(40, "nvfp4", 64, 36),
    t(41, "q1_0", 128, 18),
    t(42, "q2_0", Q2_0_BLOCK as u32, Q2_0_BYTES as u32),
];

/// The type of that number; `None` where it is not one that ggml reads today.
pub fn type_info(number: u32) -> Option<&'static TypeInfo> {
    TYPES.binary_search_by_key(&number, |t| t.number).ok().map(|i| &TYPES[i])
}

/// The type's name, or `type 99` where there is none.
pub fn type_name(number: u32) -> String {
    type_info(number).map_or_else(|| format!("type {number}"), |t| t.name.to_owned())
}

/// Other layouts, (elements, bytes) of a block, that files are known to hold under the same number.
pub fn other_layouts(number: u32) -> &'static [(u32, u32)] {
    match number {
        TYPE_Q2_0 => &[(128, 34)],
        _ => &[],
    }
}

/// Bytes of one row of `ne0` elements. `Format` where the type is unknown or the row is not whole blocks.
pub fn row_bytes(number: u32, ne0: u64) -> Result<u64> {
    let Some(t) = type_info(number) else {
        return Err(err!(Format, "ggml type {number} is not known"));
    };
    blocks_bytes(ne0, t.block, t.block_bytes).ok_or_else(|| match ne0 % u64::from(t.block) {
        0 => err!(Format, "a row of {ne0} elements of {} has more bytes than can be", t.name),
        _ => err!(Format, "a row of {ne0} elements is not a whole number of {} blocks of {} elements", t.name, t.block),
    })
}

/// Bytes of `n` elements in blocks of `block` elements; `None` where a block would be cut, or on overflow.
pub fn blocks_bytes(n: u64, block: u32, block_bytes: u32) -> Option<u64> {
    if n % u64::from(block) != 0 {
        return None;
    }
    (n / u64::from(block)).checked_mul(u64::from(block_bytes))
}

/// Quantises to Q2_0, blocks of 64: d = mean |w| as f16, code = round(w / d) clamped to -1..=2, plus 1.
///
/// The rule is the one our test model was trained and exported with (its `export.py`, `model.py`); any d is valid
/// Q2_0, and a reader needs none of it. `Argument` where lengths do not fit each other, a weight is not finite, or a
/// block's mean exceeds what f16 holds (65504).
pub fn q2_0_quantize(weights: &[f32], out: &mut [u8]) -> Result<()> {
    check_lengths(weights.len(), out.len())?;
    for (i, (w, b)) in weights.chunks_exact(Q2_0_BLOCK).zip(out.chunks_exact_mut(Q2_0_BYTES)).enumerate() {
        let mean = w.iter().map(|x| f64::from(x.abs())).sum::<f64>() / Q2_0_BLOCK as f64;
        let d = f16::from_f64(mean);
        if !d.is_finite() {
            return Err(err!(Argument, "block {i}: the mean weight {mean} is not a finite f16"));
        }
        b[..2].copy_from_slice(&d.to_le_bytes());
        // A block of zeros has d = 0: any positive divisor gives the code of 0.
        let d = f32::from(d).max(1e-8);
        for (byte, w) in b[2..].iter_mut().zip(w.chunks_exact(4)) {
            *byte = w.iter().enumerate().fold(0, |byte, (j, w)| {
                let code = ((w / d).round_ties_even().clamp(-1.0, 2.0) + 1.0) as u8;
                byte | code << (2 * j)
            });
        }
    }
    Ok(())
}

/// Reads Q2_0: element j of a block is `(code_j - 1) * d`. `Argument` where lengths do not fit each other.
pub fn q2_0_dequantize(blocks: &[u8], out: &mut [f32]) -> Result<()> {
    check_lengths(out.len(), blocks.len())?;
    for (b, out) in blocks.chunks_exact(Q2_0_BYTES).zip(out.chunks_exact_mut(Q2_0_BLOCK)) {
        let d = f32::from(f16::from_le_bytes([b[0], b[1]]));
        for (j, w) in out.iter_mut().enumerate() {
            let code = b[2 + j / 4] >> (2 * (j % 4)) & 3;
            *w = (f32::from(code) - 1.0) * d;
        }
    }
    Ok(())
}

fn check_lengths(elements: usize, bytes: usize) -> Result<()> {
    let whole = elements % Q2_0_BLOCK == 0 && bytes % Q2_0_BYTES == 0;
    if !whole || elements / Q2_0_BLOCK != bytes / Q2_0_BYTES {
        return Err(err!(
            Argument,
            "{elements} weights do not fit {bytes} bytes of q2_0 ({Q2_0_BYTES} bytes for each {Q2_0_BLOCK} weights)"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_table_is_sorted_and_rows_are_whole_blocks() {
        assert!(TYPES.windows(2).all(|w| w[0].number < w[1].number));
        assert_eq!(row_bytes(TYPE_Q2_0, 2560).unwrap() * 640, 460_800);
        assert_eq!(row_bytes(TYPE_F16, 7).unwrap(), 14);
        assert_eq!(row_bytes(14, 256).unwrap(), 210);
        assert!(row_bytes(TYPE_Q2_0, 96).unwrap_err().detail.contains("96"));
        assert!(row_bytes(4, 64).unwrap_err().detail.contains("type 4"));
        assert!(row_bytes(28, u64::MAX).unwrap_err().detail.contains("more bytes than can be"));
    }

    #[test]
    fn q2_0_known_bytes() {
        // d = 1.5; bytes 0xE4 = codes 0, 1, 2, 3 in this order.
        let mut block = [0xE4_u8; Q2_0_BYTES];
        block[..2].copy_from_slice(&f16::from_f32(1.5).to_le_bytes());
        let mut w = [0.0; Q2_0_BLOCK];
        q2_0_dequantize(&block, &mut w).unwrap();
        assert!(w.chunks(4).all(|w| w == [-1.5, 0.0, 1.5, 3.0]));

        // These weights' mean |w| is 1.0 exactly: codes 0, 1, 2, 3 of d = 1.
        let w: Vec<f32> = [-1.0, 0.0, 1.0, 2.0].repeat(16);
        let mut out = [0; Q2_0_BYTES];
        q2_0_quantize(&w, &mut out).unwrap();
        assert_eq!(out[..2], [0x00, 0x3C]);
        assert_eq!(out[2..], [0xE4; 16]);
    }

    #[test]
    fn q2_0_refuses_what_does_not_fit() {
        assert!(q2_0_quantize(&[0.0; 64], &mut [0; 34]).is_err());
        assert!(q2_0_quantize(&[0.0; 63], &mut [0; 18]).is_err());
        assert!(q2_0_quantize(&[f32::NAN; 64], &mut [0; 18]).is_err());
        assert!(q2_0_quantize(&[1e9; 64], &mut [0; 18]).is_err());
        let mut zeros = [0xFF; 18];
        q2_0_quantize(&[0.0; 64], &mut zeros).unwrap();
        assert_eq!((&zeros[..2], zeros[17]), (&[0_u8; 2][..], 0x55));
    }

    proptest! {
        #[test]
        fn q2_0_is_at_most_half_a_step_off_within_its_range(w in prop::collection::vec(-1.0f32..1.0, 64)) {
            let mut bytes = [0; 18];
            let mut back = [0.0; 64];
            q2_0_quantize(&w, &mut bytes).unwrap();
            q2_0_dequantize(&bytes, &mut back).unwrap();
            let d = f32::from(f16::from_le_bytes([bytes[0], bytes[1]]));
            for (w, b) in w.iter().zip(back) {
                let nearest = w.clamp(-d, 2.0 * d);
                prop_assert!((nearest - b).abs() <= d * 0.5001, "{w} became {b}, d = {d}");
            }
        }
    }
}
