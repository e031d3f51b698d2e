//! Reading a turn: however its bytes were cut, the same events.
#![allow(clippy::unwrap_used)]

use std::io::{self, Cursor, Read};

use evalgrid_domain::{limits::MAX_OUTPUT_LINE_BYTES, outcome::Usage};
use evalgrid_harness::{
    Command, Harness as _, HarnessEvent, TurnEnd, TurnOutput,
    lines::{Arrivals, LineReader},
};
use proptest::prelude::*;

/// Gives its bytes in pieces.
struct Pieces(Vec<Vec<u8>>);

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.0.first().is_some_and(Vec::is_empty) {
            self.0.remove(0);
        }
        let Some(piece) = self.0.first_mut() else { return Ok(0) };
        let count = piece.len().min(buffer.len());
        buffer[..count].copy_from_slice(&piece[..count]);
        piece.drain(..count);
        Ok(count)
    }
}

struct Given<'a> {
    stdout: &'a mut dyn Read,
    tail: Option<(&'a [u8], u64)>,
    times: &'a [u8],
    trace: &'a [u8],
}

fn read(given: Given<'_>) -> (Vec<HarnessEvent>, TurnEnd) {
    let mut events = Vec::new();
    let mut times = given.times;
    let mut tail = given.tail;
    let output = TurnOutput {
        stdout: given.stdout,
        stdout_tail: tail.as_mut().map(|(bytes, start)| (bytes as &mut dyn Read, *start)),
        stdout_times: &mut times,
        stderr: "",
        trace: given.trace,
        exit_code: 3,
        timed_out: false,
        finished_at_ms: 99,
        model: "m",
        earlier: None,
    };
    let end = Command.read(output, &mut |event| events.push(event)).unwrap();
    (events, end)
}

fn read_stdout(stdout: &[u8]) -> (Vec<HarnessEvent>, TurnEnd) {
    read(Given {
        stdout: &mut Cursor::new(stdout),
        tail: None,
        times: b"",
        trace: b"",
    })
}

fn read_traced(stdout: &str, trace: &str) -> Vec<String> {
    let (events, _) = read(Given {
        stdout: &mut stdout.as_bytes(),
        tail: None,
        times: b"",
        trace: trace.as_bytes(),
    });
    events.iter().map(summary).collect()
}

fn summary(event: &HarnessEvent) -> String {
    match event {
        HarnessEvent::Started { session_id, .. } => format!("started {session_id}"),
        HarnessEvent::Message { text, .. } => format!("message {text}"),
        HarnessEvent::Command { command, exit_code, .. } => format!("command {command} {exit_code:?}"),
        HarnessEvent::FileChange { paths, .. } => format!("files {}", paths.join(",")),
        HarnessEvent::ToolCall { name, .. } => format!("tool {name}"),
        HarnessEvent::Usage { usage, .. } => format!("usage {}", usage.total_tokens),
        HarnessEvent::Finished { reason, .. } => format!("finished {reason}"),
    }
}

const MIXED: &[u8] = b"hello\r\n{\"_tag\":\"Started\",\"sessionId\":\"s\",\"model\":\"m\"}\r\n\n\
{\"_tag\":\"Message\",\"role\":\"assistant\",\"text\":\"\xc3\xbc \xff \\ud83d\"}\n\0\0{\"_tag\":\"Finished\",\"reason\":\"no\"}\n{\"a\":\n\
{\"_tag\":\"Usage\",\"inputTokens\":1,\"outputTokens\":2}\n{\"_tag\":\"Usage\",\"inputTokens\":10,\"outputTokens\":20,\"cacheReadTokens\":5,\"totalTokens\":40}\n\
{\"_tag\":\"Finished\",\"reason\":\"done\",\"at\":5}";

#[test]
fn every_split_gives_the_same_events() {
    let (expected, end) = read_stdout(MIXED);
    let summaries: Vec<_> = expected.iter().map(summary).collect();
    assert_eq!(
        summaries,
        ["started s", "message ü \u{fffd} \u{fffd}", "usage 3", "usage 40", "finished done"]
    );
    assert_eq!(end.session_id.as_deref(), Some("s"));
    assert_eq!(end.failure, None);
    let usage = Usage {
        input_tokens: 11,
        output_tokens: 22,
        cache_read_tokens: 5,
        cache_write_tokens: 0,
        total_tokens: 43,
        cost_usd: None,
    };
    assert_eq!(end.usage, Some(usage));
    for at in 0..=MIXED.len() {
        let mut pieces = Pieces(vec![MIXED[..at].to_vec(), MIXED[at..].to_vec()]);
        assert_eq!(
            read(Given {
                stdout: &mut pieces,
                tail: None,
                times: b"",
                trace: b""
            }),
            (expected.clone(), end.clone()),
            "split at {at}"
        );
    }
}

