//! What the scheduler holds in memory. Everything here is derived from events alone.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use evalgrid_domain::ids::{BatchId, KeyId, OrgId, RunId, TrialId};
use evalgrid_proto::{log::v1 as log, v1};

use crate::{
    admission::{Admission, Limits},
    custody::Sandbox,
    jobs::{self, Conversing, JobPhase, Judging, Part, Person, Target},
    local::Local,
    queue::{Gates, Queue},
};

/// One trial of one run of one batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TrialKey {
    /// Its batch.
    pub batch: BatchId,
    /// Position of its run: case-major, variants in request order.
    pub run: u8,
    /// From 1.
    pub ordinal: u8,
}

impl TrialKey {
    /// The public id.
    pub fn id(self) -> TrialId {
        TrialId {
            batch: self.batch,
            run: self.run,
            ordinal: self.ordinal,
        }
    }
}

/// A tenant.
#[derive(Clone, Debug)]
pub struct Organization {
    /// Opaque and for ever.
    pub id: OrgId,
    /// For people.
    pub name: String,
    /// For people's URLs; unique.
    pub slug: String,
    /// Batches that run: the set of holders of the organization's slots, never a counter.
    pub running: BTreeSet<BatchId>,
    /// Batches in memory: running, or ended and not yet readable elsewhere. Ordered by id, which is ordered by time.
    pub in_memory: BTreeSet<BatchId>,
    /// All batches ever started.
    pub started: u64,
    /// Whether it lives here.
    pub residence: crate::moving::Residence,
    /// How often it has arrived in a cell: it lives where this is highest.
    pub generation: u64,
    /// Starts that can be answered again.
    pub(crate) idempotency: HashMap<String, IdempotentStart>,
    /// (expiry, key) of the starts whose batch has ended.
    pub(crate) idempotency_expiry: BTreeSet<(u64, String)>,
}

/// A start under an idempotency key.
#[derive(Clone, Debug)]
pub struct IdempotentStart {
    /// SHA-256 of the decoded request, in hex.
    pub request_hash: String,
    /// The batch it started.
    pub batch: BatchId,
    /// Once the batch has ended.
    pub expires_ms: Option<u64>,
}

/// An API key; the secret itself is nowhere.
#[derive(Clone, Debug)]
pub struct Key {
    /// For `keys revoke`.
    pub id: KeyId,
    /// Whose.
    pub organization: OrgId,
    /// For people.
    pub name: String,
    /// The secret's first characters.
    pub start: String,
    /// Names of the contract's permissions.
    pub permissions: Vec<String>,
    /// Milliseconds since the epoch.
    pub created_ms: u64,
    /// Set once it no longer opens anything.
    pub revoked_ms: Option<u64>,
}

/// A batch that is running, or has ended and not yet left memory.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Its id.
    pub id: BatchId,
    /// Whose.
    pub organization: OrgId,
    /// The decoded start request.
    pub request: v1::ObjectRef,
    /// The suite's handle and name.
    pub suite: v1::Suite,
    /// In request order.
    pub cases: Vec<v1::CaseInfo>,
    /// In request order.
    pub variants: Vec<v1::VariantInfo>,
    /// One per run.
    pub variant_ids: Vec<String>,
    /// Who asked for it.
    pub trigger: Option<v1::Trigger>,
    /// Under which key it was started.
    pub idempotency_key: Option<String>,
    /// Milliseconds since the epoch.
    pub started_ms: u64,
    /// Case-major.
    pub runs: Vec<Run>,
    /// Trials without a verdict.
    pub unsettled: u32,
    /// Running or ended.
    pub phase: BatchPhase,
    /// Where the client's own machine runs the trials.
    pub local: Option<Local>,
    /// The ended batch whose unscored trials this one runs again.
    pub retry_of: Option<BatchId>,
    /// The ended batch whose judges this one asks again.
    pub regrade_of: Option<BatchId>,
}

/// Whether a batch has ended.
#[derive(Clone, Debug, PartialEq)]
pub enum BatchPhase {
    /// At least one trial has no verdict.
    Running,
    /// Every trial has one.
    Ended {
        /// FINISHED or FAILED.
        status: v1::BatchStatus,
        /// Why it stopped early.
        failure: Option<String>,
        /// Milliseconds since the epoch.
        at_ms: u64,
        /// The whole result is durable as this object.
        manifest: Option<v1::ObjectRef>,
    },
}

