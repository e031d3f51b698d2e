//! The service for moving organizations from cell to cell. The rules are `evalgrid_workflow::moving`'s; here is what they need of log, index and
//! objects. Every call may be repeated.

use std::{pin::Pin, time::Duration};

use bytes::Bytes;
use evalgrid_domain::ids::OrgId;
use evalgrid_proto::{
    log::v1::{BatchArchived, event::Kind},
    v1::{self, organization_part::Part, organizations_server::Organizations},
};
use evalgrid_workflow::{Event, Organization, Residence, State, decide, moving};
use futures::{Stream, StreamExt as _, stream};
use prost::Message as _;
use tonic::{Request, Response, Status, Streaming};

use crate::{
    archive,
    auth::{SharedToken, stopping},
    chunks,
    engine::Core,
    read::{self, Reader, blocking},
};

/// Batches in one message, and so in one commit group.
const ROWS_AT_ONCE: usize = 256;
/// Between two tries when the index fails.
const RETRY_DELAY: Duration = Duration::from_secs(2);
/// A mover that sends nothing for this long is gone; it copies the objects of 256 batches between two messages.
const PART_DEADLINE: Duration = Duration::from_secs(600);

/// The service.
#[derive(Clone)]
pub struct OrganizationsService {
    /// State, index and objects.
    pub reader: Reader,
    /// Who may call.
    pub token: SharedToken,
}

fn refused(refusal: &moving::Refusal) -> Status {
    match refusal {
        moving::Refusal::Unknown(_) => Status::not_found(refusal.to_string()),
        moving::Refusal::NotArchived(_) => Status::unavailable(refusal.to_string()),
        moving::Refusal::Unreadable(_) => Status::invalid_argument(refusal.to_string()),
        _ => Status::failed_precondition(refusal.to_string()),
    }
}

fn info(state: &State, organization: &Organization) -> v1::OrganizationInfo {
    let keys = state
        .keys()
        .filter(|key| key.organization == organization.id && key.revoked_ms.is_none());
    v1::OrganizationInfo {
        id: organization.id.to_string(),
        slug: organization.slug.clone(),
        name: organization.name.clone(),
        residence: match organization.residence {
            Residence::Here => v1::organization_info::Residence::Here,
            Residence::Frozen => v1::organization_info::Residence::Frozen,
            Residence::Moved => v1::organization_info::Residence::Moved,
        }
        .into(),
        running: organization.running.len() as u64,
        started: organization.started,
        keys: keys.count() as u64,
        generation: organization.generation,
    }
}

type Decide = fn(&State, &str, u64) -> Result<Option<Event>, moving::Refusal>;
type Parts = Pin<Box<dyn Stream<Item = Result<v1::OrganizationPart, Status>> + Send>>;

impl OrganizationsService {
    fn check<T>(&self, request: &Request<T>) -> Result<(), Status> {
        self.token.check(request.metadata(), "operator's")
    }

    async fn step(&self, request: Request<v1::OrganizationRequest>, decide: Decide) -> Result<Response<v1::OrganizationInfo>, Status> {
        self.check(&request)?;
        let slug = request.into_inner().slug;
        let done = self.reader.engine.settled_turn(|core| {
            let event = decide(&core.state, &slug, core.now_ms())?;
            core.commit_all(event);
            let organization = core.state.organization_by_slug(&slug);
            organization
                .map(|organization| info(&core.state, organization))
                .ok_or_else(|| moving::Refusal::Unknown(slug.clone()))
        });
        let info = done.await.map_err(|_| stopping())?.map_err(|refusal| refused(&refusal))?;
        tracing::info!(organization = info.slug, residence = ?info.residence(), "a step of a move");
        Ok(Response::new(info))
    }

    /// Rows of the organization behind `after`, and where to go on.
    async fn rows(&self, organization: &OrgId, after: Option<Vec<u8>>) -> Result<(Vec<Bytes>, Option<Vec<u8>>), Status> {
        let (index, prefix) = (self.reader.index.clone(), read::row_prefix(organization));
        let rows = blocking(move || index.scan(&prefix, after.as_deref(), ROWS_AT_ONCE)).await?;
        let last = rows.last().map(|(key, _)| key.clone());
        Ok((rows.into_iter().map(|(_, row)| row.into()).collect(), last))
    }

