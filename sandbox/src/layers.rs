//! A sandbox's home and workspace made from a *base*, a finished folder that nobody changes: as overlayfs mounts, or as copies.
//!
//! With overlayfs, `<sandbox>/home` and `<sandbox>/workspace` are mounts whose lower layer is the base; what the sandbox writes is in
//! `<sandbox>/layers`. They are made by the supervisor and stay until the sandbox is destroyed. After a restart of the machine there are none.

use std::{
    ffi::CString,
    fs, io,
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
    thread,
};

use rustix::{
    io::Errno,
    mount::{MountFlags, MountPropagationFlags, UnmountFlags},
    thread::UnshareFlags,
};
use serde::{Deserialize, Serialize};

use crate::{
    layout::{self, Layout},
    tree::{self, Budget},
};

/// The folders of a base, and of a sandbox, that are made from it.
const FOLDERS: [&str; 2] = ["home", "workspace"];
/// Bytes of files in a base that may be copied for each sandbox: about what a disk writes in ten seconds.
pub const MOST_COPIED_BYTES: u64 = 1 << 30;
/// Bytes of files in a base that is mounted.
pub const MOST_MOUNTED_BYTES: u64 = 8 << 30;
/// Files, folders and links of a base: several of the largest `node_modules`.
pub const MOST_ENTRIES: u64 = 1_000_000;
/// More mounts on one folder than anybody has made.
const MOST_MOUNTS: usize = 16;
/// Where it is tried whether overlayfs works, below a provider's root.
const PROBE: &str = ".layers-probe-";

/// How sandboxes are made from bases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Means {
    /// Overlayfs: made in milliseconds whatever its size, and what is read is in memory once.
    Overlay,
    /// A copy for each sandbox.
    Copy,
}

impl Means {
    pub fn most_bytes(self) -> u64 {
        match self {
            Self::Overlay => MOST_MOUNTED_BYTES,
            Self::Copy => MOST_COPIED_BYTES,
        }
    }
}

/// What a sandbox was made from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Based {
    pub folder: PathBuf,
    pub means: Means,
}

impl Based {
    /// Whether the sandbox has all of its base, as this process sees it: a copy may have been cut off by a crash, and mounts are in the mount
    /// namespace of the executor that made them only.
    pub fn is_whole(&self, layout: &Layout) -> bool {
        match self.means {
            Means::Copy => filled(layout).exists(),
            Means::Overlay => {
                let device = |path: &Path| path.symlink_metadata().map(|m| m.dev());
                let below = device(&layout.folder);
                below.is_ok_and(|below| FOLDERS.iter().all(|f| device(&layout.folder.join(f)).is_ok_and(|d| d != below)))
            }
        }
    }
}

/// Says that everything has been copied.
fn filled(layout: &Layout) -> PathBuf {
    layout.folder.join("filled")
}

/// The part of a sandbox that holds what it has written over its base.
fn upper(folder: &Path) -> PathBuf {
    folder.join("layers")
}

/// Chooses, by trying it out below `root`. The reason is for people.
pub fn choose(root: &Path) -> (Means, String) {
    match probe(root) {
        Ok(()) => (Means::Overlay, "overlayfs".to_owned()),
        Err(e) => (
            Means::Copy,
            format!("copies, because overlayfs does not work in {}: {e}", root.display()),
        ),
    }
}

fn probe(root: &Path) -> io::Result<()> {
    for entry in fs::read_dir(root)?.flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix(PROBE)?.parse::<u32>().ok());
        // Of an executor that was killed in the middle of this.
        if pid.is_some_and(|pid| pid == std::process::id() || !Path::new("/proc").join(pid.to_string()).exists()) {
            layout::remove_tree(&entry.path())?;
        }
    }
    let folder = root.join(format!("{PROBE}{}", std::process::id()));
    let result = thread::scope(|scope| {
        let tried = scope.spawn(|| own_mounts().and_then(|()| try_out(&folder)));
        tried.join().unwrap_or_else(|_| Err(io::Error::other("the attempt panicked")))
    });
    let removed = layout::remove_tree(&folder);
    result.and(removed)
}

/// Gives this thread mounts of its own: they end with it, even where the process is killed.
fn own_mounts() -> io::Result<()> {
    // SAFETY: no other thread loses anything: those of this process keep their mounts, and file descriptors stay shared.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?;
    // Or what is mounted here would be mounted for everybody.
    let everything = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", everything)?;
    Ok(())
}

/// Everything that agents do to what is below: read, change, rename folders, delete.
fn try_out(folder: &Path) -> io::Result<()> {
    let (base, layout) = (folder.join("base"), Layout::new(folder, "sandbox"));
    for top in [&base, &layout.folder] {
        FOLDERS.iter().try_for_each(|f| fs::create_dir_all(top.join(f)))?;
    }
    fs::create_dir(base.join("home/deep"))?;
    fs::write(base.join("home/deep/file"), "below")?;
    fs::hard_link(base.join("home/deep/file"), base.join("home/link"))?;
    mount(&layout, &base)?;
    let home = layout.home();
    fs::rename(home.join("deep"), home.join("moved"))?;
    fs::write(home.join("moved/file"), "above")?;
    if fs::read_to_string(home.join("link"))? != "above" || fs::read_to_string(base.join("home/link"))? != "below" {
        return Err(io::Error::other("hard links break"));
    }
    fs::remove_dir_all(home.join("moved"))?;
    match fs::read_dir(&home)?.count() {
        1 => Ok(()),
        _ => Err(io::Error::other("what was deleted is still there")),
    }
}

