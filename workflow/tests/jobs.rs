//! Judgments and replies: what each may rely on, one story after the other; then random histories, and what must hold after each of their moves.
#![allow(clippy::unwrap_used)]

#[path = "jobs/places.rs"]
mod places;
#[path = "jobs/sound.rs"]
mod sound;
mod support;

use evalgrid_domain::{
    ids::BatchId,
    limits::{ABANDONED_AFTER_MS, JUDGE_AFTER_SANDBOX_MS, MAX_REFUSED_ASKS, MAX_UNCLEAR_ASKS},
};
use evalgrid_proto::{
    log::v1 as log,
    v1::{self, JudgeVerdict, TrialStatus, job_result},
};
use evalgrid_workflow::{
    Kind, Part, State, Target, TrialKey,
    decide::{self, Holder},
    retry, view,
};
use prost::Message as _;
use support::Cell;

const GRACE_MS: u64 = 60_000;

fn answerer(name: &str, harness: &str) -> v1::AnswererInfo {
    v1::AnswererInfo {
        name: name.into(),
        harness: harness.into(),
        provider: if harness.is_empty() { "openai" } else { "" }.into(),
        model: "large".into(),
    }
}

/// One case with these judges (a harness each, or none for a model), and a person.
fn start(cell: &mut Cell, number: u32, judges: &[&str], person: Option<&str>) -> BatchId {
    let organization = cell.organization(number);
    let id = BatchId::new(cell.now_ms, [number as u8; 10]);
    let judges = judges.iter().enumerate();
    let case = v1::CaseInfo {
        judges: judges
            .map(|(index, harness)| answerer(&format!("judge-{index}"), harness))
            .collect(),
        person: person.map(|harness| answerer("person", harness)),
        ..Default::default()
    };
    let started = log::BatchStarted {
        batch: id.0.to_vec().into(),
        organization_id: organization.to_string(),
        request: Some(v1::ObjectRef::default()),
        suite: Some(v1::Suite::default()),
        cases: vec![case],
        variants: vec![v1::VariantInfo {
            harness: "command".into(),
            provider: "process".into(),
            ..Default::default()
        }],
        trials: 1,
        variant_ids: vec![String::new()],
        ..Default::default()
    };
    cell.commit_all([decide::event(cell.now_ms, Kind::BatchStarted(started))]);
    id
}

fn key(batch: BatchId) -> TrialKey {
    TrialKey { batch, run: 0, ordinal: 1 }
}

/// The next job for a judge runner, if there is one now.
fn lease(cell: &mut Cell, worker_id: &str, incarnation: &str) -> Option<(Target, u64)> {
    let target = cell.state.next_job_for(worker_id, &["process".into()], cell.now_ms)?;
    let holder = Holder {
        worker_id,
        incarnation,
        boot_id: "boot",
    };
    let event = decide::grant_job(&cell.state, target, holder, cell.now_ms);
    cell.commit_all(event);
    let token = cell.trial(target.trial).job(target.part)?.token()?;
    Some((target, token))
}

/// Who holds a lease.
fn holder(cell: &Cell, token: u64) -> String {
    cell.state.lease(token).unwrap().worker_id.clone()
}

fn asks(cell: &mut Cell, token: u64) {
    let event = decide::job_asked(&cell.state, &holder(cell, token), token, cell.now_ms).unwrap();
    cell.commit_all(event);
}

fn tell(cell: &mut Cell, token: u64, result: job_result::Result) {
    let result = v1::JobResult {
        token,
        spent_ms: 7,
        result: Some(result),
    };
    let event = decide::job_result(&cell.state, &holder(cell, token), result, &mut cell.chance, cell.now_ms).unwrap();
    cell.commit_all([event]);
}

/// A new process of a judge runner takes its folder over.
fn replaced(cell: &mut Cell, worker_id: &str, incarnation: &str) {
    let hello = v1::Hello {
        worker_id: worker_id.into(),
        incarnation: incarnation.into(),
        boot_id: "boot".into(),
        role: v1::WorkerRole::JudgeRunner.into(),
        providers: vec!["process".into()],
        sandboxes: cell.state.custody().map(|(name, _)| name.to_owned()).collect(),
        ..Default::default()
    };
    let events = decide::hello_leases(&cell.state, &hello, &mut cell.chance, cell.now_ms);
    cell.commit_all(events);
    let events = decide::hello_sandboxes(&cell.state, &hello, cell.now_ms);
    cell.commit_all(events);
}

