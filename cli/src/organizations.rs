//! `organizations`: who lives in a cell, and moving one to another cell.
//!
//! A move may be killed at any moment and begun again: each step is durable where it is taken, and taking it again changes nothing.

use std::{collections::BTreeSet, time::Duration};

use bytes::Bytes;
use evalgrid_proto::{
    log::v1::{BatchArchived, TravellingOrganization},
    v1::{
        Batch, ListOrganizationsRequest, ObjectRef, OrganizationImport, OrganizationInfo, OrganizationPart, OrganizationRequest,
        PutObjectChunk, WorkerObjectRequest, evidence::Place, organization_info::Residence, organization_part::Part,
    },
};
use prost::Message as _;
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

use crate::{
    Failure,
    client::{self, Organizations},
    options, output,
};

/// Bytes of one piece of an object.
const CHUNK_BYTES: usize = 256 << 10;
/// One object, of 256 MiB at most, from cell to cell.
const OBJECT_DEADLINE: Duration = Duration::from_secs(300);
/// Any other step: the target takes 256 batches in between two messages.
const STEP_DEADLINE: Duration = Duration::from_secs(60);
/// How often results that are still being written are waited for, a second each: they are seconds behind the end of a batch.
const ARCHIVE_TRIES: u32 = 60;

pub(crate) async fn run(command: options::Organizations) -> Result<(), Failure> {
    match command {
        options::Organizations::List { operator } => {
            let mut cell = client::organizations(&operator).await?;
            output::print(&table(&all(&mut cell).await?))
        }
        options::Organizations::Move(options) => {
            let options = *options;
            if options.from.iter().any(|address| options.to.contains(address)) {
                return Err(Failure::usage(
                    "--from and --to name the same cell",
                    "Name the cell to move to: --to http://host:port",
                ));
            }
            let mut ends = Ends {
                from: client::organizations_at(&options.from, options.from_token, options.from_token_file, "FROM").await?,
                to: match options.to.is_empty() {
                    true => return Err(Failure::usage("--to is missing", "Name the cell to move to: --to http://host:port")),
                    false => client::organizations_at(&options.to, options.to_token, options.to_token_file, "TO").await?,
                },
                slug: options.slug,
                shared_objects: options.shared_objects,
            };
            match options.abort {
                true => ends.abort().await,
                false => ends.go().await,
            }
        }
    }
}

async fn all(cell: &mut Organizations) -> Result<Vec<OrganizationInfo>, Failure> {
    let answer = step(cell.list(ListOrganizationsRequest {})).await?;
    Ok(answer.organizations)
}

fn table(organizations: &[OrganizationInfo]) -> String {
    let row = |organization: &OrganizationInfo| {
        let state = match organization.residence() {
            Residence::Here | Residence::Unspecified => "here",
            Residence::Frozen => "frozen",
            Residence::Moved => "moved",
        };
        format!(
            "{}  {state:6}  {}  {}, {} running, {}\n",
            organization.id,
            output::plain(&organization.slug),
            output::count(organization.started, "batch"),
            organization.running,
            output::count(organization.keys, "key"),
        )
    };
    organizations.iter().map(row).collect()
}

async fn step<T>(call: impl Future<Output = Result<tonic::Response<T>, Status>>) -> Result<T, Failure> {
    match timeout(STEP_DEADLINE, call).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => Err(refused(&status)),
        Err(_) => Err(refused(&Status::deadline_exceeded("a cell does not answer in time"))),
    }
}

fn refused(status: &Status) -> Failure {
    let next = match status.code() {
        Code::Unauthenticated => "Check the tokens: EVALGRID_FROM_TOKEN and EVALGRID_TO_TOKEN, or the files admin-token of both cells.",
        Code::FailedPrecondition | Code::NotFound | Code::InvalidArgument => "See both cells: evalgrid organizations list",
        _ => "Run the same command again: what was done stays done.",
    };
    Failure::new(output::plain(status.message()), next)
}

/// The two cells, and who moves.
struct Ends {
    from: Organizations,
    to: Organizations,
    slug: String,
    shared_objects: bool,
}

impl Ends {
    fn request(&self) -> OrganizationRequest {
        OrganizationRequest { slug: self.slug.clone() }
    }

