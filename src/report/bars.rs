//! Bars that lie, a group a name, and intervals: both have names at the left and numbers at the bottom, so that names of any length can be read on a phone.

use plotters::prelude::*;

use super::axis::{Axis, Frame, Place, Side, drawn, place, widest};
use super::ink::Ink;
use super::page::Table;
use super::plot::{Key, Plot, label, mark, series_class};
use crate::error::Result;

/// Bars from 0, by name and series.
#[derive(Clone, Debug)]
pub struct BarPlot {
    pub title: String,
    pub x: Axis,
    /// Of the groups, from the top.
    pub names: Vec<String>,
    pub series: Vec<Bars>,
}

/// One series.
#[derive(Clone, Debug)]
pub struct Bars {
    pub name: String,
    /// As many as there are names; None: there is none.
    pub values: Vec<Option<f64>>,
}

/// What is known of a number: an interval about a middle, and what lies outside.
#[derive(Clone, Debug, Default)]
pub struct Interval {
    pub name: String,
    /// Number of the series: its colour.
    pub series: usize,
    pub low: f64,
    pub middle: f64,
    pub high: f64,
    /// The box of a box plot: first and third quartile.
    pub quartiles: Option<(f64, f64)>,
    /// Single values, drawn as dots: outliers, or the runs themselves.
    pub dots: Vec<f64>,
}

/// Intervals with a common axis: box plots where quartiles are given, else a dot with its interval.
#[derive(Clone, Debug)]
pub struct IntervalPlot {
    pub title: String,
    pub x: Axis,
    pub rows: Vec<Interval>,
    /// Drawn as an upright line: 0 of a difference, say.
    pub reference: Option<f64>,
}

/// Height of a row in pixels, and of what is around all rows.
const AROUND: i32 = 46;

impl Plot for BarPlot {
    fn title(&self) -> &str {
        &self.title
    }

    fn draw(&self, width: i32, _: bool) -> Result<(String, (i32, i32))> {
        let n = self.series.len().max(1);
        let height = AROUND + self.names.len().max(1) as i32 * (n as i32 * 16 + 10);
        let values: Vec<f64> = self.series.iter().flat_map(|s| s.values.iter().copied().flatten()).collect();
        let widest = widest(values.iter().map(|&v| self.x.format(v)));
        let frame = Frame {
            size: (width, height),
            x: Side::Ticks(&self.x),
            y: Side::Names { label: "", names: &self.names },
            right: widest as i32 + 14,
        };
        let x = Axis { from: Some(self.x.from.unwrap_or(if self.x.log { 1.0 } else { 0.0 })), ..self.x.clone() };
        let zero = x.from.unwrap_or_default();
        let mut over = String::new();
        let body = |chart: &mut super::axis::Chart| {
            for (s, series) in self.series.iter().enumerate() {
                for (i, value) in series.values.iter().enumerate() {
                    let Some(v) = value.filter(|v| x.takes(*v)) else { continue };
                    let share = 0.82 / n as f64;
                    let begin = i as f64 - 0.41 + share * s as f64;
                    let end = begin + share * 0.9;
                    let bar = [(zero, begin), (v, end)];
                    drawn(chart.draw_series([Rectangle::new(bar, Ink::Series(s).color().filled())]))?;
                    let (text, name) = (self.x.format(v), self.names.get(i).map_or("", String::as_str));
                    let at: Place = place(chart, v, (begin + end) / 2.0);
                    label(&mut over, (at.0 + 5.0, at.1 + 4.0), "start", "faint", &text);
                    let of = if n > 1 { format!("{name}, {}", series.name) } else { name.into() };
                    mark(&mut over, at, 0.0, s, &format!("{of}\n{}: {text}", self.x.label));
                }
            }
            Ok(())
        };
        let drawing = frame.draw(x.scale(values.iter().copied()), rows(self.names.len()), body)?;
        Ok((drawing + &over, (width, height)))
    }

    fn legend(&self) -> Vec<Key> {
        let key = |(i, s): (usize, &Bars)| Key { class: series_class(i), text: s.name.clone(), direct: false };
        if self.series.len() > 1 { self.series.iter().enumerate().map(key).collect() } else { Vec::new() }
    }

