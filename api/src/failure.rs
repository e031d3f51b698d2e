//! Everything that is answered instead of a result, and how a gRPC status becomes one.

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use evalgrid_proto::v1::{Refusal, refusal};
use http::{HeaderValue, StatusCode, header};
use prost::Message as _;
use serde_json::{Value, json};
use tonic::{Code, Status};

/// A failed request, as the caller sees it.
#[derive(Debug, PartialEq)]
pub(crate) enum Failure {
    /// 400: the body does not have the documented shape. The issues are the documented objects.
    Decode { message: String, issues: Value },
    /// 400: it has, but it cannot be done.
    BadRequest(String),
    /// 401.
    Unauthorized(String),
    /// 403.
    Forbidden(String),
    /// 404.
    NotFound(String),
    /// 405.
    MethodNotAllowed,
    /// 408: the body did not arrive in time.
    RequestTimeout,
    /// 409.
    Conflict(String),
    /// 413.
    TooLarge(String),
    /// 429.
    TooManyRequests(String),
    /// 500. What happened is in our log, never in the answer.
    Internal,
    /// 500: what was stored is missing or damaged. The message says what to do.
    Lost(String),
    /// 503: try again.
    Unavailable(String),
}

/// What a caller is told where the scheduler cannot be asked.
const UNAVAILABLE: &str = "The service cannot answer right now. Try again.";
/// What a caller is told where the scheduler was lost in the middle of a change.
const UNKNOWN_OUTCOME: &str = "The service was lost while it worked on this, so it is not known whether it was done. Send it again with the same idempotency-key: it is then done once.";
/// What a caller is told where stored data is missing or damaged, if the scheduler does not say more.
const LOST: &str = "What was stored for this is missing or damaged, and trying again will not help. Start the batch anew, or ask the operator to restore a backup.";
/// Seconds in `Retry-After`.
const RETRY_AFTER: &str = "1";

impl Failure {
    /// A body that is wrong as a whole.
    pub(crate) fn decode_whole(message: impl Into<String>) -> Failure {
        let message = message.into();
        let issues = json!([{"_tag": "Type", "path": [], "message": message}]);
        Failure::Decode { message, issues }
    }

    /// A caller who named no key.
    pub(crate) fn no_key() -> Failure {
        Failure::Unauthorized("Send an API key: `authorization: Bearer <key>`.".into())
    }

    /// What `status` means to the caller of the HTTP API.
    pub(crate) fn from_status(status: &Status) -> Failure {
        if let Some(failure) = refused(status) {
            return failure;
        }
        let message = status.message().to_owned();
        if evalgrid_discovery::broke_off(status) {
            tracing::warn!(code = ?status.code(), reason = %message, "the connection to the scheduler broke");
            return Failure::Unavailable(UNAVAILABLE.into());
        }
        match status.code() {
            Code::Unauthenticated => Failure::Unauthorized(or(message, "The bearer token is missing or not valid.")),
            Code::PermissionDenied => Failure::Forbidden(or(message, "The key lacks the permission for this.")),
            Code::NotFound => Failure::NotFound(or(message, "There is no such thing.")),
            Code::InvalidArgument | Code::OutOfRange => Failure::BadRequest(or(message, "The request cannot be done.")),
            Code::FailedPrecondition | Code::Aborted | Code::AlreadyExists => {
                Failure::Conflict(or(message, "The request conflicts with the current state."))
            }
            Code::ResourceExhausted => Failure::TooManyRequests(or(message, "Too much at once. Try again.")),
            Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled => {
                tracing::warn!(code = ?status.code(), reason = %message, "the scheduler did not answer");
                Failure::Unavailable(UNAVAILABLE.into())
            }
            Code::DataLoss => {
                tracing::error!(reason = %message, "stored data is missing or damaged");
                Failure::Lost(or(message, LOST))
            }
            code => {
                tracing::error!(?code, reason = %message, "the scheduler failed");
                Failure::Internal
            }
        }
    }

    /// Nobody knows whether a request that was to change something has done so.
    pub(crate) fn unknown_outcome() -> Failure {
        Failure::Unavailable(UNKNOWN_OUTCOME.into())
    }

    /// Something stored is not there although it must be.
    pub(crate) fn lost() -> Failure {
        Failure::Lost(LOST.into())
    }

