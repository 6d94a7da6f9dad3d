//! JSON text taken apart by place, so that a fault in a value can be named with its line.
//!
//! [`Located::parse`] has serde_json read the whole text first: what is no JSON ends there, with serde_json's own line. After that the
//! text is known to be well formed, and finding where a value begins and ends takes only brackets and quotation marks.

use serde_json::Value;

use crate::error::{Result, err};

/// A value in a text.
#[derive(Clone, Copy)]
pub struct Located<'a> {
    text: &'a [u8],
    /// First byte of the value, and the one behind it.
    span: (usize, usize),
}

impl<'a> Located<'a> {
    /// The value that the text is. `Format` with the line where it is no JSON.
    pub fn parse(text: &'a [u8]) -> Result<Self> {
        serde_json::from_slice::<Value>(text).map_err(|e| err!(Format, "line {}: {e}", e.line()))?;
        let start = skip_space(text, 0);
        Ok(Self { text, span: (start, end_of(text, start)) })
    }

    /// From 1.
    pub fn line(&self) -> usize {
        1 + self.text[..self.span.0].iter().filter(|&&b| b == b'\n').count()
    }

    pub fn value(&self) -> Value {
        serde_json::from_slice(&self.text[self.span.0..self.span.1]).unwrap_or_default()
    }

    /// The members of an object in the text's order; None where it is none.
    pub fn members(&self) -> Option<Vec<(String, Self)>> {
        let parts = self.parts(b'{')?;
        let one = |&(start, end): &(usize, usize)| {
            let key_end = end_of(self.text, start);
            let key = serde_json::from_slice(&self.text[start..key_end]).unwrap_or_default();
            let colon = skip_space(self.text, key_end);
            (key, Self { text: self.text, span: (skip_space(self.text, colon + 1), end) })
        };
        Some(parts.iter().map(one).collect())
    }

    /// The elements of an array; None where it is none.
    pub fn elements(&self) -> Option<Vec<Self>> {
        let one = |&span: &(usize, usize)| Self { text: self.text, span };
        Some(self.parts(b'[')?.iter().map(one).collect())
    }

    /// What stands between the commas of an object or array.
    fn parts(&self, open: u8) -> Option<Vec<(usize, usize)>> {
        let (start, end) = self.span;
        if self.text.get(start) != Some(&open) {
            return None;
        }
        let mut parts = Vec::new();
        let mut at = skip_space(self.text, start + 1);
        while at + 1 < end {
            let mut part_end = end_of(self.text, at);
            if open == b'{' {
                let colon = skip_space(self.text, part_end);
                part_end = end_of(self.text, skip_space(self.text, colon + 1));
            }
            parts.push((at, part_end));
            // over the comma, or the closing bracket
            at = skip_space(self.text, skip_space(self.text, part_end) + 1);
        }
        Some(parts)
    }
}

fn skip_space(text: &[u8], at: usize) -> usize {
    let space = text.iter().skip(at).take_while(|b| b.is_ascii_whitespace()).count();
    at + space
}

/// The byte behind the value that begins at `start`.
fn end_of(text: &[u8], start: usize) -> usize {
    let (mut at, mut depth) = (start, 0usize);
    while at < text.len() {
        match text[at] {
            b'"' => {
                at += 1;
                while at < text.len() && text[at] != b'"' {
                    at += if text[at] == b'\\' { 2 } else { 1 };
                }
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            _ => {
                // the last byte of a number or a word
                let ends = |b: &u8| matches!(b, b',' | b':' | b'}' | b']') || b.is_ascii_whitespace();
                if depth > 0 || !text.get(at + 1).is_none_or(ends) {
                    at += 1;
                    continue;
                }
            }
        }
        at += 1;
        if depth == 0 {
            break;
        }
    }
    at.min(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn parts_are_what_serde_json_reads() {
        let text =
            b" {\n \"a\\\"}\": [1, -2.5e3 ,\n{\"x\":null}, \"]\\\\\", [], {}],\n\"b\" :true,\"c\":\n {\"d\":\"\"} }\n";
        let all = Located::parse(text).unwrap();
        assert_eq!(all.value(), serde_json::from_slice::<Value>(text).unwrap());
        let members = all.members().unwrap();
        let seen: Vec<_> = members.iter().map(|(k, v)| (k.as_str(), v.line(), v.value())).collect();
        let list = json!([1, -2.5e3, { "x": null }, "]\\", [], {}]);
        assert_eq!(seen, [("a\"}", 2, list.clone()), ("b", 4, json!(true)), ("c", 5, json!({ "d": "" }))]);
        let elements = members[0].1.elements().unwrap();
        assert_eq!(elements.iter().map(Located::value).collect::<Vec<_>>(), *list.as_array().unwrap());
        assert_eq!(elements.iter().map(Located::line).collect::<Vec<_>>(), [2, 2, 3, 3, 3, 3]);
        assert!(members[1].1.elements().is_none() && elements[4].members().is_none());
        assert!(elements[4].elements().unwrap().is_empty() && elements[5].members().unwrap().is_empty());
    }

    #[test]
    fn what_is_no_json_is_named_with_its_line() {
        for (text, line) in [("", 1), ("{\n\"a\": }", 2), ("[1,\n\n2", 3), ("[NaN]", 1), ("{}\n{}", 2), ("[1e999]", 1)]
        {
            let e = Located::parse(text.as_bytes()).err().unwrap();
            assert!(e.detail.starts_with(&format!("line {line}: ")), "{text}: {e}");
        }
    }
}
