//! For development only; nothing of the product links this. A disk whose writes stay volatile until they are flushed, a machine on it that runs
//! the real binary and whose power can be cut, and the facts that a client was told and that must still be there afterwards.
//!
//! It needs root, `/dev/fuse` and loop devices. What a power cut really leaves is imitated at the block layer, below ext4: whole 4 KiB blocks
//! that were not flushed are lost or kept by chance, and a few are torn at a sector's edge.
#![allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a rig that fails has nobody to report to but the person who runs it"
)]
#![allow(clippy::disallowed_methods, reason = "the rig measures and waits in real time")]

pub mod control;
pub mod disk;
pub mod facts;
pub mod host;
pub mod load;
pub mod log;
pub mod machine;
pub mod site;
pub mod volatile;
