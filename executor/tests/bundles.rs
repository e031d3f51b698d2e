//! Prepare steps, code validators and mocks: real bundles, run by a real node in real sandboxes.
#![allow(clippy::unwrap_used)]

mod support;

use evalgrid_domain::evidence::TrialEvidence;
use evalgrid_proto::v1::{RecordedStep, TrialOutcome, TrialStatus};
use serde_json::{Value, json};
use support::{Grid, Told, request};

const PROVIDERS: [&str; 2] = ["process", "bubblewrap"];

/// A trial of this request in a grid of its own.
async fn trial(provider: &str, request: &Value) -> (Grid, Told) {
    let mut grid = Grid::new().await;
    let mut lease = grid.lease(7, request);
    lease.provider = provider.into();
    let told = grid.trial(lease).await;
    assert_eq!(told.failures, []);
    (grid, told)
}

/// The verdict in a word, or why there is none.
fn verdict(outcome: &TrialOutcome) -> String {
    match outcome.status() {
        TrialStatus::Passed => "passed".into(),
        TrialStatus::Failed => "failed".into(),
        _ => outcome.failure.clone().unwrap(),
    }
}

fn records(evidence: &TrialEvidence) -> String {
    let record = |record: &evalgrid_domain::evidence::Validation| format!("{} {} {}", record.id, record.name, record.status.name());
    evidence.validations.iter().map(record).collect::<Vec<_>>().join(", ")
}

/// What every hand-written bundle here begins with.
const TOOLS: &str = r#"
import fs from "node:fs";
import { execFileSync } from "node:child_process";
const text = (value) => ({ text: String(value), format: "text", state: "captured", truncated: false });
const say = (record) => process.stdout.write("SPHYNX_VALIDATION=" + JSON.stringify(record) + "\n");
const end = (passed) => process.stdout.write("SPHYNX_VALIDATOR_RESULT=" + JSON.stringify({ passed }) + "\n");
const check = (index, passed, message = "") => say({ id: "code:" + index, status: passed ? "passed" : "failed", message });
"#;

fn validator(names: &[&str], source: &str) -> Value {
    let manifest: Vec<_> = (0..)
        .zip(names)
        .map(|(index, name): (u64, _)| json!({ "index": index, "name": name }))
        .collect();
    let mut validator = json!({ "name": "checks", "source": format!("{TOOLS}{source}") });
    if !manifest.is_empty() {
        validator["manifest"] = json!(manifest);
    }
    validator
}

