//! Objects of the scheduler's store, on a connection of their own: evidence up, start requests and large step results down.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use evalgrid_domain::request::SuiteBatchRequest;
use evalgrid_proto::v1::{ObjectRef, PutObjectChunk, WorkerObjectRequest};
use sha2::{Digest as _, Sha256};
use tokio::{sync::OnceCell, time::timeout};
use tonic::Status;

use crate::{Client, backoff::Pauses};

/// Bytes of one message of a transfer: a few of the stream's windows.
const CHUNK_BYTES: usize = 256 << 10;
/// One try of one transfer. The largest object has about 100 MiB.
const TRANSFER_DEADLINE: Duration = Duration::from_secs(120);
/// Tries of one transfer. While the scheduler is away they only bridge the time until the lease runs out, which ends the trial anyway.
const MAX_TRIES: u32 = 30;
/// Between tries.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Between tries.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// JSON of start requests that are kept decoded: the largest one twice.
const CACHE_BYTES: u64 = 128 << 20;
/// Bytes of JSON that are decoded at once; more would keep other trials waiting and goes to a thread of its own.
const INLINE_DECODE_BYTES: usize = 256 << 10;

/// An object cannot be stored, or not be had.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    /// For as long as it was worth trying.
    #[error("the object store did not answer: {0}")]
    Unreachable(#[source] Box<Status>),
    /// Asking again would give the same answer.
    #[error("the object store refused: {0}")]
    Refused(#[source] Box<Status>),
    /// Other bytes than its hash says.
    #[error("the object {0} is not what its name says")]
    Corrupt(String),
    /// No start request.
    #[error("the object {0} cannot be read: {1}")]
    Unreadable(String, String),
}

/// See the top of this file.
pub struct Objects {
    client: Client,
    requests: Mutex<Cache>,
}

impl Objects {
    /// Over a connection of its own.
    pub fn new(client: Client) -> Self {
        Self {
            client,
            requests: Mutex::new(Cache::new(CACHE_BYTES)),
        }
    }

    /// Stores bytes durably.
    pub async fn put(&self, organization: &str, bytes: Bytes) -> Result<ObjectRef, ObjectError> {
        retry(|| self.put_once(organization, bytes.clone())).await
    }

    async fn put_once(&self, organization: &str, mut bytes: Bytes) -> Result<ObjectRef, Status> {
        let first = PutObjectChunk {
            organization_id: organization.to_owned(),
            data: bytes.split_to(bytes.len().min(CHUNK_BYTES)),
        };
        let mut chunks = vec![first];
        while !bytes.is_empty() {
            chunks.push(PutObjectChunk {
                organization_id: String::new(),
                data: bytes.split_to(bytes.len().min(CHUNK_BYTES)),
            });
        }
        let request = self.client.authorized(tokio_stream::iter(chunks));
        Ok(self.client.grpc().put_object(request).await?.into_inner())
    }

    /// The bytes of an object.
    pub async fn get(&self, organization: &str, object: &ObjectRef) -> Result<Bytes, ObjectError> {
        let bytes = retry(|| self.get_once(organization, object)).await?;
        let digest: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        if digest == object.sha256 {
            Ok(bytes)
        } else {
            Err(ObjectError::Corrupt(object.sha256.clone()))
        }
    }

    async fn get_once(&self, organization: &str, object: &ObjectRef) -> Result<Bytes, Status> {
        let request = WorkerObjectRequest {
            organization_id: organization.to_owned(),
            object: Some(object.clone()),
        };
        let mut stream = self.client.grpc().get_object(self.client.authorized(request)).await?.into_inner();
        let mut bytes = BytesMut::new();
        while let Some(chunk) = stream.message().await? {
            if bytes.len() as u64 + chunk.data.len() as u64 > object.size {
                return Err(Status::data_loss("the object is larger than its name says"));
            }
            bytes.extend_from_slice(&chunk.data);
        }
        Ok(bytes.freeze())
    }

    /// A batch's start request. However many of its trials ask at once, it is fetched and decoded once.
    pub async fn request(&self, organization: &str, object: &ObjectRef) -> Result<Arc<SuiteBatchRequest>, ObjectError> {
        let cell = self
            .requests
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .cell(organization, object);
        let decoded = cell.get_or_try_init(|| async {
            let bytes = self.get(organization, object).await?;
            let decode = move || serde_json::from_slice::<SuiteBatchRequest>(&bytes);
            let decoded = if object.size as usize <= INLINE_DECODE_BYTES {
                decode()
            } else {
                let unreadable = |error: tokio::task::JoinError| ObjectError::Unreadable(object.sha256.clone(), error.to_string());
                tokio::task::spawn_blocking(decode).await.map_err(unreadable)?
            };
            decoded
                .map(Arc::new)
                .map_err(|error| ObjectError::Unreadable(object.sha256.clone(), error.to_string()))
        });
        decoded.await.cloned()
    }
}

/// The one layer of retries for transfers.
async fn retry<T, F: Future<Output = Result<T, Status>>>(mut attempt: impl FnMut() -> F) -> Result<T, ObjectError> {
    let mut pauses = Pauses::new(FIRST_PAUSE, LONGEST_PAUSE);
    let mut tries = 1;
    loop {
        let result = timeout(TRANSFER_DEADLINE, attempt()).await;
        let status = match result.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer in time"))) {
            Ok(answer) => return Ok(answer),
            Err(status) => status,
        };
        if is_refusal(status.code()) {
            return Err(ObjectError::Refused(Box::new(status)));
        }
        if tries == MAX_TRIES {
            return Err(ObjectError::Unreachable(Box::new(status)));
        }
        tries += 1;
        tokio::time::sleep(pauses.next()).await;
    }
}

