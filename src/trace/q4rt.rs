//! The Q4RT v1 format: a trace of router candidates.
//!
//! A file is a header of 16 bytes, then one record a token and layer, tokens outermost; all little endian:
//!
//! ```text
//! "Q4RT"  u16 version = 1  u16 n_layers  u16 n_experts  u16 top_m  u32 n_tokens
//! { top_m x u16 expert id, by falling score;  top_m x f16 score }  for each layer, for each token
//! ```
//!
//! Writers: [`write_header`] once, [`encode_record`] a record. Readers: [`Trace`] maps the file, counts the whole tokens
//! and gives out [`Record`]s, which are views of the mapped bytes. A file whose writer was killed has n_tokens = 0 and
//! perhaps a cut last token: its whole tokens are read, the rest is reported by [`Trace::health`].

use std::fmt;
use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::path::Path;

use half::f16;
use half::slice::HalfFloatSliceExt;
use memmap2::Mmap;

use crate::error::{Result, err};

pub const MAGIC: [u8; 4] = *b"Q4RT";
pub const VERSION: u16 = 1;
/// Bytes before the first record.
pub const HEADER_BYTES: usize = 16;
/// Where `n_tokens` (u32) lies in the header: a writer fills it in at the end.
pub const N_TOKENS_OFFSET: u64 = 12;

/// The shape of a trace, as its first 16 bytes give it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Layers that have experts, in the order in which a token passes through them.
    pub n_layers: u16,
    /// Ids are below this.
    pub n_experts: u16,
    /// Candidates in each record.
    pub top_m: u16,
    /// As written; 0 = count from the length.
    pub n_tokens: u32,
}

impl Header {
    /// Reads and checks the first 16 bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let Some(head) = bytes.first_chunk::<HEADER_BYTES>() else {
            return Err(err!(Format, "trace header: {HEADER_BYTES} bytes wanted, {} found", bytes.len()));
        };
        let u16_at = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
        if head[..4] != MAGIC {
            return Err(err!(Format, "trace magic: \"Q4RT\" wanted, \"{}\" found", head[..4].escape_ascii()));
        }
        if u16_at(4) != VERSION {
            return Err(err!(Format, "trace version: {VERSION} wanted, {} found", u16_at(4)));
        }
        let header = Self {
            n_layers: u16_at(6),
            n_experts: u16_at(8),
            top_m: u16_at(10),
            n_tokens: u32::from_le_bytes([head[12], head[13], head[14], head[15]]),
        };
        header.check()?;
        Ok(header)
    }

    /// The header's 16 bytes.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut head = [0; HEADER_BYTES];
        head[..4].copy_from_slice(&MAGIC);
        for (at, value) in [(4, VERSION), (6, self.n_layers), (8, self.n_experts), (10, self.top_m)] {
            head[at..at + 2].copy_from_slice(&value.to_le_bytes());
        }
        head[12..].copy_from_slice(&self.n_tokens.to_le_bytes());
        head
    }

    /// An error if nothing could be recorded in this shape. `top_m` above `n_experts` is left to [`Trace::verify`]: the
    /// file can be read all the same.
    pub fn check(&self) -> Result<()> {
        if self.n_layers == 0 || self.n_experts == 0 || self.top_m == 0 {
            return Err(err!(
                Format,
                "trace shape: n_layers {}, n_experts {}, top_m {}: none may be 0",
                self.n_layers,
                self.n_experts,
                self.top_m
            ));
        }
        Ok(())
    }

    /// Bytes of one token in one layer: at most 256 KiB.
    pub fn record_bytes(&self) -> usize {
        4 * usize::from(self.top_m)
    }

    /// Bytes of one token in all layers: below 2^34, so a u64 on every machine.
    pub fn token_bytes(&self) -> u64 {
        self.record_bytes() as u64 * u64::from(self.n_layers)
    }
}

/// Writes the 16 bytes that a trace begins with. `n_tokens` = 0 while it is not known.
pub fn write_header(out: &mut impl Write, header: &Header) -> Result<()> {
    header.check()?;
    out.write_all(&header.encode()).map_err(|e| err!(Io, "trace header: {e}"))
}

/// Lays ids and scores, by falling score, into the `4 * top_m` bytes of one record. Any thread; does not allocate.
pub fn encode_record(ids: &[u16], scores: &[f16], out: &mut [u8]) -> Result<()> {
    if ids.len() != scores.len() || out.len() != 4 * ids.len() {
        return Err(err!(Argument, "record: {} ids, {} scores, {} bytes", ids.len(), scores.len(), out.len()));
    }
    let (id_bytes, score_bytes) = out.split_at_mut(2 * ids.len());
    put_u16(ids, id_bytes);
    put_u16(scores.reinterpret_cast(), score_bytes);
    Ok(())
}

