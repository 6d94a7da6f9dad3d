//! From numbers to words: which pairs are told apart, by how much, and how many tokens it would take where they are not.
//!
//! With several pairs the chance of one false alarm among all of them is what is held (Holm's step-down: the smallest p must be below
//! alpha / m, the next below alpha / (m - 1), and so on until one is not).

use statrs::distribution::{ContinuousCDF, Normal};

use super::bootstrap::Interval;
use super::sequential;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The second cell is faster than the first.
    Faster,
    Slower,
    NotToldApart,
    /// Too few blocks or tokens for any word.
    TooFew,
    /// The first planned look lies ahead.
    TooEarly,
}

impl Verdict {
    pub fn name(self) -> &'static str {
        match self {
            Self::Faster => "faster",
            Self::Slower => "slower",
            Self::NotToldApart => "not told apart",
            Self::TooFew => "too few",
            Self::TooEarly => "too early",
        }
    }

    pub fn told_apart(self) -> bool {
        matches!(self, Self::Faster | Self::Slower)
    }
}

/// A planned look: (which, of how many), from 1.
pub type Number = (u32, u32);

/// For each p the level that it was held against, and whether it is below, with all those before it in order.
pub fn holm(ps: &[f64], alpha: f64, look: Number) -> Vec<(f64, bool)> {
    let mut ascending: Vec<usize> = (0..ps.len()).collect();
    ascending.sort_by(|&a, &b| ps[a].total_cmp(&ps[b]));
    let mut found = vec![(alpha, false); ps.len()];
    let mut go_on = true;
    for (done, &i) in ascending.iter().enumerate() {
        let level = sequential::look(alpha / (ps.len() - done) as f64, look.0, look.1).level;
        go_on &= ps[i] <= level;
        found[i] = (level, go_on);
    }
    found
}

/// By how many percent the faster of two is faster in tokens per second, from and to, of an interval of ln(time / time) on one side of 0.
pub fn percent(interval: &Interval) -> (f64, f64) {
    let of = |x: f64| (x.abs().exp() - 1.0) * 100.0;
    let (one, other) = (of(interval.low), of(interval.high));
    (one.min(other), one.max(other))
}

/// `b is faster than a by 12 to 19 %`.
pub fn words(verdict: Verdict, a: &str, b: &str, interval: &Interval) -> String {
    let by = |fast: &str, slow: &str| {
        let (from, to) = percent(interval);
        format!("{fast} is faster than {slow} by {} to {} %", digits(from), digits(to))
    };
    match verdict {
        Verdict::Faster => by(b, a),
        Verdict::Slower => by(a, b),
        Verdict::NotToldApart => format!("{a} and {b}: not told apart"),
        Verdict::TooFew => format!("{a} and {b}: too few blocks or tokens"),
        Verdict::TooEarly => format!("{a} and {b}: the first planned look lies ahead"),
    }
}

/// Two digits, or the whole number.
pub fn digits(x: f64) -> String {
    match x.abs() {
        0.0 => "0".to_owned(),
        x if x < 0.95 => format!("{x:.2}"),
        x if x < 9.95 => format!("{x:.1}"),
        x => format!("{x:.0}"),
    }
}

/// A p for people: four places, or its power of ten.
pub fn p_value(p: f64) -> String {
    if p < 1e-4 { format!("{p:.0e}") } else { format!("{p:.4}") }
}

/// The normal deviate that is not exceeded with this chance.
pub fn z(p: f64) -> f64 {
    Normal::standard().inverse_cdf(p)
}

/// Chance of seeing a difference that is there, in what follows.
pub const POWER: f64 = 0.8;

/// The least |ln ratio| that is told apart with a chance of [`POWER`], at this standard error.
pub fn detectable(error: f64, alpha: f64) -> f64 {
    (z(1.0 - alpha / 2.0) + z(POWER)) * error
}

/// How many tokens tell this |ln ratio| apart with a chance of [`POWER`], if so many have this standard error. None for no difference at all.
pub fn tokens_for(effect: f64, tokens: u64, error: f64, alpha: f64) -> Option<u64> {
    let times = (detectable(error, alpha) / effect).powi(2);
    Some(tokens as f64 * times).filter(|n| n.is_finite() && *n < 1e15).map(|n| n.ceil() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interval(low: f64, high: f64) -> Interval {
        Interval { estimate: (low + high) / 2.0, low, high, p: 0.0 }
    }

    #[test]
    fn holm_steps_down_and_stops() {
        let found = holm(&[0.04, 0.011, 0.03, 0.012], 0.05, (1, 1));
        let told: Vec<bool> = found.iter().map(|f| f.1).collect();
        assert_eq!(told, [false, true, false, true], "{found:?}");
        assert!((found[1].0 - 0.0125).abs() < 1e-4 && (found[3].0 - 0.05 / 3.0).abs() < 1e-4);
        // .03 > .025 stops it, and .04 does not count although it is below .05
        assert!((found[0].0 - 0.05).abs() < 1e-4);
    }

    #[test]
    fn an_early_look_wants_more() {
        assert!(!holm(&[0.0005], 0.05, (1, 5))[0].1);
        assert!(holm(&[0.0005], 0.05, (2, 5))[0].1);
        assert!(!holm(&[0.045], 0.05, (5, 5))[0].1);
    }

    #[test]
    fn sentences() {
        let (fast, slow) =
            (interval(-0.4_f64.ln_1p(), -0.25_f64.ln_1p()), interval(0.011_f64.ln_1p(), 0.052_f64.ln_1p()));
        assert_eq!(words(Verdict::Faster, "A", "B", &fast), "B is faster than A by 25 to 40 %");
        assert_eq!(words(Verdict::Slower, "A", "B", &slow), "A is faster than B by 1.1 to 5.2 %");
        assert_eq!(words(Verdict::NotToldApart, "A", "B", &fast), "A and B: not told apart");
    }

    #[test]
    fn tokens_grow_with_the_square() {
        let half = tokens_for(0.05, 1000, 0.02, 0.05).unwrap();
        let quarter = tokens_for(0.025, 1000, 0.02, 0.05).unwrap();
        assert!(half.abs_diff(1256) <= 1 && quarter.abs_diff(4 * half) <= 4, "{half} {quarter}");
        assert_eq!(tokens_for(0.0, 1000, 0.02, 0.05), None);
    }
}
