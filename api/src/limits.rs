//! Every limit of the HTTP side that the contract does not set, with its reason. The contract's own are in `evalgrid_domain::limits`.

use std::time::Duration;

use evalgrid_domain::limits::{MAX_RUNNING_BATCHES, MAX_START_BODY_BYTES};

/// Up to this a body is small: read for anybody, from a budget of its own. Whatever is not a start or a mistake fits. One above it is read only
/// for a caller whose key is known, so a stranger cannot fill memory.
pub const SMALL_BODY: usize = 64 << 10;
/// Bytes of small bodies held at once: connections over HTTP/1 run out before this does.
pub const SMALL_IN_FLIGHT: usize = CONNECTIONS * SMALL_BODY;
/// Large bodies that one organization may send at once; it may run fewer batches than that.
pub const LARGE_BODIES_PER_ORGANIZATION: usize = MAX_RUNNING_BATCHES + 1;
/// Bytes of large bodies held at once over all callers: twice what one organization can hold. A start's body is copied once more on its way to
/// the scheduler.
pub const LARGE_IN_FLIGHT: usize = 2 * LARGE_BODIES_PER_ORGANIZATION * MAX_START_BODY_BYTES;
/// How long a body may take to arrive: 64 MiB on a slow line of about 10 Mbit/s.
pub const BODY_DEADLINE: Duration = Duration::from_secs(60);
/// How long a body may bring nothing: a line that recovers from lost packets does so sooner.
pub const BODY_IDLE: Duration = Duration::from_secs(10);
/// How long a result waits for memory before the caller is asked to come again.
pub const BUDGET_WAIT: Duration = Duration::from_secs(10);
/// What is still read and thrown away of a body that was refused, so that the caller gets to read why.
pub const DRAIN_BYTES: usize = 2 * MAX_START_BODY_BYTES;
/// How long throwing away may take.
pub const DRAIN_DEADLINE: Duration = Duration::from_secs(5);
/// Longest `authorization` value passed on; keys have well under 100 characters, OAuth tokens a few thousand.
pub const AUTHORIZATION: usize = 8 << 10;

/// Until a connection to the scheduler stands.
pub const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// Pings on a caller's quiet HTTP/2 connection, so that one that died without a word is noticed.
pub const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// A cell's answer whether it knows a key: a little longer than a failover is waited for.
pub const HOME_DEADLINE: Duration = Duration::from_secs(6);
/// How long a key's cell is remembered. A cell that an organization has left says so itself; this is for one that was reset or forgotten.
pub const HOME_TTL: Duration = Duration::from_secs(60);
/// Keys whose cell is remembered, about 80 bytes each.
pub const HOMES: usize = 16_384;
/// A unary call to the scheduler; the public client gives up on reads after 30 s.
pub const CALL_DEADLINE: Duration = Duration::from_secs(25);
/// A start carries up to 64 MiB and waits for its object and its event to be durable.
pub const START_DEADLINE: Duration = Duration::from_secs(60);
/// Between two chunks of an object.
pub const CHUNK_DEADLINE: Duration = Duration::from_secs(25);
/// The largest message accepted from the scheduler: a batch of 100 trials with inline evidence stays far below.
pub const MESSAGE_FROM_SCHEDULER: usize = 64 << 20;
/// The largest message sent to the scheduler: a start's body, its key and the framing.
pub const MESSAGE_TO_SCHEDULER: usize = MAX_START_BODY_BYTES + (64 << 10);

/// Results written at once; each holds a buffer, a chunk and its batch's start request.
pub const RESULTS_IN_FLIGHT: usize = 64;
/// Bytes of start requests held at once for results that are being written.
pub const REQUESTS_IN_FLIGHT: usize = 512 << 20;
/// A decoded start request takes about this many times its bytes while it is read (the bytes, the tree, the values).
pub const REQUEST_WEIGHT: usize = 3;
/// How long a result waits for its place before the caller is asked to come again.
pub const RESULT_WAIT: Duration = Duration::from_secs(10);
/// A result is written in pieces of about this size.
pub const PIECE: usize = 64 << 10;
/// Pieces ready before the caller has taken them.
pub const PIECES_AHEAD: usize = 2;
/// A caller that takes no piece for this long is cut off.
pub const PIECE_DEADLINE: Duration = Duration::from_secs(60);

/// A whole result, so that callers who take a piece now and then do not hold every place: 6 GiB of evidence at 30 Mbit/s.
pub const RESULT_DEADLINE: Duration = Duration::from_secs(30 * 60);

/// Open connections; more wait in the listener's backlog.
pub const CONNECTIONS: usize = 4096;
/// Request line and headers, and the idle time of a kept connection.
pub const HEADER_DEADLINE: Duration = Duration::from_secs(75);
/// Requests at once on one HTTP/2 connection.
pub const STREAMS_PER_CONNECTION: u32 = 64;
/// How long open requests get to finish after shutdown was asked for.
pub const SHUTDOWN_GRACE: Duration = Duration::from_secs(10);
/// After a failed accept (such as too many open files), before the next.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
