//! A scheduler: its process, its terms of office, and the committer's turns around the very code that serves.

use std::{collections::BTreeMap, sync::Arc};

use evalgrid_proto::{
    log::v1::{ArchivePart, event::Kind},
    v1::from_worker,
};
use evalgrid_scheduler::heart::{Core, FetchPart, MAX_OUTBOUND, Outbound, Replica, Variables, greet, hear, tick, token_floor};
use evalgrid_store::{Index as _, Record, log::BoxError};
use evalgrid_workflow::{Chance, decide};
use prost::Message as _;
use rand::Rng as _;
use tokio::sync::mpsc;

use crate::{
    check::broken,
    client::Serve,
    defect::Defect,
    disk::{self, Failed, Fate, Handle},
    duties::{Duties, Duty},
    index::Rows,
    sim::{EPOCH_MS, Event, MS, SECOND, Sim},
    trouble::Trouble,
};

/// Between two renewals of the active scheduler's lease.
const RENEW_EVERY: u64 = 2 * SECOND;
/// The owner stops acting this long before its lease ends.
const MARGIN: u64 = SECOND;
/// Between two looks of a standby.
const POLL_EVERY: u64 = SECOND;
/// Looks for abandoned trials are rarer than the others.
const LOOKS_PER_ABANDON: u64 = 10;

/// What a scheduler does next.
pub enum NodeEvent {
    /// Its process starts.
    Boot,
    /// A standby looks.
    Poll,
    /// The active one renews its lease.
    Renew,
    /// The active one looks what has come due.
    Tick,
    /// Its group reaches the log.
    Append,
    /// Its group is known to be durable.
    Publish,
    /// A client's call goes on.
    Serve(Box<Serve>),
    /// So does one of its own works.
    Duty(Duty),
}

/// Waits until a position is durable.
pub enum Waiter {
    /// A client's call.
    Serve(Box<Serve>),
    /// The scheduler's own work.
    Duty(Duty),
}

/// A scheduler and its machine.
#[derive(Default)]
pub struct Node {
    /// Tells its lives apart; what was begun in an earlier one never ends.
    pub life: u64,
    /// Its process gets no time until then.
    pub stopped_until: u64,
    /// How wrong its wall clock is, milliseconds.
    pub wall_off_ms: i64,
    booted_at: u64,
    /// Its index outlives its process.
    pub index: Arc<Rows>,
    /// How far its process has seen the log, and what that looked like: what a loss is noticed by.
    pub witness: (u64, u64),
    /// It cannot renew its lease until then.
    pub deaf_until: u64,
    role: Role,
}

#[derive(Default)]
enum Role {
    #[default]
    Down,
    Standby(Box<Replica>),
    Active(Box<Active>),
}

/// What a connection is to the scheduler.
struct Seat {
    worker_id: String,
    number: u64,
    outbound: mpsc::Receiver<Outbound>,
    /// Waits until it may leave.
    next: Option<Outbound>,
}

/// An active scheduler.
pub struct Active {
    /// The product.
    pub core: Core,
    /// What it appends by.
    pub handle: Handle,
    group: Vec<Record>,
    group_end: u64,
    writing: bool,
    /// What everybody may act upon.
    pub durable: u64,
    /// It certainly is the active one until then.
    holds_until: u64,
    began: u64,
    looks: u64,
    seats: BTreeMap<u64, Seat>,
    /// Since when workers that were here are away.
    left: BTreeMap<String, u64>,
    waiters: BTreeMap<u64, Vec<Waiter>>,
    /// Archive and snapshots.
    pub duties: Duties,
    /// Where the log shall be cut with the next group.
    pub cut: u64,
}

impl Node {
    /// Whether it is the active one, as far as it knows.
    pub fn is_active(&self) -> bool {
        matches!(self.role, Role::Active(_))
    }

    /// Its term of office.
    pub fn active(&mut self) -> Option<&mut Active> {
        match &mut self.role {
            Role::Active(active) => Some(active),
            _ => None,
        }
    }

    /// Whether nothing waits to be written, or to be done.
    pub fn is_settled(&self) -> bool {
        match &self.role {
            Role::Active(active) => {
                !active.writing
                    && !active.core.has_pending()
                    && active.waiters.is_empty()
                    && active.duties.idle()
                    && active.core.ended.is_empty()
            }
            _ => false,
        }
    }

    /// Whether its process runs.
    pub fn is_up(&self) -> bool {
        !matches!(self.role, Role::Down)
    }
}