#[tokio::test]
async fn verdicts_of_validators() {
    async fn check(names: &[&str], source: &str, expected: &str, expected_records: &str) {
        let (grid, told) = trial(
            "process",
            &request("true", json!({ "validator": validator(names, source) }), json!({})),
        )
        .await;
        let outcome = told.outcome();
        let evidence = grid.evidence(outcome);
        assert_eq!(
            (verdict(outcome).as_str(), records(&evidence).as_str()),
            (expected, expected_records),
            "{source}"
        );
        let void = outcome.status() == TrialStatus::Void;
        assert_eq!(evidence.void_fields, vec!["validator"; usize::from(void)], "{source}");
        assert_eq!(outcome.exit_code == 0, expected == "passed", "{source}");
        assert_eq!(told.step_names().last(), Some(&"check.0"));
    }
    check(&["one"], "check(0, true); end(true)", "passed", "code:0 one passed").await;
    check(
        &["one", "two"],
        "check(0, true); check(1, false); end(false)",
        "failed",
        "code:0 one passed, code:1 two failed",
    )
    .await;
    check(&[], "end(true)", "passed", "code:0 checks passed").await;
    // A line in pieces, with a pause between them.
    check(
        &["one"],
        r#"process.stdout.write("noise\nSPHYNX_VALI"); await new Promise((r) => setTimeout(r, 50));
        process.stdout.write('DATION={"id":"code:0","sta'); await new Promise((r) => setTimeout(r, 50)); process.stdout.write('tus":"passed"}\n'); end(true)"#,
        "passed",
        "code:0 one passed",
    )
    .await;
    check(
        &["one", "two"],
        r#"check(0, true); say({ id: "code:1", status: "error", message: "boom" }); end(false); process.exitCode = 1"#,
        "The validator checks gave no verdict: two could not finish: boom",
        "code:0 one passed, code:1 two error",
    )
    .await;
    check(
        &["one"],
        "syntax error here",
        "The validator checks gave no verdict: it exited with status 1",
        "code:0 one error",
    )
    .await;
    check(
        &["one"],
        r#"check(0, true); end(true); process.kill(process.pid, "SIGKILL"); await new Promise(() => setTimeout(() => {}, 60000))"#,
        "The validator checks gave no verdict: it exited with status 137",
        "code:0 one passed",
    )
    .await;
    check(
        &["one"],
        "process.exit(0)",
        "The validator checks gave no verdict: it ended before one had a result",
        "code:0 one error",
    )
    .await;
    check(
        &["one"],
        r#"check(0, true); process.stdout.write("SPHYNX_VALIDATION={\"id\":\n"); end(true)"#,
        "The validator checks gave no verdict: it printed a record that cannot be read: EOF while parsing a value at line 1 column 6",
        "code:0 one passed",
    )
    .await;
    // An agent that says itself that it failed is not checked.
    let run = r#"echo '{"_tag":"Finished","reason":"failed: no key"}'"#;
    let (grid, told) = trial(
        "process",
        &request(run, json!({ "validator": validator(&["one", "two"], "end(true)") }), json!({})),
    )
    .await;
    assert_eq!(verdict(told.outcome()), "The command agent failed: no key");
    let evidence = grid.evidence(told.outcome());
    assert_eq!(
        (records(&evidence).as_str(), evidence.void_fields.len()),
        ("code:0 one skipped, code:1 two skipped", 0)
    );
    // More than is kept: the last lines are there all the same, and a verdict that was forged in the middle is not.
    check(
        &["one"],
        r#"execFileSync("head", ["-c", "300000000", "/dev/zero"], { stdio: ["ignore", "inherit", "inherit"] });
        process.stdout.write("\n"); check(0, false); end(false)"#,
        "failed",
        "code:0 one failed",
    )
    .await;
}

#[tokio::test]
async fn without_node() {
    let profile = json!({ "env": { "PATH": "/nowhere" } });
    let missing = "there is no node in the sandbox";
    for provider in PROVIDERS {
        let case = json!({ "validator": validator(&["one"], "check(0, true); end(true)") });
        let (grid, told) = trial(provider, &request("true", case, profile.clone())).await;
        assert_eq!(verdict(told.outcome()), format!("The validator checks gave no verdict: {missing}"));
        assert_eq!(records(&grid.evidence(told.outcome())), "code:0 one error");
        let case = json!({ "prepare": { "name": "build", "source": "0" }, "verify": "true" });
        let (_, told) = trial(provider, &request("true", case, profile.clone())).await;
        assert_eq!(verdict(told.outcome()), format!("The prepare step build failed: {missing}"));
    }
}

