//! Whose bytes are where: every alignment, what lies around a slice, the memory held, the mapped file, refused calls.

use std::time::Duration;

use hotset::ErrorKind;
use hotset::model::ExpertTable;
use hotset::store::{Backing, IoMode, Store, StoreConfig, page_bytes, plan_slot_bytes};

use crate::model::{ALL, BUFFERED, Model, RING, THREADS, config, slice_of, slot_of, small};

#[test]
#[cfg_attr(miri, ignore)]
fn slots_hold_the_files_bytes_whatever_the_alignment() {
    let shapes: [Vec<Vec<(u64, u64)>>; 5] = [
        // all aligned; a large slice takes several pieces of the bounce buffer when it is not
        vec![vec![(4096, 8192), (0, 4096)], vec![(0, 12288)]],
        vec![vec![(64, 8192), (0, 200_000)], vec![(192, 4096 * 40)]],
        // odd offsets, odd lengths, companions of a few bytes
        vec![vec![(1, 4097), (13, 511), (7, 90_001), (0, 4), (1, 2880)], vec![(31, 1)]],
        vec![vec![(32, 1024 * 18), (32, 1024 * 18), (32, 512)], vec![(96, 100_000)]],
        vec![vec![(512, 512), (0, 1536)], vec![(4000, 65_536 * 3 + 1)]],
    ];
    for (i, shape) in shapes.iter().enumerate() {
        for tail in [0, 1, 5000] {
            let m = Model::new(5, shape, tail);
            for (lanes, how, bounce_bytes, chunk_bytes) in [
                (1, RING, 1, 0),
                (5, RING, 1 << 20, 64 << 10),
                (3, RING, 1, 100_000),
                (1, THREADS, 1, 0),
                (4, THREADS, 1 << 20, 64 << 10),
                (3, THREADS, 1, 100_000),
                (1, BUFFERED, 0, 65_537),
                (4, BUFFERED, 0, 0),
            ] {
                let store = m.open(StoreConfig { bounce_bytes, chunk_bytes, ..config(5, lanes, how) });
                let r = store.io_mode();
                let all = if r.in_effect == IoMode::Direct { m.table.total_bytes() } else { 0 };
                assert_eq!(r.straight_bytes + r.bounced_bytes, all);
                for layer in 0..2 {
                    for slot in 0..5 {
                        store.poison(layer, slot, 0xC7).unwrap();
                    }
                    for slot in 0..5 {
                        store.fetch(layer, 4 - slot, slot).unwrap();
                    }
                    for slot in 0..5 {
                        store.wait(layer, slot, None).unwrap();
                        assert!(m.holds(&store, layer, slot, 4 - slot), "shape {i} tail {tail} {how:?} layer {layer}");
                        assert_eq!(store.expert_in(layer, slot), Some(4 - slot));
                    }
                }
                let (c, wanted) = (store.counters(), 5 * m.table.layers.iter().map(|l| l.expert_bytes()).sum::<u64>());
                assert_eq!((c.wanted_bytes, c.failures), (wanted, 0));
                assert!(c.device_bytes >= wanted && c.reads >= 5);
                assert!(how != BUFFERED || c.device_bytes == wanted && c.bounce_copies == 0);
            }
        }
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn the_report_says_what_is_in_effect() {
    let m = small();
    let direct = m.open(config(1, 1, RING));
    let r = direct.io_mode();
    assert_eq!(r.requested, IoMode::Direct);
    assert_eq!(r.in_effect == IoMode::Direct, r.reason.is_empty(), "{r:?}");
    let buffered = m.open(config(1, 1, BUFFERED));
    let r = buffered.io_mode();
    assert_eq!((r.in_effect, r.mem_align, r.offset_align, r.reason.as_str()), (IoMode::Buffered, 1, 1, ""));
    if cfg!(target_os = "linux") && std::path::Path::new("/dev/shm").is_dir() {
        // some systems' tmpfs takes direct reads, some refuses: either way the bytes come and the report agrees
        let path = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        std::fs::write(path.path(), &m.data[0]).unwrap();
        let files = [path.path().to_owned(), m.files[1].clone()];
        let store = Store::open(&files, &m.lens, &m.table, vec![], config(2, 1, RING)).unwrap();
        let r = store.io_mode();
        assert_eq!(r.in_effect == IoMode::Direct, r.reason.is_empty(), "{r:?}");
        assert!(r.reason.is_empty() || r.reason.contains("/dev/shm"), "{r:?}");
        for layer in 0..2 {
            store.fetch(layer, 3, 1).unwrap();
            store.wait(layer, 1, None).unwrap();
            assert!(m.holds(&store, layer, 1, 3));
        }
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn a_fetch_changes_its_slices_and_nothing_else() {
    let m = Model::new(4, &[vec![(32, 5000), (1, 4096), (64, 100)], vec![(0, 64)]], 3);
    for how in ALL {
        let store = m.open(config(3, 2, how));
        for layer in 0..2 {
            (0..3).for_each(|slot| store.poison(layer, slot, 0x5A).unwrap());
        }
        store.fetch(0, 2, 1).unwrap();
        store.wait(0, 1, None).unwrap();
        assert!(m.holds(&store, 0, 1, 2));
        for (layer, slot) in [(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)] {
            assert!(slot_of(&store, layer, slot).iter().all(|&b| b == 0x5A));
            assert_eq!(store.wait(layer, slot, None).unwrap_err().kind, ErrorKind::State);
        }
        let mut gaps = slot_of(&store, 0, 1).to_vec();
        let start = slot_of(&store, 0, 1).as_ptr() as usize;
        for i in 0..3 {
            let s = slice_of(&store, 0, 1, i);
            gaps[s.as_ptr() as usize - start..][..s.len()].fill(0x5A);
        }
        assert!(gaps.iter().all(|&b| b == 0x5A), "{how:?}");
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn release_gives_back_one_slot_and_touches_no_neighbour() {
    let m = small();
    let store = m.open(config(3, 2, RING));
    let staging = store.held_bytes();
    let stride = store.slot_stride(0).unwrap();
    for slot in 0..3 {
        store.fetch(0, slot, slot).unwrap();
        store.fetch(1, slot, slot).unwrap();
    }
    (0..3).for_each(|slot| store.wait(0, slot, None).unwrap());
    store.wait_layer(1).unwrap();
    let full = store.held_bytes();
    assert_eq!(full, staging + 3 * (stride + store.slot_stride(1).unwrap()));
    assert_eq!(full, store.max_bytes());
    store.release(0, 1).unwrap();
    assert_eq!(store.held_bytes(), full - stride);
    store.release(0, 1).unwrap();
    assert_eq!(store.held_bytes(), full - stride, "once");
    assert_eq!(store.wait(0, 1, None).unwrap_err().kind, ErrorKind::State);
    assert!(m.holds(&store, 0, 0, 0) && m.holds(&store, 0, 2, 2) && m.holds(&store, 1, 0, 0));
    if cfg!(target_os = "linux") {
        assert!(slot_of(&store, 0, 1).iter().all(|&b| b == 0));
    }
    store.fetch(0, 5, 1).unwrap();
    store.wait(0, 1, None).unwrap();
    assert!(m.holds(&store, 0, 1, 5));
    assert_eq!(store.held_bytes(), full);
}

#[test]
#[cfg_attr(miri, ignore)]
fn two_disjoint_traces_stay_in_the_budget() {
    let m = Model::new(16, &[vec![(0, 30_000), (64, 30_000)], vec![(0, 18_000)]], 0);
    let config = config(4, 2, RING);
    let page = page_bytes();
    let slots: u64 = m.table.layers.iter().map(|l| 4 * plan_slot_bytes(l, None, page)).sum();
    let budget = slots + config.plan_staging_bytes();
    let store = m.open(config);
    assert!(store.max_bytes() <= budget);
    for trace in [0..8, 8..16u32] {
        for expert in trace {
            for layer in 0..2 {
                store.fetch(layer, expert, expert % 4).unwrap();
                assert!(store.held_bytes() <= budget);
                store.wait(layer, expert % 4, None).unwrap();
                assert!(m.holds(&store, layer, expert % 4, expert));
                assert!(store.held_bytes() <= budget);
            }
        }
    }
    assert_eq!(store.held_bytes(), store.max_bytes());
}

#[test]
#[cfg_attr(miri, ignore)]
fn the_page_cache_backing_has_hints_and_the_mapped_file() {
    let m = small();
    let config = StoreConfig { backing: Backing::PageCache, ..StoreConfig::default() };
    let store = Store::open(&m.files, &m.lens, &m.table, m.maps(), config.clone()).unwrap();
    for layer in 0..2 {
        (0..6).for_each(|e| store.hint(layer, e).unwrap());
        for i in 0..m.slices(layer) {
            let (start, bytes) = store.mapped_slice(layer, i).unwrap();
            // SAFETY: what the store says is mapped.
            let tensor = unsafe { std::slice::from_raw_parts(start, bytes as usize) };
            let size = m.table.layers[layer].tensors[i].slice_bytes as usize;
            (0..6).for_each(|e| assert_eq!(&tensor[e * size..][..size], m.expected(layer, i, e as u32)));
        }
    }
    assert_eq!(store.hint(2, 0).unwrap_err().kind, ErrorKind::Range);
    assert_eq!(store.hint(1, 6).unwrap_err().kind, ErrorKind::Range);
    for e in [store.fetch(0, 0, 0), store.wait(0, 0, None), store.release(0, 0), store.bank(0, 0).map(drop)] {
        assert_eq!(e.unwrap_err().kind, ErrorKind::State);
    }
    assert_eq!((store.held_bytes(), store.max_bytes(), store.slots()), (0, 0, 0));
    let e = Store::open(&m.files, &m.lens, &m.table, vec![], config).err().unwrap();
    assert_eq!(e.kind, ErrorKind::Argument);
}

#[test]
#[cfg_attr(miri, ignore)]
fn what_is_out_of_range_is_refused_and_changes_nothing() {
    let m = small();
    let store = m.open(config(2, 1, BUFFERED));
    store.fetch(0, 1, 1).unwrap();
    store.wait(0, 1, None).unwrap();
    let calls = [
        store.fetch(2, 0, 0),
        store.fetch(0, 6, 1),
        store.fetch(0, u32::MAX, 1),
        store.fetch(0, 0, 2),
        store.wait(9, 0, None),
        store.wait(0, 2, None),
        store.wait(0, 1, Some(2)),
        store.wait_layer(usize::MAX),
        store.release(0, u32::MAX),
        store.bank(1, 1).map(drop),
        store.mapped_slice(0, 2).map(drop),
    ];
    for call in calls {
        assert_eq!(call.unwrap_err().kind, ErrorKind::Range);
    }
    assert_eq!(store.mapped_slice(0, 0).unwrap_err().kind, ErrorKind::State);
    assert!(m.holds(&store, 0, 1, 1) && store.expert_in(0, 1) == Some(1));

    let good = config(2, 1, RING);
    let bad = [
        StoreConfig { slots: 0, ..good.clone() },
        StoreConfig { lanes: 0, ..good.clone() },
        StoreConfig { lanes: 65, ..good.clone() },
        StoreConfig { queue: 0, ..good.clone() },
        StoreConfig { chunk_bytes: (64 << 10) - 1, ..good.clone() },
        StoreConfig { bounce_bytes: usize::MAX, ..good.clone() },
        StoreConfig { timeout: Duration::ZERO, ..good.clone() },
        StoreConfig { timeout: Duration::MAX, ..good.clone() },
    ];
    let refused =
        |lens: &[u64], table: &ExpertTable, c| Store::open(&m.files, lens, table, vec![], c).err().unwrap().kind;
    for c in bad {
        assert_eq!(refused(&m.lens, &m.table, c), ErrorKind::Argument);
    }
    assert_eq!(refused(&m.lens[..1], &m.table, good.clone()), ErrorKind::Argument);
    assert_eq!(refused(&[m.lens[0], m.lens[1] + 1], &m.table, good.clone()), ErrorKind::Changed);
    // one byte short of the last expert's end
    assert_eq!(refused(&[m.lens[0] - 12, m.lens[1]], &m.table, good.clone()), ErrorKind::Format);
    let mut table = m.table.clone();
    table.layers[1].tensors[0].file = 2;
    assert_eq!(refused(&m.lens, &table, good.clone()), ErrorKind::Model);
    // more slots than experts are not made
    assert_eq!(m.open(StoreConfig { slots: i32::MAX as u32, ..good }).slots(), 6);
}