impl Sim {
    /// Something happens to a scheduler.
    pub fn node_event(&mut self, node: usize, event: NodeEvent) {
        match event {
            NodeEvent::Boot => self.boot(node),
            NodeEvent::Poll => self.poll(node),
            NodeEvent::Renew => self.renew(node),
            NodeEvent::Tick => self.tick(node),
            NodeEvent::Append => self.append(node),
            NodeEvent::Publish => self.publish(node),
            NodeEvent::Serve(serve) => self.serve(node, *serve),
            NodeEvent::Duty(duty) => self.do_duty(node, duty),
        }
    }

    /// Lets something happen to a scheduler in the life that it lives now.
    pub fn at_node(&mut self, node: usize, wait: u64, event: NodeEvent) {
        let life = self.nodes[node].life;
        self.at(wait, Event::Node(node, life, event));
    }

    fn replica(&mut self, node: usize) -> Option<Replica> {
        let objects = self.disk.objects.clone();
        let fetch: FetchPart = Arc::new(move |reference| match disk::get(&objects, &reference.sha256) {
            Some(bytes) => Ok(ArchivePart::decode(bytes)?),
            None => Err(BoxError::from("a part of the archive is missing")),
        });
        match Replica::new(self.nodes[node].index.clone(), fetch) {
            Ok(replica) => Some(replica),
            Err(error) => self.check(broken("every prefix recovers", error.to_string())),
        }
    }

    fn boot(&mut self, node: usize) {
        self.tell(|| format!("scheduler {node} starts"));
        self.nodes[node].booted_at = self.now;
        if self.disk.is_stream() {
            let Some(replica) = self.replica(node) else { return };
            self.nodes[node].role = Role::Standby(Box::new(replica));
            return self.at_node(node, MS, NodeEvent::Poll);
        }
        let Some(mut replica) = self.replica(node) else { return };
        let opened = self.disk.open(|item| replica.take(item));
        if let Some(handle) = self.check(opened) {
            self.take_office(node, replica, handle);
        }
    }

    /// A standby follows the log, and takes office where nobody holds it.
    fn poll(&mut self, node: usize) {
        self.notice_loss(node);
        let free = self.disk.leased_until <= self.now;
        let end = self.disk.position();
        let Role::Standby(replica) = &mut self.nodes[node].role else {
            return;
        };
        if replica.position() < end {
            let read = self.disk.read(replica.position(), |item| replica.take(item));
            let flushed = replica.flush().or_else(|error| broken("every prefix recovers", error.to_string()));
            self.nodes[node].witness = (end, self.disk.chain(end).unwrap_or_default());
            if self.check(read.and(flushed)).is_none() {
                return;
            }
        }
        let nonce = self.rng.random();
        if free && let Some(handle) = self.disk.take_over(nonce, self.now, self.setup.office) {
            if let Role::Standby(replica) = std::mem::take(&mut self.nodes[node].role) {
                self.take_office(node, *replica, handle);
            }
            return;
        }
        self.at_node(node, POLL_EVERY, NodeEvent::Poll);
    }

    /// What it saw before is not there any more: it says so, and begins anew, its index included.
    fn notice_loss(&mut self, node: usize) {
        let (position, chain) = self.nodes[node].witness;
        if self.disk.chain(position) == Some(chain) {
            return;
        }
        self.tell(|| format!("scheduler {node} misses what it saw up to position {position}"));
        let losses = self.disk.losses.iter_mut().filter(|loss| loss.position < position);
        losses.for_each(|loss| loss.noticed = true);
        if self.defect != Some(Defect::LossConcealed) {
            self.disk.report_loss();
        }
        let reset = self.nodes[node].index.reset("");
        self.check(reset.or_else(|error| broken("every prefix recovers", error.to_string())));
        self.nodes[node].witness = (0, 0);
        if let Some(replica) = self.replica(node) {
            self.nodes[node].role = Role::Standby(Box::new(replica));
        }
    }

    /// A loss that no living process has seen cannot be noticed by any.
    pub fn settle_losses(&mut self) {
        let seen = self.nodes.iter().map(|node| node.witness.0).max().unwrap_or_default();
        let losses = self.disk.losses.iter_mut();
        losses.for_each(|loss| loss.settled |= seen <= loss.position && !loss.noticed);
    }

