//! Time and chance, passed in so that a simulator can own them.

use std::{
    sync::Arc,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use rand::RngCore as _;

/// What the scheduler knows of the world besides what it is told.
pub trait World: Send + Sync {
    /// Wall time, milliseconds since the epoch. May jump.
    fn now_ms(&self) -> u64;
    /// Time that never jumps, milliseconds since some start: for liveness.
    fn steady_ms(&self) -> u64;
    /// Unpredictable bytes.
    fn random(&self, bytes: &mut [u8]);
}

/// The machine's clocks and randomness.
pub struct Machine {
    start: Instant,
}

impl Machine {
    /// The one that a real server uses.
    #[expect(clippy::disallowed_methods, reason = "this is the clock that all others are told to use")]
    pub fn shared() -> Arc<dyn World> {
        Arc::new(Machine { start: Instant::now() })
    }
}

impl World for Machine {
    #[expect(clippy::disallowed_methods, reason = "this is the clock that all others are told to use")]
    fn now_ms(&self) -> u64 {
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |elapsed| elapsed.as_millis() as u64)
    }

    fn steady_ms(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    fn random(&self, bytes: &mut [u8]) {
        rand::rng().fill_bytes(bytes);
    }
}
