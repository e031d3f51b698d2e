//! From an untrusted JSON value to the decoded request: every rule that the schema states, every issue with its path.

use std::{collections::HashSet, ops::RangeInclusive};

use serde_json::{Map, Value};

use super::*;
use crate::{
    changes,
    decode::{Decoder, Issue, IssueTag, Text, utf16_len},
    limits::*,
};

type Object = Map<String, Value>;

/// A runner's start: a batch, and what only the runner may say about it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunnerStart {
    /// The batch itself.
    #[serde(flatten)]
    pub request: SuiteBatchRequest,
    /// The client runs the trials itself and reports them.
    pub local: bool,
    /// Who or what started it.
    pub trigger: Option<Trigger>,
}

/// Decodes the body of `batches.start`.
///
/// # Errors
/// Every issue found, at most [`MAX_ISSUES`].
pub fn decode_start(value: &Value) -> Result<SuiteBatchRequest, Vec<Issue>> {
    Decoder::run(value, batch)
}

/// Decodes the body of `runner.start`.
///
/// # Errors
/// Every issue found, at most [`MAX_ISSUES`].
pub fn decode_runner_start(value: &Value) -> Result<RunnerStart, Vec<Issue>> {
    Decoder::run(value, |d, value| {
        let request = batch(d, value);
        let map = value.as_object()?;
        let local = d.optional(map, "local", Decoder::boolean);
        let trigger = d.nullable(map, "trigger", trigger);
        Some(RunnerStart {
            request: request?,
            local: local?.unwrap_or(false),
            trigger: trigger?,
        })
    })
}

fn trigger(d: &mut Decoder, value: &Value) -> Option<Trigger> {
    let map = d.object(value)?;
    let source = d.required(map, "source", |d, value| d.one_of(value, TriggerSource::ALL));
    let url = d.optional(map, "url", |d, value| d.string(value, Text::max(MAX_TRIGGER_URL)));
    Some(Trigger {
        source: source?,
        url: url?,
    })
}

fn batch(d: &mut Decoder, value: &Value) -> Option<SuiteBatchRequest> {
    let map = d.object(value)?;
    let cases = d.required(map, "cases", |d, value| d.array(value, 1..=MAX_CASES, case));
    let checks_in = d.optional(map, "checksIn", Decoder::boolean);
    let suite = d.required(map, "suite", suite);
    let trials = d.required(map, "trials", |d, value| integer_u32(d, value, 1..=i64::from(MAX_TRIALS_PER_RUN)));
    let variants = d.required(map, "variants", |d, value| d.array(value, 1..=MAX_VARIANTS, variant));
    Some(SuiteBatchRequest {
        cases: cases?,
        checks_in: checks_in?.unwrap_or(false),
        suite: suite?,
        trials: trials?,
        variants: variants?,
    })
}

/// Only for ranges that fit.
fn integer_u32(d: &mut Decoder, value: &Value, range: RangeInclusive<i64>) -> Option<u32> {
    d.integer(value, range).and_then(|number| u32::try_from(number).ok())
}

fn text(rules: Text) -> impl Fn(&mut Decoder, &Value) -> Option<String> {
    move |d, value| d.string(value, rules)
}

/// `^[a-z0-9]+(?:-[a-z0-9]+)*$`
fn is_slug(text: &str) -> bool {
    text.split('-')
        .all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit()))
}

/// `^[A-Z_][A-Z0-9_]*$`
fn is_env_name(text: &str) -> bool {
    let upper = |byte: u8| byte.is_ascii_uppercase() || byte == b'_';
    let mut bytes = text.bytes();
    bytes.next().is_some_and(upper) && bytes.all(|byte| upper(byte) || byte.is_ascii_digit())
}

/// `^[a-z0-9][a-z0-9-]{0,63}$`
fn is_profile_name(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let mut bytes = text.bytes();
    text.len() <= MAX_PROFILE_NAME && bytes.next().is_some_and(plain) && bytes.all(|byte| plain(byte) || byte == b'-')
}

