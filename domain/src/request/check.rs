//! Rules that no schema states: what is refused, and with which words.
//!
//! First the rules of single fields, then those of the whole in the order of contract 2.1, last what this server cannot do yet. Everything is
//! checked before anything is written.

use std::collections::{HashMap, HashSet};

use super::*;
use crate::{
    decode::utf16_len,
    limits::{MAX_PROCESS_ENV_BYTES, MAX_PROCESS_STRING_BYTES, MAX_PROFILE_FILES, MAX_PROFILE_TOTAL, MAX_TRIALS_PER_BATCH},
    prompt,
};

/// Names that hold keys of the platform's own services. They never go to a profile.
const SERVER_ONLY: &[&str] = &[
    "CLOUDFLARE_ACCOUNT_ID",
    "CLOUDFLARE_API_TOKEN",
    "CLOUDFLARE_SANDBOX_API_KEY",
    "CLOUDFLARE_SANDBOX_URL",
    "DAYTONA_API_KEY",
    "DEEPSEEK_API_KEY",
    "E2B_API_KEY",
    "GROQ_API_KEY",
    "MODAL_TOKEN_ID",
    "MODAL_TOKEN_SECRET",
    "MOONSHOT_API_KEY",
    "OPENROUTER_API_KEY",
    "TYPESAFE_API_KEY",
    "UPSTASH_BOX_API_KEY",
    "VERCEL_PROJECT_ID",
    "VERCEL_TEAM_ID",
    "VERCEL_TOKEN",
    "XAI_API_KEY",
];

/// A start that is refused: 400 `BadRequest`, or 409 `Conflict` where a retry may succeed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct StartRefusal {
    /// For people; begins with the path of the field, where one is to blame.
    pub message: String,
    /// The same request may be accepted later.
    pub retryable: bool,
}

fn refuse<T>(message: impl Into<String>) -> Result<T, StartRefusal> {
    Err(StartRefusal {
        message: message.into(),
        retryable: false,
    })
}

fn refuse_at<T>(path: &str, message: impl AsRef<str>) -> Result<T, StartRefusal> {
    refuse(format!("{path}: {}", message.as_ref()))
}

/// Checks a decoded request of `batches.start`.
///
/// # Errors
/// The first rule that it breaks. Nothing found here is retryable: whether the organization is busy is the scheduler's to say.
pub fn check_start(request: &SuiteBatchRequest, support: &Support) -> Result<(), StartRefusal> {
    for (index, variant) in request.variants.iter().enumerate() {
        if variant.sandbox == Sandbox::Local {
            return refuse_at(
                &format!("variants[{index}].sandbox"),
                "\"local\" is only for batches that run on the client's own machine",
            );
        }
    }
    check_local_start(request)?;
    for (index, case) in request.cases.iter().enumerate() {
        check_case_support(&format!("cases[{index}]"), case, support)?;
    }
    for (index, variant) in request.variants.iter().enumerate() {
        check_variant_support(&format!("variants[{index}]"), variant, support)?;
    }
    Ok(())
}

/// Checks a decoded request whose trials run on the client's own machine: what this server can run does not matter for it.
///
/// # Errors
/// As [`check_start`].
pub fn check_local_start(request: &SuiteBatchRequest) -> Result<(), StartRefusal> {
    for (index, case) in request.cases.iter().enumerate() {
        check_case(&format!("cases[{index}]"), case, &request.suite.prompt)?;
    }
    for (index, variant) in request.variants.iter().enumerate() {
        check_variant(&format!("variants[{index}]"), variant)?;
    }
    check_whole(request)
}

