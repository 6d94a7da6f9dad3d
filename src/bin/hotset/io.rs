//! `hotset io`: what the drive gives at a model's sizes of read, and how to read from it.

use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;
use hotset::drive::fio::{self, Fio};
use hotset::drive::sweep::{Advice, Miss, Plan, Rate, Sweep};
use hotset::drive::{Drive, Measured};
use hotset::model::{Model, Pack};
use hotset::store::{IoMode, IoReport, ReadBy};
use hotset::{Error, ErrorKind};
use serde_json::{Value, json};

use crate::output;

/// Measure what the drive gives at this model's sizes of read, and say how many lanes and what chunks to use
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  hotset io model.gguf                              about 10 seconds: 1 to 32 reads in flight, whole slices and parts of them
  hotset io model.gguf --pack model.hotset          the same reads from the pack
  hotset io model.gguf --depths 1,4,8 --chunks 0,128K,512K --json

Experts are read at random into slots, by the code that reads them in a decode. 'whole' reads a slice (packed: an expert) in one call, the other
columns cut it. 'one miss' and 'two misses' are the time from asking to having, with nothing else in flight: what a layer of a decode waits for.

Nothing is taken for the drive that is not: what the system counts as read from it is compared with what was read, and what is cached is
thrown out before buffered reads. A cache below the system (a hypervisor's, the drive's own) is out of its sight. The model is only read.")]
pub struct Args {
    /// A GGUF file, or any shard of a split one
    model: PathBuf,
    /// Packed experts of this model, to be read instead of its own file
    #[arg(long, value_name = "FILE")]
    pack: Option<PathBuf>,
    /// Reads in flight, comma-separated, 1 to 64
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32])]
    depths: Vec<usize>,
    /// Sizes of read, comma-separated: 0 = whole, else at least 64K (K and M: powers of 1024)
    #[arg(long, value_name = "BYTES,..", value_delimiter = ',', default_value = "0,128K,256K", value_parser = output::parse_bytes)]
    chunks: Vec<u64>,
    /// How: past the page cache, through it, or one after the other
    #[arg(long, value_enum, default_value = "direct")]
    mode: Mode,
    /// Who makes the reads: one thread with an io_uring, where the system permits it, or a thread for each
    #[arg(long, value_enum, default_value = "io_uring")]
    read_by: By,
    /// Time for all measurements together, fio's apart
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    seconds: f64,
    /// Do not ask fio, even if it is installed
    #[arg(long)]
    no_fio: bool,
    /// Seed of the order in which experts are read
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Mode {
    Direct,
    Buffered,
    Both,
}

#[derive(Clone, Copy, ValueEnum)]
enum By {
    #[value(name = "io_uring")]
    Ring,
    Threads,
}

impl From<By> for ReadBy {
    fn from(by: By) -> ReadBy {
        match by {
            By::Ring => ReadBy::Ring,
            By::Threads => ReadBy::Threads,
        }
    }
}

/// fio's figure beside ours, for the advised way.
struct Beside {
    version: String,
    block_bytes: u64,
    ours_gb_per_s: f64,
    fio_gb_per_s: Result<f64, String>,
}

pub fn run(args: &Args) -> Result<()> {
    args.check()?;
    let model = Model::open(&args.model)?;
    let pack = args.pack.as_ref().map(|path| Pack::open(path, &model)).transpose()?;
    let drive = Drive { model: &model, pack: pack.as_ref(), seed: args.seed };
    // what was just written is not on the drive yet; that this may fail is no matter where reads are direct
    drive.forget().ok();
    let sweep = measure(&args.plan(), &drive)?;
    let advice = sweep.advice();
    let beside = if args.no_fio { None } else { advice.and_then(|a| beside(&drive, &sweep, a)) };
    if args.json {
        output::print_json(&to_json(args, &sweep, advice, beside.as_ref()))
    } else {
        output::print(&text(args, &sweep, advice, beside.as_ref()))
    }
}

/// Measures, with a bar.
pub fn measure(plan: &Plan, drive: &Drive) -> Result<Sweep> {
    let bar = output::late_bar(plan.n_measurements() as u64, "{wide_bar} {pos} of {len} measurements, {eta} left");
    let sweep = plan.run(drive, &mut |done| output::advance(&bar, done as u64));
    bar.finish_and_clear();
    Ok(sweep?)
}

impl Args {
    fn check(&self) -> Result<()> {
        let depth = |d: &usize| (1..=64).contains(d);
        if self.depths.is_empty() || !self.depths.iter().all(depth) || self.chunks.is_empty() {
            let what = format!(
                "--depths are 1 to 64 and --chunks at least one: {:?} and {:?} given",
                self.depths, self.chunks
            );
            return Err(Error::new(ErrorKind::Argument, what).into());
        }
        if !(self.seconds > 0.0 && self.seconds <= 3600.0) {
            let what = format!("--seconds {}: above 0, at most 3600", self.seconds);
            return Err(Error::new(ErrorKind::Argument, what).into());
        }
        Ok(())
    }

