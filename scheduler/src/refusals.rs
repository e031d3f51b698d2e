//! What was refused, as a gRPC status that carries the public API's words.

use evalgrid_domain::decode::{DecodeError, Issue, IssueTag};
use evalgrid_proto::v1::{self, refusal::Kind};
use evalgrid_workflow::decide;
use prost::Message as _;
use tonic::{Code, Status};

/// A refusal with its documented kind.
pub fn refusal(code: Code, kind: Kind, message: impl Into<String>, issues: &[Issue]) -> Status {
    let message = message.into();
    let issues_json = match issues {
        [] => String::new(),
        issues => serde_json::to_string(issues).unwrap_or_default(),
    };
    let details = v1::Refusal {
        kind: kind.into(),
        message: message.clone(),
        issues_json,
    };
    Status::with_details(code, message, details.encode_to_vec().into())
}

/// 400 `BadRequest`.
pub fn bad_request(message: impl Into<String>) -> Status {
    refusal(Code::InvalidArgument, Kind::BadRequest, message, &[])
}

/// 409.
pub fn conflict(message: impl Into<String>) -> Status {
    refusal(Code::FailedPrecondition, Kind::Conflict, message, &[])
}

/// 413.
pub fn too_large(bytes: usize, limit: usize) -> Status {
    let text = format!("The body has {bytes} bytes; the limit is {limit}");
    refusal(Code::ResourceExhausted, Kind::TooLarge, text, &[])
}

/// A body that is no JSON document we read.
pub fn undecodable(error: &DecodeError) -> Status {
    let issue = Issue {
        tag: IssueTag::Unexpected,
        path: Vec::new(),
        message: error.to_string(),
    };
    refusal(Code::InvalidArgument, Kind::Decode, error.to_string(), &[issue])
}

/// A body of another shape than the documented one.
pub fn misshapen(issues: &[Issue]) -> Status {
    let message = issues.first().map_or_else(String::new, |issue| issue.to_string());
    refusal(Code::InvalidArgument, Kind::Decode, message, issues)
}

/// A refusal of the state machine.
pub fn refused(error: &decide::Refusal) -> Status {
    use decide::Refusal::*;
    match error {
        KeyReused => bad_request(error.to_string()),
        NoBatch | NoRun | NoTrial | NoOpenTrial | NoKey => Status::not_found(error.to_string()),
        _ => conflict(error.to_string()),
    }
}
