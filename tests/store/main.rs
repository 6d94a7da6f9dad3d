//! The store on real files: whatever the alignment, the I/O mode and the number of lanes, a slot holds the file's bytes or
//! the call says why not. Here: any shape in any order, many threads, and no allocation on the way of a token.

mod bytes;
mod faults;
mod model;
mod pack;
mod pieces;
mod ring;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use hotset::store::StoreConfig;
use model::{ALL, BUFFERED, Model, RING, Rng, THREADS, config, slice_of, small};
use proptest::prelude::*;

/// The system's allocator, which counts what each thread asks for.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: everything is passed on unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: as the caller says.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: as the caller says.
        unsafe { System.dealloc(p, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
#[cfg_attr(miri, ignore)]
fn fetch_and_wait_allocate_nothing() {
    let m = small();
    for how in ALL {
        let store = m.open(config(2, 2, how));
        let pass = |n: u32| {
            for expert in (0..6).cycle().take(n as usize) {
                store.fetch(0, expert, expert % 2).unwrap();
                store.wait(0, expert % 2, Some(0)).unwrap();
                store.wait(0, expert % 2, None).unwrap();
                store.wait_layer(0).unwrap();
                assert!(store.take_failed(0).is_empty());
            }
        };
        // the first sleep of a thread may set something up
        pass(50);
        let before = ALLOCATIONS.get();
        pass(200);
        assert_eq!(ALLOCATIONS.get(), before);
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn many_threads_fetch_and_wait() {
    let m = Model::new(24, &[vec![(32, 9001), (0, 4096), (64, 8192)], vec![(5, 700), (0, 16)], vec![(64, 16384)]], 7);
    for (lanes, how, queue) in [(4, RING, 4096), (2, RING, 3), (4, THREADS, 4096), (2, THREADS, 3), (3, BUFFERED, 64)] {
        let store = m.open(StoreConfig { queue, bounce_bytes: 1, ..config(8, lanes, how) });
        std::thread::scope(|s| {
            for thread in 0..4u32 {
                let (m, store) = (&m, &store);
                s.spawn(move || {
                    // each thread has two slots of every layer; what it shares are lanes, queue and wake-ups
                    let mut rng = Rng(u64::from(thread) + 77);
                    for round in 0..250 {
                        let layer = rng.below(3) as usize;
                        let slot = thread * 2 + rng.below(2) as u32;
                        let expert = rng.below(24) as u32;
                        store.fetch(layer, expert, slot).unwrap();
                        if round % 3 == 0 {
                            for i in (0..m.slices(layer)).rev() {
                                store.wait(layer, slot, Some(i)).unwrap();
                                assert_eq!(slice_of(store, layer, slot, i), m.expected(layer, i, expert));
                            }
                            if round % 2 == 0 {
                                store.release(layer, slot).unwrap();
                            }
                        } else if round % 7 != 1 {
                            store.wait(layer, slot, None).unwrap();
                            assert!(m.holds(store, layer, slot, expert));
                            if round % 5 == 0 {
                                store.release(layer, slot).unwrap();
                            }
                        }
                    }
                });
            }
            // waiters that fetched nothing see either the state or a whole slot
            s.spawn(|| (0..200).for_each(|i| store.wait_layer(i % 3).unwrap()));
        });
        (0..3).for_each(|l| store.wait_layer(l).unwrap());
        assert!(store.held_bytes() <= store.max_bytes());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..Default::default() })]
    /// Any gaps, sizes and orders of fetches.
    #[test]
    #[cfg_attr(miri, ignore)]
    fn any_shape_any_order(
        layers in prop::collection::vec(prop::collection::vec((0..5000u64, prop_oneof![1..70_000u64, (1..20u64).prop_map(|n| n * 4096), 100_000..400_000u64]), 1..5), 1..4),
        order in prop::collection::vec((any::<prop::sample::Index>(), 0..4u32, 0..3u32), 1..40),
        how in prop::sample::select(&ALL[..]),
        lanes in 1..5usize,
    ) {
        let m = Model::new(4, &layers, 17);
        let store = m.open(StoreConfig { bounce_bytes: 1, queue: 5, ..config(3, lanes, how) });
        let mut now = vec![[None; 3]; layers.len()];
        for (layer, expert, slot) in order {
            let layer = layer.index(layers.len());
            store.fetch(layer, expert, slot).unwrap();
            now[layer][slot as usize] = Some(expert);
        }
        for (layer, slots) in now.iter().enumerate() {
            for (slot, expert) in slots.iter().enumerate() {
                if let Some(expert) = expert {
                    store.wait(layer, slot as u32, None).unwrap();
                    prop_assert!(m.holds(&store, layer, slot as u32, *expert));
                } else {
                    prop_assert!(store.wait(layer, slot as u32, None).is_err());
                }
            }
        }
    }
}
