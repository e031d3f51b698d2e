//! The connection to the cell's active scheduler: one stream for leases, reports and heartbeats, for as long as it holds.

use std::{collections::VecDeque, convert::Infallible, sync::Arc, time::Duration};

use evalgrid_discovery::{Routed, Schedulers};
use evalgrid_proto::v1::{FromWorker, Heartbeat, Report, ToWorker, from_worker, to_worker::Message, workers_client::WorkersClient};
use tokio::{
    sync::mpsc,
    time::{Instant, MissedTickBehavior, interval, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Code, Request, Status, Streaming,
    metadata::{Ascii, MetadataValue},
    transport::Endpoint,
};

use crate::{Jobs, Role, Task};

/// Connecting, and each answer that a healthy scheduler gives at once. Longer than it takes to give up on finding an active one.
const ANSWER_DEADLINE: Duration = Duration::from_secs(10);
/// A TCP connection, within the above.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// Messages on their way into the stream; more wait in the outbox, where they can be grouped.
const STREAM_QUEUE: usize = 4;
/// A lease with all its recorded steps: 50 turns of at most 64 KiB each.
const MAX_MESSAGE_BYTES: usize = 16 << 20;
/// The scheduler's times are believed within these bounds.
const MILLIS: std::ops::RangeInclusive<u64> = 10..=3_600_000;

/// The scheduler's gRPC client, with the workers' token.
#[derive(Clone)]
pub struct Client {
    grpc: WorkersClient<Routed>,
    addresses: Vec<String>,
    schedulers: Schedulers,
    authorization: MetadataValue<Ascii>,
}

/// The schedulers' addresses or the token cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    /// Not `http://host:port`, or none at all.
    #[error(transparent)]
    Address(#[from] evalgrid_discovery::AddressError),
    /// It has bytes that no header may have.
    #[error("the workers' token has characters that cannot be sent")]
    Token,
}

impl Client {
    /// Connects when first used, and again whenever it must: to whichever of `addresses` is the active one then.
    pub fn new(addresses: &[String], token: &str) -> Result<Self, AddressError> {
        let tune = |endpoint: Endpoint| endpoint.connect_timeout(CONNECT_DEADLINE).tcp_nodelay(true);
        let schedulers = Schedulers::new(addresses, tune)?;
        let mut authorization: MetadataValue<Ascii> = format!("Bearer {token}").parse().map_err(|_| AddressError::Token)?;
        authorization.set_sensitive(true);
        let grpc = WorkersClient::new(Routed::new(schedulers.clone())).max_decoding_message_size(MAX_MESSAGE_BYTES);
        Ok(Self {
            grpc,
            addresses: addresses.to_vec(),
            schedulers,
            authorization,
        })
    }

    /// The schedulers', as they were given.
    pub(crate) fn addresses(&self) -> &[String] {
        &self.addresses
    }

    pub(crate) fn grpc(&self) -> WorkersClient<Routed> {
        self.grpc.clone()
    }

    /// What began at `began` has broken: its scheduler may not be the active one any more.
    pub(crate) fn suspect(&self, began: Instant) {
        self.schedulers.suspect(began);
    }

    pub(crate) fn authorized<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.metadata_mut().insert("authorization", self.authorization.clone());
        request
    }
}

/// Why a session ended. Every one is followed by another.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionEnd {
    #[error("{}", .0.message())]
    Status(#[from] Box<Status>),
    #[error("the scheduler closed the stream")]
    Closed,
    #[error("the scheduler did not answer in time")]
    Silent,
    #[error("the scheduler spoke first of something else than Welcome")]
    NoWelcome,
    #[error("the sandboxes cannot be listed, so the scheduler is not greeted: {0}")]
    Unlisted(String),
}

impl SessionEnd {
    /// The scheduler does not know the token.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, Self::Status(status) if status.code() == Code::Unauthenticated)
    }
}

impl From<Status> for SessionEnd {
    fn from(status: Status) -> Self {
        Self::Status(Box::new(status))
    }
}

impl From<tokio::time::error::Elapsed> for SessionEnd {
    fn from(_: tokio::time::error::Elapsed) -> Self {
        Self::Silent
    }
}

