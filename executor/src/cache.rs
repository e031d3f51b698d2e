//! Caches of cases: one prepared folder each, kept in the executor's own folder from one trial to the next.
//!
//! A cache belongs to an organization, a key and a path; no other organization ever gets it. It is saved once, right after the set-up, so it
//! holds what the set-up made and never what an agent did to it. It is an aid: whatever goes wrong with it is said, and costs no trial.
//!
//! Nothing is synced. After a restart of the machine a cache may be torn, so it counts only under the boot id that it was saved under.

mod place;

use std::{
    collections::{BTreeSet, HashMap},
    ffi::CStr,
    fs, io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, SystemTime},
};

use evalgrid_sandbox::{CopyBudget, copy_tree};
use place::PlaceError;
use rustix::fs::{Timespec, Timestamps, UTIME_NOW};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::time::timeout;

use crate::{
    account::Account,
    trial::{Attempt, StepResult, Stop},
};

/// Files, folders and links of one cache: a large `node_modules`.
const MAX_ENTRIES: u64 = 400_000;
/// Bytes of one cache.
const MAX_BYTES: u64 = 2 << 30;
/// Bytes of all caches of one executor.
const MAX_TOTAL_BYTES: u64 = 8 << 30;
/// Caches of one executor.
const MAX_CACHES: usize = 64;
/// Copying one cache, in or out. A trial that waits longer is better off without.
const COPY_LIMIT: Duration = Duration::from_secs(300);
/// In a cache's folder: what was saved.
const DATA: &CStr = c"data";
/// In a cache's folder: its bytes as a number. Its time is when the cache was used last.
const SIZE: &str = "size";
/// Begins the name of a folder in the store that is still being made, or already being removed.
const UNFINISHED: &str = "unfinished-";
/// What is being restored, beside the place that it is for.
const ARRIVING: &CStr = c".evalgrid-cache-arriving";

/// How much may be kept.
#[derive(Clone, Copy, Debug)]
struct Limits {
    entries: u64,
    bytes: u64,
    total_bytes: u64,
    caches: usize,
}

const LIMITS: Limits = Limits {
    entries: MAX_ENTRIES,
    bytes: MAX_BYTES,
    total_bytes: MAX_TOTAL_BYTES,
    caches: MAX_CACHES,
};

