//! Reads little-endian fields from a byte slice, with every length checked against what is left before it is used.
//! Errors name the field and the numbers; the caller adds key, tensor and file.

use crate::error::{Result, err};

pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Bytes read so far.
    pub(crate) fn position(&self) -> usize {
        self.at
    }

    pub(crate) fn take(&mut self, n: usize, what: &str) -> Result<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        let Some(taken) = rest.get(..n) else {
            return Err(err!(
                Format,
                "the header is cut: {what} at {} takes {n} bytes, {} are left of {}",
                self.at,
                rest.len(),
                self.bytes.len()
            ));
        };
        self.at += n;
        Ok(taken)
    }

    pub(crate) fn skip(&mut self, n: u64, what: &str) -> Result<()> {
        // On a 32-bit host a length over its address space is over what is left, too.
        self.take(usize::try_from(n).unwrap_or(usize::MAX), what).map(drop)
    }

    /// An unsigned integer of 1 to 8 bytes.
    pub(crate) fn uint(&mut self, bytes: u64, what: &str) -> Result<u64> {
        Ok(self.take(bytes as usize, what)?.iter().rev().fold(0, |v, b| v << 8 | u64::from(*b)))
    }

    pub(crate) fn u32(&mut self, what: &str) -> Result<u32> {
        Ok(self.uint(4, what)? as u32)
    }

    pub(crate) fn u64(&mut self, what: &str) -> Result<u64> {
        self.uint(8, what)
    }

    /// A string's bytes, after their 64-bit length.
    pub(crate) fn string_bytes(&mut self, what: &str) -> Result<&'a [u8]> {
        let n = self.u64(what)?;
        self.take(usize::try_from(n).unwrap_or(usize::MAX), what)
    }

    /// A string that must be UTF-8 and of `max` bytes at most.
    pub(crate) fn string(&mut self, what: &str, max: usize) -> Result<String> {
        let at = self.at;
        let s = self.string_bytes(what)?;
        if s.len() > max {
            return Err(err!(Format, "{what} at {at} has {} bytes, {max} is the most", s.len()));
        }
        match std::str::from_utf8(s) {
            Ok(s) => Ok(s.to_owned()),
            Err(_) => Err(err!(Format, "{what} at {at} is not UTF-8")),
        }
    }

    /// Refuses a count whose items, each of `least` bytes at least, cannot be in what is left.
    pub(crate) fn plausible(&self, count: u64, least: u64, what: &str) -> Result<()> {
        let left = (self.bytes.len() - self.at) as u64;
        if count > left / least {
            return Err(err!(Format, "{count} {what} at {} cannot be in the {left} bytes left", self.at));
        }
        Ok(())
    }
}
