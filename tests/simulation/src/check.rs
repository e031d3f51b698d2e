//! The promises of the design's first section, proved from the log alone: every record is read as it becomes durable, and what may not follow
//! from those before it is a violation. What a failover takes away is read back from the beginning.

mod jobs;

use std::collections::{BTreeMap, BTreeSet};

use evalgrid_domain::limits::{IDEMPOTENCY_KEY_MS, MAX_RUNNING_BATCHES};
use evalgrid_proto::{
    log::v1::{self as log, Event, TrialRef, event::Kind},
    v1::{BatchStatus, TrialStatus},
};
use evalgrid_store::Record;
use prost::Message as _;

pub use jobs::JobKey;
use jobs::Jobs;

/// A broken promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which one.
    pub rule: &'static str,
    /// How.
    pub detail: String,
}

/// A violation of a rule.
pub fn broken<T>(rule: &'static str, detail: impl Into<String>) -> Result<T, Violation> {
    Err(Violation {
        rule,
        detail: detail.into(),
    })
}

/// Something that the log says, and that somebody may have been told.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fact {
    /// A batch was started.
    Started([u8; 16]),
    /// A trial of a batch has this verdict.
    Settled([u8; 16], u32, u32, i32),
    /// A batch has ended.
    Ended([u8; 16]),
    /// A sandbox may be made.
    Intended(String),
    /// A step is recorded in a sandbox.
    Step(String, String),
    /// Nothing is left of a sandbox.
    Destroyed(String),
    /// A trial of a batch has run, and is judged.
    Checked([u8; 16], u32, u32),
    /// A job is asked under this token.
    Asked(u64),
    /// A job was answered under this token.
    Answered(u64),
}

type TrialId = ([u8; 16], u32, u32);

struct Batch {
    organization: String,
    key: Option<String>,
    trials: usize,
    /// How many judges each case has, and whether it has a person.
    cases: Vec<(u32, bool)>,
    variants: usize,
    settled: BTreeMap<(u32, u32), (TrialStatus, bool)>,
    ended_ms: Option<u64>,
    archived: bool,
}

/// What the log says so far.
#[derive(Default)]
pub struct Ledger {
    sequences: BTreeMap<u16, u64>,
    last_ms: u64,
    last_token: u64,
    batches: BTreeMap<[u8; 16], Batch>,
    running: BTreeMap<String, BTreeSet<[u8; 16]>>,
    keys: BTreeMap<(String, String), [u8; 16]>,
    /// The sandbox of each living lease, by token.
    leases: BTreeMap<u64, String>,
    /// The living lease of each trial.
    leased: BTreeMap<TrialId, u64>,
    custody: BTreeMap<String, (String, TrialId)>,
    /// The newest sandbox of each trial itself.
    sandboxes: BTreeMap<TrialId, String>,
    jobs: Jobs,
    facts: BTreeSet<Fact>,
}

fn id(bytes: &[u8]) -> Result<[u8; 16], Violation> {
    match bytes.try_into() {
        Ok(id) => Ok(id),
        Err(_) => broken("a record can be read", "a batch id is not 16 bytes"),
    }
}

fn trial(reference: Option<&TrialRef>) -> Result<TrialId, Violation> {
    match reference {
        Some(reference) => Ok((id(&reference.batch)?, reference.run, reference.ordinal)),
        None => broken("a record can be read", "no trial is named"),
    }
}

impl Batch {
    fn case_of(&self, run: u32) -> (u32, bool) {
        let case = self.cases.get(run as usize / self.variants.max(1));
        case.copied().unwrap_or_default()
    }
}

impl Ledger {
    /// Whether the log says so.
    pub fn says(&self, fact: &Fact) -> bool {
        self.facts.contains(fact)
    }

    /// Everything that it says.
    pub fn facts(&self) -> &BTreeSet<Fact> {
        &self.facts
    }

    /// Under which key a batch was started.
    pub fn key_of(&self, batch: &[u8; 16]) -> Option<&str> {
        self.batches.get(batch)?.key.as_deref()
    }

    /// What must hold when nothing more happens.
    pub fn at_rest(&self) -> Result<(), Violation> {
        if let Some((id, _)) = self.batches.iter().find(|(_, batch)| batch.ended_ms.is_none()) {
            return broken("every batch ends", format!("{id:?} has not"));
        }
        if let Some((id, _)) = self.batches.iter().find(|(_, batch)| !batch.archived) {
            return broken("every batch ends", format!("{id:?} has not left memory"));
        }
        if let Some((token, _)) = self.leases.iter().next() {
            return broken("no lease is left", format!("token {token} is"));
        }
        self.jobs_at_rest()?;
        match self.custody.keys().next() {
            Some(name) => broken("nothing is leaked", format!("{name} is still in custody")),
            None => Ok(()),
        }
    }

