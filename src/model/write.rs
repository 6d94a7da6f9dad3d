//! Writes GGUF v3 files in one pass, without holding tensor data in memory.
//!
//! First metadata and tensors are declared; then `write_to` writes the header, whose offsets follow from the declared
//! shapes alone, and asks a callback for each tensor's bytes, chunk after chunk.

use std::collections::HashSet;
use std::io::Write;

use super::quant;
use crate::error::{Result, err};

/// What tensors are aligned to, in bytes: GGUF's default.
pub const ALIGNMENT: u64 = 32;
/// A chunk has at most this many bytes, unless one block is larger.
const CHUNK_BYTES: usize = 1 << 20;

/// A metadata value to be written.
#[derive(Clone, Debug, PartialEq)]
pub enum MetaValue {
    U16(u16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Strings(Vec<String>),
    F32s(Vec<f32>),
    I32s(Vec<i32>),
    U32s(Vec<u32>),
}

impl From<&str> for MetaValue {
    fn from(s: &str) -> Self {
        Self::String(s.to_owned())
    }
}

impl From<u32> for MetaValue {
    fn from(v: u32) -> Self {
        Self::U32(v)
    }
}

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    pub name: String,
    /// Elements of each dimension, the fastest first; 1 to 4 of them.
    pub ne: Vec<u64>,
    /// ggml's type number.
    pub ggml_type: u32,
    /// By the arithmetic of the type.
    pub bytes: u64,
}

impl TensorSpec {
    /// `Argument` where name or shape cannot be, `Format` where the type is unknown or rows are not whole blocks.
    pub fn new(name: impl Into<String>, ne: &[u64], ggml_type: u32) -> Result<Self> {
        let name = name.into();
        // ggml's own limit: 64 bytes with the terminating zero.
        if name.is_empty() || name.len() > 63 || !(1..=4).contains(&ne.len()) {
            return Err(err!(
                Argument,
                "tensor {name:?} of shape {ne:?}: 1 to 63 bytes, 1 to 4 dimensions are possible"
            ));
        }
        let row = quant::row_bytes(ggml_type, ne[0])?;
        let bytes = ne[1..].iter().try_fold(row, |b, n| b.checked_mul(*n)).filter(|b| *b <= i64::MAX as u64);
        let bytes = bytes.ok_or_else(|| err!(Argument, "tensor {name} of shape {ne:?} is too large"))?;
        Ok(Self { name, ne: ne.to_vec(), ggml_type, bytes })
    }
}

/// A file in the making. The order of calls is the order in the file.
#[derive(Clone, Debug, Default)]
pub struct GgufWriter {
    metadata: Vec<(String, MetaValue)>,
    tensors: Vec<TensorSpec>,
}

impl GgufWriter {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn put(&mut self, key: impl Into<String>, value: impl Into<MetaValue>) -> &mut Self {
        self.metadata.push((key.into(), value.into()));
        self
    }

    pub fn tensor(&mut self, spec: TensorSpec) -> &mut Self {
        self.tensors.push(spec);
        self
    }

    /// Writes the file and returns its length in bytes.
    ///
    /// `fill(tensor, offset_bytes, chunk)` must fill all of `chunk`, which begins `offset_bytes` into that tensor and
    /// is whole blocks of its type; it comes zeroed the first time, with older bytes after. Chunks come in order.
    pub fn write_to<W: Write>(
        &self,
        out: &mut W,
        mut fill: impl FnMut(usize, u64, &mut [u8]) -> Result<()>,
    ) -> Result<u64> {
        let mut names = HashSet::new();
        let keys = self.metadata.iter().map(|(k, _)| k);
        if let Some(twice) = keys.chain(self.tensors.iter().map(|t| &t.name)).find(|n| !names.insert(n.as_str())) {
            return Err(err!(Argument, "{twice} is there twice"));
        }
        let io = |e: std::io::Error| err!(Io, "writing: {e}");
        let header = self.header();
        out.write_all(&header).map_err(io)?;
        let mut written = header.len() as u64;
        let mut buffer = Vec::new();
        for (i, t) in self.tensors.iter().enumerate() {
            let block = quant::type_info(t.ggml_type).map_or(1, |t| t.block_bytes as usize);
            buffer.resize((CHUNK_BYTES / block).max(1) * block, 0);
            let mut at = 0;
            while at < t.bytes {
                let n = (t.bytes - at).min(buffer.len() as u64);
                let chunk = &mut buffer[..n as usize];
                fill(i, at, chunk)?;
                out.write_all(chunk).map_err(io)?;
                at += n;
            }
            let padding = t.bytes.next_multiple_of(ALIGNMENT) - t.bytes;
            out.write_all(&[0; ALIGNMENT as usize][..padding as usize]).map_err(io)?;
            written += t.bytes + padding;
        }
        Ok(written)
    }

    /// Everything before the data, padded.
    fn header(&self) -> Vec<u8> {
        let mut h = b"GGUF".to_vec();
        h.extend(3_u32.to_le_bytes());
        h.extend((self.tensors.len() as u64).to_le_bytes());
        h.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            string(&mut h, key);
            put_value(&mut h, value);
        }
        let mut offset = 0_u64;
        for t in &self.tensors {
            string(&mut h, &t.name);
            h.extend((t.ne.len() as u32).to_le_bytes());
            t.ne.iter().for_each(|n| h.extend(n.to_le_bytes()));
            h.extend(t.ggml_type.to_le_bytes());
            h.extend(offset.to_le_bytes());
            offset += t.bytes.next_multiple_of(ALIGNMENT);
        }
        h.resize(h.len().next_multiple_of(ALIGNMENT as usize), 0);
        h
    }
}

fn string(h: &mut Vec<u8>, s: &str) {
    h.extend((s.len() as u64).to_le_bytes());
    h.extend(s.as_bytes());
}

/// The type's number in GGUF, then the value; an array is 9, its items' type, the count, the items.
fn put_value(h: &mut Vec<u8>, value: &MetaValue) {
    let mut open = |kind: u32, count: Option<usize>| {
        if let Some(count) = count {
            h.extend(9_u32.to_le_bytes());
            h.extend(kind.to_le_bytes());
            h.extend((count as u64).to_le_bytes());
        } else {
            h.extend(kind.to_le_bytes());
        }
    };
    match value {
        MetaValue::U16(v) => {
            open(2, None);
            h.extend(v.to_le_bytes());
        }
        MetaValue::U32(v) => {
            open(4, None);
            h.extend(v.to_le_bytes());
        }
        MetaValue::I32(v) => {
            open(5, None);
            h.extend(v.to_le_bytes());
        }
        MetaValue::F32(v) => {
            open(6, None);
            h.extend(v.to_le_bytes());
        }
        MetaValue::Bool(v) => {
            open(7, None);
            h.push(u8::from(*v));
        }
        MetaValue::String(v) => {
            open(8, None);
            string(h, v);
        }
        MetaValue::Strings(v) => {
            open(8, Some(v.len()));
            v.iter().for_each(|s| string(h, s));
        }
        MetaValue::F32s(v) => {
            open(6, Some(v.len()));
            v.iter().for_each(|v| h.extend(v.to_le_bytes()));
        }
        MetaValue::I32s(v) => {
            open(5, Some(v.len()));
            v.iter().for_each(|v| h.extend(v.to_le_bytes()));
        }
        MetaValue::U32s(v) => {
            open(4, Some(v.len()));
            v.iter().for_each(|v| h.extend(v.to_le_bytes()));
        }
    }
}
