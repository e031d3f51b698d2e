//! The wire and log formats: `.proto` files and the code generated from them. No logic lives here.
#![allow(missing_docs, reason = "generated; the .proto files carry the documentation")]
#![allow(clippy::large_enum_variant, reason = "generated")]

/// Clients, workers and the scheduler.
pub mod v1 {
    tonic::include_proto!("evalgrid.v1");
}

/// What the log keeps.
pub mod log {
    /// Format level 1.
    pub mod v1 {
        tonic::include_proto!("evalgrid.log.v1");
    }
}

/// Every service's descriptor, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
