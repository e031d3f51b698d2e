//! One connection to the server that holds the cell: found, checked, and used with a deadline on everything.
//!
//! All keys of a cell are in one slot, so even in a cluster one plain connection to one server is all that is needed. The crate's own
//! cluster and sentinel clients are not used: they retry on their own, beneath our deadlines, and `WAIT` counts only what its very
//! connection has written.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rand::seq::SliceRandom;
use redis::io::tcp::TcpSettings;
use redis::{Cmd, Connection, ConnectionAddr, ErrorKind, IntoConnectionInfo, RedisConnectionInfo, Value, cmd};

use super::clock::{self, Deadline};
use super::durability::{self, Durability};
use super::entry::Keys;
use super::error::{RedisError, accepted};
use super::scripts::Script;
use super::url::{Node, RedisUrl, Topology};
use super::{RedisOptions, value};

/// Finding a server and logging in, at most: a living one in the same data centre takes milliseconds.
pub(super) const CONNECT_WITHIN: Duration = Duration::from_secs(1);
/// What the sentinels get to answer; whoever has not by then is not waited for.
const SENTINELS_WITHIN: Duration = Duration::from_millis(500);
/// One call, at most, beside what it waits for on purpose: a disk that stalls a sync for longer is as good as gone.
pub(super) const CALL_WITHIN: Duration = Duration::from_secs(2);

/// What all connections of one store share.
pub(super) struct Endpoint {
    pub(super) url: RedisUrl,
    pub(super) keys: Keys,
    pub(super) options: RedisOptions,
    /// The server whose settings were examined, by its run id: any other is examined before it is used.
    examined: Mutex<Option<(String, Durability)>>,
}

impl Endpoint {
    pub(super) fn new(url: RedisUrl, cell: &str, options: RedisOptions) -> Endpoint {
        Endpoint {
            url,
            keys: Keys::new(cell),
            options,
            examined: Mutex::new(None),
        }
    }

    /// What the server that was examined last gives.
    pub(super) fn durability(&self) -> Option<Durability> {
        let examined = self.examined.lock().unwrap_or_else(PoisonError::into_inner);
        examined.as_ref().map(|(_, durability)| durability.clone())
    }
}

/// A connection that is made when it is needed, and anew after it broke. Makes no second attempt by itself.
pub(super) struct Link {
    endpoint: Arc<Endpoint>,
    live: Option<Live>,
    /// Where a server told us to go instead.
    moved_to: Option<Node>,
}

struct Live {
    connection: Connection,
    node: Node,
}

impl Link {
    pub(super) fn new(endpoint: Arc<Endpoint>) -> Link {
        Link {
            endpoint,
            live: None,
            moved_to: None,
        }
    }

    pub(super) fn keys(&self) -> &Keys {
        &self.endpoint.keys
    }

    /// Where it is connected to, for messages.
    pub(super) fn node(&self) -> String {
        self.live
            .as_ref()
            .map_or_else(|| self.endpoint.url.to_string(), |live| live.node.to_string())
    }

    /// Makes the connection, if there is none.
    pub(super) fn connect(&mut self, within: Duration) -> Result<(), RedisError> {
        if self.live.is_some() {
            return Ok(());
        }
        let deadline = Deadline::after(within.min(CONNECT_WITHIN));
        let mut live = self.find(deadline)?;
        let answers = live.call(&[cmd("ROLE"), cmd("INFO").arg("server").clone()], deadline)?;
        let [role, info] = answers.as_slice() else {
            return Err(live.unknown("ROLE"));
        };
        check_role(&live.node.to_string(), role)?;
        let info = value::text(info).ok_or_else(|| live.unknown("INFO"))?;
        let run_id = durability::info_field(info, "run_id").unwrap_or_default().to_owned();
        let known = {
            let examined = self.endpoint.examined.lock().unwrap_or_else(PoisonError::into_inner);
            examined.as_ref().is_some_and(|(id, _)| *id == run_id)
        };
        if !known {
            let node = live.node.to_string();
            let found = durability::examine(&node, &self.endpoint.options, &mut |commands| live.call_each(commands, deadline))?;
            let mut examined = self.endpoint.examined.lock().unwrap_or_else(PoisonError::into_inner);
            *examined = Some((run_id, found));
        }
        self.live = Some(live);
        Ok(())
    }

