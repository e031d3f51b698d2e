//! The bases of this worker: finished folders `<work>/bases/<key>.<random>`, each with `home`, `workspace` and `base.json`, and the commits
//! that the refs of batches stand for.
//!
//! A base is made in `<key>.staging-<random>` and renamed when it is whole; nobody changes it after that. Nothing is synced: after a restart
//! of the machine all bases are thrown away, with the sandboxes that were made from them.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs, io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use evalgrid_sandbox::SandboxProvider;
use rand::Rng as _;
use serde::{Deserialize, Serialize};
use tokio::{sync::watch, time::Instant};

use crate::trial::now_ms;

/// Bases that are kept, used or not: as many variants as a busy host sees in a day.
const MOST_BASES: usize = 64;
/// Bytes of files in all of them together.
const MOST_BYTES: u64 = 20 << 30;
/// A base is not used after this long: what an install gets from the network changes.
const MOST_AGE: Duration = Duration::from_secs(24 * 3_600);
/// Commits that are remembered: batches live for days, and have up to a hundred repositories.
const MOST_COMMITS: usize = 10_000;
/// After so many new commits the oldest are thrown away.
const COMMITS_BETWEEN: u32 = 1_000;
/// After so many failures nobody waits for anybody under that key,
const MOST_FAILURES: u32 = 2;
/// for this long.
const FAILED_FOR: Duration = Duration::from_secs(600);
/// Keys whose failures are remembered.
const MOST_FAILED: usize = 1_000;

/// Names a base, or what a ref is looked up under: a SHA-256 in hexadecimal digits.
pub(crate) type Key = String;

/// What is known of a base: `base.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Manifest {
    pub(crate) key: Key,
    pub(crate) boot_id: String,
    pub(crate) made_at_ms: u64,
    /// Of its files.
    pub(crate) bytes: u64,
    /// That the source is at.
    pub(crate) commit: Option<String>,
    /// The profile and its install are in it, not the source only.
    pub(crate) installed: bool,
    /// Files of the harness that were written before the install: their digests, by `home/…` or `workspace/…`.
    pub(crate) written: BTreeMap<String, String>,
}

/// See the top of this file.
pub(crate) struct Bases {
    folder: PathBuf,
    boot_id: String,
    providers: BTreeMap<&'static str, Arc<dyn SandboxProvider>>,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    ready: HashMap<Key, Ready>,
    /// How many attempts use it, by its folder's name.
    pins: HashMap<String, usize>,
    /// Who makes something closes this when done.
    making: HashMap<Key, watch::Receiver<()>>,
    staging: BTreeSet<String>,
    failures: HashMap<Key, (u32, Instant)>,
    new_commits: u32,
}

struct Ready {
    name: String,
    manifest: Manifest,
    used_at: u64,
}

/// What there is under a key.
pub(crate) enum Found {
    Base(Pin),
    /// Somebody makes it; the channel closes when that is over.
    Making(watch::Receiver<()>),
    /// Nobody does: the caller may.
    Nobody(Maker),
    /// It has failed too often.
    Hopeless,
}

/// A base that stays for as long as this lives, and then for as long as a sandbox is made from it.
pub(crate) struct Pin {
    bases: Arc<Bases>,
    name: String,
    pub(crate) folder: PathBuf,
    pub(crate) manifest: Manifest,
}

/// The right to make what a key names. Whoever waits for it goes on when this is gone.
pub(crate) struct Maker {
    bases: Arc<Bases>,
    pub(crate) key: Key,
    staging: Option<String>,
    finished: bool,
    _done: watch::Sender<()>,
}

