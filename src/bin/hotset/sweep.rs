//! `hotset sweep`: replays the cross product of settings over traces, a row a setting; goes on where it was interrupted, in shards
//! if asked, and checks what came out.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use hotset::replay::sweep::{self, Axes, check, row, table};
use hotset::replay::{Column, KeepMap, LayerResult, Ranges, Replay, Settings};
use hotset::trace::Trace;
use indicatif::{ProgressBar, ProgressStyle};
use rayon::prelude::*;

use crate::output;
use crate::replay::{Cost, DeltaName, k_of, policies};

/// Replay traces under the cross product of policies, capacities, lambdas, protected ranks and keep maps
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  hotset sweep run.q4rt -o sweep.csv                       27 settings: six policies, three of them with lambda and J
  hotset sweep run.q4rt -o sweep.csv --keep-map l2_K224.json,l2_K256.json --brief-keep-map hybrid_K224.json
  hotset sweep a.q4rt b.q4rt -o sweep.jsonl --cache-caps 64,113,160 --policies lru,belady_min
  hotset sweep run.q4rt -o part2.csv --shard 2/4           a quarter of the rows
  hotset sweep --merge part1.csv part2.csv part3.csv part4.csv -o sweep.csv

Rows are in a fixed order, whatever the number of threads (RAYON_NUM_THREADS; all cores by default). The same command again goes
on with a table that was cut off. What was checked is printed at the end; a failed check is exit code 1.")]
pub struct Args {
    /// Q4RT traces; with --merge the tables of the shards
    #[arg(required = true)]
    inputs: Vec<PathBuf>,
    /// The table: .csv, .jsonl, or with the feature parquet .parquet
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
    /// Put the tables of shards together
    #[arg(long)]
    merge: bool,
    /// Only this part of the rows: 1/N to N/N
    #[arg(long, value_name = "I/N", conflicts_with = "merge")]
    shard: Option<String>,
    /// Comma-separated
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "NAMES",
        default_value = "lru,lfu,ema,near_pick_ema,inverse_router_ema,belady_min"
    )]
    policies: Vec<String>,
    /// Those that are replayed with every lambda and J
    #[arg(long, value_delimiter = ',', value_name = "NAMES", default_value = "lru,near_pick_ema,inverse_router_ema")]
    reranked: Vec<String>,
    /// Slots of each layer
    #[arg(long, value_delimiter = ',', value_name = "N", default_value = "113")]
    cache_caps: Vec<usize>,
    #[arg(long, value_delimiter = ',', value_name = "LAMBDA", default_value = "0,0.05,0.09,0.12")]
    lambdas: Vec<f64>,
    #[arg(long, value_delimiter = ',', value_name = "J", default_value = "2,3")]
    top_js: Vec<u32>,
    /// Variants beside the whole model, with all policies
    #[arg(long, value_delimiter = ',', value_name = "FILES")]
    keep_map: Vec<PathBuf>,
    /// Variants with lru and near_pick_ema alone, without reranking
    #[arg(long, value_delimiter = ',', value_name = "FILES")]
    brief_keep_map: Vec<PathBuf>,
    /// Leave out the whole model
    #[arg(long)]
    pruned_only: bool,
    /// Experts that a token uses in a layer [default: the sidecar's, or 10]
    #[arg(long, value_name = "K")]
    k_used: Option<usize>,
    #[arg(long, value_enum, default_value = "token_topk")]
    delta: DeltaName,
    #[arg(long, value_name = "DECAY", default_value_t = 0.99)]
    ema_decay: f64,
    #[arg(long, value_name = "N", default_value_t = 48)]
    near_pick_n: usize,
    #[arg(long, value_name = "N", default_value_t = 64)]
    warmup: usize,
    #[command(flatten)]
    cost: Cost,
}

/// A trace with its name and what lies beside it.
struct Input {
    name: String,
    trace: Trace,
    ranges: Option<Ranges>,
    k: usize,
    keep: Vec<KeepMap>,
}

/// Rows that share a trace and a keep map.
struct Group {
    input: usize,
    /// Of the input's keep maps.
    keep: Option<usize>,
    variant: String,
    points: Vec<Settings>,
    /// Number of the first row.
    first: usize,
}

