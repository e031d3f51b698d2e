//! What the drivers read out of what real agents printed (`transcripts/`, with their versions), and out of output that nobody should print.
#![allow(clippy::unwrap_used)]

use std::{fmt::Write as _, fs, path::Path};

use evalgrid_domain::{coverage::Channel, outcome::Usage};
use evalgrid_harness::{HarnessEvent, TurnEnd, TurnOutput, by_name};

/// What a turn had beside its stdout.
#[derive(Clone, Copy)]
struct Given<'a> {
    stderr: &'a str,
    exit_code: i32,
    timed_out: bool,
    model: &'a str,
    earlier: Option<Usage>,
}

const ENDED: Given<'_> = Given {
    stderr: "",
    exit_code: 0,
    timed_out: false,
    model: "fake-model",
    earlier: None,
};
const FAILED: Given<'_> = Given { exit_code: 1, ..ENDED };
const STOPPED: Given<'_> = Given {
    exit_code: 137,
    timed_out: true,
    ..ENDED
};

fn read(name: &str, stdout: &[u8], given: Given<'_>) -> (Vec<HarnessEvent>, TurnEnd) {
    let mut stdout = stdout;
    let mut events = Vec::new();
    let output = TurnOutput {
        stdout: &mut stdout,
        stdout_tail: None,
        stdout_times: &mut std::io::empty(),
        stderr: given.stderr,
        trace: b"",
        exit_code: given.exit_code,
        timed_out: given.timed_out,
        finished_at_ms: 99,
        model: given.model,
        earlier: given.earlier,
    };
    let end = by_name(name).unwrap().read(output, &mut |event| events.push(event)).unwrap();
    (events, end)
}

fn transcript(path: &str) -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/transcripts").join(path)).unwrap()
}

/// Events in short: `$ command => status`, `> words`, `tool(status)`, `wrote paths`.
fn story(events: &[HarnessEvent]) -> String {
    let mut told = String::new();
    for event in events {
        match event {
            HarnessEvent::Message { text, .. } => writeln!(told, "> {text}").unwrap(),
            HarnessEvent::Command {
                command,
                exit_code,
                output,
                started_at,
                at,
            } => {
                assert!(started_at.is_some() && *at > 0.0);
                let code = exit_code.map_or("?".to_owned(), |code| code.to_string());
                writeln!(told, "$ {command} => {code} {}", output.trim_end()).unwrap();
            }
            HarnessEvent::ToolCall { name, status, error, .. } => {
                let status = status.as_deref().unwrap_or_default();
                writeln!(told, "{name}({status}){}", error.as_ref().map_or("", |_| " error")).unwrap();
            }
            HarnessEvent::FileChange { paths, .. } => writeln!(told, "wrote {}", paths.join(" ")).unwrap(),
            HarnessEvent::Started { .. } | HarnessEvent::Usage { .. } | HarnessEvent::Finished { .. } => {}
        }
    }
    told
}

/// input, output, read from the cache, written to it.
fn buckets(usage: Option<Usage>) -> Option<[u64; 4]> {
    usage.map(|usage| {
        let buckets = [
            usage.input_tokens,
            usage.output_tokens,
            usage.cache_read_tokens,
            usage.cache_write_tokens,
        ];
        assert_eq!(buckets.iter().sum::<u64>(), usage.total_tokens, "the buckets share nothing");
        buckets
    })
}

const WRITE: &str = "echo hello-from-agent > hello.txt && cat hello.txt";

