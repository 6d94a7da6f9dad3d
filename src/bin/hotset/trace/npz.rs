//! Arrays for NumPy: an .npz, which is a zip of .npy files, stored as they are.
//!
//! Zip without compression is a header before each file and a list of them at the end, and .npy is a line of text before
//! the numbers: less than a crate for either would bring in. Files of 4 GiB and more would need the format's 64-bit
//! extension, and are refused.

use std::io::{Seek, SeekFrom, Write};

use anyhow::{Context, Result};

use super::files;

/// A file of the archive: its name, the bytes of its data, their checksum and where its header is.
struct Entry {
    name: String,
    bytes: u32,
    crc: u32,
    at: u32,
}

/// An .npz in the making.
pub struct Npz<'a, W> {
    out: &'a mut W,
    entries: Vec<Entry>,
}

/// The type of an array's numbers, little endian.
#[derive(Clone, Copy)]
pub enum Numbers {
    U8,
    U16,
    F16,
    I64,
}

impl Numbers {
    fn descr(self) -> (&'static str, u64) {
        match self {
            Self::U8 => ("|u1", 1),
            Self::U16 => ("<u2", 2),
            Self::F16 => ("<f2", 2),
            Self::I64 => ("<i8", 8),
        }
    }
}

impl<'a, W: Write + Seek> Npz<'a, W> {
    pub fn new(out: &'a mut W) -> Self {
        Self { out, entries: Vec::new() }
    }

    /// An array; `fill` writes its numbers, outermost dimension first.
    pub fn array(
        &mut self,
        name: &str,
        numbers: Numbers,
        shape: &[usize],
        fill: impl FnOnce(&mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()>,
    ) -> Result<()> {
        let (descr, size) = numbers.descr();
        let dims: String = shape.iter().map(|n| format!("{n}, ")).collect();
        let mut head = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}), }}", dims.trim_end());
        // magic, version and length are 10 bytes; numbers begin at a multiple of 64
        let length = (10 + head.len() + 1).next_multiple_of(64) - 10;
        head += &" ".repeat(length - head.len() - 1);
        head.push('\n');
        let data = shape.iter().try_fold(size, |n, &dim| n.checked_mul(dim as u64));
        let bytes = data.and_then(|n| n.checked_add(10 + length as u64)).and_then(|n| u32::try_from(n).ok());
        let at = self.out.stream_position()?;
        let at = u32::try_from(at).ok().filter(|at| bytes.is_some_and(|n| at.checked_add(n).is_some()));
        let Some((bytes, at)) = bytes.zip(at) else {
            return Err(files::usage(format!("{name}: an .npz takes less than 4 GiB: choose fewer tokens")));
        };
        let mut entry = Entry { name: format!("{name}.npy"), bytes, crc: 0, at };
        self.out.write_all(&entry.local_header())?;
        let mut crc = Crc::new();
        let mut written = 0;
        let mut put = |chunk: &[u8]| {
            crc.push(chunk);
            written += chunk.len() as u64;
            self.out.write_all(chunk).context("array")
        };
        put(b"\x93NUMPY\x01\x00")?;
        put(&(length as u16).to_le_bytes())?;
        put(head.as_bytes())?;
        fill(&mut put)?;
        anyhow::ensure!(written == u64::from(bytes), "{name}: {written} bytes written, {bytes} said");
        entry.crc = crc.end();
        self.out.seek(SeekFrom::Start(at.into()))?;
        self.out.write_all(&entry.local_header())?;
        self.out.seek(SeekFrom::End(0))?;
        self.entries.push(entry);
        Ok(())
    }

    /// The list at the end.
    pub fn finish(self) -> Result<()> {
        let begin = self.out.stream_position()?;
        for entry in &self.entries {
            self.out.write_all(&entry.central_header())?;
        }
        let length = self.out.stream_position()? - begin;
        let begin = u32::try_from(begin).context("an .npz takes less than 4 GiB")?;
        let n = (self.entries.len() as u16).to_le_bytes();
        let mut end = b"PK\x05\x06\0\0\0\0".to_vec();
        end.extend([n, n].concat());
        end.extend((length as u32).to_le_bytes());
        end.extend(begin.to_le_bytes());
        end.extend([0, 0]);
        self.out.write_all(&end)?;
        Ok(())
    }
}

impl Entry {
    /// Version 2.0, no flags, stored, 1980-01-01; checksum, sizes, lengths of the name and of what follows it.
    fn common(&self) -> Vec<u8> {
        let mut bytes = vec![20, 0, 0, 0, 0, 0, 0, 0, 0x21, 0];
        for number in [self.crc, self.bytes, self.bytes] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend((self.name.len() as u16).to_le_bytes());
        bytes.extend([0, 0]);
        bytes
    }

    fn local_header(&self) -> Vec<u8> {
        [b"PK\x03\x04", self.common().as_slice(), self.name.as_bytes()].concat()
    }

    fn central_header(&self) -> Vec<u8> {
        // made by version 2.0; no comment, disk 0, no attributes
        [b"PK\x01\x02\x14\0", self.common().as_slice(), &[0; 10], &self.at.to_le_bytes(), self.name.as_bytes()].concat()
    }
}

/// The checksum that zip uses (CRC-32).
struct Crc {
    table: [u32; 256],
    crc: u32,
}

impl Crc {
    fn new() -> Self {
        let one = |n: usize| (0..8).fold(n as u32, |c, _| if c & 1 == 1 { c >> 1 ^ 0xedb8_8320 } else { c >> 1 });
        Self { table: std::array::from_fn(one), crc: !0 }
    }

    fn push(&mut self, bytes: &[u8]) {
        self.crc = bytes.iter().fold(self.crc, |c, &b| self.table[usize::from(c as u8 ^ b)] ^ c >> 8);
    }

    fn end(self) -> u32 {
        !self.crc
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_zips() {
        let mut crc = Crc::new();
        crc.push(b"1234");
        crc.push(b"56789");
        assert_eq!(crc.end(), 0xcbf4_3926);
    }

    #[test]
    fn an_array_begins_at_a_multiple_of_64() {
        let mut out = std::io::Cursor::new(Vec::new());
        let mut npz = Npz::new(&mut out);
        npz.array("a", Numbers::U16, &[3], |put| put(&[1, 0, 2, 0, 3, 0])).unwrap();
        assert!(npz.array("b", Numbers::U8, &[2], |put| put(&[1])).is_err());
        assert!(npz.array("c", Numbers::I64, &[1 << 30], |_| Ok(())).is_err());
        npz.finish().unwrap();
        let bytes = out.into_inner();
        assert_eq!(&bytes[30..41], b"a.npy\x93NUMPY");
        assert_eq!(&bytes[35 + 128..35 + 134], [1, 0, 2, 0, 3, 0]);
    }
}
