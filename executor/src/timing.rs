//! Where the time of a trial went, from what its steps have on record.

use evalgrid_domain::timing::{MAX_SPANS, Span, Timing};

/// A step that is on record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Timed {
    pub(crate) step: String,
    /// Milliseconds since the epoch.
    pub(crate) started_at_ms: u64,
    pub(crate) duration_ms: u64,
    pub(crate) failed: bool,
}

/// The tree: a queue, then the phases with their steps in the order of the record. `waiting_since_ms`: since when the trial has waited, which
/// another machine's clock said; 0 where nobody said.
pub(crate) fn tree(steps: &[Timed], waiting_since_ms: u64) -> Option<Timing> {
    let first_ms = steps.iter().map(|step| step.started_at_ms).min()?;
    let started_at_ms = match waiting_since_ms {
        0 => first_ms,
        since => since.min(first_ms),
    };
    let span = |name: &str, step: &Timed| Span {
        name: name.to_owned(),
        offset_ms: step.started_at_ms - started_at_ms,
        duration_ms: step.duration_ms,
        failed: step.failed,
        parts: Vec::new(),
    };
    let mut timing = Timing {
        started_at_ms,
        ..Timing::default()
    };
    if first_ms > started_at_ms {
        timing.spans.push(Span {
            name: "queue".into(),
            duration_ms: first_ms - started_at_ms,
            ..Span::default()
        });
    }
    let mut phases: Vec<Span> = Vec::new();
    let mut phase = "setup";
    for (index, step) in steps.iter().enumerate() {
        if index >= MAX_SPANS {
            timing.omitted = (steps.len() - index) as u64;
            break;
        }
        let turn = step.step.strip_prefix("turn.").and_then(|rest| rest.split_once('.'));
        phase = match (&step.step, phase) {
            _ if turn.is_some() => "turns",
            (name, _) if ["check.", "judge"].iter().any(|prefix| name.starts_with(prefix)) => "checks",
            (_, "setup") => "setup",
            _ => "cleanup",
        };
        let phase = entered(&mut phases, phase);
        match turn {
            None => phase.parts.push(span(&step.step, step)),
            Some((number, part)) => {
                let turn = entered(&mut phase.parts, &format!("turn.{number}"));
                turn.parts.push(span(part, step));
            }
        }
    }
    phases.iter_mut().for_each(close);
    timing.spans.extend(phases);
    Some(timing)
}

/// The last span if it has this name, else a new one behind it.
fn entered<'a>(spans: &'a mut Vec<Span>, name: &str) -> &'a mut Span {
    if spans.last().is_none_or(|last| last.name != name) {
        spans.push(Span {
            name: name.to_owned(),
            ..Span::default()
        });
    }
    let last = spans.len() - 1;
    &mut spans[last]
}

/// A span of parts lasts from the first beginning to the last end, and has failed where one of them has.
fn close(span: &mut Span) {
    if span.parts.is_empty() {
        return;
    }
    span.parts.iter_mut().for_each(close);
    let ends = span.parts.iter().map(|part| part.offset_ms + part.duration_ms);
    let end = ends.max().unwrap_or_default();
    span.offset_ms = span.parts.iter().map(|part| part.offset_ms).min().unwrap_or_default();
    span.duration_ms = end - span.offset_ms;
    span.failed = span.parts.iter().any(|part| part.failed);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(spans: &[Span], depth: usize, text: &mut String) {
        for span in spans {
            let failed = if span.failed { " failed" } else { "" };
            text.push_str(&format!(
                "{}{} {}+{}{failed}\n",
                " ".repeat(depth),
                span.name,
                span.offset_ms,
                span.duration_ms
            ));
            shown(&span.parts, depth + 1, text);
        }
    }

    #[test]
    fn trees() {
        fn check(since: u64, steps: &[(&str, u64, u64, bool)], expected: &str) {
            let steps: Vec<_> = steps
                .iter()
                .map(|(step, started_at_ms, duration_ms, failed)| Timed {
                    step: (*step).to_owned(),
                    started_at_ms: *started_at_ms,
                    duration_ms: *duration_ms,
                    failed: *failed,
                })
                .collect();
            let mut text = String::new();
            shown(&tree(&steps, since).map(|timing| timing.spans).unwrap_or_default(), 0, &mut text);
            assert_eq!(text, expected);
        }
        check(5, &[], "");
        check(0, &[("sandbox.create", 100, 3, false)], "setup 0+3\n sandbox.create 0+3\n");
        // A clock that is ahead of ours.
        check(900, &[("sandbox.create", 100, 3, false)], "setup 0+3\n sandbox.create 0+3\n");
        check(
            90,
            &[
                ("sandbox.create", 100, 3, false),
                ("prepare", 103, 2, false),
                ("turn.1.agent", 110, 50, false),
                ("turn.1.files", 160, 1, false),
                ("turn.2.agent", 170, 5, true),
                ("turn.2.files", 175, 1, false),
                ("artifacts", 176, 4, false),
                ("check.0", 180, 10, true),
                ("cache.save", 190, 1, false),
            ],
            "queue 0+10\nsetup 10+5\n sandbox.create 10+3\n prepare 13+2\nturns 20+66 failed\n turn.1 20+51\n  agent 20+50\n  files 70+1\n\
             \x20turn.2 80+6 failed\n  agent 80+5 failed\n  files 85+1\ncleanup 86+4\n artifacts 86+4\nchecks 90+10 failed\n check.0 90+10 failed\n\
             cleanup 100+1\n cache.save 100+1\n",
        );
    }

    #[test]
    fn bounded() {
        let step = |index| Timed {
            step: format!("check.{index}"),
            started_at_ms: index,
            duration_ms: 1,
            failed: false,
        };
        let steps: Vec<_> = (0..600).map(step).collect();
        let timing = tree(&steps, 0).unwrap_or_default();
        assert_eq!((timing.spans[0].parts.len(), timing.omitted), (MAX_SPANS, 600 - MAX_SPANS as u64));
    }
}
