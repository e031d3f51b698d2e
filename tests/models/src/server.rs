//! Takes requests, answers as the mode and the prompt say, and writes them down.

use std::{convert::Infallible, io, net::SocketAddr, path::Path, sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::{Request as HttpRequest, State},
    response::Response,
};
use bytes::Bytes;
use futures::stream;
use http::{HeaderMap, Method, StatusCode, Uri, header, request::Parts};
use serde_json::{Value, json};
use tokio::{
    net::{TcpListener, UnixListener},
    task::JoinHandle,
    time::{sleep, timeout},
};

use crate::{
    Format, Mode, Request, Totals, anthropic, chat,
    exchange::{Answer, Exchange, Item, Parts as Pieces},
    gemini,
    ledger::{KEPT_BODY, Ledger},
    responses,
    script::{self, Plan, Reply},
};

/// Of a request. A conversation of the longest test is a tenth of that.
const MAX_BODY: usize = 16 << 20;
/// A client on the same machine that sends no body for so long sends none at all.
const BODY_DEADLINE: Duration = Duration::from_secs(30);
/// How long a request without an answer is held: longer than any test.
const HANG: Duration = Duration::from_secs(1_800);
/// What was sent must have left before the connection breaks: a break takes with it what is still in a buffer.
const BEFORE_CUT: Duration = Duration::from_millis(50);
/// No model answers sooner. Claude with `--bare` loses the person's words from its session where the answer comes before it has written them
/// down, which takes it some 20 ms.
const THOUGHT: Duration = Duration::from_millis(100);
/// Of the prompt, in the list of requests.
const SHOWN_PROMPT: usize = 200;
/// The same for each ask of one job.
const IDEMPOTENCY_KEY: &str = "idempotency-key";

/// A running server; it ends when this is dropped.
pub struct ModelServer {
    address: SocketAddr,
    ledger: Arc<Ledger>,
    tasks: Vec<JoinHandle<()>>,
}

impl ModelServer {
    /// Serves on an address (`127.0.0.1:0`: any free port), and on a Unix socket where one is named (for sandboxes without a network). A socket
    /// that is there is replaced.
    pub async fn start(listen: &str, socket: Option<&Path>) -> io::Result<ModelServer> {
        let ledger = Arc::new(Ledger::default());
        let app = Router::new().fallback(answer).with_state(ledger.clone());
        let listener = TcpListener::bind(listen).await?;
        let address = listener.local_addr()?;
        let mut tasks = Vec::new();
        if let Some(path) = socket {
            match std::fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let listener = UnixListener::bind(path)?;
            let app = app.clone();
            tasks.push(tokio::spawn(async move {
                // It ends with its task only.
                let _ = axum::serve(listener, app).await;
            }));
        }
        tasks.push(tokio::spawn(async move {
            let _ = axum::serve(listener, app).await;
        }));
        Ok(ModelServer { address, ledger, tasks })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The base URL for a mode, without a version: `http://127.0.0.1:PORT/m401`. OpenAI's and chat completions' clients want `/v1` behind it.
    pub fn url(&self, mode: Mode) -> String {
        format!("http://{}/{mode}", self.address)
    }

    /// The newest requests, oldest first.
    pub fn requests(&self) -> Vec<Request> {
        self.ledger.read().1
    }

    /// Counts since the start.
    pub fn totals(&self) -> Totals {
        self.ledger.totals()
    }
}

impl Drop for ModelServer {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// What a path asks for.
enum Route<'a> {
    Format(Format),
    Gemini { model: &'a str, stream: bool },
}

impl Route<'_> {
    fn of(path: &str) -> Option<Route<'_>> {
        match path {
            "/v1/responses" => return Some(Route::Format(Format::Responses)),
            "/v1/messages" => return Some(Route::Format(Format::Messages)),
            "/v1/chat/completions" => return Some(Route::Format(Format::Chat)),
            _ => {}
        }
        match path.strip_prefix("/v1beta/models/")?.rsplit_once(':')? {
            (model, "streamGenerateContent") => Some(Route::Gemini { model, stream: true }),
            (model, "generateContent") => Some(Route::Gemini { model, stream: false }),
            _ => None,
        }
    }

