//! The trace room from outside: files as other tools see them, recordings that end well, badly and not at all.

#[path = "common/program.rs"]
mod program;
#[path = "common/shared.rs"]
mod shared;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use half::f16;
use hotset::trace::q4rt::{self, Header};
use hotset::trace::sidecar::{Model, ModelFile, read_ranges, sidecar_path};
use hotset::trace::{
    Phase, Placement, Recorder, RecorderConfig, Settings, Sidecar, SidecarInit, Sink, Snapshot, Spool, Trace, reason,
};
use hotset::{Error, ErrorKind, Result};
use proptest::prelude::*;

const LAYERS: usize = 3;
const EXPERTS: u16 = 4000;
const TOP_M: usize = 6;
const SECOND: Duration = Duration::from_secs(30);

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn config() -> RecorderConfig {
    RecorderConfig {
        n_layers: LAYERS as u16,
        n_experts: EXPERTS,
        top_m: TOP_M as u16,
        queue_tokens: 32,
        record_prefill: true,
        row_range: true,
        sidecar: SidecarInit {
            model: Model { files: vec![ModelFile { name: "m.gguf".into(), length: 77 }], architecture: "test".into() },
            k: 2,
            score_space: "logit".into(),
            settings: Settings {
                lambda: 0.12,
                top_j: 2,
                policy: "lru".into(),
                slots: vec![8; 3],
                ..Settings::default()
            },
            ..SidecarInit::default()
        },
    }
}

/// Candidates that say which position and layer they belong to.
fn candidates(position: usize, layer: usize) -> (Vec<u16>, Vec<f16>) {
    let first = position * 16 + layer;
    let ids = (0..TOP_M).map(|i| ((first + 700 * i) % EXPERTS as usize) as u16).collect();
    let scores = (0..TOP_M).map(|i| f16::from_f32(position as f32 * 0.25 - i as f32)).collect();
    (ids, scores)
}

fn snapshot(mark: u16) -> Vec<Vec<u16>> {
    vec![vec![mark, mark + 1]; LAYERS]
}

/// A pass in which each layer sees the last `rows[layer]` tokens.
fn pass(recorder: &mut Recorder, phase: Phase, position: usize, n: usize, rows: [usize; LAYERS], tail: bool) -> bool {
    recorder.begin_pass(phase, position as i64, n, || snapshot((position % 1000) as u16));
    for (layer, rows) in rows.into_iter().enumerate() {
        recorder.begin_layer(layer, rows, tail);
        for row in 0..rows {
            let token = position + n - rows + row;
            let (ids, scores) = candidates(token, layer);
            recorder.push_row(layer, row, &ids, &scores, token as f32 + layer as f32 / 8.0);
        }
    }
    let placement = if phase == Phase::Decode { Placement::Slots } else { Placement::PassThrough };
    recorder.end_pass(&[placement])
}

fn decode(recorder: &mut Recorder, position: usize) -> bool {
    pass(recorder, Phase::Decode, position, 1, [1; LAYERS], false)
}

/// Each token of the trace is the given position, in all layers.
fn assert_positions(trace: &Trace, positions: impl IntoIterator<Item = usize>) {
    let mut n = 0;
    for (token, position) in positions.into_iter().enumerate() {
        for layer in 0..LAYERS {
            let (mut ids, mut scores) = (vec![0; TOP_M], vec![f16::ZERO; TOP_M]);
            trace.record(token, layer).copy_ids(&mut ids);
            trace.record(token, layer).copy_scores(&mut scores);
            assert_eq!((ids, scores), candidates(position, layer), "token {token}, layer {layer}");
        }
        n += 1;
    }
    assert_eq!(trace.n_tokens(), n);
}

#[test]
fn reads_the_made_trace() {
    let trace = Trace::open(data("small.q4rt")).unwrap();
    assert_eq!((trace.n_tokens(), trace.n_layers(), trace.n_experts(), trace.top_m()), (480, 4, 96, 40));
    let health = trace.health();
    assert_eq!((health.header_tokens, health.found_tokens, health.stray_bytes, health.cut), (0, 480, 3, true));
    assert_eq!(trace.record(0, 0).id(0), 0x12);
    assert_eq!(trace.verify(0..480, 5), []);
    assert_eq!(Sidecar::read_beside(&data("small.q4rt")).unwrap(), None);
}

