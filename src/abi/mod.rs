//! extern "C": what include/hotset.h declares, and nothing else. The only room that knows C.
//!
//! Pointers, sizes and enum values are checked here and become the hook's types (`params`, `rows`); errors become status
//! codes with their detail kept in the handle (`handle`, `status`); a panic becomes `HOTSET_E_INTERNAL` (`guard`). One file per group of calls:
//! `open`, `layer`, `settings`. Types are the ones that bindgen makes of the header, and at the end of this file each exported
//! function is compared with its declaration there, so that header and code cannot drift apart.

// C names are the header's.
#![allow(non_camel_case_types)]

#[allow(non_upper_case_globals, dead_code, clippy::all, missing_docs)]
#[rustfmt::skip]
pub mod bindings;
mod guard;
mod handle;
mod layer;
mod open;
mod params;
pub use params::parse_bytes;
mod rows;
mod settings;
mod status;

/// Compiles only if both have the same type.
macro_rules! same_type {
    ($($module:ident::$name:ident),+ $(,)?) => {
        const _: () = {
            $( let _ = [bindings::$name, $module::$name]; )+
        };
    };
}

same_type! {
    status::hotset_abi_version,
    status::hotset_version,
    status::hotset_strerror,
    status::hotset_last_error,
    status::hotset_copy_last_error,
    params::hotset_params_default,
    params::hotset_params_from_env,
    params::hotset_batch_default,
    open::hotset_open,
    open::hotset_close,
    open::hotset_plan,
    open::hotset_shape,
    open::hotset_blocks,
    open::hotset_banks,
    layer::hotset_select,
    layer::hotset_admit,
    layer::hotset_wait,
    layer::hotset_ready,
    layer::hotset_read_ahead,
    layer::hotset_layer,
    settings::hotset_set_drop,
    settings::hotset_set_moce,
    settings::hotset_set_cache_bytes,
    settings::hotset_set_slots,
    settings::hotset_set_schedule,
    settings::hotset_reset,
    settings::hotset_stats,
    settings::hotset_layer_stats,
    settings::hotset_trace_flush,
}
