//! What the drivers start, with which files and variables, for settings with and without a profile, a system prompt, a session, a model server.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use evalgrid_domain::limits::MAX_PROCESS_STRING_BYTES;
use evalgrid_harness::{Harness, HarnessError, Place, ProfileFiles, Setting, Source, TextFile, Turn, TurnCommand, all, by_name};

fn setting() -> Setting {
    Setting {
        home: "/home/agent".into(),
        workspace: "/workspace".into(),
        tools: "/tools".into(),
        model: "m-1".into(),
        credential: [("apiKey".to_owned(), "secret-key".to_owned())].into(),
        env: map(&[("MINE", "yes"), ("NO_COLOR", "mine")]),
        ..Setting::default()
    }
}

fn with_server() -> Setting {
    let mut setting = setting();
    setting.credential.insert("baseUrl".into(), "http://127.0.0.1:9/v1/".into());
    setting
}

fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect()
}

fn harness(name: &str) -> &'static dyn Harness {
    by_name(name).unwrap()
}

fn turn(name: &str, setting: &Setting, session_id: Option<&str>, prompt: &str) -> Result<TurnCommand, HarnessError> {
    harness(name).turn(
        setting,
        &Turn {
            number: 1,
            prompt,
            session_id,
            deadline_ms: 5,
        },
    )
}

fn files(name: &str, setting: &Setting) -> BTreeMap<String, TextFile> {
    let files = harness(name).files(setting).into_iter();
    files
        .map(|file| {
            let place = if file.place == Place::Home { "~" } else { "." };
            (format!("{place}/{}", file.path), file)
        })
        .collect()
}

const BUILT_IN: [&str; 9] = ["codex", "claude", "opencode", "gemini", "qwen", "pi", "bub", "cursor", "fx"];

