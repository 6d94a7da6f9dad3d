//! The dense weights: what every token uses besides the experts. The page cache gives them up first when memory is short,
//! so they are held (locked), or at least read once (warmed), or left to the system.
//!
//! Ranges of the files come in; they are rounded out to pages, cut to their map and merged, since locks do not nest.
//! Nothing here fails the open: what could not be done is in the report.

use std::ops::Range;
use std::sync::Arc;

use memmap2::Mmap;

use super::sys;

/// What to do with the dense weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Dense {
    /// Lock as much as the system allows, warm the rest.
    #[default]
    Lock,
    /// Read them once; the page cache may drop them again.
    Warm,
    /// Do nothing.
    Leave,
}

/// What was done. Bytes are whole pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DenseReport {
    pub policy: Dense,
    pub wanted_bytes: u64,
    pub locked_bytes: u64,
    pub warmed_bytes: u64,
    /// Why it is less than wanted; empty if it is not.
    pub reason: String,
}

/// Keeps the locks; dropping it undoes them. The locks hold the pages for every mapping of the files, the engine's own
/// included, as long as this value lives.
pub struct DenseHold {
    maps: Vec<Arc<Mmap>>,
    /// (file, byte range in its map) of what is locked: starts at a page border.
    locked: Vec<(usize, Range<usize>)>,
    report: DenseReport,
}

/// The first attempt to lock takes this much; smaller ones follow where the limit is near.
const LOCK_STEP: usize = 64 << 20;

impl DenseHold {
    /// Applies the policy to `ranges` of (file, bytes), where a file is an index into `maps`. Blocks for as long as reading
    /// them takes. A file that is cut while it is mapped kills the process that touches it: check lengths before.
    pub fn new(policy: Dense, ranges: &[(usize, Range<u64>)], maps: Vec<Arc<Mmap>>) -> DenseHold {
        let page = sys::page_bytes() as usize;
        let (pages, beyond) = whole_pages(ranges, &maps, page);
        let wanted_bytes = pages.iter().map(|(_, r)| r.len() as u64).sum();
        let report = DenseReport { policy, wanted_bytes, locked_bytes: 0, warmed_bytes: 0, reason: String::new() };
        let mut hold = DenseHold { maps, locked: Vec::new(), report };
        if beyond > 0 {
            hold.report.reason = format!("{beyond} of {} ranges are not in the mapped files", ranges.len());
        }
        match policy {
            Dense::Leave => {}
            Dense::Warm => pages.into_iter().for_each(|(file, range)| hold.warm(file, range, page)),
            Dense::Lock => hold.lock(pages, page),
        }
        hold
    }

    pub fn report(&self) -> &DenseReport {
        &self.report
    }

    fn lock(&mut self, pages: Vec<(usize, Range<usize>)>, page: usize) {
        let limit = sys::raise_lock_limit();
        // once this is 0 the limit is reached, and the rest is warmed
        let mut step = LOCK_STEP.next_multiple_of(page);
        for (file, range) in pages {
            let mut at = range.start;
            while at < range.end && step > 0 {
                let end = range.end.min(at + step);
                let map = &self.maps[file];
                // SAFETY: `at` is a page border, and `whole_pages` cut the range to this map, which we keep.
                match unsafe { sys::lock(map.as_ptr().add(at), end - at) } {
                    Ok(()) => {
                        self.report.locked_bytes += (end - at) as u64;
                        at = end;
                    }
                    Err(e) => {
                        step = (end - at) / 2 / page * page;
                        if step == 0 {
                            let shown = if limit == u64::MAX { "none".into() } else { format!("{limit} bytes") };
                            let locked = self.report.locked_bytes;
                            self.note(format!(
                                "locking stopped after {locked} bytes: {e} (limit of locked memory: {shown})"
                            ));
                        }
                    }
                }
            }
            if at > range.start {
                self.locked.push((file, range.start..at));
            }
            self.warm(file, at..range.end, page);
        }
    }

    /// Reads a byte of each page, after a hint that lets the system read ahead of that.
    fn warm(&mut self, file: usize, range: Range<usize>, page: usize) {
        if range.is_empty() {
            return;
        }
        let map = &self.maps[file];
        // SAFETY: the start is a page border, and the range is inside the map. A refused hint costs only speed.
        let _ = unsafe { sys::advise_willneed(map.as_ptr().add(range.start), range.len()) };
        for at in range.clone().step_by(page) {
            // SAFETY: `at` is inside the map. Volatile, because the byte itself is of no use.
            unsafe { map.as_ptr().add(at).read_volatile() };
        }
        self.report.warmed_bytes += range.len() as u64;
    }

