//! Who makes the trouble that comes from outside, and how everything heals when it is over.

use rand::Rng as _;

use crate::{
    sim::{Event, MINUTE, SECOND, Sim},
    trouble::Trouble,
};

/// What comes from outside at any moment; all other trouble strikes where something is just being done.
const OUTSIDE: &[Trouble] = &[
    Trouble::SchedulerKilled,
    Trouble::ClockForward,
    Trouble::ClockBack,
    Trouble::SchedulerStopped,
    Trouble::RenewalLost,
    Trouble::FailoverLost,
    Trouble::ConnectionLost,
    Trouble::Partition,
    Trouble::WorkerKilled,
    Trouble::WorkerStopped,
    Trouble::WorkerReleased,
    Trouble::MachineRebooted,
    Trouble::WorkerAway,
    Trouble::SandboxDied,
];
/// Milliseconds.
const HOUR_MS: i64 = 3_600_000;

impl Sim {
    /// Something goes wrong, perhaps.
    pub fn make_trouble(&mut self) {
        if self.troubles.over() {
            return;
        }
        let wait = self.about(self.setup.trouble_every);
        self.at(wait, Event::Trouble);
        let Some(trouble) = self.troubles.pick(&mut self.rng, OUTSIDE) else {
            return;
        };
        if self.bring(trouble) {
            self.troubles.count(trouble);
            self.tell(|| format!("trouble: {trouble:?}"));
        }
    }

    fn bring(&mut self, trouble: Trouble) -> bool {
        let node = self.rng.random_range(0..self.nodes.len());
        let active = self.nodes.iter().position(|node| node.is_active()).unwrap_or(node);
        let worker = self.rng.random_range(0..self.workers.len());
        let stream = self.disk.is_stream();
        match trouble {
            Trouble::SchedulerKilled => {
                let up = self.nodes[node].is_up();
                if up {
                    self.kill(node);
                }
                up
            }
            Trouble::ClockForward | Trouble::ClockBack => {
                let hours = match self.rng.random_bool(0.1) {
                    true => self.rng.random_range(20..90),
                    false => self.rng.random_range(0..9),
                };
                let by = hours * HOUR_MS + self.rng.random_range(0..HOUR_MS);
                let sign = if trouble == Trouble::ClockForward { 1 } else { -1 };
                self.nodes[active].wall_off_ms += sign * by;
                true
            }
            Trouble::SchedulerStopped => {
                let until = self.now + self.rng.random_range(SECOND..40 * SECOND);
                // A second stop never ends the first: what has waited would be heard behind what came later.
                let stopped = &mut self.nodes[active].stopped_until;
                *stopped = until.max(*stopped);
                true
            }
            Trouble::RenewalLost if stream => {
                self.nodes[active].deaf_until = self.now + self.rng.random_range(SECOND..20 * SECOND);
                true
            }
            Trouble::FailoverLost if stream && self.disk.group_count() > 0 => {
                let groups = self.rng.random_range(0..6);
                let lost = self.disk.lose_last(groups);
                self.check(lost);
                self.settle_losses();
                self.disk.leased_until = self.now + self.rng.random_range(0..self.setup.office);
                groups > 0
            }
            Trouble::ConnectionLost => {
                let conns = self.conns_of(|conn| conn.worker == worker);
                conns.iter().for_each(|conn| self.break_conn(*conn));
                !conns.is_empty()
            }
            Trouble::Partition => {
                self.workers[worker].cut_off_until = self.now + self.rng.random_range(SECOND..90 * SECOND);
                if self.rng.random_bool(0.7) {
                    self.conns_of(|conn| conn.worker == worker)
                        .into_iter()
                        .for_each(|conn| self.break_conn(conn));
                }
                true
            }
            Trouble::SandboxDied => {
                let living: Vec<String> = self.workers[worker].folder.keys().cloned().collect();
                let Some(name) = living.get(self.rng.random_range(0..living.len().max(1))) else {
                    return false;
                };
                if let Some(sandbox) = self.workers[worker].folder.get_mut(name) {
                    sandbox.dead = true;
                }
                true
            }
            _ => self.bring_to_worker(trouble, worker),
        }
    }

    fn bring_to_worker(&mut self, trouble: Trouble, worker: usize) -> bool {
        if self.workers[worker].process.is_none() {
            return false;
        }
        let away = self.about(8 * SECOND);
        match trouble {
            Trouble::WorkerKilled => self.kill_worker(worker, away),
            Trouble::WorkerStopped => {
                let until = self.now + self.rng.random_range(SECOND..90 * SECOND);
                let stopped = &mut self.workers[worker].stopped_until;
                *stopped = until.max(*stopped);
            }
            Trouble::WorkerReleased => self.release(worker, away),
            Trouble::MachineRebooted => self.reboot(worker, away + 10 * SECOND),
            Trouble::WorkerAway => {
                let away = self.rng.random_range(2 * MINUTE..20 * MINUTE);
                match self.rng.random_bool(0.3) {
                    true => self.reboot(worker, away),
                    false => self.kill_worker(worker, away),
                }
            }
            _ => return false,
        }
        true
    }

    /// All trouble is over, and what it has left behind is put right, as far as machines do that by themselves.
    pub fn heal(&mut self) {
        self.tell(|| "all trouble is over".to_owned());
        self.troubles.end();
        for node in &mut self.nodes {
            node.deaf_until = 0;
            node.wall_off_ms = 0;
        }
    }
}
