//! Logs of a phone, one run a cell (`shared/ab`: thresholds F 0, .5, .75 and 1), and the published tables beside them.

use hotset::ab::drift::{left_over, place, saturating};
use hotset::ab::verdict::Verdict;
use hotset::ab::{Analysis, Design, Options, analyze};

use crate::shared::shared;

fn analysis() -> Option<Analysis> {
    let folder = shared("ab")?;
    let logs = ["f000", "f050", "f075", "f100"].map(|name| folder.join(name).with_extension("csv"));
    Some(analyze(&logs, &Options { resamples: 20_000, ..Options::default() }).unwrap())
}

/// n, mean ms, CV, autocorrelation at lags 1 / 2 / 5 / 10, variance ratio, Politis-White block, half widths in ms: independent, by blocks.
type Published = (u64, f64, f64, [f64; 4], f64, usize, f64, f64);

const TABLE: [Published; 4] = [
    (1304, 391.0, 0.73, [0.25, 0.19, 0.11, 0.10], 4.5, 35, 15.1, 33.2),
    (1300, 392.0, 0.77, [0.50, 0.42, 0.24, 0.06], 6.0, 29, 15.8, 41.2),
    (1419, 254.0, 0.53, [0.11, 0.04, 0.01, -0.02], 1.2, 4, 7.0, 7.8),
    (1306, 215.0, 0.80, [0.20, 0.03, 0.04, 0.00], 1.4, 5, 9.2, 11.6),
];

/// What follows from the data alone to the last printed digit; half widths, which were resampled there and here, within 5 %.
#[test]
fn the_published_table_is_met() {
    let Some(found) = analysis() else { return };
    println!("cell  n  mean  CV  lags 1/2/5/10  ratio  block  independent  by blocks");
    for (cell, wanted) in found.cells.iter().zip(TABLE) {
        let (n, mean, cv, lags, ratio, block, independent, by_blocks) = wanted;
        let d = &cell.dependence;
        let own = [1, 2, 5, 10].map(|lag| d.autocorrelation[lag]);
        println!(
            "{} {} {:.0} {:.2} {own:.2?} {:.2} {} {:.1} {:.1}",
            cell.name,
            cell.tokens,
            cell.mean_ms,
            d.cv(),
            d.variance_ratio,
            d.block,
            cell.independent_half_ms,
            cell.block_half_ms
        );
        assert_eq!((cell.tokens, d.block), (n, block), "{}", cell.name);
        let printed = |found: f64, wanted: f64, digit: f64| (found - wanted).abs() <= digit / 2.0 + 1e-9;
        assert!(printed(cell.mean_ms, mean, 1.0), "{}", cell.mean_ms);
        assert!(printed(d.cv(), cv, 0.01), "{}", d.cv());
        assert!(own.iter().zip(lags).all(|(f, w)| printed(*f, w, 0.01)), "{own:?}");
        assert!(printed(d.variance_ratio, ratio, 0.1), "{}", d.variance_ratio);
        for (found, wanted) in [(cell.independent_half_ms, independent), (cell.block_half_ms, by_blocks)] {
            assert!((found / wanted - 1.0).abs() < 0.05, "{}: {found} {wanted}", cell.name);
        }
        // wider by about the root of the ratio
        let wider = cell.block_half_ms / cell.independent_half_ms;
        assert!((wider / (by_blocks / independent) - 1.0).abs() < 0.06, "{}: {wider}", cell.name);
    }
}

#[test]
fn what_is_told_apart_and_what_not() {
    let Some(found) = analysis() else { return };
    assert_eq!(found.design, Design::Runs);
    assert!(found.tells.iter().any(|t| t.name == "confounded"));
    assert!(found.tells.iter().any(|t| t.name == "major faults"));
    let verdict = |a: &str, b: &str| {
        let of = |c: &&hotset::ab::Comparison| found.cells[c.a].name == a && found.cells[c.b].name == b;
        let c = found.comparisons.iter().find(of).unwrap();
        println!(
            "{} (log ratio {:+.3}, {:+.3} to {:+.3}, p {:.2e})",
            c.words, c.tokens.estimate, c.tokens.low, c.tokens.high, c.p
        );
        c.verdict
    };
    assert_eq!(verdict("F0", "F0.5"), Verdict::NotToldApart);
    assert_eq!(verdict("F0", "F0.75"), Verdict::Faster);
    assert_eq!(verdict("F0", "F1"), Verdict::Faster);
    assert_eq!(verdict("F0.5", "F0.75"), Verdict::Faster);
    assert_eq!(verdict("F0.75", "F1"), Verdict::Faster);
}

/// What a drift of 1 over the session puts into B - A, by order of blocks: straight, and saturating with a time constant of .2.
#[test]
fn the_drift_table_is_met() {
    let table = [
        ("AABB", 0.67, 0.57),
        ("ABAB", 0.33, 0.42),
        ("ABBA", 0.0, 0.39),
        ("ABBABAAB", 0.0, 0.09),
        ("ABBABAABBAABABBA", 0.0, 0.01),
    ];
    for (order, straight, bent) in table {
        let cells: Vec<usize> = order.bytes().map(|letter| usize::from(letter == b'B')).collect();
        let found = [place as fn(f64) -> f64, saturating].map(|shape| left_over(&cells, 0, 1, shape).abs());
        println!("{order}: {:.2} straight, {:.2} saturating", found[0], found[1]);
        assert!((found[0] - straight).abs() <= 0.005 && (found[1] - bent).abs() <= 0.005, "{order}: {found:?}");
    }
}
