//! Makes packs, and compares them with what they were made from.
//!
//! `pack` writes `OUT.partial`: the header, then expert after expert, each gathered from the source and followed by its checksum
//! in the table. When all are there the header is completed and the file gets its name: a pack under its own name is whole.
//! A run that was cut off is gone on with: what has its checksum stays, everything else is written (again).

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::Model;
use super::crc::crc32;
use super::pack::{self, PackHeader, WRITTEN, entries, n_experts, named};
use crate::error::{Error, Result, err};

/// What `pack` did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Packing {
    /// Of the whole pack.
    pub file_bytes: u64,
    pub experts: u64,
    /// Of them, those that an earlier run had written.
    pub kept_experts: u64,
    /// Bytes of data that are no expert's: what alignment costs.
    pub padding_bytes: u64,
}

/// Where an unfinished pack lies.
pub fn partial_path(out: &Path) -> PathBuf {
    let mut name = out.as_os_str().to_owned();
    name.push(".partial");
    name.into()
}

/// Bytes that a pack of this model has.
pub fn plan_bytes(model: &Model) -> Result<u64> {
    Ok(PackHeader::of(model)?.file_bytes)
}

/// Packs the model's experts into `out`. `progress` is told the bytes done, expert after expert. A finished pack of this model
/// that is there already is left as it is. `Model` or `Format` where what is there is something else: nothing is overwritten.
pub fn pack(model: &Model, out: &Path, progress: &mut dyn FnMut(u64)) -> Result<Packing> {
    let mut header = PackHeader::of(model)?;
    let experts = n_experts(&header.layers);
    let mut done = Packing {
        file_bytes: header.file_bytes,
        experts,
        kept_experts: experts,
        padding_bytes: header.file_bytes - header.header_bytes - model.experts.total_bytes(),
    };
    if out.exists() {
        pack::open_checked(out, model)?;
        progress(header.file_bytes);
        return Ok(done);
    }
    let partial = partial_path(out);
    let io = |e: io::Error| err!(Io, "{}: {e}", partial.display());
    let file = File::options().read(true).write(true).create(true).truncate(false).open(&partial).map_err(io)?;
    let table = begin(&file, &header).map_err(|e| named(&partial, e))?;

    let source = Sources::open(model)?;
    let (mut entry, mut at, mut buffer, mut kept) = (0, header.header_bytes, Vec::new(), 0);
    for (packed, layer) in header.layers.iter().zip(&model.experts.layers) {
        buffer.resize(packed.stride_bytes as usize, 0);
        for expert in 0..packed.n_experts {
            let there = table[entry] & WRITTEN != 0
                && file.read_exact_at(&mut buffer, at).is_ok()
                && u64::from(crc32(&buffer)) | WRITTEN == table[entry];
            if there {
                kept += 1;
            } else {
                buffer.fill(0);
                for (t, slice) in layer.tensors.iter().zip(&packed.slices) {
                    let from = slice.offset_bytes as usize;
                    source.read(t, expert, &mut buffer[from..from + slice.slice_bytes as usize])?;
                }
                file.write_all_at(&buffer, at).map_err(|e| written(&partial, at, buffer.len(), e))?;
                let sum = u64::from(crc32(&buffer)) | WRITTEN;
                let place = header.table_offset + 8 * entry as u64;
                file.write_all_at(&sum.to_le_bytes(), place).map_err(|e| written(&partial, place, 8, e))?;
            }
            at += packed.stride_bytes;
            entry += 1;
            progress(at);
        }
    }
    // what was gathered must come from one version of the source
    model.check_unchanged()?;
    file.set_len(header.file_bytes).and_then(|()| file.sync_all()).map_err(io)?;
    let mut sums = vec![0; 8 * entry];
    file.read_exact_at(&mut sums, header.table_offset).map_err(io)?;
    (header.complete, header.table_crc) = (true, crc32(&sums));
    file.write_all_at(&header.encode(), 0).and_then(|()| file.sync_all()).map_err(io)?;
    fs::rename(&partial, out).map_err(|e| err!(Io, "{} cannot become {}: {e}", partial.display(), out.display()))?;
    // that the name is on the disk too is the folder's affair
    let folder = out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder).and_then(|f| f.sync_all()).map_err(|e| err!(Io, "{}: {e}", folder.display()))?;
    done.kept_experts = kept;
    Ok(done)
}

