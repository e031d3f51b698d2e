//! Start requests: what decodes, what does not and where, and what is refused.
#![allow(clippy::unwrap_used)]

use evalgrid_domain::{
    decode::{Issue, IssueTag, format_path},
    limits::MAX_ISSUES,
    request::*,
};
use serde_json::{Value, json};

/// A request that uses every field of the contract.
fn full() -> Value {
    json!({
        "suite": {"id": "suite-1", "name": "Suite", "prompt": "Do {{ what }}", "source": {"kind": "repo", "url": "https://h/r", "ref": null}},
        "trials": 2,
        "checksIn": true,
        "cases": [
            {
                "id": "case-1", "name": "Case", "tags": ["a", "b"], "variables": {"what": "it"}, "timeoutMs": 60000, "maxTurns": 3,
                "cache": {"key": "k", "path": "node_modules"},
                "diff": {"ignore": ["*.log"], "include": ["node_modules/x/**"]},
                "source": {"kind": "files", "files": {"a/b.txt": "x"}},
                "prepare": {"name": "p", "source": "export {}"},
                "user": {"kind": "simulated", "goal": "g", "prompt": "p", "harness": "claude", "model": "m"},
                "validator": {
                    "kind": "judged", "name": "v", "capture": false,
                    "checks": [{"name": "c", "source": "s", "manifest": [{"index": 0, "name": "zero"}, {"index": 1, "name": "one"}]}],
                    "judges": [
                        {"kind": "judge", "name": "j1", "model": "m", "prompt": "p", "provider": "openai", "choices": {"yes": 1, "no": 0},
                         "expected": "e", "files": ["f"], "threshold": 0.5, "timeoutMs": 1000},
                        {"kind": "judge", "name": "j2", "model": "m", "prompt": "p", "harness": "codex", "choices": {"yes": 1}},
                    ],
                    "sourceFiles": [{"path": "a/b.ts", "content": "c"}],
                },
            },
            {"id": "case-2", "verify": "true", "user": {"kind": "scripted", "replies": ["go on", "thanks"]}},
            {"id": "case-3", "user": {"kind": "simulated", "goal": "g", "prompt": "p"},
             "validator": {"name": "code", "source": "s", "capture": true, "manifest": [{"index": 4, "name": ""}], "sourceFiles": []}},
        ],
        "variants": [
            {"harness": "command", "model": "m", "sandbox": "e2b", "credentials": {"harnessRef": "r", "sandboxRef": "s"},
             "profile": {"name": "p-1", "files": {"home/a": "x", "workspace/b/c": "y"}, "env": {"A_1": "v"}, "install": "i", "run": "r",
                         "systemPrompt": "s", "variables": ["TOKEN"]}},
            {"harness": "claude", "model": "m"},
        ],
    })
}

fn minimal() -> Value {
    json!({"suite": {"id": "s", "prompt": "p"}, "trials": 1, "cases": [{"id": "c", "verify": "true"}], "variants": [{"harness": "claude", "model": "m"}]})
}

fn everything() -> Support {
    use Feature::*;
    Support {
        harnesses: Harness::ALL.iter().map(|(_, harness)| (*harness, "1".to_owned())).collect(),
        sandboxes: [(Sandbox::E2b, Sandbox::Bubblewrap), (Sandbox::Bubblewrap, Sandbox::Bubblewrap)].into(),
        features: [
            CodeValidator,
            ModelJudge,
            HarnessJudge,
            Prepare,
            Cache,
            ScriptedUser,
            SimulatedUser,
            HarnessUser,
            ProfileVariables,
            CredentialRefs,
            ApiMock,
        ]
        .into(),
    }
}

/// Replaces, adds (for a pointer to a new key) or removes (`None`) the value at a JSON pointer.
fn change(mut request: Value, pointer: &str, value: Option<Value>) -> Value {
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    let key = key.replace("~1", "/");
    match (request.pointer_mut(parent).unwrap(), value) {
        (Value::Object(map), Some(value)) => drop(map.insert(key, value)),
        (Value::Object(map), None) => drop(map.remove(&key).unwrap()),
        (Value::Array(values), Some(value)) => values[key.parse::<usize>().unwrap()] = value,
        _ => panic!("nothing at {pointer}"),
    }
    request
}