fn judged(part: Part, verdict: JudgeVerdict) -> job_result::Result {
    let Part::Judge(index) = part else { panic!("{part:?} is no judge") };
    job_result::Result::Judged(v1::Judged {
        index: index.into(),
        name: format!("judge-{index}"),
        verdict: verdict.into(),
        error: if verdict == JudgeVerdict::Error { "it broke" } else { "" }.into(),
        ..Default::default()
    })
}

fn replied(failed: bool) -> job_result::Result {
    job_result::Result::Replied(v1::Replied {
        record: b"{}".to_vec().into(),
        failed,
        session_id: Some("s".into()),
        ..Default::default()
    })
}

fn not_now() -> job_result::Result {
    job_result::Result::NotNow(v1::NotNow::default())
}

fn unclear() -> job_result::Result {
    job_result::Result::Unclear(v1::Unclear { reason: "500".into() })
}

/// A trial that has run: its checks have said this, and its sandbox is gone.
fn checked(cell: &mut Cell, batch: BatchId, passed: bool) {
    let (_, token) = cell.lease("w").unwrap();
    cell.step("w", token, "source");
    let outcome = v1::TrialOutcome {
        status: if passed { TrialStatus::Passed } else { TrialStatus::Failed }.into(),
        exit_code: i32::from(!passed),
        commands: 3,
        ..Default::default()
    };
    let event = decide::result(&cell.state, "w", token, outcome, &mut cell.chance, cell.now_ms).unwrap();
    cell.commit_all([event]);
    let sandbox = cell.sandbox(key(batch));
    cell.destroyed("w", &sandbox);
}

/// The agent has answered, and its person speaks next.
fn awaits(cell: &mut Cell, token: u64, turn: u32) {
    let awaits = v1::AwaitsReply {
        token,
        turn,
        conversation: Some(v1::Evidence::default()),
    };
    let event = decide::awaits_reply(&cell.state, "w", awaits, &mut cell.chance, cell.now_ms).unwrap();
    cell.commit_all([event]);
}

fn outcome(cell: &Cell, batch: BatchId) -> &v1::TrialOutcome {
    cell.trial(key(batch)).outcome().expect("it has its verdict")
}

/// catalogue 17, J11: and no longer than a minute for one that is never told to be.
#[test]
fn judges_begin_when_the_trials_sandbox_is_gone() {
    let mut cell = Cell::new(1);
    let batch = start(&mut cell, 1, &[""], None);
    let (_, token) = cell.lease("w").unwrap();
    cell.pass("w", token);
    assert_eq!(lease(&mut cell, "j", "1"), None, "its sandbox is there");
    assert_eq!(
        view::progress(cell.state.batch(&batch).unwrap(), key(batch), cell.trial(key(batch))).step,
        "judge.0"
    );
    let sandbox = cell.sandbox(key(batch));
    let mut never = cell.recovered(Default::default());
    cell.destroyed("w", &sandbox);
    assert!(lease(&mut cell, "j", "1").is_some());
    // A worker that never says so keeps no judge for ever.
    never.now_ms += JUDGE_AFTER_SANDBOX_MS - 1;
    assert_eq!(lease(&mut never, "j", "1"), None);
    never.now_ms += 1;
    assert!(lease(&mut never, "j", "1").is_some());
}

/// catalogue J6: one that is missing is no verdict.
#[test]
fn verdicts_of_checks_and_judges() {
    use JudgeVerdict::{Error, Failed, Passed};
    let check = |passed: bool, verdicts: &[JudgeVerdict], status: TrialStatus, exit_code: i32, failure: Option<&str>| {
        let mut cell = Cell::new(1);
        let batch = start(&mut cell, 1, &vec![""; verdicts.len()], None);
        checked(&mut cell, batch, passed);
        for _ in verdicts {
            assert!(cell.trial(key(batch)).outcome().is_none());
            let (target, token) = lease(&mut cell, "j", "1").unwrap();
            asks(&mut cell, token);
            let Part::Judge(index) = target.part else { panic!() };
            tell(&mut cell, token, judged(target.part, verdicts[usize::from(index)]));
        }
        let outcome = outcome(&cell, batch);
        let void = status == TrialStatus::Void;
        assert_eq!((outcome.status(), outcome.exit_code), (status, exit_code), "{passed} {verdicts:?}");
        assert_eq!(outcome.failure.as_deref(), failure);
        assert_eq!(outcome.void_fields, vec!["validator"; usize::from(void)]);
        assert_eq!(
            (outcome.judged.len(), outcome.commands, outcome.checks_passed),
            (verdicts.len(), 3, Some(passed))
        );
        assert_eq!(cell.state.batch(&batch).unwrap().unsettled, 0);
    };
    check(true, &[Passed], TrialStatus::Passed, 0, None);
    check(true, &[Passed, Passed, Passed], TrialStatus::Passed, 0, None);
    check(false, &[Passed], TrialStatus::Failed, 1, None);
    check(true, &[Passed, Failed], TrialStatus::Failed, 1, None);
    let broke = Some("The judge judge-1 gave no judgment: it broke");
    check(true, &[Passed, Error], TrialStatus::Void, -1, broke);
    check(false, &[Failed, Error, Error], TrialStatus::Void, -1, broke);
}

