//! Tables of sweeps, read back: to go on with one that was cut off, to put shards together, to check one.

use std::path::Path;

use super::row::Format;
use crate::error::{Result, err};

/// A larger file is refused: rows are some hundred bytes.
pub(super) const MAX_BYTES: u64 = 1 << 30;

/// Columns and rows as text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    pub columns: Vec<String>,
    pub rows: Vec<Vec<String>>,
}

/// By the ending of the name: `.csv` or `.jsonl`. What is written as `.parquet` is CSV until then, and read back as CSV.
pub fn format_of(path: &Path) -> Result<Format> {
    match path.extension().and_then(|e| e.to_str()) {
        Some("csv") => Ok(Format::Csv),
        Some("jsonl") => Ok(Format::Jsonl),
        Some("parquet") if cfg!(feature = "parquet") => Ok(Format::Csv),
        Some("parquet") => Err(err!(
            Argument,
            "{}: this hotset was built without Parquet; build it with --features parquet, or choose .csv or .jsonl",
            path.display()
        )),
        _ => Err(err!(Argument, "{}: the name must end in .csv, .jsonl or .parquet", path.display())),
    }
}

/// Whether the table is written at once, when all rows are there, and not row by row.
pub fn is_parquet(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "parquet")
}

/// Writes a whole table from its text.
pub fn write(path: &Path, text: &str) -> Result<()> {
    #[cfg(feature = "parquet")]
    if is_parquet(path) {
        return super::parquet::write(path, text);
    }
    std::fs::write(path, text).map_err(|e| err!(Io, "{}: {e}", path.display()))
}

/// The text of a table, its whole lines only: behind the last line's end a run was cut off.
pub fn whole_lines(path: &Path) -> Result<String> {
    let name = path.display();
    let length = std::fs::metadata(path).map_err(|e| err!(Io, "{name}: {e}"))?.len();
    if length > MAX_BYTES {
        return Err(err!(Format, "{name}: {length} bytes, a sweep has at most {MAX_BYTES}"));
    }
    #[cfg(feature = "parquet")]
    if is_parquet(path) {
        return super::parquet::read(path);
    }
    let mut text = std::fs::read_to_string(path).map_err(|e| err!(Io, "{name}: {e}"))?;
    text.truncate(text.rfind('\n').map_or(0, |at| at + 1));
    Ok(text)
}

impl Table {
    pub fn open(path: &Path) -> Result<Self> {
        let format = format_of(path)?;
        Self::parse(&whole_lines(path)?, format).map_err(|e| err!(Format, "{}: {e}", path.display()))
    }

    /// `Format`, with the line, where a row is none or has other columns than the first.
    pub fn parse(text: &str, format: Format) -> Result<Self> {
        let mut table = Self::default();
        for (number, line) in text.lines().enumerate() {
            let number = number + 1;
            let row = match format {
                Format::Csv => csv(line).ok_or_else(|| err!(Format, "line {number}: a quote without its end"))?,
                Format::Jsonl => {
                    // Maps come in the order of their keys: the same for every line.
                    let object: serde_json::Map<String, serde_json::Value> =
                        serde_json::from_str(line).map_err(|e| err!(Format, "line {number}: {e}"))?;
                    let columns: Vec<String> = object.keys().cloned().collect();
                    if table.columns.is_empty() {
                        table.columns = columns;
                    } else if table.columns != columns {
                        return Err(err!(Format, "line {number}: other columns than the first line"));
                    }
                    let text = |v: &serde_json::Value| v.as_str().map_or_else(|| v.to_string(), str::to_owned);
                    object.values().map(text).collect()
                }
            };
            if table.columns.is_empty() {
                table.columns = row;
            } else if row.len() == table.columns.len() {
                table.rows.push(row);
            } else {
                let (found, wanted) = (row.len(), table.columns.len());
                return Err(err!(Format, "line {number}: {found} values, {wanted} columns"));
            }
        }
        Ok(table)
    }