pub fn run(args: &Args) -> Result<()> {
    let format = table::format_of(&args.out)?;
    if args.merge {
        let shards = args.inputs.iter().map(|path| {
            if table::format_of(path)? != format {
                bail!("{}: another format than {}", path.display(), args.out.display());
            }
            Ok((path.as_path(), table::whole_lines(path)?))
        });
        let shards: Vec<(&Path, String)> = shards.collect::<Result<_>>()?;
        let merged = table::merge(&shards, format)?;
        table::write(&args.out, &merged)?;
        return report(&args.out);
    }
    let estimate = args.cost.estimate()?;
    let inputs = args.inputs.iter().map(|path| args.input(path)).collect::<Result<Vec<_>>>()?;
    let groups = args.groups(&inputs)?;
    let of = groups.iter().map(|g| g.points.len()).sum();
    let mine = args.rows(of)?;
    let keys: Vec<row::Cells> = groups
        .iter()
        .flat_map(|g| {
            let (input, replay) = (&inputs[g.input], g.replay(&inputs));
            let (n_layers, n_experts, n_tokens) = (replay.n_layers(), replay.n_experts(), replay.n_tokens());
            g.points.iter().enumerate().map(move |(i, s)| {
                let (trace, variant) = (input.name.as_str(), g.variant.as_str());
                let setting = g.first + i;
                row::key(&row::Place { setting, of, trace, variant, n_layers, n_experts, n_tokens }, s)
            })
        })
        .collect();
    let heading = row::heading(&keys[0], &row::values(&[], &estimate), format);
    let rows = if table::is_parquet(&args.out) { beside(&args.out, ".partial.csv") } else { args.out.clone() };
    let done = mine.start + prepare(&args.out, &rows, heading.as_deref(), &keys[mine.clone()], format)?;
    if done > mine.start {
        eprintln!("hotset: {} of {} rows are there already", done - mine.start, mine.len());
    }
    let mut file = OpenOptions::new().append(true).open(&rows).with_context(|| rows.display().to_string())?;
    let bar = progress_bar(&groups, &inputs, done..mine.end);
    for group in &groups {
        let todo = group.first.max(done)..(group.first + group.points.len()).min(mine.end);
        if todo.is_empty() {
            continue;
        }
        let points = &group.points[todo.start - group.first..todo.end - group.first];
        let by_point = replay(&group.replay(&inputs), points, &bar)?;
        let mut lines = String::new();
        for (at, layers) in todo.zip(&by_point) {
            lines += &row::line(&keys[at], &row::values(layers, &estimate), format);
            lines.push('\n');
        }
        file.write_all(lines.as_bytes()).with_context(|| rows.display().to_string())?;
    }
    bar.finish_and_clear();
    if rows != args.out {
        table::write(&args.out, &table::whole_lines(&rows)?)?;
        std::fs::remove_file(&rows).with_context(|| rows.display().to_string())?;
    }
    report(&args.out)
}

/// All layers of a trace, over the cores: by point, then by layer.
pub(crate) fn replay(replay: &Replay, points: &[Settings], bar: &ProgressBar) -> Result<Vec<Vec<LayerResult>>> {
    let (distinct, which) = sweep::distinct(points);
    let layers = (0..replay.n_layers()).into_par_iter().map_init(Column::default, |column, layer| {
        let results = replay.layer(layer, &distinct, column);
        bar.inc(points.len() as u64);
        results
    });
    let by_layer: Vec<Vec<LayerResult>> = layers.collect::<hotset::Result<_>>()?;
    Ok(which.into_iter().map(|i| by_layer.iter().map(|layer| layer[i]).collect()).collect())
}

/// The file that rows are added to, with its heading, and how many of these rows are in it. What was cut off within a row is cut away.
/// `rows` is `out` itself, or lies beside it until the table is whole.
fn prepare(out: &Path, rows: &Path, heading: Option<&str>, keys: &[row::Cells], format: row::Format) -> Result<usize> {
    let (mut text, mut from) = (String::new(), rows);
    for path in if rows == out { vec![out] } else { vec![rows, out] } {
        let found = if path.exists() { table::whole_lines(path)? } else { String::new() };
        if !found.is_empty() && !begins(&found, heading, keys, format) {
            bail!("{}: holds another sweep; move it away, or choose another name", path.display());
        }
        if found.len() > text.len() {
            (text, from) = (found, path);
        }
    }
    let name = || rows.display().to_string();
    if text.is_empty() {
        let heading = heading.map_or_else(String::new, |h| format!("{h}\n"));
        std::fs::write(rows, heading).with_context(name)?;
        return Ok(0);
    }
    if from == rows {
        let file = OpenOptions::new().write(true).open(rows).with_context(name)?;
        file.set_len(text.len() as u64).with_context(name)?;
    } else {
        std::fs::write(rows, &text).with_context(name)?;
    }
    Ok(text.lines().count() - usize::from(heading.is_some()))
}

