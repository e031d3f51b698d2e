//! Events of the log as JSON for people and scripts, with the ids that the API shows.

use evalgrid_domain::{
    ids::{BatchId, TrialId},
    timestamp,
};
use evalgrid_proto::{
    log::v1::{
        BatchArchived, CarriedTrial, Event, JobRef, TravellingOrganization, TrialRef, event::Kind, job_answered::Answer, job_ref::Part,
    },
    v1::{
        AnswererInfo, BatchStatus, BatchSummary, Before, CaseInfo, Evidence, Judged, ModelSpend, ObjectRef, TrialOutcome, Trigger, Usage,
        VariantInfo, evidence::Place,
    },
};
use prost::Message as _;
use serde_json::{Value, json};

/// The kind's name and its fields, in their order.
type Told = (&'static str, Vec<(&'static str, Value)>);

/// One line for the record at `position`.
pub(crate) fn line(position: u64, partition: u16, sequence: u64, event: &Event) -> String {
    let (kind, fields) = match &event.kind {
        Some(kind) => told(kind),
        None => ("Unknown", Vec::new()),
    };
    let at = timestamp::format(event.at_ms);
    let mut line = format!(r#"{{"position":{position},"partition":{partition},"sequence":{sequence},"at":"{at}","kind":"{kind}""#);
    for (name, value) in fields {
        line.push_str(&format!(r#","{name}":{value}"#));
    }
    line.push('}');
    line
}

fn archived(e: &BatchArchived) -> Vec<(&'static str, Value)> {
    vec![
        ("batch", batch(&e.batch)),
        ("organizationId", json!(e.organization_id)),
        ("manifest", e.manifest.as_ref().map_or(Value::Null, object)),
        ("summary", e.summary.as_ref().map_or(Value::Null, summary)),
    ]
}

/// Who has arrived, without the hashes of all its keys.
fn imported(travelling: &[u8]) -> Vec<(&'static str, Value)> {
    let Ok(TravellingOrganization {
        organization: Some(organization),
        keys,
    }) = TravellingOrganization::decode(travelling)
    else {
        return Vec::new();
    };
    vec![
        ("organizationId", json!(organization.id)),
        ("name", json!(organization.name)),
        ("slug", json!(organization.slug)),
        ("started", json!(organization.started)),
        ("keys", json!(keys.len())),
        ("idempotencyKeys", json!(organization.starts.len())),
    ]
}

fn told(kind: &Kind) -> Told {
    match kind {
        Kind::OrganizationCreated(e) => (
            "OrganizationCreated",
            vec![
                ("organizationId", json!(e.organization_id)),
                ("name", json!(e.name)),
                ("slug", json!(e.slug)),
            ],
        ),
        Kind::KeyCreated(e) => (
            "KeyCreated",
            vec![
                ("keyId", json!(e.key_id)),
                ("organizationId", json!(e.organization_id)),
                ("name", json!(e.name)),
                ("start", json!(e.start)),
                ("hash", json!(hex(&e.hash))),
                ("permissions", json!(e.permissions)),
            ],
        ),
        Kind::OrganizationFrozen(e) => ("OrganizationFrozen", vec![("organizationId", json!(e.organization_id))]),
        Kind::OrganizationUnfrozen(e) => ("OrganizationUnfrozen", vec![("organizationId", json!(e.organization_id))]),
        Kind::OrganizationMoved(e) => ("OrganizationMoved", vec![("organizationId", json!(e.organization_id))]),
        Kind::OrganizationImported(e) => ("OrganizationImported", imported(&e.organization)),
        Kind::KeyRevoked(e) => ("KeyRevoked", vec![("keyId", json!(e.key_id))]),
        Kind::BatchStarted(e) => (
            "BatchStarted",
            vec![
                ("batch", batch(&e.batch)),
                ("organizationId", json!(e.organization_id)),
                ("request", e.request.as_ref().map_or(Value::Null, object)),
                ("requestHash", json!(e.request_hash)),
                ("idempotencyKey", json!(e.idempotency_key)),
                (
                    "suite",
                    e.suite.as_ref().map_or(Value::Null, |s| json!({"id": s.id, "name": s.name})),
                ),
                ("cases", e.cases.iter().map(case).collect()),
                ("variants", e.variants.iter().map(variant).collect()),
                ("trials", json!(e.trials)),
                ("trigger", e.trigger.as_ref().map_or(Value::Null, trigger)),
                ("variantIds", json!(e.variant_ids)),
                ("local", json!(e.local)),
                ("checksIn", json!(e.checks_in)),
                ("harnesses", json!(e.harnesses)),
                ("retryOf", e.retry_of.as_ref().map_or(Value::Null, |id| batch(id))),
                ("carried", e.carried.iter().map(carried).collect()),
                ("regradeOf", e.regrade_of.as_ref().map_or(Value::Null, |id| batch(id))),
                ("nonce", json!(hex(&e.nonce))),
            ],
        ),
        Kind::LeaseGranted(e) => (
            "LeaseGranted",
            vec![
                ("token", json!(e.token)),
                ("trial", trial(e.trial.as_ref())),
                ("workerId", json!(e.worker_id)),
                ("incarnation", json!(e.incarnation)),
                ("bootId", json!(e.boot_id)),
                ("sandbox", json!(e.sandbox)),
                ("adopt", json!(e.adopt)),
            ],
        ),
        Kind::StepRecorded(e) => (
            "StepRecorded",
            vec![
                ("token", json!(e.token)),
                ("step", json!(e.step)),
                ("outcome", json!(word(e.outcome().as_str_name(), "STEP_OUTCOME_"))),
                ("result", json_or_text(&e.result)),
            ],
        ),
        Kind::AttemptEnded(e) => (
            "AttemptEnded",
            vec![
                ("token", json!(e.token)),
                ("trial", trial(e.trial.as_ref())),
                ("why", json!(word(e.why().as_str_name(), "WHY_"))),
                ("reason", json!(e.reason)),
                ("notBefore", json!(timestamp::format(e.not_before_ms))),
            ],
        ),
        Kind::TrialSettled(e) => (
            "TrialSettled",
            vec![
                ("trial", trial(e.trial.as_ref())),
                ("token", json!(e.token)),
                ("outcome", e.outcome.as_ref().map_or(Value::Null, outcome)),
                (
                    "sandboxKeptUntil",
                    e.sandbox_kept_until_ms.map_or(Value::Null, |ms| json!(timestamp::format(ms))),
                ),
            ],
        ),
        Kind::TrialChecked(e) => (
            "TrialChecked",
            vec![
                ("trial", trial(e.trial.as_ref())),
                ("token", json!(e.token)),
                ("outcome", e.outcome.as_ref().map_or(Value::Null, outcome)),
                (
                    "sandboxKeptUntil",
                    e.sandbox_kept_until_ms.map_or(Value::Null, |ms| json!(timestamp::format(ms))),
                ),
                ("nonce", json!(hex(&e.nonce))),
            ],
        ),
        Kind::ReplyAwaited(e) => (
            "ReplyAwaited",
            vec![
                ("trial", trial(e.trial.as_ref())),
                ("token", json!(e.token)),
                ("turn", json!(e.turn)),
                ("conversation", e.conversation.as_ref().map_or(Value::Null, evidence)),
                ("nonce", json!(hex(&e.nonce))),
            ],
        ),
        Kind::JobLeased(e) => (
            "JobLeased",
            vec![
                ("token", json!(e.token)),
                ("job", job(e.job.as_ref())),
                ("workerId", json!(e.worker_id)),
                ("incarnation", json!(e.incarnation)),
                ("bootId", json!(e.boot_id)),
                ("sandbox", json!(e.sandbox)),
                ("adopt", json!(e.adopt)),
            ],
        ),
        Kind::JobAsked(e) => ("JobAsked", vec![("token", json!(e.token))]),
        Kind::JobEnded(e) => (
            "JobEnded",
            vec![
                ("token", json!(e.token)),
                ("job", job(e.job.as_ref())),
                ("why", json!(word(e.why().as_str_name(), "WHY_"))),
                ("reason", json!(e.reason)),
                ("notBefore", json!(timestamp::format(e.not_before_ms))),
                ("spentMs", json!(e.spent_ms)),
                ("throttledUntil", json!(timestamp::format(e.throttled_until_ms))),
            ],
        ),
        Kind::JobAnswered(e) => (
            "JobAnswered",
            vec![
                ("job", job(e.job.as_ref())),
                ("token", json!(e.token)),
                ("answer", e.answer.as_ref().map_or(Value::Null, answer)),
            ],
        ),
        Kind::BatchEnded(e) => (
            "BatchEnded",
            vec![
                ("batch", batch(&e.batch)),
                ("status", status(e.status())),
                ("failure", json!(e.failure)),
            ],
        ),
        Kind::BatchArchived(e) => ("BatchArchived", archived(e)),
        Kind::BatchImported(e) => ("BatchImported", archived(e)),
        Kind::SandboxCreated(e) => (
            "SandboxCreated",
            vec![("sandbox", json!(e.sandbox)), ("providerId", json!(e.provider_id))],
        ),
        Kind::SandboxDestroyAsked(e) => (
            "SandboxDestroyAsked",
            vec![("sandbox", json!(e.sandbox)), ("reason", json!(e.reason))],
        ),
        Kind::LocalCheckedIn(e) => ("LocalCheckedIn", vec![("batch", batch(&e.batch))]),
        Kind::LocalBatchClosed(e) => (
            "LocalBatchClosed",
            vec![
                ("batch", batch(&e.batch)),
                ("failure", json!(e.failure)),
                ("unreported", json!(e.unreported)),
                ("cancelled", json!(e.cancelled)),
            ],
        ),
        Kind::SandboxDestroyed(e) => (
            "SandboxDestroyed",
            vec![("sandbox", json!(e.sandbox)), ("workerId", json!(e.worker_id))],
        ),
    }
}

/// The API's id, or the bytes where they are none.
fn batch(bytes: &[u8]) -> Value {
    match <[u8; 16]>::try_from(bytes) {
        Ok(bytes) => json!(BatchId(bytes).to_string()),
        Err(_) => json!(hex(bytes)),
    }
}

fn trial(trial: Option<&TrialRef>) -> Value {
    let Some(trial) = trial else { return Value::Null };
    let id = || {
        Some(TrialId {
            batch: BatchId(<[u8; 16]>::try_from(&trial.batch[..]).ok()?),
            run: u8::try_from(trial.run).ok()?,
            ordinal: u8::try_from(trial.ordinal).ok()?,
        })
    };
    match id() {
        Some(id) => json!(id.to_string()),
        None => json!({"batch": batch(&trial.batch), "run": trial.run, "ordinal": trial.ordinal}),
    }
}

fn job(job: Option<&JobRef>) -> Value {
    let Some(job) = job else { return Value::Null };
    let trial = trial(job.trial.as_ref());
    match job.part {
        Some(Part::Judge(index)) => json!({"trial": trial, "judge": index}),
        Some(Part::Reply(turn)) => json!({"trial": trial, "reply": turn}),
        None => json!({"trial": trial}),
    }
}

fn answer(answer: &Answer) -> Value {
    match answer {
        Answer::Judged(e) => judged(e),
        Answer::Replied(e) => json!({
            "record": json_or_text(&e.record),
            "failed": e.failed,
            "spend": e.spend.as_ref().map(spend),
            "sessionId": e.session_id,
        }),
    }
}

fn judged(judged: &Judged) -> Value {
    json!({
        "index": judged.index,
        "name": judged.name,
        "verdict": word(judged.verdict().as_str_name(), "JUDGE_VERDICT_"),
        "choice": judged.choice,
        "score": judged.score,
        "error": judged.error,
        "validation": judged.validation.as_ref().map(evidence),
        "spend": judged.spend.as_ref().map(spend),
    })
}

fn answerer(answerer: &AnswererInfo) -> Value {
    json!({"name": answerer.name, "harness": answerer.harness, "provider": answerer.provider, "model": answerer.model})
}

fn carried(trial: &CarriedTrial) -> Value {
    json!({"run": trial.run, "ordinal": trial.ordinal, "outcome": trial.outcome.as_ref().map(outcome)})
}

fn object(object: &ObjectRef) -> Value {
    json!({"sha256": object.sha256, "size": object.size})
}

fn case(case: &CaseInfo) -> Value {
    json!({
        "id": case.id,
        "name": case.name,
        "definitionHash": case.definition_hash,
        "timeoutMs": case.timeout_ms,
        "judges": case.judges.iter().map(answerer).collect::<Vec<_>>(),
        "person": case.person.as_ref().map(answerer),
        "checks": case.checks,
    })
}

fn variant(variant: &VariantInfo) -> Value {
    json!({
        "harness": variant.harness,
        "harnessVersion": variant.harness_version,
        "model": variant.model,
        "profile": variant.profile,
        "profileVersion": variant.profile_version,
        "provider": variant.provider,
        "sandbox": variant.sandbox,
        "variables": variant.variables,
    })
}

fn trigger(trigger: &Trigger) -> Value {
    json!({"source": trigger.source, "url": trigger.url})
}

fn status(status: BatchStatus) -> Value {
    json!(word(status.as_str_name(), "BATCH_STATUS_"))
}

fn summary(summary: &BatchSummary) -> Value {
    json!({
        "cancelled": summary.cancelled,
        "cases": summary.cases,
        "failure": summary.failure,
        "finishedAt": summary.finished_at_ms.map(timestamp::format),
        "id": summary.id,
        "passed": summary.passed,
        "runs": summary.runs,
        "scored": summary.scored,
        "startedAt": timestamp::format(summary.started_at_ms),
        "status": status(summary.status()),
        "trigger": summary.trigger.as_ref().map(trigger),
        "voided": summary.voided,
    })
}

fn outcome(outcome: &TrialOutcome) -> Value {
    let before = |before: &Before| {
        let status = word(before.status().as_str_name(), "TRIAL_STATUS_");
        json!({"status": status, "judged": before.judged.iter().map(judged).collect::<Vec<_>>()})
    };
    json!({
        "before": outcome.before.as_ref().map(before),
        "cancelled": outcome.cancelled,
        "carried": outcome.carried,
        "checksPassed": outcome.checks_passed,
        "commands": outcome.commands,
        "evidence": outcome.evidence.as_ref().map(evidence),
        "exitCode": outcome.exit_code,
        "failedCommands": outcome.failed_commands,
        "failure": outcome.failure,
        "journalEntries": outcome.journal_entries,
        "judged": outcome.judged.iter().map(judged).collect::<Vec<_>>(),
        "modelMs": outcome.model_ms,
        "sandboxId": outcome.sandbox_id,
        "sandboxMs": outcome.sandbox_ms,
        "status": word(outcome.status().as_str_name(), "TRIAL_STATUS_"),
        "timed": outcome.timed,
        "usage": outcome.usage.as_ref().map(usage),
        "userSpend": outcome.user_spend.as_deref().map(spend),
        "voidFields": outcome.void_fields,
    })
}

fn spend(spend: &ModelSpend) -> Value {
    json!({"model": spend.model, "usage": spend.usage.as_ref().map(usage)})
}

fn usage(usage: &Usage) -> Value {
    json!({
        "cacheReadTokens": usage.cache_read_tokens,
        "cacheWrite1hTokens": usage.cache_write_1h_tokens,
        "cacheWriteTokens": usage.cache_write_tokens,
        "costUsd": usage.cost_usd,
        "inputTokens": usage.input_tokens,
        "outputTokens": usage.output_tokens,
        "totalTokens": usage.total_tokens,
    })
}

fn evidence(evidence: &Evidence) -> Value {
    match &evidence.place {
        Some(Place::Inline(bytes)) => json!({"inline": json_or_text(bytes)}),
        Some(Place::Object(reference)) => json!({"object": object(reference)}),
        None => Value::Null,
    }
}

/// What a step leaves is mostly JSON.
fn json_or_text(bytes: &[u8]) -> Value {
    match bytes {
        [] => Value::Null,
        bytes => serde_json::from_slice(bytes).unwrap_or_else(|_| json!(String::from_utf8_lossy(bytes))),
    }
}

/// `TRIAL_STATUS_PASSED` as `passed`.
fn word(name: &str, prefix: &str) -> String {
    name.strip_prefix(prefix).unwrap_or(name).to_lowercase()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use evalgrid_proto::{
        log::v1::{BatchEnded, KeyCreated, LeaseGranted, StepRecorded, TrialSettled, attempt_ended::Why},
        v1::{StepOutcome, TrialStatus},
    };

    use super::*;

    #[test]
    fn lines() {
        fn check(kind: Option<Kind>, expected: Value) {
            let line = line(7, 3, 2, &Event { at_ms: 0, kind });
            let head = r#"{"position":7,"partition":3,"sequence":2,"at":"1970-01-01T00:00:00.000Z","kind":""#;
            assert!(line.starts_with(head), "{line}");
            let mut value: Value = serde_json::from_str(&line).unwrap();
            for key in ["position", "partition", "sequence", "at"] {
                value.as_object_mut().unwrap().remove(key);
            }
            assert_eq!(value, expected);
        }
        let id = BatchId([1; 16]);
        let at = TrialRef {
            batch: id.0.to_vec().into(),
            run: 2,
            ordinal: 3,
        };
        let trial = TrialId {
            batch: id,
            run: 2,
            ordinal: 3,
        };
        check(None, json!({"kind": "Unknown"}));
        check(
            Some(Kind::StepRecorded(StepRecorded {
                token: 9,
                step: "turn.1.agent".into(),
                outcome: StepOutcome::Done.into(),
                result: br#"{"a":1}"#.to_vec().into(),
            })),
            json!({"kind": "StepRecorded", "token": 9, "step": "turn.1.agent", "outcome": "done", "result": {"a": 1}}),
        );
        check(
            Some(Kind::LeaseGranted(LeaseGranted {
                token: 9,
                trial: Some(at.clone()),
                sandbox: "s".into(),
                ..LeaseGranted::default()
            })),
            json!({
                "kind": "LeaseGranted", "token": 9, "trial": trial.to_string(), "workerId": "", "incarnation": "", "bootId": "",
                "sandbox": "s", "adopt": false
            }),
        );
        check(
            Some(Kind::BatchEnded(BatchEnded {
                batch: id.0.to_vec().into(),
                status: BatchStatus::Failed.into(),
                failure: Some("\"quoted\"\n".into()),
            })),
            json!({"kind": "BatchEnded", "batch": id.to_string(), "status": "failed", "failure": "\"quoted\"\n"}),
        );
        check(
            Some(Kind::KeyCreated(KeyCreated {
                hash: vec![0, 255].into(),
                ..KeyCreated::default()
            })),
            json!({"kind": "KeyCreated", "keyId": "", "organizationId": "", "name": "", "start": "", "hash": "00ff", "permissions": []}),
        );
        let settled = TrialSettled {
            trial: Some(TrialRef {
                batch: vec![1].into(),
                ..at
            }),
            outcome: None,
            token: 0,
            sandbox_kept_until_ms: Some(0),
        };
        check(
            Some(Kind::TrialSettled(settled)),
            json!({"kind": "TrialSettled", "trial": {"batch": "01", "run": 2, "ordinal": 3}, "token": 0, "outcome": null, "sandboxKeptUntil": "1970-01-01T00:00:00.000Z"}),
        );
    }

    #[test]
    fn words() {
        assert_eq!(word(Why::LeaseExpired.as_str_name(), "WHY_"), "lease_expired");
        assert_eq!(word(Why::Released.as_str_name(), "WHY_"), "released");
        assert_eq!(word(TrialStatus::Passed.as_str_name(), "TRIAL_STATUS_"), "passed");
    }
}