/// The conversation as the checks get it: as it was, with secrets, while all that is kept is redacted.
#[tokio::test]
async fn validators_read_what_was_really_said() {
    let run = r#"say() { printf '{"_tag":"Message","role":"assistant","text":"%s"}\n' "$1"; }
        echo '{"_tag":"Started","sessionId":"s","model":"m"}'; say "first of $SPHYNX_PROMPT"; say "$TOKEN"
        printf '{"_tag":"Command","command":"make","exitCode":2,"output":"%05000d"}\n' 1
        printf '{"_tag":"ToolCall","callId":null,"name":"read","input":"in","status":"ok"}\n{"_tag":"FileChange","paths":["/w/a"]}\n'"#;
    let source = r#"
        const turns = JSON.parse(fs.readFileSync(process.env.SPHYNX_TURNS_FILE, "utf8"));
        const answer = fs.readFileSync(process.env.SPHYNX_ANSWER_FILE, "utf8");
        const transcript = fs.readFileSync(process.env.SPHYNX_TRANSCRIPT_FILE, "utf8");
        const [one, two] = turns;
        const secret = process.env.TOKEN;
        check(0, turns.length === 2 && one.index === 0 && one.userText === "Do it" && two.userText === "go on", JSON.stringify(turns).slice(0, 500));
        check(1, one.agentText === "first of Do it\n\n" + secret && answer === secret && transcript === one.agentText + "\n\n" + two.agentText, answer);
        // Without what the recorder saw.
        const tags = one.events.filter((event) => event.exitCode !== null).map((event) => event._tag).join(" ");
        check(2, one.commandCount === one.events.filter((event) => event._tag === "command").length && tags === "message message message command toolCall fileChange", tags);
        const [person, , , command] = one.events;
        check(3, person.role === "user" && person.text === "Do it" && command.output.length === 4000 && command.outputTruncated === true);
        check(4, process.env.SPHYNX_PREPARE_VALUE === "{}" && process.cwd() === fs.realpathSync(process.env.PWD ?? process.cwd()));
        end(true);"#;
    for provider in PROVIDERS {
        let case = json!({
            "user": { "kind": "scripted", "replies": ["go on"] },
            "validator": validator(&["turns", "texts", "events", "cuts", "environment"], source),
        });
        let mut grid = Grid::new().await;
        // The recorder would see the agent's own printf.
        let mut lease = grid.lease(
            7,
            &request(&format!("trap - DEBUG; {run}"), case, json!({ "variables": ["TOKEN"] })),
        );
        lease.provider = provider.into();
        lease.variables.insert("TOKEN".into(), "hunter2-hunter2".into());
        let told = grid.trial(lease).await;
        let evidence = grid.evidence(told.outcome());
        assert_eq!(verdict(told.outcome()), "passed", "{:#?}", evidence.validations);
        let kept = serde_json::to_string(&evidence).unwrap();
        assert!(!kept.contains("hunter2") && kept.contains("[redacted]"));
    }
}

