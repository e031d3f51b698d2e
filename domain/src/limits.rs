//! Every limit, once, with its reason. String lengths are in UTF-16 code units, as the contract's clients count them, unless a name says bytes.

/// Trials of one run (contract 1.2).
pub const MAX_TRIALS_PER_RUN: u32 = 10;
/// Cases of one batch (contract 1.2).
pub const MAX_CASES: usize = 100;
/// Variants of one batch (contract 1.2).
pub const MAX_VARIANTS: usize = 20;
/// Trials of one batch: cases x variants x trials (contract 1.2).
pub const MAX_TRIALS_PER_BATCH: u64 = 100;
/// Batches of one organization that run at once (contract 1.2); one more start gets 409.
pub const MAX_RUNNING_BATCHES: usize = 3;

/// Bytes of a body of `batches.start` and `runner.start`, also of the gRPC message that carries it (decision 3).
pub const MAX_START_BODY_BYTES: usize = 64 << 20;
/// Bytes of any other body (decision 3).
pub const MAX_BODY_BYTES: usize = 8 << 20;
/// Nested arrays and objects in a body (decision 3).
pub const MAX_JSON_DEPTH: usize = 64;
/// Values, keys and containers in a body. A parsed value takes 32 bytes and more, so 64 MiB of `0,0,0` would otherwise become gigabytes.
pub const MAX_JSON_VALUES: usize = 2_000_000;
/// Issues that a refused body lists. More would help nobody, and an answer must stay small.
pub const MAX_ISSUES: usize = 50;
/// Characters of one key of a body that a path or message repeats.
pub const MAX_ECHOED_KEY: usize = 200;

/// A suite's or a case's id (contract 1.5).
pub const MAX_ID: usize = 100;
/// A suite's prompt (contract 1.5).
pub const MAX_PROMPT: usize = 16_384;
/// A suite's or a case's name (contract 1.5).
pub const MAX_NAME: usize = 200;
/// Tags of a case (contract 1.5).
pub const MAX_TAGS: usize = 12;
/// One tag (contract 1.5).
pub const MAX_TAG: usize = 40;
/// The value of one prompt variable (contract 1.5).
pub const MAX_VARIABLE_VALUE: usize = 2_048;
/// A verify command (contract 1.5).
pub const MAX_VERIFY: usize = 8_192;
/// The name of a prepare step, a validator, a check or a judge (contract 1.5).
pub const MAX_STEP_NAME: usize = 100;
/// A bundled program, and the content of one source file (contract 1.5).
pub const MAX_SOURCE: usize = 1_000_000;
/// Source files of a validator (contract 1.5).
pub const MAX_SOURCE_FILES: usize = 100;
/// All source files of a validator together (contract 1.5, documented).
pub const MAX_SOURCE_FILES_TOTAL: usize = 1_000_000;
/// A path of a source file, a profile file or a judge's file (contract 1.5).
pub const MAX_PATH: usize = 512;
/// Checks, judges, or manifest entries of one validator (contract 1.5).
pub const MAX_CHECKS: usize = 20;
/// The name of a manifest entry (contract 1.5).
pub const MAX_MANIFEST_NAME: usize = 200;
/// The model of a judge or of a simulated person (contract 1.5).
pub const MAX_JUDGE_MODEL: usize = 200;
/// A judge's prompt, or what it expects (contract 1.5).
pub const MAX_JUDGE_PROMPT: usize = 32_000;
/// Files shown to a judge (contract 1.5).
pub const MAX_JUDGE_FILES: usize = 8;
/// Choices of a judge (contract 1.5, documented).
pub const MAX_JUDGE_CHOICES: usize = 20;
/// Milliseconds that a judge may take (contract 1.5).
pub const JUDGE_TIMEOUT_MS: std::ops::RangeInclusive<i64> = 1_000..=300_000;
/// Milliseconds that a judge may take when it does not say (contract 1.5).
pub const DEFAULT_JUDGE_TIMEOUT_MS: u32 = 120_000;
/// A simulated person's goal (contract 1.5).
pub const MAX_USER_GOAL: usize = 2_000;
/// A simulated person's private brief (contract 1.5).
pub const MAX_USER_PROMPT: usize = 8_000;
/// Replies of a scripted person (contract 1.5).
pub const MAX_REPLIES: usize = 24;
/// One reply of a scripted person (contract 1.5).
pub const MAX_REPLY: usize = 4_000;
/// A trigger's URL (contract 1.6).
pub const MAX_TRIGGER_URL: usize = 2_048;