#[test]
fn turns_that_went_well() {
    let check = |name: &str, file: &str, given: Given<'_>, expected: &str, usage: [u64; 4], session: &str| {
        let (events, end) = read(name, &transcript(file), given);
        assert_eq!(story(&events), expected, "{file}");
        assert_eq!(buckets(end.usage), Some(usage), "{file}");
        // Gemini's sessions cannot be gone on with.
        assert_eq!(end.session_id.as_deref(), (name != "gemini").then_some(session), "{file}");
        assert_eq!((end.failure, end.stalled), (None, None), "{file}");
        assert!(
            matches!(&events[0], HarnessEvent::Started { session_id, .. } if session_id == session),
            "{file}"
        );
        assert!(
            matches!(events.last(), Some(HarnessEvent::Finished { reason, .. }) if reason == "exit 0"),
            "{file}"
        );
        for channel in [end.coverage.events, end.coverage.actions, end.coverage.messages] {
            assert_eq!(channel, Channel::Complete, "{file}");
        }
        end.coverage.usage
    };
    let used = |input_tokens, output_tokens, cache_read_tokens| Given {
        earlier: Some(Usage {
            input_tokens,
            output_tokens,
            cache_read_tokens,
            ..Usage::default()
        }),
        ..ENDED
    };
    let done = format!("$ {WRITE} => 0 hello-from-agent\n> Done: I wrote hello.txt.\n");
    let unknown = done.replace("=> 0", "=> ?");
    let lined = done.replace(WRITE, &format!("/bin/bash -lc '{WRITE}'"));

    let thread = "01a22c05-cd73-7c41-9dfa-05dcdc617ba6";
    check("codex", "codex-0.171.0.jsonl", ENDED, &lined, [1200, 100, 800, 0], thread);
    // Its usage is that of the thread: 3000 in all.
    let second = "> second-turn answer; the request held 8 input items\n";
    check(
        "codex",
        "codex-0.171.0.resume.jsonl",
        used(1200, 100, 800),
        second,
        [600, 50, 400, 0],
        thread,
    );

    let session = "aea46b2b-6fab-4446-82e9-6e03d4115ac5";
    let second = "> second-turn answer; the request held 5 messages\n";
    check("claude", "claude-2.1.197.jsonl", ENDED, &done, [2000, 100, 800, 400], session);
    check(
        "claude",
        "claude-2.1.197.resume.jsonl",
        used(2000, 100, 800),
        second,
        [1000, 50, 400, 200],
        session,
    );
    let partial = "c37d8a34-e1ec-45ba-82fd-a3b2f06402b6";
    check(
        "claude",
        "claude-2.1.197.partial.jsonl",
        ENDED,
        &done,
        [2000, 100, 800, 400],
        partial,
    );

    let session = "ses_dd3f6bb12ffes1mnUawF5glhNV";
    let second = "> second-turn answer; the request held 6 messages\n";
    check("opencode", "opencode-1.18.33.jsonl", ENDED, &done, [1200, 100, 800, 0], session);
    check(
        "opencode",
        "opencode-1.18.33.resume.jsonl",
        ENDED,
        second,
        [600, 50, 400, 0],
        session,
    );

    let session = "bd809713-878f-403a-be9b-dc34f9e7e360";
    check("gemini", "gemini-0.61.0.jsonl", ENDED, &unknown, [1200, 114, 800, 0], session);
    let second = "> second-turn answer; the request held 5 contents\n";
    check("gemini", "gemini-0.61.0.resume.jsonl", ENDED, second, [600, 57, 400, 0], session);

    let session = "deb7deb9-1a02-43bd-9d06-fbc0393ba550";
    let usage = check("qwen", "qwen-0.15.10.jsonl", ENDED, &unknown, [1200, 100, 800, 0], session);
    assert_eq!(usage, Channel::Complete);
    let second = "> second-turn answer; the request held 8 messages\n";
    let usage = check(
        "qwen",
        "qwen-0.15.10.resume.jsonl",
        used(1200, 100, 800),
        second,
        [600, 50, 400, 0],
        session,
    );
    assert!(usage.reason().unwrap().contains("1000 tokens of input"), "{usage:?}");

    let session = "01a22c0a-4974-7697-a2c3-0cb30950f105";
    let second = "> second-turn answer; the request held 6 messages\n";
    check("pi", "pi-0.73.1.jsonl", ENDED, &done, [1200, 100, 800, 0], session);
    check("pi", "pi-0.73.1.resume.jsonl", ENDED, second, [600, 50, 400, 0], session);

    let ran = "$ echo hello > hello.txt && cat hello.txt => 0 hello\n> [turn 1] Done.\n";
    check("bub", "bub-0.5.1.jsonl", ENDED, ran, [1200, 100, 800, 0], "evalgrid");
    let (events, end) = read("bub", &transcript("bub-0.5.1.resume.jsonl"), ENDED);
    assert!(story(&events).starts_with("> [turn 2] You said: "));
    assert_eq!(buckets(end.usage), Some([600, 50, 400, 0]));
}