    /// Sends the commands in one go and takes their answers. After an error of the connection, nobody knows what was done.
    pub(super) fn call(&mut self, commands: &[Cmd], within: Duration) -> Result<Vec<Value>, RedisError> {
        let deadline = Deadline::after(within);
        self.connect(within)?;
        let Some(live) = &mut self.live else {
            return Err(RedisError::NoMaster {
                reason: "there is no connection".to_owned(),
            });
        };
        let result = live.call(commands, deadline);
        if let Err(error) = &result
            && error.is_elsewhere()
        {
            self.moved_to = moved_to(error);
            self.live = None;
        }
        result
    }

    /// Runs a script, and what is to follow it in the same breath. A server that does not know the script is taught it.
    pub(super) fn script(
        &mut self,
        script: &Script,
        keys: &[&str],
        arguments: &[&[u8]],
        then: Option<&Cmd>,
        within: Duration,
    ) -> Result<Vec<Value>, RedisError> {
        let commands: Vec<Cmd> = std::iter::once(script.run(keys, arguments)).chain(then.cloned()).collect();
        match self.call(&commands, within) {
            Err(error) if error.is_unknown_script() => {
                self.call(&[script.load()], within)?;
                self.call(&commands, within)
            }
            result => result,
        }
    }

    /// Runs a script that has one answer.
    pub(super) fn script_alone(
        &mut self,
        script: &Script,
        keys: &[&str],
        arguments: &[&[u8]],
        within: Duration,
    ) -> Result<Value, RedisError> {
        let mut answers = self.script(script, keys, arguments, None, within)?;
        answers.pop().ok_or_else(|| self.unknown("a script"))
    }

    /// As [`Link::script_alone`], for scripts that only read: a master that was demoted meanwhile would answer them, too.
    pub(super) fn script_on_master(
        &mut self,
        script: &Script,
        keys: &[&str],
        arguments: &[&[u8]],
        within: Duration,
    ) -> Result<Value, RedisError> {
        let answers = self.script(script, keys, arguments, Some(&cmd("ROLE")), within)?;
        let Ok([answer, role]) = <[Value; 2]>::try_from(answers) else {
            return Err(self.unknown("a script"));
        };
        check_role(&self.node(), &role).inspect_err(|_| self.live = None)?;
        Ok(answer)
    }

    /// An answer that makes no sense.
    pub(super) fn unknown(&self, what: &'static str) -> RedisError {
        RedisError::Answer { node: self.node(), what }
    }

    fn find(&mut self, deadline: Deadline) -> Result<Live, RedisError> {
        if let Some(node) = self.moved_to.take()
            && let Ok(live) = self.open(&node, deadline)
        {
            return Ok(live);
        }
        match &self.endpoint.url.topology {
            Topology::Single(node) => self.open(node, deadline),
            Topology::Sentinel { sentinels, master } => {
                let node = ask_sentinels(sentinels, master, deadline)?;
                self.open(&node, deadline)
            }
            Topology::Cluster(nodes) => {
                let mut reasons = Vec::new();
                // The first that answers decides; where the others would say something else, the server itself sends us on.
                for node in shuffled(nodes) {
                    match self.find_in_cluster(&node, deadline) {
                        Ok(live) => return Ok(live),
                        Err(error) => reasons.push(error.to_string()),
                    }
                }
                Err(RedisError::NoMaster {
                    reason: reasons.join("; "),
                })
            }
        }
    }

    fn find_in_cluster(&self, asked: &Node, deadline: Deadline) -> Result<Live, RedisError> {
        let mut live = self.open(asked, deadline)?;
        let slot = cmd("CLUSTER").arg("KEYSLOT").arg(&self.endpoint.keys.owner).clone();
        let answers = live.call(&[slot, cmd("CLUSTER").arg("SLOTS").clone()], deadline)?;
        let [slot, ranges] = answers.as_slice() else {
            return Err(live.unknown("CLUSTER SLOTS"));
        };
        let (Some(slot), Some(ranges)) = (value::int(slot), value::items(ranges)) else {
            return Err(live.unknown("CLUSTER SLOTS"));
        };
        let owner = ranges.iter().find_map(|range| {
            let [first, last, master, ..] = value::items(range)? else {
                return None;
            };
            let covered = value::int(first)? <= slot && slot <= value::int(last)?;
            let [host, port, ..] = value::items(master)? else { return None };
            // A node that does not know its own address leaves it out: it is the one that was asked.
            let host = value::text(host).filter(|host| !host.is_empty()).unwrap_or(&asked.host).to_owned();
            let port = u16::try_from(value::int(port)?).ok()?;
            covered.then_some(Node { host, port })
        });
        match owner {
            Some(node) if node == *asked => Ok(live),
            Some(node) => self.open(&node, deadline),
            None => Err(RedisError::NoMaster {
                reason: format!("{asked} knows no master of slot {slot}"),
            }),
        }
    }