/// Turns of a trial (contract 1.5).
pub const MAX_TURNS: std::ops::RangeInclusive<i64> = 1..=50;
/// Turns of a trial whose case does not say (contract 1.5).
pub const DEFAULT_MAX_TURNS: u32 = 8;
/// Milliseconds that an agent may work in a trial, over all turns (contract 1.5).
pub const TIMEOUT_MS: std::ops::RangeInclusive<i64> = 1_000..=3_600_000;
/// Milliseconds that an agent may work where the case does not say: 15 minutes (contract 1.5).
pub const DEFAULT_TIMEOUT_MS: u32 = 900_000;
/// Milliseconds that a verify command or a code check may take (contract 2.4).
pub const CHECK_TIMEOUT_MS: u64 = 300_000;

/// A profile's name (contract 1.5).
pub const MAX_PROFILE_NAME: usize = 64;
/// Files of a profile (contract 1.5).
pub const MAX_PROFILE_FILES: usize = 256;
/// The content of one file of a profile (contract 1.5).
pub const MAX_PROFILE_FILE: usize = 96_000;
/// All files of a profile together (contract 1.5).
pub const MAX_PROFILE_TOTAL: usize = 2_000_000;
/// The name of a stored variable (contract 1.4).
pub const MAX_VARIABLE_NAME: usize = 128;
/// Bytes of one text that reaches a process as an argument or an environment variable. Linux refuses a single string of 128 KiB; the rest is
/// room for the variable's name and for quoting.
pub const MAX_PROCESS_STRING_BYTES: usize = 120 << 10;

/// Bytes of the names and values of a profile's environment together. Linux gives arguments and environment of a process 2 MiB by default, and the
/// agent's prompt and the platform's own variables are in there, too.
pub const MAX_PROCESS_ENV_BYTES: usize = 1 << 20;
/// A path of a source's file. Linux refuses a path of 4,096 bytes; the rest is room for where the workspace lies, and for longer characters.
pub const MAX_WORKSPACE_PATH: usize = 1_024;

/// An idempotency key (contract 1.9): at least one character.
pub const MAX_IDEMPOTENCY_KEY: usize = 128;
/// How long an idempotency key is kept after its batch ended: 72 hours (decision 27).
pub const IDEMPOTENCY_KEY_MS: u64 = 72 * 3_600_000;

/// Rows of a page where the request does not say (contract 1.2).
pub const DEFAULT_PAGE: usize = 20;
/// Rows of a page at most; a larger limit is clamped, not refused (contract 1.2).
pub const MAX_PAGE: usize = 100;

/// A started trial, run or batch without a durable sign of progress for this long is abandoned: six hours (decision 8).
pub const ABANDONED_AFTER_MS: u64 = 6 * 3_600_000;
/// How long a trial may wait for a slot: 72 hours (decision 8).
pub const MAX_WAIT_FOR_SLOT_MS: u64 = 72 * 3_600_000;
/// A local batch that checks in and was quiet for this long is over: ten minutes (contract 2.3).
pub const LOCAL_QUIET_MS: u64 = 600_000;
/// Attempts of a trial whose sandbox was lost: the first, and two more (decision 12).
pub const MAX_SANDBOX_ATTEMPTS: u32 = 3;

