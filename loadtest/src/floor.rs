//! The physical limits: a bare synced file, and bare processes.

use std::{
    fs::{self, File},
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Instant,
};

use rand::{RngCore as _, SeedableRng as _, rngs::StdRng};

/// Records per second into a bare append-only file, `group` records of 512 bytes for each `fdatasync`: a log without any logic, whose clients
/// cost nothing.
pub fn synced_file(folder: &Path, group: usize, records: u64) -> f64 {
    let path = folder.join("floor.log");
    let mut file = File::create(&path).unwrap();
    let mut rng = StdRng::seed_from_u64(1);
    let mut bytes = vec![0; group * 512];
    let began = Instant::now();
    let groups = records.div_ceil(group as u64);
    for _ in 0..groups {
        rng.fill_bytes(&mut bytes);
        file.write_all(&bytes).unwrap();
        file.sync_data().unwrap();
    }
    let rate = (groups * group as u64) as f64 / began.elapsed().as_secs_f64();
    fs::remove_file(path).unwrap();
    rate
}

/// Trials per second of the same processes that a no-op trial starts, with nothing around them: a temporary folder, the agent, the check.
pub fn processes(folder: &Path, at_once: u32, trials: usize, run: &str, verify: &str) -> f64 {
    let next = AtomicUsize::new(0);
    let began = Instant::now();
    thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                while next.fetch_add(1, Ordering::Relaxed) < trials {
                    let workspace = tempfile::tempdir_in(folder).unwrap();
                    for command in [run, verify] {
                        let status = Command::new("bash")
                            .args(["-c", command])
                            .current_dir(workspace.path())
                            .stdin(Stdio::null())
                            .stdout(Stdio::null())
                            .stderr(Stdio::null())
                            .status()
                            .unwrap();
                        assert!(status.success());
                    }
                }
            });
        }
    });
    trials as f64 / began.elapsed().as_secs_f64()
}
