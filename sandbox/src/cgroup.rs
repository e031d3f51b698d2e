//! Control groups: what limits memory and processes of a sandbox. Version 2 where its controllers are there, else version 1, else nothing.
//!
//! Moving a process into a group makes the kernel wait for a grace period (measured: 7 to 11 ms, 0.16 ms of CPU per hierarchy), so each
//! sandbox does that exactly once, with its first process; everything else is born inside.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::{fd::OwnedFd, unix::fs::FileExt},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal};
use serde::{Deserialize, Serialize};

use crate::Limits;

/// How long emptying one group may take before it is reported instead: killed processes leave within milliseconds, unless a disk hangs.
const REMOVE_PATIENCE: Duration = Duration::from_secs(10);

/// The version 2 group that a process puts itself into, so that its former group may have sub-groups with controllers.
const ASIDE: &str = "evalgrid-executor";

/// Where groups are made. Probed once when a provider starts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Parent folder of groups with the memory controller.
    memory: Option<Parent>,
    /// Parent folder of groups with the pids controller.
    pids: Option<Parent>,
    /// Swap is counted too (version 1 has a second limit for that).
    swap: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Parent {
    folder: PathBuf,
    version: u8,
}

/// What a provider can enforce on this host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Enforcement {
    /// Memory limits hold.
    pub memory: bool,
    /// Limits on the number of processes hold.
    pub pids: bool,
    /// For people: how, or why not.
    pub description: String,
}

/// Finds out what this process may do with control groups, by trying. Warns about what will not be enforced.
pub fn probe() -> (Plan, Enforcement) {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mut plan = Plan::default();
    let mut notes = Vec::new();
    for controller in ["memory", "pids"] {
        let found = find_parent(&mounts, &own, controller)
            .ok_or_else(|| "no such controller is mounted".to_owned())
            .and_then(|parent| {
                let usable = if parent.version == 2 {
                    delegate(&parent.folder, controller)
                } else {
                    Ok(())
                };
                usable
                    .and_then(|()| try_group(&parent, controller))
                    .map(|()| parent)
                    .map_err(|e| e.to_string())
            });
        match found {
            Ok(parent) => {
                notes.push(format!(
                    "{controller} by control groups v{} in {}",
                    parent.version,
                    parent.folder.display()
                ));
                let slot = if controller == "memory" { &mut plan.memory } else { &mut plan.pids };
                *slot = Some(parent);
            }
            Err(reason) => {
                tracing::warn!(controller, reason, "sandboxes run without this limit");
                notes.push(format!("{controller} not limited ({reason})"));
            }
        }
    }
    plan.swap = fs::read_to_string("/proc/swaps").is_ok_and(|s| s.lines().count() > 1);
    let enforcement = Enforcement {
        memory: plan.memory.is_some(),
        pids: plan.pids.is_some(),
        description: notes.join("; "),
    };
    (plan, enforcement)
}

/// The folder of the group that this process is in, for `controller`.
fn find_parent(mounts: &str, own: &str, controller: &str) -> Option<Parent> {
    let mut version_two = None;
    for line in mounts.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let left: Vec<&str> = left.split(' ').collect();
        let right: Vec<&str> = right.split(' ').collect();
        let (Some(root), Some(point), Some(kind), Some(options)) = (left.get(3), left.get(4), right.first(), right.get(2)) else {
            continue;
        };
        let folder = |id: &str| {
            let path = own.lines().find_map(|l| {
                let mut fields = l.splitn(3, ':').skip(1);
                let controllers = fields.next()?;
                (controllers.split(',').any(|c| c == id)).then(|| fields.next()).flatten()
            })?;
            // In a container the mount may show only a part of the hierarchy.
            let inside = Path::new(path).strip_prefix(root).unwrap_or(Path::new(""));
            Some(Path::new(point).join(inside))
        };
        if *kind == "cgroup" && options.split(',').any(|o| o == controller) {
            return folder(controller).map(|folder| Parent { folder, version: 1 });
        }
        if *kind == "cgroup2" {
            version_two = folder("").map(|folder| Parent { folder, version: 2 });
            // Where an earlier probe stepped aside, groups still go beside it.
            if let Some(parent) = &mut version_two
                && parent.folder.ends_with(ASIDE)
            {
                parent.folder.pop();
            }
        }
    }
    version_two
        .filter(|p| fs::read_to_string(p.folder.join("cgroup.controllers")).is_ok_and(|c| c.split_whitespace().any(|c| c == controller)))
}