/// Numbers to little-endian bytes. Not inlined, here and below: only as arguments are the two known not to overlap,
/// which lets the loop become one memory copy on little endian.
#[inline(never)]
fn put_u16(values: &[u16], out: &mut [u8]) {
    for (bytes, value) in out.chunks_exact_mut(2).zip(values) {
        bytes.copy_from_slice(&value.to_le_bytes());
    }
}

/// Little-endian bytes to numbers, as many as both sides have.
#[inline(never)]
fn get_u16(bytes: &[u8], out: &mut [u16]) {
    for (value, bytes) in out.iter_mut().zip(bytes.chunks_exact(2)) {
        *value = u16::from_le_bytes([bytes[0], bytes[1]]);
    }
}

/// A score as the format holds it: rounded to f16, and saturated at +-65504 instead of going to infinity.
pub fn saturating_f16(score: f32) -> f16 {
    // clamp keeps NaN: verify finds it, and no number is invented here
    f16::from_f32(score.clamp(-65504.0, 65504.0))
}

/// What a file holds, set against what its header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Health {
    /// The count in the header; 0 = the writer did not come to its end.
    pub header_tokens: u32,
    /// Whole tokens that the length holds.
    pub found_tokens: u64,
    /// Bytes after the last whole token.
    pub stray_bytes: u64,
    /// Tokens are missing: fewer than the header says, or the writer was stopped within one.
    pub cut: bool,
}

enum Bytes {
    Mapped(Mmap),
    Owned(Vec<u8>),
}

/// A trace, opened for reading. Any number of threads may read it.
pub struct Trace {
    bytes: Bytes,
    header: Header,
    n_tokens: usize,
    health: Health,
}

impl Trace {
    /// Maps a file. It may still be growing: the tokens counted now are those that this value will ever show.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let name = path.display();
        let file = File::open(path).map_err(|e| err!(Io, "{name}: {e}"))?;
        let meta = file.metadata().map_err(|e| err!(Io, "{name}: {e}"))?;
        if !meta.is_file() {
            return Err(err!(Format, "{name}: not a regular file"));
        }
        if meta.len() < HEADER_BYTES as u64 {
            return Err(err!(Format, "{name}: trace header: {HEADER_BYTES} bytes wanted, {} found", meta.len()));
        }
        // SAFETY: the map is read only, and its bytes are plain numbers, for which every pattern is valid. A recorder
        // only appends to a trace, patches the header (decoded here once, not read again) and, after a failed write,
        // cuts the file down to whole tokens; it unlinks an old file rather than truncate it. So none of the tokens
        // counted here goes away, unless somebody else truncates the file: that is a fault of theirs (SIGBUS), as with
        // every mapped file.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| err!(Io, "{name}: cannot be mapped: {e}"))?;
        Self::new(Bytes::Mapped(map)).map_err(|e| err!(Format, "{name}: {e}"))
    }

    /// A trace in memory.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self> {
        Self::new(Bytes::Owned(bytes))
    }

    fn new(bytes: Bytes) -> Result<Self> {
        let data = bytes.as_slice();
        let header = Header::decode(data)?;
        let body = (data.len() - HEADER_BYTES) as u64;
        let found = body / header.token_bytes();
        let stray_bytes = body % header.token_bytes();
        let said = u64::from(header.n_tokens);
        let unclosed = said == 0 && stray_bytes > 0;
        let health =
            Health { header_tokens: header.n_tokens, found_tokens: found, stray_bytes, cut: said > found || unclosed };
        let used = if said == 0 { found } else { said.min(found) };
        // found tokens are in memory, so their number fits
        let n_tokens =
            usize::try_from(used).map_err(|_| err!(Format, "{used} tokens are too many for this machine"))?;
        Ok(Self { bytes, header, n_tokens, health })
    }

    pub fn header(&self) -> &Header {
        &self.header
    }

    pub fn n_layers(&self) -> usize {
        usize::from(self.header.n_layers)
    }

    pub fn n_experts(&self) -> usize {
        usize::from(self.header.n_experts)
    }

    pub fn top_m(&self) -> usize {
        usize::from(self.header.top_m)
    }

    /// Tokens that can be read: the header's count, or what the length holds where that is 0 or too high.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    pub fn health(&self) -> Health {
        self.health
    }

    /// The candidates of one token in one layer, without a copy.
    ///
    /// # Panics
    /// If `token >= n_tokens()` or `layer >= n_layers()`, as an index out of a slice does.
    #[inline]
    pub fn record(&self, token: usize, layer: usize) -> Record<'_> {
        assert!(
            token < self.n_tokens && layer < self.n_layers(),
            "record ({token}, {layer}) of {} tokens x {} layers",
            self.n_tokens,
            self.n_layers()
        );
        let size = self.header.record_bytes();
        // within the bytes counted at opening, so no overflow
        let at = HEADER_BYTES + (token * self.n_layers() + layer) * size;
        let (ids, scores) = self.bytes.as_slice()[at..at + size].split_at(size / 2);
        Record { ids, scores }
    }

    /// The bytes of whole tokens, as they lie in the file: for a copy. Panics if `tokens` is not within `0..n_tokens()`.
    pub fn raw(&self, tokens: Range<usize>) -> &[u8] {
        assert!(tokens.start <= tokens.end && tokens.end <= self.n_tokens, "{tokens:?} of {} tokens", self.n_tokens);
        // within the bytes counted at opening, so no overflow
        let at = |token: usize| HEADER_BYTES + token * self.n_layers() * self.header.record_bytes();
        &self.bytes.as_slice()[at(tokens.start)..at(tokens.end)]
    }

    /// Looks through `tokens` for what no router can have given, and returns the first `limit` problems.
    pub fn verify(&self, tokens: Range<usize>, limit: usize) -> Vec<Problem> {
        let mut problems = Vec::new();
        // the last record in which an id was seen: distinctness without clearing a set for each record
        let mut seen = vec![0u64; 1 << 16];
        let mut record_number = 0u64;
        for token in tokens.start..tokens.end.min(self.n_tokens) {
            for layer in 0..self.n_layers() {
                record_number += 1;
                let record = self.record(token, layer);
                let mut before = f32::INFINITY;
                for rank in 0..self.top_m() {
                    let id = record.id(rank);
                    let score = record.score(rank).to_f32();
                    let mut found = |kind| {
                        if problems.len() < limit {
                            problems.push(Problem { token, layer, rank, kind });
                        }
                    };
                    if id >= self.header.n_experts {
                        found(ProblemKind::IdRange { id, n_experts: self.header.n_experts });
                    }
                    if std::mem::replace(&mut seen[usize::from(id)], record_number) == record_number {
                        found(ProblemKind::Repeated { id });
                    }
                    if score.is_nan() {
                        found(ProblemKind::NotANumber);
                        continue;
                    }
                    if score > before {
                        found(ProblemKind::Rising { before, score });
                    }
                    before = score;
                }
                if problems.len() >= limit {
                    return problems;
                }
            }
        }
        problems
    }
}

