//! Axes, and the frame in which every plot draws: scales and ticks are plotters'; what is here is which ticks, how they read, and how much room they take.

use std::ops::Range;

use plotters::coord::Shift;
use plotters::coord::combinators::{IntoLogRange, LogCoord};
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

use super::ink::{FINE, Ink, Svg, text_width};
use crate::error::{Result, err};

/// Font size of ticks and labels, in pixels.
pub(super) const FONT: f64 = 12.0;

/// Larger numbers are not drawn: differences of them would be none.
const MOST: f64 = 1e100;

/// What an axis says.
#[derive(Clone, Debug)]
pub struct Axis {
    /// With its unit: "wall time, ms".
    pub label: String,
    /// Where it begins and ends; None: with the data.
    pub from: Option<f64>,
    pub to: Option<f64>,
    /// Logarithmic; values of 0 and less are left out.
    pub log: bool,
    /// Ticks are shares, and read as percent.
    pub percent: bool,
    /// Ticks are whole numbers.
    pub whole: bool,
}

impl Axis {
    pub fn new(label: impl Into<String>) -> Self {
        Self { label: label.into(), from: None, to: None, log: false, percent: false, whole: false }
    }

    /// Begins at this number.
    pub fn from(self, from: f64) -> Self {
        Self { from: Some(from), ..self }
    }

    /// Ends at this number.
    pub fn to(self, to: f64) -> Self {
        Self { to: Some(to), ..self }
    }

    pub fn log(self) -> Self {
        Self { log: true, ..self }
    }

    /// Values are shares of 1 and read as percent.
    pub fn percent(self) -> Self {
        Self { percent: true, ..self }
    }

    /// Values are counts.
    pub fn whole(self) -> Self {
        Self { whole: true, ..self }
    }

    /// How a value reads.
    pub fn format(&self, v: f64) -> String {
        if self.percent { format!("{} %", number(100.0 * v)) } else { number(v) }
    }

    pub(super) fn takes(&self, v: f64) -> bool {
        v.abs() < MOST && (!self.log || v > 0.0)
    }

    /// The scale over these values.
    pub(super) fn scale(&self, values: impl Iterator<Item = f64>) -> Scale {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for v in values.filter(|v| self.takes(*v)) {
            (low, high) = (low.min(v), high.max(v));
        }
        if low > high {
            (low, high) = if self.log { (1.0, 10.0) } else { (0.0, 1.0) };
        }
        if self.log {
            let (low, high) = (self.from.unwrap_or(low), self.to.unwrap_or(high));
            let low = low.max(f64::MIN_POSITIVE);
            return Scale::Log((low / 1.1..high.max(low) * 1.1).log_scale().into());
        }
        // Numbers so near each other that ticks between them would be equal stand for one.
        let size = low.abs().max(high.abs());
        let room = match (high - low > 1e-9 * size, size > 1e-9) {
            (true, _) => 0.04 * (high - low),
            (false, true) => 0.05 * size,
            (false, false) => 0.5,
        };
        let low = self.from.unwrap_or(low - room);
        let high = self.to.unwrap_or(high + room);
        Scale::Linear((low..if high - low > 1e-9 * low.abs() { high } else { low + low.abs().max(1.0) }).into())
    }
}

/// Four digits, no more than needed: 1234, 12.3, 0.045.
pub fn number(v: f64) -> String {
    if !v.is_finite() {
        return "-".into();
    }
    let digits = match v.abs() {
        0.0 => 0,
        a if a >= 1000.0 => 0,
        a if a >= 1e-9 => (3 - a.log10().floor() as i32).max(0) as usize,
        _ => return format!("{v:.1e}"),
    };
    let text = format!("{v:.digits$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    if text == "-0" { "0".into() } else { text.into() }
}

/// Either kind of scale.
pub(super) enum Scale {
    Linear(RangedCoordf64),
    Log(LogCoord<f64>),
}

impl Ranged for Scale {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        match self {
            Self::Linear(s) => s.map(value, limit),
            Self::Log(s) => s.map(value, limit),
        }
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        match self {
            Self::Linear(s) => {
                // steps summed up miss 0 by a hair
                let hair = 1e-9 * (s.range().end - s.range().start);
                s.key_points(hint).into_iter().map(|v| if v.abs() < hair { 0.0 } else { v }).collect()
            }
            Self::Log(s) => {
                // Decades; where fewer than two are in sight, 1, 2 and 5 of each.
                let points = s.key_points(hint.bold_points());
                if points.len() > 1 {
                    return points;
                }
                let Range { start, end } = s.range();
                let decades = start.log10().floor() as i32..=end.log10().ceil() as i32;
                let fine = decades.flat_map(|e| [1.0, 2.0, 5.0].map(|m| m * 10f64.powi(e)));
                fine.filter(|v| (start..=end).contains(v)).collect()
            }
        }
    }

    fn range(&self) -> Range<f64> {
        match self {
            Self::Linear(s) => s.range(),
            Self::Log(s) => s.range(),
        }
    }
}

