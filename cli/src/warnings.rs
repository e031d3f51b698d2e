//! What is allowed in a request and yet most likely a slip that costs a whole run: fields that nobody reads, cases that nothing decides,
//! judges that decide nothing, placeholders without a value. What is refused is the scheduler's to say.

use std::collections::BTreeMap;

use evalgrid_domain::{decode::parse_json, limits::MAX_JSON_DEPTH, prompt};
use serde_json::{Map, Value};

/// More would be one slip again and again.
const MAX_WARNINGS: usize = 20;

const REQUEST: &[&str] = &["cases", "checksIn", "suite", "trials", "variants"];
const SUITE: &[&str] = &["id", "name", "prompt", "source"];
const CASE: &[&str] = &[
    "cache",
    "diff",
    "id",
    "maxTurns",
    "name",
    "prepare",
    "source",
    "tags",
    "timeoutMs",
    "user",
    "validator",
    "variables",
    "verify",
];
const DIFF: &[&str] = &["ignore", "include"];
const SOURCE: &[&str] = &["kind", "files", "url", "ref"];
const USER: &[&str] = &["kind", "replies", "goal", "prompt", "harness", "model"];
/// Without a `kind`.
const PROGRAM: &[&str] = &["capture", "manifest", "name", "source", "sourceFiles"];
/// Of the kind `judged`.
const JUDGED: &[&str] = &["capture", "checks", "judges", "kind", "name", "sourceFiles"];
const CHECK: &[&str] = &["capture", "manifest", "name", "source"];
const JUDGE: &[&str] = &[
    "choices",
    "expected",
    "files",
    "harness",
    "kind",
    "model",
    "name",
    "prompt",
    "provider",
    "threshold",
    "timeoutMs",
];
/// Of a calibration's file.
const CALIBRATION: &[&str] = &["items", "judge", "repeats"];
const EXAMPLE: &[&str] = &["expected", "input", "label", "output"];
/// Of a judge that names none.
const DEFAULT_THRESHOLD: f64 = 1.0;
const VARIANT: &[&str] = &["credentials", "harness", "model", "profile", "sandbox"];
const PROFILE: &[&str] = &["env", "files", "install", "name", "run", "systemPrompt", "variables"];

/// The warnings of a request; none where it cannot be read, because then it is refused.
pub(crate) fn of(request: &[u8]) -> Vec<String> {
    let Ok(Value::Object(request)) = parse_json(request, MAX_JSON_DEPTH) else {
        return Vec::new();
    };
    let mut warnings = Vec::new();
    unknown("", &request, REQUEST, &mut warnings);
    let mut prompt = "";
    if let Some(Value::Object(suite)) = request.get("suite") {
        unknown("suite.", suite, SUITE, &mut warnings);
        nested("suite.", suite, "source", SOURCE, &mut warnings);
        prompt = suite.get("prompt").and_then(Value::as_str).unwrap_or_default();
    }
    for (index, case) in objects(&request, "cases") {
        case_warnings(&format!("cases[{index}]"), case, prompt, &mut warnings);
    }
    for (index, variant) in objects(&request, "variants") {
        let path = format!("variants[{index}].");
        unknown(&path, variant, VARIANT, &mut warnings);
        nested(&path, variant, "profile", PROFILE, &mut warnings);
    }
    shortened(warnings)
}

/// The warnings of a list of judges that a regrade is given; none where it cannot be read.
pub(crate) fn of_judges(judges: &[u8]) -> Vec<String> {
    let Ok(judges @ Value::Array(_)) = parse_json(judges, MAX_JSON_DEPTH) else {
        return Vec::new();
    };
    let mut warnings = Vec::new();
    judges_warnings("", &Map::from_iter([("judges".to_owned(), judges)]), &mut warnings);
    shortened(warnings)
}

