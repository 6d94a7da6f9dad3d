//! The declarations of hotset.h and hotset_ggml.h, made by build.rs; ggml's own types come from llama-cpp-sys-2.

#![allow(non_camel_case_types, non_upper_case_globals, dead_code)]
// Names and comments in there are those of the headers.
#![allow(clippy::all, rustdoc::all)]

include!(concat!(env!("OUT_DIR"), "/hotset.rs"));
