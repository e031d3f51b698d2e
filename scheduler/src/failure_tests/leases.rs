//! Leases and workers, by a clock in the test's hands: the scheduler's loop alone, without threads.

use evalgrid_domain::ids::BatchId;
use evalgrid_proto::{
    log::v1::{self as log, event::Kind},
    v1::{Heartbeat, Hello, Report, StepRecord, TrialOutcome, TrialResult, TrialStatus, from_worker, to_worker::Message},
};
use evalgrid_store::log::MAX_GROUP_RECORDS;
use evalgrid_workflow::{Chance, decide};
use tokio::sync::mpsc;

use super::*;
use crate::{
    MAX_LEASE, MIN_LEASE,
    dispatch::Variables,
    sessions::{MAX_OUTBOUND, Outbound},
    timers::tick,
    workers::{HEARTBEATS_PER_LEASE, greet, hear},
};

pub(super) const LEASE_MS: u64 = 10_000;
const GRACE_MS: u64 = 60_000;

/// A cell's loop, and its workers' ends of the streams.
pub(super) struct Loop {
    pub(super) core: Core,
    chance: Chance,
    variables: Variables,
}

impl Loop {
    pub(super) fn new(batches: usize, trials: u32) -> Loop {
        let mut this = Loop {
            core: Core::new(State::default(), vec![0; PARTITIONS], 0),
            chance: Chance::new(1),
            variables: Variables::new(),
        };
        this.at(1_000);
        let organization = OrgId::new(1, [7; 10]);
        let created = decide::create_organization(&this.core.state, "one", organization, 1).unwrap();
        this.core.commit(created);
        for number in 0..batches {
            let mut random = [0; 10];
            random[..8].copy_from_slice(&(number as u64).to_be_bytes());
            let started = log::BatchStarted {
                batch: BatchId::new(1, random).0.to_vec().into(),
                organization_id: organization.to_string(),
                request: Some(v1::ObjectRef::default()),
                suite: Some(v1::Suite::default()),
                cases: vec![v1::CaseInfo::default()],
                variants: vec![v1::VariantInfo {
                    provider: "process".into(),
                    ..Default::default()
                }],
                trials,
                variant_ids: vec![String::new()],
                ..Default::default()
            };
            this.core.commit(decide::event(1, Kind::BatchStarted(started)));
        }
        this
    }

    pub(super) fn at(&mut self, ms: u64) {
        self.core.set_time(1_800_000_000_000 + ms, ms);
    }

    /// The same after a crash: the state is what the log says, the workers are not here.
    pub(super) fn restarted(self, now_ms: u64) -> Loop {
        let mut core = Core::new(self.core.state.clone(), self.core.sequences().to_vec(), self.core.position());
        core.set_time(1_800_000_000_000 + now_ms, now_ms);
        Loop { core, ..self }
    }

    pub(super) fn greet(&mut self, hello: &Hello) -> (u64, mpsc::Receiver<Outbound>) {
        let (sender, receiver) = mpsc::channel(MAX_OUTBOUND);
        let number = greet(&mut self.core, hello, sender, LEASE_MS, &mut self.chance, &self.variables);
        (number, receiver)
    }

    pub(super) fn hear(&mut self, worker_id: &str, number: u64, message: from_worker::Message) -> bool {
        hear(&mut self.core, worker_id, number, message, &mut self.chance, &self.variables)
    }

    fn beat(&mut self, worker_id: &str, number: u64) -> bool {
        self.hear(worker_id, number, from_worker::Message::Heartbeat(Heartbeat { number: 1 }))
    }

    pub(super) fn tick(&mut self) {
        tick(&mut self.core, LEASE_MS, GRACE_MS, &mut self.chance, false, &self.variables);
    }

    fn leases(&self) -> Vec<(u64, String)> {
        let leases = self.core.state.leases();
        leases.map(|(token, lease)| (token, lease.worker_id.clone())).collect()
    }
}

pub(super) fn hello(worker_id: &str, incarnation: &str, slots: u32) -> Hello {
    Hello {
        worker_id: worker_id.into(),
        incarnation: incarnation.into(),
        boot_id: "boot".into(),
        slots,
        providers: vec!["process".into()],
        ..Hello::default()
    }
}

/// What a worker was sent, without its position.
pub(super) fn told(receiver: &mut mpsc::Receiver<Outbound>) -> Vec<Message> {
    std::iter::from_fn(|| receiver.try_recv().ok())
        .map(|(_, message)| message)
        .collect()
}

pub(super) fn leased(receiver: &mut mpsc::Receiver<Outbound>) -> Vec<v1::Lease> {
    let lease = |message| match message {
        Message::Lease(lease) => Some(lease),
        _ => None,
    };
    told(receiver).into_iter().filter_map(lease).collect()
}