/// Asking again would give the same answer.
fn is_refusal(code: tonic::Code) -> bool {
    use tonic::Code::*;
    matches!(
        code,
        InvalidArgument | NotFound | PermissionDenied | Unauthenticated | Unimplemented | FailedPrecondition | OutOfRange
    )
}

type Cell = Arc<OnceCell<Arc<SuiteBatchRequest>>>;

/// Decoded start requests, the least recently used forgotten first.
struct Cache {
    entries: HashMap<(String, String), Entry>,
    limit: u64,
    bytes: u64,
    uses: u64,
}

struct Entry {
    cell: Cell,
    bytes: u64,
    last_use: u64,
}

impl Cache {
    fn new(limit: u64) -> Self {
        Self {
            entries: HashMap::new(),
            limit,
            bytes: 0,
            uses: 0,
        }
    }

    fn cell(&mut self, organization: &str, object: &ObjectRef) -> Cell {
        self.uses += 1;
        let key = (organization.to_owned(), object.sha256.clone());
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.last_use = self.uses;
            return entry.cell.clone();
        }
        // There are at most as many entries as batches that run here: looking at all of them costs nothing.
        while self.bytes + object.size > self.limit {
            let Some(oldest) = self
                .entries
                .iter()
                .min_by_key(|(_, entry)| entry.last_use)
                .map(|(key, _)| key.clone())
            else {
                break;
            };
            self.bytes -= self.entries.remove(&oldest).map_or(0, |entry| entry.bytes);
        }
        let cell = Cell::default();
        self.bytes += object.size;
        self.entries.insert(
            key,
            Entry {
                cell: cell.clone(),
                bytes: object.size,
                last_use: self.uses,
            },
        );
        cell
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_bounded_by_bytes_and_forgets_the_least_used() {
        let object = |name: &str, size| ObjectRef { sha256: name.into(), size };
        let mut cache = Cache::new(10);
        let a = cache.cell("org", &object("a", 4));
        cache.cell("org", &object("b", 4));
        assert!(
            Arc::ptr_eq(&a, &cache.cell("org", &object("a", 4))),
            "the same cell for all who ask"
        );
        assert!(
            !Arc::ptr_eq(&a, &cache.cell("other", &object("a", 1))),
            "organizations share nothing"
        );
        cache.cell("org", &object("c", 4));
        let mut left: Vec<_> = cache.entries.keys().map(|(_, name)| name.as_str()).collect();
        left.sort_unstable();
        assert_eq!((left.as_slice(), cache.bytes), (&["a", "a", "c"][..], 9));
        cache.cell("org", &object("huge", 100));
        assert_eq!(
            (cache.entries.len(), cache.bytes),
            (1, 100),
            "one that is too big is still shared while it is used"
        );
    }
}
