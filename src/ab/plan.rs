//! From cells and a budget of tokens to a schedule: how long blocks are, in which order, and what difference so many tokens can tell apart.
//!
//! **Washout.** After a change of settings the cache is still that of the block before. A layer whose cache has S slots and misses m experts a token
//! has taken in S new experts after S / m tokens, its turnover: that many tokens are marked, and not measured. **Block.** Five times the
//! washout, so that a fifth is lost to it; longer blocks lose less, and cancel drifts less well. **Order**: [`super::order`].

use rand::SeedableRng;
use rand_pcg::Pcg64Mcg;
use serde_json::json;

use super::drift::{left_over, saturating};
use super::log::{HITS, Log, MISSES};
use super::paired::LEAST_PAIRS;
use super::politis_white::Dependence;
use super::{order, sequential, verdict};
use crate::error::{Result, err};
use crate::hook::schedule::{Block, Carry, Cell, MAX_CELLS, Schedule};

/// How times per token spread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Standard deviation over mean of a token's time.
    pub cv: f64,
    /// Long-run variance over that of a token.
    pub variance_ratio: f64,
}

impl Default for Spread {
    /// Of a published run on a phone, the widest there: what is taken without a pilot.
    fn default() -> Self {
        Self { cv: 0.73, variance_ratio: 4.5 }
    }
}

/// What a run before the experiment tells of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pilot {
    pub spread: Spread,
    /// Tokens after which a layer's cache holds other experts; None: the log does not say, or there were no misses.
    pub turnover: Option<f64>,
    pub tokens: usize,
}

/// Of a log of one setting. `skip`: tokens left out at its beginning. `layers`: with experts, over which the log's misses are summed. `Format` where
/// too little is left.
pub fn pilot(log: &Log, skip: usize, layers: Option<u32>) -> Result<Pilot> {
    let rows = log.rows.get(skip..).unwrap_or_default();
    if rows.len() < 100 {
        let n = log.rows.len();
        return Err(err!(Format, "{}: {n} decode passes, {skip} of them left out: a pilot wants 100 more", log.name));
    }
    let times: Vec<f64> = rows.iter().map(|r| r.wall_ns / f64::from(r.tokens)).collect();
    let dependence = Dependence::of(&times);
    let tokens: f64 = rows.iter().map(|r| f64::from(r.tokens)).sum();
    let misses: f64 = rows.iter().map(|r| r.counts[MISSES]).sum::<f64>() / tokens;
    let known = rows.iter().all(|r| r.counts[HITS].is_finite()) && misses > 0.0;
    let slots = rows.iter().filter_map(|r| r.slots).max();
    let turnover = slots.zip(layers).filter(|_| known).map(|(s, l)| f64::from(s) * f64::from(l) / misses);
    let spread = Spread { cv: dependence.cv(), variance_ratio: dependence.variance_ratio };
    Ok(Pilot { spread, turnover, tokens: rows.len() })
}

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Two or more, with names of their own.
    pub cells: Vec<Cell>,
    /// Decode tokens in all, washout included: at most so many.
    pub tokens: u64,
    pub seed: u64,
    pub carry: Carry,
    /// Tokens of a block, washout included; None: five times the washout, at least 40.
    pub block: Option<u64>,
    /// None: the turnover, or 16.
    pub washout: Option<u64>,
    /// Of the caches, in tokens, where known.
    pub turnover: Option<f64>,
    pub spread: Spread,
    /// How often the logs are looked at, the end included.
    pub looks: u32,
    /// Adds a cell that is the first one once more: the two must not be told apart.
    pub again: bool,
    /// Chance of a false alarm.
    pub alpha: f64,
}

/// A schedule, and what it can do.
#[derive(Clone, Debug)]
pub struct Planned {
    pub schedule: Schedule,
    /// Blocks that one lot decided about.
    pub unit_blocks: usize,
    pub lots: usize,
    /// Of each cell, without washout.
    pub measured_tokens: u64,
    /// The least ratio of times - 1 that is told apart with a chance of 80 %, among all pairs.
    pub detectable: f64,
    /// What a heat drift of 25 % can put into a difference, at most over the pairs: a share of the time.
    pub drift_left: f64,
}

