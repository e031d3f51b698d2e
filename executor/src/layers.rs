//! What is the same for many trials is made once: their source at its commit, and the profile's install where that depends on nothing else.
//!
//! The first trial of a key runs its set-up as always, in its own sandbox; then home and workspace are copied into a *base*
//! ([`store`]). The sandboxes of the others are made from it, copy-on-write where the host can. Who comes while the base is being made waits,
//! but not for long: whatever goes wrong with a base, the trial runs its set-up itself.
//!
//! A ref is looked up once per batch and host: by the first clone. So all trials of a batch here are at one commit, and nothing but sandboxes
//! ever speaks to a repository. Trials of one base have what was written before `prepare`; credentials are written by each trial.

mod store;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use evalgrid_domain::request::{Profile, Source, SuiteBatchRequest, effective_source};
use evalgrid_proto::v1::Lease;
use evalgrid_sandbox::{BaseSupport, SandboxProvider};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::{
    sync::watch,
    time::{Instant, timeout, timeout_at},
};

pub(crate) use self::store::{Bases, is_commit};
use self::store::{Found, Key, Maker, Manifest, Pin};
use crate::{source::Repository, trial::Attempt};

/// What a trial loses at most by waiting for another that then makes nothing. Most clones and installs take less.
const PATIENCE: Duration = Duration::from_secs(180);
/// What the trial that makes a base loses at most by copying it.
const SAVE_LIMIT: Duration = Duration::from_secs(60);
/// Changes when what is in a base, or what is left out of it, changes.
const FORMAT: u32 = 1;

/// What an attempt's sandbox is made from, and what the attempt makes for others.
#[derive(Default)]
pub(crate) struct Layers {
    pin: Option<Pin>,
    keys: Option<Keys>,
    /// That the trials of the batch are at.
    commit: Option<String>,
    /// To tell the others which commit the ref stands for.
    resolve: Option<Maker>,
    source: Option<Maker>,
    installed: Option<Maker>,
}

/// What the keys of a trial follow from.
struct Keys {
    bases: Arc<Bases>,
    most_bytes: u64,
    /// Of the ref, where it may move.
    reference: Option<Key>,
    repository: Option<Value>,
    /// Without the commit; absent where other trials would not use the base.
    source: Option<Value>,
    /// The same with the profile.
    installed: Option<Value>,
}

impl Layers {
    /// Finds a base for a new sandbox, waiting for it where somebody makes it, or the right to make it.
    pub(crate) async fn find(bases: &Arc<Bases>, lease: &Lease, request: &SuiteBatchRequest, provider: &dyn SandboxProvider) -> Self {
        let support = provider.bases();
        let Some(keys) = support.and_then(|support| Keys::new(bases, lease, request, &support)) else {
            return Self::default();
        };
        let mut layers = Self::default();
        let deadline = Instant::now() + PATIENCE;
        layers.commit = keys.commit();
        if let Some(reference) = keys.reference.as_ref().filter(|_| layers.commit.is_none()) {
            match bases.find(reference) {
                Found::Nobody(maker) => layers.resolve = Some(maker),
                Found::Making(making) => {
                    over(making, deadline).await;
                    layers.commit = keys.commit();
                }
                Found::Base(_) | Found::Hopeless => {}
            }
        }
        if layers.commit.is_some() || keys.repository.is_none() {
            let commit = layers.commit.as_deref();
            if let Some(key) = keys.installed(commit) {
                (layers.pin, layers.installed) = wait(bases, &key, deadline).await;
            }
            if layers.pin.is_none()
                && let Some(key) = keys.source(commit)
            {
                (layers.pin, layers.source) = wait(bases, &key, deadline).await;
            }
        }
        layers.keys = Some(keys);
        layers
    }

    /// For a sandbox that an earlier attempt has made. It makes nothing for others: the agent may have been at work in it.
    pub(crate) fn of_sandbox(
        bases: &Arc<Bases>,
        lease: &Lease,
        request: &SuiteBatchRequest,
        provider: &dyn SandboxProvider,
        folder: Option<&Path>,
    ) -> Result<Self, String> {
        let keys = provider.bases().and_then(|support| Keys::new(bases, lease, request, &support));
        let pin = match folder {
            Some(folder) => Some(
                bases
                    .of_sandbox(folder)
                    .ok_or_else(|| format!("what it was made from, {}, is gone", folder.display()))?,
            ),
            None => None,
        };
        Ok(Self {
            pin,
            commit: keys.and_then(|keys| keys.commit()),
            ..Self::default()
        })
    }

