//! The operations of local batches (`runner.*`): their requests and answers. What they mean is the scheduler's to say.

use std::ops::RangeInclusive;

use axum::{
    body::Body,
    response::{IntoResponse as _, Response},
};
use evalgrid_domain::{
    decode::{Decoder, Text},
    limits::{MAX_LEASED_VARIABLES, MAX_TRIALS_PER_BATCH, MAX_VARIABLE_NAME},
    number::MAX_SAFE_INTEGER,
    request::Harness,
    timestamp,
};
use evalgrid_proto::v1::{
    BeatRequest, FinishBatchRequest, LeaseCredentialRequest, LeaseVariablesRequest, LeasedValues, ReportTrialRequest, SubscribeRequest,
    Subscription, TailMark, TailPage, TailRequest,
};
use http::StatusCode;
use serde::Serialize;
use serde_json::{Value, json, value::RawValue};

use crate::{
    body::Held,
    cell::call,
    failure::Failure,
    limits,
    ops::{App, Caller, Op, answered, by_id, decode, json_body},
    render::Incoherent,
    result,
};

/// One of the operations of a machine that runs a local batch, start aside. Each of them may be asked twice, so one that broke off is.
pub(crate) async fn operation(app: &App, caller: Caller, op: Op, body: Held) -> Result<Response, Failure> {
    let cells = &app.cells;
    match op {
        Op::Lease => {
            let message = decode(body, lease)?;
            let call = call!(runner, lease, caller.request(message.clone()));
            Ok(answered(&credential(&cells.read(&caller, limits::CALL_DEADLINE, call).await?)))
        }
        Op::LeaseVariables => {
            let message = decode(body, lease_variables)?;
            let call = call!(runner, lease_variables, caller.request(message.clone()));
            Ok(answered(&variables(&cells.read(&caller, limits::CALL_DEADLINE, call).await?)))
        }
        Op::Report => {
            let message = ReportTrialRequest { json: body.bytes.clone() };
            let call = call!(runner, report, caller.request(message.clone()));
            cells.read(&caller, limits::START_DEADLINE, call).await?;
            Ok(StatusCode::NO_CONTENT.into_response())
        }
        Op::Beat => {
            let batch_id = decode(body, by_id)?;
            let call = call!(
                runner,
                beat,
                caller.request(BeatRequest {
                    batch_id: batch_id.clone()
                })
            );
            cells.read(&caller, limits::CALL_DEADLINE, call).await?;
            Ok(StatusCode::NO_CONTENT.into_response())
        }
        Op::Finish => {
            let batch_id = decode(body, by_id)?;
            let call = call!(
                runner,
                finish,
                caller.request(FinishBatchRequest {
                    batch_id: batch_id.clone()
                })
            );
            let batch = cells.read(&caller, limits::CALL_DEADLINE, call).await?;
            result::batch(app, caller, batch).await
        }
        Op::Subscribe => {
            let batch_id = decode(body, by_id)?;
            let call = call!(
                runner,
                subscribe,
                caller.request(SubscribeRequest {
                    batch_id: batch_id.clone()
                })
            );
            Ok(answered(&subscription(&cells.read(&caller, limits::CALL_DEADLINE, call).await?)))
        }
        Op::Tail => {
            let message = decode(body, tail)?;
            let call = call!(runner, tail, caller.request(message.clone()));
            Ok(json_body(Body::from(page(
                &cells.read(&caller, limits::CALL_DEADLINE, call).await?,
            )?)))
        }
        _ => Err(Failure::NotFound("There is no such operation.".into())),
    }
}

/// CredentialLeaseRequest.
pub(crate) fn lease(d: &mut Decoder, value: &Value) -> Option<LeaseCredentialRequest> {
    let map = d.object(value)?;
    let batch_id = d.required(map, "id", |d, value| d.string(value, Text::any()));
    let harness = d.required(map, "harness", |d, value| d.one_of(value, Harness::ALL));
    Some(LeaseCredentialRequest {
        batch_id: batch_id?,
        harness: harness?.name().to_owned(),
    })
}