/// Whether this is the beginning of the table with these rows.
fn begins(text: &str, heading: Option<&str>, keys: &[row::Cells], format: row::Format) -> bool {
    let mut lines = text.lines();
    let same = heading.is_none_or(|h| lines.next() == Some(h));
    let lines: Vec<&str> = lines.collect();
    let key = |key| row::line(key, &Vec::new(), format);
    same && lines.len() <= keys.len() && lines.iter().zip(keys).all(|(line, k)| line.starts_with(&key(k)))
}

/// The name with more behind it.
fn beside(path: &Path, more: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(more);
    name.into()
}

impl Args {
    fn input(&self, path: &Path) -> Result<Input> {
        let trace = Trace::open(path)?;
        let keep = self.keep_map.iter().chain(&self.brief_keep_map);
        Ok(Input {
            name: stem(path),
            ranges: Ranges::beside(path, &trace)?,
            k: k_of(self.k_used, path)?,
            keep: keep.map(|map| KeepMap::open(map, &trace)).collect::<hotset::Result<_>>()?,
            trace,
        })
    }

    /// Every variant of every trace, all of which have been checked.
    fn groups(&self, inputs: &[Input]) -> Result<Vec<Group>> {
        let axes = Axes {
            policies: policies(&self.policies)?,
            reranked: policies(&self.reranked)?,
            capacities: self.cache_caps.clone(),
            lambdas: self.lambdas.clone(),
            top_js: self.top_js.clone(),
            delta: self.delta.delta(),
            ..Axes::default()
        };
        let mut groups = Vec::new();
        let mut first = 0;
        for (i, input) in inputs.iter().enumerate() {
            let base = Settings {
                k: input.k,
                decay: self.ema_decay,
                near_pick_n: self.near_pick_n,
                warmup: self.warmup,
                ..Settings::default()
            };
            let whole = (!self.pruned_only).then(|| (None, format!("K{}", input.trace.n_experts()), false));
            let maps = self.keep_map.iter().map(|path| (path, false));
            let maps = maps.chain(self.brief_keep_map.iter().map(|path| (path, true)));
            let maps = maps.enumerate().map(|(map, (path, brief))| (Some(map), stem(path), brief));
            for (keep, variant, brief) in whole.into_iter().chain(maps) {
                let group = Group { input: i, keep, variant, points: axes.points(brief, &base)?, first };
                first += group.points.len();
                let replay = group.replay(inputs);
                group.points.iter().try_for_each(|s| replay.check(s))?;
                groups.push(group);
            }
        }
        if groups.is_empty() {
            bail!("--pruned-only without --keep-map or --brief-keep-map leaves nothing");
        }
        Ok(groups)
    }

    /// The rows that are this process's.
    fn rows(&self, of: usize) -> Result<std::ops::Range<usize>> {
        let Some(shard) = &self.shard else { return Ok(0..of) };
        let parts = shard.split_once('/').and_then(|(i, n)| Some((i.parse().ok()?, n.parse().ok()?)));
        match parts {
            Some((i, n)) if (1..=n).contains(&i) => Ok(sweep::shard(of, i, n)),
            _ => bail!("--shard {shard}: it must be I/N, I from 1 to N"),
        }
    }
}

impl Group {
    fn replay<'a>(&self, inputs: &'a [Input]) -> Replay<'a> {
        let input = &inputs[self.input];
        Replay::new(&input.trace, self.keep.map(|i| &input.keep[i]), input.ranges.as_ref())
    }
}

fn stem(path: &Path) -> String {
    path.file_stem().map_or_else(String::new, |s| s.to_string_lossy().into_owned())
}

fn progress_bar(groups: &[Group], inputs: &[Input], rows: std::ops::Range<usize>) -> ProgressBar {
    let of_group = |g: &Group| {
        let mine = g.first.max(rows.start)..(g.first + g.points.len()).min(rows.end);
        mine.len() * inputs[g.input].trace.n_layers()
    };
    let bar = ProgressBar::new(groups.iter().map(of_group).sum::<usize>() as u64);
    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} layers x settings, {eta} left");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(Duration::from_millis(250));
    bar
}

/// Checks a table and says what was checked.
fn report(path: &Path) -> Result<()> {
    let table = table::Table::open(path)?;
    let found = check::check(&table)?;
    let mut text = format!("{}: {} rows\n", path.display(), table.rows.len());
    found.checked.iter().for_each(|line| text += &format!("checked: {line}\n"));
    found.warnings.iter().for_each(|line| text += &format!("warning: {line}\n"));
    found.failed.iter().for_each(|line| text += &format!("FAILED: {line}\n"));
    output::print(&text)?;
    if !found.failed.is_empty() {
        bail!("{} of the checks failed", found.failed.len());
    }
    Ok(())
}
