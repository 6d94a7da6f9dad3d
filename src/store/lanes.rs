//! The lanes: threads that read. Jobs go into one bounded queue, made at open, and each lane takes the next one; a job is
//! one piece of an expert, so that even one miss spreads over several lanes. Idle lanes sleep in the queue. Or one thread stands for all
//! of them ([`Lanes::start_one`]), which takes jobs for as many reads as there are lanes: `ring`.
//!
//! The queue never makes anyone wait: when it is full, `submit` hands the job back and the submitter reads it itself. A second queue
//! holds what is read ahead: a lane looks there only when the first is empty, and the first of several lanes never does, so that a
//! read that is waited for finds a lane.
//!
//! Fewer lanes than were started may be at work (`set_active`): a job that a lane has taken then waits at the gate for another's end.

use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use crossbeam::channel::{Receiver, Sender, TryRecvError, bounded, never, select};
use parking_lot::{Condvar, Mutex};

use super::sys::uring::Bell;
use crate::error::{Result, err};

/// One read into one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Job {
    pub layer: u32,
    pub expert: u32,
    pub slot: u32,
    /// Of the layer's pieces.
    pub piece: u32,
}

/// How many jobs may be done at a time.
struct Gate {
    state: Mutex<Open>,
    changed: Condvar,
}

struct Open {
    active: usize,
    at_work: usize,
    /// The queues are dropped.
    ended: bool,
}

impl Gate {
    fn new(active: usize) -> Gate {
        Gate { state: Mutex::new(Open { active, at_work: 0, ended: false }), changed: Condvar::new() }
    }

    fn pass(&self, job: impl FnOnce()) {
        let mut open = self.state.lock();
        while open.at_work >= open.active {
            self.changed.wait(&mut open);
        }
        open.at_work += 1;
        drop(open);
        job();
        self.state.lock().at_work -= 1;
        self.changed.notify_one();
    }
}

/// Where a lane, or the one thread that stands for all, gets its jobs.
#[derive(Clone)]
pub(super) struct Intake {
    jobs: Receiver<Job>,
    ahead: Receiver<Job>,
    gate: Arc<Gate>,
    n: usize,
}

/// What there is to do at once.
pub(super) enum Now {
    Job(Job),
    /// Of what is read ahead.
    Ahead(Job),
    Nothing,
    /// Both queues have ended.
    Ended,
}

impl Intake {
    /// The next job; one of those read ahead only if that is wanted, and nothing else is there.
    pub fn now(&self, ahead: bool) -> Now {
        match self.jobs.try_recv() {
            Ok(job) => Now::Job(job),
            Err(TryRecvError::Empty) if !ahead => Now::Nothing,
            Err(TryRecvError::Empty) => self.ahead.try_recv().map_or(Now::Nothing, Now::Ahead),
            // Lanes drops both queues together: what is left of the second is the rest.
            Err(TryRecvError::Disconnected) => self.ahead.try_recv().map_or(Now::Ended, Now::Ahead),
        }
    }

    /// The next job, waited for; None when both queues have ended.
    fn next(&self) -> Option<Job> {
        match self.now(true) {
            Now::Job(job) | Now::Ahead(job) => Some(job),
            Now::Ended => None,
            Now::Nothing => select! {
                recv(self.jobs) -> job => job.ok().or_else(|| self.ahead.try_recv().ok()),
                recv(self.ahead) -> job => job.ok().or_else(|| self.jobs.recv().ok()),
            },
        }
    }

    /// Whether `now` has something else to say than Nothing.
    pub fn has_more(&self, ahead: bool) -> bool {
        !self.jobs.is_empty() || ahead && !self.ahead.is_empty() || self.gate.state.lock().ended
    }

    /// How many jobs may be under way: at least one, at most as many as there are lanes.
    pub fn active(&self) -> usize {
        self.gate.state.lock().active.min(self.n)
    }
}

/// Joined when dropped; what is in the queue then is still done.
pub(super) struct Lanes {
    queue: Option<Sender<Job>>,
    ahead: Option<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
    gate: Arc<Gate>,
    /// Of the one thread that stands for all: it does not sleep in the queue.
    bell: Option<Bell>,
}