/// Mounts the base over the sandbox's folders, which are there and empty.
pub fn mount(layout: &Layout, base: &Path) -> io::Result<()> {
    let upper = upper(&layout.folder);
    let make = |path: &Path| fs::DirBuilder::new().mode(0o700).create(path);
    make(&upper)?;
    for name in FOLDERS {
        let (lower, changes, work) = (base.join(name), upper.join(name), upper.join(format!("{name}.work")));
        make(&changes)?;
        make(&work)?;
        // The top folder's own mode and owner are those of the upper layer.
        let top = lower.symlink_metadata()?;
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&changes, Some(top.uid()), Some(top.gid()))?;
        }
        fs::set_permissions(&changes, fs::Permissions::from_mode(top.mode() & 0o7777))?;
        // Without `redirect_dir` a folder of the base could not be renamed, without `index` its hard links would come apart.
        let options = format!(
            "lowerdir={},upperdir={},workdir={},redirect_dir=on,index=on,metacopy=off",
            text(&lower)?,
            text(&changes)?,
            text(&work)?
        );
        let options = CString::new(options).map_err(io::Error::other)?;
        rustix::mount::mount(
            "evalgrid",
            layout.folder.join(name),
            "overlay",
            MountFlags::empty(),
            options.as_c_str(),
        )
        .map_err(|e| io::Error::new(io::Error::from(e).kind(), format!("mount {name} over {}: {e}", lower.display())))?;
    }
    Ok(())
}

/// A path as it can stand among mount options. There are ways to quote, which differ between kernels.
fn text(path: &Path) -> io::Result<&str> {
    let text = path.to_str().filter(|text| !text.contains([',', ':', '\\', '"']));
    text.ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{} has special characters in it", path.display()),
        )
    })
}

/// Undoes [`mount`], however far that got. `folder` is the sandbox's. Fine where nothing is mounted. Blocks.
pub fn unmount(folder: &Path) -> io::Result<()> {
    if !upper(folder).exists() {
        return Ok(());
    }
    for name in FOLDERS {
        let path = folder.join(name);
        for _ in 0..MOST_MOUNTS {
            match rustix::mount::unmount(&path, UnmountFlags::NOFOLLOW) {
                Ok(()) => {}
                // Nothing is mounted there, or not for us; what is, keeps the folder from being removed, which then tells.
                Err(Errno::INVAL | Errno::NOENT | Errno::NOTDIR | Errno::PERM) => break,
                // Somebody's shell is in there. It keeps what it sees, and nobody else sees it.
                Err(Errno::BUSY) => rustix::mount::unmount(&path, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH)?,
                Err(e) => return Err(e.into()),
            }
        }
    }
    Ok(())
}

/// Copies the base into the sandbox's folders, which are there and empty, and marks that it is done. Blocks.
pub fn fill(layout: &Layout, base: &Path, cancelled: &AtomicBool) -> io::Result<()> {
    let mut budget = Budget::new(MOST_COPIED_BYTES, MOST_ENTRIES, cancelled);
    for name in FOLDERS {
        tree::copy(&base.join(name), &layout.folder.join(name), &Default::default(), &mut budget)?;
    }
    fs::write(filled(layout), "")
}

/// Makes a base: copies the sandbox's folders into `target`, which is not there yet, without the files of `without` (`home/…` or
/// `workspace/…`). Gives the bytes of its files. Where it fails, nothing stays. Blocks.
pub fn save(layout: &Layout, target: &Path, without: &[PathBuf], most_bytes: u64, cancelled: &AtomicBool) -> io::Result<u64> {
    fs::DirBuilder::new().mode(0o700).create(target)?;
    let copy = || {
        let mut budget = Budget::new(most_bytes, MOST_ENTRIES, cancelled);
        for name in FOLDERS {
            let without = without
                .iter()
                .filter_map(|path| Some(path.strip_prefix(name).ok()?.to_owned()))
                .collect();
            fs::create_dir(target.join(name))?;
            tree::copy(&layout.folder.join(name), &target.join(name), &without, &mut budget)?;
        }
        Ok(most_bytes - budget.bytes)
    };
    copy().inspect_err(|_| {
        // What cannot be removed now is at the next start.
        let _ = layout::remove_tree(target);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a killed start leaves behind goes with it: mounts that nobody undoes end with the thread that made them.
    #[test]
    fn mounts_of_the_trial_run_are_seen_by_nobody_else() {
        let root = tempfile::tempdir().expect("a temporary folder");
        if choose(root.path()).0 == Means::Copy {
            eprintln!("skipped: no overlayfs in {}", root.path().display());
            return;
        }
        let left = root.path().join("left");
        let mounts = || fs::read_to_string("/proc/thread-self/mountinfo").expect("procfs");
        let (inside, outside) = thread::scope(|scope| {
            let inside = scope.spawn(|| {
                own_mounts().and_then(|()| try_out(&left)).expect("it worked a moment ago");
                mounts()
            });
            (inside.join().expect("no panic"), mounts())
        });
        let left = left.to_str().expect("UTF-8");
        assert!(inside.contains(left), "it is mounted there: {inside}");
        assert!(!outside.contains(left), "and nowhere else: {outside}");
        layout::remove_tree(Path::new(left)).expect("nothing is mounted there");
    }
}