    fn open(&self, node: &Node, deadline: Deadline) -> Result<Live, RedisError> {
        let mut login = RedisConnectionInfo::default()
            .set_db(self.endpoint.url.database)
            .set_skip_set_lib_name();
        if let Some(user) = &self.endpoint.url.user {
            login = login.set_username(user);
        }
        if let Some(password) = &self.endpoint.url.password {
            login = login.set_password(password);
        }
        open(node, login, deadline)
    }
}

/// Connects in a thread of its own: looking a name up knows no deadline, and must not keep the caller.
fn open(node: &Node, login: RedisConnectionInfo, deadline: Deadline) -> Result<Live, RedisError> {
    let failed = |reason: String| RedisError::Connection {
        node: node.to_string(),
        reason,
    };
    let left = deadline.left().ok_or_else(|| failed("out of time".to_owned()))?;
    let info = ConnectionAddr::Tcp(node.host.clone(), node.port)
        .into_connection_info()
        .map_err(|error| failed(error.to_string()))?
        .set_tcp_settings(TcpSettings::default().set_nodelay(true))
        .set_redis_settings(login);
    let (send, receive) = channel();
    thread::Builder::new()
        .name("redis-connect".to_owned())
        .spawn(move || {
            let opened = redis::Client::open(info).and_then(|client| client.get_connection_with_timeout(left));
            // Whoever asked may have given up.
            let _ = send.send(opened);
        })
        .map_err(|error| failed(error.to_string()))?;
    match receive.recv_timeout(left) {
        Ok(Ok(connection)) => Ok(Live {
            connection,
            node: node.clone(),
        }),
        Ok(Err(error)) if error.kind() == ErrorKind::AuthenticationFailed => Err(RedisError::Login { node: node.to_string() }),
        Ok(Err(error)) => Err(failed(error.to_string())),
        Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Err(failed("no connection in time".to_owned())),
    }
}

impl Live {
    /// The answers, of which none is a refusal.
    fn call(&mut self, commands: &[Cmd], deadline: Deadline) -> Result<Vec<Value>, RedisError> {
        let answers = self.call_each(commands, deadline)?;
        let node = self.node.to_string();
        answers.into_iter().map(|answer| accepted(&node, answer)).collect()
    }

    /// The answers, refusals among them.
    fn call_each(&mut self, commands: &[Cmd], deadline: Deadline) -> Result<Vec<Value>, RedisError> {
        let node = self.node.to_string();
        let failed = |reason: String| RedisError::Connection {
            node: node.clone(),
            reason,
        };
        let broken = |error: redis::RedisError| match error.is_timeout() {
            true => failed("no answer in time".to_owned()),
            false => failed(error.to_string()),
        };
        let left = || deadline.left().ok_or_else(|| failed("no answer in time".to_owned()));
        self.connection.set_write_timeout(Some(left()?)).map_err(broken)?;
        let mut packed = Vec::new();
        for command in commands {
            command.write_packed_command(&mut packed);
        }
        self.connection.send_packed_command(&packed).map_err(broken)?;
        let mut answers = Vec::with_capacity(commands.len());
        for _ in commands {
            self.connection.set_read_timeout(Some(left()?)).map_err(broken)?;
            answers.push(self.connection.recv_response().map_err(broken)?);
        }
        Ok(answers)
    }

    fn unknown(&self, what: &'static str) -> RedisError {
        RedisError::Answer {
            node: self.node.to_string(),
            what,
        }
    }
}

