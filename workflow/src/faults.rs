//! Deliberate defects, so that the simulator can prove that it would notice them. Without the feature `faults`, which only the simulator
//! turns on, all of this is a constant `false`.

#[cfg(feature = "faults")]
use std::cell::Cell;

/// A defect that can be switched on. Each names the promise that it breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The end of a batch frees two of its organization's slots, as a counter does that is decremented twice.
    SlotReleasedTwice,
    /// A restored snapshot has forgotten the newest fencing tokens.
    TokensReused,
    /// A lease that runs out takes its sandbox out of custody.
    ExpiryForgetsCustody,
    /// A lease on an adopted sandbox does not tell what is recorded there.
    StepsDroppedOnAdoption,
    /// A snapshot does not hold the idempotency keys.
    KeysForgotten,
    /// The sandboxes of a silent worker count as destroyed, though nobody has looked.
    DestroyedUnasked,
    /// A batch ends while a trial has no verdict.
    BatchEndsEarly,
    /// After a recovery nobody counts how long a worker has been away that never came back.
    AbsenceNotCounted,
    /// A lease lives on after its attempt has ended.
    OldLeaseLives,
    /// Messages do not wait until what they tell is durable.
    ToldBeforeDurable,
    /// A lease that never reached its worker is not taken back.
    LostLeaseKept,
    /// Time follows the wall clock back.
    TimeGoesBack,
    /// An ask whose judge runner is lost is not counted, so that it is made again and again.
    LostAskNotCounted,
    /// The answer of a judge is forgotten while others are still to answer.
    AnswerForgotten,
    /// A person's reply does not become a step of its trial.
    ReplyForgotten,
    /// Judges are asked while the trial's sandbox is there.
    JudgedBesideSandbox,
    /// A judge that could not answer fails the trial.
    ErrorFailsTrial,
    /// A judge runner does not hear that the conversation it speaks in is over.
    LostConversationUntold,
    /// Trials that wait for their people take all the places that these could live in.
    NoPlaceForPeople,
}

#[cfg(feature = "faults")]
thread_local! {
    static ACTIVE: Cell<Option<Fault>> = const { Cell::new(None) };
}

/// Whether a defect is on, on this thread.
#[cfg(feature = "faults")]
pub fn active(fault: Fault) -> bool {
    ACTIVE.get() == Some(fault)
}

/// Whether a defect is on: never.
#[cfg(not(feature = "faults"))]
#[inline(always)]
pub const fn active(_: Fault) -> bool {
    false
}

/// Switches a defect on, or all off, on this thread.
#[cfg(feature = "faults")]
pub fn set(fault: Option<Fault>) {
    ACTIVE.set(fault);
}