/// Segments that neither are empty nor climb.
fn is_tree_path(path: &str) -> bool {
    path.split('/').all(|segment| !matches!(segment, "" | "." | ".."))
}

/// `home/…` or `workspace/…`
fn is_profile_path(path: &str) -> bool {
    is_tree_path(path) && path.split_once('/').is_some_and(|(root, _)| matches!(root, "home" | "workspace"))
}

fn is_source_path(path: &str) -> bool {
    is_tree_path(path) && !path.contains(['\\', ':', '\0'])
}

/// A place below the workspace: relative, and never above it.
fn is_workspace_path(path: &str) -> bool {
    !path.starts_with('/') && !path.ends_with('/') && path.split('/').all(|segment| segment != "..") && first_segment(path).is_some()
}

fn is_cache_path(path: &str) -> bool {
    !path.starts_with('/') && path.split('/').all(|segment| segment != "..") && first_segment(path).is_some_and(|first| first != ".sphynx")
}

/// The first segment that names something; none means the workspace itself.
fn first_segment(path: &str) -> Option<&str> {
    path.split('/').find(|segment| !matches!(*segment, "" | "."))
}

/// Neither what git would read as an option nor what no address has: a line break would hide the rest of it from whoever reads of a failure.
fn is_address(text: &str) -> bool {
    !text.starts_with('-') && !text.contains(char::is_control)
}

const ID: Text = Text::max(MAX_ID)
    .min(1)
    .matching(is_slug, "lower-case letters and digits in groups joined by single hyphens");
const STEP_NAME: Text = Text::max(MAX_STEP_NAME).min(1);
const PROGRAM: Text = Text::max(MAX_SOURCE).min(1).with_nul();
/// A text that reaches a process whole, as an argument or an environment variable.
const PROCESS_TEXT: Text = Text::any().bytes(MAX_PROCESS_STRING_BYTES);
const ENV_NAME: Text = Text::any().matching(is_env_name, "an upper-case name of letters, digits and underscores");

/// A stored variable's name: contract 1.4. Names of our own prefix are the platform's.
fn variable_name(d: &mut Decoder, value: &Value) -> Option<String> {
    let name = d.string(
        value,
        Text::max(MAX_VARIABLE_NAME).matching(is_env_name, "an upper-case name of letters, digits and underscores"),
    )?;
    if name.starts_with("SPHYNX_") {
        d.refine("Expected a name that does not start with SPHYNX_");
        return None;
    }
    Some(name)
}

fn suite(d: &mut Decoder, value: &Value) -> Option<Suite> {
    let map = d.object(value)?;
    let id = d.required(map, "id", text(ID));
    let name = d.optional(map, "name", text(Text::max(MAX_NAME).min(1)));
    let prompt = d.required(map, "prompt", text(Text::max(MAX_PROMPT)));
    let source = d.nullable(map, "source", source);
    let id = id?;
    Some(Suite {
        name: name?.unwrap_or_else(|| id.clone()),
        id,
        prompt: prompt?,
        source: source?,
    })
}