/// catalogue 19, 20, J2: never a third time, and what comes late is not heard.
#[test]
fn a_call_that_is_lost_is_made_once_more() {
    let mut cell = Cell::new(1);
    let batch = start(&mut cell, 1, &[""], None);
    checked(&mut cell, batch, true);
    let state = |cell: &Cell| {
        let job = cell.trial(key(batch)).job(Part::Judge(0)).unwrap();
        (job.unclear, job.refused, job.asked)
    };
    let replaced = |cell: &mut Cell, incarnation: &str| {
        replaced(cell, "j", incarnation);
        cell.now_ms += 60_000;
    };
    lease(&mut cell, "j", "1").unwrap();
    replaced(&mut cell, "2");
    assert_eq!(state(&cell), (0, 0, false), "what was not announced was not asked");
    for unclear in 1..=MAX_UNCLEAR_ASKS {
        let (_, token) = lease(&mut cell, "j", "2").unwrap();
        asks(&mut cell, token);
        assert!(
            decide::job_asked(&cell.state, "j", token, cell.now_ms).unwrap().is_none(),
            "told twice, recorded once"
        );
        replaced(&mut cell, &format!("{}", unclear + 2));
        assert_eq!(state(&cell), (unclear, 0, false));
        // Nothing is taken from who is dead.
        let late = v1::JobResult {
            token,
            result: Some(judged(Part::Judge(0), JudgeVerdict::Passed)),
            ..Default::default()
        };
        assert_eq!(
            decide::job_result(&cell.state, "j", late, &mut cell.chance, cell.now_ms),
            Err(decide::Refusal::Stale)
        );
    }
}

/// catalogue 13: and starts anew when that is lost.
#[test]
fn a_harness_that_judges_goes_on_in_its_sandbox() {
    let mut cell = Cell::new(1);
    let batch = start(&mut cell, 1, &["codex"], None);
    checked(&mut cell, batch, true);
    let (target, token) = lease(&mut cell, "j", "1").unwrap();
    let sandbox = cell.trial(key(batch)).sandbox_of(target.part).unwrap().to_owned();
    assert!(decide::needed(&cell.state, &sandbox));
    asks(&mut cell, token);
    cell.expire("j");
    cell.now_ms += 1_000;
    assert_eq!(lease(&mut cell, "other", "1"), None, "it lives in the folder of its judge runner");
    let (_, second) = lease(&mut cell, "j", "1").unwrap();
    let job = cell.trial(key(batch)).job(target.part).unwrap();
    assert_eq!((job.unclear, job.asked, job.sandbox.as_deref()), (0, true, Some(sandbox.as_str())));
    // Lost with its sandbox, and then it may have been answered.
    cell.expire("j");
    cell.now_ms += GRACE_MS;
    let events = decide::give_up_absent(&cell.state, &|worker| worker == "j", GRACE_MS, &mut cell.chance, cell.now_ms);
    cell.commit_all(events);
    let job = cell.trial(key(batch)).job(target.part).unwrap();
    assert_eq!((job.unclear, job.asked, job.sandbox.as_deref()), (1, false, None));
    assert!(
        !decide::needed(&cell.state, &sandbox) && cell.state.sandbox(&sandbox).is_some(),
        "custody stays open"
    );
    let (_, third) = lease(&mut cell, "other", "1").unwrap();
    assert!(third > second && second > token);
}

