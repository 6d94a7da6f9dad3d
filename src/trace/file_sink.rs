//! The plain end of a spool: blocks one after the other into a file.
//!
//! Small blocks gather in a buffer, which goes to the system when it is full and whenever the queue runs empty. What a
//! failed write leaves behind can be cut to whole units at the end.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::error::{Result, err};
use crate::trace::spool::Sink;

/// Blocks one after the other into a file, through a buffer.
pub struct FileSink {
    file: File,
    path: PathBuf,
    buffer: Vec<u8>,
    /// Bytes that the system has taken.
    written: u64,
}

impl FileSink {
    /// Bytes gathered before a write, unless the queue runs empty first.
    const BUFFER: usize = 256 << 10;

    /// Writes from where the file stands, which must be its start; `path` is for messages.
    pub fn new(file: File, path: &Path) -> Self {
        Self { file, path: path.to_owned(), buffer: Vec::with_capacity(Self::BUFFER), written: 0 }
    }

    /// Bytes given to this sink that the system has taken.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Overwrites bytes that were written before.
    pub fn patch(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.write_out()?;
        let file = &mut self.file;
        file.seek(SeekFrom::Start(offset))
            .and_then(|_| file.write_all(bytes))
            .and_then(|()| file.seek(SeekFrom::End(0)))
            .map_err(|e| err!(Io, "{}: {} bytes at offset {offset}: {e}", self.path.display(), bytes.len()))?;
        Ok(())
    }

    /// Throws away what is buffered and cuts the file to whole units of `unit` bytes after `head`, at most `max` of
    /// them. Returns their number. For the end after a failed write, which may have left a part of a block.
    pub fn cut_to_units(&mut self, head: u64, unit: u64, max: u64) -> Result<u64> {
        self.buffer.clear();
        let fail = |e: io::Error| err!(Io, "{}: {e}", self.path.display());
        let len = self.file.metadata().map_err(fail)?.len();
        let units = (len.saturating_sub(head) / unit.max(1)).min(max);
        let keep = len.min(head + units * unit);
        if keep < len {
            self.file.set_len(keep).map_err(fail)?;
        }
        self.written = keep;
        Ok(units)
    }

    fn write_out(&mut self) -> Result<()> {
        let result = self.file.write_all(&self.buffer);
        let n = self.buffer.len();
        // emptied even after an error: a second try would write a part twice
        self.buffer.clear();
        result.map_err(|e| err!(Io, "{}: {n} bytes at offset {}: {e}", self.path.display(), self.written))?;
        self.written += n as u64;
        Ok(())
    }
}

impl Sink for FileSink {
    fn write(&mut self, block: &[u8]) -> Result<()> {
        if self.buffer.len() + block.len() > Self::BUFFER {
            self.write_out()?;
        }
        // a block above the buffer's size makes it grow once, on the writer thread
        self.buffer.extend_from_slice(block);
        Ok(())
    }

    fn flush(&mut self, durable: bool) -> Result<()> {
        self.write_out()?;
        if durable {
            self.file.sync_data().map_err(|e| err!(Io, "{}: sync: {e}", self.path.display()))?;
        }
        Ok(())
    }

    fn close(&mut self) -> Result<()> {
        self.flush(false)
    }
}
