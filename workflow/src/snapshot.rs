//! The whole state as one message, and back. Only facts are written: what follows from them (queues, look-up tables) is made anew.

use std::collections::{BTreeSet, HashMap, VecDeque};

use bytes::Bytes;
use evalgrid_proto::{
    log::v1::{self as log, job_ref as saved_ref, saved_job, saved_organization, saved_trial},
    v1,
};

use crate::{
    admission::Cut,
    apply::{ApplyError, batch_id, illegal, organization_id, trial_key, trial_ref},
    custody::Sandbox,
    faults::{self, Fault},
    jobs::{Conversing, Job, JobPhase, Judging, Part, Person, Target, job_ref},
    local::Local,
    moving::Residence,
    state::{Batch, BatchPhase, IdempotentStart, Key, Lease, Organization, Phase, Run, State, Trial},
};

impl State {
    /// Everything, for a snapshot.
    pub fn save(&self) -> log::StateSnapshot {
        let hashes: HashMap<_, _> = self.keys_by_hash.iter().map(|(hash, id)| (*id, *hash)).collect();
        log::StateSnapshot {
            last_ms: self.last_ms,
            last_token: self.last_token,
            organizations: self.organizations.values().map(save_organization).collect(),
            keys: self
                .keys
                .values()
                .map(|key| save_key(key, hashes.get(&key.id).copied().unwrap_or_default()))
                .collect(),
            batches: self.batches.values().map(|batch| self.save_batch(batch)).collect(),
            leases: self
                .leases()
                .map(|(token, lease)| save_lease(token, lease, self.trial(lease.trial)))
                .collect(),
            sandboxes: self.custody().map(|(name, sandbox)| save_sandbox(name, sandbox)).collect(),
            // The owner's: it knows what has left memory.
            archive: None,
            archived: Vec::new(),
            last_ticket: self.queue.last_ticket(),
            providers: self.admission.recent().map(save_provider).collect(),
            cuts: self.admission.cuts().map(save_cut).collect(),
        }
    }

    /// The state that was saved.
    pub fn restore(saved: &log::StateSnapshot) -> Result<State, ApplyError> {
        let mut state = State {
            last_ms: saved.last_ms,
            last_token: match faults::active(Fault::TokensReused) {
                true => saved.last_token.saturating_sub(3),
                false => saved.last_token,
            },
            ..State::default()
        };
        for organization in &saved.organizations {
            state.restore_organization(organization)?;
        }
        for key in &saved.keys {
            state.restore_key(key)?;
        }
        for sandbox in &saved.sandboxes {
            let restored = Sandbox {
                trial: trial_key(sandbox.trial.as_ref())?,
                worker_id: sandbox.worker_id.clone(),
                boot_id: sandbox.boot_id.clone(),
                provider: sandbox.provider.clone(),
                intended_ms: sandbox.intended_ms,
                created: sandbox.created,
                provider_id: sandbox.provider_id.clone(),
                destroy_asked_ms: sandbox.destroy_asked_ms,
                kept_until_ms: sandbox.kept_until_ms,
            };
            state.admission.lives(&restored.provider, &sandbox.name);
            state.custody.insert(sandbox.name.clone(), restored);
        }
        for provider in &saved.providers {
            state.admission.restore_recent(&provider.name, &provider.recent_ms);
        }
        for cut in &saved.cuts {
            let restored = Cut {
                limit: cut.limit,
                until_ms: cut.until_ms,
            };
            state.admission.restore_cut(&cut.model_key, restored);
        }
        for batch in &saved.batches {
            state.restore_batch(batch)?;
        }
        state.talk_again();
        for lease in &saved.leases {
            let trial = trial_key(lease.trial.as_ref())?;
            let part = match &lease.job {
                None => Part::Trial,
                Some(job) => restore_part(job)?,
            };
            let held = state.trial(trial).and_then(|known| match (part, &known.phase) {
                (Part::Trial, Phase::Leased { token }) => Some(*token),
                (Part::Trial, _) => None,
                (part, _) => known.job(part)?.token(),
            });
            if held != Some(lease.token) {
                return illegal("a lease on what is not leased");
            }
            let restored = Lease {
                trial,
                part,
                worker_id: lease.worker_id.clone(),
                incarnation: lease.incarnation.clone(),
            };
            state.leases.insert(lease.token, restored);
            state.hold(lease.token);
        }
        state.queue.use_tickets_after(saved.last_ticket);
        state.requeue_all();
        Ok(state)
    }