fn case(d: &mut Decoder, value: &Value) -> Option<Case> {
    let map = d.object(value)?;
    let cache = d.optional(map, "cache", cache);
    let diff = d.nullable(map, "diff", diff);
    let id = d.required(map, "id", text(ID));
    let max_turns = d.nullable(map, "maxTurns", |d, value| integer_u32(d, value, MAX_TURNS));
    let name = d.optional(map, "name", text(Text::max(MAX_NAME)));
    let prepare = d.nullable(map, "prepare", prepare);
    let source = d.optional(map, "source", source);
    let tags = d.optional(map, "tags", |d, value| {
        d.array(value, 0..=MAX_TAGS, text(Text::max(MAX_TAG).min(1)))
    });
    let timeout_ms = d.nullable(map, "timeoutMs", |d, value| integer_u32(d, value, TIMEOUT_MS));
    let user = d.nullable(map, "user", user);
    let validator = d.nullable(map, "validator", validator);
    let variables = d.optional(map, "variables", |d, value| {
        d.map(value, Text::any(), text(Text::max(MAX_VARIABLE_VALUE)))
    });
    let verify = d.nullable(map, "verify", text(Text::max(MAX_VERIFY)));
    let id = id?;
    Some(Case {
        cache: cache?,
        diff: diff?,
        max_turns: max_turns?,
        name: name?.unwrap_or_else(|| id.clone()),
        id,
        prepare: prepare?,
        source: source?,
        tags: tags?.unwrap_or_default(),
        timeout_ms: timeout_ms?,
        user: user?,
        validator: validator?,
        variables: variables?.unwrap_or_default(),
        verify: verify?,
    })
}

fn cache(d: &mut Decoder, value: &Value) -> Option<CaseCache> {
    let map = d.object(value)?;
    let key = d.required(map, "key", text(Text::any().min(1)));
    let rules = Text::any().min(1).matching(
        is_cache_path,
        "a relative path below the workspace and outside .sphynx, without \"..\"",
    );
    let path = d.required(map, "path", text(rules));
    Some(CaseCache { key: key?, path: path? })
}

fn diff(d: &mut Decoder, value: &Value) -> Option<DiffRules> {
    let rules = Text::any()
        .min(1)
        .bytes(MAX_DIFF_PATTERN_BYTES)
        .matching(changes::is_pattern, "a pattern as in a .gitignore file, on one line");
    let list = |d: &mut Decoder, value: &Value| {
        let list = d.array(value, 0..=MAX_DIFF_PATTERNS, text(rules))?;
        let bytes: usize = list.iter().map(String::len).sum();
        if bytes > MAX_DIFF_PATTERNS_BYTES {
            d.issue(
                IssueTag::Refinement,
                format!("has {bytes} bytes of patterns, more than {MAX_DIFF_PATTERNS_BYTES}"),
            );
            return None;
        }
        Some(list)
    };
    let map = d.object(value)?;
    let ignore = d.optional(map, "ignore", list);
    let include = d.optional(map, "include", list);
    Some(DiffRules {
        ignore: ignore?.unwrap_or_default(),
        include: include?.unwrap_or_default(),
    })
}

fn prepare(d: &mut Decoder, value: &Value) -> Option<Prepare> {
    let map = d.object(value)?;
    let name = d.required(map, "name", text(STEP_NAME));
    let source = d.required(map, "source", text(PROGRAM));
    Some(Prepare {
        name: name?,
        source: source?,
    })
}

fn source(d: &mut Decoder, value: &Value) -> Option<Source> {
    #[derive(Clone, Copy)]
    enum Kind {
        Empty,
        Repo,
        Files,
    }
    let map = d.object(value)?;
    let kinds = [("empty", Kind::Empty), ("repo", Kind::Repo), ("files", Kind::Files)];
    match d.required(map, "kind", |d, value| d.one_of(value, &kinds))? {
        Kind::Empty => Some(Source::Empty),
        Kind::Repo => {
            let plain = Text::any()
                .bytes(MAX_PROCESS_STRING_BYTES)
                .matching(is_address, "a text without control characters that does not start with a hyphen");
            let reference = d.required(map, "ref", |d, value| match value {
                Value::Null => Some(None),
                value => d.string(value, plain).map(Some),
            });
            let url = d.required(map, "url", text(plain.min(1)));
            Some(Source::Repo {
                reference: reference?,
                url: url?,
            })
        }
        Kind::Files => {
            let paths = Text::any()
                .min(1)
                .matching(is_workspace_path, "a relative path below the workspace, without \"..\"");
            let files = d.required(map, "files", |d, value| d.map(value, paths, text(Text::any().with_nul())));
            let files = files?;
            d.at("files", |d| refuse_file_as_folder(d, &files));
            Some(Source::Files { files })
        }
    }
}

