//! One thread and an io_uring in the place of the lanes' threads: as many reads in flight as there are lanes, each with a place of its
//! own (a bounce buffer, and the [`Transfer`] that is under way there).
//!
//! ```text
//! queues (lanes) ── next job ─> free place ── call ─> io_uring ── came ─> the transfer's next call
//!                                                                   └──> or its end: the piece is finished, the place is free
//! ```
//!
//! What a read may come to is the transfer's business, here as in a thread; only who makes the call differs. On two cores a miss comes
//! sooner than by threads, since nobody is woken for each of its reads: bench/README.md.

use std::io;

use super::lanes::{Intake, Job, Now};
use super::reader::{Bounce, Transfer};
use super::shared::{Shared, caught};
use super::source::{IoMode, ReadBy, SourceFile};
use super::sys::uring::Uring;
use crate::error::{Result, err};

/// The io_uring by which these files are read, or why they are read by threads.
pub(super) fn open(wanted: ReadBy, files: &[SourceFile], places: usize) -> Result<Uring, String> {
    if wanted == ReadBy::Threads {
        return Err("as asked for".into());
    }
    // a buffered read of what is not cached would make the one thread wait, or a thread of the system's
    if let Some(f) = files.iter().find(|f| f.mode != IoMode::Direct) {
        return Err(format!("{}: buffered reads go by threads", f.path.display()));
    }
    if let Some(f) = files.iter().find(|f| f.source.file().is_none()) {
        return Err(format!("{}: its source makes its reads itself", f.path.display()));
    }
    Uring::new(places).map_err(|e| format!("no io_uring: {e}"))
}

/// Does the jobs of the queues until they have ended and all reads are over. A place for each bounce buffer.
pub(super) fn serve(shared: &Shared, uring: Uring, bounces: Vec<Bounce>, intake: &Intake) {
    let bell = uring.bell();
    let places: Vec<Place> = bounces.into_iter().map(|bounce| Place { bounce, now: None }).collect();
    let free = (0..places.len()).rev().collect();
    let ends = Vec::with_capacity(places.len());
    let mut ring = Ring { shared, uring, places, free, ends };
    loop {
        match ring.fill(intake) {
            Filled::Ended if ring.busy() == 0 => return,
            Filled::Ended | Filled::Full => {}
            Filled::Room { ahead } => {
                bell.announce();
                if intake.has_more(ahead) {
                    bell.retract();
                    continue;
                }
            }
        }
        ring.wait();
        bell.retract();
    }
}

struct Ring<'a> {
    shared: &'a Shared,
    /// Before `places`: it is dropped first, when the system is done with their buffers.
    uring: Uring,
    places: Vec<Place<'a>>,
    free: Vec<usize>,
    /// Of one `wait`: places, and what their calls came to. Empty between.
    ends: Vec<(usize, io::Result<usize>)>,
}

/// Where one read may be under way.
struct Place<'a> {
    bounce: Bounce,
    now: Option<UnderWay<'a>>,
}

struct UnderWay<'a> {
    job: Job,
    ahead: bool,
    transfer: Transfer<'a>,
    /// Of the call that is with the system.
    offset: u64,
}

/// Why no more jobs are taken for now.
enum Filled {
    /// As many reads are under way as may be.
    Full,
    /// There are no jobs; `ahead`: one that is read ahead would be taken too.
    Room { ahead: bool },
    /// There will be none.
    Ended,
}

impl Ring<'_> {
    fn busy(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Of those under way, the ones that nobody waits for.
    fn n_ahead(&self) -> usize {
        self.places.iter().filter(|p| p.now.as_ref().is_some_and(|now| now.ahead)).count()
    }

    /// Begins jobs while there is room.
    fn fill(&mut self, intake: &Intake) -> Filled {
        let active = intake.active();
        while let Some(&place) = self.free.last().filter(|_| self.busy() < active) {
            // of several places one stays for what is waited for
            let ahead = active == 1 || self.n_ahead() + 1 < active;
            let (job, of_ahead) = match intake.now(ahead) {
                Now::Job(job) => (job, false),
                Now::Ahead(job) => (job, true),
                Now::Nothing => return Filled::Room { ahead },
                Now::Ended => return Filled::Ended,
            };
            match self.shared.begin(job) {
                Ok(transfer) => {
                    self.free.pop();
                    self.places[place].now = Some(UnderWay { job, ahead: of_ahead, transfer, offset: 0 });
                    self.call(place);
                }
                Err(e) => self.shared.finish(job, Err(e)),
            }
        }
        Filled::Full
    }

    /// Hands the next call of a place's transfer to the system.
    fn call(&mut self, place: usize) {
        let Place { bounce, now: Some(now) } = &mut self.places[place] else { return };
        let from = now.transfer.file();
        let Some(file) = from.source.file() else {
            let e = err!(Internal, "{}: its source has no file any more", from.path.display());
            return self.end(place, Err(e));
        };
        let mut call = now.transfer.call(bounce, &self.shared.counters);
        now.offset = call.offset;
        // SAFETY: the buffers are the place's own bounce buffer and the part of a slot that its job has claimed. Nobody touches either
        // before `wait` names the place: transfer and bounce buffer stay in `places`, which is dropped after `uring`, and that only
        // when no read is under way. `shared` keeps the files open.
        unsafe { self.uring.read(place, file, now.offset, call.bufs()) };
    }

    /// Sleeps until reads have ended or the bell rings, and takes what has ended further.
    fn wait(&mut self) {
        let mut ends = std::mem::take(&mut self.ends);
        self.uring.wait(|place, outcome| ends.push((place, outcome)));
        ends.drain(..).for_each(|(place, outcome)| self.came(place, outcome));
        self.ends = ends;
    }

    /// What a place's call came to.
    fn came(&mut self, place: usize, outcome: io::Result<usize>) {
        let Place { bounce, now: Some(now) } = &mut self.places[place] else { return };
        let (source, counters) = (&now.transfer.file().source, &self.shared.counters);
        // a panic (in a wrapped source) is a failure of this read, not the end of the thread
        match caught(|| Ok(now.transfer.came(source.completed(now.offset, outcome), bounce, counters))) {
            Ok(None) => self.call(place),
            Ok(Some(ended)) => self.end(place, ended),
            Err(e) => self.end(place, Err(e)),
        }
    }

    /// Ends a place's job. No call of it is under way.
    fn end(&mut self, place: usize, outcome: Result<()>) {
        let Some(now) = self.places[place].now.take() else { return };
        self.free.push(place);
        self.shared.finish(now.job, outcome);
    }
}