    fn plan(&self) -> Plan {
        let mut depths = self.depths.clone();
        depths.sort_unstable();
        depths.dedup();
        let modes = match self.mode {
            Mode::Direct => vec![IoMode::Direct],
            Mode::Buffered => vec![IoMode::Buffered],
            Mode::Both => vec![IoMode::Direct, IoMode::Buffered],
        };
        let mut plan = Plan { depths, chunks: self.chunks.clone(), modes, by: self.read_by.into(), seconds: 0.0 };
        plan.seconds = self.seconds / plan.n_measurements() as f64;
        plan
    }
}

/// fio at the advised depth and size.
fn beside(drive: &Drive, sweep: &Sweep, advice: Advice) -> Option<Beside> {
    let version = fio::version()?;
    let (files, whole) = match drive.pack {
        Some(p) => (vec![p.path.clone()], p.layers.first()?.stride_bytes),
        None => {
            let slice = drive.model.experts.layers.first()?.tensors.iter().map(|t| t.slice_bytes).max()?;
            (drive.model.files.iter().map(|f| f.path.clone()).collect(), slice)
        }
    };
    // the size that a run of this length is really cut into
    let block = if advice.chunk_bytes == 0 { whole } else { whole.div_ceil(whole.div_ceil(advice.chunk_bytes)) };
    let block_bytes = (block / sweep.io.offset_align as u64).max(1) * sweep.io.offset_align as u64;
    let direct = sweep.io.in_effect == IoMode::Direct;
    let fio = Fio { files, block_bytes, depth: advice.lanes, direct, seconds: 2 };
    let rate = fio.bytes_per_s().map(|b| b / 1e9).map_err(|e| e.detail);
    Some(Beside { version, block_bytes, ours_gb_per_s: advice.gb_per_s, fio_gb_per_s: rate })
}

fn chunk_name(chunk_bytes: u64) -> String {
    match chunk_bytes {
        0 => "whole".to_owned(),
        n if n % (1 << 20) == 0 => format!("{}M", n >> 20),
        n if n % 1024 == 0 => format!("{}K", n >> 10),
        n => n.to_string(),
    }
}

/// How the files can be read, in words.
pub fn alignment(io: &IoReport) -> String {
    let how = match io.in_effect {
        IoMode::Direct => format!(
            "direct, blocks of {} bytes at addresses of multiples of {}; {:.1} % of all expert bytes straight into slots, the rest by one copy",
            io.offset_align,
            io.mem_align,
            io.straight_share() * 100.0
        ),
        IoMode::Buffered if io.reason.is_empty() => "buffered".to_owned(),
        IoMode::Buffered => format!("buffered, since {}", io.reason),
    };
    let why = if io.by_reason.is_empty() { String::new() } else { format!(" ({})", io.by_reason) };
    format!("{how}; by {}{why}", io.by.name())
}

/// What the system's own counter says about where bytes came from.
fn origin(m: &Measured) -> String {
    match m.from_drive() {
        None => "not known".to_owned(),
        Some(share) => format!("{:.0} %", (share * 100.0).min(999.0)),
    }
}

