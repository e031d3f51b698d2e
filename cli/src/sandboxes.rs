//! `sandboxes`: the operator's view of custody, and a hand for what is left over.

use std::{os::unix::process::CommandExt as _, path::Path};

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
        options::Sandboxes::Enter {
            name,
            work,
            tools,
            network,
        } => Err(enter(&name, &work, tools.as_deref(), network)),
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

/// Becomes the shell; what it returns is why it did not.
fn enter(name: &str, work: &Path, tools: Option<&Path>, network: bool) -> Failure {
    let here = |provider: &str| evalgrid_sandbox::is_sandbox_name(name) && work.join(provider).join(name).is_dir();
    let shell = if here("bubblewrap") {
        let tools = tools.map_or_else(|| work.join("tools"), Path::to_owned);
        evalgrid_sandbox::bubblewrap_shell(&work.join("bubblewrap"), name, &tools, network)
    } else if here("process") {
        evalgrid_sandbox::process_shell(&work.join("process"), name)
    } else if here("docker") {
        return Failure::new(
            format!("the sandbox {name} is a container"),
            format!("Its shell is docker exec -it $(docker ps -q --filter label=evalgrid.sandbox={name}) /bin/bash"),
        );
    } else {
        return Failure::usage(
            format!("there is no sandbox {:?} in {}", output::short(name, 80), work.display()),
            "Name the folder of its executor with --work, on the executor's machine; `evalgrid sandboxes list` shows the names.",
        );
    };
    let error = match shell {
        Ok(mut shell) => shell.exec().to_string(),
        Err(error) => error.to_string(),
    };
    Failure::new(
        format!("the shell could not be started: {error}"),
        "See whether you may read the executor's folder, and whether bubblewrap works here.",
    )
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
        let needed = match sandbox.kept_until_ms {
            Some(until_ms) if until_ms > list.now_ms => format!("kept until {}", timestamp::format(until_ms)),
            _ if sandbox.needed => "needed".to_owned(),
            _ => "not needed".to_owned(),
        };
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
            "keptUntil": sandbox.kept_until_ms.map(timestamp::format),
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
