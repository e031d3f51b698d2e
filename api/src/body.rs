//! Reading request bodies: at most so large, so long, and so many at once.

use std::sync::Arc;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt as _;
use hyper::body::Body as _;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use crate::{failure::Failure, limits};

/// Bytes shared out among those who need memory at the same time. Counted in KiB.
#[derive(Clone)]
pub(crate) struct Budget {
    semaphore: Arc<Semaphore>,
    kib: u32,
}

impl Budget {
    pub(crate) fn new(bytes: usize) -> Budget {
        let kib = u32::try_from(bytes >> 10).unwrap_or(u32::MAX);
        Budget {
            semaphore: Arc::new(Semaphore::new(kib as usize)),
            kib,
        }
    }

    /// A place for `bytes`; what is larger than the whole budget takes all of it.
    pub(crate) async fn take(&self, bytes: usize) -> Result<OwnedSemaphorePermit, Failure> {
        let kib = u32::try_from(bytes.div_ceil(1 << 10)).unwrap_or(u32::MAX).clamp(1, self.kib);
        match timeout(limits::BUDGET_WAIT, self.semaphore.clone().acquire_many_owned(kib)).await {
            Ok(Ok(permit)) => Ok(permit),
            Ok(Err(_)) | Err(_) => Err(Failure::Unavailable("Too much is being sent at once. Try again.".into())),
        }
    }
}

/// A body in memory, with its place in the budget.
pub(crate) struct Held {
    pub(crate) bytes: Bytes,
    _place: OwnedSemaphorePermit,
}

/// The length that the request announces, if it does.
pub(crate) fn announced(body: &Body) -> Option<usize> {
    body.size_hint().exact().map(|length| usize::try_from(length).unwrap_or(usize::MAX))
}

/// The whole body, of at most `limit` bytes.
pub(crate) async fn read(mut body: Body, limit: usize, budget: &Budget) -> Result<Held, Failure> {
    let announced = announced(&body);
    if announced.is_some_and(|length| length > limit) {
        return Err(too_large(body, limit).await);
    }
    // A body of unknown length takes the place of the largest one: growing its place later could leave two half-read bodies waiting for each other.
    let place = budget.take(announced.unwrap_or(limit)).await?;
    let mut bytes = BytesMut::with_capacity(announced.unwrap_or(0));
    let reading = async {
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| Failure::BadRequest("The request body broke off.".into()))?;
            let Ok(data) = frame.into_data() else { continue };
            if bytes.len() + data.len() > limit {
                return Ok(false);
            }
            bytes.extend_from_slice(&data);
        }
        Ok(true)
    };
    match timeout(limits::BODY_DEADLINE, reading).await {
        Ok(Ok(true)) => Ok(Held {
            bytes: bytes.freeze(),
            _place: place,
        }),
        Ok(Ok(false)) => {
            drop((bytes, place));
            Err(too_large(body, limit).await)
        }
        Ok(Err(failure)) => Err(failure),
        Err(_) => Err(Failure::RequestTimeout),
    }
}

/// The refusal, after the caller was given a chance to finish sending: one that still writes would not read the answer.
async fn too_large(mut body: Body, limit: usize) -> Failure {
    let drain = async {
        let mut rest = limits::DRAIN_BYTES;
        while let Some(Ok(frame)) = body.frame().await {
            let length = frame.data_ref().map_or(0, Bytes::len);
            match rest.checked_sub(length) {
                Some(left) => rest = left,
                None => break,
            }
        }
    };
    // Whether all of it was read or not, the answer is the same.
    let _ = timeout(limits::DRAIN_DEADLINE, drain).await;
    Failure::TooLarge(format!("The body is larger than {} MiB.", limit >> 20))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use futures::stream;

    use super::*;

    async fn check(chunks: &[usize], announced: bool, limit: usize, expected: Result<usize, u16>) {
        let body = match announced {
            true => Body::from(vec![b'x'; chunks.iter().sum()]),
            false => {
                let chunks: Vec<_> = chunks
                    .iter()
                    .map(|n| Ok::<_, std::io::Error>(Bytes::from(vec![b'x'; *n])))
                    .collect();
                Body::from_stream(stream::iter(chunks))
            }
        };
        let budget = Budget::new(1 << 20);
        let got = match read(body, limit, &budget).await {
            Ok(held) => Ok(held.bytes.len()),
            Err(Failure::TooLarge(_)) => Err(413),
            Err(_) => Err(400),
        };
        assert_eq!(got, expected, "{chunks:?} announced {announced} limit {limit}");
        assert_eq!(budget.semaphore.available_permits(), 1024, "the place is given back");
    }

    #[tokio::test]
    async fn bodies_are_bounded() {
        for announced in [true, false] {
            check(&[], announced, 10, Ok(0)).await;
            check(&[10], announced, 10, Ok(10)).await;
            check(&[4, 6], announced, 10, Ok(10)).await;
            check(&[11], announced, 10, Err(413)).await;
            check(&[4, 7], announced, 10, Err(413)).await;
            check(&[4, 7, 1_000_000], announced, 10, Err(413)).await;
        }
    }

    #[tokio::test]
    async fn a_broken_body_is_refused() {
        let chunks = vec![Ok(Bytes::from_static(b"half")), Err(std::io::Error::other("gone"))];
        let got = read(Body::from_stream(stream::iter(chunks)), 10, &Budget::new(1 << 20)).await;
        assert!(matches!(got, Err(Failure::BadRequest(_))));
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_never_ends_has_a_deadline() {
        let got = read(
            Body::from_stream(stream::pending::<Result<Bytes, std::io::Error>>()),
            10,
            &Budget::new(1 << 20),
        )
        .await;
        assert!(matches!(got, Err(Failure::RequestTimeout)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_budget_asks_to_come_again() {
        let budget = Budget::new(4 << 10);
        let held = read(Body::from(vec![0; 4096]), 8192, &budget).await.unwrap();
        assert!(matches!(read(Body::from("x"), 10, &budget).await, Err(Failure::Unavailable(_))));
        drop(held);
        assert!(read(Body::from("x"), 10, &budget).await.is_ok());
    }
}
