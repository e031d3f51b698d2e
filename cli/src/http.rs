//! A small client of the HTTP API: one POST, its JSON answer.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{Request, StatusCode, body::Incoming};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};

use crate::{Failure, output};

/// Until the answer begins: the API itself gives up on the scheduler earlier.
const ANSWER_DEADLINE: Duration = Duration::from_secs(90);
/// Of a refusal's body; nobody reads more.
const REFUSAL: usize = 1 << 20;

/// An answer with status 200, whose body has not been read yet.
pub(crate) async fn post(api: &str, op: &str, key: &str, body: impl Into<Bytes>) -> Result<Incoming, Failure> {
    let address = api.trim_end_matches('/');
    if !address.starts_with("http://") {
        return Err(Failure::usage(
            format!("{api:?} is no address of the API"),
            "Expected --api http://host:port (TLS is not spoken here).",
        ));
    }
    let request = Request::post(format!("{address}/v1/{op}"))
        .header("authorization", format!("Bearer {key}"))
        .header("content-type", "application/json")
        .body(Full::new(body.into()))
        .map_err(|error| Failure::usage(format!("the request cannot be written: {error}"), "Check --api and the key."))?;
    let client: Client<HttpConnector, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let unreachable = || {
        Failure::new(
            format!("no API answers at {address}"),
            format!("Start one with `{} serve`, or name another with --api.", output::program()),
        )
    };
    let response = match tokio::time::timeout(ANSWER_DEADLINE, client.request(request)).await {
        Ok(Ok(response)) => response,
        Ok(Err(_)) => return Err(unreachable()),
        Err(_) => {
            return Err(Failure::new(
                format!("the API at {address} gave no answer in time"),
                "Try again in a moment.",
            ));
        }
    };
    match response.status() {
        StatusCode::OK => Ok(response.into_body()),
        status => {
            let body = Limited::new(response.into_body(), REFUSAL)
                .collect()
                .await
                .map(|body| body.to_bytes())
                .unwrap_or_default();
            let value: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
            let message = value["message"].as_str().unwrap_or("no reason given");
            Err(Failure::new(
                format!("the API answered {status}: {}", output::plain(message)),
                "Correct the request, or see the server's log.",
            ))
        }
    }
}

/// A whole small answer.
pub(crate) async fn post_json(api: &str, op: &str, key: &str, body: impl Into<Bytes>) -> Result<serde_json::Value, Failure> {
    let broken = |why: String| Failure::new(format!("the API's answer broke off: {why}"), "Try again in a moment.");
    let body = post(api, op, key, body)
        .await?
        .collect()
        .await
        .map_err(|error| broken(error.to_string()))?;
    serde_json::from_slice(&body.to_bytes()).map_err(|error| broken(error.to_string()))
}
