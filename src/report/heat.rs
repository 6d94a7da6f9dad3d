//! Heat maps: a colour a cell, rows by columns. Cells of one level are one path, which the drawings for wide and narrow screens share; what a
//! cell holds is told by the page's script from one list of numbers.

use std::fmt::Write;

use serde_json::json;

use super::axis::{Axis, Scale, number};
use super::axis::{Frame, Side, place};
use super::bars::rows;
use super::page::Table;
use super::plot::{FIGURE, Key, Plot};
use crate::error::Result;

/// Steps of colour.
const LEVELS: usize = 10;

#[derive(Clone, Debug)]
pub struct HeatMap {
    pub title: String,
    /// What columns and rows are.
    pub x_label: String,
    pub y_label: String,
    pub columns: Vec<String>,
    /// From the top.
    pub rows: Vec<String>,
    /// Row by row; None: nothing is known, or nothing is there.
    pub cells: Vec<Option<f64>>,
    /// What a cell counts, with its unit, and how it reads.
    pub value: Axis,
    /// More to say of a cell, row by row; empty where there is none.
    pub details: Vec<String>,
    /// Cells where something else happened, as a name and row-by-row flags: marked by a dot.
    pub flagged: Option<(String, Vec<bool>)>,
}

impl HeatMap {
    pub fn new(title: impl Into<String>, x_label: impl Into<String>, y_label: impl Into<String>, value: Axis) -> Self {
        Self {
            title: title.into(),
            x_label: x_label.into(),
            y_label: y_label.into(),
            columns: Vec::new(),
            rows: Vec::new(),
            cells: Vec::new(),
            value,
            details: Vec::new(),
            flagged: None,
        }
    }

    /// The numbers at which colours begin and end.
    fn bounds(&self) -> (f64, f64) {
        let known = self.cells.iter().flatten().copied().filter(|v| v.is_finite());
        let (low, high) = known.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
        let (low, high) = (self.value.from.unwrap_or(low), self.value.to.unwrap_or(high));
        match (low.is_finite(), high > low) {
            (true, true) => (low, high),
            (true, false) => (low.min(0.0), low.max(0.0) + 1.0),
            (false, _) => (0.0, 1.0),
        }
    }

    fn level(&self, v: f64, (low, high): (f64, f64)) -> usize {
        (((v - low) / (high - low) * LEVELS as f64).floor().max(0.0) as usize).min(LEVELS - 1)
    }

    /// One path of those cells: neighbours in a row are one rectangle.
    fn path(&self, wanted: impl Fn(usize) -> bool) -> String {
        let (n, mut d) = (self.columns.len(), String::new());
        for row in 0..self.rows.len() {
            let mut column = 0;
            while column < n {
                let begin = column;
                while column < n && wanted(row * n + column) {
                    column += 1;
                }
                if column > begin {
                    let _ = write!(d, "M{begin} {row}h{}v1h-{}z", column - begin, column - begin);
                }
                column += 1;
            }
        }
        d
    }

    fn cell(&self, i: usize) -> Option<f64> {
        self.cells.get(i).copied().flatten().filter(|v| v.is_finite())
    }
}

impl Plot for HeatMap {
    fn title(&self) -> &str {
        &self.title
    }

