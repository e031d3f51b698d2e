//! What time alone brings about: leases that run out, sandboxes nobody comes back to, trials that nothing will end.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use evalgrid_workflow::{Chance, decide};
use tokio::sync::watch;

use crate::{
    dispatch::{Variables, dispatch},
    engine::{Core, Engine},
    reaper, waits,
    workers::chance,
};

/// The longest between two looks. Abandonment is counted in hours, delays of retries in hundreds of milliseconds.
const TICK: Duration = Duration::from_millis(500);
/// The shortest: a provider that gives out 200 sandboxes a second is served at its pace, and an idle scheduler costs nothing.
const SHORTEST_SLEEP: Duration = Duration::from_millis(5);
/// Looks for abandoned trials go over every batch, so they are rarer.
const LOOKS_PER_ABANDON: u64 = 120;

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
    let look = TICK.min(lease / 5);
    let mut sleep = look;
    let mut looked_ms = engine.world().steady_ms();
    let mut looks = 0u64;
    loop {
        tokio::select! {
            () = tokio::time::sleep(sleep) => {}
            _ = shutdown.wait_for(|stop| *stop) => return,
        }
        let mut chance = chance(engine.world());
        let (opens_ms, _) = engine.turn(|core| {
            // Where only a limit has asked for this, there is no need to go over every lease.
            if looked_ms + look.as_millis() as u64 / 2 <= core.steady_ms() {
                looked_ms = core.steady_ms();
                looks += 1;
                tick(
                    core,
                    lease_ms,
                    grace_ms,
                    &mut chance,
                    looks.is_multiple_of(LOOKS_PER_ABANDON),
                    &variables,
                );
            } else {
                dispatch(core, &variables);
            }
            let opens_ms = core.state.next_opening_ms(core.now_ms());
            opens_ms.map(|at_ms| Duration::from_millis(at_ms - core.now_ms()))
        });
        sleep = opens_ms.map_or(look, |opens| opens.clamp(SHORTEST_SLEEP.min(look), look));
    }
}

/// What has come due by now. `abandoned`: look for abandoned trials, too.
pub fn tick(core: &mut Core, lease_ms: u64, grace_ms: u64, chance: &mut Chance, abandoned: bool, variables: &Variables) {
    let now_ms = core.now_ms();
    let holders: BTreeSet<String> = core.state.leases().map(|(_, lease)| lease.worker_id.clone()).collect();
    let steady_ms = core.steady_ms();
    for worker_id in core.sessions.overdue(holders, lease_ms, steady_ms) {
        tracing::warn!(
            worker_id,
            "no word from the worker for a whole lease; its trials wait for its return"
        );
        let events = decide::expire_worker(&core.state, &worker_id, chance, now_ms);
        core.commit_all(events);
    }
    let gone = |worker_id: &str| !core.sessions.is_here(worker_id);
    let events = decide::give_up_absent(&core.state, &gone, grace_ms, chance, now_ms);
    core.commit_all(events);
    let events = core.check_ins.sweep(&core.state, steady_ms, now_ms);
    core.commit_all(events);
    if abandoned {
        let events = decide::abandon(&core.state, now_ms);
        core.commit_all(events);
    }
    reaper::reap(core, chance);
    dispatch(core, variables);
    waits::tell_missed(core);
}
