//! How trials end, how a run's trials are counted, and the words in which a failure is told.

use serde::{Deserialize, Serialize};

use crate::{limits::MAX_FAILURE, names::names, number::Number};

names!(
    /// Where a trial stands.
    TrialStatus {
        /// Waits.
        Queued = "queued",
        /// Is worked on.
        Running = "running",
        /// Scored: its checks passed.
        Passed = "passed",
        /// Scored: a check failed.
        Failed = "failed",
        /// Not scored: the infrastructure, not the agent, is to blame; or it was cancelled.
        Void = "void",
    }
);

impl TrialStatus {
    /// It counts in the pass rate.
    pub fn is_scored(self) -> bool {
        matches!(self, Self::Passed | Self::Failed)
    }

    /// Nothing more happens to it.
    pub fn is_settled(self) -> bool {
        self.is_scored() || self == Self::Void
    }
}

/// Tokens, as an agent reports them. Where nothing is known there is no `Usage`, rather than one full of zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// Read from the prompt cache; not part of the input.
    pub cache_read_tokens: u64,
    /// Written to the prompt cache; not part of the input.
    pub cache_write_tokens: u64,
    /// Input beyond the cache.
    pub input_tokens: u64,
    /// Output.
    pub output_tokens: u64,
    /// As reported, or the sum.
    pub total_tokens: u64,
    /// What the agent says that it cost, in US dollars.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost_usd: Option<Number>,
}

impl Usage {
    /// Both together, where both are known; else the known one.
    pub fn sum(a: Option<Self>, b: Option<Self>) -> Option<Self> {
        match (a, b) {
            (Some(a), Some(b)) => Some(a.add(&b)),
            (a, b) => a.or(b),
        }
    }

    /// Both together. The cost is known only where both are known: unknown is not zero.
    pub fn add(&self, other: &Self) -> Self {
        Self {
            cache_read_tokens: self.cache_read_tokens.saturating_add(other.cache_read_tokens),
            cache_write_tokens: self.cache_write_tokens.saturating_add(other.cache_write_tokens),
            input_tokens: self.input_tokens.saturating_add(other.input_tokens),
            output_tokens: self.output_tokens.saturating_add(other.output_tokens),
            total_tokens: self.total_tokens.saturating_add(other.total_tokens),
            cost_usd: self.cost_usd.zip(other.cost_usd).map(|(a, b)| Number(a.0 + b.0)),
        }
    }
}

/// How the trials of a run came out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Distribution {
    /// Most commands of a scored trial; 0 when none was scored.
    pub command_max: u64,
    /// Median of the commands of the scored trials, between the middle two where their number is even.
    pub command_median: Number,
    /// Fewest commands of a scored trial.
    pub command_min: u64,
    /// At least two scored trials, all with the same verdict, with command counts within [`DETERMINISTIC_SPREAD`] of each other.
    pub deterministic: bool,
    /// Scored, not passed.
    pub failed: u64,
    /// Passed of scored, 0 to 1; 0 when none was scored.
    pub pass_rate: Number,
    /// Scored and passed.
    pub passed: u64,
    /// Passed and failed.
    pub scored: u64,
    /// Settled: scored and void. A trial that is still queued or running is not counted anywhere here.
    pub trials: u64,
    /// Void.
    pub voided: u64,
}

/// How far apart the command counts of a deterministic run may be (contract 2.2).
pub const DETERMINISTIC_SPREAD: u64 = 4;

impl Distribution {
    /// Counts trials, each given by its status and its number of commands.
    pub fn of(trials: impl IntoIterator<Item = (TrialStatus, u64)>) -> Self {
        let (mut passed, mut voided, mut commands) = (0, 0, Vec::new());
        for (status, count) in trials {
            passed += u64::from(status == TrialStatus::Passed);
            voided += u64::from(status == TrialStatus::Void);
            if status.is_scored() {
                commands.push(count);
            }
        }
        commands.sort_unstable();
        let scored = commands.len() as u64;
        let (min, max) = (commands.first().copied().unwrap_or(0), commands.last().copied().unwrap_or(0));
        let median = match commands.len() {
            0 => 0.0,
            length => (commands[(length - 1) / 2] as f64 + commands[length / 2] as f64) / 2.0,
        };
        Self {
            command_max: max,
            command_median: Number(median),
            command_min: min,
            deterministic: scored >= 2 && (passed == 0 || passed == scored) && max - min <= DETERMINISTIC_SPREAD,
            failed: scored - passed,
            pass_rate: Number(if scored == 0 { 0.0 } else { passed as f64 / scored as f64 }),
            passed,
            scored,
            trials: scored + voided,
            voided,
        }
    }
}

