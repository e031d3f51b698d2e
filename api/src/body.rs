//! Reading request bodies: at most so large, so long, and so many at once.
//!
//! What is small is read for anybody and never waits for what is large. What is large is read only for a caller who may send it, a few at a time
//! for each organization. Bytes count as they arrive, so announcing many and sending none keeps nobody else out.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

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

    /// A place for `bytes`, after a wait if need be; what is larger than the whole budget takes all of it.
    pub(crate) async fn take(&self, bytes: usize) -> Result<OwnedSemaphorePermit, Failure> {
        let kib = in_kib(bytes).clamp(1, self.kib);
        match timeout(limits::BUDGET_WAIT, self.semaphore.clone().acquire_many_owned(kib)).await {
            Ok(Ok(permit)) => Ok(permit),
            Ok(Err(_)) | Err(_) => Err(full()),
        }
    }

    /// Makes `place` one for `bytes`, at once or not at all: were it to wait, two half-read bodies could wait for each other.
    fn grow(&self, place: &mut Option<OwnedSemaphorePermit>, bytes: usize) -> Result<(), Failure> {
        let has = place.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let missing = in_kib(bytes).saturating_sub(u32::try_from(has).unwrap_or(u32::MAX));
        let more = self.semaphore.clone().try_acquire_many_owned(missing).map_err(|_| full())?;
        match place {
            Some(place) => place.merge(more),
            None => *place = Some(more),
        }
        Ok(())
    }
}

fn in_kib(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(1 << 10)).unwrap_or(u32::MAX)
}

fn full() -> Failure {
    Failure::Unavailable("Too much is being sent at once. Try again.".into())
}

/// What all bodies share.
#[derive(Clone)]
pub(crate) struct Bodies {
    small: Budget,
    large: Budget,
    /// How many large bodies each organization is sending; one that sends none is not in it.
    sending: Arc<Mutex<HashMap<String, usize>>>,
}

impl Bodies {
    pub(crate) fn new(small: usize, large: usize) -> Bodies {
        Bodies {
            small: Budget::new(small),
            large: Budget::new(large),
            sending: Arc::default(),
        }
    }

    /// A turn to send a large body.
    fn turn(&self, organization: String) -> Result<Turn, Failure> {
        let mut sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        let count = sending.entry(organization.clone()).or_default();
        if *count >= limits::LARGE_BODIES_PER_ORGANIZATION {
            return Err(Failure::TooManyRequests(format!(
                "Your organization is sending {count} large requests already. Try again when one of them has been answered."
            )));
        }
        *count += 1;
        Ok(Turn {
            sending: self.sending.clone(),
            organization,
        })
    }
}

/// One of an organization's turns, given back when dropped.
struct Turn {
    sending: Arc<Mutex<HashMap<String, usize>>>,
    organization: String,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = sending.get_mut(&self.organization) {
            *count -= 1;
            if *count == 0 {
                sending.remove(&self.organization);
            }
        }
    }
}

/// A body in memory, with its place in the budget and its organization's turn.
pub(crate) struct Held {
    pub(crate) bytes: Bytes,
    _place: Option<OwnedSemaphorePermit>,
    _turn: Option<Turn>,
}

/// The whole body, of at most `limit` bytes. `admit` says whose it is, or why it is not read; it is asked only about a large body.
pub(crate) async fn read(
    mut body: Body,
    limit: usize,
    bodies: &Bodies,
    admit: impl Future<Output = Result<String, Failure>>,
) -> Result<Held, Failure> {
    let held = timeout(limits::BODY_DEADLINE, receive(&mut body, limit, bodies, admit)).await;
    let held = held.unwrap_or(Err(Failure::RequestTimeout));
    if held.is_err() {
        tokio::spawn(drain(body));
    }
    held
}

