//! What is known before a token about the experts it will use: those of the tokens before it, and of those that have been popular.
//!
//! Every predictor names k experts of each layer, as many as the token uses, so their shares of right guesses can be compared. Only decode tokens
//! are guessed. A stretch is what decodes in one turn without a gap; the prompt is the prefill right before it.

use std::collections::VecDeque;

use crate::trace::{Phase, Routing};

/// How k experts are guessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Predictor {
    /// Any k: its expectation, k of n.
    Random,
    /// Those of the token before, in the same stretch.
    PreviousToken,
    /// Those that all decode tokens of the run use most (hindsight: it cannot be had live). Guessed wherever the token before can be.
    RunHottest,
    /// Those that the prompt uses most; of equals, the one that it used first. Stretches without a prompt are left out.
    PromptHottest,
}

impl Predictor {
    pub const ALL: &[Self] = &[Self::Random, Self::PreviousToken, Self::RunHottest, Self::PromptHottest];

    pub fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::PreviousToken => "previous token",
            Self::RunHottest => "run's hottest",
            Self::PromptHottest => "prompt's hottest",
        }
    }
}

/// Right guesses of all.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Predicted {
    pub right: f64,
    pub guesses: u64,
}

impl Predicted {
    /// 0..1; None where nothing could be guessed.
    pub fn share(&self) -> Option<f64> {
        (self.guesses > 0).then(|| self.right / self.guesses as f64)
    }

    /// Both together.
    pub fn plus(self, other: Self) -> Self {
        Self { right: self.right + other.right, guesses: self.guesses + other.guesses }
    }

    fn add(&mut self, guess: &[bool], row: &[u16]) {
        self.right += row.iter().filter(|&&id| guess[usize::from(id)]).count() as f64;
        self.guesses += row.len() as u64;
    }
}

/// Picks by expert, in the order in which they first came.
struct Picks {
    counts: Vec<(u64, usize)>,
    seen: usize,
}

impl Picks {
    fn new(n_experts: usize) -> Self {
        Self { counts: vec![(0, usize::MAX); n_experts], seen: 0 }
    }

    fn add(&mut self, row: &[u16]) {
        for &id in row {
            let (count, first) = &mut self.counts[usize::from(id)];
            *count += 1;
            *first = (*first).min(self.seen);
            self.seen += 1;
        }
    }

    /// The most popular `k`; of equals, the one that came first.
    fn hottest(&self, k: usize) -> Vec<bool> {
        let mut order: Vec<usize> = (0..self.counts.len()).filter(|&e| self.counts[e].0 > 0).collect();
        order.sort_by_key(|&e| (std::cmp::Reverse(self.counts[e].0), self.counts[e].1));
        let mut hottest = vec![false; self.counts.len()];
        order.iter().take(k).for_each(|&e| hottest[e] = true);
        hottest
    }
}

/// Decode without a gap, in work.
struct Stretch<'a> {
    turn: u32,
    /// What its prompt says.
    hottest: Option<Vec<bool>>,
    last: &'a [u16],
}

/// What each predictor gets right in a layer, in the order of [`Predictor::ALL`].
pub fn predict(routing: &Routing, layer: usize) -> [Predicted; 4] {
    let (n, k) = (routing.n_experts, routing.k);
    let mut run = Picks::new(n);
    let decode = |phase| phase == Phase::Decode;
    routing.rows(layer).filter(|(pass, _)| decode(pass.phase)).for_each(|(_, row)| run.add(row));
    let run = run.hottest(k);
    let [mut random, mut previous, mut hottest, mut prompted] = [Predicted::default(); 4];
    let (mut prompt, mut prompt_turn) = (Picks::new(n), None);
    let mut stretch: Option<Stretch> = None;
    for (pass, row) in routing.rows(layer) {
        if !decode(pass.phase) {
            if stretch.take().is_some() || prompt_turn != Some(pass.turn) {
                prompt = Picks::new(n);
            }
            prompt_turn = Some(pass.turn);
            prompt.add(row);
            continue;
        }
        let guess = match stretch.take().filter(|s| s.turn == pass.turn) {
            Some(Stretch { hottest: guess, last, .. }) => {
                previous.right += row.iter().filter(|id| last.contains(id)).count() as f64;
                previous.guesses += k as u64;
                hottest.add(&run, row);
                guess
            }
            None => (prompt_turn.take() == Some(pass.turn)).then(|| prompt.hottest(k)),
        };
        random.right += (k * k) as f64 / n as f64;
        random.guesses += k as u64;
        if let Some(guess) = &guess {
            prompted.add(guess, row);
        }
        stretch = Some(Stretch { turn: pass.turn, hottest: guess, last: row });
    }
    [random, previous, hottest, prompted]
}

/// What a decode token has in common with those before it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overlap {
    /// By lag, from 1: experts in common with the token that many before.
    pub at_lag: Vec<Predicted>,
    /// By lag, from 1: experts that any of so many tokens before had.
    pub within: Vec<Predicted>,
}

/// Of a layer, at lags from 1 to `lags`, within stretches.
pub fn overlap(routing: &Routing, layer: usize, lags: usize) -> Overlap {
    let none = || vec![Predicted::default(); lags];
    let mut overlap = Overlap { at_lag: none(), within: none() };
    let (mut before, mut turn) = (VecDeque::<&[u16]>::with_capacity(lags + 1), None);
    for (pass, row) in routing.rows(layer) {
        if pass.phase != Phase::Decode || turn != Some(pass.turn) {
            before.clear();
        }
        turn = (pass.phase == Phase::Decode).then_some(pass.turn);
        if turn.is_none() {
            continue;
        }
        let mut new = row.to_vec();
        for (i, earlier) in before.iter().enumerate() {
            let common = row.iter().filter(|id| earlier.contains(id)).count();
            new.retain(|id| !earlier.contains(id));
            let guesses = row.len() as u64;
            let one = |right| Predicted { right: right as f64, guesses };
            overlap.at_lag[i] = overlap.at_lag[i].plus(one(common));
            overlap.within[i] = overlap.within[i].plus(one(row.len() - new.len()));
        }
        before.push_front(row);
        before.truncate(lags);
    }
    overlap
}