#[test]
fn decoded_form_round_trips() {
    for request in [full(), minimal()] {
        let decoded = decode_start(&request).unwrap();
        let stored = serde_json::to_value(&decoded).unwrap();
        assert_eq!(serde_json::from_value::<SuiteBatchRequest>(stored.clone()).unwrap(), decoded);
        // What is stored is itself a valid request that means the same.
        assert_eq!(decode_start(&stored).unwrap(), decoded);
        check_start(&decoded, &everything()).unwrap();
    }
}

#[test]
fn defaults() {
    let decoded = decode_start(&minimal()).unwrap();
    let expected = json!({
        "cases": [{"id": "c", "maxTurns": null, "name": "c", "prepare": null, "tags": [], "timeoutMs": null, "user": null, "validator": null,
                   "variables": {}, "verify": "true"}],
        "checksIn": false,
        "suite": {"id": "s", "name": "s", "prompt": "p", "source": null},
        "trials": 1,
        "variants": [{"harness": "claude", "model": "m", "sandbox": "e2b"}],
    });
    assert_eq!(serde_json::to_value(&decoded).unwrap(), expected);
    assert_eq!((decoded.cases[0].turn_limit(), decoded.cases[0].time_limit_ms()), (8, 900_000));
    let full = decode_start(&full()).unwrap();
    let Some(Validator::Judged(validator)) = &full.cases[0].validator else {
        panic!()
    };
    assert_eq!((validator.judges[1].threshold.0, validator.judges[1].timeout_ms), (1.0, 120_000));
    assert_eq!(full.cases[0].user_model("d").as_deref(), Some("claude/m"));
    assert_eq!(full.cases[1].user_model("d"), None);
    assert_eq!(full.cases[2].user_model("d").as_deref(), Some("d"));
    assert_eq!((full.run_at(0), full.run_at(3), full.run_at(6)), (Some((0, 0)), Some((1, 1)), None));
}

#[test]
fn effective_sources() {
    let decoded = decode_start(&full()).unwrap();
    assert!(matches!(effective_source(&decoded, 0), Source::Files { .. }));
    assert!(matches!(effective_source(&decoded, 1), Source::Repo { .. }));
    let own = decode_start(&change(full(), "/cases/1/source", Some(json!({"kind": "empty"})))).unwrap();
    assert_eq!(effective_source(&own, 1), &Source::Empty);
    assert_eq!(effective_source(&decode_start(&minimal()).unwrap(), 0), &Source::Empty);
}

#[test]
fn what_judges_read_is_named_once() {
    let mut body = full();
    body["cases"][0]["validator"]["judges"][0]["files"] = json!(["b", "a", "b"]);
    body["cases"][0]["validator"]["judges"][1]["files"] = json!(["c", "a"]);
    let decoded = decode_start(&body).unwrap();
    let Some(Validator::Judged(judged)) = &decoded.cases[0].validator else {
        panic!("the case has judges")
    };
    assert_eq!(judged.judge_files(), ["b", "a", "c"]);
    assert!(judged.judges.iter().map(|judge| judge.by.evaluator()).eq(["openai", "codex"]));
    assert!(!judged.captures());
}

fn check_issue(request: &Value, tag: IssueTag, path: &str) {
    let issues = decode_start(request).map(|_| ()).unwrap_err();
    let found = issues.iter().any(|issue| issue.tag == tag && format_path(&issue.path) == path);
    assert!(found, "wanted {tag:?} at {path}, got {issues:?}");
    assert_eq!(issues.len(), 1, "{issues:?}");
}

