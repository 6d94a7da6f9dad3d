//! A bounded parser of GGUF headers, versions 2 and 3, little endian.
//!
//! In goes a byte slice that holds at least the header (the mapped file), and the file's true length; out come the
//! metadata and the tensor list with absolute offsets. The order is that of the file: magic, counts, metadata, tensor
//! infos; then `layout` puts the tensors in order of offset and checks each against its neighbour and the file's end.
//!
//! Nothing in a file is trusted. A count is used only after the bytes left could hold that many items; strings are
//! copied only after their bytes were found; long arrays are walked over, never copied.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use super::cursor::Cursor;
use super::quant;
use crate::error::{Error, Result, err};

/// Metadata strings up to this many bytes are kept; of longer ones (chat templates) only the length.
pub const MAX_KEPT_STRING: usize = 64 * 1024;
/// Arrays of integers up to this many items are kept: hyperparameters that differ by layer.
pub const MAX_KEPT_ARRAY: u64 = 4096;
/// Arrays in arrays deeper than this are refused.
const MAX_DEPTH: u32 = 4;
/// ggml itself allows 63 bytes.
const MAX_NAME: usize = 1024;

/// One metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    /// Bytes that are not UTF-8 are replaced.
    String(String),
    /// A string longer than [`MAX_KEPT_STRING`]: its length in bytes.
    LongString(u64),
    /// The element type's number in GGUF and the count. `integers` is there for short arrays of integers.
    Array {
        element_type: u32,
        count: u64,
        integers: Option<Vec<i64>>,
    },
}

impl Value {
    /// An integer that is not negative, whatever width it was stored in.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Unsigned(v) => Some(*v),
            Self::Signed(v) => u64::try_from(*v).ok(),
            _ => None,
        }
    }

    pub fn as_str(&self) -> Option<&str> {
        if let Self::String(s) = self { Some(s) } else { None }
    }
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    pub name: String,
    /// ggml's type number, see [`quant::type_info`].
    pub ggml_type: u32,
    pub n_dims: u32,
    /// Elements of each dimension, the fastest first; 1 beyond `n_dims`.
    pub ne: [u64; 4],
    /// Index into the model's files.
    pub file: usize,
    /// From the start of the file.
    pub offset_bytes: u64,
    /// By the arithmetic of the type; `None` where the type is unknown.
    pub bytes: Option<u64>,
    /// To the next tensor's offset, or to the end of the file.
    pub room_bytes: u64,
    /// What the file aligns tensors to; a power of two.
    pub alignment: u64,
    /// No tensor of this file follows.
    pub is_last: bool,
}

impl TensorInfo {
    /// Where the bytes end: by the type, or, where it is unknown, by the next tensor.
    pub fn end_bytes(&self) -> u64 {
        self.offset_bytes.saturating_add(self.bytes.unwrap_or(self.room_bytes))
    }

    /// The error for a tensor whose room in the file is not what its type needs: names both strides.
    pub(crate) fn layout_error(&self) -> Error {
        let t = quant::type_info(self.ggml_type);
        let typed =
            t.map_or_else(String::new, |t| format!(", {}: {} elements in {} bytes", t.name, t.block, t.block_bytes));
        let other = self
            .other_layout()
            .map_or_else(String::new, |(block, bytes)| format!(" (as {block} elements in {bytes} bytes would take)"));
        let n = self.ne[2].max(1);
        let unit = if self.ne[2] > 1 { " an expert" } else { "" };
        // With another block layout the stride on disk is known exactly; otherwise up to the padding.
        let stored = self.other_layout().and_then(|l| self.bytes_as(l)).unwrap_or(self.room_bytes) / n;
        err!(
            Format,
            "tensor {} at {}: {} bytes{unit} by its type{typed}, {stored} bytes{unit} by the offsets in the file{other}: \
             offsets in the file disagree with the type ({} bytes wanted, {} found)",
            self.name,
            self.offset_bytes,
            self.bytes.unwrap_or(0) / n,
            self.bytes.unwrap_or(0),
            self.room_bytes,
        )
    }

    /// The type's other known block layout that fits the room exactly, if one does.
    fn other_layout(&self) -> Option<(u32, u32)> {
        quant::other_layouts(self.ggml_type).iter().copied().find(|l| self.bytes_as(*l).is_some_and(|b| self.fits(b)))
    }

    fn bytes_as(&self, (block, block_bytes): (u32, u32)) -> Option<u64> {
        self.ne[1..].iter().try_fold(quant::blocks_bytes(self.ne[0], block, block_bytes)?, |b, n| b.checked_mul(*n))
    }

    /// Whether `bytes` and nothing but padding fill the room.
    pub(crate) fn fits(&self, bytes: u64) -> bool {
        let padded = bytes.checked_next_multiple_of(self.alignment);
        // Some writers do not pad the last tensor.
        padded == Some(self.room_bytes) || self.is_last && bytes == self.room_bytes
    }
}

