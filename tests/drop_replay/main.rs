//! Dropping, replayed: the reference's static table on the real traces, and what becomes of small made ones; `closed` has the closed
//! loop, `cli` the command.
#![cfg(feature = "tools")]

#[cfg(feature = "cli")]
mod cli;
mod closed;
#[cfg(feature = "cli")]
#[path = "../common/program.rs"]
mod program;
#[path = "../common/shared.rs"]
mod shared;

use std::fs::File;
use std::io::{BufReader, Cursor};
use std::path::Path;

use hotset::replay::{DropSettings, Routed, Rule, Static, Weights, drop_loop, drop_static};
use hotset::route::Moce;
use hotset::trace::Phase;
use hotset::{ErrorKind, Result};
use shared::shared;

fn real(folder: &Path, name: &str) -> Routed {
    let path = folder.join(format!("{name}.route.csv"));
    Routed::from_csv(&mut BufReader::new(File::open(path).unwrap())).unwrap()
}

fn decode(routed: &Routed, rule: Rule) -> Static {
    drop_static(routed, rule, Phase::Decode, Weights::Recorded).unwrap()
}

/// Every cell of the reference's table, as it is printed there: reads avoided in %, mass dropped in %.
#[test]
fn the_references_table() {
    let Some(folder) = shared("traces") else { return };
    let cold = [
        ("qwen", "0.1 5.8 36.8 66.1", "0.00 0.49 4.44 9.46"),
        ("gemma", "1.9 13.3 41.2 67.4", "0.06 0.87 4.09 8.18"),
        ("gptoss", "0.1 1.7 11.6 54.4", "0.01 0.36 4.00 25.19"),
    ];
    let top: [(&str, &[usize], &str, &str); 3] = [
        ("qwen", &[5, 4, 3, 2, 1], "23.2 42.8 58.8 73.5 87.2", "10.60 22.70 36.78 53.38 73.47"),
        ("gemma", &[5, 4, 3, 2, 1], "20.3 39.4 56.1 70.3 84.2", "9.80 20.84 33.56 48.86 68.85"),
        ("gptoss", &[1], "54.4", "42.32"),
    ];
    let joined = |cells: Vec<String>| cells.join(" ");
    for ((name, reads, mass), (_, keep, top_reads, top_mass)) in cold.into_iter().zip(top) {
        let routed = real(&folder, name);
        for (rules, reads, mass) in [
            ([0.25, 0.5, 0.75, 1.0].map(|threshold| Rule::Cold { threshold }).to_vec(), reads, mass),
            (keep.iter().map(|&j| Rule::KeepTop(j)).collect(), top_reads, top_mass),
        ] {
            let seen: Vec<Static> = rules.iter().map(|&rule| decode(&routed, rule)).collect();
            assert_eq!(joined(seen.iter().map(|s| format!("{:.1}", 100.0 * s.avoided())).collect()), reads, "{name}");
            assert_eq!(joined(seen.iter().map(|s| format!("{:.2}", 100.0 * s.lost())).collect()), mass, "{name}");
            for s in &seen {
                assert_eq!(s.surviving.iter().sum::<u64>(), s.rows);
                assert_eq!(s.surviving[0], 0, "the heaviest is pinned");
                let survivors: u64 = s.surviving.iter().zip(0..).map(|(rows, n)| rows * n).sum();
                assert_eq!((survivors + s.dropped, s.unknown), (s.picks, 0));
            }
        }
    }
}

/// A prefill reads an expert once a pass: what one of its tokens still uses is read.
#[test]
fn a_prefill_of_the_real_traces() {
    let Some(folder) = shared("traces") else { return };
    for name in ["qwen", "gemma", "gptoss"] {
        let routed = real(&folder, name);
        let of = |rule| drop_static(&routed, rule, Phase::Prefill, Weights::Recorded).unwrap();
        let (none, some, all) =
            (of(Rule::Cold { threshold: 0.0 }), of(Rule::Cold { threshold: 1.0 }), of(Rule::KeepTop(1)));
        assert_eq!((none.avoided_bytes, none.dropped), (0, 0), "{name}");
        assert!(none.miss_bytes > 0 && some.avoided_bytes > 0, "{name}");
        // By bytes, tokens share reads: less is avoided than the share of dropped misses.
        assert!(some.avoided() < some.dropped as f64 / some.misses as f64, "{name}");
        assert!(some.avoided_bytes <= all.avoided_bytes && all.avoided_bytes < all.miss_bytes, "{name}");
    }
}

const HEADING: &str = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n";

