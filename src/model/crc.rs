//! CRC-32 (the polynomial of Ethernet and zip, reflected: 0xEDB88320), eight bytes a step by tables made at compile time. Of the
//! crates that the linked library may have none brings a checksum.

const TABLES: [[u32; 256]; 8] = {
    let mut t = [[0_u32; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let (mut c, mut bit) = (byte as u32, 0);
        while bit < 8 {
            c = if c & 1 == 1 { (c >> 1) ^ 0xEDB8_8320 } else { c >> 1 };
            bit += 1;
        }
        t[0][byte] = c;
        byte += 1;
    }
    // t[n][b]: what byte b comes to with n zero bytes behind it
    let mut n = 1;
    while n < 8 {
        let mut byte = 0;
        while byte < 256 {
            let c = t[n - 1][byte];
            t[n][byte] = (c >> 8) ^ t[0][(c & 0xFF) as usize];
            byte += 1;
        }
        n += 1;
    }
    t
};

/// A checksum in the making, over any number of pieces.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Crc32(u32);

impl Crc32 {
    pub(crate) fn new() -> Self {
        Self(!0)
    }

    pub(crate) fn update(mut self, bytes: &[u8]) -> Self {
        let t = &TABLES;
        let mut eights = bytes.chunks_exact(8);
        for b in &mut eights {
            let low = self.0 ^ u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            self.0 = t[7][(low & 0xFF) as usize]
                ^ t[6][(low >> 8 & 0xFF) as usize]
                ^ t[5][(low >> 16 & 0xFF) as usize]
                ^ t[4][(low >> 24) as usize]
                ^ t[3][usize::from(b[4])]
                ^ t[2][usize::from(b[5])]
                ^ t[1][usize::from(b[6])]
                ^ t[0][usize::from(b[7])];
        }
        for &b in eights.remainder() {
            self.0 = (self.0 >> 8) ^ t[0][((self.0 ^ u32::from(b)) & 0xFF) as usize];
        }
        self
    }

    pub(crate) fn value(self) -> u32 {
        !self.0
    }
}

/// Of one piece.
pub(crate) fn crc32(bytes: &[u8]) -> u32 {
    Crc32::new().update(bytes).value()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_check_value_and_pieces_of_any_size() {
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926);
        assert_eq!(crc32(b""), 0);
        let bytes: Vec<u8> = (0..1000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
        // bit by bit, as the polynomial is defined
        let plain = !bytes.iter().fold(!0_u32, |c, &b| {
            (0..8).fold(c ^ u32::from(b), |c, _| if c & 1 == 1 { (c >> 1) ^ 0xEDB8_8320 } else { c >> 1 })
        });
        for cut in [0, 1, 7, 8, 9, 500, 999, 1000] {
            assert_eq!(Crc32::new().update(&bytes[..cut]).update(&bytes[cut..]).value(), plain, "{cut}");
        }
    }
}