/// Why a cache was not saved or not restored.
#[derive(Debug, thiserror::Error)]
enum CacheError {
    #[error(transparent)]
    Place(#[from] PlaceError),
    #[error("it takes too long")]
    Slow,
    #[error("all caches together would take too much room, and those that are there are in use")]
    Full,
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// The caches of one executor.
pub(crate) struct Caches {
    /// For this boot alone.
    folder: PathBuf,
    limits: Limits,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// How many trials copy which cache just now.
    in_use: HashMap<String, usize>,
    /// For names of unfinished folders.
    made: u64,
}

impl Caches {
    /// The caches in a worker's folder. What another boot or a crash has left is removed by the way.
    pub(crate) fn open(worker: &Path, boot_id: &str) -> Self {
        Self::with_limits(worker, boot_id, LIMITS)
    }

    fn with_limits(worker: &Path, boot_id: &str, limits: Limits) -> Self {
        let root = worker.join("cache");
        let folder = root.join(boot_id);
        let left = |folder: &Path, is_garbage: &dyn Fn(&str) -> bool| {
            let entries = fs::read_dir(folder).into_iter().flatten().flatten();
            let garbage = entries.filter(|entry| entry.file_name().to_str().is_none_or(is_garbage));
            garbage.map(|entry| entry.path()).collect::<Vec<_>>()
        };
        let mut garbage = left(&root, &|name| name != boot_id);
        garbage.extend(left(&folder, &|name| name.starts_with(UNFINISHED)));
        if !garbage.is_empty() {
            // It may be gigabytes; nobody waits for it.
            std::thread::spawn(move || garbage.iter().for_each(|path| remove(path)));
        }
        Self {
            folder,
            limits,
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies a cache to its place below `workspace`, whatever is there. False: there is no such cache.
    fn restore(&self, name: &str, workspace: &Path, path: &str, cancelled: &AtomicBool) -> Result<bool, CacheError> {
        let Some(_used) = self.take(name) else { return Ok(false) };
        let kept = place::open(&self.folder.join(name))?;
        let data = place::folder(&kept, DATA)?.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        touch(&self.folder.join(name))?;
        let made = place::parent(place::open(workspace)?, Path::new(path), true)?;
        let (parent, leaf) = made.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        place::remove(&parent, ARRIVING)?;
        let mut budget = self.budget(cancelled);
        let copied = (|| -> Result<(), CacheError> {
            let arriving = place::make(&parent, ARRIVING)?;
            copy_tree(&place::path_of(&data), &place::path_of(&arriving), &BTreeSet::new(), &mut budget)?;
            place::remove(&parent, &leaf)?;
            Ok(place::rename(&parent, ARRIVING, &leaf)?)
        })();
        match copied {
            Ok(()) => Ok(true),
            Err(error) => {
                let _ = place::remove(&parent, ARRIVING);
                Err(error)
            }
        }
    }

    /// Keeps what is at a place below `workspace`, unless this cache is there already. False: nothing is there to be kept.
    fn save(&self, name: &str, workspace: &Path, path: &str, cancelled: &AtomicBool) -> Result<bool, CacheError> {
        let Some((parent, leaf)) = place::parent(place::open(workspace)?, Path::new(path), false)? else {
            return Ok(false);
        };
        let Some(source) = place::folder(&parent, &leaf)? else {
            return Ok(false);
        };
        if self.folder.join(name).exists() {
            return Ok(true);
        }
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.folder)?;
        let unfinished = self.unfinished();
        fs::DirBuilder::new().mode(0o700).create(&unfinished)?;
        let mut budget = self.budget(cancelled);
        let kept = (|| -> Result<Vec<PathBuf>, CacheError> {
            let data = place::make(&place::open(&unfinished)?, DATA)?;
            copy_tree(&place::path_of(&source), &place::path_of(&data), &BTreeSet::new(), &mut budget)?;
            let bytes = self.limits.bytes - budget.bytes;
            fs::write(unfinished.join(SIZE), bytes.to_string())?;
            self.admit(name, &unfinished, bytes)
        })();
        match kept {
            Ok(evicted) => {
                evicted.iter().for_each(|path| remove(path));
                Ok(true)
            }
            Err(error) => {
                remove(&unfinished);
                Err(error)
            }
        }
    }

    /// Gives a finished folder its name, and takes away the least used ones that it has no room beside. What is returned is to be removed.
    fn admit(&self, name: &str, unfinished: &Path, bytes: u64) -> Result<Vec<PathBuf>, CacheError> {
        // Held over a few renames: nobody begins to use a cache meanwhile.
        let mut state = self.state();
        let place = self.folder.join(name);
        if place.exists() {
            // Another trial was faster, with the same.
            return Ok(vec![unfinished.to_owned()]);
        }
        let mut kept = self.kept()?;
        // Last used first.
        kept.sort_by_key(|kept| std::cmp::Reverse(kept.used));
        let mut evicted = Vec::new();
        let mut total: u64 = kept.iter().map(|kept| kept.bytes).sum();
        let mut count = kept.len();
        while total.saturating_add(bytes) > self.limits.total_bytes || count + 1 > self.limits.caches {
            let idle = kept.iter().rposition(|kept| !state.in_use.contains_key(&kept.name));
            let oldest = idle.map(|index| kept.remove(index)).ok_or(CacheError::Full)?;
            total -= oldest.bytes;
            count -= 1;
            evicted.push(oldest.name);
        }
        let mut garbage = Vec::new();
        for name in evicted {
            state.made += 1;
            let away = self.folder.join(format!("{UNFINISHED}{}", state.made));
            fs::rename(self.folder.join(name), &away)?;
            garbage.push(away);
        }
        fs::rename(unfinished, place)?;
        Ok(garbage)
    }

    fn kept(&self) -> io::Result<Vec<Kept>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            if name.starts_with(UNFINISHED) {
                continue;
            }
            let size = entry.path().join(SIZE);
            // One that tells no size is of no use, and goes first.
            let bytes = fs::read_to_string(&size).ok().and_then(|text| text.parse().ok());
            let used = fs::metadata(&size).and_then(|size| size.modified()).ok();
            all.push(Kept {
                name,
                bytes: bytes.unwrap_or(self.limits.bytes),
                used: used.unwrap_or(SystemTime::UNIX_EPOCH),
            });
        }
        Ok(all)
    }

    /// Marks a cache as in use, if it is there.
    fn take(&self, name: &str) -> Option<InUse<'_>> {
        let mut state = self.state();
        self.folder.join(name).is_dir().then(|| {
            *state.in_use.entry(name.to_owned()).or_default() += 1;
            InUse {
                caches: self,
                name: name.to_owned(),
            }
        })
    }