    fn format(&self) -> Format {
        match self {
            Route::Format(format) => *format,
            Route::Gemini { .. } => Format::Gemini,
        }
    }
}

async fn answer(State(ledger): State<Arc<Ledger>>, request: HttpRequest) -> Result<Response, Infallible> {
    let (head, body) = request.into_parts();
    let (mode, path) = Mode::of(head.uri.path());
    let route = match (&head.method, path) {
        // Claude looks whether somebody is there.
        (&Method::HEAD, _) => return Ok(plain(StatusCode::OK, "", Bytes::new())),
        (&Method::GET, "/_requests") => {
            let (totals, requests) = ledger.read();
            return Ok(of_json(StatusCode::OK, &json!({ "totals": totals, "requests": requests })));
        }
        (&Method::POST, path) => Route::of(path),
        _ => None,
    };
    let Some(route) = route else {
        let message = format!("Unknown request URL: {} {path}", head.method);
        return Ok(of_json(
            StatusCode::NOT_FOUND,
            &json!({ "error": { "message": message, "type": "invalid_request_error", "param": null, "code": null } }),
        ));
    };
    let format = route.format();
    let body = match timeout(BODY_DEADLINE, axum::body::to_bytes(body, MAX_BODY)).await {
        Ok(Ok(body)) => body,
        Ok(Err(_)) => {
            return Ok(refusal(
                format,
                StatusCode::PAYLOAD_TOO_LARGE,
                "the request is too large, or was cut off",
            ));
        }
        Err(_) => return Ok(refusal(format, StatusCode::REQUEST_TIMEOUT, "the request did not come")),
    };
    let key = key(format, &head.headers, &head.uri);
    let exchange = read(&route, &head.headers, &body);
    let plan = exchange.as_ref().ok().map(script::plan);
    let asked = plan.as_ref().and_then(|plan| plan.fault).unwrap_or(mode);
    let mode = match asked {
        Mode::First(times, simple) => {
            let job = header(&head.headers, IDEMPOTENCY_KEY).unwrap_or_else(|| exchange.as_ref().map(Exchange::hash).unwrap_or_default());
            if ledger.ask(asked, &job) < times { *simple } else { Mode::Ok }
        }
        simple => simple,
    };
    let outcome = outcome(mode, key.as_deref(), exchange.as_ref(), plan.as_ref());
    let number = ledger.add(entry(&head, format, mode, key, exchange.as_ref().ok(), &body, &outcome));
    let reply = match &outcome {
        Outcome::Fault(status, message) => return Ok(refusal(format, *status, message)),
        Outcome::Hang => {
            sleep(HANG).await;
            return Ok(refusal(format, StatusCode::GATEWAY_TIMEOUT, "no answer"));
        }
        Outcome::Reply(reply) => reply,
    };
    let (Ok(exchange), Some(plan)) = (&exchange, &plan) else {
        return Ok(refusal(format, StatusCode::BAD_REQUEST, "an answer without a request"));
    };
    let least = if format == Format::Messages { THOUGHT } else { Duration::ZERO };
    sleep(plan.wait.max(least)).await;
    if let Mode::Wait(ms) = mode {
        sleep(Duration::from_millis(ms.into())).await;
    }
    let answer = Answer {
        number,
        model: &exchange.model,
        reply,
    };
    Ok(write(format, exchange.stream, mode, &answer))
}

/// What is done with a request.
enum Outcome {
    Fault(StatusCode, String),
    Hang,
    Reply(Reply),
}

fn outcome(mode: Mode, key: Option<&str>, exchange: Result<&Exchange, &String>, plan: Option<&Plan>) -> Outcome {
    let fault = |status, message: &str| Outcome::Fault(status, message.to_owned());
    match (mode, key) {
        (Mode::M401, _) => return fault(StatusCode::UNAUTHORIZED, "Incorrect API key provided"),
        (_, None) => return fault(StatusCode::UNAUTHORIZED, "You didn't provide an API key"),
        (Mode::M429, _) => return fault(StatusCode::TOO_MANY_REQUESTS, "Rate limit reached for requests"),
        (Mode::M500, _) => {
            return fault(
                StatusCode::INTERNAL_SERVER_ERROR,
                "The server had an error while processing your request",
            );
        }
        (Mode::M503, _) => {
            return fault(
                StatusCode::SERVICE_UNAVAILABLE,
                "The engine is currently overloaded, please try again later",
            );
        }
        (Mode::M529, _) => return fault(overloaded(), "Overloaded"),
        _ => {}
    }
    match (exchange, plan, mode) {
        (Err(reason), _, _) => fault(StatusCode::BAD_REQUEST, reason),
        (Ok(_), _, Mode::Hang) => Outcome::Hang,
        (Ok(exchange), Some(plan), mode) => Outcome::Reply(plan.reply(mode, exchange)),
        (Ok(_), None, _) => fault(StatusCode::BAD_REQUEST, "nothing to answer"),
    }
}

