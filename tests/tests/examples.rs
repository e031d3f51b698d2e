//! The suites of `examples/` that need a key, as a newcomer starts them, against a model server on loopback: same files, and for each case the
//! line that tells the model of the tests what a real one finds out by itself.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

#[path = "../../sandbox/tests/common/dockerd.rs"]
#[allow(dead_code, clippy::missing_panics_doc, reason = "of the sandbox's tests, who use more of it")]
mod dockerd;

use std::{collections::BTreeMap, path::Path, time::Duration};

use evalgrid_modelserver::{Mode, ModelServer};
use evalgrid_tests::{agents, suite};
use serde_json::{Value, json};

/// Installing two agents, if nobody has, and a dozen short trials on a busy machine.
const PATIENCE: Duration = Duration::from_secs(480);

/// What the suites' own checks need.
const NODE_IMAGE: &str = "evalgrid-test/node:1";

/// A file of `examples/`.
fn file(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples").join(name);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The suite of that name, on `sandbox`, with what the model of the tests does, by case; a reply of a person does what it says in `replies`.
fn example(name: &str, sandbox: &str, does: &[(&str, &str)], replies: &[&str]) -> Value {
    let mut request = file(&format!("{name}/request.json"));
    let prompt = request["suite"]["prompt"].as_str().unwrap().to_owned();
    request["suite"]["prompt"] = json!(format!("{prompt}\n{{{{ does }}}}"));
    for case in request["cases"].as_array_mut().unwrap() {
        let does = does.iter().find(|(id, _)| case["id"] == *id).unwrap().1;
        case["variables"]["does"] = json!(does);
        let said = case.pointer_mut("/user/replies").and_then(Value::as_array_mut);
        for (reply, does) in said.into_iter().flatten().zip(replies) {
            *reply = json!(format!("{}\n{does}", reply.as_str().unwrap()));
        }
    }
    // A second one would show nothing new here.
    request["trials"] = json!(1);
    for variant in request["variants"].as_array_mut().unwrap() {
        variant["sandbox"] = json!(sandbox);
    }
    request
}

const FIRST_STEPS: &[(&str, &str)] = &[
    ("greet", "RUN echo 'Hello, World!' > hello.txt"),
    ("fix-the-total", "RUN sed -i 's/sum - price/sum + price/' total.mjs"),
];

/// (case, agent, ordinal) and how the trial ended.
type Verdicts = BTreeMap<(String, String, u64), String>;

fn verdicts(batch: &Value) -> Verdicts {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let runs = batch["runs"].as_array().unwrap().iter();
    runs.flat_map(|run| {
        let variant = format!("{} {}", text(&run["variant"]["harness"]), text(&run["variant"]["profile"]));
        let trials = run["trials"].as_array().unwrap().iter();
        trials.map(move |trial| {
            let key = (text(&run["case"]["id"]), variant.clone(), trial["ordinal"].as_u64().unwrap());
            (key, format!("{} {}", text(&trial["status"]), text(&trial["failure"])))
        })
    })
    .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn suites_for_real_agents_pass_on_every_sandbox() {
    let folder = tempfile::tempdir().unwrap();
    let models = ModelServer::start("127.0.0.1:0", None).await.unwrap();
    // Nothing of the network but the models is there, and that by name.
    let port = models.address().port();
    let base = models.url(Mode::Ok).replace("127.0.0.1", "localhost");
    let mut server = agents::server(folder.path(), &base, 4);
    server.executor.push(format!("--sandbox-network=allow=localhost:{port}"));
    let docker = dockerd::dockerd();
    if let Some(docker) = docker {
        // Claude Code's own program wants the stubs of an older C library.
        let stubs = "for l in rt dl pthread m; do cp -L /lib/*/lib$l.so.* usr/lib/; done";
        let image = format!("{}\n{stubs}", dockerd::tools("node").unwrap());
        docker.import(NODE_IMAGE, &image, "ENV%20PATH%3D%2Fusr%2Fbin").unwrap();
        server.executor.push(format!("--docker=unix://{}", docker.socket.display()));
        server.executor.push(format!("--docker-image={NODE_IMAGE}"));
    }
    let _process = server.serve();
    let api = server.ready().await;
    let mut seen: BTreeMap<&str, Vec<Verdicts>> = BTreeMap::new();
    for sandbox in ["bubblewrap"].into_iter().chain(docker.map(|_| "docker")) {
        let suites = [
            ("codex", example("codex", sandbox, FIRST_STEPS, &[])),
            ("claude", example("claude", sandbox, FIRST_STEPS, &[])),
            (
                "conversation",
                example(
                    "conversation",
                    sandbox,
                    &[("choose-a-colour", "RUN echo white > door.txt")],
                    &["RUN echo blue > door.txt", "RUN echo dark blue > door.txt"],
                ),
            ),
        ];
        let mut started = Vec::new();
        for (name, request) in suites {
            started.push((name, api.start(&request).await));
        }
        for (name, id) in started {
            let batch = api.ended(&id, PATIENCE).await;
            for trial in suite::trials(&batch) {
                assert_eq!(trial["status"], "passed", "{name} on {sandbox}: {trial}");
                assert!(trial["usage"]["totalTokens"].as_u64() > Some(0), "{name} on {sandbox}: {trial}");
            }
            if name == "conversation" {
                for trial in suite::trials(&batch) {
                    let turns = trial["fileChanges"].as_array().unwrap();
                    assert_eq!(turns.len(), 3, "each turn has changed the door: {trial}");
                }
            }
            seen.entry(name).or_default().push(verdicts(&batch));
        }
    }
    for (name, seen) in seen {
        assert!(
            seen.windows(2).all(|pair| pair[0] == pair[1]),
            "{name} ends alike on all sandboxes: {seen:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_judged_suite_tells_one_who_asks_from_one_who_guesses() {
    let folder = tempfile::tempdir().unwrap();
    let models = ModelServer::start("127.0.0.1:0", None).await.unwrap();
    let server = agents::server(folder.path(), &models.url(Mode::Ok), 4);
    let _process = server.serve();
    let api = server.ready().await;
    // The model server does what the lines say that this one has more; everything else is as it stands in the example.
    let request = file("judged/without-key.json");
    let mut plain = request.clone();
    for pointer in ["/user/prompt", "/validator/judges/0/prompt", "/validator/judges/1/prompt"] {
        let prompt = plain["cases"][0].pointer_mut(pointer).unwrap();
        *prompt = json!(prompt.as_str().unwrap().rsplit_once('\n').unwrap().0);
    }
    assert_eq!(plain, file("judged/request.json"));
    let batch = api.ended(&api.start(&request).await, PATIENCE).await;
    for run in batch["runs"].as_array().unwrap() {
        let asks = run["variant"]["model"] == "asks";
        for trial in run["trials"].as_array().unwrap() {
            assert_eq!(trial["status"], if asks { "passed" } else { "failed" }, "{trial}");
            let picked: Vec<_> = trial["validations"]
                .as_array()
                .unwrap()
                .iter()
                .map(|record| &record["judgment"]["choice"])
                .collect();
            assert_eq!(picked, if asks { ["asked", "yes"] } else { ["guessed", "no"] }, "{trial}");
        }
    }
}
