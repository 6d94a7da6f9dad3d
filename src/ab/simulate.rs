//! Sessions whose truth is known: for the tests of the statistics, and to see what a plan could tell apart.
//!
//! The time of a token = the cell's x heat x noise. Heat grows by a quarter and saturates with a time constant of a fifth of the session. Noise is
//! lognormal, with a fast and a slow memory, and now and then a stall with a power-law tail; its spread and memory are near those of a
//! published run on a phone (coefficient of variation .73, autocorrelation .25 / .19 / .11 / .10 at lags 1 / 2 / 5 / 10, variance ratio 4.5). After a change
//! of cells the effect sets in over some tokens, as a cache's does.

use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, Pareto, StandardNormal};
use rand_pcg::Pcg64Mcg;

use super::Design;
use super::blocks::Run;
use super::drift::saturating;
use super::log::{COUNTS, Row};
use super::session::Session;

#[derive(Clone, Copy, Debug)]
pub struct Truth {
    /// Time of cell 1 over that of cell 0; of cell n its n-th power.
    pub ratio: f64,
    /// By how much the session ends slower than it began.
    pub heat: f64,
    /// Tokens over which a change of cells sets in (time constant).
    pub carry_tokens: f64,
    /// Standard deviation of ln(time), stalls apart.
    pub sigma: f64,
    /// Chance of a stall.
    pub stalls: f64,
}

impl Default for Truth {
    fn default() -> Self {
        Self { ratio: 1.0, heat: 0.25, carry_tokens: 4.0, sigma: 0.6, stalls: 0.005 }
    }
}

/// Shares of the variance of ln(time), and the memory from token to token, of the slow and the fast part.
const SLOW: (f64, f64) = (0.27, 0.9);
const FAST: (f64, f64) = (0.12, 0.4);

/// A run of blocks of `tokens` tokens each, the first `washout` of them marked, under the cells of `order`.
pub fn session(order: &[usize], tokens: usize, washout: usize, truth: &Truth, seed: u64) -> Session {
    let mut rng = Pcg64Mcg::seed_from_u64(seed);
    let all = (order.len() * tokens) as f64;
    let stall = Pareto::new(2.0, 2.5).expect("a scale and a shape above 0");
    let normal = |rng: &mut Pcg64Mcg| -> f64 { StandardNormal.sample(rng) };
    let (mut slow, mut fast) = (normal(&mut rng), normal(&mut rng));
    let mut rows = Vec::with_capacity(order.len() * tokens);
    let mut effect = order.first().map_or(0.0, |&c| c as f64);
    let kept = (-1.0 / truth.carry_tokens).exp();
    for (block, &cell) in order.iter().enumerate() {
        for i in 0..tokens {
            effect = cell as f64 + (effect - cell as f64) * kept;
            slow = SLOW.1 * slow + (1.0 - SLOW.1 * SLOW.1).sqrt() * normal(&mut rng);
            fast = FAST.1 * fast + (1.0 - FAST.1 * FAST.1).sqrt() * normal(&mut rng);
            let own = (1.0 - SLOW.0 - FAST.0).sqrt() * normal(&mut rng);
            let noise = (truth.sigma * (SLOW.0.sqrt() * slow + FAST.0.sqrt() * fast + own)).exp();
            let stalled = if rng.random_bool(truth.stalls) { stall.sample(&mut rng) } else { 1.0 };
            let heat = 1.0 + truth.heat * saturating((block * tokens + i) as f64 / all);
            let ms = 100.0 * truth.ratio.powf(effect) * heat * noise * stalled;
            rows.push(Row {
                cell: Some(cell),
                block: Some(block as u64),
                washout: i < washout,
                tokens: 1,
                wall_ns: ms * 1e6,
                compute_ns: Some(60e6 * heat),
                counts: [f64::NAN; COUNTS.len()],
                slots: None,
                thermal_level: None,
            });
        }
    }
    let n_cells = order.iter().max().map_or(0, |c| c + 1);
    let cells = (0..n_cells).map(|c| format!("cell {c}")).collect();
    Session { design: Design::Blocks, cells, runs: vec![Run { name: "made".to_owned(), rows }] }
}
