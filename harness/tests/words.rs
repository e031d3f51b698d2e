//! Agents that only answer in words, as judges and people: how they are started, and what is read out of their answers.
#![allow(clippy::unwrap_used)]

use evalgrid_domain::{evidence::Role, limits::MAX_PROCESS_STRING_BYTES};
use evalgrid_harness::{HarnessError, HarnessEvent, Place, Purpose, Setting, Spoken, Turn, TurnCommand, TurnOutput, by_name};

fn setting() -> Setting {
    Setting {
        purpose: Purpose::Words,
        home: "/home/agent".into(),
        workspace: "/workspace".into(),
        tools: "/tools".into(),
        model: "m-1".into(),
        credential: [("apiKey".to_owned(), "secret-key".to_owned())].into(),
        ..Setting::default()
    }
}

fn turn(name: &str, setting: &Setting, number: u32, session_id: Option<&str>, prompt: &str) -> Result<TurnCommand, HarnessError> {
    let turn = Turn {
        number,
        prompt,
        session_id,
        deadline_ms: 5,
    };
    by_name(name).unwrap().turn(setting, &turn)
}

/// Those that read their prompt from a file.
const FROM_FILE: [&str; 7] = ["codex", "claude", "opencode", "gemini", "qwen", "pi", "bub"];

