//! What can go wrong in the simulated world, which of it a seed stresses, and how often each has struck.

use rand::{Rng as _, rngs::StdRng};

macro_rules! troubles {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// One kind of trouble.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Trouble {
            $($(#[$doc])* $name,)*
        }

        impl Trouble {
            /// All of them, in the order of their numbers.
            pub const ALL: &[Trouble] = &[$(Trouble::$name,)*];
        }
    };
}

troubles! {
    /// A scheduler is killed at any moment.
    SchedulerKilled,
    /// It is killed before its group reaches the log.
    KilledBeforeAppend,
    /// The same, and a part of the group is there at the next start.
    GroupTorn,
    /// It is killed when its group is durable and nobody has been told.
    KilledAfterAppend,
    /// An append fails, and the group is not there.
    AppendLost,
    /// An append fails, and the group is there after all.
    AppendKept,
    /// A commit takes seconds.
    DiskStalled,
    /// A scheduler is killed when the archive is written and the snapshot is not.
    KilledBeforeSave,
    /// It is killed when the snapshot is saved and the log not cut.
    KilledBeforeCut,
    /// It is killed when a result is stored and no event names it.
    KilledWhileArchiving,
    /// What the index had not synced is gone.
    IndexBehind,
    /// The object store fails.
    ObjectsFailed,
    /// The wall clock jumps ahead by hours.
    ClockForward,
    /// The wall clock jumps back by hours.
    ClockBack,
    /// The active scheduler is stopped past its lease, and wakes up.
    SchedulerStopped,
    /// The active scheduler cannot renew its lease.
    RenewalLost,
    /// The store fails over to a replica that lags.
    FailoverLost,
    /// A connection breaks, with what is on its way.
    ConnectionLost,
    /// A worker is cut off for a while.
    Partition,
    /// An answer to a client is lost.
    ReplyLost,
    /// A client asks twice at once.
    StartRaced,
    /// An executor or a judge runner is killed.
    WorkerKilled,
    /// One of them is stopped past its leases, and wakes up.
    WorkerStopped,
    /// One of them gives its leases back and is started anew.
    WorkerReleased,
    /// A worker's machine is started anew.
    MachineRebooted,
    /// A worker stays away past the grace.
    WorkerAway,
    /// A sandbox dies under its trial, its judge or its person.
    SandboxDied,
    /// A sandbox is not made.
    CreateFailed,
    /// A sandbox is made, and its provider says that it is not.
    CreateMadeAndFailed,
    /// A sandbox is not destroyed at first.
    DestroyFailed,
    /// A worker cannot list its sandboxes.
    ListFailed,
    /// A step takes very long.
    SlowStep,
    /// A model's provider refuses.
    ModelRefused,
    /// So does that of a judge, or of a person.
    AnswererRefused,
    /// An ask ends so that nobody knows whether it was answered.
    AnswerUnclear,
    /// A judge runner is killed when it is on record that it asks, and it has not asked.
    KilledBeforeAsk,
    /// A judge runner is killed when it has an answer, and nobody else has.
    AnswerLost,
    /// Reports are sent again on a new connection.
    ReportsSentAgain,
}

/// How many kinds there are.
pub const KINDS: usize = Trouble::ALL.len();

/// The troubles of one seed. Each seed stresses its own: where all strike at once, most histories die young and look alike.
pub struct Troubles {
    on: [bool; KINDS],
    /// How often each has struck.
    pub struck: [u64; KINDS],
    over: bool,
}

impl Troubles {
    /// Chooses.
    pub fn choose(rng: &mut StdRng) -> Troubles {
        let share = [0.15, 0.4, 0.7][rng.random_range(0..3)];
        Troubles {
            on: std::array::from_fn(|_| rng.random_bool(share)),
            struck: [0; KINDS],
            over: false,
        }
    }

    /// Whether it strikes now.
    pub fn strike(&mut self, rng: &mut StdRng, trouble: Trouble, probability: f64) -> bool {
        if self.over || !self.on[trouble as usize] || !rng.random_bool(probability) {
            return false;
        }
        self.struck[trouble as usize] += 1;
        true
    }

    /// One of the given kinds that this seed stresses.
    pub fn pick(&mut self, rng: &mut StdRng, kinds: &[Trouble]) -> Option<Trouble> {
        let on: Vec<Trouble> = kinds.iter().copied().filter(|kind| !self.over && self.on[*kind as usize]).collect();
        (!on.is_empty()).then(|| on[rng.random_range(0..on.len())])
    }

    /// Counts one that has struck.
    pub fn count(&mut self, trouble: Trouble) {
        self.struck[trouble as usize] += 1;
    }

    /// From now on nothing goes wrong any more.
    pub fn end(&mut self) {
        self.over = true;
    }

    /// Whether all trouble is over.
    pub fn over(&self) -> bool {
        self.over
    }
}
