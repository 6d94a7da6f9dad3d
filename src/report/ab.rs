//! The page of an experiment: what was told apart, speed beside quality, the session block by block, and what else moved. Every number is the
//! analysis's own ([`crate::ab`]).

use super::{Axis, Interval, IntervalPlot, Line, LinePlot, Page, Point, PointPlot, Points, Section, Table, number};
use crate::ab::log::{HITS, MAJOR_FAULTS, MISSES, READ_BYTES};
use crate::ab::quality::{Quality, Recommendation};
use crate::ab::tells::Point as Stretch;
use crate::ab::verdict::{digits, p_value};
use crate::ab::{Analysis, Design, bootstrap};
use crate::error::Result;
use crate::replay::drop_front;

/// What was measured of quality, and what follows from both.
#[derive(Clone, Copy, Debug)]
pub struct Beside<'a> {
    pub quality: &'a Quality,
    pub recommendation: &'a Recommendation,
    /// Of the perplexity's rise, as a share.
    pub limit: f64,
}

/// The page. `beside`: with quality.
pub fn page(analysis: &Analysis, beside: Option<Beside>) -> Result<Page> {
    let mut page = Page::new("Which setting is faster");
    let tokens: u64 = analysis.cells.iter().map(|c| c.tokens).sum();
    let how = match analysis.design {
        Design::Blocks => format!("{} blocks of tokens in a balanced order", analysis.blocks.len()),
        Design::Runs => "one run a cell, confounded with the order of the runs".to_owned(),
    };
    let (cells, runs) = (analysis.cells.len(), analysis.runs.len());
    let run = if runs == 1 { "run" } else { "runs" };
    page.lead(format!("{cells} cells, {tokens} tokens measured in {runs} {run}: {how}. Made by hotset ab report."));
    page.section(result(analysis, beside));
    if let Some(beside) = beside {
        page.section(front(analysis, beside)?);
    }
    if !analysis.comparisons.is_empty() {
        page.section(pairs(analysis)?);
    }
    page.section(session(analysis)?);
    page.section(drift(analysis)?);
    Ok(page)
}

fn result(analysis: &Analysis, beside: Option<Beside>) -> Section {
    let mut section = Section::new("What was found");
    if let Some(beside) = beside {
        let what = if beside.recommendation.cell.is_some() { "Recommended: " } else { "" };
        section.text(&format!("{what}{}.", beside.recommendation.words));
    }
    analysis.comparisons.iter().for_each(|c| {
        section.text(&format!("{}.", c.words));
    });
    section.heading("Speed and quality").table(&table(analysis, beside));
    if let Some(Beside { quality, .. }) = beside {
        section.heading("Times, and what was dropped").table(&details(analysis, quality));
        section.note("Times in ms per token; +-: interval of the mean, by blocks of tokens. Faults: major, per token. Dropped, swapped, mass lost: shares.");
        section.note(&format!(
            "Quality: {}, {} tokens of {}, against the unmodified model's perplexity of {}; intervals are of pairs of tokens.",
            or(&quality.model, "the model"),
            quality.tokens,
            or(&quality.text, "a text"),
            number(quality.reference_perplexity)
        ));
    }
    analysis.tells.iter().for_each(|tell| {
        section.note(&format!("Note, {}: {}.", tell.name, tell.words));
    });
    section
}

fn or<'a>(text: &'a str, other: &'a str) -> &'a str {
    if text.is_empty() { other } else { text }
}

fn percent(share: f64) -> String {
    if share.is_finite() { format!("{} %", digits(100.0 * share)) } else { "-".into() }
}

/// A row a cell: speed, and what it costs where that was measured.
fn table(analysis: &Analysis, beside: Option<Beside>) -> Table {
    let mut heading = vec!["cell", "tok/s", "MB a token", "hits"];
    match beside {
        Some(_) => heading.extend(["perplexity", "change", "95 % interval", "KL mean", "same first token", ""]),
        None => heading.extend(["mean, ms", "+-", "p50", "p95", "p99"]),
    }
    let mut table = Table::new(heading);
    for (i, cell) in analysis.cells.iter().enumerate() {
        let (hits, misses) = (cell.counts[HITS], cell.counts[MISSES]);
        let mut row = vec![cell.name.clone(), number(cell.tokens_per_second())];
        row.extend([number(cell.counts[READ_BYTES] / 1e6), percent(hits / (hits + misses))]);
        match beside.map(|beside| (beside, beside.quality.of(&cell.name))) {
            None => row.extend([cell.mean_ms, cell.block_half_ms, cell.p50_ms, cell.p95_ms, cell.p99_ms].map(number)),
            Some((_, None)) => row.push("not measured".into()),
            Some((Beside { recommendation, limit, .. }, Some(q))) => {
                row.extend([number(q.perplexity), change(q.ratio)]);
                row.push(format!("{} to {}", change(q.ratio_low), change(q.ratio_high)));
                row.extend([number(q.kl_mean), percent(q.top1_agreement)]);
                let within = if q.ratio_high <= 1.0 + limit { "" } else { "beyond the limit" };
                row.push(if recommendation.cell == Some(i) { "recommended" } else { within }.into());
            }
        }
        table.row(row);
    }
    table
}

