//! `objects`: has those objects of a running server collected that nothing refers to any more.

use std::time::Duration;

use evalgrid_proto::v1::{CollectObjectsRequest, CollectedObjects};
use tokio::time::timeout;
use tonic::{Code, Status};

use crate::{Failure, client, options, output};

/// The longest between two signs: the server tells of every hundred objects, of which each can be large, and its store slow.
const SILENCE: Duration = Duration::from_secs(600);

pub(crate) async fn run(command: options::Objects) -> Result<(), Failure> {
    let options::Objects::Collect { org, dry_run, operator } = command;
    let request = CollectObjectsRequest {
        organization: org.unwrap_or_default(),
        dry_run,
    };
    let mut admin = client::admin(&operator).await?;
    let silent = |_| Status::deadline_exceeded(format!("no word from the scheduler for {} minutes", SILENCE.as_secs() / 60));
    let answer = timeout(SILENCE, admin.collect_objects(request)).await;
    let mut progress = answer
        .map_err(silent)
        .and_then(|answer| answer)
        .map_err(|status| refused(&status))?
        .into_inner();
    let mut problems = 0u64;
    loop {
        let next = timeout(SILENCE, progress.message()).await;
        let told = next.map_err(silent).and_then(|next| next).map_err(|status| refused(&status))?;
        let Some(told) = told else { break };
        if !told.done {
            let results = output::count(told.results, "result");
            eprintln!(
                "{}: {results} read, {} looked at",
                name(&told),
                output::count(told.looked_at, "old object")
            );
            continue;
        }
        output::line(&summary(&told, dry_run))?;
        if let Some(problem) = &told.problem {
            problems += 1;
            eprintln!("{}: {}", name(&told), output::plain(problem));
        }
    }
    match problems {
        0 => Ok(()),
        problems => Err(Failure::new(
            format!("the objects of {problems} of these could not be collected"),
            "See above what is in the way; nothing that might be needed was removed.",
        )),
    }
}

fn refused(status: &Status) -> Failure {
    match status.code() {
        // Not of a key, and nothing to try again: the message says what to do.
        Code::DataLoss => Failure::new(output::plain(status.message()), "Put right what it names, and collect again."),
        _ => client::refused_to_operator(status),
    }
}

fn name(told: &CollectedObjects) -> String {
    output::short(&told.organization, 80)
}

fn summary(told: &CollectedObjects, dry_run: bool) -> String {
    let what = if dry_run { "would be removed" } else { "removed" };
    format!(
        "{}: {} not put for 7 days, {} of them {what}, {} bytes",
        name(told),
        output::count(told.looked_at, "object"),
        told.removed,
        told.bytes
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_done_is_said_in_a_line() {
        fn check(looked_at: u64, removed: u64, dry_run: bool, expected: &str) {
            let told = CollectedObjects {
                organization: "acme".to_owned(),
                looked_at,
                removed,
                bytes: 10 * removed,
                ..CollectedObjects::default()
            };
            assert_eq!(summary(&told, dry_run), expected);
        }
        check(0, 0, false, "acme: 0 objects not put for 7 days, 0 of them removed, 0 bytes");
        check(1, 1, false, "acme: 1 object not put for 7 days, 1 of them removed, 10 bytes");
        check(
            9,
            2,
            true,
            "acme: 9 objects not put for 7 days, 2 of them would be removed, 20 bytes",
        );
    }
}
