//! GGUF files put together by hand, apart from the library's writer, so that they may also be wrong.
#![allow(dead_code)] // each test binary uses a part of it

use hotset::model::Model;
use hotset::model::quant::{TYPE_F16, TYPE_F32, TYPE_Q2_0};
use hotset::{Error, ErrorKind};
use tempfile::TempDir;

/// What a file holds.
#[derive(Clone)]
pub struct Raw {
    pub version: u32,
    pub alignment: u64,
    pub metadata: Vec<(String, Vec<u8>)>,
    /// Name, shape, type, and the bytes that the file gives it.
    pub tensors: Vec<(String, Vec<u64>, u32, u64)>,
}

pub fn string(s: &str) -> Vec<u8> {
    [&(s.len() as u64).to_le_bytes()[..], s.as_bytes()].concat()
}

impl Raw {
    pub fn new() -> Self {
        let mut raw = Self { version: 3, alignment: 32, metadata: vec![], tensors: vec![] };
        raw.put("general.architecture", 8, &string("any"));
        raw.put("any.expert_used_count", 4, &2_u32.to_le_bytes());
        raw
    }

    pub fn put(&mut self, key: &str, kind: u32, value: &[u8]) -> &mut Self {
        self.metadata.push((key.into(), [&kind.to_le_bytes()[..], value].concat()));
        self
    }

    pub fn u32(&mut self, key: &str, v: u32) -> &mut Self {
        self.put(key, 4, &v.to_le_bytes())
    }

    /// A tensor with the bytes of its type, for the few types used here.
    pub fn tensor(&mut self, name: &str, ne: &[u64], kind: u32) -> &mut Self {
        let n: u64 = ne.iter().product();
        let bytes = match kind {
            TYPE_F32 => n * 4,
            TYPE_F16 => n * 2,
            TYPE_Q2_0 => n / 64 * 18,
            _ => n,
        };
        self.stored(name, ne, kind, bytes)
    }

    pub fn stored(&mut self, name: &str, ne: &[u64], kind: u32, bytes: u64) -> &mut Self {
        self.tensors.push((name.into(), ne.to_vec(), kind, bytes));
        self
    }

    /// gate, up and down of one block: `width` inputs, `ffn` rows, `experts` experts of Q2_0.
    pub fn layer(&mut self, block: u32, width: u64, ffn: u64, experts: u64) -> &mut Self {
        self.tensor(&format!("blk.{block}.ffn_gate_exps.weight"), &[width, ffn, experts], TYPE_Q2_0);
        self.tensor(&format!("blk.{block}.ffn_up_exps.weight"), &[width, ffn, experts], TYPE_Q2_0);
        self.tensor(&format!("blk.{block}.ffn_down_exps.weight"), &[ffn, width, experts], TYPE_Q2_0)
    }

    pub fn bytes(&self) -> Vec<u8> {
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

    pub fn open(&self) -> Result<Model, Error> {
        open_bytes(&self.bytes())
    }
}

pub fn open_bytes(bytes: &[u8]) -> Result<Model, Error> {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, bytes).unwrap();
    Model::open(&path)
}

/// Asserts that it was refused for that kind of reason, with every one of `words` in the detail.
#[track_caller]
pub fn refused<T>(result: Result<T, Error>, kind: ErrorKind, words: &[&str]) {
    let e = result.err().expect("should be refused");
    assert_eq!(e.kind, kind, "{e}");
    for w in words {
        assert!(e.detail.contains(w), "{w:?} is wanted in: {e}");
    }
}