    fn unfinished(&self) -> PathBuf {
        let mut state = self.state();
        state.made += 1;
        self.folder.join(format!("{UNFINISHED}{}", state.made))
    }

    fn budget<'a>(&self, cancelled: &'a AtomicBool) -> CopyBudget<'a> {
        CopyBudget::new(self.limits.bytes, self.limits.entries, cancelled)
    }
}

/// A cache in the store.
struct Kept {
    name: String,
    bytes: u64,
    used: SystemTime,
}

/// A cache that is being copied; it is not taken away while this lives.
struct InUse<'a> {
    caches: &'a Caches,
    name: String,
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        let mut state = self.caches.state();
        if let Some(count) = state.in_use.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                state.in_use.remove(&self.name);
            }
        }
    }
}

/// Says that a cache is used now.
fn touch(kept: &Path) -> io::Result<()> {
    let size = fs::File::open(kept.join(SIZE))?;
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: UTIME_NOW,
    };
    let times = Timestamps {
        last_access: now,
        last_modification: now,
    };
    Ok(rustix::fs::futimens(size, &times)?)
}

/// Removes a folder of ours. What is left of it is tried again at the next start.
fn remove(path: &Path) {
    if let Err(error) = fs::remove_dir_all(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "a cache could not be removed");
    }
}

