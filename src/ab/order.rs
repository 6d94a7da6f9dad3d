//! The order of blocks: so balanced that a drift over the session falls on all cells alike, and drawn by lot within that balance, so that a
//! randomisation test knows what else could have been drawn.
//!
//! Two cells: Thue-Morse (A B B A B A A B ...), in units of 4, 8 or 16 blocks; of each unit the lot decides which cell is A. A unit of
//! 4 cancels a straight drift, of 8 a bent one too, of 16 a cubic one. More cells: Williams squares, in which each cell stands once in
//! each place of a row and follows each other cell equally often; for each square the lot decides which cell has which letter.

use rand::seq::SliceRandom;
use rand_pcg::Pcg64Mcg;

use super::drift;

/// The cell of each block, and how many successive blocks the lot decides about at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    pub cells: Vec<usize>,
    pub unit_blocks: usize,
}

/// The least number of blocks that are balanced: all others are multiples of it.
pub fn least_blocks(n_cells: usize) -> usize {
    if n_cells == 2 { 4 } else { square(n_cells).len() }
}

/// An order of at most so many blocks, whole units only. None where not one unit fits.
pub fn draw(n_cells: usize, most_blocks: usize, rng: &mut Pcg64Mcg) -> Option<Order> {
    let unit_blocks = unit_blocks(n_cells, most_blocks);
    let mut cells = Vec::new();
    for _ in 0..most_blocks / unit_blocks {
        let mut letters: Vec<usize> = (0..n_cells).collect();
        letters.shuffle(rng);
        if n_cells == 2 {
            cells.extend((0..unit_blocks).map(|i| letters[thue_morse(i)]));
        } else {
            let square = square(n_cells);
            let mut rows: Vec<&[usize]> = square.chunks(n_cells).collect();
            rows.shuffle(rng);
            cells.extend(rows.concat().iter().map(|&c| letters[c]));
        }
    }
    (!cells.is_empty()).then_some(Order { cells, unit_blocks })
}

/// As long as leaves eight lots or more to draw: fewer, and a randomisation test has nothing to compare with.
fn unit_blocks(n_cells: usize, most_blocks: usize) -> usize {
    let least = least_blocks(n_cells);
    if n_cells != 2 {
        return least;
    }
    [16, 8].into_iter().find(|unit| most_blocks / unit >= 8).unwrap_or(least)
}

/// 0, 1, 1, 0, 1, 0, 0, 1, ...: the parity of the bits.
fn thue_morse(i: usize) -> usize {
    (i.count_ones() & 1) as usize
}

/// A Williams square of so many letters, row after row: one for an even number, and its mirror image after it for an odd one.
pub fn square(n: usize) -> Vec<usize> {
    let first = |i: usize| if i % 2 == 1 { i.div_ceil(2) } else { (n - i / 2) % n };
    let rows = (0..n).flat_map(|row| (0..n).map(move |i| (first(i) + row) % n));
    let mut square: Vec<usize> = rows.collect();
    if n % 2 == 1 {
        let mirrored: Vec<usize> = square.chunks(n).flat_map(|row| row.iter().rev().copied()).collect();
        square.extend(mirrored);
    }
    square
}

/// How many successive blocks of an order that was found in a log were drawn at once: the largest unit that all of it is made of. A
/// unit that is cut at the end does not count. None: not an order of this file's.
pub fn recognise(order: &[usize], n_cells: usize) -> Option<usize> {
    let units: &[usize] = if n_cells == 2 { &[16, 8, 4] } else { &[square(n_cells).len()] };
    let fits = |unit: &[usize]| {
        if n_cells == 2 {
            return unit.iter().enumerate().all(|(i, &c)| c == thue_morse(i) ^ unit[0]);
        }
        let rows_hold_all = unit.chunks(n_cells).all(|row| (0..n_cells).all(|c| row.contains(&c)));
        rows_hold_all && (0..n_cells).all(|b| (0..b).all(|a| drift::left_over(unit, a, b, drift::place).abs() < 1e-9))
    };
    let all_fit = |unit: &&usize| order.len() >= **unit && order.chunks_exact(**unit).all(fits);
    units.iter().find(all_fit).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn thue_morse_begins_as_it_should() {
        assert_eq!((0..16).map(thue_morse).collect::<Vec<_>>(), [0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0]);
    }

    /// Each letter once in each row and in each place, and after each other letter equally often.
    #[test]
    fn williams_squares() {
        for n in 3..=12 {
            let square = square(n);
            let rows = square.len() / n;
            assert_eq!(rows, if n % 2 == 0 { n } else { 2 * n });
            let mut follows = vec![0; n * n];
            for row in square.chunks(n) {
                assert!((0..n).all(|c| row.contains(&c)), "{n}: {row:?}");
                row.windows(2).for_each(|w| follows[w[0] * n + w[1]] += 1);
            }
            for place in 0..n {
                let in_place = |c: usize| square.iter().skip(place).step_by(n).filter(|x| **x == c).count();
                assert!((0..n).all(|c| in_place(c) == rows / n));
            }
            let wanted = rows / n;
            assert!((0..n * n).all(|i| follows[i] == if i / n == i % n { 0 } else { wanted }), "{n}: {follows:?}");
        }
    }

    #[test]
    fn drawn_orders_are_balanced_seeded_and_recognised() {
        let mut distinct = std::collections::BTreeSet::new();
        for (n, most, unit) in [(2, 4, 4), (2, 63, 4), (2, 64, 8), (2, 130, 16), (3, 40, 18), (4, 100, 16), (8, 64, 64)]
        {
            for seed in 0..20 {
                let order = draw(n, most, &mut Pcg64Mcg::seed_from_u64(seed)).unwrap();
                assert_eq!(order, draw(n, most, &mut Pcg64Mcg::seed_from_u64(seed)).unwrap());
                assert_eq!((order.cells.len(), order.unit_blocks), (most / unit * unit, unit));
                for b in 1..n {
                    assert!(drift::left_over(&order.cells, 0, b, drift::place).abs() < 1e-9);
                }
                let found = recognise(&order.cells, n).unwrap();
                assert!(found >= unit && found % unit == 0, "{n} {most}: {found}");
                distinct.insert(order.cells);
            }
        }
        assert!(distinct.len() > 60, "{}", distinct.len());
        assert_eq!(draw(4, 15, &mut Pcg64Mcg::seed_from_u64(0)), None);
        assert_eq!(recognise(&[0, 1, 0, 1, 0, 1, 0, 1], 2), None);
        assert_eq!(recognise(&[0, 0, 0, 1, 1, 1], 2), None);
    }
}
