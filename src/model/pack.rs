//! Packed experts (`.hotset`): beside a GGUF file, a file in which each expert's slices lie together, from a 16 KiB border on,
//! so that a miss is one aligned read. Made by `pack_write`; here is what a reader needs: the header, the layout, and whether
//! the pack is of this model.
//!
//! ```text
//! 0        magic "HOTSETPK", u32 version 1, u32 header_crc, u64 header_bytes, u64 file_bytes, u64 table_offset,
//!          u32 complete (0, 1), u32 table_crc, u32 n_files, u32 n_layers, u32 source_header_crc, u32 source_sample_crc
//! 64       n_files x u64: bytes of each file of the source
//!          n_layers x (u32 block, u32 n_experts, u32 n_tensors, u32 0, u64 offset, u64 stride,
//!                      n_tensors x (u64 slice_bytes, u64 offset in the stride, u32 ggml_type, u8 projection, u8 part, u16 0))
//! table    for each layer and expert a u64: CRC-32 of its stride, and above it a 1 once it is written
//! data     at header_bytes: layer after layer, expert after expert, each a stride of whole 16 KiB pages, zeros behind its slices
//! ```
//!
//! Little endian. `header_crc` is over everything before the table but itself; `table_crc` over the table. A pack without
//! `complete` is refused: it was cut off. Nothing in it is trusted before it was checked against its own checksums, the file's
//! length and the model; data itself is checked by `pack_write::verify`, not at each read.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::crc::{Crc32, crc32};
use super::cursor::Cursor;
use super::experts::{MoeLayer, Part, Projection};
use super::{Model, quant};
use crate::error::{Error, Result, err};

/// What strides, and where experts begin, are multiples of: a page of memory on Apple silicon.
pub const PACK_ALIGN: u64 = 16 << 10;
/// What places of slices within a stride are multiples of: what GGUF aligns tensors to.
const SLICE_ALIGN: u64 = 32;
const MAGIC: &[u8; 8] = b"HOTSETPK";
const VERSION: u32 = 1;
const FIXED_BYTES: usize = 64;
/// A header beyond this is none (that of 48 layers of 512 experts has 208 KiB).
const MAX_HEADER_BYTES: u64 = 256 << 20;
/// Of each expert tensor so much, of one expert, is in the sample that tells models apart.
const SAMPLE_BYTES: u64 = 4096;
/// In an entry of the table: the expert is written, and its checksum is below.
pub(crate) const WRITTEN: u64 = 1 << 32;

/// One slice in a packed expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedSlice {
    pub slice_bytes: u64,
    /// From where the expert begins.
    pub offset_bytes: u64,
    pub ggml_type: u32,
    pub projection: u8,
    pub part: u8,
}

/// One layer in the pack. Expert `e` begins at `offset_bytes + e * stride_bytes`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedLayer {
    pub block: u32,
    pub n_experts: u32,
    /// From the start of the file; a multiple of [`PACK_ALIGN`], as the stride.
    pub offset_bytes: u64,
    pub stride_bytes: u64,
    /// In the order of the model's tensors.
    pub slices: Vec<PackedSlice>,
}

/// What tells the model that a pack was made from: lengths, headers, and a sample of every expert tensor. Times do not count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    pub file_bytes: Vec<u64>,
    /// CRC-32 over the headers of all files.
    pub header_crc: u32,
    /// CRC-32 over the first 4 KiB of one expert of each expert tensor.
    pub sample_crc: u32,
}

/// A pack's header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackHeader {
    pub source: Source,
    pub layers: Vec<PackedLayer>,
    pub complete: bool,
    /// Where the table of checksums begins.
    pub table_offset: u64,
    /// The CRC-32 of that table; 0 until the pack is complete.
    pub table_crc: u32,
    /// Where data begins.
    pub header_bytes: u64,
    /// The length of the whole pack.
    pub file_bytes: u64,
}

/// A pack that was opened and belongs to the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pack {
    pub path: PathBuf,
    pub file_bytes: u64,
    /// By layer of the model's table.
    pub layers: Vec<PackedLayer>,
}

impl Pack {
    /// Opens a pack of this model. `Io` where it cannot be read, `Format` where it is not sound or not complete, `Model` where it
    /// was made from another model.
    pub fn open(path: &Path, model: &Model) -> Result<Pack> {
        let (_, header, _) = open_checked(path, model)?;
        Ok(Pack { path: path.to_owned(), file_bytes: header.file_bytes, layers: header.layers })
    }
}

