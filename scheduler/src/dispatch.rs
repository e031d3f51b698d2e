//! Waiting trials meet workers with free slots.

use std::collections::{BTreeMap, HashMap};

use evalgrid_domain::{credential, request::Harness};
use evalgrid_proto::{
    log::v1::event::Kind,
    v1::{self, to_worker::Message},
};
use evalgrid_workflow::{
    TrialKey, admission, decide,
    decide::Holder,
    faults::{self, Fault},
};

use crate::engine::Core;

/// Values of variables by name, from the server's own environment.
pub type Variables = BTreeMap<String, String>;

/// Gives out leases while there are trials and slots. Each lease leaves once its event is durable.
pub fn dispatch(core: &mut Core, variables: &Variables) {
    for worker_id in core.sessions.free() {
        while let Some((incarnation, boot_id, providers)) = core.sessions.with_credit(&worker_id) {
            let now_ms = core.now_ms();
            let Some(key) = core.state.next_for(&worker_id, &providers, now_ms) else {
                break;
            };
            let holder = Holder {
                worker_id: &worker_id,
                incarnation: &incarnation,
                boot_id: &boot_id,
            };
            for event in decide::grant(&core.state, key, holder, now_ms) {
                let lease = match &event.kind {
                    Some(Kind::LeaseGranted(granted)) => Some((granted.token, granted.adopt)),
                    _ => None,
                };
                core.commit(event);
                if let Some((token, adopt)) = lease
                    && let Some(message) = lease_message(core, key, token, adopt, variables)
                {
                    core.sessions.take_credit(&worker_id);
                    let position = core.position();
                    core.sessions.send(&worker_id, position, Message::Lease(message));
                }
            }
        }
    }
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
        // Only the names that the variant's profile declares: the executor looks no further, and sees no more.
        variables: variant
            .variables
            .iter()
            .filter_map(|name| variables.get_key_value(name))
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect(),
        model_key: admission::model_key(variant),
        credential: credential(&variant.harness, variables),
        batch_id: key.batch.to_string(),
        waiting_since_ms: batch.started_ms,
    })
}

/// What the harness signs in with. One that has vanished since the start is left out: the executor ends the trial and names the harness.
fn credential(harness: &str, variables: &Variables) -> HashMap<String, String> {
    let method = Harness::from_name(harness).map(credential::method);
    let values = method.and_then(|method| method.values(variables).ok());
    values.into_iter().flatten().collect()
}
