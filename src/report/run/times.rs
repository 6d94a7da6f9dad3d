//! Time per token, from a metrics log: each pass, a moving median, and how much of it was waiting.

use serde_json::{Value, json};

use crate::error::Result;
use crate::replay::{Observed, PassTime};
use crate::report::{Axis, Interval, IntervalPlot, Line, LinePlot, Section, Table, number};
use crate::trace::Phase;

/// Points of a line at most; passes of a moving median.
const MAX_POINTS: usize = 600;
const WINDOW: usize = 15;

/// One pass, with its times per token.
#[derive(Clone, Debug)]
struct Pass {
    seen: Observed,
    wall_ms: Option<f64>,
    wait_ms: Option<f64>,
}

/// The passes of a run.
#[derive(Clone, Debug, Default)]
pub struct Times {
    pub file: String,
    passes: Vec<Pass>,
}

impl Times {
    pub fn new(file: String) -> Self {
        Self { file, passes: Vec::new() }
    }

    pub fn take(&mut self, seen: Observed, time: PassTime) {
        let per_token = |ns: u64| ns as f64 / 1e6 / seen.tokens.max(1) as f64;
        // A first pass has no wall time; what it took is the next best.
        let wall_ms = time.wall_ns.or(time.pass_ns).map(per_token);
        let wait_ms = time.wait_ns.map(per_token);
        self.passes.push(Pass { seen, wall_ms, wait_ms });
    }

    fn of(&self, phase: Phase) -> impl Iterator<Item = &Pass> + Clone {
        self.passes.iter().filter(move |pass| pass.seen.phase == phase)
    }

    fn summary(&self, phase: Phase) -> Option<Summary> {
        let mut passes = self.of(phase);
        let mut sum = passes.next()?.seen.clone();
        passes.for_each(|pass| sum.add(&pass.seen));
        let sorted = |of: fn(&Pass) -> Option<f64>| {
            let mut known: Vec<f64> = self.of(phase).filter_map(of).collect();
            known.sort_by(f64::total_cmp);
            known
        };
        (sum.tokens > 0).then(|| Summary {
            passes: self.of(phase).count(),
            sum,
            wall_ms: sorted(|p| p.wall_ms),
            wait_ms: sorted(|p| p.wait_ms),
        })
    }

    pub(super) fn json(&self) -> Value {
        let phase = |phase: Phase| self.summary(phase).map(|s| s.json());
        json!({ "file": self.file, "decode": phase(Phase::Decode), "prefill": phase(Phase::Prefill) })
    }

    pub(super) fn section(&self, mut section: Section) -> Result<Section> {
        section.text(&format!(
            "From {}. Wall time is from the end of one pass to the end of the next; waiting is for reads.",
            self.file
        ));
        let mut table = Table::new([
            "",
            "passes",
            "tokens",
            "tokens/s",
            "median ms",
            "95 % within, ms",
            "waiting, median ms",
            "hits",
            "misses",
            "dropped",
            "MB a token",
        ]);
        let mut boxes = Vec::new();
        for phase in [Phase::Decode, Phase::Prefill] {
            let Some(s) = self.summary(phase) else { continue };
            table.row(s.row(phase));
            if phase == Phase::Decode {
                boxes.extend(s.intervals());
            }
        }
        section.table(&table);
        let decode: Vec<&Pass> = self.of(Phase::Decode).collect();
        let wall: Vec<Option<f64>> = decode.iter().map(|p| p.wall_ms).collect();
        let wait: Vec<Option<f64>> = decode.iter().map(|p| p.wait_ms).collect();
        if wall.iter().flatten().next().is_none() {
            section.note("No decode pass has a time.");
            return Ok(section);
        }
        // A few passes that took many times as long would press the others flat.
        let most = self.summary(Phase::Decode).and_then(|s| quantile(&s.wall_ms, 0.95));
        let limit = most.map_or(f64::INFINITY, |ms| 3.0 * ms);
        let beyond = wall.iter().flatten().filter(|ms| **ms > limit).count();
        let step = decode.len().div_ceil(MAX_POINTS).max(1);
        let mut plot =
            LinePlot::new("Time per token", Axis::new("decode pass").whole(), Axis::new("ms a token").from(0.0));
        let thin = |values: Vec<f64>| values.iter().enumerate().step_by(step).map(|(i, &v)| (i as f64, v)).collect();
        let as_is = wall.iter().map(|v| v.filter(|ms| *ms <= limit).unwrap_or(f64::NAN)).collect();
        plot.lines.push(Line { name: "wall, median".into(), points: thin(medians(&wall)), ..Line::default() });
        plot.lines.push(Line { name: "waiting, median".into(), points: thin(medians(&wait)), ..Line::default() });
        plot.lines.push(Line { name: "wall, each pass".into(), points: thin(as_is), dots: true, ..Line::default() });
        let mut note = format!("Medians are of {WINDOW} passes.");
        if step > 1 {
            note += &format!(" One pass of {step} is shown, of {}.", decode.len());
        }
        if beyond > 0 {
            note += &format!(" Not drawn: {beyond} that took more than {} ms.", number(limit));
        }
        section.plot(&plot, &note)?;
        let plot = IntervalPlot {
            title: "Time per token, all decode passes".into(),
            x: Axis::new("ms a token").from(0.0),
            rows: boxes,
            reference: None,
        };
        section.plot(&plot, "The box is the middle half with the median, the line from 5 % to 95 % of the passes.")?;
        Ok(section)
    }
}

