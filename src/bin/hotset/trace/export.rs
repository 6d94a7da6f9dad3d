//! `hotset trace export`: a trace for other tools.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::ValueEnum;
use half::f16;
use hotset::trace::{Phase, Sidecar, Trace};

use super::files::{self, NewFile, Tokens};
use super::npz::{Npz, Numbers};

/// Write a trace as CSV, as route_trace v1 CSV, or as arrays for NumPy (.npz)
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  hotset trace export run.q4rt run.csv
  hotset trace export run.q4rt - --tokens 0..10 --top 12 | column -ts,
  hotset trace export run.q4rt run.npz
  hotset trace export run.q4rt run.route.csv --format route-csv

Formats:
  csv        token,phase,position,layer,block,rank,expert,score: a line each candidate; empty = not known
  npz        ids (u2) and scores (f2): tokens x layers x candidates; phases (u1: 0 prefill, 1 decode, 255 not known) and
             positions (i8: -1 not known): tokens
  route-csv  what `hotset trace import` reads: the experts used, with weights made from the scores (exp of logarithms of
             weights, else the softmax of logits, or the share of probabilities)")]
pub struct Args {
    /// A trace
    trace: PathBuf,
    /// The file to write; an older one is replaced. - = standard output (csv formats)
    out: PathBuf,
    /// What to write; else the name says it: .csv, .npz
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// Only these tokens, START..END, counted from 0
    #[arg(long, value_name = "START..END", value_parser = files::token_range)]
    tokens: Option<(Option<u64>, Option<u64>)>,
    /// Candidates of each record; else all of them (route-csv: those used)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    top: Option<u16>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Csv,
    Npz,
    RouteCsv,
}

fn format_of(path: &Path) -> Result<Format> {
    match path.extension().and_then(|e| e.to_str()) {
        Some("npz") => Ok(Format::Npz),
        Some("csv") => Ok(Format::Csv),
        None if path == Path::new("-") => Ok(Format::Csv),
        _ => Err(files::usage(format!("{}: neither .csv nor .npz: say --format", path.display()))),
    }
}

/// What is exported of which trace.
struct Export<'a> {
    trace: &'a Trace,
    sidecar: Option<&'a Sidecar>,
    tokens: std::ops::Range<u64>,
    top: usize,
}

pub fn run(args: &Args) -> Result<()> {
    let format = args.format.map_or_else(|| format_of(&args.out), Ok)?;
    let (trace, sidecar) = files::open(&args.trace)?;
    let n_tokens = trace.n_tokens() as u64;
    let (start, end) = args.tokens.unwrap_or((None, None));
    let tokens = start.unwrap_or(0)..end.unwrap_or(n_tokens);
    if tokens.start > tokens.end || tokens.end > n_tokens {
        let name = args.trace.display();
        return Err(files::usage(format!("--tokens {tokens:?}: {name} has {n_tokens}")));
    }
    let k = sidecar.as_ref().map_or(trace.top_m(), |sidecar| sidecar.shape.k as usize);
    let top = args.top.map_or(if format == Format::RouteCsv { k } else { trace.top_m() }, usize::from);
    let export = Export { trace: &trace, sidecar: sidecar.as_ref(), tokens, top: top.clamp(1, trace.top_m()) };
    if args.out == Path::new("-") {
        let mut out = std::io::BufWriter::new(std::io::stdout().lock());
        let done = match format {
            Format::Csv => export.csv(&mut out),
            Format::RouteCsv => export.route_csv(&mut out),
            Format::Npz => return Err(files::usage("an .npz needs a file, not standard output".to_owned())),
        };
        let done = done.and_then(|()| Ok(out.flush()?));
        // a reader that has gone (`| head`) is no failure
        let gone = |e: &anyhow::Error| {
            e.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
        };
        return done.or_else(|e| if gone(&e) { Ok(()) } else { Err(e) });
    }
    let mut new = NewFile::create(&args.out)?;
    match format {
        Format::Csv => export.csv(new.out()),
        Format::RouteCsv => export.route_csv(new.out()),
        Format::Npz => export.npz(new.out()),
    }
    .with_context(|| args.out.display().to_string())?;
    new.finish()
}

