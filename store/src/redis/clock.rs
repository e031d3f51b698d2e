//! Time as a lease needs it: never set back, and counted while the machine sleeps.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Time since the machine started, sleep included: an owner that wakes after its lease must see that time has passed.
pub(super) fn now() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Lets time pass, between two attempts.
pub(super) fn wait(time: Duration) {
    std::thread::sleep(time);
}

/// A moment up to which something may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline(Duration);

impl Deadline {
    pub(super) fn after(time: Duration) -> Deadline {
        Deadline(now() + time)
    }

    /// This one, or one at `time` from now, whichever is earlier.
    pub(super) fn at_most(self, time: Duration) -> Deadline {
        Deadline(self.0.min(now() + time))
    }

    /// The time that is left; None where there is none.
    pub(super) fn left(self) -> Option<Duration> {
        self.0.checked_sub(now()).filter(|left| !left.is_zero())
    }
}