    /// Takes batches in: first into the log, then into the index. Not cancelled by a mover that goes away in between: what is in the log
    /// must get into the index before anything later does.
    async fn take(&self, batches: Vec<BatchArchived>) -> Result<(), Status> {
        let reader = self.reader.clone();
        let taken = tokio::spawn(async move {
            let mut unfiled = reader.filing.lock().await;
            let rows: Vec<_> = batches.iter().filter_map(archive::Unfiled::of).collect();
            let ((), position) = reader.engine.turn(|core: &mut Core| {
                let now_ms = core.now_ms();
                let events = batches.into_iter().map(|batch| decide::event(now_ms, Kind::BatchImported(batch)));
                core.commit_all(events);
            });
            unfiled.extend(rows);
            reader.engine.durable(position).await.map_err(|_| stopping())?;
            loop {
                match archive::file(&reader, &mut unfiled, position).await {
                    Ok(()) => return Ok(()),
                    Err(status) => tracing::warn!("moved batches are not in the index yet: {}", status.message()),
                }
                tokio::time::sleep(RETRY_DELAY).await;
            }
        });
        taken.await.map_err(|_| stopping())?
    }

    /// Whether the organization may arrive: its id, or `None` where it has arrived already.
    async fn arrival(&self, travelling: &Bytes) -> Result<Option<OrgId>, Status> {
        let arrival = self.reader.engine.settled_turn(|core| moving::arrival(&core.state, travelling));
        arrival.await.map_err(|_| stopping())?.map_err(|refusal| refused(&refusal))
    }

    /// Everything is here: the organization lives here from now on.
    async fn arrive(&self, travelling: Bytes) -> Result<(), Status> {
        let arrived = self.reader.engine.settled_turn(|core| {
            // Somebody else may have brought it meanwhile.
            if moving::arrival(&core.state, &travelling)?.is_some() {
                let event = moving::arrived(travelling, core.now_ms());
                core.commit(event);
            }
            Ok(())
        });
        let arrived: Result<(), moving::Refusal> = arrived.await.map_err(|_| stopping())?;
        arrived.map_err(|refusal| refused(&refusal))
    }
}

/// The batches of one message, each of which must be the organization's.
fn read_rows(organization: &OrgId, rows: &[Bytes]) -> Result<Vec<BatchArchived>, Status> {
    if rows.len() > ROWS_AT_ONCE {
        return Err(Status::invalid_argument(format!("more than {ROWS_AT_ONCE} batches in one message")));
    }
    let read = rows.iter().map(|row| {
        let batch = BatchArchived::decode(&row[..]).map_err(|error| Status::invalid_argument(format!("not a batch: {error}")))?;
        match batch.organization_id == organization.to_string() && archive::row(&batch).is_some() {
            true => Ok(batch),
            false => Err(Status::invalid_argument("a batch of another organization")),
        }
    });
    read.collect()
}

async fn next(parts: &mut Streaming<v1::OrganizationPart>) -> Result<Part, Status> {
    let message = tokio::time::timeout(PART_DEADLINE, parts.message()).await;
    let message = message.map_err(|_| Status::deadline_exceeded("the mover sends nothing any more"))??;
    message
        .and_then(|message| message.part)
        .ok_or_else(|| Status::aborted("the organization has not arrived whole; begin the move again"))
}

fn part(part: Part) -> v1::OrganizationPart {
    v1::OrganizationPart { part: Some(part) }
}

#[tonic::async_trait]
impl Organizations for OrganizationsService {
    type ExportStream = Parts;
    type GetObjectStream = chunks::ChunkStream;

    async fn list(&self, request: Request<v1::ListOrganizationsRequest>) -> Result<Response<v1::OrganizationList>, Status> {
        self.check(&request)?;
        let organizations = self.reader.engine.settled_turn(|core| {
            core.state
                .organizations()
                .map(|organization| info(&core.state, organization))
                .collect()
        });
        Ok(Response::new(v1::OrganizationList {
            organizations: organizations.await.map_err(|_| stopping())?,
        }))
    }

