//! What is done with a data folder that no server uses: looking into its log, repairing it, raising its format level, and making the
//! index anew.

use std::path::Path;

use evalgrid_proto::log::v1::Event;
use evalgrid_store::{
    LogError, Recovery,
    log::{offline, repair},
};
use prost::Message as _;

use crate::{Failure, events, output};

/// `log verify`.
pub(crate) fn verify(data: &Path) -> Result<(), Failure> {
    let report = offline::verify(&log_of(data)?).map_err(|error| failed(&error))?;
    output::line(&found(&report.whole))?;
    for snapshot in &report.whole.skipped_snapshots {
        output::line(&format!("A snapshot is damaged and passed over: {snapshot}."))?;
    }
    match report.problem {
        None => output::line("The log is whole."),
        Some(problem) if report.opens => Err(Failure::new(
            format!("behind that: {problem}"),
            "A server starts with it all the same, since a snapshot reflects what was there. Look after the disk.",
        )),
        Some(problem) => Err(Failure::new(
            format!("behind that: {problem}"),
            "Nothing was changed. Keep a copy of the folder before you try anything with it.",
        )),
    }
}

/// `log repair`.
pub(crate) fn repair(data: &Path, yes: bool) -> Result<(), Failure> {
    let log = log_of(data)?;
    let Some(damage) = repair::examine(&log).map_err(|error| failed(&error))? else {
        return output::line("Nothing keeps this log from being opened: there is nothing to repair.");
    };
    let what = match &damage.problem {
        LogError::Corrupt { segment, offset, reason } => format!("{} is damaged at byte {offset}: {reason}.", segment.display()),
        LogError::Missing { dir, what } => format!("The log in {} is not complete: {what}.", dir.display()),
        other => format!("{other}."),
    };
    output::line(&what)?;
    output::line(&match damage.lost() {
        0 => format!(
            "A repaired log ends at position {}. There is no trace of records behind that, but there may have been some.",
            damage.kept
        ),
        lost => format!(
            "A repaired log ends at position {}. Lost would be {}, positions {} to {}, and what may have been behind them.",
            damage.kept,
            output::count(lost, "record"),
            damage.kept + 1,
            damage.last_known
        ),
    })?;
    if !yes {
        return Err(Failure::new(
            "nothing was changed",
            "Restore a backup if you have one. If not, copy the folder, and then run this again with --yes.",
        ));
    }
    match repair::repair(&log).map_err(|error| failed(&error))? {
        Some((damage, aside)) => output::line(&format!(
            "The log ends at position {} now. What was taken out of it lies in {}.",
            damage.kept,
            aside.display()
        )),
        None => output::line("The log was repaired meanwhile."),
    }
}

/// `upgrade finalize`.
pub(crate) fn finalize(data: &Path) -> Result<(), Failure> {
    let done = offline::finalize(&log_of(data)?).map_err(|error| failed(&error))?;
    output::line(&match done.from == done.to {
        true => format!("The log is written at format level {} already: nothing was changed.", done.to),
        false => format!(
            "The log is written at format level {} from now on; it was {}. Versions that do not know level {} refuse it.",
            done.to, done.from, done.to
        ),
    })
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
    let next = match error {
        LogError::InUse { .. } => "Stop the server that uses the folder.",
        LogError::NewerFormat { .. } => "Use the version of Evalgrid that wrote it, or a newer one.",
        LogError::Corrupt { .. } | LogError::Missing { .. } => "Restore a backup, or see what `evalgrid log repair` can do.",
        _ => "Check the folder's permissions, and the disk.",
    };
    Failure::new(error.to_string(), next)
}

fn found(whole: &Recovery) -> String {
    let mut text = format!(
        "{} in {}, {} in {}",
        output::count(whole.records, "record"),
        output::count(whole.groups, "group"),
        output::count(whole.bytes, "byte"),
        output::count(whole.segments, "segment")
    );
    if whole.first_position > 1 {
        text.push_str(&format!("; it begins at position {}", whole.first_position));
    }
    if let Some(position) = whole.snapshot {
        text.push_str(&format!("; the newest snapshot is of position {position}"));
    }
    if whole.torn_bytes > 0 {
        text.push_str(&format!("; a torn last group of {} bytes, never acknowledged", whole.torn_bytes));
    }
    text.push('.');
    text
}