/// catalogue J14: each reply is a step, and belongs to one attempt.
#[test]
fn a_conversation() {
    let mut cell = Cell::new(1);
    let batch = start(&mut cell, 1, &[], Some("codex"));
    let (_, token) = cell.lease("w").unwrap();
    cell.step("w", token, "turn.1.agent");
    awaits(&mut cell, token, 1);
    assert_eq!(cell.lease("w"), None, "it waits for its person, and holds no slot");
    assert_eq!(cell.state.model_holders("command/"), 0);
    let (target, job) = lease(&mut cell, "j", "1").unwrap();
    let home = cell.trial(key(batch)).sandbox_of(target.part).unwrap().to_owned();
    asks(&mut cell, job);
    tell(&mut cell, job, not_now());
    cell.now_ms += 60_000;
    let (_, job) = lease(&mut cell, "j", "1").unwrap();
    assert_eq!(
        cell.trial(key(batch)).sandbox_of(Part::Reply),
        Some(home.as_str()),
        "its memory is kept"
    );
    tell(&mut cell, job, replied(false));
    assert!(decide::needed(&cell.state, &home), "the person may be asked again");
    assert_eq!(cell.lease("other"), None, "the agent is where its sandbox is");
    let (_, token) = cell.lease("w").unwrap();
    let steps: Vec<_> = cell.trial(key(batch)).steps.iter().map(|step| step.step.as_str()).collect();
    assert_eq!(steps, ["turn.1.agent", "turn.1.person"]);
    assert_eq!(cell.trial(key(batch)).person.as_ref().unwrap().session_id, "s");
    // The executor's sandbox is lost while the second reply is due: the trial starts over, and the late reply is for nobody.
    awaits(&mut cell, token, 2);
    let (_, job) = lease(&mut cell, "j", "1").unwrap();
    let sandbox = cell.sandbox(key(batch));
    cell.destroyed("w", &sandbox);
    assert!(cell.state.lease(job).is_none());
    cell.now_ms += 60_000;
    let (_, token) = cell.lease("other").unwrap();
    assert_eq!((cell.trial(key(batch)).lost.len(), cell.trial(key(batch)).steps.len()), (1, 0));
    assert!(!decide::needed(&cell.state, &home), "the new conversation has another person");
    cell.pass("other", token);
    assert_eq!(outcome(&cell, batch).status(), TrialStatus::Passed);
}

/// catalogue 56, J16: a person that is an agent is waited for as long as its judge runner may come back; then another is told the whole conversation.
#[test]
fn a_person_whose_judge_runner_stays_away() {
    let mut cell = Cell::new(1);
    let batch = start(&mut cell, 1, &[], Some("codex"));
    let give_up = |cell: &mut Cell| {
        let events = decide::give_up_absent(&cell.state, &|worker| worker == "j", GRACE_MS, &mut cell.chance, cell.now_ms);
        cell.commit_all(events);
    };
    let (_, token) = cell.lease("w").unwrap();
    cell.step("w", token, "turn.1.agent");
    awaits(&mut cell, token, 1);
    let (target, job) = lease(&mut cell, "j", "1").unwrap();
    asks(&mut cell, job);
    tell(&mut cell, job, replied(false));
    let home = cell.trial(key(batch)).sandbox_of(Part::Reply).unwrap().to_owned();
    // Away while the agent works: nobody waits for it.
    cell.now_ms += 2 * GRACE_MS;
    give_up(&mut cell);
    assert!(decide::needed(&cell.state, &home));
    let (_, token) = cell.lease("w").unwrap();
    awaits(&mut cell, token, 2);
    cell.now_ms += GRACE_MS - 1;
    give_up(&mut cell);
    assert!(
        lease(&mut cell, "other", "1").is_none() && decide::needed(&cell.state, &home),
        "its memory is where it was"
    );
    cell.now_ms += 1;
    give_up(&mut cell);
    assert!(
        !decide::needed(&cell.state, &home) && cell.state.sandbox(&home).is_some(),
        "given up, and in custody"
    );
    let job = cell.trial(key(batch)).job(target.part).unwrap();
    assert_eq!((job.unclear, job.refused), (0, 0), "nobody was asked");
    assert_eq!(cell.trial(key(batch)).person, None, "a new one knows no session");
    let (_, job) = lease(&mut cell, "other", "1").unwrap();
    assert_ne!(cell.trial(key(batch)).sandbox_of(Part::Reply), Some(home.as_str()));
    tell(&mut cell, job, replied(false));
    assert_eq!(cell.trial(key(batch)).steps.last().unwrap().step, "turn.2.person");
    assert!(cell.lease("w").is_some(), "the conversation goes on");
}

