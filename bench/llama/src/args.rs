//! The flags that every subcommand shares: what to load, and how hotset is to treat its experts.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::ffi;

#[derive(Args, Clone)]
pub struct Load {
    /// The model, a GGUF file (of a split one, the first shard)
    #[arg(short, long, value_name = "GGUF")]
    pub model: PathBuf,
    /// Threads that compute; more than there are idle cores is many times slower
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=512))]
    pub threads: u16,
    /// Length of the context in tokens [default: what the model was trained with, at most 4096]
    #[arg(long, value_parser = clap::value_parser!(u32).range(2..))]
    pub ctx: Option<u32>,
    /// Tokens that the engine computes at once in a batch
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    pub ubatch: u32,
    /// Run the experts that this Q4RT trace says, token by token, whatever the router chose (from its start again where it ends)
    #[arg(long, value_name = "TRACE")]
    pub route: Option<PathBuf>,
    /// llama.cpp's own log, and hotset's informational lines, on stderr
    #[arg(short, long)]
    pub verbose: bool,
    /// Print exactly one JSON object instead
    #[arg(long)]
    pub json: bool,
}

/// Unset flags leave what the environment (HOTSET_SLOTS, HOTSET_LAMBDA, ...) or the library's default says.
#[derive(Args, Clone, Default)]
#[command(next_help_heading = "Experts")]
pub struct HookArgs {
    /// The engine alone: mapped file, no callback, none of the flags below
    #[arg(long, conflicts_with_all = ["slots", "cache_bytes", "policy", "lambda", "top_j", "delta", "drop", "renormalise", "trace", "metrics",
        "schedule", "lanes", "read_ahead", "pack", "chunk_bytes", "io", "read_by", "backing", "dense", "prefill", "top_m", "wait", "fork", "poison"])]
    pub no_hook: bool,
    /// Slots per layer
    #[arg(long)]
    pub slots: Option<u32>,
    /// Memory for slots and read staging; K, M and G are powers of 1024
    #[arg(long, conflicts_with = "slots", value_parser = parse_size)]
    pub cache_bytes: Option<u64>,
    /// Which resident expert goes when room is needed
    #[arg(long)]
    pub policy: Option<Policy>,
    /// Reranking (MoCE): the bonus of resident experts as a share of delta; 0 is off
    #[arg(long, allow_negative_numbers = true)]
    pub lambda: Option<f64>,
    /// Reranking: so many of the router's first experts get the bonus too
    #[arg(long)]
    pub top_j: Option<u32>,
    /// Reranking: what the bonus is a share of
    #[arg(long)]
    pub delta: Option<Delta>,
    /// Cold drop: a miss that weighs less than F x (sum of weights / k) does not run; 0 is off
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    pub drop: Option<f64>,
    /// After a drop, scale the weights that are left
    #[arg(long)]
    pub renormalise: Option<Renormalise>,
    /// Record the routing to this Q4RT file (and FILE.json)
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Write a metrics log, a line a pass (.jsonl, or .csv)
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
    /// Run this experiment: a plan file, as `hotset ab plan` writes it
    #[arg(long, value_name = "PLAN")]
    pub schedule: Option<PathBuf>,
    /// Reads in flight
    #[arg(long)]
    pub lanes: Option<u32>,
    /// Slots per layer to read ahead into, beside the cache's: the next layer's experts are guessed with its router
    #[arg(long)]
    pub read_ahead: Option<u32>,
    /// Packed experts (hotset pack), read instead of the model's own file
    #[arg(long, value_name = "FILE")]
    pub pack: Option<PathBuf>,
    /// Experts are read in parts of at most so many bytes (K, M, G), by several lanes at once; 0: whole slices
    #[arg(long, value_parser = parse_size)]
    pub chunk_bytes: Option<u64>,
    /// How experts are read
    #[arg(long)]
    pub io: Option<Io>,
    /// Who makes the reads: one thread with an io_uring, where the system permits it, or a thread a lane
    #[arg(long)]
    pub read_by: Option<ReadBy>,
    /// Where experts are kept
    #[arg(long)]
    pub backing: Option<Backing>,
    /// What happens to the weights that every token uses
    #[arg(long)]
    pub dense: Option<Dense>,
    /// What prefill passes take part in
    #[arg(long, value_delimiter = ',')]
    pub prefill: Option<Vec<Prefill>>,
    /// Candidates that are recorded, and reranked from, per token and layer
    #[arg(long)]
    pub top_m: Option<u32>,
    /// Let the engine wait for each expert inside of its matmuls (a build with the patched engine: vendor/llama.cpp/fork.sh)
    #[arg(long)]
    pub fork: bool,
    /// When an expert's bytes are waited for: each inside of its matmul with --fork, gate, up and down each before its own, or
    /// the whole layer
    #[arg(long)]
    pub wait: Option<Wait>,
    /// Fill every byte of every slot with 0xFF first (a test aid: a byte that is used unwritten becomes a NaN)
    #[arg(long)]
    pub poison: bool,
}

