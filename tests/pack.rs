//! Packs: made, gone on with, compared, refused. Whatever is wrong with one gives an error with the numbers, never other bytes.

#[path = "common/program.rs"]
mod program;
mod raw;

use std::fs;
use std::path::{Path, PathBuf};

use hotset::model::pack::{PACK_ALIGN, PackHeader};
use hotset::model::quant::{TYPE_F32, TYPE_Q2_0};
use hotset::model::tiny::{self, TinyParams};
use hotset::model::{Model, Pack, pack_write};
use hotset::{Error, ErrorKind};
use proptest::prelude::*;
use raw::{Raw, refused};
use tempfile::TempDir;

fn dir() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn tiny_model(dir: &Path, params: &TinyParams) -> Model {
    Model::open(&tiny::write(params, &dir.join("m.gguf"), &mut |_| ()).unwrap()[0].0).unwrap()
}

fn small() -> TinyParams {
    TinyParams { layers: 2, experts: 5, k: 2, ..TinyParams::default() }
}

/// Fused gate_up, biases and scales; another size and number of experts in another layer; noise in all of it.
fn odd_model(dir: &Path) -> Model {
    let mut raw = Raw::new();
    raw.tensor("token_embd.weight", &[64, 10], TYPE_F32);
    raw.tensor("blk.0.ffn_down_exps.scale", &[3], TYPE_F32).tensor("blk.0.ffn_up_exps.scale", &[3], TYPE_F32);
    raw.tensor("blk.0.ffn_gate_up_exps.bias", &[128, 3], TYPE_F32).tensor(
        "blk.0.ffn_down_exps.bias",
        &[64, 3],
        TYPE_F32,
    );
    raw.tensor("blk.0.ffn_down_exps.weight", &[64, 64, 3], TYPE_Q2_0);
    raw.tensor("blk.0.ffn_gate_up_exps.weight", &[64, 128, 3], TYPE_Q2_0);
    raw.tensor("blk.4.ffn_down_exps.weight", &[512, 512, 7], TYPE_Q2_0);
    raw.tensor("blk.4.ffn_gate_up_exps.weight", &[512, 1024, 7], TYPE_Q2_0);
    let mut bytes = raw.bytes();
    let data = raw.tensors.iter().map(|t| t.3.next_multiple_of(32)).sum::<u64>() as usize;
    let n = bytes.len();
    bytes[n - data..]
        .iter_mut()
        .enumerate()
        .for_each(|(i, b)| *b = ((i as u32).wrapping_mul(2_654_435_761) >> 13) as u8);
    let path = dir.join("odd.gguf");
    fs::write(&path, bytes).unwrap();
    Model::open(&path).unwrap()
}

fn pack(model: &Model, out: &Path) -> Result<pack_write::Packing, Error> {
    pack_write::pack(model, out, &mut |_| ())
}

fn verify(model: &Model, path: &Path) -> Result<u64, Error> {
    pack_write::verify(model, path, &mut |_| ())
}

/// Each slice of each expert in the pack, against the map, by the header's places alone.
fn check_bytes(model: &Model, path: &Path) {
    let (bytes, pack) = (fs::read(path).unwrap(), Pack::open(path, model).unwrap());
    for (l, p) in model.experts.layers.iter().zip(&pack.layers) {
        assert!(p.offset_bytes % PACK_ALIGN == 0 && p.stride_bytes % PACK_ALIGN == 0);
        for e in 0..l.n_experts as usize {
            let stride = &bytes[p.offset_bytes as usize + e * p.stride_bytes as usize..][..p.stride_bytes as usize];
            let mut end = 0;
            for (t, s) in l.tensors.iter().zip(&p.slices) {
                let (from, n) = (s.offset_bytes as usize, s.slice_bytes as usize);
                assert!(stride[end..from].iter().all(|b| *b == 0));
                let there = &model.files[t.file].map[t.offset_bytes as usize + e * n..][..n];
                assert!(stride[from..from + n] == *there, "{} expert {e}", t.name);
                end = from + n;
            }
            assert!(stride[end..].iter().all(|b| *b == 0));
        }
    }
}

