//! Clients: they start batches with and without keys, regrade those that have ended, ask again when an answer is lost, cancel, and read. What they
//! were told must stay true.

use std::collections::BTreeMap;

use evalgrid_domain::ids::{BatchId, OrgId};
use evalgrid_proto::{
    log::v1 as log,
    v1::{self, BatchStatus},
};
use evalgrid_scheduler::heart::{Variables, dispatch};
use evalgrid_workflow::{
    Batch,
    decide::{self, Refusal, Start},
    retry, view,
};
use prost::Message as _;
use rand::{Rng as _, rngs::StdRng};

use crate::{
    check::{Fact, Violation, broken},
    disk,
    node::{NodeEvent, Waiter},
    sim::{EPOCH_MS, Event, MS, SECOND, Sim},
    trouble::Trouble,
};

/// How long a client waits for an answer.
const PATIENCE: u64 = 15 * SECOND;
/// How often it asks again.
const TRIES: u32 = 6;
/// Keys that clients of one organization use: few, so that they come again.
const KEYS: u32 = 12;
/// Only local batches check in, and there are none here.
const NEVER_QUIET: &dyn Fn(&Batch) -> bool = &|_| false;
/// What the simulated workers run.
pub const PROVIDER: &str = "process";

/// What a client asks for.
#[derive(Clone, Debug)]
pub enum Ask {
    /// Start a batch.
    Start {
        /// Whose.
        organization: OrgId,
        /// Under which key.
        key: Option<String>,
        /// Of the request.
        hash: String,
        /// Cases, variants, trials.
        size: (usize, usize, u32),
    },
    /// Have the judges of one asked again, or others.
    Regrade {
        /// Whose.
        organization: OrgId,
        /// Under which key.
        key: Option<String>,
        /// Which one.
        batch: BatchId,
    },
    /// Read one.
    Get(OrgId, BatchId),
    /// Cancel one.
    Cancel(OrgId, BatchId),
}

/// What it is told.
#[derive(Debug)]
pub enum Answer {
    /// A batch has started.
    Started(BatchId),
    /// A batch, as it is.
    Batch(Box<v1::Batch>),
    /// It is cancelled.
    Cancelled,
    /// Not now, or never.
    Refused(Refusal),
    /// There is no such batch.
    NotFound,
    /// This scheduler is not the active one, or stops.
    Unavailable,
}

/// A call, where it is served.
pub struct Serve {
    /// Which one.
    pub call: u64,
    ask: Ask,
    stage: Stage,
}

enum Stage {
    Begin,
    Looked(Result<Option<BatchId>, Refusal>, Option<Refusal>),
    /// What a regrade goes on from.
    Origin(Option<Box<v1::Batch>>),
    Admit(Option<Box<v1::Batch>>),
    Read(Option<Box<v1::Batch>>),
    Answer(Answer),
}

struct Call {
    ask: Ask,
    node: usize,
    sent_at: u64,
    tries: u32,
}

/// See the module.
pub struct Clients {
    organizations: Vec<OrgId>,
    number: usize,
    known: Vec<(OrgId, BatchId)>,
    calls: BTreeMap<u64, Call>,
    last_call: u64,
    /// What each batch was started with, as its request says: who has it, reads it.
    pub cases: BTreeMap<[u8; 16], Vec<v1::CaseInfo>>,
}

/// What happens to clients.
pub enum ClientEvent {
    /// One of them wants something.
    Next,
    /// It asks, or asks again.
    Ask(Ask, u32),
    /// A call arrives.
    Arrive(u64),
    /// An answer arrives.
    Answer(u64, Answer),
    /// Nobody waits for the answer any longer.
    TimeOut(u64),
}

impl Clients {
    /// Some clients of some organizations.
    pub fn new(rng: &mut StdRng) -> Clients {
        let organizations = (0..rng.random_range(1..4))
            .map(|number| OrgId::new(EPOCH_MS, [number; 10]))
            .collect();
        Clients {
            organizations,
            number: rng.random_range(1..4),
            known: Vec::new(),
            calls: BTreeMap::new(),
            last_call: 0,
            cases: BTreeMap::new(),
        }
    }

    /// Whether nobody waits for anything.
    pub fn at_rest(&self) -> bool {
        self.calls.is_empty()
    }
}

