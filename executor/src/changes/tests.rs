//! Workspaces before and after, in every way that we could think of.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::Path,
};

use evalgrid_domain::{
    changes::{ChangeKind, FileChange},
    redact::Redactor,
    request::DiffRules,
};

use super::*;

struct Place(tempfile::TempDir, Arc<ChangeFilter>);

impl Place {
    fn new(rules: Option<&DiffRules>) -> Self {
        let place = Self(tempfile::tempdir().unwrap(), ChangeFilter::new(rules));
        fs::create_dir(place.workspace()).unwrap();
        place
    }

    fn workspace(&self) -> PathBuf {
        self.0.path().join("workspace")
    }

    fn before(&self, turn: u32) {
        let later = Instant::now() + SCAN_TIME;
        base::make(self.0.path(), turn, &self.1, now_ms() as i64 * 1_000_000, later).unwrap();
    }

    fn after(&self, turn: u32) -> TurnChanges {
        let redactor = Redactor::new(["my-secret-value", "first line\nsecond line"]);
        compare::compare(self.0.path(), turn, &self.1, &redactor, Instant::now() + SCAN_TIME).unwrap()
    }
}

fn put(workspace: &Path, path: &str, content: impl AsRef<[u8]>) {
    let path = workspace.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

fn summary(change: &FileChange) -> String {
    let from = change.from.as_ref().map(|from| format!(" from {from}")).unwrap_or_default();
    let diff = change.diff.as_ref().filter(|diff| diff.len() < 1_000);
    let diff = diff.map(|diff| format!(" {diff:?}")).unwrap_or_default();
    format!("{} {}{from} {}{diff}", change.kind.name(), change.path, change.content.name())
}

/// A turn that does `agent` to a workspace that `setup` has made.
fn check(setup: impl FnOnce(&Path), agent: impl FnOnce(&Path), expected: &[&str], reason: Option<&str>) {
    let place = Place::new(None);
    setup(&place.workspace());
    place.before(1);
    agent(&place.workspace());
    let turn = place.after(1);
    assert_eq!(turn.changes.iter().map(summary).collect::<Vec<_>>(), expected);
    match reason {
        None => assert_eq!(turn.coverage, Channel::Complete),
        Some(part) => assert!(
            matches!(&turn.coverage, Channel::Partial { reason } if reason.contains(part)),
            "{:?}",
            turn.coverage
        ),
    }
}

#[test]
fn what_a_turn_has_changed() {
    let nothing = |_: &Path| {};
    check(nothing, nothing, &[], None);
    check(|w| put(w, "a", "1\n"), nothing, &[], None);
    check(
        |w| ["kept", "changed", "gone"].iter().for_each(|name| put(w, name, "1\n2\n")),
        |w| {
            put(w, "changed", "1\n3\n");
            fs::remove_file(w.join("gone")).unwrap();
            put(w, "deep/er/new", "n");
        },
        &[
            r#"modified changed text "@@ -1,2 +1,2 @@\n 1\n-2\n+3\n""#,
            r#"added deep/er/new text "@@ -0,0 +1 @@\n+n\n\\ No newline at end of file\n""#,
            r#"deleted gone text "@@ -1,2 +0,0 @@\n-1\n-2\n""#,
        ],
        None,
    );
    // In the same tick, with the same size: no time tells.
    check(
        |w| put(w, "a", "1"),
        |w| put(w, "a", "2"),
        &[r#"modified a text "@@ -1 +1 @@\n-1\n\\ No newline at end of file\n+2\n\\ No newline at end of file\n""#],
        None,
    );
    check(|w| put(w, "touched", "1"), |w| put(w, "touched", "1"), &[], None);
    check(
        |w| {
            put(w, "old", "content");
            put(w, "empty", "");
        },
        |w| {
            fs::rename(w.join("old"), w.join("new")).unwrap();
            fs::rename(w.join("empty"), w.join("void")).unwrap();
        },
        &["deleted empty text \"\"", "renamed new from old same", "added void text \"\""],
        None,
    );
    check(
        |w| put(w, "a", "x"),
        |w| fs::set_permissions(w.join("a"), fs::Permissions::from_mode(0o755)).unwrap(),
        &["modified a same"],
        None,
    );
    check(
        |w| put(w, "bin", b"\0\x01"),
        |w| {
            put(w, "bin", b"\0\x02");
            put(w, "latin", b"caf\xe9");
        },
        &["modified bin binary", "added latin binary"],
        None,
    );
    check(
        |w| {
            symlink("a", w.join("link")).unwrap();
            put(w, "file", "x");
        },
        |w| {
            fs::remove_file(w.join("link")).unwrap();
            symlink("/etc/passwd", w.join("link")).unwrap();
            fs::remove_file(w.join("file")).unwrap();
            symlink("nowhere", w.join("file")).unwrap();
            rustix::fs::mkfifoat(rustix::fs::CWD, w.join("pipe"), 0o600.into()).unwrap();
        },
        &[
            r#"modified file text "@@ -1 +0,0 @@\n-x\n\\ No newline at end of file\n""#,
            "modified link none",
            "added pipe none",
        ],
        None,
    );
    // A symlink is never a way out, not even in the place of a folder.
    check(
        |w| put(w, "folder/a", "x\n"),
        |w| {
            fs::remove_dir_all(w.join("folder")).unwrap();
            symlink("/etc", w.join("folder")).unwrap();
        },
        &["added folder none", r#"deleted folder/a text "@@ -1 +0,0 @@\n-x\n""#],
        None,
    );
    check(
        |w| put(w, "a", "x\n"),
        |w| {
            fs::remove_dir_all(w).unwrap();
            symlink("/etc", w).unwrap();
        },
        &[r#"deleted a text "@@ -1 +0,0 @@\n-x\n""#],
        Some("the workspace is no folder"),
    );
    check(
        |w| put(w, "node_modules/a", "x"),
        |w| {
            put(w, "node_modules/a", "y");
            put(w, ".git/config", "y");
            put(w, ".sphynx/api/calls.jsonl", "y");
        },
        &[],
        None,
    );
    check(
        nothing,
        |w| {
            put(w, "vendor/x/.git/HEAD", "ref");
            put(w, "vendor/x/a", "y\n");
        },
        &[r#"added vendor/x/a text "@@ -0,0 +1 @@\n+y\n""#],
        Some("vendor/x is a repository of its own"),
    );
    check(
        |w| put(w, "large", vec![b'a'; 2 << 20]),
        |w| put(w, "large", vec![b'b'; 2 << 20]),
        &["modified large tooLarge"],
        Some("1 large files have another time and the same size"),
    );
    check(nothing, |w| put(w, "long", "line\n".repeat(100_000)), &["added long cut"], None);
}

#[test]
fn secrets_of_several_lines_leave_no_line_in_a_diff() {
    let place = Place::new(None);
    let w = place.workspace();
    let key = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC\n-----END PRIVATE KEY-----\n";
    put(&w, "key", key);
    place.before(1);
    put(&w, "key", key.replace("MIIE", "MIIF"));
    put(&w, "two", "a\nfirst line\nsecond line\nb\n");
    put(&w, "my-secret-value", "x");
    let turn = place.after(1);
    let text = serde_json::to_string(&turn).unwrap();
    for secret in ["MIIE", "MIIF", "first line", "second line", "my-secret-value"] {
        assert!(!text.contains(secret), "{secret} in {text}");
    }
    assert_eq!(turn.changes.len(), 3);
}

#[test]
fn each_turn_has_its_own() {
    let place = Place::new(None);
    let w = place.workspace();
    place.before(1);
    assert!(!base::exists(place.0.path(), 1), "an empty workspace costs no file");
    put(&w, "a", "1\n");
    assert_eq!(place.after(1).changes.len(), 1);
    // The person's, between the turns.
    put(&w, "theirs", "x\n");
    place.before(2);
    put(&w, "a", "2\n");
    let turn = place.after(2);
    assert_eq!(
        turn.changes.iter().map(summary).collect::<Vec<_>>(),
        [r#"modified a text "@@ -1 +1 @@\n-1\n+2\n""#]
    );
    // As after a crash: what lies on the disk is all that is needed, and a second look says the same.
    assert_eq!(place.after(2), turn);
    fs::remove_dir_all(&w).unwrap();
    fs::create_dir(&w).unwrap();
    place.before(3);
    assert_eq!(place.after(3).changes, []);
    let kinds: Vec<_> = turn.changes.iter().map(|change| change.kind).collect();
    assert_eq!(kinds, [ChangeKind::Modified]);
    assert!(compare::compare(place.0.path(), 2, &place.1, &Redactor::default(), Instant::now() + SCAN_TIME).is_ok());
}

/// Root reads everything, so a thread of a test that runs as root becomes somebody else.
fn as_somebody(test: impl FnOnce() + Send + 'static) {
    let thread = std::thread::spawn(|| {
        if rustix::process::geteuid().is_root() {
            rustix::thread::set_thread_uid(rustix::fs::Uid::from_raw(65_534)).unwrap();
        }
        test();
    });
    thread.join().unwrap();
}

#[test]
fn what_cannot_be_read_is_named_and_never_taken_for_gone() {
    as_somebody(|| {
        let place = Place::new(None);
        let w = place.workspace();
        put(&w, "shut/a", "1");
        put(&w, "b", "1");
        place.before(1);
        for path in ["shut", "b"] {
            fs::set_permissions(w.join(path), fs::Permissions::from_mode(0o000)).unwrap();
        }
        let turn = place.after(1);
        assert_eq!(turn.changes.iter().map(summary).collect::<Vec<_>>(), ["modified b same"]);
        let reason = turn.coverage.reason().unwrap();
        assert!(
            reason.contains("shut could not be read") && reason.contains("b could not be read"),
            "{reason}"
        );
        // And the other way round: what shows itself only afterwards is not new.
        place.before(2);
        fs::set_permissions(w.join("shut"), fs::Permissions::from_mode(0o755)).unwrap();
        let turn = place.after(2);
        assert_eq!(turn.changes, []);
        assert!(turn.coverage.reason().unwrap().contains("shut could not be read"));
    });
}

#[test]
fn many_files_end() {
    let place = Place::new(None);
    let w = place.workspace();
    place.before(1);
    for index in 0..10_050 {
        put(&w, &format!("f{}/{index:05}", index % 10), "");
    }
    let mut deep = w.join("deep");
    for _ in 0..100 {
        deep.push("d");
    }
    fs::create_dir_all(&deep).unwrap();
    let turn = place.after(1);
    assert_eq!((turn.changes.len(), turn.omitted), (10_000, 50));
    let reason = turn.coverage.reason().unwrap();
    assert!(reason.contains("50 changes beyond") && reason.contains("lies too deep"), "{reason}");
}

/// Where nothing has changed nothing is found, however often and however much is looked at. It prints what looking costs; the figures of
/// docs/figures.md are those of `EVALGRID_LONG=1 cargo test --release -p evalgrid-executor --lib -- --nocapture looking_finds_nothing`.
#[test]
fn looking_finds_nothing_where_nothing_has_changed() {
    let part = if std::env::var_os("EVALGRID_LONG").is_some() { 1 } else { 100 };
    fn cpu_us() -> u64 {
        let usage = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        usage.tv_sec as u64 * 1_000_000 + usage.tv_nsec as u64 / 1_000
    }
    fn check(what: &str, rounds: u64, fill: impl Fn(&Path)) {
        let place = Place::new(None);
        fill(&place.workspace());
        let (begin, clock) = (cpu_us(), Instant::now());
        for turn in 1..=rounds as u32 {
            place.before(turn);
            assert_eq!(place.after(turn).changes, []);
        }
        let wall = clock.elapsed().as_micros() as u64 / rounds;
        println!("{what}: {} µs of CPU per turn, {wall} µs in all", (cpu_us() - begin) / rounds);
    }
    check("an empty workspace", 1_000 / part, |_| {});
    check("10 small files", 200 / part, |w| {
        (0..10).for_each(|index| put(w, &format!("{index}"), "text\n"))
    });
    check("5,000 files of 4 KiB", 5, |w| {
        (0..5_000 / part).for_each(|index| put(w, &format!("{}/{index}", index % 50), "x".repeat(4_096)));
    });
    check("200,000 files in node_modules", 5, |w| {
        (0..200_000 / part).for_each(|index| put(w, &format!("node_modules/{}/{index}", index % 500), ""));
    });
    check("200,000 empty files that count", 1, |w| {
        (0..200_000 / part).for_each(|index| put(w, &format!("src/{}/{index}", index % 500), ""));
    });
}
