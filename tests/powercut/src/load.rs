//! Clients under whose hands the power goes: they start batches, watch them, make keys, and write down what they are told.

use std::{sync::Arc, time::Duration};

use evalgrid_proto::v1::{CreateKeyRequest, admin_client::AdminClient};
use evalgrid_tests::{counter::Counter, server::Server, suite};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::facts::{Key, Ledger, Start, post};

/// Organizations that start batches; each may have 3 running.
const ORGANIZATIONS: usize = 2;
/// Batches of one organization at once, by the public contract.
const AT_ONCE: usize = 3;
/// Between two looks at the same batches.
const LOOK: Duration = Duration::from_millis(25);
/// Between two keys.
const NEXT_KEY: Duration = Duration::from_millis(150);

/// What all clients share.
#[derive(Clone)]
pub struct Load {
    /// Whom they talk to.
    pub server: Arc<Server>,
    /// What they were told.
    pub ledger: Arc<Ledger>,
    /// What really ran.
    pub counter: Counter,
    /// Decides what they ask for.
    pub seed: u64,
}

impl Load {
    /// Starts them, for one life of the machine; they end with the set. Their errors are the power's.
    pub fn spawn(&self, life: u64) -> JoinSet<()> {
        let mut clients = JoinSet::new();
        for (number, key) in self.ledger.keys().into_iter().take(ORGANIZATIONS).enumerate() {
            let load = self.clone();
            clients.spawn(async move {
                let mut rng = StdRng::seed_from_u64(load.seed ^ (life << 16) ^ number as u64);
                let mut asked = 0;
                while load.client(&key, &mut rng, &format!("{life}-{number}"), &mut asked).await.is_ok() {
                    tokio::time::sleep(LOOK).await;
                }
            });
        }
        let load = self.clone();
        clients.spawn(async move {
            let mut made = 0;
            while load.new_key(&format!("life-{life}-{made}")).await.is_ok() {
                made += 1;
                tokio::time::sleep(NEXT_KEY).await;
            }
        });
        clients
    }

    /// Starts what may be started, and looks at what runs.
    async fn client(&self, key: &Key, rng: &mut StdRng, name: &str, asked: &mut u32) -> Result<(), String> {
        self.ask_again(key).await?;
        if self.ledger.running(&key.organization).len() < AT_ONCE {
            *asked += 1;
            let start = Start {
                key: key.clone(),
                once: format!("start-{name}-{asked}"),
                body: self.batch(rng),
                batch: None,
            };
            self.ledger.starting(start.clone());
            self.start(&start).await?;
        }
        self.look(key).await
    }

    /// Starts that were not answered are asked for again, as a client does.
    pub async fn ask_again(&self, key: &Key) -> Result<(), String> {
        for start in self.ledger.starts(&key.organization) {
            if start.batch.is_none() {
                self.start(&start).await?;
            }
        }
        Ok(())
    }

    /// Looks at every batch that is not known to have ended.
    pub async fn look(&self, key: &Key) -> Result<(), String> {
        for id in self.ledger.running(&key.organization) {
            let batch = post(&self.server, key, "evals.batches.get", &json!({ "id": id }), None).await?;
            self.ledger.saw(&batch);
        }
        Ok(())
    }

    async fn start(&self, start: &Start) -> Result<(), String> {
        let answer = post(&self.server, &start.key, "evals.batches.start", &start.body, Some(&start.once)).await;
        match answer {
            Ok(body) => {
                self.ledger.started(&start.once, body["id"].as_str().unwrap_or_default());
                Ok(())
            }
            // An unanswered start of the last life runs and was not seen yet: later.
            Err(error) if error.starts_with("4") => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// A key of a new organization.
    pub async fn new_key(&self, organization: &str) -> Result<(), String> {
        let text = |error: &dyn std::error::Error| error.to_string();
        let token = std::fs::read_to_string(self.server.data().join("admin-token")).map_err(|error| text(&error))?;
        let mut client = AdminClient::connect(format!("http://{}", self.server.grpc))
            .await
            .map_err(|error| text(&error))?;
        let mut request = tonic::Request::new(CreateKeyRequest {
            organization: organization.into(),
            ..Default::default()
        });
        request
            .metadata_mut()
            .insert("authorization", format!("Bearer {}", token.trim()).parse().unwrap());
        let created = client.create_key(request).await.map_err(|error| text(&error))?.into_inner();
        let secret = created.secret;
        // The key is acknowledged here; which organization it opens is asked for afterwards, so a cut in between forgets a fact, no more.
        let key = Key {
            organization: String::new(),
            secret,
        };
        let known = post(&self.server, &key, "auth.whoami", &json!({}), None).await?;
        self.ledger.key(Key {
            organization: known["organization"]["id"].as_str().unwrap_or_default().to_owned(),
            ..key
        });
        Ok(())
    }

    /// Small trials. Every other batch leaves evidence that is too big to travel with its event, so that it becomes an object.
    fn batch(&self, rng: &mut StdRng) -> Value {
        let name = r#"$(basename "$(dirname "$HOME")")"#;
        let talk = match rng.random_bool(0.5) {
            true => format!(r#"printf '{{"_tag":"Message","role":"assistant","text":"%s"}}\n' $(seq -f "A-line-of-{name}-%g" 300);"#),
            false => String::new(),
        };
        let milliseconds = rng.random_range(0..300);
        let run = format!(
            "{}; {talk} sleep 0.{milliseconds:03}; echo done > done",
            self.counter.report(&format!("run {name}"))
        );
        let verify = format!("{} && test \"$(cat done)\" = done", self.counter.report(&format!("check {name}")));
        suite::command_batch(rng.random_range(1..=2), rng.random_range(1..=3), "process", &run, &verify)
    }
}