impl Ask {
    /// Of a start or a regrade: whose, under which key, and what tells it from another one.
    fn start(&self) -> Option<(OrgId, Option<&str>, String)> {
        match self {
            Ask::Start {
                organization, key, hash, ..
            } => Some((*organization, key.as_deref(), hash.clone())),
            Ask::Regrade { organization, key, batch } => Some((*organization, key.as_deref(), format!("regrade of {batch}"))),
            Ask::Get(..) | Ask::Cancel(..) => None,
        }
    }
}

/// A judge or a person: mostly a model that is called, sometimes a harness.
fn answerer(rng: &mut StdRng, name: &str) -> v1::AnswererInfo {
    let harness = rng.random_bool(0.4);
    v1::AnswererInfo {
        name: name.to_owned(),
        harness: if harness { "codex" } else { "" }.to_owned(),
        provider: if harness { "" } else { "openai" }.to_owned(),
        model: "large".to_owned(),
    }
}

fn judges(rng: &mut StdRng, at_least: usize) -> Vec<v1::AnswererInfo> {
    (0..rng.random_range(at_least..3)).map(|_| answerer(rng, "judge")).collect()
}

impl Sim {
    /// The first wishes.
    pub fn begin_clients(&mut self) {
        for _ in 0..self.clients.number {
            let wait = self.about(10 * SECOND);
            self.at(wait, Event::Client(ClientEvent::Next));
        }
    }

    /// On the first start of a cell, its organizations; and again where a failover has taken them away.
    pub fn create_organizations(&mut self, node: usize) {
        let organizations = self.clients.organizations.clone();
        self.turn(node, |core| {
            for (number, id) in organizations.into_iter().enumerate() {
                let event = decide::create_organization(&core.state, &format!("org-{number}"), id, core.now_ms());
                core.commit_all(event);
            }
        });
    }

    /// Something happens to a client.
    pub fn client_event(&mut self, event: ClientEvent) {
        match event {
            ClientEvent::Next => self.wish(),
            ClientEvent::Ask(ask, tries) => self.ask(ask, tries),
            ClientEvent::Arrive(id) => {
                let Some(call) = self.clients.calls.get(&id) else { return };
                let (node, ask) = (call.node, call.ask.clone());
                let stopped = self.nodes[node].stopped_until;
                match stopped > self.now {
                    true => self.at(stopped - self.now, Event::Client(ClientEvent::Arrive(id))),
                    false => {
                        let stage = Stage::Begin;
                        self.serve(node, Serve { call: id, ask, stage });
                    }
                }
            }
            ClientEvent::Answer(id, answer) => self.hear_answer(id, answer),
            ClientEvent::TimeOut(id) => {
                if let Some(call) = self.clients.calls.remove(&id) {
                    self.ask_again(call);
                }
            }
        }
    }

    fn wish(&mut self) {
        if self.troubles.over() {
            return;
        }
        let wait = self.about(self.setup.call_every);
        self.at(wait, Event::Client(ClientEvent::Next));
        let known = self.clients.known.len();
        // Mostly young ones.
        let back = self.rng.random_range(1..=known.clamp(1, 6));
        let one = self.clients.known.get(known.wrapping_sub(back)).copied();
        let ask = match (self.rng.random_range(0..10), one) {
            (0..5, Some((organization, id))) => Ask::Get(organization, id),
            (5, Some((organization, id))) => Ask::Cancel(organization, id),
            (6, Some((organization, batch))) if self.setup.judged => {
                let number = self.rng.random_range(0..KEYS);
                Ask::Regrade {
                    organization,
                    key: self.rng.random_bool(0.6).then(|| format!("key-regrade-{number}")),
                    batch,
                }
            }
            _ => {
                let organization = self.clients.organizations[self.rng.random_range(0..self.clients.organizations.len())];
                let number = self.rng.random_range(0..KEYS);
                let other = self.rng.random_bool(0.05);
                Ask::Start {
                    organization,
                    key: self.rng.random_bool(0.6).then(|| format!("key-{number}")),
                    hash: format!("{number}{}", if other { "-other" } else { "" }),
                    size: (
                        self.rng.random_range(1..4),
                        self.rng.random_range(1..3),
                        self.rng.random_range(1..3),
                    ),
                }
            }
        };
        if let Ask::Start { key: Some(_), .. } | Ask::Regrade { key: Some(_), .. } = &ask
            && self.strike(Trouble::StartRaced, 0.3)
        {
            self.ask(ask.clone(), 0);
        }
        self.ask(ask, 0);
    }

