//! The model room against files: sound ones, and every kind of unsound one that we know others met.

use std::path::{Path, PathBuf};

use hotset::model::quant::{TYPE_F16, TYPE_F32, TYPE_Q2_0};
use hotset::model::{ExpertTable, GgufHeader, Model, Part, Projection, Value};
use hotset::{Error, ErrorKind};
use proptest::prelude::*;
use tempfile::TempDir;

/// A GGUF put together by hand, apart from the library's writer, so that it may also be wrong.
#[derive(Clone)]
struct Raw {
    version: u32,
    alignment: u64,
    metadata: Vec<(String, Vec<u8>)>,
    /// Name, shape, type, and the bytes that the file gives it.
    tensors: Vec<(String, Vec<u64>, u32, u64)>,
}

fn string(s: &str) -> Vec<u8> {
    [&(s.len() as u64).to_le_bytes()[..], s.as_bytes()].concat()
}

impl Raw {
    fn new() -> Self {
        let mut raw = Self { version: 3, alignment: 32, metadata: vec![], tensors: vec![] };
        raw.put("general.architecture", 8, &string("any"));
        raw.put("any.expert_used_count", 4, &2_u32.to_le_bytes());
        raw
    }

    fn put(&mut self, key: &str, kind: u32, value: &[u8]) -> &mut Self {
        self.metadata.push((key.into(), [&kind.to_le_bytes()[..], value].concat()));
        self
    }

    fn u32(&mut self, key: &str, v: u32) -> &mut Self {
        self.put(key, 4, &v.to_le_bytes())
    }

    /// A tensor with the bytes of its type, for the few types used here.
    fn tensor(&mut self, name: &str, ne: &[u64], kind: u32) -> &mut Self {
        let n: u64 = ne.iter().product();
        let bytes = match kind {
            TYPE_F32 => n * 4,
            TYPE_F16 => n * 2,
            TYPE_Q2_0 => n / 64 * 18,
            _ => n,
        };
        self.stored(name, ne, kind, bytes)
    }

    fn stored(&mut self, name: &str, ne: &[u64], kind: u32, bytes: u64) -> &mut Self {
        self.tensors.push((name.into(), ne.to_vec(), kind, bytes));
        self
    }

    /// gate, up and down of one block: `width` inputs, `ffn` rows, `experts` experts of Q2_0.
    fn layer(&mut self, block: u32, width: u64, ffn: u64, experts: u64) -> &mut Self {
        self.tensor(&format!("blk.{block}.ffn_gate_exps.weight"), &[width, ffn, experts], TYPE_Q2_0);
        self.tensor(&format!("blk.{block}.ffn_up_exps.weight"), &[width, ffn, experts], TYPE_Q2_0);
        self.tensor(&format!("blk.{block}.ffn_down_exps.weight"), &[ffn, width, experts], TYPE_Q2_0)
    }

    fn bytes(&self) -> Vec<u8> {
        let mut b = b"GGUF".to_vec();
        b.extend(self.version.to_le_bytes());
        b.extend((self.tensors.len() as u64).to_le_bytes());
        b.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            b.extend(string(key));
            b.extend(value);
        }
        let mut offset = 0_u64;
        for (name, ne, kind, bytes) in &self.tensors {
            b.extend(string(name));
            b.extend((ne.len() as u32).to_le_bytes());
            ne.iter().for_each(|n| b.extend(n.to_le_bytes()));
            b.extend(kind.to_le_bytes());
            b.extend(offset.to_le_bytes());
            offset += bytes.next_multiple_of(self.alignment);
        }
        b.resize(b.len().next_multiple_of(self.alignment as usize) + offset as usize, 0);
        b
    }

    fn open(&self) -> Result<Model, Error> {
        open_bytes(&self.bytes())
    }
}

fn open_bytes(bytes: &[u8]) -> Result<Model, Error> {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, bytes).unwrap();
    Model::open(&path)
}

/// Asserts that it was refused for that kind of reason, with every one of `words` in the detail.
#[track_caller]
fn refused<T>(result: Result<T, Error>, kind: ErrorKind, words: &[&str]) {
    let e = result.err().expect("should be refused");
    assert_eq!(e.kind, kind, "{e}");
    for w in words {
        assert!(e.detail.contains(w), "{w:?} is wanted in: {e}");
    }
}

