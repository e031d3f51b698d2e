//! What a trial adds up to: counts, evidence, verdict.

use std::collections::BTreeSet;

use evalgrid_domain::{
    changes::{ContentKind, TurnChanges},
    coverage::{Channel, Coverage},
    evidence::{Artifact, JournalEntry, Role, Trajectory, TrialEvidence, Validation, VerifyStep},
    judge::JudgeFile,
    limits::{INLINE_EVIDENCE_BYTES, MAX_CHANGED_FILES, MAX_TRIAL_CHANGES, MAX_TRIAL_DIFF_BYTES},
    mocks::MockCalls,
    outcome::{EXIT_NOT_SCORED, Usage},
    redact::Redactor,
};
use evalgrid_proto::v1::{Evidence, TrialOutcome, TrialStatus, evidence::Place};

use crate::{
    changes::FilesRecord,
    check::CheckRecord,
    trial::{Attempt, Stop, json},
    turns::TurnRecord,
    validator::ValidatorRecord,
};

/// Diagnostics of one trial; each is one short line.
const MAX_DIAGNOSTICS: usize = 100;

/// Fed by the steps in their order, whether they ran now or were recorded before: the same records give the same outcome.
#[derive(Default)]
pub(crate) struct Account {
    trajectory: Trajectory,
    usage: Option<Usage>,
    commands: u32,
    failed_commands: u32,
    model_ms: u64,
    timed: bool,
    files: BTreeSet<String>,
    validations: Vec<Validation>,
    verify_steps: Vec<VerifyStep>,
    diagnostics: Vec<String>,
    passed: Option<bool>,
    failure: Option<String>,
    void_fields: Vec<String>,
    /// Of the process that left the trial without a verdict.
    void_code: Option<i32>,
    /// What the person said in each turn that ran.
    asked: Vec<String>,
    /// What the agent is told of the HTTP mocks, behind its first prompt.
    pub(crate) introduction: String,
    pub(crate) mock_calls: Option<MockCalls>,
    /// The case's cache was there.
    pub(crate) cache_restored: bool,
    coverage: Coverage,
    file_changes: Vec<TurnChanges>,
    artifacts: Vec<Artifact>,
    /// Bytes of their diffs.
    diff_bytes: usize,
    source_commit: Option<String>,
    /// What the judges will read.
    judge_files: Vec<JudgeFile>,
}

impl Account {
    /// The trial will not be scored. `failure` is redacted; the first one counts.
    pub(crate) fn void(&mut self, failure: String, missing: &[&str]) {
        if self.failure.is_none() {
            self.failure = Some(failure);
            self.void_fields = missing.iter().map(|field| (*field).to_owned()).collect();
        }
    }

    pub(crate) fn is_void(&self) -> bool {
        self.failure.is_some()
    }

    /// How long the agent has worked.
    pub(crate) fn model_ms(&self) -> u64 {
        self.model_ms
    }

    pub(crate) fn diagnostics(&mut self, diagnostics: Vec<String>) {
        let room = MAX_DIAGNOSTICS.saturating_sub(self.diagnostics.len());
        self.diagnostics.extend(diagnostics.into_iter().take(room));
    }

    /// What the person said in each turn that ran.
    pub(crate) fn asked(&self) -> &[String] {
        &self.asked
    }

    /// Whether the agent ran at all.
    pub(crate) fn has_run(&self) -> bool {
        !self.asked.is_empty()
    }

    /// The repository was cloned at this commit.
    pub(crate) fn source_commit(&mut self, commit: Option<String>) {
        self.source_commit = commit.or(self.source_commit.take());
    }

    pub(crate) fn turn(&mut self, prompt: &str, record: TurnRecord, files: FilesRecord, workspace: &str) {
        self.timed = true;
        self.asked.push(prompt.to_owned());
        self.model_ms += record.finished_at_ms.saturating_sub(record.started_at_ms);
        self.commands = self.commands.saturating_add(record.commands);
        self.failed_commands = self.failed_commands.saturating_add(record.failed_commands);
        self.usage = Usage::sum(self.usage, record.usage);
        self.files(files.changes, &record.files, workspace);
        record.entries.into_iter().for_each(|entry| self.trajectory.push(entry));
        self.diagnostics(record.diagnostics);
        self.coverage.lower(&record.coverage);
        if let Some(failure) = record.failure {
            self.void(failure, &[]);
        }
    }

    /// `named`: what the agent itself said that it wrote, which is worth something only where nobody could look.
    fn files(&mut self, mut turn: TurnChanges, named: &[String], workspace: &str) {
        self.coverage.files.lower(&turn.coverage);
        if matches!(turn.coverage, Channel::Unavailable { .. }) {
            let below = |path: &String| Some(path.strip_prefix(workspace)?.strip_prefix('/')?.to_owned());
            named.iter().filter_map(below).for_each(|path| self.changed(path));
        }
        let room = MAX_TRIAL_CHANGES - self.file_changes.iter().map(|turn| turn.changes.len()).sum::<usize>();
        if turn.changes.len() > room {
            turn.omitted += (turn.changes.len() - room) as u64;
            turn.changes.truncate(room);
            let reason = format!(
                "Turn {}: changes beyond the first {MAX_TRIAL_CHANGES} of the trial are not listed",
                turn.turn
            );
            self.coverage.files.lower(&Channel::partial(reason));
        }
        for change in &mut turn.changes {
            change.from.iter().chain([&change.path]).for_each(|path| self.changed(path.clone()));
            let bytes = change.diff.as_ref().map_or(0, String::len);
            if self.diff_bytes + bytes > MAX_TRIAL_DIFF_BYTES {
                change.diff = None;
                change.content = ContentKind::TooLarge;
                let reason = format!("Turn {}: the diffs of the trial are too large to be kept", turn.turn);
                self.coverage.files.lower(&Channel::partial(reason));
            } else {
                self.diff_bytes += bytes;
            }
        }
        self.file_changes.push(turn);
    }

