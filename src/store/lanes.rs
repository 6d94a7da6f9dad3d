//! The lanes: threads that read. Jobs go into one bounded queue, made at open, and each lane takes the next one; a job is
//! one piece of an expert, so that even one miss spreads over several lanes. Idle lanes sleep in the queue.
//!
//! The queue never makes anyone wait: when it is full, `submit` hands the job back and the submitter reads it itself.

use std::thread::{Builder, JoinHandle};

use crossbeam::channel::{Receiver, Sender, bounded};

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

/// Joined when dropped; what is in the queue then is still handed to `run`.
pub(super) struct Lanes {
    queue: Option<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
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
        let mut lanes = Lanes { queue: Some(sender), threads: Vec::with_capacity(n) };
        for i in 0..n {
            let mut run = lane()?;
            let jobs: Receiver<Job> = receiver.clone();
            let thread = Builder::new()
                .name(format!("hotset-io-{i}"))
                .spawn(move || jobs.iter().for_each(&mut run))
                .map_err(|e| err!(Memory, "cannot start I/O thread {i} of {n}: {e}"))?;
            lanes.threads.push(thread);
        }
        Ok(lanes)
    }

    /// No threads: every job comes back.
    pub fn none() -> Lanes {
        Lanes { queue: None, threads: Vec::new() }
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
