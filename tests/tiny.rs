//! Models of random weights: what is written is what is read, the same seed gives the same bytes, shards agree.
#![cfg(feature = "tools")]

use std::path::Path;

use hotset::ErrorKind;
use hotset::model::quant::{TYPE_F16, TYPE_F32, TYPE_Q2_0, q2_0_dequantize};
use hotset::model::tiny::{self, TinyParams};
use hotset::model::write::{GgufWriter, MetaValue, TensorSpec};
use hotset::model::{GgufHeader, Model, Value};
use tempfile::TempDir;

fn small() -> TinyParams {
    TinyParams { layers: 2, experts: 4, k: 2, width: 64, heads: 2, kv_heads: 1, ..TinyParams::default() }
}

fn make(p: &TinyParams, out: &Path) -> Vec<std::path::PathBuf> {
    tiny::write(p, out, &mut |_| ()).unwrap().into_iter().map(|(p, _)| p).collect()
}

/// A tensor's bytes, wherever it lies.
fn data<'a>(model: &'a Model, name: &str) -> &'a [u8] {
    let t = model.tensor(name).unwrap();
    &model.files[t.file].map[t.offset_bytes as usize..t.end_bytes() as usize]
}

#[test]
fn writer_and_parser_agree() {
    let mut w = GgufWriter::new();
    w.put("a.string", "text").put("a.u32", 7_u32).put("a.u16", MetaValue::U16(9)).put("a.i32", MetaValue::I32(-3));
    w.put("a.f32", MetaValue::F32(0.5)).put("a.bool", MetaValue::Bool(true));
    w.put("a.strings", MetaValue::Strings(vec!["x".into(), "".into()])).put("a.f32s", MetaValue::F32s(vec![1.0]));
    w.put("a.i32s", MetaValue::I32s(vec![-1, 2])).put("a.u32s", MetaValue::U32s(vec![3]));
    w.tensor(TensorSpec::new("odd", &[3], TYPE_F16).unwrap());
    w.tensor(TensorSpec::new("large", &[64, 90_000], TYPE_Q2_0).unwrap());
    w.tensor(TensorSpec::new("four", &[1, 2, 3, 4], TYPE_F32).unwrap());
    let mut out = Vec::new();
    let mut chunks = vec![];
    let len = w.write_to(&mut out, |i, at, chunk| {
        chunks.push((i, at, chunk.len()));
        chunk.fill(i as u8 + 1);
        Ok(())
    });
    assert_eq!(len.unwrap(), out.len() as u64);
    assert_eq!(chunks.len(), 4, "the large tensor comes in two: {chunks:?}");
    assert_eq!(chunks[2].1 % 18, 0);
    let h = GgufHeader::parse(&out, out.len() as u64, Path::new("x")).unwrap();
    let array = |element_type, count, integers| Value::Array { element_type, count, integers };
    let wanted = [
        ("a.bool", Value::Bool(true)),
        ("a.f32", Value::Float(0.5)),
        ("a.f32s", array(6, 1, None)),
        ("a.i32", Value::Signed(-3)),
        ("a.i32s", array(5, 2, Some(vec![-1, 2]))),
        ("a.string", Value::String("text".into())),
        ("a.strings", array(8, 2, None)),
        ("a.u16", Value::Unsigned(9)),
        ("a.u32", Value::Unsigned(7)),
        ("a.u32s", array(4, 1, Some(vec![3]))),
    ];
    assert!(h.metadata.iter().map(|(k, v)| (k.as_str(), v.clone())).eq(wanted));
    let tensors: Vec<_> = h.tensors.iter().map(|t| (t.name.as_str(), t.ne, t.bytes)).collect();
    assert_eq!(tensors[0], ("odd", [3, 1, 1, 1], Some(6)));
    assert_eq!(tensors[1], ("large", [64, 90_000, 1, 1], Some(1_620_000)));
    assert_eq!(tensors[2], ("four", [1, 2, 3, 4], Some(96)));
    for (i, t) in h.tensors.iter().enumerate() {
        let bytes = &out[t.offset_bytes as usize..t.end_bytes() as usize];
        assert!(bytes.iter().all(|b| *b == i as u8 + 1), "{}", t.name);
    }
    w.put("odd", 1_u32);
    assert_eq!(w.write_to(&mut Vec::new(), |_, _, _| Ok(())).unwrap_err().kind, ErrorKind::Argument);
    assert!(TensorSpec::new("x".repeat(64), &[1], TYPE_F32).is_err());
    assert!(TensorSpec::new("x", &[65], TYPE_Q2_0).is_err());
    assert!(TensorSpec::new("x", &[u64::MAX, 2], TYPE_F32).is_err());
}

