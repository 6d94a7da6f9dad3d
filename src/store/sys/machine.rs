//! What state the machine and this process are in, for the metrics log: page faults that cost a read, memory, bytes that really came from
//! the disk, heat. [`Machine::open`] opens what is to be asked, [`Machine::read`] asks: a few system calls, nothing allocated.
//! Heat is asked for once a second at most, since a sensor may take its time.

use std::time::{Duration, Instant};

#[cfg(target_os = "linux")]
#[path = "machine_linux.rs"]
mod platform;
#[cfg(target_os = "macos")]
#[path = "machine_macos.rs"]
mod platform;

/// At one moment. None: the system does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MachineState {
    /// Page faults of this process that needed a read, since it began.
    pub major_faults: u64,
    /// Memory of this process that is resident.
    pub rss_bytes: Option<u64>,
    /// Read from the disk for this process since it began; what the page cache had is not in it.
    pub disk_bytes: Option<u64>,
    /// 0 nominal, 1 fair, 2 serious, 3 critical.
    pub thermal_level: Option<u8>,
    /// Of the hottest zone, in thousandths of a degree Celsius.
    pub thermal_mc: Option<i32>,
}

/// Level and temperature.
type Heat = (Option<u8>, Option<i32>);

/// What is asked, kept open.
pub struct Machine {
    process: platform::Process,
    thermal: platform::Thermal,
    /// As last asked, and when.
    heat: Heat,
    asked: Option<Instant>,
}

impl Machine {
    /// What cannot be opened is None in every answer.
    pub fn open() -> Machine {
        let (process, thermal) = (platform::Process::open(), platform::Thermal::open());
        Machine { process, thermal, heat: (None, None), asked: None }
    }

    pub fn read(&mut self) -> MachineState {
        let now = Instant::now();
        if self.asked.is_none_or(|then| now - then >= Duration::from_secs(1)) {
            self.heat = self.thermal.read();
            self.asked = Some(now);
        }
        let (rss_bytes, disk_bytes) = self.process.read();
        let (thermal_level, thermal_mc) = self.heat;
        MachineState { major_faults: major_faults(), rss_bytes, disk_bytes, thermal_level, thermal_mc }
    }
}

/// Bytes that the drive has delivered for this process, in all; None where the system does not say.
#[cfg(feature = "tools")]
pub fn disk_read_bytes() -> Option<u64> {
    platform::Process::open().read().1
}

fn major_faults() -> u64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `usage` has room for the answer.
    if unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) } != 0 {
        return 0;
    }
    // SAFETY: all of it was zeroed, and every bit pattern is a rusage.
    u64::try_from(unsafe { usage.assume_init() }.ru_majflt).unwrap_or(0)
}

/// Unixes without a version of their own say nothing.
#[cfg(not(any(target_os = "linux", target_os = "macos")))]
mod platform {
    pub struct Process;

    impl Process {
        pub fn open() -> Self {
            Self
        }

        pub fn read(&self) -> (Option<u64>, Option<u64>) {
            (None, None)
        }
    }

    pub struct Thermal;

    impl Thermal {
        pub fn open() -> Self {
            Self
        }

        pub fn read(&self) -> super::Heat {
            (None, None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_only_grow_and_memory_is_seen() {
        let mut machine = Machine::open();
        let before = machine.read();
        let held = vec![1u8; 64 << 20];
        let after = machine.read();
        assert!(after.major_faults >= before.major_faults);
        assert!(after.disk_bytes >= before.disk_bytes);
        if let (Some(before), Some(after)) = (before.rss_bytes, after.rss_bytes) {
            assert!(after >= before + (32 << 20), "{before} {after}");
        }
        assert!(!cfg!(any(target_os = "linux", target_os = "macos")) || after.rss_bytes.is_some());
        drop(held);
    }
}
