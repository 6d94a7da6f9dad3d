//! Slots that are read from a pack: the same bytes as from the model's own file, and the same faults.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use hotset::model::tiny::{self, TinyParams};
use hotset::model::{ExpertTable, ExpertTensor, Model, MoeLayer, Pack, PackedLayer, pack, pack_write};
use hotset::store::{Backing, IoMode, ReadAt, Store, StoreConfig, page_bytes, plan_slot_bytes};
use hotset::{Error, ErrorKind};

use crate::model::{BUFFERED, RING, THREADS, config, slice_of};

fn tiny_model(dir: &Path, params: &TinyParams) -> Model {
    let made = tiny::write(params, &dir.join("m.gguf"), &mut |_| ()).unwrap();
    Model::open(&made[0].0).unwrap()
}

fn packed(model: &Model, dir: &Path) -> Pack {
    let path = dir.join("m.hotset");
    pack_write::pack(model, &path, &mut |_| ()).unwrap();
    Pack::open(&path, model).unwrap()
}

fn open(model: &Model, config: StoreConfig) -> Result<Store, Error> {
    open_with(model, config, |_, file| file)
}

fn open_with(
    model: &Model,
    config: StoreConfig,
    wrap: impl FnMut(usize, Box<dyn ReadAt>) -> Box<dyn ReadAt>,
) -> Result<Store, Error> {
    let paths: Vec<_> = model.files.iter().map(|f| f.path.clone()).collect();
    let lens: Vec<_> = model.files.iter().map(|f| f.len_bytes).collect();
    Store::open_with(&paths, &lens, &model.experts, vec![], config, wrap)
}

fn in_model<'a>(model: &'a Model, t: &ExpertTensor, expert: u32) -> &'a [u8] {
    let at = (t.offset_bytes + t.slice_bytes * u64::from(expert)) as usize;
    &model.files[t.file].map[at..at + t.slice_bytes as usize]
}