    /// Of the turns so far.
    pub(crate) fn file_changes(&self) -> &[TurnChanges] {
        &self.file_changes
    }

    pub(crate) fn artifacts(&mut self, artifacts: Vec<Artifact>) {
        self.artifacts = artifacts;
    }

    fn changed(&mut self, path: String) {
        if self.files.len() < MAX_CHANGED_FILES {
            self.files.insert(path);
        }
    }

    pub(crate) fn check(&mut self, record: CheckRecord) {
        self.passed = record.passed;
        self.validations.push(record.validation);
        self.verify_steps = record.verify_steps;
        self.diagnostics(record.diagnostics);
        if let Some(failure) = record.failure {
            self.void(failure, &["verify"]);
        }
    }

    /// One bundle of several: all must pass.
    pub(crate) fn validator(&mut self, record: ValidatorRecord) {
        self.validations.extend(record.validations);
        self.diagnostics(record.diagnostics);
        if let Some(passed) = record.passed {
            self.passed = Some(self.passed.unwrap_or(true) && passed);
        }
        if let Some(failure) = record.failure {
            self.void_code.get_or_insert(record.exit_code);
            self.void(failure, &["validator"]);
        }
    }

    /// The case has no checks, only judges: nothing in the sandbox speaks against the agent.
    pub(crate) fn without_checks(&mut self) {
        self.passed = Some(true);
    }

    pub(crate) fn skipped(&mut self, validations: Vec<Validation>) {
        self.validations.extend(validations);
    }

    /// How many records there are so far.
    pub(crate) fn validations(&self) -> usize {
        self.validations.len()
    }

    pub(crate) fn judge_files(&mut self, files: Vec<JudgeFile>) {
        self.judge_files = files;
    }

    /// What the person said behind the last turn.
    pub(crate) fn last_words(&mut self, text: String, redactor: &Redactor) {
        let mut entry = JournalEntry::Message {
            finished_at_millis: None,
            role: Some(Role::User),
            text,
            usage: None,
        };
        entry.seal(redactor);
        self.trajectory.push(entry);
    }

    /// The trial's end. Big evidence is stored before it is named.
    pub(crate) async fn outcome(self, attempt: &Attempt<'_>, sandbox_ms: u64) -> Result<TrialOutcome, Stop> {
        let (status, exit_code) = match (&self.failure, self.passed) {
            (None, Some(true)) => (TrialStatus::Passed, 0),
            (None, Some(false)) => (TrialStatus::Failed, 1),
            _ => (TrialStatus::Void, self.void_code.unwrap_or(EXIT_NOT_SCORED)),
        };
        let evidence = TrialEvidence {
            trajectory: self.trajectory.finish(),
            validations: self.validations,
            verify_steps: self.verify_steps,
            void_fields: self.void_fields.clone(),
            files_changed: self.files.into_iter().collect(),
            artifacts: self.artifacts,
            diagnostics: self.diagnostics,
            mock_calls: self.mock_calls,
            coverage: self.timed.then_some(self.coverage),
            file_changes: self.file_changes,
            timing: attempt.timing(),
            source_commit: self.source_commit,
            judge_files: self.judge_files,
        };
        let bytes = json(&evidence);
        let place = if bytes.len() <= INLINE_EVIDENCE_BYTES {
            Place::Inline(bytes)
        } else {
            Place::Object(attempt.worker.objects.put(&attempt.lease.organization_id, bytes).await?)
        };
        Ok(TrialOutcome {
            status: status.into(),
            exit_code,
            commands: self.commands,
            failed_commands: self.failed_commands,
            model_ms: self.model_ms,
            sandbox_ms,
            sandbox_id: Some(attempt.lease.sandbox.clone()),
            timed: self.timed,
            usage: self.usage.map(|usage| evalgrid_proto::v1::Usage {
                input_tokens: usage.input_tokens,
                output_tokens: usage.output_tokens,
                cache_read_tokens: usage.cache_read_tokens,
                cache_write_tokens: usage.cache_write_tokens,
                total_tokens: usage.total_tokens,
                cost_usd: usage.cost_usd.map(|cost| cost.0),
                // No harness here tells it yet.
                cache_write_1h_tokens: None,
            }),
            failure: self.failure,
            void_fields: self.void_fields,
            evidence: Some(Evidence { place: Some(place) }),
            journal_entries: Some(evidence.trajectory.len() as u64),
            ..TrialOutcome::default()
        })
    }
}
