//! fio's figure for the same drive, the same file, read size and depth: a second opinion by another program.

use std::path::PathBuf;
use std::process::Command;

use crate::error::{Result, err};

/// fio's random reads: `depth` threads with one read each in flight, past the page cache if `direct`, for whole seconds.
#[derive(Clone, Debug)]
pub struct Fio {
    pub files: Vec<PathBuf>,
    pub block_bytes: u64,
    pub depth: usize,
    pub direct: bool,
    pub seconds: u32,
}

/// fio's version, where it is installed.
pub fn version() -> Option<String> {
    let out = Command::new("fio").arg("--version").output().ok().filter(|out| out.status.success())?;
    Some(String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

impl Fio {
    /// Bytes a second. `Io` with what fio said where it failed.
    pub fn bytes_per_s(&self) -> Result<f64> {
        // fio separates files by colons
        let names: Vec<String> = self.files.iter().map(|f| f.display().to_string().replace(':', "\\:")).collect();
        let out = Command::new("fio")
            .args(["--name=hotset", "--readonly", "--rw=randread", "--ioengine=psync", "--thread", "--time_based"])
            .args(["--group_reporting", "--norandommap", "--randrepeat=0", "--output-format=json"])
            .arg(format!("--filename={}", names.join(":")))
            .arg(format!("--bs={}", self.block_bytes))
            .arg(format!("--numjobs={}", self.depth))
            .arg(format!("--direct={}", u8::from(self.direct)))
            .arg(format!("--runtime={}", self.seconds.max(1)))
            .output()
            .map_err(|e| err!(Io, "fio cannot be started: {e}"))?;
        let said = || {
            let text = String::from_utf8_lossy(&out.stderr).trim().to_owned();
            text.lines().last().unwrap_or("nothing").chars().take(200).collect::<String>()
        };
        if !out.status.success() {
            return Err(err!(Io, "fio failed ({}): {}", out.status, said()));
        }
        parse(&out.stdout).ok_or_else(|| err!(Format, "fio's report has no read rate; it said: {}", said()))
    }
}

/// The read rate in fio's JSON, which notes may stand before.
fn parse(report: &[u8]) -> Option<f64> {
    let begin = report.iter().position(|b| *b == b'{')?;
    let json: serde_json::Value = serde_json::from_slice(&report[begin..]).ok()?;
    json["jobs"][0]["read"]["bw_bytes"].as_f64().filter(|rate| *rate > 0.0)
}

#[cfg(test)]
mod tests {
    #[test]
    fn reports() {
        let of = |text: &str| super::parse(text.as_bytes());
        assert_eq!(of("note: x\n{\"jobs\": [{\"read\": {\"bw_bytes\": 1500}}]}"), Some(1500.0));
        assert_eq!([of(""), of("{}"), of("{\"jobs\": [{\"read\": {\"bw_bytes\": 0}}]}"), of("fio: no")], [None; 4]);
    }
}
