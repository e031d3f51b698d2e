//! The operations: their requests, what is asked of the scheduler for them, and their answers.

use std::sync::Arc;

use axum::{
    body::Body,
    extract::{Request, State},
    response::{IntoResponse as _, Response},
};
use evalgrid_domain::{
    decode::{Decoder, Text, parse_json},
    limits::{DEFAULT_PAGE, MAX_BODY_BYTES, MAX_CASES, MAX_IDEMPOTENCY_KEY, MAX_JSON_DEPTH, MAX_PAGE, MAX_START_BODY_BYTES},
    number::MAX_SAFE_INTEGER,
    permission::Permission,
    request::{self, Harness},
};
use evalgrid_proto::v1::{
    CancelBatchRequest, GetBatchRequest, GetRunRequest, Identity, ListBatchesRequest, ListModelsRequest, PageCursor, RegradeBatchRequest,
    RetryBatchRequest, StartBatchRequest, WhoamiRequest,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tonic::metadata::{Ascii, MetadataValue};

use crate::{
    artifact,
    body::{self, Bodies, Budget, Held},
    cell::call,
    cells::{self, Cells, Fingerprint},
    failure::Failure,
    limits, render, result, runner,
};

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// The cells, and the limits that all requests share.
#[derive(Clone)]
pub(crate) struct App {
    pub(crate) cells: Cells,
    bodies: Bodies,
    pub(crate) requests: Budget,
    pub(crate) results: Arc<Semaphore>,
}

impl App {
    pub(crate) fn new(cells: Cells) -> App {
        App {
            cells,
            bodies: Bodies::new(limits::SMALL_IN_FLIGHT, limits::LARGE_IN_FLIGHT),
            requests: Budget::new(limits::REQUESTS_IN_FLIGHT),
            results: Arc::new(Semaphore::new(limits::RESULTS_IN_FLIGHT)),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Op {
    Start,
    GetBatch,
    ListBatches,
    CancelBatch,
    RetryBatch,
    RegradeBatch,
    GetRun,
    GetArtifact,
    ListModels,
    Whoami,
    RunnerStart,
    Lease,
    LeaseVariables,
    Report,
    Beat,
    Finish,
    Subscribe,
    Tail,
}

impl Op {
    fn parse(path: &str) -> Option<Op> {
        Some(match path.strip_prefix("/v1/")? {
            "evals.batches.start" => Op::Start,
            "evals.batches.get" => Op::GetBatch,
            "evals.batches.list" => Op::ListBatches,
            "evals.batches.cancel" => Op::CancelBatch,
            "evals.batches.retry" => Op::RetryBatch,
            "evals.batches.regrade" => Op::RegradeBatch,
            "evals.models.list" => Op::ListModels,
            "evals.runs.get" => Op::GetRun,
            "evals.artifacts.get" => Op::GetArtifact,
            "auth.whoami" => Op::Whoami,
            "runner.start" => Op::RunnerStart,
            "runner.lease" => Op::Lease,
            "runner.leaseVariables" => Op::LeaseVariables,
            "runner.report" => Op::Report,
            "runner.beat" => Op::Beat,
            "runner.finish" => Op::Finish,
            "runner.subscribe" => Op::Subscribe,
            "runner.tail" => Op::Tail,
            _ => return None,
        })
    }
}

/// Everything below `/v1/`.
pub(crate) async fn operation(State(app): State<App>, request: Request) -> Response {
    let Some(op) = Op::parse(request.uri().path()) else {
        return Failure::NotFound("There is no such operation.".into()).into_response();
    };
    if request.method() != Method::POST {
        return Failure::MethodNotAllowed.into_response();
    }
    let (parts, body) = request.into_parts();
    answer(&app, op, &parts.headers, body).await.unwrap_or_else(Failure::into_response)
}

async fn answer(app: &App, op: Op, headers: &HeaderMap, body: Body) -> Result<Response, Failure> {
    let caller = Caller::from(headers)?;
    let idempotency_key = match op {
        Op::Start | Op::RunnerStart | Op::RetryBatch | Op::RegradeBatch => idempotency_key(headers)?,
        _ => None,
    };
    let limit = match op {
        Op::Start | Op::RunnerStart => MAX_START_BODY_BYTES,
        _ => MAX_BODY_BYTES,
    };
    let body = body::read(body, limit, &app.bodies, may_send(app, op, &caller)).await?;
    let cells = &app.cells;
    match op {
        Op::Start | Op::RunnerStart => {
            let message = StartBatchRequest {
                json: body.bytes.clone(),
                idempotency_key,
            };
            let started = match op {
                Op::Start => {
                    let start = call!(batches, start, caller.request(message.clone()));
                    cells.write(&caller, limits::START_DEADLINE, start).await?
                }
                _ => {
                    let start = call!(runner, start, caller.request(message.clone()));
                    cells.write(&caller, limits::START_DEADLINE, start).await?
                }
            };
            Ok(answered(&render::started(&started)))
        }
        Op::RetryBatch => {
            let message = RetryBatchRequest {
                id: decode(body, by_id)?,
                idempotency_key,
            };
            let retry = call!(batches, retry, caller.request(message.clone()));
            let started = cells.write(&caller, limits::START_DEADLINE, retry).await?;
            Ok(answered(&render::started(&started)))
        }
        Op::RegradeBatch => {
            let message = RegradeBatchRequest {
                idempotency_key,
                ..decode(body, regrade)?
            };
            let regrade = call!(batches, regrade, caller.request(message.clone()));
            let started = cells.write(&caller, limits::START_DEADLINE, regrade).await?;
            Ok(answered(&render::started(&started)))
        }
        Op::GetBatch => {
            let id = decode(body, by_id)?;
            let get = call!(batches, get, caller.request(GetBatchRequest { id: id.clone() }));
            let batch = cells.read(&caller, limits::CALL_DEADLINE, get).await?;
            result::batch(app, caller, batch).await
        }
        Op::CancelBatch => {
            let id = decode(body, by_id)?;
            let cancel = call!(batches, cancel, caller.request(CancelBatchRequest { id: id.clone() }));
            let batch = cells.write(&caller, limits::CALL_DEADLINE, cancel).await?;
            result::batch(app, caller, batch).await
        }
        Op::GetRun => {
            let id = decode(body, by_id)?;
            let get_run = call!(batches, get_run, caller.request(GetRunRequest { id: id.clone() }));
            let run = cells.read(&caller, limits::CALL_DEADLINE, get_run).await?;
            result::run(app, caller, run).await
        }
        Op::GetArtifact => {
            let wanted = decode(body, artifact::wanted)?;
            artifact::get(app, caller, wanted).await
        }
        Op::ListBatches => {
            let message = decode(body, list_batches)?;
            let list = call!(batches, list, caller.request(message.clone()));
            let page = cells.read(&caller, limits::CALL_DEADLINE, list).await?;
            Ok(answered(&render::page(&page)))
        }
        Op::ListModels => {
            let message = decode(body, list_models)?;
            let list = call!(batches, list_models, caller.request(message.clone()));
            let catalogue = cells.read(&caller, limits::CALL_DEADLINE, list).await?;
            Ok(answered(&render::models(&message.harness, &catalogue)))
        }
        Op::Whoami => {
            decode(body, anything_with_parts)?;
            Ok(answered(&render::whoami(&whoami(app, &caller).await?)))
        }
        _ => runner::operation(app, caller, op, body).await,
    }
}

async fn whoami(app: &App, caller: &Caller) -> Result<Identity, Failure> {
    let whoami = call!(auth, whoami, caller.request(WhoamiRequest {}));
    app.cells.read(caller, limits::CALL_DEADLINE, whoami).await
}

/// The organization of a caller who may send a large body. What else they may do is the scheduler's to say; this only spares reading 64 MiB for
/// the same answer.
async fn may_send(app: &App, op: Op, caller: &Caller) -> Result<String, Failure> {
    let identity = whoami(app, caller).await?;
    let write = Permission::EvalsWrite.name();
    let starts = matches!(op, Op::Start | Op::RunnerStart | Op::RegradeBatch | Op::Report);
    if starts && !identity.permissions.iter().any(|held| held == write) {
        return Err(Failure::Forbidden(format!(
            "this key lacks the permission {write}; ask for a key that has it"
        )));
    }
    Ok(identity.organization_id)
}

pub(crate) fn answered(value: &Value) -> Response {
    json_body(Body::from(value.to_string()))
}

pub(crate) fn json_body(body: Body) -> Response {
    let mut response = Response::new(body);
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Who asks: passed on as it came, judged by the scheduler.
pub(crate) struct Caller {
    authorization: MetadataValue<Ascii>,
}

impl Caller {
    fn from(headers: &HeaderMap) -> Result<Caller, Failure> {
        let value = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes).unwrap_or_default();
        let bearer = value.len() > 7 && value[..7].eq_ignore_ascii_case(b"bearer ");
        if !bearer || value.len() > limits::AUTHORIZATION {
            return Err(Failure::no_key());
        }
        let authorization = MetadataValue::try_from(value).map_err(|_| Failure::no_key())?;
        Ok(Caller { authorization })
    }

    /// By what the caller is known again.
    pub(crate) fn fingerprint(&self) -> Fingerprint {
        cells::fingerprint(self.authorization.as_encoded_bytes())
    }

    /// `message` with the caller's key.
    pub(crate) fn request<T>(&self, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        request.metadata_mut().insert("authorization", self.authorization.clone());
        request
    }
}

fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, Failure> {
    let mut values = headers.get_all(IDEMPOTENCY_KEY).iter();
    let Some(value) = values.next() else { return Ok(None) };
    let text = value.to_str().unwrap_or_default();
    let printable = text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    if text.is_empty() || text.len() > MAX_IDEMPOTENCY_KEY || !printable || values.next().is_some() {
        return Err(Failure::BadRequest(format!(
            "The header idempotency-key must be given once, with 1 to {MAX_IDEMPOTENCY_KEY} printable ASCII characters."
        )));
    }
    Ok(Some(text.to_owned()))
}

/// The body as JSON, then as what the operation wants. The body's memory is given back before anything is asked of anybody.
pub(crate) fn decode<T>(body: Held, shape: fn(&mut Decoder, &Value) -> Option<T>) -> Result<T, Failure> {
    let value = parse_json(&body.bytes, MAX_JSON_DEPTH).map_err(|error| Failure::decode_whole(error.to_string()))?;
    Decoder::run(&value, shape).map_err(|issues| {
        let message = issues
            .first()
            .map_or_else(|| "The body is not as documented".to_owned(), ToString::to_string);
        Failure::Decode {
            message,
            issues: json!(issues),
        }
    })
}

pub(crate) fn by_id(d: &mut Decoder, value: &Value) -> Option<String> {
    let map = d.object(value)?;
    d.required(map, "id", |d, value| d.string(value, Text::any()))
}

/// Without the key. The judges are passed on as they were sent: what becomes of them is the scheduler's to say.
fn regrade(d: &mut Decoder, value: &Value) -> Option<RegradeBatchRequest> {
    let map = d.object(value)?;
    let id = d.required(map, "id", |d, value| d.string(value, Text::any()));
    let judges = d.optional(map, "judges", |d, value| {
        request::judges(d, value).map(|_| value.to_string().into_bytes().into())
    });
    let cases = d.optional(map, "cases", |d, value| {
        d.array(value, 1..=MAX_CASES, |d, value| d.string(value, Text::any()))
    });
    Some(RegradeBatchRequest {
        id: id?,
        idempotency_key: None,
        judges_json: judges?,
        cases: cases?.unwrap_or_default(),
    })
}

fn list_batches(d: &mut Decoder, value: &Value) -> Option<ListBatchesRequest> {
    let map = d.object(value)?;
    let cursor = d.nullable(map, "cursor", cursor);
    let limit = d.optional(map, "limit", |d, value| d.integer(value, i64::MIN..=i64::MAX));
    let limit = limit?.unwrap_or(DEFAULT_PAGE as i64).clamp(1, MAX_PAGE as i64);
    Some(ListBatchesRequest { cursor: cursor?, limit })
}

fn list_models(d: &mut Decoder, value: &Value) -> Option<ListModelsRequest> {
    let map = d.object(value)?;
    let harness = d.required(map, "harness", |d, value| d.one_of(value, Harness::ALL));
    let query = d.optional(map, "q", |d, value| d.string(value, Text::any()));
    Some(ListModelsRequest {
        harness: harness?.name().to_owned(),
        query: query?.unwrap_or_default(),
    })
}

fn cursor(d: &mut Decoder, value: &Value) -> Option<PageCursor> {
    let map = d.object(value)?;
    let id = d.required(map, "id", |d, value| d.string(value, Text::any()));
    let started = d.required(map, "startedAtMillis", |d, value| d.integer(value, 0..=MAX_SAFE_INTEGER));
    Some(PageCursor {
        id: id?,
        started_at_ms: started?.unsigned_abs(),
    })
}

/// The documentation allows any object here, and any array.
fn anything_with_parts(d: &mut Decoder, value: &Value) -> Option<()> {
    match value {
        Value::Array(_) => Some(()),
        _ => d.object(value).map(|_| ()),
    }
}