/// catalogue 23: after a restart nobody has been seen yet, so nobody is given another's work before a whole lease is over.
#[test]
fn a_restart_waits_for_a_whole_lease() {
    let mut before = Loop::new(1, 2);
    let (_, mut first) = before.greet(&hello("first", "1", 1));
    let lease = leased(&mut first).remove(0);
    let (_, mut second) = before.greet(&hello("second", "1", 1));
    let other = leased(&mut second).remove(0);
    for comes_back in [true, false] {
        let mut after = Loop {
            core: Core::new(before.core.state.clone(), before.core.sequences().to_vec(), before.core.position()),
            chance: Chance::new(2),
            variables: Variables::new(),
        };
        // The steady clock of a process begins anywhere.
        after.at(50);
        after.tick();
        // Another with room for both gets neither.
        let (number, mut idle) = after.greet(&hello("idle", "1", 4));
        for ms in (100..50 + LEASE_MS).step_by(100) {
            after.at(ms);
            assert!(after.beat("idle", number));
            after.tick();
        }
        assert!(leased(&mut idle).is_empty());
        assert_eq!(after.leases().len(), 2);
        if comes_back {
            let held = Hello {
                held: vec![lease.token],
                sandboxes: vec![lease.sandbox.clone()],
                ..hello("first", "1", 0)
            };
            after.greet(&held);
        }
        // The other one stays away: its lease is over, to the moment.
        after.at(50 + LEASE_MS);
        after.beat("idle", number);
        after.tick();
        let left: Vec<u64> = after.leases().into_iter().map(|(token, _)| token).collect();
        match comes_back {
            true => assert_eq!(left, [lease.token], "and not {}", other.token),
            false => assert_eq!(left, [0; 0]),
        }
    }
}

/// catalogue 29: a process that has the name of a dead one keeps nothing of it alive, and the dead one's connection renews nothing.
#[test]
fn an_older_process_of_the_same_name_is_not_heard() {
    let mut cell = Loop::new(1, 1);
    let (old, mut receiver) = cell.greet(&hello("w", "1", 1));
    let lease = leased(&mut receiver).remove(0);
    cell.at(2_000);
    let (new, mut receiver) = cell.greet(&hello("w", "2", 0));
    assert!(cell.leases().is_empty(), "the lease of the process before is over at once");
    assert!(!cell.beat("w", old), "its connection is cut");
    assert!(cell.beat("w", new));
    // Its words do not count as the new one's: silent for a lease, that one is cut, too.
    for ms in (2_000..2_000 + LEASE_MS).step_by(500) {
        cell.at(ms);
        assert!(!cell.beat("w", old));
        cell.tick();
        assert!(cell.core.sessions.is_here("w"));
    }
    cell.at(2_000 + LEASE_MS);
    assert!(!cell.beat("w", old));
    cell.tick();
    assert!(!cell.core.sessions.is_here("w"));
    assert!(leased(&mut receiver).is_empty());
    assert!(cell.core.state.lease(lease.token).is_none());
}

/// catalogue J19: whoever did not hear that its words were recorded comes back with a lease that has ended. Where the trial waits in its sandbox (for its
/// person, or for its model), the worker lets go and leaves that alone; where the trial has its verdict, all of it goes.
#[test]
fn a_lease_whose_end_was_not_heard_leaves_its_sandbox_to_what_waits() {
    let check = |end: &dyn Fn(&v1::Lease) -> Report, waits: bool| {
        let mut cell = Loop::new(1, 1);
        let (number, mut receiver) = cell.greet(&hello("w", "1", 1));
        let lease = leased(&mut receiver).remove(0);
        let step = StepRecord {
            token: lease.token,
            step: "turn.1.agent".into(),
            outcome: 1,
            ..Default::default()
        };
        let first = Report {
            number: 1,
            steps: vec![step],
            ..Report::default()
        };
        assert!(cell.hear("w", number, from_worker::Message::Report(first)));
        assert!(cell.hear("w", number, from_worker::Message::Report(end(&lease))));
        assert!(cell.leases().is_empty());
        let mut cell = cell.restarted(2_000);
        let again = Hello {
            held: vec![lease.token],
            sandboxes: vec![lease.sandbox.clone()],
            ..hello("w", "1", 0)
        };
        let (_, mut receiver) = cell.greet(&again);
        let told = told(&mut receiver);
        let lets_go = told
            .iter()
            .any(|message| matches!(message, Message::Ack(ack) if ack.number == 0 && ack.stale == [lease.token]));
        let revoked = told
            .iter()
            .any(|message| matches!(message, Message::Revoke(revoke) if revoke.token == lease.token));
        let destroyed = told.iter().any(|message| matches!(message, Message::Destroy(_)));
        assert_eq!((lets_go, revoked, destroyed), (waits, !waits, !waits), "{told:?}");
    };
    check(
        &|lease| Report {
            number: 2,
            throttled: vec![v1::Throttled {
                token: lease.token,
                model_key: lease.model_key.clone(),
                retry_after_ms: 1_000,
            }],
            ..Report::default()
        },
        true,
    );
    check(
        &|lease| Report {
            number: 2,
            results: vec![TrialResult {
                token: lease.token,
                outcome: Some(TrialOutcome {
                    status: TrialStatus::Passed.into(),
                    ..Default::default()
                }),
                keep_sandbox_ms: 0,
            }],
            ..Report::default()
        },
        false,
    );
}