#[test]
fn a_pack_holds_the_experts_whatever_the_model() {
    let (one, three, odd) = (dir(), dir(), dir());
    let models = [
        tiny_model(one.path(), &small()),
        tiny_model(three.path(), &TinyParams { shards: 3, ..small() }),
        odd_model(odd.path()),
    ];
    for (model, dir) in models.iter().zip([&one, &three, &odd]) {
        let out = dir.path().join("m.hotset");
        let mut steps = Vec::new();
        let done = pack_write::pack(model, &out, &mut |n| steps.push(n)).unwrap();
        let experts: u64 = model.experts.layers.iter().map(|l| u64::from(l.n_experts)).sum();
        assert_eq!((done.experts, done.kept_experts, steps.len() as u64), (experts, 0, experts));
        assert_eq!((*steps.last().unwrap(), fs::metadata(&out).unwrap().len()), (done.file_bytes, done.file_bytes));
        assert!(steps.is_sorted() && !pack_write::partial_path(&out).exists());
        check_bytes(model, &out);
        assert_eq!(verify(model, &out).unwrap(), experts);
        // once more: nothing to do
        let written = fs::metadata(&out).unwrap().modified().unwrap();
        assert_eq!(pack(model, &out).unwrap().kept_experts, experts);
        assert_eq!(fs::metadata(&out).unwrap().modified().unwrap(), written);
    }
    let e = pack(&Model::open(&one.path().join("m.gguf")).unwrap(), Path::new("/nowhere/m.hotset")).unwrap_err();
    assert_eq!(e.kind, ErrorKind::Io);
}

/// The odd model and its pack, with the pack's bytes.
fn packed() -> (TempDir, Model, PathBuf, Vec<u8>) {
    let dir = dir();
    let model = odd_model(dir.path());
    let out = dir.path().join("m.hotset");
    pack(&model, &out).unwrap();
    let whole = fs::read(&out).unwrap();
    (dir, model, out, whole)
}

#[test]
fn a_run_that_was_cut_off_is_gone_on_with() {
    let (_dir, model, out, whole) = packed();
    let partial = pack_write::partial_path(&out);
    let header = PackHeader::of(&model).unwrap();
    // as it is before the end: the header does not say complete
    let mut unfinished = whole.clone();
    unfinished[..header.table_offset as usize].copy_from_slice(&header.encode());
    let data = header.header_bytes as usize;
    let strides: Vec<usize> = (header.layers.iter())
        .flat_map(|l| (0..u64::from(l.n_experts)).map(|e| (l.offset_bytes + e * l.stride_bytes) as usize))
        .collect();
    let resume = |bytes: &[u8]| {
        fs::remove_file(&out).ok();
        fs::write(&partial, bytes).unwrap();
        let done = pack(&model, &out)?;
        assert!(fs::read(&out).unwrap() == whole && !partial.exists());
        verify(&model, &out).unwrap();
        Ok::<_, Error>(done.kept_experts)
    };
    for cut in [0, 1, 63, 64, 300, header.table_offset as usize, data - 1] {
        assert_eq!(resume(&unfinished[..cut]).unwrap(), 0, "cut at {cut}");
    }
    for (i, &at) in strides.iter().enumerate() {
        assert_eq!(resume(&unfinished[..at]).unwrap(), i as u64);
        assert_eq!(resume(&unfinished[..at + 5000]).unwrap(), i as u64);
        // an expert whose bytes did not reach the disk, though its checksum did, and the other way round
        let mut holed = unfinished.clone();
        holed[at + 700] ^= 1;
        assert_eq!(resume(&holed).unwrap(), strides.len() as u64 - 1);
        let mut unmarked = unfinished.clone();
        unmarked[header.table_offset as usize + 8 * i..][..8].fill(0);
        assert_eq!(resume(&unmarked).unwrap(), strides.len() as u64 - 1);
    }
    assert_eq!(resume(&unfinished).unwrap(), strides.len() as u64);
    // cut between the last header and its name
    assert_eq!(resume(&whole).unwrap(), strides.len() as u64);
    // under its own name an unfinished pack is refused
    fs::write(&out, &unfinished).unwrap();
    refused(Pack::open(&out, &model), ErrorKind::Format, &["m.hotset", "was not finished"]);
    refused(pack(&model, &out), ErrorKind::Format, &["was not finished"]);
    // what is no beginning of this pack stays as it is
    fs::remove_file(&out).unwrap();
    let mut other = unfinished.clone();
    other[56] ^= 1;
    for bytes in [b"something else".to_vec(), vec![7; data + 10], other] {
        assert!(matches!(resume(&bytes).unwrap_err().kind, ErrorKind::Format | ErrorKind::Model));
        assert!(fs::read(&partial).unwrap() == bytes && !out.exists());
    }
}

