//! Objects in S3, against a server that speaks its protocol (signatures included) over a folder.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use bytes::Bytes;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use tokio::net::TcpListener;

use super::{ObjectError, ObjectId, Objects, StoredObjects};
use crate::conformance::{age_file, check_objects, check_removal};

const KEY: &str = "access";
const SECRET: &str = "s3cret";

/// Serves the folders in `dir` as buckets until the runtime ends. Its address.
async fn serve(dir: &Path) -> String {
    let mut service = S3ServiceBuilder::new(s3s_fs::FileSystem::new(dir).unwrap());
    service.set_auth(SimpleAuth::from_single(KEY, SECRET));
    let service = service.build().into_shared();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let service = service.clone();
            tokio::spawn(async move {
                // A client that goes away is no matter.
                let _ = Builder::new(TokioExecutor::new())
                    .serve_connection(TokioIo::new(socket), service)
                    .await;
            });
        }
    });
    address
}

fn at(location: &str, endpoint: &str, secret: &str) -> Result<StoredObjects, ObjectError> {
    let variables = [
        ("AWS_ACCESS_KEY_ID", KEY),
        ("AWS_SECRET_ACCESS_KEY", secret),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", endpoint),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_NO_SUCH_THING", "x"),
        ("HOME", "/"),
    ];
    StoredObjects::at(location, variables.map(|(name, value)| (name.to_owned(), value.to_owned())))
}

#[tokio::test]
async fn s3_conforms() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("bucket")).unwrap();
    let endpoint = serve(dir.path()).await;
    for location in ["s3://bucket", "s3://bucket/", "s3://bucket/deep/prefix"] {
        check_objects(&at(location, &endpoint, SECRET).unwrap()).await;
    }
    // A page costs up to 256 requests, so there are few. What organizations there are is not asked: this server ignores the delimiter that
    // asks for it.
    let removal = at("s3://bucket/removal", &endpoint, SECRET).unwrap();
    let folder = dir.path().join("bucket/removal");
    check_removal(&removal, &|org, id, at_ms| age_file(&folder, org, id, at_ms), &[39]).await;
    // Each prefix is a place of its own.
    let id = at("s3://bucket/one", &endpoint, SECRET)
        .unwrap()
        .put("org", Bytes::from_static(b"x"))
        .await
        .unwrap();
    assert!(
        at("s3://bucket/two", &endpoint, SECRET)
            .unwrap()
            .get("org", &id, 9)
            .await
            .unwrap()
            .is_none()
    );
    let hex = id.to_string();
    assert!(dir.path().join("bucket/one/org").join(&hex[..2]).join(&hex).is_file());

    let refused = at("s3://bucket", &endpoint, "wrong").unwrap();
    let error = refused.put("org", Bytes::from_static(b"x")).await.unwrap_err();
    assert!(matches!(error, ObjectError::Store(_)), "{error}");
    assert!(!error.to_string().contains("wrong"), "{error}");
}

#[tokio::test]
async fn locations() {
    let refused = |location: &str| match at(location, "http://127.0.0.1:1", SECRET) {
        Err(ObjectError::BadLocation { reason }) => reason,
        other => panic!("{location}: {:?}", other.map(|_| ())),
    };
    assert!(refused("s3://").contains("bucket"));
    assert!(refused("s3:///prefix").contains("bucket"));
    assert!(refused("gs://bucket").contains("gs://"));
    refused("s3://bucket/a//b");
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("a/folder");
    check_objects(&at(folder.to_str().unwrap(), "", "").unwrap()).await;
}

/// Time is the runtime's, so nobody waits for it.
#[tokio::test(start_paused = true)]
async fn a_server_that_never_answers_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let objects = at("s3://bucket", &endpoint, SECRET).unwrap();
    let put = objects.put("org", Bytes::from_static(b"x")).await;
    assert!(matches!(put, Err(ObjectError::TimedOut { .. })), "{put:?}");
    let get = objects.get("org", &ObjectId::of(b"x"), 10).await;
    assert!(matches!(get, Err(ObjectError::TimedOut { .. })), "{get:?}");
    let listed = objects.put_before("org", 1, None, 1).await;
    assert!(matches!(listed, Err(ObjectError::TimedOut { .. })), "{listed:?}");
    let organizations = objects.organizations().await;
    assert!(matches!(organizations, Err(ObjectError::TimedOut { .. })), "{organizations:?}");
    let removed = objects.remove("org", &ObjectId::of(b"x"), 1).await;
    assert!(matches!(removed, Err(ObjectError::TimedOut { .. })), "{removed:?}");
}