/// The exit code of a trial that passed (contract 1.6).
pub const EXIT_PASSED: i32 = 0;
/// The exit code of a trial that failed (contract 1.6).
pub const EXIT_FAILED: i32 = 1;
/// The exit code of a trial that was not scored, where no process gave another (contract 1.6).
pub const EXIT_NOT_SCORED: i32 = -1;

/// A duration for people: `1s`, `5m`, `1h 30m`, `1s 500ms`.
pub fn humanise_duration(ms: u64) -> String {
    let parts = [
        (ms / 3_600_000, "h"),
        (ms / 60_000 % 60, "m"),
        (ms / 1000 % 60, "s"),
        (ms % 1000, "ms"),
    ];
    let parts: Vec<_> = parts
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, unit)| format!("{count}{unit}"))
        .collect();
    if parts.is_empty() { "0s".to_owned() } else { parts.join(" ") }
}

/// The failure of a batch that was cancelled, and of its unfinished trials.
pub const CANCELLED: &str = "Cancelled";

/// The agent worked longer than it may.
pub fn timed_out(limit_ms: u64) -> String {
    format!("The agent ran past its time limit of {}", humanise_duration(limit_ms))
}

/// A prepare step ended with another status than 0.
pub fn prepare_failed(name: &str, status: i32) -> String {
    failure_text(&format!("The prepare step {name} exited with status {status}"))
}

/// A profile's install command ended with another status than 0.
pub fn install_failed(status: i32) -> String {
    format!("The profile's install exited with status {status}")
}

/// A set-up step did not end in time. `step` is, for example, `prepare step build` or `profile's install`.
pub fn set_up_timed_out(step: &str, limit_ms: u64) -> String {
    failure_text(&format!("The {step} ran past its limit of {}", humanise_duration(limit_ms)))
}

/// A repository could not be cloned. `reason` must be redacted, as must `url`.
pub fn source_failed(url: &str, reason: &str) -> String {
    failure_text(&format!(
        "The source {url} could not be cloned: {}",
        first_line(reason).unwrap_or("no reason was given")
    ))
}

/// The verify command did not end in time, so there is no verdict.
pub fn verify_timed_out(limit_ms: u64) -> String {
    format!("The verify command ran past its limit of {}", humanise_duration(limit_ms))
}

/// The verify command could not be run.
pub fn verify_failed(reason: &str) -> String {
    failure_text(&format!(
        "The verify command could not be run: {}",
        first_line(reason).unwrap_or("no reason was given")
    ))
}

/// A bundle of checks did not end in time, so there is no verdict.
pub fn validator_timed_out(name: &str, limit_ms: u64) -> String {
    failure_text(&format!(
        "The validator {name} ran past its limit of {}",
        humanise_duration(limit_ms)
    ))
}

/// A bundle of checks gave no verdict. `reason` must be redacted.
pub fn validator_failed(name: &str, reason: &str) -> String {
    failure_text(&format!(
        "The validator {name} gave no verdict: {}",
        first_line(reason).unwrap_or("no reason was given")
    ))
}

/// A judge gave no valid judgment. `reason` must be redacted.
pub fn judge_failed(name: &str, reason: &str) -> String {
    failure_text(&format!(
        "The judge {name} gave no judgment: {}",
        first_line(reason).unwrap_or("no reason was given")
    ))
}

/// The case's simulated person gave no reply. `reason` must be redacted.
pub fn user_unavailable(reason: &str) -> String {
    failure_text(&format!(
        "The simulated person could not answer: {}",
        first_line(reason).unwrap_or("no reason was given")
    ))
}

