//! Objects through the crate `object_store`: a folder of this machine, a folder that machines share, or an S3 bucket.
//!
//! An object lies at `<org>/<first two hex digits>/<hash>`: one byte that says how the rest is encoded, then the rest.
//!
//! In a folder, a put writes a file beside its place, syncs it, renames it and syncs the directories it changed. A directory that
//! another put has just made is not synced by this one; the journals of ext4, XFS and btrfs commit it with, or before, the file in it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::{BufMut, Bytes, BytesMut};
use futures::TryStreamExt as _;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::prefix::PrefixStore;
use object_store::{ClientConfigKey, ObjectStore, ObjectStoreExt, RetryConfig, local::LocalFileSystem};
use tokio::sync::RwLock;
use zstd::zstd_safe;

use super::{MAX_OBJECT_BYTES, ObjectError, ObjectId, Objects, OldObject, check_org};
use crate::disk;

/// The rest is the object itself.
const RAW: u8 = 0;
/// The rest is one zstd frame that states its content's length.
const ZSTD: u8 = 1;
/// Evidence is text that shrinks well at any level; CPU is what is short.
const ZSTD_LEVEL: i32 = 1;

/// What any call may take: some retries of a store that answers with errors for a while.
const CALL_WITHIN: Duration = Duration::from_secs(30);
/// What a transfer may take besides, per so many bytes: a slow line, but a line.
const BYTES_PER_SECOND: usize = 2 * 1024 * 1024;
/// A store that takes no connection for so long is as good as gone.
const CONNECT_WITHIN: &str = "5s";
const S3: &str = "s3://";
/// Puts and removals exclude each other by an object's first byte modulo this: enough that puts hardly ever wait for a removal.
const LOCKS: usize = 64;

/// Objects in a store of the crate `object_store`.
pub struct StoredObjects {
    store: Arc<dyn ObjectStore>,
    /// Shared by puts, alone for a removal.
    locks: Arc<[Arc<RwLock<()>>]>,
}

impl StoredObjects {
    /// Objects in the folder `dir`, which is created where it is missing.
    pub fn in_folder(dir: &Path) -> Result<StoredObjects, ObjectError> {
        let failed = |source| object_store::Error::Generic {
            store: "LocalFileSystem",
            source: Box::<std::io::Error>::new(source),
        };
        disk::create_dir_durably(dir).map_err(failed)?;
        // Off by default: without it, neither files nor their directories are synced.
        let store = LocalFileSystem::new_with_prefix(dir)?.with_fsync(true);
        Ok(StoredObjects::new(store))
    }

    fn new(store: impl ObjectStore) -> StoredObjects {
        StoredObjects {
            store: Arc::new(store),
            locks: (0..LOCKS).map(|_| Arc::default()).collect(),
        }
    }

    fn lock(&self, id: &ObjectId) -> Arc<RwLock<()>> {
        self.locks[usize::from(id.as_bytes()[0]) % LOCKS].clone()
    }

    /// Objects at `location`: `s3://bucket/prefix`, or else a folder, which may be one that machines share.
    ///
    /// What S3 needs (credentials, region, another endpoint) comes from `variables`, by their usual names: `AWS_ACCESS_KEY_ID`,
    /// `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, `AWS_ENDPOINT_URL`, `AWS_ALLOW_HTTP` and the like; others are left alone.
    /// Nothing is asked of the bucket yet.
    pub fn at(location: &str, variables: impl IntoIterator<Item = (String, String)>) -> Result<StoredObjects, ObjectError> {
        let Some(rest) = location.strip_prefix(S3) else {
            return match location.split_once("://") {
                Some((scheme, _)) => Err(ObjectError::BadLocation {
                    reason: format!("objects are kept in a folder or at s3://bucket/prefix, not at {scheme}://"),
                }),
                None => StoredObjects::in_folder(Path::new(location)),
            };
        };
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(ObjectError::BadLocation {
                reason: "a bucket is missing: s3://bucket/prefix".to_owned(),
            });
        }
        let prefix = object_store::path::Path::parse(prefix).map_err(|error| ObjectError::BadLocation { reason: error.to_string() })?;
        let mut builder = AmazonS3Builder::new();
        for (name, value) in variables {
            if name.starts_with("AWS_")
                && let Ok(key) = name.to_ascii_lowercase().parse::<AmazonS3ConfigKey>()
            {
                builder = builder.with_config(key, value);
            }
        }
        let longest = deadline(MAX_OBJECT_BYTES);
        let retry = RetryConfig {
            retry_timeout: CALL_WITHIN,
            ..RetryConfig::default()
        };
        let store = builder
            .with_bucket_name(bucket)
            .with_config(AmazonS3ConfigKey::Client(ClientConfigKey::ConnectTimeout), CONNECT_WITHIN)
            .with_config(
                AmazonS3ConfigKey::Client(ClientConfigKey::Timeout),
                format!("{}s", longest.as_secs()),
            )
            .with_retry(retry)
            .build()?;
        Ok(StoredObjects::new(PrefixStore::new(store, prefix)))
    }
}

