//! Sandboxes in custody against the needs of trials, again and again: what nobody needs, its worker is asked to destroy until it confirms.
//!
//! It looks at what is, not at what has changed, so nothing that was missed is missed for ever. Workers remove the sandboxes of their own
//! trials without being asked; the reaper is for what crashes, lost messages and stubborn files leave behind.

use std::collections::{BTreeMap, BTreeSet};

use evalgrid_proto::v1::{self, to_worker::Message};
use evalgrid_workflow::{Chance, Listing, decide};

use crate::engine::Core;

/// Between two looks. They go over all of custody: 10,000 sandboxes take about a millisecond. Milliseconds, as below.
const LOOK_EVERY_MS: u64 = 5_000;
/// How long a worker has to remove a sandbox by itself before it is asked: its own tries at a stubborn one take some of this.
const GRACE_MS: u64 = 30_000;
/// Asked again after this, then after twice as long each time.
const ASK_AGAIN_MS: u64 = 30_000;
/// But never less often than this, for ever: what is not confirmed stays on the list.
const LONGEST_PAUSE_MS: u64 = 600_000;
/// Names of others' in a worker's folder that are kept to be shown; one more would tell nobody more.
const MAX_FOREIGN: usize = 100;

/// What workers are asked. Not durable: after a restart everybody is asked anew.
#[derive(Default)]
pub struct Asks {
    by_sandbox: BTreeMap<String, Ask>,
    look_at_ms: u64,
}

/// Steady milliseconds.
struct Ask {
    next_ms: u64,
    asked: u32,
}

/// The level-triggered look. Does nothing where it is not yet time.
pub fn reap(core: &mut Core, chance: &mut Chance) {
    let steady_ms = core.steady_ms();
    if steady_ms < core.sessions.asks.look_at_ms {
        return;
    }
    core.sessions.asks.look_at_ms = steady_ms + LOOK_EVERY_MS;
    let unneeded: BTreeSet<String> = unneeded(core).map(str::to_owned).collect();
    core.sessions.asks.by_sandbox.retain(|name, _| unneeded.contains(name));
    for name in unneeded {
        let ask = core.sessions.asks.by_sandbox.entry(name.clone()).or_insert_with(|| Ask {
            next_ms: steady_ms + GRACE_MS + chance.below(LOOK_EVERY_MS),
            asked: 0,
        });
        if ask.next_ms <= steady_ms {
            ask_worker(core, &name, chance);
        }
    }
}

/// Sandboxes in custody that no trial needs.
pub fn unneeded(core: &Core) -> impl Iterator<Item = &str> {
    core.state
        .custody()
        .map(|(name, _)| name)
        .filter(|name| !decide::needed(&core.state, name))
}

/// Asks a sandbox's worker to destroy it, if it is here; true if it was. Only for what no trial needs.
pub fn ask_worker(core: &mut Core, name: &str, chance: &mut Chance) -> bool {
    let Some(sandbox) = core.state.sandbox(name).filter(|sandbox| core.sessions.is_here(&sandbox.worker_id)) else {
        return false;
    };
    let worker_id = sandbox.worker_id.clone();
    let destroy = v1::Destroy {
        sandbox: name.to_owned(),
        provider: sandbox.provider.clone(),
        provider_id: sandbox.provider_id.clone().unwrap_or_default(),
    };
    let event = decide::ask_to_destroy(&core.state, name, core.now_ms());
    core.commit_all(event);
    let steady_ms = core.steady_ms();
    let ask = core
        .sessions
        .asks
        .by_sandbox
        .entry(name.to_owned())
        .or_insert(Ask { next_ms: 0, asked: 0 });
    let pause_ms = (ASK_AGAIN_MS << ask.asked.min(16)).min(LONGEST_PAUSE_MS);
    ask.next_ms = steady_ms + pause_ms / 2 + chance.below(pause_ms / 2 + 1);
    ask.asked += 1;
    if ask.asked > 1 {
        tracing::warn!(
            worker_id,
            sandbox = name,
            asked = ask.asked,
            "a sandbox that nobody needs is still not destroyed"
        );
    }
    let position = core.position();
    core.sessions.send(&worker_id, position, Message::Destroy(destroy));
    true
}

/// What lies in the folder of a worker that has just come: ours that nobody needs is to go now, and what is not ours is left alone.
pub fn greet(core: &mut Core, hello: &v1::Hello, chance: &mut Chance) {
    let listing = Listing::Folder {
        boot_id: &hello.boot_id,
        names: &hello.sandboxes,
    };
    let (unneeded, foreign) = decide::unneeded(&core.state, &listing);
    for name in unneeded {
        let its_own = core.state.sandbox(name).is_some_and(|sandbox| sandbox.worker_id == hello.worker_id);
        if !its_own || !ask_worker(core, name, chance) {
            // In no custody of this worker: confirmed gone, and still there, as after a crash between two deletions.
            let destroy = v1::Destroy {
                sandbox: name.to_owned(),
                ..v1::Destroy::default()
            };
            let position = core.position();
            core.sessions.send(&hello.worker_id, position, Message::Destroy(destroy));
        }
    }
    if !foreign.is_empty() {
        let first = foreign[0];
        tracing::warn!(
            worker_id = hello.worker_id,
            count = foreign.len(),
            first,
            "in the worker's folder lies what is no sandbox of ours; it is left alone"
        );
        core.sessions.note_foreign(&hello.worker_id, foreign.into_iter().take(MAX_FOREIGN));
    }
}