/// A case on a variant.
#[derive(Clone, Debug)]
pub struct Run {
    /// By ordinal − 1.
    pub trials: Vec<Trial>,
    /// When its last trial settled.
    pub finished_ms: Option<u64>,
}

/// A trial and what is known of it.
#[derive(Clone, Debug)]
pub struct Trial {
    /// Waiting, leased or settled.
    pub phase: Phase,
    /// Fresh sandboxes begun.
    pub attempts: u32,
    /// Leases since the last recorded step: what a poisonous trial runs up. Counted when they are granted, so that a worker which the trial
    /// kills without a word counts, too.
    pub idle_leases: u32,
    /// How the last of those that are over has ended, for people.
    pub idle_end: String,
    /// Why earlier attempts were lost.
    pub lost: Vec<String>,
    /// The last durable sign of progress, milliseconds since the epoch.
    pub progress_ms: u64,
    /// The sandbox of the current attempt.
    pub sandbox: Option<String>,
    /// Steps recorded in that sandbox.
    pub steps: Vec<v1::RecordedStep>,
    /// Where its person lives, where a harness plays one.
    pub person: Option<Person>,
    /// What its person has taken in this attempt.
    pub user_spend: Option<v1::ModelSpend>,
}

/// Where a trial stands.
#[derive(Clone, Debug)]
pub enum Phase {
    /// Waits for a worker.
    Queued {
        /// Since when.
        since_ms: u64,
        /// Not before.
        not_before_ms: u64,
        /// Tells a queue entry of this wait from older ones.
        ticket: u64,
    },
    /// A worker has it.
    Leased {
        /// The attempt's fencing token.
        token: u64,
    },
    /// Waits, in its sandbox, for what its simulated person says.
    Conversing(Box<Conversing>),
    /// It has run, and its judges are asked.
    Judging(Box<Judging>),
    /// It has its verdict.
    Settled(Box<v1::TrialOutcome>),
}

/// The right of one worker to work on one trial, or on one of its jobs.
#[derive(Clone, Debug)]
pub struct Lease {
    /// Which trial.
    pub trial: TrialKey,
    /// What of it.
    pub part: Part,
    /// The worker's lasting name.
    pub worker_id: String,
    /// The process that holds it.
    pub incarnation: String,
}

impl Lease {
    /// What it is for.
    pub fn target(&self) -> Target {
        Target {
            trial: self.trial,
            part: self.part,
        }
    }
}

/// Everything.
#[derive(Clone, Debug, Default)]
pub struct State {
    pub(crate) organizations: BTreeMap<OrgId, Organization>,
    pub(crate) slugs: BTreeMap<String, OrgId>,
    pub(crate) keys: BTreeMap<KeyId, Key>,
    pub(crate) keys_by_hash: HashMap<[u8; 32], KeyId>,
    /// Ordered, as everything that is walked: the same state decides the same in every process.
    pub(crate) batches: BTreeMap<BatchId, Batch>,
    pub(crate) leases: BTreeMap<u64, Lease>,
    pub(crate) custody: BTreeMap<String, Sandbox>,
    pub(crate) queue: Queue,
    pub(crate) admission: Admission,
    /// The newest token given out.
    pub(crate) last_token: u64,
    /// Tokens up to this one may have been given out by a history that was lost.
    pub(crate) token_floor: u64,
    /// The newest time seen in an event; time never goes back.
    pub(crate) last_ms: u64,
}

impl State {
    /// The newest time of any event.
    pub fn last_ms(&self) -> u64 {
        self.last_ms
    }

    /// Gives out only tokens above `floor` from now on: what an owner before this one gave out, and a failover lost, is never given out again.
    /// Not an event: the tokens themselves are.
    pub fn raise_token_floor(&mut self, floor: u64) {
        self.token_floor = self.token_floor.max(floor);
    }

    /// An organization by id.
    pub fn organization(&self, id: &OrgId) -> Option<&Organization> {
        self.organizations.get(id)
    }

    /// An organization by slug.
    pub fn organization_by_slug(&self, slug: &str) -> Option<&Organization> {
        self.slugs.get(slug).and_then(|id| self.organizations.get(id))
    }

    /// How many organizations there are.
    pub fn organization_count(&self) -> usize {
        self.organizations.len()
    }