fn check_case(path: &str, case: &Case, suite_prompt: &str) -> Result<(), StartRefusal> {
    if case.validator.is_some() && case.verify.is_some() {
        return refuse_at(path, "a case has either \"validator\" or \"verify\", not both");
    }
    // The agent gets its prompt as one string of its environment or its arguments.
    let length = prompt::rendered_len(suite_prompt, &case.variables);
    if length > MAX_PROCESS_STRING_BYTES {
        return refuse_at(
            path,
            format!("the prompt with its variables filled in holds {length} bytes; the limit is {MAX_PROCESS_STRING_BYTES}"),
        );
    }
    Ok(())
}

fn check_variant(path: &str, variant: &VariantRequest) -> Result<(), StartRefusal> {
    let run = variant.profile.as_ref().is_some_and(|profile| profile.run.is_some());
    match (variant.harness == Harness::Command, run) {
        (true, false) => {
            return refuse_at(
                &format!("{path}.profile.run"),
                "the harness \"command\" needs a profile with a \"run\" command",
            );
        }
        (false, true) => {
            let harness = variant.harness.name();
            return refuse_at(
                &format!("{path}.profile.run"),
                format!("only the harness \"command\" has \"run\", and this is \"{harness}\""),
            );
        }
        _ => {}
    }
    match &variant.profile {
        Some(profile) => check_profile(&format!("{path}.profile"), profile),
        None => Ok(()),
    }
}

fn check_profile(path: &str, profile: &Profile) -> Result<(), StartRefusal> {
    let files = profile.files.len();
    if files > MAX_PROFILE_FILES {
        return refuse_at(
            &format!("{path}.files"),
            format!("a profile holds at most {MAX_PROFILE_FILES} files, and this has {files}"),
        );
    }
    let total: usize = profile.files.values().map(|content| utf16_len(content)).sum();
    if total > MAX_PROFILE_TOTAL {
        return refuse_at(
            &format!("{path}.files"),
            format!("the files of a profile hold at most {MAX_PROFILE_TOTAL} characters together, and these hold {total}"),
        );
    }
    let env: usize = profile.env.iter().flatten().map(|(name, value)| name.len() + value.len() + 2).sum();
    if env > MAX_PROCESS_ENV_BYTES {
        return refuse_at(
            &format!("{path}.env"),
            format!("the environment of a profile holds at most {MAX_PROCESS_ENV_BYTES} bytes, and this holds {env}"),
        );
    }
    for (index, name) in profile.variables.iter().flatten().enumerate() {
        let path = format!("{path}.variables[{index}]");
        if profile.env.as_ref().is_some_and(|env| env.contains_key(name)) {
            return refuse_at(&path, format!("{name} is in both \"env\" and \"variables\""));
        }
        if SERVER_ONLY.contains(&name.as_str()) {
            return refuse_at(&path, format!("{name} belongs to the server and is never given to a profile"));
        }
    }
    Ok(())
}

fn check_whole(request: &SuiteBatchRequest) -> Result<(), StartRefusal> {
    let mut variants = HashMap::new();
    for (index, variant) in request.variants.iter().enumerate() {
        let identity = (variant.harness, &variant.model, variant.sandbox, variant.profile_name());
        if let Some(first) = variants.insert(identity, index) {
            return refuse_at(
                &format!("variants[{index}]"),
                format!("the same harness, model, sandbox and profile as variants[{first}]"),
            );
        }
    }
    let mut cases = HashSet::new();
    for (index, case) in request.cases.iter().enumerate() {
        if !cases.insert(&case.id) {
            return refuse_at(
                &format!("cases[{index}].id"),
                format!("\"{}\" is the id of another case, too", case.id),
            );
        }
    }
    let total = request.total_trials();
    if total > MAX_TRIALS_PER_BATCH {
        let (cases, variants, trials) = (request.cases.len(), request.variants.len(), request.trials);
        return refuse(format!(
            "A batch holds at most {MAX_TRIALS_PER_BATCH} trials, and this one asks for {total} ({cases} cases x {variants} variants x {trials} trials)"
        ));
    }
    Ok(())
}

