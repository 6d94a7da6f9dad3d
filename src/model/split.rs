//! Split models: `name-00001-of-00003.gguf` and so on, each a GGUF of its own, with `split.no` (from 0), `split.count`
//! and `split.tensors.count` (of all shards) in its metadata.
//!
//! Any shard may be opened; what it says of itself must agree with its name, and every other shard with it. A tensor
//! list is joined by the caller, which also refuses a name that is there twice.

use std::path::{Path, PathBuf};

use super::gguf::GgufHeader;
use super::{ModelFile, file_name, open_one};
use crate::error::{Error, Result, err};

/// The path of shard `no` (from 0) of `count`, for a model that would be `stem.gguf` if it were not split.
pub fn shard_path(dir: &Path, stem: &str, no: u32, count: u32) -> PathBuf {
    dir.join(format!("{stem}{}", suffix(no, count)))
}

/// The end of a shard's name; shards are counted from 1 there.
fn suffix(no: u32, count: u32) -> String {
    format!("-{:05}-of-{count:05}.gguf", u64::from(no) + 1)
}

/// Opens `path`, and all its fellows where it is a shard, in order.
pub(super) fn open_all(path: &Path) -> Result<(Vec<ModelFile>, Vec<GgufHeader>)> {
    let (file, header) = open_one(path)?;
    let count = number(&header, "split.count")?.unwrap_or(1);
    if count <= 1 {
        return Ok((vec![file], vec![header]));
    }
    let no = required(&header, "split.no")?;
    if no >= count {
        return Err(err!(Format, "{}: split.no {no} of {count} shards", path.display()));
    }
    let name = file_name(path)?;
    let Some(stem) = name.strip_suffix(&suffix(no, count)).filter(|s| !s.is_empty()) else {
        return Err(err!(
            Model,
            "{}: by its metadata this is shard {} of {count}, so its name should end in {}: the others cannot be found",
            path.display(),
            no + 1,
            suffix(no, count)
        ));
    };
    let dir = path.parent().unwrap_or(Path::new(""));
    let total = number(&header, "split.tensors.count")?;
    let (mut files, mut headers) = (Vec::new(), Vec::new());
    let mut given = Some((file, header));
    for i in 0..count {
        let (file, header) = match given.take() {
            Some(given) if i == no => given,
            other => {
                given = other;
                open_shard(&shard_path(dir, stem, i, count), i, count)?
            }
        };
        files.push(file);
        headers.push(header);
    }
    let found: u64 = headers.iter().map(|h| h.tensors.len() as u64).sum();
    match total {
        Some(total) if u64::from(total) != found => {
            Err(err!(Format, "{}: split.tensors.count is {total}, the shards hold {found}", path.display()))
        }
        _ => Ok((files, headers)),
    }
}

fn open_shard(path: &Path, no: u32, count: u32) -> Result<(ModelFile, GgufHeader)> {
    let (file, header) = open_one(path)
        .map_err(|e| Error::new(e.kind, format!("shard {} of {count} is wanted: {}", u64::from(no) + 1, e.detail)))?;
    let (no_found, count_found) = (required(&header, "split.no")?, number(&header, "split.count")?.unwrap_or(count));
    if (no_found, count_found) != (no, count) {
        return Err(err!(
            Format,
            "{}: split.no {no} of {count} is wanted, it says {no_found} of {count_found}",
            path.display()
        ));
    }
    Ok((file, header))
}

/// A small number from the metadata; `None` where the key is missing.
fn number(header: &GgufHeader, key: &str) -> Result<Option<u32>> {
    let Some(value) = header.metadata.get(key) else { return Ok(None) };
    match value.as_u64().and_then(|v| u32::try_from(v).ok()) {
        Some(v) if key != "split.count" || v <= u32::from(u16::MAX) => Ok(Some(v)),
        _ => Err(err!(Format, "{}: {key} is {value:?}, a number is wanted", header.name.display())),
    }
}

fn required(header: &GgufHeader, key: &str) -> Result<u32> {
    number(header, key)?.ok_or_else(|| err!(Format, "{}: the key {key} is missing", header.name.display()))
}