#[test]
fn the_trained_model() {
    let model = Model::open(Path::new("tests/data/model/tiny-moe-q2_0.gguf")).unwrap();
    assert_eq!((model.architecture(), model.n_experts_used()), (Some("qwen3moe"), Some(6)));
    assert_eq!((model.files.len(), model.files[0].len_bytes, model.tensors.len()), (1, 9_660_288, 75));
    let table = &model.experts;
    assert_eq!((table.layers.len(), table.n_experts()), (6, 64));
    for (i, l) in table.layers.iter().enumerate() {
        assert_eq!((l.block as usize, l.n_experts, l.expert_bytes()), (i, 64, 3 * 6912));
        let projections: Vec<Projection> = l.tensors.iter().map(|t| t.projection).collect();
        assert_eq!(projections, [Projection::Gate, Projection::Up, Projection::Down]);
        assert!(l.tensors.iter().all(|t| t.part == Part::Weight && t.slice_bytes == 6912 && t.ggml_type == TYPE_Q2_0));
    }
    let down = model.tensor("blk.5.ffn_down_exps.weight").unwrap();
    assert_eq!((down.offset_bytes, down.is_last, down.end_bytes()), (11_904 + 9_206_016, true, 9_660_288));
    // Dense and expert bytes make up all of the data: this file has no gaps but padding, and here no padding.
    let dense: u64 = model.dense_ranges().iter().map(|(_, r)| r.end - r.start).sum();
    assert_eq!(dense + table.total_bytes(), 9_660_288 - 11_904);
    assert_eq!(model.dense_ranges().len(), 6, "one run before each layer's experts");
    model.check_unchanged().unwrap();
}

#[test]
fn a_file_cut_by_one_byte_is_refused_at_open() {
    let mut raw = Raw::new();
    raw.layer(0, 128, 64, 4);
    let mut bytes = raw.bytes();
    let len = bytes.len();
    assert_eq!(raw.open().unwrap().experts.layers[0].expert_bytes(), 3 * 128 * 64 / 64 * 18);
    bytes.pop();
    let (end, cut) = (len.to_string(), (len - 1).to_string());
    refused(open_bytes(&bytes), ErrorKind::Format, &["blk.0.ffn_down_exps.weight", &end, &cut, "m.gguf"]);
}

#[test]
fn another_block_size_behind_the_same_type_is_refused_with_both_strides() {
    // 128 x 64 weights an expert: 2304 bytes in blocks of 64, 2176 in blocks of 128.
    let stored = 128 * 64 * 4 / 128 * 34;
    let mut raw = Raw::new();
    raw.stored("blk.0.ffn_gate_exps.weight", &[128, 64, 4], TYPE_Q2_0, stored);
    raw.stored("blk.0.ffn_up_exps.weight", &[128, 64, 4], TYPE_Q2_0, stored);
    raw.stored("blk.0.ffn_down_exps.weight", &[128, 64, 4], TYPE_Q2_0, stored);
    let words = ["2304", "2176", "ffn_gate_exps", "offsets in the file disagree with the type"];
    refused(raw.open(), ErrorKind::Format, &words);

    // The last tensor alone, where the file's end is the neighbour.
    let mut raw = Raw::new();
    raw.tensor("blk.0.ffn_gate_exps.weight", &[128, 64, 4], TYPE_Q2_0);
    raw.tensor("blk.0.ffn_up_exps.weight", &[128, 64, 4], TYPE_Q2_0);
    raw.stored("blk.0.ffn_down_exps.weight", &[128, 64, 4], TYPE_Q2_0, stored);
    refused(raw.open(), ErrorKind::Format, &["2304", "2176", "ffn_down_exps"]);

    // Strides larger than the type's.
    let mut raw = Raw::new();
    raw.layer(0, 128, 64, 4);
    raw.tensors[1].3 = 128 * 64 * 4 / 64 * 20;
    refused(raw.open(), ErrorKind::Format, &["2304", "2560", "ffn_up_exps"]);
}

