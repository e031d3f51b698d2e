//! What the case's judges read of the workspace, and the records of judges that are not asked. Asking them is not the executor's.

use evalgrid_domain::{
    decode::utf16_len,
    evidence::Validation,
    judge::{self, JudgeFile},
    limits::{MAX_JUDGE_FILE, MAX_JUDGE_FILES_TOTAL},
    request::{JudgedValidator, Validator},
};
use evalgrid_sandbox::{Base, SandboxError};
use serde::{Deserialize, Serialize};

use crate::{
    account::Account,
    trial::{Attempt, StepResult, Stop, called},
};

const STEP: &str = "judge-files";
/// A character, as they are counted here, takes at most three bytes.
const MAX_BYTES: usize = 3 * MAX_JUDGE_FILE;

/// What `judge-files` records.
#[derive(Debug, Serialize, Deserialize)]
struct Read {
    files: Vec<JudgeFile>,
}

impl StepResult for Read {
    fn failed(&self) -> bool {
        false
    }
}

/// Keeps the files that judges will read: behind the checks, and before the sandbox goes. Of a void trial the judges' records, which say that they
/// were not asked.
pub(crate) async fn keep(attempt: &Attempt<'_>, account: &mut Account) -> Result<(), Stop> {
    let Some(Validator::Judged(judged)) = &attempt.case.validator else {
        return Ok(());
    };
    if account.is_void() {
        let skipped = skipped(attempt, judged, account.validations());
        account.skipped(skipped);
        return Ok(());
    }
    let paths = judged.judge_files();
    if !paths.is_empty() {
        let read = attempt.once(STEP, read(attempt, paths)).await?;
        account.judge_files(read.files);
    }
    Ok(())
}

/// Behind the records of the checks.
fn skipped(attempt: &Attempt<'_>, judged: &JudgedValidator, checks: usize) -> Vec<Validation> {
    let places = (0..)
        .zip(checks as u64..)
        .map(|(judge, validation)| judge::Place { judge, validation });
    let judges = judged.judges.iter().zip(places);
    judges
        .map(|(judge, place)| judge::skipped(judge, place, &attempt.redactor))
        .collect()
}

async fn read(attempt: &Attempt<'_>, paths: Vec<&str>) -> Result<Read, Stop> {
    let mut files = Vec::new();
    let mut left = Some(MAX_JUDGE_FILES_TOTAL);
    for path in paths {
        let text = match left {
            Some(_) => text(attempt, path).await?,
            None => Err(too_much()),
        };
        let mut file = JudgeFile::new(path, text, &attempt.redactor);
        if let JudgeFile::Text { text, .. } = &file {
            left = left.and_then(|left| left.checked_sub(utf16_len(text)));
            if left.is_none() {
                file = JudgeFile::new(path, Err(too_much()), &attempt.redactor);
            }
        }
        files.push(file);
    }
    Ok(Read { files })
}

fn too_much() -> String {
    format!("does not fit: the files of the case's judges may have {MAX_JUDGE_FILES_TOTAL} characters together")
}

/// The text of a file, or what is wrong with the file.
async fn text(attempt: &Attempt<'_>, path: &str) -> Result<Result<String, String>, Stop> {
    let read = attempt.sandbox.read_file(Base::Workspace, path, MAX_BYTES as u64 + 1);
    let bytes = match called("read a file for the judges", async { Ok(read.await) }).await? {
        Ok(Some(bytes)) => bytes,
        Ok(None) => return Ok(Err("is not there".to_owned())),
        Err(SandboxError::Operation { reason, .. }) => return Ok(Err(format!("cannot be read: {reason}"))),
        Err(error) => return Err(error.into()),
    };
    if bytes.len() > MAX_BYTES {
        return Ok(Err(format!(
            "has more than {MAX_JUDGE_FILE} characters; a judge reads at most {MAX_JUDGE_FILE}"
        )));
    }
    let text = String::from_utf8(bytes).ok().filter(|text| !text.contains('\0'));
    Ok(text.ok_or_else(|| "is not text".to_owned()))
}