#[test]
fn broken_fields() {
    use IssueTag::*;
    let long = |length: usize| Some(json!("x".repeat(length)));
    let nul = || Some(json!("a\0b"));
    for (pointer, value, tag, path) in [
        ("/suite/id", Some(json!("Suite")), Refinement, "suite.id"),
        ("/suite/id", Some(json!("a--b")), Refinement, "suite.id"),
        ("/suite/id", Some(json!("-a")), Refinement, "suite.id"),
        ("/suite/id", Some(json!("a\0")), Refinement, "suite.id"),
        ("/suite/id", long(101), Refinement, "suite.id"),
        ("/suite/prompt", None, Missing, "suite.prompt"),
        ("/suite/prompt", long(16_385), Refinement, "suite.prompt"),
        ("/suite/prompt", nul(), Refinement, "suite.prompt"),
        ("/suite/prompt", Some(json!("😀".repeat(8_193))), Refinement, "suite.prompt"),
        ("/suite/name", Some(json!("")), Refinement, "suite.name"),
        ("/suite/name", Some(Value::Null), Type, "suite.name"),
        ("/suite/source/url", Some(json!("")), Refinement, "suite.source.url"),
        ("/suite/source/url", Some(json!("--upload-pack=x")), Refinement, "suite.source.url"),
        ("/suite/source/ref", None, Missing, "suite.source.ref"),
        ("/suite/source/ref", Some(json!("-x")), Refinement, "suite.source.ref"),
        ("/suite/source/kind", Some(json!("git")), Type, "suite.source.kind"),
        ("/suite/source", Some(json!([])), Type, "suite.source"),
        ("/suite", Some(Value::Null), Type, "suite"),
        ("/trials", Some(json!(0)), Refinement, "trials"),
        ("/trials", Some(json!(11)), Refinement, "trials"),
        ("/trials", Some(json!(1.5)), Refinement, "trials"),
        ("/trials", Some(json!(1e300)), Refinement, "trials"),
        ("/trials", Some(json!("1")), Type, "trials"),
        ("/trials", None, Missing, "trials"),
        ("/checksIn", Some(json!(1)), Type, "checksIn"),
        ("/cases", Some(json!([])), Refinement, "cases"),
        ("/cases", Some(json!({})), Type, "cases"),
        ("/cases/0", Some(json!("x")), Type, "cases[0]"),
        ("/cases/0/name", long(201), Refinement, "cases[0].name"),
        ("/cases/0/name", nul(), Refinement, "cases[0].name"),
        ("/cases/0/tags", Some(json!(vec!["t"; 13])), Refinement, "cases[0].tags"),
        ("/cases/0/tags/1", Some(json!("")), Refinement, "cases[0].tags[1]"),
        ("/cases/0/tags", Some(Value::Null), Type, "cases[0].tags"),
        ("/cases/0/variables/what", long(2_049), Refinement, "cases[0].variables.what"),
        ("/cases/0/variables/a b", Some(json!(1)), Type, "cases[0].variables[\"a b\"]"),
        ("/cases/0/timeoutMs", Some(json!(999)), Refinement, "cases[0].timeoutMs"),
        ("/cases/0/timeoutMs", Some(json!(3_600_001)), Refinement, "cases[0].timeoutMs"),
        ("/cases/0/maxTurns", Some(json!(51)), Refinement, "cases[0].maxTurns"),
        ("/cases/0/cache", Some(Value::Null), Type, "cases[0].cache"),
        ("/cases/0/cache/key", Some(json!("")), Refinement, "cases[0].cache.key"),
        ("/cases/0/cache/path", Some(json!("/abs")), Refinement, "cases[0].cache.path"),
        ("/cases/0/cache/path", Some(json!("a/../b")), Refinement, "cases[0].cache.path"),
        ("/cases/0/diff", Some(json!([])), Type, "cases[0].diff"),
        ("/cases/0/diff/ignore/0", Some(json!("")), Refinement, "cases[0].diff.ignore[0]"),
        (
            "/cases/0/diff/ignore/0",
            Some(json!("[z-a]")),
            Refinement,
            "cases[0].diff.ignore[0]",
        ),
        (
            "/cases/0/diff/include/0",
            Some(json!("a\nb")),
            Refinement,
            "cases[0].diff.include[0]",
        ),
        (
            "/cases/0/diff/include",
            Some(json!(vec!["x"; 257])),
            Refinement,
            "cases[0].diff.include",
        ),
        ("/cases/0/cache/path", Some(json!("./.")), Refinement, "cases[0].cache.path"),
        ("/cases/0/cache/path", Some(json!("./.sphynx/x")), Refinement, "cases[0].cache.path"),
        ("/cases/0/source", Some(Value::Null), Type, "cases[0].source"),
        (
            "/cases/0/source/files/..~1x",
            Some(json!("")),
            Refinement,
            "cases[0].source.files[\"../x\"]",
        ),
        (
            "/cases/0/source/files/~1etc",
            Some(json!("")),
            Refinement,
            "cases[0].source.files[\"/etc\"]",
        ),
        (
            "/cases/0/source/files/a~1b.txt~1c",
            Some(json!("")),
            Refinement,
            "cases[0].source.files[\"a/b.txt/c\"]",
        ),
        (
            "/variants/0/profile/files/home~1a~1b~1c",
            Some(json!("")),
            Refinement,
            "variants[0].profile.files[\"home/a/b/c\"]",
        ),
        ("/cases/0/prepare/name", Some(json!("")), Refinement, "cases[0].prepare.name"),
        ("/cases/0/prepare/source", Some(json!("")), Refinement, "cases[0].prepare.source"),
        ("/cases/0/user/kind", Some(json!("human")), Type, "cases[0].user.kind"),
        ("/cases/0/user/goal", long(2_001), Refinement, "cases[0].user.goal"),
        ("/cases/0/user/model", None, Missing, "cases[0].user.model"),
        ("/cases/0/user/harness", None, Missing, "cases[0].user.harness"),
        ("/cases/0/user/harness", Some(json!("command")), Type, "cases[0].user.harness"),
        ("/cases/1/user/replies", Some(json!([])), Refinement, "cases[1].user.replies"),
        ("/cases/1/user/replies/1", Some(json!("")), Refinement, "cases[1].user.replies[1]"),
        ("/cases/1/user/replies/1", nul(), Refinement, "cases[1].user.replies[1]"),
        ("/cases/1/verify", long(8_193), Refinement, "cases[1].verify"),
        ("/cases/1/verify", nul(), Refinement, "cases[1].verify"),
        ("/cases/0/validator/kind", Some(json!("code")), Type, "cases[0].validator.kind"),
        ("/cases/0/validator/kind", None, Missing, "cases[0].validator.kind"),
        ("/cases/2/validator/source", None, Missing, "cases[2].validator.source"),
        (
            "/cases/0/validator/judges",
            Some(json!([])),
            Refinement,
            "cases[0].validator.judges",
        ),
        (
            "/cases/0/validator/judges/1/name",
            Some(json!("j1")),
            Refinement,
            "cases[0].validator.judges[1].name",
        ),
        (
            "/cases/0/validator/judges/1/provider",
            Some(json!("openai")),
            Forbidden,
            "cases[0].validator.judges[1].harness",
        ),
        (
            "/cases/0/validator/judges/1/harness",
            None,
            Missing,
            "cases[0].validator.judges[1].provider",
        ),
        (
            "/cases/0/validator/judges/0/provider",
            Some(json!("other")),
            Type,
            "cases[0].validator.judges[0].provider",
        ),
        (
            "/cases/0/validator/judges/0/choices/yes",
            Some(json!(1.1)),
            Refinement,
            "cases[0].validator.judges[0].choices.yes",
        ),
        (
            "/cases/0/validator/judges/0/choices",
            Some(json!({})),
            Refinement,
            "cases[0].validator.judges[0].choices",
        ),
        (
            "/cases/0/validator/judges/0/files",
            Some(json!([])),
            Refinement,
            "cases[0].validator.judges[0].files",
        ),
        (
            "/cases/0/validator/judges/0/files",
            Some(json!(["out/../../secret"])),
            Refinement,
            "cases[0].validator.judges[0].files[0]",
        ),
        (
            "/cases/0/validator/judges/0/files",
            Some(json!(["/etc/passwd"])),
            Refinement,
            "cases[0].validator.judges[0].files[0]",
        ),
        (
            "/cases/0/validator/judges/0/timeoutMs",
            Some(json!(300_001)),
            Refinement,
            "cases[0].validator.judges[0].timeoutMs",
        ),
        (
            "/cases/0/validator/checks/0/manifest/1/index",
            Some(json!(0)),
            Refinement,
            "cases[0].validator.checks[0].manifest[1].index",
        ),
        (
            "/cases/0/validator/checks/0/manifest/1/index",
            Some(json!(-1)),
            Refinement,
            "cases[0].validator.checks[0].manifest[1].index",
        ),
        (
            "/cases/0/validator/sourceFiles/0/path",
            Some(json!("a/./b")),
            Refinement,
            "cases[0].validator.sourceFiles[0].path",
        ),
        (
            "/cases/0/validator/sourceFiles/0/path",
            Some(json!("c:/b")),
            Refinement,
            "cases[0].validator.sourceFiles[0].path",
        ),
        (
            "/cases/2/validator/manifest",
            Some(json!([])),
            Refinement,
            "cases[2].validator.manifest",
        ),
        ("/cases/2/validator/source", None, Missing, "cases[2].validator.source"),
        ("/variants/0/harness", Some(json!("cline")), Type, "variants[0].harness"),
        ("/variants/0/model", Some(json!("")), Refinement, "variants[0].model"),
        ("/variants/0/model", nul(), Refinement, "variants[0].model"),
        ("/variants/0/sandbox", Some(json!("moon")), Type, "variants[0].sandbox"),
        ("/variants/0/sandbox", Some(Value::Null), Type, "variants[0].sandbox"),
        (
            "/variants/0/credentials/harnessRef",
            Some(json!(1)),
            Type,
            "variants[0].credentials.harnessRef",
        ),
        ("/variants/0/profile/name", Some(json!("P")), Refinement, "variants[0].profile.name"),
        ("/variants/0/profile/name", long(65), Refinement, "variants[0].profile.name"),
        ("/variants/0/profile/files", None, Missing, "variants[0].profile.files"),
        (
            "/variants/0/profile/files/home~1a",
            long(96_001),
            Refinement,
            "variants[0].profile.files[\"home/a\"]",
        ),
        (
            "/variants/0/profile/files/etc~1a",
            Some(json!("")),
            Refinement,
            "variants[0].profile.files[\"etc/a\"]",
        ),
        (
            "/variants/0/profile/files/homes~1a",
            Some(json!("")),
            Refinement,
            "variants[0].profile.files[\"homes/a\"]",
        ),
        (
            "/variants/0/profile/files/home~1..~1a",
            Some(json!("")),
            Refinement,
            "variants[0].profile.files[\"home/../a\"]",
        ),
        (
            "/variants/0/profile/files/home~1a\0",
            Some(json!("")),
            Refinement,
            "variants[0].profile.files[\"home/a\\u0000\"]",
        ),
        (
            "/variants/0/profile/env/a",
            Some(json!("")),
            Refinement,
            "variants[0].profile.env.a",
        ),
        ("/variants/0/profile/env/A_1", nul(), Refinement, "variants[0].profile.env.A_1"),
        (
            "/variants/0/profile/env/A_1",
            long(200_000),
            Refinement,
            "variants[0].profile.env.A_1",
        ),
        ("/variants/0/profile/run", nul(), Refinement, "variants[0].profile.run"),
        ("/variants/0/profile/install", nul(), Refinement, "variants[0].profile.install"),
        (
            "/variants/0/profile/variables/0",
            Some(json!("SPHYNX_X")),
            Refinement,
            "variants[0].profile.variables[0]",
        ),
    ] {
        check_issue(&change(full(), pointer, value), tag, path);
    }
    for value in [json!(null), json!([]), json!("x"), json!(1)] {
        check_issue(&value, Type, "");
    }
}