/// catalogue 34, 35, 36: judge runners that die before they ask, again and again: the job ends after a bounded number of leases, with the reason.
#[test]
fn a_job_that_kills_its_judge_runners() {
    const STOPPED: &str = "the judge runner stopped 16 times in a row while it worked on this";
    for person in [false, true] {
        let mut cell = Cell::new(1);
        let batch = start(&mut cell, 1, if person { &[] } else { &[""] }, person.then_some(""));
        if person {
            let (_, token) = cell.lease("w").unwrap();
            cell.step("w", token, "turn.1.agent");
            awaits(&mut cell, token, 1);
        } else {
            checked(&mut cell, batch, true);
        }
        let mut leases = 0;
        while let Some((target, _)) = lease(&mut cell, "j", &leases.to_string()) {
            leases += 1;
            let job = cell.trial(key(batch)).job(target.part).unwrap();
            assert_eq!(
                (job.idle_leases, job.unclear, job.refused),
                (leases, 0, 0),
                "counted when it is granted"
            );
            replaced(&mut cell, "j", &leases.to_string());
            cell.now_ms += decide::MAX_DELAY_MS;
        }
        assert_eq!(leases, decide::MAX_IDLE_LEASES);
        let reason = match person {
            true => String::from_utf8(cell.trial(key(batch)).steps.last().unwrap().result.to_vec()).unwrap(),
            false => outcome(&cell, batch).failure.clone().unwrap(),
        };
        assert!(reason.contains(STOPPED), "{reason}");
        // Whoever ran the agent ends the conversation, with that.
        assert_eq!(cell.lease("w").is_some(), person);
    }
}

/// catalogue 17, J12: by people, and by time alone.
#[test]
fn ends_from_outside_keep_what_is_known() {
    for end in ["cancel", "resolve", "abandon"] {
        let mut cell = Cell::new(1);
        let batch = start(&mut cell, 1, &["", "", ""], None);
        let organization = cell.organization_of(key(batch));
        checked(&mut cell, batch, true);
        // The second judge is faster than the first, and nobody has come to the third.
        let (_, open) = lease(&mut cell, "j", "1").unwrap();
        asks(&mut cell, open);
        let (target, token) = lease(&mut cell, "j", "1").unwrap();
        tell(&mut cell, token, judged(target.part, JudgeVerdict::Passed));
        match end {
            "cancel" => {
                let events = decide::cancel(&cell.state, &organization, &batch, cell.now_ms).unwrap();
                cell.commit_all(events);
            }
            "resolve" => {
                let event = decide::resolve(&cell.state, key(batch), "enough", cell.now_ms).unwrap();
                cell.commit_all([event]);
            }
            _ => {
                cell.now_ms += ABANDONED_AFTER_MS - 1;
                assert_eq!(decide::abandon(&cell.state, cell.now_ms), []);
                let events = decide::abandon(&cell.state, cell.now_ms + 1);
                cell.commit_all(events);
            }
        }
        let outcome = outcome(&cell, batch);
        assert_eq!(
            (outcome.status(), outcome.exit_code, outcome.commands),
            (TrialStatus::Void, -1, 3),
            "{end}"
        );
        let verdicts: Vec<_> = outcome.judged.iter().map(|judged| (judged.index, judged.verdict())).collect();
        assert_eq!(
            verdicts,
            [(0, JudgeVerdict::Error), (1, JudgeVerdict::Passed), (2, JudgeVerdict::Skipped)],
            "{end}"
        );
        let (asked, failure) = (&outcome.judged[0], outcome.failure.as_deref().unwrap());
        assert_eq!(
            (asked.name.as_str(), asked.error.as_str()),
            ("judge-0", &*format!("the trial ended before this judge had answered: {failure}"))
        );
        assert!(asked.spend.as_ref().is_some_and(|spend| spend.usage.is_none()), "{end}");
        assert!(cell.state.lease(open).is_none() && cell.state.waiting() == 0, "{end}");
    }
}