    async fn freeze(&self, request: Request<v1::OrganizationRequest>) -> Result<Response<v1::OrganizationInfo>, Status> {
        self.step(request, moving::freeze).await
    }

    async fn unfreeze(&self, request: Request<v1::OrganizationRequest>) -> Result<Response<v1::OrganizationInfo>, Status> {
        self.step(request, moving::unfreeze).await
    }

    async fn leave(&self, request: Request<v1::OrganizationRequest>) -> Result<Response<v1::OrganizationInfo>, Status> {
        self.step(request, moving::leave).await
    }

    async fn export(&self, request: Request<v1::OrganizationRequest>) -> Result<Response<Parts>, Status> {
        self.check(&request)?;
        let slug = request.into_inner().slug;
        let exported = self.reader.engine.settled_turn(|core| moving::export(&core.state, &slug));
        let (organization, travelling) = exported.await.map_err(|_| stopping())?.map_err(|refusal| refused(&refusal))?;
        let first = part(Part::Organization(travelling.encode_to_vec().into()));
        // Nothing of it changes while it is frozen, so reading page by page sees one moment.
        let service = self.clone();
        let rest = stream::unfold(Some((None, 0)), move |at| {
            let service = service.clone();
            async move {
                let (after, count) = at?;
                match service.rows(&organization, after).await {
                    Ok((_, None)) => Some((Ok(part(Part::Complete(count))), None)),
                    Ok((archived, last)) => {
                        let count = count + archived.len() as u64;
                        Some((Ok(part(Part::Batches(v1::ArchivedBatches { archived }))), Some((last, count))))
                    }
                    Err(status) => Some((Err(status), None)),
                }
            }
        });
        Ok(Response::new(stream::once(async { Ok(first) }).chain(rest).boxed()))
    }

    async fn import(&self, request: Request<Streaming<v1::OrganizationPart>>) -> Result<Response<v1::OrganizationImport>, Status> {
        self.check(&request)?;
        let mut parts = request.into_inner();
        let Part::Organization(travelling) = next(&mut parts).await? else {
            return Err(Status::invalid_argument("the organization comes first"));
        };
        let Some(organization) = self.arrival(&travelling).await? else {
            return Ok(Response::new(v1::OrganizationImport { already: true }));
        };
        let mut count = 0;
        loop {
            match next(&mut parts).await? {
                Part::Organization(_) => return Err(Status::invalid_argument("a second organization")),
                Part::Batches(batches) => {
                    let batches = read_rows(&organization, &batches.archived)?;
                    count += batches.len() as u64;
                    self.take(batches).await?;
                }
                Part::Complete(expected) if expected == count => break,
                Part::Complete(expected) => {
                    return Err(Status::aborted(format!(
                        "{count} of {expected} batches have arrived; begin the move again"
                    )));
                }
            }
        }
        self.arrive(travelling).await?;
        tracing::info!(%organization, batches = count, "an organization has arrived from another cell");
        Ok(Response::new(v1::OrganizationImport { already: false }))
    }

    async fn get_object(&self, request: Request<v1::WorkerObjectRequest>) -> Result<Response<chunks::ChunkStream>, Status> {
        self.check(&request)?;
        let request = request.into_inner();
        let organization: OrgId = request
            .organization_id
            .parse()
            .map_err(|_| Status::invalid_argument("organization_id: not an organization's id"))?;
        let reference = request.object.ok_or_else(|| Status::invalid_argument("object: is missing"))?;
        let objects = self.reader.objects.as_ref();
        Ok(Response::new(chunks::read(objects, &organization, &reference).await?))
    }

    async fn put_object(&self, request: Request<Streaming<v1::PutObjectChunk>>) -> Result<Response<v1::ObjectRef>, Status> {
        self.check(&request)?;
        let objects = self.reader.objects.as_ref();
        Ok(Response::new(chunks::write(objects, request.into_inner()).await?))
    }
}
