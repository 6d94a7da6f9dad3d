//! An io_uring: reads that one thread hands to the system, many at a time. Linux only, and with the feature `io-uring`; elsewhere
//! [`Uring::new`] says why there is none.
//!
//! ```text
//! read(place, ..)            puts a call into the queue
//! wait()                     one system call: hands over what is queued, sleeps until something has ended
//! Bell::ring, any thread     ends a sleep that was announced (Bell::announce)
//! ```

pub use platform::{Bell, Uring};

#[cfg(all(target_os = "linux", feature = "io-uring"))]
mod platform {
    use std::fs::File;
    use std::io::{self, IoSliceMut, Read, Write};
    use std::os::fd::{AsRawFd, FromRawFd};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst, fence};
    use std::time::Duration;

    use io_uring::{IoUring, opcode, types::Fd};

    /// No place has this number.
    const BELL: u64 = u64::MAX;

    /// Wakes the thread that sleeps in [`Uring::wait`], if it said that it wants to be woken.
    #[derive(Clone)]
    pub struct Bell(Arc<BellState>);

    struct BellState {
        asleep: AtomicBool,
        event: File,
    }

    impl Bell {
        fn new() -> io::Result<Bell> {
            // SAFETY: eventfd has no preconditions.
            let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
            super::super::check(fd.min(0))?;
            // SAFETY: a new descriptor, which nobody else has.
            let event = unsafe { File::from_raw_fd(fd) };
            Ok(Bell(Arc::new(BellState { asleep: AtomicBool::new(false), event })))
        }

        /// To be called after what the sleeper is to see has been done. No system call while nobody sleeps.
        pub fn ring(&self) {
            // either we see the announcement, or the sleeper, which looks once more after it, sees what was done
            fence(SeqCst);
            if self.0.asleep.load(SeqCst) && self.0.asleep.swap(false, SeqCst) {
                self.ring_anyway();
            }
        }

        /// Ends the present sleep, or the next one, also one that was not announced.
        pub fn ring_anyway(&self) {
            // a full counter refuses, and wakes all the same
            let _ = (&self.0.event).write(&1u64.to_ne_bytes());
        }

        /// From here on until `retract` somebody who rings ends a sleep. The caller looks once more for work before it sleeps.
        pub fn announce(&self) {
            self.0.asleep.store(true, SeqCst);
            fence(SeqCst);
        }

        pub fn retract(&self) {
            self.0.asleep.store(false, SeqCst);
        }
    }

    pub struct Uring {
        ring: IoUring,
        bell: Bell,
        /// The bell's own request is with the system.
        armed: bool,
        /// Reads with the system, or queued for it.
        under_way: usize,
        /// By place: the system reads them when a call is handed over.
        iovecs: Vec<[libc::iovec; 3]>,
    }

    // SAFETY: the addresses in `iovecs` are only handed on; they are used as `read` promises.
    unsafe impl Send for Uring {}

    impl Uring {
        /// For reads at so many places. Err where the system knows no io_uring or forbids it.
        pub fn new(places: usize) -> io::Result<Uring> {
            // each place has one call at most, and the bell one
            let entries = u32::try_from(places + 1).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
            // systems before 5.19 do not know the flag, which saves interrupts: nobody looks for ends but in `wait`
            let ring = IoUring::builder().setup_coop_taskrun().build(entries).or_else(|_| IoUring::new(entries))?;
            let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
            Ok(Uring { ring, bell: Bell::new()?, armed: false, under_way: 0, iovecs: vec![[none; 3]; places] })
        }

        pub fn bell(&self) -> Bell {
            self.bell.clone()
        }

        /// Queues a read into up to three buffers in turn.
        ///
        /// # Safety
        /// Until `wait` has named the place the buffers stay where they are, the file stays open, and nobody uses what is in them. Nothing
        /// else is under way at the place.
        pub unsafe fn read(&mut self, place: usize, file: &File, offset: u64, bufs: &mut [IoSliceMut<'_>]) {
            let iovecs = &mut self.iovecs[place];
            for (to, buf) in iovecs.iter_mut().zip(bufs.iter_mut()) {
                *to = libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() };
            }
            let n = bufs.len().min(iovecs.len()) as u32;
            let read = opcode::Readv::new(Fd(file.as_raw_fd()), iovecs.as_ptr(), n).offset(offset).build();
            self.push(read.user_data(place as u64));
            self.under_way += 1;
        }

        /// Hands over what is queued, waits until something has ended or the bell rings, and names what has: place, and bytes read.
        pub fn wait(&mut self, mut ended: impl FnMut(usize, io::Result<usize>)) {
            if !self.armed {
                let event = Fd(self.bell.0.event.as_raw_fd());
                self.push(opcode::PollAdd::new(event, libc::POLLIN as u32).build().user_data(BELL));
                self.armed = true;
            }
            if self.ring.submit_and_wait(1).is_err_and(|e| e.kind() != io::ErrorKind::Interrupted) {
                // Short of memory, or of room for ends: what is queued stays queued, and whoever waits for it has a timeout.
                std::thread::sleep(Duration::from_millis(1));
            }
            for end in self.ring.completion() {
                match end.user_data() {
                    BELL => {
                        self.armed = false;
                        let _ = (&self.bell.0.event).read(&mut [0; 8]);
                    }
                    place => {
                        self.under_way -= 1;
                        let n = end.result();
                        let outcome = usize::try_from(n).map_err(|_| io::Error::from_raw_os_error(n.wrapping_neg()));
                        ended(place as usize, outcome);
                    }
                }
            }
        }

        fn push(&mut self, entry: io_uring::squeue::Entry) {
            // SAFETY: the buffers are as `read` promises, and `iovecs` is never resized; the bell's request has none. The queue has
            // room: an entry a place and one for the bell, each of which is pushed again only after its end.
            let pushed = unsafe { self.ring.submission().push(&entry) };
            debug_assert!(pushed.is_ok());
        }
    }

    /// Waits for what is under way: whoever made the buffers may free them then.
    impl Drop for Uring {
        fn drop(&mut self) {
            while self.under_way > 0 {
                self.wait(|_, _| ());
            }
        }
    }
}

#[cfg(not(all(target_os = "linux", feature = "io-uring")))]
mod platform {
    use std::convert::Infallible;
    use std::fs::File;
    use std::io::{self, IoSliceMut};

    #[derive(Clone)]
    pub struct Bell(Infallible);

    impl Bell {
        pub fn ring(&self) {
            match self.0 {}
        }

        pub fn ring_anyway(&self) {
            match self.0 {}
        }

        pub fn announce(&self) {
            match self.0 {}
        }

        pub fn retract(&self) {
            match self.0 {}
        }
    }

    /// None exists.
    pub struct Uring(Infallible);

    impl Uring {
        pub fn new(_places: usize) -> io::Result<Uring> {
            let why =
                if cfg!(target_os = "linux") { "built without the feature io-uring" } else { "not on this system" };
            Err(io::Error::new(io::ErrorKind::Unsupported, why))
        }

        pub fn bell(&self) -> Bell {
            match self.0 {}
        }

        pub unsafe fn read(&mut self, _place: usize, _file: &File, _offset: u64, _bufs: &mut [IoSliceMut<'_>]) {
            match self.0 {}
        }

        pub fn wait(&mut self, _ended: impl FnMut(usize, io::Result<usize>)) {
            match self.0 {}
        }
    }
}
