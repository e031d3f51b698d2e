//! What waits meets workers with free slots: trials meet executors, judgments and replies meet judge runners.

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;
use evalgrid_domain::{credential, provider, request::Harness};
use evalgrid_proto::{
    log::v1::event::Kind,
    v1::{self, WorkerRole, to_worker::Message},
};
use evalgrid_workflow::{
    Part, Phase, Target, TrialKey, admission, decide,
    decide::Holder,
    faults::{self, Fault},
    jobs,
};
use sha2::{Digest as _, Sha256};

use crate::engine::Core;

/// Values of variables by name, from the server's own environment.
pub type Variables = BTreeMap<String, String>;

/// Bytes of what a job's fences are made of.
const NONCE_BYTES: usize = 16;

/// Gives out leases while there is something to do and somebody to do it. Each lease leaves once its event is durable.
pub fn dispatch(core: &mut Core, variables: &Variables) {
    for worker_id in core.sessions.free() {
        while let Some(session) = core.sessions.with_credit(&worker_id) {
            let (incarnation, boot_id) = (session.incarnation.clone(), session.boot_id.clone());
            let (providers, role) = (session.providers.clone(), session.role);
            let now_ms = core.now_ms();
            let target = match role {
                WorkerRole::JudgeRunner => core.state.next_job_for(&worker_id, &providers, now_ms),
                WorkerRole::Executor | WorkerRole::Unspecified => core.state.next_for(&worker_id, &providers, now_ms).map(Target::trial),
            };
            let Some(target) = target else { break };
            let holder = Holder {
                worker_id: &worker_id,
                incarnation: &incarnation,
                boot_id: &boot_id,
            };
            match target.part {
                Part::Trial => lease(core, target.trial, holder, variables),
                Part::Reply | Part::Judge(_) => lease_job(core, target, holder, variables),
            }
        }
    }
}

fn lease(core: &mut Core, key: TrialKey, holder: Holder<'_>, variables: &Variables) {
    for event in decide::grant(&core.state, key, holder, core.now_ms()) {
        let lease = match &event.kind {
            Some(Kind::LeaseGranted(granted)) => Some((granted.token, granted.adopt)),
            _ => None,
        };
        core.commit(event);
        if let Some((token, adopt)) = lease
            && let Some(message) = lease_message(core, key, token, adopt, variables)
        {
            send(core, holder.worker_id, Message::Lease(message));
        }
    }
}

fn lease_job(core: &mut Core, target: Target, holder: Holder<'_>, variables: &Variables) {
    let Some(event) = decide::grant_job(&core.state, target, holder, core.now_ms()) else {
        return;
    };
    let lease = match &event.kind {
        Some(Kind::JobLeased(leased)) => Some((leased.token, leased.sandbox.clone(), leased.adopt)),
        _ => None,
    };
    core.commit(event);
    if let Some((token, sandbox, adopt)) = lease
        && let Some(message) = job_message(core, target, token, (sandbox, adopt), variables)
    {
        send(core, holder.worker_id, Message::Job(message));
    }
}

fn send(core: &mut Core, worker_id: &str, message: Message) {
    core.sessions.take_credit(worker_id);
    let position = core.position();
    core.sessions.send(worker_id, position, message);
}

fn lease_message(core: &Core, key: TrialKey, token: u64, adopt: bool, variables: &Variables) -> Option<v1::Lease> {
    let batch = core.state.batch(&key.batch)?;
    let trial = batch.trial(key)?;
    let (case_index, variant_index) = batch.coordinates(key.run);
    let variant = batch.variants.get(variant_index)?;
    Some(v1::Lease {
        token,
        organization_id: batch.organization.to_string(),
        trial_id: key.id().to_string(),
        ordinal: key.ordinal.into(),
        case_index: case_index as u32,
        variant_index: variant_index as u32,
        request: Some(batch.request.clone()),
        sandbox: trial.sandbox.clone()?,
        provider: variant.provider.clone(),
        adopt,
        steps: match faults::active(Fault::StepsDroppedOnAdoption) {
            true => Vec::new(),
            false => trial.steps.clone(),
        },
        variables: named(variant, variables).collect(),
        model_key: admission::model_key(variant),
        credential: credential(&variant.harness, variables).unwrap_or_default(),
        batch_id: key.batch.to_string(),
        waiting_since_ms: batch.started_ms,
    })
}

