//! The model room against whole files: sound ones, and every kind of unsound one that we know others met.

mod raw;

use std::path::{Path, PathBuf};

use hotset::ErrorKind;
use hotset::model::quant::{TYPE_F16, TYPE_F32, TYPE_Q2_0};
use hotset::model::{Model, Part, Projection};
use raw::{Raw, open_bytes, refused};
use tempfile::TempDir;

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
    let dense = model.dense_bytes();
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
    refused(open_bytes(b""), ErrorKind::Format, &["the header is cut", "m.gguf"]);
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
