//! The service for the operator: organizations and their API keys, and the custody of sandboxes.

use evalgrid_domain::{
    ids::{KeyId, OrgId},
    permission::Permission,
};
use evalgrid_proto::{
    log::v1::{KeyCreated, event::Kind},
    v1::{self, admin_server::Admin},
};
use evalgrid_workflow::{Key, State, decide};
use tonic::{Request, Response, Status};

use crate::{
    auth::{self, SharedToken, stopping},
    clock::World,
    collect::{CollectStream, Collector},
    engine::Engine,
    reaper, trials,
    workers::chance,
};

/// Longest slug of an organization and longest name of a key.
const MAX_SLUG: usize = 64;
const MAX_KEY_NAME: usize = 200;
/// Characters of a key shown again later.
const START_LENGTH: usize = 8;

/// The service.
#[derive(Clone)]
pub struct AdminService {
    /// State.
    pub engine: Engine,
    /// Who may call.
    pub token: SharedToken,
    /// Removes objects that nothing refers to.
    pub collector: Collector,
}

/// A fresh secret: `anp_` and 40 characters, 238 bits.
pub fn new_secret(world: &dyn World) -> String {
    const ALPHABET: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    let mut secret = String::from("anp_");
    while secret.len() < 44 {
        let mut byte = [0];
        world.random(&mut byte);
        // 248 is the largest multiple of 62 in a byte: no character is likelier than another.
        if byte[0] < 248 {
            secret.push(char::from(ALPHABET[usize::from(byte[0]) % 62]));
        }
    }
    secret
}

/// Creates a key for the organization with this slug, and the organization where it is not there yet. The secret is not kept.
pub async fn create_key(engine: &Engine, slug: &str, name: &str, permissions: Vec<String>, secret: &str) -> Result<v1::Key, Status> {
    let slug_fits = |slug: &str| {
        slug.bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
            && !slug.starts_with('-')
    };
    if slug.is_empty() || slug.len() > MAX_SLUG || !slug_fits(slug) {
        return Err(Status::invalid_argument(format!(
            "organization: 1 to {MAX_SLUG} lower-case letters, digits and hyphens"
        )));
    }
    if name.chars().count() > MAX_KEY_NAME {
        return Err(Status::invalid_argument(format!("name: {MAX_KEY_NAME} characters at most")));
    }
    let permissions = match permissions.is_empty() {
        true => Permission::ALL.iter().map(|(name, _)| (*name).to_owned()).collect(),
        false => permissions,
    };
    if let Some(unknown) = permissions.iter().find(|held| Permission::from_name(held).is_none()) {
        let known = Permission::ALL.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        return Err(Status::invalid_argument(format!("permissions: {unknown:?} is none of {known}")));
    }
    let mut random = [0; 20];
    engine.world().random(&mut random);
    let (organization_random, key_random) = (first_ten(&random), first_ten(&random[10..]));
    let created = engine.settled_turn(|core| {
        decide::room_for_key(&core.state, slug).map_err(|full| Status::resource_exhausted(full.to_string()))?;
        let now_ms = core.now_ms();
        let fresh = decide::create_organization(&core.state, slug, OrgId::new(now_ms, organization_random), now_ms);
        core.commit_all(fresh);
        let Some(organization) = core.state.organization_by_slug(slug).map(|organization| organization.id) else {
            return Err(Status::internal("the organization could not be created"));
        };
        if let Some(refusal) = core
            .state
            .organization(&organization)
            .and_then(|organization| organization.immovable())
        {
            return Err(Status::failed_precondition(refusal.to_string()));
        }
        let id = KeyId::new(now_ms, key_random);
        core.commit(decide::event(
            now_ms,
            Kind::KeyCreated(KeyCreated {
                key_id: id.to_string(),
                organization_id: organization.to_string(),
                name: name.to_owned(),
                start: secret.chars().take(START_LENGTH).collect(),
                hash: auth::hash(secret).to_vec().into(),
                permissions,
            }),
        ));
        core.state
            .key(&id)
            .map(|key| message(&core.state, key))
            .ok_or_else(|| Status::internal("the key could not be created"))
    });
    created.await.map_err(|_| stopping())?
}

fn first_ten(bytes: &[u8]) -> [u8; 10] {
    let mut ten = [0; 10];
    ten.copy_from_slice(&bytes[..10]);
    ten
}

