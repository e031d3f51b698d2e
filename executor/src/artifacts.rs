//! The files that are kept of a trial: small texts that the agent's turns have added or changed, as they are when the last turn has ended.

use evalgrid_domain::{
    changes::{FileType, TurnChanges},
    evidence::Artifact,
    limits::{MAX_ARTIFACT_BYTES, MAX_ARTIFACTS, MAX_ARTIFACTS_BYTES},
    redact,
};
use evalgrid_sandbox::{Base, SandboxError};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::{
    account::Account,
    changes,
    trial::{Attempt, StepResult, Stop, called},
};

/// An artifact this short travels with the evidence: an object costs several syncs, and a small trial must cost none.
const INLINE_BYTES: usize = 1_024;
/// All of those of a trial together: evidence with them should still travel inline itself.
const INLINE_TOTAL_BYTES: usize = 4_096;
/// Transfers at once: most of each is waiting for a disk.
const PUTS_AT_ONCE: usize = 8;

const STEP: &str = "artifacts";

/// What `artifacts` records.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Kept {
    artifacts: Vec<Artifact>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    diagnostics: Vec<String>,
}

impl StepResult for Kept {
    fn failed(&self) -> bool {
        false
    }
}

/// Keeps them. Before the checks, whose own files are nobody's work; so what is kept is saved before a check may write.
pub(crate) async fn keep(attempt: &Attempt<'_>, account: &mut Account) -> Result<(), Stop> {
    let paths = candidates(account.file_changes());
    if paths.is_empty() {
        return Ok(());
    }
    let recorded = attempt.is_recorded(STEP);
    let kept = attempt.once(STEP, collect(attempt, paths)).await?;
    if !recorded {
        changes::save(attempt, STEP.into(), &kept).await?;
    }
    account.artifacts(kept.artifacts);
    account.diagnostics(kept.diagnostics);
    Ok(())
}

/// Paths of small files that a turn has touched and none has removed, in their order.
fn candidates(turns: &[TurnChanges]) -> Vec<String> {
    let mut paths = std::collections::BTreeSet::new();
    for change in turns.iter().flat_map(|turn| &turn.changes) {
        if let Some(from) = &change.from {
            paths.remove(from);
        }
        let small = change
            .after
            .as_ref()
            .is_some_and(|after| after.file_type == FileType::File && after.byte_size <= MAX_ARTIFACT_BYTES);
        if small {
            paths.insert(change.path.clone());
        } else {
            paths.remove(&change.path);
        }
    }
    paths.into_iter().collect()
}

async fn collect(attempt: &Attempt<'_>, paths: Vec<String>) -> Result<Kept, Stop> {
    if let Some(kept) = changes::saved(attempt, STEP).await {
        return Ok(kept);
    }
    let mut texts: Vec<(String, String)> = Vec::new();
    let (mut bytes, mut beyond, mut withheld) = (0, 0, 0);
    for path in paths {
        let read = async { Ok(attempt.sandbox.read_file(Base::Workspace, &path, MAX_ARTIFACT_BYTES + 1).await) };
        let content = match called("read a changed file", read).await? {
            Ok(Some(content)) if content.len() as u64 <= MAX_ARTIFACT_BYTES => content,
            // It has gone or grown, or its name was not what it seemed; or nobody may read it, which the coverage of files says.
            Ok(_) | Err(SandboxError::Operation { .. }) => continue,
            Err(error) => return Err(error.into()),
        };
        let Some(mut text) = String::from_utf8(content).ok().filter(|text| !text.contains('\0')) else {
            continue;
        };
        attempt.redactor.string(&mut text);
        if redact::assigns_password(&text) {
            withheld += 1;
        } else if texts.len() == MAX_ARTIFACTS || bytes + text.len() as u64 > MAX_ARTIFACTS_BYTES {
            beyond += 1;
        } else {
            bytes += text.len() as u64;
            texts.push((path, text));
        }
    }
    let mut inline = 0;
    let texts = texts.into_iter().map(|(path, text)| {
        let short = text.len() <= INLINE_BYTES && inline + text.len() <= INLINE_TOTAL_BYTES;
        inline += if short { text.len() } else { 0 };
        (path, text, short)
    });
    let put = |(path, text, short): (String, String, bool)| async move {
        if short {
            return Ok(Artifact {
                byte_size: text.len() as u64,
                path,
                sha256: Sha256::digest(&text).iter().map(|byte| format!("{byte:02x}")).collect(),
                text: Some(text),
            });
        }
        let object = attempt.worker.objects.put(&attempt.lease.organization_id, text.into()).await?;
        Ok::<_, Stop>(Artifact {
            byte_size: object.size,
            path,
            sha256: object.sha256,
            text: None,
        })
    };
    let artifacts = stream::iter(texts.collect::<Vec<_>>())
        .map(put)
        .buffered(PUTS_AT_ONCE)
        .try_collect()
        .await?;
    let mut diagnostics = Vec::new();
    if beyond > 0 {
        diagnostics.push(format!(
            "{beyond} changed text files are not among the artifacts: a trial keeps {MAX_ARTIFACTS} files and {} MiB",
            MAX_ARTIFACTS_BYTES >> 20
        ));
    }
    if withheld > 0 {
        diagnostics.push(format!(
            "{withheld} changed text files are not among the artifacts: they hold what looks like a password"
        ));
    }
    Ok(Kept { artifacts, diagnostics })
}

#[cfg(test)]
mod tests {
    use evalgrid_domain::changes::{ChangeKind, ContentKind, FileChange, FileSide};

    use super::*;

    #[test]
    fn what_is_left_of_all_turns() {
        let change = |path: &str, kind, from: Option<&str>, size: Option<u64>| FileChange {
            path: path.into(),
            kind,
            from: from.map(str::to_owned),
            before: None,
            after: size.map(|byte_size| FileSide {
                file_type: FileType::File,
                mode: "0644".into(),
                byte_size,
                target: None,
            }),
            content: ContentKind::Text,
            diff: None,
        };
        let turn = |changes| TurnChanges {
            changes,
            ..TurnChanges::default()
        };
        use ChangeKind::*;
        let turns = [
            turn(vec![
                change("a", Added, None, Some(1)),
                change("b", Added, None, Some(1)),
                change("c", Modified, None, Some(1)),
                change("large", Added, None, Some(MAX_ARTIFACT_BYTES + 1)),
                change("grows", Added, None, Some(1)),
            ]),
            turn(vec![
                change("a", Deleted, None, None),
                change("d", Renamed, Some("b"), Some(1)),
                change("grows", Modified, None, Some(MAX_ARTIFACT_BYTES + 1)),
            ]),
        ];
        assert_eq!(candidates(&turns), ["c", "d"]);
    }
}