#[test]
fn a_pack_of_another_model_is_refused_with_the_numbers() {
    let (a, b) = (dir(), dir());
    let model = tiny_model(a.path(), &small());
    let out = a.path().join("m.hotset");
    pack(&model, &out).unwrap();
    // another seed: the same names, shapes and lengths, other weights
    let others = [
        (TinyParams { seed: 2, ..small() }, "sample"),
        (TinyParams { context: 1024, ..small() }, "checksum"),
        (TinyParams { experts: 6, ..small() }, "bytes, these have"),
        (TinyParams { shards: 2, ..small() }, "bytes, these have"),
    ];
    for (params, says) in others {
        let other = tiny_model(b.path(), &params);
        refused(Pack::open(&out, &other), ErrorKind::Model, &["m.hotset", "another model", says]);
        refused(pack(&other, &out), ErrorKind::Model, &["another model"]);
        refused(verify(&other, &out), ErrorKind::Model, &["another model"]);
    }
    // neither a new time nor another name makes another model
    let moved = b.path().join("renamed.gguf");
    fs::copy(&model.files[0].path, &moved).unwrap();
    Pack::open(&out, &Model::open(&moved).unwrap()).unwrap();
}

#[test]
fn verify_finds_every_kind_of_wrong_byte() {
    let (_dir, model, out, whole) = packed();
    let header = PackHeader::of(&model).unwrap();
    let l = &header.layers[1];
    let at = (l.offset_bytes + 3 * l.stride_bytes) as usize;
    let s = &l.slices[1];
    let in_slice = at + s.offset_bytes as usize + 77;
    let mut bytes = whole.clone();
    bytes[in_slice] ^= 0x10;
    fs::write(&out, &bytes).unwrap();
    refused(verify(&model, &out), ErrorKind::Format, &["block 4 expert 3", "byte 77 of blk.4.ffn_down_exps.weight"]);
    // the padding behind the slices
    let last = l.slices.last().unwrap();
    let mut bytes = whole.clone();
    bytes[at + (last.offset_bytes + last.slice_bytes) as usize] = 1;
    assert!(last.offset_bytes + last.slice_bytes < l.stride_bytes);
    fs::write(&out, &bytes).unwrap();
    refused(verify(&model, &out), ErrorKind::Format, &["block 4 expert 3", "checksum"]);
}

/// CRC-32, bit by bit: apart from the library's.
fn crc32(pieces: &[&[u8]]) -> u32 {
    let bytes = pieces.iter().flat_map(|p| p.iter());
    !bytes.fold(!0_u32, |c, &b| {
        (0..8).fold(c ^ u32::from(b), |c, _| if c & 1 == 1 { (c >> 1) ^ 0xEDB8_8320 } else { c >> 1 })
    })
}

