//! What all roles have in common, with a role that does what the test says.
#![allow(clippy::unwrap_used)]

use std::sync::Mutex;

use async_trait::async_trait;
use evalgrid_proto::v1::{AttemptFailure, AttemptFailureKind, JobLease, JobResult, Report, Unclear, WorkerRole, job_result};
use evalgrid_sandbox::{Sandbox, SandboxName, SandboxProvider, SandboxSpec};
use tokio::sync::Notify;

use super::*;

/// Nothing here takes longer, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// Says of every sandbox that it is gone.
#[derive(Default)]
struct Emptied(Mutex<Vec<String>>);

#[async_trait]
impl SandboxProvider for Emptied {
    fn name(&self) -> &'static str {
        "process"
    }
    async fn create(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError> {
        self.attach(&spec.name, spec.token).await
    }
    async fn attach(&self, name: &str, _: u64) -> Result<Box<dyn Sandbox>, SandboxError> {
        Err(SandboxError::Lost {
            name: name.into(),
            reason: "there are none".into(),
        })
    }
    async fn list(&self) -> Result<Vec<SandboxName>, SandboxError> {
        Ok(Vec::new())
    }
    fn share(&self, _: &[(String, Vec<u8>)]) -> Result<(), SandboxError> {
        Ok(())
    }
    async fn destroy(&self, name: &str) -> Result<(), SandboxError> {
        self.0.lock().unwrap().push(name.to_owned());
        Ok(())
    }
}

/// Ends each job at once with what its reason says: `keep`, `destroy`, `bug`; or never.
#[derive(Default)]
struct Toy {
    begun: Notify,
}

fn end(token: u64, then: Then) -> End {
    let result = job_result::Result::Unclear(Unclear::default());
    End {
        fact: Fact::Job(Box::new(JobResult {
            token,
            spent_ms: 0,
            result: Some(result),
        })),
        then,
    }
}

impl Role for Toy {
    type Task = JobLease;
    const ROLE: WorkerRole = WorkerRole::JudgeRunner;
    const NAME: &str = "toy";

    async fn run(&self, _: &Worker, job: &JobLease) -> End {
        self.begun.notify_one();
        match job.reason.as_str() {
            "keep" => end(job.token, Then::Keep),
            "destroy" => end(job.token, Then::Destroy),
            "bug" => panic!("a bug"),
            _ => std::future::pending().await,
        }
    }

    fn broken(&self, job: &JobLease) -> End {
        end(job.token, Then::Destroy)
    }
}

struct Rig {
    jobs: Arc<Jobs<Toy>>,
    provider: Arc<Emptied>,
    _folder: tempfile::TempDir,
}

impl Rig {
    fn new(slots: u32) -> Self {
        let root = tempfile::tempdir().unwrap();
        let folder = Folder::open(&root.path().join("worker")).unwrap();
        let client = Client::new(&["http://127.0.0.1:1".into()], "token").unwrap();
        let provider = Arc::new(Emptied::default());
        let mut providers = Providers::new();
        providers.insert("process", provider.clone());
        let limits = Limits {
            memory_bytes: 1 << 30,
            pids: 64,
        };
        let tools = ToolOptions {
            folder: root.path().join("tools"),
            ..ToolOptions::default()
        };
        let tools = Tools::new(tools).unwrap();
        let worker = Worker::new(folder, slots, client.clone(), Objects::new(client), providers, limits, tools);
        Self {
            jobs: Arc::new(Jobs::new(worker, Toy::default())),
            provider,
            _folder: root,
        }
    }

    fn begin(&self, token: u64, sandbox: &str, what: &str) {
        self.jobs.begin(JobLease {
            token,
            sandbox: sandbox.into(),
            provider: "process".into(),
            reason: what.into(),
            ..JobLease::default()
        });
    }

    /// Reports until `enough`, each acknowledged.
    async fn until(&self, enough: impl Fn(&Report) -> bool) -> Report {
        let outbox = &self.jobs.worker().outbox;
        let mut told = Report::default();
        while !enough(&told) {
            match outbox.next_report() {
                Some(report) => {
                    outbox.acknowledge(report.number);
                    told.jobs.extend(report.jobs);
                    told.failures.extend(report.failures);
                    told.destroyed.extend(report.destroyed);
                    told.credits += report.credits;
                }
                None => timeout(PATIENCE, outbox.ready()).await.unwrap(),
            }
        }
        told
    }

