//! A bounded spool: from a thread that must never wait to a file that may be slow.
//!
//! A fixed number of blocks circulates. The sender takes a free one ([`Spool::take`]), fills it and sends it
//! ([`Spool::send`]); the writer thread hands its bytes to a [`Sink`] and puts it back among the free ones. Neither call
//! waits, allocates or meets the disk: when all blocks are with the writer, `take` gives `None` and the sender counts
//! what it had to leave out. The first error of the sink is kept; from then on blocks are thrown away, so that a full
//! disk costs the trace, never the model.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam::queue::ArrayQueue;
use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Result, err};

/// Where blocks go. All calls come from the writer thread; after the first error only `close` is called.
pub trait Sink: Send {
    /// The bytes of one block, in the order of sending.
    fn write(&mut self, block: &[u8]) -> Result<()>;

    /// Everything so far goes to the system, and to the device if `durable`.
    fn flush(&mut self, durable: bool) -> Result<()>;

    /// The queue is empty: time for what can wait. Returns when to be called again though nothing was sent.
    fn idle(&mut self) -> Result<Option<Duration>> {
        self.flush(false)?;
        Ok(None)
    }

    /// The end; also after an error, to leave the files as sound as they can be.
    fn close(&mut self) -> Result<()>;
}

/// What the sender and the writer share.
struct Shared {
    free: ArrayQueue<Buffer>,
    full: ArrayQueue<Buffer>,
    sent: AtomicU64,
    closing: AtomicBool,
    failed: AtomicBool,
    /// A request in `state` waits; saves the writer the lock for each block.
    flush_asked: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Flushes asked for, and served: numbers of requests.
    asked: u64,
    served: u64,
    /// Blocks that must be written before the last request is served.
    asked_after: u64,
    asked_durable: bool,
    error: Option<Error>,
    ended: bool,
}

/// The memory of a block: its length never changes, `used` does.
struct Buffer {
    bytes: Box<[u8]>,
    used: usize,
}

/// A block in the sender's hands. Dropped without being sent, it goes back among the free ones.
pub struct Block {
    buffer: Option<Buffer>,
    shared: Arc<Shared>,
}

impl Block {
    /// All bytes of the block, whatever is used of them. Those of an earlier use are still there.
    #[inline]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.buffer.as_mut().map_or(&mut [], |buffer| &mut buffer.bytes)
    }

    /// How many of the bytes are to be written; more than there are is cut to what there is.
    #[inline]
    pub fn set_used(&mut self, used: usize) {
        if let Some(buffer) = &mut self.buffer {
            buffer.used = used.min(buffer.bytes.len());
        }
    }

    /// Bytes to be written.
    pub fn used(&self) -> usize {
        self.buffer.as_ref().map_or(0, |buffer| buffer.used)
    }
}

/// Appends, and never grows: what does not fit is `WriteZero` to `write_all`.
impl Write for Block {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let Some(buffer) = &mut self.buffer else { return Ok(0) };
        let room = &mut buffer.bytes[buffer.used..];
        let n = room.len().min(data.len());
        room[..n].copy_from_slice(&data[..n]);
        buffer.used += n;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.shared.give_back(buffer);
        }
    }
}

impl Shared {
    fn give_back(&self, buffer: Buffer) {
        // the queue has room for all blocks there are: a refusal cannot be, and would only lose a block
        let _ = self.free.push(buffer);
    }

    fn fail(&self, error: Error) {
        self.state.lock().error.get_or_insert(error);
        self.failed.store(true, Ordering::Release);
    }
}

/// The sender's end. May be shared by threads; dropping it closes it.
pub struct Spool {
    shared: Arc<Shared>,
    writer: Option<JoinHandle<()>>,
}