#[test]
fn turns_that_failed() {
    let check = |name: &str, file: &str, given: Given<'_>, expected: &str| {
        let (events, end) = read(name, &transcript(file), given);
        let failure = end.failure.unwrap_or_default();
        assert!(failure.contains(expected), "{file}: {failure}");
        assert_eq!(story(&events), "", "{file}: a part of an answer is no answer");
        assert_eq!(end.usage, None, "{file}: missing usage is not zero");
        assert!(matches!(end.coverage.usage, Channel::Unavailable { .. }), "{file}");
        assert!(matches!(events.last(), Some(HarnessEvent::Finished { reason, .. }) if reason.starts_with("failed: ")));
    };
    let (key, limit, cut, gone) = (
        "refused the key (401); check",
        "limits its requests",
        "broke off",
        "could not be reached",
    );
    let broken = "failed (500)";
    check("codex", "errors/codex-m401.jsonl", FAILED, key);
    check("codex", "errors/codex-m429.jsonl", FAILED, limit);
    // Codex does not tell the status.
    check("codex", "errors/codex-m500.jsonl", FAILED, "is overloaded");
    check("codex", "errors/codex-mcut.jsonl", FAILED, cut);
    // Killed from outside while it waited for the network.
    check("codex", "codex-0.171.0.error.jsonl", FAILED, gone);
    check("claude", "errors/claude-m401.jsonl", FAILED, key);
    check("claude", "errors/claude-m429.jsonl", FAILED, limit);
    check("claude", "errors/claude-m500.jsonl", FAILED, broken);
    check("claude", "errors/claude-mcut.jsonl", FAILED, cut);
    check("claude", "claude-2.1.197.error.jsonl", FAILED, gone);
    check("opencode", "errors/opencode-m401.jsonl", FAILED, key);
    check("opencode", "errors/opencode-m429.jsonl", FAILED, limit);
    check("opencode", "errors/opencode-mcut.jsonl", FAILED, cut);
    check("gemini", "errors/gemini-m401.jsonl", FAILED, key);
    check("gemini", "errors/gemini-m429.jsonl", FAILED, limit);
    check("gemini", "errors/gemini-m500.jsonl", FAILED, broken);
    check("gemini", "errors/gemini-mcut.jsonl", ENDED, cut);
    check("gemini", "errors/gemini-un.jsonl", FAILED, gone);
    // These three exit with 0.
    check("qwen", "errors/qwen-m401.jsonl", ENDED, key);
    check("qwen", "errors/qwen-m429.jsonl", ENDED, limit);
    check("qwen", "errors/qwen-m500.jsonl", ENDED, broken);
    check("qwen", "errors/qwen-mcut.jsonl", ENDED, cut);
    check("qwen", "errors/qwen-un.jsonl", ENDED, gone);
    check("pi", "errors/pi-m401.jsonl", ENDED, key);
    check("pi", "errors/pi-m429.jsonl", ENDED, limit);
    check("pi", "errors/pi-m500.jsonl", ENDED, broken);
    let own_model = Given { model: "x", ..ENDED };
    check("pi", "errors/pi-mcut.jsonl", own_model, cut);
    check("pi", "errors/pi-un.jsonl", ENDED, gone);
    check("bub", "errors/bub-m401.jsonl", FAILED, key);
    check("bub", "errors/bub-m429.jsonl", FAILED, limit);
    check("bub", "errors/bub-m500.jsonl", FAILED, broken);
    check("bub", "errors/bub-mcut.jsonl", ENDED, cut);
    check("bub", "errors/bub-un.jsonl", FAILED, gone);
}

#[test]
fn limits_of_the_agents_own_settings_are_no_failure() {
    for file in ["claude-2.1.197.maxturns.jsonl", "claude-2.1.197.maxbudget.jsonl"] {
        let (_, end) = read("claude", &transcript(file), FAILED);
        assert_eq!(end.failure, None, "{file}");
        assert!(end.diagnostics[0].contains("a limit of its settings"), "{file}");
    }
    let (events, end) = read("claude", &transcript("claude-2.1.197.denied.jsonl"), ENDED);
    assert!(story(&events).starts_with(&format!("$ {WRITE} => ? Output redirection")));
    assert_eq!((end.failure, end.diagnostics.len()), (None, 1));
}

