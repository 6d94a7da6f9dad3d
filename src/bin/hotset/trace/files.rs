//! Opening a trace with its sidecar, and putting down a new one: whole, or not at all.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use hotset::trace::sidecar::{MAX_BYTES, range_path, sidecar_path};
use hotset::trace::{Health, Phase, Sidecar, Trace};
use hotset::{Error, ErrorKind};

/// A trace, and what lies beside it. A sidecar of another shape is an error.
pub fn open(path: &Path) -> Result<(Trace, Option<Sidecar>)> {
    let trace = Trace::open(path)?;
    let sidecar = Sidecar::read_beside(path)?;
    if let Some(sidecar) = &sidecar {
        sidecar.check_header(trace.header()).with_context(|| sidecar_path(path).display().to_string())?;
    }
    Ok((trace, sidecar))
}

/// What cannot be asked for: exit code 2.
pub fn usage(detail: String) -> anyhow::Error {
    Error::new(ErrorKind::Argument, detail).into()
}

/// A file in the making, beside the place where it is to be. It goes there when it is whole; until then an older one stays.
/// So a trace can be cut into itself.
pub struct NewFile {
    path: PathBuf,
    beside: PathBuf,
    file: BufWriter<File>,
    finished: bool,
}

impl NewFile {
    pub fn create(path: &Path) -> Result<Self> {
        let mut name = path.as_os_str().to_owned();
        name.push(".new");
        let beside = PathBuf::from(name);
        let file = File::create(&beside).with_context(|| beside.display().to_string())?;
        Ok(Self { path: path.to_owned(), beside, file: BufWriter::with_capacity(1 << 20, file), finished: false })
    }

    /// Where its bytes go.
    pub fn out(&mut self) -> &mut BufWriter<File> {
        &mut self.file
    }

    /// An error in writing, with the file's name.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).with_context(|| self.path.display().to_string())
    }

    /// Puts it in its place.
    pub fn finish(mut self) -> Result<()> {
        self.place()
    }

    /// The same with what lies beside a trace: a sidecar, and the ranges of whole rows. An older trace's go.
    pub fn finish_trace(mut self, sidecar: Option<&Sidecar>, ranges: Option<&[f32]>) -> Result<()> {
        let beside = [sidecar_path(&self.path), range_path(&self.path)];
        for old in &beside {
            if fs::exists(old)? {
                fs::remove_file(old).with_context(|| old.display().to_string())?;
            }
        }
        self.place()?;
        if let Some(ranges) = ranges {
            let bytes: Vec<u8> = ranges.iter().flat_map(|range| range.to_le_bytes()).collect();
            fs::write(&beside[1], bytes).with_context(|| beside[1].display().to_string())?;
        }
        if let Some(sidecar) = sidecar {
            let length = sidecar.write(&beside[0], false)?;
            if length > MAX_BYTES {
                fs::remove_file(&beside[0])?;
                anyhow::bail!("{}: {length} bytes, more than readers take ({MAX_BYTES})", beside[0].display());
            }
        }
        Ok(())
    }

    fn place(&mut self) -> Result<()> {
        let name = || self.path.display().to_string();
        self.file.flush().with_context(name)?;
        fs::rename(&self.beside, &self.path).with_context(name)?;
        self.finished = true;
        Ok(())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.finished {
            // what is left of a failure helps nobody
            let _ = fs::remove_file(&self.beside);
        }
    }
}

/// What is to be said of a file's length, if anything.
pub fn health(health: &Health) -> Vec<String> {
    let mut notes = Vec::new();
    let Health { header_tokens, found_tokens, stray_bytes, .. } = *health;
    if header_tokens == 0 && found_tokens > 0 {
        notes.push("the header says 0 tokens (its writer did not come to the end): counted from the length".to_owned());
    }
    if u64::from(header_tokens) > found_tokens {
        notes.push(format!("the header says {header_tokens} tokens, the file holds {found_tokens}"));
    }
    if header_tokens > 0 && u64::from(header_tokens) < found_tokens {
        let more = found_tokens - u64::from(header_tokens);
        notes.push(format!("{more} tokens after the {header_tokens} that the header says are not read"));
    }
    if stray_bytes > 0 {
        notes.push(format!("{stray_bytes} stray bytes after the last whole token are not read"));
    }
    notes
}

/// Phase and position of each token, as far as the sidecar tells.
pub struct Tokens<'a> {
    sidecar: Option<&'a Sidecar>,
    range: usize,
}

impl<'a> Tokens<'a> {
    pub fn new(sidecar: Option<&'a Sidecar>) -> Self {
        Self { sidecar, range: 0 }
    }

    /// Of a token; they are asked for in rising order.
    pub fn at(&mut self, token: u64) -> Option<(Phase, Option<i64>)> {
        let ranges = &self.sidecar?.ranges;
        while ranges.get(self.range).is_some_and(|range| range.end() <= token) {
            self.range += 1;
        }
        let range = ranges.get(self.range).filter(|range| range.first <= token)?;
        let position = range.position.checked_add_unsigned(token - range.first).filter(|_| range.position >= 0);
        Some((range.phase, position))
    }
}

/// Tokens as START..END of a trace: either may be left out.
pub fn token_range(text: &str) -> Result<(Option<u64>, Option<u64>), String> {
    let (start, end) = text.split_once("..").ok_or_else(|| format!("START..END wanted, {text:?} found"))?;
    let side = |text: &str| match text {
        "" => Ok(None),
        digits => digits.parse().map(Some).map_err(|e| format!("{digits:?}: {e}")),
    };
    Ok((side(start)?, side(end)?))
}
