//! Verify commands, planned and then really run by bash: the exit code and the output must be those of the command as it was written.
#![allow(clippy::unwrap_used)]

use std::process::Command;

use evalgrid_domain::verify::{VerifyPlan, plan, read_steps};

const MARKER: &str = "mark-0123456789abcdef";

fn bash(script: &str) -> (i32, String) {
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new("bash")
        .args(["--noprofile", "--norc", "-c", script])
        .current_dir(&folder)
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .output();
    let output = output.unwrap();
    (
        output.status.code().unwrap_or(-1),
        String::from_utf8_lossy(&output.stdout).replace(folder.path().to_str().unwrap(), "DIR"),
    )
}

/// The command is split; `codes` are the exit codes of the steps that run.
fn check_steps(command: &str, codes: &[i64]) {
    let VerifyPlan::Steps { script, steps, marker } = plan(command, MARKER) else {
        panic!("not split: {command}: {:?}", plan(command, MARKER));
    };
    let (code, output) = bash(&script);
    let (plain_code, plain_output) = bash(command);
    let (clean, ran) = read_steps(&output, &marker, &steps);
    assert_eq!(code, plain_code, "{command}");
    assert_eq!(clean, plain_output, "{command}");
    assert_eq!(ran.iter().map(|step| step.exit_code).collect::<Vec<_>>(), codes, "{command}");
    for (step, text) in ran.iter().zip(&steps) {
        assert_eq!(step.command, *text);
    }
}

#[test]
fn steps_run_as_written() {
    for (command, codes) in [
        ("true && true", &[0, 0][..]),
        ("true && false", &[0, 1]),
        ("false && true", &[1]),
        ("true&&true&&(exit 7)&&true", &[0, 0, 7]),
        ("echo a && echo b >&2 && printf c", &[0, 0, 0]),
        ("printf 'no newline' && printf '\\n\\n' && echo end", &[0, 0, 0]),
        ("mkdir -p d && cd d && pwd && x=1 && test $x = 1", &[0, 0, 0, 0, 0]),
        ("f() { echo \"f $1\"; } && f 1 && f 2", &[0, 0, 0]),
        ("f() { true && false; } && f", &[0, 1]),
        ("export A='a && b' && test \"$A\" = 'a && b'", &[0, 0]),
        ("test \"$(echo a | wc -l)\" -eq 1 && echo ok", &[0, 0]),
        ("test $(echo a | wc -l) -eq 1 && echo ok", &[0, 0]),
        ("test `echo a | wc -l` -eq 1 && echo ok", &[0, 0]),
        ("echo \"$(echo \"$(echo '\")')\")\" && echo ok", &[0, 0]),
        ("[[ a && b ]] && [[ ab =~ a|b ]] && echo both", &[0, 0, 0]),
        ("[[ a == b ]] && echo never", &[1]),
        ("(( 1 | 2 )) && echo \"$((4|1))\" && echo ${HOME:-a|b}", &[0, 0, 0]),
        ("(cd / && pwd) && pwd", &[0, 0]),
        ("{ false && true; true; } && echo group", &[0, 0]),
        ("! false && ! grep -q x /dev/null && echo not", &[0, 0, 0]),
        ("false || true && echo c", &[0, 0]),
        ("exit 3 && true", &[3]),
        ("exit 0 && false", &[0]),
        ("true && exit 9", &[0, 9]),
        ("true &&\n  true &&\\\n  echo lines", &[0, 0, 0]),
        ("  true && echo spaces  \n", &[0, 0]),
        ("nonexistent-command-x && true", &[127]),
        ("true && /dev/null", &[0, 126]),
        ("echo 'it'\\''s' && echo \"a\\\"&&b\" && echo $'x\\'&&y'", &[0, 0, 0]),
        ("echo a\\&\\&b && echo a\\|b", &[0, 0]),
        ("set -e && false && true", &[0, 1]),
        ("set -e && f() { false; echo went on; } && f", &[0, 0, 1]),
        ("set -o pipefail && false | true && echo never", &[0, 1]),
        ("set -o pipefail && true | true && echo ok", &[0, 0, 0]),
        ("set -u && echo ${nothing-default}", &[0, 0]),
        (
            "echo x > file && cat < file && cat file 2>&1 && echo y >| file && echo z &> file",
            &[0, 0, 0, 0, 0],
        ),
        ("cat <<< 'here && string' && echo ok", &[0, 0]),
        ("diff <(echo a | cat) <(echo a) && echo same", &[0, 0]),
        ("a=(1 '2 && 3') && echo ${#a[@]}", &[0, 0]),
        ("A=1 B=2 env && echo \"$?\"", &[0, 0]),
        ("echo 'A=1' > env.sh && . ./env.sh && test $A = 1", &[0, 0, 0]),
        ("true && kill -TERM $BASHPID", &[0]),
        ("time true && echo timed", &[0, 0]),
        ("true && 'unclosed'\"quote\" --x", &[0, 127]),
        ("echo mark-0123456789abcdef 1 0 && echo mark-0123456789abcdef", &[0, 0]),
        ("echo é && echo ü", &[0, 0]),
    ] {
        if command.contains("kill") {
            // The signal ends the shell in both cases; whether the last step is reported on the way out is bash's affair.
            let VerifyPlan::Steps { script, .. } = plan(command, MARKER) else {
                panic!("not split: {command}")
            };
            assert_eq!(bash(&script).0, bash(command).0);
            continue;
        }
        if command.starts_with("echo mark") {
            // A command that guesses the marker can only spoil its own evidence, never the verdict.
            let VerifyPlan::Steps { script, .. } = plan(command, MARKER) else {
                panic!("not split: {command}")
            };
            assert_eq!(bash(&script).0, 0);
            continue;
        }
        check_steps(command, codes);
    }
}