#[test]
fn a_recording_is_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.q4rt");
    fs::write(&path, b"an older file").unwrap();
    let mut recorder = Recorder::create(&path, config()).unwrap();
    assert!(pass(&mut recorder, Phase::Prefill, 0, 4, [4; LAYERS], false));
    assert!(pass(&mut recorder, Phase::Prefill, 4, 4, [4; LAYERS], false));
    (8..12).for_each(|position| assert!(decode(&mut recorder, position)));
    recorder.flush(SECOND, true).unwrap();
    let live = Sidecar::read_beside(&path).unwrap().unwrap();
    assert_eq!((live.described_tokens(), live.closed), (12, false));
    let settings = Settings { lambda: 0.5, drop: 0.75, ..config().sidecar.settings };
    recorder.set_settings(settings.clone()).unwrap();
    assert!(recorder.set_settings(Settings { drop: f64::NAN, ..Settings::default() }).is_err());
    assert!(decode(&mut recorder, 12));
    recorder.mark_gap(reason::RESET);
    let state = serde_json::json!({ "mean": [1.5, 2.0] });
    recorder.begin_pass(Phase::Decode, 13, 1, || Snapshot { layers: snapshot(99), state: state.clone() });
    for layer in 0..LAYERS {
        recorder.begin_layer(layer, 1, false);
        let (ids, scores) = candidates(13, layer);
        recorder.push_row(layer, 0, &ids, &scores, 13.0);
    }
    assert!(recorder.end_pass(&[Placement::Slots, Placement::PassThrough, Placement::Slots]));
    assert_eq!((recorder.tokens(), recorder.left_out()), (14, 0));
    recorder.close().unwrap();

    let trace = Trace::open(&path).unwrap();
    assert_positions(&trace, 0..14);
    let health = trace.health();
    assert_eq!((health.header_tokens, health.stray_bytes, health.cut), (14, 0, false));
    assert_eq!(trace.verify(0..14, 9), []);
    let ranges = read_ranges(&path, LAYERS).unwrap();
    assert_eq!((ranges.len(), ranges[5 * LAYERS + 2]), (14 * LAYERS, 5.25));

    let sidecar = Sidecar::read_beside(&path).unwrap().unwrap();
    sidecar.check_header(trace.header()).unwrap();
    let ranges: Vec<_> = sidecar
        .ranges
        .iter()
        .map(|r| (r.first, r.n_tokens, r.phase, r.position, r.tokens_per_pass, r.placement.len()))
        .collect();
    let expected = [
        (0, 8, Phase::Prefill, 0, 4, 1),
        (8, 4, Phase::Decode, 8, 1, 1),
        (12, 1, Phase::Decode, 12, 1, 1),
        (13, 1, Phase::Decode, 13, 1, 3),
    ];
    assert_eq!(ranges, expected);
    let resident: Vec<_> = sidecar.resident.iter().map(|r| (r.before_token, r.reason.as_str())).collect();
    assert_eq!(resident, [(0, reason::START), (12, reason::SETTINGS), (13, reason::RESET)]);
    assert_eq!(sidecar.resident[1].layers, snapshot(12));
    assert_eq!(sidecar.resident[2].state, state);
    assert_eq!((sidecar.settings.len(), sidecar.settings[1].token), (2, 12));
    assert_eq!(sidecar.settings[1].settings, settings);
    assert!(sidecar.closed && sidecar.error.is_none() && sidecar.left_out.is_empty());
    assert_eq!(Sidecar::from_json(&sidecar.to_json()).unwrap(), sidecar);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3, "a temporary file was left behind");
}