/// A prepare step did not do what it should, for another reason than its exit status. `reason` must be redacted.
pub fn prepare_refused(name: &str, reason: &str) -> String {
    failure_text(&format!(
        "The prepare step {name} failed: {}",
        first_line(reason).unwrap_or("no reason was given")
    ))
}

/// A profile's HTTP mock does not serve. `reason` must be redacted.
pub fn mock_failed(reason: &str) -> String {
    failure_text(&format!(
        "The HTTP mock failed: {}",
        first_line(reason).unwrap_or("no reason was given")
    ))
}

/// No check says what passes.
pub const NOTHING_TO_CHECK: &str = "The case has neither a validator nor a verify command";

/// A sandbox could not be created.
pub fn sandbox_unavailable(provider: &str, reason: &str) -> String {
    failure_text(&format!(
        "No {provider} sandbox could be created: {}",
        first_line(reason).unwrap_or("no reason was given")
    ))
}

/// The sandbox was lost in each attempt.
pub fn sandbox_lost(attempts: u32) -> String {
    match attempts {
        1 => "The sandbox was lost".to_owned(),
        attempts => format!("The sandbox was lost in each of {attempts} attempts"),
    }
}

/// An agent could not be started, or reported an error of its own. `reason` must be redacted.
pub fn harness_failed(harness: &str, reason: &str) -> String {
    failure_text(&format!(
        "The {harness} agent failed: {}",
        first_line(reason).unwrap_or("no reason was given")
    ))
}

/// The agent is not on the machine that runs the trial, and could not be brought there.
pub fn harness_unavailable(harness: &str, reason: &str) -> String {
    failure_text(&format!(
        "The {harness} agent is unavailable: {}",
        first_line(reason).unwrap_or("no reason was given")
    ))
}

/// Nothing was heard of the trial for too long.
pub fn abandoned(quiet_ms: u64) -> String {
    format!(
        "The process running this trial stopped: there was no sign of progress for {}",
        humanise_duration(quiet_ms)
    )
}

/// The trial waited too long for whoever judges it, or plays its person.
pub fn never_judged(waited_ms: u64) -> String {
    format!("No judge runner was free for {}", humanise_duration(waited_ms))
}

/// The trial waited too long for a slot.
pub fn never_started(waited_ms: u64) -> String {
    format!("The trial never started: no slot was free for {}", humanise_duration(waited_ms))
}

/// The machine that ran a local batch stopped checking in.
pub fn machine_quiet(quiet_ms: u64) -> String {
    format!(
        "The machine running this batch stopped reporting {} ago",
        humanise_duration(quiet_ms)
    )
}

/// The machine of a local batch finished it without a report of this trial.
pub const NEVER_REPORTED: &str = "The machine running this batch finished without reporting this trial";

fn first_line(raw: &str) -> Option<&str> {
    raw.lines().map(str::trim).find(|line| !line.is_empty())
}

