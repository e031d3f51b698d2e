//! Trials and their jobs that wait for a worker: fairly between organizations, and back to the sandbox they left where one still lives.
//!
//! The queue holds exactly the trials that are queued: whoever changes a trial's phase takes it out first.

mod shares;

use std::collections::{BTreeMap, HashMap};

use evalgrid_domain::ids::OrgId;

use self::shares::{Shares, Waiting};
use crate::jobs::Target;

/// One wait: who it is, and where it stands.
#[derive(Clone, Debug)]
pub(crate) struct Wait {
    pub key: Target,
    /// Its place among those that came before and after it.
    pub ticket: u64,
    /// Milliseconds since the epoch before which it may not be served.
    pub not_before_ms: u64,
    pub organization: OrgId,
    /// Who can serve it: the provider of its fresh sandbox, or, for jobs, what [`crate::jobs`] calls those who ask.
    pub provider: String,
    pub model_key: String,
    /// In whose folder its sandbox waits. `None`: it needs a fresh one, and any worker will do.
    pub adopter: Option<String>,
}

/// Who may be served now.
pub(crate) struct Gates<'a> {
    /// Whether the provider may get one more sandbox.
    pub provider: &'a dyn Fn(&str) -> bool,
    /// Whether the model key may get one more trial.
    pub model_key: &'a dyn Fn(&str) -> bool,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queue {
    /// Trials that need a fresh sandbox, by provider.
    fresh: HashMap<String, Shares>,
    /// Trials whose sandbox waits in a worker's folder, by worker and model key.
    adoptable: HashMap<String, BTreeMap<String, Waiting>>,
    /// Those that must wait out a delay first, by when and ticket.
    delayed: BTreeMap<(u64, u64), Wait>,
    last_ticket: u64,
}

impl Queue {
    /// A ticket for a new wait.
    pub fn ticket(&mut self) -> u64 {
        self.last_ticket += 1;
        self.last_ticket
    }

    /// The newest ticket.
    pub fn last_ticket(&self) -> u64 {
        self.last_ticket
    }

    /// Tickets up to this one were given out before.
    pub fn use_tickets_after(&mut self, ticket: u64) {
        self.last_ticket = ticket;
    }

    pub fn push(&mut self, wait: Wait, now_ms: u64) {
        if wait.not_before_ms > now_ms {
            self.delayed.insert((wait.not_before_ms, wait.ticket), wait);
        } else {
            self.ready(&wait);
        }
    }

    /// Takes a trial out; false if it was not there.
    pub fn remove(&mut self, wait: &Wait) -> bool {
        if self.delayed.remove(&(wait.not_before_ms, wait.ticket)).is_some() {
            return true;
        }
        let Some(worker_id) = &wait.adopter else {
            let Some(shares) = self.fresh.get_mut(&wait.provider) else {
                return false;
            };
            let removed = shares.remove(&wait.organization, &wait.model_key, wait.ticket);
            if shares.is_empty() {
                self.fresh.remove(&wait.provider);
            }
            return removed;
        };
        let Some(by_model) = self.adoptable.get_mut(worker_id) else {
            return false;
        };
        let Some(waiting) = by_model.get_mut(&wait.model_key) else {
            return false;
        };
        let removed = waiting.remove(&wait.ticket).is_some();
        if waiting.is_empty() {
            by_model.remove(&wait.model_key);
        }
        if by_model.is_empty() {
            self.adoptable.remove(worker_id);
        }
        removed
    }

    /// One trial of the organization is served with a fresh sandbox of the provider. Before it is taken out, or its turn would be lost.
    pub fn charge(&mut self, provider: &str, organization: &OrgId) {
        if let Some(shares) = self.fresh.get_mut(provider) {
            shares.charge(organization);
        }
    }

    /// When the next of those that wait out a delay at `now_ms` may be served.
    pub fn next_delay_ms(&self, now_ms: u64) -> Option<u64> {
        self.delayed.range((now_ms + 1, 0)..).next().map(|((at, _), _)| *at)
    }

    /// The trial to serve next on a worker with a free slot.
    pub fn next_for(&mut self, worker_id: &str, providers: &[String], now_ms: u64, gates: &Gates<'_>) -> Option<Target> {
        while let Some(entry) = self.delayed.first_entry() {
            if entry.key().0 > now_ms {
                break;
            }
            let wait = entry.remove();
            self.ready(&wait);
        }
        let adoptable = self.adoptable.get(worker_id).into_iter().flatten();
        let first = adoptable
            .filter(|(model_key, _)| (gates.model_key)(model_key))
            .filter_map(|(_, waiting)| waiting.first_key_value())
            .min();
        if let Some((_, key)) = first {
            return Some(*key);
        }
        let open = providers.iter().filter(|provider| (gates.provider)(provider));
        open.filter_map(|provider| self.fresh.get(provider)?.next(gates.model_key)).next()
    }

    /// Who could serve those that wait for nobody in particular, once their delays are over.
    pub fn waited_for(&self, now_ms: u64) -> impl Iterator<Item = &str> {
        let due = self.delayed.range(..=(now_ms, u64::MAX));
        let due = due
            .filter(|(_, wait)| wait.adopter.is_none())
            .map(|(_, wait)| wait.provider.as_str());
        self.fresh.keys().map(String::as_str).chain(due)
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        let adoptable = self.adoptable.values().flat_map(BTreeMap::values).map(Waiting::len);
        let fresh = self.fresh.values().map(Shares::len);
        self.delayed.len() + adoptable.sum::<usize>() + fresh.sum::<usize>()
    }

    fn ready(&mut self, wait: &Wait) {
        match &wait.adopter {
            Some(worker_id) => {
                let by_model = self.adoptable.entry(worker_id.clone()).or_default();
                by_model.entry(wait.model_key.clone()).or_default().insert(wait.ticket, wait.key);
            }
            None => {
                let shares = self.fresh.entry(wait.provider.clone()).or_default();
                shares.push(wait.organization, &wait.model_key, wait.ticket, wait.key);
            }
        }
    }
}