#[test]
fn a_model_has_the_shape_that_was_asked_for() {
    let dir = TempDir::new().unwrap();
    for (kind, row) in [(TYPE_Q2_0, 18), (TYPE_F16, 128), (TYPE_F32, 256)] {
        let p = TinyParams { expert_type: kind, ..small() };
        let mut last = 0;
        let made = tiny::write(&p, &dir.path().join("m.gguf"), &mut |n| last = n).unwrap();
        assert_eq!(last, p.data_bytes().unwrap());
        let model = Model::open(&made[0].0).unwrap();
        assert_eq!(model.files[0].len_bytes, made[0].1);
        assert_eq!((model.architecture(), model.n_experts_used()), (Some("qwen3moe"), Some(2)));
        assert_eq!(model.experts.layers.len(), 2);
        let l = &model.experts.layers[1];
        assert_eq!((l.block, l.n_experts, l.expert_bytes()), (1, 4, 3 * 64 * row));
    }
}

/// llama.cpp loads the trained model; a random one of its shape has the same header, but for names and licence.
#[test]
fn the_header_is_that_of_the_trained_model() {
    let trained = Model::open(Path::new("tests/data/model/tiny-moe-q2_0.gguf")).unwrap();
    let p = TinyParams {
        layers: 6,
        width: 192,
        heads: 6,
        kv_heads: 2,
        head_dim: 32,
        experts: 64,
        k: 6,
        ffn: 128,
        context: 512,
        ..TinyParams::default()
    };
    let dir = TempDir::new().unwrap();
    let random = Model::open(&make(&p, &dir.path().join("m.gguf"))[0]).unwrap();
    let facts = |m: &Model| {
        let mut facts = m.metadata.clone();
        facts.retain(|k, _| !["general.name", "general.description", "general.license"].contains(&k.as_str()));
        facts
    };
    assert_eq!(facts(&random), facts(&trained));
    let tensors = |m: &Model| {
        m.tensors.iter().map(|t| (t.name.clone(), t.ne, t.n_dims, t.ggml_type, t.bytes)).collect::<Vec<_>>()
    };
    assert_eq!(tensors(&random), tensors(&trained));
    // The arrays of the tokenizer, which the parser walks over: byte for byte.
    let tokens = |m: &Model| {
        let map = &m.files[0].map;
        let key = b"tokenizer.ggml.tokens";
        let at = map.windows(key.len()).position(|w| w == key).unwrap();
        map[at..at + 7000].to_vec()
    };
    assert!(tokens(&random) == tokens(&trained));
}