fn job_message(core: &Core, target: Target, token: u64, (sandbox, adopt): (String, bool), variables: &Variables) -> Option<v1::JobLease> {
    let key = target.trial;
    let batch = core.state.batch(&key.batch)?;
    let trial = batch.trial(key)?;
    let job = trial.job(target.part)?;
    let answerer = batch.answerer(target)?;
    let (case_index, variant_index) = batch.coordinates(key.run);
    let (name, nonce, work) = match (&trial.phase, target.part) {
        (Phase::Judging(judging), Part::Judge(index)) => {
            let index = u32::from(index);
            let judge = v1::JudgeJob {
                index,
                evidence: judging.outcome.evidence.clone(),
                validation_index: batch.cases.get(case_index)?.checks + index,
            };
            (format!("judge-{index}"), &judging.nonce, v1::job_lease::Job::Judge(judge))
        }
        (Phase::Conversing(conversing), Part::Reply) => {
            let session_id = trial.person.as_ref().filter(|_| adopt).map(|person| person.session_id.clone());
            let reply = v1::ReplyJob {
                turn: conversing.turn,
                conversation: Some(conversing.conversation.clone()),
                session_id: session_id.unwrap_or_default(),
            };
            // A trial that starts over has another conversation.
            let name = format!("reply-{}-{}", trial.attempts, conversing.turn);
            (name, &conversing.nonce, v1::job_lease::Job::Reply(reply))
        }
        _ => return None,
    };
    let credential = match answerer.harness.as_str() {
        "" => provider::named(&answerer.provider)?
            .credential(variables)
            .map(|values| values.into_iter().collect()),
        harness => credential(harness, variables),
    };
    let variant = batch.variants.get(variant_index)?;
    let own = self::credential(&variant.harness, variables).unwrap_or_default();
    let trial_secrets = named(variant, variables).map(|(_, value)| value).chain(own.into_values());
    let missing = credential.as_ref().err().copied().unwrap_or_default().to_owned();
    let nonce = Sha256::new().chain_update(nonce).chain_update(&name).finalize();
    Some(v1::JobLease {
        token,
        organization_id: batch.organization.to_string(),
        trial_id: key.id().to_string(),
        case_index: case_index as u32,
        request: Some(batch.request.clone()),
        sandbox,
        provider: variant.provider.clone(),
        adopt,
        model_key: jobs::model_key(target.part, answerer),
        credential: credential.unwrap_or_default(),
        missing,
        model_provider: answerer.provider.clone(),
        model: answerer.model.clone(),
        unclear: job.unclear,
        refused: job.refused,
        reason: job.reason.clone(),
        spent_ms: job.spent_ms,
        idempotency_key: format!("{}-{name}", key.id()),
        nonce: Bytes::copy_from_slice(&nonce[..NONCE_BYTES]),
        job: Some(work),
        trial_secrets: trial_secrets.collect(),
    })
}

/// Only the variables that the variant's profile declares: a worker looks no further, and sees no more.
fn named<'a>(variant: &'a v1::VariantInfo, variables: &'a Variables) -> impl Iterator<Item = (String, String)> + 'a {
    let named = variant.variables.iter().filter_map(|name| variables.get_key_value(name));
    named.map(|(name, value)| (name.clone(), value.clone()))
}

/// What a harness signs in with, or the variable that is missing: the worker ends what needs it, and names it.
fn credential(harness: &str, variables: &Variables) -> Result<HashMap<String, String>, &'static str> {
    match Harness::from_name(harness).map(credential::method) {
        Some(method) => Ok(method.values(variables)?.into_iter().collect()),
        None => Ok(HashMap::new()),
    }
}