impl Bases {
    /// Takes over what an earlier process has left in `work`. Blocks.
    pub(crate) fn open(work: &Path, boot_id: &str, providers: &BTreeMap<&'static str, Arc<dyn SandboxProvider>>) -> io::Result<Arc<Self>> {
        let folder = work.join("bases");
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder.join("commits"))?;
        // Thousands of files at once, beside thousands that were deleted: without this, copying takes three times as long.
        evalgrid_sandbox::spread(&folder);
        let bases = Self {
            folder: folder.canonicalize()?,
            boot_id: boot_id.to_owned(),
            providers: providers.clone(),
            inner: Mutex::default(),
        };
        for name in bases.names()? {
            if let Some(manifest) = bases.read(&name) {
                let used_at = modified_ms(&bases.folder.join(&name).join("base.json"));
                let ready = Ready { name, manifest, used_at };
                bases.inner().ready.insert(ready.manifest.key.clone(), ready);
            }
        }
        bases.collect();
        bases.forget_commits();
        Ok(Arc::new(bases))
    }

    /// What there is under `key`. `Nobody` only where `may_make`.
    pub(crate) fn find(self: &Arc<Self>, key: &Key) -> Found {
        let now = now_ms();
        let mut inner = self.inner();
        if let Some(ready) = inner.ready.get_mut(key) {
            if now.saturating_sub(ready.manifest.made_at_ms) < MOST_AGE.as_millis() as u64 {
                ready.used_at = now;
                let (name, manifest) = (ready.name.clone(), ready.manifest.clone());
                *inner.pins.entry(name.clone()).or_default() += 1;
                drop(inner);
                let folder = self.folder.join(&name);
                // For a later process: which was used last.
                let _ = fs::File::open(folder.join("base.json"))
                    .and_then(|file| file.set_modified(std::time::SystemTime::UNIX_EPOCH + Duration::from_millis(now)));
                return Found::Base(Pin {
                    bases: self.clone(),
                    name,
                    folder,
                    manifest,
                });
            }
            inner.ready.remove(key);
        }
        if let Some(making) = inner.making.get(key) {
            return Found::Making(making.clone());
        }
        if let Some((count, last)) = inner.failures.get(key)
            && *count >= MOST_FAILURES
            && last.elapsed() < FAILED_FOR
        {
            return Found::Hopeless;
        }
        let (done, making) = watch::channel(());
        inner.making.insert(key.clone(), making);
        Found::Nobody(Maker {
            bases: self.clone(),
            key: key.clone(),
            staging: None,
            finished: false,
            _done: done,
        })
    }

    /// The base that a living sandbox was made from.
    pub(crate) fn of_sandbox(self: &Arc<Self>, folder: &Path) -> Option<Pin> {
        let name = folder.strip_prefix(&self.folder).ok()?.to_str()?.to_owned();
        let manifest = self.read(&name)?;
        *self.inner().pins.entry(name.clone()).or_default() += 1;
        Some(Pin {
            bases: self.clone(),
            name,
            folder: folder.to_owned(),
            manifest,
        })
    }

    /// The commit that was found under `key`.
    pub(crate) fn commit(&self, key: &Key) -> Option<String> {
        let text = fs::read_to_string(self.folder.join("commits").join(key)).ok()?;
        is_commit(&text).then_some(text)
    }

    /// Remembers a commit. Only the first one counts.
    pub(crate) fn remember(&self, key: &Key, commit: &str) -> io::Result<()> {
        let folder = self.folder.join("commits");
        let unfinished = folder.join(format!("{key}.{}", random_name()));
        fs::write(&unfinished, commit)?;
        let linked = fs::hard_link(&unfinished, folder.join(key));
        fs::remove_file(&unfinished)?;
        match linked {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let mut inner = self.inner();
        inner.new_commits += 1;
        if inner.new_commits >= COMMITS_BETWEEN {
            inner.new_commits = 0;
            drop(inner);
            self.forget_commits();
        }
        Ok(())
    }

    /// Removes what nobody needs: bases above the limits that no sandbox uses, the longest unused first; and what is neither a base nor about to
    /// become one. Blocks.
    pub(crate) fn collect(&self) {
        if let Err(reason) = self.try_collect() {
            tracing::warn!(reason, "old bases are not removed now");
        }
    }

    fn try_collect(&self) -> Result<(), String> {
        let used = self.used()?;
        {
            let mut inner = self.inner();
            let Inner { ready, pins, .. } = &mut *inner;
            let mut oldest: Vec<_> = ready.values().map(|base| (base.used_at, base.manifest.key.clone())).collect();
            oldest.sort();
            let mut bytes: u64 = ready.values().map(|base| base.manifest.bytes).sum();
            for (_, key) in oldest {
                if ready.len() <= MOST_BASES && bytes <= MOST_BYTES {
                    break;
                }
                let free = |base: &Ready| !pins.contains_key(&base.name) && !used.contains(&self.folder.join(&base.name));
                if ready.get(&key).is_some_and(free)
                    && let Some(base) = ready.remove(&key)
                {
                    tracing::info!(base = base.name, "a base makes room for newer ones");
                    bytes -= base.manifest.bytes;
                }
            }
        }
        // Names first: what appears later is no business of ours. Nobody takes up what is not among the ready ones any more, so whoever uses
        // it by now is the last.
        let names = self.names().map_err(|error| error.to_string())?;
        let inner = self.inner();
        let kept = |name: &String| {
            inner.staging.contains(name) || inner.pins.contains_key(name) || inner.ready.values().any(|base| base.name == *name)
        };
        let leftover: Vec<_> = names.into_iter().filter(|name| !kept(name)).collect();
        drop(inner);
        let used = if leftover.is_empty() { used } else { self.used()? };
        for name in leftover {
            let folder = self.folder.join(&name);
            if !used.contains(&folder) {
                evalgrid_sandbox::remove_tree(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
            }
        }
        Ok(())
    }

    /// The bases of living sandboxes.
    fn used(&self) -> Result<BTreeSet<PathBuf>, String> {
        let mut used = BTreeSet::new();
        for provider in self.providers.values() {
            used.extend(provider.bases_in_use().map_err(|error| error.to_string())?);
        }
        Ok(used)
    }

    /// Names of all bases, finished or not.
    fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            if let Ok(name) = entry?.file_name().into_string()
                && name.split_once('.').is_some_and(|(key, _)| key.len() == 64)
            {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// A base's manifest, if it is one, of this run of the machine.
    fn read(&self, name: &str) -> Option<Manifest> {
        let bytes = fs::read(self.folder.join(name).join("base.json")).ok()?;
        let manifest: Manifest = serde_json::from_slice(&bytes).ok()?;
        let (key, kind) = name.split_once('.')?;
        (manifest.boot_id == self.boot_id && manifest.key == key && !kind.starts_with("staging-")).then_some(manifest)
    }

    fn forget_commits(&self) {
        let Ok(entries) = fs::read_dir(self.folder.join("commits")) else {
            return;
        };
        let mut commits: Vec<_> = entries.flatten().map(|entry| (modified_ms(&entry.path()), entry.path())).collect();
        commits.sort();
        for (_, path) in commits.iter().take(commits.len().saturating_sub(MOST_COMMITS)) {
            // Tried again after the next thousand.
            let _ = fs::remove_file(path);
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pin {
    /// No sandbox could be made from it: it is not tried again.
    pub(crate) fn distrust(&self) {
        let mut inner = self.bases.inner();
        if inner.ready.get(&self.manifest.key).is_some_and(|base| base.name == self.name) {
            inner.ready.remove(&self.manifest.key);
            inner.fail(&self.manifest.key);
        }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut inner = self.bases.inner();
        if let Some(count) = inner.pins.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                inner.pins.remove(&self.name);
            }
        }
    }
}

impl Maker {
    /// Where the base is to be made.
    pub(crate) fn staging(&mut self) -> PathBuf {
        let name = format!("{}.staging-{}", self.key, random_name());
        self.bases.inner().staging.insert(name.clone());
        let folder = self.bases.folder.join(&name);
        self.staging = Some(name);
        folder
    }

    /// What is in the staging folder is a base from now on.
    pub(crate) fn finish(
        mut self,
        bytes: u64,
        commit: Option<String>,
        installed: bool,
        written: BTreeMap<String, String>,
    ) -> io::Result<()> {
        let Some(staging) = self.staging.clone() else {
            return Err(io::Error::other("nothing was made"));
        };
        let manifest = Manifest {
            key: self.key.clone(),
            boot_id: self.bases.boot_id.clone(),
            made_at_ms: now_ms(),
            bytes,
            commit,
            installed,
            written,
        };
        let staged = self.bases.folder.join(&staging);
        fs::write(staged.join("base.json"), serde_json::to_vec(&manifest)?)?;
        let name = format!("{}.{}", self.key, random_name());
        fs::rename(&staged, self.bases.folder.join(&name))?;
        let mut inner = self.bases.inner();
        let used_at = manifest.made_at_ms;
        inner.failures.remove(&self.key);
        inner.ready.insert(self.key.clone(), Ready { name, manifest, used_at });
        drop(inner);
        self.finished = true;
        Ok(())
    }

    /// The key has served its purpose without a base.
    pub(crate) fn done(mut self) {
        self.finished = true;
    }
}

impl Drop for Maker {
    fn drop(&mut self) {
        let mut inner = self.bases.inner();
        inner.making.remove(&self.key);
        if !self.finished {
            inner.fail(&self.key);
        }
        if let Some(staging) = self.staging.take() {
            inner.staging.remove(&staging);
            // What is left of it is removed with old bases, unless whoever copied has seen that nobody waits any more.
        }
    }
}

impl Inner {
    fn fail(&mut self, key: &Key) {
        if self.failures.len() >= MOST_FAILED {
            self.failures.clear();
        }
        let now = Instant::now();
        let (count, last) = self.failures.entry(key.clone()).or_insert((0, now));
        if last.elapsed() >= FAILED_FOR {
            *count = 0;
        }
        *count += 1;
        *last = now;
    }
}

/// A full name of a commit, as git prints it.
pub(crate) fn is_commit(text: &str) -> bool {
    matches!(text.len(), 40 | 64) && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn modified_ms(path: &Path) -> u64 {
    let modified = fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
    let since = modified.and_then(|time| time.duration_since(std::time::SystemTime::UNIX_EPOCH).ok());
    since.map_or(0, |since| since.as_millis() as u64)
}

fn random_name() -> String {
    format!("{:016x}", rand::rng().random::<u64>())
}