/// FAULTS: the last layer sees fewer tokens in a prefill.
#[test]
fn layers_that_see_fewer_tokens_shift_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.q4rt");
    let mut recorder = Recorder::create(&path, config()).unwrap();
    assert!(decode(&mut recorder, 0));
    assert!(pass(&mut recorder, Phase::Prefill, 1, 28, [28, 28, 1], true));
    assert!(decode(&mut recorder, 29));
    assert!(!pass(&mut recorder, Phase::Prefill, 30, 28, [28, 28, 1], false));
    assert!(decode(&mut recorder, 58));
    assert!(!pass(&mut recorder, Phase::Prefill, 59, 28, [28, 28, 0], true));
    assert!(!pass(&mut recorder, Phase::Prefill, 87, 0, [0; LAYERS], true));
    assert!(pass(&mut recorder, Phase::Prefill, 87, 5, [5, 3, 4], true));
    assert!(decode(&mut recorder, 92));
    recorder.close().unwrap();

    assert_positions(&Trace::open(&path).unwrap(), [0, 28, 29, 58, 89, 90, 91, 92]);
    let sidecar = Sidecar::read_beside(&path).unwrap().unwrap();
    assert_eq!(sidecar.left_out[reason::FEWER_TOKENS], 27 + 28 + 28 + 2);
    let spans: Vec<_> = sidecar.ranges.iter().map(|r| (r.position, r.n_tokens, r.left_out_before)).collect();
    assert_eq!(spans, [(0, 1, 0), (28, 1, 27), (29, 1, 0), (58, 1, 0), (89, 3, 2), (92, 1, 0)]);
    let resident: Vec<_> = sidecar.resident.iter().map(|r| r.before_token).collect();
    assert_eq!(resident, [0, 2, 3, 4, 7]);
}

#[test]
fn what_is_not_recorded_is_counted_and_is_a_gap() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.q4rt");
    let mut recorder = Recorder::create(&path, RecorderConfig { record_prefill: false, ..config() }).unwrap();
    assert!(!pass(&mut recorder, Phase::Prefill, 0, 7, [7; LAYERS], false));
    assert!(decode(&mut recorder, 7));
    recorder.skip_pass(1, reason::NO_CANDIDATES);
    assert!(!pass(&mut recorder, Phase::Decode, 9, 33, [33; LAYERS], false));
    // a pass that ends in the middle, one that is begun anew, one with a layer twice, one with too few candidates
    assert!(recorder.begin_pass(Phase::Decode, 10, 2, || snapshot(0)));
    recorder.abort_pass();
    assert!(recorder.begin_pass(Phase::Decode, 10, 2, || snapshot(0)) && recorder.in_pass());
    assert!(recorder.begin_pass(Phase::Decode, 10, 1, || snapshot(0)));
    assert!(recorder.begin_layer(0, 1, false));
    let (ids, scores) = candidates(10, 0);
    recorder.push_row(0, 0, &ids, &scores, 0.0);
    assert!(!recorder.begin_layer(0, 1, false));
    assert!(!recorder.end_pass(&[Placement::Slots]));
    assert!(recorder.begin_pass(Phase::Decode, 10, 1, || snapshot(0)));
    assert!(recorder.begin_layer(0, 1, false));
    recorder.push_row(0, 0, &ids[1..], &scores[1..], 0.0);
    assert!(!recorder.in_pass() && !recorder.end_pass(&[Placement::Slots]));
    // more tokens than the first layer, a row that never came, a reset in the middle, a snapshot of other layers
    assert!(!pass(&mut recorder, Phase::Decode, 10, 1, [1, 2, 1], true));
    assert!(recorder.begin_pass(Phase::Decode, 10, 1, || snapshot(0)));
    assert!(recorder.begin_layer(0, 1, false) && !recorder.begin_layer(1, 1, false));
    recorder.abort_pass();
    assert!(recorder.begin_pass(Phase::Decode, 10, 1, || snapshot(0)));
    recorder.mark_gap(reason::RESET);
    assert!(!recorder.begin_layer(0, 1, false) && !recorder.end_pass(&[Placement::Slots]));
    assert!(
        !recorder.begin_pass(Phase::Decode, 10, 1, Vec::<Vec<u16>>::new) && !recorder.end_pass(&[Placement::Slots])
    );
    assert!(!recorder.begin_pass(Phase::Decode, 10, 1, || snapshot(EXPERTS - 1)));
    assert!(decode(&mut recorder, 30));
    assert_eq!((recorder.tokens(), recorder.left_out()), (2, 7 + 1 + 33 + 2 + 2 + 7));
    recorder.close().unwrap();

    assert_positions(&Trace::open(&path).unwrap(), [7, 30]);
    let sidecar = Sidecar::read_beside(&path).unwrap().unwrap();
    let left_out: Vec<_> = sidecar.left_out.iter().map(|(why, n)| (why.as_str(), *n)).collect();
    let mut expected = [
        (reason::PREFILL, 7),
        (reason::NO_CANDIDATES, 1),
        (reason::BATCH_TOO_LARGE, 33),
        (reason::ABORTED, 4),
        (reason::LAYER_ORDER, 1),
        (reason::SNAPSHOT, 2),
        (reason::ROWS, 2),
        (reason::MORE_TOKENS, 1),
        (reason::RESET, 1),
    ];
    expected.sort_unstable();
    assert_eq!(left_out, expected);
    let resident: Vec<_> = sidecar.resident.iter().map(|r| (r.before_token, r.reason.as_str())).collect();
    assert_eq!(
        resident,
        [(0, reason::PREFILL), (1, reason::NO_CANDIDATES)].map(|(n, why)| {
            // recording had not begun when the prefill was left out
            (n, if n == 0 { reason::START } else { why })
        })
    );
}

