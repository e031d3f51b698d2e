//! The right to act as the owner of a cell: a lease in Redis, renewed by a thread of its own on a connection of its own.
//!
//! The lease only says who may try. What protects the log is the fence in every script: an owner that lost its lease and does not
//! know it yet writes nothing once another has taken over.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use tokio::sync::watch;

use super::clock;
use super::entry::Writer;
use super::error::RedisError;
use super::link::{CALL_WITHIN, Endpoint, Link};
use super::scripts::{RELEASE, RENEW};
use super::value;

/// Renewals per lease: two may get lost.
const RENEWALS: u32 = 5;
/// What an owner gives up of its lease, as a part of it: clocks of two machines do not run at quite the same speed, and a reply takes
/// its time.
const MARGIN: u32 = 8;
/// After a renewal without an answer the next one follows soon, while there is time.
const RETRY_AFTER: Duration = Duration::from_millis(50);

/// The right to act as owner. Ends by itself. Clones are the same right; when the last one is dropped, renewal ends.
#[derive(Clone)]
pub struct Tenure {
    handle: Arc<Handle>,
}

struct Handle {
    shared: Arc<Shared>,
    endpoint: Arc<Endpoint>,
    writer: Writer,
    /// Ends the renewing thread when it is dropped.
    _stop: Sender<()>,
}

/// What the thread knows, too.
struct Shared {
    /// Up to when it holds, in nanoseconds of the clock; 0 once it is lost for good.
    until: AtomicU64,
    /// The last position that was acknowledged: a log that ends before it has lost something.
    acknowledged: AtomicU64,
    history: Mutex<String>,
    lost: watch::Sender<Option<String>>,
}

impl Shared {
    /// Extends it, unless it is lost already: that is for ever.
    fn extend(&self, until: Duration) {
        let nanos = u64::try_from(until.as_nanos()).unwrap_or(u64::MAX);
        let _ = self
            .until
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| (old > 0).then_some(nanos));
    }

    fn left(&self) -> Option<Duration> {
        let until = Duration::from_nanos(self.until.load(Ordering::Acquire));
        until.checked_sub(clock::now()).filter(|left| !left.is_zero())
    }

    fn lose(&self, reason: String) {
        self.until.store(0, Ordering::Release);
        self.lost.send_if_modified(|lost| {
            let first = lost.is_none();
            lost.get_or_insert(reason);
            first
        });
    }
}

impl Tenure {
    /// Begins to renew a lease that was asked for at `asked`.
    pub(super) fn begin(
        endpoint: &Arc<Endpoint>,
        writer: Writer,
        asked: Duration,
        position: u64,
        history: String,
    ) -> Result<Tenure, RedisError> {
        let lease = endpoint.options.lease;
        let shared = Arc::new(Shared {
            until: AtomicU64::new(1),
            acknowledged: AtomicU64::new(position),
            history: Mutex::new(history),
            lost: watch::Sender::new(None),
        });
        shared.extend(asked + lease - lease / MARGIN);
        let (stop, stopped) = channel::<()>();
        let renewer = Renewer {
            shared: Arc::clone(&shared),
            link: Link::new(Arc::clone(endpoint)),
            token: writer.token(),
            lease,
        };
        thread::Builder::new()
            .name("redis-lease".to_owned())
            .spawn(move || renewer.run(|wait| matches!(stopped.recv_timeout(wait), Err(RecvTimeoutError::Timeout))))
            .map_err(|error| RedisError::Connection {
                node: "this process".to_owned(),
                reason: format!("the thread that renews the lease could not be started: {error}"),
            })?;
        Ok(Tenure {
            handle: Arc::new(Handle {
                shared,
                endpoint: Arc::clone(endpoint),
                writer,
                _stop: stop,
            }),
        })
    }

    /// Whether it holds now: by the moment the last confirmed renewal was sent, the lease, and a margin.
    pub fn holds(&self) -> bool {
        self.handle.shared.left().is_some()
    }

    /// Becomes `Some(why)` once it is lost. It may have ceased to hold a moment earlier.
    pub fn lost(&self) -> watch::Receiver<Option<String>> {
        self.handle.shared.lost.subscribe()
    }

    /// The epoch: higher with each owner.
    pub fn epoch(&self) -> u64 {
        self.handle.writer.epoch
    }

    /// Hands over: gives up the lease, so that another can take the cell at once.
    pub fn release(&self) -> Result<(), RedisError> {
        self.lose("it was handed over".to_owned());
        let mut link = Link::new(Arc::clone(&self.handle.endpoint));
        let lease = link.keys().lease.clone();
        let token = self.handle.writer.token();
        link.script_alone(&RELEASE, &[&lease], &[token.as_bytes()], CALL_WITHIN)?;
        Ok(())
    }

    pub(super) fn lose(&self, reason: String) {
        self.handle.shared.lose(reason);
    }

    pub(super) fn writer(&self) -> &Writer {
        &self.handle.writer
    }

    pub(super) fn acknowledged(&self, position: u64) {
        self.handle.shared.acknowledged.store(position, Ordering::Release);
    }

    pub(super) fn history(&self) -> String {
        self.handle.shared.history.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

struct Renewer {
    shared: Arc<Shared>,
    link: Link,
    token: String,
    lease: Duration,
}

impl Renewer {
    /// Renews until the tenure ends or `wait` says that nobody needs it any more.
    fn run(mut self, wait: impl Fn(Duration) -> bool) {
        let (mut pause, mut failing) = (self.lease / RENEWALS, false);
        while wait(pause) {
            let Some(left) = self.shared.left() else {
                self.shared.lose("no renewal reached Redis in time".to_owned());
                return;
            };
            pause = match self.renew(left) {
                Ok(None) => {
                    failing = false;
                    self.lease / RENEWALS
                }
                Ok(Some(reason)) => return self.shared.lose(reason),
                Err(error) => {
                    if !failing {
                        tracing::warn!(%error, "the lease was not renewed; trying on");
                    }
                    failing = true;
                    RETRY_AFTER
                }
            };
            // Never sleeps past the moment at which it must say that it is over.
            pause = self.shared.left().map_or(pause, |left| pause.min(left + Duration::from_millis(1)));
        }
    }

    /// One renewal; why the tenure is over, if it is.
    fn renew(&mut self, left: Duration) -> Result<Option<String>, RedisError> {
        let acknowledged = self.shared.acknowledged.load(Ordering::Acquire);
        let (owner, lease) = (self.link.keys().owner.clone(), self.link.keys().lease.clone());
        let milliseconds = self.lease.as_millis().to_string();
        let asked = clock::now();
        let answer = self
            .link
            .script_alone(&RENEW, &[&owner, &lease], &[self.token.as_bytes(), milliseconds.as_bytes()], left)?;
        let (position, history) = match value::items(&answer) {
            Some([_]) => return Ok(Some("its lease in Redis is gone".to_owned())),
            Some([_, position, history]) => (value::number(position), value::text(history)),
            _ => (None, None),
        };
        let (Some(position), Some(history)) = (position, history) else {
            return Err(self.link.unknown("a renewal"));
        };
        if position < acknowledged {
            return Ok(Some(format!(
                "the log ends at position {position}, but {acknowledged} was acknowledged"
            )));
        }
        history.clone_into(&mut self.shared.history.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.extend(asked + self.lease - self.lease / MARGIN);
        Ok(None)
    }
}
