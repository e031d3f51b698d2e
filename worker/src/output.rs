//! Outputs of finished steps, as far as people, checks and harnesses read them. Texts are bounded, and decoded lossily.

use std::{
    fs::File,
    io::{self, Read, Seek as _, SeekFrom},
    path::Path,
};

use evalgrid_domain::{
    outcome::{Usage, failure_text},
    redact::Redactor,
};
use evalgrid_harness::{Harness, HarnessEvent, TurnEnd, TurnOutput};
use evalgrid_sandbox::{StepExit, StepOutput};

/// Bytes of a check's output that are read from its beginning, and as many from its end. Evidence keeps 16,000 characters of it, and the
/// marker of a verify command's last step is at the end.
const PART_BYTES: u64 = 256 << 10;
/// Bytes of stderr that are searched for the reason of a failure.
const REASON_BYTES: u64 = 16 << 10;

/// The whole stdout, or its beginning and its end.
pub fn stdout(output: &StepOutput) -> io::Result<String> {
    if output.stdout_bytes == 0 {
        // Then there need be no file; one that is missing with bytes in it is an error.
        return Ok(String::new());
    }
    if output.stdout_bytes <= 2 * PART_BYTES {
        return read(&output.stdout, 0, 2 * PART_BYTES);
    }
    let head = read(&output.stdout, 0, PART_BYTES)?;
    let tail = tail(output.stdout_tail.as_deref().unwrap_or(&output.stdout), PART_BYTES)?;
    Ok(format!(
        "{head}\n[{} bytes were left out here]\n{tail}",
        output.stdout_bytes.saturating_sub(2 * PART_BYTES)
    ))
}

/// The beginning of stderr.
pub fn stderr(output: &StepOutput) -> io::Result<String> {
    empty_if_missing(read(&output.stderr, 0, PART_BYTES))
}

/// The end of what is kept of stderr.
pub fn stderr_tail(output: &StepOutput) -> io::Result<String> {
    empty_if_missing(tail(&output.stderr, REASON_BYTES))
}

/// A step that never wrote to stderr has no file of it.
fn empty_if_missing(text: io::Result<String>) -> io::Result<String> {
    match text {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        text => text,
    }
}

/// Hands what a turn has printed to its harness. `trace`: the recorder's log, where there is one. `earlier`: what the session's earlier turns have used.
pub fn read_turn(
    harness: &dyn Harness,
    exit: &StepExit,
    trace: &[u8],
    model: &str,
    earlier: Option<Usage>,
    events: &mut dyn FnMut(HarnessEvent),
) -> io::Result<TurnEnd> {
    // A silent agent's output need not have a file.
    let mut stdout: Box<dyn Read> = match exit.output.stdout_bytes {
        0 => Box::new(io::empty()),
        _ => Box::new(File::open(&exit.output.stdout)?),
    };
    let mut tail = None;
    if let Some(path) = &exit.output.stdout_tail {
        let file = File::open(path)?;
        let start = exit.output.stdout_bytes.saturating_sub(file.metadata()?.len());
        tail = Some((file, start));
    }
    // Without arrival times the events are still worth having.
    let mut times: Box<dyn Read> = match File::open(&exit.output.stdout_times) {
        Ok(file) => Box::new(file),
        Err(_) => Box::new(io::empty()),
    };
    // What it says is a hint: a stderr that cannot be read costs that hint only.
    let stderr = stderr_tail(&exit.output).unwrap_or_default();
    let output = TurnOutput {
        stdout: &mut stdout,
        stdout_tail: tail.as_mut().map(|(file, start)| (file as &mut dyn Read, *start)),
        stdout_times: &mut times,
        stderr: &stderr,
        trace,
        exit_code: exit.code,
        timed_out: exit.timed_out,
        finished_at_ms: exit.finished_at_ms,
        model,
        earlier,
    };
    harness.read(output, events)
}

/// That a process failed, with which status, and the last thing it said, for people.
pub fn last_words(who: &str, code: i32, output: &StepOutput, redactor: &Redactor) -> String {
    // Redacted as a whole, before a line is taken out of it: a secret may have several.
    let stderr = redactor.text(&stderr_tail(output).unwrap_or_default()).into_owned();
    // What node writes behind every uncaught error says nothing of this one.
    let says_nothing = |line: &&str| line.is_empty() || line.starts_with("at ") || line.starts_with("Node.js v");
    let mut lines = stderr.lines().map(str::trim);
    match lines
        .clone()
        .rfind(|line| !says_nothing(line))
        .or_else(|| lines.rfind(|line| !line.is_empty()))
    {
        Some(line) => format!("{who} exited with status {code}; its last line on stderr: {}", failure_text(line)),
        None => format!("{who} exited with status {code} and wrote nothing to stderr"),
    }
}