impl ValueFormatter<f64> for Scale {
    fn format(value: &f64) -> String {
        number(*value)
    }
}

pub(super) type Chart<'a, 'b> = ChartContext<'a, Svg<'b>, Cartesian2d<Scale, Scale>>;

/// How a side of the frame is labelled.
pub(super) enum Side<'a> {
    /// Ticks where plotters sets them.
    Ticks(&'a Axis),
    /// A name at each whole number: rows from the top, columns from the left. So many of them as there is room for.
    Names { label: &'a str, names: &'a [String] },
}

/// The room of a plot.
pub(super) struct Frame<'a> {
    /// In pixels.
    pub(super) size: (i32, i32),
    pub(super) x: Side<'a>,
    pub(super) y: Side<'a>,
    /// Room at the right, in pixels, for labels of what is drawn.
    pub(super) right: i32,
}

/// A place in pixels.
pub(super) type Place = (f64, f64);

pub(super) fn text(ink: Ink, size: f64) -> TextStyle<'static> {
    ("sans-serif", size * f64::from(FINE)).into_font().color(&ink.color())
}

/// Plotters' errors are those of drawing, which writing to memory does not have.
pub(super) fn drawn<T, E: std::fmt::Display>(result: std::result::Result<T, E>) -> Result<T> {
    result.map_err(|e| err!(Internal, "a plot cannot be drawn: {e}"))
}

impl Frame<'_> {
    /// Draws axes and grid, then what `body` draws into them, and returns the SVG elements. `x` and `y` are where the numbers lie.
    pub(super) fn draw(&self, x: Scale, y: Scale, body: impl FnOnce(&mut Chart) -> Result<()>) -> Result<String> {
        let mut out = String::new();
        {
            let root = Svg { out: &mut out, size: self.size }.into_drawing_area();
            let (width, height) = self.size;
            let n_y = (height / 44).clamp(2, 8) as usize;
            let left = match &self.y {
                Side::Ticks(axis) => widest(y.key_points(n_y).iter().map(|v| axis.format(*v))) + 12.0,
                Side::Names { names, .. } => widest(names.iter()) + 12.0,
            };
            let left = left.min(0.42 * f64::from(width)) as i32;
            let (y_label, x_label) = (self.y.label(), self.x.label());
            let top = if y_label.is_empty() { 6 } else { 24 };
            let bottom = if x_label.is_empty() { 22 } else { 40 };
            let mut builder = ChartBuilder::on(&root);
            builder.margin_top(top * FINE).margin_right(self.right * FINE);
            builder.set_label_area_size(LabelAreaPosition::Left, left * FINE);
            builder.set_label_area_size(LabelAreaPosition::Bottom, bottom * FINE);
            let mut chart = drawn(builder.build_cartesian_2d(x, y))?;
            let ticks = |side: &Side, v: f64| match side {
                Side::Ticks(axis) if axis.whole && v.fract().abs() > 1e-9 => String::new(),
                Side::Ticks(axis) => axis.format(v),
                Side::Names { .. } => String::new(),
            };
            let (x_format, y_format) = (|v: &f64| ticks(&self.x, *v), |v: &f64| ticks(&self.y, *v));
            let inner = f64::from(width - left - self.right);
            let mut mesh = chart.configure_mesh();
            mesh.bold_line_style(Ink::Grid.color()).light_line_style(TRANSPARENT).max_light_lines(1);
            mesh.axis_style(Ink::Axis.color()).label_style(text(Ink::Faint, FONT)).set_all_tick_mark_size(3 * FINE);
            mesh.x_labels((inner / 64.0).clamp(2.0, 12.0) as usize).y_labels(n_y);
            mesh.x_label_formatter(&x_format).y_label_formatter(&y_format);
            if matches!(self.x, Side::Names { .. }) {
                mesh.disable_x_mesh().disable_x_axis();
            }
            if matches!(self.y, Side::Names { .. }) {
                mesh.disable_y_mesh().disable_y_axis();
            }
            drawn(mesh.draw())?;
            if !y_label.is_empty() {
                drawn(root.draw_text(y_label, &text(Ink::Text, FONT), (2 * FINE, 4 * FINE)))?;
            }
            if !x_label.is_empty() {
                let at = ((f64::from(left) + inner / 2.0) as i32 * FINE, (height - 4) * FINE);
                let style = text(Ink::Text, FONT).pos(pos(HPos::Center, VPos::Bottom));
                drawn(root.draw_text(x_label, &style, at))?;
            }
            self.names(&chart, &root, left)?;
            body(&mut chart)?;
        }
        Ok(out)
    }

    /// The names of rows and columns, thinned out until they have room.
    fn names(&self, chart: &Chart, root: &DrawingArea<Svg, Shift>, left: i32) -> Result<()> {
        let at = |x: f64, y: f64| chart.backend_coord(&(x, y));
        let style = text(Ink::Faint, FONT);
        if let Side::Names { names, .. } = &self.y {
            let row = f64::from((at(0.0, 1.0).1 - at(0.0, 0.0).1).abs()) / f64::from(FINE);
            let step = (15.0 / row.max(0.01)).ceil().max(1.0) as usize;
            for (i, name) in names.iter().enumerate().step_by(step) {
                let y = at(0.0, i as f64).1;
                let name = shorten(name, f64::from(left) - 10.0);
                drawn(root.draw_text(&name, &style.pos(pos(HPos::Right, VPos::Center)), ((left - 6) * FINE, y)))?;
            }
        }
        if let Side::Names { names, .. } = &self.x {
            let column = f64::from((at(1.0, 0.0).0 - at(0.0, 0.0).0).abs()) / f64::from(FINE);
            let step = ((widest(names.iter()) + 14.0) / column.max(0.01)).ceil().max(1.0);
            // steps that people count in
            let mut round = [1.0, 2.0, 4.0, 5.0, 8.0]
                .into_iter()
                .chain((1..6).flat_map(|e| [1.0, 2.0, 5.0].map(|m| m * 10f64.powi(e))));
            let step = round.find(|n| *n >= step).unwrap_or(step) as usize;
            let bottom = chart.plotting_area().get_pixel_range().1.end;
            for (i, name) in names.iter().enumerate().step_by(step) {
                let style = style.pos(pos(HPos::Center, VPos::Top));
                drawn(root.draw_text(name, &style, (at(i as f64, 0.0).0, bottom + 5 * FINE)))?;
            }
        }
        Ok(())
    }
}

