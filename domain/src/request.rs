//! The start of a batch: its decoded form, how it is decoded, and what is refused.
//!
//! The types hold the *decoded* form, defaults filled in; their JSON is what is stored and hashed. [`decode_start`] finds every violation of
//! the schema, [`check_start`] the first broken rule that no schema states.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::{
    limits::{DEFAULT_MAX_TURNS, DEFAULT_TIMEOUT_MS},
    names::names,
    number::Number,
};

mod check;
mod decode;
mod support;

pub use check::{StartRefusal, check_judges, check_local_start, check_start};
pub use decode::{RunnerStart, decode_runner_start, decode_start, judge, judges};
pub use support::{Feature, Support};

/// A request to start a batch: every case on every variant, `trials` times.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SuiteBatchRequest {
    /// At least one.
    pub cases: Vec<Case>,
    /// The machine that runs a local batch promises to check in. Means nothing for a hosted batch.
    pub checks_in: bool,
    /// The suite that the cases belong to.
    pub suite: Suite,
    /// Trials of each run.
    pub trials: u32,
    /// At least one.
    pub variants: Vec<VariantRequest>,
}

impl SuiteBatchRequest {
    /// Cases x variants x trials.
    pub fn total_trials(&self) -> u64 {
        self.cases.len() as u64 * self.variants.len() as u64 * u64::from(self.trials)
    }

    /// The case and the variant of a run, by the run's place in the batch: case-major, then variants in the request's order.
    pub fn run_at(&self, run: usize) -> Option<(usize, usize)> {
        let variants = self.variants.len();
        (run < self.cases.len() * variants).then(|| (run / variants, run % variants))
    }
}

/// What plays a simulated person where the operator names no other model (contract 2.6).
pub const DEFAULT_USER_MODEL: &str = "gpt-5.4-mini";

impl SuiteBatchRequest {
    /// Every harness that runs, plays a person or judges in the batch.
    pub fn harnesses(&self) -> BTreeSet<Harness> {
        let mut used: BTreeSet<Harness> = self.variants.iter().map(|variant| variant.harness).collect();
        for case in &self.cases {
            if let Some(User::Simulated { by: Some(player), .. }) = &case.user {
                used.insert(player.harness);
            }
            if let Some(Validator::Judged(validator)) = &case.validator {
                used.extend(validator.judges.iter().filter_map(|judge| match judge.by {
                    JudgeBy::Harness { harness } => Some(harness),
                    JudgeBy::Provider { .. } => None,
                }));
            }
        }
        used
    }
}

/// The source that a case's workspace really comes from: its own, else its suite's, else nothing.
///
/// # Panics
/// Where `case` is not an index of the request's cases.
pub fn effective_source(request: &SuiteBatchRequest, case: usize) -> &Source {
    request.cases[case]
        .source
        .as_ref()
        .or(request.suite.source.as_ref())
        .unwrap_or(&Source::Empty)
}

/// The suite of a batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Suite {
    /// `^[a-z0-9]+(?:-[a-z0-9]+)*$`.
    pub id: String,
    /// Its name; the id where the request has none.
    pub name: String,
    /// The prompt, with placeholders.
    pub prompt: String,
    /// The source of cases that have none of their own.
    pub source: Option<Source>,
}

/// One case of a suite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Case {
    /// A folder kept between trials.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<CaseCache>,
    /// Ours: which files count as the agent's work. Absent is not written, so that hashes of requests without it stay what they were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diff: Option<DiffRules>,
    /// `^[a-z0-9]+(?:-[a-z0-9]+)*$`.
    pub id: String,
    /// Turns of a conversation; null means the default.
    pub max_turns: Option<u32>,
    /// Its name; the id where the request has none.
    pub name: String,
    /// A program that prepares the workspace.
    pub prepare: Option<Prepare>,
    /// Its own source. Absent is not the same as empty: then the suite's source is used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<Source>,
    /// For people and filters.
    pub tags: Vec<String>,
    /// Milliseconds that the agent may work, over all turns; null means the default.
    pub timeout_ms: Option<u32>,
    /// Who answers the agent.
    pub user: Option<User>,
    /// Code or judges that decide; never together with `verify`.
    pub validator: Option<Validator>,
    /// Values for the prompt's placeholders.
    pub variables: BTreeMap<String, String>,
    /// A command that decides; never together with `validator`.
    pub verify: Option<String>,
}

impl Case {
    /// Turns that a conversation may have.
    pub fn turn_limit(&self) -> u32 {
        self.max_turns.unwrap_or(DEFAULT_MAX_TURNS)
    }

    /// Milliseconds that the agent may work, over all turns.
    pub fn time_limit_ms(&self) -> u32 {
        self.timeout_ms.unwrap_or(DEFAULT_TIMEOUT_MS)
    }

