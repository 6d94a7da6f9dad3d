//! What is on disk: a GGUF file (or its shards), the block arithmetic of ggml's types, and where each expert's bytes lie.
//!
//! `Model::open` maps the file, parses the header (`gguf`: every length is checked against the file before it is used),
//! opens the other shards where there are any (`split`), and then `experts` finds the expert tensors by name and
//! shape. No architecture table: what the file says is what counts. `pack` reads the other form of a model's experts, one
//! aligned piece an expert. With the feature `tools`, `write` and `tiny` make models, `pack_write` makes packs.

mod crc;
mod cursor;
pub mod experts;
pub mod gguf;
mod map;
pub mod pack;
#[cfg(feature = "tools")]
pub mod pack_write;
pub mod quant;
mod split;
#[cfg(feature = "tools")]
pub mod tiny;
#[cfg(feature = "tools")]
pub mod write;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{File, Metadata};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use memmap2::Mmap;

pub use experts::{ExpertTable, ExpertTensor, MoeLayer, Part, Projection};
pub use gguf::{GgufHeader, TensorInfo, Value};
pub use pack::{Pack, PackedLayer};
pub use split::shard_path;

use crate::error::{Error, Result, err};

/// One file of a model, mapped.
#[derive(Clone, Debug)]
pub struct ModelFile {
    pub path: PathBuf,
    /// Length at open.
    pub len_bytes: u64,
    /// The whole file; nothing was read ahead.
    pub map: Arc<Mmap>,
    /// Time of the last change at open, nanoseconds since 1970; 0 where the file system has none.
    pub mtime_ns: i128,
}

impl ModelFile {
    /// Opens and maps a file, without reading it.
    fn open(path: &Path) -> Result<Self> {
        let io = |what: &str, e: std::io::Error| err!(Io, "{}: {what}: {e}", path.display());
        let file = File::open(path).map_err(|e| io("cannot be opened", e))?;
        let meta = file.metadata().map_err(|e| io("cannot be examined", e))?;
        if !meta.is_file() {
            return Err(err!(Io, "{}: not a regular file", path.display()));
        }
        let map = Arc::new(map::map_file(&file).map_err(|e| io("cannot be mapped", e))?);
        Ok(Self { path: path.to_owned(), len_bytes: meta.len(), map, mtime_ns: mtime_ns(&meta) })
    }

    /// Whether the file at the path still has the length and time of change that it had at open; `Changed` if not.
    pub fn check_unchanged(&self) -> Result<()> {
        let path = self.path.display();
        let meta = std::fs::metadata(&self.path).map_err(|e| err!(Changed, "{path}: was there at open, now: {e}"))?;
        let (len, mtime) = (meta.len(), mtime_ns(&meta));
        if len != self.len_bytes {
            return Err(err!(Changed, "{path}: had {} bytes at open, now {len}", self.len_bytes));
        }
        if mtime != self.mtime_ns {
            return Err(err!(Changed, "{path}: changed at {} ns before open, at {mtime} ns since", self.mtime_ns));
        }
        Ok(())
    }
}

fn mtime_ns(meta: &Metadata) -> i128 {
    meta.modified().map_or(0, |t| match t.duration_since(UNIX_EPOCH) {
        Ok(after) => after.as_nanos() as i128,
        Err(before) => -(before.duration().as_nanos() as i128),
    })
}

/// A model: its files, tensors and experts.
#[derive(Clone, Debug)]
pub struct Model {
    /// One, or all shards in order.
    pub files: Vec<ModelFile>,
    pub experts: ExpertTable,
    /// Of all files, in the order of files and within them.
    pub tensors: Vec<TensorInfo>,
    /// Of the first file.
    pub metadata: BTreeMap<String, Value>,
    index: HashMap<String, usize>,
}

