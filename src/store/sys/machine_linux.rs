//! Linux: /proc/self for the process, /sys/class/thermal for the heat. Their files are made anew at every read from offset 0.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::Heat;
use crate::store::page_bytes;

pub struct Process {
    statm: Option<File>,
    io: Option<File>,
    page_bytes: u64,
}

impl Process {
    pub fn open() -> Self {
        let open = |name| File::open(name).ok();
        Self { statm: open("/proc/self/statm"), io: open("/proc/self/io"), page_bytes: page_bytes() }
    }

    /// Resident bytes, bytes read from the disk.
    pub fn read(&self) -> (Option<u64>, Option<u64>) {
        let mut text = [0; 512];
        // the second number is of pages
        let pages = contents(self.statm.as_ref(), &mut text).and_then(|t| number(t.split(|&b| b == b' ').nth(1)?));
        let rss_bytes = pages.and_then(|n| u64::try_from(n).ok()?.checked_mul(self.page_bytes));
        let line = |t: &[u8]| t.split(|&b| b == b'\n').find_map(|l| number(l.strip_prefix(b"read_bytes: ")?));
        let disk_bytes = contents(self.io.as_ref(), &mut text).and_then(line);
        (rss_bytes, disk_bytes.and_then(|n| u64::try_from(n).ok()))
    }
}

/// Zones that are asked at most.
const MAX_ZONES: usize = 64;

pub struct Thermal {
    zones: Vec<Zone>,
}

struct Zone {
    temperature: File,
    /// In thousandths of a degree: from where on the system cools by slowing down, is too hot, and switches off.
    trips: [Option<i64>; 3],
}

impl Thermal {
    pub fn open() -> Self {
        Self::of(Path::new("/sys/class/thermal"))
    }

    fn of(folder: &Path) -> Self {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let zones = entries.filter(|e| e.file_name().as_encoded_bytes().starts_with(b"thermal_zone"));
        Self { zones: zones.take(MAX_ZONES).filter_map(|e| Zone::open(&e.path())).collect() }
    }

    /// The level is the highest trip point that any zone has passed; None where no zone has trip points.
    pub fn read(&self) -> Heat {
        let (mut level, mut hottest) = (None, None);
        for zone in &self.zones {
            let mut text = [0; 32];
            let Some(mc) = contents(Some(&zone.temperature), &mut text).and_then(number) else { continue };
            hottest = hottest.max(i32::try_from(mc).ok());
            if zone.trips.iter().any(Option::is_some) {
                let passed = |trip: &Option<i64>| trip.is_some_and(|at| mc >= at);
                level = level.max(Some(zone.trips.iter().rposition(passed).map_or(0, |i| i as u8 + 1)));
            }
        }
        (level, hottest)
    }
}

impl Zone {
    fn open(folder: &Path) -> Option<Self> {
        let temperature = File::open(folder.join("temp")).ok()?;
        let mut trips = [None; 3];
        for i in 0..32 {
            let Ok(kind) = fs::read(folder.join(format!("trip_point_{i}_type"))) else { break };
            let at = fs::read(folder.join(format!("trip_point_{i}_temp"))).ok().and_then(|t| number(&t));
            let level = match kind.trim_ascii() {
                b"passive" => 0,
                b"hot" => 1,
                b"critical" => 2,
                // a fan begins to turn: nothing slows down
                _ => continue,
            };
            // a trip point at 0 or below is one that is switched off
            if let Some(at) = at.filter(|at| *at > 0) {
                trips[level] = Some(trips[level].map_or(at, |other: i64| other.min(at)));
            }
        }
        Some(Self { temperature, trips })
    }
}

/// As much as fits.
fn contents<'a>(file: Option<&File>, text: &'a mut [u8]) -> Option<&'a [u8]> {
    let n = file?.read_at(text, 0).ok()?;
    text.get(..n)
}

fn number(text: &[u8]) -> Option<i64> {
    std::str::from_utf8(text.trim_ascii()).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heat_is_the_hottest_zone_and_the_highest_trip_point() {
        let dir = tempfile::tempdir().unwrap();
        let zone = |n: u32, temp: &str, trips: &[(&str, &str)]| {
            let folder = dir.path().join(format!("thermal_zone{n}"));
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("temp"), temp).unwrap();
            for (i, (kind, at)) in trips.iter().enumerate() {
                fs::write(folder.join(format!("trip_point_{i}_type")), format!("{kind}\n")).unwrap();
                fs::write(folder.join(format!("trip_point_{i}_temp")), format!("{at}\n")).unwrap();
            }
        };
        let heat = || Thermal::of(dir.path()).read();
        assert_eq!(heat(), (None, None));
        zone(0, "41000\n", &[]);
        fs::create_dir(dir.path().join("cooling_device0")).unwrap();
        assert_eq!(heat(), (None, Some(41_000)));
        let trips = [("critical", "105000"), ("passive", "80000"), ("active", "50000"), ("hot", "0")];
        for (temp, level) in [("-5000", 0), ("79999", 0), ("80000", 1), ("104999", 1), ("105000", 3)] {
            zone(1, temp, &trips);
            assert_eq!(heat(), (Some(level), Some(temp.parse::<i32>().unwrap().max(41_000))), "{temp}");
        }
        zone(2, "90000", &[("passive", "95000"), ("hot", "88000")]);
        zone(1, "60000", &trips);
        assert_eq!(heat(), (Some(2), Some(90_000)));
        // a sensor that fails is not asked again in this answer, and the others are
        zone(2, "n/a", &[]);
        assert_eq!(heat(), (Some(0), Some(60_000)));
    }
}