/// Characters of a command's output, or of a tool's input, output or error, that a trajectory keeps (contract 1.6).
pub const MAX_EVIDENCE_TEXT: usize = 4_000;
/// Entries of a trajectory (decision 11).
pub const MAX_TRAJECTORY_ENTRIES: usize = 20_000;
/// Bytes of a trajectory as JSON (decision 11).
pub const MAX_TRAJECTORY_BYTES: usize = 64 << 20;
/// Bytes of one line of an agent's output; a longer one is dropped with a diagnostic (decision 11).
pub const MAX_OUTPUT_LINE_BYTES: usize = 16 << 20;
/// Characters of one value of a validation (contract 1.7).
pub const MAX_VALIDATION_VALUE: usize = 16_000;
/// Characters of all values of one stored validation (contract 2.4).
pub const MAX_VALIDATION_TOTAL: usize = 64_000;
/// Characters of a validation's message (contract 1.7).
pub const MAX_VALIDATION_MESSAGE: usize = 2_000;
/// Characters of a validation's id (contract 1.7).
pub const MAX_VALIDATION_ID: usize = 200;
/// Characters of a validation's name (contract 1.7).
pub const MAX_VALIDATION_NAME: usize = 200;
/// Validations of a trial (contract 1.7).
pub const MAX_VALIDATIONS: usize = 40;
/// Calls, and log lines, of one validation (contract 1.7).
pub const MAX_VALIDATION_CALLS: usize = 64;
/// Calls of each kind of mock that a trial keeps (contract 2.4).
pub const MAX_MOCK_CALLS: usize = 256;
/// Bytes of all calls of a trial's mocks as JSON: 256 calls of two values of 16,000 characters that are mostly one byte long.
pub const MAX_MOCK_CALL_BYTES: usize = 8 << 20;
/// Bytes of one line of a mock's log: its values hold up to 64,000 characters each, its handler's logs as much again.
pub const MAX_MOCK_LINE_BYTES: usize = 4 << 20;
/// HTTP mocks of one profile.
pub const MAX_MOCK_APIS: usize = 64;
/// Endpoints of one HTTP mock. All of them must fit into the agent's prompt anyway.
pub const MAX_MOCK_ENDPOINTS: usize = 512;
/// Bytes of the value that a prepare step returns: checks get it as one variable.
pub const MAX_PREPARED_BYTES: usize = MAX_PROCESS_STRING_BYTES;
/// Milliseconds that a prepare step may take: one command of 600 s, as the documentation shows it, and what is around it.
pub const PREPARE_TIMEOUT_MS: u64 = 900_000;
/// Milliseconds until an HTTP mock must say that it is ready.
pub const MOCK_READY_MS: u64 = 60_000;
/// Paths of changed files that one trial keeps.
pub const MAX_CHANGED_FILES: usize = 10_000;
/// Changed files of one turn that are listed (decision 20).
pub const MAX_TURN_CHANGES: usize = 10_000;
/// Changed files of all turns of a trial that are listed: 50 turns at their limit would be 100 MB that every reader gets.
pub const MAX_TRIAL_CHANGES: usize = 20_000;
/// Bytes of changed files that are read for one turn, both sides (decision 20).
pub const MAX_TURN_CONTENT_BYTES: u64 = 64 << 20;
/// Bytes of a file whose text is looked at; larger ones are no text that a person reads.
pub const MAX_DIFFED_FILE_BYTES: u64 = 1 << 20;
/// Bytes of one diff.
pub const MAX_DIFF_BYTES: usize = 64 << 10;
/// Bytes of all diffs of one turn.
pub const MAX_TURN_DIFF_BYTES: usize = 4 << 20;
/// Bytes of all diffs of a trial: every reader of its results gets them.
pub const MAX_TRIAL_DIFF_BYTES: usize = 16 << 20;
/// Patterns of one list of a case's `diff`.
pub const MAX_DIFF_PATTERNS: usize = 256;
/// Bytes of one such pattern: longer paths there are none.
pub const MAX_DIFF_PATTERN_BYTES: usize = 4_096;
/// Bytes of all patterns of one list together: compiling them takes processor time and memory of the executor.
pub const MAX_DIFF_PATTERNS_BYTES: usize = 16 << 10;
/// How long the sandbox of a trial that did not pass may be kept: a day.
pub const MAX_KEEP_MS: u64 = 24 * 3_600_000;
/// Sandboxes that are kept for people on one worker at a time: each may hold gigabytes of its disk.
pub const MAX_KEPT_SANDBOXES: usize = 16;
/// Bytes of one kept file; larger ones are no text that a person reads.
pub const MAX_ARTIFACT_BYTES: u64 = 256 << 10;
/// Kept files of one trial: each is an object, and an object costs several syncs.
pub const MAX_ARTIFACTS: usize = 64;
/// Bytes of all kept files of one trial.
pub const MAX_ARTIFACTS_BYTES: u64 = 4 << 20;
/// Evidence up to this travels with its event; what is larger is an object. An object costs several syncs, and a small trial must cost none.
pub const INLINE_EVIDENCE_BYTES: usize = 16 << 10;
/// The record of a judgment up to this travels with its event; what is larger is an object. Twenty of them belong to a trial, a hundred trials to an
/// event that takes a whole batch over, and beside a judge's seconds an object's syncs are nothing.
pub const INLINE_JUDGMENT_BYTES: usize = 2 << 10;
/// Asks of a judge or a person whose answer is not known: one that may be lost is asked once more, and no third time.
pub const MAX_UNCLEAR_ASKS: u32 = 2;
/// Refusals for now (429, overloaded) that a judge or a person may meet. With the pauses that is about a minute, and limits are per minute.
pub const MAX_REFUSED_ASKS: u32 = 4;
/// Characters of one text in the conversation that a judge reads (contract 2.7).
pub const MAX_JUDGE_ENTRY: usize = 4_000;
/// Characters of the whole conversation that a judge reads, as JSON (contract 2.7).
pub const MAX_JUDGE_CONVERSATION: usize = 48_000;
/// Characters of one file that a judge reads (contract 2.7).
pub const MAX_JUDGE_FILE: usize = 32_000;
/// Characters of all files that the judges of a case read (contract 2.7).
pub const MAX_JUDGE_FILES_TOTAL: usize = 96_000;
/// Characters of a judge's reason (contract 2.7).
pub const MAX_JUDGE_REASON: usize = 2_000;
/// Characters of the agent's last message that a judge reads. Messages are not cut elsewhere, and a line of output may have 16 MiB. With this, all
/// that a judge reads is about 320,000 characters at most: some 80,000 tokens of plain text, where smaller models take 128,000.
pub const MAX_JUDGE_OUTPUT: usize = 96_000;
/// Bytes of a judge's answer that are read: a reason of 2,000 characters, each of which may be written as an escape of up to 12 bytes, with room
/// for the label.
pub const MAX_JUDGE_ANSWER_BYTES: usize = 64 << 10;
/// Characters of one text in the conversation that a simulated person reads: 50 turns of them still fit into a model's window.
pub const MAX_PERSON_TEXT: usize = 16_000;
/// Characters of a simulated person's reply. It is asked for one or two sentences, and a recorded step holds 64 KiB.
pub const MAX_PERSON_REPLY: usize = 16_000;
/// How long a judge's sandbox waits for the trial's own to be gone. Longer, and the worker that should remove it may never come back.
pub const JUDGE_AFTER_SANDBOX_MS: u64 = 60_000;
/// How long a simulated person may take for one reply.
pub const REPLY_TIMEOUT_MS: u64 = 120_000;
/// How long a leased credential, leased variables, or a token for a batch's tail is good: 15 minutes (contract 1.9).
pub const LEASED_VALUES_MS: u64 = 15 * 60_000;
/// Names of variables leased at once (contract 1.9).
pub const MAX_LEASED_VARIABLES: usize = 100;
/// Journal entries of one page of a tail (contract 1.9).
pub const MAX_TAIL_EVENTS: usize = 500;
/// Bytes of the entries of one page of a tail: messages are not cut, so entries can be large. At least one entry is given.
pub const MAX_TAIL_BYTES: usize = 4 << 20;
/// Characters of a failure text, before its ellipsis (contract 2.3).
pub const MAX_FAILURE: usize = 240;

