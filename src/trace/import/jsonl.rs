//! JSONL of routed ids: a line a token, `{"tok": 0, "layers": [[3, 17, ...], ...]}`, a list of k ids for each layer.
//!
//! Such a file has no scores, and often no ranks either (ids ascending). Every score is recorded as 0: all equal, which
//! reranking leaves alone, and ids stay in the order of the file. The sidecar's `score_space` is `none`. All tokens are decode
//! tokens, at the positions that `tok` gives; it must rise by one. A layer whose list is empty in every line has no experts, and
//! is no layer of the trace (`shape.blocks`). Keys other than the two are ignored.

use std::collections::BTreeSet;
use std::io::{BufRead, Seek, Write};

use half::f16;
use serde_json::json;

use super::lines::{Lines, short};
use super::{ImportOptions, MAX_EXPERTS, Output};
use crate::error::{Result, err};
use crate::trace::block::Phase;
use crate::trace::sidecar::Sidecar;

/// Lists within lists that an ignored value may have.
const MAX_DEPTH: usize = 64;

/// Reads a JSONL file of ids and writes a trace. Returns what goes beside it.
pub fn jsonl(
    input: &mut (impl BufRead + Seek),
    out: &mut (impl Write + Seek),
    options: ImportOptions,
) -> Result<Sidecar> {
    options.check()?;
    let max = options.n_experts.map_or(MAX_EXPERTS, u64::from) - 1;
    let mut shape: Option<(Vec<bool>, usize)> = None;
    let mut highest = 0;
    each_token(input, max, |number, token| {
        let used: Vec<bool> = token.ends.iter().scan(0, |at, &end| Some(std::mem::replace(at, end) < end)).collect();
        let k = token.list(used.iter().position(|u| *u).unwrap_or(0)).len();
        if k == 0 || k > u16::MAX.into() || used.len() > u16::MAX.into() {
            return Err(err!(Format, "line {number}: {} layers of {k} ids: 1 to 65535 of both wanted", used.len()));
        }
        let (layers, k) = shape.get_or_insert((used, k));
        if layers.len() != token.ends.len() {
            let (wanted, found) = (layers.len(), token.ends.len());
            return Err(err!(Format, "line {number}: {wanted} layers wanted, as in line 1, {found} found"));
        }
        for (layer, &used) in layers.iter().enumerate() {
            let (ids, wanted) = (token.list(layer), if used { *k } else { 0 });
            let column = token.columns[layer];
            if ids.len() != wanted {
                let found = ids.len();
                return Err(err!(
                    Format,
                    "line {number}, column {column}: layer {layer}: {wanted} ids wanted, {found} found"
                ));
            }
            let mut sorted = ids.to_vec();
            sorted.sort_unstable();
            if let Some(two) = sorted.windows(2).find(|two| two[0] == two[1]) {
                return Err(err!(Format, "line {number}, column {column}: layer {layer}: expert {} twice", two[0]));
            }
            highest = sorted.last().map_or(highest, |&id| highest.max(id));
        }
        Ok(())
    })?;
    let Some((used, k)) = shape else { return Err(err!(Format, "no lines, and so no tokens")) };
    let layers: BTreeSet<u16> = (0..).zip(&used).filter(|(_, used)| **used).map(|(layer, _)| layer).collect();
    let n_experts = options.n_experts.unwrap_or(highest + 1);
    let mut output = Output::new(out, layers.len(), n_experts, k as u16)?;
    let scores = vec![f16::ZERO; k];
    each_token(input, max, |_, token| {
        for &layer in &layers {
            output.record(token.list(layer.into()), &scores)?;
        }
        output.end_pass(1, Phase::Decode, token.tok, 0)
    })?;
    let sidecar = output.finish(&layers, "none")?;
    let import = json!({ "format": "jsonl", "n_layer": used.len() });
    Ok(Sidecar { more: [("import".to_owned(), import)].into_iter().collect(), ..sidecar })
}

/// A line, taken apart; its memory is used again for the next.
#[derive(Default)]
struct Token {
    tok: i64,
    /// The ids of all layers, and where each layer's end.
    ids: Vec<u16>,
    ends: Vec<usize>,
    /// Where each layer's list begins in the line.
    columns: Vec<usize>,
}

impl Token {
    fn list(&self, layer: usize) -> &[u16] {
        let begin = if layer == 0 { 0 } else { self.ends[layer - 1] };
        self.ends.get(layer).map_or(&[], |&end| &self.ids[begin..end])
    }
}

fn each_token(
    input: &mut (impl BufRead + Seek),
    max: u64,
    mut take: impl FnMut(u64, &Token) -> Result<()>,
) -> Result<()> {
    let mut lines = Lines::new(input)?;
    let mut token = Token::default();
    let mut before = None;
    while let Some((number, line)) = lines.next()? {
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        Cursor { line, at: 0, number }.token(max, &mut token)?;
        if let Some(before) = before.filter(|&before: &i64| before + 1 != token.tok) {
            let tok = token.tok;
            return Err(err!(Format, "line {number}: \"tok\" {tok} after {before}: tokens are missing"));
        }
        before = Some(token.tok);
        take(number, &token)?;
    }
    Ok(())
}