    fn table(&self) -> Table {
        let names = self.series.iter().map(|s| s.name.clone());
        let mut table = Table::new(std::iter::once(self.x.label.clone()).chain(names));
        for (i, name) in self.names.iter().enumerate() {
            let value = |s: &Bars| s.values.get(i).copied().flatten().map_or("-".into(), |v| self.x.format(v));
            table.row(std::iter::once(name.clone()).chain(self.series.iter().map(value)));
        }
        table
    }
}

impl Plot for IntervalPlot {
    fn title(&self) -> &str {
        &self.title
    }

    fn draw(&self, width: i32, _: bool) -> Result<(String, (i32, i32))> {
        let height = AROUND + self.rows.len().max(1) as i32 * 30;
        let names: Vec<String> = self.rows.iter().map(|row| row.name.clone()).collect();
        let frame = Frame {
            size: (width, height),
            x: Side::Ticks(&self.x),
            y: Side::Names { label: "", names: &names },
            right: 20,
        };
        let values = self.rows.iter().flat_map(|r| [r.low, r.middle, r.high].into_iter().chain(r.dots.iter().copied()));
        let scale = self.x.scale(values.chain(self.reference).collect::<Vec<_>>().into_iter());
        let mut over = String::new();
        let body = |chart: &mut super::axis::Chart| {
            if let Some(x) = self.reference.filter(|x| self.x.takes(*x)) {
                let line = [(x, -0.5), (x, self.rows.len() as f64 - 0.5)];
                drawn(chart.draw_series(LineSeries::new(line, Ink::Axis.color())))?;
            }
            for (i, row) in self.rows.iter().enumerate() {
                if [row.low, row.middle, row.high].iter().any(|v| !self.x.takes(*v)) {
                    continue;
                }
                let (y, ink) = (i as f64, Ink::Series(row.series).color());
                let mut line =
                    |points: Vec<(f64, f64)>| drawn(chart.draw_series(LineSeries::new(points, ink)).map(drop));
                line(vec![(row.low, y), (row.high, y)])?;
                for end in [row.low, row.high] {
                    line(vec![(end, y - 0.14), (end, y + 0.14)])?;
                }
                if let Some((q1, q3)) = row.quartiles {
                    line(vec![(row.middle, y - 0.28), (row.middle, y + 0.28)])?;
                    let area = Rectangle::new([(q1, y - 0.28), (q3, y + 0.28)], ink.mix(0.3).filled());
                    drawn(chart.draw_series([area]))?;
                }
                for &dot in row.dots.iter().filter(|v| self.x.takes(**v)) {
                    mark(
                        &mut over,
                        place(chart, dot, y),
                        2.0,
                        row.series,
                        &format!("{}\n{}", row.name, self.x.format(dot)),
                    );
                }
                let f = |v| self.x.format(v);
                let tip =
                    format!("{}\n{}: {}\n{} to {}", row.name, self.x.label, f(row.middle), f(row.low), f(row.high));
                let r = if row.quartiles.is_some() { 0.0 } else { 4.0 };
                mark(&mut over, place(chart, row.middle, y), r, row.series, &tip);
            }
            Ok(())
        };
        let drawing = frame.draw(scale, rows(self.rows.len()), body)?;
        Ok((drawing + &over, (width, height)))
    }

    fn table(&self) -> Table {
        let boxes = self.rows.iter().any(|r| r.quartiles.is_some());
        let mut heading = vec![self.x.label.clone(), "low".into(), "middle".into(), "high".into()];
        if boxes {
            heading.extend(["first quartile".into(), "third quartile".into()]);
        }
        let mut table = Table::new(heading);
        for row in &self.rows {
            let mut cells = vec![row.name.clone()];
            cells.extend([row.low, row.middle, row.high].map(|v| self.x.format(v)));
            if boxes {
                let of = |q: Option<f64>| q.map_or("-".into(), |v| self.x.format(v));
                cells.extend([of(row.quartiles.map(|q| q.0)), of(row.quartiles.map(|q| q.1))]);
            }
            table.row(cells);
        }
        table
    }
}

/// Rows from the top, half a row of room around each.
pub(super) fn rows(n: usize) -> super::axis::Scale {
    // Plotters' own scale falls where it begins with the higher number.
    super::axis::Scale::Linear((n.max(1) as f64 - 0.5..-0.5).into())
}
