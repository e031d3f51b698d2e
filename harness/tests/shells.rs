//! The recorder, in real shells.
#![allow(clippy::unwrap_used)]

use std::{fs, process};

use evalgrid_harness::{Command, Harness as _, Setting, Turn, command::SYSTEM_PROMPT, recorder};

struct Ran {
    stdout: String,
    stderr: String,
    code: i32,
    /// Commands of the log, in order.
    traced: Vec<String>,
}

/// Runs `run` as the command harness would, in a HOME with the harness's files.
fn run(script: &str, env: &[(&str, &str)]) -> Ran {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().to_str().unwrap().to_owned();
    let setting = Setting {
        home: path.clone(),
        workspace: path.clone(),
        shared: format!("{path}/shared"),
        model: "m".into(),
        run: Some(script.into()),
        system_prompt: Some("Be terse.".into()),
        env: env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
        ..Setting::default()
    };
    let shared = evalgrid_harness::shared_files();
    let shared = shared
        .into_iter()
        .map(|file| (home.path().join("shared").join(file.path), file.content));
    let own = Command.files(&setting).into_iter();
    let own = own.map(|file| (home.path().join(file.path), file.content));
    for (target, content) in shared.chain(own) {
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        fs::write(target, content).unwrap();
    }
    let turn = Command
        .turn(
            &setting,
            &Turn {
                number: 1,
                prompt: "do it",
                session_id: None,
                deadline_ms: 5,
            },
        )
        .unwrap();
    let output = process::Command::new(&turn.argv[0])
        .args(&turn.argv[1..])
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .env("HOME", &path)
        .envs(&turn.env)
        .current_dir(home.path())
        .stdin(process::Stdio::null())
        .output()
        .unwrap();
    let log = fs::read(home.path().join(recorder::log(1))).unwrap_or_default();
    for line in log.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        let line: serde_json::Value = serde_json::from_str(&String::from_utf8_lossy(line)).expect("each line is JSON");
        assert_eq!(line["source"], "trap");
        assert!(line["at"].as_u64().unwrap() > 1_600_000_000_000 && line["cwd"].is_string());
    }
    Ran {
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        code: output.status.code().unwrap_or(-1),
        traced: recorder::read_log(&log).into_iter().map(|traced| traced.command).collect(),
    }
}

fn check(script: &str, code: i32, stdout: &str, traced: &[&str]) {
    let ran = run(script, &[]);
    assert_eq!((ran.code, ran.stdout.as_str(), ran.stderr.as_str()), (code, stdout, ""), "{script}");
    assert_eq!(ran.traced, traced, "{script}");
}

#[test]
fn bash_commands_are_seen_and_nothing_else_changes() {
    check("true", 0, "", &["true"]);
    check("echo a; echo b && false", 1, "a\nb\n", &["echo a", "echo b", "false"]);
    check("exit 7", 7, "", &["exit 7"]);
    check(
        "echo 'a\"b\\c'\necho \"two\nlines\tand a tab\"",
        0,
        "a\"b\\c\ntwo\nlines\tand a tab\n",
        &["echo 'a\"b\\c'", "echo \"two\nlines\tand a tab\""],
    );
    check("echo '&' \\\\ x", 0, "& \\ x\n", &["echo '&' \\\\ x"]);
    check(
        "set -eu; x=1; echo $x; false; echo never",
        1,
        "1\n",
        &["set -eu", "x=1", "echo $x", "false"],
    );
    check("set -u; f() { local a=$1; echo in $a; }; f 1", 0, "in 1\n", &["set -u", "f 1"]);
    check("(echo sub); { echo brace; }", 0, "sub\nbrace\n", &["echo brace"]);
    check(
        "true | false; echo ${PIPESTATUS[*]} $?",
        0,
        "0 1 1\n",
        &["true", "false", "echo ${PIPESTATUS[*]} $?"],
    );
    check("true last; echo $_", 0, "last\n", &["true last", "echo $_"]);
    check(
        "[[ abc =~ b(c) ]]; echo ${BASH_REMATCH[1]}",
        0,
        "c\n",
        &["[[ abc =~ b(c) ]]", "echo ${BASH_REMATCH[1]}"],
    );
    check("set -o posix; echo p", 0, "p\n", &["set -o posix", "echo p"]);
    check("shopt -s extdebug; echo runs", 0, "runs\n", &["shopt -s extdebug", "echo runs"]);
    check("trap 'echo bye' EXIT; true", 0, "bye\n", &["trap 'echo bye' EXIT", "true"]);
    // In an ERR trap, bash shows the command that failed instead of the trap's own.
    check(
        "trap 'echo ERR' ERR; set -E; true; false; true",
        0,
        "ERR\n",
        &["trap 'echo ERR' ERR", "set -E", "true", "false", "false", "true"],
    );
    check(
        "f() { trap 'echo ret' RETURN; g; echo f; }; g() { echo g; }; f",
        0,
        "g\nf\nret\n",
        &["f"],
    );
    check("trap 'echo mine' DEBUG; true", 0, "mine\n", &["trap 'echo mine' DEBUG"]);
    check(
        "bash -c 'echo nested; exit 3'; echo $?",
        0,
        "nested\n3\n",
        &["bash -c 'echo nested; exit 3'", "echo nested", "exit 3", "echo $?"],
    );
    check("sh -c 'echo dash; true'", 0, "dash\n", &["sh -c 'echo dash; true'"]);
    check("cd /; echo $-", 0, "hBc\n", &["cd /", "echo $-"]);
    check("IFS=e; set -f; echo 'te*st'", 0, "te*st\n", &["IFS=e", "set -f", "echo 'te*st'"]);
    check("exec true", 0, "", &["exec true"]);
}

