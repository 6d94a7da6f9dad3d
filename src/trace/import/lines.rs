//! Lines of a text file, one at a time, in bounded memory.

use std::io::{BufRead, Read, Seek, SeekFrom};

use crate::error::{Result, err};

/// A longer line is refused.
pub const MAX_LINE: usize = 16 << 20;

/// The lines of a file from its beginning.
pub(crate) struct Lines<'a, R> {
    input: &'a mut R,
    line: Vec<u8>,
    number: u64,
}

impl<'a, R: BufRead + Seek> Lines<'a, R> {
    pub fn new(input: &'a mut R) -> Result<Self> {
        input.seek(SeekFrom::Start(0)).map_err(|e| err!(Io, "line 1: {e}"))?;
        Ok(Self { input, line: Vec::new(), number: 0 })
    }

    /// The next line, without its end, and its number from 1.
    pub fn next(&mut self) -> Result<Option<(u64, &[u8])>> {
        self.line.clear();
        self.number += 1;
        let mut bounded = self.input.by_ref().take(MAX_LINE as u64 + 1);
        let n = bounded.read_until(b'\n', &mut self.line).map_err(|e| err!(Io, "line {}: {e}", self.number))?;
        if n > MAX_LINE {
            return Err(err!(Format, "line {}: longer than {MAX_LINE} bytes", self.number));
        }
        if n == 0 {
            return Ok(None);
        }
        let line = self.line.strip_suffix(b"\n").unwrap_or(&self.line);
        Ok(Some((self.number, line.strip_suffix(b"\r").unwrap_or(line))))
    }
}

/// Bytes as a message can hold them.
pub(super) fn short(bytes: &[u8]) -> String {
    let dots = if bytes.len() > 40 { "..." } else { "" };
    format!("\"{}{dots}\"", bytes[..bytes.len().min(40)].escape_ascii())
}
