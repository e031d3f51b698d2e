//! Stopping: the first signal asks everything to end within a time, the second ends the process at once.

use std::{process::exit, time::Duration};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
    time::sleep,
};

use crate::Failure;

/// After the first signal. Each role has shorter limits of its own; this one is for a bug in them.
const HARD_DEADLINE: Duration = Duration::from_secs(40);
/// The shell's code for a process that SIGINT has ended.
const INTERRUPTED: i32 = 130;

/// Turns true at SIGINT or SIGTERM. From then on the process ends at the second signal or at the hard deadline, whatever it is doing.
pub(crate) fn on_signal() -> Result<watch::Receiver<bool>, Failure> {
    let cannot = |error| {
        Failure::new(
            format!("signals cannot be handled: {error}"),
            "Check the limits of this process (ulimit -a).",
        )
    };
    let mut interrupt = signal(SignalKind::interrupt()).map_err(cannot)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(cannot)?;
    let (stop, stopped) = watch::channel(false);
    tokio::spawn(async move {
        either(&mut interrupt, &mut terminate).await;
        tracing::info!("stopping; a second signal stops at once");
        // Nobody left to tell means that everything has ended already.
        let _ = stop.send(true);
        tokio::select! {
            () = either(&mut interrupt, &mut terminate) => exit(INTERRUPTED),
            () = sleep(HARD_DEADLINE) => {
                eprintln!("error: not everything stopped within {} s", HARD_DEADLINE.as_secs());
                exit(1);
            }
        }
    });
    Ok(stopped)
}

async fn either(interrupt: &mut Signal, terminate: &mut Signal) {
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
}
