//! Whether the log makes progress. A scheduler whose disk takes nothing more still accepts connections and still knows everything; it must not
//! look as if it served.

use std::time::Duration;

use tokio::{sync::watch, time::sleep};

use crate::{engine::Engine, gate::Gate};

/// Between two looks.
const LOOK: Duration = Duration::from_millis(500);
/// A group becomes durable within milliseconds, on a busy disk within a second or two.
pub const STALLED_AFTER: Duration = Duration::from_secs(5);

/// What was seen of the log's progress.
#[derive(Default)]
pub struct Pace {
    /// How far the log was durable, and when it last moved or had nothing to do, in steady milliseconds.
    moved: Option<(u64, u64)>,
}

impl Pace {
    /// Looks at the newest position and at the durable one. Answers with how long nothing has become durable although something waits for it,
    /// once that is too long.
    pub fn look(&mut self, newest: u64, durable: u64, steady_ms: u64) -> Option<Duration> {
        match self.moved {
            Some((seen, since_ms)) if seen == durable && durable < newest => {
                let stands = Duration::from_millis(steady_ms - since_ms);
                (stands >= STALLED_AFTER).then_some(stands)
            }
            _ => {
                self.moved = Some((durable, steady_ms));
                None
            }
        }
    }
}

/// Runs until shutdown: what the gate says of this scheduler follows from what the log does, whatever was said before.
pub async fn watch(engine: Engine, gate: Gate, mut shutdown: watch::Receiver<bool>) {
    let mut pace = Pace::default();
    let mut stalled = false;
    loop {
        tokio::select! {
            () = sleep(LOOK) => {}
            _ = shutdown.wait_for(|stop| *stop) => return,
        }
        let (newest, _) = engine.turn(|core| core.position());
        let durable = engine.watch().borrow().position;
        let stands = pace.look(newest, durable, engine.world().steady_ms());
        if stands.is_some() == stalled {
            continue;
        }
        stalled = stands.is_some();
        match stands {
            Some(stands) => tracing::error!(
                durable,
                waiting = newest - durable,
                "the log has taken nothing for {stands:?}: look at its disk; calls are refused until it goes on"
            ),
            None => tracing::info!(durable, "the log goes on, and so does this scheduler"),
        }
        gate.stall(stalled).await;
    }
}