/// As `Pack::open`, with the file and the table of checksums.
pub(crate) fn open_checked(path: &Path, model: &Model) -> Result<(File, PackHeader, Vec<u64>)> {
    let file = File::open(path).map_err(|e| err!(Io, "{}: cannot be opened: {e}", path.display()))?;
    let inner = || {
        let (header, bytes, len) = read_header(&file)?;
        if !header.complete {
            return Err(err!(Format, "the pack was not finished: pack the model again to go on with it"));
        }
        if len != header.file_bytes {
            return Err(err!(Format, "the pack has {len} bytes, its header says {}", header.file_bytes));
        }
        header.check_source(model)?;
        let table = header.table(&bytes)?;
        Ok((header, table))
    };
    let (header, table) = inner().map_err(|e| named(path, e))?;
    Ok((file, header, table))
}

/// Header, its bytes and the length of a file that may be a pack, complete or not.
pub(crate) fn read_header(file: &File) -> Result<(PackHeader, Vec<u8>, u64)> {
    let io = |e: std::io::Error| err!(Io, "the header cannot be read: {e}");
    let len = file.metadata().map_err(io)?.len();
    let mut fixed = [0; FIXED_BYTES];
    let n = usize::try_from(len).unwrap_or(FIXED_BYTES).min(FIXED_BYTES);
    file.read_exact_at(&mut fixed[..n], 0).map_err(io)?;
    let mut bytes = vec![0; header_bytes(&fixed[..n], len)? as usize];
    file.read_exact_at(&mut bytes, 0).map_err(io)?;
    Ok((PackHeader::parse(&bytes, len)?, bytes, len))
}

/// Magic and version are checked; the header's length is, against the file's.
fn header_bytes(fixed: &[u8], len: u64) -> Result<u64> {
    let mut c = Cursor::new(fixed);
    let magic = c.take(8, "the magic")?;
    if magic != MAGIC {
        return Err(err!(Format, "begins with {magic:02x?}, a pack begins with {MAGIC:02x?} (HOTSETPK)"));
    }
    let version = c.u32("the version")?;
    if version != VERSION {
        return Err(err!(Format, "pack version {version}, {VERSION} is known"));
    }
    c.u32("the checksum")?;
    let n = c.u64("the header's length")?;
    if n < FIXED_BYTES as u64 || n % PACK_ALIGN != 0 || n > len || n > MAX_HEADER_BYTES {
        return Err(err!(Format, "a header of {n} bytes in a file of {len}: it must be multiples of {PACK_ALIGN}"));
    }
    Ok(n)
}

impl PackHeader {
    /// The header that a pack of this model has before anything is written.
    pub fn of(model: &Model) -> Result<PackHeader> {
        let too_large = || err!(Model, "the experts are too large for a pack");
        let mut layers = Vec::with_capacity(model.experts.layers.len());
        let mut end = 0u64; // from where data begins
        for l in &model.experts.layers {
            let layer = packed(l, end).ok_or_else(too_large)?;
            end = layer
                .stride_bytes
                .checked_mul(l.n_experts.into())
                .and_then(|n| n.checked_add(end))
                .ok_or_else(too_large)?;
            layers.push(layer);
        }
        if layers.is_empty() {
            return Err(err!(Model, "no layer has expert tensors (blk.N.ffn_*_exps): there is nothing to pack"));
        }
        let source = Source::of(model)?;
        let tensors: usize = layers.iter().map(|l| 32 + 24 * l.slices.len()).sum();
        let table_offset = (FIXED_BYTES + 8 * source.file_bytes.len() + tensors).next_multiple_of(8) as u64;
        let header_bytes = (table_offset + 8 * n_experts(&layers)).next_multiple_of(PACK_ALIGN);
        layers.iter_mut().for_each(|l| l.offset_bytes += header_bytes);
        let file_bytes = end.checked_add(header_bytes).filter(|n| *n <= i64::MAX as u64).ok_or_else(too_large)?;
        Ok(PackHeader { source, layers, complete: false, table_offset, table_crc: 0, header_bytes, file_bytes })
    }