/// Anthropic's own status of an overload.
fn overloaded() -> StatusCode {
    StatusCode::from_u16(529).unwrap_or(StatusCode::SERVICE_UNAVAILABLE)
}

/// A request as it is written down.
fn entry(
    head: &Parts,
    format: Format,
    mode: Mode,
    key: Option<String>,
    exchange: Option<&Exchange>,
    body: &[u8],
    outcome: &Outcome,
) -> Request {
    let answer = match outcome {
        Outcome::Fault(StatusCode::BAD_REQUEST, reason) => format!("refused: {reason}"),
        Outcome::Fault(status, _) => status.as_u16().to_string(),
        Outcome::Hang => "none".into(),
        Outcome::Reply(Reply::Text(_)) => "text".into(),
        Outcome::Reply(Reply::CutOff(_)) => "cut off".into(),
        Outcome::Reply(Reply::Refusal(_)) => "refusal".into(),
        Outcome::Reply(Reply::Call { name, .. }) => format!("call {name}"),
    };
    let said = exchange
        .into_iter()
        .flat_map(|exchange| exchange.items.iter().rev())
        .find_map(|item| match item {
            Item::User(text) => Some(text.chars().take(SHOWN_PROMPT).collect()),
            _ => None,
        });
    Request {
        number: 0,
        method: head.method.to_string(),
        path: head.uri.to_string(),
        user_agent: header(&head.headers, "user-agent").unwrap_or_default(),
        idempotency_key: header(&head.headers, IDEMPOTENCY_KEY),
        format,
        mode,
        answer,
        model: exchange.map(|exchange| exchange.model.clone()).unwrap_or_default(),
        key: key.unwrap_or_default(),
        prompt_hash: exchange.map(Exchange::hash).unwrap_or_default(),
        prompt: said.unwrap_or_default(),
        items: exchange.map_or(0, |exchange| exchange.items.len()),
        tools: exchange.map(|exchange| exchange.offered.clone()).unwrap_or_default(),
        body: String::from_utf8_lossy(&body[..body.len().min(KEPT_BODY)]).into(),
    }
}

fn header(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
}

/// The key as each vendor's clients send it.
fn key(format: Format, headers: &HeaderMap, uri: &Uri) -> Option<String> {
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let bearer = header("authorization").and_then(|value| value.strip_prefix("Bearer "));
    let key = match format {
        Format::Responses | Format::Chat => bearer,
        Format::Messages => header("x-api-key").or(bearer),
        Format::Gemini => header("x-goog-api-key").or_else(|| uri.query()?.split('&').find_map(|pair| pair.strip_prefix("key="))),
    };
    key.filter(|key| !key.is_empty()).map(str::to_owned)
}

fn read(route: &Route<'_>, headers: &HeaderMap, body: &[u8]) -> Result<Exchange, String> {
    let body: Value = serde_json::from_slice(body).map_err(|error| format!("the body is not JSON: {error}"))?;
    let exchange = match route {
        Route::Format(Format::Messages) if !headers.contains_key("anthropic-version") => {
            Err("anthropic-version: header is required".into())
        }
        Route::Format(Format::Messages) => anthropic::read(&body),
        Route::Format(Format::Chat) => chat::read(&body),
        Route::Format(_) => responses::read(&body),
        Route::Gemini { model, stream } => gemini::read(model, *stream, &body),
    }?;
    exchange.check()?;
    Ok(exchange)
}