    /// Reads the next record, and answers with its event.
    pub fn take(&mut self, record: &Record) -> Result<Event, Violation> {
        let last = self.sequences.entry(record.partition).or_default();
        if record.sequence != *last + 1 {
            let detail = format!("partition {}: {} follows {last}", record.partition, record.sequence);
            return broken("sequences are dense", detail);
        }
        *last = record.sequence;
        let event = match Event::decode(record.payload.clone()) {
            Ok(event) => event,
            Err(error) => return broken("a record can be read", error.to_string()),
        };
        if event.at_ms < self.last_ms {
            return broken("time never goes back", format!("from {} to {}", self.last_ms, event.at_ms));
        }
        self.last_ms = event.at_ms;
        match &event.kind {
            Some(Kind::BatchStarted(started)) => self.started(started, event.at_ms)?,
            Some(Kind::LeaseGranted(granted)) => self.granted(granted)?,
            Some(Kind::StepRecorded(step)) => self.step(step)?,
            Some(Kind::AttemptEnded(ended)) => self.attempt_ended(ended)?,
            Some(Kind::TrialSettled(settled)) => self.settled(settled)?,
            Some(Kind::BatchEnded(ended)) => self.ended(ended, event.at_ms)?,
            Some(Kind::BatchArchived(archived)) => self.archived(archived)?,
            Some(Kind::TrialChecked(checked)) => self.checked(checked, event.at_ms)?,
            Some(Kind::ReplyAwaited(awaited)) => self.reply_awaited(awaited)?,
            Some(Kind::JobLeased(leased)) => self.job_leased(leased, event.at_ms)?,
            Some(Kind::JobAsked(asked)) => self.job_asked(asked)?,
            Some(Kind::JobEnded(ended)) => self.job_ended(ended)?,
            Some(Kind::JobAnswered(answered)) => self.job_answered(answered)?,
            Some(Kind::SandboxDestroyed(destroyed)) => {
                let Some((_, trial)) = self.custody.remove(&destroyed.sandbox) else {
                    return broken("custody ends once", format!("{} was not in custody", destroyed.sandbox));
                };
                self.asked_no_more(&destroyed.sandbox);
                if self.sandboxes.get(&trial) == Some(&destroyed.sandbox) {
                    self.conversation_ends(trial);
                }
                self.facts.insert(Fact::Destroyed(destroyed.sandbox.clone()));
            }
            Some(_) => {}
            None => return broken("a record can be read", "an event of no known kind"),
        }
        Ok(event)
    }

    fn started(&mut self, started: &log::BatchStarted, at_ms: u64) -> Result<(), Violation> {
        let batch = id(&started.batch)?;
        let organization = started.organization_id.clone();
        let running = self.running.entry(organization.clone()).or_default();
        if running.len() >= MAX_RUNNING_BATCHES {
            let detail = format!("{organization} starts one more than {MAX_RUNNING_BATCHES}");
            return broken("three batches run at most", detail);
        }
        running.insert(batch);
        if let Some(key) = &started.idempotency_key {
            let before = self.keys.insert((organization.clone(), key.clone()), batch);
            let living = before.and_then(|before| self.batches.get(&before)).filter(|before| {
                let expired = before.ended_ms.is_some_and(|ended| ended + IDEMPOTENCY_KEY_MS <= at_ms);
                !expired
            });
            if living.is_some() {
                return broken("a key starts one batch", format!("{key} of {organization} starts a second one"));
            }
        }
        let mut new = Batch {
            organization,
            key: started.idempotency_key.clone(),
            trials: started.cases.len() * started.variants.len() * started.trials as usize,
            cases: started
                .cases
                .iter()
                .map(|case| (case.judges.len() as u32, case.person.is_some()))
                .collect(),
            variants: started.variants.len(),
            settled: BTreeMap::new(),
            ended_ms: None,
            archived: false,
        };
        let judged = self.carried(started, &mut new)?;
        if self.batches.insert(batch, new).is_some() {
            return broken("a batch is started once", format!("{batch:?}"));
        }
        let as_before = self.batches[&batch].settled.iter();
        let as_before = as_before.map(|((run, ordinal), (status, _))| Fact::Settled(batch, *run, *ordinal, (*status).into()));
        self.facts.extend(as_before);
        for carried in judged {
            let outcome = carried.outcome.clone().unwrap_or_default();
            self.judged_from_now((batch, carried.run, carried.ordinal), &outcome, None);
        }
        self.facts.insert(Fact::Started(batch));
        Ok(())
    }

