//! Pages that show what was measured: one HTML file with everything in it, for a browser without a network.
//!
//! A [`Page`] is made of [`Section`]s, a section of paragraphs, facts, [`Table`]s and plots. A plot is plain data with public fields: names,
//! [`Axis`] labels with their units, numbers. It is drawn twice, for a wide page and for a phone, with its numbers in a table beside it, and answers to
//! the pointer by itself. Colours, light and dark, are the style sheet's (`page.css`): series have numbers, not colours.
//!
//! | plot | for |
//! |---|---|
//! | [`LinePlot`] of [`Line`]s | curves and time series, each with a band (interval) if it has one, dashed if it is a bound |
//! | [`BarPlot`] of [`Bars`] | numbers by name, grouped |
//! | [`PointPlot`] of [`Points`] | fronts: labelled points with two numbers each, joined or not |
//! | [`IntervalPlot`] of [`Interval`]s | box plots, and estimates with their intervals about a reference |
//! | [`HeatMap`] | rows by columns |
//!
//! ```
//! use hotset::report::{Axis, Line, LinePlot, Page, Section};
//! let mut plot = LinePlot::new("Hits by slots", Axis::new("slots a layer").whole(), Axis::new("hit rate").percent().from(0.0));
//! plot.lines.push(Line { name: "lru".into(), points: vec![(8.0, 0.31), (16.0, 0.55)], ..Line::default() });
//! let mut section = Section::new("Cache");
//! section.text("What a cache of each size would have hit.").plot(&plot, "Decode tokens only.")?;
//! let mut page = Page::new("A run");
//! page.lead("One turn, 64 tokens.").section(section);
//! let html = page.html();
//! # assert!(html.contains("Hits by slots"));
//! # Ok::<(), hotset::Error>(())
//! ```
//!
//! Scales, ticks and drawing are plotters'; the way through here: plot -> `axis::Frame` (a plotters chart) -> `ink` (SVG elements with classes for
//! colours) -> `plot::figure` (legend, both widths, numbers) -> `page`. What no library has is heat maps with shared cells and labels that keep apart. A
//! number that is none (NaN, infinity) is a gap, never 0. The same data gives the same bytes. To add a plot: a file that implements [`Plot`].
//! [`run`] is the page of `hotset report`, [`ab`] that of `hotset ab report`.

pub mod ab;
mod axis;
mod bars;
mod heat;
mod ink;
mod lines;
mod page;
mod plot;
mod points;
pub mod run;

pub use axis::{Axis, number};
pub use bars::{BarPlot, Bars, Interval, IntervalPlot};
pub use heat::HeatMap;
pub use lines::{Line, LinePlot};
pub use page::{Page, Section, Table};
pub use plot::{FIGURE, Key, Plot};
pub use points::{Point, PointPlot, Points};

/// Colours that series have; a ninth begins again with the first.
const SERIES: usize = 8;