#[test]
fn xtrace_shows_only_the_agents_commands() {
    let ran = run("set -x; echo a", &[]);
    assert_eq!((ran.stdout.as_str(), ran.stderr.as_str()), ("a\n", "+ echo a\n"));
}

#[test]
fn bytes_that_are_no_text_stay_one_line_each() {
    let ran = run("eval $'echo \\'a\\xffb\\x02c\\' >/dev/null'", &[("LC_ALL", "C.UTF-8")]);
    assert_eq!(ran.code, 0);
    assert!(ran.traced.iter().any(|text| text.contains("a\u{fffd}b")), "{:?}", ran.traced);
}

#[test]
fn a_log_that_cannot_be_written_costs_nothing() {
    let ran = run("rm -rf $HOME/.sphynx; echo still; bash -c 'echo inside'", &[]);
    assert_eq!((ran.code, ran.stdout.as_str(), ran.stderr.as_str()), (0, "still\ninside\n", ""));
}

#[test]
fn a_loop_does_not_fill_the_disk() {
    let ran = run("for ((i = 0; i < 30000; i++)); do :; done; echo end", &[]);
    assert_eq!((ran.code, ran.stdout.as_str(), ran.traced.len()), (0, "end\n", 20_000));
}

#[test]
fn a_command_of_any_length_is_bounded() {
    let ran = run(&format!("echo '{}' >/dev/null", "\"".repeat(60_000)), &[]);
    assert_eq!(ran.code, 0);
    assert_eq!(ran.traced[0].chars().count(), 16_384);
}

#[test]
fn zsh_is_seen_too() {
    if process::Command::new("zsh").arg("--version").output().is_err() {
        eprintln!("skipped: no zsh here");
        return;
    }
    let ran = run("zsh -c 'set -eu; echo \"a\nb\"; true'", &[]);
    assert_eq!((ran.code, ran.stdout.as_str(), ran.stderr.as_str()), (0, "a\nb\n", ""));
    assert_eq!(ran.traced[1..], ["set -eu", "echo \"a\nb\"", "true"]);
    let ran = run("echo 'echo own' > $HOME/.zshenv; zsh -c 'echo \"q\\\"\\\\\"'", &[]);
    assert_eq!(ran.stdout, "own\nq\"\\\n");
    let ran = run("echo 'echo profile' > $HOME/.zprofile; zsh -lc 'echo login'", &[]);
    assert_eq!(ran.stdout, "profile\nlogin\n");
    assert_eq!(ran.traced.last().map(String::as_str), Some("echo login"));
}

#[test]
fn the_documented_environment() {
    let ran = run(
        "env | grep -E '^(SPHYNX_|MINE)' | sed \"s,$HOME,~,\" | sort; cat $SPHYNX_SYSTEM_PROMPT_FILE; pwd | grep -c $SPHYNX_WORKSPACE",
        &[("MINE", "1"), ("SPHYNX_MODEL", "not mine to set")],
    );
    let expected = format!(
        "MINE=1\nSPHYNX_DEADLINE_MS=5\nSPHYNX_HOME=~\nSPHYNX_MODEL=m\nSPHYNX_PROMPT=do it\nSPHYNX_SYSTEM_PROMPT_FILE=~/{SYSTEM_PROMPT}\n\
         SPHYNX_TRACE_LOG=~/.sphynx-trace.ndjson\nSPHYNX_WORKSPACE=~\nBe terse.1\n"
    );
    assert_eq!(ran.stdout, expected);
}