    fn ask(&mut self, ask: Ask, tries: u32) {
        self.clients.last_call += 1;
        let id = self.clients.last_call;
        let node = self.rng.random_range(0..self.nodes.len());
        // A load balancer's health checks mostly know the active one.
        let active = self.nodes.iter().position(|node| node.is_active());
        let node = active.filter(|_| self.rng.random_bool(0.9)).unwrap_or(node);
        self.tell(|| format!("call {id} to scheduler {node}: {ask:?}"));
        let call = Call {
            ask,
            node,
            sent_at: self.now,
            tries,
        };
        self.clients.calls.insert(id, call);
        let wait = self.rng.random_range(MS..50 * MS);
        self.at(wait, Event::Client(ClientEvent::Arrive(id)));
        self.at(PATIENCE, Event::Client(ClientEvent::TimeOut(id)));
    }

    fn ask_again(&mut self, call: Call) {
        let may = !matches!(call.ask, Ask::Start { key: None, .. } | Ask::Regrade { key: None, .. });
        if may && call.tries < TRIES {
            let wait = self.about(3 * SECOND);
            self.at(wait, Event::Client(ClientEvent::Ask(call.ask, call.tries + 1)));
        }
    }

    /// A call is not served.
    pub fn unavailable(&mut self, call: u64) {
        let wait = self.rng.random_range(MS..50 * MS);
        self.at(wait, Event::Client(ClientEvent::Answer(call, Answer::Unavailable)));
    }

    /// A scheduler goes on with a call, as the service does.
    pub fn serve(&mut self, node: usize, mut serve: Serve) {
        let stage = std::mem::replace(&mut serve.stage, Stage::Begin);
        let next = match (stage, &serve.ask) {
            (Stage::Begin, ask @ (Ask::Start { .. } | Ask::Regrade { .. })) => {
                let Some((organization, key, hash)) = ask.start() else { return };
                self.turn(node, |core| {
                    let known = decide::replay(&core.state, &organization, key, &hash, core.now_ms());
                    Stage::Looked(
                        known,
                        decide::busy(&core.state, &organization, key.is_some(), NEVER_QUIET, core.now_ms()),
                    )
                })
            }
            (Stage::Begin, Ask::Get(organization, id)) => self.turn(node, |core| {
                let batch = core.state.batch(id).filter(|batch| batch.organization == *organization);
                Stage::Read(batch.map(|batch| Box::new(view::batch(batch, None))))
            }),
            (Stage::Begin, Ask::Cancel(organization, id)) => self.turn(node, |core| {
                Stage::Answer(match decide::cancel(&core.state, organization, id, core.now_ms()) {
                    Ok(events) => {
                        core.commit_all(events);
                        Answer::Cancelled
                    }
                    Err(refusal) => Answer::Refused(refusal),
                })
            }),
            (Stage::Looked(Ok(Some(id)), _), _) => return self.answer(serve.call, Answer::Started(id)),
            (Stage::Looked(Err(refusal), _) | Stage::Looked(_, Some(refusal)), _) => {
                return self.answer(serve.call, Answer::Refused(refusal));
            }
            (Stage::Looked(..), Ask::Regrade { organization, batch, .. }) => self.turn(node, |core| {
                let batch = core.state.batch(batch).filter(|batch| batch.organization == *organization);
                Stage::Origin(batch.map(|batch| Box::new(view::batch(batch, None))))
            }),
            (Stage::Looked(..), _) => return self.store(node, serve, None),
            (Stage::Origin(Some(old)), _) => return self.store(node, serve, Some(old)),
            (Stage::Origin(None), Ask::Regrade { organization, batch, .. }) => {
                return match self.read_archived(node, organization, batch) {
                    Answer::Batch(old) => self.store(node, serve, Some(old)),
                    _ => self.answer(serve.call, Answer::NotFound),
                };
            }
            (Stage::Origin(None), _) => None,
            (Stage::Admit(old), ask) => self.admit(node, ask.clone(), old),
            (Stage::Read(batch), Ask::Get(organization, id)) => {
                let answer = match batch {
                    Some(batch) => Answer::Batch(batch),
                    None => self.read_archived(node, organization, id),
                };
                return self.answer(serve.call, answer);
            }
            (Stage::Read(_), _) => None,
            (Stage::Answer(answer), _) => return self.answer(serve.call, answer),
        };
        match next {
            Some((stage, position)) => {
                serve.stage = stage;
                self.wait(node, position, Waiter::Serve(Box::new(serve)));
            }
            None => self.unavailable(serve.call),
        }
    }

