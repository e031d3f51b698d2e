//! Looking into a data folder that no server uses: the log's records, and the index made anew.

use std::path::Path;

use evalgrid_domain::timestamp;
use evalgrid_proto::log::v1::Event;
use evalgrid_store::{LogError, Recovery, log::offline};
use prost::Message as _;

use crate::{Failure, output};

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
        let event = match Event::decode(record.payload) {
            Ok(event) => match event.kind {
                Some(kind) => format!("{} {kind:?}", timestamp::format(event.at_ms)),
                None => format!("{} an event that this version does not know", timestamp::format(event.at_ms)),
            },
            Err(error) => format!("not an event: {error}"),
        };
        output::line(&format!("{position} {}/{} {event}", record.partition, record.sequence)).map_err(|error| {
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
    output::line(&format!("The index is made anew: {rows} batches."))
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
        "{} records in {} groups, {} bytes in {} segments",
        whole.records, whole.groups, whole.bytes, whole.segments
    );
    if whole.torn_bytes > 0 {
        text.push_str(&format!("; a torn last group of {} bytes, never acknowledged", whole.torn_bytes));
    }
    text.push('.');
    text
}
