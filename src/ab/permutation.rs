//! The randomisation test: had the cells no effect, each order that the lot could have drawn would have given the same times, only under other
//! names. So the difference is compared with those of the other orders.
//!
//! For two cells a unit of the order is drawn by exchanging them ([`super::order`]), which turns the sign of the unit's difference; and
//! ln(sum of b / sum of a) grows with the sum of the differences, whatever the signs, so that sum is what is compared.

use rand::Rng;
use rand_pcg::Pcg64Mcg;

use super::blocks::Pair;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Randomisation {
    /// Share of the orders with a difference at least as large, this one among them.
    pub p: f64,
    /// The smallest p that so few units can give.
    pub least: f64,
    pub units: usize,
}

/// All orders are gone through up to so many units.
const EXACT: usize = 14;

/// None without pairs.
pub fn randomisation(pairs: &[Pair], resamples: usize, rng: &mut Pcg64Mcg) -> Option<Randomisation> {
    let mut units: Vec<(usize, f64)> = Vec::new();
    for pair in pairs {
        let difference = pair.b_ms - pair.a_ms;
        match units.iter_mut().find(|(unit, _)| *unit == pair.unit) {
            Some((_, sum)) => *sum += difference,
            None => units.push((pair.unit, difference)),
        }
    }
    let sums: Vec<f64> = units.iter().map(|(_, sum)| *sum).collect();
    let n = sums.len();
    if n == 0 {
        return None;
    }
    let found = sums.iter().sum::<f64>().abs() * (1.0 - 1e-12);
    let with = |signs: &mut dyn FnMut(usize) -> bool| -> f64 {
        sums.iter().enumerate().map(|(i, s)| if signs(i) { -s } else { *s }).sum()
    };
    let least = 2.0 * 0.5_f64.powi(n as i32);
    if n <= EXACT {
        let orders = 1_u32 << n;
        let as_far = (0..orders).filter(|bits| with(&mut |i| bits >> i & 1 == 1).abs() >= found).count();
        return Some(Randomisation { p: as_far as f64 / f64::from(orders), least, units: n });
    }
    let mut as_far = 0;
    for _ in 0..resamples {
        let (mut bits, mut left) = (0_u64, 0);
        let mut next = |_| {
            if left == 0 {
                (bits, left) = (rng.random(), 64);
            }
            let sign = bits & 1 == 1;
            (bits, left) = (bits >> 1, left - 1);
            sign
        };
        as_far += usize::from(with(&mut next).abs() >= found);
    }
    let p = (as_far + 1) as f64 / (resamples + 1) as f64;
    Some(Randomisation { p, least: least.max(1.0 / (resamples + 1) as f64), units: n })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    fn pairs(differences: &[f64]) -> Vec<Pair> {
        let one = |(unit, d): (usize, &f64)| Pair { a_ms: 10.0, b_ms: 10.0 + d, gap: 1.0, share: 0.0, unit };
        differences.iter().enumerate().map(one).collect()
    }

    fn p(differences: &[f64]) -> Randomisation {
        randomisation(&pairs(differences), 20_000, &mut Pcg64Mcg::seed_from_u64(1)).unwrap()
    }

    #[test]
    fn small_ones_are_counted() {
        // of eight orders of 1, 1, 1 the two with all signs alike are as far; of 3, 1, 1 those and none else
        assert_eq!(p(&[1.0, 1.0, 1.0]), Randomisation { p: 0.25, least: 0.25, units: 3 });
        assert_eq!(p(&[3.0, -1.0, -1.0]).p, 1.0);
        assert_eq!(p(&[3.0, 1.0, -1.0]).p, 0.75);
        assert_eq!(p(&[0.0, 0.0]).p, 1.0);
        assert!(randomisation(&[], 10, &mut Pcg64Mcg::seed_from_u64(1)).is_none());
    }

    /// Twenty units, of which 15 say one way: a binomial tail of 2 x 0.0207.
    #[test]
    fn large_ones_are_drawn() {
        let found = p(&[[1.0; 15].as_slice(), &[-1.0; 5]].concat());
        assert!((found.p - 0.0414).abs() < 0.005, "{found:?}");
    }

    /// Pairs of one unit turn together.
    #[test]
    fn units_are_turned_as_a_whole() {
        let mut two = pairs(&[1.0, 1.0, 1.0, 1.0]);
        two.iter_mut().enumerate().for_each(|(i, pair)| pair.unit = i / 2);
        let found = randomisation(&two, 10, &mut Pcg64Mcg::seed_from_u64(1)).unwrap();
        assert_eq!((found.p, found.units), (0.5, 2));
    }
}
