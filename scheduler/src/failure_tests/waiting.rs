//! What people are told of a trial that waits for judges, or for its person, while judge runners come, refuse and go.

use evalgrid_domain::ids::BatchId;
use evalgrid_proto::{
    log::v1::{self as log, event::Kind},
    v1::{
        AnswererInfo, AwaitsReply, Hello, JobAsked, JobResult, NotNow, Report, TrialOutcome, TrialResult, TrialStatus, Unclear, WorkerRole,
        from_worker, job_result, to_worker::Message,
    },
};
use evalgrid_workflow::{TrialKey, decide};

use super::{
    leases::{LEASE_MS, Loop, hello, leased, told},
    *,
};
use crate::{sessions::Outbound, waits};

/// A batch of one trial with two judges, a model and an agent, and a person.
fn judged() -> (Loop, TrialKey) {
    let mut cell = Loop::new(0, 0);
    let batch = BatchId::new(1, [1; 10]);
    let model = |name: &str| AnswererInfo {
        name: name.into(),
        provider: "openai".into(),
        model: "large".into(),
        ..Default::default()
    };
    let agent = AnswererInfo {
        name: "tone".into(),
        harness: "claude".into(),
        model: "small".into(),
        ..Default::default()
    };
    let case = v1::CaseInfo {
        judges: vec![model("asks"), agent],
        person: Some(model("person")),
        ..Default::default()
    };
    let started = log::BatchStarted {
        batch: batch.0.to_vec().into(),
        organization_id: OrgId::new(1, [7; 10]).to_string(),
        request: Some(v1::ObjectRef::default()),
        suite: Some(v1::Suite::default()),
        cases: vec![case],
        variants: vec![v1::VariantInfo {
            provider: "process".into(),
            ..Default::default()
        }],
        trials: 1,
        variant_ids: vec![String::new()],
        ..Default::default()
    };
    cell.core.commit(decide::event(1, Kind::BatchStarted(started)));
    (cell, TrialKey { batch, run: 0, ordinal: 1 })
}

fn runner(worker_id: &str, slots: u32, providers: &[&str]) -> Hello {
    Hello {
        role: WorkerRole::JudgeRunner.into(),
        providers: providers.iter().map(|name| (*name).to_owned()).collect(),
        ..hello(worker_id, "1", slots)
    }
}

fn report(cell: &mut Loop, (worker_id, number): (&str, u64), report: Report) {
    assert!(cell.hear(worker_id, number, from_worker::Message::Report(Report { number: 1, ..report })));
}

/// The tokens of the jobs that a worker was given.
fn jobs(receiver: &mut tokio::sync::mpsc::Receiver<Outbound>) -> Vec<u64> {
    let token = |message| match message {
        Message::Job(job) => Some(job.token),
        _ => None,
    };
    told(receiver).into_iter().filter_map(token).collect()
}

fn came(token: u64, result: job_result::Result) -> Report {
    Report {
        jobs: vec![JobResult {
            token,
            spent_ms: 5,
            result: Some(result),
        }],
        credits: 1,
        ..Report::default()
    }
}

fn not_now() -> job_result::Result {
    job_result::Result::NotNow(NotNow {
        retry_after_ms: 4_000,
        reason: "openai answered with status 429".into(),
    })
}

fn waits(cell: &Loop, key: TrialKey) -> String {
    waits::waits_for(&cell.core, cell.core.state.batch(&key.batch).unwrap(), key).unwrap_or_default()
}

fn asked(cell: &Loop, key: TrialKey) -> Vec<String> {
    let asked = waits::asked(&cell.core, cell.core.state.batch(&key.batch).unwrap(), key);
    let person = (!asked.person.is_empty()).then_some(asked.person);
    asked.judges.into_iter().chain(person).collect()
}

fn missing(cell: &Loop, key: TrialKey) -> Vec<(String, u32)> {
    let missing = waits::missing(&cell.core, cell.core.state.batch(&key.batch).unwrap());
    missing.into_iter().map(|missing| (missing.what, missing.trials)).collect()
}

/// Brings the trial to its judges: it has run, and its sandbox is there still.
fn checked(cell: &mut Loop) -> (u64, String) {
    let (number, mut receiver) = cell.greet(&hello("w", "1", 1));
    let lease = leased(&mut receiver).remove(0);
    let outcome = TrialOutcome {
        status: TrialStatus::Passed.into(),
        ..TrialOutcome::default()
    };
    let result = TrialResult {
        token: lease.token,
        outcome: Some(outcome),
        keep_sandbox_ms: 0,
    };
    report(
        cell,
        ("w", number),
        Report {
            results: vec![result],
            ..Report::default()
        },
    );
    (number, lease.sandbox)
}