    fn save_batch(&self, batch: &Batch) -> log::SavedBatch {
        let start = batch
            .idempotency_key
            .as_ref()
            .and_then(|key| self.organizations.get(&batch.organization)?.idempotency.get(key));
        let (ended, ended_ms, manifest) = match &batch.phase {
            BatchPhase::Running => (None, 0, None),
            BatchPhase::Ended {
                status,
                failure,
                at_ms,
                manifest,
            } => {
                let ended = log::BatchEnded {
                    batch: batch.id.0.to_vec().into(),
                    status: (*status).into(),
                    failure: failure.clone(),
                };
                (Some(ended), *at_ms, manifest.clone())
            }
        };
        log::SavedBatch {
            started: Some(log::BatchStarted {
                batch: batch.id.0.to_vec().into(),
                organization_id: batch.organization.to_string(),
                request: Some(batch.request.clone()),
                request_hash: start.map(|start| start.request_hash.clone()).unwrap_or_default(),
                idempotency_key: batch.idempotency_key.clone(),
                suite: Some(batch.suite.clone()),
                cases: batch.cases.clone(),
                variants: batch.variants.clone(),
                trials: batch.trials_per_run() as u32,
                trigger: batch.trigger.clone(),
                variant_ids: batch.variant_ids.clone(),
                local: batch.local.is_some(),
                checks_in: batch.local.as_ref().is_some_and(|local| local.checks_in),
                harnesses: batch.local.iter().flat_map(|local| local.harnesses.clone()).collect(),
                retry_of: batch.retry_of.map(|id| id.0.to_vec().into()),
                // Its trials tell what was taken over.
                carried: Vec::new(),
                regrade_of: batch.regrade_of.map(|id| id.0.to_vec().into()),
                // Its trials have it.
                nonce: Bytes::new(),
            }),
            local: batch.local.as_ref().map(Local::save),
            started_ms: batch.started_ms,
            runs: batch.runs.iter().map(save_run).collect(),
            ended,
            ended_ms,
            manifest,
        }
    }

    pub(crate) fn restore_key(&mut self, saved: &log::SavedKey) -> Result<(), ApplyError> {
        let Some(created) = &saved.created else {
            return illegal("a key of nothing");
        };
        self.key_created(created, saved.created_ms)?;
        match saved.revoked_ms {
            Some(at_ms) => {
                let key_id = created.key_id.clone();
                self.key_revoked(&log::KeyRevoked { key_id }, at_ms)
            }
            None => Ok(()),
        }
    }

    pub(crate) fn restore_organization(&mut self, saved: &log::SavedOrganization) -> Result<(), ApplyError> {
        let id = organization_id(&saved.id)?;
        let mut organization = Organization {
            id,
            name: saved.name.clone(),
            slug: saved.slug.clone(),
            running: BTreeSet::new(),
            in_memory: BTreeSet::new(),
            started: saved.started,
            generation: saved.generation,
            residence: match saved.residence() {
                saved_organization::Residence::Here => Residence::Here,
                saved_organization::Residence::Frozen => Residence::Frozen,
                saved_organization::Residence::Moved => Residence::Moved,
            },
            idempotency: HashMap::new(),
            idempotency_expiry: BTreeSet::new(),
        };
        for start in saved.starts.iter().filter(|_| !faults::active(Fault::KeysForgotten)) {
            let restored = IdempotentStart {
                request_hash: start.request_hash.clone(),
                batch: batch_id(&start.batch)?,
                expires_ms: start.expires_ms,
            };
            organization.idempotency.insert(start.key.clone(), restored);
            organization
                .idempotency_expiry
                .extend(start.expires_ms.map(|expiry| (expiry, start.key.clone())));
        }
        self.slugs.insert(saved.slug.clone(), id);
        match self.organizations.insert(id, organization) {
            None => Ok(()),
            Some(_) => illegal("an organization is saved twice"),
        }
    }

