//! What a user and an operator see over the life of a server: keys, permissions, cancelling, conversations, sources, restarts, repair.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::{
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Command, Output},
    time::Duration,
};

use evalgrid_tests::{
    http::Api,
    server::{Server, binary},
    suite,
};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);

fn evalgrid(arguments: &[&str]) -> Output {
    Command::new(binary()).args(arguments).output().unwrap()
}

fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

fn quick(verify: &str) -> Value {
    suite::command_batch(1, 1, "bubblewrap", "echo hello > hello.txt", verify)
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_and_restarts() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::new(folder.path());
    let data = server.data();
    let data = data.to_str().unwrap();
    let mut process = server.serve();
    let api = server.ready().await;
    let secret = server.secret("api-key");
    for name in ["api-key", "admin-token", "worker-token"] {
        let mode = std::fs::metadata(server.data().join(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name} is for its owner only");
    }
    let whoami = api.call("auth.whoami", &json!({})).await.unwrap().body;
    assert_eq!(whoami["organization"]["slug"], "default");
    assert_eq!(
        whoami["permissions"].as_array().unwrap().len(),
        15,
        "the first key may do everything"
    );

    let scheduler = format!("http://{}", server.grpc);
    let created = evalgrid(&[
        "keys",
        "create",
        "--org",
        "acme",
        "--permissions",
        "evals:read",
        "--data",
        data,
        "--scheduler",
        &scheduler,
    ]);
    assert!(created.status.success(), "{}", text(&created));
    let reader = text(&created)
        .split_whitespace()
        .find(|word| word.starts_with("anp_"))
        .unwrap()
        .to_owned();
    let reader = Api::new(&server.http, &reader);
    assert_eq!(reader.call("evals.batches.list", &json!({})).await.unwrap().body["total"], 0);
    let refused = reader.call("evals.batches.start", &quick("true")).await.unwrap();
    assert_eq!((refused.status, &refused.body["_tag"]), (403, &json!("Forbidden")));
    let id = api.start(&quick("true")).await;
    let hidden = reader.call("evals.batches.get", &json!({ "id": id })).await.unwrap();
    assert_eq!(hidden.status, 404, "another organization's batch is not there");
    let ended = api.ended(&id, PATIENCE).await;

    let list = text(&evalgrid(&["keys", "list", "--data", data, "--scheduler", &scheduler]));
    let line = list.lines().find(|line| line.contains("acme")).unwrap();
    let key = line.split_whitespace().find(|word| word.starts_with("key_")).unwrap();
    let revoked = evalgrid(&["keys", "revoke", key, "--data", data, "--scheduler", &scheduler]);
    assert!(revoked.status.success(), "{}", text(&revoked));
    assert_eq!(reader.call("evals.batches.list", &json!({})).await.unwrap().status, 401);
    assert!(!list.contains(&secret), "secrets are not listed");

    // Offline commands refuse a folder in use.
    for command in [["log", "verify"], ["index", "rebuild"]] {
        let refused = evalgrid(&[&command[..], &["--data", data]].concat());
        assert_eq!(refused.status.code(), Some(1), "{}", text(&refused));
        assert!(text(&refused).contains("in use"), "{}", text(&refused));
    }
    assert_eq!(process.terminate(Duration::from_secs(20)), 0);

    for command in [["log", "verify"], ["log", "dump"], ["index", "rebuild"]] {
        let done = evalgrid(&[&command[..], &["--data", data]].concat());
        assert!(done.status.success(), "{}", text(&done));
    }
    let _process = server.serve();
    let api = server.ready().await;
    assert_eq!(api.batch(&id).await.unwrap(), ended, "the batch is read back unchanged");
    let log = std::fs::read_to_string(folder.path().join("evalgrid.log")).unwrap();
    assert_eq!(log.matches(&secret).count(), 1, "the key is printed once, at the first start");
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelling_ends_the_agents() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::new(folder.path());
    server.executor = vec!["--slots".into(), "2".into()];
    let mut process = server.serve();
    let api = server.ready().await;
    let id = api.start(&suite::command_batch(1, 5, "bubblewrap", "sleep 300", "true")).await;
    evalgrid_tests::eventually("two trials run", PATIENCE, || async {
        let batch = api.batch(&id).await.ok()?;
        (suite::trials(&batch).iter().filter(|trial| trial["status"] == "running").count() == 2).then_some(())
    })
    .await;
    let cancelled = api.call("evals.batches.cancel", &json!({ "id": id })).await.unwrap();
    assert_eq!(
        (cancelled.status, &cancelled.body["status"], &cancelled.body["failure"]),
        (200, &json!("failed"), &json!("Cancelled"))
    );
    let counts = &cancelled.body["runs"][0]["distribution"];
    assert_eq!(
        (&counts["trials"], &counts["voided"], &counts["cancelled"]),
        (&json!(5), &json!(5), &json!(5))
    );
    // The slots come back at once: the next batch does not wait for `sleep 300`.
    let next = api.start(&quick("test -e hello.txt")).await;
    let ended = api.ended(&next, Duration::from_secs(20)).await;
    assert_eq!(suite::trials(&ended)[0]["status"], "passed");
    let again = api.call("evals.batches.cancel", &json!({ "id": next })).await.unwrap();
    assert_eq!(again.status, 409);
    assert_eq!(process.terminate(Duration::from_secs(20)), 0);
}

/// A cancel may come while a sandbox is being made: it is destroyed once it is there, and not taken for gone before.
#[tokio::test(flavor = "multi_thread")]
async fn cancelling_at_once_leaves_no_sandbox() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::new(folder.path());
    server.executor = vec!["--slots".into(), "8".into()];
    let mut process = server.serve();
    let api = server.ready().await;
    for wait in (0..6).chain(0..6).chain(0..6).chain([8, 12, 20, 30]) {
        let id = api.start(&suite::command_batch(4, 1, "bubblewrap", "sleep 300", "true")).await;
        tokio::time::sleep(Duration::from_millis(wait)).await;
        let cancelled = api.call("evals.batches.cancel", &json!({ "id": id })).await.unwrap();
        assert_eq!(cancelled.status, 200, "{}", cancelled.body);
    }
    // Every slot is free again, for sandboxes that are gone.
    let last = api.start(&suite::command_batch(8, 1, "bubblewrap", "true", "true")).await;
    let ended = api.ended(&last, PATIENCE).await;
    assert!(suite::trials(&ended).iter().all(|trial| trial["status"] == "passed"), "{ended}");
    evalgrid_tests::eventually("no sandbox is left", Duration::from_secs(20), || async {
        let find = Command::new("find").arg(folder.path()).args(["-name", "trial_*"]).output().unwrap();
        find.stdout.is_empty().then_some(())
    })
    .await;
    assert_eq!(process.terminate(Duration::from_secs(20)), 0);
    assert_eq!(evalgrid_tests::leftovers::processes(folder.path()), [""; 0]);
}