    /// The name of the model that plays the case's person, as a variant's identity has it: null for none or a script; `harness/model` for a
    /// harness. `default_model` is the server's model for people.
    pub fn user_model(&self, default_model: &str) -> Option<String> {
        match self.user.as_ref()? {
            User::Scripted { .. } => None,
            User::Simulated { by: None, .. } => Some(default_model.to_owned()),
            User::Simulated { by: Some(player), .. } => Some(format!("{}/{}", player.harness.name(), player.model)),
        }
    }
}

/// A folder of the workspace that is kept between trials under a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaseCache {
    /// What it is kept under.
    pub key: String,
    /// Relative to the workspace.
    pub path: String,
}

/// Which files of the workspace count as the agent's work, beyond the defaults: patterns as in a `.gitignore` at the top of the workspace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiffRules {
    /// What does not count.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ignore: Vec<String>,
    /// What counts all the same; stronger than `ignore` and the defaults.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub include: Vec<String>,
}

/// A program that prepares the workspace before the agent starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prepare {
    /// For people.
    pub name: String,
    /// A whole ES module.
    pub source: String,
}

/// What a workspace starts with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Source {
    /// Nothing.
    Empty,
    /// A git repository.
    Repo {
        /// Branch, tag or commit; null means the default branch.
        #[serde(rename = "ref")]
        reference: Option<String>,
        /// What to clone.
        url: String,
    },
    /// Files, by their path in the workspace.
    Files {
        /// Path to content.
        files: BTreeMap<String, String>,
    },
}

/// Who answers the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum User {
    /// A model, or a harness, plays a person.
    Simulated {
        /// What the person wants.
        goal: String,
        /// What only the person knows.
        prompt: String,
        /// The harness that plays; absent means the server's model for people.
        #[serde(flatten, skip_serializing_if = "Option::is_none")]
        by: Option<Player>,
    },
    /// Fixed replies, in order.
    Scripted {
        /// At least one.
        replies: Vec<String>,
    },
}

/// The harness and model that play a person.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Player {
    /// One that may judge.
    pub harness: Harness,
    /// Its model.
    pub model: String,
}

/// Code, or code and judges, that decide on a trial.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Validator {
    /// Has `kind: "judged"`.
    Judged(JudgedValidator),
    /// Has no `kind`.
    Code(CodeValidator),
}

impl Validator {
    /// Its name, for people.
    pub fn name(&self) -> &str {
        match self {
            Self::Judged(validator) => &validator.name,
            Self::Code(validator) => &validator.check.name,
        }
    }

    /// The files that its source was made from.
    pub fn source_files(&self) -> Option<&[SourceFile]> {
        match self {
            Self::Judged(validator) => validator.source_files.as_deref(),
            Self::Code(validator) => validator.source_files.as_deref(),
        }
    }
}

/// One bundled program of checks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CodeValidator {
    /// The program.
    #[serde(flatten)]
    pub check: Check,
    /// Shown beside the evidence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_files: Option<Vec<SourceFile>>,
}

/// Checks and judges together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JudgedValidator {
    /// False: values are not kept. Absent means true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capture: Option<bool>,
    /// May be empty.
    pub checks: Vec<Check>,
    /// At least one.
    pub judges: Vec<Judge>,
    /// Always `judged`.
    pub kind: Judged,
    /// For people.
    pub name: String,
    /// Shown beside the evidence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_files: Option<Vec<SourceFile>>,
}

impl JudgedValidator {
    /// The files that its judges read, each once, in the order in which they are named first.
    pub fn judge_files(&self) -> Vec<&str> {
        let mut seen = BTreeSet::new();
        let named = self.judges.iter().flat_map(|judge| judge.files.iter().flatten());
        named.map(String::as_str).filter(|path| seen.insert(*path)).collect()
    }

    /// Whether what its checks and judges were given, and gave, is kept.
    pub fn captures(&self) -> bool {
        self.capture.unwrap_or(true)
    }
}

/// The word `judged`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Judged {
    /// The only value.
    Judged,
}

/// A bundled program of checks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// False: values are not kept. Absent means true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capture: Option<bool>,
    /// The checks in it; absent in old bundles, which count as one check.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub manifest: Option<Vec<ManifestEntry>>,
    /// For people.
    pub name: String,
    /// A whole ES module.
    pub source: String,
}

/// One check of a bundle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestEntry {
    /// Unique in its bundle.
    pub index: u64,
    /// For people.
    pub name: String,
}

/// A file that a program was bundled from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceFile {
    /// The text.
    pub content: String,
    /// Relative, with `/`.
    pub path: String,
}

