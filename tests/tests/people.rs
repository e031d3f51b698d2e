//! Simulated people, through the whole product: by a model's API, by the real Codex and by the real Claude Code, in conversation with an agent of a
//! few lines and with those two. What each failure comes to and how often it was asked, who said what, and when a conversation ends.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::{collections::BTreeSet, path::Path, process::Command, time::Duration};

use evalgrid_modelserver::{Mode, ModelServer};
use evalgrid_tests::{
    agents, eventually,
    server::{Server, binary},
    suite,
};
use serde_json::{Value, json};

/// Four refusals with their pauses, and a few agents on a busy machine.
const PATIENCE: Duration = Duration::from_secs(240);

/// An agent that holds a session, and says the same at each turn.
const AGENT: &str =
    r#"printf '{"_tag":"Started","model":"m","sessionId":"one"}\n{"_tag":"Message","role":"assistant","text":"it is four"}\n'"#;

fn says() -> Value {
    json!({ "harness": "command", "model": "none", "sandbox": "bubblewrap", "profile": { "name": "says", "files": {}, "run": AGENT } })
}

/// A person of these replies. `by`: a harness, or empty for a model. `mark`: a line by which what it is asked is known.
fn person(by: &str, mark: &str, fault: &str, replies: &str) -> Value {
    let mut person = json!({ "kind": "simulated", "goal": "The agent is sure.",
        "prompt": format!("PERSON: {replies}\n{mark}\nFAULT {fault}") });
    if !by.is_empty() {
        let model = if by == "claude" { "claude-sonnet-4-6" } else { "gpt-5" };
        (person["harness"], person["model"]) = (json!(by), json!(model));
    }
    person
}

fn batch(cases: Vec<Value>, variants: &[Value]) -> Value {
    json!({ "suite": { "id": "people", "prompt": "How much is two and two?" }, "cases": cases, "variants": variants, "trials": 1 })
}

/// Who plays the person (empty: a model), the model server's mode, why there is no reply, and how often it was asked.
type Row = (&'static str, &'static str, &'static str, usize);

const USED_TOOL: &str = "it used a tool (exec_command), and may use none";
const FAILURES: &[Row] = &[
    ("", "ok", "", 1),
    ("", "mfirst2-m429", "", 3),
    ("", "mfirst1-m500", "", 2),
    // What is left of `<<DONE>>` is still what somebody says, until the turns are used up.
    ("", "mincomplete", "", 7),
    ("", "mrefusal", "the model refused to answer: I cannot help with that.", 1),
    ("", "m401", "the provider answered with status 401: Incorrect API key provided", 1),
    (
        "",
        "m429",
        "the provider still refused for now when it was asked 4 times: status 429: Rate limit reached for requests",
        4,
    ),
    (
        "",
        "m500",
        "it was asked 2 times, and no answer arrived: status 500: The server had an error while processing your request",
        2,
    ),
    ("", "mhuge", "the answer is longer than 524288 bytes", 1),
    ("", "mtool", USED_TOOL, 1),
    (
        "",
        "mstall",
        "it was asked 2 times, and no answer arrived: the answer stood still for 15s",
        2,
    ),
    ("codex", "ok", "", 1),
    (
        "codex",
        "m401",
        // Behind it, an agent tells what it was told.
        "the codex agent failed: its model server refused the key (401); check OPENAI_API_KEY",
        1,
    ),
    ("codex", "mrefusal", "the codex agent failed: it said nothing", 1),
    ("codex", "mtool", USED_TOOL, 2),
    ("claude", "ok", "", 1),
    (
        "claude",
        "m401",
        "the claude agent failed: its model server refused the key (401); check ANTHROPIC_API_KEY",
        1,
    ),
    (
        "claude",
        "mrefusal",
        "the claude agent failed: API Error: Claude Code is unable to respond",
        1,
    ),
    ("claude", "mtool", USED_TOOL, 2),
];

fn id((by, fault, ..): &Row) -> String {
    format!("{}-{fault}", if by.is_empty() { "model" } else { by })
}

fn mark(row: &Row) -> String {
    format!("This is row {}.", id(row))
}

/// catalogue J15: by who plays the person, how often it was asked, and what is told.
#[tokio::test(flavor = "multi_thread")]
async fn what_each_failure_comes_to() {
    let models = ModelServer::start("127.0.0.1:0", None).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let server = agents::server(folder.path(), &models.url(Mode::Ok), 4);
    let _process = server.serve();
    let api = server.ready().await;
    let case = |row: &Row| json!({ "id": id(row), "verify": "true", "user": person(row.0, &mark(row), row.1, "<<DONE>>") });
    let started = api.start(&batch(FAILURES.iter().map(case).collect(), &[says()])).await;
    let ended = api.ended(&started, PATIENCE).await;
    assert_eq!(suite::trials(&ended).len(), FAILURES.len());
    for (row, trial) in FAILURES.iter().zip(suite::trials(&ended)) {
        let (name, mark) = (id(row), mark(row));
        let requests = models.requests();
        let asked: Vec<_> = requests.iter().filter(|request| request.body.contains(&mark)).collect();
        let failure = trial["failure"].as_str().unwrap_or_default();
        println!("{name:<20} {:>2} {} {failure}", asked.len(), trial["status"]);
        match row.2 {
            "" => assert_eq!((&trial["status"], failure), (&json!("passed"), ""), "{name}"),
            error => {
                assert_eq!((&trial["status"], &trial["exitCode"]), (&json!("void"), &json!(-1)), "{name}");
                let expected = format!("The simulated person could not answer: {error}");
                let whole = row.0.is_empty();
                assert!(failure == expected || !whole && failure.starts_with(&expected), "{name}: {failure}");
            }
        }
        assert_eq!(asked.len(), row.3, "{name}: asks");
        if row.0.is_empty() {
            // Each reply is a job of its own; all asks of one have its key.
            let replies = if row.1 == "mincomplete" { row.3 } else { 1 };
            let keys: BTreeSet<_> = asked.iter().map(|request| request.idempotency_key.as_deref().unwrap()).collect();
            assert_eq!(keys.len(), replies, "{name}: {keys:?}");
        }
    }
    no_sandbox(&server).await;
}

/// Those of people go with their conversations.
async fn no_sandbox(server: &Server) {
    let (data, scheduler) = (server.data(), format!("http://{}", server.grpc));
    let list = |data: &Path| {
        let list = Command::new(binary())
            .args([
                "sandboxes",
                "list",
                "--json",
                "--data",
                data.to_str().unwrap(),
                "--scheduler",
                &scheduler,
            ])
            .output()
            .unwrap();
        assert!(list.status.success(), "{list:?}");
        serde_json::from_slice::<Value>(&list.stdout).unwrap()
    };
    eventually("no sandbox is left", Duration::from_secs(60), || async {
        list(&data)["sandboxes"].as_array().unwrap().is_empty().then_some(())
    })
    .await;
}

/// A batch that needs a person without a key is refused at once.
#[tokio::test(flavor = "multi_thread")]
async fn missing_keys() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = agents::server(folder.path(), "http://127.0.0.1:9", 1);
    server.variables.clear();
    let _process = server.serve();
    let api = server.ready().await;
    for (by, what) in [("", "play a simulated person"), ("codex", "run codex")] {
        let case = json!({ "id": "c", "verify": "true", "user": person(by, "", "ok", "<<DONE>>") });
        let answer = api.call("evals.batches.start", &batch(vec![case], &[says()])).await.unwrap();
        let expected =
            format!("Set OPENAI_API_KEY in Settings > Environment to {what} (on this server: in the scheduler's own environment)");
        assert_eq!((answer.status, &answer.body["message"]), (400, &json!(expected)));
    }
}