impl Bytes {
    fn as_slice(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Owned(vec) => vec,
        }
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trace").field("header", &self.header).field("health", &self.health).finish_non_exhaustive()
    }
}

/// One token in one layer: `top_m` candidates by falling score. Ids are as the file has them: not checked against
/// `n_experts` (see [`Trace::verify`]).
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    ids: &'a [u8],
    scores: &'a [u8],
}

impl Record<'_> {
    /// Number of candidates: the trace's top_m.
    #[inline]
    #[allow(clippy::len_without_is_empty, reason = "top_m is never 0")]
    pub fn len(&self) -> usize {
        self.ids.len() / 2
    }

    /// The expert at a rank, 0 = the highest score. Panics at `rank >= len()`.
    #[inline]
    pub fn id(&self, rank: usize) -> u16 {
        u16::from_le_bytes([self.ids[2 * rank], self.ids[2 * rank + 1]])
    }

    /// The selection score at a rank. Panics at `rank >= len()`.
    #[inline]
    pub fn score(&self, rank: usize) -> f16 {
        f16::from_bits(u16::from_le_bytes([self.scores[2 * rank], self.scores[2 * rank + 1]]))
    }

    /// Copies the first ids, as many as both sides have, and returns their number. One memory copy on little endian.
    #[inline]
    pub fn copy_ids(&self, out: &mut [u16]) -> usize {
        get_u16(self.ids, out);
        out.len().min(self.len())
    }

    /// Copies the first scores, as many as both sides have, and returns their number. One memory copy on little endian.
    #[inline]
    pub fn copy_scores(&self, out: &mut [f16]) -> usize {
        get_u16(self.scores, out.reinterpret_cast_mut());
        out.len().min(self.len())
    }
}

/// Something in a record that no router gives.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Problem {
    pub token: usize,
    pub layer: usize,
    pub rank: usize,
    pub kind: ProblemKind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ProblemKind {
    /// An id that the model does not have.
    IdRange { id: u16, n_experts: u16 },
    /// An id that stands at an earlier rank of the same record.
    Repeated { id: u16 },
    /// A score above the one before it.
    Rising { before: f32, score: f32 },
    /// A score that is NaN.
    NotANumber,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "token {}, layer {}, rank {}: ", self.token, self.layer, self.rank)?;
        match self.kind {
            ProblemKind::IdRange { id, n_experts } => write!(f, "expert {id} of {n_experts}"),
            ProblemKind::Repeated { id } => write!(f, "expert {id} a second time"),
            ProblemKind::Rising { before, score } => write!(f, "score {score} after {before}"),
            ProblemKind::NotANumber => write!(f, "score is NaN"),
        }
    }
}

#[cfg(test)]
mod tests;