#[test]
fn command_lines() {
    let check = |name: &str, setting: &Setting, session: Option<&str>, expected: &str| {
        let command = turn(name, setting, session, "do it").unwrap();
        assert_eq!(command.argv.join(" "), expected);
        assert_eq!(command.env["MINE"], "yes");
    };
    let codex = if cfg!(target_arch = "aarch64") {
        "/tools/codex-0.171.0/node_modules/@openai/codex-linux-arm64/vendor/aarch64-unknown-linux-musl/bin/codex"
    } else {
        "/tools/codex-0.171.0/node_modules/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex"
    };
    let flags = "--json --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox";
    let quiet = "-c analytics.enabled=false -c check_for_update_on_startup=false";
    let plain = setting();
    let server = with_server();
    let prompted = Setting {
        system_prompt: Some("Be \"terse\".\n".into()),
        ..setting()
    };
    check("codex", &plain, None, &format!("{codex} exec {flags} --model m-1 {quiet} -- do it"));
    check(
        "codex",
        &Setting {
            model: String::new(),
            ..prompted.clone()
        },
        Some("s"),
        &format!("{codex} exec resume {flags} {quiet} -c developer_instructions=\"Be \\\"terse\\\".\\n\" -- s do it"),
    );
    let provider = "-c model_provider=\"evalgrid\" -c model_providers.evalgrid.base_url=\"http://127.0.0.1:9/v1\" \
                    -c model_providers.evalgrid.name=\"evalgrid\" -c model_providers.evalgrid.env_key=\"OPENAI_API_KEY\" \
                    -c model_providers.evalgrid.wire_api=\"responses\" -c model_providers.evalgrid.request_max_retries=0 \
                    -c model_providers.evalgrid.stream_max_retries=0 -c model_providers.evalgrid.stream_idle_timeout_ms=300000";
    check(
        "codex",
        &server,
        None,
        &format!("{codex} exec {flags} --model m-1 {quiet} {provider} -- do it"),
    );

    let claude = "/tools/claude-2.1.197/node_modules/.bin/claude -p --output-format stream-json --verbose --bare --dangerously-skip-permissions --model m-1";
    check("claude", &plain, None, &format!("{claude} -- do it"));
    check(
        "claude",
        &prompted,
        Some("s"),
        &format!("{claude} --append-system-prompt-file /home/agent/.sphynx/system-prompt.md --resume s -- do it"),
    );
    let profiled = |home: &[(&str, &str)], workspace: &[(&str, &str)]| Setting {
        profile: Some(ProfileFiles {
            home: map(home),
            workspace: map(workspace),
        }),
        ..setting()
    };
    check(
        "claude",
        &profiled(&[], &[]),
        None,
        &format!("{claude} --add-dir /workspace -- do it"),
    );
    check(
        "claude",
        &profiled(&[(".claude/settings.json", "{}"), (".mcp.json", "{}")], &[(".mcp.json", "{}")]),
        None,
        &format!("{claude} --add-dir /workspace --settings /home/agent/.claude/settings.json --mcp-config /workspace/.mcp.json -- do it"),
    );

    let opencode = "/tools/opencode-1.18.33/node_modules/.bin/opencode run --format json --print-logs --log-level ERROR --model";
    check("opencode", &plain, None, &format!("{opencode} m-1 -- do it"));
    check(
        "opencode",
        &server,
        Some("s"),
        &format!("{opencode} evalgrid/m-1 --session s -- do it"),
    );
    let gemini = "/tools/gemini-0.61.0/node_modules/.bin/gemini --skip-trust --yolo --output-format stream-json --model m-1";
    check("gemini", &plain, None, &format!("{gemini} --prompt=do it"));
    check("gemini", &server, None, &format!("{gemini} --prompt=do it"));
    let qwen = "/tools/qwen-0.15.10/node_modules/.bin/qwen --auth-type openai --yolo --output-format stream-json --model m-1";
    check("qwen", &plain, None, &format!("{qwen} do it"));
    check("qwen", &server, Some("s"), &format!("{qwen} --resume s do it"));
    let pi = |setting: &Setting, session| turn("pi", setting, session, "do it").unwrap().argv[3..].join(" ");
    let program = "pi /tools/pi-0.73.1/node_modules/.bin/pi --mode json -p";
    assert_eq!(pi(&plain, None), format!("{program} --model m-1 do it"));
    let second = format!("{program} --provider evalgrid --model m-1 --session s do it");
    assert_eq!(pi(&server, Some("s")), second);
    let bub = turn("bub", &plain, Some("evalgrid"), "do it").unwrap().argv;
    assert_eq!(
        bub[3..].join(" "),
        "bub /tools/bub-0.5.1/bin/python -m bub --workspace /workspace run --session-id evalgrid -- do it"
    );
    let configured = Setting {
        program: Some("/opt/agent".into()),
        ..setting()
    };
    check(
        "cursor",
        &configured,
        Some("s"),
        "/opt/agent -p --output-format stream-json --force --model m-1 --resume s -- do it",
    );
    check("fx", &configured, None, "/opt/agent ask --json do it");
    assert_eq!(pi(&configured, None), "pi /opt/agent --mode json -p --model m-1 do it");
    let bub = turn("bub", &configured, None, "do it").unwrap().argv;
    assert_eq!(bub[3..6].join(" "), "bub /opt/agent --workspace");
}

#[test]
fn prompts_are_never_options() {
    let configured = Setting {
        program: Some("/opt/agent".into()),
        ..setting()
    };
    for name in BUILT_IN {
        let argv = turn(name, &configured, None, "--help").unwrap().argv;
        let prompt = argv.last().unwrap();
        let guarded = argv[argv.len() - 2] == "--" || prompt == " --help" || prompt == "--prompt=--help";
        assert!(guarded, "{name}: {argv:?}");
    }
    for name in ["pi", "fx", "qwen"] {
        let argv = turn(name, &configured, None, "@file").unwrap().argv;
        assert_eq!(argv.last().unwrap(), " @file");
    }
}