fn message(state: &State, key: &Key) -> v1::Key {
    v1::Key {
        id: key.id.to_string(),
        organization: state
            .organization(&key.organization)
            .map(|organization| organization.slug.clone())
            .unwrap_or_default(),
        name: key.name.clone(),
        start: key.start.clone(),
        permissions: key.permissions.clone(),
        created_at_ms: key.created_ms,
        revoked_at_ms: key.revoked_ms,
    }
}

#[tonic::async_trait]
impl Admin for AdminService {
    type CollectObjectsStream = CollectStream;

    async fn create_key(&self, request: Request<v1::CreateKeyRequest>) -> Result<Response<v1::CreatedKey>, Status> {
        self.token.check(request.metadata(), "operator's")?;
        let request = request.into_inner();
        let secret = new_secret(self.engine.world());
        let key = create_key(&self.engine, &request.organization, &request.name, request.permissions, &secret).await?;
        tracing::info!(organization = key.organization, key = key.id, "a key has been created");
        Ok(Response::new(v1::CreatedKey { key: Some(key), secret }))
    }

    async fn list_keys(&self, request: Request<v1::ListKeysRequest>) -> Result<Response<v1::KeyList>, Status> {
        self.token.check(request.metadata(), "operator's")?;
        let slug = request.into_inner().organization;
        let keys = self.engine.settled_turn(|core| {
            let all = core.state.keys().map(|key| message(&core.state, key));
            all.filter(|key| slug.is_empty() || key.organization == slug).collect()
        });
        Ok(Response::new(v1::KeyList {
            keys: keys.await.map_err(|_| stopping())?,
        }))
    }

    async fn revoke_key(&self, request: Request<v1::RevokeKeyRequest>) -> Result<Response<v1::Key>, Status> {
        self.token.check(request.metadata(), "operator's")?;
        let text = request.into_inner().id;
        let no_key = || Status::not_found("there is no living key with this id; `evalgrid keys list` shows them");
        let id: KeyId = text.parse().map_err(|_| no_key())?;
        let revoked = self.engine.settled_turn(|core| {
            let event = decide::revoke_key(&core.state, &id, core.now_ms()).map_err(|refusal| match refusal {
                decide::Refusal::OnTheMove => Status::failed_precondition(refusal.to_string()),
                _ => no_key(),
            })?;
            core.commit(event);
            core.state.key(&id).map(|key| message(&core.state, key)).ok_or_else(no_key)
        });
        let key = revoked.await.map_err(|_| stopping())??;
        tracing::info!(key = key.id, "a key has been revoked");
        Ok(Response::new(key))
    }
    async fn list_sandboxes(&self, request: Request<v1::ListSandboxesRequest>) -> Result<Response<v1::SandboxList>, Status> {
        self.token.check(request.metadata(), "operator's")?;
        let list = self.engine.settled_turn(|core| reaper::list(core)).await;
        Ok(Response::new(list.map_err(|_| stopping())?))
    }

    async fn reap_sandboxes(&self, request: Request<v1::ReapSandboxesRequest>) -> Result<Response<v1::SandboxList>, Status> {
        self.token.check(request.metadata(), "operator's")?;
        let dry_run = request.into_inner().dry_run;
        let mut chance = chance(self.engine.world());
        let asked = self.engine.settled_turn(|core| reaper::reap_now(core, dry_run, &mut chance)).await;
        let asked = asked.map_err(|_| stopping())?;
        tracing::info!(sandboxes = asked.total, dry_run, "the operator reaps sandboxes");
        Ok(Response::new(asked))
    }

    async fn show_trial(&self, request: Request<v1::ShowTrialRequest>) -> Result<Response<v1::TrialReport>, Status> {
        self.token.check(request.metadata(), "operator's")?;
        trials::show(&self.engine, &request.into_inner().id).await.map(Response::new)
    }

    async fn resolve_trial(&self, request: Request<v1::ResolveTrialRequest>) -> Result<Response<v1::TrialReport>, Status> {
        self.token.check(request.metadata(), "operator's")?;
        let v1::ResolveTrialRequest { id, reason } = request.into_inner();
        trials::resolve(&self.engine, &id, &reason).await.map(Response::new)
    }

    async fn collect_objects(&self, request: Request<v1::CollectObjectsRequest>) -> Result<Response<CollectStream>, Status> {
        self.token.check(request.metadata(), "operator's")?;
        self.collector.start(request.into_inner()).map(Response::new)
    }
}
