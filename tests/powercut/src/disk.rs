//! The disk as the test handles it: its process, the loop device over its file, the ext4 on that, and its mount.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    time::Duration,
};

use crate::{
    control::{Answer, IMAGE, Order},
    host::{self, must, run, wait_until},
    volatile::{Counts, Cut},
};

/// The disk's size: several segments of the log beside all else. Only what is written takes memory.
const MEBIBYTES: u32 = 1024;
/// The file system's journal, MiB: small, so that it wraps around and is checkpointed while the test runs.
const JOURNAL_MEBIBYTES: u32 = 4;
/// An answer of the disk. The longest order, a cut of a full cache, is a copy in memory.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
/// Until a file system, or a device, that nobody uses any more is let go by the kernel.
const RELEASE_LIMIT: Duration = Duration::from_secs(30);
/// Exit codes of e2fsck up to here: the file system is clean, or what the journal could not know was put right.
const FSCK_CORRECTED: i32 = 1;

/// See the module.
pub struct Disk {
    daemon: Child,
    orders: Option<ChildStdin>,
    answers: Receiver<Answer>,
    image: PathBuf,
    below: PathBuf,
    mount: PathBuf,
    device: Option<String>,
}

impl Disk {
    /// Makes the disk and an ext4 on it. `program` is the disk's process, `folder` one of ours.
    pub fn new(program: &Path, folder: &Path) -> Disk {
        let (below, mount) = (folder.join("below"), folder.join("disk"));
        std::fs::create_dir_all(&below).unwrap();
        std::fs::create_dir_all(&mount).unwrap();
        let mut daemon = Command::new(program)
            .arg(&below)
            .arg(MEBIBYTES.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{} could not be started: {error}", program.display()));
        let orders = daemon.stdin.take();
        let lines = BufReader::new(daemon.stdout.take().unwrap()).lines();
        let (tell, answers) = channel();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if tell.send(serde_json::from_str(&line).unwrap()).is_err() {
                    return;
                }
            }
        });
        let mut disk = Disk {
            daemon,
            orders,
            answers,
            image: below.join(IMAGE),
            below,
            mount,
            device: None,
        };
        match disk.answer() {
            Answer::Ready => {}
            other => panic!("the disk could not be mounted: {other:?}"),
        }
        let device = disk.attach();
        let journal = format!("size={JOURNAL_MEBIBYTES}");
        let extra = "nodiscard,lazy_itable_init=0,lazy_journal_init=0";
        must("mkfs.ext4", &["-q", "-b", "4096", "-E", extra, "-J", &journal, &device]);
        // What an installer leaves is durable.
        must("sync", &[&device]);
        disk.detach();
        disk
    }

    /// Where its file system is mounted.
    pub fn folder(&self) -> &Path {
        &self.mount
    }

    /// Starts as a machine does: connects the disk, lets e2fsck replay the journal, mounts.
    pub fn mount(&mut self) {
        let device = self.attach();
        let (code, text) = run("e2fsck", &["-p", &device]);
        assert!(
            code.is_some_and(|code| code <= FSCK_CORRECTED),
            "ext4 itself did not survive, so the rig is at fault ({code:?}): {text}"
        );
        must("mount", &["-t", "ext4", "-o", "noatime", &device, self.mount.to_str().unwrap()]);
    }

    /// Checks all of the file system, which is not mounted.
    pub fn check(&mut self) {
        let device = self.attach();
        let (code, text) = run("e2fsck", &["-f", "-n", &device]);
        assert_eq!(code, Some(0), "ext4 is damaged, so the rig is at fault: {text}");
        self.detach();
    }

    /// From a flush on, nothing that is written or flushed is carried out, or acknowledged: the first one after at least `flushes` more that
    /// `blocks` blocks wait for.
    pub fn freeze(&mut self, flushes: u32, blocks: usize) {
        self.order(&Order::Freeze { flushes, blocks });
    }

    /// Whoever waits for the disk gets an error, so that he can die.
    pub fn fail(&mut self) {
        self.order(&Order::Fail);
    }

    /// Loses what was not flushed; the machine that used it is off.
    pub fn cut(&mut self, seed: u64, keep: f64) -> Cut {
        self.release();
        match self.order(&Order::Cut { seed, keep }) {
            Answer::Cut(cut) => cut,
            other => panic!("the disk answered a cut with {other:?}"),
        }
    }

    /// Unmounts in good order.
    pub fn release(&mut self) {
        self.unmount();
        self.detach();
    }

    /// What happened so far.
    pub fn counts(&mut self) -> Counts {
        match self.order(&Order::Count) {
            Answer::Counted(counts) => counts,
            other => panic!("the disk answered a count with {other:?}"),
        }
    }

    fn unmount(&self) {
        let point = self.mount.to_str().unwrap();
        let mut text = String::new();
        // Busy for as long as a process that was killed is not quite gone.
        let done = wait_until(RELEASE_LIMIT, || {
            let (code, said) = run("umount", &[point]);
            text = said;
            code == Some(0)
        });
        assert!(done, "{point} is not let go: {text}");
    }

    fn attach(&mut self) -> String {
        assert!(self.device.is_none(), "the disk is connected already");
        let device = must("losetup", &["--show", "--find", self.image.to_str().unwrap()]);
        self.device = Some(device.clone());
        device
    }

    fn detach(&mut self) {
        let Some(device) = self.device.take() else { return };
        run("losetup", &["--detach", &device]);
        let free = wait_until(RELEASE_LIMIT, || {
            host::loops().iter().all(|(used, file)| *used != device || *file != self.image)
        });
        assert!(free, "{device} is not let go");
    }

    fn order(&mut self, order: &Order) -> Answer {
        let mut line = serde_json::to_string(order).unwrap();
        line.push('\n');
        let orders = self.orders.as_mut().expect("the disk is there until it is dropped");
        orders.write_all(line.as_bytes()).expect("the disk's process lives");
        self.answer()
    }

    fn answer(&self) -> Answer {
        self.answers.recv_timeout(ANSWER_LIMIT).expect("the disk answers")
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // The end of its stdin makes it fail whatever waits for it; nothing below can hang then.
        self.orders = None;
        wait_until(RELEASE_LIMIT, || self.daemon.try_wait().is_ok_and(|status| status.is_some()));
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
        run("umount", &["--lazy", self.mount.to_str().unwrap_or_default()]);
        if let Some(device) = &self.device {
            run("losetup", &["--detach", device]);
        }
        run("umount", &["--lazy", self.below.to_str().unwrap_or_default()]);
    }
}