#[test]
fn sizes_differ_by_layer_and_layers_without_experts_lie_between() {
    let mut raw = Raw::new();
    raw.tensor("token_embd.weight", &[64, 10], TYPE_F32).layer(2, 64, 128, 3).layer(7, 64, 64, 5);
    raw.tensor("blk.5.ffn_up.weight", &[64, 64], TYPE_F16).layer(60, 128, 64, 600);
    let model = raw.open().unwrap();
    let layers: Vec<_> = model.experts.layers.iter().map(|l| (l.block, l.n_experts, l.expert_bytes())).collect();
    assert_eq!(layers, [(2, 3, 3 * 128 * 18), (7, 5, 3 * 64 * 18), (60, 600, 3 * 128 * 18)]);
    assert_eq!(model.experts.n_experts(), 600);
    let total: u64 = layers.iter().map(|(_, n, b)| u64::from(*n) * b).sum();
    assert_eq!(model.experts.total_bytes(), total);
    let dense: Vec<u64> = model.dense_ranges().iter().map(|(_, r)| r.end - r.start).collect();
    assert_eq!(dense, [64 * 10 * 4, 64 * 64 * 2]);
}

#[test]
fn fused_gate_up_with_biases_and_scales() {
    let mut raw = Raw::new();
    raw.tensor("blk.0.ffn_down_exps.scale", &[3], TYPE_F32);
    raw.tensor("blk.0.ffn_up_exps.scale", &[3], TYPE_F32);
    raw.tensor("blk.0.ffn_gate_up_exps.bias", &[128, 3], TYPE_F32);
    raw.tensor("blk.0.ffn_down_exps.bias", &[64, 3], TYPE_F32);
    raw.tensor("blk.0.ffn_down_exps.weight", &[64, 64, 3], TYPE_Q2_0);
    raw.tensor("blk.0.ffn_gate_up_exps.weight", &[64, 128, 3], TYPE_Q2_0);
    raw.tensor("blk.0.ffn_up_exps.input_scale", &[3], TYPE_F32);
    let model = raw.open().unwrap();
    let found: Vec<_> = model.experts.layers[0].tensors.iter().map(|t| (t.part, t.projection, t.slice_bytes)).collect();
    let wanted = [
        (Part::Weight, Projection::GateUp, 128 * 18),
        (Part::Weight, Projection::Down, 64 * 18),
        (Part::Bias, Projection::GateUp, 512),
        (Part::Bias, Projection::Down, 256),
        (Part::Scale, Projection::Up, 4),
        (Part::Scale, Projection::Down, 4),
    ];
    assert_eq!(found, wanted);
    // Only the input scale is dense.
    assert_eq!(model.dense_ranges().len(), 1);
    assert_eq!(model.dense_ranges()[0].1.end - model.dense_ranges()[0].1.start, 12);
}

#[test]
fn incomplete_or_contradicting_layers_are_refused() {
    let edit = |f: &dyn Fn(&mut Raw)| {
        let mut raw = Raw::new();
        raw.layer(0, 64, 128, 4).layer(1, 64, 128, 4);
        f(&mut raw);
        raw.open()
    };
    assert!(edit(&|_| ()).is_ok());
    let model = ErrorKind::Model;
    refused(edit(&|r| drop(r.tensors.remove(4))), model, &["block 1", "[Gate, Down]"]);
    refused(edit(&|r| drop(r.tensors.remove(3))), model, &["block 1", "[Up, Down]"]);
    refused(edit(&|r| drop(r.tensors.remove(2))), model, &["block 0", "[Gate, Up]"]);
    let fused = |r: &mut Raw| {
        r.tensor("blk.1.ffn_gate_up_exps.weight", &[64, 256, 4], TYPE_Q2_0);
    };
    refused(edit(&fused), model, &["block 1", "GateUp"]);
    let other_count = |r: &mut Raw| {
        r.tensors[5] = ("blk.1.ffn_down_exps.weight".into(), vec![128, 64, 5], TYPE_Q2_0, 128 * 5 * 18);
    };
    refused(edit(&other_count), model, &["has 4 experts", "blk.1.ffn_down_exps.weight has 5"]);
    let unknown = |r: &mut Raw| r.tensors[4].2 = 99;
    refused(edit(&unknown), model, &["blk.1.ffn_up_exps.weight", "type 99", "m.gguf"]);
    let narrow = |r: &mut Raw| {
        r.tensors[3] = ("blk.1.ffn_gate_exps.weight".into(), vec![64, 64, 4], TYPE_Q2_0, 64 * 4 * 18);
    };
    refused(edit(&narrow), model, &["blk.1.ffn_gate_exps.weight has 64 rows", "128 inputs"]);
    let many = |r: &mut Raw| {
        r.tensor("blk.2.ffn_up_exps.scale", &[65536], TYPE_F32);
    };
    refused(edit(&many), model, &["65536 experts", "65535"]);
    let bias = |r: &mut Raw| {
        r.tensor("blk.1.ffn_up_exps.bias", &[64, 4], TYPE_F32);
    };
    refused(edit(&bias), model, &["blk.1.ffn_up_exps.bias has 64", "128 rows"]);
    // A model that has no gate anywhere is whole.
    let gateless = |r: &mut Raw| r.tensors.retain(|t| !t.0.contains("gate"));
    assert_eq!(edit(&gateless).unwrap().experts.layers[1].tensors.len(), 2);
}

