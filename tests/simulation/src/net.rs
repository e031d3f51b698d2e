//! Connections between workers and schedulers: ordered either way, slow by chance, and gone at any moment with what is on its way.

use std::collections::VecDeque;

use evalgrid_proto::v1::{from_worker, to_worker};
use rand::Rng as _;

use crate::sim::{Event, MS, SECOND, Sim};

/// One connection.
pub struct Conn {
    /// From.
    pub worker: usize,
    worker_life: u64,
    /// To.
    pub node: usize,
    node_life: u64,
    up: VecDeque<from_worker::Message>,
    down: VecDeque<to_worker::Message>,
    /// When the newest message on its way arrives.
    up_at: u64,
    down_at: u64,
    /// Nothing gets through any more, though the ends may not know.
    broken: bool,
    node_ended: bool,
    worker_ended: bool,
}

impl Sim {
    /// A worker connects, if anybody is there who accepts.
    pub fn connect(&mut self, worker: usize, node: usize) -> Option<u64> {
        let (from, to) = (&self.workers[worker], &self.nodes[node]);
        if from.cut_off_until > self.now || to.stopped_until > self.now || !to.is_active() {
            return None;
        }
        self.last_conn += 1;
        let conn = Conn {
            worker,
            worker_life: from.life,
            node,
            node_life: to.life,
            up: VecDeque::new(),
            down: VecDeque::new(),
            up_at: self.now,
            down_at: self.now,
            broken: false,
            node_ended: false,
            worker_ended: false,
        };
        self.conns.insert(self.last_conn, conn);
        Some(self.last_conn)
    }

    fn delay(&mut self, worker: usize) -> u64 {
        let slow = self.rng.random_bool(0.02);
        let delay = self.rng.random_range(100..if slow { 2 * SECOND } else { 20 * MS });
        delay + self.workers[worker].cut_off_until.saturating_sub(self.now)
    }

    /// A worker sends.
    pub fn send_up(&mut self, id: u64, message: from_worker::Message) {
        let Some(conn) = self.conns.get(&id).filter(|conn| !conn.broken) else {
            return;
        };
        let delay = self.delay(conn.worker);
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.up.push_back(message);
            conn.up_at = conn.up_at.max(self.now + delay);
            let wait = conn.up_at - self.now;
            self.at(wait, Event::Up(id));
        }
    }

    /// A scheduler sends.
    pub fn send_down(&mut self, id: u64, message: to_worker::Message) {
        let Some(conn) = self.conns.get(&id).filter(|conn| !conn.broken) else {
            return;
        };
        let delay = self.delay(conn.worker);
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.down.push_back(message);
            conn.down_at = conn.down_at.max(self.now + delay);
            let wait = conn.down_at - self.now;
            self.at(wait, Event::Down(id));
        }
    }

    /// The next message reaches the scheduler.
    pub fn up(&mut self, id: u64) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let (node, alive) = (conn.node, self.nodes[conn.node].life == conn.node_life);
        let open = !conn.node_ended;
        if let Some(message) = conn.up.pop_front()
            && alive
            && open
        {
            self.node_hears(node, id, message);
        }
    }

    /// The next message reaches the worker.
    pub fn down(&mut self, id: u64) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let (worker, alive) = (conn.worker, self.workers[conn.worker].life == conn.worker_life);
        let open = !conn.worker_ended;
        if let Some(message) = conn.down.pop_front()
            && alive
            && open
        {
            self.worker_hears(worker, id, message);
        }
    }

    /// A connection breaks: what is on its way is lost, and each end hears of it in its own time, or by its own silence.
    pub fn break_conn(&mut self, id: u64) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.broken = true;
        conn.up.clear();
        conn.down.clear();
        let soon = self.rng.random_bool(0.5);
        let mut wait = || self.rng.random_range(MS..if soon { SECOND } else { 25 * SECOND });
        let (node, worker) = (wait(), wait());
        self.at(node, Event::NodeHearsEnd(id));
        self.at(worker, Event::WorkerHearsEnd(id));
    }

    /// A scheduler closes its end; what it has sent still arrives.
    pub fn close_from_node(&mut self, id: u64) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.up.clear();
        conn.node_ended = true;
        let wait = conn.down_at.max(self.now + MS) - self.now;
        self.at(wait, Event::WorkerHearsEnd(id));
    }

    /// A worker closes its end; what it has sent still arrives.
    pub fn close_from_worker(&mut self, id: u64) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.down.clear();
        conn.worker_ended = true;
        let wait = conn.up_at.max(self.now + MS) - self.now;
        self.at(wait, Event::NodeHearsEnd(id));
    }

    /// The scheduler hears that a connection is over.
    pub fn node_hears_end(&mut self, id: u64) {
        let Some(conn) = self.conns.get_mut(&id).filter(|conn| !conn.node_ended) else {
            return;
        };
        conn.node_ended = true;
        let (node, alive) = (conn.node, self.nodes[conn.node].life == conn.node_life);
        self.bury(id);
        if alive {
            self.node_loses(node, id);
        }
    }

    /// The worker does.
    pub fn worker_hears_end(&mut self, id: u64) {
        let Some(conn) = self.conns.get_mut(&id).filter(|conn| !conn.worker_ended) else {
            return;
        };
        conn.worker_ended = true;
        let (worker, alive) = (conn.worker, self.workers[conn.worker].life == conn.worker_life);
        self.bury(id);
        if alive {
            self.worker_loses(worker, id);
        }
    }

    fn bury(&mut self, id: u64) {
        if self.conns.get(&id).is_some_and(|conn| conn.node_ended && conn.worker_ended) {
            self.conns.remove(&id);
        }
    }

    /// Connections of a scheduler or a worker.
    pub fn conns_of(&self, which: impl Fn(&Conn) -> bool) -> Vec<u64> {
        self.conns.iter().filter(|(_, conn)| which(conn)).map(|(id, _)| *id).collect()
    }
}