/// Something that grows with use, and how far it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth {
    /// What grows, in the plural.
    pub what: &'static str,
    /// As many as there may be.
    pub limit: u64,
    /// What to do once it is full.
    pub then: &'static str,
}

/// Something has grown as far as it may; what would make it larger changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} {}: that is the limit; {}", .0.limit, .0.what, .0.then)]
pub struct Full(pub Growth);

impl Growth {
    /// Refuses a size above the limit.
    pub fn check(&self, size: u64) -> Result<(), Full> {
        match size > self.limit {
            true => Err(Full(*self)),
            false => Ok(()),
        }
    }

    /// Whether a step from `before` to `after` passes 80 % of the limit: the moment for a warning, while there is time to act.
    pub fn nears(&self, before: u64, after: u64) -> bool {
        let mark = self.limit - self.limit / 5;
        before < mark && mark <= after
    }
}

/// 50 turns of three steps each, and the steps around them, with room.
pub const STEPS_PER_TRIAL: Growth = Growth {
    what: "recorded steps of one trial",
    limit: 1_024,
    then: "split the case into several",
};
/// They are held in memory and travel with every lease of the trial: 100 such trials must fit into a scheduler's memory.
pub const RECORDED_BYTES_PER_TRIAL: Growth = Growth {
    what: "bytes in the recorded steps of one trial",
    limit: 8 << 20,
    then: "split the case into several",
};
/// Each costs about 300 bytes of memory until it expires (decision 27).
pub const IDEMPOTENCY_KEYS: Growth = Growth {
    what: "idempotency keys remembered for one organization",
    limit: 10_000,
    then: "start without one, or wait until older ones expire",
};
/// Each costs about 300 bytes of memory for ever, revoked ones too.
pub const KEYS_PER_ORGANIZATION: Growth = Growth {
    what: "API keys of one organization",
    limit: 1_000,
    then: "use one of those it has",
};
/// As above, over all organizations.
pub const API_KEYS: Growth = Growth {
    what: "API keys",
    limit: 100_000,
    then: "start another server for more organizations",
};
/// Each costs about 1 KiB of memory for ever.
pub const ORGANIZATIONS: Growth = Growth {
    what: "organizations",
    limit: 50_000,
    then: "start another server for more",
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_refused_above_the_limit_and_warned_of_once_before() {
        for limit in [1, 4, 5, 10, 1_024] {
            let growth = Growth {
                what: "things",
                limit,
                then: "stop",
            };
            let warnings: Vec<u64> = (1..=limit).filter(|size| growth.nears(size - 1, *size)).collect();
            assert_eq!(warnings.len(), 1, "one warning on the way to {limit}");
            assert!(warnings[0] * 5 >= limit * 4, "not before 80 % of {limit}");
            assert_eq!(growth.check(limit), Ok(()));
            assert_eq!(growth.check(limit + 1), Err(Full(growth)));
        }
        assert_eq!(
            Full(IDEMPOTENCY_KEYS).to_string(),
            "10000 idempotency keys remembered for one organization: that is the limit; start without one, or wait until older ones expire"
        );
    }
}