/// Compares a finished pack with the model, byte for byte, and with its checksums. Returns the experts compared.
pub fn verify(model: &Model, path: &Path, progress: &mut dyn FnMut(u64)) -> Result<u64> {
    let (file, header, table) = pack::open_checked(path, model)?;
    let source = Sources::open(model)?;
    let (mut buffer, mut wanted, mut entry, mut at) = (Vec::new(), Vec::new(), 0, header.header_bytes);
    for (packed, layer) in header.layers.iter().zip(&model.experts.layers) {
        buffer.resize(packed.stride_bytes as usize, 0);
        for expert in 0..packed.n_experts {
            let here = || format!("{}: block {} expert {expert} at {at}", path.display(), layer.block);
            file.read_exact_at(&mut buffer, at).map_err(|e| err!(Io, "{}: {e}", here()))?;
            for (t, slice) in layer.tensors.iter().zip(&packed.slices) {
                wanted.resize(slice.slice_bytes as usize, 0);
                source.read(t, expert, &mut wanted)?;
                let found = &buffer[slice.offset_bytes as usize..][..wanted.len()];
                if let Some(i) = found.iter().zip(&wanted).position(|(a, b)| a != b) {
                    let (a, b) = (found[i], wanted[i]);
                    return Err(err!(Format, "{}: byte {i} of {} is {a:#04x}, in the model {b:#04x}", here(), t.name));
                }
            }
            let sum = u64::from(crc32(&buffer)) | WRITTEN;
            if sum != table[entry] {
                return Err(err!(Format, "{}: checksum {sum:#x}, {:#x} is stored", here(), table[entry]));
            }
            at += packed.stride_bytes;
            entry += 1;
            progress(at);
        }
    }
    Ok(entry as u64)
}

/// Writes the header of a new pack, or checks that what is there is the beginning of this one. Returns the table as it is.
fn begin(file: &File, header: &PackHeader) -> Result<Vec<u64>> {
    let io = |e: io::Error| err!(Io, "{e}");
    let n = n_experts(&header.layers) as usize;
    let fresh = header.encode();
    let len = file.metadata().map_err(io)?.len();
    let mut found = vec![0; (len.min(header.header_bytes)) as usize];
    file.read_exact_at(&mut found, 0).map_err(io)?;
    if len < header.header_bytes {
        // cut while its header was written, or new
        if found[..found.len().min(fresh.len())] != fresh[..found.len().min(fresh.len())] {
            return Err(err!(Format, "{len} bytes that are no beginning of a pack of this model: remove it"));
        }
        let mut whole = fresh;
        whole.resize(header.header_bytes as usize, 0);
        file.write_all_at(&whole, 0).map_err(io)?;
        return Ok(vec![0; n]);
    }
    // cut between the last header and the new name: then it is complete already
    let mut there = PackHeader::parse(&found, header.file_bytes.max(len))?;
    (there.complete, there.table_crc) = (false, 0);
    if there != *header {
        return Err(err!(Model, "this is the beginning of a pack of another model, or of other bytes: remove it"));
    }
    let table = &found[header.table_offset as usize..][..8 * n];
    Ok(entries(table))
}

fn written(path: &Path, at: u64, bytes: usize, e: io::Error) -> Error {
    err!(Io, "{}: {bytes} bytes cannot be written at {at}: {e}", path.display())
}

/// The model's files, for reading without the map: a file cut meanwhile is an error then, not a signal.
struct Sources(Vec<(PathBuf, File)>);

impl Sources {
    fn open(model: &Model) -> Result<Sources> {
        let open = |f: &super::ModelFile| {
            let file = File::open(&f.path).map_err(|e| err!(Io, "{}: cannot be opened: {e}", f.path.display()))?;
            Ok((f.path.clone(), file))
        };
        Ok(Sources(model.files.iter().map(open).collect::<Result<_>>()?))
    }

    fn read(&self, t: &super::ExpertTensor, expert: u32, dest: &mut [u8]) -> Result<()> {
        let (path, file) = &self.0[t.file];
        let offset = t.offset_bytes + t.slice_bytes * u64::from(expert);
        file.read_exact_at(dest, offset).map_err(|e| {
            err!(
                Io,
                "{}: {} expert {expert}: offset {offset}, wanted {} bytes: {e}",
                path.display(),
                t.name,
                dest.len()
            )
        })
    }
}