/// catalogue J13: only judges are asked.
#[test]
fn a_regrade_asks_the_judges_of_those_that_ran() {
    let mut cell = Cell::new(1);
    let first = start(&mut cell, 1, &[""], None);
    checked(&mut cell, first, true);
    let running = view::batch(cell.state.batch(&first).unwrap(), None);
    assert_eq!(retry::regraded(&running, &[true]).err(), Some(decide::Refusal::StillRunning));
    let (target, token) = lease(&mut cell, "j", "1").unwrap();
    tell(&mut cell, token, judged(target.part, JudgeVerdict::Error));
    let ended = view::batch(cell.state.batch(&first).unwrap(), None);
    assert_eq!(retry::regraded(&ended, &[false]).err(), Some(decide::Refusal::NothingToJudge));
    let carried = retry::regraded(&ended, &[true]).unwrap();
    let id = BatchId::new(cell.now_ms, [9; 10]);
    let batch = cell.state.batch(&first).unwrap();
    let started = log::BatchStarted {
        batch: id.0.to_vec().into(),
        organization_id: batch.organization.to_string(),
        request: Some(v1::ObjectRef::default()),
        suite: Some(v1::Suite::default()),
        cases: batch.cases.clone(),
        variants: batch.variants.clone(),
        trials: 1,
        variant_ids: vec![String::new()],
        regrade_of: Some(first.0.to_vec().into()),
        carried,
        ..Default::default()
    };
    cell.commit_all([decide::event(cell.now_ms, Kind::BatchStarted(started))]);
    assert_eq!(cell.lease("w"), None, "no agent runs again");
    let (target, token) = lease(&mut cell, "j", "1").unwrap();
    assert_eq!(target.trial, key(id));
    tell(&mut cell, token, judged(target.part, JudgeVerdict::Passed));
    let outcome = outcome(&cell, id);
    let before = outcome.before.as_ref().unwrap();
    assert_eq!((outcome.status(), before.status()), (TrialStatus::Passed, TrialStatus::Void));
    assert_eq!(
        (before.judged[0].verdict(), outcome.judged[0].verdict()),
        (JudgeVerdict::Error, JudgeVerdict::Passed)
    );
    assert_eq!(
        view::summary(cell.state.batch(&id).unwrap()).regrade_of,
        Some(first.to_string()),
        "lists tell it, too"
    );
    assert_eq!(
        view::batch(cell.state.batch(&id).unwrap(), None).regrade_of,
        Some(first.to_string())
    );
}

#[test]
fn a_regrade_of_a_cancelled_batch_is_not_cancelled() {
    let mut cell = Cell::new(1);
    let first = start(&mut cell, 1, &[""], None);
    checked(&mut cell, first, true);
    let organization = cell.organization_of(key(first));
    let events = decide::cancel(&cell.state, &organization, &first, cell.now_ms).unwrap();
    cell.commit_all(events);
    let ended = view::batch(cell.state.batch(&first).unwrap(), None);
    assert!(outcome(&cell, first).cancelled);
    let carried = retry::regraded(&ended, &[true]).unwrap();
    let outcome = carried[0].outcome.as_ref().unwrap();
    assert!(!outcome.cancelled);
    assert!(outcome.before.as_ref().unwrap().judged.is_empty(), "nobody had asked its judge");
}

/// One move of a judge runner that keeps the rules of asking: what has been asked often enough is answered finally.
fn job_move(cell: &mut Cell, target: Target, token: u64) {
    let job = cell.trial(target.trial).job(target.part).unwrap().clone();
    let last = job.unclear >= MAX_UNCLEAR_ASKS || job.refused >= MAX_REFUSED_ASKS;
    let chance = cell.chance.below(10);
    if !last && chance < 8 {
        asks(cell, token);
    }
    let failure = |kind: v1::AttemptFailureKind| v1::AttemptFailure {
        token,
        kind: kind.into(),
        reason: "as it happens".into(),
    };
    match (last, cell.chance.below(9)) {
        (false, 0) if job.refused + 1 < MAX_REFUSED_ASKS => return tell(cell, token, not_now()),
        (false, 1) if job.unclear + 1 < MAX_UNCLEAR_ASKS => return tell(cell, token, unclear()),
        (false, kind @ 2..=3) => {
            let kind = if kind == 2 {
                v1::AttemptFailureKind::Released
            } else {
                v1::AttemptFailureKind::SandboxLost
            };
            let event = decide::attempt_failed(&cell.state, &holder(cell, token), &failure(kind), &mut cell.chance, cell.now_ms).unwrap();
            return cell.commit_all(event);
        }
        (false, 4) => {
            let worker = holder(cell, token);
            return cell.expire(&worker);
        }
        (false, 5) => return,
        _ => {}
    }
    let result = match target.part {
        Part::Reply => replied(cell.chance.below(5) == 0),
        part => judged(
            part,
            [JudgeVerdict::Passed, JudgeVerdict::Failed, JudgeVerdict::Error][cell.chance.below(3) as usize],
        ),
    };
    tell(cell, token, result);
}