    fn shared(&self) -> String {
        let bounds = self.bounds();
        let mut html =
            format!(r#"<svg class="shared" width="0" height="0" aria-hidden="true"><g id="{FIGURE}-cells">"#);
        for level in 0..LEVELS {
            let d = self.path(|i| self.cell(i).is_some_and(|v| self.level(v, bounds) == level));
            if !d.is_empty() {
                let _ = write!(html, r#"<path class="h{level}" d="{d}"/>"#);
            }
        }
        html += "</g></svg>";
        // What the script shows: texts, so that numbers read as they do elsewhere.
        let cells: Vec<String> = (0..self.columns.len() * self.rows.len())
            .map(|i| self.cell(i).map_or(String::new(), |v| self.value.format(v)))
            .collect();
        let data = json!({
            "x": self.x_label, "y": self.y_label, "value": self.value.label, "columns": self.columns, "rows": self.rows,
            "cells": cells, "details": self.details,
        });
        // `<` cannot end the element if it is not there.
        let data = data.to_string().replace('<', "\\u003c");
        let _ = write!(html, r#"<script type="application/json" id="{FIGURE}-data">{data}</script>"#);
        html
    }

    fn draw(&self, width: i32, wide: bool) -> Result<(String, (i32, i32))> {
        let (n_rows, n_columns) = (self.rows.len().max(1), self.columns.len().max(1));
        // On a phone a fine map scrolls in its own frame.
        let width = if wide { width } else { width.max((3 * n_columns as i32 + 60).min(700)) };
        let cell = (420 / n_rows as i32).clamp(7, 22);
        let height = n_rows as i32 * cell + 64;
        let frame = Frame {
            size: (width, height),
            x: Side::Names { label: &self.x_label, names: &self.columns },
            y: Side::Names { label: &self.y_label, names: &self.rows },
            right: 10,
        };
        let x = Scale::Linear((-0.5..n_columns as f64 - 0.5).into());
        let mut over = String::new();
        let flagged = self.flagged.as_ref();
        let body = |chart: &mut super::axis::Chart| {
            let (a, b) = (place(chart, -0.5, -0.5), place(chart, n_columns as f64 - 0.5, n_rows as f64 - 0.5));
            let (width, height) = (b.0 - a.0, b.1 - a.1);
            let _ = write!(
                over,
                r##"<svg class="cells" x="{:.1}" y="{:.1}" width="{width:.1}" height="{height:.1}" viewBox="0 0 {n_columns} {n_rows}" preserveAspectRatio="none"><rect class="hx" width="{n_columns}" height="{n_rows}"/><use href="#{FIGURE}-cells"/></svg>"##,
                a.0, a.1
            );
            if let Some((_, flags)) = flagged {
                let r = (width / n_columns as f64).min(height / n_rows as f64) * 0.28;
                for (i, _) in flags.iter().enumerate().filter(|(_, flag)| **flag) {
                    let at = place(chart, (i % n_columns) as f64, (i / n_columns) as f64);
                    let _ = write!(over, r#"<circle class="flag" cx="{:.1}" cy="{:.1}" r="{r:.1}"/>"#, at.0, at.1);
                }
            }
            let _ = write!(
                over,
                r#"<rect class="hot" data-map="{FIGURE}-data" x="{:.1}" y="{:.1}" width="{width:.1}" height="{height:.1}"/>"#,
                a.0, a.1
            );
            Ok(())
        };
        let drawing = frame.draw(x, rows(n_rows), body)?;
        Ok((drawing + &over, (width, height)))
    }

    fn legend(&self) -> Vec<Key> {
        let (low, high) = self.bounds();
        let key = |class: String, text: String| Key { class, text, direct: false };
        let at = |i: usize| low + (high - low) * i as f64 / LEVELS as f64;
        let beyond = if self.cells.iter().flatten().any(|v| *v > high) { " and more" } else { "" };
        let mut keys = vec![key(
            "scale".into(),
            format!(
                "{}, from {} to {}{beyond}",
                self.value.label,
                self.value.format(at(0)),
                self.value.format(at(LEVELS))
            ),
        )];
        if (0..self.cells.len()).any(|i| self.cell(i).is_none()) {
            keys.push(key("hx".into(), "nothing here".into()));
        }
        if let Some((name, _)) = self.flagged.as_ref().filter(|f| f.1.contains(&true)) {
            keys.push(key("flag".into(), name.clone()));
        }
        keys
    }

    /// A row of the map is a row: its mean, least and most.
    fn table(&self) -> Table {
        let n = self.columns.len();
        let heading = [&self.y_label, "cells", "mean", "least", "most", "in which column"].map(str::to_owned);
        let mut table = Table::new(heading);
        for (r, name) in self.rows.iter().enumerate() {
            let known: Vec<(usize, f64)> = (0..n).filter_map(|c| Some((c, self.cell(r * n + c)?))).collect();
            let Some(most) = known.iter().copied().reduce(|a, b| if b.1 > a.1 { b } else { a }) else { continue };
            let least = known.iter().map(|c| c.1).fold(f64::INFINITY, f64::min);
            let mean = known.iter().map(|c| c.1).sum::<f64>() / known.len() as f64;
            let f = |v| self.value.format(v);
            let cells =
                [name.clone(), number(known.len() as f64), f(mean), f(least), f(most.1), self.columns[most.0].clone()];
            table.row(cells);
        }
        table
    }
}