/// Says hello, then speaks and listens until something breaks. `welcomed` runs once the scheduler has answered.
pub(crate) async fn session<R: Role>(jobs: &Arc<Jobs<R>>, welcomed: impl FnOnce()) -> Result<Infallible, SessionEnd> {
    let worker = jobs.worker();
    let client = &worker.client;
    let sandboxes = worker.sandboxes().await.map_err(SessionEnd::Unlisted)?;
    let (to_scheduler, outgoing) = mpsc::channel(STREAM_QUEUE);
    let said_hello = Instant::now();
    let (hello, unacknowledged) = jobs.hello(sandboxes);
    // The queue is empty and the receiver alive: this cannot wait, or fail.
    let _ = to_scheduler.try_send(FromWorker {
        message: Some(from_worker::Message::Hello(hello)),
    });
    let request = client.authorized(ReceiverStream::new(outgoing));
    let mut incoming = timeout(ANSWER_DEADLINE, client.grpc().work(request)).await??.into_inner();
    let welcome = match timeout(ANSWER_DEADLINE, incoming.message())
        .await??
        .ok_or(SessionEnd::Closed)?
        .message
    {
        Some(Message::Welcome(welcome)) => welcome,
        _ => return Err(SessionEnd::NoWelcome),
    };
    let lease = millis(welcome.lease_ms);
    worker.heard(said_hello, lease);
    welcomed();
    let link = Link {
        jobs,
        to_scheduler,
        lease,
        beats: VecDeque::new(),
        beat: 0,
        resend: unacknowledged.into(),
    };
    link.run(millis(welcome.heartbeat_ms), &mut incoming).await
}

fn millis(value: u64) -> Duration {
    Duration::from_millis(value.clamp(*MILLIS.start(), *MILLIS.end()))
}

struct Link<'a, R> {
    jobs: &'a Arc<Jobs<R>>,
    to_scheduler: mpsc::Sender<FromWorker>,
    lease: Duration,
    /// Heartbeats on their way: their number and when they were sent. As many as fit into a lease, which ends the session.
    beats: VecDeque<(u64, Instant)>,
    beat: u64,
    /// Reports of an earlier session, before new ones.
    resend: VecDeque<Report>,
}

impl<R: Role> Link<'_, R> {
    async fn run(mut self, heartbeat: Duration, incoming: &mut Streaming<ToWorker>) -> Result<Infallible, SessionEnd> {
        let mut heartbeat = interval(heartbeat);
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let to_scheduler = self.to_scheduler.clone();
        let mut next = None;
        loop {
            if next.is_none() {
                next = self
                    .resend
                    .pop_front()
                    .or_else(|| self.jobs.worker().outbox.next_report())
                    .map(from_worker::Message::Report);
            }
            tokio::select! {
                message = incoming.message() => self.hear(message?.ok_or(SessionEnd::Closed)?),
                _ = heartbeat.tick() => {
                    self.beat += 1;
                    let message = from_worker::Message::Heartbeat(Heartbeat { number: self.beat });
                    // A full queue means that the scheduler does not read: then a heartbeat more would not be heard either.
                    if self.to_scheduler.try_send(FromWorker { message: Some(message) }).is_ok() {
                        self.beats.push_back((self.beat, Instant::now()));
                    }
                }
                permit = to_scheduler.reserve(), if next.is_some() => {
                    permit.map_err(|_| SessionEnd::Closed)?.send(FromWorker { message: next.take() });
                }
                () = self.jobs.worker().outbox.ready(), if next.is_none() => {}
            }
        }
    }

    fn hear(&mut self, message: ToWorker) {
        match message.message {
            Some(Message::Heartbeat(reply)) => {
                while let Some((number, sent)) = self.beats.pop_front() {
                    if number == reply.number {
                        // The lease was renewed when the scheduler heard us, which was not before we spoke.
                        self.jobs.worker().heard(sent, self.lease);
                        break;
                    }
                }
            }
            Some(Message::Lease(lease)) => self.leased(lease.token, Message::Lease(lease)),
            Some(Message::Job(job)) => self.leased(job.token, Message::Job(job)),
            Some(Message::Ack(ack)) => {
                // First those that must not take the acknowledgement for theirs.
                ack.stale.iter().for_each(|token| self.jobs.abandon(*token));
                self.jobs.worker().outbox.acknowledge(ack.number);
            }
            Some(Message::Revoke(revoke)) => self.jobs.revoke(revoke.token, &revoke.reason),
            Some(Message::Destroy(destroy)) => self.jobs.destroy(destroy.sandbox),
            // A second Welcome, or something that a newer scheduler says.
            Some(Message::Welcome(_)) | None => {}
        }
    }

    fn leased(&self, token: u64, message: Message) {
        match R::Task::of(message) {
            Some(task) => self.jobs.begin(task),
            None => {
                tracing::error!(token, "the scheduler leases something that is not for {}s", R::NAME);
                self.jobs.refuse(token, "this worker does not do that");
            }
        }
    }
}