    fn take_office(&mut self, node: usize, mut replica: Replica, handle: Handle) {
        let claimed = replica.claim_index(&format!("history-{}", self.disk.history));
        if let Err(error) = claimed {
            return self.check(broken("every prefix recovers", error.to_string())).unwrap_or_default();
        }
        let mut core = match replica.to_core() {
            Ok(core) => core,
            Err(error) => return self.check(broken("every prefix recovers", error.to_string())).unwrap_or_default(),
        };
        if self.disk.is_stream() {
            let chance = self.rng.random();
            core.state.raise_token_floor(token_floor(handle.owner.epoch, chance));
        }
        let position = core.position();
        self.tell(|| format!("scheduler {node} takes office at position {position}"));
        if position != self.disk.position() {
            let detail = format!("{position} of {} records are there", self.disk.position());
            return self.check(broken("an acknowledged fact survives", detail)).unwrap_or_default();
        }
        let chain = self.disk.chain(position).unwrap_or_default();
        let holds_until = match self.disk.is_stream() {
            true => self.now + self.setup.office - MARGIN,
            false => u64::MAX,
        };
        self.nodes[node].witness = (position, chain);
        self.nodes[node].role = Role::Active(Box::new(Active {
            core,
            handle,
            group: Vec::new(),
            group_end: position,
            writing: false,
            durable: position,
            holds_until,
            began: self.now,
            looks: 0,
            seats: BTreeMap::new(),
            left: BTreeMap::new(),
            waiters: BTreeMap::new(),
            duties: Duties::default(),
            cut: 0,
        }));
        let limits = self.setup.limits.clone();
        self.turn(node, |core| {
            core.state.configure(limits);
            let events = decide::catch_up(&core.state, core.now_ms());
            core.commit_all(events);
        });
        self.create_organizations(node);
        self.at_node(node, self.setup.tick, NodeEvent::Tick);
        if self.disk.is_stream() {
            self.at_node(node, RENEW_EVERY, NodeEvent::Renew);
        }
    }

    /// Runs a turn on the state, as the engine does. The second value is the position that must be durable before anybody acts on the first.
    pub fn turn<T>(&mut self, node: usize, turn: impl FnOnce(&mut Core) -> T) -> Option<(T, u64)> {
        let this = &mut self.nodes[node];
        let now_ms = (EPOCH_MS + self.now / MS).saturating_add_signed(this.wall_off_ms);
        let steady_ms = (self.now - this.booted_at) / MS;
        let active = this.active()?;
        active.core.set_time(now_ms, steady_ms);
        let value = turn(&mut active.core);
        let position = active.core.position();
        self.commit(node);
        self.pump(node);
        Some((value, position))
    }

    /// Chance for a turn.
    pub fn chance(&mut self) -> Chance {
        Chance::new(self.rng.random())
    }

    fn tick(&mut self, node: usize) {
        let mut chance = self.chance();
        let (lease_ms, grace_ms) = (self.setup.lease / MS, self.setup.grace_ms);
        let Some(active) = self.nodes[node].active() else { return };
        active.looks += 1;
        let abandoned = active.looks.is_multiple_of(LOOKS_PER_ABANDON);
        self.turn(node, |core| {
            tick(core, lease_ms, grace_ms, &mut chance, abandoned, &Variables::new())
        });
        self.begin_duties(node);
        self.at_node(node, self.setup.tick, NodeEvent::Tick);
    }

    fn commit(&mut self, node: usize) {
        let Some(active) = self.nodes[node].active() else { return };
        if active.writing || !active.core.has_pending() {
            return;
        }
        active.writing = true;
        active.group.clear();
        active.group_end = active.core.take_group(&mut active.group);
        let stalled = self.strike(Trouble::DiskStalled, 0.01);
        let wait = self.rng.random_range(100..if stalled { 20 * SECOND } else { 5 * MS });
        self.at_node(node, wait, NodeEvent::Append);
    }

    fn append(&mut self, node: usize) {
        if self.strike(Trouble::KilledBeforeAppend, 0.002) {
            if !self.disk.is_stream()
                && self.strike(Trouble::GroupTorn, 0.7)
                && let Role::Active(active) = &mut self.nodes[node].role
            {
                // The outcome is the next start's to find.
                let _ = self.disk.append(&mut active.handle, &active.group, Fate::Torn);
            }
            return self.kill(node);
        }
        let fate = match () {
            () if self.strike(Trouble::AppendLost, 0.002) => Fate::Lost,
            () if self.strike(Trouble::AppendKept, 0.002) => Fate::Kept,
            () => Fate::Fine,
        };
        let from = self.disk.records.len();
        let Role::Active(active) = &mut self.nodes[node].role else { return };
        let done = self.disk.append(&mut active.handle, &active.group, fate);
        let holds = self.now < active.holds_until;
        self.read_new(from);
        match done {
            Ok(()) if self.strike(Trouble::KilledAfterAppend, 0.002) => self.kill(node),
            Ok(()) => {
                let wait = self.rng.random_range(10..500);
                self.at_node(node, wait, NodeEvent::Publish);
            }
            Err(Failed::Unknown) if !self.disk.is_stream() => self.kill(node),
            Err(Failed::Unknown) if holds => {
                let wait = self.rng.random_range(20 * MS..2 * SECOND);
                self.at_node(node, wait, NodeEvent::Append);
            }
            Err(_) => self.step_down(node),
        }
    }