impl Model {
    /// Opens a GGUF file, or all shards of a split model, of which `path` may be any. Reads headers only.
    ///
    /// `Io` where a file cannot be opened (a missing shard is named), `Format` where one is not sound, `Model` where
    /// the experts are not what can be kept in slots. A model without experts opens, with an empty table.
    pub fn open(path: &Path) -> Result<Self> {
        let (files, headers) = split::open_all(path)?;
        let mut tensors = Vec::new();
        let mut metadata = BTreeMap::new();
        for (file, header) in headers.into_iter().enumerate() {
            if file == 0 {
                metadata = header.metadata;
            }
            tensors.extend(header.tensors.into_iter().map(|t| TensorInfo { file, ..t }));
        }
        let mut index = HashMap::with_capacity(tensors.len());
        for (i, t) in tensors.iter().enumerate() {
            if let Some(other) = index.insert(t.name.clone(), i) {
                let (a, b) = (&files[tensors[other].file], &files[t.file]);
                let (name, a, b) = (&t.name, a.path.display(), b.path.display());
                return Err(err!(Format, "{b}: tensor {name} is in {a} too"));
            }
        }
        let paths: Vec<&Path> = files.iter().map(|f| f.path.as_path()).collect();
        let experts = ExpertTable::find(&tensors, &paths)?;
        Ok(Self { files, experts, tensors, metadata, index })
    }

    /// `general.architecture`.
    pub fn architecture(&self) -> Option<&str> {
        self.metadata.get("general.architecture")?.as_str()
    }

    /// k, from `<architecture>.expert_used_count`; the largest, where it differs by layer.
    pub fn n_experts_used(&self) -> Option<u32> {
        let key = format!("{}.expert_used_count", self.architecture()?);
        match self.metadata.get(&key)? {
            Value::Array { integers: Some(v), .. } => u32::try_from(*v.iter().max()?).ok(),
            v => u32::try_from(v.as_u64()?).ok(),
        }
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.index.get(name).map(|&i| &self.tensors[i])
    }

    /// The byte ranges, by file, of all tensors that are not in the expert table: what every token uses. Neighbours
    /// are merged over the padding between them; experts, headers and gaps are never inside.
    pub fn dense_ranges(&self) -> Vec<(usize, Range<u64>)> {
        let experts = self.experts.layers.iter().flat_map(|l| &l.tensors);
        let experts: HashSet<&str> = experts.map(|t| t.name.as_str()).collect();
        let mut dense: Vec<&TensorInfo> = self.tensors.iter().filter(|t| !experts.contains(t.name.as_str())).collect();
        dense.sort_by_key(|t| (t.file, t.offset_bytes));
        let mut ranges: Vec<(usize, Range<u64>)> = Vec::new();
        for t in dense {
            let range = t.offset_bytes..t.end_bytes();
            match ranges.last_mut() {
                _ if range.is_empty() => {}
                Some((file, last)) if *file == t.file && range.start.saturating_sub(last.end) < t.alignment => {
                    last.end = last.end.max(range.end);
                }
                _ => ranges.push((t.file, range)),
            }
        }
        ranges
    }

    /// Bytes of everything that is no expert: the sum of `dense_ranges`.
    pub fn dense_bytes(&self) -> u64 {
        self.dense_ranges().iter().map(|(_, r)| r.end - r.start).sum()
    }

    /// [`ModelFile::check_unchanged`] for every file.
    pub fn check_unchanged(&self) -> Result<()> {
        self.files.iter().try_for_each(ModelFile::check_unchanged)
    }
}

/// Maps one file and parses its header.
fn open_one(path: &Path) -> Result<(ModelFile, GgufHeader)> {
    let file = ModelFile::open(path)?;
    let header = GgufHeader::parse(&file.map, file.len_bytes, path)?;
    Ok((file, header))
}

/// A path's file name for a message or a pattern; `Argument` where it has none that is UTF-8.
fn file_name(path: &Path) -> Result<&str, Error> {
    let name = path.file_name().and_then(|n| n.to_str());
    name.ok_or_else(|| err!(Argument, "{}: the file name is not UTF-8", path.display()))
}