async fn receive(
    body: &mut Body,
    limit: usize,
    bodies: &Bodies,
    admit: impl Future<Output = Result<String, Failure>>,
) -> Result<Held, Failure> {
    let too_large = || Failure::TooLarge(format!("The body is larger than {} MiB.", limit >> 20));
    let announced = body.size_hint().exact();
    if announced.is_some_and(|length| length > limit as u64) {
        return Err(too_large());
    }
    let (mut bytes, mut place) = (BytesMut::new(), None);
    // A body of unknown length is small until it is not.
    let small = limits::SMALL_BODY.min(limit);
    if announced.is_none_or(|length| length <= small as u64) && arrived(body, &mut bytes, small, &bodies.small, &mut place).await? {
        return Ok(Held {
            bytes: bytes.freeze(),
            _place: place,
            _turn: None,
        });
    }
    if bytes.len() > limit {
        return Err(too_large());
    }
    let turn = bodies.turn(admit.await?)?;
    // From here on the bytes count as those of a large body.
    place = None;
    bodies.large.grow(&mut place, bytes.len())?;
    match arrived(body, &mut bytes, limit, &bodies.large, &mut place).await? {
        true => Ok(Held {
            bytes: bytes.freeze(),
            _place: place,
            _turn: Some(turn),
        }),
        false => Err(too_large()),
    }
}

