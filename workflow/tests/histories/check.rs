//! What must hold: of a whole log, in every state, and after a recovery from every prefix.

use std::collections::{HashMap, HashSet};

use evalgrid_domain::limits;
use evalgrid_proto::{log::v1 as log, v1};
use evalgrid_workflow::{
    BatchPhase, Event, Kind, Phase, State, admission,
    decide::{self, Holder},
    view,
};
use prost::Message as _;

use crate::world::WORKERS;

/// What section 1 of the design promises, from the log alone.
pub(crate) fn check_log(log: &[Event]) {
    let mut verdicts = HashSet::new();
    let mut local = HashMap::new();
    let mut steps = HashSet::new();
    let mut sandbox_of = HashMap::new();
    let mut custody = HashSet::new();
    let mut kept_until = HashMap::new();
    let mut last_token = 0;
    let mut last_ms = 0;
    for event in log {
        assert!(event.at_ms >= last_ms, "time does not go back");
        last_ms = event.at_ms;
        match event.kind.as_ref().unwrap() {
            Kind::BatchStarted(started) => {
                let all = (0..started.variant_ids.len() as u32).flat_map(|run| (1..=started.trials).map(move |ordinal| (run, ordinal)));
                let all: Vec<_> = all.map(|(run, ordinal)| (started.batch.clone(), run, ordinal)).collect();
                if started.local {
                    local.insert(started.batch.clone(), all);
                }
                for trial in &started.carried {
                    assert!(verdicts.insert((started.batch.clone(), trial.run, trial.ordinal)), "carried once");
                }
            }
            Kind::LocalBatchClosed(closed) => {
                let all = local.get_mut(&closed.batch).expect("only local batches are closed");
                for trial in std::mem::take(all) {
                    verdicts.insert(trial);
                }
            }
            Kind::LeaseGranted(granted) => {
                let trial = granted.trial.clone().unwrap();
                assert!(!local.contains_key(&trial.batch), "a local trial is never leased");
                assert!(
                    !verdicts.contains(&(trial.batch, trial.run, trial.ordinal)),
                    "a scored trial does not run again"
                );
                assert!(granted.token > last_token, "tokens only grow");
                last_token = granted.token;
                sandbox_of.insert(granted.token, granted.sandbox.clone());
                assert_eq!(
                    custody.insert(granted.sandbox.clone()),
                    !granted.adopt,
                    "custody begins once, with the first lease"
                );
            }
            Kind::StepRecorded(step) => {
                let sandbox = &sandbox_of[&step.token];
                assert!(
                    steps.insert((sandbox.clone(), step.step.clone())),
                    "{} is recorded twice in {sandbox}",
                    step.step
                );
            }
            Kind::TrialSettled(settled) => {
                let trial = settled.trial.clone().unwrap();
                assert!(verdicts.insert((trial.batch, trial.run, trial.ordinal)), "a trial has one verdict");
                if let Some(until_ms) = settled.sandbox_kept_until_ms {
                    assert!(until_ms <= event.at_ms + limits::MAX_KEEP_MS, "nothing is kept for ever");
                    kept_until.insert(sandbox_of[&settled.token].clone(), until_ms);
                }
            }
            Kind::SandboxDestroyAsked(asked) => {
                let until_ms = kept_until.get(&asked.sandbox).copied().unwrap_or_default();
                assert!(event.at_ms >= until_ms, "what is kept stays");
            }
            Kind::SandboxDestroyed(gone) => assert!(custody.remove(&gone.sandbox), "custody ends once"),
            _ => {}
        }
    }
}

