//! `judge`: how far a judge can be trusted.

use std::{io::IsTerminal as _, path::Path, time::Duration};

use evalgrid_domain::{
    decode::parse_json,
    judge::Question,
    limits::MAX_JSON_DEPTH,
    provider,
    redact::Redactor,
    request::{Judge, JudgeBy},
};
use evalgrid_judge_runner::{
    calibrate::{self, Calibration, Report},
    http::{Http, HttpOptions},
    model::{Endpoint, Met, Terms},
    openai,
};
use tokio::time::Instant;

use crate::{Failure, batch, options, output};

/// Seed of the resampled intervals. Always the same, so that the same answers give the same report.
const SEED: u64 = 1;

pub(crate) async fn run(command: options::Judge) -> Result<(), Failure> {
    match command {
        options::Judge::Calibrate { file, json } => calibrate(&file, json).await,
    }
}

async fn calibrate(file: &Path, json: bool) -> Result<(), Failure> {
    let calibration = read(file)?;
    let asker = Asker::of(&calibration.judge)?;
    let total = calibration.items.len() * (calibration.repeats as usize + 1);
    eprintln!("Asking {total} times.");
    let mut nonce = [0; 16];
    rand::fill(&mut nonce);
    let ask = |question, key| asker.ask(question, key);
    let observed = calibrate::run(&calibration, nonce, ask, |done| progress(done, total)).await;
    // A provider may say the key back.
    let redactor = Redactor::new([&asker.key]);
    let observed = observed.map_err(|error| {
        Failure::unavailable(
            output::plain(&redactor.text(&error.to_string())),
            "Check the key, the address, the model's name and the account's limits.",
        )
    })?;
    let report = Report::of(&calibration, &observed, SEED);
    if json {
        let text = serde_json::to_string_pretty(&report);
        let text = text.map_err(|error| Failure::new(format!("the report cannot be written: {error}"), "Report this as a bug."))?;
        return output::line(&redactor.text(&text));
    }
    // The judge's words may be in it.
    let text = report.text();
    redactor.text(&text).lines().try_for_each(|line| output::line(&output::plain(line)))
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
    calibrate::decode(&value).map_err(|issues| {
        let issues: Vec<String> = issues.iter().map(ToString::to_string).collect();
        wrong(issues.join("; "))
    })
}

/// On a terminal one line that counts; elsewhere a line for every tenth.
fn progress(done: usize, total: usize) {
    match std::io::stderr().is_terminal() {
        true if done == total => eprintln!("\r{done}/{total}"),
        true => eprint!("\r{done}/{total}"),
        false if done == total || done.is_multiple_of(total.div_ceil(10)) => eprintln!("{done}/{total}"),
        false => {}
    }
}

/// Asks one judge, as a judge runner does.
struct Asker {
    http: Http,
    provider: &'static str,
    base_url: String,
    key: String,
    model: String,
    limit: Duration,
}

impl Asker {
    /// By the variables of this process.
    fn of(judge: &Judge) -> Result<Asker, Failure> {
        let JudgeBy::Provider { .. } = judge.by else {
            return Err(Failure::data(
                format!(
                    "judge.harness: {} judges in sandboxes of a server, which this command has none of",
                    judge.by.evaluator()
                ),
                "Calibrate a judge with \"provider\": \"openai\".",
            ));
        };
        let id = judge.by.evaluator();
        let provider =
            provider::named(id).ok_or_else(|| Failure::data(format!("judge.provider: {id} is not known here"), "Name openai."))?;
        let variables = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        let credential = provider.credential(&variables.filter(|(_, value)| !value.is_empty()).collect());
        let mut credential = credential.map_err(|variable| {
            Failure::unavailable(
                format!("the judge cannot be asked: {variable} is not set"),
                format!("Set it to a key of {id}, for this command."),
            )
        })?;
        let http =
            Http::new(HttpOptions::default()).map_err(|error| Failure::new(error.to_string(), "Check this machine's certificates."))?;
        Ok(Asker {
            http,
            provider: provider.id,
            base_url: credential.remove("baseUrl").unwrap_or_default(),
            key: credential.remove("apiKey").unwrap_or_default(),
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
