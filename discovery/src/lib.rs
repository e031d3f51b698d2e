//! Which scheduler of a cell is the active one. Whoever speaks to a cell is given the addresses of all its schedulers; exactly one of them
//! serves, and after a failover another. [`Schedulers`] finds it, [`Routed`] sends each call there.
//!
//! A standby may say where it believes the active one to be. That is not followed: asking all of the given addresses at once costs the same
//! round trip, and nobody can send a caller and its key to a stranger.

mod routed;

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::{StreamExt as _, stream::FuturesUnordered};
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until, timeout},
};
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};

pub use routed::{Routed, another_may_answer, broke_off, never_began, twice};

/// How long a caller waits until there is an active scheduler: a failover takes 3 s, and a caller that waits is better off than one that
/// comes back.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// One scheduler's answer about its health. A busy one answers in milliseconds; one that is gone must not keep us from the others.
const ANSWER_DEADLINE: Duration = Duration::from_secs(1);
/// A call without an answer for this long is a reason to ask whether its scheduler is still the active one: a process that is stopped keeps its
/// connections, and nothing else tells for a long while. Nearly every answer takes less.
const SLOW: Duration = Duration::from_secs(2);
/// Between two questions to the same scheduler, by chance within these milliseconds: short enough to find a new active one at once, and spread
/// so that everybody who lost the old one does not ask in the same instant.
const PAUSE_MS: std::ops::RangeInclusive<u64> = 50..=250;
/// A quiet connection is asked this often whether it still lives: idle ones die in NATs after a minute, and a machine that is gone says nothing.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// How long the other side may take to answer that.
const KEEP_ALIVE_DEADLINE: Duration = Duration::from_secs(10);
/// A cell has one active scheduler and a few standbys; a longer list is a mistake.
const MAX_ADDRESSES: usize = 16;

/// The list of addresses cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// Not `http://host:port`.
    #[error("{0:?} is no address of a scheduler (expected http://host:port)")]
    Invalid(String),
    /// There is none.
    #[error("no address of a scheduler is given (expected http://host:port, or several with commas between)")]
    None,
    /// More than a cell can have.
    #[error("{0} addresses of schedulers are given, more than the {MAX_ADDRESSES} that a cell may have")]
    TooMany(usize),
}

/// No scheduler of the cell was the active one for as long as the caller waited.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no scheduler of this cell is the active one: {0}")]
pub struct NoActive(String);

/// The schedulers of one cell. Clones share what they know.
#[derive(Clone)]
pub struct Schedulers(Arc<Inner>);

struct Inner {
    places: Vec<Place>,
    known: watch::Sender<Known>,
}

struct Place {
    address: String,
    endpoint: Endpoint,
    channel: Mutex<Channel>,
    seen: Mutex<Seen>,
}

/// What a scheduler answered last.
#[derive(Clone, Copy)]
enum Seen {
    NotAsked,
    Silent,
    Unreachable,
    Standby,
    Active,
}

#[derive(Clone, Copy, Default)]
struct Known {
    /// Which place serves, and when it said so.
    active: Option<(usize, Instant)>,
    /// Somebody is looking.
    looking: bool,
    /// When the last look ended.
    looked: Option<Instant>,
}

impl fmt::Debug for Schedulers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.addresses()).finish()
    }
}

impl Schedulers {
    /// `addresses` are `http://host:port`; one that is named twice counts once. `tune` sets what the caller wants of its connections; they are
    /// made when first used. Must be called within a tokio runtime.
    pub fn new<A: AsRef<str>>(addresses: &[A], tune: impl Fn(Endpoint) -> Endpoint) -> Result<Schedulers, AddressError> {
        let mut places: Vec<Place> = Vec::new();
        for address in addresses.iter().map(|address| address.as_ref().trim()) {
            if places.iter().any(|place| place.address == address) {
                continue;
            }
            let endpoint = tune(endpoint(address)?);
            places.push(Place {
                address: address.to_owned(),
                channel: Mutex::new(endpoint.connect_lazy()),
                endpoint,
                seen: Mutex::new(Seen::NotAsked),
            });
        }
        match places.len() {
            0 => Err(AddressError::None),
            count if count > MAX_ADDRESSES => Err(AddressError::TooMany(count)),
            _ => Ok(Schedulers(Arc::new(Inner {
                places,
                known: watch::Sender::default(),
            }))),
        }
    }

    /// As they were given.
    pub fn addresses(&self) -> impl Iterator<Item = &str> {
        self.0.places.iter().map(|place| place.address.as_str())
    }

    /// Whether there is a choice. Where there is none, nothing is ever looked for: the only scheduler is taken for the active one.
    pub fn are_several(&self) -> bool {
        self.0.places.len() > 1
    }

    /// A connection to the active scheduler: the one known, as long as nobody has called it [`suspect`](Self::suspect), else the one that says
    /// that it serves. Waits for one at most [`PATIENCE`].
    pub async fn active(&self) -> Result<Channel, NoActive> {
        self.place().await.map(|(_, channel)| channel)
    }