/// The warnings of a calibration's file; none where it cannot be read. A judge's threshold has no say there.
pub(crate) fn of_calibration(file: &[u8]) -> Vec<String> {
    let Ok(Value::Object(file)) = parse_json(file, MAX_JSON_DEPTH) else {
        return Vec::new();
    };
    let mut warnings = Vec::new();
    unknown("", &file, CALIBRATION, &mut warnings);
    nested("", &file, "judge", JUDGE, &mut warnings);
    for (index, example) in objects(&file, "items") {
        unknown(&format!("items[{index}]."), example, EXAMPLE, &mut warnings);
    }
    shortened(warnings)
}

/// Says them on stderr.
pub(crate) fn tell(warnings: &[String]) {
    for warning in warnings {
        eprintln!("warning: {}", crate::output::plain(warning));
    }
}

fn shortened(mut warnings: Vec<String>) -> Vec<String> {
    if warnings.len() > MAX_WARNINGS {
        let more = warnings.len() - MAX_WARNINGS;
        warnings.truncate(MAX_WARNINGS);
        warnings.push(format!("and {}", crate::output::count(more, "more such slip")));
    }
    warnings
}

fn objects<'a>(map: &'a Map<String, Value>, key: &str) -> impl Iterator<Item = (usize, &'a Map<String, Value>)> {
    let values = map.get(key).and_then(Value::as_array).into_iter().flatten().enumerate();
    values.filter_map(|(index, value)| Some((index, value.as_object()?)))
}

fn case_warnings(path: &str, case: &Map<String, Value>, prompt: &str, warnings: &mut Vec<String>) {
    let within = format!("{path}.");
    unknown(&within, case, CASE, warnings);
    nested(&within, case, "diff", DIFF, warnings);
    nested(&within, case, "source", SOURCE, warnings);
    nested(&within, case, "user", USER, warnings);
    if let Some(Value::Object(validator)) = case.get("validator") {
        validator_warnings(&format!("{path}.validator."), validator, warnings);
    }
    let given = |key: &str| case.get(key).is_some_and(|value| !value.is_null());
    if !given("verify") && !given("validator") {
        warnings.push(format!("{path} has neither \"verify\" nor \"validator\": its trials will be void"));
    }
    let variables = case.get("variables").and_then(Value::as_object);
    for name in placeholders(prompt) {
        if variables.is_none_or(|variables| !variables.contains_key(name)) {
            warnings.push(format!(
                "{path}.variables has no value for {{{{ {name} }}}}, which stays in the prompt as it is"
            ));
        }
    }
}

fn validator_warnings(path: &str, validator: &Map<String, Value>, warnings: &mut Vec<String>) {
    if validator.contains_key("kind") {
        unknown(path, validator, JUDGED, warnings);
        for (index, check) in objects(validator, "checks") {
            unknown(&format!("{path}checks[{index}]."), check, CHECK, warnings);
        }
        judges_warnings(path, validator, warnings);
        return;
    }
    let (judged, other): (Map<_, _>, Map<_, _>) = validator.clone().into_iter().partition(|(key, _)| JUDGED.contains(&key.as_str()));
    unknown(path, &other, PROGRAM, warnings);
    let ignored = judged.keys().filter(|key| !PROGRAM.contains(&key.as_str()));
    warnings.extend(ignored.map(|key| format!("\"{path}{key}\" is ignored without \"kind\": \"judged\" beside it")));
}

fn judges_warnings(path: &str, validator: &Map<String, Value>, warnings: &mut Vec<String>) {
    for (index, judge) in objects(validator, "judges") {
        let path = format!("{path}judges[{index}]");
        unknown(&format!("{path}."), judge, JUDGE, warnings);
        warnings.extend(decided(judge).map(|why| format!("{path} {why}")));
    }
}