/// A failure as it is shown: the first line that is not blank, at most [`MAX_FAILURE`] characters, then an ellipsis. `raw` must be redacted.
pub fn failure_text(raw: &str) -> String {
    let line = first_line(raw).unwrap_or("The trial stopped, and no reason was given");
    match line.char_indices().nth(MAX_FAILURE) {
        Some((end, _)) => format!("{}…", line[..end].trim_end()),
        None => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::TrialStatus::*;
    use super::*;

    #[test]
    fn durations() {
        for (ms, text) in [
            (0, "0s"),
            (1, "1ms"),
            (1_000, "1s"),
            (1_500, "1s 500ms"),
            (60_000, "1m"),
            (90_000, "1m 30s"),
            (300_000, "5m"),
            (3_600_000, "1h"),
            (5_400_000, "1h 30m"),
            (3_661_001, "1h 1m 1s 1ms"),
            (72 * 3_600_000, "72h"),
        ] {
            assert_eq!(humanise_duration(ms), text);
        }
    }

    #[test]
    fn distributions() {
        let check = |trials: &[(TrialStatus, u64)], expected: &str| {
            assert_eq!(
                serde_json::to_string(&Distribution::of(trials.iter().copied())).unwrap(),
                expected,
                "{trials:?}"
            );
        };
        check(
            &[],
            r#"{"commandMax":0,"commandMedian":0,"commandMin":0,"deterministic":false,"failed":0,"passRate":0,"passed":0,"scored":0,"trials":0,"voided":0}"#,
        );
        check(
            &[
                (Passed, 3),
                (Failed, 8),
                (Void, 100),
                (Passed, 4),
                (Running, 50),
                (Queued, 0),
                (Passed, 7),
            ],
            r#"{"commandMax":8,"commandMedian":5.5,"commandMin":3,"deterministic":false,"failed":1,"passRate":0.75,"passed":3,"scored":4,"trials":5,"voided":1}"#,
        );
        check(
            &[(Failed, 1), (Failed, 5), (Failed, 2)],
            r#"{"commandMax":5,"commandMedian":2,"commandMin":1,"deterministic":true,"failed":3,"passRate":0,"passed":0,"scored":3,"trials":3,"voided":0}"#,
        );
        let deterministic = |trials: &[(TrialStatus, u64)]| Distribution::of(trials.iter().copied()).deterministic;
        assert!(deterministic(&[(Passed, 0), (Passed, 4)]));
        assert!(!deterministic(&[(Passed, 0), (Passed, 5)]));
        assert!(!deterministic(&[(Passed, 0), (Failed, 0)]));
        assert!(!deterministic(&[(Passed, 0), (Void, 0)]));
    }

    #[test]
    fn unknown_cost_stays_unknown() {
        let known = Usage {
            input_tokens: 3,
            cost_usd: Some(Number(0.5)),
            ..Usage::default()
        };
        let unknown = Usage {
            input_tokens: u64::MAX,
            ..Usage::default()
        };
        assert_eq!(known.add(&known).cost_usd, Some(Number(1.0)));
        assert_eq!(known.add(&unknown).cost_usd, None);
        assert_eq!(known.add(&unknown).input_tokens, u64::MAX);
        let read: Usage = serde_json::from_str(
            r#"{"cacheReadTokens":1,"cacheWriteTokens":2,"inputTokens":3,"outputTokens":4,"totalTokens":10,"costUsd":null}"#,
        )
        .unwrap();
        assert_eq!((read.total_tokens, read.cost_usd), (10, None));
    }

    #[test]
    fn failures() {
        assert_eq!(timed_out(300_000), "The agent ran past its time limit of 5m");
        assert_eq!(prepare_failed("build", 2), "The prepare step build exited with status 2");
        assert_eq!(install_failed(1), "The profile's install exited with status 1");
        assert_eq!(
            source_failed("https://h/r", "\n fatal: not found\nmore"),
            "The source https://h/r could not be cloned: fatal: not found"
        );
        assert_eq!(sandbox_lost(3), "The sandbox was lost in each of 3 attempts");
        assert_eq!(failure_text(" \n\t\n  one \n two"), "one");
        assert_eq!(failure_text("  \n"), "The trial stopped, and no reason was given");
        assert_eq!(failure_text(&"é".repeat(240)), "é".repeat(240));
        assert_eq!(failure_text(&"é".repeat(241)), format!("{}…", "é".repeat(240)));
    }

    proptest! {
        #[test]
        fn denominators_are_honest(trials in prop::collection::vec((0..5usize, 0..30u64), 0..12)) {
            let trials: Vec<_> = trials.iter().map(|(status, commands)| (TrialStatus::ALL[*status].1, *commands)).collect();
            let result = Distribution::of(trials.iter().copied());
            prop_assert_eq!(result.trials, result.scored + result.voided);
            prop_assert_eq!(result.scored, result.passed + result.failed);
            prop_assert_eq!(result.trials, trials.iter().filter(|(status, _)| status.is_settled()).count() as u64);
            prop_assert!((0.0..=1.0).contains(&result.pass_rate.0));
            prop_assert!(result.command_min as f64 <= result.command_median.0 && result.command_median.0 <= result.command_max as f64);
        }

        #[test]
        fn failures_are_one_short_line(raw in "[\\PC\n\r]{0,600}") {
            let text = failure_text(&raw);
            prop_assert!(!text.is_empty() && text.chars().count() <= MAX_FAILURE + 1 && !text.contains('\n'));
        }
    }
}
