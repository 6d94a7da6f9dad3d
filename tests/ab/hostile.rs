//! Whatever a log or a quality file holds: an error that names the line, or an analysis; never a panic.

use std::io::Cursor;

use hotset::ab::log::Log;
use hotset::ab::quality::Quality;
use hotset::ab::session::Session;
use hotset::ab::{Options, analyze_session};
use hotset::report::ab::page;
use proptest::prelude::*;

const ODD: &[&str] = &["", "0", "1", "1e15", "1e-300", "18446744073709551615", "1e300", "-1", "nan", "x", "null"];

fn field() -> impl Strategy<Value = String> {
    prop_oneof![200 => (1u32..1000).prop_map(|n| n.to_string()), 1 => prop::sample::select(ODD).prop_map(str::to_owned)]
}

fn line() -> impl Strategy<Value = String> {
    let cell = prop::sample::select(&["A", "A", "B", "C", ""][..]);
    let block = prop_oneof![50 => (0u64..12).prop_map(|n| n.to_string()), 1 => field()];
    let phase = prop::sample::select(&["decode", "decode", "decode", "prefill"][..]);
    (phase, prop::collection::vec(field(), 6), cell, block, 0..2).prop_map(|(phase, f, cell, block, washout)| {
        let [tokens, wall, wait, bytes, level, mc] = <[String; 6]>::try_from(f).unwrap();
        format!("{phase},{tokens},{wall},{wait},{bytes},{level},{mc},{cell},{block},{washout}")
    })
}

const HEADING: &str = "phase,tokens,wall_ns,wait_ns,read_bytes,thermal_level,thermal_mc,cell,block,washout";

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn any_log(lines in prop::collection::vec(line(), 1..120), run in 1usize..20) {
        // runs of the same cell, as logs have them
        let repeated: Vec<&str> = lines.iter().flat_map(|l| std::iter::repeat_n(l.as_str(), run)).collect();
        let text = format!("{HEADING}\n{}\n", repeated.join("\n"));
        if let Ok(log) = Log::parse(&mut Cursor::new(&text), "made".into()) {
            let options = Options { resamples: 100, ..Options::default() };
            if let Ok(analysis) = Session::of(vec![log], 0).and_then(|s| analyze_session(&s, &options)) {
                prop_assert!(analysis.to_json().is_object());
                prop_assert!(page(&analysis, None).unwrap().html().ends_with("</html>\n"));
                for c in &analysis.comparisons {
                    prop_assert!(c.p > 0.0 && c.p <= 1.0, "{}", c.p);
                }
            }
        }
    }

    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = Log::parse(&mut Cursor::new(&bytes), String::new());
        let _ = Quality::parse(&String::from_utf8_lossy(&bytes));
    }
}