    /// What a regrade takes over: everything, as it was. Those that are judged again are the answer.
    fn carried<'a>(&self, started: &'a log::BatchStarted, new: &mut Batch) -> Result<Vec<&'a log::CarriedTrial>, Violation> {
        let Some(old) = &started.regrade_of else { return Ok(Vec::new()) };
        let Some(old) = self.batches.get(&id(old)?).filter(|old| old.ended_ms.is_some()) else {
            return broken("what has ended is regraded", "what has not is");
        };
        let mut judged = Vec::new();
        for carried in &started.carried {
            let outcome = carried.outcome.clone().unwrap_or_default();
            let before = old.settled.get(&(carried.run, carried.ordinal));
            let told = (outcome.status(), outcome.cancelled);
            // A batch that goes on from a cancelled one is not cancelled itself.
            let before_here = before.map(|(status, _)| (*status, false));
            let asks = new.case_of(carried.run).0 > 0 && outcome.status() != TrialStatus::Void;
            if asks {
                let marked = outcome.before.as_ref().map(|before| before.status());
                if before.map(|(status, _)| *status) != marked {
                    return broken("a regrade takes over what was", format!("{marked:?} for {before:?}"));
                }
                judged.push(carried);
                continue;
            }
            if before_here != Some(told) {
                return broken("a regrade takes over what was", format!("{told:?} for {before:?}"));
            }
            new.settled.insert((carried.run, carried.ordinal), told);
        }
        match new.settled.len() + judged.len() == new.trials && !judged.is_empty() {
            true => Ok(judged),
            false => broken("a regrade takes over what was", "some of it is missing"),
        }
    }

    /// How many judges a trial's case has, and whether it has a person.
    fn case_of(&self, trial: TrialId) -> Option<(u32, bool)> {
        Some(self.batches.get(&trial.0)?.case_of(trial.1))
    }

    fn newer(&mut self, token: u64) -> Result<(), Violation> {
        if token <= self.last_token {
            let detail = format!("{token} follows {}", self.last_token);
            return broken("tokens strictly grow", detail);
        }
        self.last_token = token;
        Ok(())
    }

    /// A lease takes a sandbox: one that may be made from now on, or the one that an earlier lease has left.
    fn takes(&mut self, name: &str, adopt: bool, worker_id: &str, trial: TrialId) -> Result<(), Violation> {
        match (adopt, self.custody.get(name)) {
            (true, Some((worker, owner))) if worker == worker_id && *owner == trial => Ok(()),
            (true, known) => broken("nothing is leaked", format!("{name} is adopted, and in custody as {known:?}")),
            (false, None) if self.facts.insert(Fact::Intended(name.to_owned())) => {
                self.custody.insert(name.to_owned(), (worker_id.to_owned(), trial));
                Ok(())
            }
            (false, _) => broken("an intent comes before a sandbox", format!("{name} is intended twice")),
        }
    }

    fn granted(&mut self, granted: &log::LeaseGranted) -> Result<(), Violation> {
        let trial = trial(granted.trial.as_ref())?;
        self.newer(granted.token)?;
        if let Some(token) = self.leased.insert(trial, granted.token) {
            let detail = format!("{trial:?} is leased under {token} and {}", granted.token);
            return broken("a trial has one living lease", detail);
        }
        let open = self
            .batches
            .get(&trial.0)
            .is_some_and(|batch| batch.ended_ms.is_none() && !batch.settled.contains_key(&(trial.1, trial.2)));
        if !open {
            return broken("what has its verdict runs no more", format!("{trial:?} is leased"));
        }
        if self.waits_for_jobs(&trial) {
            return broken("who waits for judges or its person does not run", format!("{trial:?} is leased"));
        }
        self.takes(&granted.sandbox, granted.adopt, &granted.worker_id, trial)?;
        self.sandboxes.insert(trial, granted.sandbox.clone());
        self.leases.insert(granted.token, granted.sandbox.clone());
        Ok(())
    }

    fn step(&mut self, step: &log::StepRecorded) -> Result<(), Violation> {
        let Some(sandbox) = self.leases.get(&step.token).cloned() else {
            return broken("no record under an old token", format!("{} under {}", step.step, step.token));
        };
        if !self.custody.contains_key(&sandbox) {
            return broken("nothing is leaked", format!("{sandbox} works, and is not in custody"));
        }
        if !self.facts.insert(Fact::Step(sandbox.clone(), step.step.clone())) {
            return broken("a step is recorded once per sandbox", format!("{} in {sandbox}", step.step));
        }
        Ok(())
    }

    /// The lease of an attempt ends. Token 0: there was none.
    fn end(&mut self, trial: TrialId, token: u64) -> Result<(), Violation> {
        if self.leased.get(&trial).copied().unwrap_or_default() != token {
            let held = self.leased.get(&trial);
            return broken(
                "no record under an old token",
                format!("{trial:?} ends under {token}, and is held under {held:?}"),
            );
        }
        self.leased.remove(&trial);
        self.leases.remove(&token);
        Ok(())
    }

    fn attempt_ended(&mut self, ended: &log::AttemptEnded) -> Result<(), Violation> {
        let trial = trial(ended.trial.as_ref())?;
        if ended.token == 0 {
            self.conversation_ends(trial);
        }
        self.end(trial, ended.token)
    }

    fn settled(&mut self, settled: &log::TrialSettled) -> Result<(), Violation> {
        let trial = trial(settled.trial.as_ref())?;
        self.end(trial, settled.token)?;
        let Some(outcome) = &settled.outcome else {
            return broken("a record can be read", "a verdict without an outcome");
        };
        self.judged(trial, outcome)?;
        let Some(batch) = self.batches.get_mut(&trial.0) else {
            return broken("a trial has one verdict", "of no batch");
        };
        if batch.ended_ms.is_some() {
            return broken("a batch ends with its last verdict", format!("{trial:?} has its verdict later"));
        }
        let scored = matches!(outcome.status(), TrialStatus::Passed | TrialStatus::Failed);
        if !scored && outcome.status() != TrialStatus::Void || (outcome.cancelled && scored) {
            return broken("denominators are honest", format!("{:?}", outcome.status()));
        }
        if batch
            .settled
            .insert((trial.1, trial.2), (outcome.status(), outcome.cancelled))
            .is_some()
        {
            return broken("a trial has one verdict", format!("{trial:?}"));
        }
        self.facts.insert(Fact::Settled(trial.0, trial.1, trial.2, outcome.status));
        Ok(())
    }

    fn ended(&mut self, ended: &log::BatchEnded, at_ms: u64) -> Result<(), Violation> {
        let batch_id = id(&ended.batch)?;
        let Some(batch) = self.batches.get_mut(&batch_id) else {
            return broken("a batch ends once", "one that is not there");
        };
        if batch.ended_ms.replace(at_ms).is_some() {
            return broken("a batch ends once", format!("{batch_id:?}"));
        }
        if batch.settled.len() != batch.trials {
            let detail = format!("{} of {} trials have a verdict", batch.settled.len(), batch.trials);
            return broken("denominators are honest", detail);
        }
        let cancelled = batch.settled.values().any(|(_, cancelled)| *cancelled);
        if cancelled != (ended.status() == BatchStatus::Failed) {
            return broken("a batch ends as its trials say", format!("{:?}", ended.status()));
        }
        if let Some(running) = self.running.get_mut(&batch.organization) {
            running.remove(&batch_id);
        }
        self.facts.insert(Fact::Ended(batch_id));
        Ok(())
    }

    fn archived(&mut self, archived: &log::BatchArchived) -> Result<(), Violation> {
        let batch_id = id(&archived.batch)?;
        let Some(batch) = self
            .batches
            .get_mut(&batch_id)
            .filter(|batch| batch.ended_ms.is_some() && !batch.archived)
        else {
            return broken("a batch is archived once, when it has ended", format!("{batch_id:?}"));
        };
        batch.archived = true;
        let Some(summary) = &archived.summary else {
            return broken("denominators are honest", "no summary");
        };
        let count = |wanted: &dyn Fn(TrialStatus) -> bool| batch.settled.values().filter(|(status, _)| wanted(*status)).count() as u32;
        let scored = count(&|status| status != TrialStatus::Void);
        let passed = count(&|status| status == TrialStatus::Passed);
        let cancelled = batch.settled.values().filter(|(_, cancelled)| *cancelled).count() as u32;
        let told = (summary.scored, summary.passed, summary.cancelled, summary.voided + summary.scored);
        if told != (scored, passed, cancelled, batch.trials as u32) {
            return broken("denominators are honest", format!("{batch_id:?}: {summary:?}"));
        }
        Ok(())
    }
}