/// The name of a cache in the store. Kinds of sandboxes do not share one: their users differ. The length of each part keeps two sets of parts apart that read the same.
fn name(organization: &str, provider: &str, key: &str, path: &str) -> String {
    let mut hash = Sha256::new();
    for part in [organization, provider, key, path] {
        hash.update(part.len().to_le_bytes());
        hash.update(part);
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What restoring or saving records.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Record {
    /// The folder is there, or was kept.
    done: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    diagnostics: Vec<String>,
}

impl StepResult for Record {
    fn failed(&self) -> bool {
        false
    }
}

/// Brings back what an earlier trial has saved. Behind the install, whose result may become a base for trials that have no such cache; durable
/// before anything can run that works on it.
pub(crate) async fn restore(attempt: &Attempt<'_>, account: &mut Account) -> Result<(), Stop> {
    if attempt.case.cache.is_none() || account.is_void() {
        return Ok(());
    }
    let record = attempt
        .once("cache.restore", copy(attempt, Caches::restore, "restored", None))
        .await?;
    account.cache_restored = record.done;
    account.diagnostics(record.diagnostics);
    attempt.durable().await
}

/// Keeps what the set-up has made, where there was no cache. Durable before the agent begins: what it does is nobody's cache.
pub(crate) async fn save(attempt: &Attempt<'_>, account: &mut Account) -> Result<(), Stop> {
    let Some(cache) = attempt
        .case
        .cache
        .as_ref()
        .filter(|_| !account.is_void() && !account.cache_restored)
    else {
        return Ok(());
    };
    let missing = format!("The cache was not saved: there is no {} after the set-up", cache.path);
    let record = attempt
        .once("cache.save", copy(attempt, Caches::save, "saved", Some(missing)))
        .await?;
    account.diagnostics(record.diagnostics);
    attempt.durable().await
}

/// [`Caches::restore`] or [`Caches::save`].
type Copy = fn(&Caches, &str, &Path, &str, &AtomicBool) -> Result<bool, CacheError>;

/// One copy, in a thread of its own. `missing`: what to say where there is nothing to copy.
async fn copy(attempt: &Attempt<'_>, copy: Copy, what: &str, missing: Option<String>) -> Result<Record, Stop> {
    let Some(cache) = &attempt.case.cache else {
        return Ok(Record::default());
    };
    let Some(folder) = attempt.sandbox.folder() else {
        return Ok(said(format!("The cache was not {what}: the workspace is not on this host")));
    };
    let workspace = folder.join("workspace");
    let (caches, path) = (attempt.executor.caches.clone(), cache.path.clone());
    let name = name(&attempt.lease.organization_id, &attempt.lease.provider, &cache.key, &cache.path);
    // A trial that is given up takes its copy with it.
    let cancel = Cancel(Arc::new(AtomicBool::new(false)));
    let cancelled = cancel.0.clone();
    let copied = tokio::task::spawn_blocking(move || copy(&caches, &name, &workspace, &path, &cancelled));
    let copied = match timeout(COPY_LIMIT, copied).await {
        Ok(copied) => copied.unwrap_or_else(|error| Err(io::Error::other(error).into())),
        Err(_) => Err(CacheError::Slow),
    };
    Ok(match copied {
        Ok(true) => Record {
            done: true,
            diagnostics: Vec::new(),
        },
        Ok(false) => missing.map_or_else(Record::default, said),
        Err(error) => said(attempt.redactor.text(&format!("The cache was not {what}: {error}")).into_owned()),
    })
}

/// Ends a copy once nobody waits for it.
struct Cancel(Arc<AtomicBool>);

impl Drop for Cancel {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn said(text: String) -> Record {
    Record {
        done: false,
        diagnostics: vec![text],
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::symlink;

    use super::*;

    const SMALL: Limits = Limits {
        entries: 10,
        bytes: 100,
        total_bytes: 250,
        caches: 3,
    };

    struct Rig {
        root: tempfile::TempDir,
        caches: Caches,
    }

    impl Rig {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            let caches = Caches::with_limits(root.path(), "boot", SMALL);
            Self { root, caches }
        }

        /// A new workspace with these files in it.
        fn workspace(&self, name: &str, files: &[(&str, &str)]) -> PathBuf {
            let workspace = self.root.path().join(name);
            fs::create_dir_all(&workspace).unwrap();
            for (path, text) in files {
                let path = workspace.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            workspace
        }

        fn save(&self, name: &str, workspace: &Path, path: &str) -> Result<bool, String> {
            let saved = self.caches.save(name, workspace, path, &AtomicBool::new(false));
            saved.map_err(|error| error.to_string())
        }

        fn restore(&self, name: &str, workspace: &Path, path: &str) -> Result<bool, String> {
            let restored = self.caches.restore(name, workspace, path, &AtomicBool::new(false));
            restored.map_err(|error| error.to_string())
        }

        fn kept(&self) -> Vec<String> {
            let names = fs::read_dir(&self.caches.folder)
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap());
            let mut names: Vec<_> = names.collect();
            names.sort();
            names
        }
    }

    #[test]
    fn what_was_saved_comes_back() {
        let rig = Rig::new();
        let made = rig.workspace("made", &[("deep/deps/a/b", "b"), ("deep/deps/c", "c"), ("else", "e")]);
        symlink("/etc", made.join("deep/deps/link")).unwrap();
        assert_eq!(rig.restore("x", &made, "deep/deps"), Ok(false));
        assert_eq!(rig.save("x", &made, "nowhere/deps"), Ok(false));
        assert_eq!(rig.save("x", &made, "deep/deps/"), Ok(true));
        fs::write(made.join("deep/deps/c"), "changed").unwrap();
        assert_eq!(rig.save("x", &made, "deep/deps"), Ok(true), "the first one stays");
        let fresh = rig.workspace("fresh", &[("deep/deps/old", "o")]);
        for _ in 0..2 {
            assert_eq!(rig.restore("x", &fresh, "./deep//deps"), Ok(true));
            let text = |path: &str| fs::read_to_string(fresh.join(path)).ok();
            assert_eq!(
                (
                    text("deep/deps/a/b").as_deref(),
                    text("deep/deps/c").as_deref(),
                    text("deep/deps/old")
                ),
                (Some("b"), Some("c"), None)
            );
            assert_eq!(fs::read_link(fresh.join("deep/deps/link")).unwrap(), Path::new("/etc"));
        }
        assert_eq!(rig.kept(), ["x"]);
        assert_ne!(name("org_a", "p", "key", "path"), name("org_b", "p", "key", "path"));
        assert_ne!(name("org_a", "p", "key", "path"), name("org_a", "q", "key", "path"));
        assert_ne!(name("org", "p", "ab", "c"), name("org", "p", "a", "bc"));
    }

    #[test]
    fn no_symlink_leads_out() {
        let rig = Rig::new();
        let outside = rig.workspace("outside", &[("deps/secret", "s")]);
        let made = rig.workspace("made", &[("file", "f"), ("good/deps/a", "a")]);
        symlink(&outside, made.join("link")).unwrap();
        symlink(outside.join("deps"), made.join("deps")).unwrap();
        for (path, reason) in [
            ("link/deps", "link is no folder"),
            ("deps", "deps is no folder"),
            ("file", "file is no folder"),
        ] {
            assert_eq!(rig.save("x", &made, path), Err(reason.to_owned()));
        }
        assert_eq!(rig.save("x", &made, "good/deps"), Ok(true));
        assert_eq!(rig.restore("x", &made, "link/deps"), Err("link is no folder".to_owned()));
        assert_eq!(rig.restore("x", &made, "deps"), Ok(true), "the link goes, not what it leads to");
        assert_eq!(fs::read_to_string(outside.join("deps/secret")).unwrap(), "s");
        assert_eq!(fs::read_dir(outside).unwrap().count(), 1);
    }

    #[test]
    fn room_is_bounded_and_the_least_used_goes() {
        let rig = Rig::new();
        let text = |bytes: usize| "x".repeat(bytes);
        let big = rig.workspace("big", &[("deps/a", &text(101))]);
        assert_eq!(rig.save("big", &big, "deps"), Err("a: it is too big".into()));
        let many: Vec<_> = (0..11).map(|number| format!("deps/{number}")).collect();
        let many: Vec<_> = many.iter().map(|path| (path.as_str(), "")).collect();
        let error = rig.save("many", &rig.workspace("many", &many), "deps").unwrap_err();
        assert!(error.contains("there are too many files"), "{error}");
        assert_eq!(rig.kept(), [""; 0], "nothing is left of what failed");

        let used = |name: &str, ago: u64| {
            let size = fs::File::open(rig.caches.folder.join(name).join(SIZE)).unwrap();
            let now = size.metadata().unwrap().modified().unwrap();
            size.set_modified(now - Duration::from_secs(ago)).unwrap();
        };
        let save = |name: &str, bytes: usize| rig.save(name, &rig.workspace(name, &[("deps/a", &text(bytes))]), "deps");
        for (name, ago) in [("a", 30), ("b", 20), ("c", 10)] {
            assert_eq!(save(name, 80), Ok(true));
            used(name, ago);
        }
        assert_eq!(rig.restore("a", &rig.workspace("w", &[]), "deps"), Ok(true));
        assert_eq!(save("d", 10), Ok(true));
        assert_eq!(rig.kept(), ["a", "c", "d"], "too many: the one that was not used for longest went");
        assert_eq!(save("e", 100), Ok(true));
        assert_eq!(rig.kept(), ["a", "d", "e"], "too big together");
        let in_use: Vec<_> = ["a", "d", "e"].iter().map(|name| rig.caches.take(name).unwrap()).collect();
        assert!(save("f", 100).unwrap_err().contains("in use"));
        drop(in_use);
        assert_eq!(save("f", 100), Ok(true));
        assert_eq!(rig.kept().len(), 3);
    }

    #[test]
    fn what_a_crash_or_another_boot_has_left_goes() {
        let rig = Rig::new();
        let made = rig.workspace("made", &[("deps/a", "a")]);
        assert_eq!(rig.save("x", &made, "deps"), Ok(true));
        fs::create_dir_all(rig.caches.folder.join("unfinished-9/data")).unwrap();
        let again = Caches::with_limits(rig.root.path(), "boot", SMALL);
        let until = |what: &str, condition: &dyn Fn() -> bool| {
            for _ in 0..2_000 {
                if condition() {
                    return;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            panic!("{what}");
        };
        until("the unfinished one goes", &|| rig.kept() == ["x"]);
        assert!(again.take("x").is_some());
        let next = Caches::with_limits(rig.root.path(), "next", SMALL);
        assert!(next.take("x").is_none(), "it may be torn");
        until("the old boot's go", &|| !rig.caches.folder.exists());
    }
}
