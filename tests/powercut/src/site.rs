//! A disk and the machine on it, from one power cut to the next.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use evalgrid_tests::server::Server;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

use crate::{
    disk::Disk,
    host::Scratch,
    machine::{self, Machine},
    volatile::Cut,
};

/// How much of what was not flushed stays: nothing, some or all of it, since each is a different crash. In turn, so that few cuts see all.
const KEEP: [f64; 5] = [0.0, 0.5, 0.1, 1.0, 0.9];
/// The power goes at one of the next flushes, so that what belongs to it is under way. Three and more see the parts of a file system's commit.
const FLUSHES: std::ops::Range<u32> = 0..5;
/// How many blocks the flush must be about: most are about one or two, and a large one has more ways to break.
const BLOCKS: [usize; 4] = [1, 2, 8, 24];

/// The seed of this run: `EVALGRID_SEED`, or always the same. Printed, so that a failure can be repeated.
pub fn seed() -> u64 {
    let seed = std::env::var("EVALGRID_SEED").map_or(2026, |seed| seed.parse().expect("EVALGRID_SEED is a number"));
    println!("EVALGRID_SEED={seed}");
    seed
}

/// See the module.
pub struct Site {
    // In the order in which they must go.
    machine: Option<Machine>,
    /// The disk.
    pub disk: Disk,
    /// Decides when and how the power goes.
    pub rng: StdRng,
    /// Where the server keeps its data and where it is reached.
    pub server: Arc<Server>,
    preload: Option<PathBuf>,
    boots: u32,
    cuts: usize,
    scratch: Scratch,
}

impl Site {
    /// A mounted disk with nothing on it. `program` is the disk's process.
    pub fn new(program: &str, name: &str, seed: u64) -> Site {
        let scratch = Scratch::new(name);
        let mut disk = Disk::new(Path::new(program), &scratch.path);
        disk.mount();
        Site {
            machine: None,
            server: Arc::new(Server::new(disk.folder())),
            disk,
            rng: StdRng::seed_from_u64(seed),
            preload: None,
            boots: 0,
            cuts: 0,
            scratch,
        }
    }

    /// From the next start on, syncs do nothing.
    pub fn lie_about_syncs(&mut self) {
        self.preload = Some(machine::no_sync_library(&self.scratch.path));
    }

    /// Starts the machine with the binary in one role: its name and further arguments.
    pub fn boot(&mut self, role: &str, arguments: &[&str]) {
        self.boots += 1;
        let (data, server) = (self.server.data(), &self.server);
        let common = [role, "--data", data.to_str().unwrap(), "--grpc", &server.grpc];
        let line: Vec<String> = common.iter().chain(arguments).map(|word| (*word).to_owned()).collect();
        self.machine = Some(Machine::boot(&self.scratch.path, self.boots, &line, self.preload.as_deref()));
    }

    /// Switches the power off, and on again: the disk is mounted, nothing runs.
    pub fn cut(&mut self) -> Cut {
        let machine = self.machine.take().expect("a machine runs");
        let blocks = BLOCKS[self.rng.random_range(0..BLOCKS.len())];
        self.disk.freeze(self.rng.random_range(FLUSHES), blocks);
        let disk = &mut self.disk;
        machine.cut(|| disk.fail());
        let keep = KEEP[self.cuts % KEEP.len()];
        self.cuts += 1;
        let cut = self.disk.cut(self.rng.random(), keep);
        self.disk.mount();
        cut
    }

    /// Stops the machine in good order.
    pub fn stop(&mut self) {
        let machine = self.machine.take().expect("a machine runs");
        assert_eq!(machine.stop(), Some(0), "the server stops in good order");
    }
}
