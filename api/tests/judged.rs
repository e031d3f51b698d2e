//! Batches with judges: their records among the validations, and regrades, in and out.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use evalgrid_proto::v1::{
    AnswererInfo, Batch, Before, Evidence, JudgeVerdict, Judged, ObjectRef, Trial, TrialOutcome, TrialStatus, evidence::Place,
};
use serde_json::{Value, json};
use support::{Api, KEY, Script, batch, evidence, schema};

fn judge(name: &str) -> Value {
    json!({
        "kind": "judge", "name": name, "provider": "openai", "model": "gpt-5.4-mini", "prompt": "Is it right?",
        "choices": {"right": 1, "wrong": 0}, "threshold": 0.5,
    })
}

/// As a judge runner records it.
fn record(index: u32, status: &str) -> Value {
    let value = json!({"text": "said", "format": "text", "state": "captured", "truncated": false});
    json!({
        "id": format!("judge:{index}"), "index": 1 + index, "name": "tone", "kind": "judge", "status": status, "startedAt": 1.0,
        "durationMs": 3, "message": "]}", "exitCode": null, "truncated": false, "input": value, "output": value, "error": null,
        "calls": [], "logs": [],
        "judgment": {
            "name": "tone", "model": "m", "evaluator": "openai", "score": 1, "choice": "right", "reason": "\"validations\":[", "threshold": 0.5,
            "durationMs": 3, "error": null,
        },
    })
}

fn judged(index: u32, verdict: JudgeVerdict, validation: Option<Place>) -> Judged {
    let answered = verdict != JudgeVerdict::Error;
    Judged {
        index,
        name: format!("judge {index}"),
        verdict: verdict.into(),
        choice: answered.then(|| "right".into()),
        score: answered.then_some(1.0),
        error: if answered {
            String::new()
        } else {
            "OPENAI_API_KEY is not set".into()
        },
        validation: validation.map(|place| Evidence { place: Some(place) }),
        spend: None,
    }
}

/// A batch of two judges whose first two trials have been judged.
async fn api_with_judges() -> Api {
    let api = Api::start().await;
    let (mut batch, mut objects) = batch();
    let mut by_codex = judge("judge 1");
    by_codex.as_object_mut().unwrap().remove("provider");
    by_codex["harness"] = json!("codex");
    by_codex["model"] = json!("gpt-5.4");
    let request = json!({
        "suite": {"id": "smoke", "prompt": "Do {{ task }}."},
        "cases": [{
            "id": "add", "name": "Add", "variables": {"task": "it"},
            "validator": {"kind": "judged", "name": "v", "checks": [], "judges": [judge("judge 0"), by_codex]},
        }],
        "variants": [{"harness": "command", "model": "m", "profile": {"name": "p", "files": {}, "run": "true"}}],
        "trials": 5,
    });
    let request = evalgrid_domain::request::decode_start(&request).unwrap();
    let mut put = |name: &str, bytes: Vec<u8>| {
        let size = bytes.len() as u64;
        objects.insert(name.into(), bytes);
        ObjectRef { sha256: name.into(), size }
    };
    batch.request = Some(put("request", serde_json::to_vec(&request).unwrap()));
    let stored = put("judgment", record(0, "passed").to_string().into());
    batch.cases[0].checks = 1;
    batch.cases[0].judges = vec![
        AnswererInfo {
            provider: "openai".into(),
            model: "gpt-5.4-mini".into(),
            ..AnswererInfo::default()
        },
        AnswererInfo {
            harness: "codex".into(),
            model: "gpt-5.4".into(),
            ..AnswererInfo::default()
        },
    ];
    let trials = &mut batch.runs[0].trials;
    let inline = Place::Inline(record(1, "failed").to_string().into());
    // In whatever order they came.
    trials[0].outcome.as_mut().unwrap().judged = vec![
        judged(1, JudgeVerdict::Failed, Some(inline)),
        judged(0, JudgeVerdict::Passed, Some(Place::Object(stored.clone()))),
    ];
    trials[1].outcome.as_mut().unwrap().judged = vec![
        judged(0, JudgeVerdict::Passed, Some(Place::Object(stored))),
        judged(1, JudgeVerdict::Error, None),
    ];
    change(&api, |script| (script.batch, script.objects) = (batch, objects));
    api
}

fn change(api: &Api, change: impl FnOnce(&mut Script)) {
    change(&mut api.script.lock().unwrap());
}

fn first(batch: &mut Batch) -> &mut Trial {
    &mut batch.runs[0].trials[0]
}