/// What must hold in every state.
pub(crate) fn check_state(state: &State) {
    let mut leased = HashSet::new();
    for (token, lease) in state.leases() {
        assert!(leased.insert(lease.trial), "a trial has one lease");
        let trial = state.trial(lease.trial).unwrap();
        assert!(
            matches!(trial.phase, Phase::Leased { token: held } if held == token),
            "lease and trial agree"
        );
        let name = trial.sandbox.as_deref().unwrap();
        assert!(
            state
                .custody()
                .any(|(known, sandbox)| known == name && sandbox.trial == lease.trial),
            "a leased sandbox is in custody"
        );
    }
    // catalogue 39, 40: the holders of every limit are those who live, after whatever has happened.
    let starting = state.leases().filter(|(_, lease)| {
        let name = state.trial(lease.trial).and_then(|trial| trial.sandbox.as_deref());
        name.and_then(|name| state.sandbox(name)).is_some_and(|sandbox| !sandbox.created)
    });
    let (starting, living) = (starting.count(), state.custody().count());
    let (counted_starting, counted_living) = state.sandbox_counts("process");
    assert_eq!(counted_living, living, "living sandboxes are those in custody");
    assert_eq!(
        counted_starting, starting,
        "who starts a sandbox has a lease, and there is no sign of it yet"
    );
    let key = admission::model_key(&v1::VariantInfo::default());
    assert_eq!(state.model_holders(&key), leased.len(), "holders of a model key are living leases");
    let hosted = state.batches().filter(|batch| batch.local.is_none());
    let queued = hosted.flat_map(|batch| batch.trials());
    let queued = queued.filter(|(_, trial)| matches!(trial.phase, Phase::Queued { .. })).count();
    assert_eq!(state.waiting(), queued, "the queue holds those who wait, each once");
    for batch in state.batches() {
        let open = batch.trials().filter(|(_, trial)| trial.outcome().is_none()).count();
        assert_eq!(open, batch.unsettled as usize, "the count of open trials is right");
        let running = state.organization(&batch.organization).unwrap().running.contains(&batch.id);
        let runs = match &batch.local {
            Some(local) => local.closed.is_none(),
            None => open > 0,
        };
        assert_eq!(running, runs, "a batch holds its organization's slot exactly while it runs");
        assert_eq!(running, batch.phase == BatchPhase::Running);
        for run in view::batch(batch, None).runs {
            let counts = run.distribution.unwrap();
            assert_eq!(counts.trials, counts.scored + counts.voided, "denominators are honest");
        }
    }
}

pub(crate) fn describe(state: &State) -> String {
    let mut batches: Vec<_> = state.batches().map(|batch| (batch.id, format!("{batch:?}"))).collect();
    batches.sort();
    let leases: Vec<_> = state.leases().map(|(token, lease)| format!("{token} {lease:?}")).collect();
    let custody: Vec<_> = state.custody().map(|(name, sandbox)| format!("{name} {sandbox:?}")).collect();
    format!("{batches:?} {leases:?} {custody:?}")
}

/// Whoever waits before a snapshot waits behind it: nobody is forgotten, nobody comes in from nowhere.
pub(crate) fn check_waiting(restored: &State, replayed: &State) {
    let waiting = |state: &State| {
        let mut state = state.clone();
        let (mut now_ms, mut keys) = (state.last_ms() + 3_600_000, Vec::new());
        while let Some((worker, key)) = WORKERS
            .iter()
            .find_map(|worker| Some((*worker, state.next_for(worker, &["process".into()], now_ms)?)))
        {
            let holder = Holder {
                worker_id: worker,
                incarnation: "x",
                boot_id: "boot",
            };
            now_ms += 1;
            for event in decide::grant(&state, key, holder, now_ms) {
                state.apply(&event).unwrap();
            }
            keys.push(key);
        }
        keys.sort();
        keys
    };
    assert_eq!(waiting(restored), waiting(replayed), "the same trials wait");
}

/// A replay of the log is the state; so is a replay of any prefix, and it can go on from there.
pub(crate) fn check_prefixes(log: &[Event], end: &State) {
    let mut replayed = State::default();
    // A snapshot of any prefix, and the rest of the log behind it, is the state as well.
    let mut from_snapshot = State::default();
    for (index, event) in log.iter().enumerate() {
        replayed.apply(event).unwrap();
        from_snapshot.apply(event).unwrap();
        if index % 41 == 0 {
            let saved = replayed.save().encode_to_vec();
            assert_eq!(from_snapshot.save().encode_to_vec(), saved, "snapshot and replay agree");
            from_snapshot = State::restore(&log::StateSnapshot::decode(saved.as_slice()).unwrap()).unwrap();
            assert_eq!(describe(&from_snapshot), describe(&replayed), "a snapshot keeps everything");
            check_waiting(&from_snapshot, &replayed);
        }
        let missing = decide::catch_up(&replayed, replayed.last_ms());
        if missing.is_empty() {
            check_state(&replayed);
            continue;
        }
        let mut recovered = replayed.clone();
        missing.iter().for_each(|event| recovered.apply(event).unwrap());
        check_state(&recovered);
    }
    assert_eq!(describe(&replayed), describe(end), "replay and life agree");
    assert_eq!(from_snapshot.save(), end.save(), "a snapshot and its tail agree with life");
}