/// Without a turnover.
const WASHOUT: u64 = 16;
const LEAST_BLOCK: u64 = 40;

/// `Argument` for what cannot work, with the numbers.
pub fn plan(wanted: &Wanted) -> Result<Planned> {
    let mut cells = wanted.cells.clone();
    if let Some(first) = wanted.cells.first().filter(|_| wanted.again).cloned() {
        cells.insert(1, Cell { name: format!("{} again", first.name), ..first });
    }
    let n = cells.len();
    check_cells(&cells)?;
    if !(1..=100).contains(&wanted.looks) {
        return Err(err!(Argument, "{} looks: 1 to 100 wanted", wanted.looks));
    }
    let turnover = wanted.turnover.filter(|t| t.is_finite() && *t > 0.0);
    let washout = wanted.washout.unwrap_or_else(|| turnover.map_or(WASHOUT, |t| t.ceil() as u64));
    let tokens = wanted.block.unwrap_or_else(|| washout.saturating_mul(5).max(LEAST_BLOCK));
    if washout >= tokens {
        return Err(err!(
            Argument,
            "blocks of {tokens} tokens with a washout of {washout}: nothing is left to measure"
        ));
    }
    let most = usize::try_from(wanted.tokens / tokens).unwrap_or(usize::MAX).min(MAX_BLOCKS);
    let unit = order::least_blocks(n);
    let least = unit * LEAST_PAIRS.div_ceil(unit / n);
    if most < least {
        let (total, given) = (least as u64 * tokens, wanted.tokens);
        let why = "give more tokens, shorter blocks (--block) or fewer cells";
        return Err(err!(
            Argument,
            "{n} cells want at least {least} blocks of {tokens} tokens (washout {washout}), {total} tokens; {given} are given: {why}"
        ));
    }
    let mut rng = Pcg64Mcg::seed_from_u64(wanted.seed);
    let order = order::draw(n, most, &mut rng).expect("at least one unit fits");
    let block = |(i, &cell): (usize, &usize)| Block { cell, from: i as u64 * tokens, tokens };
    let blocks: Vec<Block> = order.cells.iter().enumerate().map(block).collect();
    let lots = order.cells.len() / order.unit_blocks;
    if lots < wanted.looks as usize {
        let (looks, unit) = (wanted.looks, order.unit_blocks);
        return Err(err!(Argument, "{looks} looks at {lots} units of {unit} blocks: at most one a unit"));
    }
    let pairs_of_cells = (n * (n - 1) / 2) as f64;
    let measured_tokens = (blocks.len() / n) as u64 * (tokens - washout);
    let Spread { cv, variance_ratio } = wanted.spread;
    let error = (2.0 * cv * cv * variance_ratio / measured_tokens as f64).sqrt();
    let left = |b: usize| (0..b).map(move |a| (a, b));
    let drift_left =
        (0..n).flat_map(left).map(|(a, b)| left_over(&order.cells, a, b, saturating).abs()).fold(0.0, f64::max);
    let ab = json!({
        "looks": wanted.looks, "unit_blocks": order.unit_blocks, "tokens": blocks.len() as u64 * tokens,
        "cv": cv, "variance_ratio": variance_ratio,
    });
    let schedule = Schedule {
        seed: Some(wanted.seed),
        carry: wanted.carry,
        washout,
        cells,
        blocks,
        ab: ab.as_object().cloned().unwrap_or_default(),
    };
    // what the hook would refuse is refused here
    Schedule::parse(schedule.to_json().as_bytes()).map_err(|e| err!(Argument, "no schedule: {}", e.detail))?;
    let level = sequential::look(wanted.alpha / pairs_of_cells, wanted.looks, wanted.looks).level;
    Ok(Planned {
        unit_blocks: order.unit_blocks,
        lots,
        measured_tokens,
        detectable: verdict::detectable(error, level).exp() - 1.0,
        drift_left: 0.25 * drift_left,
        schedule,
    })
}