#[test]
fn command_lines() {
    let check = |name: &str, session: Option<&str>, contains: &[&str]| {
        let command = turn(name, &setting(), 3, session, "do it").unwrap();
        let line = command.argv.join(" ");
        for part in contains {
            assert!(line.contains(part), "{name}: {part:?} is not in {line}");
        }
        for never in ["dangerously", "--yolo", "--force", "do it", "secret-key"] {
            assert!(!line.contains(never), "{name}: {never} is in {line}");
        }
        assert!(!command.env.values().any(|value| value == "yolo"));
        command
    };
    let claude = [
        "--bare --tools  --permission-mode dontAsk --disable-slash-commands --model m-1",
        "--resume s",
    ];
    let command = check("claude", Some("s"), &claude);
    assert_eq!(&command.argv[..2], ["/bin/bash", "-c"]);
    assert_eq!(&command.argv[3..5], ["claude", "/home/agent/.evalgrid/prompt-3"]);
    check(
        "codex",
        None,
        &[
            "exec --json",
            "-c sandbox_mode=\"read-only\" -c approval_policy=\"never\"",
            "features.shell_tool=false",
            "-- -",
        ],
    );
    check("codex", Some("s"), &["exec resume --json", "-- s -"]);
    check("gemini", None, &["--approval-mode default"]);
    check(
        "qwen",
        Some("s"),
        &[
            "--bare --exclude-tools read_file,edit,run_shell_command --approval-mode default",
            "--resume s",
        ],
    );
    check("pi", Some("s"), &["--no-tools --no-extensions --no-skills", "--session s"]);
    let command = check("opencode", None, &["--title evalgrid"]);
    assert!(command.env["OPENCODE_CONFIG_CONTENT"].contains(r#""permission":"deny""#));
    check("bub", None, &["bin/python -c import runpy", "-- /home/agent/.evalgrid/prompt-3"]);

    let settings = by_name("gemini").unwrap().files(&setting());
    let settings = settings.iter().find(|file| file.path.ends_with("settings.json")).unwrap();
    assert!(String::from_utf8_lossy(&settings.content).contains(r#""core": []"#));

    let configured = Setting {
        program: Some("/opt/agent".into()),
        ..setting()
    };
    let line = |name: &str| turn(name, &configured, 1, None, "do it").unwrap().argv.join(" ");
    assert_eq!(
        line("cursor"),
        "/opt/agent -p --output-format stream-json --mode ask --trust --model m-1 -- do it"
    );
    assert_eq!(line("fx"), "/opt/agent ask --json do it");
    assert!(
        !turn("fx", &configured, 1, None, "do it")
            .unwrap()
            .env
            .contains_key("FX_PERMISSION_MODE")
    );
    // An operator's own program takes no Python.
    assert!(line("bub").ends_with("-- do it"));
}

#[test]
fn prompts_come_from_files_of_any_length() {
    let long = "é".repeat(MAX_PROCESS_STRING_BYTES);
    for name in FROM_FILE {
        let content = |prompt: &str| {
            let command = turn(name, &setting(), 2, None, prompt).unwrap();
            let [file] = &command.files[..] else { panic!("{name}: one file") };
            assert_eq!(
                (file.place, file.path.as_str(), file.private),
                (Place::Home, ".evalgrid/prompt-2", true)
            );
            assert!(command.argv.iter().all(|argument| argument.len() < 2_000), "{name}");
            String::from_utf8(file.content.clone()).unwrap()
        };
        for prompt in [&long, "--help", "@file", "a\n/clear", ""] {
            assert_eq!(content(prompt), *prompt);
        }
        // Nobody else's words are a command to the agent.
        assert_eq!(content("/clear"), "> /clear");
        assert_eq!(content(" \n/clear"), ">  \n/clear");
    }
    let configured = Setting {
        program: Some("/opt/agent".into()),
        ..setting()
    };
    for name in ["cursor", "fx", "bub"] {
        let error = turn(name, &configured, 1, None, &long).unwrap_err();
        assert!(matches!(error, HarnessError::TooLong { .. }), "{name}: {error}");
    }
    // Work has no files.
    let work = Setting {
        purpose: Purpose::Work,
        ..setting()
    };
    for name in FROM_FILE {
        assert_eq!(turn(name, &work, 1, None, "do it").unwrap().files, []);
    }
}

#[test]
fn the_answer_and_what_was_used_instead() {
    let check = |events: Vec<HarnessEvent>, answer: Option<&str>, tools: &[&str]| {
        let mut spoken = Spoken::default();
        events.into_iter().for_each(|event| spoken.take(event));
        assert_eq!(
            (spoken.answer.as_deref(), spoken.tools),
            (answer, tools.iter().map(|tool| (*tool).to_owned()).collect())
        );
    };
    let says = |role, text: &str| HarnessEvent::Message {
        at: 1.0,
        role,
        text: text.into(),
        usage: None,
    };
    let tool = |name: &str| HarnessEvent::ToolCall {
        at: 1.0,
        started_at: None,
        call_id: None,
        name: name.into(),
        input: String::new(),
        output: None,
        error: None,
        status: None,
    };
    let command = HarnessEvent::Command {
        at: 1.0,
        started_at: None,
        command: "id".into(),
        exit_code: None,
        output: String::new(),
    };
    let change = HarnessEvent::FileChange {
        at: 1.0,
        paths: vec!["/a".into()],
    };
    check(vec![], None, &[]);
    check(
        vec![says(Role::Assistant, "a"), says(Role::Assistant, "b"), says(Role::User, "c")],
        Some("b"),
        &[],
    );
    check(
        vec![
            tool("Read"),
            command.clone(),
            change,
            tool("Read"),
            command,
            says(Role::Assistant, "a"),
        ],
        Some("a"),
        &["Read", "a command", "a file change"],
    );
    check(
        (0..20).map(|number| tool(&number.to_string())).collect(),
        None,
        &["0", "1", "2", "3", "4", "5", "6", "7"],
    );
}

/// Codex does not tell calls of tools that it does not have; its record does.
#[test]
fn codex_tells_all_calls_by_its_record() {
    let lines = r#"{"type":"thread.started","thread_id":"t"}
{"type":"item.completed","item":{"id":"item_0","type":"agent_message","text":"hi"}}
{"type":"turn.completed","usage":{"input_tokens":10,"cached_input_tokens":4,"output_tokens":5}}
{"timestamp":"2026-11-30T22:37:42.182Z","ordinal":9,"type":"response_item","payload":{"type":"function_call","id":"fc_1","name":"exec_command","arguments":"{\"cmd\":\"id\"}","call_id":"call_1"}}
{"timestamp":"2026-11-30T22:37:42.183Z","ordinal":10,"type":"response_item","payload":{"type":"custom_tool_call","name":"apply_patch","input":"*** Begin Patch","call_id":"call_2"}}
{"timestamp":"2026-11-30T22:37:42.184Z","ordinal":11,"type":"response_item","payload":{"type":"web_search_call","status":"completed","action":{"type":"search","query":"q"}}}
"#;
    let (mut spoken, mut inputs) = (Spoken::default(), Vec::new());
    let output = TurnOutput {
        stdout: &mut lines.as_bytes(),
        stdout_tail: None,
        stdout_times: &mut std::io::empty(),
        stderr: "",
        trace: b"",
        exit_code: 0,
        timed_out: false,
        finished_at_ms: 1,
        model: "m-1",
        earlier: None,
    };
    let end = by_name("codex").unwrap().read(output, &mut |event| {
        if let HarnessEvent::ToolCall { input, .. } = &event {
            inputs.push(input.clone());
        }
        spoken.take(event);
    });
    let end = end.unwrap();
    assert_eq!((end.failure, end.session_id.as_deref()), (None, Some("t")));
    assert_eq!(spoken.answer.as_deref(), Some("hi"));
    assert_eq!(spoken.tools, ["exec_command", "apply_patch", "web_search_call"]);
    assert_eq!(inputs, [r#"{"cmd":"id"}"#, "*** Begin Patch", r#"{"query":"q","type":"search"}"#]);
}
