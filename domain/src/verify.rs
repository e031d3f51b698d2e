//! The verify command: how its steps are told apart, and which ones would hide a failure.
//!
//! A command of several steps joined by `&&` is run step by step in one shell, and each step reports its number and exit code on a marker line.
//! A pipeline without `pipefail` reports only its last command, so it is refused. What we cannot read with certainty is run as it is.

use crate::evidence::VerifyStep;

mod scan;

/// How a verify command is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VerifyPlan {
    /// It is not run: the trial fails with this message.
    Refused(String),
    /// It is run as it is, with `bash -c`; it has no steps.
    Single(String),
    /// It is run step by step.
    Steps {
        /// For `bash -c`. Its exit code is that of the command as it was written.
        script: String,
        /// The text of each step.
        steps: Vec<String>,
        /// For [`read_steps`].
        marker: String,
    },
}

/// Plans a verify command. `marker` must be new for each trial, and of letters, digits, `_` and `-` only: the command must not guess it.
pub fn plan(command: &str, marker: &str) -> VerifyPlan {
    let scan = scan::scan(command);
    let guarded = command.contains("pipefail") || command.contains("PIPESTATUS");
    if let Some(at) = scan.pipe.filter(|_| !guarded) {
        let before = command[..at].lines().last().unwrap_or_default().trim();
        return VerifyPlan::Refused(format!(
            "The verify command has a pipeline after `{}`, and a pipeline succeeds or fails as its last command does, so an earlier failure would be \
             hidden. Start it with `set -o pipefail &&`, or avoid the pipeline.",
            shorten(before)
        ));
    }
    if scan.steps.len() < 2 {
        return VerifyPlan::Single(command.to_owned());
    }
    let steps: Vec<_> = scan.steps.into_iter().map(|step| command[step].trim().to_owned()).collect();
    VerifyPlan::Steps {
        script: script(&steps, marker),
        steps,
        marker: marker.to_owned(),
    }
}

fn shorten(text: &str) -> String {
    const MAX: usize = 80;
    match text.char_indices().rev().nth(MAX) {
        Some((start, _)) => format!("…{}", &text[start..]),
        None => text.to_owned(),
    }
}

/// Each step runs through `eval` in the same shell, so directory, variables and functions carry over, and sees the exit status of the one before.
/// All but the last stand left of `||`, all run at top level: `set -e` means what it means in `a && b`. A step that fails, exits, or is the last
/// one is reported on the way out, the others right after they ran.
fn script(steps: &[String], marker: &str) -> String {
    let report = |status: &str| format!("printf '\\n%s %s %s\\n' {} \"$__evalgrid_step\" {status}", quote(marker));
    let mut script = format!(
        "trap '__evalgrid_exit=$?; {}' EXIT\n",
        report("\"$__evalgrid_exit\"").replace('\'', "'\\''")
    );
    for (index, step) in steps.iter().enumerate() {
        script.push_str(&format!("__evalgrid_step={}\neval {}", index + 1, quote(step)));
        if index + 1 < steps.len() {
            script.push_str(&format!(" || exit\n{} || :\n", report("0")));
        }
    }
    script.push('\n');
    script
}

fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

/// Takes the marker lines out of the output of a [`VerifyPlan::Steps`]: the output as the command wrote it, and the steps that ran.
///
/// A step before a reported one succeeded, even where its own line was lost with the middle of a long output.
pub fn read_steps(output: &str, marker: &str, steps: &[String]) -> (String, Vec<VerifyStep>) {
    let mut clean = String::with_capacity(output.len());
    let mut codes: Vec<i64> = Vec::new();
    let mut rest = output;
    while let Some(at) = rest.find(marker).filter(|_| !marker.is_empty()) {
        let after = &rest[at + marker.len()..];
        match read_mark(after, steps.len()).filter(|(step, ..)| *step > codes.len()) {
            Some((step, code, length)) => {
                let before = &rest[..at];
                clean.push_str(before.strip_suffix('\n').unwrap_or(before));
                codes.resize(step - 1, 0);
                codes.push(code);
                rest = &after[length..];
            }
            None => {
                clean.push_str(&rest[..at + marker.len()]);
                rest = after;
            }
        }
    }
    clean.push_str(rest);
    let ran = steps
        .iter()
        .zip(codes)
        .map(|(command, exit_code)| VerifyStep {
            command: command.clone(),
            exit_code,
        })
        .collect();
    (clean, ran)
}

/// ` STEP CODE\n` after a marker: step, code, bytes.
fn read_mark(text: &str, steps: usize) -> Option<(usize, i64, usize)> {
    let line = text.strip_prefix(' ')?.split_inclusive('\n').next()?;
    let (step, code) = line.strip_suffix('\n')?.split_once(' ')?;
    let step = step.parse().ok().filter(|step| (1..=steps).contains(step))?;
    let code = code.parse::<u8>().ok()?;
    Some((step, i64::from(code), line.len() + 1))
}
