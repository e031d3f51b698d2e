//! Fair shares of one provider between organizations: deficit round robin.
//!
//! Each organization that waits has a turn, a place in one order of all. The first of the order is served until its deficit is used up and then
//! goes to the end. Trials of a model key that takes no more now are passed over without being looked at one by one: each key has a lane, the
//! organizations with trials of that key by turn, and the lanes are ordered by their first. So a dispatch costs the logarithm of the
//! organizations, and one step for each key that is closed.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use evalgrid_domain::ids::OrgId;

use crate::jobs::Target;

/// What an organization may use up per turn. With every dispatch at the same cost, one of them per turn keeps shares equal within one.
const QUANTUM: u32 = 1;
/// What a dispatch costs.
const COST: u32 = 1;

/// Trials that wait, by ticket: in the order in which they came.
pub(super) type Waiting = BTreeMap<u64, Target>;

/// See the module.
#[derive(Clone, Debug, Default)]
pub(super) struct Shares {
    organizations: BTreeMap<OrgId, Share>,
    /// Who waits with a model key, by turn.
    lanes: BTreeMap<Arc<str>, BTreeMap<u64, OrgId>>,
    /// The first turn of each lane.
    heads: BTreeSet<(u64, Arc<str>)>,
    last_turn: u64,
}

#[derive(Clone, Debug)]
struct Share {
    turn: u64,
    deficit: u32,
    /// Never empty, and none of its values is.
    waiting: BTreeMap<Arc<str>, Waiting>,
}

impl Shares {
    pub fn push(&mut self, organization: OrgId, model_key: &str, ticket: u64, key: Target) {
        let share = self.organizations.entry(organization).or_insert_with(|| {
            self.last_turn += 1;
            Share {
                turn: self.last_turn,
                deficit: QUANTUM,
                waiting: BTreeMap::new(),
            }
        });
        if let Some(waiting) = share.waiting.get_mut(model_key) {
            waiting.insert(ticket, key);
            return;
        }
        let name: Arc<str> = self
            .lanes
            .get_key_value(model_key)
            .map_or_else(|| model_key.into(), |(name, _)| name.clone());
        let turn = share.turn;
        share.waiting.insert(name.clone(), [(ticket, key)].into());
        self.join_lane(&name, turn, organization);
    }

    pub fn remove(&mut self, organization: &OrgId, model_key: &str, ticket: u64) -> bool {
        let Some(share) = self.organizations.get_mut(organization) else {
            return false;
        };
        let Some(waiting) = share.waiting.get_mut(model_key) else {
            return false;
        };
        let removed = waiting.remove(&ticket).is_some();
        if waiting.is_empty() {
            let turn = share.turn;
            share.waiting.remove(model_key);
            if share.waiting.is_empty() {
                self.organizations.remove(organization);
            }
            self.leave_lane(model_key, turn);
        }
        removed
    }

    /// The trial to serve next, out of those whose model key is open.
    pub fn next(&self, open: &dyn Fn(&str) -> bool) -> Option<Target> {
        let (turn, lane) = self.heads.iter().find(|(_, lane)| open(lane))?;
        let organization = self.lanes.get(lane)?.get(turn)?;
        let waiting = self.organizations.get(organization)?.waiting.get(lane)?;
        waiting.first_key_value().map(|(_, key)| *key)
    }

    /// One trial of the organization is about to be served: once its share of this turn is used up, it goes to the end.
    pub fn charge(&mut self, organization: &OrgId) {
        let Some(share) = self.organizations.get_mut(organization) else {
            return;
        };
        share.deficit = share.deficit.saturating_sub(COST);
        if share.deficit >= COST {
            return;
        }
        share.deficit += QUANTUM;
        self.last_turn += 1;
        let (old, new) = (share.turn, self.last_turn);
        share.turn = new;
        let lanes: Vec<Arc<str>> = share.waiting.keys().cloned().collect();
        for lane in lanes {
            self.leave_lane(&lane, old);
            self.join_lane(&lane, new, *organization);
        }
    }

    pub fn len(&self) -> usize {
        let waiting = self.organizations.values().flat_map(|share| share.waiting.values());
        waiting.map(Waiting::len).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.organizations.is_empty()
    }

    fn join_lane(&mut self, name: &Arc<str>, turn: u64, organization: OrgId) {
        let lane = self.lanes.entry(name.clone()).or_default();
        let head = lane.first_key_value().map(|(turn, _)| *turn);
        lane.insert(turn, organization);
        if head.is_none_or(|head| turn < head) {
            if let Some(head) = head {
                self.heads.remove(&(head, name.clone()));
            }
            self.heads.insert((turn, name.clone()));
        }
    }

    fn leave_lane(&mut self, name: &str, turn: u64) {
        let Some((name, _)) = self.lanes.get_key_value(name) else { return };
        let name = name.clone();
        let Some(lane) = self.lanes.get_mut(&name) else { return };
        lane.remove(&turn);
        let head = lane.first_key_value().map(|(turn, _)| *turn);
        if head.is_none() {
            self.lanes.remove(&name);
        }
        if self.heads.remove(&(turn, name.clone())) {
            self.heads.extend(head.map(|head| (head, name)));
        }
    }
}