fn csv(rows: &str) -> Result<Routed> {
    Routed::from_csv(&mut Cursor::new(format!("# n_layer=1 n_expert=9 n_expert_used=3\n{HEADING}{rows}")))
}

#[test]
fn weights_that_are_not_known_are_counted() {
    let rows = "0,1,0,0,0,1,0.6,0,100\n0,1,0,0,1,2,0.3,0,100\n0,1,0,0,2,3,0.1,0,100\n\
                0,1,1,0,0,4,nan,0,100\n0,1,1,0,1,5,0.3,0,100\n0,1,1,0,2,6,0.1,0,100\n";
    let routed = csv(rows).unwrap();
    for (rule, avoided) in [(Rule::Cold { threshold: 1.0 }, 200), (Rule::KeepTop(2), 100)] {
        let s = decode(&routed, rule);
        assert_eq!((s.rows, s.unknown, s.miss_bytes, s.avoided_bytes), (2, 1, 600, avoided), "{rule:?}");
        assert_eq!(s.surviving[3], 1, "the unknown row runs whole");
        assert!((s.mass - 1.0).abs() < 1e-6, "and has no mass");
    }
    for weights in [Weights::Recorded, Weights::OfScores] {
        let settings = DropSettings { capacity: 3, k: 3, threshold: 9.0, weights, ..DropSettings::default() };
        let (all, _) = drop_loop(&routed, &settings, &[]).unwrap();
        assert_eq!((all.rows, all.unknown, all.dropped, all.misses), (2, 1, 0, 6), "{weights:?}");
    }
}

#[test]
fn a_prefetched_expert_is_no_miss() {
    let routed = csv("0,1,0,0,0,1,0.6,1,0\n0,1,0,0,1,2,0.3,2,100\n0,1,0,0,2,3,0.1,0,70\n").unwrap();
    let s = decode(&routed, Rule::Cold { threshold: 1.0 });
    assert_eq!((s.misses, s.prefetched, s.miss_bytes, s.avoided_bytes, s.dropped), (1, 1, 70, 70, 1));
    // A prefill of two tokens: expert 3 is light for both, expert 2 for one only.
    let rows = "0,0,0,0,0,1,0.8,0,10\n0,0,0,0,1,2,0.1,0,20\n0,0,0,0,2,3,0.1,0,40\n\
                0,0,1,0,0,2,0.8,0,0\n0,0,1,0,1,4,0.1,1,0\n0,0,1,0,2,3,0.1,0,0\n";
    let s = drop_static(&csv(rows).unwrap(), Rule::Cold { threshold: 1.0 }, Phase::Prefill, Weights::Recorded).unwrap();
    assert_eq!((s.miss_bytes, s.avoided_bytes, s.dropped), (70, 40, 3));
}

#[test]
fn what_cannot_be_is_refused() {
    let routed = csv("0,1,0,0,0,1,0.6,1,0\n0,1,0,0,1,2,0.3,2,100\n0,1,0,0,2,3,0.1,0,70\n").unwrap();
    for rule in [Rule::KeepTop(0), Rule::KeepTop(4), Rule::Cold { threshold: f64::NAN }, Rule::Cold { threshold: -1.0 }]
    {
        let error = drop_static(&routed, rule, Phase::Decode, Weights::Recorded).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Argument, "{rule:?}");
    }
    let none = drop_static(&routed, Rule::KeepTop(1), Phase::Prefill, Weights::Recorded).unwrap_err();
    assert!(none.kind == ErrorKind::Argument && none.detail.contains("prefill"), "{none}");
    let good = DropSettings { capacity: 3, k: 3, ..DropSettings::default() };
    drop_loop(&routed, &good, &[0.5]).unwrap();
    let bad = [
        DropSettings { capacity: 2, ..good.clone() },
        DropSettings { k: 4, capacity: 9, ..good.clone() },
        DropSettings { k: 0, ..good.clone() },
        DropSettings { warmup: 1, ..good.clone() },
        DropSettings { phase: Phase::Prefill, ..good.clone() },
        DropSettings { threshold: f64::INFINITY, ..good.clone() },
        DropSettings { moce: Moce { lambda: -0.1, ..Moce::default() }, ..good.clone() },
        DropSettings { policy: hotset::cache::Policy::BeladyMin, ..good },
    ];
    for settings in bad {
        assert_eq!(drop_loop(&routed, &settings, &[]).unwrap_err().kind, ErrorKind::Argument, "{settings:?}");
    }
    let error = csv("0,1,0,0,0,1,-0.6,1,0\n").unwrap_err();
    assert!(error.detail.contains("line 3, column 13: weight"), "{error}");
}