/// Asks all sentinels at once and believes the one that knows of the latest failover: a partition leaves some behind.
fn ask_sentinels(sentinels: &[Node], master: &str, deadline: Deadline) -> Result<Node, RedisError> {
    let within = deadline.at_most(SENTINELS_WITHIN);
    let (send, receive) = channel();
    for sentinel in sentinels {
        let (send, sentinel, master) = (send.clone(), sentinel.clone(), master.to_owned());
        let asker = thread::Builder::new().name("redis-sentinel".to_owned());
        // A sentinel that cannot be asked for want of a thread is one that does not answer.
        let _ = asker.spawn(move || send.send(ask_sentinel(&sentinel, &master, within)));
    }
    drop(send);
    let (mut best, mut reasons): (Option<(i64, Node)>, Vec<String>) = (None, Vec::new());
    while let Some(left) = within.left() {
        match receive.recv_timeout(left) {
            Ok(Ok((epoch, node))) if best.as_ref().is_none_or(|(best, _)| epoch > *best) => best = Some((epoch, node)),
            Ok(Ok(_)) => {}
            Ok(Err(error)) => reasons.push(error.to_string()),
            Err(_) => break,
        }
    }
    best.map(|(_, node)| node).ok_or_else(|| RedisError::NoMaster {
        reason: format!("no sentinel named the master {master}: {}", reasons.join("; ")),
    })
}

fn ask_sentinel(sentinel: &Node, master: &str, deadline: Deadline) -> Result<(i64, Node), RedisError> {
    let mut live = open(sentinel, RedisConnectionInfo::default().set_skip_set_lib_name(), deadline)?;
    let answers = live.call(&[cmd("SENTINEL").arg("MASTER").arg(master).clone()], deadline)?;
    let fields = answers.first().and_then(value::items).unwrap_or_default();
    let field = |name: &str| {
        let mut pairs = fields.as_chunks::<2>().0.iter();
        pairs.find_map(|[key, found]| (value::text(key)? == name).then(|| value::text(found))?)
    };
    let known = || {
        let epoch = field("config-epoch")?.parse().ok()?;
        let port = field("port")?.parse().ok()?;
        let host = field("ip")?.to_owned();
        Some((epoch, Node { host, port }))
    };
    known().ok_or_else(|| live.unknown("SENTINEL MASTER"))
}

/// Takes the answer to `ROLE` of a master only.
fn check_role(node: &str, role: &Value) -> Result<(), RedisError> {
    match value::items(role).and_then(|items| value::text(items.first()?)) {
        Some("master") => Ok(()),
        role => Err(RedisError::NotMaster {
            node: node.to_owned(),
            role: role.unwrap_or("server that does not say what it is").to_owned(),
        }),
    }
}

/// The address in a `MOVED` or `ASK`; an empty host means the same one.
fn moved_to(error: &RedisError) -> Option<Node> {
    let RedisError::Refused { node, code, message } = error else {
        return None;
    };
    if code != "MOVED" {
        return None;
    }
    let (host, port) = message.split_whitespace().nth(1)?.rsplit_once(':')?;
    let host = match host {
        "" => node.rsplit_once(':')?.0.trim_matches(['[', ']']),
        host => host,
    };
    Some(Node {
        host: host.to_owned(),
        port: port.parse().ok()?,
    })
}

/// In another order each time, so that one dead node does not cost everyone its deadline.
fn shuffled(nodes: &[Node]) -> Vec<Node> {
    let mut nodes = nodes.to_vec();
    nodes.shuffle(&mut rand::rng());
    nodes
}

/// First wait before something is tried again.
const FIRST_WAIT: Duration = Duration::from_millis(5);
/// Longest wait before something is tried again: well below a lease, so that a short outage does not cost one.
const LONGEST_WAIT: Duration = Duration::from_millis(200);

/// Tries until it succeeds, fails for good, `patience` is over or `goes_on` says no. The last error tells why.
pub(super) fn persist<T>(
    patience: Duration,
    mut goes_on: impl FnMut() -> bool,
    mut attempt: impl FnMut() -> Result<T, RedisError>,
) -> Result<T, RedisError> {
    let deadline = Deadline::after(patience);
    let (mut longest, mut told) = (FIRST_WAIT, false);
    loop {
        let error = match attempt() {
            Err(error) if error.passes() => error,
            result => return result,
        };
        // Full jitter: standbys and the owner must not come back in step.
        let wait = longest.mul_f64(rand::random_range(0.0..1.0));
        longest = (longest * 2).min(LONGEST_WAIT);
        if !goes_on() || deadline.left().is_none_or(|left| left < wait) {
            return Err(error);
        }
        if !told {
            tracing::warn!(%error, "asking Redis again, for at most {patience:?}");
        }
        told = true;
        clock::wait(wait);
    }
}