#[test]
fn weights_are_spread_as_those_of_a_fresh_network() {
    let dir = TempDir::new().unwrap();
    let p = TinyParams { layers: 1, experts: 32, ..TinyParams::default() };
    let model = Model::open(&make(&p, &dir.path().join("m.gguf"))[0]).unwrap();
    let spread = |w: &[f32]| {
        let n = w.len() as f64;
        let mean = w.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
        (mean, (w.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / n).sqrt())
    };
    let blocks = data(&model, "blk.0.ffn_gate_exps.weight");
    let mut w = vec![0.0; blocks.len() / 18 * 64];
    q2_0_dequantize(blocks, &mut w).unwrap();
    let want = 1.0 / f64::from(p.width).sqrt();
    let (mean, std) = spread(&w);
    assert!(mean.abs() < 0.01 * want && (std / want - 1.0).abs() < 0.05, "gate: mean {mean}, deviation {std}");
    let router = data(&model, "blk.0.ffn_gate_inp.weight");
    let w: Vec<f32> = router.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    let (mean, std) = spread(&w);
    assert!(mean.abs() < 0.05 * want && (std / want - 1.0).abs() < 0.05, "router: mean {mean}, deviation {std}");
    assert!(data(&model, "output_norm.weight").chunks(4).all(|b| b == 1.0_f32.to_le_bytes()));
}

#[test]
fn the_same_seed_gives_the_same_bytes_however_it_is_split() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    let one = make(&small(), &at("a.gguf"));
    let two = make(&small(), &at("b.gguf"));
    assert!(std::fs::read(&one[0]).unwrap() == std::fs::read(&two[0]).unwrap());
    let other = Model::open(&make(&TinyParams { seed: 2, ..small() }, &at("c.gguf"))[0]).unwrap();
    let one = Model::open(&one[0]).unwrap();
    assert!(data(&one, "output.weight") != data(&other, "output.weight"));
    for shards in [2, 3, 28] {
        let paths = make(&TinyParams { shards, ..small() }, &at("s.gguf"));
        assert_eq!(paths.len(), shards as usize);
        assert_eq!(paths[1], at(&format!("s-00002-of-{shards:05}.gguf")));
        let split = Model::open(&paths[1]).unwrap();
        assert_eq!((split.files.len(), split.tensors.len()), (shards as usize, one.tensors.len()));
        assert!(split.tensors.iter().all(|t| t.file > 0), "the first shard holds metadata only");
        assert!((1..shards as usize).all(|f| split.tensors.iter().any(|t| t.file == f)));
        for t in &one.tensors {
            assert!(data(&one, &t.name) == data(&split, &t.name), "{}", t.name);
        }
    }
}

#[test]
fn impossible_shapes_are_refused() {
    let out = Path::new("/nonexistent/m.gguf");
    let refuse = |p: TinyParams, words: &[&str]| {
        let e = tiny::write(&p, out, &mut |_| ()).unwrap_err();
        assert_eq!(e.kind, ErrorKind::Argument, "{e}");
        assert!(words.iter().all(|w| e.detail.contains(w)), "{e}");
    };
    refuse(TinyParams { width: 96, ..small() }, &["width is 96", "q2_0", "64"]);
    refuse(TinyParams { ffn: 32, ..small() }, &["ffn is 32"]);
    refuse(TinyParams { k: 5, ..small() }, &["k is 5", "4 experts"]);
    refuse(TinyParams { heads: 3, kv_heads: 2, ..small() }, &["3 heads", "2 kv heads"]);
    refuse(TinyParams { head_dim: 5, ..small() }, &["head dim is 5"]);
    refuse(TinyParams { experts: 0, ..small() }, &["experts is 0"]);
    refuse(TinyParams { experts: 70_000, ..small() }, &["65535"]);
    refuse(TinyParams { shards: 29, ..small() }, &["29 shards", "27 tensors"]);
    refuse(TinyParams { expert_type: 14, ..small() }, &["q6_K"]);
    assert!(TinyParams { width: 96, ffn: 40, expert_type: TYPE_F16, ..small() }.check().is_ok());
    assert_eq!(tiny::write(&small(), out, &mut |_| ()).unwrap_err().kind, ErrorKind::Io);
    // One expert of the preset: 3 x 460,800 bytes.
    let p = TinyParams::target_2l();
    assert_eq!((p.check().is_ok(), p.width * p.ffn / 64 * 18, p.experts), (true, 460_800, 512));
}
