//! The lanes: threads that read. Jobs go into one bounded queue, made at open, and each lane takes the next one; a job is
//! one slice, so that the misses of one layer spread over all lanes. Idle lanes sleep in the queue.
//!
//! The queue never makes anyone wait: when it is full, `submit` hands the job back and the submitter reads it itself.
//!
//! Fewer lanes than were started may be at work (`set_active`): a job that a lane has taken then waits at the gate for another's end.

use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use crossbeam::channel::{Receiver, Sender, bounded};
use parking_lot::{Condvar, Mutex};

use crate::error::{Result, err};

/// One slice to read into one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Job {
    pub layer: u32,
    pub expert: u32,
    pub slot: u32,
    pub slice: u32,
}

/// How many jobs may be done at a time.
struct Gate {
    state: Mutex<Open>,
    changed: Condvar,
}

struct Open {
    active: usize,
    at_work: usize,
}

impl Gate {
    fn new(active: usize) -> Gate {
        Gate { state: Mutex::new(Open { active, at_work: 0 }), changed: Condvar::new() }
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

/// Joined when dropped; what is in the queue then is still handed to `run`.
pub(super) struct Lanes {
    queue: Option<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
    gate: Arc<Gate>,
}

impl Lanes {
    /// Starts `n` threads; `lane` makes what each of them does with a job. `run` must not panic: it would end its lane.
    pub fn start<R: FnMut(Job) + Send + 'static>(
        n: usize,
        queue: usize,
        mut lane: impl FnMut() -> Result<R>,
    ) -> Result<Lanes> {
        let (sender, receiver) = bounded(queue);
        // on an early return this ends the lanes already started
        let mut lanes = Lanes { queue: Some(sender), threads: Vec::with_capacity(n), gate: Arc::new(Gate::new(n)) };
        for i in 0..n {
            let mut run = lane()?;
            let (jobs, gate): (Receiver<Job>, _) = (receiver.clone(), lanes.gate.clone());
            let thread = Builder::new()
                .name(format!("hotset-io-{i}"))
                .spawn(move || jobs.iter().for_each(|job| gate.pass(|| run(job))))
                .map_err(|e| err!(Memory, "cannot start I/O thread {i} of {n}: {e}"))?;
            lanes.threads.push(thread);
        }
        Ok(lanes)
    }

    /// No threads: every job comes back.
    pub fn none() -> Lanes {
        Lanes { queue: None, threads: Vec::new(), gate: Arc::new(Gate::new(0)) }
    }

    /// Lets no more than `n` lanes work from here on, at least one; what they have begun is ended.
    pub fn set_active(&self, n: usize) {
        self.gate.state.lock().active = n.max(1);
        self.gate.changed.notify_all();
    }

    /// Queues a job, or hands it back if the queue is full. Never blocks, never allocates.
    pub fn submit(&self, job: Job) -> Result<(), Job> {
        let Some(queue) = &self.queue else { return Err(job) };
        queue.try_send(job).map_err(|full| full.into_inner())
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.queue = None;
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
        Job { layer: 0, expert: 0, slot, slice: 0 }
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