/// Why a judge's verdict is the same whatever it picks.
fn decided(judge: &Map<String, Value>) -> Option<String> {
    let choices = judge.get("choices").and_then(Value::as_object)?;
    let scores: Vec<f64> = choices.values().map(Value::as_f64).collect::<Option<_>>()?;
    let best = scores.iter().copied().reduce(f64::max)?;
    let worst = scores.iter().copied().reduce(f64::min)?;
    let (threshold, default) = match judge.get("threshold") {
        Some(threshold) => (threshold.as_f64()?, ""),
        None => (DEFAULT_THRESHOLD, ", the default"),
    };
    match threshold {
        _ if threshold > best => Some(format!(
            "can never pass: no choice has more than {best}, and its threshold is {threshold}{default}"
        )),
        _ if threshold <= worst => Some(format!(
            "can never fail: no choice has less than {worst}, and its threshold is {threshold}{default}"
        )),
        _ => None,
    }
}

/// Names of the prompt's placeholders, each once. What is one is the domain's to say.
fn placeholders(prompt: &str) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    // Every brace may begin one: `{{{ name }}` holds a placeholder from its second brace.
    for (start, _) in prompt.match_indices('{').filter(|(start, _)| prompt[*start..].starts_with("{{")) {
        let inner = &prompt[start + 2..];
        let Some(end) = inner.find("}}") else { break };
        let name = inner[..end].trim();
        let is_one = || {
            let value = BTreeMap::from([(name.to_owned(), String::new())]);
            prompt::render(&prompt[start..start + 2 + end + 2], &value).is_empty()
        };
        if !names.contains(&name) && is_one() {
            names.push(name);
        }
    }
    names
}

fn nested(path: &str, map: &Map<String, Value>, key: &str, known: &[&str], warnings: &mut Vec<String>) {
    if let Some(Value::Object(inner)) = map.get(key) {
        unknown(&format!("{path}{key}."), inner, known, warnings);
    }
}