#[test]
fn another_model_than_asked_for_is_a_failure() {
    let check = |name: &str, file: &str, model: &str, failure: Option<&str>| {
        let (_, end) = read(name, &transcript(file), Given { model, ..ENDED });
        assert_eq!(end.failure.as_deref(), failure, "{file} {model}");
    };
    let other = Some("it used the model fake-model where opus-9 was asked for");
    for (name, file) in [
        ("claude", "claude-2.1.197.jsonl"),
        ("gemini", "gemini-0.61.0.jsonl"),
        ("qwen", "qwen-0.15.10.jsonl"),
        ("pi", "pi-0.73.1.jsonl"),
        ("bub", "bub-0.5.1.jsonl"),
    ] {
        check(name, file, "opus-9", other);
        check(name, file, "anthropic/FAKE_model", None);
        check(name, file, "", None);
    }
    // These never say.
    check("codex", "codex-0.171.0.jsonl", "opus-9", None);
    check("opencode", "opencode-1.18.33.jsonl", "opus-9", None);
}

#[test]
fn what_a_stopped_turn_was_waiting_for() {
    let check = |name: &str, stdout: &[u8], stderr: &str, expected: Option<&str>| {
        let (_, end) = read(name, stdout, Given { stderr, ..STOPPED });
        assert_eq!(end.failure, None, "the time limit is not the agent's failure");
        assert_eq!(end.stalled.as_deref(), expected);
        assert!(!end.coverage.events.is_complete());
    };
    check(
        "codex",
        &transcript("codex-0.171.0.error.jsonl"),
        "",
        Some("codex was waiting for its model server: Reconnecting... waiting for network (Connection failed: error sending request)"),
    );
    check(
        "opencode",
        b"",
        "level=ERROR message=\"stream error\" error.error=\"AI_APICallError: The server had an error\"\n",
        Some("opencode was waiting for its model server: AI_APICallError: The server had an error"),
    );
    check(
        "opencode",
        &transcript("errors/opencode-mcut.jsonl"),
        "",
        Some("opencode was waiting for its model server: the answer broke off (unknown)"),
    );
    check("qwen", b"", "YOLO mode is enabled.\n", Some("qwen had told nothing yet"));
    let whole = transcript("claude-2.1.197.jsonl");
    let lines: Vec<&[u8]> = whole.split_inclusive(|byte| *byte == b'\n').collect();
    check("claude", lines[0], "", Some("claude was waiting for its model server"));
    // A tool is running.
    check("claude", &lines[..2].concat(), "", None);
    check("claude", &lines[..3].concat(), "", Some("claude was waiting for its model server"));
}

