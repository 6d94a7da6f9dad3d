//! The per-layer calls allocate nothing after the first pass: through the C ABI, with misses, reranking, dropping, recording, metrics (with the
//! machine's state) and a schedule on. Counted on the calling thread only; the writer and the lanes have threads of their own.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::CString;

use hotset::abi::bindings as c;
use hotset::model::tiny::{self, TinyParams};

struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|n| n.set(n.get() + 1));
        // SAFETY: as for the caller.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as for the caller.
        unsafe { System.dealloc(at, layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        COUNT.with(|n| n.set(n.get() + 1));
        // SAFETY: as for the caller.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const LAYERS: u32 = 3;
const EXPERTS: usize = 300;
const K: usize = 6;

#[test]
fn nothing_is_allocated_after_the_first_pass() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("m.gguf");
    let shape = TinyParams { layers: LAYERS, experts: EXPERTS as u32, k: K as u32, ..TinyParams::default() };
    tiny::write(&shape, &path, &mut |_| ()).unwrap();
    let text = |p: &std::path::Path| CString::new(p.to_str().unwrap()).unwrap();
    let (gguf, trace, metrics) = (text(&path), text(&dir.path().join("t.q4rt")), text(&dir.path().join("m.jsonl")));
    // Blocks begin and end; where one changes settings, what is resident is noted for the trace, and that allocates.
    let plan = dir.path().join("plan.json");
    let blocks: Vec<_> =
        (0..9).map(|i| format!("{{\"cell\":\"{}\",\"from\":{},\"tokens\":20}}", ["a", "b"][i % 2], 20 * i)).collect();
    let cells = r#"[{"name":"a"},{"name":"b"}]"#;
    let text_of =
        format!("{{\"hotset_schedule\":1,\"washout\":3,\"cells\":{cells},\"blocks\":[{}]}}", blocks.join(","));
    std::fs::write(&plan, text_of).unwrap();
    let plan = text(&plan);
    let (topk, running) = (c::HOTSET_DELTA_TOKEN_TOPK, c::HOTSET_DELTA_RUNNING_FULL);
    for (lambda, drop, delta, top_m) in [(0.0, 0.0, topk, 64), (0.2, 0.8, running, 64), (0.2, 0.8, running, 256)] {
        let mut h = std::ptr::null_mut();
        // SAFETY: as hotset.h has it; what the pointers name lives through the calls.
        unsafe {
            let params = c::hotset_params {
                slots: 20,
                lambda,
                drop,
                delta,
                top_m,
                trace: trace.as_ptr(),
                metrics: metrics.as_ptr(),
                schedule: if top_m == 64 { plan.as_ptr() } else { std::ptr::null() },
                queue_tokens: 4096,
                ..c::hotset_params_default()
            };
            assert_eq!(c::hotset_open(gguf.as_ptr(), &params, &mut h), 0);
        }
        let mut rng = fastrand::Rng::with_seed(3);
        let mut scores = vec![0.0f32; EXPERTS];
        let mut counts = Vec::with_capacity(200);
        for _token in 0..200 {
            let mut count = 0;
            for layer in 0..LAYERS {
                scores.iter_mut().for_each(|z| *z = rng.f32());
                let (mut ids, mut weights) = ([0i32; K], [0.4, 0.3, 0.1, 0.1, 0.05, 0.05f32]);
                let batch = c::hotset_batch {
                    struct_size: size_of::<c::hotset_batch>(),
                    layer,
                    n_tokens: 1,
                    n_experts: EXPERTS as u32,
                    k: K as u32,
                    position: -1,
                    ..Default::default()
                };
                let before = COUNT.with(Cell::get);
                // SAFETY: one row of EXPERTS scores, K ids and K weights.
                unsafe {
                    assert_eq!(c::hotset_select(h, &batch, scores.as_ptr(), EXPERTS * 4, ids.as_mut_ptr(), K * 4), 0);
                    let (i, w) = (ids.as_mut_ptr(), weights.as_mut_ptr());
                    assert_eq!(c::hotset_admit(h, &batch, i, K * 4, w, K * 4, std::ptr::null_mut()), 0);
                    assert_eq!(c::hotset_wait(h, layer, -1, c::HOTSET_ALL as u32), 0);
                }
                count += COUNT.with(Cell::get) - before;
            }
            counts.push(count);
        }
        let mut stats = c::hotset_stats { struct_size: size_of::<c::hotset_stats>(), ..Default::default() };
        // SAFETY: a live handle, closed after its last use.
        unsafe {
            assert_eq!(c::hotset_stats(h, &mut stats), 0);
            c::hotset_close(h);
        }
        assert!(
            stats.misses > 500 && stats.recorded_tokens == 200 && (stats.swapped > 0) == (lambda > 0.0),
            "{stats:?}"
        );
        assert!(counts[0] > 0, "the counter counts: the first pass allocates its working memory");
        assert_eq!(counts[1..].iter().sum::<u64>(), 0, "{counts:?}");
    }
}