#[test]
fn accepted_all_the_same() {
    for (pointer, value) in [
        ("/trials", json!(3.0)),
        ("/unknown", json!({"deep": [1]})),
        ("/cases/0/unknown", json!(1)),
        ("/suite/prompt", json!("")),
        ("/suite/prompt", json!("😀".repeat(8_192))),
        ("/suite/source", json!(null)),
        ("/cases/0/name", json!("")),
        ("/cases/0/timeoutMs", json!(null)),
        ("/cases/0/source/files/a~1.~1b", json!("")),
        ("/cases/0/source/files/a~1b.txt", json!("file with \u{0} in it")),
        ("/variants/0/profile/files/home~1a", json!("file with \u{0} in it")),
        ("/variants/0/profile/files/home~1..a", json!("")),
        ("/cases/1/verify", json!("")),
        ("/variants/1/sandbox", json!("bubblewrap")),
        ("/variants/1/harness", json!("bub")),
    ] {
        decode_start(&change(full(), pointer, Some(value))).unwrap_or_else(|issues| panic!("{pointer}: {issues:?}"));
    }
}

#[test]
fn issues_are_complete_and_bounded() {
    let issues = decode_start(&json!({"cases": [{"id": "A"}, {"tags": 1}], "trials": 99})).unwrap_err();
    let paths: Vec<_> = issues.iter().map(|issue| format_path(&issue.path)).collect();
    assert_eq!(
        paths,
        ["cases[0].id", "cases[1].id", "cases[1].tags", "suite", "trials", "variants"]
    );
    let files: serde_json::Map<_, _> = (0..200).map(|index| (format!("{}{index}", "k".repeat(10_000)), json!(1))).collect();
    let issues = decode_start(&change(full(), "/variants/0/profile/files", Some(files.into()))).unwrap_err();
    assert_eq!(issues.len(), MAX_ISSUES);
    assert!(serde_json::to_string(&issues).unwrap().len() < 50_000);
}

