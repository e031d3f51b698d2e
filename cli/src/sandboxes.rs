//! `sandboxes`: the operator's view of custody, and a hand for what is left over.

use evalgrid_domain::{outcome::humanise_duration, timestamp};
use evalgrid_proto::v1::{CustodySandbox, ListSandboxesRequest, ReapSandboxesRequest, SandboxList, SandboxState};
use serde_json::{Value, json};

use crate::{Failure, client, options, output};

pub(crate) async fn run(command: options::Sandboxes) -> Result<(), Failure> {
    match command {
        options::Sandboxes::List { operator, json } => {
            let answer = client::admin(&operator).await?.list_sandboxes(ListSandboxesRequest {}).await;
            let list = answer.map_err(|status| client::refused_to_operator(&status))?.into_inner();
            if json {
                return output::line(&as_json(&list).to_string());
            }
            output::print(&table(&list))
        }
        options::Sandboxes::Reap { operator, dry_run } => {
            let answer = client::admin(&operator)
                .await?
                .reap_sandboxes(ReapSandboxesRequest { dry_run })
                .await;
            let asked = answer.map_err(|status| client::refused_to_operator(&status))?.into_inner();
            let what = if dry_run { "would be asked for" } else { "asked for" };
            output::print(&table(&asked))?;
            output::line(&format!("The destruction of {} is {what}.", output::count(asked.total, "sandbox")))
        }
    }
}

fn state(sandbox: &CustodySandbox) -> &'static str {
    match sandbox.state() {
        SandboxState::Created => "created",
        SandboxState::DestroyAsked => "destroy asked",
        SandboxState::Intended | SandboxState::Unspecified => "intended",
    }
}

fn table(list: &SandboxList) -> String {
    let mut text = String::new();
    for sandbox in &list.sandboxes {
        let age = humanise_duration(list.now_ms.saturating_sub(sandbox.intended_at_ms) / 1000 * 1000);
        let needed = if sandbox.needed { "needed" } else { "not needed" };
        let worker = if sandbox.worker_here { "here" } else { "away" };
        let name = match &sandbox.provider_id {
            Some(id) => format!("{} ({})", sandbox.name, output::short(id, 60)),
            None => sandbox.name.clone(),
        };
        let asked = match sandbox.asked {
            0 => String::new(),
            _ => format!(", asked {}", output::count(sandbox.asked, "time")),
        };
        text.push_str(&format!(
            "{name}  {}  {}{asked}  {needed}  {age} old  of {}, which is {worker}\n",
            output::short(&sandbox.provider, 20),
            state(sandbox),
            output::short(&sandbox.worker_id, 40),
        ));
    }
    let listed = list.sandboxes.len() as u64;
    if list.total > listed {
        text.push_str(&format!("… and {} more\n", list.total - listed));
    }
    for foreign in &list.foreign {
        text.push_str(&format!(
            "{:?} in the folder of {} is no sandbox of ours, and left alone\n",
            output::short(&foreign.name, 80),
            output::short(&foreign.worker_id, 40)
        ));
    }
    text
}

fn as_json(list: &SandboxList) -> Value {
    let sandboxes = list.sandboxes.iter().map(|sandbox| {
        json!({
            "name": sandbox.name,
            "trialId": sandbox.trial_id,
            "workerId": sandbox.worker_id,
            "workerHere": sandbox.worker_here,
            "provider": sandbox.provider,
            "providerId": sandbox.provider_id,
            "state": state(sandbox),
            "needed": sandbox.needed,
            "intendedAt": timestamp::format(sandbox.intended_at_ms),
            "destroyAskedAt": sandbox.destroy_asked_at_ms.map(timestamp::format),
            "asked": sandbox.asked,
            "ageMs": list.now_ms.saturating_sub(sandbox.intended_at_ms),
        })
    });
    let foreign = list.foreign.iter();
    let foreign = foreign.map(|foreign| json!({ "workerId": foreign.worker_id, "name": foreign.name }));
    json!({
        "sandboxes": sandboxes.collect::<Vec<_>>(),
        "total": list.total,
        "foreign": foreign.collect::<Vec<_>>(),
    })
}
