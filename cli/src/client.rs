//! Speaking gRPC to a scheduler, and saying in plain words what it answered.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use evalgrid_discovery::{Routed, Schedulers};
use evalgrid_proto::v1::{Refusal, admin_client::AdminClient, batches_client::BatchesClient, organizations_client::OrganizationsClient};
use prost::Message as _;
use tokio::time::timeout;
use tonic::{
    Code, Request, Status,
    metadata::{Ascii, MetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use crate::{Failure, options, output};

/// Until a connection stands.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// A start may bring 64 MiB.
const MESSAGE: usize = (64 << 20) + (64 << 10);

/// As refusals end that are about the variables of the server.
const OF_THE_SERVER: &str = "in the scheduler's own environment";

/// Puts `authorization: Bearer …` on every call.
#[derive(Clone)]
pub(crate) struct Bearer(MetadataValue<Ascii>);

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.metadata_mut().insert("authorization", self.0.clone());
        Ok(request)
    }
}

pub(crate) type Batches = BatchesClient<InterceptedService<Routed, Bearer>>;
pub(crate) type Organizations = OrganizationsClient<InterceptedService<Routed, Bearer>>;
pub(crate) type Admin = AdminClient<InterceptedService<Routed, Bearer>>;

/// A client for batches, with the caller's API key.
pub(crate) async fn batches(client: &options::Client) -> Result<Batches, Failure> {
    let key = api_key(client)?;
    batches_at(&client.scheduler.schedulers, &key).await
}

/// A client for batches at the cell of these schedulers with `key`.
pub(crate) async fn batches_at(schedulers: &[String], key: &str) -> Result<Batches, Failure> {
    let client = BatchesClient::with_interceptor(connect(schedulers).await?, bearer(key)?);
    Ok(client.max_decoding_message_size(MESSAGE).max_encoding_message_size(MESSAGE))
}

/// A client for keys, with the operator's token.
pub(crate) async fn admin(operator: &options::Operator) -> Result<Admin, Failure> {
    let token = match &operator.admin_token {
        Some(token) => token.clone(),
        None => secret(&operator.data.data.join("admin-token"), "the admin token", "EVALGRID_ADMIN_TOKEN")?,
    };
    admin_at(&operator.scheduler.schedulers, &token).await
}

/// As [`admin`], with a token that is known.
pub(crate) async fn admin_at(schedulers: &[String], token: &str) -> Result<Admin, Failure> {
    Ok(AdminClient::with_interceptor(connect(schedulers).await?, bearer(token)?))
}

/// A client for the organizations of a cell, with the operator's token.
pub(crate) async fn organizations(operator: &options::Operator) -> Result<Organizations, Failure> {
    let token = match &operator.admin_token {
        Some(token) => token.clone(),
        None => secret(&operator.data.data.join("admin-token"), "the admin token", "EVALGRID_ADMIN_TOKEN")?,
    };
    organizations_with(&operator.scheduler.schedulers, &token).await
}

/// A client for the organizations of one of the two cells of a move. `end` is FROM or TO.
pub(crate) async fn organizations_at(
    schedulers: &[String],
    token: Option<String>,
    file: Option<PathBuf>,
    end: &str,
) -> Result<Organizations, Failure> {
    let variable = format!("EVALGRID_{end}_TOKEN");
    let token = match (token, file) {
        (Some(token), _) => token,
        (None, Some(file)) => secret(&file, "the admin token", &variable)?,
        (None, None) => {
            return Err(Failure::usage(
                "the admin tokens of both cells are needed",
                format!("Set {variable}, or name a file with --{}-token-file.", end.to_lowercase()),
            ));
        }
    };
    organizations_with(schedulers, &token).await
}

async fn organizations_with(schedulers: &[String], token: &str) -> Result<Organizations, Failure> {
    let client = OrganizationsClient::with_interceptor(connect(schedulers).await?, bearer(token)?);
    Ok(client.max_decoding_message_size(MESSAGE).max_encoding_message_size(MESSAGE))
}

/// The caller's API key.
pub(crate) fn api_key(client: &options::Client) -> Result<String, Failure> {
    match &client.api_key {
        Some(key) => Ok(key.clone()),
        None => secret(&client.data.data.join("api-key"), "an API key", "EVALGRID_API_KEY"),
    }
}

/// A secret that a server has put into its data folder.
pub(crate) fn secret(path: &Path, what: &str, variable: &str) -> Result<String, Failure> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(text.trim().to_owned()),
        Err(error) => {
            let why = match error.kind() {
                io::ErrorKind::NotFound => "there is none".to_owned(),
                _ => error.to_string(),
            };
            Err(Failure::usage(
                format!("{what} is needed, and looking in {}: {why}", path.display()),
                format!("Set {variable}, or name the server's data folder with --data."),
            ))
        }
    }
}

