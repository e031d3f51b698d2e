//! Mocks that a profile brings (contract 2.4): what tells the agent of them, and which of their calls are kept.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    evidence::cut,
    limits::{MAX_MOCK_APIS, MAX_MOCK_CALL_BYTES, MAX_MOCK_CALLS, MAX_MOCK_ENDPOINTS, MAX_MOCK_LINE_BYTES, MAX_VALIDATION_VALUE},
    redact::Redactor,
    request::Profile,
};

/// The profile's file that says how its HTTP mock is started.
pub const PROGRAM: &str = "workspace/.sphynx/api/program.json";
/// Where everything about mocks is in a profile.
const FOLDER: &str = "workspace/.sphynx/";
/// Where a running HTTP mock says what it serves, below the workspace.
pub const MANIFEST: &str = ".sphynx/api/manifest.json";
/// Begins the line that an HTTP mock prints when it serves.
pub const READY: &str = "SPHYNX_API_READY=";
/// Where calls of HTTP mocks are logged, below the workspace.
pub const API_CALLS: &str = ".sphynx/api/calls.jsonl";
/// Where calls of mocked commands are logged, below the workspace.
pub const CLI_CALLS: &str = ".sphynx/cli-calls.jsonl";
/// Where calls of mocked MCP servers are logged, below the workspace.
pub const MCP_CALLS: &str = ".sphynx/mcp-calls.jsonl";

/// Whether a profile brings mocks of any kind.
pub fn any(profile: &Profile) -> bool {
    profile.files.keys().any(|path| path.starts_with(FOLDER))
}

/// The program of a profile's HTTP mock, below the workspace. `None`: there is none. `Some(Err)`: why it cannot be started.
pub fn program(profile: &Profile) -> Option<Result<String, String>> {
    #[derive(Deserialize)]
    struct Program {
        entry: String,
    }
    let text = profile.files.get(PROGRAM)?;
    Some(match serde_json::from_str::<Program>(text) {
        Ok(Program { entry }) => {
            let plain = !entry.contains('\0') && entry.split('/').all(|part| !matches!(part, "" | "." | ".."));
            match plain {
                true => Ok(entry),
                false => Err("the entry of its program.json is no path below the workspace".to_owned()),
            }
        }
        Err(error) => Err(format!("its program.json cannot be read: {error}")),
    })
}

/// One HTTP API that a mock serves.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct Api {
    name: String,
    url: String,
    endpoints: Vec<Endpoint>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct Endpoint {
    method: String,
    path: String,
    #[serde(default)]
    description: Option<String>,
}

/// What the agent is told of the HTTP mocks, to stand behind its prompt.
///
/// # Errors
/// Why the manifest cannot be used.
pub fn introduction(manifest: &[u8]) -> Result<String, String> {
    let apis: Vec<Api> = serde_json::from_slice(manifest).map_err(|error| format!("its manifest cannot be read: {error}"))?;
    if apis.len() > MAX_MOCK_APIS || apis.iter().any(|api| api.endpoints.len() > MAX_MOCK_ENDPOINTS) {
        return Err(format!(
            "its manifest names more than {MAX_MOCK_APIS} APIs, or more than {MAX_MOCK_ENDPOINTS} endpoints of one"
        ));
    }
    let mut text = "\n\nThese local HTTP APIs are available:".to_owned();
    for api in &apis {
        text.push_str(&format!("\n\n{}: {}", one_line(&api.name), one_line(&api.url)));
        for Endpoint { method, path, description } in &api.endpoints {
            text.push_str(&format!("\n- {} {}", one_line(method), one_line(path)));
            if let Some(description) = description.as_deref().filter(|text| !text.trim().is_empty()) {
                text.push_str(&format!(": {}", one_line(description)));
            }
        }
    }
    Ok(text)
}

/// A text in one line, and without NUL, which no variable and no argument may hold.
fn one_line(text: &str) -> String {
    text.split(|c: char| c.is_whitespace() || c.is_control())
        .filter(|word| !word.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}

/// What the agent asked of the mocks, in order. The shapes of the calls are those of the mocks' own logs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MockCalls {
    /// Of HTTP mocks.
    pub api: Vec<Value>,
    /// Of mocked commands.
    pub cli: Vec<Value>,
    /// Of mocked MCP servers.
    pub mcp: Vec<Value>,
    /// A text was cut, or a call was left out.
    pub truncated: bool,
}

/// The logs that mocks have written, one JSON object per line.
#[derive(Clone, Debug, Default)]
pub struct CallLogs {
    /// [`API_CALLS`].
    pub api: Vec<u8>,
    /// [`CLI_CALLS`].
    pub cli: Vec<u8>,
    /// [`MCP_CALLS`].
    pub mcp: Vec<u8>,
}

impl MockCalls {
    /// What is kept of the logs: redacted, then cut. `None`: nothing was called. The second value counts lines that are no calls; an agent can
    /// write into these files, so they may hold anything.
    pub fn read(logs: &CallLogs, redactor: &Redactor) -> (Option<Self>, usize) {
        let mut calls = Self::default();
        let (mut left, mut unreadable) = (MAX_MOCK_CALL_BYTES, 0);
        for (log, kept) in [
            (&logs.api, &mut calls.api),
            (&logs.cli, &mut calls.cli),
            (&logs.mcp, &mut calls.mcp),
        ] {
            for line in log.split(|byte| *byte == b'\n').filter(|line| !line.trim_ascii().is_empty()) {
                if kept.len() == MAX_MOCK_CALLS || line.len() > MAX_MOCK_LINE_BYTES {
                    calls.truncated = true;
                    continue;
                }
                let Ok(Value::Object(call)) = serde_json::from_slice(line) else {
                    unreadable += 1;
                    continue;
                };
                let mut call = Value::Object(call);
                redactor.json(&mut call);
                calls.truncated |= cut_texts(&mut call);
                match left.checked_sub(call.to_string().len()) {
                    Some(rest) => {
                        left = rest;
                        kept.push(call);
                    }
                    None => calls.truncated = true,
                }
            }
        }
        let none = calls == Self::default();
        ((!none).then_some(calls), unreadable)
    }
}

