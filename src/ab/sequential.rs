//! Looks that were planned ahead pay for themselves: alpha spending after Lan and DeMets (Biometrika 70, 1983), with the spending function that
//! is like O'Brien and Fleming's bounds: almost nothing is spent early, so that the last look keeps nearly all of it.

use statrs::distribution::{Continuous, ContinuousCDF, Normal};

use super::bootstrap::two_sided;

/// What one look may use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Look {
    /// A |z| beyond this tells apart.
    pub bound: f64,
    /// The same as a two-sided p.
    pub level: f64,
}

/// Of `alpha`, both sides together, what is spent when this share of the information is there:
/// 2 x (2 - 2 Phi(z(alpha / 4) / sqrt(share))).
pub fn spent(alpha: f64, share: f64) -> f64 {
    let z = Normal::standard().inverse_cdf(1.0 - alpha / 4.0);
    2.0 * two_sided(z / share.clamp(f64::MIN_POSITIVE, 1.0).sqrt())
}

/// The bounds of looks at these ascending shares, the last of which is usually 1. By recursion over the density of the sum that has not
/// crossed a bound (Armitage, McPherson and Rowe, 1969).
pub fn looks(alpha: f64, shares: &[f64]) -> Vec<Look> {
    let normal = Normal::standard();
    // the density of the sum, at points an equal step apart, of those runs that go on
    let (mut points, mut density): (Vec<f64>, Vec<f64>) = (vec![0.0], vec![1.0]);
    let (mut before, mut paid, mut all) = (0.0, 0.0, Vec::new());
    for &share in shares {
        let sd = (share - before).sqrt();
        let to_pay = spent(alpha, share) - paid;
        let crossing = |bound: f64| -> f64 {
            let beyond = |s: f64| normal.sf((bound - s) / sd) + normal.cdf((-bound - s) / sd);
            points.iter().zip(&density).map(|(s, weight)| weight * beyond(*s)).sum()
        };
        let (mut low, mut high) = (0.0, 12.0 * share.sqrt());
        for _ in 0..60 {
            let middle = 0.5 * (low + high);
            if crossing(middle) > to_pay { low = middle } else { high = middle }
        }
        let bound = high;
        let step = 2.0 * bound / GRID as f64;
        let next: Vec<f64> = (0..=GRID).map(|i| -bound + step * i as f64).collect();
        let ends = |i: usize| if i == 0 || i == GRID { 0.5 } else { 1.0 };
        density = next
            .iter()
            .enumerate()
            .map(|(i, s)| {
                let arrives = |(from, weight): (&f64, &f64)| weight * normal.pdf((s - from) / sd) / sd;
                points.iter().zip(&density).map(arrives).sum::<f64>() * step * ends(i)
            })
            .collect();
        points = next;
        (before, paid) = (share, paid + to_pay);
        let z = bound / share.sqrt();
        all.push(Look { bound: z, level: two_sided(z) });
    }
    all
}

const GRID: usize = 300;

/// `planned` looks an equal part of the plan apart: the one with this number, from 1.
pub fn look(alpha: f64, number: u32, planned: u32) -> Look {
    let shares: Vec<f64> = (1..=number).map(|i| f64::from(i) / f64::from(planned)).collect();
    *looks(alpha, &shares).last().expect("at least one look")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bounds that are tabulated for five equal looks at .05, both sides.
    #[test]
    fn five_looks() {
        let bounds: Vec<f64> = looks(0.05, &[0.2, 0.4, 0.6, 0.8, 1.0]).iter().map(|l| l.bound).collect();
        for (found, wanted) in bounds.iter().zip([4.8769, 3.3569, 2.6803, 2.2898, 2.0310]) {
            assert!((found - wanted).abs() < 0.003, "{bounds:?}");
        }
    }

    #[test]
    fn one_look_costs_nothing() {
        let one = look(0.05, 1, 1);
        assert!((one.bound - 1.95996).abs() < 1e-4 && (one.level - 0.05).abs() < 1e-5, "{one:?}");
        assert!((spent(0.05, 1.0) - 0.05).abs() < 1e-9);
    }
}