#[test]
fn issues_have_the_contracts_shape() {
    let issues: Vec<Issue> = decode_start(&change(full(), "/cases/1/user/replies/1", Some(json!(5)))).unwrap_err();
    let expected = json!([{"_tag": "Type", "path": ["cases", 1, "user", "replies", 1], "message": "Expected a string, got a number"}]);
    assert_eq!(serde_json::to_value(&issues).unwrap(), expected);
    assert_eq!(issues[0].to_string(), "cases[1].user.replies[1]: Expected a string, got a number");
}

fn check_refused(request: Value, support: &Support, expected: &str) {
    let refusal = check_start(&decode_start(&request).unwrap(), support).unwrap_err();
    assert!(refusal.message.contains(expected), "wanted {expected}, got {}", refusal.message);
    assert!(!refusal.retryable);
}

#[test]
fn refusals() {
    let cases = |count: usize| {
        json!(
            (0..count)
                .map(|index| json!({"id": format!("c{index}"), "verify": "true"}))
                .collect::<Vec<_>>()
        )
    };
    let many_files = |count: usize, size: usize| {
        let files: serde_json::Map<_, _> = (0..count).map(|index| (format!("home/{index}"), json!("x".repeat(size)))).collect();
        Some(Value::from(files))
    };
    let many_variables = |count: usize, size: usize| {
        let env: serde_json::Map<_, _> = (0..count).map(|index| (format!("A{index}"), json!("x".repeat(size)))).collect();
        Some(Value::from(env))
    };
    for (pointer, value, expected) in [
        ("/cases/0/verify", Some(json!("true")), "cases[0]: a case has either"),
        (
            "/variants/1/sandbox",
            Some(json!("local")),
            "variants[1].sandbox: \"local\" is only",
        ),
        (
            "/variants/0/profile/run",
            None,
            "variants[0].profile.run: the harness \"command\" needs",
        ),
        (
            "/variants/0/profile",
            None,
            "variants[0].profile.run: the harness \"command\" needs",
        ),
        (
            "/variants/0/harness",
            Some(json!("pi")),
            "variants[0].profile.run: only the harness \"command\"",
        ),
        (
            "/variants/0/profile/files",
            many_files(257, 1),
            "variants[0].profile.files: a profile holds at most 256 files, and this has 257",
        ),
        (
            "/variants/0/profile/files",
            many_files(21, 96_000),
            "at most 2000000 characters together, and these hold 2016000",
        ),
        (
            "/variants/0/profile/variables",
            Some(json!(["B", "A_1"])),
            "variants[0].profile.variables[1]: A_1 is in both",
        ),
        (
            "/variants/0/profile/variables",
            Some(json!(["E2B_API_KEY"])),
            "variants[0].profile.variables[0]: E2B_API_KEY belongs",
        ),
        (
            "/cases/1/id",
            Some(json!("case-1")),
            "cases[1].id: \"case-1\" is the id of another case",
        ),
        (
            "/cases",
            Some(cases(51)),
            "at most 100 trials, and this one asks for 204 (51 cases x 2 variants x 2 trials)",
        ),
        (
            "/variants/0/profile/env",
            many_variables(12, 100_000),
            "variants[0].profile.env: the environment of a profile holds at most 1048576",
        ),
        ("/suite/prompt", Some(json!("{{what}}".repeat(2_000))), ""),
    ] {
        let request = change(full(), pointer, value);
        let request = if expected.is_empty() {
            change(request, "/cases/0/variables/what", Some(json!("w".repeat(2_048))))
        } else {
            request
        };
        check_refused(
            request,
            &everything(),
            if expected.is_empty() {
                "cases[0]: the prompt with its variables"
            } else {
                expected
            },
        );
    }
    let twice = change(
        full(),
        "/variants",
        Some(json!([{"harness": "pi", "model": "m"}, {"harness": "pi", "model": "m", "sandbox": "e2b"}])),
    );
    check_refused(
        twice,
        &everything(),
        "variants[1]: the same harness, model, sandbox and profile as variants[0]",
    );
    // Exactly the limit is accepted.
    let limit = change(full(), "/cases", Some(cases(25)));
    check_start(&decode_start(&limit).unwrap(), &everything()).unwrap();
}

