//! Who is asking: API keys of organizations, the workers' token, the operator's token.

use evalgrid_domain::ids::OrgId;
use evalgrid_workflow::Residence;
use sha2::{Digest as _, Sha256};
use tonic::{Status, metadata::MetadataMap};

use crate::engine::Engine;

/// A caller with an API key.
#[derive(Clone, Debug)]
pub struct Caller {
    /// Whose key it is.
    pub organization: OrgId,
    /// What the key may do.
    pub permissions: Vec<String>,
    /// The key's label.
    pub key_name: String,
    /// The secret's first characters.
    pub key_start: String,
}

impl Caller {
    /// Refuses a caller whose key lacks `permission`.
    pub fn require(&self, permission: &str) -> Result<(), Status> {
        match self.permissions.iter().any(|held| held == permission) {
            true => Ok(()),
            false => Err(Status::permission_denied(format!(
                "this key lacks the permission {permission}; ask for a key that has it"
            ))),
        }
    }
}

/// The SHA-256 of a secret: all that is kept of it.
pub fn hash(secret: &str) -> [u8; 32] {
    Sha256::digest(secret).into()
}

/// The bearer token of a request.
pub fn bearer(metadata: &MetadataMap) -> Result<&str, Status> {
    let missing = || Status::unauthenticated("send \"authorization: Bearer <API key>\"");
    let value = metadata
        .get("authorization")
        .and_then(|value| value.to_str().ok())
        .ok_or_else(missing)?;
    let (scheme, token) = value.split_once(' ').ok_or_else(missing)?;
    if !scheme.eq_ignore_ascii_case("bearer") || token.trim().is_empty() {
        return Err(missing());
    }
    Ok(token.trim())
}

/// The organization behind an API key.
pub async fn caller(engine: &Engine, metadata: &MetadataMap) -> Result<Caller, Status> {
    let hash = hash(bearer(metadata)?);
    let found = engine.settled_turn(|core| {
        let key = core.state.key_by_hash(&hash)?;
        let moved = core
            .state
            .organization(&key.organization)
            .is_some_and(|organization| organization.residence == Residence::Moved);
        let caller = Caller {
            organization: key.organization,
            permissions: key.permissions.clone(),
            key_name: key.name.clone(),
            key_start: key.start.clone(),
        };
        Some((!moved).then_some(caller))
    });
    match found.await.map_err(|_| stopping())? {
        Some(Some(caller)) => Ok(caller),
        // Unauthenticated, like a key that was never here: whoever asks on is to ask the other cells.
        Some(None) => Err(Status::unauthenticated("moved: this key's organization lives in another cell now")),
        None => Err(Status::unauthenticated("this API key is not known, or was revoked")),
    }
}

/// A token that the server shares with its own people or machines.
#[derive(Clone)]
pub struct SharedToken([u8; 32]);

impl SharedToken {
    /// Knows it again by its hash.
    pub fn new(secret: &str) -> SharedToken {
        SharedToken(hash(secret))
    }

    /// Refuses everybody else. Hashes are compared, so the time it takes tells nothing of the secret.
    pub fn check(&self, metadata: &MetadataMap, whose: &str) -> Result<(), Status> {
        match hash(bearer(metadata)?) == self.0 {
            true => Ok(()),
            false => Err(Status::unauthenticated(format!("this is not the {whose} token of this scheduler"))),
        }
    }
}

/// What everybody hears while the process ends.
pub fn stopping() -> Status {
    Status::unavailable("the scheduler is stopping; try again")
}
