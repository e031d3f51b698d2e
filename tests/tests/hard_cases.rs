//! The hard cases: agents that print too much, ignore signals, leave daemons, delete their workspace, bomb, and what each comes to. Afterwards
//! nothing of them is left on the machine.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::time::{Duration, Instant};

use evalgrid_tests::{
    leftovers::{groups, mounts, processes},
    server::Server,
    suite,
};
use serde_json::{Value, json};

/// What a case must come to.
struct Hard {
    name: &'static str,
    run: &'static str,
    verify: &'static str,
    timeout_ms: u64,
    status: &'static str,
    /// Part of the failure text.
    failure: &'static str,
    /// The whole trial, with room for a busy machine.
    limit: Duration,
}

const HARD: &[Hard] = &[
    Hard {
        name: "much-output",
        run: "head -c 200000000 /dev/zero | tr '\\0' x; echo; echo '{\"_tag\":\"Message\",\"role\":\"assistant\",\"text\":\"the end\"}'",
        verify: "true",
        timeout_ms: 60_000,
        status: "passed",
        failure: "",
        limit: Duration::from_secs(60),
    },
    Hard {
        name: "ignores-sigterm",
        run: "trap '' TERM; while :; do sleep 0.1; done",
        verify: "true",
        timeout_ms: 1_000,
        status: "void",
        failure: "The agent ran past its time limit of 1s",
        limit: Duration::from_secs(15),
    },
    Hard {
        name: "daemon-holds-stdout",
        run: "(trap '' HUP; while :; do echo still; sleep 0.2; done) & echo started > started",
        verify: "test -e started",
        timeout_ms: 60_000,
        status: "passed",
        failure: "",
        limit: Duration::from_secs(10),
    },
    Hard {
        name: "detached-daemon",
        run: "setsid sh -c 'sleep 300' > /dev/null 2>&1 & echo started > started",
        verify: "test -e started",
        timeout_ms: 60_000,
        status: "passed",
        failure: "",
        limit: Duration::from_secs(10),
    },
    Hard {
        name: "deletes-its-workspace",
        run: "rm -rf \"$SPHYNX_WORKSPACE\"/* \"$SPHYNX_WORKSPACE\"; true",
        verify: "test -z \"$(ls -A)\"",
        timeout_ms: 60_000,
        status: "passed",
        failure: "",
        limit: Duration::from_secs(10),
    },
    Hard {
        name: "fork-bomb",
        run: "echo started > started; bomb() { bomb | bomb & }; bomb; sleep 1",
        verify: "test -e started",
        timeout_ms: 20_000,
        status: "passed",
        failure: "",
        limit: Duration::from_secs(60),
    },
    Hard {
        name: "nothing-but-noise",
        run: "printf '{\"_tag\":\"Message\"\\n\\0\\xff\\xfe\\r\\n{\"_tag\":\"Unknown\"}\\n{\"_tag\":\"Finished\",\"reason\":\"done\"'; exit 3",
        verify: "true",
        timeout_ms: 60_000,
        status: "passed",
        failure: "",
        limit: Duration::from_secs(10),
    },
    Hard {
        name: "says-it-failed",
        run: "echo '{\"_tag\":\"Finished\",\"reason\":\"failed: no model\"}'",
        verify: "true",
        timeout_ms: 60_000,
        status: "void",
        failure: "no model",
        limit: Duration::from_secs(10),
    },
    Hard {
        name: "pipeline-check",
        run: "true",
        verify: "false | cat",
        timeout_ms: 60_000,
        status: "failed",
        failure: "",
        limit: Duration::from_secs(10),
    },
];

fn batch(hard: &Hard, sandbox: &str) -> Value {
    let mut batch = suite::command_batch(1, 1, sandbox, hard.run, hard.verify);
    batch["cases"][0]["id"] = json!(hard.name);
    batch["cases"][0]["timeoutMs"] = json!(hard.timeout_ms);
    batch
}

async fn every_hard_case(sandbox: &str) {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::new(folder.path());
    server.executor = ["--slots", "2", "--enable-process-sandbox", "--sandbox-pids", "200"]
        .map(str::to_owned)
        .into();
    let (mounts_before, groups_before) = (mounts(), groups());
    let mut process = server.serve();
    let api = server.ready().await;
    for hard in HARD {
        let began = Instant::now();
        let id = api.start(&batch(hard, sandbox)).await;
        let ended = api.ended(&id, hard.limit).await;
        let trial = suite::trials(&ended)[0];
        println!("{sandbox} {}: {} in {:?}", hard.name, trial["status"], began.elapsed());
        assert_eq!(trial["status"], hard.status, "{}: {trial:.2000}", hard.name);
        let failure = trial["failure"].as_str().unwrap_or_default();
        assert!(
            failure.contains(hard.failure) && failure.is_empty() == hard.failure.is_empty(),
            "{}: {failure:?}",
            hard.name
        );
        if hard.name == "much-output" {
            assert_eq!(
                trial["trajectory"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .filter(|entry| entry["_tag"] == "message")
                    .count(),
                1
            );
        }
    }
    // The executor's own process and its helpers carry the folder too, so it ends first.
    evalgrid_tests::eventually("every sandbox's folder is gone", Duration::from_secs(30), || async {
        let work = server.data();
        let left = std::process::Command::new("find")
            .arg(work)
            .args(["-name", "trial_*"])
            .output()
            .unwrap()
            .stdout;
        left.is_empty().then_some(())
    })
    .await;
    assert_eq!(process.terminate(Duration::from_secs(20)), 0);
    evalgrid_tests::eventually("no process is left", Duration::from_secs(10), || async {
        processes(folder.path()).is_empty().then_some(())
    })
    .await;
    let new: Vec<String> = groups().into_iter().filter(|group| !groups_before.contains(group)).collect();
    // Other tests run beside this one; only what stays is a leak.
    evalgrid_tests::eventually("no control group is left", Duration::from_secs(10), || async {
        let left = groups();
        new.iter().all(|group| !left.contains(group)).then_some(())
    })
    .await;
    assert!(mounts() <= mounts_before, "no mount is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn in_bubblewrap() {
    every_hard_case("bubblewrap").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn in_plain_processes() {
    every_hard_case("process").await;
}