    fn held(&self) -> Vec<u64> {
        self.jobs.hello(Vec::new()).0.held
    }
}

#[tokio::test]
async fn what_becomes_of_a_sandbox() {
    async fn check(sandbox: &str, what: &str, destroyed: &[&str]) {
        let rig = Rig::new(1);
        rig.begin(1, sandbox, what);
        let told = rig.until(|told| told.credits == 1).await;
        assert_eq!(
            (told.jobs.len(), told.destroyed.as_slice()),
            (1, &destroyed.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>()[..]),
            "{sandbox} {what}"
        );
        assert_eq!(rig.provider.0.lock().unwrap().as_slice(), destroyed);
        assert!(rig.held().is_empty());
    }
    check("sandbox", "destroy", &["sandbox"]).await;
    check("sandbox", "keep", &[]).await;
    check("sandbox", "bug", &["sandbox"]).await;
    // A model was called: there is nothing to destroy.
    check("", "destroy", &[]).await;
    check("", "bug", &[]).await;
}

#[tokio::test]
async fn a_slot_is_free_once_the_end_is_durable() {
    let rig = Rig::new(1);
    let outbox = &rig.jobs.worker().outbox;
    rig.begin(1, "", "keep");
    timeout(PATIENCE, outbox.ready()).await.unwrap();
    let report = outbox.next_report().unwrap();
    assert_eq!((report.jobs.len(), report.credits), (1, 0));
    // A connection that breaks now finds the lease held, and its end on the way.
    let (hello, resent) = rig.jobs.hello(Vec::new());
    assert_eq!((hello.held.as_slice(), hello.slots, resent.len()), (&[1][..], 0, 1));
    assert_eq!(hello.role(), WorkerRole::JudgeRunner);
    outbox.acknowledge(report.number);
    rig.until(|told| told.credits == 1).await;
}

#[tokio::test]
async fn jobs_without_a_sandbox_have_nothing_in_common() {
    let rig = Rig::new(4);
    for token in 1..=2 {
        rig.begin(token, "", "wait");
        rig.begin(token + 10, "sandbox", "wait");
    }
    assert_eq!(rig.held(), [1, 2, 12], "a newer lease of the same sandbox takes it over");
    rig.begin(11, "sandbox", "wait");
    assert_eq!(rig.held(), [1, 2, 12], "an older one does not");
    rig.jobs.revoke(1, "cancelled");
    rig.jobs.revoke(12, "cancelled");
    let told = rig.until(|told| told.credits == 2).await;
    assert_eq!((told.destroyed.as_slice(), told.jobs.len()), (&["sandbox".to_owned()][..], 0));
    assert_eq!(rig.held(), [2]);
}

#[tokio::test]
async fn who_stops_gives_back_what_it_holds_and_what_still_comes() {
    let rig = Rig::new(2);
    rig.begin(1, "", "wait");
    timeout(PATIENCE, rig.jobs.role().begun.notified()).await.unwrap();
    rig.jobs.release().await;
    rig.begin(2, "", "keep");
    let told = rig.until(|told| told.failures.len() == 2).await;
    let released = |token| AttemptFailure {
        token,
        kind: AttemptFailureKind::Released.into(),
        reason: "the worker is stopping".into(),
    };
    assert_eq!((told.failures, told.credits), (vec![released(1), released(2)], 0));
}

/// catalogue 33: what was said at a moment renews the lease from that moment on, and the worker's time ends before the scheduler's.
/// catalogue 25: so two never act under one right.
#[tokio::test]
async fn a_lease_ends_here_before_it_ends_there() {
    let rig = Rig::new(1);
    let worker = rig.jobs.worker();
    let lease = Duration::from_secs(10);
    let heard_ago = |ms| worker.heard(Instant::now() - Duration::from_millis(ms), lease);
    assert!(!worker.leases_hold(), "nothing was heard yet");
    heard_ago(9_500);
    assert!(!worker.leases_hold(), "0.95 of the time is over");
    worker.silence().await;
    heard_ago(5_000);
    assert!(worker.leases_hold());
    heard_ago(9_500);
    assert!(worker.leases_hold(), "an older answer takes nothing back");
}
