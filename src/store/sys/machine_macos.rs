//! macOS: proc_pid_rusage for the process, the system's notification of thermal pressure for the heat. There is no temperature that an
//! ordinary process may read.

use std::ffi::{c_char, c_int};
use std::mem::MaybeUninit;

use super::Heat;

pub struct Process;

impl Process {
    pub fn open() -> Self {
        Self
    }

    /// Resident bytes, bytes read from the disk.
    pub fn read(&self) -> (Option<u64>, Option<u64>) {
        let mut usage = MaybeUninit::<libc::rusage_info_v4>::zeroed();
        // SAFETY: getpid has no preconditions; `usage` has room for what this flavor fills in.
        let status = unsafe { libc::proc_pid_rusage(libc::getpid(), libc::RUSAGE_INFO_V4, usage.as_mut_ptr().cast()) };
        if status != 0 {
            return (None, None);
        }
        // SAFETY: all of it was zeroed, and every bit pattern is a rusage_info_v4.
        let usage = unsafe { usage.assume_init() };
        (Some(usage.ri_resident_size), Some(usage.ri_diskio_bytesread))
    }
}

// In libSystem, which every program is linked with.
unsafe extern "C" {
    fn notify_register_check(name: *const c_char, token: *mut c_int) -> u32;
    fn notify_get_state(token: c_int, state: *mut u64) -> u32;
    fn notify_cancel(token: c_int) -> u32;
}

pub struct Thermal {
    token: Option<c_int>,
}

impl Thermal {
    pub fn open() -> Self {
        let mut token = 0;
        // SAFETY: the name is a C string, `token` receives the registration.
        let status = unsafe { notify_register_check(c"com.apple.system.thermalpressurelevel".as_ptr(), &mut token) };
        Self { token: (status == 0).then_some(token) }
    }

    /// The system counts nominal, moderate, heavy, trapping, sleeping: the last two are critical.
    pub fn read(&self) -> Heat {
        let mut state = 0;
        // SAFETY: the registration is ours, `state` receives the answer.
        let level = self.token.filter(|&token| unsafe { notify_get_state(token, &mut state) } == 0);
        (level.map(|_| state.min(3) as u8), None)
    }
}

impl Drop for Thermal {
    fn drop(&mut self) {
        if let Some(token) = self.token {
            // SAFETY: the registration is ours, and this is its last use.
            unsafe { notify_cancel(token) };
        }
    }
}