/// A tree cannot hold both a file `a` and a file `a/b`.
fn refuse_file_as_folder(d: &mut Decoder, files: &BTreeMap<String, String>) {
    for path in files.keys() {
        let mut folders = path.match_indices('/').map(|(end, _)| &path[..end]);
        if let Some(folder) = folders.rfind(|folder| files.contains_key(*folder)) {
            d.at(path.as_str(), |d| {
                d.refine(format!("Expected no file in \"{folder}\", which is a file, too"))
            });
        }
    }
}

fn judge_harness(d: &mut Decoder, value: &Value) -> Option<Harness> {
    let known: Vec<_> = Harness::ALL.iter().copied().filter(|(_, harness)| harness.may_judge()).collect();
    d.one_of(value, &known)
}

fn user(d: &mut Decoder, value: &Value) -> Option<User> {
    let map = d.object(value)?;
    let simulated = d.required(map, "kind", |d, value| d.one_of(value, &[("simulated", true), ("scripted", false)]))?;
    if !simulated {
        let replies = d.required(map, "replies", |d, value| {
            d.array(value, 1..=MAX_REPLIES, text(Text::max(MAX_REPLY).min(1)))
        });
        return Some(User::Scripted { replies: replies? });
    }
    let goal = d.required(map, "goal", text(Text::max(MAX_USER_GOAL).min(1)));
    let prompt = d.required(map, "prompt", text(Text::max(MAX_USER_PROMPT).min(1)));
    let by = if map.contains_key("harness") || map.contains_key("model") {
        let harness = d.required(map, "harness", judge_harness);
        let model = d.required(map, "model", text(Text::max(MAX_JUDGE_MODEL).min(1)));
        Some(Player {
            harness: harness?,
            model: model?,
        })
    } else {
        None
    };
    Some(User::Simulated {
        goal: goal?,
        prompt: prompt?,
        by,
    })
}

fn validator(d: &mut Decoder, value: &Value) -> Option<Validator> {
    let map = d.object(value)?;
    if !map.contains_key("kind") {
        if map.contains_key("judges") && !map.contains_key("source") {
            d.at("kind", |d| d.issue(IssueTag::Missing, "is missing; with judges it is \"judged\""));
            return None;
        }
        let check = check(d, value);
        let source_files = d.optional(map, "sourceFiles", source_files);
        return Some(Validator::Code(CodeValidator {
            check: check?,
            source_files: source_files?,
        }));
    }
    let kind = d.required(map, "kind", |d, value| d.one_of(value, &[("judged", Judged::Judged)]));
    let capture = d.optional(map, "capture", Decoder::boolean);
    let name = d.required(map, "name", text(STEP_NAME));
    let checks = d.required(map, "checks", |d, value| d.array(value, 0..=MAX_CHECKS, check));
    let judges = d.required(map, "judges", judges);
    let source_files = d.optional(map, "sourceFiles", source_files);
    let checks = checks?;
    let entries: usize = checks.iter().map(|check| check.manifest.as_ref().map_or(1, Vec::len)).sum();
    if entries > MAX_CHECKS {
        d.at("checks", |d| {
            d.refine(format!(
                "Expected at most {MAX_CHECKS} checks in all manifests together, got {entries}"
            ))
        });
    }
    Some(Validator::Judged(JudgedValidator {
        capture: capture?,
        checks,
        judges: judges?,
        kind: kind?,
        name: name?,
        source_files: source_files?,
    }))
}

