//! Intervals without a shape assumed: a studentised bootstrap over pairs of blocks, and a circular block bootstrap over tokens.

use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;
use statrs::distribution::{ContinuousCDF, StudentsT};

use super::politis_white::Dependence;

/// An estimate with its interval and the chance of one as far from 0 where the truth is 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    pub estimate: f64,
    pub low: f64,
    pub high: f64,
    /// Two-sided.
    pub p: f64,
}

/// What the resampled |t| of a mean says, in the place of Student's table.
pub struct Studentised {
    /// Ascending.
    t: Vec<f64>,
    /// Degrees of freedom, for what lies beyond the resamples.
    df: f64,
}

impl Studentised {
    /// Resamples `values` (their mean does not matter); `df` = their number less what was fitted to them.
    pub fn of(values: &[f64], df: f64, resamples: usize, rng: &mut Pcg64Mcg) -> Self {
        let n = values.len();
        let mean = values.iter().sum::<f64>() / n as f64;
        let centred: Vec<f64> = values.iter().map(|x| x - mean).collect();
        let mut draw = || {
            let (mut sum, mut squares) = (0.0, 0.0);
            for _ in 0..n {
                let x = centred[index(rng, n)];
                sum += x;
                squares += x * x;
            }
            let mean = sum / n as f64;
            let variance = (squares - sum * mean).max(0.0) / (n - 1) as f64;
            // a resample of one value n times says nothing of its error: the farthest out
            if variance > 0.0 { (mean / (variance / n as f64).sqrt()).abs() } else { f64::MAX }
        };
        let mut t: Vec<f64> = (0..resamples).map(|_| draw()).collect();
        t.sort_by(f64::total_cmp);
        Self { t, df }
    }

    /// The |t| that is exceeded with this chance.
    pub fn quantile(&self, alpha: f64) -> f64 {
        let beyond = alpha * self.t.len() as f64;
        let student = self.student().inverse_cdf(1.0 - alpha / 2.0);
        if beyond < ENOUGH {
            // fewer than a handful of resamples lie there: Student's, and never nearer than the resamples' own
            let at = self.t.len().saturating_sub(ENOUGH as usize + 1);
            return student.max(self.t.get(at).copied().filter(|t| *t < f64::MAX).unwrap_or(0.0));
        }
        let at = (self.t.len() as f64 - beyond).floor() as usize;
        let found = self.t[at.min(self.t.len() - 1)];
        if found < f64::MAX { found } else { student }
    }

    /// The chance of a |t| as large.
    pub fn p(&self, t: f64) -> f64 {
        let beyond = (self.t.len() - self.t.partition_point(|x| *x < t.abs())) as f64;
        let counted = (beyond + 1.0) / (self.t.len() + 1) as f64;
        if beyond < ENOUGH { counted.min((2.0 * self.student().sf(t.abs())).max(f64::MIN_POSITIVE)) } else { counted }
    }

    fn student(&self) -> StudentsT {
        StudentsT::new(0.0, 1.0, self.df.max(1.0)).expect("at least one degree of freedom")
    }
}

/// Resamples beyond a point, for it to be told by them.
const ENOUGH: f64 = 10.0;

/// Means of a series resampled in blocks of successive values, the end joined to the beginning.
struct Circular {
    /// Sums of the first 0, 1, 2 ... values, twice round.
    sums: Vec<f64>,
    n: usize,
    block: usize,
}

impl Circular {
    fn new(series: &[f64], block: usize) -> Self {
        let n = series.len();
        let mut sums = vec![0.0; 1];
        let mut sum = 0.0;
        for x in series.iter().chain(series) {
            sum += x;
            sums.push(sum);
        }
        Self { sums, n, block: block.clamp(1, n.max(1)) }
    }

    /// The mean of one resample of as many values; the last block is cut.
    fn mean(&self, rng: &mut Pcg64Mcg) -> f64 {
        let (mut sum, mut left) = (0.0, self.n);
        while left > 0 {
            let (from, len) = (index(rng, self.n), self.block.min(left));
            sum += self.sums[from + len] - self.sums[from];
            left -= len;
        }
        sum / self.n as f64
    }
}

/// The mean of a series, resampled in blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct Means {
    pub mean: f64,
    /// In the order in which they were drawn.
    resampled: Vec<f64>,
}

impl Means {
    /// Of a series that is not empty.
    pub fn of(series: &[f64], block: usize, resamples: usize, rng: &mut Pcg64Mcg) -> Self {
        let circular = Circular::new(series, block);
        let mean = circular.sums[circular.n] / circular.n as f64;
        Self { mean, resampled: (0..resamples).map(|_| circular.mean(rng)).collect() }
    }

    /// Half the width of the percentile interval.
    pub fn half_width(&self, level: f64) -> f64 {
        let (low, high) = percentiles(&mut self.resampled.clone(), level);
        (high - low) / 2.0
    }
}

/// The mean of a series, resampled in blocks as long as its values depend on each other ([`Dependence`]), with the percentile interval; p by a
/// normal tail of the resamples' spread, 1 where all values are equal to 0. For differences of what was measured in pairs.
pub fn mean(series: &[f64], level: f64, resamples: usize, seed: u64) -> Interval {
    let mut rng = Pcg64Mcg::seed_from_u64(seed);
    let Means { mean: estimate, mut resampled } = Means::of(series, Dependence::of(series).block, resamples, &mut rng);
    let sd = (resampled.iter().map(|x| (x - estimate).powi(2)).sum::<f64>() / resamples as f64).sqrt();
    let p = if estimate == 0.0 { 1.0 } else { two_sided(estimate / sd) };
    let (low, high) = percentiles(&mut resampled, level);
    Interval { estimate, low, high, p }
}

