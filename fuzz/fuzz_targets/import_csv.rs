//! Any text as a route_trace v1 CSV: an error, or a sound trace with a sidecar that fits it, and its routing with as many passes in every layer.
#![no_main]

use std::io::Cursor;

use hotset::trace::import::{self, ImportOptions};
use hotset::trace::{Sidecar, Trace};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (bool, &str)| {
    let (prefill, rows) = input;
    // the heading is given: what lies behind it is of interest
    let heading = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes";
    let text = if rows.starts_with('#') { rows.replacen('~', heading, 1) } else { format!("{heading}\n{rows}") };
    let options = ImportOptions { prefill, ..ImportOptions::default() };
    if let Ok(routing) = import::route_csv_routing(&mut Cursor::new(text.as_bytes()), None) {
        assert!(routing.layers.iter().all(|rows| rows.ends.len() == routing.passes.len()));
        (0..routing.layers.len()).for_each(|layer| drop(hotset::analyze::Reuse::of(&routing, layer)));
    }
    let mut out = Cursor::new(Vec::new());
    let Ok(sidecar) = import::route_csv(&mut Cursor::new(text.as_bytes()), &mut out, options) else { return };
    let trace = Trace::from_bytes(out.into_inner()).expect("what was imported is a trace");
    sidecar.check_header(trace.header()).expect("of the same shape");
    assert_eq!(trace.verify(0..usize::MAX, 1), []);
    assert_eq!(sidecar.described_tokens(), trace.n_tokens() as u64);
    assert_eq!(Sidecar::from_json(&sidecar.to_json()).expect("what was made can be read"), sidecar);
});
