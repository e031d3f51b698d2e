//! A plain HTTP client for the public API.

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::{Method, Request, header};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::Value;

/// Talks to one API with one key.
#[derive(Clone)]
pub struct Api {
    base: String,
    key: String,
    client: Client<HttpConnector, Full<Bytes>>,
}

/// Status and body of an answer.
#[derive(Debug)]
pub struct Answer {
    /// The HTTP status.
    pub status: u16,
    /// The JSON body, or null where it is not JSON.
    pub body: Value,
    /// The body as it came.
    pub bytes: Bytes,
}

impl Api {
    /// `address` is `host:port`.
    pub fn new(address: &str, key: &str) -> Api {
        let client = Client::builder(TokioExecutor::new()).build_http();
        Api {
            base: format!("http://{address}"),
            key: key.to_owned(),
            client,
        }
    }

    /// One operation with a JSON body.
    pub async fn call(&self, operation: &str, body: &Value) -> Result<Answer, String> {
        self.send(operation, body.to_string().into_bytes(), &[]).await
    }

    /// One operation with any bytes as its body.
    pub async fn send(&self, operation: &str, body: Vec<u8>, headers: &[(&str, &str)]) -> Result<Answer, String> {
        let mut request = Request::builder()
            .method(Method::POST)
            .uri(format!("{}/v1/{operation}", self.base))
            .header(header::AUTHORIZATION, format!("Bearer {}", self.key))
            .header(header::CONTENT_TYPE, "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(Bytes::from(body))).map_err(|error| error.to_string())?;
        let response = self.client.request(request).await.map_err(|error| format!("{error:?}"))?;
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.map_err(|error| error.to_string())?.to_bytes();
        Ok(Answer {
            status,
            body: serde_json::from_slice(&body).unwrap_or(Value::Null),
            bytes: body,
        })
    }

    /// Starts a batch that must be admitted; its id.
    pub async fn start(&self, request: &Value) -> String {
        let answer = self.call("evals.batches.start", request).await.expect("the API answers");
        assert_eq!(answer.status, 200, "the batch is admitted: {}", answer.body);
        answer.body["id"].as_str().expect("a batch has an id").to_owned()
    }

    /// The whole batch.
    pub async fn batch(&self, id: &str) -> Result<Value, String> {
        let answer = self.call("evals.batches.get", &serde_json::json!({ "id": id })).await?;
        match answer.status {
            200 => Ok(answer.body),
            status => Err(format!("{status}: {}", answer.body)),
        }
    }

    /// Waits until a batch has ended; the whole batch. Rides over restarts of the server.
    pub async fn ended(&self, id: &str, limit: std::time::Duration) -> Value {
        crate::eventually(&format!("{id} has ended"), limit, || async {
            match self.batch(id).await {
                Ok(batch) if batch["status"] != "running" => Some(batch),
                _ => None,
            }
        })
        .await
    }
}

/// Bare requests, for whoever measures what a server does when nobody of ours is in between. Connections are kept.
#[derive(Clone)]
pub struct Bare {
    client: Client<HttpConnector, Full<Bytes>>,
}

impl Default for Bare {
    fn default() -> Bare {
        Bare {
            client: Client::builder(TokioExecutor::new()).build_http(),
        }
    }
}

impl Bare {
    /// One JSON body with a bearer key; the status, once the whole answer is there.
    pub async fn post(&self, url: &str, key: &str, body: Vec<u8>) -> Result<u16, String> {
        let request = Request::builder()
            .method(Method::POST)
            .uri(url)
            .header(header::AUTHORIZATION, format!("Bearer {key}"))
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| error.to_string())?;
        let response = self.client.request(request).await.map_err(|error| format!("{error:?}"))?;
        let status = response.status().as_u16();
        response.into_body().collect().await.map_err(|error| error.to_string())?;
        Ok(status)
    }
}