/// catalogue J17: real agents, and people of both kinds: who says what, in which order, and when it ends.
#[tokio::test(flavor = "multi_thread")]
async fn conversations_of_real_agents() {
    let models = ModelServer::start("127.0.0.1:0", None).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let server = agents::server(folder.path(), &models.url(Mode::Ok), 4);
    let _process = server.serve();
    let api = server.ready().await;
    let case = |id: &str, by: &str, max_turns: u32| {
        json!({ "id": id, "verify": "true", "maxTurns": max_turns,
            "user": person(by, &format!("This is case {id}."), "ok", "a red one | in May | <<DONE>>") })
    };
    // The third reply ends the one, the limit the other.
    let cases = vec![
        case("model-done", "", 8),
        case("codex-done", "codex", 8),
        case("model-limit", "", 2),
        case("codex-limit", "codex", 2),
    ];
    let variant = |name: &str| json!({ "harness": name, "model": "fake-model", "sandbox": "bubblewrap" });
    let started = api.start(&batch(cases, &[variant("codex"), variant("claude")])).await;
    let ended = api.ended(&started, PATIENCE).await;
    let said = |trial: &Value| -> Vec<(bool, String)> {
        let entries = trial["trajectory"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|entry| entry["_tag"] == "message");
        entries
            .map(|entry| (entry["role"] == "user", entry["text"].as_str().unwrap().to_owned()))
            .collect()
    };
    for run in ended["runs"].as_array().unwrap() {
        let (case, agent, trial) = (run["case"]["id"].as_str().unwrap(), &run["variant"]["harness"], &run["trials"][0]);
        assert_eq!(trial["status"], "passed", "{case} {agent}: {trial:.3000}");
        let all = said(trial);
        let person: Vec<&str> = all.iter().filter(|(person, _)| *person).map(|(_, text)| text.as_str()).collect();
        let agents: Vec<&str> = all.iter().filter(|(person, _)| !person).map(|(_, text)| text.as_str()).collect();
        let replies: &[&str] = if case.ends_with("done") {
            &["a red one", "in May"]
        } else {
            &["a red one"]
        };
        assert!(person.ends_with(replies), "{case} {agent}: {all:?}");
        assert!(
            !trial.to_string().contains("<<DONE>>"),
            "{case} {agent}: the sentinel is nobody's words"
        );
        // The agent knows what was said before.
        assert_eq!(agents.len(), replies.len() + 1, "{case} {agent}: {all:?}");
        for (index, text) in agents.iter().enumerate() {
            assert!(
                text.starts_with(&format!("[turn {}] You said: ", index + 1)),
                "{case} {agent}: {all:?}"
            );
            assert!(index == 0 || text.contains(replies[index - 1]), "{case} {agent}: {all:?}");
        }
    }
    // A person that is an agent has one session: what it is asked first is there in each request, with what it has said since.
    let requests = models.requests();
    let sizes = requests
        .iter()
        .filter(|request| request.body.contains("This is case codex-done."))
        .map(|request| request.items);
    assert_eq!(sizes.clone().count(), 2 * 3, "three replies for each of two agents");
    assert!(sizes.clone().max() > sizes.min(), "the session goes on");
    no_sandbox(&server).await;
}