#[test]
fn every_prefix_and_every_flipped_bit_of_the_header_is_refused() {
    let (dir, model, _, whole) = packed();
    let header = PackHeader::of(&model).unwrap();
    let bad = dir.path().join("bad.hotset");
    let refuse = |bytes: &[u8], what: String| {
        fs::write(&bad, bytes).unwrap();
        let e = Pack::open(&bad, &model).expect_err(&what);
        assert!(e.kind == ErrorKind::Format && e.detail.contains("bad.hotset"), "{what}: {e}");
    };
    let table_end =
        header.table_offset as usize + 8 * header.layers.iter().map(|l| l.n_experts as usize).sum::<usize>();
    for n in (0..table_end).chain([header.header_bytes as usize - 1, header.header_bytes as usize, whole.len() - 1]) {
        refuse(&whole[..n], format!("prefix of {n}"));
    }
    refuse(&[&whole[..], b"x"].concat(), "a byte more".into());
    for at in 0..table_end {
        let mut bytes = whole[..header.header_bytes as usize].to_vec();
        bytes[at] ^= 1 << (at % 8);
        // the header alone: nothing of data is looked at before it is found sound
        assert!(
            PackHeader::parse(&bytes, whole.len() as u64).and_then(|h| h.table(&bytes)).is_err(),
            "byte {at} flipped"
        );
    }
    assert!(PackHeader::parse(&whole, whole.len() as u64).and_then(|h| h.table(&whole)).is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]
    /// Any change that has its checksums made right again: an error, or the places of this very model, in the file and apart.
    #[test]
    fn changed_headers_with_right_checksums(
        changes in prop::collection::vec((16usize..600, any::<u8>()), 1..6), len_off in prop_oneof![Just(0i64), -40_000i64..40_000],
    ) {
        use std::sync::OnceLock;
        static MADE: OnceLock<(TempDir, Model, PathBuf, Vec<u8>)> = OnceLock::new();
        let (_, model, _, whole) = MADE.get_or_init(packed);
        let good = PackHeader::parse(whole, whole.len() as u64).unwrap();
        let mut bytes = whole[..good.header_bytes as usize].to_vec();
        let n = good.table_offset as usize;
        changes.iter().for_each(|&(at, b)| bytes[at % n] = b);
        bytes[..12].copy_from_slice(&whole[..12]);
        // wherever the table is said to be now
        let table = u64::from_le_bytes(bytes[32..40].try_into().unwrap());
        let end = usize::try_from(table).unwrap_or(0).clamp(16, bytes.len());
        let crc = crc32(&[&bytes[..12], &bytes[16..end]]);
        bytes[12..16].copy_from_slice(&crc.to_le_bytes());
        let len = (whole.len() as i64 + len_off) as u64;
        let Ok(h) = PackHeader::parse(&bytes, len) else { return Ok(()) };
        let mut end = h.header_bytes;
        for l in &h.layers {
            prop_assert!(l.offset_bytes == end && l.offset_bytes % PACK_ALIGN == 0 && l.stride_bytes % PACK_ALIGN == 0);
            end = l.offset_bytes + l.stride_bytes * u64::from(l.n_experts);
            let mut in_stride = 0;
            for s in &l.slices {
                prop_assert!(s.offset_bytes >= in_stride && s.offset_bytes % 32 == 0);
                in_stride = s.offset_bytes + s.slice_bytes;
            }
            prop_assert!(in_stride <= l.stride_bytes);
        }
        prop_assert_eq!(end, h.file_bytes);
        prop_assert!(!h.complete || end == len);
        if h.check_source(model).is_ok() {
            let sizes = |l: &hotset::model::PackedLayer| l.slices.iter().map(|s| s.slice_bytes).collect::<Vec<_>>();
            for (a, b) in h.layers.iter().zip(&good.layers) {
                prop_assert_eq!((a.block, a.n_experts, sizes(a)), (b.block, b.n_experts, sizes(b)));
            }
        }
        let _ = h.table(&bytes);
    }

    #[test]
    fn any_bytes_as_a_header(mut bytes in prop::collection::vec(any::<u8>(), 0..300), magic in any::<bool>()) {
        if magic && bytes.len() > 12 {
            bytes[..12].copy_from_slice(b"HOTSETPK\x01\0\0\0");
        }
        prop_assert!(PackHeader::parse(&bytes, bytes.len() as u64).is_err());
    }
}

