//! Calls that find their way: a tonic transport that asks [`Schedulers`] anew for each call, and notices which answers mean that another one
//! is the active scheduler by now.

use std::{
    error::Error,
    pin::Pin,
    task::{Context, Poll},
};

use tokio::time::Instant;
use tonic::{Code, ConnectError, Status, body::Body};
use tower::{Service, ServiceExt as _};

use crate::Schedulers;

/// What a standby puts on its refusals: where the active one is, or nothing where it does not know.
const ACTIVE: &str = "evalgrid-active";

/// A transport for the generated clients, instead of a channel to one address.
#[derive(Clone, Debug)]
pub struct Routed(Schedulers);

impl Routed {
    /// To whichever of `schedulers` is the active one at each call.
    pub fn new(schedulers: Schedulers) -> Routed {
        Routed(schedulers)
    }
}

/// Nothing was heard from the scheduler that was asked, and another one is the active one now: whether it did anything is not known.
#[derive(Debug, thiserror::Error)]
#[error("another scheduler has become the active one before this one answered")]
struct Superseded;

impl Service<http::Request<Body>> for Routed {
    type Response = http::Response<Body>;
    type Error = Box<dyn Error + Send + Sync>;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        // Which connection must be ready is known with the call only.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let schedulers = self.0.clone();
        Box::pin(async move {
            let (place, channel) = schedulers.place().await.map_err(|none| Status::unavailable(none.to_string()))?;
            let began = Instant::now();
            let answer = match schedulers.are_several() {
                false => channel.oneshot(request).await,
                true => tokio::select! {
                    answer = channel.oneshot(request) => answer,
                    () = schedulers.superseded(place) => return Err(Superseded.into()),
                },
            };
            let moved = match &answer {
                Ok(response) => Status::from_header_map(response.headers()).is_some_and(|status| status.code() == Code::Unavailable),
                Err(_) => true,
            };
            if moved {
                schedulers.suspect(began);
            }
            Ok(answer?)
        })
    }
}

/// Whether a failed call certainly changed nothing: a standby refused it, or no connection could be made.
pub fn never_began(status: &Status) -> bool {
    let mut cause = status.source();
    while let Some(error) = cause {
        if error.is::<ConnectError>() {
            return true;
        }
        cause = error.source();
    }
    status.code() == Code::Unavailable && status.metadata().contains_key(ACTIVE)
}

/// Whether a failed call may fare better with another scheduler: this one says that it cannot answer, or nothing was heard from it to the end.
pub fn another_may_answer(status: &Status) -> bool {
    status.code() == Code::Unavailable || broke_off(status)
}

/// Whether the connection failed: nothing that a scheduler says itself has a cause on our side.
pub fn broke_off(status: &Status) -> bool {
    status.source().is_some()
}

/// Calls `once` and, where that failed and another scheduler may do better, a second time. `again` says whether a call that failed so may be
/// made twice: a read where [`another_may_answer`], a write where it [`never_began`].
pub async fn twice<T, F>(schedulers: &Schedulers, again: impl Fn(&Status) -> bool, mut once: impl FnMut() -> F) -> Result<T, Status>
where
    F: Future<Output = Result<T, Status>>,
{
    let began = Instant::now();
    match once().await {
        Err(status) if schedulers.are_several() && again(&status) => {
            schedulers.suspect(began);
            once().await
        }
        answer => answer,
    }
}