/// A disk that stands still until it is let go.
struct Stuck(Box<dyn Sink>, Arc<AtomicBool>);

impl Sink for Stuck {
    fn write(&mut self, block: &[u8]) -> Result<()> {
        while self.1.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.0.write(block)
    }
    fn flush(&mut self, durable: bool) -> Result<()> {
        self.0.flush(durable)
    }
    fn idle(&mut self) -> Result<Option<Duration>> {
        self.0.idle()
    }
    fn close(&mut self) -> Result<()> {
        self.0.close()
    }
}

#[test]
fn a_slow_disk_costs_tokens_not_time() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.q4rt");
    let stuck = Arc::new(AtomicBool::new(true));
    let disk = stuck.clone();
    let small = RecorderConfig { queue_tokens: 8, ..config() };
    let mut recorder = Recorder::create_with(&path, small, |files| Box::new(Stuck(files, disk))).unwrap();
    let begun = Instant::now();
    let kept = (0..100).filter(|&position| decode(&mut recorder, position)).count();
    assert!(begun.elapsed() < Duration::from_secs(5), "the decoding side waited for the disk");
    assert_eq!(kept, 8);
    assert_eq!(recorder.flush(Duration::from_millis(20), false).unwrap_err().kind, ErrorKind::Timeout);
    stuck.store(false, Ordering::Release);
    recorder.flush(SECOND, false).unwrap();
    assert!(decode(&mut recorder, 100) && decode(&mut recorder, 101));
    recorder.close().unwrap();

    assert_positions(&Trace::open(&path).unwrap(), (0..8).chain(100..102));
    let sidecar = Sidecar::read_beside(&path).unwrap().unwrap();
    assert_eq!(sidecar.left_out[reason::QUEUE_FULL], 92);
    assert_eq!(sidecar.resident.len(), 2);
    assert_eq!((sidecar.resident[1].before_token, sidecar.resident[1].reason.as_str()), (8, reason::QUEUE_FULL));
    assert_eq!(sidecar.resident[1].layers, snapshot(100));
    assert_eq!(sidecar.described_tokens(), 10);
}

/// A disk that is full after some blocks.
struct Full(Box<dyn Sink>, usize);

impl Sink for Full {
    fn write(&mut self, block: &[u8]) -> Result<()> {
        self.1 = self.1.checked_sub(1).ok_or(Error::new(ErrorKind::Io, "no space left"))?;
        self.0.write(block)
    }
    fn flush(&mut self, durable: bool) -> Result<()> {
        self.0.flush(durable)
    }
    fn close(&mut self) -> Result<()> {
        self.0.close()
    }
}

