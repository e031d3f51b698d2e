//! The simulated world: virtual time, one queue of events, one source of chance, and everybody who acts in it.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, VecDeque},
};

use evalgrid_proto::v1::WorkerRole;
use evalgrid_workflow::{Limits, ProviderLimits};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

use crate::{
    check::{Violation, broken},
    client::{ClientEvent, Clients, PROVIDER},
    defect::Defect,
    disk::Disk,
    models::Models,
    net::Conn,
    node::{Node, NodeEvent},
    trouble::{Trouble, Troubles},
    worker::{Worker, WorkerEvent},
};

/// Microseconds.
pub const MS: u64 = 1_000;
/// Microseconds.
pub const SECOND: u64 = 1_000 * MS;
/// Microseconds.
pub const MINUTE: u64 = 60 * SECOND;
/// The wall clock at the beginning, milliseconds since the epoch.
pub const EPOCH_MS: u64 = 1_800_000_000_000;
/// How long after the last trouble everything must have come to rest: longer than any wait that has no trouble to blame.
const REST_DEADLINE: u64 = 180 * MINUTE;
/// A world that makes more events than this is caught in a loop.
const MAX_EVENTS: u64 = 6_000_000;
/// How many of the seeds have judges and simulated people.
const JUDGED: f64 = 0.5;
/// Between two looks whether all is at rest.
const LOOK: u64 = 20 * SECOND;

/// What happens next.
pub enum Event {
    /// To a scheduler, in one of its lives.
    Node(usize, u64, NodeEvent),
    /// To a worker, in one of its lives.
    Worker(usize, u64, WorkerEvent),
    /// The next message of a connection reaches the scheduler.
    Up(u64),
    /// The next message of a connection reaches the worker.
    Down(u64),
    /// The scheduler hears that a connection has ended.
    NodeHearsEnd(u64),
    /// The worker does.
    WorkerHearsEnd(u64),
    /// To a client, or one of its calls.
    Client(ClientEvent),
    /// Something goes wrong, perhaps.
    Trouble,
    /// Something that lasted is over.
    Over(Box<dyn FnOnce(&mut Sim)>),
}

struct Due {
    at: u64,
    number: u64,
    event: Event,
}

impl PartialEq for Due {
    fn eq(&self, other: &Due) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Due) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Due) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

/// What one seed has chosen for a whole run.
pub struct Setup {
    /// Of workers.
    pub lease: u64,
    /// How long a trial waits for the worker that has its sandbox, milliseconds.
    pub grace_ms: u64,
    /// Between two looks of the scheduler.
    pub tick: u64,
    /// A snapshot is taken whenever this much log has gathered.
    pub snapshot_bytes: u64,
    /// Of the active scheduler.
    pub office: u64,
    /// How long there is load and trouble.
    pub load: u64,
    /// Mean time between two troubles.
    pub trouble_every: u64,
    /// Mean time between two calls of a client.
    pub call_every: u64,
    /// What the operator allows at once.
    pub limits: Limits,
    /// Cases have judges and simulated people.
    pub judged: bool,
}

/// See the module.
pub struct Sim {
    /// All chance there is.
    pub rng: StdRng,
    /// Microseconds since the beginning.
    pub now: u64,
    queue: BinaryHeap<Reverse<Due>>,
    number: u64,
    /// Events so far.
    pub events: u64,
    /// What this run has chosen.
    pub setup: Setup,
    /// What goes wrong.
    pub troubles: Troubles,
    /// The log and the objects.
    pub disk: Disk,
    /// Schedulers.
    pub nodes: Vec<Node>,
    /// Workers.
    pub workers: Vec<Worker>,
    /// Connections between them.
    pub conns: BTreeMap<u64, Conn>,
    /// The newest connection.
    pub last_conn: u64,
    /// Those who ask.
    pub clients: Clients,
    /// Those who judge and play people.
    pub models: Models,
    /// Every sandbox that was ever made, and whether it is there.
    pub sandboxes: BTreeMap<String, bool>,
    /// The defect that is on.
    pub defect: Option<Defect>,
    /// The first broken promise.
    pub violation: Option<Violation>,
    /// The newest events, where they are wanted.
    pub trace: Option<VecDeque<String>>,
    print: bool,
}

