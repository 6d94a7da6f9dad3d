//! What must hold in any table of a sweep.
//!
//! - Belady's MIN misses no more than any policy without reranking, per trace, variant and capacity. What the warm-up leaves in a cache is not
//!   counted, so a policy can be ahead by up to a cacheful per layer: within that it is a warning.
//! - misses per token = k x layers x (1 - hit rate).
//! - The derived columns follow from the misses.
//! - Misses that rise with lambda are a warning: nothing forbids it.

use std::collections::BTreeMap;

use super::table::Table;
use crate::error::Result;

/// What was looked at, and what was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// A line for each rule: what, and how often.
    pub checked: Vec<String>,
    pub failed: Vec<String>,
    pub warnings: Vec<String>,
}

/// Checks a table. `Format` where a column is missing or holds no number.
pub fn check(table: &Table) -> Result<Report> {
    let mut report = Report::default();
    belady_is_least(table, &mut report)?;
    derived(table, &mut report)?;
    lambdas(table, &mut report)?;
    Ok(report)
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * (1.0 + a.abs().max(b.abs()))
}

/// The values of some columns, as one text.
fn group(table: &Table, row: &[String], columns: &[&str]) -> Result<String> {
    let values: Result<Vec<&str>> = columns.iter().map(|c| table.text(row, c)).collect();
    Ok(values?.join(" "))
}

fn belady_is_least(table: &Table, report: &mut Report) -> Result<()> {
    let same = ["trace", "variant", "cache_cap"];
    let mut least = BTreeMap::new();
    for row in &table.rows {
        if table.text(row, "policy")? == "belady_min" {
            least.insert(group(table, row, &same)?, table.number(row, "misses_per_token")?);
        }
    }
    let mut compared = 0;
    for row in &table.rows {
        let policy = table.text(row, "policy")?;
        let group = group(table, row, &same)?;
        let Some(&least) = least.get(&group) else { continue };
        if policy.starts_with("belady") || table.number(row, "lambda_moce")? > 0.0 {
            continue;
        }
        compared += 1;
        let misses = table.number(row, "misses_per_token")?;
        if least > misses && !close(least, misses) {
            let warmup = table.number(row, "warmup")?;
            let counted = (table.number(row, "n_tokens")? - warmup).max(1.0);
            let slack = table.number(row, "n_layers")? * table.number(row, "cache_cap")? / counted;
            let what = format!("belady_min {least:.4} is more than {policy} {misses:.4} ({group})");
            if warmup > 0.0 && least - misses <= slack {
                report.warnings.push(what);
            } else {
                report.failed.push(what);
            }
        }
    }
    report.checked.push(format!("belady_min misses no more than a policy without reranking: {compared} compared"));
    Ok(())
}

fn derived(table: &Table, report: &mut Report) -> Result<()> {
    let speeds: Vec<(&String, f64)> = table
        .columns
        .iter()
        .filter_map(|c| Some((c, c.strip_prefix("tok_s_")?.strip_suffix("GBs")?.parse().ok()?)))
        .collect();
    for row in &table.rows {
        let of = |column: &str| table.number(row, column);
        let misses = of("misses_per_token")?;
        let mut wants = vec![
            ("misses_per_token", of("k_used")? * of("n_layers")? * (1.0 - of("hit_rate")?)),
            ("ssd_mb_per_token", misses * (of("expert_bytes")? / 1e6)),
        ];
        let counted = (of("n_tokens")? - of("warmup")?).max(1.0);
        wants.push(("misses", misses * counted));
        for (column, bandwidth) in &speeds {
            let seconds = of("ssd_mb_per_token")? / (bandwidth * 1000.0) + of("compute_ms")? / 1000.0;
            wants.push((column.as_str(), 1.0 / seconds));
        }
        for (column, wanted) in wants {
            let found = of(column)?;
            if !close(found, wanted) {
                report.failed.push(format!("setting {}: {column} is {found}, {wanted} follows", of("setting")?));
            }
        }
    }
    let n = table.rows.len();
    report
        .checked
        .push(format!("misses per token = k x layers x (1 - hit rate), MB and tokens a second follow: {n} rows"));
    Ok(())
}

fn lambdas(table: &Table, report: &mut Report) -> Result<()> {
    let same = ["trace", "variant", "cache_cap", "policy", "protect_top_j", "delta"];
    let mut series: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for row in &table.rows {
        let point = (table.number(row, "lambda_moce")?, table.number(row, "misses_per_token")?);
        series.entry(group(table, row, &same)?).or_default().push(point);
    }
    let mut compared = 0;
    for (group, mut points) in series {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        for pair in points.windows(2) {
            compared += 1;
            if pair[1].1 > pair[0].1 && !close(pair[0].1, pair[1].1) {
                report.warnings.push(format!(
                    "misses rise from {:.4} to {:.4} between lambda {} and {} ({group})",
                    pair[0].1, pair[1].1, pair[0].0, pair[1].0
                ));
            }
        }
    }
    report.checked.push(format!("misses do not rise with lambda: {compared} steps"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::row::Format;
    use super::*;

    #[test]
    fn finds_what_cannot_be() {
        let table = |rows: &str| {
            let columns = "setting,trace,variant,cache_cap,policy,lambda_moce,protect_top_j,delta,warmup,n_tokens,n_layers,\
                           k_used,misses,misses_per_token,hit_rate,expert_bytes,compute_ms,ssd_mb_per_token,tok_s_2GBs";
            Table::parse(&format!("{columns}\n{rows}"), Format::Csv).unwrap()
        };
        let lru = "0,t,all,4,lru,0,3,d,0,10,1,2,10,1,0.5,2000000,10,2,90.9090909090909\n";
        let found = check(&table(lru)).unwrap();
        assert_eq!((found.checked.len(), found.failed, found.warnings), (3, vec![], vec![]));
        let rises = lru
            .replace("lru,0,3", "lru,0.1,3")
            .replace(",10,1,0.5,", ",12,1.2,0.4,")
            .replace(",2,90.9090909090909", ",2.4,89.2857142857142857");
        assert_eq!(check(&table(&format!("{lru}{rises}"))).unwrap().warnings.len(), 1);
        let worse = rises.replace("lru,0.1", "belady_min,0");
        assert_eq!(check(&table(&format!("{lru}{worse}"))).unwrap().failed.len(), 1);
        let other = check(&table(&lru.replace("0.5,2000000", "0.6,2000000"))).unwrap();
        assert!(other.failed[0].contains("misses_per_token"), "{other:?}");
        assert!(check(&table(&lru.replace("t,all,4,lru,0", "t,all,4,lru,NaN"))).is_err());
    }
}
