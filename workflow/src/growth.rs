//! What is about to grow past 80 % of its limit: told once, at the step that passes the mark, so that there is time to act.

use evalgrid_domain::limits::{
    API_KEYS, Growth, IDEMPOTENCY_KEYS, KEYS_PER_ORGANIZATION, ORGANIZATIONS, RECORDED_BYTES_PER_TRIAL, STEPS_PER_TRIAL,
};

use crate::{Event, Kind, State};

/// Whose growth it is, and which.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Near {
    /// An organization's id or a trial's; none where it is the whole server's.
    pub whose: Option<String>,
    /// Which limit is near.
    pub growth: Growth,
}

/// What `event` makes nearly full, in the state before it.
pub fn near(state: &State, event: &Event) -> Vec<Near> {
    let mut found = Vec::new();
    let mut look = |growth: Growth, before: u64, adding: u64, whose: &dyn Fn() -> Option<String>| {
        if growth.nears(before, before + adding) {
            found.push(Near { whose: whose(), growth });
        }
    };
    match &event.kind {
        Some(Kind::StepRecorded(step)) => {
            let Some(lease) = state.lease(step.token) else { return found };
            let Some(trial) = state.trial(lease.trial) else { return found };
            // Every step of every trial comes by here: its name is only made where it is told.
            let id = || Some(lease.trial.id().to_string());
            look(STEPS_PER_TRIAL, trial.steps.len() as u64, 1, &id);
            look(RECORDED_BYTES_PER_TRIAL, trial.recorded_bytes(), step.result.len() as u64, &id);
        }
        Some(Kind::BatchStarted(started)) if started.idempotency_key.is_some() => {
            let organization = started.organization_id.parse().ok();
            if let Some(organization) = organization.and_then(|id| state.organization(&id)) {
                let before = organization.living_idempotency_keys(event.at_ms) as u64;
                look(IDEMPOTENCY_KEYS, before, 1, &|| Some(started.organization_id.clone()));
            }
        }
        Some(Kind::KeyCreated(created)) => {
            look(API_KEYS, state.keys().count() as u64, 1, &|| None);
            if let Ok(organization) = created.organization_id.parse() {
                let before = state.keys_of(&organization) as u64;
                look(KEYS_PER_ORGANIZATION, before, 1, &|| Some(created.organization_id.clone()));
            }
        }
        Some(Kind::OrganizationCreated(_)) => look(ORGANIZATIONS, state.organization_count() as u64, 1, &|| None),
        _ => {}
    }
    found
}