    fn note(&mut self, what: String) {
        if !self.report.reason.is_empty() {
            self.report.reason.push_str("; ");
        }
        self.report.reason.push_str(&what);
    }
}

impl Drop for DenseHold {
    fn drop(&mut self) {
        for (file, range) in &self.locked {
            // SAFETY: locked in `new`, in a map that we have kept since.
            unsafe { sys::unlock(self.maps[*file].as_ptr().add(range.start), range.len()) }
        }
    }
}

/// The ranges as whole pages (the last one of a file ends with the file), sorted and merged, and how many of them were not
/// wholly in their file.
fn whole_pages(ranges: &[(usize, Range<u64>)], maps: &[Arc<Mmap>], page: usize) -> (Vec<(usize, Range<usize>)>, usize) {
    let mut beyond = 0;
    let mut pages: Vec<(usize, Range<usize>)> = Vec::with_capacity(ranges.len());
    for (file, range) in ranges.iter().filter(|(_, r)| r.start < r.end) {
        let len = maps.get(*file).map_or(0, |m| m.len());
        let inside = |n: u64| usize::try_from(n).unwrap_or(usize::MAX).min(len);
        beyond += usize::from(range.end > len as u64);
        let start = inside(range.start) / page * page;
        let end = inside(range.end).checked_next_multiple_of(page).unwrap_or(len).min(len);
        if start < end && range.start < len as u64 {
            pages.push((*file, start..end));
        }
    }
    pages.sort_unstable_by_key(|(file, r)| (*file, r.start));
    let mut merged: Vec<(usize, Range<usize>)> = Vec::with_capacity(pages.len());
    for (file, range) in pages {
        match merged.last_mut() {
            Some((f, last)) if *f == file && range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push((file, range)),
        }
    }
    (merged, beyond)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn map(bytes: usize) -> Vec<Arc<Mmap>> {
        let mut f = tempfile::tempfile().unwrap();
        f.write_all(&vec![7; bytes]).unwrap();
        // SAFETY: nobody else knows this file.
        vec![Arc::new(unsafe { Mmap::map(&f) }.unwrap())]
    }

    #[test]
    #[cfg_attr(miri, ignore)]
    fn ranges_become_pages_once() {
        let maps = map(50_000);
        let ranges = [(0, 9000..9001), (0, 100..200), (0, 5000..9000), (0, 40_000..49_999), (0, 7..7)];
        assert_eq!(whole_pages(&ranges, &maps, 4096), (vec![(0, 0..12288), (0, 36864..50_000)], 0));
        let ranges = [(0, 60_000..70_000), (1, 0..5), (0, 49_990..u64::MAX)];
        assert_eq!(whole_pages(&ranges, &maps, 4096), (vec![(0, 49_152..50_000)], 3));
    }

    #[test]
    #[cfg_attr(miri, ignore)]
    fn each_policy_says_what_it_did() {
        let maps = map(1 << 20);
        let ranges = [(0, 0..1 << 19), (0, 700_000..1 << 20), (0, 1 << 20..1 << 21)];
        for policy in [Dense::Leave, Dense::Warm, Dense::Lock] {
            let hold = DenseHold::new(policy, &ranges, maps.clone());
            let r = hold.report();
            assert!(r.wanted_bytes >= (1 << 19) + (1 << 20) - 700_000);
            let (locked, warmed) = (r.locked_bytes, r.warmed_bytes);
            match policy {
                Dense::Leave => assert_eq!((locked, warmed), (0, 0)),
                Dense::Warm => assert_eq!((locked, warmed), (0, r.wanted_bytes)),
                // how much may be locked is the machine's affair; all of it is at least warm
                Dense::Lock => assert_eq!(locked + warmed, r.wanted_bytes),
            }
            assert!(r.reason.contains("1 of 3 ranges"), "{}", r.reason);
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    #[cfg_attr(miri, ignore)]
    fn locks_end_with_the_hold() {
        let maps = map(100_000);
        let start = format!("{:x}-", maps[0].as_ptr() as usize);
        // of this mapping alone: other tests lock theirs at the same time
        let locked_kb = || {
            let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let ours = smaps.lines().skip_while(|l| !l.starts_with(&start));
            let line = ours.skip(1).find(|l| l.starts_with("Locked:")).unwrap();
            line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
        };
        let hold = DenseHold::new(Dense::Lock, &[(0, 0..100_000)], maps.clone());
        if hold.report().locked_bytes == 100_000 {
            assert_eq!(locked_kb(), 100);
        }
        drop(hold);
        assert_eq!(locked_kb(), 0);
    }
}
