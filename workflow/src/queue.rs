//! Trials that wait for a worker: fairly between organizations, and back to the sandbox they left where one still lives.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use evalgrid_domain::ids::OrgId;

use crate::state::TrialKey;

/// An entry is valid only while its trial still waits under the same ticket; others are dropped when they surface.
#[derive(Clone, Copy, Debug)]
struct Entry {
    key: TrialKey,
    ticket: u64,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queue {
    /// Trials that need a fresh sandbox, by provider and organization.
    fresh: BTreeMap<String, BTreeMap<OrgId, VecDeque<Entry>>>,
    /// Trials whose sandbox waits in a worker's folder.
    adoptable: HashMap<String, VecDeque<Entry>>,
    /// Fresh ones that must wait out a delay first: (when, ticket).
    delayed: BTreeSet<(u64, u64)>,
    delayed_entries: HashMap<u64, (Entry, String, OrgId)>,
    /// The organization served last, per provider: the next one goes first.
    served: BTreeMap<String, OrgId>,
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

    pub fn push_fresh(&mut self, key: TrialKey, ticket: u64, provider: &str, organization: OrgId, not_before_ms: u64, now_ms: u64) {
        let entry = Entry { key, ticket };
        if not_before_ms > now_ms {
            self.delayed.insert((not_before_ms, ticket));
            self.delayed_entries.insert(ticket, (entry, provider.to_owned(), organization));
        } else {
            self.ready(entry, provider, organization);
        }
    }

    pub fn push_adoptable(&mut self, key: TrialKey, ticket: u64, worker_id: &str) {
        self.adoptable
            .entry(worker_id.to_owned())
            .or_default()
            .push_back(Entry { key, ticket });
    }

    pub fn note_served(&mut self, provider: &str, organization: OrgId) {
        self.served.insert(provider.to_owned(), organization);
    }

    pub fn next_delay_ms(&self) -> Option<u64> {
        self.delayed.first().map(|(at, _)| *at)
    }

    /// Looks, and drops stale entries on the way; the entry itself stays until its trial is leased and its ticket goes stale.
    pub fn next_for(
        &mut self,
        worker_id: &str,
        providers: &[String],
        now_ms: u64,
        valid: &dyn Fn(TrialKey, u64) -> bool,
    ) -> Option<TrialKey> {
        while let Some(&(at, ticket)) = self.delayed.first() {
            if at > now_ms {
                break;
            }
            self.delayed.remove(&(at, ticket));
            if let Some((entry, provider, organization)) = self.delayed_entries.remove(&ticket) {
                self.ready(entry, &provider, organization);
            }
        }
        if let Some(waiting) = self.adoptable.get_mut(worker_id) {
            if let Some(key) = front(waiting, valid) {
                return Some(key);
            }
            self.adoptable.remove(worker_id);
        }
        for provider in providers {
            let Some(organizations) = self.fresh.get_mut(provider) else {
                continue;
            };
            let after: Vec<OrgId> = match self.served.get(provider) {
                Some(last) => {
                    let later = organizations.keys().filter(|id| *id > last);
                    later.chain(organizations.keys().filter(|id| *id <= last)).cloned().collect()
                }
                None => organizations.keys().cloned().collect(),
            };
            for organization in after {
                let Some(waiting) = organizations.get_mut(&organization) else {
                    continue;
                };
                if let Some(key) = front(waiting, valid) {
                    return Some(key);
                }
                organizations.remove(&organization);
            }
        }
        None
    }

    fn ready(&mut self, entry: Entry, provider: &str, organization: OrgId) {
        if !self.fresh.contains_key(provider) {
            self.fresh.insert(provider.to_owned(), BTreeMap::new());
        }
        if let Some(organizations) = self.fresh.get_mut(provider) {
            organizations.entry(organization).or_default().push_back(entry);
        }
    }
}

fn front(waiting: &mut VecDeque<Entry>, valid: &dyn Fn(TrialKey, u64) -> bool) -> Option<TrialKey> {
    while let Some(entry) = waiting.front() {
        if valid(entry.key, entry.ticket) {
            return Some(entry.key);
        }
        waiting.pop_front();
    }
    None
}