    fn parts(&self) -> (StatusCode, Value) {
        let tagged = |tag: &str, message: &str| json!({"_tag": tag, "message": message});
        match self {
            Failure::Decode { message, issues } => (
                StatusCode::BAD_REQUEST,
                json!({"_tag": "HttpApiDecodeError", "message": message, "issues": issues}),
            ),
            Failure::BadRequest(message) => (StatusCode::BAD_REQUEST, tagged("BadRequest", message)),
            Failure::Unauthorized(message) => (StatusCode::UNAUTHORIZED, tagged("Unauthorized", message)),
            Failure::Forbidden(message) => (StatusCode::FORBIDDEN, tagged("Forbidden", message)),
            Failure::NotFound(message) => (StatusCode::NOT_FOUND, tagged("NotFound", message)),
            Failure::MethodNotAllowed => (
                StatusCode::METHOD_NOT_ALLOWED,
                tagged("MethodNotAllowed", "Every operation is a POST with a JSON body."),
            ),
            Failure::RequestTimeout => (
                StatusCode::REQUEST_TIMEOUT,
                tagged("RequestTimeout", "The request body did not arrive in time."),
            ),
            Failure::Conflict(message) => (StatusCode::CONFLICT, tagged("Conflict", message)),
            Failure::TooLarge(message) => (StatusCode::PAYLOAD_TOO_LARGE, tagged("PayloadTooLarge", message)),
            Failure::TooManyRequests(message) => (StatusCode::TOO_MANY_REQUESTS, tagged("TooManyRequests", message)),
            Failure::Internal => (
                StatusCode::INTERNAL_SERVER_ERROR,
                tagged("InternalError", "Something went wrong on our side."),
            ),
            Failure::Lost(message) => (StatusCode::INTERNAL_SERVER_ERROR, tagged("InternalError", message)),
            Failure::Unavailable(message) => (StatusCode::SERVICE_UNAVAILABLE, tagged("Unavailable", message)),
        }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let (status, body) = self.parts();
        let mut response = Response::new(Body::from(body.to_string()));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        match self {
            Failure::MethodNotAllowed => {
                headers.insert(header::ALLOW, HeaderValue::from_static("POST"));
            }
            Failure::Unauthorized(_) => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            Failure::Unavailable(_) | Failure::TooManyRequests(_) => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER));
            }
            _ => {}
        }
        response
    }
}

/// The scheduler's own words, where the status carries them.
fn refused(status: &Status) -> Option<Failure> {
    if status.details().is_empty() {
        return None;
    }
    let refusal = Refusal::decode(status.details()).ok()?;
    let message = refusal.message.clone();
    match refusal.kind() {
        refusal::Kind::Unspecified => None,
        refusal::Kind::Decode => Some(Failure::Decode {
            issues: serde_json::from_str(&refusal.issues_json)
                .ok()
                .filter(Value::is_array)
                .unwrap_or_else(|| json!([{"_tag": "Type", "path": [], "message": message}])),
            message,
        }),
        refusal::Kind::BadRequest => Some(Failure::BadRequest(message)),
        refusal::Kind::TooLarge => Some(Failure::TooLarge(message)),
        refusal::Kind::Conflict => Some(Failure::Conflict(message)),
    }
}

fn or(message: String, otherwise: &str) -> String {
    if message.is_empty() { otherwise.into() } else { message }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn statuses_become_the_documented_failures() {
        fn check(code: Code, status: u16, tag: &str) {
            let (got, body) = Failure::from_status(&Status::new(code, "words")).parts();
            assert_eq!((got.as_u16(), body["_tag"].as_str().unwrap()), (status, tag), "{code:?}");
            let leaks = body["message"].as_str().unwrap().contains("words");
            assert_eq!(
                leaks,
                status < 500 || code == Code::DataLoss,
                "{code:?}: internal words stay inside, the others are for the caller"
            );
        }
        check(Code::Unauthenticated, 401, "Unauthorized");
        check(Code::PermissionDenied, 403, "Forbidden");
        check(Code::NotFound, 404, "NotFound");
        check(Code::FailedPrecondition, 409, "Conflict");
        check(Code::Aborted, 409, "Conflict");
        check(Code::AlreadyExists, 409, "Conflict");
        check(Code::InvalidArgument, 400, "BadRequest");
        check(Code::OutOfRange, 400, "BadRequest");
        check(Code::ResourceExhausted, 429, "TooManyRequests");
        check(Code::Unavailable, 503, "Unavailable");
        check(Code::DeadlineExceeded, 503, "Unavailable");
        check(Code::Cancelled, 503, "Unavailable");
        check(Code::Internal, 500, "InternalError");
        check(Code::Unknown, 500, "InternalError");
        check(Code::DataLoss, 500, "InternalError");
        check(Code::Unimplemented, 500, "InternalError");
        assert_eq!(Failure::from_status(&Status::new(Code::DataLoss, "")), Failure::lost());
    }

    #[test]
    fn a_refusal_outranks_the_code() {
        fn check(kind: refusal::Kind, issues_json: &str, expected: Failure) {
            let refusal = Refusal {
                kind: kind.into(),
                message: "no".into(),
                issues_json: issues_json.into(),
            };
            let status = Status::with_details(Code::InvalidArgument, "grpc words", refusal.encode_to_vec().into());
            assert_eq!(Failure::from_status(&status), expected);
        }
        let issue = json!([{"_tag": "Missing", "path": ["cases", 0], "message": "is missing"}]);
        check(
            refusal::Kind::Decode,
            &issue.to_string(),
            Failure::Decode {
                message: "no".into(),
                issues: issue,
            },
        );
        check(
            refusal::Kind::Decode,
            "not json",
            Failure::Decode {
                message: "no".into(),
                issues: json!([{"_tag": "Type", "path": [], "message": "no"}]),
            },
        );
        check(refusal::Kind::BadRequest, "", Failure::BadRequest("no".into()));
        check(refusal::Kind::TooLarge, "", Failure::TooLarge("no".into()));
        check(refusal::Kind::Conflict, "", Failure::Conflict("no".into()));
        check(refusal::Kind::Unspecified, "", Failure::BadRequest("grpc words".into()));
    }
}