fn need(support: &Support, feature: Feature, path: String, value: &str) -> Result<(), StartRefusal> {
    match support.features.contains(&feature) {
        true => Ok(()),
        false => refuse_at(&path, format!("{value} not supported by this server yet")),
    }
}

fn check_case_support(path: &str, case: &Case, support: &Support) -> Result<(), StartRefusal> {
    if case.cache.is_some() {
        need(support, Feature::Cache, format!("{path}.cache"), "a cache is")?;
    }
    if case.prepare.is_some() {
        need(support, Feature::Prepare, format!("{path}.prepare"), "a prepare step is")?;
    }
    match &case.user {
        None => {}
        Some(User::Scripted { .. }) => need(support, Feature::ScriptedUser, format!("{path}.user"), "a scripted person is")?,
        Some(User::Simulated { by: None, .. }) => need(support, Feature::SimulatedUser, format!("{path}.user"), "a simulated person is")?,
        Some(User::Simulated { by: Some(player), .. }) => {
            let path = format!("{path}.user.harness");
            need(support, Feature::HarnessUser, path.clone(), "a person played by a harness is")?;
            check_harness(&path, player.harness, support)?;
        }
    }
    match &case.validator {
        None => {}
        Some(Validator::Code(_)) => need(support, Feature::CodeValidator, format!("{path}.validator"), "a code validator is")?,
        Some(Validator::Judged(validator)) => {
            if !validator.checks.is_empty() {
                need(
                    support,
                    Feature::CodeValidator,
                    format!("{path}.validator.checks"),
                    "a code validator is",
                )?;
            }
            check_judges(&format!("{path}.validator.judges"), &validator.judges, support)?;
        }
    }
    Ok(())
}

/// Checks whether a server can ask these judges.
///
/// # Errors
/// The first that it cannot.
pub fn check_judges(path: &str, judges: &[Judge], support: &Support) -> Result<(), StartRefusal> {
    for (index, judge) in judges.iter().enumerate() {
        let path = format!("{path}[{index}]");
        match judge.by {
            JudgeBy::Provider { .. } => need(support, Feature::ModelJudge, format!("{path}.provider"), "a model as judge is")?,
            JudgeBy::Harness { harness } => {
                let path = format!("{path}.harness");
                need(support, Feature::HarnessJudge, path.clone(), "a harness as judge is")?;
                check_harness(&path, harness, support)?;
            }
        }
    }
    Ok(())
}

fn check_harness(path: &str, harness: Harness, support: &Support) -> Result<(), StartRefusal> {
    match support.harnesses.contains_key(&harness) {
        true => Ok(()),
        false => refuse_at(path, format!("\"{}\" is not supported by this server yet", harness.name())),
    }
}

fn check_variant_support(path: &str, variant: &VariantRequest, support: &Support) -> Result<(), StartRefusal> {
    check_harness(&format!("{path}.harness"), variant.harness, support)?;
    if support.provider(variant.sandbox).is_none() {
        let name = variant.sandbox.name();
        return refuse_at(
            &format!("{path}.sandbox"),
            format!("\"{name}\" is neither configured on this server nor mapped to another sandbox"),
        );
    }
    if variant.credentials.as_ref().is_some_and(|refs| *refs != CredentialRefs::default()) {
        need(
            support,
            Feature::CredentialRefs,
            format!("{path}.credentials"),
            "a reference to credentials is",
        )?;
    }
    if let Some(profile) = &variant.profile {
        if profile.variables.as_ref().is_some_and(|names| !names.is_empty()) {
            need(
                support,
                Feature::ProfileVariables,
                format!("{path}.profile.variables"),
                "stored variables are",
            )?;
        }
        if profile.files.contains_key("workspace/.sphynx/api/program.json") {
            need(
                support,
                Feature::ApiMock,
                format!("{path}.profile.files[\"workspace/.sphynx/api/program.json\"]"),
                "an HTTP mock is",
            )?;
        }
    }
    Ok(())
}