    /// Data first, then the pointer.
    fn store(&mut self, node: usize, mut serve: Serve, old: Option<Box<v1::Batch>>) {
        if self.strike(Trouble::ObjectsFailed, 0.02) {
            return self.unavailable(serve.call);
        }
        serve.stage = Stage::Admit(old);
        let wait = self.rng.random_range(MS..30 * MS);
        self.at_node(node, wait, NodeEvent::Serve(Box::new(serve)));
    }

    fn admit(&mut self, node: usize, ask: Ask, old: Option<Box<v1::Batch>>) -> Option<(Stage, u64)> {
        let (organization, key, hash) = ask.start()?;
        let size = match &ask {
            Ask::Start { size, .. } => Some(*size),
            _ => None,
        };
        let new = match (size, old) {
            (Some(size), _) => self.fresh(size),
            (None, Some(old)) => match self.regraded(&old) {
                Ok(new) => new,
                Err(refusal) => return self.turn(node, |_| Stage::Answer(Answer::Refused(refusal))),
            },
            (None, None) => return None,
        };
        let (random, cases) = (self.rng.random(), new.cases.clone());
        let mut admitted = None;
        let next = self.turn(node, |core| {
            let now_ms = core.now_ms();
            let id = BatchId::new(now_ms, random);
            let started = log::BatchStarted {
                batch: id.0.to_vec().into(),
                organization_id: organization.to_string(),
                request: Some(v1::ObjectRef::default()),
                request_hash: hash,
                idempotency_key: key.map(str::to_owned),
                suite: Some(v1::Suite::default()),
                ..new
            };
            Stage::Answer(match decide::start(&core.state, started, &organization, NEVER_QUIET, now_ms) {
                Ok(Start::Replay(id)) => Answer::Started(id),
                Ok(Start::Admit(events)) => {
                    admitted = Some(id);
                    core.commit_all(events);
                    dispatch(core, &Variables::new());
                    Answer::Started(id)
                }
                Err(refusal) => Answer::Refused(refusal),
            })
        });
        self.clients.cases.extend(admitted.map(|id| (id.0, cases)));
        next
    }

    fn fresh(&mut self, (cases, variants, trials): (usize, usize, u32)) -> log::BatchStarted {
        let judged = self.setup.judged;
        let rng = &mut self.rng;
        let case = |_| match judged {
            true => v1::CaseInfo {
                judges: judges(rng, 0),
                person: rng.random_bool(0.3).then(|| answerer(rng, "person")),
                ..v1::CaseInfo::default()
            },
            false => v1::CaseInfo::default(),
        };
        let variant = v1::VariantInfo {
            harness: "command".into(),
            provider: PROVIDER.into(),
            ..v1::VariantInfo::default()
        };
        log::BatchStarted {
            cases: (0..cases).map(case).collect(),
            variants: vec![variant; variants],
            variant_ids: vec![String::new(); cases * variants],
            trials,
            ..log::BatchStarted::default()
        }
    }

    /// The same judges again, or others.
    fn regraded(&mut self, old: &v1::Batch) -> Result<log::BatchStarted, Refusal> {
        let mut cases = old.cases.clone();
        if self.rng.random_bool(0.5) {
            let rng = &mut self.rng;
            cases.iter_mut().for_each(|case| case.judges = judges(rng, 1));
        }
        let judged: Vec<bool> = cases.iter().map(|case| !case.judges.is_empty()).collect();
        let carried = retry::regraded(old, &judged)?;
        let id: BatchId = old.id.parse().map_err(|_| Refusal::NoBatch)?;
        Ok(log::BatchStarted {
            variants: old.variants.clone(),
            variant_ids: old.runs.iter().map(|run| run.variant_id.clone()).collect(),
            trials: old.runs.first().map_or(0, |run| run.trials.len() as u32),
            regrade_of: Some(id.0.to_vec().into()),
            carried,
            cases,
            ..log::BatchStarted::default()
        })
    }

    fn read_archived(&mut self, node: usize, organization: &OrgId, id: &BatchId) -> Answer {
        let manifest = self.row(node, organization, id).and_then(|row| row.manifest);
        let bytes = manifest.and_then(|manifest| disk::get(&self.disk.objects, &manifest.sha256));
        match bytes.and_then(|bytes| v1::Batch::decode(bytes).ok()) {
            Some(batch) => Answer::Batch(Box::new(batch)),
            None => Answer::NotFound,
        }
    }

