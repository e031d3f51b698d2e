//! One POST to a model, sent once, and every way in which it can end.
//!
//! What counts is whether it may have been answered: an answer that is lost on its way is paid for, and must not be asked for again and again.
//! So each connection is used for one call (a kept one can be dead already, and nobody could tell whether the call arrived), nothing is sent a
//! second time, and no redirect is followed, which would also carry the key to another host.

use std::{error::Error as _, time::Duration, time::SystemTime};

use reqwest::{
    Client, Proxy, Response, StatusCode,
    header::{HeaderMap, HeaderName},
    redirect,
};
use serde_json::Value;
use tokio::time::{Instant, timeout, timeout_at};

/// Who asks.
const USER_AGENT: &str = concat!("evalgrid/", env!("CARGO_PKG_VERSION"));
/// Characters of one failure's text that are kept: a sentence for people, not a page of HTML.
const MAX_MESSAGE: usize = 500;
/// Of the body of a failure that is read to find that sentence.
const MAX_FAILURE_BYTES: usize = 64 << 10;
/// The longest wait that a provider may ask for: one that names hours is out of its mind, or the account is.
const MAX_RETRY_AFTER_MS: u64 = 3_600_000;
/// Of a provider's id of the call, which is a few dozen bytes long everywhere.
const MAX_REQUEST_ID_BYTES: usize = 200;

/// How calls are made.
#[derive(Clone, Debug)]
pub struct HttpOptions {
    /// Until there is a connection, with TLS.
    pub connect: Duration,
    /// How long an answer that has begun may stand still. Before it begins the model thinks, and only the whole call's deadline counts.
    pub stall: Duration,
    /// Bytes of an answer. 2,048 tokens of judgment, with a reasoning model's envelope, fit in it hundreds of times.
    pub max_answer_bytes: usize,
    /// `http://host:port` of the operator's proxy. Those of the environment are for other programs, and are not used.
    pub proxy: Option<String>,
}

impl Default for HttpOptions {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            stall: Duration::from_secs(15),
            max_answer_bytes: 512 << 10,
            proxy: None,
        }
    }
}

/// There is no way to make calls here.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The proxy's address.
    #[error("the proxy {0} cannot be used: {1}")]
    Proxy(String, String),
    /// The certificates of this machine.
    #[error("HTTPS does not work here: {0}")]
    Tls(String),
}

/// One call.
#[derive(Clone, Debug)]
pub struct Call<'a> {
    /// Where to.
    pub url: &'a str,
    /// The bearer key.
    pub key: &'a str,
    /// The same for every call that asks the same thing.
    pub idempotency_key: &'a str,
    /// JSON.
    pub body: Vec<u8>,
    /// When the answer must be there, all of it.
    pub deadline: Instant,
}

/// An answer, whatever it says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answered {
    /// Of the 200s.
    pub status: u16,
    /// What the provider calls this request.
    pub request_id: Option<String>,
    /// The whole body.
    pub body: Vec<u8>,
}

/// How a call ended. Texts are for people, and not redacted yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// There is an answer.
    Answered(Answered),
    /// Not answered, and surely nothing was done: limited, overloaded, or nobody was reached.
    NotNow {
        /// When the provider wants to be asked again; 0 where it did not say.
        retry_after_ms: u64,
        /// Why.
        reason: String,
    },
    /// It may have been answered, or may not.
    Unclear {
        /// What is known.
        reason: String,
    },
    /// Asking again would bring the same: a wrong key, no such model.
    Refused {
        /// The answer's HTTP status.
        status: u16,
        /// What the provider says of it.
        message: String,
    },
    /// There can be no such call: its address is none, its key cannot be a header.
    Uncallable {
        /// Why.
        reason: String,
    },
    /// The answer is longer than an answer can be.
    TooLong,
    /// The deadline passed.
    TimedOut,
}

impl Outcome {
    /// What a failure's status says of whether it may have been answered.
    pub(crate) fn of(status: u16, message: String, retry_after_ms: u64) -> Self {
        let reason = format!("status {status}: {message}");
        match status {
            // 408, 425: it did not take the request. 409: a call with this idempotency key is being answered. 529: Anthropic's 503.
            408 | 409 | 425 | 429 | 503 | 529 => Self::NotNow { retry_after_ms, reason },
            500..=599 => Self::Unclear { reason },
            _ => Self::Refused { status, message },
        }
    }
}

/// Makes calls.
#[derive(Clone, Debug)]
pub struct Http {
    client: Client,
    options: HttpOptions,
}