fn check(store: &Store, model: &Model, layer: usize, slot: u32, expert: u32) {
    for (i, t) in model.experts.layers[layer].tensors.iter().enumerate() {
        assert!(slice_of(store, layer, slot, i) == in_model(model, t, expert), "{} expert {expert}", t.name);
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn slots_are_the_same_from_pack_and_file() {
    let small = TinyParams { layers: 2, experts: 9, ..TinyParams::default() };
    let wide = TinyParams { layers: 1, experts: 5, width: 640, ffn: 512, ..small.clone() };
    for params in [small.clone(), TinyParams { shards: 3, ..small }, wide] {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let model = tiny_model(dir.path(), &params);
        let pack = packed(&model, dir.path());
        for (how, chunk_bytes, lanes) in
            [(RING, 0, 1), (RING, 64 << 10, 4), (THREADS, 64 << 10, 4), (BUFFERED, 64 << 10, 2)]
        {
            let config = StoreConfig { chunk_bytes, pack: Some(pack.clone()), ..config(4, lanes, how) };
            let store = open(&model, config.clone()).unwrap();
            let report = store.io_mode();
            if report.in_effect == IoMode::Direct {
                assert_eq!((report.bounced_bytes, report.straight_share()), (0, 1.0), "a pack is always in step");
            }
            for layer in 0..model.experts.layers.len() {
                for expert in 0..params.experts {
                    let slot = expert % 4;
                    store.poison(layer, slot, 0xC7).unwrap();
                    store.fetch(layer, expert, slot).unwrap();
                    store.wait(layer, slot, None).unwrap();
                    check(&store, &model, layer, slot, expert);
                }
            }
            assert_eq!(store.counters().bounce_copies, 0);
            let planned: u64 = (model.experts.layers.iter().zip(&pack.layers))
                .map(|(l, p)| 4 * plan_slot_bytes(l, Some(p), page_bytes()))
                .sum();
            assert!(store.max_bytes() <= planned + config.plan_staging_bytes());
            store.check_files().unwrap();
        }
    }
}

/// The target's numbers: 84.375 pages of 16 KiB become 85.
#[test]
fn the_targets_expert_takes_85_pages() {
    let layer = |slices: &[u64]| {
        let slices = slices.iter().scan(0, |end, &slice_bytes| {
            let offset_bytes = *end;
            *end += slice_bytes;
            Some(pack::PackedSlice { slice_bytes, offset_bytes, ggml_type: 42, projection: 0, part: 0 })
        });
        let slices: Vec<_> = slices.collect();
        let stride_bytes =
            slices.last().map_or(0, |s| s.offset_bytes + s.slice_bytes).next_multiple_of(pack::PACK_ALIGN);
        PackedLayer { block: 0, n_experts: 512, offset_bytes: 16384, stride_bytes, slices }
    };
    let p = layer(&[460_800; 3]);
    assert_eq!(p.stride_bytes, 85 * 16384);
    let l = MoeLayer { block: 0, n_experts: 512, tensors: vec![] };
    assert_eq!(plan_slot_bytes(&l, Some(&p), 4096), 85 * 16384);
    assert_eq!(plan_slot_bytes(&l, Some(&p), 65536), 22 * 65536);
}

#[test]
#[cfg_attr(miri, ignore)]
fn a_pack_that_does_not_fit_is_refused_with_the_numbers() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let model = tiny_model(dir.path(), &TinyParams::default());
    let pack = packed(&model, dir.path());
    let with = |pack: Pack| StoreConfig { pack: Some(pack), ..config(4, 1, RING) };
    let refused = |change: &dyn Fn(&mut Pack)| {
        let mut bad = pack.clone();
        change(&mut bad);
        open(&model, with(bad)).err().unwrap()
    };
    let e = refused(&|p| p.layers.truncate(1));
    assert!(e.kind == ErrorKind::Model && e.detail.contains("a pack of 1 layers, the model has 4"), "{e}");
    for change in [
        (|p: &mut Pack| p.layers[2].n_experts += 1) as fn(&mut Pack),
        |p| p.layers[0].slices[1].slice_bytes -= 1,
        |p| p.layers[0].slices[1].offset_bytes -= 32,
        |p| p.layers[1].slices[2].offset_bytes = u64::MAX,
        |p| p.layers[1].stride_bytes -= 16384,
        |p| p.layers[3].offset_bytes += 16384,
        |p| p.layers[3].stride_bytes = u64::MAX / 4,
    ] {
        assert_eq!(refused(&change).kind, ErrorKind::Model);
    }
    assert_eq!(refused(&|p| p.file_bytes += 1).kind, ErrorKind::Changed);
    assert_eq!(refused(&|p| p.path = "/nowhere/m.hotset".into()).kind, ErrorKind::Io);
    let page_cache = StoreConfig { backing: Backing::PageCache, ..with(pack.clone()) };
    let e = Store::open(&[], &[], &ExpertTable::default(), vec![], page_cache).err().unwrap();
    assert!(e.kind == ErrorKind::Argument && e.detail.contains("m.hotset"), "{e}");
}

/// A source that fails one read.
struct Once {
    file: Box<dyn ReadAt>,
    /// Of the read that fails, counted down; 0: none does.
    left: Arc<AtomicU64>,
    errno: i32,
}

impl ReadAt for Once {
    fn read_at(&self, bufs: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize> {
        let this = self.left.fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1)) == Ok(1);
        match (this, self.errno) {
            (true, 0) => self.file.read_at(bufs, offset).map(|n| n / 2), // short
            (true, e) => Err(io::Error::from_raw_os_error(e)),
            (false, _) => self.file.read_at(bufs, offset),
        }
    }
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }
    fn stamp(&self) -> io::Result<hotset::store::Stamp> {
        self.file.stamp()
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn faults_of_a_pack_are_loud_and_do_not_last() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let model =
        tiny_model(dir.path(), &TinyParams { layers: 1, experts: 4, width: 640, ffn: 512, ..TinyParams::default() });
    let pack = packed(&model, dir.path());
    let strided = pack.layers[0].stride_bytes;
    assert!(strided > 3 * (64 << 10), "several chunks: {strided}");
    let with = StoreConfig { pack: Some(pack.clone()), ..config(2, 2, RING) };
    for errno in [libc::EIO, libc::EINTR, 0] {
        let left = Arc::new(AtomicU64::new(0));
        let n_files = model.files.len();
        let store = open_with(&model, with.clone(), |i, file| {
            // the pack comes behind the model's own files
            if i == n_files { Box::new(Once { file, left: left.clone(), errno }) } else { file }
        })
        .unwrap();
        for nth in 1..=4 {
            left.store(nth, SeqCst);
            store.fetch(0, nth as u32 - 1, 1).unwrap();
            let outcome = store.wait(0, 1, None);
            if errno == libc::EIO {
                let e = outcome.unwrap_err();
                assert_eq!(e.kind, ErrorKind::Io);
                for part in ["layer 0 expert ", "slot 1 slice", "m.hotset", "offset ", "wanted "] {
                    assert!(e.detail.contains(part), "{part}: {e}");
                }
                store.fetch(0, nth as u32 - 1, 1).unwrap();
                store.wait(0, 1, None).unwrap();
            } else {
                outcome.unwrap();
            }
            check(&store, &model, 0, 1, nth as u32 - 1);
        }
    }

    let store = open(&model, with).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    let file = File::options().write(true).open(&pack.path).unwrap();
    let mut first = [0; 100];
    File::open(&pack.path).unwrap().read_exact_at(&mut first, 0).unwrap();
    file.write_all_at(&first, 0).unwrap();
    store.fetch(0, 1, 0).unwrap();
    let e = store.wait(0, 0, None).unwrap_err();
    assert!(e.kind == ErrorKind::Changed && e.detail.contains("m.hotset was written to"), "{e}");
    file.set_len(pack.file_bytes - strided).unwrap();
    store.fetch(0, 3, 0).unwrap();
    let e = store.wait(0, 0, None).unwrap_err();
    assert!(e.kind == ErrorKind::Changed && e.detail.contains(&format!("had {} bytes", pack.file_bytes)), "{e}");
    assert_eq!(store.check_files().unwrap_err().kind, ErrorKind::Changed);
}