    /// What the old cell says of it.
    async fn at_source(&mut self) -> Result<OrganizationInfo, Failure> {
        let found = all(&mut self.from).await?.into_iter().find(|known| known.slug == self.slug);
        found.ok_or_else(|| {
            Failure::new(
                format!("there is no organization {:?} in the cell that it should leave", self.slug),
                "See who is there: evalgrid organizations list",
            )
        })
    }

    /// Whether the organization has arrived by this move. It may have moved on from there since.
    async fn has_arrived(&mut self, source: &OrganizationInfo) -> Result<bool, Failure> {
        let known = all(&mut self.to).await?;
        Ok(known
            .iter()
            .any(|known| known.id == source.id && known.generation > source.generation))
    }

    async fn abort(&mut self) -> Result<(), Failure> {
        let source = self.at_source().await?;
        if self.has_arrived(&source).await? {
            return Err(Failure::new(
                format!("{} lives in the other cell already", self.slug),
                "Run the move again to end it; to bring the organization back, move it back.",
            ));
        }
        let request = self.request();
        step(self.from.unfreeze(request)).await?;
        output::line(&format!("{} stays where it is.", self.slug))
    }

    /// Before anything is frozen: another organization of this slug in the new cell could not be told from this one.
    async fn check_slug(&mut self, source: &OrganizationInfo) -> Result<(), Failure> {
        let known = all(&mut self.to).await?;
        match known.iter().any(|known| known.slug == source.slug && known.id != source.id) {
            true => Err(Failure::new(
                format!("the new cell has another organization {:?} already", self.slug),
                "An organization can only move to where its slug is free. Nothing was changed.",
            )),
            false => Ok(()),
        }
    }

    async fn go(&mut self) -> Result<(), Failure> {
        let source = self.at_source().await?;
        if source.residence() != Residence::Moved {
            self.check_slug(&source).await?;
            let request = self.request();
            step(self.from.freeze(request)).await?;
            output::line("1/3 frozen in the old cell")?;
        }
        if !self.has_arrived(&source).await? {
            if source.residence() == Residence::Moved {
                return Err(Failure::new(
                    format!("{} has left this cell for another one than --to", self.slug),
                    "Find it: evalgrid organizations list, for each cell.",
                ));
            }
            self.bring().await?;
        }
        output::line("2/3 lives in the new cell")?;
        let request = self.request();
        step(self.from.leave(request)).await?;
        output::line("3/3 has left the old cell")
    }

    /// Export, objects, import.
    async fn bring(&mut self) -> Result<(), Failure> {
        let mut parts = self.export().await?;
        let (sender, receiver) = mpsc::channel(1);
        let mut target = self.to.clone();
        // In a task of its own: the target hears parts while we copy the next objects.
        let import = tokio::spawn(async move { target.import(ReceiverStream::new(receiver)).await });
        let sent = self.send(&mut parts, &sender).await;
        drop(sender);
        let imported = timeout(STEP_DEADLINE, import).await;
        match imported {
            // The target's refusal says more than that it takes nothing any more.
            Ok(Ok(Err(status))) if sent.is_ok() || status.code() != Code::Aborted => Err(refused(&status)),
            Ok(Ok(Ok(answer))) => match answer.into_inner() {
                OrganizationImport { already: true } => Ok(()),
                OrganizationImport { already: false } => sent,
            },
            _ => sent.and(Err(refused(&Status::deadline_exceeded("the new cell does not answer in time")))),
        }
    }

