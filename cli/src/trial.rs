//! `trial`: the operator's commands for single trials.

use evalgrid_domain::timestamp;
use evalgrid_proto::v1::{ResolveTrialRequest, ShowTrialRequest, TrialReport, TrialStatus};

use crate::{Failure, client, options, output};

mod evidence;

pub(crate) async fn run(command: options::Trial) -> Result<(), Failure> {
    match command {
        options::Trial::Show {
            id,
            artifact,
            api_key,
            operator,
        } => show(id, artifact, api_key, operator).await,
        options::Trial::Resolve { id, void, operator } => {
            let mut admin = client::admin(&operator).await?;
            let request = ResolveTrialRequest { id, reason: void };
            let report = admin
                .resolve_trial(request)
                .await
                .map_err(|status| client::refused_trial(&status))?;
            output::print(&text(&report.into_inner()))
        }
    }
}

/// What the operator may know of a trial of a batch in memory, and what its organization may know of it once it has ended.
async fn show(id: String, artifact: Option<String>, api_key: Option<String>, operator: options::Operator) -> Result<(), Failure> {
    let key = api_key.map_or_else(
        || client::secret(&operator.data.data.join("api-key"), "an API key", "EVALGRID_API_KEY"),
        Ok,
    );
    if let Some(path) = artifact {
        let mut batches = client::batches_at(&operator.scheduler.schedulers, &key?).await?;
        return output::bytes(&evidence::artifact(&mut batches, &id, &path).await?);
    }
    let answer = client::admin(&operator)
        .await?
        .show_trial(ShowTrialRequest { id: id.clone() })
        .await;
    let report = match answer {
        Ok(report) => Ok(text(&report.into_inner())),
        Err(status) => Err(status),
    };
    let evidence = match key {
        Ok(key) => {
            let mut batches = client::batches_at(&operator.scheduler.schedulers, &key).await?;
            evidence::text(&mut batches, &id, report.is_err()).await
        }
        Err(_) => Ok(None),
    };
    match (report, evidence) {
        (Ok(report), Ok(Some(evidence))) => output::print(&(report + &evidence)),
        // Another organization's, or not ended yet.
        (Ok(report), _) => output::print(&report),
        // Its batch has left memory.
        (Err(_), Ok(Some(evidence))) => output::print(&evidence),
        (Err(status), _) => Err(client::refused_trial(&status)),
    }
}

fn text(report: &TrialReport) -> String {
    let status = match report.status() {
        TrialStatus::Queued | TrialStatus::Unspecified => "queued",
        TrialStatus::Running => "running",
        TrialStatus::Passed => "passed",
        TrialStatus::Failed => "failed",
        TrialStatus::Void => "void",
    };
    let mut lines = vec![
        ("trial", report.id.clone()),
        ("batch", report.batch_id.clone()),
        ("organization", report.organization.clone()),
        ("case", format!("{}, trial {}", report.case_id, report.ordinal)),
        ("status", status.to_owned()),
    ];
    if let Some(failure) = &report.failure {
        lines.push(("failure", failure.clone()));
    }
    match report.local {
        true => lines.push(("runs on", "the client's own machine".to_owned())),
        false => {
            // A trial that is judged, or in talk, has no worker of its own and no open steps: who is asked stands below.
            let asked = !report.judged_by.is_empty() || !report.answered_by.is_empty();
            if report.worker_id.is_some() || !asked {
                lines.push(("worker", report.worker_id.clone().unwrap_or_else(|| "none".to_owned())));
            }
            lines.push(("sandbox", report.sandbox.clone().unwrap_or_else(|| "none".to_owned())));
            lines.push(("sandboxes begun", report.attempts.to_string()));
            lines.push(("leases without a step", report.idle_leases.to_string()));
            if !report.steps.is_empty() {
                lines.push(("steps", report.steps.join(", ")));
            }
        }
    }
    lines.extend(report.judged_by.iter().map(|judge| ("being judged", judge.clone())));
    if !report.answered_by.is_empty() {
        lines.push(("in talk", report.answered_by.clone()));
    }
    if !report.waits_for.is_empty() {
        lines.push(("waits for", report.waits_for.clone()));
    }
    lines.extend(report.lost_attempts.iter().map(|reason| ("lost", reason.clone())));
    lines.push(("last progress", timestamp::format(report.progress_at_ms)));
    let row = |(name, value): &(&str, String)| format!("{name:22}{}\n", output::plain(value));
    lines.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports() {
        let report = TrialReport {
            id: "trial_1".into(),
            case_id: "add".into(),
            ordinal: 2,
            status: TrialStatus::Running.into(),
            attempts: 2,
            worker_id: Some("w\u{1b}[1m".into()),
            steps: vec!["source".into(), "turn.1.agent".into()],
            lost_attempts: vec!["it was gone".into()],
            waits_for: "a judge runner, and none is connected".into(),
            ..TrialReport::default()
        };
        let text = text(&report);
        for line in [
            "case                  add, trial 2",
            "steps                 source, turn.1.agent",
            "lost                  it was gone",
            "waits for             a judge runner, and none is connected",
        ] {
            assert!(text.lines().any(|known| known == line), "{line:?} in {text}");
        }
        assert!(!text.contains('\u{1b}'), "a terminal is not told what to do");
    }

    #[test]
    fn who_is_asked() {
        let report = TrialReport {
            status: TrialStatus::Running.into(),
            judged_by: vec!["\"asks\" by gpt-5 (openai), for 4s".into()],
            answered_by: "the person by gpt-5 (openai), for 2s".into(),
            ..TrialReport::default()
        };
        let text = text(&report);
        for line in [
            "being judged          \"asks\" by gpt-5 (openai), for 4s",
            "in talk               the person by gpt-5 (openai), for 2s",
        ] {
            assert!(text.lines().any(|known| known == line), "{line:?} in {text}");
        }
        assert!(
            !text.contains("worker") && !text.contains("steps"),
            "what says nothing is left out: {text}"
        );
    }
}