/// None for most, tight ones for some.
fn limits(rng: &mut StdRng) -> Limits {
    let mut limits = Limits::default();
    if rng.random_bool(0.3) {
        let limited = ProviderLimits {
            create_per_second: rng.random_range(0.05..2.0),
            create_burst: rng.random_range(1..4),
            max_starting: rng.random_range(1..4),
            max_living: rng.random_range(2..8),
        };
        limits.providers.insert(PROVIDER.to_owned(), limited);
    }
    limits
}

/// How many of the newest events are kept.
const TRACED: usize = 40;

impl Sim {
    /// The world of a seed.
    pub fn new(seed: u64, defect: Option<Defect>, trace: bool, print: bool) -> Sim {
        let mut rng = StdRng::seed_from_u64(seed);
        let stream = rng.random_bool(0.5);
        let troubles = Troubles::choose(&mut rng);
        let lease = [5, 15, 30][rng.random_range(0..3)] * SECOND;
        let setup = Setup {
            lease,
            grace_ms: [20_000, 60_000][rng.random_range(0..2)],
            tick: lease / 5,
            snapshot_bytes: rng.random_range(1_000..20_000),
            office: 6 * SECOND,
            load: rng.random_range(20..70) * MINUTE,
            trouble_every: rng.random_range(10..90) * SECOND,
            call_every: rng.random_range(20..90) * SECOND,
            limits: limits(&mut rng),
            judged: rng.random_bool(JUDGED),
        };
        let nodes = if stream { rng.random_range(1..4) } else { 1 };
        let (executors, runners) = match setup.judged {
            true => (rng.random_range(1..4), rng.random_range(1..3)),
            false => (rng.random_range(1..5), 0),
        };
        let workers = executors + runners;
        let role = |number| {
            if number < executors {
                WorkerRole::Executor
            } else {
                WorkerRole::JudgeRunner
            }
        };
        let clients = Clients::new(&mut rng);
        let mut sim = Sim {
            now: 0,
            queue: BinaryHeap::new(),
            number: 0,
            events: 0,
            setup,
            troubles,
            disk: Disk::new(stream, defect),
            nodes: (0..nodes).map(|_| Node::default()).collect(),
            workers: (0..workers)
                .map(|number| Worker::new(role(number), number, rng.random_range(1..5)))
                .collect(),
            conns: BTreeMap::new(),
            last_conn: 0,
            clients,
            models: Models::default(),
            sandboxes: BTreeMap::new(),
            defect,
            violation: None,
            trace: trace.then(VecDeque::new),
            print,
            rng,
        };
        let limits = sim.setup.limits.clone();
        sim.tell(|| format!("{nodes} schedulers, {executors} executors, {runners} judge runners, {limits:?}"));
        for node in 0..nodes {
            let wait = sim.rng.random_range(0..SECOND);
            sim.at(wait, Event::Node(node, 0, NodeEvent::Boot));
        }
        for worker in 0..workers {
            let wait = sim.rng.random_range(0..5 * SECOND);
            sim.at(wait, Event::Worker(worker, 0, WorkerEvent::Boot));
        }
        sim.begin_clients();
        sim.at(SECOND, Event::Trouble);
        sim
    }

    /// Lets something happen after a while.
    pub fn at(&mut self, wait: u64, event: Event) {
        self.number += 1;
        self.queue.push(Reverse(Due {
            at: self.now + wait,
            number: self.number,
            event,
        }));
    }

