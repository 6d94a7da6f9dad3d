//! The adapter on graphs that no model here has: one MoE layer built by hand as llama.cpp builds it, with fused gate_up, per-expert biases
//! and a per-expert scale, computed by ggml's CPU backend. Through slots its outputs are those of plain ggml, bit for bit; a callback that
//! was there before is still called; and what is not understood is an error.

mod common;
#[path = "../src/ffi.rs"]
mod ffi;

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::ptr::null_mut;

use hotset::model::write::{GgufWriter, TensorSpec};
use llama_cpp_sys_2::*;

const D: i64 = 64;
const F: i64 = 32;
const E: i64 = 8;
const K: i64 = 2;

/// Names and shapes of the file, in the order of `Net::tensors`.
const TENSORS: [(&str, &[i64]); 6] = [
    ("blk.3.ffn_gate_inp.weight", &[D, E]),
    ("blk.3.ffn_gate_up_exps.weight", &[D, 2 * F, E]),
    ("blk.3.ffn_gate_up_exps.bias", &[2 * F, E]),
    ("blk.3.ffn_down_exps.weight", &[F, D, E]),
    ("blk.3.ffn_down_exps.bias", &[D, E]),
    ("blk.3.ffn_down_exps.scale", &[E]),
];

/// Numbers in -1..1, the same for the same place.
fn number(tensor: usize, i: usize) -> f32 {
    let mut z = (tensor as u64 * 1_000_003 + i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    ((z ^ (z >> 27)) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

fn bytes_of(tensor: usize) -> Vec<u8> {
    let n = TENSORS[tensor].1.iter().product::<i64>() as usize;
    (0..n).flat_map(|i| number(tensor, i).to_le_bytes()).collect()
}

fn write_model(path: &Path) {
    let mut writer = GgufWriter::new();
    writer.put("general.architecture", "by-hand").put("by-hand.expert_used_count", K as u32);
    for (name, ne) in TENSORS {
        let ne: Vec<u64> = ne.iter().map(|&n| n as u64).collect();
        writer.tensor(TensorSpec::new(name, &ne, 0).unwrap());
    }
    let mut file = std::fs::File::create(path).unwrap();
    let fill = |t: usize, at: u64, chunk: &mut [u8]| {
        chunk.copy_from_slice(&bytes_of(t)[at as usize..][..chunk.len()]);
        Ok(())
    };
    writer.write_to(&mut file, fill).unwrap();
}

/// Weights in buffers, a CPU backend and its scheduler.
struct Net {
    weights: [*mut ggml_context; 2],
    buffers: Vec<ggml_backend_buffer_t>,
    tensors: Vec<*mut ggml_tensor>,
    backend: ggml_backend_t,
    sched: ggml_backend_sched_t,
}

fn context() -> *mut ggml_context {
    // SAFETY: plain values; freed by whoever asked for it.
    unsafe { ggml_init(ggml_init_params { mem_size: 1 << 20, mem_buffer: null_mut(), no_alloc: true }) }
}

fn name(t: *mut ggml_tensor, text: &str) -> *mut ggml_tensor {
    let text = CString::new(text).unwrap();
    // SAFETY: a live tensor; ggml copies the name.
    unsafe { ggml_set_name(t, text.as_ptr()) }
}

impl Net {
    /// The experts in buffers of type `experts`, the router in a plain one.
    fn new(experts: ggml_backend_buffer_type_t) -> Self {
        let weights = [context(), context()];
        // SAFETY: contexts and tensors live as long as the Net; sizes are the tensors' own.
        unsafe {
            let new = |(i, (text, ne)): (usize, &(&str, &[i64]))| {
                let ctx = weights[usize::from(i > 0)];
                name(ggml_new_tensor(ctx, ggml_type::from(GGML_TYPE_F32), ne.len() as i32, ne.as_ptr()), text)
            };
            let tensors: Vec<_> = TENSORS.iter().enumerate().map(new).collect();
            let buffers = vec![
                ggml_backend_alloc_ctx_tensors_from_buft(weights[0], ggml_backend_cpu_buffer_type()),
                ggml_backend_alloc_ctx_tensors_from_buft(weights[1], experts),
            ];
            for (i, &t) in tensors.iter().enumerate() {
                let bytes = bytes_of(i);
                ggml_backend_tensor_set(t, bytes.as_ptr().cast(), 0, bytes.len());
            }
            for &b in &buffers {
                ggml_backend_buffer_set_usage(b, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
            }
            let mut backend = ggml_backend_cpu_init();
            ggml_backend_cpu_set_n_threads(backend, 1);
            let sched = ggml_backend_sched_new(&mut backend, null_mut(), 1, 256, false, false);
            Net { weights, buffers, tensors, backend, sched }
        }
    }

    /// The layer's output for these tokens, or None where the backend was told to abort.
    fn compute(&self, first_token: usize, n: i64, ids_of_another_layer: bool) -> Option<Vec<f32>> {
        // SAFETY: a context of its own for the graph, freed at the end; shapes as ggml asks for them.
        unsafe {
            let c = context();
            let [router, gate_up, gate_up_b, down, down_b, down_s] = self.tensors[..] else { unreachable!() };
            let x = ggml_new_tensor_2d(c, GGML_TYPE_F32, D, n);
            ggml_set_input(x);
            let logits = name(ggml_mul_mat(c, router, x), "ffn_moe_logits-3");
            let probs = name(ggml_soft_max(c, logits), "ffn_moe_probs-3");
            let topk = ggml_argsort_top_k(c, probs, K as i32);
            name((*topk).src[0], "ffn_moe_argsort-3");
            name(topk, "ffn_moe_topk-3");
            let mut w = name(ggml_get_rows(c, ggml_reshape_3d(c, probs, 1, E, n), topk), "ffn_moe_weights-3");
            w = ggml_reshape_2d(c, w, K, n);
            let sum = name(ggml_sum_rows(c, w), "ffn_moe_weights_sum-3");
            w = ggml_reshape_3d(c, name(ggml_div(c, w, sum), "ffn_moe_weights_norm-3"), 1, K, n);
            let graph = ggml_new_graph_custom(c, 256, false);
            ggml_build_forward_expand(graph, w);

            let ids = if ids_of_another_layer { ggml_cont(c, topk) } else { topk };
            let cur = ggml_reshape_3d(c, x, D, 1, n);
            let gu = ggml_add_id(c, ggml_mul_mat_id(c, gate_up, cur, ids), gate_up_b, ids);
            let half = |at: usize| ggml_view_3d(c, gu, F, K, n, (*gu).nb[1], (*gu).nb[2], at * 4);
            let h = ggml_swiglu_split(c, half(0), half(F as usize));
            let mut out = ggml_mul_mat_id(c, down, h, ids);
            let scale = ggml_repeat_4d(c, ggml_reshape_3d(c, down_s, 1, E, 1), 1, E, n, 1);
            out = ggml_mul(c, out, ggml_get_rows(c, scale, ids));
            out = ggml_add_id(c, out, down_b, ids);
            out = name(ggml_mul(c, out, w), "ffn_moe_weighted-3");
            let part = |i: i64| ggml_view_2d(c, out, D, n, (*out).nb[2], i as usize * (*out).nb[1]);
            let sum = name(ggml_add(c, part(0), part(1)), "ffn_moe_out-3");
            ggml_set_output(sum);
            ggml_build_forward_expand(graph, sum);

            ggml_backend_sched_reset(self.sched);
            assert!(ggml_backend_sched_alloc_graph(self.sched, graph));
            let input: Vec<f32> = (0..n as usize * D as usize)
                .map(|i| number(100 + first_token + i / D as usize, i % D as usize))
                .collect();
            ggml_backend_tensor_set(x, input.as_ptr().cast(), 0, input.len() * 4);
            let status = ggml_backend_sched_graph_compute(self.sched, graph);
            let mut result = vec![0f32; (D * n) as usize];
            if status == GGML_STATUS_SUCCESS {
                ggml_backend_tensor_get(sum, result.as_mut_ptr().cast(), 0, result.len() * 4);
            }
            ggml_free(c);
            (status == GGML_STATUS_SUCCESS).then_some(result)
        }
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        // SAFETY: made in `new`, used no more.
        unsafe {
            ggml_backend_sched_free(self.sched);
            ggml_backend_free(self.backend);
            self.buffers.iter().for_each(|&b| ggml_backend_buffer_free(b));
            self.weights.iter().for_each(|&w| ggml_free(w));
        }
    }
}

/// What the chained callback saw.
#[derive(Default)]
struct Seen {
    asked: Vec<String>,
    computed: Vec<String>,
}

unsafe extern "C" fn watch(t: *mut ggml_tensor, ask: bool, user: *mut c_void) -> bool {
    // SAFETY: the test's Seen, used by one thread; a live tensor.
    let (seen, text) = unsafe { (&mut *user.cast::<Seen>(), CStr::from_ptr((*t).name.as_ptr())) };
    let text = text.to_string_lossy().into_owned();
    if ask {
        seen.asked.push(text.clone());
        return text == "ffn_moe_logits-3" || text == "ffn_moe_topk-3" || text == "ffn_moe_out-3";
    }
    seen.computed.push(text);
    true
}

/// Handle and adapter, attached to a net of its own.
struct Hooked {
    h: *mut ffi::hotset,
    g: *mut ffi::hotset_ggml,
    net: Option<Net>,
    seen: Box<Seen>,
}

impl Hooked {
    fn new(path: &Path, slots: u32, set: impl FnOnce(&mut ffi::hotset_params)) -> Self {
        let gguf = CString::new(path.to_str().unwrap()).unwrap();
        let (mut h, mut g, mut detail) = (null_mut(), null_mut(), [0 as c_char; 256]);
        let mut seen = Box::<Seen>::default();
        // SAFETY: as the headers have it; what pointers name lives through the calls, the Seen as long as the adapter.
        let net = unsafe {
            let mut p = ffi::hotset_params_default();
            (p.slots, p.detail, p.detail_size) = (slots, detail.as_mut_ptr(), detail.len());
            set(&mut p);
            let status = ffi::hotset_open(gguf.as_ptr(), &p, &mut h);
            assert_eq!(status, 0, "{:?}", CStr::from_ptr(detail.as_ptr()));
            let mut q = ffi::hotset_ggml_params_default();
            q.chain = Some(watch);
            q.chain_user = (&raw mut *seen).cast();
            assert_eq!(ffi::hotset_ggml_init(h, &q, &mut g), 0);
            let net = Net::new(ffi::hotset_ggml_buffer_type(g));
            ggml_backend_sched_set_eval_callback(net.sched, Some(ffi::hotset_ggml_eval), g.cast());
            ggml_backend_cpu_set_abort_callback(net.backend, Some(ffi::hotset_ggml_aborted), g.cast());
            net
        };
        Hooked { h, g, net: Some(net), seen }
    }

    fn compute(&self, first: usize, n: i64) -> Option<Vec<f32>> {
        self.net.as_ref().unwrap().compute(first, n, false)
    }

    fn error(&self) -> (i32, String) {
        // SAFETY: a live adapter; its text is copied.
        unsafe {
            (
                ffi::hotset_ggml_status(self.g),
                CStr::from_ptr(ffi::hotset_ggml_error(self.g)).to_string_lossy().into_owned(),
            )
        }
    }

    fn stats(&self) -> ffi::hotset_stats {
        let mut s = ffi::hotset_stats { struct_size: size_of::<ffi::hotset_stats>(), ..Default::default() };
        // SAFETY: a live handle.
        assert_eq!(unsafe { ffi::hotset_stats(self.h, &mut s) }, 0);
        s
    }
}

impl Drop for Hooked {
    fn drop(&mut self) {
        self.net = None;
        // SAFETY: the net, which used them, is gone.
        unsafe {
            ffi::hotset_ggml_free(self.g);
            ffi::hotset_close(self.h);
        }
    }
}

fn plain() -> Net {
    // SAFETY: ggml's own type.
    Net::new(unsafe { ggml_backend_cpu_buffer_type() })
}

#[test]
fn fused_weights_biases_and_scales_through_slots_are_plain_ggmls() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    write_model(&path);
    let plain = plain();
    for slots in [2, 3, 8] {
        let hooked = Hooked::new(&path, slots, |_| ());
        for t in 0..40 {
            // Now and then a batch: of two slots it must pass through.
            let n = if t % 5 == 4 { 3 } else { 1 };
            let (wanted, found) = (plain.compute(t * 3, n, false).unwrap(), hooked.compute(t * 3, n));
            let found = found.unwrap_or_else(|| panic!("token {t}: {:?}", hooked.error()));
            let same = wanted.iter().zip(&found).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same && wanted.iter().any(|x| x.abs() > 0.01), "{slots} slots, token {t}");
        }
        let s = hooked.stats();
        assert!(
            s.misses > 5 && (slots == 8 || s.misses > 8) && s.hits > 0 && (s.pass_through_rows > 0) == (slots < 6),
            "{s:?}"
        );
    }
}

#[test]
fn the_callback_before_is_still_called_and_stops_are_few() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    write_model(&path);
    for (lambda, stops_a_pass) in [(0.0, 1), (0.3, 2)] {
        // Eight slots, all filled first: layers with reads in flight have stops of their own.
        let mut hooked = Hooked::new(&path, 8, |p| p.lambda = lambda);
        (0..40).for_each(|t| drop(hooked.compute(100 + t, 1).unwrap()));
        assert_eq!(hooked.stats().resident, 8);
        hooked.compute(0, 1).unwrap(); // the first pass stops at every node of the weights' chain, to learn which is the last
        // SAFETY: a live adapter.
        let before = unsafe { ffi::hotset_ggml_stops(hooked.g) };
        *hooked.seen = Seen::default();
        (1..11).for_each(|t| drop(hooked.compute(t, 1).unwrap()));
        // SAFETY: a live adapter.
        assert_eq!(unsafe { ffi::hotset_ggml_stops(hooked.g) } - before, 10 * stops_a_pass);
        // What it wanted it got, once a pass and no more; and it was asked about every node.
        assert_eq!(hooked.seen.computed.len(), 30);
        for wanted in ["ffn_moe_logits-3", "ffn_moe_topk-3", "ffn_moe_out-3"] {
            assert_eq!(hooked.seen.computed.iter().filter(|n| *n == wanted).count(), 10, "{wanted}");
        }
        assert!(hooked.seen.asked.len() > 200 && hooked.seen.asked.iter().any(|n| n == "ffn_moe_weights_sum-3"));
    }
}

#[test]
fn dropping_is_felt_and_stays_finite() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    write_model(&path);
    let plain = plain();
    let hooked = Hooked::new(&path, 3, |p| p.drop = 2.0);
    let mut other = 0;
    for t in 0..60 {
        let (wanted, found) = (plain.compute(t, 1, false).unwrap(), hooked.compute(t, 1).unwrap());
        assert!(found.iter().all(|x| x.is_finite()));
        other += usize::from(wanted != found);
    }
    let s = hooked.stats();
    assert!(s.dropped > 5 && other as u64 == s.dropped, "{other} outputs changed, {s:?}");
}

#[test]
fn ids_from_elsewhere_end_the_decode() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    write_model(&path);
    let hooked = Hooked::new(&path, 4, |_| ());
    hooked.compute(0, 1).unwrap();
    assert!(hooked.net.as_ref().unwrap().compute(1, 1, true).is_none(), "the backend was told to abort");
    let (status, message) = hooked.error();
    assert!(status == ffi::HOTSET_E_MODEL && message.contains("takes its ids from"), "{message}");
    // Cleared, it goes on as if nothing had been.
    // SAFETY: a live adapter.
    unsafe { ffi::hotset_ggml_clear(hooked.g) };
    assert_eq!(hooked.compute(2, 1), plain().compute(2, 1, false));
}
