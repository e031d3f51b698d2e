//! A cell as the API sees it: clients that speak to its active scheduler.

use evalgrid_discovery::{AddressError, Routed, Schedulers};
use evalgrid_proto::v1::{auth_client::AuthClient, batches_client::BatchesClient, runner_client::RunnerClient};

use crate::limits;

/// A call that can be made again, in any cell: `call!(batches, get, request)`.
macro_rules! call {
    ($client:ident, $method:ident, $request:expr) => {
        |cell: &$crate::cell::Cell| {
            let (mut client, request) = (cell.$client.clone(), $request);
            async move { client.$method(request).await }
        }
    };
}
pub(crate) use call;

/// See the top of this file.
pub(crate) struct Cell {
    pub(crate) name: String,
    pub(crate) schedulers: Schedulers,
    pub(crate) batches: BatchesClient<Routed>,
    pub(crate) auth: AuthClient<Routed>,
    pub(crate) runner: RunnerClient<Routed>,
}

impl Cell {
    pub(crate) fn new(name: &str, addresses: &[String]) -> Result<Cell, AddressError> {
        let schedulers = Schedulers::new(addresses, |endpoint| {
            endpoint.connect_timeout(limits::CONNECT_DEADLINE).http2_adaptive_window(true)
        })?;
        Ok(Cell {
            name: name.to_owned(),
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
}