/// What moving so many bytes may take.
fn deadline(bytes: usize) -> Duration {
    CALL_WITHIN + Duration::from_secs((bytes / BYTES_PER_SECOND) as u64)
}

/// Ends what a store does not.
async fn timed<T>(bytes: usize, call: impl Future<Output = Result<T, object_store::Error>>) -> Result<T, ObjectError> {
    let within = deadline(bytes);
    match tokio::time::timeout(within, call).await {
        Ok(result) => Ok(result?),
        Err(_) => Err(ObjectError::TimedOut { within }),
    }
}

#[async_trait]
impl Objects for StoredObjects {
    async fn put(&self, org: &str, bytes: Bytes) -> Result<ObjectId, ObjectError> {
        check_org(org)?;
        if bytes.len() > MAX_OBJECT_BYTES {
            return Err(ObjectError::TooLarge { limit: MAX_OBJECT_BYTES });
        }
        let (id, stored) = blocking(move || (ObjectId::of(&bytes), encode(&bytes))).await?;
        let (place, lock) = (location(org, &id), self.lock(&id));
        timed(stored.len(), async {
            // A put that is given up may still write once this is released; nobody was told that it had, so nobody counts on it.
            let _shared = lock.read().await;
            self.store.put(&place, stored.into()).await
        })
        .await?;
        Ok(id)
    }

    async fn get(&self, org: &str, id: &ObjectId, limit: usize) -> Result<Option<Bytes>, ObjectError> {
        check_org(org)?;
        let limit = limit.min(MAX_OBJECT_BYTES);
        let found = match timed(0, self.store.get(&location(org, id))).await {
            Err(ObjectError::Store(object_store::Error::NotFound { .. })) => return Ok(None),
            found => found?,
        };
        // What is stored is never larger than the object and its first byte.
        if found.meta.size > limit as u64 + 1 {
            return Err(ObjectError::TooLarge { limit });
        }
        let stored = timed(limit, found.bytes()).await?;
        let expected = *id;
        let decoded = blocking(move || {
            let bytes = decode(stored, limit)?;
            if ObjectId::of(&bytes) == expected {
                Ok(bytes)
            } else {
                Err(Unreadable::Damaged("its bytes have another hash"))
            }
        });
        match decoded.await? {
            Ok(bytes) => Ok(Some(bytes)),
            Err(Unreadable::TooLarge) => Err(ObjectError::TooLarge { limit }),
            Err(Unreadable::Damaged(reason)) => Err(ObjectError::Damaged {
                org: org.to_owned(),
                id: *id,
                reason,
            }),
        }
    }

    async fn organizations(&self) -> Result<Vec<String>, ObjectError> {
        let listed = timed(0, self.store.list_with_delimiter(None)).await?;
        let names = listed.common_prefixes.iter().filter_map(|prefix| prefix.filename());
        let mut names: Vec<String> = names.filter(|name| check_org(name).is_ok()).map(str::to_owned).collect();
        names.sort_unstable();
        Ok(names)
    }