    /// What the sandbox is to be made from.
    pub(crate) fn folder(&self) -> Option<PathBuf> {
        self.pin.as_ref().map(|pin| pin.folder.clone())
    }

    /// The sandbox could not be made from it.
    pub(crate) fn distrust(&self) {
        if let Some(pin) = &self.pin {
            pin.distrust();
        }
    }

    /// The base, whose source the sandbox has.
    pub(crate) fn base(&self) -> Option<&Manifest> {
        self.pin.as_ref().map(|pin| &pin.manifest)
    }

    /// The base, if the profile is in it and installed.
    pub(crate) fn installed(&self) -> Option<&Manifest> {
        self.base().filter(|manifest| manifest.installed)
    }

    /// That the clone is to be at.
    pub(crate) fn commit(&self) -> Option<&str> {
        self.commit.as_deref()
    }

    /// The source was cloned and is at `commit`; `clean`: nothing speaks against using the clone for others.
    pub(crate) async fn cloned(&mut self, attempt: &Attempt<'_>, commit: Option<&str>, clean: bool) {
        let Some(keys) = &self.keys else { return };
        if let Some(maker) = self.resolve.take() {
            // Dropped, it says that nothing came of it.
            let Some(commit) = commit.filter(|commit| is_commit(commit)) else {
                return;
            };
            // Before others hear of the commit, so that we are the first.
            let mine = |key: Option<Key>| match keys.bases.find(&key?) {
                Found::Nobody(maker) => Some(maker),
                _ => None,
            };
            self.installed = mine(keys.installed(Some(commit)));
            self.source = mine(keys.source(Some(commit)));
            self.commit = Some(commit.to_owned());
            match keys.bases.remember(&maker.key, commit) {
                Ok(()) => maker.done(),
                Err(error) => tracing::warn!(%error, "a commit is not remembered, so the batch's trials may differ in it"),
            }
        }
        // A ref that moved in between, where the old commit cannot be had any more.
        if commit.is_none() || commit != self.commit() {
            (self.source, self.installed) = (None, None);
        }
        if let Some(maker) = self.source.take().filter(|_| clean) {
            self.save(attempt, maker, false, Saved::default()).await;
        }
    }

    /// The profile was installed; `clean` as above.
    pub(crate) async fn was_installed(&mut self, attempt: &Attempt<'_>, clean: bool, saved: impl FnOnce() -> Saved) {
        if let Some(maker) = self.installed.take().filter(|_| clean) {
            self.save(attempt, maker, true, saved()).await;
        }
    }

    /// Set-up is over: nobody is to wait for this trial any more.
    pub(crate) fn end(&mut self) {
        (self.resolve, self.source, self.installed) = (None, None, None);
    }

    /// Makes a base of the sandbox as it is. A failure costs nobody but those who come later.
    async fn save(&self, attempt: &Attempt<'_>, mut maker: Maker, installed: bool, saved: Saved) {
        let Some(keys) = &self.keys else { return };
        let staging = maker.staging();
        let copy = attempt.sandbox.save_base(&staging, &saved.private, keys.most_bytes);
        let copied = match timeout(SAVE_LIMIT, copy).await {
            Ok(copied) => copied.map_err(|error| error.to_string()),
            Err(_) => Err(format!("it takes longer than {SAVE_LIMIT:?}")),
        };
        // From here to the end nothing waits: an attempt that is aborted while the copy is being made never calls it a base.
        let made = copied.and_then(|bytes| {
            let commit = keys.repository.as_ref().and(self.commit.clone());
            let key = maker.key.clone();
            maker
                .finish(bytes, commit, installed, saved.written)
                .map(|()| tracing::info!(base = key, bytes, installed, "a base was made"))
                .map_err(|error| error.to_string())
        });
        if let Err(reason) = made {
            tracing::warn!(
                reason,
                installed,
                "no base could be made; trials do that part of their set-up themselves"
            );
        }
        let bases = keys.bases.clone();
        tokio::task::spawn_blocking(move || bases.collect());
    }
}

/// What a base is to hold and not to hold, beside what is in the sandbox.
#[derive(Default)]
pub(crate) struct Saved {
    /// Files with credentials.
    pub(crate) private: Vec<PathBuf>,
    /// The harness's other files, and their digests.
    pub(crate) written: BTreeMap<String, String>,
}