proptest! {
    #[test]
    fn any_split_gives_the_same_lines(bytes in prop::collection::vec(prop_oneof![Just(b'\n'), any::<u8>()], 0..400), cuts in prop::collection::vec(0usize..400, 0..20)) {
        let collect = |cuts: &[usize]| {
            let mut reader = LineReader::default();
            let mut lines = Vec::new();
            let mut from = 0;
            for cut in cuts.iter().copied().filter(|cut| *cut <= bytes.len()).chain([bytes.len()]) {
                if cut >= from {
                    reader.push(&bytes[from..cut], &mut |line, offset| lines.push((line.to_vec(), offset)));
                    from = cut;
                }
            }
            reader.finish(&mut |line, offset| lines.push((line.to_vec(), offset)));
            lines
        };
        let mut sorted = cuts;
        sorted.sort_unstable();
        let whole = collect(&[]);
        prop_assert_eq!(collect(&sorted), whole.clone());
        // The offsets are where the lines end.
        for (line, offset) in &whole {
            let end = *offset as usize;
            prop_assert!(bytes[..end].ends_with(line) || bytes[..end - 1].ends_with(line));
        }
    }

    #[test]
    fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..600), trace in prop::collection::vec(any::<u8>(), 0..200), times in prop::collection::vec(any::<u8>(), 0..64)) {
        let (events, _) = read(Given { stdout: &mut &bytes[..], tail: None, times: &times, trace: &trace });
        let finished = events.iter().any(|event| matches!(event, HarnessEvent::Finished { .. }));
        prop_assert!(finished);
    }
}

#[test]
fn a_line_over_the_limit_is_dropped_and_told() {
    let long = vec![b'x'; 50 << 20];
    let mut stdout = b"{\"_tag\":\"Message\",\"role\":\"user\",\"text\":\"".to_vec();
    stdout.extend_from_slice(&long);
    stdout.extend_from_slice(b"\"}\n{\"_tag\":\"Message\",\"role\":\"assistant\",\"text\":\"after\"}\n");
    let (events, end) = read_stdout(&stdout);
    assert_eq!(events.iter().map(summary).collect::<Vec<_>>(), ["message after", "finished exit 3"]);
    assert_eq!(end.diagnostics, ["1 lines of the agent's output were over 16 MiB and were dropped"]);
    // Exactly at the limit it is kept.
    let frame = "{\"_tag\":\"Finished\",\"reason\":\"\"}".len();
    for (length, kept) in [(MAX_OUTPUT_LINE_BYTES - frame, true), (MAX_OUTPUT_LINE_BYTES - frame + 1, false)] {
        let line = format!("{{\"_tag\":\"Finished\",\"reason\":\"{}\"}}\n", "y".repeat(length));
        let (events, end) = read_stdout(line.as_bytes());
        assert_eq!(
            matches!(&events[0], HarnessEvent::Finished { reason, .. } if reason.len() == length),
            kept
        );
        assert_eq!(end.diagnostics.is_empty(), kept);
    }
}

#[test]
fn a_tail_goes_on_after_a_gap_or_an_overlap() {
    fn check(head: &str, tail: &str, start: u64, expected: &[&str], diagnostics: usize) {
        let (events, end) = read(Given {
            stdout: &mut head.as_bytes(),
            tail: Some((tail.as_bytes(), start)),
            times: b"",
            trace: b"",
        });
        let mut expected: Vec<_> = expected.to_vec();
        expected.push("finished exit 3");
        assert_eq!(events.iter().map(summary).collect::<Vec<_>>(), expected);
        assert_eq!(end.diagnostics.len(), diagnostics);
    }
    let line = |text: &str| format!("{{\"_tag\":\"Message\",\"role\":\"user\",\"text\":\"{text}\"}}\n");
    let (a, b, c) = (line("a"), line("b"), line("c"));
    let whole = format!("{a}{b}{c}");
    let one = a.len();
    // The tail continues exactly where the head ends, in the middle of a line.
    check(
        &whole[..one + 9],
        &whole[one + 9..],
        (one + 9) as u64,
        &["message a", "message b", "message c"],
        0,
    );
    // It begins inside the head.
    check(&whole[..one + 9], &whole[5..], 5, &["message a", "message b", "message c"], 0);
    // Something is missing: the cut lines are dropped, on both sides.
    check(
        &whole[..one + 9],
        &whole[one + 12..],
        (one + 12) as u64,
        &["message a", "message c"],
        1,
    );
    check(&whole[..one], &whole[one + 1..], one as u64 + 1, &["message a", "message c"], 1);
}

