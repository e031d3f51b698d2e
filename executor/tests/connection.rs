//! Crashes, broken streams, silence, revocation: what a worker does when things go wrong around its trials.
#![allow(clippy::unwrap_used)]

mod support;

use std::{fs, path::PathBuf, time::Duration};

use evalgrid_proto::v1::{AttemptFailureKind, JobLease, Lease, RecordedStep, TrialStatus, WorkerRole, to_worker};
use serde_json::{Value, json};
use support::{Grid, PATIENCE, Session, Told, request};

/// A trial whose agent waits for a file, so that a test decides when it ends.
struct Held {
    gate: PathBuf,
    lease: Lease,
}

impl Held {
    fn new(grid: &Grid, token: u64) -> Self {
        let gate = grid.folder.path().join(format!("gate-{token}"));
        let run = "echo $$ > pid; echo started > started; until [ -e \"$GATE\" ]; do sleep 0.02; done; echo ran >> ran";
        let profile = json!({ "env": { "GATE": gate } });
        Self {
            lease: grid.lease(token, &request(run, json!({ "verify": "test $(wc -l < ran) = 1" }), profile)),
            gate,
        }
    }

    fn open(&self) {
        fs::write(&self.gate, "").unwrap();
    }

    /// Until the agent runs. What was told until then is acknowledged.
    async fn begin(&self, grid: &Grid, session: &mut Session) -> Told {
        session.lease(&self.lease).await;
        let told = session.until(|told| !told.steps.is_empty()).await;
        let started = self.file(grid, "workspace/started");
        until("the agent runs", || fs::read(&started).is_ok_and(|text| !text.is_empty())).await;
        told
    }

    fn file(&self, grid: &Grid, path: &str) -> PathBuf {
        grid.folder.path().join("worker/process").join(&self.lease.sandbox).join(path)
    }

    /// The agent's process, to see whether it lives.
    fn agent(&self, grid: &Grid) -> PathBuf {
        let pid = fs::read_to_string(self.file(grid, "workspace/pid")).unwrap();
        PathBuf::from(format!("/proc/{}", pid.trim()))
    }