    /// The living key whose secret has this SHA-256.
    pub fn key_by_hash(&self, hash: &[u8; 32]) -> Option<&Key> {
        self.keys_by_hash
            .get(hash)
            .and_then(|id| self.keys.get(id))
            .filter(|key| key.revoked_ms.is_none())
    }

    /// Every key, revoked ones too.
    pub fn keys(&self) -> impl Iterator<Item = &Key> {
        self.keys.values()
    }

    /// How many keys an organization has, revoked ones included.
    pub fn keys_of(&self, organization: &OrgId) -> usize {
        self.keys.values().filter(|key| key.organization == *organization).count()
    }

    /// A key by id.
    pub fn key(&self, id: &KeyId) -> Option<&Key> {
        self.keys.get(id)
    }

    /// A batch that is in memory.
    pub fn batch(&self, id: &BatchId) -> Option<&Batch> {
        self.batches.get(id)
    }

    /// Every batch in memory.
    pub fn batches(&self) -> impl Iterator<Item = &Batch> {
        self.batches.values()
    }

    /// A trial of a batch in memory.
    pub fn trial(&self, key: TrialKey) -> Option<&Trial> {
        self.batches.get(&key.batch)?.trial(key)
    }

    /// As [`State::trial`], as the log names it.
    pub fn trial_at(&self, reference: &log::TrialRef) -> Option<&Trial> {
        self.trial(crate::apply::trial_key(Some(reference)).ok()?)
    }

    /// The living lease of a token.
    pub fn lease(&self, token: u64) -> Option<&Lease> {
        self.leases.get(&token)
    }

    /// Living leases by token.
    pub fn leases(&self) -> impl Iterator<Item = (u64, &Lease)> {
        self.leases.iter().map(|(token, lease)| (*token, lease))
    }

    /// Sandboxes in custody, by name.
    pub fn custody(&self) -> impl Iterator<Item = (&str, &Sandbox)> {
        self.custody.iter().map(|(name, sandbox)| (name.as_str(), sandbox))
    }

    /// The start that used an idempotency key, if it can still be answered at `now_ms`.
    pub fn idempotent_start(&self, organization: &OrgId, key: &str, now_ms: u64) -> Option<&IdempotentStart> {
        let start = self.organizations.get(organization)?.idempotency.get(key)?;
        start.expires_ms.is_none_or(|expiry| now_ms < expiry).then_some(start)
    }

    /// A sandbox in custody.
    pub fn sandbox(&self, name: &str) -> Option<&Sandbox> {
        self.custody.get(name)
    }

    /// Puts the operator's limits in force. Not an event: it changes no fact, only what is dispatched next.
    pub fn configure(&mut self, limits: Limits) {
        self.admission.configure(limits);
    }

    /// The next trial for an executor with a free slot, as far as the limits allow one now: first one whose sandbox waits in its folder, else one
    /// of the organization whose turn it is.
    pub fn next_for(&mut self, worker_id: &str, providers: &[String], now_ms: u64) -> Option<TrialKey> {
        self.next_target(worker_id, providers, now_ms).map(|target| target.trial)
    }

    /// The next job for a judge runner with a free slot and these kinds of sandboxes, by the same rules.
    pub fn next_job_for(&mut self, worker_id: &str, providers: &[String], now_ms: u64) -> Option<Target> {
        self.next_target(worker_id, &jobs::queues(providers), now_ms)
    }

    fn next_target(&mut self, worker_id: &str, queues: &[String], now_ms: u64) -> Option<Target> {
        let Self { queue, admission, .. } = self;
        let gates = Gates {
            provider: &|name| admission.provider_open(jobs::provider_of(name), jobs::provider_of(name) != name, now_ms),
            model_key: &|name| admission.model_open(name, now_ms),
        };
        queue.next_for(worker_id, queues, now_ms, &gates)
    }

    /// When time alone may let a trial be dispatched that cannot be at `now_ms`: a delay is over, or a limit opens.
    pub fn next_opening_ms(&self, now_ms: u64) -> Option<u64> {
        let openings = [self.queue.next_delay_ms(now_ms), self.admission.next_opening_ms(now_ms)];
        openings.into_iter().flatten().min()
    }

