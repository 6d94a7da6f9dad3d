//! The ratio of two cells by pairs of blocks, with the interval of a bootstrap over the pairs.
//!
//! The estimate is ln(sum of b's times / sum of a's times): what a user of b waits, against a. Its error is that of the mean of one number a
//! pair, b_i / mean(b) - a_i / mean(a) (the ratio, linearised). What a drift adds to a pair is in proportion to how far b lies behind a; so these
//! numbers are fitted to that distance, and to the distance times the place in the session, and the residuals are what is resampled. In a
//! balanced order the fit does not move the estimate, it only keeps the drift out of the interval.

use rand_pcg::Pcg64Mcg;

use super::blocks::Pair;
use super::bootstrap::{Interval, Studentised};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Paired {
    /// Of ln(time of b / time of a).
    pub interval: Interval,
    pub n_pairs: usize,
    /// Standard error of the estimate.
    pub error: f64,
    /// a always before b, or always behind it: a drift and the cells' difference cannot be told from each other.
    pub one_sided: bool,
}

/// Fewer pairs say nothing.
pub const LEAST_PAIRS: usize = 4;

/// None for fewer than [`LEAST_PAIRS`], or without any spread. `alpha`: 1 - level of the interval.
pub fn paired(pairs: &[Pair], alpha: f64, resamples: usize, rng: &mut Pcg64Mcg) -> Option<Paired> {
    let n = pairs.len();
    if n < LEAST_PAIRS {
        return None;
    }
    let mean = |of: fn(&Pair) -> f64| pairs.iter().map(of).sum::<f64>() / n as f64;
    let (a, b) = (mean(|p| p.a_ms), mean(|p| p.b_ms));
    let numbers: Vec<f64> = pairs.iter().map(|p| p.b_ms / b - p.a_ms / a).collect();
    let middle = mean(|p| p.share);
    let gaps: Vec<f64> = pairs.iter().map(|p| p.gap).collect();
    let bends: Vec<f64> = pairs.iter().map(|p| p.gap * (p.share - middle)).collect();
    // orthogonal to each other; one that says nothing new is left out, and so are those for which there are too few pairs
    let mut drifts: Vec<Vec<f64>> = Vec::new();
    for (column, least) in [(gaps, LEAST_PAIRS), (bends, 3 * LEAST_PAIRS)] {
        let left = without(&column, &drifts);
        if n >= least && dot(&left, &left) > 1e-9 * dot(&column, &column) {
            drifts.push(left);
        }
    }
    let ones = vec![1.0; n];
    let mut own = without(&ones, &drifts);
    let one_sided = dot(&own, &own) < 0.1 * n as f64;
    if one_sided {
        (drifts, own) = (Vec::new(), ones);
    }
    let weight = dot(&own, &own);
    let moved = dot(&own, &numbers) / weight;
    let mut residuals = without(&numbers, &drifts);
    residuals.iter_mut().zip(&own).for_each(|(r, w)| *r -= moved * w);
    let df = (n - 1 - drifts.len()) as f64;
    let error = (dot(&residuals, &residuals) / df / weight).sqrt();
    if error <= 0.0 || !error.is_finite() {
        return None;
    }
    let estimate = (b / a).ln() + moved;
    let t = Studentised::of(&residuals, df, resamples, rng);
    let half = t.quantile(alpha) * error;
    let interval = Interval { estimate, low: estimate - half, high: estimate + half, p: t.p(estimate / error) };
    Some(Paired { interval, n_pairs: n, error, one_sided })
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// What of `x` is orthogonal to these, which are so to each other.
fn without(x: &[f64], to: &[Vec<f64>]) -> Vec<f64> {
    let mut left = x.to_vec();
    for column in to {
        let part = dot(&left, column) / dot(column, column);
        left.iter_mut().zip(column).for_each(|(l, c)| *l -= part * c);
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    fn pair(i: usize, a_ms: f64, b_ms: f64, gap: f64) -> Pair {
        Pair { a_ms, b_ms, gap, share: i as f64 / 40.0, unit: i / 2 }
    }

    fn of(pairs: &[Pair]) -> Option<Paired> {
        paired(pairs, 0.05, 1000, &mut Pcg64Mcg::seed_from_u64(1))
    }

    /// b is 10 % slower; both get slower by a third over the session, which must not widen the interval.
    #[test]
    fn a_drift_is_kept_out_of_the_interval() {
        let mut rng = fastrand::Rng::with_seed(3);
        let mut session = |drift: f64| -> Vec<Pair> {
            let mut time = |at: f64, of: f64| of * (1.0 + drift * at / 80.0) * (1.0 + 0.002 * (rng.f64() - 0.5));
            let one = |i: usize| {
                let (first, second) = (2.0 * i as f64, 2.0 * i as f64 + 1.0);
                let forward = i % 2 == 0;
                let (a, b) = if forward { (first, second) } else { (second, first) };
                pair(i, time(a, 100.0), time(b, 110.0), b - a)
            };
            (0..40).map(one).collect()
        };
        let (still, heated) = (of(&session(0.0)).unwrap(), of(&session(0.33)).unwrap());
        for found in [still, heated] {
            assert!((found.interval.estimate - 1.1_f64.ln()).abs() < 3.0 * found.error, "{found:?}");
            assert!(found.interval.p < 1e-6 && !found.one_sided);
        }
        assert!(heated.error < 2.0 * still.error, "{heated:?} {still:?}");
    }

    #[test]
    fn always_in_the_same_order() {
        let pairs: Vec<Pair> = (0..20).map(|i| pair(i, 100.0 + (i % 3) as f64, 101.0 + (i % 4) as f64, 64.0)).collect();
        assert!(of(&pairs).unwrap().one_sided);
    }

    #[test]
    fn too_few() {
        let pairs: Vec<Pair> =
            (0..4).map(|i| pair(i, 100.0 + i as f64, 101.0, if i % 2 == 0 { 1.0 } else { -1.0 })).collect();
        assert!(of(&pairs[..3]).is_none());
        assert!(of(&pairs).is_some());
        assert!(of(&[pairs[0]; 5]).is_none(), "no spread");
    }
}