impl Spool {
    /// Starts the writer thread, with `n_blocks` of `block_bytes` each: all the memory it will ever use.
    pub fn new(thread_name: &str, n_blocks: usize, block_bytes: usize, sink: Box<dyn Sink>) -> Result<Self> {
        let total = n_blocks.checked_mul(block_bytes).filter(|&n| n > 0 && n <= isize::MAX as usize);
        if total.is_none() {
            return Err(err!(Argument, "spool: {n_blocks} blocks of {block_bytes} bytes"));
        }
        let free = ArrayQueue::new(n_blocks);
        for _ in 0..n_blocks {
            let mut bytes = Vec::new();
            bytes
                .try_reserve_exact(block_bytes)
                .map_err(|_| err!(Memory, "spool: no memory for {n_blocks} blocks of {block_bytes} bytes"))?;
            bytes.resize(block_bytes, 0);
            let _ = free.push(Buffer { bytes: bytes.into_boxed_slice(), used: 0 });
        }
        let shared = Arc::new(Shared {
            free,
            full: ArrayQueue::new(n_blocks),
            sent: AtomicU64::new(0),
            closing: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            flush_asked: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let writer = Writer { shared: shared.clone(), sink, taken: 0 };
        let thread = thread::Builder::new()
            .name(thread_name.to_owned())
            .spawn(move || writer.run())
            .map_err(|e| err!(Memory, "spool: no writer thread: {e}"))?;
        Ok(Self { shared, writer: Some(thread) })
    }

    /// An empty block, or `None` when all are with the writer. Never waits, never allocates.
    #[inline]
    pub fn take(&self) -> Option<Block> {
        let mut buffer = self.shared.free.pop()?;
        buffer.used = 0;
        Some(Block { buffer: Some(buffer), shared: self.shared.clone() })
    }

    /// Hands a block of this spool to the writer. Never waits, never allocates.
    #[inline]
    pub fn send(&self, mut block: Block) {
        // a block of another spool is dropped, which gives it back to where it belongs
        let Some(buffer) = block.buffer.take_if(|_| Arc::ptr_eq(&block.shared, &self.shared)) else { return };
        // counted before it can be seen: a flush that counts it waits for it
        self.shared.sent.fetch_add(1, Ordering::SeqCst);
        let _ = self.shared.full.push(buffer);
        self.wake();
    }

    /// Blocks that `take` would give at this moment.
    pub fn n_free(&self) -> usize {
        self.shared.free.len()
    }

    /// All blocks.
    pub fn n_blocks(&self) -> usize {
        self.shared.free.capacity()
    }

    /// Whether a write has failed. One atomic load.
    #[inline]
    pub fn failed(&self) -> bool {
        self.shared.failed.load(Ordering::Acquire)
    }

    /// The first error of the writing side.
    pub fn error(&self) -> Option<Error> {
        if self.failed() { self.shared.state.lock().error.clone() } else { None }
    }

    /// Waits until all that was sent before is written, and on the device if `durable`; at most `timeout`.
    pub fn flush(&self, timeout: Duration, durable: bool) -> Result<()> {
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.shared.state.lock();
        let sent = self.shared.sent.load(Ordering::SeqCst);
        state.asked += 1;
        state.asked_after = sent;
        state.asked_durable |= durable;
        let mine = state.asked;
        self.shared.flush_asked.store(true, Ordering::Release);
        self.wake();
        while state.served < mine && !state.ended {
            match deadline {
                None => self.shared.changed.wait(&mut state),
                Some(at) => {
                    if self.shared.changed.wait_until(&mut state, at).timed_out() && state.served < mine {
                        return Err(err!(Timeout, "spool: not all of {sent} blocks written within {timeout:?}"));
                    }
                }
            }
        }
        state.error.clone().map_or(Ok(()), Err)
    }

    /// Writes what was sent, closes the sink, joins the thread. Returns the first error there was.
    pub fn close(mut self) -> Result<()> {
        self.finish();
        self.error().map_or(Ok(()), Err)
    }

    fn wake(&self) {
        if let Some(writer) = &self.writer {
            // without a system call unless the writer sleeps
            writer.thread().unpark();
        }
    }

    fn finish(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        self.wake();
        if let Some(writer) = self.writer.take() {
            // a panic has been turned into an error by `Ended`
            let _ = writer.join();
        }
    }
}

impl Drop for Spool {
    fn drop(&mut self) {
        self.finish();
    }
}

/// The writer thread's side.
struct Writer {
    shared: Arc<Shared>,
    sink: Box<dyn Sink>,
    /// Blocks taken out of the queue and written, or thrown away after an error.
    taken: u64,
}

impl Writer {
    fn run(mut self) {
        let _ended = Ended(self.shared.clone());
        loop {
            while let Some(buffer) = self.shared.full.pop() {
                if !self.shared.failed.load(Ordering::Relaxed) {
                    let result = self.sink.write(&buffer.bytes[..buffer.used]);
                    self.keep(result);
                }
                self.taken += 1;
                self.shared.give_back(buffer);
                self.serve_flush();
            }
            self.serve_flush();
            // read before the queue is looked at for the last time: who set it had sent everything
            let closing = self.shared.closing.load(Ordering::Acquire);
            if !self.shared.full.is_empty() {
                continue;
            }
            if closing {
                break;
            }
            let again = if self.shared.failed.load(Ordering::Relaxed) { Ok(None) } else { self.sink.idle() };
            // a wake-up between here and the parking is not lost: unpark leaves a token
            match self.keep(again).flatten() {
                Some(pause) => thread::park_timeout(pause),
                None => thread::park(),
            }
        }
        let result = self.sink.close();
        self.keep(result);
    }

    fn keep<T>(&self, result: Result<T>) -> Option<T> {
        result.map_err(|e| self.shared.fail(e)).ok()
    }

    /// Serves the flushes asked for, if what they wait for is written.
    fn serve_flush(&mut self) {
        if !self.shared.flush_asked.load(Ordering::Acquire) {
            return;
        }
        let (number, durable) = {
            let mut state = self.shared.state.lock();
            if self.taken < state.asked_after {
                return;
            }
            self.shared.flush_asked.store(false, Ordering::Release);
            (state.asked, std::mem::take(&mut state.asked_durable))
        };
        if !self.shared.failed.load(Ordering::Relaxed) {
            let result = self.sink.flush(durable);
            self.keep(result);
        }
        self.shared.state.lock().served = number;
        self.shared.changed.notify_all();
    }
}

/// Tells those who wait that the writer is gone, also when a sink panicked.
struct Ended(Arc<Shared>);

impl Drop for Ended {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.fail(err!(Internal, "the spool's writer thread panicked"));
        }
        self.0.state.lock().ended = true;
        self.0.changed.notify_all();
    }
}
