//! `keys`: the operator's commands for API keys.

use evalgrid_domain::timestamp;
use evalgrid_proto::v1::{CreateKeyRequest, Key, ListKeysRequest, RevokeKeyRequest};

use crate::{Failure, client, options, output};

pub(crate) async fn run(command: options::Keys) -> Result<(), Failure> {
    match command {
        options::Keys::Create {
            org,
            name,
            permissions,
            operator,
        } => {
            let request = CreateKeyRequest {
                organization: org,
                name,
                permissions,
            };
            let answer = client::admin(&operator)
                .await?
                .create_key(request)
                .await
                .map_err(|status| client::refused_to_operator(&status))?;
            let created = answer.into_inner();
            // The secret alone on stdout, so that it can be piped; what people want to know goes beside it.
            output::line(&created.secret)?;
            if let Some(key) = &created.key {
                eprintln!("{} for {}: {}", key.id, key.organization, key.permissions.join(", "));
            }
            eprintln!("This is the only time that the key is shown.");
            Ok(())
        }
        options::Keys::List { org, operator } => {
            let request = ListKeysRequest {
                organization: org.unwrap_or_default(),
            };
            let answer = client::admin(&operator)
                .await?
                .list_keys(request)
                .await
                .map_err(|status| client::refused_to_operator(&status))?;
            output::print(&table(&answer.into_inner().keys))
        }
        options::Keys::Revoke { id, operator } => {
            let answer = client::admin(&operator).await?.revoke_key(RevokeKeyRequest { id }).await;
            let key = answer.map_err(|status| client::refused_to_operator(&status))?.into_inner();
            output::line(&format!("{} ({}…) is revoked.", key.id, key.start))
        }
    }
}

fn table(keys: &[Key]) -> String {
    let mut text = String::new();
    for key in keys {
        let state = match key.revoked_at_ms {
            Some(at) => format!("revoked {}", timestamp::format(at)),
            None => format!("since {}", timestamp::format(key.created_at_ms)),
        };
        let permissions = key.permissions.join(",");
        let name = output::short(&key.name, 40);
        text.push_str(&format!(
            "{}  {}  {}…  {state}  {name:?}  {permissions}\n",
            key.id, key.organization, key.start
        ));
    }
    text
}