    /// Everything before the table.
    pub fn encode(&self) -> Vec<u8> {
        let mut h = MAGIC.to_vec();
        h.extend(VERSION.to_le_bytes());
        h.extend([0; 4]);
        [self.header_bytes, self.file_bytes, self.table_offset].iter().for_each(|n| h.extend(n.to_le_bytes()));
        let s = &self.source;
        let counts = [s.file_bytes.len() as u32, self.layers.len() as u32, s.header_crc, s.sample_crc];
        [self.complete.into(), self.table_crc].iter().chain(&counts).for_each(|n: &u32| h.extend(n.to_le_bytes()));
        s.file_bytes.iter().for_each(|n| h.extend(n.to_le_bytes()));
        for l in &self.layers {
            [l.block, l.n_experts, l.slices.len() as u32, 0].iter().for_each(|n| h.extend(n.to_le_bytes()));
            [l.offset_bytes, l.stride_bytes].iter().for_each(|n| h.extend(n.to_le_bytes()));
            for t in &l.slices {
                [t.slice_bytes, t.offset_bytes].iter().for_each(|n| h.extend(n.to_le_bytes()));
                h.extend(t.ggml_type.to_le_bytes());
                h.extend([t.projection, t.part, 0, 0]);
            }
        }
        h.resize(self.table_offset as usize, 0);
        let crc = header_crc(&h);
        h[12..16].copy_from_slice(&crc.to_le_bytes());
        h
    }

    /// Parses the header at the start of `bytes`, of a pack whose length is `file_len` bytes or will be more (where it is not
    /// complete). What comes out is sound in itself: strides hold their slices, layers lie in the file and apart.
    pub fn parse(bytes: &[u8], file_len: u64) -> Result<PackHeader> {
        let header_bytes = header_bytes(&bytes[..bytes.len().min(FIXED_BYTES)], file_len.min(bytes.len() as u64))?;
        let mut c = Cursor::new(&bytes[..header_bytes as usize]);
        c.skip(12, "magic and version")?;
        let stored_crc = c.u32("the checksum")?;
        c.skip(8, "the header's length")?;
        let (file_bytes, table_offset) = (c.u64("the file's length")?, c.u64("the table's place")?);
        if table_offset < FIXED_BYTES as u64 || table_offset > header_bytes || table_offset % 8 != 0 {
            return Err(err!(Format, "the table at {table_offset} is not in the header of {header_bytes} bytes"));
        }
        let crc = header_crc(&bytes[..table_offset as usize]);
        if crc != stored_crc {
            return Err(err!(Format, "the header's checksum is {crc:#010x}, {stored_crc:#010x} is stored in it"));
        }
        let complete = match c.u32("the state")? {
            state @ (0 | 1) => state == 1,
            state => return Err(err!(Format, "the pack's state is {state}, 0 and 1 are known")),
        };
        let table_crc = c.u32("the table's checksum")?;
        let (n_files, n_layers) = (c.u32("the number of files")?, c.u32("the number of layers")?);
        let (source_header_crc, sample_crc) = (c.u32("the source's header")?, c.u32("the source's sample")?);
        c.plausible(n_files.into(), 8, "files")?;
        let files = (0..n_files).map(|_| c.u64("a file's length")).collect::<Result<_>>()?;
        c.plausible(n_layers.into(), 32, "layers")?;
        let mut layers = Vec::with_capacity(n_layers as usize);
        let mut end = header_bytes;
        for _ in 0..n_layers {
            let layer = parse_layer(&mut c, end)?;
            // no overflow: `parse_layer` has checked it
            end = layer.offset_bytes + layer.stride_bytes * u64::from(layer.n_experts);
            layers.push(layer);
        }
        if c.position() as u64 > table_offset || table_offset + 8 * n_experts(&layers) > header_bytes {
            let (at, n) = (c.position(), n_experts(&layers));
            return Err(err!(
                Format,
                "the table of {n} experts at {table_offset} does not fit between {at} and {header_bytes}"
            ));
        }
        if end != file_bytes || complete && file_len != file_bytes {
            return Err(err!(
                Format,
                "the layers end at {end}, the header says {file_bytes} bytes, the file has {file_len}"
            ));
        }
        let source = Source { file_bytes: files, header_crc: source_header_crc, sample_crc };
        Ok(PackHeader { source, layers, complete, table_offset, table_crc, header_bytes, file_bytes })
    }