fn outcome(script: &mut Script) -> &mut TrialOutcome {
    first(&mut script.batch).outcome.as_mut().unwrap()
}

#[tokio::test]
async fn judgments_are_validations_behind_those_of_the_checks() {
    let api = api_with_judges().await;
    let batch = api.op("evals.batches.get", json!({"id": "batch_1"})).await.json();
    schema::check("EvalBatch", &batch);
    let trials = &batch["runs"][0]["trials"];
    let checks = evidence()["validations"][0].clone();
    assert_eq!(trials[0]["validations"], json!([checks, record(0, "passed"), record(1, "failed")]));
    assert_eq!(trials[0]["trajectory"], evidence()["trajectory"], "the rest goes through as it is");
    let minimal = &trials[1]["validations"][2];
    assert_eq!(trials[1]["validations"], json!([checks, record(0, "passed"), minimal]));
    let expected = json!({
        "name": "judge 1", "model": "gpt-5.4", "evaluator": "codex", "score": null, "choice": null, "threshold": 0.5, "durationMs": 0,
        "reason": "There is no record of this judgment.", "error": "OPENAI_API_KEY is not set",
    });
    assert_eq!(
        (&minimal["id"], &minimal["index"], &minimal["status"], &minimal["judgment"]),
        (&json!("judge:1"), &json!(2), &json!("error"), &expected)
    );
}

/// As those of a case that a regrade left out: the batch asks no judges there, and what they had said goes on with it.
#[tokio::test]
async fn judgments_of_a_case_that_asks_nobody() {
    let api = api_with_judges().await;
    change(&api, |script| {
        script.batch.cases[0].judges.clear();
        outcome(script).judged = vec![judged(0, JudgeVerdict::Skipped, None), judged(1, JudgeVerdict::Error, None)];
    });
    let batch = api.op("evals.batches.get", json!({"id": "batch_1"})).await.json();
    schema::check("EvalBatch", &batch);
    let validations = &batch["runs"][0]["trials"][0]["validations"];
    let shown = |at: usize| {
        (
            &validations[at]["id"],
            &validations[at]["status"],
            &validations[at]["judgment"]["evaluator"],
        )
    };
    assert_eq!(shown(1), (&json!("judge:0"), &json!("skipped"), &Value::Null));
    assert_eq!(shown(2), (&json!("judge:1"), &json!("error"), &json!("codex")));
}

/// Evidence of any size and shape has one place for judgments, and none is no place to leave them out silently.
#[tokio::test]
async fn wherever_the_evidence_is() {
    let api = api_with_judges().await;
    let mut long = evidence();
    long["trajectory"][0]["output"] = json!("\"validations\":[]\\".repeat(20_000));
    let check = async |evidence: Option<Value>, expected: Result<usize, ()>| {
        let bytes = evidence.as_ref().map(|evidence| evidence.to_string().into_bytes());
        change(&api, |script| {
            let place = bytes.map(|bytes| {
                let size = bytes.len() as u64;
                script.objects.insert("another".into(), bytes);
                let sha256 = "another".into();
                Place::Object(ObjectRef { sha256, size })
            });
            outcome(script).evidence = place.map(|place| Evidence { place: Some(place) });
        });
        let body = json!({"id": "run_1"}).to_string();
        let answer = api.try_send("POST", "/v1/evals.runs.get", &[("authorization", KEY)], body).await;
        let Ok(answer) = answer else {
            return assert_eq!(expected, Err(()));
        };
        let trial = &answer.json()["trials"][0];
        assert_eq!(Ok(trial["validations"].as_array().unwrap().len()), expected);
        if let Some(evidence) = evidence {
            assert_eq!(trial["trajectory"], evidence["trajectory"]);
        }
    };
    let mut none = evidence();
    none["validations"] = json!([]);
    check(None, Ok(2)).await;
    check(Some(none), Ok(2)).await;
    check(Some(evidence()), Ok(3)).await;
    check(Some(long), Ok(3)).await;
    let mut without = evidence();
    without.as_object_mut().unwrap().remove("validations");
    check(Some(without), Err(())).await;
}

#[tokio::test]
async fn a_record_that_is_none_cuts_the_answer() {
    let api = api_with_judges().await;
    let check = async |place: Place| {
        change(&api, |script| {
            outcome(script).judged[0].validation = Some(Evidence { place: Some(place) })
        });
        let body = json!({"id": "batch_1"}).to_string();
        let answer = api.try_send("POST", "/v1/evals.batches.get", &[("authorization", KEY)], body).await;
        assert!(answer.is_err(), "{answer:?}");
    };
    let object = |name: &str, size| Place::Object(ObjectRef { sha256: name.into(), size });
    check(Place::Inline("".into())).await;
    check(Place::Inline("{\"half\":".into())).await;
    check(object("missing", 5)).await;
    check(object("judgment", 5)).await;
}