    /// A column's value in a row, as text; `Format` where there is no such column.
    pub fn text<'a>(&self, row: &'a [String], column: &str) -> Result<&'a str> {
        let at = self.columns.iter().position(|c| c == column);
        at.and_then(|at| row.get(at)).map(String::as_str).ok_or_else(|| err!(Format, "there is no column '{column}'"))
    }

    /// The same as a finite number.
    pub fn number(&self, row: &[String], column: &str) -> Result<f64> {
        let text = self.text(row, column)?;
        let number = text.parse().ok().filter(|n: &f64| n.is_finite());
        number.ok_or_else(|| err!(Format, "column '{column}': '{text}' is no number"))
    }
}

/// The values of one line (no line ends within quotes); None where a quote has no end.
fn csv(line: &str) -> Option<Vec<String>> {
    let (mut cells, mut cell, mut quoted) = (Vec::new(), String::new(), false);
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '"' if quoted && chars.next_if_eq(&'"').is_some() => cell.push('"'),
            '"' if quoted || cell.is_empty() => quoted = !quoted,
            ',' if !quoted => cells.push(std::mem::take(&mut cell)),
            c => cell.push(c),
        }
    }
    cells.push(cell);
    (!quoted).then_some(cells)
}

/// Puts shards of one sweep together: their lines in the order of their settings. `Format` where they are not of the same sweep, or a
/// setting is missing or there twice.
pub fn merge(shards: &[(&Path, String)], format: Format) -> Result<String> {
    let mut heading: Option<&str> = None;
    let mut lines: Vec<(usize, &str)> = Vec::new();
    let mut of: Option<usize> = None;
    for (path, text) in shards {
        let at = |e: crate::Error| err!(Format, "{}: {e}", path.display());
        let table = Table::parse(text, format).map_err(at)?;
        let mut rest = text.lines();
        if format == Format::Csv {
            let first = rest.next().unwrap_or_default();
            if *heading.get_or_insert(first) != first {
                return Err(err!(Format, "{}: other columns than the first shard", path.display()));
            }
        }
        for (row, line) in table.rows.iter().zip(rest) {
            let setting = table.number(row, "setting").map_err(at)? as usize;
            let all = table.number(row, "of").map_err(at)? as usize;
            if *of.get_or_insert(all) != all {
                return Err(err!(
                    Format,
                    "{}: of {all} settings, the first shard of {}",
                    path.display(),
                    of.unwrap_or(0)
                ));
            }
            lines.push((setting, line));
        }
    }
    lines.sort_by_key(|(setting, _)| *setting);
    let of = of.unwrap_or(0);
    for i in 0..of.max(lines.len()) {
        match lines.get(i) {
            Some((setting, _)) if *setting == i => {}
            Some((setting, _)) if *setting < i => return Err(err!(Format, "setting {setting} is there twice")),
            _ => return Err(err!(Format, "setting {i} of {of} is missing")),
        }
    }
    let lines = heading.into_iter().chain(lines.into_iter().map(|(_, line)| line));
    Ok(lines.flat_map(|line| [line, "\n"]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes() {
        assert_eq!(csv(r#"a,"b,""c""",,d"#).unwrap(), ["a", r#"b,"c""#, "", "d"]);
        assert_eq!(csv(r#"a,"b"#), None);
        assert!(Table::parse("a,b\n1\n", Format::Csv).unwrap_err().detail.contains("line 2"));
        assert!(Table::parse("{\"a\":1}\n{\"b\":1}\n", Format::Jsonl).is_err());
    }

    #[test]
    fn shards() {
        let (a, b) = (Path::new("a"), Path::new("b"));
        let part = |rows: &str| format!("setting,of,x\n{rows}");
        let merged = |x: &str, y: &str| merge(&[(a, part(x)), (b, part(y))], Format::Csv);
        assert_eq!(merged("2,3,c\n", "0,3,a\n1,3,b\n").unwrap(), part("0,3,a\n1,3,b\n2,3,c\n"));
        assert!(merged("0,3,a\n", "2,3,c\n").unwrap_err().detail.contains("setting 1 of 3 is missing"));
        assert!(merged("0,2,a\n", "0,2,a\n1,2,b\n").unwrap_err().detail.contains("setting 0 is there twice"));
        assert!(merged("0,2,a\n", "1,3,a\n").unwrap_err().detail.contains("of 3 settings"));
    }
}
