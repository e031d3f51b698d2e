//! What must hold in every state that judgments and replies lead to, and in the log that led there.

use std::collections::{BTreeMap, BTreeSet};

use evalgrid_domain::limits::{MAX_REFUSED_ASKS, MAX_UNCLEAR_ASKS};
use evalgrid_proto::log::v1::job_answered::Answer;
use evalgrid_workflow::{Event, JobPhase, Kind, Lease, Part, Phase, State, jobs};
use prost::Message as _;

/// What must hold after every move.
pub fn sound(state: &State, log: &[Event]) {
    let mut held = BTreeMap::new();
    for (token, lease) in state.leases() {
        let trial = state.trial(lease.trial).unwrap();
        let holds = match lease.part {
            Part::Trial => matches!(trial.phase, Phase::Leased { token: own } if own == token),
            part => trial.job(part).unwrap().token() == Some(token),
        };
        assert!(holds, "a lease is of what says so");
        assert!(held.insert((lease.trial, lease.part), token).is_none(), "one lease each");
    }
    let mut waiting = 0;
    for batch in state.batches() {
        for (key, trial) in batch.trials() {
            waiting += usize::from(matches!(trial.phase, Phase::Queued { .. }));
            for (part, job) in trial.jobs() {
                waiting += usize::from(matches!(job.phase, JobPhase::Waits { .. }));
                assert_eq!(job.token(), held.get(&(key, part)).copied());
                assert!(job.unclear <= MAX_UNCLEAR_ASKS && job.refused <= MAX_REFUSED_ASKS);
            }
        }
    }
    assert_eq!(state.waiting(), waiting, "the queue holds what waits, and nothing else");
    for (name, _) in state.custody() {
        let holders = state
            .leases()
            .filter(|(_, lease)| state.trial(lease.trial).unwrap().sandbox_of(lease.part) == Some(name));
        assert!(holders.count() <= 1, "one worker in a sandbox");
    }
    for key in [
        "judge/openai/large",
        "judge/codex/large",
        "judge/claude/large",
        "person/openai/large",
        "person/codex/large",
        "command/",
    ] {
        let holds = |lease: &&Lease| {
            let batch = state.batch(&lease.trial.batch).unwrap();
            match batch.answerer(lease.target()) {
                Some(answerer) => jobs::model_key(lease.part, answerer) == key,
                None => key == "command/",
            }
        };
        let living = state.leases().filter(|(_, lease)| holds(lease)).count();
        assert_eq!(state.model_holders(key), living, "{key}: those who hold are those who live");
    }
    let mut answered = BTreeSet::new();
    let answers = log.iter().filter_map(|event| match &event.kind {
        Some(Kind::JobAnswered(answered)) if matches!(answered.answer, Some(Answer::Judged(_))) => answered.job.clone(),
        _ => None,
    });
    for job in answers {
        assert!(answered.insert(job.encode_to_vec()), "a judge answers once");
    }
    let (mut answered, mut last) = (BTreeSet::new(), 0);
    for event in log {
        match &event.kind {
            Some(Kind::JobAnswered(done)) if matches!(done.answer, Some(Answer::Judged(_))) => {
                answered.insert(done.job.as_ref().unwrap().encode_to_vec());
            }
            Some(Kind::JobLeased(leased)) => {
                assert!(leased.token > last, "tokens grow");
                last = leased.token;
                assert!(
                    !answered.contains(&leased.job.as_ref().unwrap().encode_to_vec()),
                    "who has answered is not asked again"
                );
            }
            _ => {}
        }
    }
    let saved = state.save();
    let restored = State::restore(&saved).unwrap();
    assert_eq!(
        restored.save().encode_to_vec(),
        saved.encode_to_vec(),
        "a snapshot is the whole state"
    );
}