impl Side<'_> {
    fn label(&self) -> &str {
        match self {
            Self::Ticks(axis) => &axis.label,
            Self::Names { label, .. } => label,
        }
    }
}

pub(super) use plotters::style::text_anchor::{HPos, VPos};

pub(super) fn pos(h: HPos, v: VPos) -> plotters::style::text_anchor::Pos {
    plotters::style::text_anchor::Pos::new(h, v)
}

/// Width of the widest of these texts in pixels.
pub(super) fn widest(texts: impl Iterator<Item = impl AsRef<str>>) -> f64 {
    texts.map(|text| text_width(text.as_ref(), FONT)).fold(0.0, f64::max)
}

/// As much of a text as there is room for.
fn shorten(name: &str, width: f64) -> String {
    if text_width(name, FONT) <= width {
        return name.into();
    }
    let mut short = String::new();
    for c in name.chars() {
        if text_width(&short, FONT) + FONT > width {
            break;
        }
        short.push(c);
    }
    short + "…"
}

/// Where a value lies, in pixels.
pub(super) fn place(chart: &Chart, x: f64, y: f64) -> Place {
    let (x, y) = chart.backend_coord(&(x, y));
    (f64::from(x) / f64::from(FINE), f64::from(y) / f64::from(FINE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_as_people_write_them() {
        let texts = [
            (0.0, "0"),
            (1234.4, "1234"),
            (56.774, "56.77"),
            (0.0451, "0.0451"),
            (-0.5, "-0.5"),
            (1e-12, "1.0e-12"),
            (f64::NAN, "-"),
            (-1e-10, "-1.0e-10"),
        ];
        texts.iter().for_each(|(v, text)| assert_eq!(number(*v), *text));
        assert_eq!(Axis::new("").percent().format(0.749), "74.9 %");
    }

    /// Ticks end, lie within the scale and rise, whatever the numbers.
    #[test]
    fn every_scale_has_ticks() {
        let values: [&[f64]; 9] = [
            &[],
            &[0.0],
            &[5.0, 5.0],
            &[1e18, 1e18 + 256.0],
            &[-3e-200, 4e-200],
            &[1e99, -1e99],
            &[f64::MAX, f64::NAN, f64::INFINITY, 2.0],
            &[1e-320],
            &[1e16, 1.0],
        ];
        let axes = || {
            [
                Axis::new(""),
                Axis::new("").from(0.0),
                Axis::new("").log(),
                Axis::new("").from(1e18),
                Axis::new("").to(0.0),
            ]
        };
        for (values, axis) in values.iter().flat_map(|v| axes().map(|axis| (v, axis))) {
            let scale = axis.scale(values.iter().copied());
            let Range { start, end } = scale.range();
            assert!(start < end && start.is_finite() && end.is_finite(), "{axis:?} {values:?}: {start} {end}");
            let ticks = scale.key_points(8);
            assert!(ticks.len() < 2000 && ticks.windows(2).all(|t| t[0] < t[1]), "{axis:?} {values:?}: {ticks:?}");
        }
    }
}