#[test]
fn headers_that_contradict_themselves_are_refused() {
    let parse = |b: &[u8]| GgufHeader::parse(b, b.len() as u64, Path::new("x.gguf"));
    let format = ErrorKind::Format;
    let mut raw = Raw::new();
    raw.tensor("a", &[8], TYPE_F32).tensor("b", &[8, 2], TYPE_F32);
    let good = raw.bytes();
    assert_eq!(parse(&good).unwrap().tensors.len(), 2);
    raw.version = 2;
    assert_eq!(parse(&raw.bytes()).unwrap().version, 2);
    assert_eq!(parse(&raw.bytes()).unwrap().tensors, parse(&good).unwrap().tensors);
    raw.version = 3_u32.swap_bytes();
    refused(parse(&raw.bytes()), format, &["big-endian", "x.gguf"]);
    raw.version = 1;
    refused(parse(&raw.bytes()), format, &["version 1"]);
    raw.version = 3;
    refused(parse(b"GGML0000"), format, &["47, 47, 4d, 4c"]);
    refused(parse(b""), format, &["the header is cut"]);

    let with = |f: &dyn Fn(&mut Raw)| {
        let mut r = raw.clone();
        f(&mut r);
        parse(&r.bytes())
    };
    refused(
        with(&|r| {
            r.u32("k", 1).u32("k", 2);
        }),
        format,
        &["key k", "twice"],
    );
    refused(
        with(&|r| {
            r.tensor("a", &[4], TYPE_F32);
        }),
        format,
        &["tensor a", "twice"],
    );
    refused(
        with(&|r| {
            r.u32("general.alignment", 24);
        }),
        format,
        &["general.alignment", "24"],
    );
    refused(
        with(&|r| {
            r.u32("general.alignment", 64);
        }),
        format,
        &["tensor b", "multiple of 64"],
    );
    refused(
        with(&|r| {
            r.tensor("q", &[96], TYPE_Q2_0);
        }),
        format,
        &["tensor q", "96", "64"],
    );
    refused(
        with(&|r| {
            r.tensor("d", &[1; 5], TYPE_F32);
        }),
        format,
        &["tensor d", "5 dimensions"],
    );
    refused(
        with(&|r| {
            r.stored("o", &[1 << 40, 1 << 40], TYPE_F32, 4);
        }),
        format,
        &["tensor o"],
    );
    refused(
        with(&|r| {
            r.stored("o", &[1 << 61], TYPE_F32, 4);
        }),
        format,
        &["tensor o", "ends at", "cut"],
    );
    // An array that says it has 2^61 strings; one nested deeper than is sane.
    let huge = [&8_u32.to_le_bytes()[..], &(1_u64 << 61).to_le_bytes()].concat();
    refused(
        with(&|r| {
            r.put("huge", 9, &huge);
        }),
        format,
        &["key huge", "2305843009213693952"],
    );
    let nest = [&9_u32.to_le_bytes()[..], &1_u64.to_le_bytes()].concat().repeat(9);
    refused(
        with(&|r| {
            r.put("nest", 9, &nest);
        }),
        format,
        &["key nest", "nested"],
    );
    refused(
        with(&|r| {
            r.put("kind", 13, &[0; 8]);
        }),
        format,
        &["key kind", "type 13"],
    );
    // Counts that no file of this size can hold.
    for at in [8, 16] {
        let mut b = good.clone();
        b[at + 7] = 0x7F;
        refused(parse(&b), format, &["cannot be in"]);
    }
}

