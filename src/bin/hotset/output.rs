//! What all subcommands share in how they print: sizes, tables, one object of JSON.

use std::io::{ErrorKind, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Writes to standard output. A reader that has gone (`| head`) is no failure.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(e.into()),
        _ => Ok(()),
    }
}

/// One JSON value on lines of its own.
pub fn print_json(value: &serde_json::Value) -> anyhow::Result<()> {
    print(&format!("{value:#}\n"))
}

/// A size for people: decimal units, three or four digits (`1.48 GB`, `20736 B`).
pub fn bytes(n: u64) -> String {
    if n < 100_000 {
        return format!("{n} B");
    }
    let (mut v, mut unit) = (n as f64 / 1e3, "kB");
    for next in ["MB", "GB", "TB", "PB", "EB"] {
        if v < 1e3 {
            break;
        }
        (v, unit) = (v / 1e3, next);
    }
    let digits = if v < 10.0 { 2 } else { 1 };
    format!("{v:.digits$} {unit}")
}

/// A size from the command line: bytes, or K, M, G behind a number (powers of 1024), as in the environment.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    hotset::abi::parse_bytes(text)
        .ok_or_else(|| "bytes, or a number with K, M or G behind it (powers of 1024)".to_owned())
}

/// A bar for work that may be short: hidden, until `advance` finds that it takes longer than two seconds.
pub fn late_bar(len: u64, template: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(len), ProgressDrawTarget::hidden());
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}

/// Moves a `late_bar`.
pub fn advance(bar: &ProgressBar, position: u64) {
    if bar.is_hidden() && bar.elapsed() > Duration::from_secs(2) {
        bar.set_draw_target(ProgressDrawTarget::stderr());
    }
    bar.set_position(position);
}

/// A share from the command line: `5%`, or 0.05. The caller says which shares there can be.
pub fn parse_share(text: &str) -> Option<f64> {
    let (number, of) = text.strip_suffix('%').map_or((text, 1.0), |number| (number, 100.0));
    number.trim().parse().ok().map(|n: f64| n / of)
}

/// Lines of `label  value`, the values aligned.
pub fn facts(facts: &[(&str, String)]) -> String {
    let width = facts.iter().map(|(label, _)| label.chars().count()).max().unwrap_or(0);
    facts.iter().map(|(label, value)| format!("{label:<width$}  {value}\n")).collect()
}

/// A table with a heading; columns as wide as their widest cell, all but the first to the right.
pub fn table(heading: &[&str], rows: &[Vec<String>]) -> String {
    let heading: Vec<String> = heading.iter().map(|h| (*h).to_owned()).collect();
    let all: Vec<&Vec<String>> = std::iter::once(&heading).chain(rows).collect();
    let width = |c: usize| all.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..heading.len()).map(width).collect();
    let mut text = String::new();
    for row in all {
        let cells = row.iter().zip(&widths).enumerate();
        let cells = cells.map(|(i, (s, &w))| if i == 0 { format!("{s:<w$}") } else { format!("{s:>w$}") });
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    #[test]
    fn sizes() {
        let sizes = [(0, "0 B"), (20_736, "20736 B"), (460_800, "460.8 kB"), (1_415_577_600, "1.42 GB")];
        sizes.iter().for_each(|(n, s)| assert_eq!(super::bytes(*n), *s));
        assert_eq!(super::bytes(u64::MAX), "18.4 EB");
    }
}