/// A judge: a model, or a harness, that picks one of a few choices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Judge {
    /// Label to score.
    pub choices: BTreeMap<String, Number>,
    /// What a good answer looks like.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
    /// Files of the workspace that it is shown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub files: Option<Vec<String>>,
    /// Always `judge`.
    pub kind: JudgeKind,
    /// Its model.
    pub model: String,
    /// Unique in its case.
    pub name: String,
    /// What it judges by.
    pub prompt: String,
    /// The score that passes.
    pub threshold: Number,
    /// Milliseconds that it may take.
    pub timeout_ms: u32,
    /// Who answers.
    #[serde(flatten)]
    pub by: JudgeBy,
}

/// The word `judge`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JudgeKind {
    /// The only value.
    Judge,
}

/// Who answers for a judge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum JudgeBy {
    /// A model of a provider.
    Provider {
        /// The only one is `openai`.
        provider: JudgeProvider,
    },
    /// A harness in a fresh sandbox.
    Harness {
        /// One that may judge.
        harness: Harness,
    },
}

impl JudgeBy {
    /// Its name in a judgment: the harness, or the provider.
    pub fn evaluator(&self) -> &'static str {
        match self {
            Self::Provider { provider } => provider.name(),
            Self::Harness { harness } => harness.name(),
        }
    }
}

/// A provider of judging models.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JudgeProvider {
    /// OpenAI.
    Openai,
}

impl JudgeProvider {
    /// The name that the contract gives it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Openai => "openai",
        }
    }
}

/// What the cases run on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VariantRequest {
    /// Whose keys are used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub credentials: Option<CredentialRefs>,
    /// The agent.
    pub harness: Harness,
    /// The agent's model, as the agent spells it.
    pub model: String,
    /// What the agent is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<Profile>,
    /// The name of its sandbox, as the request had it.
    pub sandbox: Sandbox,
}

impl VariantRequest {
    /// The profile's name.
    pub fn profile_name(&self) -> Option<&str> {
        self.profile.as_ref().map(|profile| profile.name.as_str())
    }
}

/// References to stored credentials.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CredentialRefs {
    /// For the agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub harness_ref: Option<String>,
    /// For its sandbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox_ref: Option<String>,
}

/// What an agent is given: files, environment, commands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Profile {
    /// Plain environment variables.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env: Option<BTreeMap<String, String>>,
    /// Path (`home/…` or `workspace/…`) to content.
    pub files: BTreeMap<String, String>,
    /// A command that runs once, before the agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub install: Option<String>,
    /// Part of the variant's identity.
    pub name: String,
    /// The command of the harness `command`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
    /// Added to the agent's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_prompt: Option<String>,
    /// Names of stored variables that become environment variables.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub variables: Option<Vec<String>>,
}

/// Who or what started a batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trigger {
    /// Where the start came from.
    pub source: TriggerSource,
    /// For example a CI job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
}

names!(
    /// A coding agent. `bub` is ours; the others are the contract's.
    Harness {
        /// OpenAI's Codex.
        Codex = "codex",
        /// OpenCode.
        Opencode = "opencode",
        /// Pi.
        Pi = "pi",
        /// Fx.
        Fx = "fx",
        /// Claude Code.
        Claude = "claude",
        /// Gemini CLI.
        Gemini = "gemini",
        /// Qwen Code.
        Qwen = "qwen",
        /// Cursor's agent.
        Cursor = "cursor",
        /// A process of the client's own.
        Command = "command",
        /// Bub.
        Bub = "bub",
    }
);

impl Harness {
    /// It may judge, or play a person.
    pub fn may_judge(self) -> bool {
        !matches!(self, Self::Command | Self::Bub)
    }
}

names!(
    /// The name of a sandbox. `bubblewrap`, `docker` and `process` are ours; the others are the contract's.
    Sandbox {
        /// Daytona.
        Daytona = "daytona",
        /// E2B; what a variant without `sandbox` gets.
        E2b = "e2b",
        /// Upstash Box.
        Upstash = "upstash",
        /// Modal.
        Modal = "modal",
        /// Cloudflare.
        Cloudflare = "cloudflare",
        /// Vercel.
        Vercel = "vercel",
        /// The client's own machine; only in a local batch.
        Local = "local",
        /// bubblewrap on the executor's machine.
        Bubblewrap = "bubblewrap",
        /// Docker.
        Docker = "docker",
        /// A bare process on the executor's machine.
        Process = "process",
    }
);

names!(
    /// Where a start came from.
    TriggerSource {
        /// The dashboard.
        Dashboard = "dashboard",
        /// The API; the default.
        Api = "api",
        /// The command line.
        Cli = "cli",
        /// A CI job.
        Ci = "ci",
        /// An MCP client.
        Mcp = "mcp",
    }
);