impl Lanes {
    /// Starts `n` threads; `lane` makes what each of them does with a job. `run` must not panic: it would end its lane.
    pub fn start<R: FnMut(Job) + Send + 'static>(
        n: usize,
        queue: usize,
        mut lane: impl FnMut() -> Result<R>,
    ) -> Result<Lanes> {
        // on an early return this ends the lanes already started
        let (mut lanes, intake) = Lanes::idle(n, queue, None);
        for i in 0..n {
            let mut run = lane()?;
            let mut intake = intake.clone();
            if i == 0 && n > 1 {
                intake.ahead = never();
            }
            let thread = Builder::new()
                .name(format!("hotset-io-{i}"))
                .spawn(move || {
                    while let Some(job) = intake.next() {
                        intake.gate.pass(|| run(job));
                    }
                })
                .map_err(|e| err!(Memory, "cannot start I/O thread {i} of {n}: {e}"))?;
            lanes.threads.push(thread);
        }
        Ok(lanes)
    }

    /// Starts one thread that stands for `n` lanes. `serve` does the jobs of its intake, as many at a time as that says, until it says that
    /// they have ended; `bell` wakes it. It must not panic.
    pub fn start_one(
        n: usize,
        queue: usize,
        bell: Bell,
        serve: impl FnOnce(&Intake) + Send + 'static,
    ) -> Result<Lanes> {
        let (mut lanes, intake) = Lanes::idle(n, queue, Some(bell));
        let thread = Builder::new()
            .name("hotset-io".into())
            .spawn(move || serve(&intake))
            .map_err(|e| err!(Memory, "cannot start the I/O thread: {e}"))?;
        lanes.threads.push(thread);
        Ok(lanes)
    }

    /// The queues, and no threads yet.
    fn idle(n: usize, queue: usize, bell: Option<Bell>) -> (Lanes, Intake) {
        let ((sender, jobs), (ahead_sender, ahead)) = (bounded(queue), bounded(queue));
        let gate = Arc::new(Gate::new(n));
        let intake = Intake { jobs, ahead, gate: gate.clone(), n };
        (Lanes { queue: Some(sender), ahead: Some(ahead_sender), threads: Vec::with_capacity(n), gate, bell }, intake)
    }

    /// No threads: every job comes back.
    pub fn none() -> Lanes {
        Lanes { queue: None, ahead: None, threads: Vec::new(), gate: Arc::new(Gate::new(0)), bell: None }
    }

    /// Lets no more than `n` lanes work from here on, at least one; what they have begun is ended.
    pub fn set_active(&self, n: usize) {
        self.gate.state.lock().active = n.max(1);
        self.gate.changed.notify_all();
        self.bell.iter().for_each(Bell::ring_anyway);
    }

    /// Queues a job, or hands it back if the queue is full. Never blocks, never allocates.
    pub fn submit(&self, job: Job) -> Result<(), Job> {
        let Some(queue) = &self.queue else { return Err(job) };
        queue.try_send(job).map_err(|full| full.into_inner())?;
        self.bell.iter().for_each(Bell::ring);
        Ok(())
    }

    /// Queues a job behind all that `submit` has queued and will; handed back in the same way.
    pub fn submit_ahead(&self, job: Job) -> Result<(), Job> {
        let Some(queue) = &self.ahead else { return Err(job) };
        queue.try_send(job).map_err(|full| full.into_inner())?;
        self.bell.iter().for_each(Bell::ring);
        Ok(())
    }

    /// How many more jobs `submit_ahead` would take now.
    pub fn room_ahead(&self) -> usize {
        self.ahead.as_ref().map_or(0, |q| q.capacity().unwrap_or(0).saturating_sub(q.len()))
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        (self.queue, self.ahead) = (None, None);
        self.gate.state.lock().ended = true;
        self.bell.iter().for_each(Bell::ring_anyway);
        for thread in self.threads.drain(..) {
            // a lane that panicked has nothing more to say
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
    use std::sync::mpsc;

    fn job(slot: u32) -> Job {
        Job { layer: 0, expert: 0, slot, piece: 0 }
    }

    #[test]
    fn every_job_is_done_once_also_when_dropped_early() {
        let sum = Arc::new(AtomicU32::new(0));
        let lanes = Lanes::start(3, 100, || {
            let sum = sum.clone();
            Ok(move |job: Job| {
                sum.fetch_add(job.slot, SeqCst);
            })
        })
        .unwrap();
        (1..=100).for_each(|i| lanes.submit(job(i)).unwrap());
        drop(lanes);
        assert_eq!(sum.load(SeqCst), 5050);
    }

    #[test]
    fn what_is_read_ahead_comes_last_and_is_done_all_the_same() {
        let done = Arc::new(std::sync::Mutex::new(Vec::new()));
        let (go, wait) = mpsc::channel::<()>();
        let wait = Arc::new(std::sync::Mutex::new(wait));
        for n in [1, 2] {
            done.lock().unwrap().clear();
            let lanes = Lanes::start(n, 100, || {
                let (done, wait) = (done.clone(), wait.clone());
                Ok(move |job: Job| {
                    if job.slot == 0 {
                        wait.lock().unwrap().recv().unwrap();
                    }
                    done.lock().unwrap().push(job.slot);
                })
            })
            .unwrap();
            // each lane is held by a job of its own while the queues fill
            (0..n).for_each(|_| lanes.submit(job(0)).unwrap());
            (101..=110).for_each(|i| lanes.submit_ahead(job(i)).unwrap());
            (1..=10).for_each(|i| lanes.submit(job(i)).unwrap());
            assert!(lanes.room_ahead() >= 90);
            (0..n).for_each(|_| go.send(()).unwrap());
            drop(lanes);
            let done = done.lock().unwrap();
            assert_eq!(done.len(), 20 + n);
            if n == 1 {
                assert_eq!(done[1..], [(1..=10).collect::<Vec<_>>(), (101..=110).collect()].concat());
            }
        }
        assert_eq!(Lanes::none().submit_ahead(job(1)), Err(job(1)));
    }

    #[test]
    fn a_full_queue_hands_the_job_back() {
        let (go, wait) = mpsc::channel::<()>();
        let wait = Arc::new(std::sync::Mutex::new(wait));
        let lanes = Lanes::start(1, 2, || {
            let wait = wait.clone();
            Ok(move |_| {
                wait.lock().unwrap().recv().unwrap_err();
            })
        })
        .unwrap();
        let returned = (0..10).filter_map(|i| lanes.submit(job(i)).err()).count();
        // two queued, and one perhaps already with the lane
        assert!((7..=8).contains(&returned), "{returned}");
        drop(go);
    }

    #[test]
    fn no_more_lanes_work_than_are_active() {
        let (now, most, done) = (AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(0));
        let counts = Arc::new((now, most, done));
        let lanes = Lanes::start(6, 1000, || {
            let counts = counts.clone();
            Ok(move |_| {
                let n = counts.0.fetch_add(1, SeqCst) + 1;
                counts.1.fetch_max(n, SeqCst);
                std::thread::sleep(std::time::Duration::from_micros(200));
                counts.0.fetch_sub(1, SeqCst);
                counts.2.fetch_add(1, SeqCst);
            })
        })
        .unwrap();
        let run = |active: usize, upto: u32| {
            lanes.set_active(active);
            counts.1.store(0, SeqCst);
            (0..100).for_each(|i| lanes.submit(job(i)).unwrap());
            while counts.2.load(SeqCst) < upto {
                std::thread::yield_now();
            }
            counts.1.load(SeqCst)
        };
        assert_eq!(run(1, 100), 1);
        assert!((2..=3).contains(&run(3, 200)));
        assert!((2..=6).contains(&run(99, 300)));
        // fewer, and dropped with jobs in the queue: all are done, the lanes end
        lanes.set_active(0);
        (0..50).for_each(|i| lanes.submit(job(i)).unwrap());
        drop(lanes);
        assert_eq!(counts.2.load(SeqCst), 350);
    }

    #[test]
    fn a_lane_that_cannot_be_made_ends_the_others() {
        let mut left = 2;
        let e = Lanes::start(4, 8, || {
            left -= 1;
            if left < 0 { Err(err!(Memory, "no more")) } else { Ok(|_| ()) }
        });
        assert_eq!(e.err().unwrap().detail, "no more");
        assert_eq!(Lanes::none().submit(job(1)), Err(job(1)));
    }
}
