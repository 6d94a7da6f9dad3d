//! A log as the hook writes it, of a made run under a schedule, and a quality file.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use hotset::ab::simulate::{Truth, session};
use hotset::hook::Schedule;

/// Runs a plan's blocks: cell n is 0.9^n times as slow as the first, reads less, and drops more. The first pass has no time.
pub fn log(plan: &Schedule, seed: u64, path: &Path) {
    let order: Vec<usize> = plan.blocks.iter().map(|b| b.cell).collect();
    let truth = Truth { ratio: 0.9, sigma: 0.2, stalls: 0.002, ..Truth::default() };
    let made = session(&order, plan.blocks[0].tokens as usize, plan.washout as usize, &truth, seed);
    let rows = &made.runs[0].rows;
    let mut text = String::from(
        "pass,phase,position,tokens,wall_ns,pass_ns,wait_ns,reads,read_bytes,hits,misses,dropped,swapped,mass_dropped,mass_swapped,\
         pass_through_rows,slots,lambda,drop,cell,block,washout,major_faults,rss_bytes,disk_bytes,thermal_level,thermal_mc\n",
    );
    let _ = writeln!(text, "0,prefill,0,12,,5,5,9,9000000,0,40,0,0,0,0,0,24,0,0,,,,0,1000000,9000000,0,40000");
    for (i, row) in rows.iter().enumerate() {
        let (cell, block) = (row.cell.unwrap(), row.block.unwrap());
        let wall = if i == 0 { String::new() } else { format!("{:.0}", row.wall_ns) };
        let wait = row.wall_ns - row.compute_ns.unwrap().min(row.wall_ns);
        let name = &plan.cells[cell].name;
        let (bytes, misses, dropped) = (4_000_000 - 800_000 * cell, 40 - 8 * cell, 6 * cell);
        let (washout, level) = (u8::from(row.washout), u8::from(3 * i > 2 * rows.len()));
        let _ = writeln!(
            text,
            "{},decode,{},1,{wall},5,{wait:.0},9,{bytes},60,{misses},{dropped},0,{},0,0,24,0,0,{name},{block},{washout},0,1000000,{bytes},{level},41000",
            i + 1,
            12 + i,
            0.1 * cell as f64
        );
    }
    std::fs::write(path, text).unwrap();
}

/// Each cell costs more than the one before; the second one 0.4 %, with an interval to 0.7 %.
pub fn quality(plan: &Schedule, path: &Path) {
    let cell = |(i, c): (usize, &hotset::hook::schedule::Cell)| {
        let ratio = 1.0 + 0.004 * (i * i) as f64;
        serde_json::json!({
            "name": c.name, "drop": c.drop, "lambda": c.lambda, "perplexity": 10.0 * ratio, "ratio": ratio,
            "ratio_low": ratio - 0.003 * i as f64, "ratio_high": ratio + 0.003 * i as f64, "kl_mean": 0.002 * i as f64,
            "kl_p99": 0.05 * i as f64, "top1_agreement": 1.0 - 0.01 * i as f64, "mass_lost": 0.02 * i as f64, "swap_rate": 0.0,
            "drop_rate": 0.05 * i as f64,
        })
    };
    let cells: Vec<serde_json::Value> = plan.cells.iter().enumerate().map(cell).collect();
    let file = serde_json::json!({
        "quality": 1, "model": "made.gguf", "text": "made.txt", "tokens": 4000, "reference": { "perplexity": 10.0 }, "cells": cells,
    });
    std::fs::write(path, file.to_string()).unwrap();
}

/// What `hotset ab plan` writes with these flags, beside `dir`.
pub fn plan(dir: &Path, flags: &[&str]) -> (PathBuf, Schedule) {
    let path = dir.join("plan.json");
    crate::program::ok(crate::program::hotset().args(["ab", "plan", "-o"]).arg(&path).args(flags));
    let plan = Schedule::load(&path).unwrap();
    (path, plan)
}
