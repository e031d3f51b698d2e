//! The state machine of a cell: organizations, keys, batches, trials, leases and the custody of sandboxes.
//!
//! `decide::*` look at a [`State`] and a request and answer with the events that would carry it out, or a refusal; [`State::apply`] changes
//! the state by one event. Both are pure: no I/O, no clock, no randomness, no tokio. Time comes in as `now_ms`, identifiers and jitter come
//! in as values, and `apply` takes time from events only, so production, replay and simulation run the same code.

pub mod admission;
mod apply;
mod chance;
pub mod custody;
pub mod decide;
pub mod faults;
pub mod growth;
pub mod jobs;
mod judging;
mod lease;
pub mod local;
pub mod moving;
mod queue;
pub mod retry;
mod snapshot;
pub mod state;
pub mod view;

pub use admission::{Limits, ProviderLimits};
pub use apply::ApplyError;
pub use chance::Chance;
pub use custody::{Listing, Sandbox};
pub use evalgrid_proto::log::v1::{Event, event::Kind};
pub use jobs::{Job, JobPhase, Part, Target};
pub use local::CheckIns;
pub use moving::Residence;
pub use state::{Batch, BatchPhase, Key, Lease, Organization, Phase, State, Trial, TrialKey};