    /// Something that a person may want to read.
    pub fn tell(&mut self, what: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            let line = format!("{:>12.6} {}", self.now as f64 / 1e6, what());
            if self.print {
                println!("{line}");
            }
            if trace.len() == TRACED {
                trace.pop_front();
            }
            trace.push_back(line);
        }
    }

    /// Notes a broken promise; the run ends with the first one.
    pub fn check<T>(&mut self, result: Result<T, Violation>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(violation) => {
                self.violation.get_or_insert(violation);
                None
            }
        }
    }

    /// Whether trouble strikes.
    pub fn strike(&mut self, trouble: Trouble, probability: f64) -> bool {
        let struck = self.troubles.strike(&mut self.rng, trouble, probability);
        if struck {
            self.tell(|| format!("trouble: {trouble:?}"));
        }
        struck
    }

    /// A time with this mean; mostly shorter, sometimes much longer.
    pub fn about(&mut self, mean: u64) -> u64 {
        let chance: f64 = self.rng.random_range(0.001..1.0);
        (-chance.ln() * mean as f64) as u64 + 1
    }

    /// Lives to the end.
    pub fn run(&mut self) {
        let mut rested_at = None;
        let mut look_at = LOOK;
        while self.violation.is_none() {
            let Some(Reverse(due)) = self.queue.pop() else {
                self.check::<()>(broken("every batch ends", "nothing happens any more"));
                return;
            };
            self.now = due.at;
            self.events += 1;
            self.happen(due.event);
            if self.now < look_at {
                continue;
            }
            look_at = self.now + LOOK;
            self.check_silence();
            match rested_at {
                None if self.now >= self.setup.load => {
                    rested_at = Some(self.now);
                    self.heal();
                }
                Some(since) if self.now > since + MINUTE && self.is_at_rest() => return,
                Some(since) if self.now > since + REST_DEADLINE => {
                    let result = self.disk.ledger.at_rest();
                    self.check(result);
                    self.check::<()>(broken("everything comes to rest", self.unrest()));
                    return;
                }
                _ if self.events > MAX_EVENTS => {
                    self.check::<()>(broken("everything comes to rest", "too many events"));
                }
                _ => {}
            }
        }
    }

    fn happen(&mut self, event: Event) {
        // Whoever is stopped does everything later, in the same order.
        if let Some(until) = self.stopped_until(&event) {
            self.at(until - self.now, event);
            return;
        }
        match event {
            Event::Node(node, life, event) if self.nodes[node].life == life => self.node_event(node, event),
            Event::Worker(worker, life, event) if self.workers[worker].life == life => self.worker_event(worker, event),
            Event::Node(..) | Event::Worker(..) => {}
            Event::Up(conn) => self.up(conn),
            Event::Down(conn) => self.down(conn),
            Event::NodeHearsEnd(conn) => self.node_hears_end(conn),
            Event::WorkerHearsEnd(conn) => self.worker_hears_end(conn),
            Event::Client(event) => self.client_event(event),
            Event::Trouble => self.make_trouble(),
            Event::Over(over) => over(self),
        }
    }

    fn stopped_until(&self, event: &Event) -> Option<u64> {
        let until = match event {
            Event::Node(node, life, _) if self.nodes[*node].life == *life => self.nodes[*node].stopped_until,
            Event::Worker(worker, life, _) if self.workers[*worker].life == *life => self.workers[*worker].stopped_until,
            Event::Up(conn) | Event::NodeHearsEnd(conn) => self.nodes[self.conns.get(conn)?.node].stopped_until,
            Event::Down(conn) | Event::WorkerHearsEnd(conn) => self.workers[self.conns.get(conn)?.worker].stopped_until,
            _ => 0,
        };
        (until > self.now).then_some(until)
    }

    fn is_at_rest(&self) -> bool {
        self.disk.ledger.at_rest().is_ok() && self.unrest().is_empty()
    }

    /// Proves what can be proved of the whole log once all is at rest.
    pub fn prove(&mut self, thorough: bool) -> Result<(), Violation> {
        if let Some(loss) = self.disk.losses.iter().find(|loss| !loss.settled) {
            let detail = format!("what followed {} is gone, and nobody says so", loss.position);
            return broken("what a failover lost is reported", detail);
        }
        let living = self
            .nodes
            .iter_mut()
            .find_map(|node| node.active().map(|active| active.core.state.clone()));
        crate::proof::prove(&self.disk.records, &self.disk.saved, living, thorough)
    }

    fn unrest(&self) -> String {
        let left: Vec<&String> = self.sandboxes.iter().filter(|(_, there)| **there).map(|(name, _)| name).collect();
        if !left.is_empty() {
            return format!("sandboxes are there: {left:?}");
        }
        if !self.clients.at_rest() {
            return "calls are open".to_owned();
        }
        match self.nodes.iter().any(Node::is_settled) {
            true => String::new(),
            false => "no scheduler has written everything".to_owned(),
        }
    }
}
