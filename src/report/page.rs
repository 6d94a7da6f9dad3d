//! The page: sections of text, tables and figures, in one file that asks the network for nothing.

use std::fmt::Write;

use super::plot::{FIGURE, Plot, figure};
use crate::error::Result;

/// One HTML file.
#[derive(Clone, Debug, Default)]
pub struct Page {
    title: String,
    lead: Vec<String>,
    sections: Vec<Section>,
}

/// A part of the page under a heading of its own.
#[derive(Clone, Debug, Default)]
pub struct Section {
    title: String,
    parts: Vec<Part>,
    /// The list of sections at the top leaves it out.
    inner: bool,
}

#[derive(Clone, Debug)]
enum Part {
    Html(String),
    /// HTML in which [`FIGURE`] stands for the figure's id, which the page knows.
    Figure(String),
}

/// Rows of text under a heading. The first column names the row.
#[derive(Clone, Debug, Default)]
pub struct Table {
    heading: Vec<String>,
    rows: Vec<Vec<String>>,
}

/// Rows that a table shows; it says how many it leaves out.
const MAX_ROWS: usize = 200;

impl Table {
    pub fn new(heading: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self { heading: heading.into_iter().map(Into::into).collect(), rows: Vec::new() }
    }

    pub fn row(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    pub(super) fn html(&self) -> String {
        // Words begin at the left, numbers end at the right.
        let number = |cell: &str| cell.is_empty() || cell.starts_with(|c: char| c.is_ascii_digit() || "-+".contains(c));
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let words: Vec<bool> =
            (0..columns).map(|i| self.rows.iter().filter_map(|r| r.get(i)).any(|c| !number(c))).collect();
        let mut html = String::from(r#"<div class="scroll" tabindex="0"><table>"#);
        if self.heading.iter().any(|h| !h.is_empty()) {
            html += "<thead><tr>";
            for (i, cell) in self.heading.iter().enumerate() {
                let class = if words.get(i) == Some(&true) { r#" class="words""# } else { "" };
                let _ = write!(html, r#"<th scope="col"{class}>{}</th>"#, escape(cell));
            }
            html += "</tr></thead>";
        }
        html += "<tbody>";
        // Of long tables every so manyth row.
        let step = self.rows.len().div_ceil(MAX_ROWS).max(1);
        for row in self.rows.iter().step_by(step) {
            html += "<tr>";
            for (i, cell) in row.iter().enumerate() {
                let cell = escape(cell);
                let _ = match i {
                    0 => write!(html, r#"<th scope="row">{cell}</th>"#),
                    _ if words[i] => write!(html, r#"<td class="words">{cell}</td>"#),
                    _ => write!(html, "<td>{cell}</td>"),
                };
            }
            html += "</tr>";
        }
        html += "</tbody></table></div>";
        if step > 1 {
            let _ = write!(html, r#"<p class="note">One row of {step} is shown, of {}.</p>"#, self.rows.len());
        }
        html
    }
}

impl Section {
    pub fn new(title: impl Into<String>) -> Self {
        Self { title: title.into(), parts: Vec::new(), inner: false }
    }

    /// A section that the list at the top of the page leaves out, since it goes with the one before.
    pub fn inner(title: impl Into<String>) -> Self {
        Self { inner: true, ..Self::new(title) }
    }

    /// A paragraph.
    pub fn text(&mut self, text: &str) -> &mut Self {
        self.html(format!("<p>{}</p>\n", escape(text)))
    }

    /// A paragraph in small print: what was left out, and why.
    pub fn note(&mut self, text: &str) -> &mut Self {
        self.html(format!(r#"<p class="note">{}</p>"#, escape(text)))
    }

    /// A heading within the section.
    pub fn heading(&mut self, text: &str) -> &mut Self {
        self.html(format!("<h3>{}</h3>\n", escape(text)))
    }

    pub fn table(&mut self, table: &Table) -> &mut Self {
        self.html(table.html())
    }

    /// Facts: names and what they are.
    pub fn facts(&mut self, facts: &[(&str, String)]) -> &mut Self {
        let mut html = String::from(r#"<dl class="facts">"#);
        for (name, value) in facts {
            let class = if value.chars().count() > 16 { r#" class="long""# } else { "" };
            let _ = write!(html, "<div{class}><dt>{}</dt><dd>{}</dd></div>", escape(name), escape(value));
        }
        self.html(html + "</dl>\n")
    }

    /// A plot with its numbers; `note` says in a sentence what to look at, or what was cut.
    pub fn plot(&mut self, plot: &dyn Plot, note: &str) -> Result<&mut Self> {
        self.parts.push(Part::Figure(figure(plot, note)?));
        Ok(self)
    }

    fn html(&mut self, html: String) -> &mut Self {
        self.parts.push(Part::Html(html));
        self
    }
}

impl Page {
    pub fn new(title: impl Into<String>) -> Self {
        Self { title: title.into(), ..Self::default() }
    }

    /// A paragraph under the title.
    pub fn lead(&mut self, text: impl Into<String>) -> &mut Self {
        self.lead.push(text.into());
        self
    }

    pub fn section(&mut self, section: Section) -> &mut Self {
        self.sections.push(section);
        self
    }

    /// The file. The same page is the same bytes.
    pub fn html(&self) -> String {
        let title = escape(&self.title);
        let mut html = format!(
            r#"<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{}</style>
</head>
<body>
<header><h1>{title}</h1>
"#,
            include_str!("page.css")
        );
        for text in &self.lead {
            let _ = writeln!(html, "<p>{}</p>", escape(text));
        }
        html += "</header>\n";
        if self.sections.len() > 2 {
            html += r#"<nav aria-label="Sections"><ul>"#;
            for (i, section) in self.sections.iter().enumerate().filter(|(_, section)| !section.inner) {
                let _ = write!(html, r##"<li><a href="#s{i}">{}</a></li>"##, escape(&section.title));
            }
            html += "</ul></nav>\n";
        }
        html += "<main>\n";
        let mut figures = 0;
        for (i, section) in self.sections.iter().enumerate() {
            let _ = writeln!(html, r#"<section id="s{i}"><h2>{}</h2>"#, escape(&section.title));
            for part in &section.parts {
                match part {
                    Part::Html(part) => html += part,
                    Part::Figure(part) => {
                        html += &part.replace(FIGURE, &format!("fig{figures}"));
                        figures += 1;
                    }
                }
            }
            html += "</section>\n";
        }
        let _ = write!(html, "</main>\n<script>\n{}</script>\n</body>\n</html>\n", include_str!("page.js"));
        html
    }
}

/// Text as HTML, in elements and in attributes.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            '\n' => out += "&#10;",
            c if c.is_control() => out += "\u{fffd}",
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_named_cannot_become_markup() {
        let mut page = Page::new("<script>alert(1)</script>");
        let mut section = Section::new("a & b");
        section.text("\"><img src=x>\u{0}");
        let mut table = Table::new(["<b>"]);
        table.row(["'</td>'"]);
        section.table(&table);
        page.section(section);
        let html = page.html();
        assert!(!html.contains("<script>alert") && !html.contains("<img") && !html.contains("<b>"));
        assert!(html.contains("&lt;script&gt;alert(1)&lt;/script&gt;") && html.contains("a &amp; b"));
    }

    #[test]
    fn long_tables_are_thinned_out_and_say_so() {
        let mut table = Table::new(["n"]);
        (0..1000).for_each(|n| table.row([n.to_string()]));
        let html = table.html();
        assert_eq!(html.matches("<tr>").count(), 201);
        assert!(html.contains("One row of 5 is shown, of 1000."));
    }
}
