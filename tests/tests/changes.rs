//! What a trial leaves to be looked at: its file changes, the files that are kept, where its time went.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::{
    io::Write as _,
    process::{Command, Stdio},
    time::Duration,
};

use evalgrid_tests::{
    server::{Server, binary},
    suite,
};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(120);

/// A conversation of two turns in a workspace with a file; the server is killed in the middle of the second turn, whose agent goes on.
#[tokio::test(flavor = "multi_thread")]
async fn each_turn_is_told_apart_across_a_crash() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::new(folder.path());
    let mut process = server.serve();
    let api = server.ready().await;
    // The second turn tells that it runs in a folder that does not count.
    let run = r#"printf '{"_tag":"Started","sessionId":"s","model":"m"}\n'
        if [ -z "$SPHYNX_SESSION_ID" ]; then echo one >> kept.txt; echo 'DB_PASSWORD=hunter2' > .env; mkdir -p build; echo x > build/out
        else echo two > second.txt; mkdir -p node_modules; touch node_modules/waiting; sleep 3; rm kept.txt; fi"#;
    let mut request = suite::command_batch(1, 1, "bubblewrap", run, "echo check > by-check.txt; test ! -e kept.txt");
    let case = &mut request["cases"][0];
    case["source"] = json!({ "kind": "files", "files": { "kept.txt": "zero\n" } });
    case["user"] = json!({ "kind": "scripted", "replies": ["go on"] });
    case["diff"] = json!({ "ignore": ["nothing"], "include": ["build/out"] });
    let id = api.start(&request).await;
    let work = server.data().join("work/bubblewrap");
    evalgrid_tests::eventually("the second turn runs", PATIENCE, || async {
        let sandboxes = std::fs::read_dir(&work).ok()?.flatten();
        let mut waiting = sandboxes.map(|sandbox| sandbox.path().join("workspace/node_modules/waiting"));
        waiting.any(|file| file.exists()).then_some(())
    })
    .await;
    process.kill();
    process = server.serve();
    let batch = api.ended(&id, PATIENCE).await;
    let [trial] = suite::trials(&batch)[..] else { panic!("{batch}") };
    assert_eq!(
        (&trial["status"], &trial["lostAttempts"]),
        (&json!("passed"), &json!([])),
        "{trial}"
    );
    let turns: Vec<Vec<String>> = trial["fileChanges"].as_array().unwrap().iter().map(changes).collect();
    assert_eq!(
        turns,
        [
            vec!["added .env", "added build/out", "modified kept.txt"],
            vec!["deleted kept.txt", "added second.txt"]
        ]
    );
    assert_eq!(trial["filesChanged"], json!([".env", "build/out", "kept.txt", "second.txt"]));
    assert_eq!(trial["coverage"]["files"], json!({ "state": "complete" }));
    assert_eq!(trial["fileChanges"][0]["changes"][2]["diff"], "@@ -1 +1,2 @@\n zero\n+one\n");
    let kept: Vec<_> = trial["artifacts"].as_array().unwrap().iter().map(|kept| &kept["path"]).collect();
    assert_eq!(kept, ["build/out", "second.txt"], "what looks like a password is not kept");

    let wanted = |path: &str| json!({ "trialId": trial["id"], "path": path });
    let artifact = api.call("evals.artifacts.get", &wanted("second.txt")).await.unwrap();
    assert_eq!(
        (artifact.status, &artifact.body["content"], &artifact.body["byteSize"]),
        (200, &json!("two\n"), &json!(4))
    );
    for (body, status) in [
        (wanted(".env"), 404),
        (json!({ "trialId": "trial_none", "path": "second.txt" }), 404),
        (json!({ "trialId": trial["id"] }), 400),
    ] {
        assert_eq!(api.call("evals.artifacts.get", &body).await.unwrap().status, status, "{body}");
    }

    let show = |more: &[&str]| {
        let (data, scheduler) = (server.data(), format!("http://{}", server.grpc));
        let id = trial["id"].as_str().unwrap();
        let arguments = ["trial", "show", id, "--data", data.to_str().unwrap(), "--scheduler", &scheduler];
        let output = Command::new(binary()).args(arguments).args(more).output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    assert_eq!(show(&["--artifact", "second.txt"]), (true, "two\n".to_owned()));
    assert!(!show(&["--artifact", ".env"]).0);
    let (_, text) = show(&[]);
    for part in [
        "turn 1                modified kept.txt",
        "  queue",
        "    turn.2",
        "      files",
        "    check.0",
    ] {
        assert!(text.lines().any(|line| line.starts_with(part)), "{part:?} in {text}");
    }
    assert_eq!(process.terminate(Duration::from_secs(20)), 0);
}

fn changes(turn: &Value) -> Vec<String> {
    let changes = turn["changes"].as_array().unwrap().iter();
    changes
        .map(|change| format!("{} {}", change["kind"].as_str().unwrap(), change["path"].as_str().unwrap()))
        .collect()
}

/// What --keep-failed keeps outlives the server; a person looks into it. (That it goes when its time is over is tested where time can be set.)
#[tokio::test(flavor = "multi_thread")]
async fn the_sandbox_of_a_failed_trial_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::new(folder.path());
    server.executor.extend(["--keep-failed", "60"].map(str::to_owned));
    let mut process = server.serve();
    let api = server.ready().await;
    let run = "echo mark > look.txt";
    for verify in ["true", "false"] {
        let id = api.start(&suite::command_batch(1, 1, "bubblewrap", run, verify)).await;
        api.ended(&id, PATIENCE).await;
    }
    let (data, scheduler) = (server.data(), format!("http://{}", server.grpc));
    let list = || {
        let arguments = [
            "sandboxes",
            "list",
            "--json",
            "--data",
            data.to_str().unwrap(),
            "--scheduler",
            &scheduler,
        ];
        let output = Command::new(binary()).args(arguments).output().unwrap();
        serde_json::from_slice::<Value>(&output.stdout).unwrap_or_default()
    };
    // The sandbox of the trial that passed goes.
    let one = evalgrid_tests::eventually("one is left", PATIENCE, || async { Some(list()).filter(|list| list["total"] == 1) }).await;
    let name = one["sandboxes"][0]["name"].as_str().unwrap().to_owned();
    assert!(one["sandboxes"][0]["keptUntil"].is_string(), "{one}");
    process.kill();
    process = server.serve();
    server.ready().await;
    let back = || async { Some(list()).filter(|list| list["sandboxes"][0]["workerHere"] == true) };
    let list = evalgrid_tests::eventually("its worker is back", PATIENCE, back).await;
    assert_eq!(list["sandboxes"][0]["keptUntil"], one["sandboxes"][0]["keptUntil"]);
    let work = data.join("work");
    let mut shell = Command::new(binary())
        .args(["sandboxes", "enter", &name, "--work", work.to_str().unwrap()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    shell
        .stdin
        .take()
        .unwrap()
        .write_all(b"cat look.txt; pwd; echo $HOME\nexit\n")
        .unwrap();
    let output = shell.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "mark\n/workspace\n/home/agent\n");
    let nobody = Command::new(binary())
        .args(["sandboxes", "enter", "../x", "--work", work.to_str().unwrap()])
        .output()
        .unwrap();
    assert!(!nobody.status.success());
    assert_eq!(process.terminate(Duration::from_secs(20)), 0);
}