    /// The checker reads what has just become durable.
    fn read_new(&mut self, from: usize) {
        for index in from..self.disk.records.len() {
            let record = self.disk.records[index].clone();
            let read = self.disk.ledger.take(&record);
            let said = read.and_then(|event| self.models.check(&self.disk, &event).map(|()| event));
            let Some(event) = self.check(said) else { return };
            self.tell(|| format!("{} durable: {event:?}", index + 1));
            if let Some(Kind::SandboxDestroyed(gone)) = &event.kind
                && self.sandboxes.get(&gone.sandbox) == Some(&true)
            {
                self.check::<()>(broken("destroyed means gone", format!("{} is there", gone.sandbox)));
            }
        }
    }

    fn publish(&mut self, node: usize) {
        let this = &mut self.nodes[node];
        let Role::Active(active) = &mut this.role else { return };
        active.durable = active.group_end;
        active.writing = false;
        // After a failover there may be no such group any more; the next append finds out.
        this.witness = (active.durable, self.disk.hash());
        if active.cut > 0 {
            self.disk.cut(&mut active.handle, active.cut);
            active.cut = 0;
        }
        let durable = active.durable;
        let later = active.waiters.split_off(&(durable + 1));
        let ready = std::mem::replace(&mut active.waiters, later);
        for waiter in ready.into_values().flatten() {
            self.wake(node, waiter);
        }
        self.commit(node);
        self.pump(node);
    }

    /// Goes on once a position is durable.
    pub fn wait(&mut self, node: usize, position: u64, waiter: Waiter) {
        let Some(active) = self.nodes[node].active() else {
            return self.refuse(waiter);
        };
        match active.durable >= position {
            true => self.wake(node, waiter),
            false => active.waiters.entry(position).or_default().push(waiter),
        }
    }

    fn wake(&mut self, node: usize, waiter: Waiter) {
        match waiter {
            _ if !self.holds(node) => self.refuse(waiter),
            Waiter::Serve(serve) => self.serve(node, *serve),
            Waiter::Duty(duty) => self.do_duty(node, duty),
        }
    }

    fn refuse(&mut self, waiter: Waiter) {
        if let Waiter::Serve(serve) = waiter {
            self.unavailable(serve.call);
        }
    }

    /// Whether a scheduler certainly is the active one.
    pub fn holds(&self, node: usize) -> bool {
        match &self.nodes[node].role {
            Role::Active(active) => self.now < active.holds_until,
            _ => false,
        }
    }

    /// Messages leave in order, each once its position is durable.
    fn pump(&mut self, node: usize) {
        let holds = self.holds(node);
        let Some(active) = self.nodes[node].active() else { return };
        let durable = active.durable;
        let (mut leave, mut over) = (Vec::new(), Vec::new());
        for (conn, seat) in &mut active.seats {
            loop {
                if seat.next.is_none() {
                    match seat.outbound.try_recv() {
                        Ok(next) => seat.next = Some(next),
                        Err(mpsc::error::TryRecvError::Empty) => break,
                        Err(mpsc::error::TryRecvError::Disconnected) => {
                            over.push(*conn);
                            break;
                        }
                    }
                }
                match seat.next.take() {
                    Some((position, message)) if position <= durable => leave.push((*conn, message)),
                    next => {
                        seat.next = next;
                        break;
                    }
                }
            }
        }
        for (conn, message) in leave {
            match holds {
                true => self.send_down(conn, message),
                false => over.push(conn),
            }
        }
        over.dedup();
        for conn in over {
            self.close_from_node(conn);
            self.node_loses(node, conn);
        }
    }

    fn renew(&mut self, node: usize) {
        let deaf = self.nodes[node].deaf_until > self.now;
        let office = self.setup.office;
        let (position, chain) = self.nodes[node].witness;
        let Role::Active(active) = &mut self.nodes[node].role else { return };
        // The answer tells what the log looks like, too: an owner that has nothing to write would never notice a loss.
        if !deaf && self.disk.chain(position) != Some(chain) {
            return self.step_down(node);
        }
        if !deaf && self.disk.renew(active.handle.owner, self.now, office) {
            active.holds_until = self.now + office - MARGIN;
        }
        match self.now < active.holds_until {
            true => self.at_node(node, RENEW_EVERY, NodeEvent::Renew),
            false => self.step_down(node),
        }
    }

