//! Any text as a schedule: an error that names a line of it, or one that is the same after writing and reading it again.
#![no_main]

use hotset::hook::Schedule;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    match Schedule::parse(text) {
        Err(e) => {
            let line = e.detail.strip_prefix("line ").and_then(|d| d.split(':').next()?.parse::<usize>().ok());
            let lines = 1 + text.iter().filter(|&&b| b == b'\n').count();
            assert!(line.is_some_and(|n| n <= lines), "{e}");
        }
        Ok(schedule) => {
            let written = schedule.to_json();
            let again = Schedule::parse(written.as_bytes()).expect("what was read can be written");
            assert_eq!(again.to_json(), written);
            assert_eq!(again.blocks, schedule.blocks);
        }
    }
});