    /// The kinds of judge runners that jobs wait for now, in order: by the provider of their sandboxes, empty where any will do.
    pub fn judge_runners_waited_for(&self, now_ms: u64) -> BTreeSet<String> {
        let kinds = self.queue.waited_for(now_ms).filter_map(jobs::asked_in);
        kinds.map(str::to_owned).collect()
    }

    /// How many trials wait. Counts one by one.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Sandboxes of a provider: being made, and in custody.
    pub fn sandbox_counts(&self, provider: &str) -> (usize, usize) {
        self.admission.counts(provider)
    }

    /// Whether the model key's limit lets one more trial, or job, run now.
    pub fn model_open(&self, model_key: &str, now_ms: u64) -> bool {
        self.admission.model_open(model_key, now_ms)
    }

    /// Trials that run on a model key.
    pub fn model_holders(&self, model_key: &str) -> usize {
        self.admission.holders(model_key)
    }

    /// Forgets an ended batch whose whole result can be read elsewhere. Not an event: it changes no fact, only where it is read from.
    pub fn forget(&mut self, id: &BatchId) {
        if let Some(Batch {
            phase: BatchPhase::Ended { manifest: Some(_), .. },
            organization,
            ..
        }) = self.batches.get(id)
        {
            if let Some(organization) = self.organizations.get_mut(organization) {
                organization.in_memory.remove(id);
            }
            self.batches.remove(id);
        }
    }
}

impl Organization {
    /// Idempotency keys that can still be answered at `now_ms`.
    pub fn living_idempotency_keys(&self, now_ms: u64) -> usize {
        let expired = self.idempotency_expiry.iter().take_while(|(expiry, _)| *expiry <= now_ms);
        self.idempotency.len() - expired.count()
    }
}

impl Batch {
    /// Trials per run.
    pub fn trials_per_run(&self) -> usize {
        self.runs.first().map_or(0, |run| run.trials.len())
    }

    /// The id of the run at a position.
    pub fn run_id(&self, run: u8) -> RunId {
        RunId { batch: self.id, run }
    }

    /// Which case and which variant a run is.
    pub fn coordinates(&self, run: u8) -> (usize, usize) {
        let variants = self.variants.len().max(1);
        (usize::from(run) / variants, usize::from(run) % variants)
    }

    /// One trial.
    pub fn trial(&self, key: TrialKey) -> Option<&Trial> {
        self.runs
            .get(usize::from(key.run))?
            .trials
            .get(usize::from(key.ordinal).checked_sub(1)?)
    }

    pub(crate) fn trial_mut(&mut self, key: TrialKey) -> Option<&mut Trial> {
        self.runs
            .get_mut(usize::from(key.run))?
            .trials
            .get_mut(usize::from(key.ordinal).checked_sub(1)?)
    }

    /// Every trial with its key, case-major.
    pub fn trials(&self) -> impl Iterator<Item = (TrialKey, &Trial)> {
        self.runs.iter().enumerate().flat_map(move |(run, state)| {
            state.trials.iter().enumerate().map(move |(index, trial)| {
                // At most 100 runs of at most 10 trials: see `domain::limits`.
                (
                    TrialKey {
                        batch: self.id,
                        run: run as u8,
                        ordinal: index as u8 + 1,
                    },
                    trial,
                )
            })
        })
    }
}

impl Trial {
    /// The status on the wire.
    pub fn status(&self) -> v1::TrialStatus {
        match &self.phase {
            Phase::Queued { .. } if self.attempts == 0 => v1::TrialStatus::Queued,
            Phase::Queued { .. } | Phase::Leased { .. } | Phase::Conversing(_) | Phase::Judging(_) => v1::TrialStatus::Running,
            Phase::Settled(outcome) => outcome.status(),
        }
    }

    /// Whether somebody has it, or one of its jobs, in hand.
    pub fn is_leased(&self) -> bool {
        matches!(self.phase, Phase::Leased { .. }) || self.jobs().any(|(_, job)| matches!(job.phase, JobPhase::Leased { .. }))
    }

    /// Bytes of the results of its steps.
    pub fn recorded_bytes(&self) -> u64 {
        self.steps.iter().map(|step| step.result.len() as u64).sum()
    }

    /// Its verdict.
    pub fn outcome(&self) -> Option<&v1::TrialOutcome> {
        match &self.phase {
            Phase::Settled(outcome) => Some(outcome),
            _ => None,
        }
    }
}