fn unknown(path: &str, map: &Map<String, Value>, known: &[&str], warnings: &mut Vec<String>) {
    let keys = map.keys().filter(|key| !known.contains(&key.as_str()));
    warnings.extend(keys.map(|key| format!("\"{path}{}\" is not a field and is ignored", crate::output::short(key, 60))));
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use evalgrid_domain::request::{Feature, Harness, Sandbox, Support, check_start, decode_start};
    use serde_json::json;

    use super::*;

    fn request() -> Value {
        json!({
            "suite": {"id": "s", "prompt": "Do it."},
            "cases": [{"id": "a", "verify": "true"}],
            "variants": [{"harness": "command", "model": "m", "profile": {"name": "p", "files": {}, "run": "true"}}],
            "trials": 1
        })
    }

    #[test]
    fn slips_of_calibrations_are_told() {
        let example = json!({"input": "i", "output": "o", "lable": "a", "label": "a"});
        let file = json!({"judge": {"name": "a", "treshold": 1}, "repeat": 3, "items": [example]});
        assert_eq!(
            of_calibration(file.to_string().as_bytes()),
            [
                "\"repeat\" is not a field and is ignored",
                "\"judge.treshold\" is not a field and is ignored",
                "\"items[0].lable\" is not a field and is ignored",
            ]
        );
        let shipped = include_bytes!("../../examples/calibrate.json");
        assert_eq!(of_calibration(shipped), [""; 0]);
    }

    #[test]
    fn slips_are_told() {
        fn check(pointer: &str, value: Value, expected: &[&str]) {
            let mut request = request();
            let (parent, key) = pointer.rsplit_once('/').unwrap();
            match request.pointer_mut(parent).unwrap() {
                Value::Array(values) => values[key.parse::<usize>().unwrap()] = value,
                parent => parent[key] = value,
            }
            assert_eq!(of(&serde_json::to_vec(&request).unwrap()), expected, "{pointer}");
        }
        check("/trials", json!(1), &[]);
        check("/trails", json!(3), &["\"trails\" is not a field and is ignored"]);
        check("/suite/promt", json!(""), &["\"suite.promt\" is not a field and is ignored"]);
        check(
            "/suite/source",
            json!({"kind": "empty", "path": "x"}),
            &["\"suite.source.path\" is not a field and is ignored"],
        );
        check(
            "/cases/0/timeout",
            json!(1),
            &["\"cases[0].timeout\" is not a field and is ignored"],
        );
        check(
            "/cases/0/user",
            json!({"kind": "scripted", "reply": []}),
            &["\"cases[0].user.reply\" is not a field and is ignored"],
        );
        check(
            "/cases/0/validator",
            json!({"kind": "judged", "name": "v", "checks": [], "judge": [], "judges": [{"name": "a", "treshold": 0.5}]}),
            &[
                "\"cases[0].validator.judge\" is not a field and is ignored",
                "\"cases[0].validator.judges[0].treshold\" is not a field and is ignored",
            ],
        );
        check(
            "/cases/0/validator",
            json!({"kind": "judged", "name": "v", "source": "s", "checks": [{"name": "c", "src": "s"}], "judges": []}),
            &[
                "\"cases[0].validator.source\" is not a field and is ignored",
                "\"cases[0].validator.checks[0].src\" is not a field and is ignored",
            ],
        );
        check(
            "/cases/0/validator",
            json!({"name": "v", "source": "s", "typo": 1, "checks": [], "judges": [{"name": "a"}]}),
            &[
                "\"cases[0].validator.typo\" is not a field and is ignored",
                "\"cases[0].validator.checks\" is ignored without \"kind\": \"judged\" beside it",
                "\"cases[0].validator.judges\" is ignored without \"kind\": \"judged\" beside it",
            ],
        );
        check(
            "/variants/0/prompt",
            json!(1),
            &["\"variants[0].prompt\" is not a field and is ignored"],
        );
        check(
            "/variants/0/profile/setup",
            json!("x"),
            &["\"variants[0].profile.setup\" is not a field and is ignored"],
        );
        let void = "cases[0] has neither \"verify\" nor \"validator\": its trials will be void";
        check("/cases/0/verify", Value::Null, &[void]);
        check("/cases/0", json!({"id": "a"}), &[void]);
        check("/cases/0", json!({"id": "a", "validator": {}}), &[]);
        let stays = "cases[0].variables has no value for {{ task }}, which stays in the prompt as it is";
        check("/suite/prompt", json!("{{ task }} and {{task}}"), &[stays]);
        check("/suite/prompt", json!("{{{ task }}}"), &[stays]);
        check("/suite/prompt", json!("{{ 1 }} {{ a b }} {{ }} {{ open"), &[]);
        // Shapes that are refused are told by the refusal.
        check("/cases", json!("none"), &[]);
        check("/variants", json!([1]), &[]);
    }

    #[test]
    fn judges_that_decide_nothing() {
        fn check(judge: Value, expected: &[&str]) {
            let judges = json!([{"name": "first"}, judge]);
            assert_eq!(of_judges(&serde_json::to_vec(&judges).unwrap()), expected, "{judges}");
            let mut whole = request();
            whole["cases"][0]["validator"] = json!({"kind": "judged", "name": "v", "checks": [], "judges": judges});
            let expected: Vec<_> = expected
                .iter()
                .map(|text| text.replace("judges[", "cases[0].validator.judges["))
                .collect();
            assert_eq!(of(&serde_json::to_vec(&whole).unwrap()), expected, "{whole}");
        }
        let choices = json!({"good": 0.5, "bad": 0});
        check(json!({"choices": choices, "threshold": 0.5}), &[]);
        check(json!({"choices": choices, "threshold": 0.1}), &[]);
        check(
            json!({"choices": choices, "treshold": 0.5}),
            &[
                "\"judges[1].treshold\" is not a field and is ignored",
                "judges[1] can never pass: no choice has more than 0.5, and its threshold is 1, the default",
            ],
        );
        check(
            json!({"choices": choices, "threshold": 0.75}),
            &["judges[1] can never pass: no choice has more than 0.5, and its threshold is 0.75"],
        );
        check(
            json!({"choices": choices, "threshold": 0}),
            &["judges[1] can never fail: no choice has less than 0, and its threshold is 0"],
        );
        check(
            json!({"choices": {"only": 1}}),
            &["judges[1] can never fail: no choice has less than 1, and its threshold is 1, the default"],
        );
        // Shapes that are refused are told by the refusal.
        for judge in [
            json!({"choices": {}}),
            json!({"choices": {"a": "1"}}),
            json!({"choices": choices, "threshold": null}),
            json!(1),
        ] {
            check(judge, &[]);
        }
        for judges in ["{}", "[", "[[]]"] {
            assert_eq!(of_judges(judges.as_bytes()), Vec::<String>::new(), "{judges}");
        }
    }

    #[test]
    fn values_and_many_slips() {
        let mut request = request();
        request["suite"]["prompt"] = json!("{{ task }}");
        request["cases"][0]["variables"] = json!({"task": "{{ other }}"});
        assert_eq!(of(&serde_json::to_vec(&request).unwrap()), Vec::<String>::new());
        request["cases"] = json!(vec![json!({"id": "a"}); 30]);
        let warnings = of(&serde_json::to_vec(&request).unwrap());
        assert_eq!((warnings.len(), warnings[20].as_str()), (21, "and 40 more such slips"));
        assert_eq!(of(b"no json"), Vec::<String>::new());
    }

    #[test]
    fn the_documented_request_is_accepted() {
        let page = include_str!("../../docs/requests.md");
        let (_, rest) = page.split_once("```json\n").unwrap();
        let (example, _) = rest.split_once("```").unwrap();
        assert_eq!(of(example.as_bytes()), Vec::<String>::new());
        let request = decode_start(&parse_json(example.as_bytes(), MAX_JSON_DEPTH).unwrap()).unwrap();
        let support = Support {
            harnesses: [(Harness::Command, "unknown".to_owned())].into(),
            sandboxes: [(Sandbox::E2b, Sandbox::Bubblewrap)].into(),
            features: [Feature::ScriptedUser, Feature::ProfileVariables].into(),
        };
        check_start(&request, &support).unwrap();
    }

    /// A field that the domain learns to read must be known here, too: a request with every known field decodes, and gives them all back.
    #[test]
    fn known_fields_are_those_of_the_domain() {
        let request = json!({
            "checksIn": true,
            "suite": {"id": "s", "name": "S", "prompt": "Do it.", "source": {"kind": "repo", "url": "u", "ref": null}},
            "cases": [{
                "cache": {"key": "k", "path": "p"}, "diff": {"ignore": ["a"], "include": ["b"]}, "id": "a", "maxTurns": 1, "name": "A", "prepare": {"name": "n", "source": "s"},
                "source": {"kind": "files", "files": {}}, "tags": ["t"], "timeoutMs": 1000,
                "user": {"kind": "simulated", "goal": "g", "prompt": "p", "harness": "codex", "model": "m"},
                "validator": {"name": "n", "source": "s"}, "variables": {}, "verify": "true"
            }],
            "variants": [{
                "credentials": {}, "harness": "command", "model": "m", "sandbox": "e2b",
                "profile": {"env": {}, "files": {}, "install": "i", "name": "p", "run": "r", "systemPrompt": "s", "variables": []}
            }],
            "trials": 1
        });
        assert_eq!(of(&serde_json::to_vec(&request).unwrap()), Vec::<String>::new());
        let decoded = serde_json::to_value(decode_start(&request).unwrap()).unwrap();
        let keys = |pointer: &str| -> Vec<String> {
            let value = decoded.pointer(pointer).unwrap().as_object().unwrap();
            value.keys().cloned().collect()
        };
        let sorted = |known: &[&str]| {
            let mut known: Vec<_> = known.iter().map(|key| (*key).to_owned()).collect();
            known.sort();
            known
        };
        for (pointer, known) in [
            ("", REQUEST),
            ("/suite", SUITE),
            ("/cases/0", CASE),
            ("/cases/0/diff", DIFF),
            ("/variants/0", VARIANT),
            ("/variants/0/profile", PROFILE),
        ] {
            assert_eq!(keys(pointer), sorted(known), "{pointer:?}");
        }
    }
}