    /// The table of checksums, which `bytes` (the header) must hold whole; checked against its own checksum.
    pub fn table(&self, bytes: &[u8]) -> Result<Vec<u64>> {
        let (start, n) = (self.table_offset as usize, n_experts(&self.layers) as usize);
        let Some(table) = bytes.get(start..start + 8 * n) else {
            return Err(err!(
                Format,
                "{} bytes of header do not hold the table of {n} experts at {start}",
                bytes.len()
            ));
        };
        let crc = crc32(table);
        if crc != self.table_crc {
            let stored = self.table_crc;
            return Err(err!(Format, "the checksums' checksum is {crc:#010x}, {stored:#010x} is stored in the header"));
        }
        let entries = entries(table);
        match entries.iter().position(|e| e & !0xFFFF_FFFF != WRITTEN) {
            Some(i) => Err(err!(Format, "expert {i} of the table is {:#x}: it was never written", entries[i])),
            None => Ok(entries),
        }
    }

    /// `Model`, with what differs, where the pack was made from another model.
    pub fn check_source(&self, model: &Model) -> Result<()> {
        let other = |what: String| err!(Model, "the pack was made from another model: {what}");
        let wanted = PackHeader::of(model)?;
        let (a, b) = (&self.source, &wanted.source);
        if a.file_bytes != b.file_bytes {
            return Err(other(format!("its files had {:?} bytes, these have {:?}", a.file_bytes, b.file_bytes)));
        }
        if a.header_crc != b.header_crc {
            return Err(other(format!("its headers' checksum is {:#010x}, here {:#010x}", a.header_crc, b.header_crc)));
        }
        if a.sample_crc != b.sample_crc {
            return Err(other(format!("its experts' sample has {:#010x}, here {:#010x}", a.sample_crc, b.sample_crc)));
        }
        if self.layers.len() != wanted.layers.len() {
            return Err(other(format!("it has {} layers, here are {}", self.layers.len(), wanted.layers.len())));
        }
        for (p, w) in self.layers.iter().zip(&wanted.layers) {
            let same = |a: &PackedSlice, b: &PackedSlice| {
                (a.slice_bytes, a.ggml_type, a.projection, a.part) == (b.slice_bytes, b.ggml_type, b.projection, b.part)
            };
            let slices = p.slices.len() == w.slices.len() && p.slices.iter().zip(&w.slices).all(|(a, b)| same(a, b));
            if (p.block, p.n_experts) != (w.block, w.n_experts) || !slices {
                return Err(other(format!(
                    "block {} of {} experts: {}; here block {} of {} experts: {}",
                    p.block,
                    p.n_experts,
                    sizes(p),
                    w.block,
                    w.n_experts,
                    sizes(w)
                )));
            }
        }
        Ok(())
    }
}

fn sizes(l: &PackedLayer) -> String {
    let one = |t: &PackedSlice| format!("{} bytes of {}", t.slice_bytes, quant::type_name(t.ggml_type));
    l.slices.iter().map(one).collect::<Vec<_>>().join(", ")
}

impl Source {
    /// Of an open model. Reads its headers and a little of every expert tensor.
    pub fn of(model: &Model) -> Result<Source> {
        let mut headers = Crc32::new();
        for (i, file) in model.files.iter().enumerate() {
            let first = model.tensors.iter().filter(|t| t.file == i).map(|t| t.offset_bytes).min();
            let end = first.unwrap_or(file.len_bytes).min(file.len_bytes);
            headers = headers.update(&file.map[..end as usize]);
        }
        Ok(Source {
            file_bytes: model.files.iter().map(|f| f.len_bytes).collect(),
            header_crc: headers.value(),
            sample_crc: sample_crc(model),
        })
    }
}

/// One expert of each tensor, another in each, so that all of the file's reaches are touched.
fn sample_crc(model: &Model) -> u32 {
    let tensors = model.experts.layers.iter().flat_map(|l| l.tensors.iter().map(move |t| (l, t)));
    let sample = tensors.enumerate().fold(Crc32::new(), |crc, (i, (l, t))| {
        let expert = (i as u64 * 7919 + 13) % u64::from(l.n_experts);
        let at = (t.offset_bytes + expert * t.slice_bytes) as usize;
        crc.update(&model.files[t.file].map[at..at + t.slice_bytes.min(SAMPLE_BYTES) as usize])
    });
    sample.value()
}

