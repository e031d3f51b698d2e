//! `judge`: how far a judge can be trusted.

mod agent;

use std::{
    collections::BTreeMap,
    io::{IsTerminal as _, Write as _},
    path::Path,
    time::Duration,
};

use evalgrid_domain::{
    credential,
    decode::parse_json,
    judge::Question,
    limits::MAX_JSON_DEPTH,
    provider::{self, Provider},
    redact::Redactor,
    request::{Judge, JudgeBy},
};
use evalgrid_judge_runner::{
    calibrate::{self, Calibration, Observed, Report, Unreachable},
    http::{Http, HttpOptions},
    model::{Endpoint, Met, Terms},
    openai,
};
use tokio::{sync::watch, time::Instant};

use crate::{Failure, batch, options, output, stop, warnings};

/// Seed of the resampled intervals. Always the same, so that the same answers give the same report.
const SEED: u64 = 1;

pub(crate) async fn run(command: options::Judge) -> Result<(), Failure> {
    match command {
        options::Judge::Calibrate { file, json, agent } => calibrate(&file, json, &agent).await,
    }
}

async fn calibrate(file: &Path, json: bool, flags: &options::JudgeAgent) -> Result<(), Failure> {
    let calibration = read(file)?;
    let credential = credential(&calibration.judge)?;
    let stopped = stop::on_signal()?;
    let observed = match calibration.judge.by {
        JudgeBy::Provider { .. } => {
            let model = Model::new(&calibration.judge, &credential)?;
            ask(&calibration, |question, key| model.ask(question, key), stopped).await?
        }
        JudgeBy::Harness { harness } => {
            let place = agent::Place::new(flags.work.as_deref())?;
            let agent = agent::open(&place, &flags.sandboxes, &calibration.judge, harness, &credential, &stopped).await?;
            let observed = ask(&calibration, |question, key| agent.ask(question, key), stopped).await;
            agent::close(agent, &place).await?;
            observed?
        }
    };
    // Whom is asked may say the key back.
    let redactor = Redactor::new(credential.get("apiKey"));
    let observed = observed.map_err(|error| {
        Failure::unavailable(
            output::plain(&redactor.text(&error.to_string())),
            "Check the key, the address, the model's name and the account's limits.",
        )
    })?;
    let report = Report::of(&calibration, &observed, SEED);
    let text = match json {
        true => serde_json::to_string_pretty(&report)
            .map_err(|error| Failure::new(format!("the report cannot be written: {error}"), "Report this as a bug."))?,
        // The judge's words may be in it.
        false => report.text().lines().map(output::plain).collect::<Vec<_>>().join("\n"),
    };
    output::line(&redactor.text(&text))?;
    match report.answered {
        0 => Err(Failure::unavailable(
            "the judge gave no valid answer, so nothing was measured",
            "The report says why: correct the judge's prompt, or take another model.",
        )),
        _ => Ok(()),
    }
}

/// Asks about all examples, until somebody stops it.
async fn ask<A: Future<Output = Met>>(
    calibration: &Calibration,
    ask: impl Fn(Question, String) -> A,
    mut stopped: watch::Receiver<bool>,
) -> Result<Result<Vec<Observed>, Unreachable>, Failure> {
    let total = calibration.items.len() * (calibration.repeats as usize + 1);
    say(format_args!("Asking {total} times.\n"));
    let mut nonce = [0; 16];
    rand::fill(&mut nonce);
    tokio::select! {
        observed = calibrate::run(calibration, nonce, ask, |done| progress(done, total)) => Ok(observed),
        () = asked_to_stop(&mut stopped) => {
            say(format_args!("\nStopping; a second signal stops at once.\n"));
            Err(was_stopped())
        }
    }
}

/// Tells on stderr how it goes. That nobody reads it is no reason to leave sandboxes behind.
fn say(text: std::fmt::Arguments<'_>) {
    let _ = std::io::stderr().write_fmt(text);
}

async fn asked_to_stop(stopped: &mut watch::Receiver<bool>) {
    // An error says that nobody can tell us any more.
    let _ = stopped.wait_for(|stop| *stop).await;
}

fn was_stopped() -> Failure {
    Failure::new(
        "the calibration was stopped, and its answers are lost",
        "Start it again; fewer examples or repeats take less time.",
    )
}

/// How the judge is reached, by the variables of this process.
fn credential(judge: &Judge) -> Result<BTreeMap<String, String>, Failure> {
    let variables = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let variables = variables.filter(|(_, value)| !value.is_empty()).collect();
    let credential = match judge.by {
        JudgeBy::Provider { .. } => named(judge)?.credential(&variables),
        JudgeBy::Harness { harness } => credential::method(harness).values(&variables),
    };
    credential.map_err(|variable| {
        Failure::unavailable(
            format!("the judge cannot be asked: {variable} is not set"),
            format!("Set it to a key of {}, for this command.", judge.by.evaluator()),
        )
    })
}

fn named(judge: &Judge) -> Result<&'static Provider, Failure> {
    let id = judge.by.evaluator();
    provider::named(id).ok_or_else(|| Failure::data(format!("judge.provider: {id} is not known here"), "Name openai."))
}

fn read(file: &Path) -> Result<Calibration, Failure> {
    let bytes = batch::read(file)?;
    let wrong = |what: String| {
        Failure::data(
            format!("{}: {}", file.display(), output::plain(&what)),
            "docs/judges.md describes the file, examples/calibrate.json is one.",
        )
    };
    let value = parse_json(&bytes, MAX_JSON_DEPTH).map_err(|error| wrong(error.to_string()))?;
    warnings::tell(&warnings::of_calibration(&bytes));
    calibrate::decode(&value).map_err(|issues| {
        let issues: Vec<String> = issues.iter().map(ToString::to_string).collect();
        wrong(issues.join("; "))
    })
}

/// On a terminal one line that counts; elsewhere a line for every tenth.
fn progress(done: usize, total: usize) {
    match std::io::stderr().is_terminal() {
        true if done == total => say(format_args!("\r{done}/{total}\n")),
        true => say(format_args!("\r{done}/{total}")),
        false if done == total || done.is_multiple_of(total.div_ceil(10)) => say(format_args!("{done}/{total}\n")),
        false => {}
    }
}

/// Asks a judge by a model's API, as a judge runner does.
struct Model {
    http: Http,
    provider: &'static str,
    base_url: String,
    key: String,
    model: String,
    limit: Duration,
}

impl Model {
    fn new(judge: &Judge, credential: &BTreeMap<String, String>) -> Result<Model, Failure> {
        let http =
            Http::new(HttpOptions::default()).map_err(|error| Failure::new(error.to_string(), "Check this machine's certificates."))?;
        let field = |name: &str| credential.get(name).cloned().unwrap_or_default();
        Ok(Model {
            http,
            provider: named(judge)?.id,
            base_url: field("baseUrl"),
            key: field("apiKey"),
            model: judge.model.clone(),
            limit: Duration::from_millis(judge.timeout_ms.into()),
        })
    }

    async fn ask(&self, question: Question, idempotency_key: String) -> Met {
        let endpoint = Endpoint {
            provider: self.provider,
            base_url: &self.base_url,
            key: &self.key,
            model: &self.model,
        };
        let terms = Terms {
            idempotency_key: &idempotency_key,
            deadline: Instant::now() + self.limit,
            limit_ms: self.limit.as_millis() as u64,
        };
        openai::judge(&self.http, endpoint, &question, terms).await
    }
}
