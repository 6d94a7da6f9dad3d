//! An engine as a child process: its output in a file, its progress read off its metrics log, its end waited for, and ended with us.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};

/// Set by the first signal to end.
static ENDING: AtomicBool = AtomicBool::new(false);

/// From here on signals to end (from the keyboard or elsewhere) end the engine before this program.
pub fn catch_signals() -> Result<()> {
    ctrlc::set_handler(|| ENDING.store(true, Ordering::SeqCst)).context("signals cannot be caught")
}

/// One run of an engine.
pub struct Engine<'a> {
    /// Program and arguments.
    pub command: &'a [OsString],
    pub env: &'a [(&'a str, PathBuf)],
    /// Gets what it prints.
    pub output: &'a Path,
    pub log: &'a Path,
    /// Decode tokens that it is to come to.
    pub tokens: u64,
    pub name: String,
}

impl Engine<'_> {
    /// Waits for its end; an error, with the end of what it printed, where it fails. None: ended from outside.
    pub fn run(&self) -> Result<Option<()>> {
        let [program, arguments @ ..] = self.command else { bail!("no engine to run") };
        let out = File::create(self.output).with_context(|| self.output.display().to_string())?;
        let mut command = Command::new(program);
        command.args(arguments).envs(self.env.iter().map(|(name, path)| (name, path)));
        command.stdin(Stdio::null()).stderr(out.try_clone()?).stdout(out);
        let child = command.spawn().with_context(|| format!("{} cannot be started", program.to_string_lossy()))?;
        let Some(status) = self.watch(Ended(child))? else { return Ok(None) };
        if status.success() {
            return Ok(Some(()));
        }
        bail!(
            "{}: the engine failed: {status}. The end of {}:\n{}",
            self.name,
            self.output.display(),
            tail(self.output)
        )
    }

    fn watch(&self, mut child: Ended) -> Result<Option<ExitStatus>> {
        let begun = Instant::now();
        let mut progress = Progress { rows: 0, at: 0, bar: None };
        loop {
            if let Some(status) = child.0.try_wait()? {
                progress.end();
                // a signal from the keyboard reaches both
                return Ok((!ENDING.load(Ordering::SeqCst)).then_some(status));
            }
            if ENDING.load(Ordering::SeqCst) {
                progress.end();
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(if begun.elapsed() < Duration::from_secs(2) { 10 } else { 200 }));
            if begun.elapsed() > Duration::from_secs(2) {
                progress.show(self);
            }
        }
    }
}

/// Killed and waited for when it goes, if it still runs.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // an error says that it has ended
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A bar of the lines in the metrics log.
struct Progress {
    rows: u64,
    at: u64,
    bar: Option<ProgressBar>,
}

impl Progress {
    fn show(&mut self, engine: &Engine) {
        let bar = self.bar.get_or_insert_with(|| {
            let bar = ProgressBar::new(engine.tokens);
            let style = ProgressStyle::with_template("{msg}: {wide_bar} {pos}/{len} tokens, {eta} left");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.set_message(engine.name.clone());
            bar
        });
        let mut added = Vec::new();
        let read = File::open(engine.log).and_then(|mut log| {
            log.seek(SeekFrom::Start(self.at))?;
            log.read_to_end(&mut added)
        });
        self.at += read.unwrap_or(0) as u64;
        self.rows += added.iter().filter(|&&b| b == b'\n').count() as u64;
        bar.set_position(self.rows.min(engine.tokens));
    }

    fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

/// The last lines of a file, for an error.
fn tail(path: &Path) -> String {
    let text = std::fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&text[text.len().saturating_sub(4000)..]).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(10)..].join("\n")
}