    fn restore_batch(&mut self, saved: &log::SavedBatch) -> Result<(), ApplyError> {
        let Some(started) = &saved.started else {
            return illegal("a batch of nothing");
        };
        let (Some(request), Some(suite)) = (started.request.clone(), started.suite.clone()) else {
            return illegal("a batch without a request or a suite");
        };
        let id = batch_id(&started.batch)?;
        let organization_id = organization_id(&started.organization_id)?;
        let Some(organization) = self.organizations.get_mut(&organization_id) else {
            return illegal("a batch of no organization");
        };
        organization.in_memory.insert(id);
        let phase = match &saved.ended {
            None => {
                organization.running.insert(id);
                BatchPhase::Running
            }
            Some(ended) => BatchPhase::Ended {
                status: ended.status(),
                failure: ended.failure.clone(),
                at_ms: saved.ended_ms,
                manifest: saved.manifest.clone(),
            },
        };
        let local = match (started.local, &saved.local) {
            (true, Some(saved)) => Some(Local::restore(started, saved)),
            (false, None) => None,
            _ => return illegal("a local batch without its machine's signs"),
        };
        let retry_of = started.retry_of.as_deref().map(batch_id).transpose()?;
        let regrade_of = started.regrade_of.as_deref().map(batch_id).transpose()?;
        let runs = saved.runs.iter().map(restore_run).collect::<Result<Vec<_>, _>>()?;
        let trials = runs.iter().flat_map(|run| &run.trials);
        let unsettled = trials.filter(|trial| !matches!(trial.phase, Phase::Settled(_))).count();
        if runs.len() != started.cases.len() * started.variants.len() || runs.iter().any(|run| run.trials.len() != started.trials as usize)
        {
            return illegal("a batch of an impossible size");
        }
        let batch = Batch {
            id,
            organization: organization_id,
            request,
            suite,
            cases: started.cases.clone(),
            variants: started.variants.clone(),
            variant_ids: started.variant_ids.clone(),
            trigger: started.trigger.clone(),
            idempotency_key: started.idempotency_key.clone(),
            started_ms: saved.started_ms,
            runs,
            unsettled: unsettled as u32,
            phase,
            local,
            retry_of,
            regrade_of,
        };
        match self.batches.insert(id, batch) {
            None => Ok(()),
            Some(_) => illegal("a batch is saved twice"),
        }
    }

    /// Those who wait, in their old order.
    /// Trials in whose sandbox a conversation goes on, or may.
    fn talk_again(&mut self) {
        let lives = |trial: &Trial| {
            trial
                .sandbox
                .as_deref()
                .is_some_and(|name| trial.lives_in(name) == Some(Part::Trial))
        };
        let trials = self.batches.values().flat_map(Batch::trials);
        let talking = trials.filter(|(key, trial)| lives(trial) && self.has_harness_person(*key));
        let talking = talking.filter_map(|(key, trial)| {
            let sandbox = self.custody.get(trial.sandbox.as_ref()?)?;
            Some((sandbox.provider.clone(), key))
        });
        for (provider, key) in talking.collect::<Vec<_>>() {
            self.admission.talks(&provider, key);
        }
    }

    fn requeue_all(&mut self) {
        let trials = self.batches.values().flat_map(Batch::trials);
        let waits = trials.flat_map(|(key, trial)| {
            let queued = match trial.phase {
                Phase::Queued { ticket, .. } => Some((ticket, Target::trial(key))),
                _ => None,
            };
            let jobs = trial.jobs().filter_map(move |(part, job)| match job.phase {
                JobPhase::Waits { ticket, .. } => Some((ticket, Target { trial: key, part })),
                _ => None,
            });
            queued.into_iter().chain(jobs)
        });
        let mut waits: Vec<_> = waits.collect();
        waits.sort_unstable();
        for (_, target) in waits {
            self.enqueue(target, self.last_ms);
        }
    }
}

pub(crate) fn save_organization(organization: &Organization) -> log::SavedOrganization {
    let mut starts: Vec<_> = organization
        .idempotency
        .iter()
        .map(|(key, start)| log::SavedStart {
            key: key.clone(),
            request_hash: start.request_hash.clone(),
            batch: start.batch.0.to_vec().into(),
            expires_ms: start.expires_ms,
        })
        .collect();
    starts.sort_unstable_by(|one, other| one.key.cmp(&other.key));
    log::SavedOrganization {
        id: organization.id.to_string(),
        name: organization.name.clone(),
        slug: organization.slug.clone(),
        started: organization.started,
        starts,
        generation: organization.generation,
        residence: match organization.residence {
            Residence::Here => saved_organization::Residence::Here,
            Residence::Frozen => saved_organization::Residence::Frozen,
            Residence::Moved => saved_organization::Residence::Moved,
        }
        .into(),
    }
}

