//! Points with two numbers each, which may be joined: fronts.

use plotters::prelude::*;

use super::axis::{Axis, Frame, Side, drawn, place};
use super::ink::Ink;
use super::page::Table;
use super::plot::{Key, Plot, Taken, label, mark, series_class};
use crate::error::Result;

#[derive(Clone, Debug, Default)]
pub struct Point {
    pub x: f64,
    pub y: f64,
    /// What it is, in words: shown to the pointer, and in the table.
    pub what: String,
    /// Written beside it, as far as there is room.
    pub label: Option<String>,
    /// Drawn small: one among many, not one to look at.
    pub small: bool,
}

/// Points of one colour.
#[derive(Clone, Debug, Default)]
pub struct Points {
    pub name: String,
    pub points: Vec<Point>,
    /// The points that are not small are joined by a line, in their order.
    pub joined: bool,
}

#[derive(Clone, Debug)]
pub struct PointPlot {
    pub title: String,
    pub x: Axis,
    pub y: Axis,
    pub series: Vec<Points>,
}

impl Plot for PointPlot {
    fn title(&self) -> &str {
        &self.title
    }

    fn draw(&self, width: i32, wide: bool) -> Result<(String, (i32, i32))> {
        let height = if wide { 380 } else { 300 };
        let frame = Frame { size: (width, height), x: Side::Ticks(&self.x), y: Side::Ticks(&self.y), right: 18 };
        let all = || self.series.iter().flat_map(|s| &s.points);
        let (x, y) = (self.x.scale(all().map(|p| p.x)), self.y.scale(all().map(|p| p.y)));
        let mut over = String::new();
        let body = |chart: &mut super::axis::Chart| {
            let seen = |p: &&Point| self.x.takes(p.x) && self.y.takes(p.y);
            let mut taken = Taken::default();
            for (i, series) in self.series.iter().enumerate() {
                if series.joined {
                    let line = series.points.iter().filter(seen).filter(|p| !p.small).map(|p| (p.x, p.y));
                    drawn(chart.draw_series(LineSeries::new(line, Ink::Series(i).color())))?;
                }
                for p in series.points.iter().filter(seen) {
                    let at = place(chart, p.x, p.y);
                    taken.keep(at, if p.small { 1.0 } else { 5.0 });
                    let tip = format!(
                        "{}\n{}\n{}: {}\n{}: {}",
                        series.name,
                        p.what,
                        self.x.label,
                        self.x.format(p.x),
                        self.y.label,
                        self.y.format(p.y)
                    );
                    mark(&mut over, at, if p.small { 2.5 } else { 4.5 }, i, &tip);
                }
            }
            let (xs, ys) = chart.plotting_area().get_pixel_range();
            let fine = f64::from(super::ink::FINE);
            let bounds = [xs.start, ys.start, xs.end, ys.end].map(|v| f64::from(v) / fine);
            for (i, series) in self.series.iter().enumerate() {
                for p in series.points.iter().filter(seen) {
                    let Some(text) = &p.label else { continue };
                    if let Some((anchor, at)) = taken.beside(place(chart, p.x, p.y), text, bounds) {
                        label(&mut over, at, anchor, &series_class(i), text);
                    }
                }
            }
            Ok(())
        };
        let drawing = frame.draw(x, y, body)?;
        Ok((drawing + &over, (width, height)))
    }

    fn legend(&self) -> Vec<Key> {
        let key = |(i, s): (usize, &Points)| Key { class: series_class(i), text: s.name.clone(), direct: false };
        self.series.iter().enumerate().map(key).collect()
    }

    fn table(&self) -> Table {
        let mut table = Table::new(["", "what", &self.x.label, &self.y.label].map(str::to_owned));
        for series in &self.series {
            for p in &series.points {
                table.row([series.name.clone(), p.what.clone(), self.x.format(p.x), self.y.format(p.y)]);
            }
        }
        table
    }
}