fn check(d: &mut Decoder, value: &Value) -> Option<Check> {
    let map = d.object(value)?;
    let capture = d.optional(map, "capture", Decoder::boolean);
    let manifest = d.optional(map, "manifest", manifest);
    let name = d.required(map, "name", text(STEP_NAME));
    let source = d.required(map, "source", text(PROGRAM));
    Some(Check {
        capture: capture?,
        manifest: manifest?,
        name: name?,
        source: source?,
    })
}

fn manifest(d: &mut Decoder, value: &Value) -> Option<Vec<ManifestEntry>> {
    let mut seen = HashSet::new();
    d.array(value, 1..=MAX_CHECKS, |d, value| {
        let map = d.object(value)?;
        let index = d.required(map, "index", |d, value| d.integer(value, 0..=i64::MAX));
        let name = d.required(map, "name", text(Text::max(MAX_MANIFEST_NAME)));
        let index = index.and_then(|index| u64::try_from(index).ok())?;
        if !seen.insert(index) {
            d.at("index", |d| d.refine("Expected an index that no other entry has"));
        }
        Some(ManifestEntry { index, name: name? })
    })
}

fn source_files(d: &mut Decoder, value: &Value) -> Option<Vec<SourceFile>> {
    let paths = Text::max(MAX_PATH).matching(
        is_source_path,
        "a relative path with \"/\", without \".\", \"..\", backslash or colon",
    );
    let files = d.array(value, 0..=MAX_SOURCE_FILES, |d, value| {
        let map = d.object(value)?;
        let content = d.required(map, "content", text(Text::max(MAX_SOURCE).with_nul()));
        let path = d.required(map, "path", text(paths));
        Some(SourceFile {
            content: content?,
            path: path?,
        })
    })?;
    let total: usize = files.iter().map(|file| utf16_len(&file.content)).sum();
    if total > MAX_SOURCE_FILES_TOTAL {
        d.refine(format!(
            "Expected at most {MAX_SOURCE_FILES_TOTAL} characters in all files together, got {total}"
        ));
    }
    Some(files)
}

/// The judges of a case, as a start request has them.
pub fn judges(d: &mut Decoder, value: &Value) -> Option<Vec<Judge>> {
    let mut seen = HashSet::new();
    d.array(value, 1..=MAX_CHECKS, |d, value| {
        let judge = judge(d, value)?;
        if !seen.insert(judge.name.clone()) {
            d.at("name", |d| d.refine("Expected a name that no other judge has"));
        }
        Some(judge)
    })
}

/// One judge, as a start request has it.
pub fn judge(d: &mut Decoder, value: &Value) -> Option<Judge> {
    let map = d.object(value)?;
    let choices = d.required(map, "choices", choices);
    let expected = d.optional(map, "expected", text(Text::max(MAX_JUDGE_PROMPT)));
    let file = Text::max(MAX_PATH)
        .min(1)
        .matching(is_workspace_path, "a relative path below the workspace, without \"..\"");
    let files = d.optional(map, "files", |d, value| d.array(value, 1..=MAX_JUDGE_FILES, text(file)));
    let kind = d.required(map, "kind", |d, value| d.one_of(value, &[("judge", JudgeKind::Judge)]));
    let model = d.required(map, "model", text(Text::max(MAX_JUDGE_MODEL).min(1)));
    let name = d.required(map, "name", text(STEP_NAME));
    let prompt = d.required(map, "prompt", text(Text::max(MAX_JUDGE_PROMPT).min(1)));
    let threshold = d.optional(map, "threshold", |d, value| d.number(value, 0.0..=1.0));
    let timeout_ms = d.optional(map, "timeoutMs", |d, value| integer_u32(d, value, JUDGE_TIMEOUT_MS));
    let by = judge_by(d, map);
    Some(Judge {
        choices: choices?,
        expected: expected?,
        files: files?,
        kind: kind?,
        model: model?,
        name: name?,
        prompt: prompt?,
        threshold: Number(threshold?.unwrap_or(1.0)),
        timeout_ms: timeout_ms?.unwrap_or(DEFAULT_JUDGE_TIMEOUT_MS),
        by: by?,
    })
}