/// A base, or the right to make it, or neither.
async fn wait(bases: &Arc<Bases>, key: &Key, deadline: Instant) -> (Option<Pin>, Option<Maker>) {
    match bases.find(key) {
        Found::Base(pin) => (Some(pin), None),
        Found::Nobody(maker) => (None, Some(maker)),
        Found::Hopeless => (None, None),
        Found::Making(making) => {
            over(making, deadline).await;
            match bases.find(key) {
                Found::Base(pin) => (Some(pin), None),
                // It came to nothing, and now all who have waited do it themselves at once. One of them may make it for those to come.
                Found::Nobody(maker) => (None, Some(maker)),
                Found::Making(_) | Found::Hopeless => (None, None),
            }
        }
    }
}

/// Returns when whoever makes something has ended, or at the deadline.
async fn over(mut making: watch::Receiver<()>, deadline: Instant) {
    // Nothing is ever sent: the sender's end is the news.
    let ended = async { while making.changed().await.is_ok() {} };
    let _ = timeout_at(deadline, ended).await;
}

impl Keys {
    /// `None`: nothing that could be shared.
    fn new(bases: &Arc<Bases>, lease: &Lease, request: &SuiteBatchRequest, support: &BaseSupport) -> Option<Self> {
        let case = request.cases.get(lease.case_index as usize)?;
        let variant = request.variants.get(lease.variant_index as usize)?;
        let source = effective_source(request, lease.case_index as usize);
        let (mut repository, mut reference) = (None, None);
        if let Source::Repo { url, reference: name } = source {
            // What cannot be cloned fails in the trial, with its reason.
            Repository::parse(url, name.as_deref()).ok()?;
            let value = json!({ "url": url, "ref": name });
            if !name.as_deref().is_some_and(is_commit) {
                // An older scheduler does not say whose trial it is.
                (!lease.batch_id.is_empty()).then_some(())?;
                reference = Some(digest(&json!(["ref", lease.organization_id, lease.batch_id, value])));
            }
            repository = Some(value);
        }
        let place = json!([FORMAT, lease.organization_id, lease.provider]);
        let same_source = (0..request.cases.len())
            .filter(|index| effective_source(request, *index) == source)
            .count();
        let trials = request.trials as usize;
        let shared = same_source * request.variants.len() * trials > 1;
        let profile = variant
            .profile
            .as_ref()
            .filter(|_| case.cache.is_none())
            .filter(|profile| installable(profile));
        let installed = profile.zip(support.environment.as_ref()).and_then(|(profile, environment)| {
            let own = installs(profile);
            let same = request.variants.iter().filter(|other| {
                let profile = other.profile.as_ref().filter(|profile| installable(profile));
                other.harness == variant.harness && profile.is_some_and(|profile| installs(profile) == own)
            });
            let name = variant.harness.name();
            let version = evalgrid_harness::by_name(name)
                .and_then(|harness| harness.install())
                .map(|install| install.version);
            (same_source * same.count() * trials > 1).then(|| json!(["installed", place, environment, name, version, source, own]))
        });
        let source = repository
            .as_ref()
            .filter(|_| shared)
            .map(|repository| json!(["source", place, repository]));
        (source.is_some() || installed.is_some()).then(|| Self {
            bases: bases.clone(),
            most_bytes: support.most_bytes,
            reference,
            repository,
            source,
            installed,
        })
    }

    /// The commit, where the ref is one, or is known to stand for one in this batch.
    fn commit(&self) -> Option<String> {
        match &self.reference {
            Some(reference) => self.bases.commit(reference),
            None => Some(self.repository.as_ref()?.get("ref")?.as_str()?.to_owned()),
        }
    }

    fn source(&self, commit: Option<&str>) -> Option<Key> {
        self.source.as_ref().map(|source| digest(&json!([source, commit])))
    }

    fn installed(&self, commit: Option<&str>) -> Option<Key> {
        self.installed.as_ref().map(|installed| digest(&json!([installed, commit])))
    }
}

/// An install that depends on nothing but what is in the key. Variables' values are secrets, and may differ.
fn installable(profile: &Profile) -> bool {
    profile.install.is_some() && profile.variables.as_ref().is_none_or(Vec::is_empty)
}

/// What an install depends on.
fn installs(profile: &Profile) -> Value {
    json!([profile.files, profile.env, profile.install, profile.system_prompt])
}

fn digest(value: &Value) -> Key {
    hex(value.to_string().as_bytes())
}

/// SHA-256 in hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