#[test]
fn a_failing_disk_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.q4rt");
    let mut recorder = Recorder::create_with(&path, config(), |files| Box::new(Full(files, 5))).unwrap();
    assert!((0..9).all(|position| decode(&mut recorder, position)));
    assert!(recorder.flush(SECOND, false).unwrap_err().detail.contains("no space left"));
    assert!(!decode(&mut recorder, 9));
    assert_eq!(recorder.error().unwrap().kind, ErrorKind::Io);
    assert!(recorder.close().is_err());
    assert_positions(&Trace::open(&path).unwrap(), 0..5);
    let sidecar = Sidecar::read_beside(&path).unwrap().unwrap();
    assert_eq!((sidecar.left_out[reason::WRITE_FAILED], sidecar.described_tokens()), (5, 5));
    assert!(sidecar.error.is_some());
}

#[test]
fn a_forgotten_recorder_leaves_whole_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.q4rt");
    let mut recorder = Recorder::create(&path, config()).unwrap();
    assert_eq!(Trace::open(&path).unwrap().n_tokens(), 0);
    (0..10).for_each(|position| assert!(decode(&mut recorder, position)));
    std::mem::forget(recorder);
    // without any flush: the writer hands on what it has when its queue is empty
    let begun = Instant::now();
    while Trace::open(&path).unwrap().n_tokens() < 10 && begun.elapsed() < SECOND {
        std::thread::sleep(Duration::from_millis(5));
    }
    let trace = Trace::open(&path).unwrap();
    assert_positions(&trace, 0..10);
    assert_eq!(trace.health().header_tokens, 0);
}

/// Not a test of its own: the process that `a_killed_process_leaves_whole_tokens` kills.
#[test]
fn child_that_dies() {
    let Some(path) = std::env::var_os("HOTSET_TEST_DIES") else { return };
    let mut recorder = Recorder::create(path, config()).unwrap();
    let mut position = 0;
    loop {
        pass(&mut recorder, Phase::Decode, position, 3, [3; LAYERS], false);
        position += 3;
    }
}

#[test]
fn a_killed_process_leaves_whole_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.q4rt");
    let mut child = program::command(std::env::current_exe().unwrap())
        .args(["--exact", "child_that_dies"])
        .env("HOTSET_TEST_DIES", &path)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    while fs::metadata(&path).map_or(0, |meta| meta.len()) < 20_000 && begun.elapsed() < SECOND {
        std::thread::sleep(Duration::from_millis(2));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let trace = Trace::open(&path).unwrap();
    assert!(trace.n_tokens() > 0);
    assert_eq!(trace.health().header_tokens, 0);
    let sidecar = Sidecar::read_beside(&path).unwrap().unwrap();
    assert!(!sidecar.closed && sidecar.described_tokens() <= trace.n_tokens() as u64);
    for range in &sidecar.ranges {
        for i in 0..range.n_tokens as usize {
            for layer in 0..LAYERS {
                let (ids, _) = candidates(range.position as usize + i, layer);
                assert_eq!(trace.record(range.first as usize + i, layer).id(0), ids[0]);
            }
        }
    }
}

#[test]
fn what_cannot_be_recorded_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.q4rt");
    let refused = |config| match Recorder::create(&path, config) {
        Ok(_) => panic!("accepted"),
        Err(e) => e,
    };
    assert_eq!(refused(RecorderConfig { n_layers: 0, ..config() }).kind, ErrorKind::Argument);
    assert_eq!(refused(RecorderConfig { queue_tokens: 0, ..config() }).kind, ErrorKind::Argument);
    assert!(refused(RecorderConfig { top_m: 5000, ..config() }).detail.contains("5000"));
    let mut other = config();
    other.sidecar.n_experts = vec![100, 4, 100];
    assert!(refused(other).detail.contains("4 experts in layer 1"));
    let mut other = config();
    other.sidecar.n_experts = vec![100; 2];
    assert!(Recorder::create(&path, other).is_err());
    assert!(!path.exists());
    assert!(Recorder::create(dir.path(), config()).is_err(), "a directory is not replaced");
    assert!(Recorder::create(dir.path().join("no/such/place"), config()).is_err());
}