/// A bare repository with two commits and a tag on the first.
fn repository(folder: &Path) {
    let script = "
        set -e
        export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@example.com GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@example.com
        git init -q -b main work && cd work
        echo one > file && git add file && git commit -q -m one && git tag first
        echo two > file && git commit -q -a -m two
        cd .. && git clone -q --bare work served/repo.git";
    std::fs::create_dir_all(folder.join("served")).unwrap();
    let made = Command::new("bash").args(["-c", script]).current_dir(folder).output().unwrap();
    assert!(made.status.success(), "{}", text(&made));
}

struct Daemon(std::process::Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sources_profiles_and_conversations() {
    let folder = tempfile::tempdir().unwrap();
    repository(folder.path());
    let port = evalgrid_tests::server::free_address().rsplit_once(':').unwrap().1.to_owned();
    // The program itself, not `git daemon`, which would leave it behind when killed.
    let programs = String::from_utf8(Command::new("git").arg("--exec-path").output().unwrap().stdout).unwrap();
    let daemon = Command::new(Path::new(programs.trim()).join("git-daemon"))
        .args(["--export-all", "--reuseaddr", "--listen=127.0.0.1", &format!("--port={port}")])
        .arg(format!("--base-path={}", folder.path().join("served").display()))
        .arg(folder.path().join("served"))
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let _daemon = Daemon(daemon);
    let server = Server::new(folder.path());
    let _process = server.serve();
    let api = server.ready().await;
    let url = format!("git://127.0.0.1:{port}/repo.git");
    let say = "echo \"{\\\"_tag\\\":\\\"Started\\\",\\\"sessionId\\\":\\\"s\\\",\\\"model\\\":\\\"m\\\"}\"; echo \"$SPHYNX_PROMPT/${SPHYNX_SESSION_ID-none}\" >> said";
    let cases = json!([
        { "id": "at-head", "source": { "kind": "repo", "url": url, "ref": null }, "verify": "test $(cat file) = two && test -d .git" },
        { "id": "at-tag", "source": { "kind": "repo", "url": url, "ref": "first" }, "verify": "test $(cat file) = one" },
        { "id": "no-such-ref", "source": { "kind": "repo", "url": url, "ref": "nowhere" }, "verify": "true" },
        { "id": "from-suite", "verify": "test \"$(cat from)\" = suite" },
        { "id": "own-files", "source": { "kind": "files", "files": { "a/b.txt": "x" } }, "verify": "test $(cat a/b.txt) = x && test ! -e from" },
        { "id": "profile", "verify": "test $(cat shipped) = yes && test $(cat ~/at-home) = yes && test $(cat installed) = v" },
        { "id": "script", "variables": { "task": "begin" }, "user": { "kind": "scripted", "replies": ["go on", "thanks"] },
          "verify": "test \"$(cat said)\" = \"$(printf 'Do begin./none\\ngo on/s\\nthanks/s')\"" },
        { "id": "two-turns", "maxTurns": 2, "user": { "kind": "scripted", "replies": ["a", "b"] }, "verify": "test $(wc -l < said) = 2" },
        { "id": "fails", "verify": "true && test -e nothing && true" },
    ]);
    let body = json!({
        "suite": { "id": "everything", "prompt": "Do {{ task }}.", "source": { "kind": "files", "files": { "from": "suite" } } },
        "cases": cases,
        "variants": [{
            "harness": "command",
            "model": "m",
            "profile": {
                "name": "p",
                "files": { "home/at-home": "yes", "workspace/shipped": "yes" },
                "env": { "VALUE": "v" },
                "install": "echo $VALUE > installed",
                "run": say,
            },
        }],
        "trials": 1,
    });
    let id = api.start(&body).await;
    let batch = api.ended(&id, PATIENCE).await;
    for run in batch["runs"].as_array().unwrap() {
        let trial = &run["trials"][0];
        let case = run["case"]["id"].as_str().unwrap();
        let expected = match case {
            "no-such-ref" => "void",
            "fails" => "failed",
            _ => "passed",
        };
        assert_eq!(trial["status"], expected, "{case}: {trial}");
        match case {
            "no-such-ref" => {
                let failure = trial["failure"].as_str().unwrap();
                assert!(failure.starts_with(&format!("The source {url} could not be cloned: ")), "{failure}");
            }
            "fails" => assert_eq!(
                trial["verifySteps"],
                json!([{ "command": "true", "exitCode": 0 }, { "command": "test -e nothing", "exitCode": 1 }])
            ),
            "script" => {
                let people = trial["trajectory"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .filter(|entry| entry["role"] == "user")
                    .count();
                assert_eq!(people, 3, "{trial}");
                assert_eq!(run["setup"]["prompt"], "Do begin.");
            }
            _ => {}
        }
    }
    let run = &batch["runs"][0];
    let alone = api.call("evals.runs.get", &json!({ "id": run["id"] })).await.unwrap();
    assert_eq!((alone.status, &alone.body), (200, run));
}

#[tokio::test(flavor = "multi_thread")]
async fn admission_over_http() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::new(folder.path());
    // No executor: what is started waits.
    let _scheduler = server.scheduler();
    let _api = server.api();
    let api = server.ready().await;
    let body = quick("true").to_string().into_bytes();
    let first = api
        .send("evals.batches.start", body.clone(), &[("idempotency-key", "k")])
        .await
        .unwrap();
    let again = api
        .send("evals.batches.start", body.clone(), &[("idempotency-key", "k")])
        .await
        .unwrap();
    assert_eq!((first.status, &again.body), (200, &first.body));
    let other = api
        .send(
            "evals.batches.start",
            quick("false").to_string().into_bytes(),
            &[("idempotency-key", "k")],
        )
        .await
        .unwrap();
    assert_eq!((other.status, &other.body["_tag"]), (400, &json!("BadRequest")));
    let mut ids = vec![first.body["id"].as_str().unwrap().to_owned()];
    for _ in 0..2 {
        ids.push(api.start(&quick("true")).await);
    }
    let fourth = api.send("evals.batches.start", body, &[]).await.unwrap();
    assert_eq!((fourth.status, &fourth.body["_tag"]), (409, &json!("Conflict")));
    ids.reverse();
    let page = api.call("evals.batches.list", &json!({ "limit": 2 })).await.unwrap().body;
    assert_eq!((page["total"].as_u64(), page["batches"].as_array().unwrap().len()), (Some(3), 2));
    assert_eq!(page["batches"][0]["id"], ids[0].as_str());
    let rest = api
        .call("evals.batches.list", &json!({ "limit": 2, "cursor": page["next"] }))
        .await
        .unwrap()
        .body;
    assert_eq!((&rest["batches"][0]["id"], &rest["next"]), (&json!(ids[2]), &Value::Null));
    let waiting = api.batch(&ids[0]).await.unwrap();
    assert_eq!(waiting["runs"][0]["trials"][0]["status"], "queued");
}
