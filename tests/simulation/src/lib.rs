//! The deterministic simulator: the scheduler's own loop, its state machine and the store's log in virtual time, among faults.
//!
//! One seed is one history: same seed, same bytes in the log, on any machine. Simulated schedulers drive `evalgrid_scheduler::heart`;
//! simulated executors, judge runners and clients speak the real messages over a network that loses and delays; a checker reads the log as it grows and
//! proves the promises of the design's first section from it, together with what clients and workers were told.
//!
//! The binary `simulate` runs one seed; the tests run thousands, and prove with deliberate defects that they would be found.

mod check;
mod client;
mod defect;
mod disk;
mod duties;
mod index;
mod judge;
mod mischief;
mod models;
mod net;
mod node;
mod outbox;
mod proof;
mod sim;
mod task;
mod trial;
mod trouble;
mod worker;

use std::{
    cell::Cell,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook},
    sync::Once,
};

pub use check::Violation;
pub use defect::Defect;
pub use trouble::{KINDS, Trouble};

use crate::{check::broken, sim::Sim};

/// One seed in so many has recovery tried from every prefix of its log; the others from those behind a verdict.
const THOROUGH: u64 = 16;

/// How to run a seed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// A defect that is on.
    pub defect: Option<Defect>,
    /// Keep the newest events.
    pub trace: bool,
    /// Print every event.
    pub print: bool,
}

/// What came of a seed.
#[derive(Clone, Debug)]
pub struct Report {
    /// The seed.
    pub seed: u64,
    /// The first broken promise.
    pub violation: Option<Violation>,
    /// How often each trouble has struck.
    pub struck: [u64; KINDS],
    /// Events of the world.
    pub events: u64,
    /// Virtual time, microseconds.
    pub micros: u64,
    /// Records in the log.
    pub records: u64,
    /// A hash of the log.
    pub log_hash: u64,
    /// The newest events, where they were kept.
    pub trace: Vec<String>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "seed {}: {} events in {:.0} simulated minutes, {} records, log hash {:016x}",
            self.seed,
            self.events,
            self.micros as f64 / 6e7,
            self.records,
            self.log_hash
        )?;
        if let Some(violation) = &self.violation {
            self.trace.iter().try_for_each(|line| writeln!(f, "{line}"))?;
            writeln!(f, "seed {} breaks the promise: {}: {}", self.seed, violation.rule, violation.detail)?;
        }
        Ok(())
    }
}

thread_local! {
    static SIMULATING: Cell<bool> = const { Cell::new(false) };
}

/// A scheduler that gives itself up is a finding, told with its seed, and no noise beside that.
fn be_quiet() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |panic| {
            if !SIMULATING.get() {
                before(panic);
            }
        }));
    });
}

/// Runs one seed on this thread.
pub fn run(seed: u64, options: Options) -> Report {
    be_quiet();
    Defect::switch(options.defect);
    SIMULATING.set(true);
    let mut sim = Sim::new(seed, options.defect, options.trace, options.print);
    let lived = catch_unwind(AssertUnwindSafe(|| {
        sim.run();
        if sim.violation.is_none() {
            let proved = sim.prove(seed.is_multiple_of(THOROUGH));
            sim.check(proved);
        }
    }));
    SIMULATING.set(false);
    Defect::switch(None);
    if let Err(panic) = lived {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        sim.check::<()>(broken("the scheduler does not give itself up", text.unwrap_or_default()));
    }
    Report {
        seed,
        violation: sim.violation.take(),
        struck: sim.troubles.struck,
        events: sim.events,
        micros: sim.now,
        records: sim.disk.position(),
        log_hash: sim.disk.hash(),
        trace: sim.trace.take().into_iter().flatten().collect(),
    }
}