#[test]
fn a_spool_serves_other_logs() {
    #[derive(Clone, Default)]
    struct Memory(Arc<Mutex<Vec<u8>>>);
    impl Sink for Memory {
        fn write(&mut self, block: &[u8]) -> Result<()> {
            self.0.lock().unwrap().extend_from_slice(block);
            Ok(())
        }
        fn flush(&mut self, _: bool) -> Result<()> {
            Ok(())
        }
        fn close(&mut self) -> Result<()> {
            self.write(b"end")
        }
    }
    use std::io::Write;
    let memory = Memory::default();
    let spool = Spool::new("test", 4, 8, Box::new(memory.clone())).unwrap();
    let held: Vec<_> = std::iter::from_fn(|| spool.take()).collect();
    assert_eq!((held.len(), spool.n_free(), spool.n_blocks()), (4, 0, 4));
    drop(held);
    let mut expected = String::new();
    for i in 0..1000 {
        let mut block = loop {
            match spool.take() {
                Some(block) => break block,
                None => std::thread::yield_now(),
            }
        };
        assert_eq!(block.used(), 0);
        writeln!(block, "{i}").unwrap();
        assert!(i > 0 || block.write_all(b"too long!").is_err());
        if i == 0 {
            block.set_used(2);
        }
        expected += &format!("{i}\n");
        spool.send(block);
    }
    spool.flush(SECOND, true).unwrap();
    assert_eq!(String::from_utf8_lossy(&memory.0.lock().unwrap()), expected);
    spool.close().unwrap();
    assert!(memory.0.lock().unwrap().ends_with(b"end"));
    assert!(Spool::new("test", 0, 8, Box::new(memory.clone())).is_err());
    assert!(Spool::new("test", usize::MAX, 8, Box::new(memory)).is_err());
}

#[test]
fn a_panicking_sink_is_an_error() {
    struct Panics;
    impl Sink for Panics {
        fn write(&mut self, _: &[u8]) -> Result<()> {
            panic!("as the test wants");
        }
        fn flush(&mut self, _: bool) -> Result<()> {
            Ok(())
        }
        fn close(&mut self) -> Result<()> {
            Ok(())
        }
    }
    let spool = Spool::new("test", 2, 8, Box::new(Panics)).unwrap();
    spool.send(spool.take().unwrap());
    assert_eq!(spool.flush(SECOND, false).unwrap_err().kind, ErrorKind::Internal);
    assert_eq!(spool.close().unwrap_err().kind, ErrorKind::Internal);
}