pub(crate) fn save_key(key: &Key, hash: [u8; 32]) -> log::SavedKey {
    log::SavedKey {
        created: Some(log::KeyCreated {
            key_id: key.id.to_string(),
            organization_id: key.organization.to_string(),
            name: key.name.clone(),
            start: key.start.clone(),
            hash: hash.to_vec().into(),
            permissions: key.permissions.clone(),
        }),
        created_ms: key.created_ms,
        revoked_ms: key.revoked_ms,
    }
}

fn save_lease(token: u64, lease: &Lease, trial: Option<&Trial>) -> log::SavedLease {
    log::SavedLease {
        token,
        trial: trial_ref(lease.trial),
        worker_id: lease.worker_id.clone(),
        incarnation: lease.incarnation.clone(),
        job: job_ref(lease.target(), trial),
    }
}

fn restore_part(job: &log::JobRef) -> Result<Part, ApplyError> {
    match job.part {
        Some(saved_ref::Part::Judge(index)) => u8::try_from(index).map(Part::Judge).or_else(|_| illegal("a judge of no place")),
        Some(saved_ref::Part::Reply(_)) => Ok(Part::Reply),
        None => illegal("a lease on no part of a trial"),
    }
}

fn save_sandbox(name: &str, sandbox: &Sandbox) -> log::SavedSandbox {
    log::SavedSandbox {
        name: name.to_owned(),
        trial: trial_ref(sandbox.trial),
        worker_id: sandbox.worker_id.clone(),
        boot_id: sandbox.boot_id.clone(),
        provider: sandbox.provider.clone(),
        intended_ms: sandbox.intended_ms,
        created: sandbox.created,
        provider_id: sandbox.provider_id.clone(),
        destroy_asked_ms: sandbox.destroy_asked_ms,
        kept_until_ms: sandbox.kept_until_ms,
    }
}

fn save_provider((name, recent): (&str, &VecDeque<u64>)) -> log::SavedProvider {
    log::SavedProvider {
        name: name.to_owned(),
        recent_ms: recent.iter().copied().collect(),
    }
}

fn save_cut((model_key, cut): (&str, Cut)) -> log::SavedCut {
    log::SavedCut {
        model_key: model_key.to_owned(),
        limit: cut.limit,
        until_ms: cut.until_ms,
    }
}

fn save_run(run: &Run) -> log::SavedRun {
    log::SavedRun {
        trials: run.trials.iter().map(save_trial).collect(),
        finished_ms: run.finished_ms,
    }
}

fn save_trial(trial: &Trial) -> log::SavedTrial {
    let phase = match &trial.phase {
        Phase::Queued {
            since_ms,
            not_before_ms,
            ticket,
        } => saved_trial::Phase::Queued(saved_trial::Queued {
            since_ms: *since_ms,
            not_before_ms: *not_before_ms,
            ticket: *ticket,
        }),
        Phase::Leased { token } => saved_trial::Phase::Leased(*token),
        Phase::Conversing(conversing) => saved_trial::Phase::Conversing(log::SavedConversing {
            turn: conversing.turn,
            conversation: Some(conversing.conversation.clone()),
            since_ms: conversing.since_ms,
            job: Some(save_job(&conversing.job)),
            nonce: conversing.nonce.clone(),
        }),
        Phase::Judging(judging) => saved_trial::Phase::Judging(log::SavedJudging {
            outcome: Some(judging.outcome.clone()),
            jobs: judging.jobs.iter().map(save_job).collect(),
            nonce: judging.nonce.clone(),
        }),
        Phase::Settled(outcome) => saved_trial::Phase::Settled(v1::TrialOutcome::clone(outcome)),
    };
    log::SavedTrial {
        phase: Some(phase),
        attempts: trial.attempts,
        idle_leases: trial.idle_leases,
        lost: trial.lost.clone(),
        progress_ms: trial.progress_ms,
        sandbox: trial.sandbox.clone(),
        steps: trial.steps.clone(),
        idle_end: trial.idle_end.clone(),
        person: trial.person.as_ref().map(|person| log::SavedPerson {
            sandbox: person.sandbox.clone(),
            session_id: person.session_id.clone(),
        }),
        user_spend: trial.user_spend.clone(),
    }
}