#[test]
fn left_alone() {
    for command in [
        "",
        "   ",
        "true",
        "npm test",
        "a; b",
        "true && true; false",
        "cd app\nnpm test && npm run lint",
        "true && false || true",
        "true & wait && true",
        "if true && false; then echo a; fi",
        "for i in 1 2; do true && false; done && echo",
        "while false; do :; done && true",
        "case a|b in a) ;; esac && true",
        "case a in a|b) true;; esac",
        "cat <<EOF && true\na | b && c\nEOF",
        "true # && false",
        "true && # comment\ntrue",
        "set -x && true",
        "trap 'echo bye' EXIT && true",
        "exec true && true",
        "echo 'unclosed && true",
        "echo \"$(unclosed && true",
        "echo `unclosed && true",
        "(true && true",
        "true) && true",
        "{ true && true",
        "&& true",
        "true &&",
        "true && && true",
        "alias a=b && a",
        "echo $(case x in x) echo 'a|b';; esac) && true",
        "\"&&\"",
        "'a && b'",
        "[[ a && b",
        "echo ${a && true",
    ] {
        assert_eq!(plan(command, MARKER), VerifyPlan::Single(command.to_owned()), "{command}");
    }
}

#[test]
fn pipelines() {
    for command in [
        "a | b",
        "a|b",
        "a |& b",
        "npm test | tee log",
        "cd x && npm test | tee log",
        "npm test | tee log && true",
        "true; a | b",
        "(a | b)",
        "{ a | b; } && c",
        "if a | b; then c; fi",
        "a || b | c",
        "cat <<EOF | grep x\nbody\nEOF",
        "echo 'x' | grep y # z",
        "f() { a | b; } && f",
        "a \\\n | b",
        "a 2>&1 | b",
    ] {
        let VerifyPlan::Refused(message) = plan(command, MARKER) else {
            panic!("not refused: {command}")
        };
        assert!(message.contains("pipeline") && message.len() < 500, "{message}");
    }
    for command in [
        "set -o pipefail; a | b",
        "a | b; test ${PIPESTATUS[0]} -eq 0",
        "echo 'a | b'",
        "echo \"a | b\"",
        "echo a \\| b",
        "test \"$(a | b)\" = c",
        "test $(a | b) = c",
        "test `a | b` = c",
        "a || b",
        "[[ a =~ b|c ]]",
        "(( a | b ))",
        "echo $((a | b))",
        "echo ${a/x|y/z}",
        "case a in b|c) d;; esac",
        "cat <<EOF\na | b\nEOF",
        "true # a | b",
        "bash -o pipefail -c 'a | b'",
        "ls @(a|b)",
        "diff <(a | b) c",
        "echo a >| b",
    ] {
        assert!(!matches!(plan(command, MARKER), VerifyPlan::Refused(_)), "{command}");
    }
}