fn cli(dir: &Path) -> (PathBuf, PathBuf) {
    tiny_model(dir, &small());
    (dir.join("m.gguf"), dir.join("m.hotset"))
}

#[test]
fn the_command_packs_verifies_and_refuses() {
    let dir = dir();
    let (model, out) = cli(dir.path());
    let run = |args: &[&str]| {
        let mut command = program::hotset();
        command.arg("pack").arg(&model).arg("-o").arg(&out).args(args);
        command
    };
    let first = program::json(&mut run(&["--json"]));
    assert_eq!(
        (&first["experts"], &first["kept_experts"], &first["was_there"]),
        (&10.into(), &0.into(), &false.into())
    );
    assert_eq!(first["bytes"].as_u64(), Some(fs::metadata(&out).unwrap().len()));
    let again = program::json(&mut run(&["--json", "--verify"]));
    assert_eq!((&again["verified_experts"], &again["was_there"]), (&10.into(), &true.into()));
    assert!(program::ok(&mut run(&["--verify"])).contains("10 experts are the model's"));
    let mut bytes = fs::read(&out).unwrap();
    let n = bytes.len();
    bytes[n - PACK_ALIGN as usize] ^= 1;
    fs::write(&out, &bytes).unwrap();
    program::fails(&mut run(&["--verify"]), 1, "block 1 expert 4");
    tiny_model(dir.path(), &TinyParams { seed: 3, ..small() });
    program::fails(&mut run(&[]), 1, "another model");
}

#[test]
fn io_measures_and_says_where_bytes_came_from() {
    let dir = dir();
    let (model, out) = cli(dir.path());
    program::ok(program::hotset().arg("pack").arg(&model).arg("-o").arg(&out));
    for pack in [false, true] {
        let mut command = program::hotset();
        command.arg("io").arg(&model).args([
            "--seconds",
            "0.4",
            "--no-fio",
            "--depths",
            "2,1",
            "--mode",
            "both",
            "--json",
        ]);
        if pack {
            command.arg("--pack").arg(&out);
        }
        let found = program::json(&mut command);
        let (rates, misses) = (found["rates"].as_array().unwrap(), found["misses"].as_array().unwrap());
        // two depths, three sizes, two modes; one and two misses of three sizes
        assert_eq!((rates.len(), misses.len()), (12, 6));
        for m in rates.iter().chain(misses) {
            let (gb, bytes, seconds) = (m["gb_per_s"].as_f64(), m["bytes"].as_f64(), m["seconds"].as_f64());
            assert!(
                (gb.unwrap() - bytes.unwrap() / seconds.unwrap() / 1e9).abs() < 1e-9 && bytes.unwrap() > 0.0,
                "{m}"
            );
            // never silent about its origin: the drive's share is known and large enough, or the figure is called doubtful
            let share = m["from_drive"].as_f64();
            assert_eq!(m["doubtful"].as_bool(), Some(share.is_none_or(|s| s < 0.95)), "{m}");
        }
        let share = found["straight_bytes"].as_u64().unwrap() + found["bounced_bytes"].as_u64().unwrap();
        assert_eq!(share > 0, found["io"] == "direct");
        assert!(!pack || found["bounced_bytes"] == 0);
        assert!([1, 2].contains(&found["advice"]["lanes"].as_u64().unwrap()));
    }
    let says = program::ok(program::hotset().arg("io").arg(&model).args(["--seconds", "0.2", "--no-fio"]));
    assert!(says.contains("use  HOTSET_LANES=") && says.contains("from the drive"), "{says}");
    let mut io = program::hotset();
    program::fails(io.arg("io").arg(&model).args(["--depths", "65"]), 2, "[65]");
    program::fails(program::hotset().arg("io").arg(&model).args(["--chunks", "4K"]), 2, "4096 bytes");
    program::fails(program::hotset().arg("io").arg(&model).args(["--pack", "/nowhere"]), 1, "/nowhere");
}