#[test]
fn unsupported_fields_are_named() {
    for (feature, expected) in [
        (Feature::Cache, "cases[0].cache: a cache is not supported by this server yet"),
        (Feature::Prepare, "cases[0].prepare: "),
        (Feature::HarnessUser, "cases[0].user.harness: "),
        (Feature::ScriptedUser, "cases[1].user: "),
        (Feature::SimulatedUser, "cases[2].user: "),
        (Feature::CodeValidator, "cases[0].validator.checks: "),
        (Feature::ModelJudge, "cases[0].validator.judges[0].provider: "),
        (Feature::HarnessJudge, "cases[0].validator.judges[1].harness: "),
        (Feature::CredentialRefs, "variants[0].credentials: "),
        (Feature::ProfileVariables, "variants[0].profile.variables: "),
    ] {
        let mut support = everything();
        support.features.remove(&feature);
        check_refused(full(), &support, expected);
    }
    let mut support = everything();
    support.harnesses.remove(&Harness::Claude);
    check_refused(
        minimal(),
        &support,
        "variants[0].harness: \"claude\" is not supported by this server yet",
    );
    support = everything();
    support.sandboxes.remove(&Sandbox::E2b);
    check_refused(minimal(), &support, "variants[0].sandbox: \"e2b\" is neither configured");
    support = everything();
    support.features.remove(&Feature::ApiMock);
    let mock = change(
        full(),
        "/variants/0/profile/files/workspace~1.sphynx~1api~1program.json",
        Some(json!("{}")),
    );
    check_refused(
        mock,
        &support,
        "variants[0].profile.files[\"workspace/.sphynx/api/program.json\"]: an HTTP mock is",
    );
    // The least of servers runs the least of requests.
    let least = Support {
        harnesses: [(Harness::Claude, "2".to_owned())].into(),
        sandboxes: [(Sandbox::E2b, Sandbox::Bubblewrap)].into(),
        features: [].into(),
    };
    check_start(&decode_start(&minimal()).unwrap(), &least).unwrap();
}

