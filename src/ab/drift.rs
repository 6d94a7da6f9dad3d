//! What changes over a session whatever the cell: heat, other programs, a longer context. How much of it an order of blocks leaves in a
//! difference, and how much of it a session had.

use statrs::distribution::{ContinuousCDF, StudentsT};

/// A straight drift: 0 at the session's beginning, 1 at its end.
pub fn place(share: f64) -> f64 {
    share
}

/// A drift that saturates, as heat does, with a time constant of a fifth of the session.
pub fn saturating(share: f64) -> f64 {
    1.0 - (-share / 0.2).exp()
}

/// What a drift of this shape, one block after the other, puts into mean(cell b) - mean(cell a).
pub fn left_over(order: &[usize], a: usize, b: usize, shape: fn(f64) -> f64) -> f64 {
    let last = order.len().saturating_sub(1).max(1) as f64;
    let mean = |cell: usize| {
        let of_cell = order.iter().enumerate().filter(|(_, c)| **c == cell);
        let (sum, n) = of_cell.fold((0.0, 0), |(sum, n), (i, _)| (sum + shape(i as f64 / last), n + 1));
        sum / f64::from(n)
    };
    mean(b) - mean(a)
}

/// A rank correlation, and the chance of one as strong without any.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spearman {
    pub rho: f64,
    /// Two-sided, by Student's t with n - 2 degrees of freedom.
    pub p: f64,
    pub n: usize,
}

/// Of two series of the same length. None for fewer than 4 values, or where one of them does not vary.
pub fn spearman(x: &[f64], y: &[f64]) -> Option<Spearman> {
    let n = x.len().min(y.len());
    if n < 4 {
        return None;
    }
    let (x, y) = (ranks(&x[..n]), ranks(&y[..n]));
    let middle = (n + 1) as f64 / 2.0;
    let product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - middle) * (b - middle)).sum::<f64>();
    let scale = (product(&x, &x) * product(&y, &y)).sqrt();
    if scale <= 0.0 {
        return None;
    }
    let rho = (product(&x, &y) / scale).clamp(-1.0, 1.0);
    let df = (n - 2) as f64;
    let t = rho.abs() * (df / (1.0 - rho * rho).max(1e-300)).sqrt();
    Some(Spearman { rho, p: 2.0 * StudentsT::new(0.0, 1.0, df).expect("n is 4 or more").sf(t), n })
}

/// From 1; equals share the mean of their ranks.
fn ranks(values: &[f64]) -> Vec<f64> {
    let mut by_value: Vec<usize> = (0..values.len()).collect();
    by_value.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    let mut ranks = vec![0.0; values.len()];
    let mut from = 0;
    for equal in by_value.chunk_by(|&a, &b| values[a] == values[b]) {
        let rank = from as f64 + (equal.len() + 1) as f64 / 2.0;
        equal.iter().for_each(|&i| ranks[i] = rank);
        from += equal.len();
    }
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_correlations() {
        let up: Vec<f64> = (0..10).map(f64::from).collect();
        let down: Vec<f64> = up.iter().map(|x| -x.exp()).collect();
        assert_eq!(spearman(&up, &down).unwrap().rho, -1.0);
        assert!(spearman(&up, &down).unwrap().p < 1e-6);
        assert_eq!(ranks(&[3.0, 1.0, 3.0, 2.0]), [3.5, 1.0, 3.5, 2.0]);
        // 1 - 6 x (sum of squared rank differences = 12) / (5 x 24) = .4; t = .756, p = .505
        let some = spearman(&[1.0, 2.0, 3.0, 4.0, 5.0], &[2.0, 1.0, 5.0, 3.0, 4.0]);
        let found = some.unwrap();
        assert!((found.rho - 0.6).abs() < 1e-12 && (found.p - 0.2848).abs() < 1e-3, "{found:?}");
        assert_eq!(spearman(&up, &[1.0; 10]), None);
    }
}
