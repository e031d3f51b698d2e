//! The custody ledger: the life of each sandbox, from before it exists until nothing of it is left.
//!
//! Intended with the lease that may make it; created, once there is a sign of it or its provider has named it; destruction asked for, where a
//! sandbox is there that nobody needs and its worker has not removed by itself; and closed, once its worker confirms that it is gone. What is
//! closed is forgotten. Nothing here is ever closed by a list that is silent, unless the list is of a kind that proves absence: see [`Listing`].

use evalgrid_domain::{ids::TrialId, limits, outcome};
use evalgrid_proto::{
    log::v1::{self as log, Event, event::Kind},
    v1,
};

use crate::{
    chance::Chance,
    decide::{attempt_failed, event, settled, void},
    jobs::{JobPhase, Part},
    state::{Phase, State, TrialKey},
};

/// Longest id that a provider gives to a sandbox.
pub const MAX_PROVIDER_ID_BYTES: usize = 256;

/// A sandbox in custody: intended or created, and not confirmed destroyed.
#[derive(Clone, Debug, PartialEq)]
pub struct Sandbox {
    /// For which trial.
    pub trial: TrialKey,
    /// Who may make it, and in whose folder a local one is.
    pub worker_id: String,
    /// A different boot id proves that the processes of a local one are gone.
    pub boot_id: String,
    /// What runs it.
    pub provider: String,
    /// When it was intended, milliseconds since the epoch.
    pub intended_ms: u64,
    /// There has been a sign of it.
    pub created: bool,
    /// What its provider calls it, where that is not its name.
    pub provider_id: Option<String>,
    /// Since when its worker is asked to destroy it, milliseconds since the epoch.
    pub destroy_asked_ms: Option<u64>,
    /// Until when it stays although its trial has ended, for people to look into, milliseconds since the epoch.
    pub kept_until_ms: Option<u64>,
}

impl Sandbox {
    /// One that may be made from now on.
    pub(crate) fn intended(trial: TrialKey, worker_id: &str, boot_id: &str, provider: &str, at_ms: u64) -> Sandbox {
        Sandbox {
            trial,
            worker_id: worker_id.to_owned(),
            boot_id: boot_id.to_owned(),
            provider: provider.to_owned(),
            intended_ms: at_ms,
            created: false,
            provider_id: None,
            destroy_asked_ms: None,
            kept_until_ms: None,
        }
    }
}

/// What is known of the sandboxes of a worker, and by which kind of list: kinds differ in what they prove of a sandbox that they do not name.
#[derive(Clone, Copy, Debug)]
pub enum Listing<'a> {
    /// The worker's own folder, read under its own lock, on this boot: whatever is local and not here is gone.
    Folder {
        /// The boot on which it was read.
        boot_id: &'a str,
        /// Everything that has left something there.
        names: &'a [String],
    },
    /// What a provider's interface has listed. Such lists lag and flap: they prove presence, never absence; only a look-up by id does.
    Provider {
        /// What it named.
        names: &'a [String],
    },
}

impl Listing<'_> {
    fn names(&self) -> &[String] {
        match self {
            Self::Folder { names, .. } | Self::Provider { names } => names,
        }
    }

    /// Whether this proves that nothing is left of the sandbox.
    pub fn proves_gone(&self, name: &str, sandbox: &Sandbox) -> bool {
        match self {
            Self::Folder { boot_id, names } => {
                is_local(&sandbox.provider) && (sandbox.boot_id != *boot_id || !names.iter().any(|present| present == name))
            }
            Self::Provider { .. } => false,
        }
    }
}

/// Whether a provider's sandboxes live in their worker's folder and die with its boot.
pub fn is_local(provider: &str) -> bool {
    matches!(provider, "bubblewrap" | "process")
}

/// Whether a name has the form of our sandboxes' names: the trial's id and the token of the attempt that made it. Nothing else is ours to touch.
pub fn is_ours(name: &str) -> bool {
    let parse = || {
        let (trial, token) = name.rsplit_once('-')?;
        let trial: TrialId = trial.parse().ok()?;
        let token: u64 = token.parse().ok()?;
        // As written, and in no other way that reads the same.
        Some(name == format!("{trial}-{token}"))
    };
    parse().unwrap_or(false)
}

