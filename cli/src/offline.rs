//! Looking into a data folder that no server uses: the log's records, and the index made anew.

use std::path::Path;

use evalgrid_proto::log::v1::Event;
use evalgrid_store::{LogError, Recovery, log::offline};
use prost::Message as _;

use crate::{Failure, events, output};

/// `log verify`.
pub(crate) fn verify(data: &Path) -> Result<(), Failure> {
    let report = offline::verify(&log_of(data)?).map_err(|error| failed(&error))?;
    output::line(&found(&report.whole))?;
    match report.problem {
        None => output::line("The log is whole."),
        Some(problem) => Err(Failure::new(
            format!("behind that: {problem}"),
            "Nothing was changed. Keep a copy of the folder before you try anything with it.",
        )),
    }
}

/// `log dump`.
pub(crate) fn dump(data: &Path) -> Result<(), Failure> {
    let mut failure = None;
    let dumped = offline::dump(&log_of(data)?, |position, record| {
        let line = match Event::decode(record.payload) {
            Ok(event) => events::line(position, record.partition, record.sequence, &event),
            Err(error) => {
                let error = serde_json::Value::from(error.to_string());
                let (partition, sequence) = (record.partition, record.sequence);
                format!(r#"{{"position":{position},"partition":{partition},"sequence":{sequence},"kind":"Unreadable","error":{error}}}"#)
            }
        };
        output::line(&line).map_err(|error| {
            let text = error.to_string();
            failure = Some(error);
            text.into()
        })
    });
    if let Some(failure) = failure {
        return Err(failure);
    }
    let whole = dumped.map_err(|error| failed(&error))?;
    if whole.torn_bytes > 0 {
        eprintln!("{}", found(&whole));
    }
    Ok(())
}

/// `index rebuild`.
pub(crate) fn rebuild(data: &Path) -> Result<(), Failure> {
    log_of(data)?;
    let rows = evalgrid_scheduler::rebuild_index(data).map_err(|error| {
        Failure::new(
            error.to_string(),
            "Stop the server that uses the folder, or check the folder's permissions.",
        )
    })?;
    output::line(&format!("The index is made anew: {}.", output::count(rows, "batch")))
}

fn log_of(data: &Path) -> Result<std::path::PathBuf, Failure> {
    let log = data.join("log");
    match log.is_dir() {
        true => Ok(log),
        false => Err(Failure::usage(
            format!("{} holds no log", data.display()),
            "Name the server's data folder with --data.",
        )),
    }
}

fn failed(error: &LogError) -> Failure {
    Failure::new(
        error.to_string(),
        "Stop the server that uses the folder, or check the folder's permissions.",
    )
}

fn found(whole: &Recovery) -> String {
    let mut text = format!(
        "{} in {}, {} in {}",
        output::count(whole.records, "record"),
        output::count(whole.groups, "group"),
        output::count(whole.bytes, "byte"),
        output::count(whole.segments, "segment")
    );
    if whole.torn_bytes > 0 {
        text.push_str(&format!("; a torn last group of {} bytes, never acknowledged", whole.torn_bytes));
    }
    text.push('.');
    text
}