    async fn export(&mut self) -> Result<tonic::Streaming<OrganizationPart>, Failure> {
        let mut tries = 0;
        loop {
            let request = self.request();
            match timeout(STEP_DEADLINE, self.from.export(request)).await {
                Ok(Ok(answer)) => return Ok(answer.into_inner()),
                Ok(Err(status)) if status.code() == Code::Unavailable && tries < ARCHIVE_TRIES => {
                    tries += 1;
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
                Ok(Err(status)) => return Err(refused(&status)),
                Err(_) => return Err(refused(&Status::deadline_exceeded("the old cell does not answer in time"))),
            }
        }
    }

    async fn send(&mut self, parts: &mut tonic::Streaming<OrganizationPart>, to: &mpsc::Sender<OrganizationPart>) -> Result<(), Failure> {
        let mut organization = String::new();
        loop {
            let message = timeout(STEP_DEADLINE, parts.message()).await;
            let message = message.unwrap_or_else(|_| Err(Status::deadline_exceeded("the old cell does not answer in time")));
            let Some(part) = message.map_err(|status| refused(&status))?.and_then(|message| message.part) else {
                return Err(refused(&Status::unavailable("the old cell broke off")));
            };
            let last = match &part {
                Part::Organization(travelling) => {
                    let travelling = TravellingOrganization::decode(&travelling[..]).map_err(unreadable)?;
                    organization = travelling.organization.unwrap_or_default().id;
                    false
                }
                Part::Batches(batches) => {
                    // Data first, then the pointers to it.
                    if !self.shared_objects {
                        for row in &batches.archived {
                            self.copy_batch(&organization, row).await?;
                        }
                    }
                    output::line(&format!("    {} copied", output::count(batches.archived.len(), "batch")))?;
                    false
                }
                Part::Complete(_) => {
                    // Nobody may have called the move off meanwhile.
                    if self.at_source().await?.residence() != Residence::Frozen {
                        return Err(refused(&Status::failed_precondition("the move was called off")));
                    }
                    true
                }
            };
            if to.send(OrganizationPart { part: Some(part) }).await.is_err() {
                return Err(refused(&Status::unavailable("the new cell takes nothing any more")));
            }
            if last {
                return Ok(());
            }
        }
    }

    /// Every object of an archived batch: its result, and what that names.
    async fn copy_batch(&mut self, organization: &str, row: &[u8]) -> Result<(), Failure> {
        let archived = BatchArchived::decode(row).map_err(unreadable)?;
        let Some(manifest) = archived.manifest else { return Ok(()) };
        let bytes = self.copy(organization, &manifest).await?;
        let batch = Batch::decode(bytes).map_err(unreadable)?;
        let mut copied = BTreeSet::new();
        for object in objects_of(&batch) {
            if copied.insert(&object.sha256) {
                self.copy(organization, object).await?;
            }
        }
        Ok(())
    }

    async fn copy(&mut self, organization: &str, object: &ObjectRef) -> Result<Bytes, Failure> {
        let copied = timeout(OBJECT_DEADLINE, self.copy_once(organization, object)).await;
        copied
            .unwrap_or_else(|_| Err(Status::deadline_exceeded(format!("the object {} takes too long", object.sha256))))
            .map_err(|status| refused(&status))
    }

    async fn copy_once(&mut self, organization: &str, object: &ObjectRef) -> Result<Bytes, Status> {
        let request = WorkerObjectRequest {
            organization_id: organization.to_owned(),
            object: Some(object.clone()),
        };
        let mut stream = self.from.get_object(request).await?.into_inner();
        let mut bytes = bytes::BytesMut::new();
        while let Some(chunk) = stream.message().await? {
            bytes.extend_from_slice(&chunk.data);
        }
        let bytes = bytes.freeze();
        let mut rest = bytes.clone();
        let mut chunks = Vec::new();
        while chunks.is_empty() || !rest.is_empty() {
            chunks.push(PutObjectChunk {
                organization_id: if chunks.is_empty() {
                    organization.to_owned()
                } else {
                    String::new()
                },
                data: rest.split_to(rest.len().min(CHUNK_BYTES)),
            });
        }
        let put = self.to.put_object(tokio_stream::iter(chunks)).await?.into_inner();
        match put.sha256 == object.sha256 {
            true => Ok(bytes),
            false => Err(Status::data_loss(format!("the object {} is not what its name says", object.sha256))),
        }
    }
}

fn unreadable(error: prost::DecodeError) -> Failure {
    Failure::new(
        format!("the old cell sent what cannot be read: {error}"),
        "Is this evalgrid as new as the cell's?",
    )
}

/// What an archived batch's result names.
fn objects_of(batch: &Batch) -> impl Iterator<Item = &ObjectRef> {
    let trials = batch.runs.iter().flat_map(|run| &run.trials);
    let evidence = trials.filter_map(|trial| match trial.outcome.as_ref()?.evidence.as_ref()?.place.as_ref()? {
        Place::Object(object) => Some(object),
        Place::Inline(_) => None,
    });
    batch.request.iter().chain(evidence)
}
