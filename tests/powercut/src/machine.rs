//! A machine whose power can be cut: processes of the real binary with all their children in namespaces of their own, under a boot id of
//! their own. When its first process is killed, the kernel kills all the others.

use std::{
    fs::{self, File},
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    process::{Child, Stdio},
    time::Duration,
};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::host::{program, run, wait_until};

/// Until all processes of a machine that was switched off are gone.
const DEATH_LIMIT: Duration = Duration::from_secs(30);
/// Until a machine that is asked to stop has stopped.
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// The first process. It ends in good order with its stdin, so that nothing survives the test. Control groups would outlive the machine, which
/// those of a real one do not; so it has none.
const FIRST_PROCESS: &str = r#"
mount --bind "$1" /proc/sys/kernel/random/boot_id && mount -t tmpfs -o ro none /sys/fs/cgroup || exit 99
shift
LD_PRELOAD=$PRELOAD "$@" < /dev/null &
while read -r; do :; done
kill -TERM $!
wait $!
"#;

/// See the module.
pub struct Machine {
    outer: Child,
    first: Option<rustix::fd::OwnedFd>,
}

impl Machine {
    /// Starts the binary with these arguments on a freshly booted machine. `folder` is one of ours; output goes to a file in it. `preload` is a
    /// library to put before libc.
    pub fn boot(folder: &Path, number: u32, arguments: &[String], preload: Option<&Path>) -> Machine {
        let boot_id = folder.join(format!("boot-id-{number}"));
        fs::write(&boot_id, format!("00000000-0000-4000-8000-{number:012}\n")).unwrap();
        let log = File::options().create(true).append(true).open(folder.join("evalgrid.log")).unwrap();
        let outer = program("unshare")
            .args([
                "--mount",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "bash",
                "-c",
                FIRST_PROCESS,
            ])
            .arg("init")
            .arg(&boot_id)
            .arg(evalgrid_tests::server::binary())
            .args(arguments)
            .env("PRELOAD", preload.unwrap_or(Path::new("")))
            .env("EVALGRID_LOG", "warn,evalgrid=info")
            .stdin(Stdio::piped())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .expect("unshare starts");
        let first = first_process(&outer);
        Machine { outer, first }
    }

    /// Kills everything; returns once nothing runs any more. What waits for the disk must have been failed, or nothing can die: `fail` is called
    /// after the blow and before the wait.
    pub fn cut(mut self, fail: impl FnOnce()) {
        self.kill();
        fail();
        let gone = wait_until(DEATH_LIMIT, || self.outer.try_wait().unwrap().is_some());
        assert!(gone, "the machine's processes do not die");
    }

    /// Stops the binary in good order; its exit code.
    pub fn stop(mut self) -> Option<i32> {
        drop(self.outer.stdin.take());
        let mut code = None;
        wait_until(STOP_LIMIT, || {
            let status = self.outer.try_wait().unwrap();
            code = status.and_then(|status| status.code());
            status.is_some()
        });
        code
    }

    fn kill(&self) {
        // Through unshare the first process would die a moment later: acknowledgements could still slip out.
        if let Some(first) = &self.first {
            let _ = pidfd_send_signal(first.as_fd(), Signal::KILL);
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.kill();
        let _ = self.outer.kill();
        wait_until(DEATH_LIMIT, || self.outer.try_wait().is_ok_and(|status| status.is_some()));
    }
}

/// The one child of `unshare`: the first process of the namespace.
fn first_process(outer: &Child) -> Option<rustix::fd::OwnedFd> {
    let children = PathBuf::from(format!("/proc/{0}/task/{0}/children", outer.id()));
    let mut found = None;
    wait_until(DEATH_LIMIT, || {
        let text = fs::read_to_string(&children).unwrap_or_default();
        let pid = text
            .split_whitespace()
            .next()
            .and_then(|pid| pid.parse().ok())
            .and_then(Pid::from_raw);
        found = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        found.is_some()
    });
    found
}

/// A library that turns every sync of a process into nothing, compiled into `folder`: with it the test must fail.
pub fn no_sync_library(folder: &Path) -> PathBuf {
    let (source, library) = (folder.join("no-sync.c"), folder.join("no-sync.so"));
    fs::write(&source, include_str!("no_sync.c")).unwrap();
    let paths = [&source, &library].map(|path| path.to_str().unwrap().to_owned());
    let (code, text) = run("cc", &["-shared", "-fPIC", "-o", &paths[1], &paths[0]]);
    assert_eq!(code, Some(0), "a C compiler is needed (package gcc): {text}");
    library
}