    async fn put_before(&self, org: &str, before_ms: u64, after: Option<&ObjectId>, limit: usize) -> Result<Vec<OldObject>, ObjectError> {
        check_org(org)?;
        let mut found = Vec::new();
        // One folder after the other: a folder's list has no order, and all of them at once need not fit into memory.
        for folder in after.map_or(0, |after| after.as_bytes()[0])..=u8::MAX {
            let wanted = limit - found.len();
            if wanted == 0 {
                break;
            }
            let mut first: BTreeMap<ObjectId, u64> = BTreeMap::new();
            let mut listed = self
                .store
                .list(Some(&object_store::path::Path::from_iter([org, &format!("{folder:02x}")])));
            while let Some(meta) = timed(0, listed.try_next()).await? {
                // What is no object of ours is left alone.
                let Some(id) = meta.location.filename().and_then(|name| name.parse::<ObjectId>().ok()) else {
                    continue;
                };
                if is_before(&meta, before_ms) && after.is_none_or(|after| id > *after) {
                    first.insert(id, meta.size);
                    if first.len() > wanted {
                        first.pop_last();
                    }
                }
            }
            found.extend(first.into_iter().map(|(id, bytes)| OldObject { id, bytes }));
        }
        Ok(found)
    }

    async fn remove(&self, org: &str, id: &ObjectId, before_ms: u64) -> Result<bool, ObjectError> {
        check_org(org)?;
        let (store, location, lock) = (self.store.clone(), location(org, id), self.lock(id));
        // A task of its own keeps the lock until the store has really done it: dropped halfway, the store would go on, and could take away
        // what a later put has acknowledged.
        let removal = tokio::spawn(async move {
            let _alone = lock.write().await;
            match store.head(&location).await {
                Ok(meta) if is_before(&meta, before_ms) => match store.delete(&location).await {
                    Ok(()) => Ok(true),
                    Err(object_store::Error::NotFound { .. }) => Ok(false),
                    Err(error) => Err(error),
                },
                Ok(_) | Err(object_store::Error::NotFound { .. }) => Ok(false),
                Err(error) => Err(error),
            }
        });
        let removed = timed(0, async { Ok(removal.await) }).await?;
        Ok(removed.map_err(|_| ObjectError::Abandoned)??)
    }
}

fn is_before(meta: &object_store::ObjectMeta, before_ms: u64) -> bool {
    meta.last_modified.timestamp_millis() < i64::try_from(before_ms).unwrap_or(i64::MAX)
}

fn location(org: &str, id: &ObjectId) -> object_store::path::Path {
    let hash = id.to_string();
    object_store::path::Path::from_iter([org, &hash[..2], &hash])
}

/// Hashing and compressing megabytes does not belong on a thread that others wait for.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, ObjectError> {
    tokio::task::spawn_blocking(work).await.map_err(|_| ObjectError::Abandoned)
}

fn encode(bytes: &Bytes) -> Bytes {
    match zstd::bulk::compress(bytes, ZSTD_LEVEL) {
        Ok(packed) if packed.len() < bytes.len() => with_encoding(ZSTD, &packed),
        _ => with_encoding(RAW, bytes),
    }
}

fn with_encoding(encoding: u8, rest: &[u8]) -> Bytes {
    let mut stored = BytesMut::with_capacity(rest.len() + 1);
    stored.put_u8(encoding);
    stored.put_slice(rest);
    stored.freeze()
}

enum Unreadable {
    TooLarge,
    Damaged(&'static str),
}

fn decode(stored: Bytes, limit: usize) -> Result<Bytes, Unreadable> {
    let rest = stored.slice(1.min(stored.len())..);
    match stored.first() {
        Some(&RAW) if rest.len() > limit => Err(Unreadable::TooLarge),
        Some(&RAW) => Ok(rest),
        Some(&ZSTD) => {
            let stated = zstd_safe::get_frame_content_size(&rest).ok().flatten();
            let stated = stated.ok_or(Unreadable::Damaged("its length is unreadable"))?;
            let length = usize::try_from(stated)
                .ok()
                .filter(|length| *length <= limit)
                .ok_or(Unreadable::TooLarge)?;
            let bytes = zstd::bulk::decompress(&rest, length).map_err(|_| Unreadable::Damaged("it does not decompress"))?;
            Ok(bytes.into())
        }
        _ => Err(Unreadable::Damaged("its encoding is unknown")),
    }
}