/// A way to whichever of `addresses` is the active scheduler, at each call anew. There must be one now.
async fn connect(addresses: &[String]) -> Result<Routed, Failure> {
    let schedulers = Schedulers::new(addresses, |endpoint| endpoint.connect_timeout(CONNECT_DEADLINE))
        .map_err(|error| Failure::usage(error.to_string(), "Correct --scheduler."))?;
    // A health check is answered by every scheduler, and without a key.
    let there = match schedulers.are_several() {
        true => schedulers.active().await.map(drop).map_err(|none| none.to_string()),
        false => {
            let mut health = HealthClient::new(Routed::new(schedulers.clone()));
            let answer = timeout(CONNECT_DEADLINE, health.check(HealthCheckRequest::default())).await;
            let there = answer.ok().and_then(Result::ok);
            there
                .map(drop)
                .ok_or_else(|| format!("no scheduler answers at {}", addresses.join(", ")))
        }
    };
    there.map_err(|why| unreachable(&why))?;
    Ok(Routed::new(schedulers))
}

fn unreachable(why: &str) -> Failure {
    Failure::new(
        why,
        format!("Start one with `{} serve`, or name another with --scheduler.", output::program()),
    )
}

fn bearer(secret: &str) -> Result<Bearer, Failure> {
    MetadataValue::try_from(format!("Bearer {secret}"))
        .map(Bearer)
        .map_err(|_| Failure::usage("the key has characters that no key has", "Copy it again, without line breaks."))
}

/// What a refused call about batches means, and what to do.
pub(crate) fn refused(status: &Status) -> Failure {
    let program = output::program();
    let next = match status.code() {
        // Nothing is wrong with the request.
        Code::InvalidArgument if status.message().contains(OF_THE_SERVER) => {
            "Set it there, start the scheduler (or serve) again, and send the request again.".to_owned()
        }
        Code::Unauthenticated => "Check the key: EVALGRID_API_KEY, or the file api-key of the right data folder in --data.".to_owned(),
        Code::PermissionDenied => format!("Use a key with that permission: {program} keys create --permissions …"),
        Code::NotFound => format!("See what there is: {program} batch list"),
        Code::FailedPrecondition | Code::Aborted => format!("See what runs: {program} batch list"),
        Code::InvalidArgument => "Correct the request and send it again.".to_owned(),
        code => failed(code).to_owned(),
    };
    told(status, next)
}

/// What a refused call about keys means, and what to do.
pub(crate) fn refused_to_operator(status: &Status) -> Failure {
    let program = output::program();
    let next = match status.code() {
        Code::Unauthenticated | Code::PermissionDenied => {
            "Check the token: EVALGRID_ADMIN_TOKEN, or the file admin-token of the right data folder in --data.".to_owned()
        }
        // The message begins with the name of the field that is wrong.
        Code::InvalidArgument => match status.message().split(':').next() {
            Some("permissions") => "Correct --permissions.".to_owned(),
            Some("organization") => "Correct --org.".to_owned(),
            Some("name") => "Correct --name.".to_owned(),
            _ => format!("See the keys: {program} keys list"),
        },
        Code::NotFound | Code::FailedPrecondition | Code::Aborted => format!("See the keys: {program} keys list"),
        code => failed(code).to_owned(),
    };
    told(status, next)
}

/// What a refused call about a trial means, and what to do.
pub(crate) fn refused_trial(status: &Status) -> Failure {
    let program = output::program();
    let next = match status.code() {
        Code::InvalidArgument => "Correct --void.".to_owned(),
        Code::NotFound | Code::FailedPrecondition => format!("See the ids of the batch's trials: {program} batch get batch_… --json"),
        _ => return refused_to_operator(status),
    };
    told(status, next)
}

/// What to do where it was not the caller's mistake.
fn failed(code: Code) -> &'static str {
    match code {
        Code::Unavailable | Code::DeadlineExceeded | Code::ResourceExhausted | Code::Cancelled => "Try again in a moment.",
        _ => "See the server's log.",
    }
}

fn told(status: &Status, next: String) -> Failure {
    let refusal = match status.details() {
        [] => None,
        details => Refusal::decode(details).ok(),
    };
    let message = refusal
        .as_ref()
        .map(|refusal| refusal.message.as_str())
        .filter(|text| !text.is_empty());
    let message = output::plain(message.unwrap_or(status.message()));
    let message = match message.is_empty() {
        true => format!("the scheduler answered {:?}", status.code()),
        false => message,
    };
    let issues = refusal.map(|refusal| issues(&refusal.issues_json)).unwrap_or_default();
    Failure::new(format!("{message}{issues}"), next)
}

/// The documented issues, one per line, if there are more than the message tells.
fn issues(json: &str) -> String {
    let issues: Vec<evalgrid_domain::decode::Issue> = serde_json::from_str(json).unwrap_or_default();
    match issues.len() {
        0 | 1 => String::new(),
        _ => issues
            .iter()
            .map(|issue| format!("\n  {}", output::plain(&issue.to_string())))
            .collect(),
    }
}