/// A schedule's file is bounded.
const MAX_BLOCKS: usize = 40_000;

fn check_cells(cells: &[Cell]) -> Result<()> {
    let n = cells.len();
    if !(2..=MAX_CELLS).contains(&n) {
        return Err(err!(Argument, "{n} cells: 2 to {MAX_CELLS} wanted (or the first one again)"));
    }
    for (i, cell) in cells.iter().enumerate() {
        if cells[..i].iter().any(|c| c.name == cell.name) {
            return Err(err!(Argument, "two cells are named \"{}\"", cell.name));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(names: &[&str], tokens: u64) -> Wanted {
        let cell = |name: &&str| Cell { name: (*name).to_owned(), ..Cell::default() };
        Wanted {
            cells: names.iter().map(cell).collect(),
            tokens,
            seed: 7,
            carry: Carry::Washout,
            block: None,
            washout: None,
            turnover: None,
            spread: Spread::default(),
            looks: 1,
            again: false,
            alpha: 0.05,
        }
    }

    #[test]
    fn what_cannot_work_is_refused_with_numbers() {
        let cases: [(Wanted, &str); 8] = [
            (wanted(&["A", "B\""], 10_000), "no schedule: line"),
            (wanted(&["A"], 10_000), "1 cells: 2 to 256 wanted"),
            (wanted(&["A", "A"], 10_000), "two cells are named \"A\""),
            (
                wanted(&["A", "B"], 639),
                "2 cells want at least 8 blocks of 80 tokens (washout 16), 640 tokens; 639 are given",
            ),
            (wanted(&["A", "B", "C", "D"], 1279), "at least 16 blocks of 80 tokens"),
            (Wanted { block: Some(16), ..wanted(&["A", "B"], 10_000) }, "blocks of 16 tokens with a washout of 16"),
            (Wanted { looks: 9, ..wanted(&["A", "B"], 640) }, "9 looks at 2 units of 4 blocks"),
            (Wanted { looks: 0, ..wanted(&["A", "B"], 640) }, "0 looks"),
        ];
        for (wanted, says) in cases {
            let error = plan(&wanted).unwrap_err();
            assert!(error.detail.contains(says), "{error}");
        }
    }

    /// The schedule is one that its own reader takes, and the same seed gives the same.
    #[test]
    fn a_schedule() {
        let wanted = Wanted { turnover: Some(11.2), again: true, looks: 3, ..wanted(&["A", "B"], 20_000) };
        let planned = plan(&wanted).unwrap();
        let s = &planned.schedule;
        assert_eq!(Schedule::parse(s.to_json().as_bytes()).unwrap().blocks, s.blocks);
        assert_eq!((s.washout, s.blocks[1].from, s.cells[1].name.as_str(), s.cells.len()), (12, 60, "A again", 3));
        assert_eq!(s.blocks.len() % planned.unit_blocks, 0);
        assert_eq!(planned.measured_tokens, s.blocks.len() as u64 / 3 * 48);
        assert_eq!(plan(&wanted).unwrap().schedule, *s);
        assert_ne!(plan(&Wanted { seed: 8, ..wanted }).unwrap().schedule, *s);
    }

    /// Four times the tokens see half the difference.
    #[test]
    fn the_detectable_difference() {
        let of = |tokens| plan(&wanted(&["A", "B"], tokens)).unwrap().detectable.ln_1p();
        assert!((of(10_240) / of(40_960) - 2.0).abs() < 1e-9);
        // 2.8016 x sqrt(2 x .73^2 x 4.5 / 4096)
        assert!((of(10_240) - 0.0959).abs() < 1e-3, "{}", of(10_240));
    }
}