/// The reference replayer reads what we write, and we read it alike.
#[test]
fn the_reference_reads_the_same() {
    let Some(reference) = shared::shared("reference") else { return };
    if Command::new("python3").arg("--version").output().is_err() {
        println!("skipped: the reference replayer: no python3");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.q4rt");
    let mut recorder = Recorder::create(&path, config()).unwrap();
    (0..20).for_each(|position| assert!(decode(&mut recorder, position)));
    recorder.close().unwrap();
    // the same, as a killed process leaves it
    let cut = dir.path().join("cut.q4rt");
    let mut bytes = fs::read(&path).unwrap();
    bytes[12..16].fill(0);
    bytes.truncate(bytes.len() - 7);
    fs::write(&cut, bytes).unwrap();
    let script = r#"
import struct, sys
sys.path.insert(0, sys.argv[1])
import replay_moe_cache as reference
trace = reference.parse_trace_file(sys.argv[2])
h = 0
for t in range(trace["n_tokens"]):
    for l in range(trace["n_layers"]):
        ids, scores = trace["layers_data"][l][t]
        for n in list(ids) + [struct.unpack("<H", struct.pack("<e", z))[0] for z in scores]:
            h = (h * 31 + n) % (1 << 64)
print(trace["n_tokens"], trace["n_layers"], trace["n_experts"], trace["top_m"], h)
"#;
    for file in [path, cut, data("small.q4rt")] {
        let out = Command::new("python3")
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .args(["-c", script])
            .args([&reference, &file])
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let trace = Trace::open(&file).unwrap();
        let mut h = 0u64;
        for token in 0..trace.n_tokens() {
            for layer in 0..trace.n_layers() {
                let record = trace.record(token, layer);
                let ids = (0..record.len()).map(|rank| record.id(rank));
                let scores = (0..record.len()).map(|rank| record.score(rank).to_bits());
                h = ids.chain(scores).fold(h, |h, n| h.wrapping_mul(31).wrapping_add(n.into()));
            }
        }
        let (tokens, layers) = (trace.n_tokens(), trace.n_layers());
        let ours = format!("{tokens} {layers} {} {} {h}", trace.n_experts(), trace.top_m());
        assert_eq!(String::from_utf8_lossy(&out.stdout).trim(), ours);
    }
}

proptest! {
    #[test]
    fn records_round_trip(pairs in prop::collection::vec((any::<u16>(), any::<u16>()), 1..200)) {
        let (ids, bits): (Vec<u16>, Vec<u16>) = pairs.into_iter().unzip();
        let scores: Vec<f16> = bits.iter().copied().map(f16::from_bits).collect();
        let header = Header { n_layers: 1, n_experts: u16::MAX, top_m: ids.len() as u16, n_tokens: 1 };
        let mut bytes = Vec::new();
        q4rt::write_header(&mut bytes, &header).unwrap();
        bytes.resize(16 + header.record_bytes(), 0);
        q4rt::encode_record(&ids, &scores, &mut bytes[16..]).unwrap();
        let trace = Trace::from_bytes(bytes).unwrap();
        prop_assert_eq!(*trace.header(), header);
        let record = trace.record(0, 0);
        let (mut got_ids, mut got) = (vec![0; ids.len()], vec![f16::ZERO; ids.len()]);
        prop_assert_eq!((record.copy_ids(&mut got_ids), record.copy_scores(&mut got)), (ids.len(), ids.len()));
        prop_assert_eq!(&got_ids, &ids);
        prop_assert_eq!(got.iter().map(|s| s.to_bits()).collect::<Vec<_>>(), bits);
        let by_rank: Vec<u16> = (0..record.len()).map(|rank| record.id(rank)).collect();
        prop_assert_eq!(by_rank, ids);
        trace.verify(0..1, 10);
    }

    #[test]
    fn any_bytes_are_read_or_refused(
        bytes in prop::collection::vec(any::<u8>(), 0..400),
        layers in 0u16..4, experts in 0u16..9, top_m in 0u16..6, tokens in any::<u32>(),
    ) {
        let header = Header { n_layers: layers, n_experts: experts, top_m, n_tokens: tokens % 50 };
        for bytes in [bytes.clone(), [header.encode().to_vec(), bytes].concat()] {
            let length = bytes.len() as u64;
            if let Ok(trace) = Trace::from_bytes(bytes) {
                let health = trace.health();
                prop_assert_eq!(16 + health.found_tokens * trace.header().token_bytes() + health.stray_bytes, length);
                prop_assert!(trace.n_tokens() as u64 <= health.found_tokens);
                prop_assert!(trace.verify(0..usize::MAX, 7).len() <= 7);
            }
        }
    }

    #[test]
    fn a_sidecar_with_a_fault_is_read_or_refused(at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<bool>()) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.q4rt");
        Recorder::create(&path, config()).unwrap().close().unwrap();
        let mut text = fs::read(sidecar_path(&path)).unwrap();
        let at = at.index(text.len());
        if cut { text.truncate(at) } else { text[at] = byte }
        if let Ok(sidecar) = Sidecar::from_slice(&text) {
            prop_assert_eq!(Sidecar::from_json(&sidecar.to_json()).unwrap(), sidecar);
        }
    }
}