/// VariableLeaseRequest.
pub(crate) fn lease_variables(d: &mut Decoder, value: &Value) -> Option<LeaseVariablesRequest> {
    let map = d.object(value)?;
    let batch_id = d.required(map, "id", |d, value| d.string(value, Text::any()));
    let name = Text::max(MAX_VARIABLE_NAME).min(1);
    let names = d.required(map, "names", |d, value| {
        d.array(value, 1..=MAX_LEASED_VARIABLES, |d, value| d.string(value, name))
    });
    Some(LeaseVariablesRequest {
        batch_id: batch_id?,
        names: names?,
    })
}

/// EvalBatchTailRequest.
pub(crate) fn tail(d: &mut Decoder, value: &Value) -> Option<TailRequest> {
    /// One mark per trial.
    const MARKS: RangeInclusive<usize> = 0..=MAX_TRIALS_PER_BATCH as usize;
    let map = d.object(value)?;
    let batch_id = d.required(map, "id", |d, value| d.string(value, Text::any()));
    let after = d.required(map, "after", |d, value| d.array(value, MARKS, mark));
    Some(TailRequest {
        batch_id: batch_id?,
        after: after?,
    })
}

fn mark(d: &mut Decoder, value: &Value) -> Option<TailMark> {
    let map = d.object(value)?;
    let run_id = d.required(map, "run", |d, value| d.string(value, Text::any()));
    let ordinal = d.required(map, "ordinal", |d, value| d.integer(value, 1..=i64::from(u32::MAX)));
    let seq = d.required(map, "seq", |d, value| d.integer(value, 0..=MAX_SAFE_INTEGER));
    Some(TailMark {
        run_id: run_id?,
        ordinal: u32::try_from(ordinal?).ok()?,
        seq: seq?.unsigned_abs(),
    })
}

/// CredentialLease.
pub(crate) fn credential(leased: &LeasedValues) -> Value {
    json!({
        "authMethodId": leased.auth_method_id,
        "expiresAt": timestamp::format(leased.expires_at_ms),
        "values": leased.values,
    })
}

/// VariableLease.
pub(crate) fn variables(leased: &LeasedValues) -> Value {
    json!({
        "expiresAt": timestamp::format(leased.expires_at_ms),
        "values": leased.values,
    })
}

/// BatchSubscription.
pub(crate) fn subscription(subscription: &Subscription) -> Value {
    json!({
        "expiresAtMillis": subscription.expires_at_ms,
        "tag": subscription.tag,
        "token": subscription.token,
    })
}

/// EvalBatchTail.
#[derive(Serialize)]
struct Tail<'a> {
    events: Vec<TailEvent<'a>>,
    next: Vec<Mark<'a>>,
    running: bool,
    settled: u32,
}

#[derive(Serialize)]
struct TailEvent<'a> {
    entry: &'a RawValue,
    #[serde(flatten)]
    mark: Mark<'a>,
}

#[derive(Serialize)]
struct Mark<'a> {
    ordinal: u32,
    run: &'a str,
    seq: u64,
}

fn mark_of(mark: &TailMark) -> Mark<'_> {
    Mark {
        ordinal: mark.ordinal,
        run: &mark.run_id,
        seq: mark.seq,
    }
}

/// EvalBatchTail as JSON: entries go through as they were stored.
pub(crate) fn page(page: &TailPage) -> Result<Vec<u8>, Failure> {
    let incoherent = |what: &'static str| {
        tracing::error!(error = %Incoherent(what), "a tail could not be written");
        Failure::Internal
    };
    let mut events = Vec::with_capacity(page.events.len());
    for event in &page.events {
        let mark = event.mark.as_ref().ok_or_else(|| incoherent("an entry of no trial"))?;
        events.push(TailEvent {
            entry: serde_json::from_slice(&event.entry).map_err(|_| incoherent("an entry that is not JSON"))?,
            mark: mark_of(mark),
        });
    }
    let tail = Tail {
        events,
        next: page.next.iter().map(mark_of).collect(),
        running: page.running,
        settled: page.settled,
    };
    serde_json::to_vec(&tail).map_err(|_| incoherent("a page that is not JSON"))
}