/// Version 2 hands a controller to sub-groups only on request, and not while the group itself holds processes: step aside if we are alone.
fn delegate(folder: &Path, controller: &str) -> io::Result<()> {
    let control = folder.join("cgroup.subtree_control");
    if fs::read_to_string(&control)?.split_whitespace().any(|c| c == controller) {
        return Ok(());
    }
    let enable = || fs::write(&control, format!("+{controller}"));
    if enable().is_ok() {
        return Ok(());
    }
    let own = std::process::id().to_string();
    if fs::read_to_string(folder.join("cgroup.procs"))?.lines().any(|pid| pid != own) {
        return Err(io::Error::other(
            "the control group holds other processes, so its controllers cannot be delegated",
        ));
    }
    let aside = folder.join(ASIDE);
    fs::create_dir_all(&aside)?;
    fs::write(aside.join("cgroup.procs"), own)?;
    enable()
}

fn try_group(parent: &Parent, controller: &str) -> io::Result<()> {
    // Two providers of one process may probe at once.
    static PROBES: AtomicU64 = AtomicU64::new(0);
    let probe = PROBES.fetch_add(1, Ordering::Relaxed);
    let folder = parent.folder.join(format!("evalgrid-probe-{}-{probe}", std::process::id()));
    fs::create_dir(&folder)?;
    let limit = folder.join(if controller == "memory" {
        memory_limit(parent.version)
    } else {
        "pids.max"
    });
    let result = OpenOptions::new().write(true).open(limit).map(drop);
    fs::remove_dir(&folder)?;
    result
}

fn memory_limit(version: u8) -> &'static str {
    if version == 2 { "memory.max" } else { "memory.limit_in_bytes" }
}

fn memory_events(version: u8) -> &'static str {
    if version == 2 { "memory.events" } else { "memory.oom_control" }
}

impl Parent {
    fn group(&self, name: &str) -> PathBuf {
        self.folder.join(format!("evalgrid-{name}.{}", std::process::id()))
    }
}

impl Plan {
    /// Whether the number of processes can be limited.
    pub fn limits_pids(&self) -> bool {
        self.pids.is_some()
    }

    /// The folders that the groups of a sandbox will have. Names are unique within a root folder only, groups on the host: the process id of
    /// the supervisor, which calls this, tells them apart.
    pub fn folders(&self, name: &str) -> Vec<PathBuf> {
        let mut folders: Vec<PathBuf> = [&self.memory, &self.pids].into_iter().flatten().map(|p| p.group(name)).collect();
        folders.dedup();
        folders
    }
}

/// The groups of one sandbox.
pub struct Group {
    folders: Vec<PathBuf>,
    /// Counts processes killed for memory.
    events: Option<File>,
    /// `pids.current` and `pids.max`, with the limit.
    pids: Option<(File, File, u32)>,
    /// Kills already reported.
    kills_seen: u64,
}

impl Group {
    /// Makes the groups and sets the limits.
    pub fn create(plan: &Plan, name: &str, limits: Limits) -> io::Result<Self> {
        let mut group = Self {
            folders: plan.folders(name),
            events: None,
            pids: None,
            kills_seen: 0,
        };
        for folder in &group.folders {
            fs::create_dir(folder)?;
        }
        if let Some(parent) = &plan.memory {
            let folder = parent.group(name);
            let bytes = limits.memory_bytes.to_string();
            fs::write(folder.join(memory_limit(parent.version)), &bytes)?;
            if plan.swap {
                let (file, value) = if parent.version == 2 {
                    ("memory.swap.max", "0")
                } else {
                    ("memory.memsw.limit_in_bytes", bytes.as_str())
                };
                match fs::write(folder.join(file), value) {
                    // Not every kernel counts swap.
                    Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                    _ => {}
                }
            }
            group.events = Some(File::open(folder.join(memory_events(parent.version)))?);
        }
        if let Some(parent) = &plan.pids {
            let folder = parent.group(name);
            let max = OpenOptions::new().write(true).open(folder.join("pids.max"))?;
            max.write_at(limits.pids.to_string().as_bytes(), 0)?;
            group.pids = Some((File::open(folder.join("pids.current"))?, max, limits.pids));
        }
        Ok(group)
    }