#[tokio::test]
async fn what_is_being_judged_is_running() {
    let api = api_with_judges().await;
    change(&api, |script| {
        first(&mut script.batch).status = TrialStatus::Running.into();
        outcome(script).exit_code = 0;
    });
    let run = api.op("evals.runs.get", json!({"id": "run_1"})).await.json();
    let trial = &run["trials"][0];
    assert_eq!((&trial["status"], &trial["exitCode"]), (&json!("running"), &json!(-1)));
}

#[tokio::test]
async fn a_regraded_batch_tells_what_was_before() {
    let api = api_with_judges().await;
    change(&api, |script| {
        script.batch.regrade_of = Some("batch_0".into());
        outcome(script).before = Some(Before {
            status: TrialStatus::Failed.into(),
            judged: vec![judged(0, JudgeVerdict::Failed, None), judged(1, JudgeVerdict::Error, None)],
        });
    });
    let batch = api.op("evals.batches.get", json!({"id": "batch_1"})).await.json();
    schema::check("EvalBatch", &batch);
    let trials = &batch["runs"][0]["trials"];
    let before = json!({"status": "failed", "judges": [
        {"name": "judge 0", "choice": "right", "score": 1, "verdict": "failed"},
        {"name": "judge 1", "choice": null, "score": null, "verdict": "error"},
    ]});
    assert_eq!((&batch["regradeOf"], &trials[0]["before"]), (&json!("batch_0"), &before));
    assert!(trials[1].get("before").is_none());
}

#[tokio::test]
async fn a_regrade_is_passed_on_as_it_was_sent() {
    let api = Api::start().await;
    let headers = [("authorization", KEY), ("idempotency-key", "once")];
    let body = json!({"id": "batch_1", "judges": [judge("a"), judge("b")], "cases": ["add"]});
    let answer = api.send("POST", "/v1/evals.batches.regrade", &headers, body.to_string()).await;
    assert_eq!(answer.status, 200);
    schema::check("StartedBatch", &answer.json());
    assert_eq!(answer.json()["id"], "batch_3");
    assert_eq!(api.op("evals.batches.regrade", json!({"id": "batch_1"})).await.status, 200);
    let regraded = std::mem::take(&mut api.script.lock().unwrap().regraded);
    let [all, plain] = &regraded[..] else { panic!("{regraded:?}") };
    let judges: Value = serde_json::from_slice(all.judges_json.as_ref().unwrap()).unwrap();
    assert_eq!(
        (all.id.as_str(), all.idempotency_key.as_deref(), &all.cases[..]),
        ("batch_1", Some("once"), &["add".to_owned()][..])
    );
    assert_eq!(judges, body["judges"]);
    assert_eq!((&plain.idempotency_key, &plain.judges_json, plain.cases.len()), (&None, &None, 0));
}

#[tokio::test]
async fn a_regrade_that_is_none_is_refused_with_the_path() {
    let api = Api::start().await;
    let mut wrong = judge("a");
    wrong["choices"] = json!({"right": 2});
    let many: Vec<Value> = (0..21).map(|index| judge(&format!("{index}"))).collect();
    for (body, path) in [
        (json!({}), json!(["id"])),
        (json!({"id": "b", "judges": []}), json!(["judges"])),
        (json!({"id": "b", "judges": many}), json!(["judges"])),
        (json!({"id": "b", "judges": null}), json!(["judges"])),
        (
            json!({"id": "b", "judges": [judge("a"), wrong]}),
            json!(["judges", 1, "choices", "right"]),
        ),
        (json!({"id": "b", "judges": [judge("a"), judge("a")]}), json!(["judges", 1, "name"])),
        (json!({"id": "b", "cases": "add"}), json!(["cases"])),
        // Absent means all; none would be no regrade.
        (json!({"id": "b", "cases": []}), json!(["cases"])),
        (json!({"id": "b", "cases": ["add", 1]}), json!(["cases", 1])),
    ] {
        let answer = api.op("evals.batches.regrade", body.clone()).await;
        assert_eq!(answer.kind(), (400, "HttpApiDecodeError".into()), "{body}");
        schema::check("HttpApiDecodeError", &answer.json());
        assert_eq!(answer.json()["issues"][0]["path"], path, "{body}");
    }
    assert!(api.script.lock().unwrap().regraded.is_empty());
}
