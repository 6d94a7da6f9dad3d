//! `hotset pack`: a model's experts, each in one aligned piece.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use hotset::model::{Model, pack_write};
use serde_json::json;

use crate::output;

/// Pack a model's experts: each in one piece, from a 16 KiB border on, so that a miss is one aligned read
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  hotset pack model.gguf -o model.hotset                a run that was cut off is gone on with by the same command
  hotset pack model.gguf -o model.hotset --verify       afterwards, or of a finished pack: compare it with the model, byte for byte
  HOTSET_PACK=model.hotset your-program ...             or hotset_params.pack

The pack stands beside the model, which is still needed: its other weights, and batches that pass through, come from there. It holds checksums
and what tells the model that it was made from (lengths, headers, a sample of every expert tensor; times do not count), and is refused for any
other. While it is made it is called FILE.partial; under its own name it is whole. Whether reads are faster from it
depends on the drive: compare 'hotset io model.gguf' with 'hotset io model.gguf --pack model.hotset'.")]
pub struct Args {
    /// A GGUF file, or any shard of a split one
    model: PathBuf,
    /// The pack to make
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
    /// Compare every expert of the pack with the model, and with its checksum
    #[arg(long)]
    verify: bool,
    /// Print one JSON object of what was done
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let model = Model::open(&args.model)?;
    let bytes = pack_write::plan_bytes(&model)?;
    let was_there = args.out.exists();
    let begun = Instant::now();
    let made = with_bar(bytes, "packing", |step| pack_write::pack(&model, &args.out, step))?;
    let pack_s = begun.elapsed().as_secs_f64();
    let begun = Instant::now();
    let verified = match args.verify {
        true => Some(with_bar(bytes, "verifying", |step| pack_write::verify(&model, &args.out, step))?),
        false => None,
    };
    let verify_s = begun.elapsed().as_secs_f64();
    let experts_bytes = model.experts.total_bytes();
    if args.json {
        return output::print_json(&json!({
            "pack": args.out, "bytes": made.file_bytes, "experts": made.experts, "experts_bytes": experts_bytes,
            "padding_bytes": made.padding_bytes, "was_there": was_there, "kept_experts": made.kept_experts,
            "pack_seconds": pack_s, "verified_experts": verified, "verify_seconds": verified.map(|_| verify_s),
        }));
    }
    let state = match (was_there, made.kept_experts) {
        (true, _) => "it was there already".to_owned(),
        (_, 0) => format!("all written, {pack_s:.1} s"),
        (_, kept) => format!("{kept} of them were there already, {pack_s:.1} s"),
    };
    let padding = made.padding_bytes as f64 / experts_bytes.max(1) as f64 * 100.0;
    let mut facts = vec![
        ("pack", format!("{} ({})", args.out.display(), output::bytes(made.file_bytes))),
        ("experts", format!("{}, {} and {padding:.2} % of padding", made.experts, output::bytes(experts_bytes))),
        ("written", state),
    ];
    if let Some(n) = verified {
        facts.push(("verified", format!("{n} experts are the model's, {verify_s:.1} s")));
    }
    output::print(&output::facts(&facts))
}

/// Runs with a bar that shows after two seconds.
fn with_bar<T>(
    bytes: u64,
    what: &'static str,
    work: impl FnOnce(&mut dyn FnMut(u64)) -> hotset::Result<T>,
) -> Result<T> {
    let style = "{msg} {wide_bar} {decimal_bytes} of {decimal_total_bytes}, {decimal_bytes_per_sec}, {eta} left";
    let bar = output::late_bar(bytes, style);
    bar.set_message(what);
    let done = work(&mut |n| output::advance(&bar, n));
    bar.finish_and_clear();
    Ok(done?)
}