/// An enum of the command line whose members stand for numbers of hotset.h.
macro_rules! choice {
    ($name:ident { $($member:ident = $text:literal => $value:expr),+ $(,)? }) => {
        #[derive(ValueEnum, Clone, Copy, PartialEq, Debug)]
        pub enum $name { $(#[value(name = $text)] $member),+ }
        impl $name {
            pub fn number(self) -> i32 {
                match self { $($name::$member => $value as i32),+ }
            }
            pub fn text_of(number: i32) -> &'static str {
                $(if number == $value as i32 { return $text; })+
                "unknown"
            }
        }
    };
}

choice!(Policy {
    Lru = "lru" => ffi::HOTSET_POLICY_LRU,
    Lfu = "lfu" => ffi::HOTSET_POLICY_LFU,
    Ema = "ema" => ffi::HOTSET_POLICY_EMA,
    NearPickEma = "near_pick_ema" => ffi::HOTSET_POLICY_NEAR_PICK_EMA,
    InverseRouterEma = "inverse_router_ema" => ffi::HOTSET_POLICY_INVERSE_ROUTER_EMA,
});
choice!(Delta {
    TokenTopk = "token_topk" => ffi::HOTSET_DELTA_TOKEN_TOPK,
    TokenFull = "token_full" => ffi::HOTSET_DELTA_TOKEN_FULL,
    RunningFull = "running_full" => ffi::HOTSET_DELTA_RUNNING_FULL,
});
choice!(Renormalise {
    Auto = "auto" => ffi::HOTSET_RENORMALISE_AUTO,
    On = "on" => ffi::HOTSET_RENORMALISE_ON,
    Off = "off" => ffi::HOTSET_RENORMALISE_OFF,
});
choice!(Io {
    Direct = "direct" => ffi::HOTSET_IO_DIRECT,
    Buffered = "buffered" => ffi::HOTSET_IO_BUFFERED,
});
choice!(ReadBy {
    Ring = "io_uring" => ffi::HOTSET_READ_BY_RING,
    Threads = "threads" => ffi::HOTSET_READ_BY_THREADS,
});
choice!(Backing {
    Slots = "slots" => ffi::HOTSET_BACKING_SLOTS,
    PageCache = "page-cache" => ffi::HOTSET_BACKING_PAGE_CACHE,
});
choice!(Dense {
    Lock = "lock" => ffi::HOTSET_DENSE_LOCK,
    Warm = "warm" => ffi::HOTSET_DENSE_WARM,
    Leave = "leave" => ffi::HOTSET_DENSE_LEAVE,
});
choice!(Wait {
    Latest = "latest" => ffi::HOTSET_GGML_WAIT_LATEST,
    Projection = "projection" => ffi::HOTSET_GGML_WAIT_PROJECTION,
    Layer = "layer" => ffi::HOTSET_GGML_WAIT_LAYER,
});
choice!(Prefill {
    Record = "record" => ffi::HOTSET_PREFILL_RECORD,
    Moce = "moce" => ffi::HOTSET_PREFILL_MOCE,
    Drop = "drop" => ffi::HOTSET_PREFILL_DROP,
});

impl Prefill {
    pub fn texts(bits: u32) -> Vec<&'static str> {
        let all = [Prefill::Record, Prefill::Moce, Prefill::Drop];
        all.iter().filter(|p| bits & p.number() as u32 != 0).map(|p| Prefill::text_of(p.number())).collect()
    }
}

/// "7.5G", "512M", "1000".
pub fn parse_size(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'k' | b'K') => (&text[..text.len() - 1], 10),
        Some(b'm' | b'M') => (&text[..text.len() - 1], 20),
        Some(b'g' | b'G') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    if let Ok(whole) = digits.parse::<u64>() {
        return whole.checked_mul(1 << shift).ok_or(format!("{text} is more than 64 bits hold"));
    }
    match digits.parse::<f64>() {
        Ok(number) if shift > 0 && (0.0..1e9).contains(&number) => Ok((number * (1u64 << shift) as f64) as u64),
        _ => Err(format!("\"{text}\" is no size: a number of bytes, or a number with K, M or G")),
    }
}

#[cfg(test)]
mod tests {
    use super::{Io, Prefill, parse_size};

    #[test]
    fn sizes() {
        assert_eq!(parse_size("1000"), Ok(1000));
        assert_eq!(parse_size("2k"), Ok(2048));
        assert_eq!(parse_size("1.5M"), Ok(1_572_864));
        assert_eq!(parse_size("1G"), Ok(1 << 30));
        for bad in ["", "G", "1.5", "-1", "-1G", "x", "NaNG", "99999999999999999G"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn numbers_and_names_agree() {
        assert_eq!(Io::text_of(Io::Buffered.number()), "buffered");
        assert_eq!(Io::text_of(77), "unknown");
        assert_eq!(Prefill::texts(5), ["record", "drop"]);
    }
}