    /// The groups that somebody else has made around a process: nothing to join, set or remove, but there is what happened in it.
    pub fn around(process: Pid, limits: Limits) -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let mounts = read("/proc/self/mountinfo");
        let own = read(&format!("/proc/{}/cgroup", process.as_raw_nonzero()));
        let open = |parent: &Parent, file: &str| File::open(parent.folder.join(file)).ok();
        let pids = find_parent(&mounts, &own, "pids").and_then(|parent| {
            let max = OpenOptions::new().write(true).open(parent.folder.join("pids.max"));
            // Without the right to write, what is written is lost, which is fine.
            let max = max.ok().or_else(|| open(&parent, "pids.max"))?;
            Some((open(&parent, "pids.current")?, max, limits.pids))
        });
        Self {
            folders: Vec::new(),
            events: find_parent(&mounts, &own, "memory").and_then(|parent| open(&parent, memory_events(parent.version))),
            pids,
            kills_seen: 0,
        }
    }

    /// Files to write `0` to, for a process that joins.
    pub fn doors(&self) -> io::Result<Vec<OwnedFd>> {
        self.folders
            .iter()
            .map(|f| Ok(OpenOptions::new().write(true).open(f.join("cgroup.procs"))?.into()))
            .collect()
    }

    /// Moves the calling process in; what it starts from now on is born inside.
    pub fn join(&self) -> io::Result<()> {
        for door in self.doors()? {
            rustix::io::write(&door, b"0")?;
        }
        Ok(())
    }

    /// Leaves the groups, if the calling process is in them, and removes them. Best effort: `destroy` does it too, but perhaps nobody calls it.
    pub fn dissolve(&self) {
        for folder in &self.folders {
            if fs::remove_dir(folder).is_err()
                && let Some(parent) = folder.parent()
            {
                // A version 2 parent that hands out controllers takes no process; then there is the group that the executor stepped into.
                let enter = |group: &Path| fs::write(group.join("cgroup.procs"), "0");
                let _ = enter(parent)
                    .or_else(|_| enter(&parent.join(ASIDE)))
                    .and_then(|()| fs::remove_dir(folder));
            }
        }
    }

    /// Whether the kernel killed something for memory since the last call.
    pub fn out_of_memory(&mut self) -> bool {
        let Some(text) = self.events.as_ref().and_then(read_at_start) else {
            return false;
        };
        let kills = text
            .lines()
            .find_map(|l| l.strip_prefix("oom_kill "))
            .and_then(|n| n.trim().parse().ok())
            .unwrap_or(0);
        let more = kills > self.kills_seen;
        self.kills_seen = kills;
        more
    }

    /// Whether more than half of the processes that may exist do exist.
    pub fn is_crowded(&self) -> bool {
        let Some((current, _, limit)) = &self.pids else { return false };
        read_at_start(current)
            .and_then(|t| t.trim().parse::<u32>().ok())
            .is_some_and(|n| n > limit / 2)
    }

    /// While `on`, nobody inside can start a process. Without the pids controller this does nothing.
    pub fn forbid_forks(&self, on: bool) {
        if let Some((_, max, limit)) = &self.pids {
            // Best effort: it makes killing quicker, not surer.
            let _ = max.write_at(if on { 0 } else { *limit }.to_string().as_bytes(), 0);
        }
    }
}

fn read_at_start(file: &File) -> Option<String> {
    let mut buffer = [0; 1024];
    let n = file.read_at(&mut buffer, 0).ok()?;
    Some(String::from_utf8_lossy(&buffer[..n]).into_owned())
}

/// Kills whatever is in these groups and removes them. Fine when they are not there.
pub fn remove(folders: &[PathBuf]) -> io::Result<()> {
    let patience = Instant::now() + REMOVE_PATIENCE;
    for folder in folders {
        loop {
            match fs::remove_dir(folder) {
                Ok(()) => break,
                Err(e) if e.kind() == io::ErrorKind::NotFound => break,
                Err(e) if Instant::now() > patience => {
                    return Err(io::Error::new(
                        e.kind(),
                        format!("the control group {} is not empty: {e}", folder.display()),
                    ));
                }
                Err(_) => {}
            }
            for pid in fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default().lines() {
                if let Some(pid) = pid.parse().ok().and_then(Pid::from_raw) {
                    // Gone already is what we want.
                    let _ = rustix::process::kill_process(pid, Signal::KILL);
                }
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn finds_the_own_group() {
        let v1 = "31 30 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n32 30 0:28 /docker/abc /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n";
        let own = "8:pids:/docker/abc/inner\n4:memory:/service/x\n";
        for (controller, expected) in [
            ("memory", Some("/sys/fs/cgroup/memory/service/x")),
            ("pids", Some("/sys/fs/cgroup/pids/inner")),
            ("cpu", None),
        ] {
            let found = find_parent(v1, own, controller);
            assert_eq!(found.map(|p| p.folder), expected.map(PathBuf::from), "{controller}");
        }
        assert_eq!(find_parent("", "", "memory"), None);
        assert_eq!(find_parent("nonsense - \n", ":::", "memory"), None);
    }
}