#[test]
fn metadata_values() {
    let mut raw = Raw::new();
    let array = |kind: u32, n: u64, items: &[u8]| [&kind.to_le_bytes()[..], &n.to_le_bytes(), items].concat();
    raw.put("i8", 1, &[0xFF]).put("f32", 6, &1.5_f32.to_le_bytes()).put("bool", 7, &[1]);
    raw.put("long", 8, &string(&"x".repeat(70_000))).put("ints", 9, &array(5, 2, &[1, 0, 0, 0, 254, 255, 255, 255]));
    raw.put("big", 9, &array(0, 5000, &[7; 5000])).put("words", 9, &array(8, 2, &[string("a"), string("b")].concat()));
    raw.put("nested", 9, &array(9, 1, &array(9, 1, &array(7, 1, &[1]))));
    let b = raw.bytes();
    let h = GgufHeader::parse(&b, b.len() as u64, Path::new("x")).unwrap();
    let array = |element_type, count, integers| Value::Array { element_type, count, integers };
    assert_eq!(h.metadata["i8"], Value::Signed(-1));
    assert_eq!(h.metadata["f32"], Value::Float(1.5));
    assert_eq!(h.metadata["bool"], Value::Bool(true));
    assert_eq!(h.metadata["long"], Value::LongString(70_000));
    assert_eq!(h.metadata["ints"], array(5, 2, Some(vec![1, -2])));
    assert_eq!(h.metadata["big"], array(0, 5000, None));
    assert_eq!(h.metadata["words"], array(8, 2, None));
    assert_eq!(h.metadata["nested"], array(9, 1, None));
    // k by layer: the largest counts.
    let mut raw = Raw::new();
    raw.metadata.pop();
    let ks = [&5_u32.to_le_bytes()[..], &2_u64.to_le_bytes(), &2_u32.to_le_bytes(), &8_u32.to_le_bytes()].concat();
    assert_eq!(raw.put("any.expert_used_count", 9, &ks).open().unwrap().n_experts_used(), Some(8));
}

#[test]
fn a_changed_file_is_noticed() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("m.gguf");
    let mut bytes = Raw::new().layer(0, 64, 64, 2).bytes();
    std::fs::write(&path, &bytes).unwrap();
    let model = Model::open(&path).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_modified(std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(5)).unwrap();
    refused(model.check_unchanged(), ErrorKind::Changed, &["m.gguf", "5000000000"]);
    bytes.push(0);
    std::fs::write(&path, &bytes).unwrap();
    let len = bytes.len();
    refused(model.check_unchanged(), ErrorKind::Changed, &[&len.to_string(), &(len - 1).to_string()]);
    std::fs::remove_file(&path).unwrap();
    refused(model.check_unchanged(), ErrorKind::Changed, &["m.gguf"]);
    refused(Model::open(&path), ErrorKind::Io, &["m.gguf"]);
    refused(Model::open(dir.path()), ErrorKind::Io, &["not a regular file"]);
}

/// Three shards: metadata, a layer, a layer. `edit` may change any of them.
fn shards(edit: impl FnOnce(&mut [Raw; 3])) -> (TempDir, Vec<PathBuf>) {
    let mut raws = [Raw::new(), Raw::new(), Raw::new()];
    for (i, r) in raws.iter_mut().enumerate() {
        r.put("split.no", 2, &(i as u16).to_le_bytes()).put("split.count", 2, &3_u16.to_le_bytes());
        r.put("split.tensors.count", 5, &7_u32.to_le_bytes());
    }
    raws[1].layer(0, 64, 64, 2).tensor("output.weight", &[64, 4], TYPE_F32);
    raws[2].layer(1, 64, 64, 2);
    edit(&mut raws);
    let dir = TempDir::new().unwrap();
    let path = |i| dir.path().join(format!("m-0000{i}-of-00003.gguf"));
    let paths = vec![path(1), path(2), path(3)];
    raws.iter().zip(&paths).for_each(|(r, p)| std::fs::write(p, r.bytes()).unwrap());
    (dir, paths)
}