/// Why git failed: its last `fatal:` or `error:`, else whatever it said last.
pub fn git_reason(stderr: &str) -> &str {
    let lines = || stderr.lines().map(str::trim).filter(|line| !line.is_empty());
    let named = lines()
        .rev()
        .find_map(|line| line.strip_prefix("fatal: ").or_else(|| line.strip_prefix("error: ")));
    named.or_else(|| lines().next_back()).unwrap_or_default()
}

fn tail(path: &Path, length: u64) -> io::Result<String> {
    let size = std::fs::metadata(path)?.len();
    read(path, size.saturating_sub(length), length)
}

fn read(path: &Path, from: u64, length: u64) -> io::Result<String> {
    let mut file = File::open(path)?;
    if from > 0 {
        file.seek(SeekFrom::Start(from))?;
    }
    let mut bytes = Vec::new();
    file.take(length).read_to_end(&mut bytes)?;
    Ok(match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn git_reasons() {
        for (stderr, reason) in [
            ("", ""),
            ("\n x \n\n", "x"),
            ("Cloning…\nfatal: repository 'u' not found\n", "repository 'u' not found"),
            (
                "fatal: Could not read from remote repository.\n\nPlease make sure\nand it exists.\n",
                "Could not read from remote repository.",
            ),
            ("error: a\nfatal: b\n", "b"),
            ("bash: line 1: git: command not found", "bash: line 1: git: command not found"),
        ] {
            assert_eq!(git_reason(stderr), reason);
        }
    }

    #[test]
    fn silent_steps_have_no_files() {
        let folder = tempfile::tempdir().unwrap();
        for path in [folder.path().join("missing"), "/dev/null".into()] {
            let mut output = StepOutput {
                stdout: path.clone(),
                stdout_tail: None,
                stdout_bytes: 0,
                stdout_times: path.clone(),
                stderr: path.clone(),
            };
            for text in [stdout(&output), stderr(&output), stderr_tail(&output)] {
                assert_eq!(text.unwrap(), "");
            }
            assert_eq!(
                last_words("It", 7, &output, &Redactor::default()),
                "It exited with status 7 and wrote nothing to stderr"
            );
            output.stdout = folder.path().join("missing");
            output.stdout_bytes = 1;
            assert_eq!(stdout(&output).unwrap_err().kind(), io::ErrorKind::NotFound);
        }
    }

    #[test]
    fn the_last_words_are_those_that_say_why() {
        let folder = tempfile::tempdir().unwrap();
        let output = StepOutput {
            stdout: folder.path().join("out"),
            stdout_tail: None,
            stdout_bytes: 0,
            stdout_times: folder.path().join("times"),
            stderr: folder.path().join("err"),
        };
        for (stderr, last) in [
            ("first\nlast\n\n", "last"),
            (
                "file:///x.mjs:1\nthrow new Error('boom')\n^\n\nError: boom\n    at file:///x.mjs:1:7\n\nNode.js v20.20.2\n",
                "Error: boom",
            ),
            ("Node.js v20.20.2\n", "Node.js v20.20.2"),
        ] {
            std::fs::write(&output.stderr, stderr).unwrap();
            let told = last_words("It", 1, &output, &Redactor::default());
            assert_eq!(told, format!("It exited with status 1; its last line on stderr: {last}"));
        }
    }

    #[test]
    fn long_outputs_lose_their_middle() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let mut output = StepOutput {
            stdout: path("out"),
            stdout_tail: None,
            stdout_bytes: 3,
            stdout_times: path("times"),
            stderr: path("err"),
        };
        std::fs::write(&output.stdout, b"a\xffb").unwrap();
        assert_eq!(stdout(&output).unwrap(), "a\u{fffd}b");
        let long = [vec![b'a'; PART_BYTES as usize], vec![b'b'; 10], vec![b'c'; PART_BYTES as usize]].concat();
        std::fs::write(&output.stdout, &long).unwrap();
        output.stdout_bytes = long.len() as u64;
        let text = stdout(&output).unwrap();
        assert!(text.starts_with('a') && text.ends_with('c') && !text.contains("bb") && text.contains("[10 bytes were left out here]"));
        std::fs::write(path("tail"), "the end").unwrap();
        output.stdout_tail = Some(path("tail"));
        assert!(stdout(&output).unwrap().ends_with("the end"));
        std::fs::write(&output.stderr, "one\ntwo\n\n").unwrap();
        assert_eq!(
            last_words("It", 1, &output, &Redactor::default()),
            "It exited with status 1; its last line on stderr: two"
        );
    }
}
