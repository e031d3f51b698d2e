//! An organization moves from cell to cell: it is frozen where it is, its batches and then itself are imported where it goes, and it leaves.
//! At no time it changes in two cells.

use evalgrid_domain::{ids::OrgId, limits};
use evalgrid_proto::log::v1::{self as log, Event, event::Kind};
use prost::Message as _;

use crate::{
    apply::{ApplyError, illegal, key_id, organization_id},
    decide::event,
    snapshot::{save_key, save_organization},
    state::{Key, Organization, State},
};

/// Keys of an organization that can move: they travel in one event, which must fit a commit group.
pub const MAX_TRAVELLING_KEYS: usize = 10_000;

/// Where an organization lives, as far as this cell knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Residence {
    /// In this cell.
    #[default]
    Here,
    /// In this cell, and it may be on its way: nothing of it changes.
    Frozen,
    /// In another cell.
    Moved,
}

/// Why a step of a move is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No such organization.
    #[error("there is no organization {0:?} in this cell; `evalgrid organizations list` shows them")]
    Unknown(String),
    /// Its batches run.
    #[error("{running} of its batches are running; wait until they have ended, or cancel them")]
    Running {
        /// How many.
        running: usize,
    },
    /// Batches have ended and are not yet archived.
    #[error("the results of {0} of its batches are still being written; try again in a moment")]
    NotArchived(usize),
    /// It must be frozen for this.
    #[error("it is not frozen in this cell; begin the move again")]
    NotFrozen,
    /// An older life of it has not ended where it should arrive.
    #[error("an older move away from this cell was never finished; run that one again first")]
    LivesHere,
    /// It lives elsewhere.
    #[error("it has moved to another cell")]
    Moved,
    /// Another organization has its slug.
    #[error("another organization of this cell has the slug {0:?}")]
    SlugTaken(String),
    /// Another organization has its key.
    #[error("another organization of this cell has one of its keys")]
    KeyTaken,
    /// Too many keys.
    #[error("it has {0} keys; at most {MAX_TRAVELLING_KEYS} can move")]
    TooManyKeys(usize),
    /// The cell is full.
    #[error(transparent)]
    Full(#[from] limits::Full),
    /// What arrived is no organization.
    #[error("what arrived is no organization: {0}")]
    Unreadable(String),
}

impl Organization {
    /// Why nothing of it may be changed here now.
    pub fn immovable(&self) -> Option<crate::decide::Refusal> {
        match self.residence {
            Residence::Here => None,
            Residence::Frozen => Some(crate::decide::Refusal::OnTheMove),
            Residence::Moved => Some(crate::decide::Refusal::Elsewhere),
        }
    }
}

fn find<'a>(state: &'a State, slug: &str) -> Result<&'a Organization, Refusal> {
    state.organization_by_slug(slug).ok_or_else(|| Refusal::Unknown(slug.to_owned()))
}

/// Freezes an organization. `None`: it is frozen already.
pub fn freeze(state: &State, slug: &str, now_ms: u64) -> Result<Option<Event>, Refusal> {
    let organization = find(state, slug)?;
    match organization.residence {
        Residence::Frozen => Ok(None),
        Residence::Moved => Err(Refusal::Moved),
        Residence::Here if !organization.running.is_empty() => Err(Refusal::Running {
            running: organization.running.len(),
        }),
        Residence::Here => {
            let organization_id = organization.id.to_string();
            Ok(Some(event(
                now_ms,
                Kind::OrganizationFrozen(log::OrganizationFrozen { organization_id }),
            )))
        }
    }
}

/// Calls a move off. `None`: the organization is not frozen.
pub fn unfreeze(state: &State, slug: &str, now_ms: u64) -> Result<Option<Event>, Refusal> {
    let organization = find(state, slug)?;
    match organization.residence {
        Residence::Here => Ok(None),
        Residence::Moved => Err(Refusal::Moved),
        Residence::Frozen => {
            let organization_id = organization.id.to_string();
            Ok(Some(event(
                now_ms,
                Kind::OrganizationUnfrozen(log::OrganizationUnfrozen { organization_id }),
            )))
        }
    }
}

/// Ends a frozen organization's life in this cell. `None`: it has ended.
pub fn leave(state: &State, slug: &str, now_ms: u64) -> Result<Option<Event>, Refusal> {
    let organization = find(state, slug)?;
    match organization.residence {
        Residence::Moved => Ok(None),
        Residence::Here => Err(Refusal::NotFrozen),
        Residence::Frozen => {
            let organization_id = organization.id.to_string();
            Ok(Some(event(
                now_ms,
                Kind::OrganizationMoved(log::OrganizationMoved { organization_id }),
            )))
        }
    }
}

