//! FNV-1a, 64 bits: one number that stands for every logit of a run, so that two runs can be compared for identity.

pub struct Fnv(u64);

impl Fnv {
    pub fn new() -> Self {
        Fnv(0xcbf2_9ce4_8422_2325)
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    /// As they lie in memory on a little-endian machine, so that the number means the same everywhere.
    pub fn floats(&mut self, values: &[f32]) {
        for value in values {
            self.bytes(&value.to_le_bytes());
        }
    }

    pub fn hex(&self) -> String {
        format!("{:016x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::Fnv;

    #[test]
    fn published_vectors() {
        for (text, hash) in [("", "cbf29ce484222325"), ("a", "af63dc4c8601ec8c"), ("foobar", "85944171f73967e8")] {
            let mut fnv = Fnv::new();
            fnv.bytes(text.as_bytes());
            assert_eq!(fnv.hex(), hash);
        }
    }

    #[test]
    fn floats_are_their_bytes() {
        let (mut a, mut b) = (Fnv::new(), Fnv::new());
        a.floats(&[1.0, -0.5]);
        b.bytes(&[0, 0, 0x80, 0x3f, 0, 0, 0, 0xbf]);
        assert_eq!(a.hex(), b.hex());
    }
}