    fn answer(&mut self, call: u64, answer: Answer) {
        if self.strike(Trouble::ReplyLost, 0.1) {
            return;
        }
        let wait = self.rng.random_range(MS..50 * MS);
        self.at(wait, Event::Client(ClientEvent::Answer(call, answer)));
    }

    fn hear_answer(&mut self, id: u64, answer: Answer) {
        let Some(call) = self.clients.calls.remove(&id) else { return };
        self.tell(|| match &answer {
            Answer::Batch(batch) => format!("call {id} is answered: {} is {:?}", batch.id, batch.status()),
            answer => format!("call {id} is answered: {answer:?}"),
        });
        match (&call.ask, answer) {
            (_, Answer::Unavailable) => self.ask_again(call),
            (_, Answer::Refused(Refusal::Busy { .. } | Refusal::KeyReused | Refusal::Ended | Refusal::NoBatch)) => {}
            (Ask::Regrade { .. }, Answer::Refused(Refusal::StillRunning | Refusal::NothingToJudge)) => {}
            (ask, Answer::Refused(refusal)) => {
                let detail = format!("{ask:?} is refused: {refusal}");
                self.check::<()>(broken("nothing is refused without reason", detail));
            }
            (Ask::Start { organization, key, .. } | Ask::Regrade { organization, key, .. }, Answer::Started(batch)) => {
                let started = Fact::Started(batch.0);
                if self.disk.ledger.says(&started) && self.disk.ledger.key_of(&batch.0) != key.as_deref() {
                    self.check::<()>(broken("a key starts one batch", format!("{key:?} is answered with {batch}")));
                }
                let told = self.disk.tell(started, self.now);
                self.check(told);
                self.clients.known.push((*organization, batch));
            }
            (Ask::Cancel(_, batch), Answer::Cancelled) => {
                let told = self.disk.tell(Fact::Ended(batch.0), self.now);
                self.check(told);
            }
            (Ask::Get(_, batch), Answer::Batch(seen)) => {
                let result = self.hear_batch(batch.0, &seen, call.sent_at);
                self.check(result);
            }
            (Ask::Get(_, batch) | Ask::Regrade { batch, .. }, Answer::NotFound) => {
                let told = self.disk.told.get(&Fact::Started(batch.0)).is_some_and(|at| *at < call.sent_at);
                if told {
                    self.check::<()>(broken("an answer never goes back", format!("{batch} is not there")));
                }
            }
            (ask, answer) => {
                let detail = format!("{ask:?} is answered with {answer:?}");
                self.check::<()>(broken("the simulator is right", detail));
            }
        }
    }

    /// Everything that anybody was told before must be in the answer; and what is new in it is told now.
    fn hear_batch(&mut self, batch: [u8; 16], seen: &v1::Batch, sent_at: u64) -> Result<(), Violation> {
        let ended = seen.status() != BatchStatus::Running;
        let mut facts = vec![Fact::Started(batch)];
        for (run, seen) in (0..).zip(&seen.runs) {
            for trial in &seen.trials {
                if trial.outcome.is_some() {
                    facts.push(Fact::Settled(batch, run, trial.ordinal, trial.status));
                }
            }
            let counts = seen.distribution.unwrap_or_default();
            let whole = !ended || counts.trials as usize == seen.trials.len();
            if !whole || counts.trials != counts.scored + counts.voided {
                return broken("denominators are honest", format!("{counts:?}"));
            }
        }
        if ended {
            facts.push(Fact::Ended(batch));
        }
        let before = [Fact::Started(batch), Fact::Ended(batch)];
        let settled = Fact::Settled(batch, 0, 0, i32::MIN)..=Fact::Settled(batch, u32::MAX, u32::MAX, i32::MAX);
        let told = self.disk.told.range(settled).map(|(fact, at)| (fact, *at));
        let told = told.chain(before.iter().filter_map(|fact| Some((fact, *self.disk.told.get(fact)?))));
        for (fact, at) in told {
            if at < sent_at && !facts.contains(fact) {
                return broken(
                    "an answer never goes back",
                    format!("{fact:?} was told, and is not in a later answer"),
                );
            }
        }
        facts.into_iter().try_for_each(|fact| self.disk.tell(fact, self.now))
    }
}
