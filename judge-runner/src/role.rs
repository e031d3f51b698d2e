//! What a judge runner does with a job.

use evalgrid_proto::v1::{JobLease, JobResult, Unclear, WorkerRole, job_lease::Job as What, job_result};
use evalgrid_worker::{End, Fact, Role, Then, Worker};

use crate::{
    http::Http,
    job::{Job, Stop},
    judgment, reply,
};

/// The part of a worker that only judge runners have.
pub(crate) struct JudgeRunner {
    pub(crate) http: Http,
}

impl Role for JudgeRunner {
    type Task = JobLease;
    const ROLE: WorkerRole = WorkerRole::JudgeRunner;
    const NAME: &str = "judge runner";

    async fn run(&self, worker: &Worker, lease: &JobLease) -> End {
        let job = Job::new(worker, &self.http, lease);
        match &lease.job {
            Some(What::Judge(judge)) => judgment::run(&job, judge).await,
            Some(What::Reply(reply)) => reply::run(&job, reply).await,
            // What a newer scheduler asks for: another judge runner may know it.
            None => job.given_up(Stop::unavailable("this judge runner does not know such jobs"), Then::Keep),
        }
    }

    fn broken(&self, lease: &JobLease) -> End {
        let unclear = Unclear {
            reason: "the judge runner hit a bug".into(),
        };
        let result = JobResult {
            token: lease.token,
            spent_ms: 0,
            result: Some(job_result::Result::Unclear(unclear)),
        };
        let then = match lease.job {
            // Its sandbox is its memory.
            Some(What::Reply(_)) => Then::Keep,
            _ => Then::Destroy,
        };
        End {
            fact: Fact::Job(Box::new(result)),
            then,
        }
    }
}
