//! A cell as the API sees it: clients that speak to its active scheduler, and the rules for asking a second time.

use std::time::Duration;

use evalgrid_discovery::{AddressError, Routed, Schedulers, another_may_answer, broke_off, never_began};
use evalgrid_proto::v1::{auth_client::AuthClient, batches_client::BatchesClient, runner_client::RunnerClient};
use tokio::time::timeout;
use tonic::{Response, Status};

use crate::{failure::Failure, limits};

/// A call that can be made again: `call!(clients, method, request)`.
macro_rules! call {
    ($client:expr, $method:ident, $request:expr) => {
        || {
            let (mut client, request) = ($client.clone(), $request);
            async move { client.$method(request).await }
        }
    };
}
pub(crate) use call;

/// See the top of this file.
#[derive(Clone)]
pub(crate) struct Cell {
    schedulers: Schedulers,
    pub(crate) batches: BatchesClient<Routed>,
    pub(crate) auth: AuthClient<Routed>,
    pub(crate) runner: RunnerClient<Routed>,
}

impl Cell {
    pub(crate) fn new(addresses: &[String]) -> Result<Cell, AddressError> {
        let schedulers = Schedulers::new(addresses, |endpoint| {
            endpoint
                .connect_timeout(limits::CONNECT_DEADLINE)
                .http2_keep_alive_interval(limits::KEEP_ALIVE)
                .keep_alive_while_idle(true)
                .http2_adaptive_window(true)
        })?;
        Ok(Cell {
            batches: BatchesClient::new(Routed::new(schedulers.clone()))
                .max_decoding_message_size(limits::MESSAGE_FROM_SCHEDULER)
                .max_encoding_message_size(limits::MESSAGE_TO_SCHEDULER),
            runner: RunnerClient::new(Routed::new(schedulers.clone()))
                .max_decoding_message_size(limits::MESSAGE_FROM_SCHEDULER)
                .max_encoding_message_size(limits::MESSAGE_TO_SCHEDULER),
            auth: AuthClient::new(Routed::new(schedulers.clone())),
            schedulers,
        })
    }

    /// A call that changes nothing: made again where its scheduler was lost.
    pub(crate) async fn read<T, F>(&self, deadline: Duration, call: impl FnMut() -> F) -> Result<T, Failure>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        match timeout(deadline, self.twice(call)).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => Err(Failure::from_status(&status)),
            Err(_) => Err(Failure::from_status(&Status::deadline_exceeded("no answer in time"))),
        }
    }

    /// A call that changes something: made again only where it has certainly changed nothing yet.
    pub(crate) async fn write<T, F>(&self, deadline: Duration, call: impl FnMut() -> F) -> Result<T, Failure>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        match timeout(deadline, evalgrid_discovery::twice(&self.schedulers, never_began, call)).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) if broke_off(&status) && !never_began(&status) => {
                tracing::warn!(reason = status.message(), "the scheduler was lost in the middle of a change");
                Err(Failure::unknown_outcome())
            }
            Ok(Err(status)) => Err(Failure::from_status(&status)),
            Err(_) => Err(Failure::unknown_outcome()),
        }
    }

    /// As [`read`](Self::read), without a deadline.
    pub(crate) async fn twice<T, F>(&self, call: impl FnMut() -> F) -> Result<Response<T>, Status>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        evalgrid_discovery::twice(&self.schedulers, another_may_answer, call).await
    }
}