#[test]
fn variables() {
    let check = |name: &str, setting: &Setting, expected: &[(&str, &str)]| {
        let env = turn(name, setting, None, "do it").unwrap().env;
        for (variable, value) in expected {
            assert_eq!(env.get(*variable).map(String::as_str), Some(*value), "{name} {variable}");
        }
        env
    };
    let (plain, server) = (setting(), with_server());
    let url = "http://127.0.0.1:9/v1";
    let env = check("codex", &plain, &[("CODEX_HOME", "/home/agent/.codex")]);
    assert!(!env.contains_key("OPENAI_API_KEY"), "it is in auth.json");
    check("codex", &server, &[("OPENAI_API_KEY", "secret-key")]);
    let env = check(
        "claude",
        &plain,
        &[
            ("ANTHROPIC_API_KEY", "secret-key"),
            ("IS_SANDBOX", "1"),
            ("CLAUDE_CODE_MAX_RETRIES", "0"),
        ],
    );
    assert!(!env.contains_key("ANTHROPIC_BASE_URL"));
    check("claude", &server, &[("ANTHROPIC_BASE_URL", url)]);
    let env = check("gemini", &plain, &[("GEMINI_API_KEY", "secret-key"), ("NO_COLOR", "1")]);
    assert!(!env.contains_key("GOOGLE_GEMINI_BASE_URL"));
    check("gemini", &server, &[("GOOGLE_GEMINI_BASE_URL", url)]);
    check(
        "qwen",
        &plain,
        &[("OPENAI_BASE_URL", "https://dashscope.aliyuncs.com/compatible-mode/v1")],
    );
    check(
        "qwen",
        &server,
        &[("OPENAI_API_KEY", "secret-key"), ("OPENAI_BASE_URL", url), ("OPENAI_MODEL", "m-1")],
    );
    check(
        "opencode",
        &server,
        &[("OPENCODE_API_KEY", "secret-key"), ("OPENCODE_DISABLE_MODELS_FETCH", "1")],
    );
    check("pi", &server, &[("PI_API_KEY", "secret-key"), ("PI_OFFLINE", "1")]);
    check(
        "bub",
        &server,
        &[("BUB_API_BASE", url), ("BUB_API_KEY", "secret-key"), ("BUB_MODEL", "openai:m-1")],
    );
    for (model, expected) in [("m-1", "openai:m-1"), ("anthropic/m", "anthropic:m"), ("groq:a/b", "groq:a/b")] {
        let other = Setting {
            model: model.into(),
            ..setting()
        };
        check("bub", &other, &[("BUB_MODEL", expected)]);
    }
    let configured = Setting {
        program: Some("/opt/agent".into()),
        ..setting()
    };
    check("cursor", &configured, &[("CURSOR_API_KEY", "secret-key")]);
    check(
        "fx",
        &configured,
        &[
            ("AI_GATEWAY_API_KEY", "secret-key"),
            ("FX_MODEL", "m-1"),
            ("FX_PERMISSION_MODE", "yolo"),
        ],
    );
}

#[test]
fn files_that_agents_need() {
    let check = |name: &str, setting: &Setting, expected: &[&str]| {
        let files = files(name, setting);
        assert_eq!(files.keys().map(String::as_str).collect::<Vec<_>>(), expected, "{name}");
        for (path, file) in &files {
            let secret = String::from_utf8_lossy(&file.content).contains("secret-key");
            assert_eq!(
                file.private, secret,
                "{name} {path}: whatever holds the key is private, and nothing else"
            );
            assert_eq!(file.prepend, file.place == Place::Workspace, "{name} {path}");
        }
        files
    };
    let prompt = "~/.sphynx/system-prompt.md";
    let (plain, server) = (setting(), with_server());
    let prompted = Setting {
        system_prompt: Some("Be terse.\n".into()),
        ..setting()
    };
    let auth = &check("codex", &plain, &["~/.codex/auth.json"])["~/.codex/auth.json"].content;
    let auth: serde_json::Value = serde_json::from_slice(auth).unwrap();
    assert_eq!(auth, serde_json::json!({"auth_mode": "apikey", "OPENAI_API_KEY": "secret-key"}));
    check("codex", &prompted, &["~/.codex/auth.json", prompt]);
    check("claude", &plain, &[]);
    check("claude", &prompted, &[prompt]);
    check("opencode", &server, &[]);
    check("gemini", &plain, &["~/.gemini/settings.json"]);
    let files = check("gemini", &prompted, &["./GEMINI.md", "~/.gemini/settings.json", prompt]);
    assert_eq!(files["./GEMINI.md"].content, b"Be terse.\n\n");
    check("qwen", &prompted, &["./AGENTS.md", "~/.qwen/settings.json", prompt]);
    check("pi", &plain, &["~/.pi/agent/auth.json", "~/.pi/agent/settings.json"]);
    let files = check("pi", &server, &["~/.pi/agent/models.json", "~/.pi/agent/settings.json"]);
    let models: serde_json::Value = serde_json::from_slice(&files["~/.pi/agent/models.json"].content).unwrap();
    let provider = &models["providers"]["evalgrid"];
    assert_eq!(
        (&provider["baseUrl"], &provider["apiKey"]),
        (&"http://127.0.0.1:9/v1".into(), &"PI_API_KEY".into())
    );
    for name in ["bub", "cursor", "fx"] {
        check(name, &plain, &[]);
        check(name, &prompted, &["./AGENTS.md", prompt]);
    }
}