#[test]
fn calls_and_results_of_every_kind() {
    let check = |name: &str, lines: &[&str], expected: &str| {
        let (events, end) = read(name, lines.join("\n").as_bytes(), ENDED);
        assert_eq!(story(&events), expected);
        end
    };
    check(
        "codex",
        &[
            r#"{"type":"thread.started","thread_id":"t"}"#,
            r#"{"type":"item.started","item":{"id":"item_1","type":"mcp_tool_call","server":"docs","tool":"search","arguments":{"q":1},"status":"in_progress"}}"#,
            r#"{"type":"item.started","item":{"id":"item_2","type":"command_execution","command":"sleep 1","aggregated_output":"","exit_code":null,"status":"in_progress"}}"#,
            r#"{"type":"item.completed","item":{"id":"item_2","type":"command_execution","command":"sleep 1","aggregated_output":"x","exit_code":7,"status":"failed"}}"#,
            r#"{"type":"item.completed","item":{"id":"item_1","type":"mcp_tool_call","server":"docs","tool":"search","arguments":{"q":1},"error":{"message":"no"},"status":"failed"}}"#,
            r#"{"type":"item.completed","item":{"id":"item_3","type":"file_change","changes":[{"path":"/workspace/a","kind":"add"},{"path":"/workspace/b","kind":"delete"}],"status":"completed"}}"#,
            r#"{"type":"item.completed","item":{"id":"item_4","type":"web_search","query":"weather"}}"#,
            r#"{"type":"item.started","item":{"id":"item_5","type":"command_execution","command":"sleep 9","aggregated_output":"","exit_code":null,"status":"in_progress"}}"#,
            r#"{"type":"turn.completed","usage":{"input_tokens":5,"cached_input_tokens":9,"output_tokens":1}}"#,
        ],
        "$ sleep 1 => 7 x\ndocs.search(failed) error\nwrote /workspace/a /workspace/b\nweb_search()\n$ sleep 9 => ? \n",
    );
    let end = check(
        "claude",
        &[
            r#"{"type":"system","subtype":"init","cwd":"/workspace","session_id":"s","model":"fake-model"}"#,
            r#"{"type":"assistant","parent_tool_use_id":null,"message":{"model":"fake-model","content":[{"type":"text","text":"Both."},{"type":"tool_use","id":"a","name":"Edit","input":{"file_path":"src/a.rs"}},{"type":"tool_use","id":"b","name":"Bash","input":{"command":"false"}}]}}"#,
            r#"{"type":"user","message":{"content":[{"type":"tool_result","tool_use_id":"b","is_error":true,"content":"Exit code 1\nno"}]}}"#,
            r#"{"type":"user","message":{"content":[{"type":"tool_result","tool_use_id":"a","content":[{"type":"text","text":"ok"}]}]}}"#,
            r#"{"type":"user","message":{"content":[{"type":"tool_result","tool_use_id":"never-called","content":"?"}]}}"#,
            r#"{"type":"assistant","parent_tool_use_id":"a","message":{"model":"another","content":[{"type":"text","text":"a helper's words"}]}}"#,
            r#"{"type":"result","subtype":"success","is_error":false,"session_id":"s","usage":{"input_tokens":1,"output_tokens":2}}"#,
        ],
        "> Both.\n$ false => 1 Exit code 1\nno\nEdit(completed)\nwrote /workspace/src/a.rs\nunknown(completed)\n",
    );
    assert_eq!((buckets(end.usage), end.failure), (Some([1, 2, 0, 0]), None));
    // An id that is used again, a result that is told twice, and one without an id.
    let call = |id: &str, command: &str| {
        format!(
            r#"{{"type":"assistant","message":{{"content":[{{"type":"tool_use","id":"{id}","name":"Bash","input":{{"command":"{command}"}}}}]}}}}"#
        )
    };
    let result = |id: &str, text: &str| {
        format!(r#"{{"type":"user","message":{{"content":[{{"type":"tool_result","tool_use_id":"{id}","content":"{text}"}}]}}}}"#)
    };
    let lines = [
        call("a", "one"),
        result("a", "1"),
        result("a", "again"),
        call("a", "two"),
        call("b", "three"),
        result("a", "2"),
        result("", "3"),
        result("", "nothing is open"),
    ];
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    check(
        "claude",
        &lines,
        "$ one => 0 1\nunknown(completed)\n$ two => 0 2\n$ three => 0 3\nunknown(completed)\n",
    );
    let end = check(
        "cursor",
        &[
            r#"{"type":"system","subtype":"init","session_id":"c","model":"Some Model","cwd":"/workspace"}"#,
            r#"{"type":"tool_call","subtype":"started","call_id":"1","tool_call":{"shellToolCall":{"args":{"command":"ls"}}}}"#,
            r#"{"type":"tool_call","subtype":"completed","call_id":"1","tool_call":{"shellToolCall":{"args":{"command":"ls"},"result":{"success":{"exitCode":0,"stdout":"a"}}}}}"#,
            r#"{"type":"tool_call","subtype":"completed","call_id":"2","tool_call":{"writeToolCall":{"args":{"path":"/workspace/x"},"result":{"success":{"path":"/workspace/x"}}}}}"#,
            r#"{"type":"tool_call","subtype":"completed","call_id":"3","tool_call":{"readToolCall":{"args":{"path":"y"},"result":{"error":{"errorMessage":"gone"}}}}}"#,
            r#"{"type":"assistant","message":{"role":"assistant","content":[{"type":"text","text":"Done."}]},"session_id":"c"}"#,
            r#"{"type":"result","subtype":"success","is_error":false,"result":"Done.","session_id":"c"}"#,
        ],
        "$ ls => 0 a\nwrite(success)\nwrote /workspace/x\nread(error) error\n> Done.\n",
    );
    assert_eq!((end.model.as_deref(), end.failure), (Some("Some Model"), None));
    check(
        "fx",
        &["{\n  \"final_output\": \"It\",\n  \"tools\": [\"shell\"]\n}"],
        "shell()\n> It\n",
    );
    let end = check("fx", &[r#"{"error":{"message":"unexpected status 401"}}"#], "");
    assert!(end.failure.unwrap().contains("check AI_GATEWAY_API_KEY"));
}

#[test]
fn sessions_that_no_command_line_could_name() {
    for (id, kept) in [
        ("ses_dd3f6bb12ffes1mnUawF5glhNV", true),
        ("01a22c05-cd73-7c41-9dfa-05dcdc617ba6", true),
        ("--dangerous", false),
        ("a b", false),
        ("a/../b", false),
        (&"x".repeat(257), false),
    ] {
        let line = format!("{{\"type\":\"thread.started\",\"thread_id\":\"{id}\"}}");
        let (_, end) = read("codex", line.as_bytes(), ENDED);
        assert_eq!((end.session_id.is_some(), end.diagnostics.is_empty()), (kept, kept), "{id}");
    }
}

#[test]
fn hostile_output() {
    let agents = ["codex", "claude", "opencode", "gemini", "qwen", "pi", "bub", "cursor", "fx"];
    let check = |stdout: &[u8], given: Given<'_>, failure: &str| {
        for name in agents {
            let (events, end) = read(name, stdout, given);
            assert_eq!(story(&events), "", "{name}");
            let told = end.failure.unwrap_or_default();
            assert!(told.contains(failure), "{name}: {told}");
            assert_eq!((end.usage, end.session_id), (None, None), "{name}");
            assert!(matches!(end.coverage.events, Channel::Unavailable { .. }), "{name}");
            assert!(end.diagnostics.len() < 30, "{name}");
        }
    };
    let last = Given {
        stderr: "one\nnode: not found\n\n",
        exit_code: 127,
        ..ENDED
    };
    check(b"", ENDED, "it stopped before its turn was over, with status 0: it gave no reason");
    check(b"", last, "with status 127: node: not found");
    check(
        b"\x00\xff\xfe{\n{\"a\n[1]\nnull\n\"x\"\nWarning!\n",
        FAILED,
        "before its turn was over",
    );
    let deep = format!("{{\"type\":{}", "[".repeat(200_000));
    check(deep.as_bytes(), FAILED, "before its turn was over");

    // Right lines with wrong fields are read as far as they make sense, by everyone.
    let kinds = [
        "system",
        "assistant",
        "user",
        "result",
        "error",
        "item.completed",
        "item.started",
        "turn.completed",
        "turn.failed",
        "tool_use",
        "tool_result",
        "tool_call",
        "step_finish",
        "text",
        "message",
        "message_end",
        "tool_execution_start",
        "tool_execution_end",
        "agent_end",
        "init",
    ];
    let values = ["null", "1e300", "-1", "\"\\ud800\"", "[]", "{}", "[{\"type\":7},null,[[]]]", "true"];
    let keys = [
        "message",
        "item",
        "usage",
        "part",
        "stats",
        "tool_call",
        "tool_id",
        "result",
        "error",
        "content",
        "session_id",
        "payload",
        "model",
        "timestamp",
    ];
    let mut lines = String::new();
    for kind in kinds {
        for value in values {
            let fields: Vec<_> = keys.iter().map(|key| format!("\"{key}\":{value}")).collect();
            writeln!(
                lines,
                "{{\"type\":\"{kind}\",\"subtype\":\"init\",\"kind\":\"event\",{}}}",
                fields.join(",")
            )
            .unwrap();
        }
    }
    for name in agents {
        let (_, end) = read(name, lines.as_bytes(), ENDED);
        assert_eq!(end.usage, None, "{name}");
    }

    // A transcript with noise between its lines says the same, and that it is not whole.
    let noisy: Vec<u8> = transcript("claude-2.1.197.jsonl")
        .split_inclusive(|byte| *byte == b'\n')
        .flat_map(|line| [b"npm warn\n{\"type\":\n", line].concat())
        .collect();
    let (events, end) = read("claude", &noisy, ENDED);
    assert_eq!(
        story(&events),
        format!("$ {WRITE} => 0 hello-from-agent\n> Done: I wrote hello.txt.\n")
    );
    assert_eq!(end.failure, None);
    assert!(matches!(end.coverage.events, Channel::Partial { .. }));
    assert_eq!(
        end.diagnostics,
        ["10 lines of the agent's output were no JSON objects and were skipped"]
    );
}