fn save_job(job: &Job) -> log::SavedJob {
    let phase = match &job.phase {
        JobPhase::Waits {
            since_ms,
            not_before_ms,
            ticket,
        } => saved_job::Phase::Waits(saved_job::Waits {
            since_ms: *since_ms,
            not_before_ms: *not_before_ms,
            ticket: *ticket,
        }),
        JobPhase::Leased { token, .. } => saved_job::Phase::Leased(*token),
        JobPhase::Judged(judged) => saved_job::Phase::Judged(v1::Judged::clone(judged)),
    };
    log::SavedJob {
        phase: Some(phase),
        unclear: job.unclear,
        refused: job.refused,
        asked: job.asked,
        spent_ms: job.spent_ms,
        idle_leases: job.idle_leases,
        reason: job.reason.clone(),
        sandbox: job.sandbox.clone(),
        leased_ms: match job.phase {
            JobPhase::Leased { since_ms, .. } => since_ms,
            JobPhase::Waits { .. } | JobPhase::Judged(_) => 0,
        },
    }
}

fn restore_job(saved: Option<&log::SavedJob>) -> Result<Job, ApplyError> {
    let Some(saved) = saved else { return illegal("a job of nothing") };
    let phase = match &saved.phase {
        Some(saved_job::Phase::Waits(waits)) => JobPhase::Waits {
            since_ms: waits.since_ms,
            not_before_ms: waits.not_before_ms,
            ticket: waits.ticket,
        },
        Some(saved_job::Phase::Leased(token)) => JobPhase::Leased {
            token: *token,
            since_ms: saved.leased_ms,
        },
        Some(saved_job::Phase::Judged(judged)) => JobPhase::Judged(Box::new(judged.clone())),
        None => return illegal("a job in no phase"),
    };
    Ok(Job {
        phase,
        unclear: saved.unclear,
        refused: saved.refused,
        asked: saved.asked,
        spent_ms: saved.spent_ms,
        idle_leases: saved.idle_leases,
        reason: saved.reason.clone(),
        sandbox: saved.sandbox.clone(),
    })
}

fn restore_run(saved: &log::SavedRun) -> Result<Run, ApplyError> {
    Ok(Run {
        trials: saved.trials.iter().map(restore_trial).collect::<Result<_, _>>()?,
        finished_ms: saved.finished_ms,
    })
}

fn restore_trial(saved: &log::SavedTrial) -> Result<Trial, ApplyError> {
    let phase = match &saved.phase {
        Some(saved_trial::Phase::Queued(queued)) => Phase::Queued {
            since_ms: queued.since_ms,
            not_before_ms: queued.not_before_ms,
            ticket: queued.ticket,
        },
        Some(saved_trial::Phase::Leased(token)) => Phase::Leased { token: *token },
        Some(saved_trial::Phase::Conversing(saved)) => Phase::Conversing(Box::new(Conversing {
            turn: saved.turn,
            conversation: saved.conversation.clone().unwrap_or_default(),
            since_ms: saved.since_ms,
            job: restore_job(saved.job.as_ref())?,
            nonce: saved.nonce.clone(),
        })),
        Some(saved_trial::Phase::Judging(saved)) => Phase::Judging(Box::new(Judging {
            outcome: saved.outcome.clone().unwrap_or_default(),
            jobs: saved.jobs.iter().map(|job| restore_job(Some(job))).collect::<Result<_, _>>()?,
            nonce: saved.nonce.clone(),
        })),
        Some(saved_trial::Phase::Settled(outcome)) => Phase::Settled(Box::new(outcome.clone())),
        None => return illegal("a trial in no phase"),
    };
    Ok(Trial {
        phase,
        attempts: saved.attempts,
        idle_leases: saved.idle_leases,
        lost: saved.lost.clone(),
        progress_ms: saved.progress_ms,
        sandbox: saved.sandbox.clone(),
        steps: saved.steps.clone(),
        idle_end: saved.idle_end.clone(),
        person: saved.person.as_ref().map(|person| Person {
            sandbox: person.sandbox.clone(),
            session_id: person.session_id.clone(),
        }),
        user_spend: saved.user_spend.clone(),
    })
}
