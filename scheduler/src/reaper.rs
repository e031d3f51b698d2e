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
/// Rows of a list: what fits into one message.
const MAX_LISTED: usize = 10_000;

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
        // Its worker does not remove by itself what was kept, nor where a person has lived.
        let was_kept = core
            .state
            .sandbox(&name)
            .is_some_and(|sandbox| sandbox.kept_until_ms.is_some() || core.sessions.is_judge_runner(&sandbox.worker_id));
        let ask = core.sessions.asks.by_sandbox.entry(name.clone()).or_insert_with(|| Ask {
            next_ms: match was_kept {
                true => steady_ms,
                false => steady_ms + GRACE_MS + chance.below(LOOK_EVERY_MS),
            },
            asked: 0,
        });
        if ask.next_ms <= steady_ms {
            ask_worker(core, &name, chance);
        }
    }
}

/// Sandboxes in custody that no trial needs, and that are not kept for people.
pub fn unneeded(core: &Core) -> impl Iterator<Item = &str> {
    core.state
        .custody()
        .map(|(name, _)| name)
        .filter(|name| !decide::needed(&core.state, name) && !decide::kept(&core.state, name, core.now_ms()))
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

/// Custody for the operator.
pub fn list(core: &Core) -> v1::SandboxList {
    let names: Vec<&str> = core.state.custody().map(|(name, _)| name).collect();
    let foreign = core.sessions.foreign().map(|(worker_id, name)| v1::ForeignSandbox {
        worker_id: worker_id.to_owned(),
        name: name.to_owned(),
    });
    v1::SandboxList {
        foreign: foreign.collect(),
        ..listed(core, &names)
    }
}

/// Asks for everything that can be asked for now, or only tells what that is.
pub fn reap_now(core: &mut Core, dry_run: bool, chance: &mut Chance) -> v1::SandboxList {
    let unneeded: Vec<String> = unneeded(core).map(str::to_owned).collect();
    let here = |core: &Core, name: &str| {
        core.state
            .sandbox(name)
            .is_some_and(|sandbox| core.sessions.is_here(&sandbox.worker_id))
    };
    let asked: Vec<String> = unneeded
        .into_iter()
        .filter(|name| {
            if dry_run {
                here(core, name)
            } else {
                ask_worker(core, name, chance)
            }
        })
        .collect();
    let asked: Vec<&str> = asked.iter().map(String::as_str).collect();
    listed(core, &asked)
}

fn listed(core: &Core, names: &[&str]) -> v1::SandboxList {
    let sandboxes = names.iter().filter_map(|name| {
        let sandbox = core.state.sandbox(name)?;
        let state = match (sandbox.destroy_asked_ms, sandbox.created) {
            (Some(_), _) => v1::SandboxState::DestroyAsked,
            (None, true) => v1::SandboxState::Created,
            (None, false) => v1::SandboxState::Intended,
        };
        Some(v1::CustodySandbox {
            name: (*name).to_owned(),
            trial_id: sandbox.trial.id().to_string(),
            worker_id: sandbox.worker_id.clone(),
            provider: sandbox.provider.clone(),
            provider_id: sandbox.provider_id.clone(),
            state: state.into(),
            intended_at_ms: sandbox.intended_ms,
            destroy_asked_at_ms: sandbox.destroy_asked_ms,
            needed: decide::needed(&core.state, name),
            kept_until_ms: sandbox.kept_until_ms,
            worker_here: core.sessions.is_here(&sandbox.worker_id),
            asked: core.sessions.asks.by_sandbox.get(*name).map_or(0, |ask| ask.asked),
        })
    });
    let mut sandboxes: Vec<_> = sandboxes.collect();
    sandboxes.sort_by_key(|sandbox| sandbox.intended_at_ms);
    sandboxes.truncate(MAX_LISTED);
    v1::SandboxList {
        sandboxes,
        total: names.len() as u64,
        foreign: Vec::new(),
        now_ms: core.now_ms(),
    }
}

/// What lies in the folder of a worker that has just come: ours that nobody needs is to go now, and what is not ours is left alone.
pub fn greet(core: &mut Core, hello: &v1::Hello, chance: &mut Chance) {
    let listing = Listing::Folder {
        boot_id: &hello.boot_id,
        names: &hello.sandboxes,
    };
    let (unneeded, foreign) = decide::unneeded(&core.state, &listing);
    let now_ms = core.now_ms();
    let unneeded: Vec<&str> = unneeded
        .into_iter()
        .filter(|name| !decide::kept(&core.state, name, now_ms))
        .collect();
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use evalgrid_domain::{
        ids::{BatchId, OrgId},
        limits,
    };
    use evalgrid_proto::log::v1::{self as log, event::Kind};
    use evalgrid_workflow::{State, decide::Holder};
    use tokio::sync::mpsc;

    use super::*;

    const NOW_MS: u64 = 1_800_000_000_000;

    /// A sandbox with a verdict, whose worker `w` is here and has not removed it.
    fn left_over() -> (Core, mpsc::Receiver<crate::sessions::Outbound>, String) {
        kept_for(0)
    }

    /// The same, of a worker that keeps it.
    fn kept_for(keep_ms: u64) -> (Core, mpsc::Receiver<crate::sessions::Outbound>, String) {
        let mut core = Core::new(State::default(), vec![0; 65], 0);
        core.set_time(NOW_MS, 0);
        let organization = OrgId::new(NOW_MS, [1; 10]);
        let created = decide::create_organization(&core.state, "acme", organization, NOW_MS);
        core.commit_all(created);
        let started = log::BatchStarted {
            batch: BatchId::new(NOW_MS, [1; 10]).0.to_vec().into(),
            organization_id: organization.to_string(),
            request: Some(v1::ObjectRef::default()),
            suite: Some(v1::Suite::default()),
            cases: vec![v1::CaseInfo::default()],
            variants: vec![v1::VariantInfo {
                provider: "process".into(),
                ..Default::default()
            }],
            trials: 1,
            variant_ids: vec![String::new()],
            ..Default::default()
        };
        core.commit(decide::event(NOW_MS, Kind::BatchStarted(started)));
        let key = core.state.next_for("w", &["process".into()], NOW_MS).unwrap();
        let holder = Holder {
            worker_id: "w",
            incarnation: "1",
            boot_id: "boot",
        };
        let granted = decide::grant(&core.state, key, holder, NOW_MS);
        core.commit_all(granted);
        let (token, _) = core.state.leases().next().unwrap();
        let outcome = v1::TrialOutcome {
            status: v1::TrialStatus::Passed.into(),
            ..Default::default()
        };
        let settled = decide::result(&core.state, "w", token, outcome, &mut Chance::new(1), NOW_MS).unwrap();
        let settled = decide::keep_sandbox(&core.state, "w", settled, keep_ms, NOW_MS);
        core.commit_settled(settled);
        let name = core.state.custody().next().unwrap().0.to_owned();
        let (sender, outbound) = mpsc::channel(64);
        let hello = v1::Hello {
            worker_id: "w".into(),
            ..Default::default()
        };
        core.sessions.join(&hello, sender, 0);
        (core, outbound, name)
    }

    /// Looks every second; when the worker was asked.
    fn asked(core: &mut Core, outbound: &mut mpsc::Receiver<crate::sessions::Outbound>, seconds: std::ops::Range<u64>) -> Vec<u64> {
        let mut chance = Chance::new(1);
        let mut asked = Vec::new();
        for second in seconds {
            core.set_time(NOW_MS + second * 1_000, second * 1_000);
            reap(core, &mut chance);
            while let Ok((_, message)) = outbound.try_recv() {
                assert!(matches!(message, Message::Destroy(_)));
                asked.push(second);
            }
        }
        asked
    }

    /// catalogue 57: what does not succeed is tried again, less and less often, for ever, and stays in sight.
    #[test]
    fn a_stubborn_sandbox_is_asked_for_again_and_again_until_it_is_gone() {
        let (mut core, mut outbound, name) = left_over();
        let times = asked(&mut core, &mut outbound, 0..7_200);
        assert!((30..=40).contains(&times[0]), "its worker has time to do it by itself: {times:?}");
        let pauses: Vec<u64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(pauses[0] <= 40 && pauses.iter().all(|pause| *pause <= 610), "{pauses:?}");
        assert!((12..40).contains(&times.len()), "in two hours: {times:?}");
        let row = list(&core).sandboxes.remove(0);
        assert_eq!((row.state(), row.asked as usize), (v1::SandboxState::DestroyAsked, times.len()));
        let gone = decide::destroyed(&core.state, &name, "w", core.now_ms());
        core.commit_all(gone);
        assert!(asked(&mut core, &mut outbound, 7_200..9_000).is_empty(), "confirmed");
        assert!(core.sessions.asks.by_sandbox.is_empty() && list(&core).total == 0);
    }

    /// One that is kept for people is nobody's to destroy until its time is over, and somebody's for ever from then on.
    #[test]
    fn a_kept_sandbox_stays_until_its_time_is_over() {
        let (mut core, mut outbound, name) = kept_for(600_000);
        let mut chance = Chance::new(1);
        assert_eq!(list(&core).sandboxes[0].kept_until_ms, Some(NOW_MS + 600_000));
        assert!(asked(&mut core, &mut outbound, 0..590).is_empty());
        assert_eq!(reap_now(&mut core, false, &mut chance).total, 0, "not even by hand");
        // A worker that comes back with it, and a scheduler that comes back from a snapshot, leave it alone, too.
        core.state = State::restore(&core.state.save()).unwrap();
        let hello = v1::Hello {
            worker_id: "w".into(),
            providers: vec!["process".into()],
            boot_id: "boot".into(),
            sandboxes: vec![name.clone()],
            ..Default::default()
        };
        greet(&mut core, &hello, &mut chance);
        assert!(outbound.try_recv().is_err());
        let times = asked(&mut core, &mut outbound, 600..700);
        assert!((600..=605).contains(times.first().unwrap()), "{times:?}");
        let longest = kept_for(u64::MAX).0;
        assert_eq!(list(&longest).sandboxes[0].kept_until_ms, Some(NOW_MS + limits::MAX_KEEP_MS));
    }

    /// catalogue 5: what counts is what is, not what has changed. A worker that was away when it was to be asked is asked when it is back.
    #[test]
    fn nobody_is_asked_who_is_away() {
        let (mut core, mut outbound, _) = left_over();
        let number = 1;
        core.sessions.leave("w", number);
        assert!(asked(&mut core, &mut outbound, 0..600).is_empty());
        assert_eq!(
            list(&core).sandboxes[0].state(),
            v1::SandboxState::Intended,
            "nothing is on record that did not happen"
        );
        let (sender, mut outbound) = mpsc::channel(64);
        let hello = v1::Hello {
            worker_id: "w".into(),
            ..Default::default()
        };
        core.sessions.join(&hello, sender, 600_000);
        assert_eq!(asked(&mut core, &mut outbound, 600..620).len(), 1);
    }
}
