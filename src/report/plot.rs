//! What all plots share: how a [`Plot`] becomes a figure of the page (drawn twice, for wide and narrow screens), marks that answer to the pointer, and labels
//! that keep apart.

use std::fmt::Write;

use super::axis::{FONT, Place};
use super::ink::text_width;
use super::page::{Table, escape};
use crate::error::Result;

/// Width in pixels of what is drawn for a wide page and for a phone.
pub(super) const WIDTHS: [(&str, i32); 2] = [("wide", 880), ("narrow", 358)];

/// Something that a section shows as a figure. Its title says what is seen; its numbers stand in a table beside it.
pub trait Plot {
    fn title(&self) -> &str;

    /// The SVG of it at a width in pixels, as the elements inside, and its size.
    fn draw(&self, width: i32, wide: bool) -> Result<(String, (i32, i32))>;

    /// Names of the series by number, for the legend; empty where there is one only.
    fn legend(&self) -> Vec<Key> {
        Vec::new()
    }

    /// The numbers that are drawn.
    fn table(&self) -> Table;

    /// What goes before the drawings: shapes that they share, and data for the script.
    /// Ids in it begin with [`FIGURE`].
    fn shared(&self) -> String {
        String::new()
    }
}

/// An entry of a legend.
#[derive(Clone, Debug)]
pub struct Key {
    /// CSS class of the swatch: `s0` ... for series, others as the style sheet has them.
    pub class: String,
    pub text: String,
    /// The wide drawing names it itself.
    pub direct: bool,
}

/// Stands for the id of a figure until the page knows it. Texts cannot have it: a control character is escaped everywhere.
pub const FIGURE: char = '\u{1}';

/// The figure of a plot.
pub(super) fn figure(plot: &dyn Plot, note: &str) -> Result<String> {
    let title = escape(plot.title());
    let mut html = format!(r#"<figure id="{FIGURE}"><figcaption>{title}</figcaption>"#);
    let legend = plot.legend();
    if !legend.is_empty() {
        let direct = if legend.iter().all(|key| key.direct) { " only-narrow" } else { "" };
        let _ = write!(html, r#"<ul class="legend{direct}">"#);
        for Key { class, text, .. } in &legend {
            let _ = write!(html, r#"<li><span class="swatch {class}"></span>{}</li>"#, escape(text));
        }
        html += "</ul>";
    }
    html += &plot.shared();
    for (class, width) in WIDTHS {
        let (inner, (width, height)) = plot.draw(width, class == "wide")?;
        let _ = write!(
            html,
            r#"<div class="scroll {class}"><svg role="img" aria-label="{title}" viewBox="0 0 {width} {height}" width="{width}" height="{height}">{inner}</svg></div>"#
        );
    }
    if !note.is_empty() {
        let _ = write!(html, r#"<p class="note">{}</p>"#, escape(note));
    }
    let table = plot.table();
    if !table.is_empty() {
        let _ = write!(html, "<details><summary>Numbers</summary>{}</details>", table.html());
    }
    Ok(html + "</figure>\n")
}

/// CSS class of a series: its colour.
pub(super) fn series_class(i: usize) -> String {
    format!("s{}", i % super::SERIES)
}

/// A dot that shows `tip` to the pointer. `r` 0: only the tip, over a place where something is drawn already.
pub(super) fn mark(out: &mut String, at: Place, r: f64, series: usize, tip: &str) {
    let series = series_class(series);
    let (class, r) = if r > 0.0 { ("mark", r) } else { ("mark bare", 7.0) };
    let _ = write!(
        out,
        r#"<circle class="{class} {series}" cx="{:.1}" cy="{:.1}" r="{r}" data-tip="{}"/>"#,
        at.0,
        at.1,
        escape(tip)
    );
}

/// A text that stands beside what it names.
pub(super) fn label(out: &mut String, at: Place, anchor: &str, class: &str, text: &str) {
    let text = escape(text);
    let _ = write!(
        out,
        r#"<text class="label {class}" x="{:.1}" y="{:.1}" font-size="{FONT}" text-anchor="{anchor}">{text}</text>"#,
        at.0, at.1
    );
}

/// Heights of labels, moved so far that none overlaps another: in the order given.
pub(super) fn apart(wanted: &[f64], gap: f64, bottom: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by(|&a, &b| wanted[a].total_cmp(&wanted[b]));
    let mut placed = wanted.to_vec();
    for pair in 1..order.len() {
        let (above, below) = (order[pair - 1], order[pair]);
        placed[below] = placed[below].max(placed[above] + gap);
    }
    // Those that were pushed out at the bottom push back.
    let mut limit = bottom;
    for &i in order.iter().rev() {
        placed[i] = placed[i].min(limit);
        limit = placed[i] - gap;
    }
    placed
}

/// Boxes that are taken: a label is set only where it covers none.
#[derive(Default)]
pub(super) struct Taken(Vec<[f64; 4]>);

impl Taken {
    /// Keeps this room free.
    pub(super) fn keep(&mut self, (x, y): Place, r: f64) {
        self.0.push([x - r, y - r, x + r, y + r]);
    }

    /// The first side of a point on which the text has room within the bounds: its anchor and place.
    pub(super) fn beside(&mut self, (x, y): Place, text: &str, bounds: [f64; 4]) -> Option<(&'static str, Place)> {
        let width = text_width(text, FONT);
        let sides = [
            ("start", x + 5.0, y - 7.0),
            ("end", x - 5.0, y - 7.0),
            ("start", x + 5.0, y + 17.0),
            ("end", x - 5.0, y + 17.0),
            ("start", x + 9.0, y + 4.0),
            ("end", x - 9.0, y + 4.0),
        ];
        for (anchor, x, y) in sides {
            let left = if anchor == "start" { x } else { x - width };
            let room = [left, y - FONT, left + width, y + 3.0];
            let inside = room[0] >= bounds[0] && room[1] >= bounds[1] && room[2] <= bounds[2] && room[3] <= bounds[3];
            let covers = |t: &[f64; 4]| t[0] < room[2] && room[0] < t[2] && t[1] < room[3] && room[1] < t[3];
            if inside && !self.0.iter().any(covers) {
                self.0.push(room);
                return Some((anchor, (x, y)));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_keep_apart() {
        assert_eq!(apart(&[10.0, 12.0, 50.0], 14.0, 100.0), [10.0, 24.0, 50.0]);
        assert_eq!(apart(&[95.0, 90.0], 14.0, 100.0), [100.0, 86.0]);
        let mut taken = Taken::default();
        let bounds = [0.0, 0.0, 200.0, 100.0];
        let first = taken.beside((20.0, 50.0), "F 0.5", bounds);
        let second = taken.beside((21.0, 50.0), "F 0.75", bounds);
        assert!(first.is_some() && second.is_some());
        assert_ne!(first.map(|f| f.1.1), second.map(|s| s.1.1));
        assert!(taken.beside((199.0, 1.0), "wider than the whole plot, by a good deal, so nowhere", bounds).is_none());
    }
}
