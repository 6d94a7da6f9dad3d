//! Foreign traces become Q4RT: [`route_csv`] (route_trace v1) and [`jsonl`] (ids alone).
//!
//! Both read their input more than once: first for its shape and every fault it has, then to write. So nothing is written of a
//! file that is at fault, and no more than a pass (or a line) of it is in memory. Faults are named with line and column, counted
//! from 1, the column in bytes.
//!
//! An imported trace has as many candidates as the run used experts (top_m = k), because that is what such files hold: a replay
//! of it can count misses, but reranking has nothing to choose from. Its sidecar names the format under `more.import`; what
//! was resident when the run began is not known, so `resident` is empty.

mod jsonl;
mod lines;
mod passes;
mod route_csv;
mod routed;
mod row;

use std::collections::BTreeSet;
use std::io::{Seek, SeekFrom, Write};

pub use jsonl::jsonl;
pub(crate) use lines::Lines;
pub use lines::MAX_LINE;
pub use route_csv::{route_csv, route_csv_routing};
pub use routed::{RoutedCell, RoutedShape, routed_csv};

use half::f16;

use crate::error::{Result, err};
use crate::trace::block::{Phase, Placement};
use crate::trace::q4rt::{Header, N_TOKENS_OFFSET, encode_record, write_header};
use crate::trace::sidecar::{Shape, Sidecar, TokenRange};

/// What to take of a foreign trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImportOptions {
    /// Prefill tokens too; else they are counted as left out.
    pub prefill: bool,
    /// Keep in the sidecar what the run found resident, where the format has it.
    pub residency: bool,
    /// Experts of each layer; `None` = as the file says, or the highest id and one.
    pub n_experts: Option<u16>,
}

impl Default for ImportOptions {
    fn default() -> Self {
        Self { prefill: true, residency: true, n_experts: None }
    }
}

impl ImportOptions {
    fn check(&self) -> Result<()> {
        if self.n_experts == Some(0) {
            return Err(err!(Argument, "import: 0 experts: at least 1 wanted"));
        }
        Ok(())
    }
}

/// Ids are below this: a trace counts the experts in a u16.
const MAX_EXPERTS: u64 = u16::MAX as u64;

/// The trace at the other end: a header, then record after record, at last the number of tokens and the ranges.
struct Output<'a, W> {
    out: &'a mut W,
    header: Header,
    tokens: u64,
    ranges: Vec<TokenRange>,
    bytes: Vec<u8>,
}

impl<'a, W: Write + Seek> Output<'a, W> {
    fn new(out: &'a mut W, n_layers: usize, n_experts: u16, top_m: u16) -> Result<Self> {
        let n_layers = u16::try_from(n_layers).map_err(|_| err!(Format, "{n_layers} layers: at most 65535 wanted"))?;
        let header = Header { n_layers, n_experts, top_m, n_tokens: 0 };
        write_header(out, &header)?;
        Ok(Self { out, header, tokens: 0, ranges: Vec::new(), bytes: vec![0; header.record_bytes()] })
    }

    fn record(&mut self, ids: &[u16], scores: &[f16]) -> Result<()> {
        encode_record(ids, scores, &mut self.bytes)?;
        self.out.write_all(&self.bytes).map_err(|e| err!(Io, "token {}: {e}", self.tokens))
    }

    /// The records of `n` tokens are written, and this is what they were: one whole pass, of which `left_out` tokens before
    /// them are not here.
    fn end_pass(&mut self, n: u64, phase: Phase, position: i64, left_out: u32) -> Result<()> {
        let per_pass = u32::try_from(n + u64::from(left_out)).map_err(|_| err!(Format, "a pass of {n} tokens"))?;
        let first = self.tokens;
        self.tokens += n;
        match self.ranges.last_mut() {
            Some(last)
                if (last.phase, last.tokens_per_pass) == (phase, per_pass)
                    && (last.left_out_before, left_out) == (0, 0)
                    && last.position.checked_add_unsigned(last.n_tokens) == Some(position) =>
            {
                last.n_tokens += n;
            }
            _ => self.ranges.push(TokenRange {
                first,
                n_tokens: n,
                phase,
                position,
                tokens_per_pass: per_pass,
                placement: vec![Placement::Slots],
                left_out_before: left_out,
            }),
        }
        Ok(())
    }

    /// The header gets its number of tokens, and the sidecar what is known here.
    fn finish(self, layers: &BTreeSet<u16>, score_space: &str) -> Result<Sidecar> {
        let n_tokens = u32::try_from(self.tokens).unwrap_or(0);
        let patch = |out: &mut W| {
            out.seek(SeekFrom::Start(N_TOKENS_OFFSET))?;
            out.write_all(&n_tokens.to_le_bytes())?;
            out.seek(SeekFrom::End(0))?;
            out.flush()
        };
        patch(self.out).map_err(|e| err!(Io, "number of tokens: {e}"))?;
        let (k, n_experts) = (u32::from(self.header.top_m), u32::from(self.header.n_experts));
        Ok(Sidecar {
            shape: Shape {
                blocks: layers.iter().map(|&layer| layer.into()).collect(),
                n_experts: vec![n_experts; layers.len()],
                k,
                top_m: k,
            },
            score_space: score_space.to_owned(),
            ranges: self.ranges,
            closed: true,
            ..Sidecar::default()
        })
    }
}
