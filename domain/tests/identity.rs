//! The identity hashes: golden vectors that never change, and what does and does not make a difference.
#![allow(clippy::unwrap_used)]

use evalgrid_domain::{
    identity::{canonical_json, definition_hash, profile_version, start_hash},
    request::{Profile, SuiteBatchRequest, decode_runner_start, decode_start},
};
use proptest::prelude::*;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The first `bytes` bytes of the SHA-256 of a text, as hex: the vectors below are given as the exact bytes that are hashed.
fn sha(text: &str, bytes: usize) -> String {
    Sha256::digest(text)[..bytes].iter().map(|byte| format!("{byte:02x}")).collect()
}

fn start(case: Value) -> SuiteBatchRequest {
    decode_start(&json!({
        "suite": {"id": "s", "prompt": "Say {{ word }}", "source": {"kind": "repo", "url": "https://h/r", "ref": null}},
        "trials": 1, "cases": [case], "variants": [{"harness": "claude", "model": "m"}],
    }))
    .unwrap()
}

#[test]
fn definitions() {
    let judge =
        json!({"kind": "judge", "name": "j", "model": "m", "prompt": "p", "provider": "openai", "choices": {"é": 0.5, "b": 1, "B": 0}});
    let judged = json!({"kind": "judged", "name": "v", "checks": [], "judges": [judge], "sourceFiles": [{"path": "a", "content": "b"}]});
    for (case, hashed) in [
        (json!({"id": "c"}), "Say {{ word }}\0\0\0\0repo https://h/r \0\0"),
        (
            json!({"id": "other", "name": "n", "tags": ["t"], "variables": {"word": "hi"}}),
            "Say hi\0\0\0\0repo https://h/r \0\0",
        ),
        (
            json!({"id": "c", "source": {"kind": "repo", "url": "u", "ref": "main"}, "verify": "true && x", "maxTurns": 3}),
            "Say {{ word }}\0\0\0true && x\0repo u main\0\0\0limits 3 ",
        ),
        (
            json!({"id": "c", "source": {"kind": "files", "files": {"b": "2", "a/é": "1", "B": "3"}}, "timeoutMs": 60000, "maxTurns": null}),
            "Say {{ word }}\0\0\0\0files B 3a/é 1b 2\0\0\0limits  60000",
        ),
        (
            json!({"id": "c", "source": {"kind": "empty"}, "prepare": {"name": "p", "source": "prep"}, "cache": {"key": "k", "path": "p/q"},
                   "validator": {"name": "v", "source": "code", "capture": true, "sourceFiles": []},
                   "user": {"kind": "simulated", "prompt": "p", "goal": "g"}}),
            "Say {{ word }}\0prep\0code\0\0empty\0{\"goal\":\"g\",\"kind\":\"simulated\",\"prompt\":\"p\"}\0k p/q",
        ),
        (
            json!({"id": "c", "validator": judged, "user": {"kind": "scripted", "replies": ["a\n", "b"]}}),
            "Say {{ word }}\0\0{\"checks\":[],\"judges\":[{\"choices\":{\"B\":0,\"b\":1,\"é\":0.5},\"kind\":\"judge\",\"model\":\"m\",\"name\":\"j\",\
             \"prompt\":\"p\",\"provider\":\"openai\",\"threshold\":1,\"timeoutMs\":120000}],\"kind\":\"judged\",\"name\":\"v\"}\0\0repo https://h/r \
             \0{\"kind\":\"scripted\",\"replies\":[\"a\\n\",\"b\"]}\0",
        ),
    ] {
        assert_eq!(definition_hash(&start(case.clone()), 0), sha(hashed, 16), "{case}");
    }
    // One vector in full, so that the hash itself is pinned, too.
    assert_eq!(definition_hash(&start(json!({"id": "c"})), 0), "d7a3639a857b386ef2ea83d5f924b38b");
}

#[test]
fn profiles() {
    let version = |profile: Value| profile_version(&serde_json::from_value::<Profile>(profile).unwrap());
    for (profile, hashed) in [
        (
            json!({"name": "p", "files": {}}),
            r#"{"env":null,"files":[],"install":null,"run":null,"systemPrompt":null}"#,
        ),
        (
            json!({"name": "q", "files": {}, "variables": []}),
            r#"{"env":null,"files":[],"install":null,"run":null,"systemPrompt":null}"#,
        ),
        (
            json!({"name": "p", "files": {"workspace/b": "2", "home/a": "1\"é"}, "env": {"B": "2", "A": "1"}, "install": "i", "run": "r",
                   "systemPrompt": "s", "variables": ["Z", "A", "Z"]}),
            r#"{"env":[["A","1"],["B","2"]],"files":[["home/a","1\"é"],["workspace/b","2"]],"install":"i","run":"r","systemPrompt":"s","variables":["A","Z","Z"]}"#,
        ),
    ] {
        assert_eq!(version(profile.clone()), sha(hashed, 16), "{profile}");
    }
    assert_eq!(version(json!({"name": "p", "files": {}})), "f7b86e4c728f64241ba839afe8b2410c");
}

