//! Collection of objects by the real binary: real agents, evidence that is big enough to be objects, and files that look old.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::{Duration, SystemTime},
};

use evalgrid_tests::{
    server::{Server, binary},
    suite,
};

const PATIENCE: Duration = Duration::from_secs(120);
const OLD: Duration = Duration::from_secs(8 * 24 * 3600);

fn files(folder: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().map(Result::unwrap) {
        match entry.path().is_dir() {
            true => found.extend(files(&entry.path())),
            false => drop(found.insert(entry.path())),
        }
    }
    found
}

fn age(file: &Path) {
    let opened = std::fs::File::options().write(true).open(file).unwrap();
    opened.set_modified(SystemTime::now() - OLD).unwrap();
}

fn collect(server: &Server, more: &[&str]) -> Output {
    let scheduler = format!("http://{}", server.grpc);
    let data = server.data();
    let mut arguments = vec!["objects", "collect", "--scheduler", &scheduler, "--data", data.to_str().unwrap()];
    arguments.extend(more);
    Command::new(binary()).args(arguments).output().unwrap()
}

fn said(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[tokio::test(flavor = "multi_thread")]
async fn only_what_nobody_needs_is_collected() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::new(folder.path());
    server.executor = vec!["--enable-process-sandbox".to_owned()];
    let mut process = server.serve();
    let api = server.ready().await;
    // Each line is an event of the journal: more than what travels inline.
    let chatty = "i=0; while [ $i -lt 1500 ]; do echo \"a line of output, number $i\"; i=$((i+1)); done";
    let mut batches = Vec::new();
    for verify in ["true", "false"] {
        let id = api.start(&suite::command_batch(1, 2, "process", chatty, verify)).await;
        batches.push(api.ended(&id, PATIENCE).await);
    }
    // Stopped and started again, so that all that ended has left memory.
    assert_eq!(process.terminate(Duration::from_secs(20)), 0);
    let _process = server.serve();
    let api = server.ready().await;

    let objects = server.data().join("objects");
    let kept = files(&objects);
    assert!(kept.len() > 4, "requests, manifests, and evidence: {kept:?}");
    let some = kept.first().unwrap();
    let place = some.parent().unwrap().parent().unwrap().join("00");
    std::fs::create_dir_all(&place).unwrap();
    let orphan = place.join(format!("00{}", "ab".repeat(31)));
    let young = place.join(format!("00{}", "cd".repeat(31)));
    std::fs::write(&orphan, "0 nobody knows me").unwrap();
    kept.iter().chain([&orphan]).for_each(|file| age(file));
    std::fs::write(&young, "0 nobody knows me yet").unwrap();

    let (code, out, err) = said(&collect(&server, &["--dry-run"]));
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(out.contains("default: ") && out.contains("would be removed"), "{out}");
    assert!(orphan.exists(), "a dry run removes nothing");
    let (code, out, err) = said(&collect(&server, &["--org", "nobody"]));
    assert!(code == Some(1) && err.contains("there is none of this name"), "{out}{err}");
    let (code, out, err) = said(&collect(&server, &["--org", "default"]));
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(err.contains("default: "), "progress is told: {err}");
    assert!(!orphan.exists() && young.exists());
    // What only recorded steps had named went with their trials; every answer is as before.
    for before in &batches {
        assert_eq!(api.batch(before["id"].as_str().unwrap()).await.unwrap(), *before);
        assert!(suite::trials(before).iter().all(|trial| trial["status"] != "void"), "{before}");
    }
    let (code, out, err) = said(&collect(&server, &[]));
    assert!(code == Some(0) && out.contains("default: "), "{out}{err}");
    assert!(out.contains(" 0 of them removed"), "once is enough: {out}");

    // A result that cannot be read: the rest stays, and the command fails and says what to do.
    std::fs::write(&orphan, "0 nobody knows me").unwrap();
    let left = files(&objects);
    for file in left.iter().filter(|file| **file != young) {
        age(file);
    }
    for file in left.iter().filter(|file| **file != young && **file != orphan) {
        let whole = std::fs::read(file).unwrap();
        std::fs::write(file, &whole[..whole.len() / 2]).unwrap();
        age(file);
        let (code, out, err) = said(&collect(&server, &[]));
        assert!(code == Some(1) && err.contains("damaged") && err.contains("restore"), "{out}{err}");
        assert!(orphan.exists());
        std::fs::write(file, whole).unwrap();
    }
    assert_eq!(said(&collect(&server, &[])).0, Some(0));
    assert!(!orphan.exists());
}