/// The name of the sandbox that an attempt makes.
pub(crate) fn sandbox_name(key: TrialKey, token: u64) -> String {
    format!("{}-{token}", key.id())
}

/// Why a sandbox is lost that its worker no longer has.
pub(crate) const GONE_ON_RETURN: &str = "it was gone when its worker came back";
/// Why one is lost that its worker has destroyed.
const GONE_UNDER_LEASE: &str = "its worker had destroyed it";
/// Why its worker is asked to destroy a sandbox.
pub const UNNEEDED: &str = "no trial needs it any more";

/// What a list proves of a worker's sandboxes, once [`hello_leases`](crate::decide::hello_leases) is applied: some are destroyed. A sandbox under a living lease
/// may be about to be made and is left alone.
pub fn listed_sandboxes(state: &State, worker_id: &str, listing: Listing<'_>, now_ms: u64) -> Vec<Event> {
    let mut events = Vec::new();
    for (name, sandbox) in state.custody().filter(|(_, sandbox)| sandbox.worker_id == worker_id) {
        if !leased_in(state, name, sandbox) && listing.proves_gone(name, sandbox) {
            events.extend(destroyed(state, name, worker_id, now_ms));
        }
    }
    events
}

/// As [`listed_sandboxes`], for the folder that a greeting tells of.
pub fn hello_sandboxes(state: &State, hello: &v1::Hello, now_ms: u64) -> Vec<Event> {
    // An attempt that the worker still holds may be making its sandbox just now, after the folder was read: even where its lease has ended,
    // which it does not know yet.
    let custody = state.custody().filter(|(_, sandbox)| sandbox.worker_id == hello.worker_id);
    let unproven = custody.filter(|(name, sandbox)| {
        let making = hello.held.iter().any(|token| sandbox_name(sandbox.trial, *token) == *name);
        // A provider that does not work there any more was not asked what it has.
        making || !hello.providers.contains(&sandbox.provider)
    });
    let unproven = unproven.map(|(name, _)| name.to_owned());
    let names: Vec<String> = hello.sandboxes.iter().cloned().chain(unproven).collect();
    let listing = Listing::Folder {
        boot_id: &hello.boot_id,
        names: &names,
    };
    listed_sandboxes(state, &hello.worker_id, listing, now_ms)
}

/// Out of a list: sandboxes of ours that no trial needs any more, and names that are not ours, which nobody may touch.
pub fn unneeded<'a>(state: &State, listing: &'a Listing<'_>) -> (Vec<&'a str>, Vec<&'a str>) {
    let names = listing.names().iter().map(String::as_str);
    names
        .filter(|name| !needed(state, name))
        .partition(|name| is_ours(name) || state.custody.contains_key(*name))
}

/// Whether a trial without a verdict, its person or one of its judges still lives in this sandbox.
pub fn needed(state: &State, name: &str) -> bool {
    state
        .custody
        .get(name)
        .and_then(|sandbox| state.trial(sandbox.trial))
        .is_some_and(|trial| trial.lives_in(name).is_some())
}

/// Whether somebody works in a sandbox now, or may be about to make it.
fn leased_in(state: &State, name: &str, sandbox: &Sandbox) -> bool {
    let Some(trial) = state.trial(sandbox.trial) else { return false };
    match trial.lives_in(name) {
        Some(Part::Trial) => matches!(trial.phase, Phase::Leased { .. }),
        Some(part) => trial.job(part).is_some_and(|job| matches!(job.phase, JobPhase::Leased { .. })),
        None => false,
    }
}

/// Whether a sandbox is kept for people now.
pub fn kept(state: &State, name: &str, now_ms: u64) -> bool {
    let until_ms = state.custody.get(name).and_then(|sandbox| sandbox.kept_until_ms);
    until_ms.is_some_and(|until_ms| now_ms < until_ms)
}

/// A verdict whose worker keeps the trial's sandbox for `keep_ms`: says so, within the limits of time and number. What is above them is simply not
/// needed any more.
pub fn keep_sandbox(state: &State, worker_id: &str, mut verdict: Event, keep_ms: u64, now_ms: u64) -> Event {
    let kept = state
        .custody()
        .filter(|(name, sandbox)| sandbox.worker_id == worker_id && kept(state, name, now_ms));
    if keep_ms == 0 || kept.count() >= limits::MAX_KEPT_SANDBOXES {
        return verdict;
    }
    let until_ms = Some(now_ms + keep_ms.min(limits::MAX_KEEP_MS));
    match &mut verdict.kind {
        Some(Kind::TrialSettled(settled)) => settled.sandbox_kept_until_ms = until_ms,
        Some(Kind::TrialChecked(checked)) => checked.sandbox_kept_until_ms = until_ms,
        _ => {}
    }
    verdict
}