fn change(ratio: f64) -> String {
    format!("{:+.2} %", 100.0 * (ratio - 1.0))
}

/// What is behind the table with quality: times, what was dropped, and the quality's own details.
fn details(analysis: &Analysis, quality: &Quality) -> Table {
    let mut table = Table::new([
        "cell",
        "mean, ms",
        "+-",
        "p50",
        "p95",
        "p99",
        "faults",
        "dropped",
        "swapped",
        "KL p99",
        "mass lost",
    ]);
    for cell in &analysis.cells {
        let mut row = vec![cell.name.clone()];
        row.extend([cell.mean_ms, cell.block_half_ms, cell.p50_ms, cell.p95_ms, cell.p99_ms].map(number));
        row.push(number(cell.counts[MAJOR_FAULTS]));
        if let Some(q) = quality.of(&cell.name) {
            row.extend([percent(q.drop_rate), percent(q.swap_rate), number(q.kl_p99), percent(q.mass_lost)]);
        }
        table.row(row);
    }
    table
}

fn front(analysis: &Analysis, beside: Beside) -> Result<Section> {
    let mut section = Section::new("The front");
    let both: Vec<(&str, f64, f64)> = analysis
        .cells
        .iter()
        .filter_map(|c| Some((c.name.as_str(), beside.quality.of(&c.name)?.ratio - 1.0, c.tokens_per_second())))
        .collect();
    let costs: Vec<(f64, f64)> = both.iter().map(|&(_, change, speed)| (change, -speed)).collect();
    let on_front = drop_front::front(&costs);
    let point = |(name, change, speed): &(&str, f64, f64)| Point {
        x: *change,
        y: *speed,
        what: (*name).to_owned(),
        label: Some((*name).to_owned()),
        small: false,
    };
    let series = |name: &str, joined: bool, wanted: bool| {
        let mut points: Vec<Point> =
            both.iter().zip(&on_front).filter(|(_, on)| **on == wanted).map(|(c, _)| point(c)).collect();
        points.sort_by(|a, b| a.x.total_cmp(&b.x));
        Points { name: name.to_owned(), points, joined }
    };
    let plot = PointPlot {
        title: "Speed against perplexity".into(),
        x: Axis::new("change of perplexity").percent(),
        y: Axis::new("tokens per second").from(0.0),
        series: vec![series("the front", true, true), series("beaten in both by another", false, false)],
    };
    let limit = digits(100.0 * beside.limit);
    section.plot(&plot, &format!("Joined are the cells that no other one beats in both. The limit is +{limit} %, to be kept with the whole interval."))?;
    Ok(section)
}

fn pairs(analysis: &Analysis) -> Result<Section> {
    let mut section = Section::new("Pairs of cells");
    section.text(
        "By how much the first named cell is faster than the second, in tokens per second: right of 0 it is faster, left of 0 slower. \
         The verdict rests on the first interval of a pair; with several pairs it asks for more than an interval that leaves out 0.",
    );
    // of times: the ratio of speeds is its inverse
    let faster = |x: f64| (-x).exp() - 1.0;
    let row = |name: String, series: usize, i: &bootstrap::Interval| Interval {
        name,
        series,
        low: faster(i.high),
        middle: faster(i.estimate),
        high: faster(i.low),
        ..Interval::default()
    };
    let mut rows = Vec::new();
    let mut table = Table::new(["pair", "verdict", "p", "below", "p by lots", "tokens for this", "tokens for 5 %"]);
    for c in &analysis.comparisons {
        let name = format!("{} / {}", analysis.cells[c.b].name, analysis.cells[c.a].name);
        let mut of_tokens = name.clone();
        if let Some(paired) = &c.paired {
            rows.push(row(name.clone(), 0, &paired.interval));
            of_tokens = "by tokens".to_owned();
        }
        rows.push(row(of_tokens, 1, &c.tokens));
        let tokens = |n: Option<u64>| n.map_or("-".into(), |n| n.to_string());
        table.row([
            name,
            c.verdict.name().to_owned(),
            p_value(c.p),
            p_value(c.level),
            c.randomisation.map_or("-".into(), |r| p_value(r.p)),
            tokens(c.tokens_for_this),
            tokens(c.tokens_for_5_percent),
        ]);
    }
    let title = "Faster by".to_owned();
    let plot =
        IntervalPlot { title, x: Axis::new("faster, in tokens per second").percent(), rows, reference: Some(0.0) };
    let note = format!(
        "{:.0} % intervals: by a bootstrap over pairs of blocks, and by blocks of tokens, each cell by itself.",
        100.0 * analysis.level
    );
    section.plot(&plot, &note)?;
    section.heading("Verdicts").table(&table);
    section.note("p must be below the number beside it: Holm's, so that all pairs together have one chance of a false alarm; less at an early look. \
                  Tokens: measured ones of both cells, for a chance of 80 %.");
    Ok(section)
}