    /// A worker's message arrives.
    pub fn node_hears(&mut self, node: usize, conn: u64, message: from_worker::Message) {
        let mut chance = self.chance();
        let lease_ms = self.setup.lease / MS;
        let Some(active) = self.nodes[node].active() else { return };
        if let from_worker::Message::Hello(hello) = message {
            let (sender, outbound) = mpsc::channel(MAX_OUTBOUND);
            let worker_id = hello.worker_id.clone();
            let seat = Seat {
                worker_id,
                number: 0,
                outbound,
                next: None,
            };
            active.seats.insert(conn, seat);
            let number = self.turn(node, |core| greet(core, &hello, sender, lease_ms, &mut chance, &Variables::new()));
            if let Some(seat) = self.nodes[node].active().and_then(|active| active.seats.get_mut(&conn))
                && let Some((number, _)) = number
            {
                seat.number = number;
            }
            return;
        }
        let Some(seat) = active.seats.get(&conn) else { return };
        let (worker_id, number) = (seat.worker_id.clone(), seat.number);
        let heard = self.turn(node, |core| hear(core, &worker_id, number, message, &mut chance, &Variables::new()));
        if !heard.is_some_and(|(goes_on, _)| goes_on) {
            self.close_from_node(conn);
            self.node_loses(node, conn);
        }
    }

    /// A connection is over for the scheduler.
    pub fn node_loses(&mut self, node: usize, conn: u64) {
        let seat = self.nodes[node].active().and_then(|active| active.seats.remove(&conn));
        if let Some(seat) = seat {
            let now = self.now;
            if let Some(active) = self.nodes[node].active() {
                active.left.insert(seat.worker_id.clone(), now);
            }
            self.turn(node, |core| core.sessions.leave(&seat.worker_id, seat.number));
        }
    }

    /// Its process ends, and starts again some time later.
    pub fn kill(&mut self, node: usize) {
        self.tell(|| format!("scheduler {node} is killed"));
        self.end_term(node);
        self.nodes[node].role = Role::Down;
        self.nodes[node].witness = (0, 0);
        self.settle_losses();
        self.nodes[node].stopped_until = 0;
        let behind = self.strike(Trouble::IndexBehind, 0.5);
        if behind {
            self.nodes[node].index.crash();
        }
        let mean = [SECOND, 5 * SECOND, 60 * SECOND][self.rng.random_range(0..3)];
        let wait = self.about(mean);
        self.at_node(node, wait, NodeEvent::Boot);
    }

    /// It is, or may be, no longer the active one: it drops its state, and follows.
    fn step_down(&mut self, node: usize) {
        self.tell(|| format!("scheduler {node} steps down"));
        self.end_term(node);
        if let Some(replica) = self.replica(node) {
            self.nodes[node].role = Role::Standby(Box::new(replica));
        }
        self.at_node(node, POLL_EVERY, NodeEvent::Poll);
    }

    fn end_term(&mut self, node: usize) {
        self.nodes[node].life += 1;
        if let Role::Active(active) = std::mem::take(&mut self.nodes[node].role) {
            active.seats.keys().for_each(|conn| self.close_from_node(*conn));
            active.waiters.into_values().flatten().for_each(|waiter| self.refuse(waiter));
        }
        for conn in self.conns_of(|conn| conn.node == node) {
            self.close_from_node(conn);
        }
    }

    /// A worker that an active scheduler has not heard for long holds no lease with it.
    pub fn check_silence(&mut self) {
        for node in 0..self.nodes.len() {
            let patience = 3 * self.setup.lease + 4 * self.setup.tick + 30 * SECOND;
            let now = self.now;
            // What it did not live through does not count.
            let woke = self.nodes[node].stopped_until;
            let holds = self.holds(node) && woke <= now;
            let Some(active) = self.nodes[node].active() else { continue };
            if !holds || active.began.max(woke) + patience > now || active.writing {
                continue;
            }
            let here: Vec<&String> = active.seats.values().map(|seat| &seat.worker_id).collect();
            let silent = active.core.state.leases().find(|(_, lease)| {
                let since = active.left.get(&lease.worker_id).copied().unwrap_or_default();
                !here.contains(&&lease.worker_id) && since + patience < now
            });
            if let Some((token, lease)) = silent {
                let detail = format!("{} has been away for long, and still holds {token}", lease.worker_id);
                self.check::<()>(broken("the leases of the silent run out", detail));
            }
        }
    }
}