/// catalogue 21: who beats keeps its work, for however long; who does not loses it after one lease, however young it is.
#[test]
fn work_is_taken_from_the_silent_and_not_from_the_slow() {
    let mut cell = Loop::new(1, 2);
    let (slow, mut slow_told) = cell.greet(&hello("slow", "1", 1));
    let (_, mut silent_told) = cell.greet(&hello("silent", "1", 1));
    let (slow_lease, silent_lease) = (leased(&mut slow_told).remove(0), leased(&mut silent_told).remove(0));
    let (idle, mut idle_told) = cell.greet(&hello("idle", "1", 2));
    let heartbeat_ms = LEASE_MS / HEARTBEATS_PER_LEASE;
    for beat in 1..=500 {
        cell.at(1_000 + beat * heartbeat_ms);
        // Two of three heartbeats are lost on the way.
        if beat % 3 == 0 {
            assert!(cell.beat("slow", slow));
        }
        cell.beat("idle", idle);
        cell.tick();
        let silent_has_it = cell.core.state.lease(silent_lease.token).is_some();
        assert_eq!(silent_has_it, beat < HEARTBEATS_PER_LEASE, "heartbeat {beat}");
    }
    assert_eq!(cell.core.state.lease(slow_lease.token).unwrap().worker_id, "slow");
    assert_eq!(
        leased(&mut idle_told).len(),
        1,
        "the silent one's trial went to another, the slow one's did not"
    );
}

/// catalogue 22: a lease always holds several heartbeats.
#[test]
fn a_lease_holds_several_heartbeats() {
    for lease in [MIN_LEASE, Duration::from_secs(15), MAX_LEASE] {
        let mut cell = Loop::new(0, 0);
        let (sender, mut receiver) = mpsc::channel(MAX_OUTBOUND);
        let lease_ms = lease.as_millis() as u64;
        greet(
            &mut cell.core,
            &hello("w", "1", 1),
            sender,
            lease_ms,
            &mut cell.chance,
            &cell.variables,
        );
        match told(&mut receiver).remove(0) {
            Message::Welcome(welcome) => {
                assert_eq!(welcome.lease_ms, lease_ms);
                // What a worker makes of it at the least: see its bounds.
                assert!(3 * welcome.heartbeat_ms.max(10) <= lease_ms, "{welcome:?}");
            }
            other => panic!("{other:?}"),
        }
    }
}

/// catalogue 26: a heartbeat that was under way when its trial ended renews nothing. catalogue 20: a second verdict changes nothing.
#[test]
fn a_heartbeat_behind_the_verdict_changes_nothing() {
    let mut cell = Loop::new(1, 1);
    let (number, mut receiver) = cell.greet(&hello("w", "1", 1));
    let lease = leased(&mut receiver).remove(0);
    let verdict = |status: TrialStatus| {
        let outcome = TrialOutcome {
            status: status.into(),
            ..Default::default()
        };
        from_worker::Message::Report(Report {
            number: 1,
            results: vec![TrialResult {
                token: lease.token,
                outcome: Some(outcome),
                keep_sandbox_ms: 0,
            }],
            ..Report::default()
        })
    };
    assert!(cell.hear("w", number, verdict(TrialStatus::Passed)));
    let (position, before) = (cell.core.position(), format!("{:?}", cell.core.state.batches().collect::<Vec<_>>()));
    for _ in 0..3 {
        assert!(cell.beat("w", number));
        assert!(cell.hear("w", number, verdict(TrialStatus::Failed)));
        cell.tick();
    }
    assert_eq!(cell.core.position(), position, "no event");
    assert_eq!(format!("{:?}", cell.core.state.batches().collect::<Vec<_>>()), before);
    let stale = told(&mut receiver)
        .into_iter()
        .filter(|message| matches!(message, Message::Ack(ack) if ack.stale == [lease.token]));
    assert_eq!(stale.count(), 3, "and the worker is told so");
}

