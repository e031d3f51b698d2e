//! What time alone brings about: leases that run out, sandboxes nobody comes back to, trials that nothing will end.

use std::{collections::HashSet, sync::Arc, time::Duration};

use evalgrid_workflow::decide;
use tokio::sync::watch;

use crate::{
    dispatch::{Variables, dispatch},
    engine::{Core, Engine},
    workers::retry_delay_ms,
};

/// The longest between two looks. Abandonment is counted in hours, delays of retries in hundreds of milliseconds.
const TICK: Duration = Duration::from_millis(500);
/// Looks for abandoned trials go over every batch, so they are rarer.
const TICKS_PER_ABANDON: u64 = 120;

/// Runs until shutdown.
pub async fn timer_loop(
    engine: Engine,
    variables: Arc<Variables>,
    lease: Duration,
    affinity_grace: Duration,
    mut shutdown: watch::Receiver<bool>,
) {
    let lease_ms = lease.as_millis() as u64;
    let grace_ms = affinity_grace.as_millis() as u64;
    let mut interval = tokio::time::interval(TICK.min(lease / 5));
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut ticks = 0u64;
    loop {
        tokio::select! {
            _ = interval.tick() => {}
            _ = shutdown.wait_for(|stop| *stop) => return,
        }
        ticks += 1;
        let delay_ms = retry_delay_ms(engine.world());
        let abandoned = ticks.is_multiple_of(TICKS_PER_ABANDON);
        engine.turn(|core| tick(core, lease_ms, grace_ms, delay_ms, abandoned, &variables));
    }
}

/// What has come due by now. `abandoned`: look for abandoned trials, too.
pub fn tick(core: &mut Core, lease_ms: u64, grace_ms: u64, delay_ms: u64, abandoned: bool, variables: &Variables) {
    let now_ms = core.now_ms();
    let holders: HashSet<String> = core.state.leases().map(|(_, lease)| lease.worker_id.clone()).collect();
    let steady_ms = core.steady_ms();
    for worker_id in core.sessions.overdue(holders, lease_ms, steady_ms) {
        tracing::warn!(
            worker_id,
            "no word from the worker for a whole lease; its trials wait for its return"
        );
        let events = decide::expire_worker(&core.state, &worker_id, now_ms);
        core.commit_all(events);
    }
    let gone = |worker_id: &str| !core.sessions.is_here(worker_id);
    let events = decide::give_up_absent(&core.state, &gone, grace_ms, delay_ms, now_ms);
    core.commit_all(events);
    if abandoned {
        let events = decide::abandon(&core.state, now_ms);
        core.commit_all(events);
    }
    dispatch(core, variables);
}