/// A place in a line of JSON.
struct Cursor<'a> {
    line: &'a [u8],
    at: usize,
    number: u64,
}

impl<'a> Cursor<'a> {
    fn token(&mut self, max: u64, token: &mut Token) -> Result<()> {
        let (mut tok, mut layers) = (None, false);
        self.wanted(b'{')?;
        let mut more = !self.found(b'}');
        while more {
            self.blanks();
            let begin = self.at;
            let key = self.string()?;
            self.wanted(b':')?;
            match key {
                b"tok" if tok.is_none() => tok = Some(self.whole(i64::MAX as u64 - 1)? as i64),
                b"layers" if !layers => {
                    layers = true;
                    self.layers(max, token)?;
                }
                b"tok" | b"layers" => {
                    self.at = begin;
                    return Err(self.error("each key once"));
                }
                _ => self.skip()?,
            }
            more = self.next_of(b'}')?;
        }
        self.blanks();
        if self.at < self.line.len() {
            return Err(self.error("the end of the line"));
        }
        match tok {
            Some(tok) if layers => token.tok = tok,
            None => return Err(self.error("a key \"tok\"")),
            Some(_) => return Err(self.error("a key \"layers\"")),
        }
        Ok(())
    }

    fn layers(&mut self, max: u64, token: &mut Token) -> Result<()> {
        token.ids.clear();
        token.ends.clear();
        token.columns.clear();
        self.wanted(b'[')?;
        let mut more = !self.found(b']');
        while more {
            self.wanted(b'[')?;
            token.columns.push(self.at);
            let mut ids = !self.found(b']');
            while ids {
                token.ids.push(self.whole(max)? as u16);
                ids = self.next_of(b']')?;
            }
            token.ends.push(token.ids.len());
            more = self.next_of(b']')?;
        }
        Ok(())
    }

    /// After an element: whether another one follows.
    fn next_of(&mut self, end: u8) -> Result<bool> {
        if self.found(end) {
            return Ok(false);
        }
        match self.found(b',') {
            true => Ok(true),
            false => Err(self.error(&format!("\",\" or \"{}\"", char::from(end)))),
        }
    }

    fn whole(&mut self, max: u64) -> Result<u64> {
        self.blanks();
        let begin = self.at;
        self.at += self.line[begin..].iter().take_while(|b| !b",]}: \t\"[{".contains(b)).count();
        let text = &self.line[begin..self.at];
        let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
        let value = std::str::from_utf8(text).ok().filter(|_| digits).and_then(|t| t.parse().ok());
        value.filter(|&n: &u64| n <= max).ok_or_else(|| {
            self.at = begin;
            self.error(&format!("a whole number from 0 to {max}"))
        })
    }

    fn string(&mut self) -> Result<&'a [u8]> {
        self.wanted(b'"')?;
        let begin = self.at;
        while let Some(&byte) = self.line.get(self.at) {
            match byte {
                b'"' => {
                    self.at += 1;
                    return Ok(&self.line[begin..self.at - 1]);
                }
                b'\\' => self.at += 2,
                _ => self.at += 1,
            }
        }
        self.at = self.line.len();
        Err(self.error("a string that ends"))
    }

    /// Passes over any value: brackets and strings are followed, not judged.
    fn skip(&mut self) -> Result<()> {
        let mut depth = 0;
        loop {
            self.blanks();
            match self.line.get(self.at) {
                Some(b'"') => drop(self.string()?),
                Some(b'[' | b'{') if depth == MAX_DEPTH => return Err(self.error("fewer brackets within brackets")),
                Some(b'[' | b'{') => (self.at, depth) = (self.at + 1, depth + 1),
                Some(b']' | b'}') if depth > 0 => (self.at, depth) = (self.at + 1, depth - 1),
                Some(b',' | b':') if depth > 0 => self.at += 1,
                Some(b) if b.is_ascii_alphanumeric() || b"+-.".contains(b) => {
                    let rest = &self.line[self.at..];
                    self.at += rest.iter().take_while(|b| b.is_ascii_alphanumeric() || b"+-.".contains(b)).count();
                }
                _ => return Err(self.error("a value")),
            }
            if depth == 0 {
                return Ok(());
            }
        }
    }

    fn wanted(&mut self, byte: u8) -> Result<()> {
        match self.found(byte) {
            true => Ok(()),
            false => Err(self.error(&format!("\"{}\"", char::from(byte)))),
        }
    }

    fn found(&mut self, byte: u8) -> bool {
        self.blanks();
        let found = self.line.get(self.at) == Some(&byte);
        self.at += usize::from(found);
        found
    }

    fn blanks(&mut self) {
        self.at += self.line[self.at.min(self.line.len())..].iter().take_while(|b| b.is_ascii_whitespace()).count();
    }

    fn error(&self, wanted: &str) -> crate::error::Error {
        let rest = &self.line[self.at.min(self.line.len())..];
        let found = if rest.is_empty() { "the end of the line".to_owned() } else { short(rest) };
        err!(Format, "line {}, column {}: {wanted} wanted, {found} found", self.number, self.at + 1)
    }
}