#[tokio::test]
async fn prepare_steps() {
    async fn check(source: &str, expected: &str) {
        let checks = r#"check(0, process.env.SPHYNX_PREPARE_VALUE === fs.readFileSync("expected", "utf8"), process.env.SPHYNX_PREPARE_VALUE); end(true)"#;
        let case =
            json!({ "prepare": { "name": "build", "source": format!("{TOOLS}{source}") }, "validator": validator(&["one"], checks) });
        let (_, told) = trial("process", &request("true", case, json!({ "env": { "A": "a" } }))).await;
        assert_eq!(verdict(told.outcome()), expected, "{source}");
    }
    let expect = |value: &str| format!(r#"fs.writeFileSync("expected", '{value}');"#);
    check(&expect("{}"), "passed").await;
    let result = r#"process.stdout.write('SPHYNX_PREPARE_RESULT={"port": 4173}\n');"#;
    check(
        &format!(
            r#"{} console.log("SPHYNX_PREPARE_RESULT=1"); {result}"#,
            expect(r#"{"port": 4173}"#)
        ),
        "passed",
    )
    .await;
    check(
        &format!(
            r#"{} if (process.env.A !== "a" || process.env.SPHYNX_CACHE_RESTORED !== "false") process.exit(9); {result}"#,
            expect(r#"{"port": 4173}"#)
        ),
        "passed",
    )
    .await;
    check("process.exit(3)", "The prepare step build exited with status 3").await;
    check("throw new Error('x')", "The prepare step build exited with status 1").await;
    check(
        r#"console.log("SPHYNX_PREPARE_RESULT=[1]")"#,
        "The prepare step build failed: what it returned is no JSON object",
    )
    .await;
    check(
        r#"console.log('SPHYNX_PREPARE_RESULT={"a":"' + "x".repeat(200000) + '"}')"#,
        "The prepare step build failed: it returned more than 122880 bytes",
    )
    .await;
}

/// What prepare returns is in no record, object or evidence, whoever says it again.
#[tokio::test]
async fn what_was_prepared_is_nowhere_kept() {
    let prepare = r#"const key = "swordfish-" + 6 * 7; fs.writeFileSync("key", key);
        console.log("SPHYNX_PREPARE_RESULT=" + JSON.stringify({ apiKey: key, nested: [{ note: "blue moon " + 6 * 7 }] }))"#;
    let run = r#"printf '{"_tag":"Message","role":"assistant","text":"a credential word, a variable word"}\n'
        printf '{"_tag":"Message","role":"assistant","text":"the key is %s"}\n' "$(cat key)"; printf '{"_tag":"Command","command":"ls","exitCode":0,"output":"%s"}\n' "$(ls -a $HOME)""#;
    let checks = r#"const value = JSON.parse(process.env.SPHYNX_PREPARE_VALUE);
        const said = fs.readFileSync(process.env.SPHYNX_ANSWER_FILE, "utf8");
        say({ id: "code:0", status: said === "the key is " + value.apiKey ? "passed" : "failed", message: value.apiKey, output: text(value.nested[0].note), input: text(value.apiKey), metadata: text("a credential word, a variable word") });
        end(true)"#;
    for provider in PROVIDERS {
        let case = json!({ "prepare": { "name": "key", "source": format!("{TOOLS}{prepare}") }, "validator": validator(&["one"], checks) });
        let mut grid = Grid::new().await;
        let mut lease = grid.lease(
            7,
            &request(&format!("trap - DEBUG; {run}"), case, json!({ "variables": ["TOKEN"] })),
        );
        lease.provider = provider.into();
        // What the trial knew before stays secret, too.
        lease.credential.insert("apiKey".into(), "credential word".into());
        lease.variables.insert("TOKEN".into(), "variable word".into());
        let told = grid.trial(lease).await;
        let evidence = grid.evidence(told.outcome());
        assert_eq!(verdict(told.outcome()), "passed", "{:#?}", evidence.validations);
        let mut kept = format!("{:?}", told.outcome());
        kept.push_str(&serde_json::to_string(&evidence).unwrap());
        told.steps
            .iter()
            .for_each(|step| kept.push_str(&String::from_utf8_lossy(&step.result)));
        for secret in ["swordfish-42", "blue moon 42", "credential word", "variable word"] {
            assert!(!kept.contains(secret), "{secret}: {kept}");
        }
        assert!(kept.contains("the key is [redacted]"));
        assert!(!kept.contains(".sphynx-prepare"), "the bundle is gone before the agent comes");
    }
}

/// An HTTP mock as a bundle makes it.
const MOCK: &str = r#"
import fs from "node:fs"; import http from "node:http";
fs.appendFileSync(process.env.HOME + "/ran", "mock\n");
const log = (call) => fs.appendFileSync(".sphynx/api/calls.jsonl", JSON.stringify(call) + "\n");
const server = http.createServer((request, response) => {
  log({ api: "catalog", index: 0, method: request.method, path: request.url, matched: true, status: 200, logs: [], error: null,
    input: { text: process.env.TOKEN ?? "", format: "text", state: "captured", truncated: false } });
  console.log("x".repeat(200000));
  response.end("an item");
});
server.listen(0, "127.0.0.1", () => {
  const url = "http://127.0.0.1:" + server.address().port;
  fs.writeFileSync(".sphynx/api/manifest.json", JSON.stringify([{ name: "catalog", url, endpoints: [{ method: "GET", path: "/items/:id", description: "One item" }] }]));
  console.log("SPHYNX_API_READY=" + url);
});
"#;

fn mock(source: &str) -> Value {
    json!({ "files": {
        "workspace/.sphynx/api/program.json": r#"{"entry": ".sphynx/api/server.mjs"}"#,
        "workspace/.sphynx/api/server.mjs": source,
    }})
}

/// Asks the mock that the prompt names, by a URL that only the prompt has.
const ASK: &str = r#"trap - DEBUG; url=$(printf '%s\n' "$SPHYNX_PROMPT" | sed -n 's/^catalog: //p')
    printf '{"_tag":"Message","role":"assistant","text":"%s, %s"}\n' "$(curl -s "$url/items/1")" "$(printf '%s' "$SPHYNX_PROMPT" | tail -n 1)"
    echo '{"server":"users","kind":"tool","name":"get"}' > .sphynx/mcp-calls.jsonl; printf '{"cli":"users"}\nbroken\n' > .sphynx/cli-calls.jsonl"#;

#[tokio::test]
async fn mocks_are_started_told_and_kept() {
    let checks = r#"const [api] = JSON.parse(fs.readFileSync(".sphynx/api/manifest.json", "utf8"));
        const said = await (await fetch(api.url + "/items/2")).text();
        const [turn] = JSON.parse(fs.readFileSync(process.env.SPHYNX_TURNS_FILE, "utf8"));
        check(0, turn.agentText === "an item, - GET /items/:id: One item" && said === "an item", turn.agentText);
        check(1, turn.userText === "Do it", turn.userText); end(true)"#;
    for provider in PROVIDERS {
        // The address is known before `prepare`, which may ask for it.
        let prepare = json!({ "name": "p", "source": "import fs from 'node:fs'; fs.readFileSync('.sphynx/api/manifest.json')" });
        let case = json!({ "prepare": prepare, "validator": validator(&["answer", "prompt"], checks) });
        let (grid, told) = trial(provider, &request(ASK, case, mock(MOCK))).await;
        let evidence = grid.evidence(told.outcome());
        assert_eq!(verdict(told.outcome()), "passed", "{:#?}", evidence.validations);
        let calls = evidence.mock_calls.unwrap();
        assert_eq!(
            (calls.api.len(), calls.cli.len(), calls.mcp.len(), calls.truncated),
            (1, 1, 1, false),
            "the checks' own calls are not the agent's"
        );
        assert_eq!((&calls.api[0]["path"], &calls.mcp[0]["name"]), (&json!("/items/1"), &json!("get")));
        assert!(
            evidence
                .diagnostics
                .contains(&"1 lines in the logs of the mocks are no calls".to_owned()),
            "{:?}",
            evidence.diagnostics
        );
        let steps = told.step_names();
        assert_eq!(
            steps[steps.len() - 6..],
            ["mocks", "prepare", "turn.1.agent", "turn.1.files", "mocks.calls", "check.0"]
        );
    }
}

#[tokio::test]
async fn mocks_that_do_not_serve() {
    async fn check(source: &str, expected: &str) {
        let (_, told) = trial("process", &request("true", json!({ "verify": "true" }), mock(source))).await;
        assert_eq!(verdict(told.outcome()), expected, "{source}");
    }
    check(
        "process.exit(3)",
        "The HTTP mock failed: it exited with status 3 before it was ready",
    )
    .await;
    check("", "The HTTP mock failed: it ended before it was ready").await;
    check(
        "console.log('SPHYNX_API_READY=')",
        "The HTTP mock failed: there is no .sphynx/api/manifest.json",
    )
    .await;
    let broken = "import fs from 'node:fs'; fs.writeFileSync('.sphynx/api/manifest.json', '['); console.log('SPHYNX_API_READY=')";
    check(
        broken,
        "The HTTP mock failed: its manifest cannot be read: EOF while parsing a list at line 1 column 1",
    )
    .await;
    let long = "import fs from 'node:fs'; fs.writeFileSync('.sphynx/api/manifest.json', JSON.stringify([{name: 'a'.repeat(130000), url: '', endpoints: []}])); console.log('SPHYNX_API_READY=')";
    check(
        long,
        "The HTTP mock failed: the prompt with the list of its endpoints holds 130047 bytes; the limit is 122880",
    )
    .await;
}

/// catalogue 11: a trial goes on from any of its recorded steps, and no bundle runs twice.
#[tokio::test]
async fn bundles_run_once_whoever_asks() {
    let mut grid = Grid::new().await;
    let ran = |word: &str| format!(r#"fs.appendFileSync(process.env.HOME + "/ran", "{word}\n");"#);
    let prepare = format!(
        r#"{TOOLS}{} console.log("SPHYNX_PREPARE_RESULT=" + JSON.stringify({{ token: "swordfish-" + 6 * 7 }}))"#,
        ran("prepare")
    );
    let checks = format!(
        r#"{} const order = fs.readFileSync(process.env.HOME + "/ran", "utf8");
        check(0, order === "mock\nprepare\nagent\ncheck\n" && JSON.parse(process.env.SPHYNX_PREPARE_VALUE).token === "swordfish-42", order); end(true)"#,
        ran("check")
    );
    let case = json!({ "prepare": { "name": "p", "source": prepare }, "validator": validator(&["one"], &checks) });
    let mut lease = grid.lease(1, &request(&format!("echo agent >> $HOME/ran; {ASK}"), case, mock(MOCK)));
    let names = ["mocks", "prepare", "turn.1.agent", "turn.1.files", "mocks.calls", "check.0"];
    let mut recorded: Vec<RecordedStep> = Vec::new();
    let mut first = None;
    // First in one go, then as if the worker had died behind each of the steps.
    for lost in 0..=names.len() {
        let executor = grid.executor();
        let mut session = grid.session().await;
        session.acknowledge_if(|report| report.results.is_empty());
        lease.steps = recorded[..recorded.len().saturating_sub(lost)].to_vec();
        session.lease(&lease).await;
        let told = session.until(|told| !told.results.is_empty()).await;
        if recorded.is_empty() {
            recorded = told.recorded();
        } else {
            assert_eq!(told.step_names(), names[names.len() - lost..]);
        }
        let outcome = told.outcome();
        assert_eq!(verdict(outcome), "passed", "{:#?}", grid.evidence(outcome).validations);
        let bare = grid.bare(outcome);
        assert_eq!(&bare, first.get_or_insert(bare.clone()), "without {lost} steps");
        executor.kill().await;
        (lease.token, lease.adopt) = (lease.token + 1, true);
    }
}

/// The set-up's own folder comes back in the next trial, not what the agent has made of it; and only to its own organization.
#[tokio::test]
async fn caches() {
    let prepare = r#"const cached = process.env.SPHYNX_CACHE_RESTORED;
        if (cached === "false") { fs.mkdirSync("deps/x", { recursive: true }); fs.writeFileSync("deps/x/made", "made"); }
        console.log("SPHYNX_PREPARE_RESULT=" + JSON.stringify({ cached, made: fs.readFileSync("deps/x/made", "utf8") }))"#;
    let checks = r#"const value = JSON.parse(process.env.SPHYNX_PREPARE_VALUE);
        say({ id: "code:0", status: value.made === "made" ? "passed" : "failed", message: value.cached }); end(true)"#;
    let cache = |path: &str| json!({ "key": "k", "path": path });
    let case = |cache: Value| json!({ "cache": cache, "prepare": { "name": "p", "source": format!("{TOOLS}{prepare}") }, "validator": validator(&["one"], checks) });
    for provider in PROVIDERS {
        let mut grid = Grid::new().await;
        for (token, organization, path, cached, steps) in [
            (1, "org_test", "deps", "false", &["cache.restore", "prepare", "cache.save"][..]),
            (2, "org_test", "deps", "true", &["cache.restore", "prepare"]),
            (3, "org_other", "deps", "false", &["cache.restore", "prepare", "cache.save"]),
            (4, "org_test", "./deps", "false", &["cache.restore", "prepare", "cache.save"]),
        ] {
            let mut lease = grid.lease(token, &request("echo spoilt > deps/x/made", case(cache(path)), json!({})));
            (lease.provider, lease.organization_id) = (provider.into(), organization.into());
            let told = grid.trial(lease).await;
            let evidence = grid.evidence(told.outcome());
            assert_eq!(
                (verdict(told.outcome()).as_str(), evidence.validations[0].message.as_str()),
                ("passed", cached),
                "{token}"
            );
            let found: Vec<_> = told
                .step_names()
                .into_iter()
                .filter(|step| step.starts_with("cache") || *step == "prepare")
                .collect();
            assert_eq!(found, steps);
            assert_eq!(evidence.diagnostics, [""; 0]);
        }
    }
    let case = json!({ "cache": cache("nothing"), "verify": "true" });
    let (grid, told) = trial("process", &request("true", case, json!({}))).await;
    assert_eq!(verdict(told.outcome()), "passed");
    assert_eq!(
        grid.evidence(told.outcome()).diagnostics,
        ["The cache was not saved: there is no nothing after the set-up"]
    );
}

#[tokio::test]
async fn profiles_are_text() {
    let profile = json!({ "files": { "workspace/logo.png": "a\u{0}b", "workspace/text": "text" } });
    let (grid, told) = trial(
        "process",
        &request("true", json!({ "verify": "test ! -e logo.png && test -s text" }), profile),
    )
    .await;
    assert_eq!(verdict(told.outcome()), "passed");
    let found = grid.evidence(told.outcome()).diagnostics;
    assert_eq!(
        found,
        ["The profile's file workspace/logo.png was skipped: it holds a NUL byte, and profiles are text"]
    );
}
