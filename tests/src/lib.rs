//! The rig: starts the real `evalgrid` binary, talks to it over HTTP and gRPC as a client or a worker would, and kills it.
//!
//! A failure of the rig itself ends the run with a message: there is nothing to go on with.
#![allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a rig that fails has nobody to report to but the person who runs it"
)]
#![allow(clippy::disallowed_methods, reason = "the rig measures and waits in real time")]

pub mod agents;
pub mod cell;
pub mod counter;
pub mod http;
pub mod judges;
pub mod leftovers;
pub mod server;
pub mod suite;
pub mod worker;

use std::{
    future::Future,
    time::{Duration, Instant},
};

/// Waits for a condition, looking every few milliseconds; gives up loudly.
pub async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, limit: Duration, mut look: impl FnMut() -> F) -> T {
    let end = Instant::now() + limit;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < end, "gave up after {limit:?} waiting until {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Whether the scheduler at `address` says that it is the active one.
pub async fn serves(address: &str) -> bool {
    use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}")).unwrap();
    let Ok(channel) = endpoint.connect().await else { return false };
    let answer = HealthClient::new(channel).check(HealthCheckRequest::default()).await;
    answer.is_ok_and(|answer| answer.into_inner().status() == ServingStatus::Serving)
}
