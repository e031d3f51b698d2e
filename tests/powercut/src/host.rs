//! What the rig asks of the machine that it runs on: rights, devices and programs; a folder of its own; and no traces of earlier runs.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Set to anything, it leaves the tests out on machines that cannot run them.
pub const SKIP: &str = "EVALGRID_SKIP_POWERCUT";
/// Part of the name of every folder of ours, and so of every mount and loop device.
const MARK: &str = "evalgrid-powercut-";
/// What is called. The packages are Debian's.
const PROGRAMS: &[(&str, &str)] = &[
    ("mkfs.ext4", "e2fsprogs"),
    ("e2fsck", "e2fsprogs"),
    ("losetup", "mount"),
    ("mount", "mount"),
    ("umount", "mount"),
    ("unshare", "util-linux"),
    ("sync", "coreutils"),
    ("bash", "bash"),
];
/// One call of a program. The slowest, `mkfs.ext4`, takes a tenth of a second on an idle machine.
const CALL_LIMIT: Duration = Duration::from_secs(60);
/// Between looks at something that has no way of telling.
pub(crate) const LOOK: Duration = Duration::from_millis(5);

/// Whether the tests shall be left out. Where they shall run and cannot, this ends them with what to do.
pub fn skipped() -> bool {
    if std::env::var_os(SKIP).is_some() {
        println!("left out: {SKIP} is set");
        return true;
    }
    let mut wrong = Vec::new();
    if !rustix::process::geteuid().is_root() {
        wrong.push("run as root (sudo -E cargo test …)".to_owned());
    }
    for (device, module) in [("/dev/fuse", "fuse"), ("/dev/loop-control", "loop")] {
        if !Path::new(device).exists() {
            wrong.push(format!(
                "{device} is missing: run `modprobe {module}`, or give the container that device"
            ));
        }
    }
    for (program, package) in PROGRAMS {
        if !folders().any(|folder| folder.join(program).is_file()) {
            wrong.push(format!("{program} is missing: install the package {package}"));
        }
    }
    assert!(
        wrong.is_empty(),
        "the power cut cannot be tested here:\n  {}\nor leave the test out with {SKIP}=1",
        wrong.join("\n  ")
    );
    false
}

/// Where programs are: a path without the system's folders hides `losetup` from root, too.
fn folders() -> impl Iterator<Item = PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let listed: Vec<PathBuf> = std::env::split_paths(&path).collect();
    listed
        .into_iter()
        .chain(["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from))
}

/// A program by its whole path.
pub(crate) fn program(name: &str) -> Command {
    let found = folders().map(|folder| folder.join(name)).find(|path| path.is_file());
    Command::new(found.unwrap_or_else(|| name.into()))
}

/// Runs a program to its end; its exit code, and what it printed. One that does not end in time is killed and counts as failed.
pub(crate) fn run(name: &str, arguments: &[&str]) -> (Option<i32>, String) {
    run_command(program(name).args(arguments))
}

/// The same, for a command.
pub(crate) fn run_command(command: &mut Command) -> (Option<i32>, String) {
    let out = tempfile_of_output();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(out.try_clone().unwrap())
        .stderr(out.try_clone().unwrap())
        .spawn()
        .unwrap_or_else(|error| panic!("{command:?} could not be started: {error}"));
    let end = Instant::now() + CALL_LIMIT;
    let code = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status.code(),
            None if Instant::now() < end => thread::sleep(LOOK),
            None => {
                // Not waited for: one that hangs in the kernel does not die of it.
                let _ = child.kill();
                break None;
            }
        }
    };
    (code, read_from_start(out))
}

/// Runs a program that must succeed; what it printed.
pub(crate) fn must(name: &str, arguments: &[&str]) -> String {
    let (code, text) = run(name, arguments);
    assert_eq!(code, Some(0), "{name} {arguments:?} failed: {text}");
    text.trim().to_owned()
}

/// Memory only: a pipe would have to be read while the program runs.
fn tempfile_of_output() -> File {
    rustix::fs::memfd_create("output", rustix::fs::MemfdFlags::CLOEXEC).unwrap().into()
}

fn read_from_start(mut file: File) -> String {
    use std::io::{Read as _, Seek as _};
    let mut bytes = Vec::new();
    file.rewind().and_then(|()| file.read_to_end(&mut bytes)).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A folder of ours, held by a lock for as long as the test lives. It stays where the test fails, for a person who looks into that.
pub struct Scratch {
    /// Where it is.
    pub path: PathBuf,
    _lock: File,
}

impl Scratch {
    /// Clears away what killed runs have left, and makes a folder.
    pub fn new(name: &str) -> Scratch {
        sweep();
        let path = std::env::temp_dir().join(format!("{MARK}{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        // Named once it is held: else somebody who sweeps could take it in between.
        let lock = File::create(path.join("lock.new")).unwrap();
        lock.lock().unwrap();
        fs::rename(path.join("lock.new"), path.join("lock")).unwrap();
        Scratch { path, _lock: lock }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        match thread::panicking() {
            true => println!("the logs are in {}", self.path.display()),
            false => clear(&self.path),
        }
    }
}

/// Takes away the mounts, loop devices and folders of runs that are over.
fn sweep() {
    for entry in fs::read_dir(std::env::temp_dir()).unwrap().flatten() {
        let path = entry.path();
        let ours = entry.file_name().to_string_lossy().starts_with(MARK);
        // A folder without a lock file has no mounts yet. The lock is held until all is gone.
        let Some(lock) = ours.then(|| File::open(path.join("lock")).ok()).flatten() else {
            continue;
        };
        if lock.try_lock().is_ok() {
            println!("clearing away what an earlier run left: {}", path.display());
            clear(&path);
        }
    }
}

/// Takes away all that lies in and on a folder of ours.
fn clear(folder: &Path) {
    let mounts = || -> Vec<String> {
        let all = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let points = all.lines().filter_map(|line| line.split(' ').nth(1));
        points
            .filter(|point| Path::new(point).starts_with(folder))
            .map(str::to_owned)
            .collect()
    };
    // Asked for before anything is unmounted, since the kernel then no longer knows the whole name of a device's file.
    let devices: Vec<String> = loops()
        .into_iter()
        .filter(|(_, file)| file.starts_with(folder))
        .map(|(device, _)| device)
        .collect();
    // The newest lies on top. Lazily: whatever still uses it is a process that is about to die.
    for point in mounts().iter().rev() {
        run("umount", &["--lazy", point]);
    }
    for device in devices {
        run("losetup", &["--detach", &device]);
    }
    // Never through a mount into what lies behind it.
    if mounts().is_empty()
        && let Err(error) = fs::remove_dir_all(folder)
    {
        println!("{} stays: {error}", folder.display());
    }
}

/// Loop devices in use and their files.
pub(crate) fn loops() -> Vec<(String, PathBuf)> {
    let devices = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let used = devices.filter_map(|device| {
        let file = fs::read_to_string(device.path().join("loop/backing_file")).ok()?;
        Some((format!("/dev/{}", device.file_name().display()), PathBuf::from(file.trim_end())))
    });
    used.collect()
}

/// Waits for something outside that has no way of telling; false if it does not come true in time.
pub(crate) fn wait_until(limit: Duration, mut true_now: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    loop {
        if true_now() {
            return true;
        }
        if Instant::now() > end {
            return false;
        }
        thread::sleep(LOOK);
    }
}