fn choices(d: &mut Decoder, value: &Value) -> Option<BTreeMap<String, Number>> {
    let choices = d.map(value, Text::any().min(1), |d, value| d.number(value, 0.0..=1.0).map(Number))?;
    if !(1..=MAX_JUDGE_CHOICES).contains(&choices.len()) {
        d.refine(format!("Expected 1 to {MAX_JUDGE_CHOICES} choices, got {}", choices.len()));
    }
    Some(choices)
}

fn judge_by(d: &mut Decoder, map: &Object) -> Option<JudgeBy> {
    match (map.contains_key("provider"), map.contains_key("harness")) {
        (true, true) => {
            d.at("harness", |d| {
                d.issue(IssueTag::Forbidden, "Expected either \"provider\" or \"harness\", not both")
            });
            None
        }
        (false, true) => d
            .required(map, "harness", judge_harness)
            .map(|harness| JudgeBy::Harness { harness }),
        (true, false) => {
            let provider = d.required(map, "provider", |d, value| d.one_of(value, &[("openai", JudgeProvider::Openai)]));
            provider.map(|provider| JudgeBy::Provider { provider })
        }
        (false, false) => {
            d.at("provider", |d| d.issue(IssueTag::Missing, "is missing, and so is \"harness\""));
            None
        }
    }
}

fn variant(d: &mut Decoder, value: &Value) -> Option<VariantRequest> {
    let map = d.object(value)?;
    let credentials = d.optional(map, "credentials", credentials);
    let harness = d.required(map, "harness", |d, value| d.one_of(value, Harness::ALL));
    let model = d.required(map, "model", text(PROCESS_TEXT.min(1)));
    let profile = d.optional(map, "profile", profile);
    let sandbox = d.optional(map, "sandbox", |d, value| d.one_of(value, Sandbox::ALL));
    Some(VariantRequest {
        credentials: credentials?,
        harness: harness?,
        model: model?,
        profile: profile?,
        sandbox: sandbox?.unwrap_or(Sandbox::E2b),
    })
}

fn credentials(d: &mut Decoder, value: &Value) -> Option<CredentialRefs> {
    let map = d.object(value)?;
    let harness_ref = d.optional(map, "harnessRef", text(Text::any()));
    let sandbox_ref = d.optional(map, "sandboxRef", text(Text::any()));
    Some(CredentialRefs {
        harness_ref: harness_ref?,
        sandbox_ref: sandbox_ref?,
    })
}

fn profile(d: &mut Decoder, value: &Value) -> Option<Profile> {
    let map = d.object(value)?;
    let env = d.optional(map, "env", |d, value| d.map(value, ENV_NAME, text(PROCESS_TEXT)));
    let paths = Text::max(MAX_PATH).matching(
        is_profile_path,
        "a path that starts with home/ or workspace/, without \".\" or \"..\"",
    );
    let files = d.required(map, "files", |d, value| {
        d.map(value, paths, text(Text::max(MAX_PROFILE_FILE).with_nul()))
    });
    if let Some(files) = &files {
        d.at("files", |d| refuse_file_as_folder(d, files));
    }
    let install = d.optional(map, "install", text(PROCESS_TEXT));
    let names = Text::any().matching(
        is_profile_name,
        "1 to 64 lower-case letters, digits and hyphens, not starting with a hyphen",
    );
    let name = d.required(map, "name", text(names));
    let run = d.optional(map, "run", text(PROCESS_TEXT));
    let system_prompt = d.optional(map, "systemPrompt", text(PROCESS_TEXT));
    let variables = d.optional(map, "variables", |d, value| d.array(value, 0..=usize::MAX, variable_name));
    Some(Profile {
        env: env?,
        files: files?,
        install: install?,
        name: name?,
        run: run?,
        system_prompt: system_prompt?,
        variables: variables?,
    })
}