/// The header of one file.
#[derive(Clone, Debug)]
pub struct GgufHeader {
    /// 2 or 3.
    pub version: u32,
    pub metadata: BTreeMap<String, Value>,
    /// In the file's order.
    pub tensors: Vec<TensorInfo>,
    /// What tensors are aligned to, in bytes.
    pub alignment: u64,
    /// Where tensor data begins, from the start of the file.
    pub data_offset_bytes: u64,
    /// The name it was parsed under, for errors.
    pub name: PathBuf,
}

impl GgufHeader {
    /// Parses the header at the start of `bytes`. `file_len` is the length of the whole file in bytes, against which
    /// the tensors are checked; `name` is for errors. `Format` names what is wrong and where.
    pub fn parse(bytes: &[u8], file_len: u64, name: &Path) -> Result<Self> {
        let inner = Self::parse_inner(bytes, file_len, name);
        inner.map_err(|e| Error::new(e.kind, format!("{}: {}", name.display(), e.detail)))
    }

    fn parse_inner(bytes: &[u8], file_len: u64, name: &Path) -> Result<Self> {
        let mut c = Cursor::new(bytes);
        if c.take(4, "the magic")? != b"GGUF" {
            return Err(err!(Format, "not a GGUF file: it begins with {:02x?}", &bytes[..4]));
        }
        let version = c.u32("the version")?;
        if version & 0xFFFF == 0 && version != 0 {
            return Err(err!(Format, "a big-endian GGUF (version field {version:#010x}): only little endian is read"));
        }
        if !(2..=3).contains(&version) {
            return Err(err!(Format, "GGUF version {version}: 2 and 3 are read"));
        }
        let n_tensors = c.u64("the tensor count")?;
        let n_metadata = c.u64("the metadata count")?;
        // The least that an entry takes: a length, a type, one byte of value; a length, dims, a type, an offset.
        c.plausible(n_metadata, 13, "metadata entries")?;
        let mut metadata = BTreeMap::new();
        for i in 0..n_metadata {
            let key = c.string("a metadata key", MAX_KEPT_STRING)?;
            let kind = c.u32("a metadata type")?;
            let value = read_value(&mut c, kind).map_err(|e| Error::new(e.kind, format!("key {key}: {}", e.detail)))?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(err!(Format, "key {key} is there twice (entry {i})"));
            }
        }
        let alignment = match metadata.get("general.alignment") {
            None => 32,
            Some(v) => v.as_u64().filter(|a| a.is_power_of_two() && *a <= 1 << 30).ok_or_else(|| {
                err!(Format, "general.alignment is {v:?}: a power of two is wanted, 1 to {}", 1 << 30)
            })?,
        };
        c.plausible(n_tensors, 24, "tensors")?;
        let mut tensors = Vec::new();
        for _ in 0..n_tensors {
            tensors.push(read_tensor(&mut c, alignment)?);
        }
        let data_offset_bytes = (c.position() as u64).next_multiple_of(alignment);
        layout(&mut tensors, data_offset_bytes, file_len)?;
        Ok(Self { version, metadata, tensors, alignment, data_offset_bytes, name: name.to_owned() })
    }
}

fn read_value(c: &mut Cursor, kind: u32) -> Result<Value> {
    Ok(match kind {
        0 | 2 | 4 | 10 => Value::Unsigned(c.uint(scalar_bytes(kind), "a value")?),
        1 => Value::Signed((c.uint(1, "a value")? as u8 as i8).into()),
        3 => Value::Signed((c.uint(2, "a value")? as u16 as i16).into()),
        5 => Value::Signed((c.u32("a value")? as i32).into()),
        11 => Value::Signed(c.u64("a value")? as i64),
        6 => Value::Float(f32::from_bits(c.u32("a value")?).into()),
        12 => Value::Float(f64::from_bits(c.u64("a value")?)),
        7 => Value::Bool(c.uint(1, "a value")? != 0),
        8 => {
            let s = c.string_bytes("a string value")?;
            if s.len() <= MAX_KEPT_STRING {
                Value::String(String::from_utf8_lossy(s).into_owned())
            } else {
                Value::LongString(s.len() as u64)
            }
        }
        9 => read_array(c, MAX_DEPTH)?,
        _ => return Err(err!(Format, "value type {kind} at {} is not one of GGUF's", c.position())),
    })
}

