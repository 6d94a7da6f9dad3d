//! What dropping and reranking would buy: reads against mass, for every F and lambda, by slots.

use serde_json::{Value, json};

use crate::error::Result;
use crate::replay::DropRow;
use crate::replay::drop_front::{Limit, by_slots};
use crate::report::{Axis, Point, PointPlot, Points, Section, Table, number};

/// Losses at which the best row is told.
const LOSSES: [f64; 4] = [0.01, 0.02, 0.05, 0.1];

pub(super) fn json(rows: &[DropRow], layers: usize) -> Value {
    let row = |row: &DropRow| {
        let (s, all, tokens) = (&row.settings, &row.all, row.tokens(layers));
        json!({
            "slots": s.capacity, "k": s.k, "lambda": s.moce.lambda, "f": s.threshold, "misses": all.misses, "bytes": all.bytes,
            "misses_per_token": all.misses as f64 / tokens, "bytes_per_token": all.bytes as f64 / tokens,
            "mass_lost": all.mass_lost(), "reads_avoided": all.avoided(&row.without), "dropped": all.dropped,
            "swapped": all.swapped, "unknown_rows": all.unknown, "pass_through_rows": all.pass_through_rows, "front": row.front,
        })
    };
    rows.iter().map(row).collect()
}

fn name(row: &DropRow, lambdas: bool) -> String {
    let (f, lambda) = (row.settings.threshold, row.settings.moce.lambda);
    if lambdas { format!("F {f}, λ {lambda}") } else { format!("F {f}") }
}

pub(super) fn section(mut section: Section, rows: &[DropRow], layers: usize, known_bytes: bool) -> Result<Section> {
    let first = &rows[0].settings;
    let lambdas = rows.iter().any(|row| row.settings.moce.lambda != first.moce.lambda);
    section.text(
        "A threshold F drops a miss that weighs less than F times its token's mean weight; lambda raises resident experts in the router's order. \
         Each point is the run again, as a closed loop, with what was dropped not resident afterwards either.",
    );
    let mut plot = PointPlot {
        title: "Reads and mass lost".into(),
        x: Axis::new("routing weight lost").percent().from(0.0),
        y: Axis::new("read, MB a token").from(0.0),
        series: Vec::new(),
    };
    for of_slots in by_slots(rows) {
        let point = |row: &DropRow| Point {
            x: row.all.mass_lost(),
            y: row.all.bytes as f64 / 1e6 / row.tokens(layers),
            what: name(row, lambdas),
            label: row.front.then(|| name(row, lambdas)),
            small: !row.front,
        };
        let mut points: Vec<Point> = of_slots.iter().map(point).collect();
        points.sort_by(|a, b| a.x.total_cmp(&b.x).then(b.y.total_cmp(&a.y)));
        let name = format!("{} slots", of_slots[0].settings.capacity);
        plot.series.push(Points { name, points, joined: true });
    }
    let unknown = rows.iter().map(|row| row.all.unknown).max().unwrap_or(0);
    let passed = rows.iter().map(|row| row.all.pass_through_rows).max().unwrap_or(0);
    let mut note = format!(
        "{}, {} tokens{}. Joined are the points that no other one of as many slots beats in both.",
        first.policy.name(),
        first.phase.as_str(),
        super::uncounted(first.warmup)
    );
    if !known_bytes {
        note += " The run does not say what an expert weighs: the size is assumed.";
    }
    if unknown > 0 {
        note += &format!(" {unknown} rows have unknown weights: nothing of them is dropped.");
    }
    if passed > 0 {
        note += &format!(" Up to {passed} rows did not fit the slots and are not counted.");
    }
    section.plot(&plot, &note)?;
    let mut table =
        Table::new(["lost at most", "slots", "F", "lambda", "lost", "misses a token", "MB a token", "reads avoided"]);
    for share in LOSSES {
        for of_slots in by_slots(rows) {
            let Some(row) = Limit::Mass(share).best(of_slots, layers) else { continue };
            let tokens = row.tokens(layers);
            table.row([
                format!("{} %", number(100.0 * share)),
                row.settings.capacity.to_string(),
                row.settings.threshold.to_string(),
                row.settings.moce.lambda.to_string(),
                format!("{:.2} %", 100.0 * row.all.mass_lost()),
                number(row.all.misses as f64 / tokens),
                number(row.all.bytes as f64 / 1e6 / tokens),
                format!("{:.1} %", 100.0 * row.all.avoided(&row.without)),
            ]);
        }
    }
    section.heading("What reads least within a loss").table(&table);
    Ok(section)
}