impl Http {
    /// Reads the machine's certificates.
    pub fn new(options: HttpOptions) -> Result<Self, HttpError> {
        let mut builder = Client::builder()
            .user_agent(USER_AGENT)
            .connect_timeout(options.connect)
            .redirect(redirect::Policy::none())
            .retry(reqwest::retry::never())
            .pool_max_idle_per_host(0)
            .http1_only()
            .no_proxy();
        if let Some(proxy) = &options.proxy {
            builder = builder.proxy(Proxy::all(proxy).map_err(|error| HttpError::Proxy(proxy.clone(), root(&error)))?);
        }
        let client = builder.build().map_err(|error| HttpError::Tls(root(&error)))?;
        Ok(Self { client, options })
    }

    /// Bytes of an answer at most.
    pub fn max_answer_bytes(&self) -> usize {
        self.options.max_answer_bytes
    }

    /// Sends a call, once.
    pub async fn post(&self, call: Call<'_>) -> Outcome {
        let deadline = call.deadline;
        if deadline <= Instant::now() {
            return Outcome::TimedOut;
        }
        let ended = timeout_at(deadline, self.send(call)).await;
        ended.unwrap_or(Outcome::TimedOut)
    }

    async fn send(&self, call: Call<'_>) -> Outcome {
        let request = self
            .client
            .post(call.url)
            .bearer_auth(call.key)
            .header("idempotency-key", call.idempotency_key)
            .header("content-type", "application/json")
            .header("accept", "application/json")
            .body(call.body);
        let response = match request.send().await {
            Ok(response) => response,
            Err(error) => return unsent(&error),
        };
        let status = response.status();
        if !status.is_success() {
            return self.failed(status, response).await;
        }
        let request_id = request_id(response.headers());
        match self.body(response, self.options.max_answer_bytes).await {
            Ok(body) => Outcome::Answered(Answered {
                status: status.as_u16(),
                request_id,
                body,
            }),
            Err(Broken::TooLong(_)) => Outcome::TooLong,
            Err(Broken::Off(reason)) => Outcome::Unclear { reason },
        }
    }

    async fn failed(&self, status: StatusCode, response: Response) -> Outcome {
        let retry_after_ms = retry_after_ms(response.headers(), now());
        // What could be read of it says enough.
        let body = match self.body(response, MAX_FAILURE_BYTES).await {
            Ok(body) | Err(Broken::TooLong(body)) => body,
            Err(Broken::Off(_)) => Vec::new(),
        };
        let failure = Failure::read(&body);
        let status = status.as_u16();
        match failure.is("insufficient_quota") {
            // An account without money is told by the status of a limit, and no wait helps.
            true => Outcome::Refused {
                status,
                message: failure.message,
            },
            false => Outcome::of(status, failure.message, retry_after_ms),
        }
    }

    async fn body(&self, mut response: Response, max: usize) -> Result<Vec<u8>, Broken> {
        let mut body = Vec::new();
        loop {
            let chunk = timeout(self.options.stall, response.chunk()).await;
            match chunk {
                Ok(Ok(Some(chunk))) => body.extend_from_slice(&chunk),
                Ok(Ok(None)) => return Ok(body),
                Ok(Err(error)) => return Err(Broken::Off(format!("the answer broke off: {}", root(&error)))),
                Err(_) => return Err(Broken::Off(format!("the answer stood still for {:?}", self.options.stall))),
            }
            if body.len() > max {
                body.truncate(max);
                return Err(Broken::TooLong(body));
            }
        }
    }
}

/// A body that did not come whole.
enum Broken {
    /// It is longer than allowed; its beginning.
    TooLong(Vec<u8>),
    Off(String),
}

/// Nothing came back.
fn unsent(error: &reqwest::Error) -> Outcome {
    let reason = root(error);
    if error.is_connect() {
        return Outcome::NotNow {
            retry_after_ms: 0,
            reason: format!("no connection: {reason}"),
        };
    }
    // An address that is none, or a key with a line break: nothing was sent, and nothing ever will be.
    if error.is_builder() {
        return Outcome::Uncallable { reason };
    }
    Outcome::Unclear {
        reason: format!("the connection broke before it answered: {reason}"),
    }
}

/// What an error comes from. The errors around it repeat the URL, which may hold what nobody should read.
fn root(error: &reqwest::Error) -> String {
    let mut cause = match error.source() {
        Some(cause) => cause,
        None => return "no reason was given".into(),
    };
    while let Some(next) = cause.source() {
        cause = next;
    }
    short(&cause.to_string())
}

/// What a provider says of a failure.
struct Failure {
    message: String,
    code: Option<String>,
}