    fn adopt(&self, token: u64) -> Lease {
        Lease {
            token,
            adopt: true,
            ..self.lease.clone()
        }
    }
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !condition() {
        assert!(tokio::time::Instant::now() < deadline, "waited too long until {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// catalogue 11: a trial goes on from any of them.
#[tokio::test]
async fn every_prefix_of_the_recorded_steps_leads_to_the_same_outcome() {
    let mut grid = Grid::new().await;
    let run = r#"echo x >> "$HOME/ran"; echo x >> grows; echo '{"_tag":"Started","sessionId":"s","model":"m"}'
        printf '{"_tag":"Message","role":"assistant","text":"%s"}\n' "$SPHYNX_PROMPT"; printf '{"_tag":"Usage","inputTokens":1,"outputTokens":2}\n'"#;
    let case = json!({
        "source": { "kind": "files", "files": { "a": "a" } },
        "user": { "kind": "scripted", "replies": ["go on"] },
        "verify": "echo check >> grows; echo check >> \"$HOME/ran\" && test \"$(tr '\\n' ' ' < \"$HOME/ran\")\" = 'i x x check '",
    });
    let profile = json!({ "install": "echo i >> \"$HOME/ran\"", "files": { "home/a": "a", "workspace/b": "b" } });
    let mut lease = grid.lease(1, &request(run, case, profile));
    let set_up = ["sandbox.create", "source", "profile.home", "profile.workspace"];
    let processes = [
        "profile.install",
        "turn.1.agent",
        "turn.1.files",
        "turn.2.agent",
        "turn.2.files",
        "artifacts",
        "check.0",
    ];
    let names = [set_up.as_slice(), &processes].concat();
    let mut recorded: Vec<RecordedStep> = Vec::new();

    // The worker dies before a process, each time with one step more that has become durable.
    for durable in 0..set_up.len() {
        let executor = grid.executor();
        let mut session = grid.session().await;
        session.acknowledge_if(|_| false);
        lease.steps = recorded[..durable].to_vec();
        session.lease(&lease).await;
        let told = session.until(|told| told.step_names().last() == set_up.last()).await;
        assert_eq!(told.step_names(), set_up[durable..], "only what was not recorded");
        executor.kill().await;
        recorded.truncate(durable);
        recorded.extend(told.recorded());
        (lease.token, lease.adopt) = (lease.token + 1, true);
    }

    // And now when all is done.
    let mut first = None;
    for durable in set_up.len()..=names.len() {
        let executor = grid.executor();
        let mut session = grid.session().await;
        assert_eq!(session.hello.sandboxes, [lease.sandbox.clone()]);
        assert!(session.hello.held.is_empty());
        if durable < names.len() {
            session.acknowledge_if(|report| report.results.is_empty());
        }
        lease.steps = recorded[..durable].to_vec();
        session.lease(&lease).await;
        let told = session.until(|told| !told.results.is_empty()).await;
        assert_eq!(told.failures, []);
        assert_eq!(told.step_names(), names[durable..], "only what was not recorded");
        let outcome = told.outcome();
        assert_eq!(outcome.status(), TrialStatus::Passed, "{:?}", grid.evidence(outcome));
        let bare = grid.bare(outcome);
        assert_eq!(&bare, first.get_or_insert(bare.clone()), "after {durable} steps");
        if durable < names.len() {
            executor.kill().await;
        } else {
            // The last one hears that it is durable, and cleans up.
            session
                .until(|told| told.destroyed == [lease.sandbox.clone()] && told.credits == 1)
                .await;
            executor.stop().await;
        }
        recorded.truncate(durable);
        recorded.extend(told.recorded());
        lease.token += 1;
    }
    assert_eq!(grid.sandboxes(), Vec::<PathBuf>::new());
}

#[tokio::test]
async fn no_process_starts_before_the_set_up_is_durable() {
    async fn check(install: Value, processes: &[&str]) {
        let mut grid = Grid::new().await;
        let case = json!({ "source": { "kind": "files", "files": { "a": "" } }, "verify": "test -e started" });
        let mut profile = json!({ "files": { "workspace/b": "" } });
        profile.as_object_mut().unwrap().extend(install.as_object().unwrap().clone());
        let lease = grid.lease(1, &request("touch started", case, profile));
        let folder = grid.folder.path().join("worker/process").join(&lease.sandbox);
        let executor = grid.executor();
        let mut session = grid.session().await;
        session.acknowledge_if(|_| false);
        session.lease(&lease).await;
        session.until(|told| told.step_names().last() == Some(&"profile.workspace")).await;
        // Meanwhile another trial has all the time that it needs, on the same worker.
        session.acknowledge_if(|_| true);
        let other = grid.lease(2, &request("true", json!({ "verify": "true" }), json!({})));
        session.lease(&other).await;
        let told = session.until(|told| told.credits == 1).await;
        assert_eq!(told.outcome().status(), TrialStatus::Passed);
        assert!(told.steps.iter().all(|step| step.token == 2), "{:?}", told.steps);
        assert!(folder.join("workspace/b").exists());
        for mark in ["installed", "started"] {
            assert!(!folder.join("workspace").join(mark).exists(), "{mark}");
        }
        session.make_up().await;
        let told = session.until(|told| told.credits == 1).await;
        assert_eq!(told.step_names(), processes);
        assert_eq!(told.outcome().status(), TrialStatus::Passed);
        executor.stop().await;
    }
    check(
        json!({ "install": "touch installed" }),
        &["profile.install", "turn.1.agent", "turn.1.files", "artifacts", "check.0"],
    )
    .await;
    check(json!({}), &["turn.1.agent", "turn.1.files", "artifacts", "check.0"]).await;
}

#[tokio::test]
async fn a_worker_that_dies_leaves_the_agent_and_the_next_one_waits_for_it() {
    let mut grid = Grid::new().await;
    let held = Held::new(&grid, 1);
    let executor = grid.executor();
    let mut session = grid.session().await;
    held.begin(&grid, &mut session).await;
    let first = session.hello.clone();
    executor.kill().await;
    let agent = held.agent(&grid);
    let executor = grid.executor();
    let mut session = grid.session().await;
    assert_eq!(session.hello.worker_id, first.worker_id);
    assert_ne!(session.hello.incarnation, first.incarnation);
    assert_eq!(
        (session.hello.slots, session.hello.sandboxes.as_slice()),
        (3, &[held.lease.sandbox.clone()][..])
    );
    session.lease(&held.adopt(2)).await;
    assert!(agent.exists(), "the agent never noticed");
    held.open();
    let told = session.until(|told| told.credits == 1).await;
    assert_eq!(told.outcome().status(), TrialStatus::Passed);
    executor.stop().await;
}

#[tokio::test]
async fn reports_that_nobody_acknowledged_are_sent_again() {
    let mut grid = Grid::new().await;
    let held = Held::new(&grid, 1);
    let executor = grid.executor();
    let mut session = grid.session().await;
    held.begin(&grid, &mut session).await;
    session.acknowledge_if(|_| false);
    held.open();
    let before = session.until(|told| !told.results.is_empty()).await;
    drop(session);
    let mut session = grid.session().await;
    assert_eq!(session.hello.held, [1]);
    assert_eq!(session.hello.slots, 2);
    let after = session.until(|told| told.credits == 1).await;
    assert_eq!(after.reports[..before.reports.len()], before.reports, "the same ones, first");
    assert_eq!(after.step_names(), ["turn.1.agent", "turn.1.files", "artifacts", "check.0"]);
    assert_eq!(after.outcome().status(), TrialStatus::Passed);
    assert_eq!(after.destroyed, std::slice::from_ref(&held.lease.sandbox));
    executor.stop().await;
}

#[tokio::test]
async fn a_sandbox_stays_until_the_outcome_is_durable() {
    let mut grid = Grid::new().await;
    let executor = grid.executor();
    let mut session = grid.session().await;
    session.acknowledge_if(|report| report.results.is_empty());
    session
        .lease(&grid.lease(1, &request("true", json!({ "verify": "true" }), json!({}))))
        .await;
    let told = session.until(|told| !told.results.is_empty()).await;
    drop(session);
    let mut session = grid.session().await;
    assert_eq!(grid.sandboxes().len(), 1);
    assert_eq!(told.destroyed, Vec::<String>::new());
    session.until(|told| told.credits == 1).await;
    assert_eq!(grid.sandboxes().len(), 0);
    executor.stop().await;
}

#[tokio::test]
async fn a_revoked_trial_ends_and_its_sandbox_goes() {
    let mut grid = Grid::new().await;
    let held = Held::new(&grid, 1);
    let executor = grid.executor();
    let mut session = grid.session().await;
    held.begin(&grid, &mut session).await;
    let agent = held.agent(&grid);
    session.revoke(99).await;
    session.revoke(1).await;
    let told = session.until(|told| told.credits == 1).await;
    assert_eq!(
        (told.destroyed.as_slice(), told.results.len(), told.failures.len()),
        (&[held.lease.sandbox.clone()][..], 0, 0)
    );
    assert!(!agent.exists());
    assert_eq!(grid.sandboxes().len(), 0);
    executor.stop().await;
}

/// catalogue 30: who is told that its lease is not known lets go of the trial.
#[tokio::test]
async fn a_stale_token_makes_the_worker_stop_acting() {
    let mut grid = Grid::new().await;
    let held = Held::new(&grid, 1);
    let executor = grid.executor();
    let mut session = grid.session().await;
    let number = held.begin(&grid, &mut session).await.reports[0].number;
    session.ack(number, vec![1]).await;
    let told = session.until(|told| told.credits == 1).await;
    assert_eq!((told.destroyed.len(), told.results.len(), told.failures.len()), (0, 0, 0));
    assert!(held.agent(&grid).exists(), "who may act decides what becomes of the agent");
    session.destroy(&held.lease.sandbox).await;
    let told = session.until(|told| !told.destroyed.is_empty()).await;
    assert_eq!(told.destroyed, std::slice::from_ref(&held.lease.sandbox));
    assert_eq!(grid.sandboxes().len(), 0);
    executor.stop().await;
}

#[tokio::test]
async fn a_stale_token_is_no_leave_to_start_a_process() {
    let mut grid = Grid::new().await;
    let held = Held::new(&grid, 1);
    let executor = grid.executor();
    let mut session = grid.session().await;
    session.acknowledge_if(|_| false);
    session.lease(&held.lease).await;
    let told = session.until(|told| !told.steps.is_empty()).await;
    session.ack(told.reports[0].number, vec![1]).await;
    let told = session.until(|told| told.credits == 1).await;
    assert_eq!((told.steps.len(), told.destroyed.len(), told.failures.len()), (0, 0, 0));
    assert!(!held.file(&grid, "workspace/started").exists());
    executor.stop().await;
}

#[tokio::test]
async fn a_newer_lease_of_the_same_sandbox_takes_it_over() {
    let mut grid = Grid::new().await;
    let held = Held::new(&grid, 1);
    let executor = grid.executor();
    let mut session = grid.session().await;
    held.begin(&grid, &mut session).await;
    session.lease(&held.adopt(2)).await;
    held.open();
    let told = session.until(|told| told.credits == 2).await;
    assert_eq!(told.results.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [2]);
    executor.stop().await;
}

/// catalogue 30: who is told nothing at all does so by itself.
#[tokio::test]
async fn silence_for_the_time_of_a_lease_ends_all_leases() {
    let mut grid = Grid::new().await;
    let held = Held::new(&grid, 1);
    let executor = grid.executor();
    let mut session = grid.connection().await;
    session.fall_silent();
    session.welcome(300).await;
    // The lease comes late in its own time, so the agent may not have started when it ends: wait for the sandbox only.
    session.lease(&held.lease).await;
    let mut next = grid.session().await;
    assert_eq!((next.hello.held.len(), next.hello.slots), (0, 3));
    session.closed().await;
    let sandboxes = next.hello.sandboxes.clone();
    assert!(sandboxes.is_empty() || sandboxes == [held.lease.sandbox.clone()]);
    next.destroy(&held.lease.sandbox).await;
    let told = next.until(|told| !told.destroyed.is_empty()).await;
    assert_eq!(
        (told.steps.len(), told.results.len(), told.failures.len()),
        (0, 0, 0),
        "nothing is said for a lease that has ended"
    );
    executor.stop().await;
}

/// catalogue 24: at its end, too, a worker is heard for as long as something that it vouches for is open.
#[tokio::test]
async fn heartbeats_outlive_the_work_at_shutdown() {
    let mut grid = Grid::new().await;
    let held = Held::new(&grid, 1);
    let executor = grid.executor();
    let mut session = grid.connection().await;
    session.welcome(1_000).await;
    held.begin(&grid, &mut session).await;
    session.acknowledge_if(|_| false);
    executor.ask_to_stop();
    session.until(|told| !told.failures.is_empty()).await;
    let before = session.beats();
    until("it beats on", || session.beats() >= before + 5).await;
    session.make_up().await;
    executor.ended().await;
}

/// catalogue 31: no number of broken connections ends the heartbeat, or the work, while they fit into the lease.
#[tokio::test]
async fn errors_do_not_end_the_heartbeat() {
    let mut grid = Grid::new().await;
    let held = Held::new(&grid, 1);
    let executor = grid.executor();
    let mut session = grid.connection().await;
    session.welcome(10_000).await;
    held.begin(&grid, &mut session).await;
    for _ in 0..4 {
        drop(session);
        // One that breaks before the welcome, and one that holds for some heartbeats.
        drop(grid.connection().await);
        session = grid.connection().await;
        assert_eq!(session.hello.held, [1], "it still has its trial");
        session.welcome(10_000).await;
        until("it beats", || session.beats() >= 1).await;
    }
    held.open();
    let told = session.until(|told| told.credits == 1).await;
    assert_eq!((told.outcome().status(), told.results[0].0), (TrialStatus::Passed, 1));
    executor.stop().await;
}

/// catalogue 33: the worker counts by its own clock, and by nobody's word.
#[tokio::test]
async fn a_worker_that_is_not_answered_lets_go_and_leaves_the_agent() {
    let mut grid = Grid::new().await;
    let held = Held::new(&grid, 1);
    let executor = grid.executor();
    let mut session = grid.connection().await;
    let welcomed = tokio::time::Instant::now();
    session.welcome(3_000).await;
    held.begin(&grid, &mut session).await;
    let agent = held.agent(&grid);
    session.fall_silent();
    session.closed().await;
    assert!(welcomed.elapsed() >= Duration::from_millis(2_000), "it did not give up early");
    // It comes back without the trial, in the time that the scheduler still grants; the agent lives on with its supervisor.
    let next = grid.connection().await;
    assert!(next.hello.held.is_empty() && next.hello.sandboxes == [held.lease.sandbox.clone()]);
    assert!(agent.exists(), "the agent is left alone");
    executor.stop().await;
}

/// catalogue 58: what was taken over is given back, too.
#[tokio::test]
async fn stopping_gives_the_leases_back_and_leaves_the_agents() {
    let mut grid = Grid::new().await;
    let held = Held::new(&grid, 1);
    let executor = grid.executor();
    let mut session = grid.session().await;
    held.begin(&grid, &mut session).await;
    let agent = held.agent(&grid);
    executor.ask_to_stop();
    let told = session.until(|told| !told.failures.is_empty()).await;
    assert_eq!((told.failures[0].0, told.failures[0].1), (1, AttemptFailureKind::Released.into()));
    assert_eq!(told.destroyed.len(), 0);
    executor.ended().await;
    assert!(agent.exists());
    let executor = grid.executor();
    let mut session = grid.session().await;
    session.lease(&held.adopt(2)).await;
    held.open();
    assert_eq!(
        session.until(|told| told.credits == 1).await.outcome().status(),
        TrialStatus::Passed
    );
    executor.stop().await;
}

#[tokio::test]
async fn a_stopping_worker_gives_each_new_lease_back_once_and_takes_no_more() {
    let mut grid = Grid::new().await;
    let held = Held::new(&grid, 1);
    let executor = grid.executor();
    let mut session = grid.session().await;
    held.begin(&grid, &mut session).await;
    // It stays while something is not acknowledged, and goes as soon as everything is.
    session.acknowledge_if(|_| false);
    executor.ask_to_stop();
    let mut told = vec![session.until(|told| !told.failures.is_empty()).await];
    let request = request("true", json!({ "verify": "true" }), json!({}));
    // More than it ever had slots.
    for token in 2..=5 {
        session.lease(&grid.lease(token, &request)).await;
    }
    told.push(session.until(|told| told.failures.len() == 4).await);
    session.acknowledge_if(|_| true);
    session.make_up().await;
    executor.ended().await;
    told.push(session.closed().await);
    let failures: Vec<_> = told
        .iter()
        .flat_map(|told| &told.failures)
        .map(|failure| (failure.0, failure.1))
        .collect();
    assert_eq!(failures, [1, 2, 3, 4, 5].map(|token| (token, AttemptFailureKind::Released.into())));
    for told in told {
        assert_eq!(
            (told.credits, told.steps.len(), told.results.len(), told.destroyed.len()),
            (0, 0, 0, 0)
        );
    }
    assert_eq!(grid.sandboxes().len(), 1, "only the one that was there before");
}

/// It never happens; but what is refused is asked of somebody else, and what is dropped waits for hours.
#[tokio::test]
async fn a_job_for_judge_runners_is_given_back() {
    let mut grid = Grid::new().await;
    let executor = grid.executor();
    let mut session = grid.session().await;
    assert_eq!(session.hello.role(), WorkerRole::Executor);
    let job = JobLease {
        token: 9,
        ..JobLease::default()
    };
    session.send(to_worker::Message::Job(job)).await;
    let told = session.until(|told| !told.failures.is_empty()).await;
    assert_eq!((told.failures[0].0, told.failures[0].1), (9, AttemptFailureKind::Released.into()));
    assert_eq!(told.credits, 0);
    executor.stop().await;
}

#[tokio::test]
async fn stopping_without_a_scheduler_takes_a_bounded_time() {
    let mut grid = Grid::new().await;
    let held = Held::new(&grid, 1);
    let executor = grid.executor();
    let mut session = grid.session().await;
    held.begin(&grid, &mut session).await;
    drop(session);
    executor.stop().await;
}

#[tokio::test]
async fn attempts_that_cannot_begin() {
    async fn check(change: impl FnOnce(&mut Lease), kind: AttemptFailureKind, reason: &str) {
        let mut grid = Grid::new().await;
        let mut lease = grid.lease(1, &request("true", json!({ "verify": "true" }), json!({})));
        change(&mut lease);
        let executor = grid.executor();
        let mut session = grid.session().await;
        session.lease(&lease).await;
        let told = session.until(|told| told.credits == 1).await;
        assert_eq!(told.failures.len(), 1);
        let (token, found, text) = &told.failures[0];
        assert_eq!((*token, *found), (1, kind.into()));
        assert!(text.contains(reason), "{text}");
        executor.stop().await;
    }
    check(|lease| lease.adopt = true, AttemptFailureKind::SandboxLost, "").await;
    check(
        |lease| lease.provider = "docker".into(),
        AttemptFailureKind::SandboxUnavailable,
        "docker",
    )
    .await;
    check(|lease| lease.case_index = 5, AttemptFailureKind::SandboxUnavailable, "case").await;
    let gone = |lease: &mut Lease| lease.request.as_mut().unwrap().sha256 = "0".repeat(64);
    check(gone, AttemptFailureKind::SandboxUnavailable, "refused").await;
}

#[tokio::test]
async fn one_executor_per_folder() {
    let mut grid = Grid::new().await;
    let executor = grid.executor();
    let _session = grid.session().await;
    let second = grid.executor();
    assert!(second.refused().await.contains("in use"));
    executor.stop().await;
}

/// catalogue 45: its loop ends with no error of a connection.
#[tokio::test]
async fn a_worker_follows_a_failover_at_once() {
    let (mut a, mut b) = (Grid::new().await, Grid::new().await);
    a.serves(true).await;
    b.serves(false).await;
    let executor = a.executor_of(&[&a, &b]);
    let held = Held::new(&a, 1);
    let mut session = a.session().await;
    held.begin(&a, &mut session).await;
    a.serves(false).await;
    // The active one is gone, and for a while there is none.
    drop(session);
    tokio::time::sleep(Duration::from_millis(400)).await;
    b.serves(true).await;
    let since = tokio::time::Instant::now();
    let session = b.session().await;
    let took = since.elapsed();
    assert!(took < Duration::from_secs(2), "{took:?}");
    println!("the worker came after {took:?}");
    assert_eq!(session.hello.held, [1], "the trial has gone on");
    held.open();
    executor.kill().await;
}