#[test]
fn steps_lost_with_the_middle_of_an_output_are_known() {
    let steps = ["a", "b", "c"].map(str::to_owned);
    let (clean, ran) = read_steps("head\n[cut]\nmark 3 5\ntail", "mark", &steps);
    assert_eq!(clean, "head\n[cut]tail");
    assert_eq!(
        ran.iter().map(|step| (step.command.as_str(), step.exit_code)).collect::<Vec<_>>(),
        [("a", 0), ("b", 0), ("c", 5)]
    );
    for noise in [
        "mark",
        "mark ",
        "mark 1",
        "mark 1 0",
        "mark 0 0\n",
        "mark 4 0\n",
        "mark 1 256\n",
        "mark x y\n",
        "mark  1 0\n",
    ] {
        assert_eq!(read_steps(noise, "mark", &steps), (noise.to_owned(), vec![]), "{noise}");
    }
}

mod properties {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn planning_never_panics(command in "[ab &|;(){}\\[\\]<>'\"`$\\\\#=!\n\té]{0,60}") {
            plan(&command, MARKER);
        }
    }

    /// Pieces of shell, joined at random: the exit code and output are always those of the plain command.
    fn piece() -> impl Strategy<Value = &'static str> {
        prop::sample::select(vec![
            "true",
            "false",
            "(exit 3)",
            "echo a",
            "printf b",
            "x=1",
            "test \"$x\" = 1",
            "{ true; false; }",
            "(cd /; false)",
            "! true",
            "! false",
            "[[ -n $x ]]",
            "f() { return 4; }",
            "f",
            "set -e",
            "exit 5",
            "cd /",
            "pwd",
            "echo \"$(false; echo c)\"",
            "((0))",
            "echo 'q && q'",
            "false || true",
            "eval 'false'",
            "y=$(exit 6)",
        ])
    }

    fn joint() -> impl Strategy<Value = &'static str> {
        prop::sample::select(vec![" && ", " && ", " && ", "&&", " || ", "; ", "\n", " &&\n", " | "])
    }

    fn check_as_written(command: &str) -> Result<(), TestCaseError> {
        let VerifyPlan::Steps { script, steps, marker } = plan(command, MARKER) else {
            return Ok(());
        };
        let (plain_code, plain_output) = bash(command);
        let (code, output) = bash(&script);
        let (clean, ran) = read_steps(&output, &marker, &steps);
        prop_assert_eq!((code, clean), (plain_code, plain_output), "{}", command);
        prop_assert_eq!(ran.last().map(|step| step.exit_code), Some(i64::from(code)), "{}", command);
        prop_assert!(ran.iter().rev().skip(1).all(|step| step.exit_code == 0), "{}", command);
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]
        #[test]
        fn steps_run_as_written(pieces in prop::collection::vec(piece(), 2..6)) {
            let command = pieces.join(" && ");
            check_as_written(&command)?;
        }

        #[test]
        fn whatever_is_split_runs_as_written(pieces in prop::collection::vec((piece(), joint()), 2..6), group: bool) {
            let mut command: String = pieces.iter().flat_map(|(piece, joint)| [*piece, *joint]).collect();
            command.push_str("true");
            if group {
                command = format!("({command}) && {{ {command}; }}");
            }
            check_as_written(&command)?;
        }
    }
}