impl Failure {
    /// Providers agree on `{error: {message, code, type}}`, nearly.
    fn read(body: &[u8]) -> Self {
        let json: Value = serde_json::from_slice(body).unwrap_or_default();
        let json = json.get(0).unwrap_or(&json);
        let error = json.get("error").unwrap_or(json);
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let message = text(error).or_else(|| error.get("message").and_then(text));
        let message = message.unwrap_or_else(|| String::from_utf8_lossy(body).into_owned());
        let message = match message.trim() {
            "" => "no reason was given".into(),
            message => short(message),
        };
        let code = [error.get("code"), error.get("type")].into_iter().flatten().find_map(text);
        Self { message, code }
    }

    fn is(&self, code: &str) -> bool {
        self.code.as_deref() == Some(code)
    }
}

/// The first line of a text, as far as anybody reads it.
pub(crate) fn short(text: &str) -> String {
    let line = text.trim().lines().next().unwrap_or_default();
    line.chars().take(MAX_MESSAGE).collect()
}

fn request_id(headers: &HeaderMap) -> Option<String> {
    let id = ["x-request-id", "request-id"]
        .iter()
        .find_map(|name| headers.get(*name))?
        .to_str()
        .ok()?;
    (id.len() <= MAX_REQUEST_ID_BYTES).then(|| id.to_owned())
}

/// When to ask again, as the provider says it: in milliseconds, in seconds, or as a date. 0 where it says nothing that can be read.
fn retry_after_ms(headers: &HeaderMap, now: SystemTime) -> u64 {
    let text = |name: &'static str| headers.get(HeaderName::from_static(name))?.to_str().ok().map(str::trim);
    let number = |text: &str| text.parse::<f64>().ok().filter(|number| *number > 0.0);
    let wait = text("retry-after-ms").and_then(number).or_else(|| {
        let text = text("retry-after")?;
        number(text).map(|seconds| seconds * 1_000.0).or_else(|| {
            let date = httpdate::parse_http_date(text).ok()?;
            Some(date.duration_since(now).ok()?.as_millis() as f64)
        })
    });
    // A cast saturates, whatever the number is.
    (wait.unwrap_or(0.0).ceil() as u64).min(MAX_RETRY_AFTER_MS)
}

#[expect(clippy::disallowed_methods, reason = "a date in an answer is a time of the wall clock")]
fn now() -> SystemTime {
    SystemTime::now()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::UNIX_EPOCH;

    use super::*;

    #[test]
    fn when_to_ask_again() {
        // Sun, 06 Nov 1994 08:49:37 GMT
        let now = UNIX_EPOCH + Duration::from_secs(784_111_777);
        let check = |headers: &[(&'static str, &str)], expected: u64| {
            let headers = headers
                .iter()
                .map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap()));
            assert_eq!(
                retry_after_ms(&headers.clone().collect(), now),
                expected,
                "{:?}",
                headers.collect::<Vec<_>>()
            );
        };
        check(&[], 0);
        check(&[("retry-after", "2")], 2_000);
        check(&[("retry-after", " 0.25 ")], 250);
        check(&[("retry-after", "2"), ("retry-after-ms", "1500.2")], 1_501);
        check(&[("retry-after", "2"), ("retry-after-ms", "soon")], 2_000);
        check(&[("retry-after", "Sun, 06 Nov 1994 08:49:47 GMT")], 10_000);
        check(&[("retry-after", "Sun, 06 Nov 1994 08:49:27 GMT")], 0);
        check(&[("retry-after", "tomorrow")], 0);
        check(&[("retry-after", "-5")], 0);
        check(&[("retry-after", "NaN")], 0);
        check(&[("retry-after", "inf")], MAX_RETRY_AFTER_MS);
        check(&[("retry-after", "1e300")], MAX_RETRY_AFTER_MS);
    }

    #[test]
    fn what_providers_say_of_failures() {
        let check = |body: &str, message: &str, code: Option<&str>| {
            let failure = Failure::read(body.as_bytes());
            assert_eq!((failure.message.as_str(), failure.code.as_deref()), (message, code), "{body}");
        };
        let openai =
            r#"{"error":{"message":"Incorrect API key provided","type":"invalid_request_error","param":null,"code":"invalid_api_key"}}"#;
        check(openai, "Incorrect API key provided", Some("invalid_api_key"));
        let anthropic = r#"{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}"#;
        check(anthropic, "Overloaded", Some("overloaded_error"));
        check(r#"[{"error":{"code":429,"message":"Quota","status":"X"}}]"#, "Quota", None);
        check(r#"{"error":"no such model"}"#, "no such model", None);
        check(r#"{"message":"nope"}"#, "nope", None);
        check("<html>\n<body>Bad gateway", "<html>", None);
        check("", "no reason was given", None);
        check(" \n ", "no reason was given", None);
        check("null", "null", None);
        check(&"ö".repeat(600), &"ö".repeat(500), None);
    }
}
