//! Finding and killing every descendant of a supervisor that runs its steps without a pid namespace.
//!
//! The supervisor is a subreaper, so whoever loses his parent becomes its child: when it has no child left, nobody is left.

use std::{collections::BTreeSet, fs};

use rustix::process::{Pid, Signal};

/// Rounds of stopping before killing: each round must find a process that was born during the one before, or it is the last.
const STOP_ROUNDS: usize = 50;

/// Sends `signal` to all descendants that can be found now.
pub fn signal_descendants(signal: Signal) {
    for pid in descendants() {
        send(pid, signal);
    }
}

/// One attempt at killing all descendants: stops them first, so that they cannot start others meanwhile.
pub fn kill_descendants() {
    let mut stopped = BTreeSet::new();
    for _ in 0..STOP_ROUNDS {
        let fresh: Vec<i32> = descendants().difference(&stopped).copied().collect();
        if fresh.is_empty() {
            break;
        }
        for pid in fresh {
            send(pid, Signal::STOP);
            stopped.insert(pid);
        }
    }
    for pid in stopped {
        send(pid, Signal::KILL);
    }
}

fn send(pid: i32, signal: Signal) {
    // A pid cannot be somebody else's here: ended descendants stay zombies until their parent, in the end this process, reaps them. If the
    // parent is another descendant, it may reap in this instant; the kernel hands out pids in a circle, so the number is not used again yet.
    if let Some(pid) = Pid::from_raw(pid) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}

/// Everything below this process.
fn descendants() -> BTreeSet<i32> {
    let own = std::process::id() as i32;
    let mut found = BTreeSet::new();
    let mut open = vec![own];
    let by_children_file = fs::exists(format!("/proc/{own}/task/{own}/children")).unwrap_or(false);
    let table = if by_children_file { Vec::new() } else { parents() };
    while let Some(parent) = open.pop() {
        let children = if by_children_file {
            children_of(parent)
        } else {
            table.iter().filter(|(_, p)| *p == parent).map(|(c, _)| *c).collect()
        };
        for child in children {
            if found.insert(child) {
                open.push(child);
            }
        }
    }
    found
}

/// Children of all threads of a process, by the file that most kernels offer.
fn children_of(pid: i32) -> Vec<i32> {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return Vec::new();
    };
    let read = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("children")).unwrap_or_default();
    threads
        .flatten()
        .flat_map(|t| read(t).split_whitespace().filter_map(|c| c.parse().ok()).collect::<Vec<_>>())
        .collect()
}

/// (process, its parent) for the whole machine.
fn parents() -> Vec<(i32, i32)> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let parent = |pid: i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name in parentheses may hold anything; what follows the last one is plain: state, parent.
        stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
    };
    entries
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse().ok())
        .filter_map(|pid| Some((pid, parent(pid)?)))
        .collect()
}