#[test]
fn runner_starts() {
    let decoded = decode_runner_start(&minimal()).unwrap();
    assert_eq!((decoded.local, &decoded.trigger), (false, &None));
    let request = change(
        change(minimal(), "/local", Some(json!(true))),
        "/trigger",
        Some(json!({"source": "ci", "url": "u"})),
    );
    let decoded = decode_runner_start(&request).unwrap();
    assert_eq!(
        decoded.trigger,
        Some(Trigger {
            source: TriggerSource::Ci,
            url: Some("u".to_owned())
        })
    );
    assert_eq!(
        serde_json::from_value::<RunnerStart>(serde_json::to_value(&decoded).unwrap()).unwrap(),
        decoded
    );
    let issues = decode_runner_start(&change(request, "/trigger/source", Some(json!("x")))).unwrap_err();
    assert_eq!(format_path(&issues[0].path), "trigger.source");
}

mod properties {
    use proptest::prelude::*;

    use super::*;

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            "[a-z\\-\0é😀]{0,6}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map("kind|id|name|source|files|cases|harness|[a-z]{1,3}", inner, 0..5)
                    .prop_map(|map| Value::from(map.into_iter().collect::<serde_json::Map<_, _>>())),
            ]
        })
    }

    /// Every place of a value, as a JSON pointer.
    fn places(value: &Value, here: String, all: &mut Vec<String>) {
        match value {
            Value::Object(map) => map
                .iter()
                .for_each(|(key, value)| places(value, format!("{here}/{}", key.replace('/', "~1")), all)),
            Value::Array(values) => values
                .iter()
                .enumerate()
                .for_each(|(index, value)| places(value, format!("{here}/{index}"), all)),
            _ => {}
        }
        if !here.is_empty() {
            all.push(here);
        }
    }

    fn pointer_path(pointer: &str, root: &Value) -> String {
        let (mut text, mut value) = (String::new(), root);
        for segment in pointer[1..].split('/').map(|segment| segment.replace("~1", "/")) {
            let (piece, next) = match value {
                Value::Array(values) => {
                    let index: usize = segment.parse().unwrap();
                    (format_path(&[index.into()]), &values[index])
                }
                value => (format_path(&[segment.as_str().into()]), &value[&segment]),
            };
            if !text.is_empty() && !piece.starts_with('[') {
                text.push('.');
            }
            text.push_str(&piece);
            value = next;
        }
        text
    }

    proptest! {
        #[test]
        fn decoding_anything_never_panics(value in any_json()) {
            let _ = (decode_start(&value), decode_runner_start(&value));
        }

        #[test]
        fn a_broken_field_is_named(pick: prop::sample::Index, into in any_json()) {
            let mut all = Vec::new();
            places(&full(), String::new(), &mut all);
            let pointer = pick.get(&all);
            let changed = change(full(), pointer, Some(into));
            match decode_start(&changed) {
                Ok(decoded) => {
                    let stored = serde_json::to_value(&decoded).unwrap();
                    prop_assert_eq!(decode_start(&stored).unwrap(), decoded.clone());
                    let _ = check_start(&decoded, &everything());
                }
                Err(issues) => {
                    // At the field, inside it, or (for `kind` and for pairs of fields) beside it.
                    let parent = pointer_path(pointer, &full());
                    let parent = parent.strip_suffix(".kind").or(parent.strip_suffix(".provider")).or(parent.strip_suffix(".harness")).unwrap_or(&parent);
                    let near = |issue: &Issue| format_path(&issue.path).starts_with(parent) || issue.message.contains("other");
                    prop_assert!(issues.iter().all(near), "{} {:?}", pointer, issues);
                }
            }
        }
    }
}
