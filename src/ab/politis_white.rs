//! How much the times of successive tokens depend on each other, and how long a block must be so that a block bootstrap sees it.
//!
//! Politis and White, "Automatic block-length selection for the dependent bootstrap", Econometric Reviews 23 (2004), with the correction of
//! Patton, Politis and White, Econometric Reviews 28 (2009), for the circular block bootstrap.

/// What one series is like.
#[derive(Clone, Debug, PartialEq)]
pub struct Dependence {
    pub n: usize,
    pub mean: f64,
    /// Of one value: divided by n.
    pub variance: f64,
    /// Of lags 0, 1, 2 ...; as far as the block length looked.
    pub autocorrelation: Vec<f64>,
    /// Long-run variance over `variance`: by so much the variance of a mean is larger than of as many independent values. The flat-top
    /// estimate; at least 0.05, since it may come out negative.
    pub variance_ratio: f64,
    /// For a circular block bootstrap, in values; at least 1.
    pub block: usize,
}

impl Dependence {
    /// Of a series in the order of time. Fewer than 8 values, or values that are all equal, count as independent.
    pub fn of(series: &[f64]) -> Self {
        let n = series.len();
        let mean = series.iter().sum::<f64>() / n.max(1) as f64;
        let centred: Vec<f64> = series.iter().map(|x| x - mean).collect();
        let covariance =
            |lag: usize| centred.iter().zip(&centred[lag..]).map(|(a, b)| a * b).sum::<f64>() / n.max(1) as f64;
        let variance = covariance(0);
        let alone = Self { n, mean, variance, autocorrelation: vec![1.0], variance_ratio: 1.0, block: 1 };
        if n < 8 || variance <= 0.0 || !variance.is_finite() {
            return alone;
        }
        // K_N lags in a row must be negligible for the ones before them to be the last that count
        let in_a_row = 5_usize.max((n as f64).log10().sqrt().ceil() as usize);
        let longest = ((n as f64).sqrt().ceil() as usize + in_a_row).min(n - 1);
        let rho: Vec<f64> = (0..=longest).map(|lag| covariance(lag) / variance).collect();
        let band = 2.0 * ((n as f64).log10() / n as f64).sqrt();
        let quiet = |lag: &usize| rho[lag + 1..].iter().take(in_a_row).all(|r| r.abs() < band);
        let counts = (0..(longest + 1).saturating_sub(in_a_row)).find(quiet);
        let counts = counts.or_else(|| (1..=longest).rev().find(|&lag| rho[lag].abs() >= band));
        let bandwidth = (2 * counts.unwrap_or(1).max(1)).min(longest);
        let weight = |lag: usize| (2.0 * (1.0 - lag as f64 / bandwidth as f64)).clamp(0.0, 1.0);
        let both_sides = |f: &dyn Fn(usize) -> f64| (1..=bandwidth).map(|lag| 2.0 * weight(lag) * f(lag)).sum::<f64>();
        let ratio = 1.0 + both_sides(&|lag| rho[lag]);
        let slope = both_sides(&|lag| lag as f64 * rho[lag]);
        // D of the circular bootstrap: 4/3 of the squared spectrum at 0
        let best = (2.0 * slope * slope / (4.0 / 3.0 * ratio * ratio)).cbrt() * (n as f64).cbrt();
        let most = (3.0 * (n as f64).sqrt()).min(n as f64 / 3.0).ceil();
        let block = if best.is_finite() { best.min(most).round().max(1.0) as usize } else { 1 };
        Self { autocorrelation: rho, variance_ratio: ratio.max(0.05), block, ..alone }
    }

    /// Standard deviation over mean.
    pub fn cv(&self) -> f64 {
        self.variance.sqrt() / self.mean
    }
}

#[cfg(test)]
mod tests {
    use super::Dependence;

    #[test]
    fn a_short_or_constant_series_is_taken_for_independent() {
        for series in [vec![], vec![3.0], vec![2.0; 100]] {
            let d = Dependence::of(&series);
            assert_eq!((d.variance_ratio, d.block), (1.0, 1), "{series:?}");
        }
    }

    /// x = 0.8 of the one before + noise: a variance ratio of (1 + .8) / (1 - .8) = 9, and autocorrelations of .8, .64, ...
    #[test]
    fn an_autoregressive_series() {
        let mut rng = fastrand::Rng::with_seed(5);
        let mut x = 0.0;
        let series: Vec<f64> = (0..50_000)
            .map(|_| {
                x = 0.8 * x + rng.f64() - 0.5;
                x
            })
            .collect();
        let d = Dependence::of(&series);
        assert!((d.autocorrelation[1] - 0.8).abs() < 0.02, "{}", d.autocorrelation[1]);
        assert!((d.variance_ratio / 9.0 - 1.0).abs() < 0.15, "{}", d.variance_ratio);
        // (2 G^2 / (4/3 g^2))^(1/3) n^(1/3) with G = 2 x .8 / (1 - .8)^2 = 40 and g = 9: 3.094 x 36.8
        assert!((90..=140).contains(&d.block), "{}", d.block);
    }
}