/// A phase.
struct Summary {
    passes: usize,
    sum: Observed,
    /// Sorted, of the passes that have one.
    wall_ms: Vec<f64>,
    wait_ms: Vec<f64>,
}

impl Summary {
    fn json(&self) -> Value {
        let q = |of: &[f64]| [0.05, 0.25, 0.5, 0.75, 0.95].map(|share| quantile(of, share));
        let sum = &self.sum;
        json!({
            "passes": self.passes, "tokens": sum.tokens, "hits": sum.hits, "misses": sum.misses, "dropped": sum.dropped,
            "bytes": sum.bytes, "tokens_per_second": self.speed(), "wall_ms_quantiles": q(&self.wall_ms),
            "wait_ms_quantiles": q(&self.wait_ms), "quantiles": [0.05, 0.25, 0.5, 0.75, 0.95],
        })
    }

    /// By the median pass.
    fn speed(&self) -> Option<f64> {
        quantile(&self.wall_ms, 0.5).filter(|ms| *ms > 0.0).map(|ms| 1000.0 / ms)
    }

    fn row(&self, phase: Phase) -> Vec<String> {
        let known = |v: Option<f64>| v.map_or("-".into(), number);
        let sum = &self.sum;
        let all = (sum.hits + sum.misses + sum.dropped).max(1) as f64;
        vec![
            phase.as_str().into(),
            self.passes.to_string(),
            sum.tokens.to_string(),
            known(self.speed()),
            known(quantile(&self.wall_ms, 0.5)),
            known(quantile(&self.wall_ms, 0.95)),
            known(quantile(&self.wait_ms, 0.5)),
            format!("{:.1} %", 100.0 * sum.hits as f64 / all),
            sum.misses.to_string(),
            sum.dropped.to_string(),
            number(sum.bytes as f64 / 1e6 / sum.tokens as f64),
        ]
    }

    fn intervals(&self) -> Vec<Interval> {
        let one = |(series, (name, of)): (usize, (&str, &Vec<f64>))| {
            let q = |share| quantile(of, share);
            Some(Interval {
                name: name.into(),
                series,
                low: q(0.05)?,
                middle: q(0.5)?,
                high: q(0.95)?,
                quartiles: Some((q(0.25)?, q(0.75)?)),
                dots: Vec::new(),
            })
        };
        [("wall", &self.wall_ms), ("waiting", &self.wait_ms)].into_iter().enumerate().filter_map(one).collect()
    }
}

/// Of sorted values, the nearest rank.
fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

/// The median of each value's neighbourhood; NaN where nothing is known there.
fn medians(values: &[Option<f64>]) -> Vec<f64> {
    let near = |i: usize| &values[i.saturating_sub(WINDOW / 2)..values.len().min(i + WINDOW / 2 + 1)];
    let median = |i: usize| {
        let mut known: Vec<f64> = near(i).iter().flatten().copied().collect();
        known.sort_by(f64::total_cmp);
        quantile(&known, 0.5).unwrap_or(f64::NAN)
    };
    (0..values.len()).map(median).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_neighbours() {
        let mut values = vec![Some(1.0); 40];
        values[20] = Some(100.0);
        values[0] = None;
        assert!(medians(&values).iter().all(|m| *m == 1.0));
        assert!(medians(&[None]).iter().all(|m| m.is_nan()));
        assert_eq!([0.05, 0.5, 1.0].map(|share| quantile(&[1.0, 2.0, 3.0], share)), [Some(1.0), Some(2.0), Some(3.0)]);
        assert_eq!(quantile(&[], 0.5), None);
    }
}
