//! The patched engine (vendor/llama.cpp/expert-rows.patch): its matmuls ask for an expert's rows before they use them, and the adapter
//! answers when they are there. Built with the feature `fork`, by vendor/llama.cpp/fork.sh; every other build has the stock engine.

use anyhow::Result;

/// Has the engine's matmuls ask the adapter, or nobody. For the whole process: before anything is computed.
#[cfg(feature = "fork")]
pub fn use_patch(on: bool) -> Result<()> {
    use std::ffi::c_void;

    use llama_cpp_sys_2::ggml_tensor;

    type ExpertRows = unsafe extern "C" fn(*const ggml_tensor, i64, bool) -> *const c_void;
    unsafe extern "C" {
        /// Of the patched ggml-cpu.h.
        fn ggml_cpu_set_expert_rows(callback: Option<ExpertRows>);
    }
    // SAFETY: nothing is being computed; the adapter's function is there as long as the program.
    unsafe { ggml_cpu_set_expert_rows(on.then_some(crate::ffi::hotset_ggml_rows as ExpertRows)) };
    Ok(())
}

#[cfg(not(feature = "fork"))]
pub fn use_patch(on: bool) -> Result<()> {
    if on {
        anyhow::bail!("--fork: this build has the stock engine; vendor/llama.cpp/fork.sh builds the patched one");
    }
    Ok(())
}