/// The table's entries, as they lie in a header.
pub(crate) fn entries(table: &[u8]) -> Vec<u64> {
    table.chunks_exact(8).map(|e| e.iter().rev().fold(0, |v, b| v << 8 | u64::from(*b))).collect()
}

/// An error of this file.
pub(crate) fn named(path: &Path, e: Error) -> Error {
    Error::new(e.kind, format!("{}: {}", path.display(), e.detail))
}

pub(crate) fn n_experts(layers: &[PackedLayer]) -> u64 {
    layers.iter().map(|l| u64::from(l.n_experts)).sum()
}

fn header_crc(bytes: &[u8]) -> u32 {
    Crc32::new().update(&bytes[..12]).update(&bytes[16..]).value()
}

/// A layer's place in a new pack; None where sizes overflow.
fn packed(l: &MoeLayer, offset_bytes: u64) -> Option<PackedLayer> {
    let mut end = 0u64;
    let mut slices = Vec::with_capacity(l.tensors.len());
    for t in &l.tensors {
        let offset_bytes = end.checked_next_multiple_of(SLICE_ALIGN)?;
        end = offset_bytes.checked_add(t.slice_bytes)?;
        let projection = match t.projection {
            Projection::Gate => 0,
            Projection::Up => 1,
            Projection::GateUp => 2,
            Projection::Down => 3,
        };
        let part = match t.part {
            Part::Weight => 0,
            Part::Bias => 1,
            Part::Scale => 2,
        };
        slices.push(PackedSlice { slice_bytes: t.slice_bytes, offset_bytes, ggml_type: t.ggml_type, projection, part });
    }
    let stride_bytes = end.checked_next_multiple_of(PACK_ALIGN)?;
    Some(PackedLayer { block: l.block, n_experts: l.n_experts, offset_bytes, stride_bytes, slices })
}

/// One layer of a header, which must begin at or after `least`, where the one before it ends.
fn parse_layer(c: &mut Cursor, least: u64) -> Result<PackedLayer> {
    let (block, n_experts) = (c.u32("a block")?, c.u32("a number of experts")?);
    let (n_tensors, zero) = (c.u32("a number of tensors")?, c.u32("padding")?);
    let (offset_bytes, stride_bytes) = (c.u64("a layer's place")?, c.u64("a stride")?);
    let sound = n_experts > 0 && n_tensors > 0 && zero == 0 && stride_bytes > 0;
    let end = stride_bytes.checked_mul(n_experts.into()).and_then(|n| n.checked_add(offset_bytes));
    let aligned = offset_bytes % PACK_ALIGN == 0 && stride_bytes % PACK_ALIGN == 0;
    if !sound || !aligned || offset_bytes != least || end.is_none_or(|end| end > i64::MAX as u64) {
        return Err(err!(
            Format,
            "block {block}: {n_experts} experts of {n_tensors} tensors in strides of {stride_bytes} bytes at {offset_bytes}, \
             {least} is where they should begin"
        ));
    }
    c.plausible(n_tensors.into(), 24, "tensors")?;
    let mut slices = Vec::with_capacity(n_tensors as usize);
    let mut end = 0;
    for _ in 0..n_tensors {
        let (slice_bytes, offset_bytes) = (c.u64("a slice")?, c.u64("a slice's place")?);
        let ggml_type = c.u32("a type")?;
        let (projection, part) = (c.uint(1, "a projection")? as u8, c.uint(1, "a part")? as u8);
        let zero = c.uint(2, "padding")?;
        let next = offset_bytes.checked_add(slice_bytes).filter(|n| *n <= stride_bytes);
        if slice_bytes == 0 || offset_bytes < end || offset_bytes % SLICE_ALIGN != 0 || zero != 0 || next.is_none() {
            return Err(err!(
                Format,
                "block {block}: a slice of {slice_bytes} bytes at {offset_bytes} in a stride of {stride_bytes}, {end} bytes of which are taken"
            ));
        }
        end = next.unwrap_or(end);
        slices.push(PackedSlice { slice_bytes, offset_bytes, ggml_type, projection, part });
    }
    Ok(PackedLayer { block, n_experts, offset_bytes, stride_bytes, slices })
}