/// Its provider has made a sandbox and named it. Believed whoever holds the lease by now: what is there must not be lost from sight. `None` where
/// that is known, or where nothing is in custody under this name with this worker.
pub fn created(state: &State, worker_id: &str, report: v1::CreatedSandbox, now_ms: u64) -> Option<Event> {
    let sandbox = state
        .custody
        .get(&report.sandbox)
        .filter(|sandbox| sandbox.worker_id == worker_id)?;
    let known = sandbox.created && sandbox.provider_id.as_deref().unwrap_or_default() == report.provider_id;
    let fits = report.provider_id.len() <= MAX_PROVIDER_ID_BYTES;
    (!known && fits).then(|| {
        event(
            now_ms,
            Kind::SandboxCreated(log::SandboxCreated {
                sandbox: report.sandbox,
                provider_id: report.provider_id,
            }),
        )
    })
}

/// From here on, the worker of a sandbox that nobody needs is asked to destroy it, until it confirms that. `None` where it is asked already, or
/// where the sandbox is needed.
pub fn ask_to_destroy(state: &State, name: &str, now_ms: u64) -> Option<Event> {
    let sandbox = state.custody.get(name)?;
    (sandbox.destroy_asked_ms.is_none() && !needed(state, name) && !kept(state, name, now_ms)).then(|| {
        event(
            now_ms,
            Kind::SandboxDestroyAsked(log::SandboxDestroyAsked {
                sandbox: name.to_owned(),
                reason: UNNEEDED.to_owned(),
            }),
        )
    })
}

/// A worker says that a sandbox is destroyed under a lease that it holds: what it had reported before, a failover has lost. Nobody goes on there.
pub fn gone_under_lease(state: &State, worker_id: &str, name: &str, chance: &mut Chance, now_ms: u64) -> Option<Event> {
    let trial = state.trial(state.custody.get(name)?.trial)?;
    let token = match (trial.lives_in(name)?, &trial.phase) {
        (Part::Trial, Phase::Leased { token }) => *token,
        (part, _) => trial.job(part)?.token()?,
    };
    let failure = v1::AttemptFailure {
        token,
        kind: v1::AttemptFailureKind::SandboxLost.into(),
        reason: GONE_UNDER_LEASE.to_owned(),
    };
    attempt_failed(state, worker_id, &failure, chance, now_ms).ok().flatten()
}

/// A sandbox is confirmed destroyed. Where a waiting trial lived in it, that attempt is lost, and past the bound the trial is void.
pub fn destroyed(state: &State, name: &str, worker_id: &str, now_ms: u64) -> Vec<Event> {
    let Some(sandbox) = state.custody.get(name).filter(|sandbox| sandbox.worker_id == worker_id) else {
        return Vec::new();
    };
    // A worker that holds the lease and says so contradicts itself: its attempt is what ends first.
    if leased_in(state, name, sandbox) {
        return Vec::new();
    }
    let mut events = Vec::new();
    if let Some(batch) = state.batch(&sandbox.trial.batch)
        && let Some(trial) = batch.trial(sandbox.trial)
        && trial.lives_in(name) == Some(Part::Trial)
    {
        match trial.phase {
            Phase::Queued { .. } | Phase::Conversing(_)
                if !trial.steps.is_empty() && trial.lost.len() as u32 + 1 >= limits::MAX_SANDBOX_ATTEMPTS =>
            {
                let text = format!("{}: {GONE_ON_RETURN}", outcome::sandbox_lost(trial.lost.len() as u32 + 1));
                events.push(settled(sandbox.trial, 0, void(&text, Some((batch, sandbox.trial))), now_ms));
            }
            _ => {}
        }
    }
    let gone = log::SandboxDestroyed {
        sandbox: name.to_owned(),
        worker_id: worker_id.to_owned(),
    };
    events.push(event(now_ms, Kind::SandboxDestroyed(gone)));
    events
}