fn read_array(c: &mut Cursor, depth: u32) -> Result<Value> {
    let element_type = c.u32("an array's type")?;
    let count = c.u64("an array's count")?;
    let mut integers = None;
    match element_type {
        0..=5 | 10 | 11 if count <= MAX_KEPT_ARRAY => {
            c.plausible(count, scalar_bytes(element_type), "array items")?;
            let mut kept = Vec::with_capacity(count as usize);
            for _ in 0..count {
                kept.push(match read_value(c, element_type)? {
                    Value::Unsigned(v) => i64::try_from(v).unwrap_or(i64::MAX),
                    Value::Signed(v) => v,
                    _ => 0,
                });
            }
            integers = Some(kept);
        }
        0..=7 | 10..=12 => {
            let bytes = count.checked_mul(scalar_bytes(element_type));
            let bytes = bytes.ok_or_else(|| err!(Format, "an array of {count} items cannot be"))?;
            c.skip(bytes, "an array")?;
        }
        8 => {
            c.plausible(count, 8, "array items")?;
            for _ in 0..count {
                c.string_bytes("an array's string")?;
            }
        }
        9 if depth == 0 => return Err(err!(Format, "arrays nested more than {MAX_DEPTH} deep")),
        9 => {
            c.plausible(count, 12, "array items")?;
            for _ in 0..count {
                read_array(c, depth - 1)?;
            }
        }
        _ => return Err(err!(Format, "array type {element_type} is not one of GGUF's")),
    }
    Ok(Value::Array { element_type, count, integers })
}

/// Bytes of a scalar of that GGUF value type.
fn scalar_bytes(kind: u32) -> u64 {
    match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        _ => 8,
    }
}

/// Reads one tensor info. Its offset stays relative to the data section until `layout`.
fn read_tensor(c: &mut Cursor, alignment: u64) -> Result<TensorInfo> {
    let name = c.string("a tensor's name", MAX_NAME)?;
    let n_dims = c.u32("a tensor's dimensions")?;
    if n_dims > 4 {
        return Err(err!(Format, "tensor {name} has {n_dims} dimensions, 4 is the most"));
    }
    let mut ne = [1; 4];
    for n in &mut ne[..n_dims as usize] {
        *n = c.u64("a tensor's shape")?;
    }
    let ggml_type = c.u32("a tensor's type")?;
    let offset_bytes = c.u64("a tensor's offset")?;
    let elements = ne.iter().try_fold(1_u64, |p, n| p.checked_mul(*n)).filter(|n| *n <= i64::MAX as u64);
    if elements.is_none() {
        return Err(err!(Format, "tensor {name} of shape {ne:?} has more elements than can be"));
    }
    let bytes = match quant::type_info(ggml_type) {
        None => None,
        Some(_) => {
            let row = quant::row_bytes(ggml_type, ne[0]).map_err(|e| err!(Format, "tensor {name}: {}", e.detail))?;
            let bytes = ne[1..].iter().try_fold(row, |b, n| b.checked_mul(*n));
            Some(bytes.ok_or_else(|| err!(Format, "tensor {name} of shape {ne:?} has more bytes than can be"))?)
        }
    };
    if offset_bytes % alignment != 0 {
        return Err(err!(Format, "tensor {name} at data offset {offset_bytes}: not a multiple of {alignment}"));
    }
    let (file, room_bytes, is_last) = (0, 0, false);
    Ok(TensorInfo { name, ggml_type, n_dims, ne, file, offset_bytes, bytes, room_bytes, alignment, is_last })
}

/// Makes offsets absolute, finds each tensor's room, and checks that its bytes are inside room and file.
fn layout(tensors: &mut [TensorInfo], data_offset: u64, file_len: u64) -> Result<()> {
    let mut seen = HashSet::with_capacity(tensors.len());
    for t in tensors.iter_mut() {
        if !seen.insert(t.name.as_str()) {
            return Err(err!(Format, "tensor {} is there twice", t.name));
        }
        let at = data_offset.checked_add(t.offset_bytes);
        t.offset_bytes = at.ok_or_else(|| err!(Format, "tensor {} at {} cannot be", t.name, t.offset_bytes))?;
    }
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|&i| (tensors[i].offset_bytes, tensors[i].bytes));
    // Every room first: only then is a file whose block layout is another told from a file that was cut.
    for (rank, &i) in order.iter().enumerate() {
        let next = order.get(rank + 1).map(|&n| tensors[n].offset_bytes);
        let t = &mut tensors[i];
        t.is_last = next.is_none();
        t.room_bytes = next.unwrap_or(file_len).saturating_sub(t.offset_bytes);
    }
    let overlap = order.iter().map(|&i| &tensors[i]).find(|t| {
        t.bytes.is_some_and(|b| b > t.room_bytes) && (!t.is_last || t.room_bytes > 0 && t.other_layout().is_some())
    });
    if let Some(t) = overlap {
        return Err(t.layout_error());
    }
    for t in order.iter().map(|&i| &tensors[i]) {
        let end = t.offset_bytes.checked_add(t.bytes.unwrap_or(0));
        if end.is_none_or(|e| e > file_len) {
            let end = end.map_or("beyond 2^64".to_owned(), |e| e.to_string());
            return Err(err!(
                Format,
                "tensor {} begins at {} and ends at {end}, but the file has {file_len} bytes: it was cut",
                t.name,
                t.offset_bytes
            ));
        }
    }
    Ok(())
}
