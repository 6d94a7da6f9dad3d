//! The miss path alone against fio: experts of a model at random, fetched and waited for by the store, and fio's random reads of the
//! same size at the same depth from the same file, in turns, in one run.
//!
//! `cargo bench --bench store -- [--model FILE.gguf] [--pack FILE.hotset] [--rounds N] [--seconds S]`. Without a model it makes one
//! of the target's shape (1.49 GB in the target folder) and removes it afterwards. Medians and their ratio, for each number of lanes; whether
//! the bytes came from the drive is checked and said. Needs fio.

use std::path::{Path, PathBuf};

use hotset::drive::fio::{self, Fio};
use hotset::drive::{Drive, Way};
use hotset::model::tiny::{self, TinyParams};
use hotset::model::{Model, Pack, pack_write};
use hotset::store::{IoMode, LANES, ReadBy};

struct Args {
    model: Option<PathBuf>,
    pack: Option<PathBuf>,
    rounds: u64,
    seconds: f64,
}

fn args() -> Args {
    let mut args = Args { model: None, pack: None, rounds: 7, seconds: 2.0 };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().unwrap_or_else(|| panic!("{word} wants a value"));
        match word.as_str() {
            "--model" => args.model = Some(value().into()),
            "--pack" => args.pack = Some(value().into()),
            "--rounds" => args.rounds = value().parse().expect("a number of rounds"),
            "--seconds" => args.seconds = value().parse().expect("seconds"),
            _ => {} // cargo's own: --bench
        }
    }
    args
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// One arm: the files, the size that both sides read, and for each number of lanes the two medians.
fn arm(name: &str, drive: &Drive, files: Vec<PathBuf>, block_bytes: u64, args: &Args) {
    for depth in [1, 4, 8] {
        let way = Way { lanes: depth, chunk_bytes: 0, io: IoMode::Direct, by: ReadBy::Ring };
        let fio = Fio { files: files.clone(), block_bytes, depth, direct: true, seconds: args.seconds.ceil() as u32 };
        let (mut ours, mut theirs, mut from_drive) = (Vec::new(), Vec::new(), f64::INFINITY);
        for round in 0..args.rounds {
            let drive = Drive { seed: round, ..*drive };
            // in turns, and each goes first as often
            for ours_now in [round % 2 == 0, round % 2 != 0] {
                if ours_now {
                    let (m, io) = drive.rate(way, args.seconds).expect("reads");
                    assert_eq!(io.in_effect, IoMode::Direct, "{}", io.reason);
                    ours.push(m.gb_per_s());
                    from_drive = from_drive.min(m.from_drive().unwrap_or(f64::NAN));
                } else {
                    theirs.push(fio.bytes_per_s().expect("fio reads") / 1e9);
                }
            }
        }
        let (ours, theirs) = (median(&mut ours), median(&mut theirs));
        println!(
            "{name}, {block_bytes} bytes, {depth} in flight: store {ours:.3} GB/s, fio {theirs:.3} GB/s, {:.1} % (at least {:.0} % from the drive)",
            ours / theirs * 100.0,
            from_drive.min(1.0) * 100.0
        );
    }
    // misses alone: sizes of read and who reads, in turns
    let ways: Vec<Way> = [ReadBy::Ring, ReadBy::Threads]
        .into_iter()
        .flat_map(|by| {
            [0, 256 << 10, 128 << 10].map(|chunk_bytes| Way { lanes: LANES, chunk_bytes, io: IoMode::Direct, by })
        })
        .collect();
    for n in [1, 2] {
        let mut times = vec![Vec::new(); ways.len()];
        for round in 0..args.rounds as usize {
            for i in (0..ways.len()).map(|i| (i + round) % ways.len()) {
                let drive = Drive { seed: round as u64, ..*drive };
                times[i].push(drive_misses(&drive, ways[i], n, args.seconds / 4.0));
            }
        }
        for (way, times) in ways.iter().zip(&mut times) {
            let (by, chunk, ms) = (way.by.name(), way.chunk_bytes, median(times) * 1e3);
            println!("{name}, {n} misses alone, {LANES} in flight, by {by}, chunks of {chunk}: {ms:.3} ms");
        }
    }
}

fn drive_misses(drive: &Drive, way: Way, n: usize, seconds: f64) -> f64 {
    let (_, mut times) = drive.misses(way, n, seconds).expect("reads");
    median(&mut times)
}

fn main() {
    let args = args();
    let Some(version) = fio::version() else {
        println!("skipped: fio is not installed");
        return;
    };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bench-store");
    std::fs::create_dir_all(&folder).expect("a folder");
    let made = args.model.is_none();
    let path = args.model.clone().unwrap_or_else(|| {
        let path = folder.join("target-2l.gguf");
        tiny::write(&TinyParams::target_2l(), &path, &mut |_| ()).expect("a model");
        path
    });
    let model = Model::open(&path).expect("a model");
    let pack_path = args.pack.clone().unwrap_or_else(|| folder.join("bench.hotset"));
    pack_write::pack(&model, &pack_path, &mut |_| ()).expect("a pack");
    let pack = Pack::open(&pack_path, &model).expect("a pack");
    println!("{version}, {} rounds of {} s", args.rounds, args.seconds);

    let plain = Drive { model: &model, pack: None, seed: 0 };
    plain.forget().ok();
    let slice = model.experts.layers[0].tensors[0].slice_bytes;
    arm("plain", &plain, model.files.iter().map(|f| f.path.clone()).collect(), slice / 512 * 512, &args);
    let packed = Drive { model: &model, pack: Some(&pack), seed: 0 };
    packed.forget().ok();
    arm("packed", &packed, vec![pack_path.clone()], pack.layers[0].stride_bytes, &args);

    if made {
        std::fs::remove_file(&path).ok();
    }
    if args.pack.is_none() {
        std::fs::remove_file(&pack_path).ok();
    }
    std::fs::remove_dir(&folder).ok();
}