/// catalogue 15: a lease counts before anything is known of what comes of it, and what cannot be recorded ends its own trial at once, with the
/// reason, and no other.
#[test]
fn a_report_that_cannot_be_recorded_ends_its_own_trial_only() {
    let step = |token, step: &str, bytes: usize| StepRecord {
        token,
        step: step.into(),
        outcome: 1,
        result: vec![1; bytes].into(),
    };
    let result = |token, status| TrialResult {
        token,
        outcome: Some(TrialOutcome {
            status,
            ..TrialOutcome::default()
        }),
        keep_sandbox_ms: 0,
    };
    type Bad = Box<dyn Fn(u64, &mut Report)>;
    let bad: [(&str, Bad); 5] = [
        (
            "65537 bytes",
            Box::new(move |token, report| report.steps.push(step(token, "source", 65_537))),
        ),
        ("0 bytes", Box::new(move |token, report| report.steps.push(step(token, "", 1)))),
        (
            "81 bytes",
            Box::new(move |token, report| report.steps.push(step(token, &"s".repeat(81), 1))),
        ),
        (
            "not a verdict",
            Box::new(move |token, report| report.results.push(result(token, TrialStatus::Running.into()))),
        ),
        (
            "not the model key",
            Box::new(|token, report| {
                report.throttled.push(v1::Throttled {
                    token,
                    model_key: "another".into(),
                    retry_after_ms: 1,
                });
            }),
        ),
    ];
    for (text, bad) in bad {
        let mut cell = Loop::new(1, 2);
        let (number, mut receiver) = cell.greet(&hello("w", "1", 2));
        let leases = leased(&mut receiver);
        let (poisonous, good) = (leases[0].token, leases[1].token);
        let key = cell.core.state.lease(poisonous).unwrap().trial;
        assert_eq!(cell.core.state.trial(key).unwrap().idle_leases, 1, "counted before a word of it");
        let mut report = Report {
            number: 1,
            steps: vec![step(good, "source", 1)],
            ..Report::default()
        };
        bad(poisonous, &mut report);
        report.steps.push(step(good, "turn.1.agent", 1));
        // Its own verdict in the same breath comes too late: a part of what led to it is missing.
        report.results.push(result(poisonous, TrialStatus::Passed.into()));
        let late = text == "not the model key";
        if late {
            report.results.clear();
        }
        assert!(cell.hear("w", number, from_worker::Message::Report(report)));
        let outcome = cell
            .core
            .state
            .trial(key)
            .unwrap()
            .outcome()
            .cloned()
            .unwrap_or_else(|| panic!("{text}: it goes on"));
        assert_eq!(outcome.status(), TrialStatus::Void, "{text}");
        assert!(
            outcome.failure.as_deref().is_some_and(|failure| failure.contains(text)),
            "{text}: {:?}",
            outcome.failure
        );
        let kept = cell.core.state.lease(good).unwrap().trial;
        assert_eq!(cell.core.state.trial(kept).unwrap().steps.len(), 2, "{text}: the other one goes on");
        let told = told(&mut receiver);
        assert!(
            told.iter()
                .any(|message| matches!(message, Message::Revoke(revoke) if revoke.token == poisonous))
        );
        assert!(
            told.iter()
                .any(|message| matches!(message, Message::Ack(ack) if ack.stale == [poisonous]))
        );
    }
}

/// catalogue 44: what a restart has to put right, it puts right in few steps, and not one by one: 3,000 leases that nobody comes back for are
/// one turn and as few groups as their records fit into.
#[test]
fn thousands_of_lost_leases_are_few_groups() {
    let mut cell = Loop::new(300, 10);
    let (_, mut receiver) = cell.greet(&hello("w", "1", 3_000));
    assert_eq!(leased(&mut receiver).len(), 3_000);
    let mut cell = cell.restarted(5_000);
    assert!(
        decide::catch_up(&cell.core.state, cell.core.now_ms()).is_empty(),
        "a restart itself needs no event"
    );
    cell.tick();
    assert!(!cell.core.has_pending());
    cell.at(5_000 + LEASE_MS);
    cell.tick();
    let mut groups = Vec::new();
    while cell.core.has_pending() {
        let mut group = Vec::new();
        cell.core.take_group(&mut group);
        groups.push(group.len());
    }
    assert_eq!(groups.iter().sum::<usize>(), 3_000, "one event each");
    assert_eq!(groups.len(), 3_000usize.div_ceil(MAX_GROUP_RECORDS), "{groups:?}");
    assert!(cell.leases().is_empty());
}
