//! Routing forced by a trace: at each layer's choice the ids of the trace's next token are written over the router's, so that a model of
//! random weights, whose own routing is noise, runs experts as a real model does. Weights are then what the graph makes of those ids.
//!
//! ```text
//! ask  topk-N   wanted            (and whatever hotset's adapter wants)
//! stop topk-N   the trace's ids   then the adapter, which sees them as the router's own choice
//! ```

use std::ffi::{CStr, c_void};
use std::path::Path;
use std::ptr;

use anyhow::{Result, bail};
use hotset::trace::Trace;
use llama_cpp_sys_2::ggml_tensor;

use crate::ffi;

pub struct Route {
    trace: Trace,
    /// Block numbers of the layers with experts, as they came; the trace's layers in order.
    blocks: Vec<u32>,
    /// The token of the trace that the next pass begins with, and that this one did.
    next: usize,
    first: usize,
    /// Tokens of this pass, as the first layer saw them.
    pass_tokens: usize,
    /// The adapter, or NULL.
    adapter: *mut c_void,
    wanted_by_adapter: bool,
    error: Option<String>,
}

impl Route {
    pub fn open(path: &Path) -> Result<Box<Route>> {
        let trace = Trace::open(path)?;
        if trace.n_tokens() == 0 {
            bail!("{}: no tokens to route by", path.display());
        }
        Ok(Box::new(Route {
            trace,
            blocks: Vec::new(),
            next: 0,
            first: 0,
            pass_tokens: 0,
            adapter: ptr::null_mut(),
            wanted_by_adapter: false,
            error: None,
        }))
    }

    pub fn set_adapter(&mut self, adapter: *mut c_void) {
        self.adapter = adapter;
    }

    /// What does not fit: the decode went on with the router's own ids.
    pub fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    /// Writes the ids of one layer. A trace that is shorter than the run begins again.
    fn write(&mut self, t: &ggml_tensor, block: u32) -> Result<()> {
        let (k, rows) = (t.ne[0] as usize, t.ne[1] as usize);
        let layer = match self.blocks.iter().position(|&b| b == block) {
            Some(layer) => layer,
            None => {
                self.blocks.push(block);
                self.blocks.len() - 1
            }
        };
        if layer == 0 {
            (self.first, self.pass_tokens) = (self.next, rows);
            self.next += rows;
        }
        // SAFETY: the node's sources live as long as the graph.
        let scores = unsafe { t.src[0].as_ref() };
        let n_experts = scores.map_or(0, |s| s.ne[0] as usize);
        if layer >= self.trace.n_layers()
            || k > self.trace.top_m()
            || n_experts != self.trace.n_experts()
            || t.type_ != llama_cpp_sys_2::GGML_TYPE_I32
        {
            bail!(
                "--route: block {block} is layer {layer} and takes {k} of {n_experts} experts; the trace has {} layers, and {} of {}",
                self.trace.n_layers(),
                self.trace.top_m(),
                self.trace.n_experts()
            );
        }
        // A last layer that sees outputs only sees the last tokens.
        let skipped = self.pass_tokens.saturating_sub(rows);
        for row in 0..rows {
            let token = (self.first + skipped + row) % self.trace.n_tokens();
            let record = self.trace.record(token, layer);
            // A file's word: ids out of range, or twice, would have the engine's kernels write where they must not.
            let bad = (0..k)
                .find(|&r| usize::from(record.id(r)) >= n_experts || (0..r).any(|b| record.id(b) == record.id(r)));
            if let Some(rank) = bad {
                let id = record.id(rank);
                bail!(
                    "--route: token {token}, layer {layer}, rank {rank}: expert {id} of {n_experts}, or a second time"
                );
            }
            // SAFETY: the node was just computed: row `row` of k adjacent ids lies there (checked to be i32).
            unsafe {
                let to = t.data.cast::<u8>().add(row * t.nb[1]).cast::<i32>();
                (0..k).for_each(|rank| to.add(rank).write(record.id(rank).into()));
            }
        }
        Ok(())
    }
}

/// The N of "ffn_moe_topk-N".
fn topk_of(t: &ggml_tensor) -> Option<u32> {
    // SAFETY: ggml ends a name with 0.
    let name = unsafe { CStr::from_ptr(t.name.as_ptr()) };
    name.to_str().ok()?.strip_prefix("ffn_moe_topk-")?.parse().ok()
}

/// The ggml_backend_sched_eval_callback; `user` is the Route.
///
/// # Safety
/// Called by ggml only, with a live node.
pub unsafe extern "C" fn eval(t: *mut ggml_tensor, ask: bool, user: *mut c_void) -> bool {
    // SAFETY: the engine that owns the Route is being decoded with, and touches it through this alone.
    let (route, node) = unsafe { (&mut *user.cast::<Route>(), &*t) };
    let block = topk_of(node);
    // SAFETY: the adapter lives as long as the context.
    let adapter = |route: &Route| unsafe { !route.adapter.is_null() && ffi::hotset_ggml_eval(t, ask, route.adapter) };
    if ask {
        route.wanted_by_adapter = adapter(route);
        return route.wanted_by_adapter || block.is_some();
    }
    if let Some(block) = block.filter(|_| route.error.is_none()) {
        if let Err(e) = route.write(node, block) {
            route.error = Some(e.to_string());
        }
    }
    if route.wanted_by_adapter { adapter(route) } else { true }
}