#[test]
fn a_split_model_opens_by_any_shard() {
    let (_dir, paths) = shards(|_| ());
    for p in &paths {
        let model = Model::open(p).unwrap();
        assert_eq!((model.files.len(), model.experts.layers.len(), model.n_experts_used()), (3, 2, Some(2)));
        assert_eq!(model.files.iter().map(|f| &f.path).collect::<Vec<_>>(), paths.iter().collect::<Vec<_>>());
        assert_eq!(model.experts.layers.iter().map(|l| l.tensors[0].file).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(model.tensor("output.weight").unwrap().file, 1);
        assert_eq!(model.dense_ranges().len(), 1);
    }
}

#[test]
fn unsound_shards_are_refused() {
    let (_dir, paths) = shards(|_| ());
    std::fs::remove_file(&paths[1]).unwrap();
    refused(Model::open(&paths[0]), ErrorKind::Io, &["shard 2 of 3", "m-00002-of-00003.gguf"]);
    refused(Model::open(&paths[2]), ErrorKind::Io, &["shard 2 of 3"]);

    let (_dir, paths) = shards(|r| drop(r[2].tensors.splice(..1, [r[1].tensors[0].clone()])));
    let words = ["m-00003-of-00003.gguf", "blk.0.ffn_gate_exps.weight", "m-00002-of-00003.gguf too"];
    refused(Model::open(&paths[0]), ErrorKind::Format, &words);

    let (_dir, paths) = shards(|r| drop(r[1].tensors.pop()));
    refused(Model::open(&paths[0]), ErrorKind::Format, &["split.tensors.count is 7", "hold 6"]);

    let (_dir, paths) = shards(|r| r.swap(1, 2));
    refused(Model::open(&paths[0]), ErrorKind::Format, &["split.no 1 of 3 is wanted", "2 of 3"]);

    let (dir, paths) = shards(|_| ());
    let other = dir.path().join("other.gguf");
    std::fs::rename(&paths[0], &other).unwrap();
    refused(Model::open(&other), ErrorKind::Model, &["shard 1 of 3", "-00001-of-00003.gguf"]);
}

#[test]
fn every_prefix_of_a_file_is_refused_without_a_panic() {
    let mut raw = Raw::new();
    raw.put("words", 9, &[&8_u32.to_le_bytes()[..], &1_u64.to_le_bytes(), &string("word")].concat());
    raw.layer(0, 64, 64, 2);
    let bytes = raw.bytes();
    for n in 0..bytes.len() {
        let cut = &bytes[..n];
        assert!(GgufHeader::parse(cut, n as u64, Path::new("x")).is_err(), "{n} of {} bytes", bytes.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Whatever a few bytes of a sound header are changed to: an answer, and a table inside the file.
    #[test]
    fn mutated_headers_do_no_harm(
        edits in prop::collection::vec((0_usize..700, any::<u8>()), 1..6),
        len in prop::option::of(0_usize..4000),
    ) {
        let mut raw = Raw::new();
        raw.u32("general.alignment", 32).layer(0, 64, 64, 2).tensor("blk.0.ffn_up_exps.bias", &[64, 2], TYPE_F32);
        let mut bytes = raw.bytes();
        for (at, b) in edits {
            if let Some(byte) = bytes.get_mut(at) { *byte = b; }
        }
        bytes.truncate(len.unwrap_or(usize::MAX));
        let file_len = bytes.len() as u64;
        if let Ok(h) = GgufHeader::parse(&bytes, file_len, Path::new("x")) {
            prop_assert!(h.tensors.iter().all(|t| t.bytes.is_none() || t.end_bytes() <= file_len));
            if let Ok(table) = ExpertTable::find(&h.tensors, &[Path::new("x")]) {
                for l in &table.layers {
                    for t in &l.tensors {
                        prop_assert!(t.offset_bytes + t.slice_bytes * u64::from(l.n_experts) <= file_len);
                    }
                }
                prop_assert!(table.total_bytes() <= file_len);
            }
        }
    }

    #[test]
    fn any_bytes_do_no_harm(tail in prop::collection::vec(any::<u8>(), 0..200)) {
        let bytes = [&b"GGUF\x03\0\0\0"[..], &tail].concat();
        let _ = GgufHeader::parse(&bytes, bytes.len() as u64, Path::new("x"));
    }
}