/// Cuts every text to the limit of stored values. A value of the contract's shape says itself that it was cut.
fn cut_texts(value: &mut Value) -> bool {
    match value {
        Value::String(text) => cut(text, MAX_VALIDATION_VALUE),
        Value::Array(values) => values.iter_mut().fold(false, |any, value| cut_texts(value) | any),
        Value::Object(map) => {
            let mut any = false;
            let mut text = false;
            for (key, value) in map.iter_mut() {
                let was_cut = cut_texts(value);
                any |= was_cut;
                text |= was_cut && key == "text";
            }
            if let (true, Some(truncated)) = (text, map.get_mut("truncated")) {
                *truncated = Value::Bool(true);
            }
            any
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    fn profile(files: &[(&str, &str)]) -> Profile {
        Profile {
            env: None,
            files: files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect(),
            install: None,
            name: "p".into(),
            run: None,
            system_prompt: None,
            variables: None,
        }
    }

    #[test]
    fn programs() {
        assert_eq!(program(&profile(&[("workspace/a", "")])), None);
        assert!(!any(&profile(&[("workspace/a", ""), ("home/.sphynx/x", "")])));
        for (text, expected) in [
            (r#"{"entry":".sphynx/api/server.mjs","more":1}"#, Ok(".sphynx/api/server.mjs")),
            (
                r#"{"entry":"/etc/passwd"}"#,
                Err("the entry of its program.json is no path below the workspace"),
            ),
            (
                r#"{"entry":"a/../../b"}"#,
                Err("the entry of its program.json is no path below the workspace"),
            ),
            (
                r#"{"entry":""}"#,
                Err("the entry of its program.json is no path below the workspace"),
            ),
            (
                r#"{"#,
                Err("its program.json cannot be read: EOF while parsing an object at line 1 column 1"),
            ),
        ] {
            let profile = profile(&[(PROGRAM, text)]);
            assert!(any(&profile));
            let found = program(&profile).unwrap();
            assert_eq!(found.as_deref().map_err(String::as_str), expected);
        }
    }

    #[test]
    fn agents_are_told() {
        let manifest = json!([{ "name": "catalog", "url": "http://127.0.0.1:4000", "endpoints": [
            { "method": "GET", "path": "/items/:id", "description": "One\nitem\u{0}" }, { "method": "POST", "path": "/items" },
        ]}]);
        assert_eq!(
            introduction(manifest.to_string().as_bytes()).unwrap(),
            "\n\nThese local HTTP APIs are available:\n\ncatalog: http://127.0.0.1:4000\n- GET /items/:id: One item\n- POST /items"
        );
        for manifest in [
            json!({}),
            json!([{ "name": "a" }]),
            json!(vec![json!({ "name": "a", "url": "", "endpoints": [] }); MAX_MOCK_APIS + 1]),
        ] {
            assert!(
                introduction(manifest.to_string().as_bytes())
                    .unwrap_err()
                    .starts_with("its manifest")
            );
        }
    }

    #[test]
    fn calls_are_redacted_then_cut() {
        let redactor = Redactor::new(["hunter2-hunter2"]);
        let check = |logs: CallLogs| MockCalls::read(&logs, &redactor);
        assert_eq!(check(CallLogs::default()), (None, 0));
        // The secret crosses the cut, and leaves no piece.
        let long = format!("{}hunter2-hunter2", "a".repeat(MAX_VALIDATION_VALUE - 4));
        let call = json!({ "api": "catalog", "status": 200, "input": { "text": long, "format": "text", "state": "captured", "truncated": false } });
        let logs = CallLogs {
            api: format!("{call}\nnonsense\n[1]\n\n").into_bytes(),
            mcp: br#"{"server":"users","input":{"hunter2-hunter2":["hunter2-hunter2"]}}"#.to_vec(),
            ..CallLogs::default()
        };
        let (calls, unreadable) = check(logs);
        let calls = calls.unwrap();
        assert_eq!((unreadable, calls.api.len(), calls.truncated), (2, 1, true));
        let input = &calls.api[0]["input"];
        assert_eq!(
            (input["truncated"].as_bool(), input["text"].as_str().unwrap().ends_with("aaa[red")),
            (Some(true), true)
        );
        assert_eq!(calls.mcp[0]["input"], json!({ "[redacted]": ["[redacted]"] }));

        let many = CallLogs {
            cli: "{}\n".repeat(MAX_MOCK_CALLS + 1).into_bytes(),
            ..CallLogs::default()
        };
        let calls = check(many).0.unwrap();
        assert_eq!((calls.cli.len(), calls.truncated), (MAX_MOCK_CALLS, true));
        let big = json!({ "a": vec!["b".repeat(15_000); 200] });
        let huge = CallLogs {
            cli: format!("{big}\n").repeat(10).into_bytes(),
            ..CallLogs::default()
        };
        let calls = check(huge).0.unwrap();
        assert_eq!((calls.cli.len(), calls.truncated), (2, true), "all together have a limit");
    }
}