/// catalogue 1, 39, 40, J1: in every state the queue holds who waits, the limits hold who lives, and who has answered is not leased again.
#[test]
fn random_histories() {
    for seed in 0..300 {
        let mut cell = Cell::new(seed);
        let kinds: [(&[&str], Option<&str>); 5] = [
            (&[""], None),
            (&["codex", "", "claude"], None),
            (&[], Some("")),
            (&[""], Some("codex")),
            (&["codex"], Some("codex")),
        ];
        let batches: Vec<BatchId> = (1..)
            .zip(kinds)
            .map(|(number, (judges, person))| start(&mut cell, number, judges, person))
            .collect();
        let (runners, mut incarnation) = (["j", "k"], 1);
        for moves in 0.. {
            if batches.iter().all(|batch| cell.trial(key(*batch)).outcome().is_some()) {
                break;
            }
            assert!(moves < 2_000, "seed {seed}: every trial ends");
            cell.now_ms += cell.chance.below(20_000);
            match cell.chance.below(10) {
                0..=3 => {
                    if let Some((key, token)) = cell.lease("w") {
                        let turns = cell.trial(key).steps.len() as u32 / 2 + 1;
                        cell.step("w", token, &format!("turn.{turns}.agent"));
                        let person = cell.state.batch(&key.batch).unwrap().cases[0].person.is_some();
                        if person && turns < 3 {
                            awaits(&mut cell, token, turns);
                        } else {
                            cell.pass("w", token);
                        }
                    }
                }
                4..=7 => {
                    let worker = runners[cell.chance.below(2) as usize];
                    if let Some((target, token)) = lease(&mut cell, worker, &incarnation.to_string()) {
                        job_move(&mut cell, target, token);
                    }
                }
                8 => {
                    let gone: Vec<(String, String)> = cell
                        .state
                        .custody()
                        .filter(|(name, _)| !decide::needed(&cell.state, name))
                        .map(|(name, sandbox)| (name.to_owned(), sandbox.worker_id.clone()))
                        .collect();
                    gone.iter().for_each(|(name, worker)| cell.destroyed(worker, name));
                }
                _ if cell.chance.below(3) == 0 => {
                    incarnation += 1;
                    runners
                        .iter()
                        .for_each(|worker| replaced(&mut cell, worker, &incarnation.to_string()));
                }
                _ if cell.chance.below(30) == 0 => {
                    let batch = batches[cell.chance.below(batches.len() as u64) as usize];
                    let organization = cell.organization_of(key(batch));
                    let events = decide::cancel(&cell.state, &organization, &batch, cell.now_ms).unwrap_or_default();
                    cell.commit_all(events);
                }
                _ if cell.chance.below(30) == 0 => {
                    let batch = batches[cell.chance.below(batches.len() as u64) as usize];
                    let event = decide::resolve(&cell.state, key(batch), "enough", cell.now_ms);
                    cell.commit_all(event);
                }
                _ => {
                    let worker = ["j", "k", "w"][cell.chance.below(3) as usize];
                    cell.expire(worker);
                    if cell.chance.below(3) == 0 {
                        cell.now_ms += GRACE_MS;
                        let events = decide::give_up_absent(&cell.state, &|id| id == worker, GRACE_MS, &mut cell.chance, cell.now_ms);
                        cell.commit_all(events);
                    }
                }
            }
            sound::sound(&cell.state, &cell.log);
            if cell.chance.below(20) == 0 {
                // A restart from a snapshot goes on as if there had been none.
                cell.state = State::restore(&cell.state.save()).unwrap();
            }
        }
        let again = cell.recovered(Default::default());
        assert_eq!(
            again.state.save().encode_to_vec(),
            cell.state.save().encode_to_vec(),
            "seed {seed}: the log tells all"
        );
        assert_eq!(cell.state.leases().count(), 0, "seed {seed}");
        for batch in &batches {
            assert_eq!(cell.state.batch(batch).unwrap().unsettled, 0, "seed {seed}");
        }
    }
}