#[test]
fn starts() {
    let request = start(json!({"id": "c", "verify": "true"}));
    let hashed = r#"{"cases":[{"id":"c","maxTurns":null,"name":"c","prepare":null,"tags":[],"timeoutMs":null,"user":null,"validator":null,"variables":{},"verify":"true"}],"checksIn":false,"suite":{"id":"s","name":"s","prompt":"Say {{ word }}","source":{"kind":"repo","ref":null,"url":"https://h/r"}},"trials":1,"variants":[{"harness":"claude","model":"m","sandbox":"e2b"}]}"#;
    assert_eq!(canonical_json(&request), hashed);
    assert_eq!(start_hash(&request), sha(hashed, 32));
    assert_eq!(
        start_hash(&request),
        "f937de4cf37677580108e2702788eeb2d252a24761d95f165979da1089301f84"
    );
    // Defaults and their absence are the same request; so are 1 and 1.0, and unknown keys.
    let spelled = json!({
        "suite": {"id": "s", "name": "s", "prompt": "p", "source": null}, "trials": 1.0, "checksIn": false, "x": 1,
        "cases": [{"id": "c", "name": "c", "tags": [], "variables": {}, "maxTurns": null, "verify": "true"}],
        "variants": [{"harness": "claude", "model": "m", "sandbox": "e2b"}],
    });
    let short = json!({"suite": {"id": "s", "prompt": "p"}, "trials": 1, "cases": [{"id": "c", "verify": "true"}], "variants": [{"harness": "claude", "model": "m"}]});
    assert_eq!(
        start_hash(&decode_start(&spelled).unwrap()),
        start_hash(&decode_start(&short).unwrap())
    );
    // A source of its own, even an empty one, is another request than none.
    let mut own = short.clone();
    own["cases"][0]["source"] = json!({"kind": "empty"});
    assert_ne!(start_hash(&decode_start(&own).unwrap()), start_hash(&decode_start(&short).unwrap()));
    // A local batch is another request than a hosted one.
    let mut local = short.clone();
    local["local"] = json!(true);
    assert_ne!(
        start_hash(&decode_runner_start(&local).unwrap()),
        start_hash(&decode_runner_start(&short).unwrap())
    );
}

#[test]
fn canonical() {
    for (value, text) in [
        (json!({}), "{}"),
        (json!([]), "[]"),
        (
            json!({"b": [1, 2.0, 0.1, -0.0, null, true], "a": {"é": 1, "z": 2, "Z": 3}}),
            r#"{"a":{"Z":3,"z":2,"é":1},"b":[1,2,0.1,0,null,true]}"#,
        ),
        (json!("a\"\\\n\u{1}/é\u{7f}"), "\"a\\\"\\\\\\n\\u0001/é\u{7f}\""),
    ] {
        assert_eq!(canonical_json(&value), text);
    }
}

/// The text of an object with its keys in the given order.
fn object(entries: &[(String, u32)]) -> String {
    let entries: Vec<_> = entries
        .iter()
        .map(|(key, value)| format!("{}:{value}", Value::from(key.as_str())))
        .collect();
    format!("{{{}}}", entries.join(","))
}

proptest! {
    #[test]
    fn the_order_of_keys_does_not_matter(entries in prop::collection::btree_map("\\PC{0,4}", any::<u32>(), 0..8), seed: u64) {
        let sorted: Vec<_> = entries.into_iter().collect();
        let mut shuffled = sorted.clone();
        shuffled.sort_by_key(|(key, _)| { let hash = Sha256::digest(format!("{seed}{key}")); hash[..8].to_vec() });
        let read = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        prop_assert_eq!(start_hash(&read(&object(&sorted))), start_hash(&read(&object(&shuffled))));
        prop_assert_eq!(canonical_json(&read(&object(&shuffled))), object(&sorted));
    }

    #[test]
    fn one_change_changes_the_hash(a in "[a-z]{1,8}", b in "[a-z]{1,8}") {
        let hash = |verify: &str| definition_hash(&start(json!({"id": "c", "verify": verify})), 0);
        prop_assert_eq!(a == b, hash(&a) == hash(&b));
    }
}
