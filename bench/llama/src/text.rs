//! A text that goes through the model: read, cut, made tokens, and stepped through in windows of the context, with the logits of each token handed
//! to whoever scores them.

use std::io::IsTerminal;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};

use crate::engine::{Engine, Logits, Token};

/// The file, or only so many bytes from its beginning.
pub fn read(file: &Path, bytes: Option<usize>) -> Result<Vec<u8>> {
    let mut text = std::fs::read(file).with_context(|| file.display().to_string())?;
    if let Some(limit) = bytes {
        text.truncate(whole_characters(&text, limit));
    }
    Ok(text)
}

/// A text's tokens, without a beginning of text: every window begins with its own.
pub fn tokens(engine: &Engine, text: &[u8], file: &Path) -> Result<Vec<Token>> {
    let mut tokens = engine.tokenize(text)?;
    let bos = engine.bos();
    if bos.is_some() && tokens.first() == bos.as_ref() {
        tokens.remove(0);
    }
    if tokens.len() < 2 {
        bail!("{}: {} tokens are too short a text", file.display(), tokens.len());
    }
    Ok(tokens)
}

/// What is done with a text's logits.
pub trait Score {
    /// Of the logits that foretell a token, and that token; in the text's order.
    fn score(&mut self, logits: &[f32], target: Token) -> Result<()>;
    /// After a call of the engine: its tokens, and how long it took.
    fn decoded(&mut self, tokens: usize, time: Duration);
}

/// Feeds the tokens, `batch` at a time, in windows as long as the context, each beginning with an empty one. Each token of the text is scored
/// once, but for the first of a window without a beginning of text, which nothing foretells. Returns the number of windows.
pub fn walk(
    engine: &mut Engine,
    tokens: &[Token],
    batch: usize,
    prefill: bool,
    scores: &mut impl Score,
) -> Result<usize> {
    let bos = engine.bos();
    let (mut rest, mut windows) = (tokens, 0);
    while !rest.is_empty() {
        engine.restart();
        windows += 1;
        let room = engine.n_ctx as usize;
        // What goes into the model, and what each of its outputs is to foretell.
        let taken = rest.len().min(if bos.is_some() { room } else { room + 1 });
        let mut input: Vec<Token> = bos.into_iter().chain(rest[..taken].iter().copied()).collect();
        let targets = input[1..].to_vec();
        // Nothing is left to be foretold after the last.
        input.pop();
        for (input, targets) in input.chunks(batch).zip(targets.chunks(batch)) {
            let start = Instant::now();
            engine.decode(input, Logits::All, prefill)?;
            let time = start.elapsed();
            for (i, &target) in targets.iter().enumerate() {
                scores.score(engine.logits(i as i32)?, target)?;
            }
            scores.decoded(input.len(), time);
        }
        rest = &rest[taken..];
    }
    Ok(windows)
}

/// -ln of the probability that the logits give to the target; in f64, with the largest taken out first.
pub fn surprise(logits: &[f32], target: usize) -> f64 {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - top).exp()).sum();
    sum.ln() - f64::from(logits[target] - top)
}

/// At most `limit` bytes, without cutting a UTF-8 character.
fn whole_characters(text: &[u8], limit: usize) -> usize {
    if limit >= text.len() {
        return text.len();
    }
    // Continuation bytes are 10xxxxxx; a character has at most three. Text in another encoding is cut at the limit.
    (limit.saturating_sub(3)..=limit).rev().find(|&end| text[end] & 0xC0 != 0x80).unwrap_or(limit)
}

/// A bar on a terminal, and only if it takes longer than two seconds.
pub struct Progress {
    len: u64,
    start: Instant,
    bar: Option<ProgressBar>,
}

impl Progress {
    pub fn new(len: u64) -> Self {
        Progress { len, start: Instant::now(), bar: None }
    }

    pub fn at(&mut self, position: u64, message: String) {
        if self.bar.is_none() && self.start.elapsed() > Duration::from_secs(2) && std::io::stderr().is_terminal() {
            let bar = ProgressBar::new(self.len);
            if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len} tokens, {eta} left, {msg}") {
                bar.set_style(style);
            }
            self.bar = Some(bar);
        }
        if let Some(bar) = &self.bar {
            bar.set_message(message);
            bar.set_position(position);
        }
    }

    pub fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{surprise, whole_characters};

    #[test]
    fn surprise_of_known_distributions() {
        assert!((surprise(&[5.0; 8], 3) - 8f64.ln()).abs() < 1e-12);
        assert!((surprise(&[0.0, 1000.0], 1)).abs() < 1e-12);
        assert!((surprise(&[0.0, 1000.0], 0) - 1000.0).abs() < 1e-9);
        assert!(surprise(&[f32::NAN, f32::NAN], 0).is_nan());
    }

    #[test]
    fn characters_stay_whole() {
        let text = "aä€".as_bytes(); // 1, 2 and 3 bytes
        let cut: Vec<usize> = (0..=7).map(|limit| whole_characters(text, limit)).collect();
        assert_eq!(cut, [0, 1, 1, 3, 3, 3, 6, 6]);
        assert_eq!(whole_characters(&[0x80; 9], 5), 5);
    }
}
