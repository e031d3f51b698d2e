//! Deliberate defects: of the product, by `evalgrid_workflow::faults`, and of what the simulator stands in for.

use evalgrid_workflow::faults::{self, Fault};

/// One that is switched on for a whole run, which must then find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Defect {
    /// In the product's own code.
    Product(Fault),
    /// The store takes groups from anybody.
    NoFence,
    /// It does not compare the last position, so that records follow a hole.
    AppendedOverHole,
    /// A group whose fate is unknown is appended again without looking.
    AppendedTwice,
    /// A snapshot is saved before what it reflects is durable.
    SnapshotAhead,
    /// The log is cut before the snapshot is saved.
    CutFirst,
    /// A failover that took something away is not reported.
    LossConcealed,
    /// A sandbox's supervisor starts a step again when it is asked again.
    ProcessStartedTwice,
    /// A judge runner asks before it is on record that it does.
    AskedBeforeDurable,
    /// It asks again by itself where it does not know the answer.
    AskedAgainAtOnce,
}

impl Defect {
    /// All of them.
    pub const ALL: &[Defect] = &[
        Defect::Product(Fault::SlotReleasedTwice),
        Defect::Product(Fault::TokensReused),
        Defect::Product(Fault::ExpiryForgetsCustody),
        Defect::Product(Fault::StepsDroppedOnAdoption),
        Defect::Product(Fault::KeysForgotten),
        Defect::Product(Fault::DestroyedUnasked),
        Defect::Product(Fault::BatchEndsEarly),
        Defect::Product(Fault::AbsenceNotCounted),
        Defect::Product(Fault::OldLeaseLives),
        Defect::Product(Fault::ToldBeforeDurable),
        Defect::Product(Fault::LostLeaseKept),
        Defect::Product(Fault::TimeGoesBack),
        Defect::Product(Fault::LostAskNotCounted),
        Defect::Product(Fault::AnswerForgotten),
        Defect::Product(Fault::ReplyForgotten),
        Defect::Product(Fault::JudgedBesideSandbox),
        Defect::Product(Fault::ErrorFailsTrial),
        Defect::Product(Fault::LostConversationUntold),
        Defect::Product(Fault::NoPlaceForPeople),
        Defect::NoFence,
        Defect::AppendedOverHole,
        Defect::AppendedTwice,
        Defect::SnapshotAhead,
        Defect::CutFirst,
        Defect::LossConcealed,
        Defect::ProcessStartedTwice,
        Defect::AskedBeforeDurable,
        Defect::AskedAgainAtOnce,
    ];

    /// Switches the product's part of it on, on this thread; `None` switches all off.
    pub fn switch(defect: Option<Defect>) {
        faults::set(match defect {
            Some(Defect::Product(fault)) => Some(fault),
            _ => None,
        });
    }
}
