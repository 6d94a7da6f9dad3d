//! Where plotters draws to: SVG elements with CSS classes in place of colours, so that the page's style sheet decides on light and dark.
//!
//! Plotters knows colours only as numbers. So an [`Ink`] is one: its first byte is the kind, its second the number of a series, and [`Svg`], the
//! backend, turns it back into class names. Plotters knows whole pixels only as well: it is given a canvas `FINE` times as large, and
//! coordinates are divided by that as they are written.

use std::convert::Infallible;
use std::fmt::Write;

use plotters::prelude::{DrawingBackend, RGBColor};
use plotters_backend::text_anchor::{HPos, VPos};
use plotters_backend::{BackendColor, BackendCoord, BackendStyle, BackendTextStyle, DrawingErrorKind};

use super::page::escape;

/// Canvas units a pixel.
pub(super) const FINE: i32 = 8;

/// What something is drawn as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ink {
    Text,
    /// Of ticks and less.
    Faint,
    Grid,
    Axis,
    /// A series, by its number.
    Series(usize),
    /// One that is a bound or a reference.
    Dashed(usize),
}

impl Ink {
    pub(super) fn color(self) -> RGBColor {
        let (kind, n) = match self {
            Self::Text => (0, 0),
            Self::Faint => (1, 0),
            Self::Grid => (2, 0),
            Self::Axis => (3, 0),
            Self::Series(n) => (4, n),
            Self::Dashed(n) => (5, n),
        };
        RGBColor(kind, (n % super::SERIES) as u8, 0)
    }

    fn class((kind, n, _): (u8, u8, u8)) -> String {
        match kind {
            1 => "faint".into(),
            2 => "grid".into(),
            3 => "axis".into(),
            4 => format!("s{n}"),
            5 => format!("s{n} dashed"),
            _ => "text".into(),
        }
    }
}

/// A canvas unit in pixels, with as many digits as it needs.
fn px(units: i32) -> f64 {
    (f64::from(units) / f64::from(FINE) * 100.0).round() / 100.0
}

/// About how wide a text is, in pixels: fonts are the reader's.
pub(super) fn text_width(text: &str, size: f64) -> f64 {
    text.chars().map(|c| if "ijlt.,:;|'!() ".contains(c) { 0.36 } else { 0.63 }).sum::<f64>() * size
}

/// Writes SVG elements.
pub(super) struct Svg<'a> {
    pub(super) out: &'a mut String,
    /// In pixels.
    pub(super) size: (i32, i32),
}

type Done = Result<(), DrawingErrorKind<Infallible>>;

impl Svg<'_> {
    /// One element. Nothing that cannot be seen is written.
    fn element(&mut self, name: &str, kind: &str, color: BackendColor, shape: std::fmt::Arguments) -> Done {
        if color.alpha <= 0.0 {
            return Ok(());
        }
        let class = Ink::class(color.rgb);
        // Writing to a string cannot fail.
        let _ = write!(self.out, r#"<{name} class="{kind} {class}" {shape}"#);
        if color.alpha < 1.0 {
            let _ = write!(self.out, r#" opacity="{}""#, color.alpha);
        }
        self.out.push_str("/>");
        Ok(())
    }

    fn path(points: impl IntoIterator<Item = BackendCoord>) -> String {
        let mut d = String::new();
        let mut last = None;
        for point in points {
            if last != Some(point) {
                let step = if last.is_none() { 'M' } else { 'L' };
                let _ = write!(d, "{step}{} {}", px(point.0), px(point.1));
            }
            last = Some(point);
        }
        d
    }
}

impl DrawingBackend for Svg<'_> {
    type ErrorType = Infallible;

    fn get_size(&self) -> (u32, u32) {
        ((self.size.0 * FINE).max(0) as u32, (self.size.1 * FINE).max(0) as u32)
    }

    fn ensure_prepared(&mut self) -> Done {
        Ok(())
    }

    fn present(&mut self) -> Done {
        Ok(())
    }

    fn draw_pixel(&mut self, at: BackendCoord, color: BackendColor) -> Done {
        self.draw_rect(at, (at.0 + FINE, at.1 + FINE), &color, true)
    }

    fn draw_line<S: BackendStyle>(&mut self, from: BackendCoord, to: BackendCoord, style: &S) -> Done {
        self.element("path", "line", style.color(), format_args!(r#"d="{}""#, Self::path([from, to])))
    }

    fn draw_rect<S: BackendStyle>(&mut self, a: BackendCoord, b: BackendCoord, style: &S, fill: bool) -> Done {
        let (x, y) = (a.0.min(b.0), a.1.min(b.1));
        let (width, height) = (px((a.0 - b.0).abs()), px((a.1 - b.1).abs()));
        let kind = if fill { "area" } else { "line" };
        let shape = format!(r#"x="{}" y="{}" width="{width}" height="{height}""#, px(x), px(y));
        self.element("rect", kind, style.color(), format_args!("{shape}"))
    }

    fn draw_path<S: BackendStyle, I: IntoIterator<Item = BackendCoord>>(&mut self, path: I, style: &S) -> Done {
        self.element("path", "line", style.color(), format_args!(r#"d="{}""#, Self::path(path)))
    }

    fn draw_circle<S: BackendStyle>(&mut self, at: BackendCoord, radius: u32, style: &S, fill: bool) -> Done {
        let kind = if fill { "area" } else { "line" };
        let shape = format!(r#"cx="{}" cy="{}" r="{}""#, px(at.0), px(at.1), px(radius as i32));
        self.element("circle", kind, style.color(), format_args!("{shape}"))
    }

    fn fill_polygon<S: BackendStyle, I: IntoIterator<Item = BackendCoord>>(&mut self, points: I, style: &S) -> Done {
        self.element("path", "area", style.color(), format_args!(r#"d="{}Z""#, Self::path(points)))
    }

    fn draw_text<T: BackendTextStyle>(&mut self, text: &str, style: &T, at: BackendCoord) -> Done {
        let (anchor, size) = (style.anchor(), style.size() / f64::from(FINE));
        let side = match anchor.h_pos {
            HPos::Left => "start",
            HPos::Center => "middle",
            HPos::Right => "end",
        };
        let down = match anchor.v_pos {
            VPos::Top => 0.8,
            VPos::Center => 0.35,
            VPos::Bottom => -0.2,
        };
        let (x, y) = (px(at.0), ((f64::from(at.1) / f64::from(FINE) + down * size) * 100.0).round() / 100.0);
        let class = Ink::class(style.color().rgb);
        let text = escape(text);
        let _ = write!(
            self.out,
            r#"<text class="label {class}" x="{x}" y="{y}" font-size="{size}" text-anchor="{side}">{text}</text>"#
        );
        Ok(())
    }

    fn estimate_text_size<T: BackendTextStyle>(
        &self,
        text: &str,
        style: &T,
    ) -> Result<(u32, u32), DrawingErrorKind<Infallible>> {
        Ok((text_width(text, style.size()) as u32, style.size() as u32))
    }
}