/// ln(mean of b / mean of a), both resampled independently.
pub fn log_ratio_of_means(a: &Means, b: &Means, level: f64) -> Interval {
    let estimate = (b.mean / a.mean).ln();
    let mut all: Vec<f64> = b.resampled.iter().zip(&a.resampled).map(|(b, a)| (b / a).ln()).collect();
    let n = all.len() as f64;
    let as_far = all.iter().filter(|x| (*x - estimate).abs() >= estimate.abs()).count() as f64;
    let mut p = (as_far + 1.0) / (n + 1.0);
    if as_far < ENOUGH {
        // beyond the resamples: a normal tail of their spread
        let sd = (all.iter().map(|x| (x - estimate).powi(2)).sum::<f64>() / n).sqrt();
        p = p.min(two_sided(estimate / sd).max(f64::MIN_POSITIVE));
    }
    let (low, high) = percentiles(&mut all, level);
    Interval { estimate, low, high, p }
}

/// One of 0 .. n, n < 2^32: by multiplication, off by less than n / 2^32.
fn index(rng: &mut Pcg64Mcg, n: usize) -> usize {
    ((u64::from(rng.random::<u32>()) * n as u64) >> 32) as usize
}

/// The chance of a normal deviate at least as far from 0.
pub fn two_sided(z: f64) -> f64 {
    2.0 * statrs::distribution::Normal::standard().sf(z.abs())
}

/// The ends of the middle `level` of these numbers, which are sorted.
fn percentiles(numbers: &mut [f64], level: f64) -> (f64, f64) {
    numbers.sort_by(f64::total_cmp);
    (quantile(numbers, (1.0 - level) / 2.0), quantile(numbers, 1.0 - (1.0 - level) / 2.0))
}

/// The `q` quantile of ascending numbers, between neighbours in proportion; NaN of none.
pub fn quantile(ascending: &[f64], q: f64) -> f64 {
    let Some(last) = ascending.len().checked_sub(1) else { return f64::NAN };
    let at = q.clamp(0.0, 1.0) * last as f64;
    let (low, part) = (at.floor() as usize, at.fract());
    ascending[low] + part * (ascending[(low + 1).min(last)] - ascending[low])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles() {
        assert_eq!(quantile(&[1.0, 2.0, 4.0], 0.5), 2.0);
        assert_eq!(quantile(&[1.0, 2.0, 4.0], 0.75), 3.0);
        assert_eq!(quantile(&[7.0], 0.99), 7.0);
        assert!(quantile(&[], 0.5).is_nan());
    }

    /// Of normal values the resampled t is close to Student's table: 2.131 for 15 degrees of freedom.
    #[test]
    fn studentised_is_close_to_the_table() {
        let mut rng = Pcg64Mcg::seed_from_u64(1);
        let mut sum = 0.0;
        for _ in 0..40 {
            let values: Vec<f64> =
                (0..16).map(|_| rand_distr::Distribution::sample(&rand_distr::StandardNormal, &mut rng)).collect();
            let t = Studentised::of(&values, 15.0, 2000, &mut rng);
            let q = t.quantile(0.05);
            assert!((t.p(q) - 0.05).abs() < 0.002);
            sum += q / 40.0;
            // beyond the resamples
            assert!(t.quantile(1e-6) > 7.0 && t.p(9.0) < 1e-6);
        }
        assert!((sum - 2.131).abs() < 0.15, "{sum}");
    }

    #[test]
    fn the_mean_of_differences() {
        let same = mean(&[0.0; 50], 0.95, 500, 1);
        assert_eq!(same, Interval { estimate: 0.0, low: 0.0, high: 0.0, p: 1.0 });
        let mut rng = Pcg64Mcg::seed_from_u64(3);
        let noise: Vec<f64> = (0..2000).map(|_| rng.random_range(-1.0..1.0)).collect();
        // 1.96 x sqrt(1/3 / 2000); what depends on the value before has a wider one
        let independent = mean(&noise, 0.95, 2000, 1);
        let half = (independent.high - independent.low) / 2.0;
        assert!((half / 0.0253 - 1.0).abs() < 0.25, "{half}");
        let smooth: Vec<f64> = noise.windows(20).map(|w| w.iter().sum::<f64>() / 20.0 + 0.5).collect();
        let dependent = mean(&smooth, 0.95, 2000, 1);
        let wide = (dependent.high - dependent.low) / 2.0;
        assert!(wide > 0.6 * half && dependent.low < 0.5 + independent.estimate && dependent.p < 1e-6, "{dependent:?}");
    }

    /// A block as long as the series has one mean only; blocks of one value give the interval of independent values.
    #[test]
    fn circular_blocks() {
        let mut rng = Pcg64Mcg::seed_from_u64(2);
        let mut half_width =
            |series: &[f64], block, resamples| Means::of(series, block, resamples, &mut rng).half_width(0.95);
        let series: Vec<f64> = (0..400).map(|i| f64::from(i % 10)).collect();
        assert!(half_width(&series, 400, 200) < 1e-9);
        let independent = half_width(&series, 1, 4000);
        let wanted = 1.96 * (8.25_f64 / 400.0).sqrt();
        assert!((independent / wanted - 1.0).abs() < 0.05, "{independent} {wanted}");
        // what goes up and down within ten values hardly moves the mean of blocks of ten
        assert!(half_width(&series, 10, 1000) < 1e-9);
    }
}