fn write(format: Format, stream: bool, mode: Mode, answer: &Answer<'_>) -> Response {
    let (kind, parts): (&str, Pieces) = match (format, stream) {
        (Format::Responses, true) => ("text/event-stream", responses::stream(answer)),
        (Format::Messages, true) => ("text/event-stream", anthropic::stream(answer)),
        (Format::Chat, true) => ("text/event-stream", chat::stream(answer)),
        (Format::Gemini, true) => ("text/event-stream", gemini::stream(answer)),
        (Format::Responses, false) => ("application/json", in_two(&responses::whole(answer))),
        (Format::Messages, false) => ("application/json", in_two(&anthropic::whole(answer))),
        (Format::Chat, false) => ("application/json", in_two(&chat::whole(answer))),
        (Format::Gemini, false) => ("application/json", in_two(&gemini::whole(answer))),
    };
    let half = parts.len() / 2;
    let mut sent: Vec<io::Result<Bytes>> = parts.into_iter().map(|part| Ok(part.into())).collect();
    if mode == Mode::Stall {
        let first = sent.first().and_then(|part| part.as_ref().ok()).map(|part| part.slice(..1));
        sent = first.into_iter().map(Ok).chain([Err(io::Error::other("stalled"))]).collect();
    }
    if mode == Mode::Cut {
        sent.truncate(half);
        sent.push(Err(io::Error::other("cut")));
    }
    let body = stream::unfold(sent.into_iter(), move |mut sent| async move {
        let part = sent.next()?;
        match (mode, &part) {
            (Mode::Slow, _) => sleep(Mode::PAUSE).await,
            (Mode::Stall, Err(_)) => sleep(HANG).await,
            (_, Err(_)) => sleep(BEFORE_CUT).await,
            (_, Ok(_)) => {}
        }
        Some((part, sent))
    });
    let mut response = Response::new(Body::from_stream(body));
    let kind = http::HeaderValue::from_static(kind);
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

fn in_two(value: &Value) -> Pieces {
    let text = value.to_string();
    let (first, second) = crate::exchange::halves(&text);
    vec![first.to_owned(), second.to_owned()]
}

/// An error in the vendor's shape.
fn refusal(format: Format, status: StatusCode, message: &str) -> Response {
    /// Seconds, for clients that obey it.
    const RETRY_AFTER: http::HeaderValue = http::HeaderValue::from_static("1");
    let openai = match status {
        StatusCode::UNAUTHORIZED => ("invalid_request_error", "invalid_api_key"),
        StatusCode::TOO_MANY_REQUESTS => ("requests", "rate_limit_exceeded"),
        StatusCode::INTERNAL_SERVER_ERROR => ("server_error", "server_error"),
        status if status.is_server_error() => ("server_error", "server_is_overloaded"),
        _ => ("invalid_request_error", "invalid_request_error"),
    };
    let anthropic = match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::INTERNAL_SERVER_ERROR => "api_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        status if status.is_server_error() => "overloaded_error",
        _ => "invalid_request_error",
    };
    let gemini = match status {
        StatusCode::UNAUTHORIZED => "UNAUTHENTICATED",
        StatusCode::TOO_MANY_REQUESTS => "RESOURCE_EXHAUSTED",
        StatusCode::INTERNAL_SERVER_ERROR => "INTERNAL",
        status if status.is_server_error() => "UNAVAILABLE",
        _ => "INVALID_ARGUMENT",
    };
    let body = match format {
        Format::Responses | Format::Chat => {
            json!({ "error": { "message": message, "type": openai.0, "param": null, "code": openai.1 } })
        }
        Format::Messages => json!({ "type": "error", "error": { "type": anthropic, "message": message }, "request_id": "req_test" }),
        Format::Gemini => json!({ "error": { "code": status.as_u16(), "message": message, "status": gemini } }),
    };
    let mut response = of_json(status, &body);
    if status == StatusCode::TOO_MANY_REQUESTS {
        response.headers_mut().insert(header::RETRY_AFTER, RETRY_AFTER);
    }
    response
}

fn of_json(status: StatusCode, value: &Value) -> Response {
    plain(status, "application/json", value.to_string().into())
}

fn plain(status: StatusCode, kind: &'static str, body: Bytes) -> Response {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    if !kind.is_empty() {
        response
            .headers_mut()
            .insert(header::CONTENT_TYPE, http::HeaderValue::from_static(kind));
    }
    response
}