#[test]
fn opencode_gets_the_profiles_own_settings_over_ours() {
    let check = |setting: &Setting, path: &str, expected: serde_json::Value| {
        let env = turn("opencode", setting, None, "do it").unwrap().env;
        let config: serde_json::Value = serde_json::from_str(&env["OPENCODE_CONFIG_CONTENT"]).unwrap();
        assert_eq!(config.pointer(path), Some(&expected).filter(|value| !value.is_null()), "{config}");
        assert!(!env["OPENCODE_CONFIG_CONTENT"].contains("secret-key"));
    };
    let mut setting = with_server();
    check(&setting, "/permission", "allow".into());
    check(&setting, "/provider/evalgrid/options/baseURL", "http://127.0.0.1:9/v1".into());
    check(&setting, "/instructions", serde_json::Value::Null);
    setting.system_prompt = Some("Be terse.".into());
    let own = "/home/agent/.sphynx/system-prompt.md";
    check(&setting, "/instructions", serde_json::json!([own]));
    let theirs = r#"{"permission":{"bash":"deny"},"instructions":["RULES.md"],"provider":{"evalgrid":{"options":{"timeout":5}}}}"#;
    setting.profile = Some(ProfileFiles {
        home: map(&[(".config/opencode/opencode.json", theirs)]),
        workspace: map(&[("opencode.json", "// no plain JSON\n{}")]),
    });
    check(&setting, "/permission", serde_json::json!({"bash": "deny"}));
    check(&setting, "/instructions", serde_json::json!(["RULES.md", own]));
    check(&setting, "/provider/evalgrid/options/timeout", 5.into());
    check(&setting, "/provider/evalgrid/options/apiKey", "{env:OPENCODE_API_KEY}".into());
    setting.profile = Some(ProfileFiles {
        home: map(&[(".config/opencode/opencode.json", r#"{"permission":"ask"}"#)]),
        workspace: map(&[("opencode.json", r#"{"permission":"deny"}"#)]),
    });
    check(&setting, "/permission", "deny".into());
}

#[test]
fn what_cannot_be_started_is_refused() {
    let check = |name: &str, setting: &Setting, prompt: &str, expected: &str| {
        let error = turn(name, setting, None, prompt).unwrap_err().to_string();
        assert!(error.contains(expected), "{name}: {error}");
    };
    let long = "x".repeat(MAX_PROCESS_STRING_BYTES + 1);
    let configured = Setting {
        program: Some("/opt/agent".into()),
        ..setting()
    };
    for name in BUILT_IN {
        check(name, &configured, &long, "bytes long");
        let keyless = Setting {
            credential: BTreeMap::new(),
            ..configured.clone()
        };
        check(name, &keyless, "p", &format!("{name} needs a key"));
    }
    for name in ["cursor", "fx"] {
        check(name, &setting(), "p", "its operator must configure the program");
    }
    let instructed = Setting {
        system_prompt: Some(long),
        ..setting()
    };
    check("codex", &instructed, "p", "the system prompt");
    assert!(turn("claude", &instructed, None, "p").is_ok(), "it is read from a file");
}

#[test]
fn installs_are_pinned() {
    for harness in all() {
        let Some(install) = harness.install() else {
            assert_eq!(harness.name(), "command");
            continue;
        };
        assert_eq!(install.name, harness.name());
        let configured = install.source == Source::Configured;
        assert_eq!(install.version.is_empty(), configured);
        assert_eq!(install.program.is_empty(), configured);
        assert!(!install.version_args.is_empty());
    }
    assert!(by_name("unheard-of").is_none());
}
