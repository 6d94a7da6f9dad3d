//! Any order of the C ABI's calls, with any arguments that a C caller can pass by value, on one open model: statuses, never a crash; ids
//! that come back are slots in range and distinct; the cache stays within its slots.
#![no_main]

use std::ffi::CString;
use std::sync::OnceLock;

use hotset::abi::bindings as c;
use hotset::model::tiny::{self, TinyParams};
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;

const EXPERTS: u32 = 8;
const K: usize = 3;

#[derive(Arbitrary, Debug)]
enum Call {
    Select { layer: u32, tokens: u8, k: u8, flags: u8, space: i8, scores: [f32; 8], ids: [i8; 6] },
    Admit { layer: u32, tokens: u8, k: u8, phase: i8, ids: [i8; 6], weights: [f32; 6], with_weights: bool },
    Wait { layer: u32, slot: i8, projection: u8 },
    Drop { f: f64, renormalise: i8 },
    Moce { lambda: f64, top_j: u32, delta: i8 },
    Slots(u8),
    Bytes(u64),
    Reset,
    Flush,
}

fn model() -> &'static CString {
    static MODEL: OnceLock<CString> = OnceLock::new();
    MODEL.get_or_init(|| {
        let path = std::env::temp_dir().join(format!("hotset-fuzz-{}.gguf", std::process::id()));
        let shape =
            TinyParams { layers: 2, width: 64, ffn: 64, experts: EXPERTS, k: K as u32, ..TinyParams::default() };
        tiny::write(&shape, &path, &mut |_| ()).unwrap();
        CString::new(path.to_str().unwrap()).unwrap()
    })
}

fn batch(layer: u32, tokens: u8, k: u8) -> c::hotset_batch {
    c::hotset_batch {
        struct_size: size_of::<c::hotset_batch>(),
        layer: layer % 3,
        n_tokens: (tokens % 3).into(),
        n_experts: EXPERTS,
        k: (k % 4).into(),
        position: -1,
        ..Default::default()
    }
}

fuzz_target!(|calls: Vec<Call>| {
    let mut h = std::ptr::null_mut();
    // SAFETY: as hotset.h has it: rows for two tokens are behind every pointer, and batches have at most two of at most K ids.
    unsafe {
        let params =
            c::hotset_params { slots: 4, lanes: 1, dense: c::HOTSET_DENSE_LEAVE, ..c::hotset_params_default() };
        assert_eq!(c::hotset_open(model().as_ptr(), &params, &mut h), 0);
        for call in calls {
            match call {
                Call::Select { layer, tokens, k, flags, space, scores, ids } => {
                    let b =
                        c::hotset_batch { flags: flags.into(), score_space: space.into(), ..batch(layer, tokens, k) };
                    let scores: Vec<f32> = scores.iter().chain(&scores).copied().collect();
                    let mut ids = ids.map(i32::from);
                    let status = c::hotset_select(h, &b, scores.as_ptr(), 32, ids.as_mut_ptr(), 4 * b.k as usize);
                    let chosen = &ids[..(b.n_tokens * b.k) as usize];
                    assert!(status < 0 || chosen.iter().all(|id| (0..EXPERTS as i32).contains(id)));
                }
                Call::Admit { layer, tokens, k, phase, ids, weights, with_weights } => {
                    let b = c::hotset_batch { phase: phase.into(), ..batch(layer, tokens, k) };
                    let (mut ids, mut weights) = (ids.map(i32::from), weights);
                    let w = if with_weights { weights.as_mut_ptr() } else { std::ptr::null_mut() };
                    let (row, before) = (4 * b.k as usize, ids);
                    let status = c::hotset_admit(h, &b, ids.as_mut_ptr(), row, w, row, std::ptr::null_mut());
                    if status != 0 {
                        assert_eq!(ids, before);
                    } else if b.k > 0 {
                        for row in ids[..(b.n_tokens * b.k) as usize].chunks(b.k as usize) {
                            assert!(row.iter().all(|id| (0..EXPERTS as i32).contains(id)));
                            assert!((1..row.len()).all(|i| !row[..i].contains(&row[i])));
                        }
                        assert_eq!(c::hotset_wait(h, b.layer, -1, c::HOTSET_ALL as u32), 0);
                    }
                }
                Call::Wait { layer, slot, projection } => {
                    drop(c::hotset_wait(h, layer % 3, slot.into(), projection.into()))
                }
                Call::Drop { f, renormalise } => drop(c::hotset_set_drop(h, f, renormalise.into())),
                Call::Moce { lambda, top_j, delta } => drop(c::hotset_set_moce(h, lambda, top_j, delta.into())),
                Call::Slots(n) => drop(c::hotset_set_slots(h, n.into())),
                Call::Bytes(n) => drop(c::hotset_set_cache_bytes(h, n)),
                Call::Reset => assert_eq!(c::hotset_reset(h), 0),
                Call::Flush => assert_eq!(c::hotset_trace_flush(h, 1), c::HOTSET_E_STATE),
            }
            let mut stats = c::hotset_stats { struct_size: size_of::<c::hotset_stats>(), ..Default::default() };
            assert_eq!(c::hotset_stats(h, &mut stats), 0);
            assert!(stats.resident <= 2 * u64::from(EXPERTS));
        }
        c::hotset_close(h);
    }
});