/// Whether the body ended with at most `limit` bytes; otherwise it was left in the middle.
async fn arrived(
    body: &mut Body,
    bytes: &mut BytesMut,
    limit: usize,
    budget: &Budget,
    place: &mut Option<OwnedSemaphorePermit>,
) -> Result<bool, Failure> {
    while let Some(frame) = timeout(limits::BODY_IDLE, body.frame())
        .await
        .map_err(|_| Failure::RequestTimeout)?
    {
        let frame = frame.map_err(|_| Failure::BadRequest("The request body broke off.".into()))?;
        let Ok(data) = frame.into_data() else { continue };
        budget.grow(place, bytes.len() + data.len())?;
        bytes.extend_from_slice(&data);
        if bytes.len() > limit {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Reads on and throws away while the refusal is already on its way: a caller who still writes to a closed connection may never see it.
async fn drain(mut body: Body) {
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
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use futures::stream;

    use super::*;

    const SMALL: usize = limits::SMALL_BODY;

    fn chunked(chunks: &[usize]) -> Body {
        let chunks: Vec<_> = chunks
            .iter()
            .map(|n| Ok::<_, std::io::Error>(Bytes::from(vec![b'x'; *n])))
            .collect();
        Body::from_stream(stream::iter(chunks))
    }

    fn status(failure: &Failure) -> u16 {
        match failure {
            Failure::BadRequest(_) => 400,
            Failure::Forbidden(_) => 403,
            Failure::RequestTimeout => 408,
            Failure::TooLarge(_) => 413,
            Failure::TooManyRequests(_) => 429,
            Failure::Unavailable(_) => 503,
            other => panic!("{other:?}"),
        }
    }

    /// A body of `organization`, or of one who may not send it.
    async fn send(bodies: &Bodies, body: Body, limit: usize, organization: Option<&str>) -> Result<Held, u16> {
        let admit = async { organization.map(str::to_owned).ok_or_else(|| Failure::Forbidden("no".into())) };
        read(body, limit, bodies, admit).await.map_err(|failure| status(&failure))
    }

    async fn check(chunks: &[usize], announced: bool, limit: usize, organization: Option<&str>, expected: Result<usize, u16>) {
        let body = match announced {
            true => Body::from(vec![b'x'; chunks.iter().sum()]),
            false => chunked(chunks),
        };
        let bodies = Bodies::new(1 << 20, 1 << 20);
        let got = send(&bodies, body, limit, organization).await.map(|held| held.bytes.len());
        assert_eq!(got, expected, "{chunks:?} announced {announced} limit {limit}");
        for budget in [&bodies.small, &bodies.large] {
            assert_eq!(budget.semaphore.available_permits(), 1024, "the place is given back");
        }
        assert!(bodies.sending.lock().unwrap().is_empty(), "the turn is given back");
    }

    #[tokio::test]
    async fn bodies_are_bounded() {
        for announced in [true, false] {
            check(&[], announced, 10, None, Ok(0)).await;
            check(&[10], announced, 10, None, Ok(10)).await;
            check(&[4, 6], announced, 10, None, Ok(10)).await;
            check(&[11], announced, 10, None, Err(413)).await;
            check(&[4, 7], announced, 10, None, Err(413)).await;
            check(&[4, 7, 1_000_000], announced, 10, None, Err(413)).await;
            check(&[SMALL], announced, 1 << 19, None, Ok(SMALL)).await;
            check(&[SMALL, 1], announced, 1 << 19, None, Err(403)).await;
            check(&[SMALL, 1], announced, 1 << 19, Some("a"), Ok(SMALL + 1)).await;
            check(&[1 << 18, 1 << 18], announced, 1 << 19, Some("a"), Ok(1 << 19)).await;
            check(&[1 << 18, 1 << 18, 1], announced, 1 << 19, Some("a"), Err(413)).await;
            check(&[SMALL, (2 << 20) - SMALL], announced, 2 << 20, Some("a"), Err(503)).await;
        }
    }

    #[tokio::test]
    async fn a_broken_body_is_refused() {
        let chunks = vec![Ok(Bytes::from_static(b"half")), Err(std::io::Error::other("gone"))];
        let body = Body::from_stream(stream::iter(chunks));
        assert_eq!(send(&Bodies::new(1 << 20, 1 << 20), body, 10, None).await.err(), Some(400));
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_without_progress_or_end_has_a_deadline() {
        let bodies = Bodies::new(1 << 20, 1 << 20);
        let started = tokio::time::Instant::now();
        let stalled = Body::from_stream(stream::pending::<Result<Bytes, std::io::Error>>());
        assert_eq!(send(&bodies, stalled, 10, None).await.err(), Some(408));
        assert_eq!(started.elapsed().as_secs(), limits::BODY_IDLE.as_secs());

        let started = tokio::time::Instant::now();
        let trickle = stream::unfold((), |()| async {
            tokio::time::sleep(limits::BODY_IDLE / 2).await;
            Some((Ok::<_, std::io::Error>(Bytes::from_static(b"x")), ()))
        });
        assert_eq!(send(&bodies, Body::from_stream(trickle), 1000, None).await.err(), Some(408));
        assert_eq!(started.elapsed().as_secs(), limits::BODY_DEADLINE.as_secs());
    }

    #[tokio::test]
    async fn a_full_budget_asks_to_come_again_and_is_not_the_others_budget() {
        let bodies = Bodies::new(SMALL, 4 * SMALL);
        let large = async || send(&bodies, Body::from(vec![0; 3 * SMALL]), 1 << 20, Some("a")).await;
        let small = async || send(&bodies, Body::from(vec![0; SMALL]), 1 << 20, None).await;
        let held = (large().await.unwrap(), small().await.unwrap());
        assert_eq!(large().await.err(), Some(503));
        assert_eq!(small().await.err(), Some(503));
        drop(held.0);
        assert_eq!(small().await.err(), Some(503));
        assert!(large().await.is_ok());
        drop(held.1);
        assert!(small().await.is_ok());
    }

    #[tokio::test]
    async fn an_organization_has_so_many_turns() {
        let bodies = Bodies::new(1 << 20, 1 << 20);
        let large = async |organization| send(&bodies, Body::from(vec![0; SMALL + 1]), 1 << 20, Some(organization)).await;
        let mut held = vec![];
        for _ in 0..limits::LARGE_BODIES_PER_ORGANIZATION {
            held.push(large("a").await.unwrap());
        }
        assert_eq!(large("a").await.err(), Some(429));
        assert!(large("b").await.is_ok());
        held.pop();
        assert!(large("a").await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_place_is_waited_for_only_so_long() {
        let budget = Budget::new(4 << 10);
        let place = budget.take(1 << 20).await.unwrap();
        assert!(matches!(budget.take(1).await, Err(Failure::Unavailable(_))));
        drop(place);
        assert!(budget.take(1).await.is_ok());
    }
}
