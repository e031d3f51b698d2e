//! The log as it lies on the disk after a cut, read with the binary's own offline commands before anything is started on it.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    path::Path,
    process::Command,
};

use evalgrid_proto::v1::ObjectRef;
use serde_json::Value;

use crate::host::run_command;

/// What the log says.
#[derive(Debug, Default)]
pub struct LogView {
    /// Records.
    pub records: u64,
    /// Each batch and its organization.
    pub batches: HashMap<String, String>,
    /// Trials with a verdict.
    pub settled: HashSet<String>,
    /// Recorded steps by token, in their order.
    pub steps: HashMap<u64, Vec<String>>,
    /// The token of each settled trial, where an attempt settled it.
    pub settled_by: HashMap<u64, String>,
    /// Sandboxes in custody.
    pub custody: BTreeSet<String>,
    /// Objects that events name: organization, name. By kind of event for the report.
    pub objects: Vec<(&'static str, String, ObjectRef)>,
    /// What cannot be.
    pub wrong: Vec<String>,
}

/// Reads the log of a data folder that no server uses.
pub fn read(data: &Path) -> Result<LogView, String> {
    offline("verify", data)?;
    let text = offline("dump", data)?;
    let mut reader = Reader::default();
    for line in text.lines().filter(|line| line.starts_with('{')) {
        let event = serde_json::from_str(line).map_err(|error| format!("log dump printed {line}: {error}"))?;
        reader.take(&event);
    }
    Ok(reader.view)
}

fn offline(command: &str, data: &Path) -> Result<String, String> {
    let (code, text) = run_command(
        Command::new(evalgrid_tests::server::binary())
            .args(["log", command, "--data"])
            .arg(data),
    );
    match code {
        Some(0) => Ok(text),
        code => Err(format!("log {command} ended with {code:?}: {text}")),
    }
}

#[derive(Default)]
struct Reader {
    view: LogView,
    sequences: HashMap<u64, u64>,
    /// Of each token.
    trials: HashMap<u64, String>,
    once: HashSet<String>,
}

impl Reader {
    fn take(&mut self, event: &Value) {
        let text = |name: &str| event[name].as_str().unwrap_or_default().to_owned();
        let number = |name: &str| event[name].as_u64().unwrap_or_default();
        let (position, partition, sequence) = (number("position"), number("partition"), number("sequence"));
        let last = std::mem::replace(&mut self.view.records, position);
        if last != 0 && position != last + 1 {
            self.wrong(format!("record {position} follows record {last}"));
        }
        if let Some(last) = self.sequences.insert(partition, sequence)
            && sequence != last + 1
        {
            self.wrong(format!("partition {partition}: sequence {sequence} follows {last}"));
        }
        match text("kind").as_str() {
            "KeyCreated" => self.once("key", &text("keyId")),
            "BatchStarted" => {
                self.once("batch", &text("batch"));
                if let Some(key) = event["idempotencyKey"].as_str() {
                    self.once("idempotency key", &format!("{} {key}", text("organizationId")));
                }
                self.object("request", text("organizationId"), &event["request"]);
                self.view.batches.insert(text("batch"), text("organizationId"));
            }
            "LeaseGranted" => {
                self.once("token", &number("token").to_string());
                self.view.custody.insert(text("sandbox"));
                self.trials.insert(number("token"), text("trial"));
            }
            "StepRecorded" => {
                self.once("step", &format!("{} {}", number("token"), text("step")));
                self.view.steps.entry(number("token")).or_default().push(text("step"));
                let trial = self.trials.get(&number("token")).cloned();
                if let Some(organization) = trial.and_then(|trial| self.organization(&trial)) {
                    self.object("step", organization, &event["result"]);
                }
            }
            "TrialSettled" => {
                self.once("verdict", &text("trial"));
                if let Some(organization) = self.organization(&text("trial")) {
                    self.object("evidence", organization, &event["outcome"]["evidence"]["object"]);
                }
                self.view.settled.insert(text("trial"));
                self.view.settled_by.insert(number("token"), text("trial"));
            }
            "BatchEnded" => self.once("end", &text("batch")),
            "BatchArchived" => {
                self.once("archive", &text("batch"));
                self.object("manifest", text("organizationId"), &event["manifest"]);
            }
            "SandboxDestroyed" => drop(self.view.custody.remove(&text("sandbox"))),
            _ => {}
        }
    }

    fn wrong(&mut self, text: String) {
        self.view.wrong.push(text);
    }

    fn once(&mut self, what: &str, which: &str) {
        if !self.once.insert(format!("{what} {which}")) {
            self.wrong(format!("twice in the log: {what} {which}"));
        }
    }

    /// A batch's id and those of its trials have the same middle.
    fn organization(&self, trial: &str) -> Option<String> {
        let middle = trial.strip_prefix("trial_")?;
        let length = self.view.batches.keys().next()?.len() - "batch_".len();
        self.view.batches.get(&format!("batch_{}", middle.get(..length)?)).cloned()
    }

    fn object(&mut self, kind: &'static str, organization: String, object: &Value) {
        if let (Some(sha256), Some(size)) = (object["sha256"].as_str(), object["size"].as_u64()) {
            let sha256 = sha256.to_owned();
            self.view.objects.push((kind, organization, ObjectRef { sha256, size }));
        }
    }
}
