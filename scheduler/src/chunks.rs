//! Objects in pieces over gRPC.

use std::pin::Pin;

use bytes::{Bytes, BytesMut};
use evalgrid_domain::ids::OrgId;
use evalgrid_proto::v1;
use evalgrid_store::{ObjectError, ObjectId, Objects};
use futures::{Stream, StreamExt as _};
use tonic::{Status, Streaming};

/// A piece is small enough not to hold up other streams of its connection.
const CHUNK_BYTES: usize = 256 * 1024;

/// An object on its way out.
pub type ChunkStream = Pin<Box<dyn Stream<Item = Result<v1::ObjectChunk, Status>> + Send>>;

/// Reads an object of an organization.
pub async fn read(objects: &dyn Objects, organization: &OrgId, reference: &v1::ObjectRef) -> Result<ChunkStream, Status> {
    let bytes = fetch(objects, organization, reference).await?;
    let count = bytes.len().div_ceil(CHUNK_BYTES);
    let chunks = (0..count).map(move |index| {
        let start = index * CHUNK_BYTES;
        Ok(v1::ObjectChunk {
            data: bytes.slice(start..bytes.len().min(start + CHUNK_BYTES)),
        })
    });
    Ok(futures::stream::iter(chunks).boxed())
}

/// The whole object.
pub async fn fetch(objects: &dyn Objects, organization: &OrgId, reference: &v1::ObjectRef) -> Result<Bytes, Status> {
    let id: ObjectId = reference
        .sha256
        .parse()
        .map_err(|error| Status::invalid_argument(format!("sha256: {error}")))?;
    let limit = evalgrid_store::objects::MAX_OBJECT_BYTES;
    match objects.get(&organization.to_string(), &id, limit).await {
        Ok(Some(bytes)) => Ok(bytes),
        Ok(None) => Err(Status::not_found("there is no object with this hash")),
        Err(error) => Err(failed(&error)),
    }
}

/// Takes an object in. The first piece names the organization.
pub async fn write(objects: &dyn Objects, mut pieces: Streaming<v1::PutObjectChunk>) -> Result<v1::ObjectRef, Status> {
    let first = pieces
        .message()
        .await?
        .ok_or_else(|| Status::invalid_argument("an object without a first piece"))?;
    let organization = first.organization_id;
    let mut bytes = BytesMut::from(first.data.as_ref());
    while let Some(piece) = pieces.message().await? {
        if bytes.len() + piece.data.len() > evalgrid_store::objects::MAX_OBJECT_BYTES {
            return Err(Status::resource_exhausted("the object is over the size limit"));
        }
        bytes.extend_from_slice(&piece.data);
    }
    let size = bytes.len() as u64;
    let id = objects.put(&organization, bytes.freeze()).await.map_err(|error| failed(&error))?;
    Ok(v1::ObjectRef {
        sha256: id.to_string(),
        size,
    })
}

/// One message for the caller, one for the log.
pub fn failed(error: &ObjectError) -> Status {
    match error {
        ObjectError::BadOrganization { .. } => Status::invalid_argument(error.to_string()),
        ObjectError::TooLarge { .. } => Status::resource_exhausted(error.to_string()),
        ObjectError::Damaged { .. } => {
            tracing::error!("objects: {error}");
            Status::data_loss("a stored object is damaged; the operator must restore it from a backup, the scheduler's log names it")
        }
        ObjectError::Store(_) | ObjectError::TimedOut { .. } | ObjectError::BadLocation { .. } | ObjectError::Abandoned => {
            tracing::error!("objects: {error}");
            Status::unavailable("the object store failed; the scheduler's log says why")
        }
    }
}