fn session(analysis: &Analysis) -> Result<Section> {
    let mut section = Section::new("The session");
    let of_cell = |(i, cell): (usize, &crate::ab::cells::Cell)| Points {
        name: cell.name.clone(),
        points: analysis.drift.points.iter().filter(|p| p.cell == i).map(|p| at(analysis, p)).collect(),
        joined: false,
    };
    let plot = PointPlot {
        title: "Time per token, by block".into(),
        x: Axis::new("place in the session").percent().from(0.0).to(1.0),
        y: Axis::new("mean time per token, ms").from(0.0),
        series: analysis.cells.iter().enumerate().map(of_cell).collect(),
    };
    let note = match analysis.design {
        Design::Blocks => "A point a block, its washout left out. Runs are laid over each other.",
        Design::Runs => "A point a stretch of tokens. Runs are laid over each other.",
    };
    section.plot(&plot, note)?;
    Ok(section)
}

fn at(analysis: &Analysis, p: &Stretch) -> Point {
    let what = format!("{}, run {}", analysis.cells[p.cell].name, p.run + 1);
    Point { x: p.share, y: p.ms, what, label: None, small: false }
}

/// Parts of the session over which the drift's line is a mean.
const PARTS: usize = 12;

fn drift(analysis: &Analysis) -> Result<Section> {
    let mut section = Section::new("Drift");
    let d = &analysis.drift;
    let line = |name: &str, of: &dyn Fn(&Stretch) -> Option<f64>| {
        let part = |i: usize| {
            let (from, to) = (i as f64 / PARTS as f64, (i + 1) as f64 / PARTS as f64);
            let within = d.points.iter().filter(|p| p.share >= from && (p.share < to || i + 1 == PARTS));
            let values: Vec<f64> = within.filter_map(of).collect();
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            (!values.is_empty()).then(|| ((from + to) / 2.0, mean.exp() - 1.0))
        };
        Line { name: name.to_owned(), points: (0..PARTS).filter_map(part).collect(), ..Line::default() }
    };
    let plot = LinePlot {
        lines: vec![line("time", &|p| Some(p.off)), line("compute", &|p| p.compute_off)],
        ..LinePlot::new(
            "Time against the cell's mean",
            Axis::new("place in the session").percent().from(0.0),
            Axis::new("above or below the cell's mean").percent(),
        )
    };
    section.plot(&plot, "Means over twelfths of the session, whatever the cell. A line that rises or falls is what a fixed order of cells would take for a difference.")?;
    let mut table = Table::new(["what", "first to last third", "rank correlation", "p"]);
    for (what, s, percent) in [("time", &d.wall, d.wall_percent), ("compute", &d.compute, d.compute_percent)] {
        if let Some(s) = s {
            table.row([what.to_owned(), format!("{percent:+.1} %"), format!("{:+.2}", s.rho), p_value(s.p)]);
        }
    }
    if !table.is_empty() {
        section.table(&table);
    }
    let mut thermal = Table::new(["thermal level", "tokens", "time against the cell's mean"]);
    for level in &d.thermal {
        thermal.row([
            level.level.to_string(),
            level.tokens.to_string(),
            format!("{:+.1} %", 100.0 * (level.ratio - 1.0)),
        ]);
    }
    if !thermal.is_empty() {
        section.heading("By thermal level").table(&thermal);
    }
    Ok(section)
}
