//! The end of a sandbox: what `destroy` does beside asking the supervisor.

use std::{
    fs, io,
    os::unix::ffi::OsStrExt,
    path::Path,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal};

use crate::{
    cgroup,
    journal::{Content, Meta},
    layers,
    layout::{self, Layout},
};

/// How long a supervisor that does not answer any more may take to die after SIGKILL, or to see that its folder is gone (5 s).
const LOCK_PATIENCE: Duration = Duration::from_secs(10);
/// Rounds of looking for processes that a dead supervisor left behind; each must find one.
const STRAY_ROUNDS: usize = 200;

/// Removes everything of a sandbox. `orderly`: its supervisor has just said that all is dead and that it will exit. Blocks.
pub fn remove(layout: &Layout, boot_id: &str, orderly: bool) -> io::Result<()> {
    let journal = Content::read(&layout.journal())?;
    match journal.meta {
        Some(meta) if meta.boot_id == boot_id => {
            // One that has written down why it ended had killed everybody before.
            let orderly = orderly || journal.ended.is_some();
            let lock = wait_for_supervisor(layout, Some(&meta), orderly)?;
            if !orderly {
                kill_strays(&layout.folder)?;
            }
            cgroup::remove(&meta.cgroups)?;
            drop(lock);
        }
        Some(_) => {}
        // Half-made, or its journal was deleted, which a living supervisor sees and ends by itself.
        None => drop(wait_for_supervisor(layout, None, orderly)?),
    }
    layers::unmount(&layout.folder)?;
    // The usual case, without looking first: nothing but what we made is left.
    for folder in [layout.home(), layout.workspace(), layout.tmp()] {
        let _ = fs::remove_dir(folder);
    }
    for file in [layout.control(), layout.journal()] {
        let _ = fs::remove_file(file);
    }
    fs::remove_dir(&layout.folder).or_else(|_| layout::remove_tree(&layout.folder))
}

/// Returns when the supervisor is dead, if need be by killing it, where it is known.
fn wait_for_supervisor(layout: &Layout, meta: Option<&Meta>, orderly: bool) -> io::Result<fs::File> {
    let patience = Instant::now() + LOCK_PATIENCE;
    let mut pause = Duration::from_micros(100);
    let mut killed = false;
    loop {
        if let Some(lock) = layout::try_lock(&layout.folder)? {
            return Ok(lock);
        }
        if Instant::now() > patience {
            return Err(io::Error::other("its supervisor does not end"));
        }
        if !killed && !orderly && pause > Duration::from_millis(50) {
            // Whoever holds the lock is the process that wrote its id there.
            if let Some(pid) = meta.and_then(|m| Pid::from_raw(m.supervisor as i32)) {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            }
            killed = true;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(100));
    }
}

/// Kills processes that a killed supervisor left behind, by their working folder, environment or command line. Control groups find the rest.
fn kill_strays(folder: &Path) -> io::Result<()> {
    for _ in 0..STRAY_ROUNDS {
        let strays = strays(folder)?;
        if strays.is_empty() {
            return Ok(());
        }
        for pid in strays {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Err(io::Error::other("processes of the sandbox do not end"))
}

fn strays(folder: &Path) -> io::Result<Vec<Pid>> {
    let own = std::process::id() as i32;
    let mut mark = b"HOME=".to_vec();
    mark.extend_from_slice(folder.join("home").as_os_str().as_bytes());
    // Bubblewrap has the folders it binds on its command line.
    let bound = folder.join("workspace");
    let bound = bound.as_os_str().as_bytes();
    let is_stray = |pid: i32| {
        let proc = Path::new("/proc").join(pid.to_string());
        // Ended ones have neither, so they do not count.
        fs::read_link(proc.join("cwd")).is_ok_and(|cwd| cwd.starts_with(folder))
            || fs::read(proc.join("environ")).is_ok_and(|e| e.split(|b| *b == 0).any(|v| v == mark))
            || fs::read(proc.join("cmdline")).is_ok_and(|c| c.split(|b| *b == 0).any(|a| a == bound))
    };
    let pids = fs::read_dir("/proc")?
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
    Ok(pids.filter(|pid| *pid != own && is_stray(*pid)).filter_map(Pid::from_raw).collect())
}