    /// As [`active`](Self::active), and which of the places it is.
    async fn place(&self) -> Result<(usize, Channel), NoActive> {
        if let [only] = self.0.places.as_slice() {
            return Ok((0, only.channel()));
        }
        if let Some(active) = self.known_active() {
            return Ok(active);
        }
        timeout(PATIENCE, self.found()).await.map_err(|_| NoActive(self.0.seen()))
    }

    /// Returns when another scheduler than that of `place` has become the active one, as far as a call that waits for its answer has to know.
    async fn superseded(&self, place: usize) {
        loop {
            let began = Instant::now();
            sleep(SLOW).await;
            self.suspect(began);
            // All who wait share one look. Where nobody serves, the scheduler that was asked may still answer.
            if self.place().await.is_ok_and(|(active, _)| active != place) {
                return;
            }
        }
    }

    /// A call that began at `began` has failed in a way that its scheduler may not be the active one any more: the next one looks again. What
    /// was found since then is not what failed.
    pub fn suspect(&self, began: Instant) {
        self.0.known.send_if_modified(|known| {
            let stale = known.active.is_some_and(|(_, found)| found <= began);
            if stale {
                known.active = None;
            }
            stale
        });
    }

    fn known_active(&self) -> Option<(usize, Channel)> {
        let (index, _) = self.0.known.borrow().active?;
        Some((index, self.0.places.get(index)?.channel()))
    }

    async fn found(&self) -> (usize, Channel) {
        let mut known = self.0.known.subscribe();
        loop {
            self.begin_to_look();
            // The sender lives as long as we do.
            let _ = known.wait_for(|known| known.active.is_some() || !known.looking).await;
            if let Some(active) = self.known_active() {
                return active;
            }
        }
    }

    /// One look serves all who wait, and ends when nobody does.
    fn begin_to_look(&self) {
        let begins = self.0.known.send_if_modified(|known| {
            let begins = known.active.is_none() && !known.looking;
            known.looking |= begins;
            begins
        });
        if begins {
            tokio::spawn(self.0.clone().look());
        }
    }
}

/// An address, checked.
fn endpoint(address: &str) -> Result<Endpoint, AddressError> {
    let invalid = || AddressError::Invalid(address.to_owned());
    let endpoint = Endpoint::from_shared(address.to_owned()).map_err(|_| invalid())?;
    // Here, so that nobody who speaks to a scheduler can leave it out.
    let endpoint = endpoint
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE_DEADLINE)
        .keep_alive_while_idle(true);
    let uri = endpoint.uri();
    match uri.scheme_str() == Some("http") && uri.host().is_some_and(|host| !host.is_empty()) {
        true => Ok(endpoint),
        false => Err(invalid()),
    }
}

impl Inner {
    async fn look(self: Arc<Self>) {
        let active = tokio::select! {
            active = self.serving() => Some((active, Instant::now())),
            () = self.known.closed() => None,
        };
        self.known.send_modify(|known| {
            *known = Known {
                active,
                looking: false,
                looked: Some(Instant::now()),
            };
        });
    }

    /// Asks all at once, each again and again, until one of them serves.
    async fn serving(&self) -> usize {
        let looked = self.known.borrow().looked;
        if let Some(looked) = looked {
            sleep_until(looked + pause()).await;
        }
        let mut asked: FuturesUnordered<_> = (0..self.places.len()).map(|index| self.place_serves(index)).collect();
        match asked.next().await {
            Some(index) => index,
            // There are at least two places, and each of them is asked until it serves.
            None => std::future::pending().await,
        }
    }

    async fn place_serves(&self, index: usize) -> usize {
        let Some(place) = self.places.get(index) else {
            return std::future::pending().await;
        };
        while !place.serves().await {
            sleep(pause()).await;
        }
        index
    }

    fn seen(&self) -> String {
        let told = self.places.iter().map(|place| {
            let seen = match *place.seen.lock().unwrap_or_else(PoisonError::into_inner) {
                Seen::NotAsked => "was not asked",
                Seen::Silent => "does not answer",
                Seen::Unreachable => "cannot be reached",
                Seen::Standby => "is a standby",
                Seen::Active => "has just become it",
            };
            format!("{} {seen}", place.address)
        });
        told.collect::<Vec<_>>().join(", ")
    }
}

impl Place {
    fn channel(&self) -> Channel {
        self.channel.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn serves(&self) -> bool {
        let mut health = HealthClient::new(self.channel());
        let answer = timeout(ANSWER_DEADLINE, health.check(HealthCheckRequest::default())).await;
        let seen = match answer {
            Ok(Ok(answer)) if answer.get_ref().status() == ServingStatus::Serving => Seen::Active,
            Ok(Ok(_)) => Seen::Standby,
            Ok(Err(_)) => Seen::Unreachable,
            Err(_) => Seen::Silent,
        };
        if matches!(seen, Seen::Silent) {
            // Its connection may lead to a machine that is gone; one that has come back is found by a new one only.
            *self.channel.lock().unwrap_or_else(PoisonError::into_inner) = self.endpoint.connect_lazy();
        }
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = seen;
        matches!(seen, Seen::Active)
    }
}

fn pause() -> Duration {
    Duration::from_millis(rand::random_range(PAUSE_MS))
}
