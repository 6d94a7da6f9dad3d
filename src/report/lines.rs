//! Lines over a number: curves, time series; each with a band if it has one.

use plotters::prelude::*;

use super::axis::{Axis, Frame, Side, drawn, place, widest};
use super::ink::Ink;
use super::page::Table;
use super::plot::{Key, Plot, apart, label, mark, series_class};
use crate::error::Result;

/// A line. Points whose x or y is no number are gaps.
#[derive(Clone, Debug, Default)]
pub struct Line {
    pub name: String,
    /// (x, y), by rising x.
    pub points: Vec<(f64, f64)>,
    /// (x, low, high), by rising x: what is shaded about the line.
    pub band: Vec<(f64, f64, f64)>,
    /// A bound or reference, not one among others.
    pub dashed: bool,
    /// Points are not joined, and only dots are drawn.
    pub dots: bool,
}

/// Lines with a common x and y.
#[derive(Clone, Debug)]
pub struct LinePlot {
    pub title: String,
    pub x: Axis,
    pub y: Axis,
    pub lines: Vec<Line>,
    /// (x, text): upright lines that divide the plot.
    pub marks: Vec<(f64, String)>,
}

/// Dots that answer to the pointer, of a line.
const MARKS: usize = 100;

impl LinePlot {
    pub fn new(title: impl Into<String>, x: Axis, y: Axis) -> Self {
        Self { title: title.into(), x, y, lines: Vec::new(), marks: Vec::new() }
    }

    fn takes(&self, (x, y): (f64, f64)) -> bool {
        self.x.takes(x) && self.y.takes(y)
    }
}

impl Plot for LinePlot {
    fn title(&self) -> &str {
        &self.title
    }

    fn draw(&self, width: i32, wide: bool) -> Result<(String, (i32, i32))> {
        let height = if wide { 320 } else { 250 };
        let named = self.lines.len() > 1 && wide;
        let names = widest(self.lines.iter().map(|l| &l.name));
        let right = if named { (names as i32 + 18).min(width / 3) } else { 16 };
        let values = |of: fn(&Line) -> Vec<f64>| self.lines.iter().flat_map(of).collect::<Vec<_>>();
        let xs = values(|l| l.points.iter().map(|p| p.0).chain(l.band.iter().map(|b| b.0)).collect());
        let ys = values(|l| l.points.iter().map(|p| p.1).chain(l.band.iter().flat_map(|b| [b.1, b.2])).collect());
        let frame = Frame { size: (width, height), x: Side::Ticks(&self.x), y: Side::Ticks(&self.y), right };
        let mut over = String::new();
        let body = |chart: &mut super::axis::Chart| {
            for (x, text) in &self.marks {
                let y = chart.plotting_area().get_y_range();
                let line = [(*x, y.start), (*x, y.end)];
                drawn(chart.draw_series(LineSeries::new(line, Ink::Axis.color())))?;
                let top = place(chart, *x, y.end);
                label(&mut over, (top.0 + 4.0, top.1 + 11.0), "start", "faint", text);
            }
            for (i, line) in self.lines.iter().enumerate() {
                let band: Vec<_> = line.band.iter().filter(|b| self.takes((b.0, b.1)) && self.y.takes(b.2)).collect();
                let low = band.iter().map(|b| (b.0, b.1));
                let outline: Vec<_> = low.chain(band.iter().rev().map(|b| (b.0, b.2))).collect();
                if outline.len() > 3 {
                    drawn(chart.draw_series([Polygon::new(outline, Ink::Series(i).color().mix(0.18))]))?;
                }
            }
            let mut ends = Vec::new();
            for (i, line) in self.lines.iter().enumerate() {
                let ink = if line.dashed { Ink::Dashed(i) } else { Ink::Series(i) };
                if !line.dots {
                    for part in line.points.split(|&p| !self.takes(p)).filter(|part| part.len() > 1) {
                        drawn(chart.draw_series(LineSeries::new(part.iter().copied(), ink.color())))?;
                    }
                }
                let seen: Vec<_> = line.points.iter().copied().filter(|&p| self.takes(p)).collect();
                let step = if line.dots { 1 } else { seen.len().div_ceil(MARKS).max(1) };
                for &(x, y) in seen.iter().step_by(step) {
                    let name = if self.lines.len() > 1 { format!("{}\n", line.name) } else { String::new() };
                    let tip =
                        format!("{name}{}: {}\n{}: {}", self.x.label, self.x.format(x), self.y.label, self.y.format(y));
                    let r = if line.dots {
                        2.0
                    } else if seen.len() <= 24 {
                        3.0
                    } else {
                        0.0
                    };
                    mark(&mut over, place(chart, x, y), r, i, &tip);
                }
                if let Some(&(x, y)) = seen.last() {
                    ends.push((i, place(chart, x, y)));
                }
            }
            if named {
                let wanted: Vec<f64> = ends.iter().map(|(_, at)| at.1 + 4.0).collect();
                let bottom = f64::from(height) - 42.0;
                let right_edge = f64::from(width - right) + 6.0;
                for ((i, _), y) in ends.iter().zip(apart(&wanted, 14.0, bottom)) {
                    label(&mut over, (right_edge, y), "start", &series_class(*i), &self.lines[*i].name);
                }
            }
            Ok(())
        };
        let drawing = frame.draw(self.x.scale(xs.into_iter()), self.y.scale(ys.into_iter()), body)?;
        Ok((drawing + &over, (width, height)))
    }

    fn legend(&self) -> Vec<Key> {
        let key = |(i, line): (usize, &Line)| Key {
            class: format!("{}{}", series_class(i), if line.dashed { " dashed" } else { "" }),
            text: line.name.clone(),
            direct: true,
        };
        if self.lines.len() > 1 { self.lines.iter().enumerate().map(key).collect() } else { Vec::new() }
    }

    fn table(&self) -> Table {
        let mut xs: Vec<f64> = self.lines.iter().flat_map(|l| l.points.iter().map(|p| p.0)).collect();
        xs.sort_by(f64::total_cmp);
        xs.dedup();
        let many = self.lines.len() > 1;
        let heading = |line: &Line| if many { line.name.clone() } else { self.y.label.clone() };
        let mut table = Table::new(std::iter::once(self.x.label.clone()).chain(self.lines.iter().map(heading)));
        for x in xs {
            let y = |line: &Line| {
                let at = line.points.iter().find(|p| p.0 == x);
                at.map_or_else(|| "-".into(), |p| self.y.format(p.1))
            };
            table.row(std::iter::once(self.x.format(x)).chain(self.lines.iter().map(y)));
        }
        table
    }
}