/// The speeds are the stated formulas of the stated numbers, and memory is the hook's own plan.
#[test]
fn the_doctor_says_what_follows_from_what() {
    let dir = dir();
    let (model, out) = cli(dir.path());
    program::ok(program::hotset().arg("pack").arg(&model).arg("-o").arg(&out));
    let run = |args: &[&str]| {
        let mut command = program::hotset();
        command.arg("doctor").arg(&model).args(args);
        command
    };
    let told = ["--memory", "16M", "--read-gbps", "0.5", "--compute-ms", "2", "--slots", "3", "--json"];
    for pack in [false, true] {
        let mut command = run(&told);
        if pack {
            command.arg("--pack").arg(&out);
        }
        let found = program::json(&mut command);
        assert_eq!((&found["slots"], &found["k"], &found["n_layers"]), (&3.into(), &2.into(), &2.into()));
        assert_eq!((&found["memory_bytes"], &found["drive_measured"]), (&(16 << 20).into(), &false.into()));
        let rows = found["predicted"].as_array().unwrap();
        assert_eq!(rows.len(), 4);
        for r in rows {
            let of = |key: &str| r[key].as_f64().unwrap();
            let read = of("mb_per_token") / 500.0;
            assert!((of("tok_s_in_turns") - 1.0 / (read + 0.002)).abs() < 1e-6, "{r}");
            assert!((of("tok_s_overlapped") - 1.0 / read.max(0.002)).abs() < 1e-6, "{r}");
            let each = if pack { 16384.0 } else { 3.0 * 64.0 * 128.0 / 64.0 * 18.0 };
            assert!((of("mb_per_token") - of("misses_per_token") * each / 1e6).abs() < 1e-9, "{r}");
            assert_eq!(r["misses_are"], "made trace");
        }
        let misses: Vec<f64> = rows.iter().map(|r| r["misses_per_token"].as_f64().unwrap()).collect();
        assert!(misses[0] >= misses[1] && misses[0] > misses[2] && misses[0] <= 4.0, "{misses:?}");
        let env = found["environment"].as_array().unwrap();
        assert!(env.contains(&"HOTSET_SLOTS=3".into()));
        assert_eq!(env.iter().any(|l| l.as_str().unwrap().starts_with("HOTSET_PACK=")), pack);
    }
    let text = program::ok(&mut run(&told[..8]));
    assert!(
        text.contains("made trace") && text.contains("0.5 GB/s, as told") && text.contains("p.slots = 3;"),
        "{text}"
    );
    // measured, quickly
    let measured = program::json(&mut run(&["--memory", "16M", "--json"]));
    assert_eq!(measured["drive_measured"], true);
    assert!(measured["turns_gb_per_s"].as_f64().unwrap() > 0.0);
    program::fails(&mut run(&["--memory", "100K"]), 1, "dense weights");
    program::fails(&mut run(&["--memory", "16M", "--slots", "1"]), 1, "a token uses 2");
    program::fails(&mut run(&["--read-gbps", "0"]), 2, "--read-gbps 0");
    program::fails(&mut run(&["--compute-ms", "nan"]), 2, "--compute-ms");
    let trace = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/small.q4rt");
    program::fails(run(&["--memory", "16M", "--read-gbps", "1", "--trace"]).arg(trace), 2, "of another model");
}