#[test]
fn finished_rules() {
    fn check(stdout: &str, events: &[&str], failure: Option<&str>, diagnostics: usize) {
        let (found, end) = read_stdout(stdout.as_bytes());
        assert_eq!(found.iter().map(summary).collect::<Vec<_>>(), events, "{stdout}");
        assert_eq!(end.failure.as_deref(), failure, "{stdout}");
        assert_eq!(end.diagnostics.len(), diagnostics, "{stdout}");
    }
    let finished = |reason: &str| format!("{{\"_tag\":\"Finished\",\"reason\":\"{reason}\"}}\n");
    let message = "{\"_tag\":\"Message\",\"role\":\"assistant\",\"text\":\"hi\"}\n";
    check("", &["finished exit 3"], None, 0);
    check(message, &["message hi", "finished exit 3"], None, 0);
    check(&finished("parked: later"), &["finished parked: later"], None, 0);
    check(&finished("failed: no key "), &["finished failed: no key "], Some("no key"), 0);
    check(&finished("failed:"), &["finished failed:"], Some(""), 0);
    check(&finished(" failed: x"), &["finished  failed: x"], None, 0);
    check(&finished("Failed: x"), &["finished Failed: x"], None, 0);
    let failed_late = format!("{message}{}{message}{}", finished("done"), finished("failed: x"));
    check(&failed_late, &["message hi", "finished done"], None, 1);
}

#[test]
fn a_session_is_the_first_that_can_continue() {
    fn check(ids: &[&str], expected: Option<&str>) {
        let stdout: String = ids
            .iter()
            .map(|id| format!("{{\"_tag\":\"Started\",\"sessionId\":\"{id}\",\"model\":\"m\"}}\n"))
            .collect();
        assert_eq!(read_stdout(stdout.as_bytes()).1.session_id.as_deref(), expected);
    }
    check(&[], None);
    check(&[""], None);
    check(&["a\\u0000b"], None);
    check(&[&"x".repeat(5_000)], None);
    check(&["", "a", "b"], Some("a"));
}

#[test]
fn traced_commands_follow_unless_reported() {
    let reported = "{\"_tag\":\"Command\",\"command\":\"ls -l\",\"exitCode\":0,\"output\":\"\"}\n";
    let trace = "{\"at\":5,\"cwd\":\"/\",\"argv\":[\"ls -l\"],\"source\":\"trap\"}\n\
        {\"at\":6,\"argv\":[\"make\",\"all\"]}\nnoise\n{\"argv\":[]}\n{\"argv\":[3]}\n{\"at\":7,\"argv\":[\"make\",\"all\"]}\n{\"at\":8,\"argv\":[\"cu";
    let expected = [
        "command ls -l Some(0)",
        "finished exit 3",
        "command make all None",
        "command make all None",
    ];
    assert_eq!(read_traced(reported, trace), expected);
    assert_eq!(
        read_traced("", "{\"argv\":[\"x\"]}\n{\"argv\":[\"x\"]}"),
        ["finished exit 3", "command x None", "command x None"]
    );
}

#[test]
fn lines_are_stamped_when_they_arrived() {
    let line = "{\"_tag\":\"Message\",\"role\":\"user\",\"text\":\"a\"}\n";
    let pair = |end: usize, at: u64| [(end as u64).to_le_bytes(), at.to_le_bytes()].concat();
    let stdout = line.repeat(3);
    // The second line came in two chunks: it was there when its end was.
    let times = [pair(line.len(), 10), pair(line.len() + 4, 20), pair(2 * line.len(), 30)].concat();
    let (events, _) = read(Given {
        stdout: &mut stdout.as_bytes(),
        tail: None,
        times: &times,
        trace: b"",
    });
    let at: Vec<_> = events
        .iter()
        .map(|event| if let HarnessEvent::Message { at, .. } = event { *at } else { -1.0 })
        .collect();
    assert_eq!(at, [10.0, 30.0, 99.0, -1.0]);
    let mut broken = Arrivals::new(&times[..20], 99);
    assert_eq!([broken.at(1), broken.at(line.len() as u64 + 1)], [10, 99]);
}

#[test]
fn what_is_lost_is_not_whole() {
    let message = b"{\"_tag\":\"Message\",\"role\":\"assistant\",\"text\":\"x\"}\n";
    let check = |tail: Option<(&[u8], u64)>, whole: bool| {
        let (_, end) = read(Given {
            stdout: &mut Cursor::new(message),
            tail,
            times: b"",
            trace: b"",
        });
        let coverage = end.coverage;
        for channel in [&coverage.events, &coverage.actions, &coverage.messages] {
            assert_eq!(channel.is_complete(), whole, "{tail:?}");
        }
        assert_eq!(coverage.usage.reason(), Some("The command printed no Usage"));
    };
    check(None, true);
    check(Some((b"}\n", message.len() as u64 - 2)), true);
    check(Some((b"}\n", 1_000)), false);
}