impl Export<'_> {
    fn block(&self, layer: usize) -> usize {
        self.sidecar.map_or(layer, |sidecar| sidecar.shape.blocks[layer] as usize)
    }

    fn csv(&self, out: &mut impl Write) -> Result<()> {
        writeln!(out, "token,phase,position,layer,block,rank,expert,score")?;
        let mut known = Tokens::new(self.sidecar);
        for token in self.tokens.clone() {
            let (phase, position) = known.at(token).map_or(("", None), |(phase, at)| (phase.as_str(), at));
            let position = position.map_or(String::new(), |p| p.to_string());
            for layer in 0..self.trace.n_layers() {
                let (block, record) = (self.block(layer), self.trace.record(token as usize, layer));
                for rank in 0..self.top {
                    let (id, score) = (record.id(rank), record.score(rank));
                    writeln!(out, "{token},{phase},{position},{layer},{block},{rank},{id},{score}")?;
                }
            }
        }
        Ok(())
    }

    fn npz(&self, out: &mut (impl Write + std::io::Seek)) -> Result<()> {
        let n = (self.tokens.end - self.tokens.start) as usize;
        let shape = [n, self.trace.n_layers(), self.top];
        let mut npz = Npz::new(out);
        let mut bytes = Vec::new();
        npz.array("ids", Numbers::U16, &shape, |put| {
            self.each_token(&mut bytes, |record, rank| record.id(rank).to_le_bytes(), put)
        })?;
        npz.array("scores", Numbers::F16, &shape, |put| {
            self.each_token(&mut bytes, |record, rank| record.score(rank).to_le_bytes(), put)
        })?;
        let mut known = Tokens::new(self.sidecar);
        npz.array("phases", Numbers::U8, &[n], |put| {
            self.tokens.clone().try_for_each(|token| {
                put(&[known.at(token).map_or(255, |(phase, _)| u8::from(phase == Phase::Decode))])
            })
        })?;
        let mut known = Tokens::new(self.sidecar);
        npz.array("positions", Numbers::I64, &[n], |put| {
            self.tokens.clone().try_for_each(|token| {
                put(&known.at(token).and_then(|(_, position)| position).unwrap_or(-1).to_le_bytes())
            })
        })?;
        npz.finish()
    }

    /// Two bytes of each candidate, a token at a time.
    fn each_token(
        &self,
        bytes: &mut Vec<u8>,
        number: impl Fn(&hotset::trace::Record, usize) -> [u8; 2],
        put: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        for token in self.tokens.clone() {
            bytes.clear();
            for layer in 0..self.trace.n_layers() {
                let record = self.trace.record(token as usize, layer);
                (0..self.top).for_each(|rank| bytes.extend(number(&record, rank)));
            }
            put(bytes)?;
        }
        Ok(())
    }

    fn route_csv(&self, out: &mut impl Write) -> Result<()> {
        let n_layers = self.trace.n_layers();
        let last = (0..n_layers).map(|layer| self.block(layer)).max().unwrap_or(0);
        let residency =
            self.sidecar.filter(|s| s.residency.len() == self.trace.n_tokens() && self.top == self.trace.top_m());
        writeln!(out, "# route_trace v1")?;
        let (experts, k) = (self.trace.n_experts(), self.top);
        writeln!(out, "# n_layer={} n_expert={experts} n_expert_used={k}", last + 1)?;
        if let Some(sidecar) = self.sidecar {
            let architecture = &sidecar.model.architecture;
            if !architecture.is_empty() && !architecture.contains(char::is_whitespace) {
                writeln!(out, "# arch={architecture}")?;
            }
            for (layer, bytes) in sidecar.expert_bytes.iter().enumerate() {
                writeln!(out, "# layer={} expert_bytes={bytes}", self.block(layer))?;
            }
        }
        if residency.is_none() {
            writeln!(out, "# residency=unknown")?;
        }
        writeln!(out, "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes")?;
        let (mut turn, mut next) = (0, None);
        for Span { first, n_tokens, phase, step } in spans(self.sidecar, self.tokens.clone()) {
            if next.is_some_and(|next| next != step) {
                turn += 1;
            }
            next = Some(step + n_tokens);
            for layer in 0..n_layers {
                for (token, step) in (first..first + n_tokens).zip(step..) {
                    let record = self.trace.record(token as usize, layer);
                    let scores: Vec<f16> = (0..k).map(|rank| record.score(rank)).collect();
                    for (rank, weight) in self.weights(&scores).into_iter().enumerate() {
                        let digits = residency.map(|s| s.residency[token as usize].as_bytes()[layer * k + rank]);
                        let digit = char::from(digits.unwrap_or(b'0'));
                        let (block, id) = (self.block(layer), record.id(rank));
                        let phase = u8::from(phase == Phase::Decode);
                        writeln!(out, "{turn},{phase},{step},{block},{rank},{id},{weight},{digit},0")?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Of the experts used.
    fn weights(&self, scores: &[f16]) -> Vec<f64> {
        let z: Vec<f64> = scores.iter().map(|z| z.to_f64()).collect();
        if scores.iter().all(|&z| z == f16::MIN) {
            // what a recorder writes where nothing is known
            return vec![f64::NAN; z.len()];
        }
        let share = |mass: Vec<f64>| {
            let sum: f64 = mass.iter().sum();
            mass.iter().map(|m| m / sum).collect::<Vec<f64>>()
        };
        match self.sidecar.map_or("logit", |sidecar| sidecar.score_space.as_str()) {
            "log_weight" => z.iter().map(|z| z.exp()).collect(),
            "logit" | "log_prob" | "none" | "" => share(z.iter().map(|x| (x - z[0]).exp()).collect()),
            _ => share(z.iter().map(|x| x.max(0.0)).collect()),
        }
    }
}

/// Tokens whose rows come layer by layer: a pass of a prefill, or one token.
struct Span {
    first: u64,
    n_tokens: u64,
    phase: Phase,
    /// The first token's.
    step: u64,
}

/// The passes of some tokens. What is not described is taken for decode tokens, with the token's number as the step.
fn spans(sidecar: Option<&Sidecar>, tokens: std::ops::Range<u64>) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::new();
    let one = |token: u64| Span { first: token, n_tokens: 1, phase: Phase::Decode, step: token };
    let mut at = tokens.start;
    for range in sidecar.iter().flat_map(|sidecar| &sidecar.ranges) {
        spans.extend((at..range.first.min(tokens.end)).map(one));
        at = at.max(range.first);
        let end = range.end().min(tokens.end);
        // steps are below 2^32
        let known = range.position >= 0 && range.position.saturating_add_unsigned(range.n_tokens) < 1 << 32;
        while at < end {
            let inside = at - range.first;
            let of_pass = u64::from(range.tokens_per_pass);
            let left = of_pass - (inside + u64::from(range.left_out_before)) % of_pass;
            let n_tokens = if range.phase == Phase::Decode { 1 } else { left.min(end - at) };
            let step = if known { range.position as u64 + inside } else { at };
            spans.push(Span { first: at, n_tokens, phase: range.phase, step });
            at += n_tokens;
        }
    }
    spans.extend((at..tokens.end).map(one));
    spans
}