#[test]
fn a_judged_trial_tells_whom_it_waits_for_and_who_is_asked() {
    let (mut cell, key) = judged();
    let (number, sandbox) = checked(&mut cell);
    assert_eq!(waits(&cell, key), "the end of the trial's sandbox, for 1m at most");
    report(
        &mut cell,
        ("w", number),
        Report {
            destroyed: vec![sandbox],
            ..Report::default()
        },
    );
    // Nobody asks.
    let (any, sandboxes) = ("a judge runner", "a judge runner with process sandboxes");
    let none = format!("{any}, and none is connected; {sandboxes}, and none is connected");
    assert_eq!(waits(&cell, key), none);
    assert_eq!(missing(&cell, key), [(any.to_owned(), 1), (sandboxes.to_owned(), 1)]);
    // One that has no sandboxes and no free place, and then room for the model.
    cell.greet(&runner("full", 0, &[]));
    assert_eq!(
        waits(&cell, key),
        format!("a free place at {any}; {sandboxes}, and none is connected")
    );
    assert_eq!(missing(&cell, key), [(sandboxes.to_owned(), 1)]);
    cell.at(2_000);
    let (number, mut receiver) = cell.greet(&runner("j", 1, &[]));
    let token = jobs(&mut receiver).remove(0);
    cell.at(6_000);
    assert_eq!(asked(&cell, key), ["\"asks\" by large (openai), for 4s"]);
    assert_eq!(waits(&cell, key), format!("{sandboxes}, and none is connected"));
    // Refused: a pause, in which nobody is free or not.
    report(&mut cell, ("j", number), came(token, not_now()));
    assert!(asked(&cell, key).is_empty());
    let told_of = waits(&cell, key);
    let refused = "\"asks\" by large (openai): tried once: openai answered with status 429, next try in ";
    assert!(told_of.starts_with(refused), "{told_of}");
    assert!(told_of.ends_with(&format!("s; {sandboxes}, and none is connected")), "{told_of}");
    // Asked again.
    cell.at(12_000);
    cell.tick();
    let token = jobs(&mut receiver).remove(0);
    report(
        &mut cell,
        ("j", number),
        Report {
            asked: vec![JobAsked { token }],
            ..Report::default()
        },
    );
    let again = "\"asks\" by large (openai), for 0s; before that tried once: openai answered with status 429";
    assert_eq!(asked(&cell, key), [again]);
    // Killed: for the rest of its lease nobody knows more than that, then it waits again.
    cell.core.sessions.leave("j", number);
    assert_eq!(asked(&cell, key), [format!("{again}; its judge runner j is not connected")]);
    cell.at(12_000 + LEASE_MS);
    cell.tick();
    assert!(asked(&cell, key).is_empty());
    let told_of = waits(&cell, key);
    let lost =
        "\"asks\" by large (openai): tried twice, 1 without a known answer; last told: openai answered with status 429; next try with";
    assert!(told_of.starts_with(&format!("{lost} {any}, and none is connected")), "{told_of}");
}

#[test]
fn a_trial_in_talk_tells_who_speaks() {
    let (mut cell, key) = judged();
    let (number, mut receiver) = cell.greet(&hello("w", "1", 1));
    let token = leased(&mut receiver).remove(0).token;
    let awaits = AwaitsReply {
        token,
        turn: 1,
        conversation: Some(v1::Evidence::default()),
    };
    report(
        &mut cell,
        ("w", number),
        Report {
            awaiting: vec![awaits],
            ..Report::default()
        },
    );
    assert_eq!(missing(&cell, key), [("a judge runner".to_owned(), 1)]);
    let (number, mut receiver) = cell.greet(&runner("j", 1, &["process"]));
    let token = jobs(&mut receiver).remove(0);
    assert!(missing(&cell, key).is_empty());
    assert_eq!(asked(&cell, key), ["the person by large (openai), for 0s"]);
    let unclear = job_result::Result::Unclear(Unclear {
        reason: "the connection broke".into(),
    });
    report(&mut cell, ("j", number), came(token, unclear));
    let told_of = waits(&cell, key);
    let met = "the person by large (openai): tried once, without a known answer: the connection broke, next try in ";
    assert!(told_of.starts_with(met), "{told_of}");
}

/// The operator is told once of each kind that is missing, however many jobs wait and however long, and not of one that is only coming back.
#[test]
fn a_missing_judge_runner_is_told_once() {
    let (mut cell, _) = judged();
    let (number, sandbox) = checked(&mut cell);
    let destroyed = Report {
        destroyed: vec![sandbox],
        ..Report::default()
    };
    report(&mut cell, ("w", number), destroyed);
    let known = |cell: &Loop| cell.core.sessions.missed.told().cloned().collect::<Vec<_>>();
    cell.tick();
    cell.at(5_999);
    cell.tick();
    assert!(known(&cell).is_empty());
    cell.at(6_000);
    cell.tick();
    assert_eq!(known(&cell), ["", "process"]);
    // One has come for the models; what was told stays told until the other comes.
    let (number, _receiver) = cell.greet(&runner("j", 0, &[]));
    cell.tick();
    assert_eq!(known(&cell), ["process"]);
    // Gone for a moment only.
    cell.core.sessions.leave("j", number);
    cell.at(7_000);
    cell.tick();
    let (_, _receiver) = cell.greet(&runner("j", 0, &["process"]));
    cell.at(16_000);
    cell.tick();
    assert!(known(&cell).is_empty());
}