fn text(args: &Args, sweep: &Sweep, advice: Option<Advice>, beside: Option<&Beside>) -> String {
    let file = args.pack.as_ref().unwrap_or(&args.model).display();
    let mut text = format!("{file}: {}\n", alignment(&sweep.io));
    for mode in [IoMode::Direct, IoMode::Buffered] {
        let rates: Vec<&Rate> = sweep.rates.iter().filter(|r| r.way.io == mode).collect();
        let mut depths: Vec<usize> = rates.iter().map(|r| r.way.lanes).collect();
        depths.dedup();
        if depths.is_empty() {
            continue;
        }
        let names: Vec<String> = args.chunks.iter().map(|c| format!("{} GB/s", chunk_name(*c))).collect();
        let mut heading = vec!["in flight"];
        heading.extend(names.iter().map(String::as_str));
        heading.push("from the drive");
        let rows: Vec<Vec<String>> = depths
            .iter()
            .map(|&d| {
                let mine = rates.iter().filter(|r| r.way.lanes == d);
                let mut row = vec![d.to_string()];
                row.extend(mine.clone().map(|r| format!("{:.2}", r.measured.gb_per_s())));
                let least = mine.min_by(|a, b| {
                    a.measured.from_drive().unwrap_or(0.0).total_cmp(&b.measured.from_drive().unwrap_or(0.0))
                });
                row.push(least.map_or_else(String::new, |r| origin(&r.measured)));
                row
            })
            .collect();
        text += &format!("\n{}, all lanes busy\n{}", mode.name(), output::table(&heading, &rows));
        if let Some(Err(why)) = rates.iter().find_map(|r| r.forgotten.as_ref().filter(|f| f.is_err())) {
            text += &format!("not sure: {why}\n");
        }
    }
    let lanes = sweep.misses.first().map_or(0, |m| m.way.lanes);
    let rows: Vec<Vec<String>> = sweep.misses.iter().map(miss_row).collect();
    text += &format!(
        "\nmisses alone, {lanes} lanes\n{}",
        output::table(&["reads of", "misses", "median", "GB/s", "from the drive"], &rows)
    );
    if let Some(b) = beside {
        let ours = b.ours_gb_per_s;
        text += &match &b.fio_gb_per_s {
            Ok(fio) => format!(
                "\nfio ({}), the same file, {} bytes, {} in flight: {fio:.2} GB/s; here {ours:.2}, {:.0} %\n",
                b.version,
                b.block_bytes,
                advice.map_or(0, |a| a.lanes),
                ours / fio * 100.0
            ),
            Err(why) => format!("\nfio ({}): {why}\n", b.version),
        };
    }
    if sweep.doubtful() {
        text += "\nNOT SURE that this is the drive: less came from it than was read (see the columns), or the system does not say\n";
    }
    if below_us() {
        text += "\nthis is a virtual machine: a cache of its host would not show here\n";
    }
    if let Some(a) = advice {
        text += &format!(
            "\nuse  HOTSET_LANES={} HOTSET_CHUNK={}  ({:.2} GB/s with all lanes busy, {:.2} GB/s for one miss alone)\n",
            a.lanes, a.chunk_bytes, a.gb_per_s, a.one_miss_gb_per_s
        );
    }
    text
}

fn miss_row(m: &Miss) -> Vec<String> {
    let ms = format!("{:.3} ms", m.median_s * 1e3);
    vec![
        chunk_name(m.way.chunk_bytes),
        m.n.to_string(),
        ms,
        format!("{:.2}", m.measured.gb_per_s()),
        origin(&m.measured),
    ]
}

/// A hypervisor, as the processor says (x86-64 Linux).
fn below_us() -> bool {
    let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    flags.lines().find(|l| l.starts_with("flags")).is_some_and(|l| l.split_whitespace().any(|f| f == "hypervisor"))
}

fn measured_json(m: &Measured) -> Value {
    json!({
        "gb_per_s": m.gb_per_s(), "bytes": m.bytes, "seconds": m.seconds, "experts": m.experts, "reads": m.reads,
        "asked_bytes": m.asked_bytes, "disk_bytes": m.disk_bytes, "from_drive": m.from_drive(), "doubtful": m.doubtful(),
    })
}

fn to_json(args: &Args, sweep: &Sweep, advice: Option<Advice>, beside: Option<&Beside>) -> Value {
    let io = &sweep.io;
    let with = |mut value: Value, m: &Measured| {
        value
            .as_object_mut()
            .into_iter()
            .for_each(|v| v.extend(measured_json(m).as_object().cloned().unwrap_or_default()));
        value
    };
    let rates = sweep.rates.iter().map(|r| {
        let forgotten = r.forgotten.as_ref().map(|f| f.is_ok());
        let way = json!({ "in_flight": r.way.lanes, "chunk_bytes": r.way.chunk_bytes, "io": r.way.io.name(), "cache_dropped": forgotten });
        with(way, &r.measured)
    });
    let misses = sweep.misses.iter().map(|m| {
        let way = json!({ "misses": m.n, "lanes": m.way.lanes, "chunk_bytes": m.way.chunk_bytes, "median_ms": m.median_s * 1e3 });
        with(way, &m.measured)
    });
    json!({
        "model": args.model,
        "pack": args.pack,
        "io": io.in_effect.name(),
        "io_reason": io.reason,
        "read_by": io.by.name(),
        "read_by_reason": io.by_reason,
        "mem_align": io.mem_align,
        "offset_align": io.offset_align,
        "straight_bytes": io.straight_bytes,
        "bounced_bytes": io.bounced_bytes,
        "rates": rates.collect::<Vec<_>>(),
        "misses": misses.collect::<Vec<_>>(),
        "fio": beside.map(|b| json!({
            "version": b.version, "block_bytes": b.block_bytes, "gb_per_s": b.fio_gb_per_s.as_ref().ok(),
            "error": b.fio_gb_per_s.as_ref().err(),
            "ours_to_fio": b.fio_gb_per_s.as_ref().ok().map(|fio| b.ours_gb_per_s / fio),
        })),
        "doubtful": sweep.doubtful(),
        "virtual_machine": below_us(),
        "advice": advice.map(|a| json!({
            "lanes": a.lanes, "chunk_bytes": a.chunk_bytes, "gb_per_s": a.gb_per_s, "one_miss_gb_per_s": a.one_miss_gb_per_s,
        })),
    })
}
