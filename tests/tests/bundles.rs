//! Programs of the request, from the API and back: the example that newcomers run, and what answers show of mocks and set-ups.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::{path::Path, time::Duration};

use evalgrid_tests::{server::Server, suite};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(120);

fn examples() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../examples"))
}

fn read(path: &str) -> String {
    std::fs::read_to_string(examples().join(path)).unwrap()
}

fn example() -> Value {
    serde_json::from_str(&read("validator.json")).unwrap()
}

#[test]
fn the_example_carries_its_files() {
    let request = example();
    for (pointer, file) in [
        ("/cases/0/prepare/source", "validators/prepare.mjs"),
        ("/cases/1/prepare/source", "validators/prepare.mjs"),
        ("/cases/0/validator/source", "validators/by-hand.mjs"),
        ("/cases/1/validator/source", "validators/bundled/checks.mjs"),
        ("/cases/1/validator/sourceFiles/0/content", "validators/bundled/src/checks.mjs"),
        ("/cases/1/validator/sourceFiles/1/content", "validators/bundled/src/index.mjs"),
        ("/cases/1/validator/sourceFiles/2/content", "validators/bundled/src/protocol.mjs"),
        ("/variants/0/profile/files/home~1agent.sh", "validators/agent.sh"),
    ] {
        assert_eq!(
            request.pointer(pointer).unwrap().as_str().unwrap(),
            read(file),
            "run `node examples/validators/make.mjs`"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_of_the_request() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::new(folder.path());
    let _process = server.serve();
    let api = server.ready().await;

    let batch = api.ended(&api.start(&example()).await, PATIENCE).await;
    for (run, validator, checks) in [
        (0, "by-hand", "code:0 wroteTheTotal passed, code:1 saysTheTotal passed"),
        (1, "bundled", "code:0 wroteTheTotal passed, code:1 readBeforeWriting passed"),
    ] {
        let run = &batch["runs"][run];
        assert_eq!(run["distribution"]["passed"], 2, "{run:#}");
        assert_eq!(
            (&run["setup"]["prepare"], &run["setup"]["validator"]),
            (&json!("numbers"), &json!(validator))
        );
        for trial in run["trials"].as_array().unwrap() {
            let found = trial["validations"].as_array().unwrap().iter();
            let found: Vec<_> = found
                .map(|check| format!("{} {} {}", check["id"], check["name"], check["status"]).replace('"', ""))
                .collect();
            assert_eq!(found.join(", "), checks);
            assert_eq!(trial["voidFields"], json!([]));
        }
    }
    assert_eq!(batch["runs"][1]["setup"]["validatorFiles"][0]["path"], "src/checks.mjs");

    // One check that fails, one that breaks, and what an agent asked of a mock.
    let mut request = suite::command_batch(
        2,
        1,
        "bubblewrap",
        "echo '{\"server\":\"users\",\"name\":\"get\"}' > .sphynx/mcp-calls.jsonl",
        "true",
    );
    request["variants"][0]["profile"]["files"] = json!({ "workspace/.sphynx/mcp/0/server.mjs": "" });
    for (case, source) in [
        (0, "console.log('SPHYNX_VALIDATOR_RESULT={\"passed\":false,\"message\":\"no\"}')"),
        (1, "process.exit(3)"),
    ] {
        request["cases"][case]["verify"] = Value::Null;
        request["cases"][case]["validator"] = json!({ "name": "check", "source": source });
    }
    let batch = api.ended(&api.start(&request).await, PATIENCE).await;
    let trials = suite::trials(&batch);
    assert_eq!(
        (
            &trials[0]["status"],
            &trials[0]["exitCode"],
            &trials[0]["validations"][0]["message"]
        ),
        (&json!("failed"), &json!(1), &json!("no"))
    );
    assert_eq!(trials[0]["mockCalls"]["mcp"], json!([{ "server": "users", "name": "get" }]));
    assert_eq!((&trials[1]["status"], &trials[1]["exitCode"]), (&json!("void"), &json!(3)));
    assert_eq!(trials[1]["failure"], "The validator check gave no verdict: it exited with status 3");
    assert_eq!(
        (&trials[1]["voidFields"], &trials[1]["validations"][0]["status"]),
        (&json!(["validator"]), &json!("error"))
    );
    assert_eq!(batch["status"], "finished");
}