/// A frozen organization as it travels, all of whose batches are archived.
pub fn export(state: &State, slug: &str) -> Result<(OrgId, log::TravellingOrganization), Refusal> {
    let organization = find(state, slug)?;
    if organization.residence != Residence::Frozen {
        return Err(Refusal::NotFrozen);
    }
    if !organization.in_memory.is_empty() {
        return Err(Refusal::NotArchived(organization.in_memory.len()));
    }
    let hashes: std::collections::HashMap<_, _> = state.keys_by_hash.iter().map(|(hash, id)| (*id, *hash)).collect();
    let keys = state.keys().filter(|key| key.organization == organization.id);
    let keys: Vec<_> = keys
        .map(|key| save_key(key, hashes.get(&key.id).copied().unwrap_or_default()))
        .collect();
    if keys.len() > MAX_TRAVELLING_KEYS {
        return Err(Refusal::TooManyKeys(keys.len()));
    }
    let saved = log::SavedOrganization {
        residence: log::saved_organization::Residence::Here.into(),
        generation: organization.generation + 1,
        ..save_organization(organization)
    };
    let travelling = log::TravellingOrganization {
        organization: Some(saved),
        keys,
    };
    Ok((organization.id, travelling))
}

/// Whether an organization may arrive: its id, or `None` where it has arrived already.
pub fn arrival(state: &State, travelling: &[u8]) -> Result<Option<OrgId>, Refusal> {
    let unreadable = |text: String| Refusal::Unreadable(text);
    let travelling = log::TravellingOrganization::decode(travelling).map_err(|error| unreadable(error.to_string()))?;
    let saved = travelling
        .organization
        .ok_or_else(|| unreadable("it has no organization".to_owned()))?;
    let id = organization_id(&saved.id).map_err(|error| unreadable(error.to_string()))?;
    match state.organization(&id) {
        // By this very move, and it may have moved on since.
        Some(known) if known.generation >= saved.generation => return Ok(None),
        Some(known) if known.residence != Residence::Moved => return Err(Refusal::LivesHere),
        _ => {}
    }
    if state.organization_by_slug(&saved.slug).is_some_and(|other| other.id != id) {
        return Err(Refusal::SlugTaken(saved.slug));
    }
    if travelling.keys.len() > MAX_TRAVELLING_KEYS {
        return Err(Refusal::TooManyKeys(travelling.keys.len()));
    }
    let others = state.keys().filter(|key| key.organization != id).count();
    limits::API_KEYS.check((others + travelling.keys.len()) as u64)?;
    if state.organization(&id).is_none() {
        limits::ORGANIZATIONS.check(state.organization_count() as u64 + 1)?;
    }
    for key in &travelling.keys {
        let created = key.created.as_ref().ok_or_else(|| unreadable("a key of nothing".to_owned()))?;
        let key = key_id(&created.key_id).map_err(|error| unreadable(error.to_string()))?;
        let hash = <[u8; 32]>::try_from(created.hash.as_ref()).map_err(|_| unreadable("a key without a hash".to_owned()))?;
        if created.organization_id != saved.id {
            return Err(unreadable("a key of another organization".to_owned()));
        }
        let by_hash = state.keys_by_hash.get(&hash).and_then(|id| state.key(id));
        let others = |known: Option<&Key>| known.is_some_and(|known| known.organization != id);
        if others(by_hash) || others(state.key(&key)) {
            return Err(Refusal::KeyTaken);
        }
    }
    Ok(Some(id))
}

/// The organization has arrived, after all its batches.
pub fn arrived(travelling: bytes::Bytes, now_ms: u64) -> Event {
    event(
        now_ms,
        Kind::OrganizationImported(log::OrganizationImported { organization: travelling }),
    )
}

impl State {
    /// Every organization, those that have moved away too.
    pub fn organizations(&self) -> impl Iterator<Item = &Organization> {
        self.organizations.values()
    }

    pub(crate) fn reside(&mut self, id: &str, from: Residence, to: Residence) -> Result<(), ApplyError> {
        match self.organizations.get_mut(&organization_id(id)?) {
            Some(organization) if organization.residence == from => organization.residence = to,
            _ => return illegal(format!("an organization becomes {to:?} that was not {from:?}")),
        }
        Ok(())
    }

    pub(crate) fn organization_imported(&mut self, imported: &log::OrganizationImported) -> Result<(), ApplyError> {
        let Ok(Some(id)) = arrival(self, &imported.organization) else {
            return illegal("an organization arrives that cannot");
        };
        // What it left behind when it moved away.
        if let Some(old) = self.organizations.remove(&id) {
            self.slugs.remove(&old.slug);
            self.keys.retain(|_, key| key.organization != id);
            let keys = &self.keys;
            self.keys_by_hash.retain(|_, key| keys.contains_key(key));
        }
        let Ok(travelling) = log::TravellingOrganization::decode(&imported.organization[..]) else {
            return illegal("an organization arrives that cannot be read");
        };
        if let Some(organization) = &travelling.organization {
            self.restore_organization(organization)?;
        }
        for key in &travelling.keys {
            self.restore_key(key)?;
        }
        Ok(())
    }
}
