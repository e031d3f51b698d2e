//! How much may run at once, and how fast sandboxes may be made: per provider account, and per model key.
//!
//! Holders are sets, never counters: a provider's sandboxes are those in custody, a model key's holders are the tokens of living leases. Both
//! follow from events, so what crashed never holds a place for ever, and letting go twice lets go once. The limits themselves are the
//! operator's; they are no events, and decide only what is dispatched next.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use evalgrid_proto::v1::VariantInfo;

use crate::{
    faults::{self, Fault},
    state::TrialKey,
};

/// The times of a provider's newest sandboxes that are remembered: a bucket holds no more, so more would say nothing.
pub const MAX_CREATE_BURST: u32 = 1_024;
/// What a provider of models may ask for with a 429 is believed up to here: longer, and a trial would rather be tried and refused again.
pub const MAX_RETRY_AFTER_MS: u64 = 600_000;
/// And from here: a refusal that names no time, or none at all, is no leave to ask again at once.
pub const MIN_RETRY_AFTER_MS: u64 = 1_000;
/// After its time is over, the limit of a model key that was cut grows by one in this time.
pub const RECOVERY_STEP_MS: u64 = 1_000;
/// A cut that has grown up to here no longer limits anything: more trials than a cell runs at once.
const FORGOTTEN_LIMIT: u32 = 100_000;

/// Of one provider account.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProviderLimits {
    /// Sandboxes that may be made per second, for long.
    pub create_per_second: f64,
    /// And at once, after a pause: from 1 to [`MAX_CREATE_BURST`].
    pub create_burst: u32,
    /// Sandboxes asked for of which there is no sign yet.
    pub max_starting: u32,
    /// Sandboxes in custody: intended, living, or not proven gone.
    pub max_living: u32,
}

/// Of all.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Limits {
    /// By the provider's name. One that is not named has no limit.
    pub providers: BTreeMap<String, ProviderLimits>,
    /// Trials at once by [`model_key`]. One that is not named has no limit until its provider refuses.
    pub models: BTreeMap<String, u32>,
}

/// Whose limits a variant's model counts toward: the harness, and the model's name up to its first slash (`command/anthropic` for the model
/// `anthropic/large` of the command harness).
pub fn model_key(variant: &VariantInfo) -> String {
    let provider = variant.model.split('/').next().unwrap_or_default();
    format!("{}/{provider}", variant.harness)
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub(crate) struct Admission {
    limits: Limits,
    providers: BTreeMap<String, Provider>,
    models: BTreeMap<String, Model>,
}

#[derive(Clone, Debug, Default)]
struct Provider {
    /// Sandboxes whose lease is held and of which there is no sign yet.
    starting: BTreeSet<String>,
    /// Sandboxes in custody.
    living: BTreeSet<String>,
    /// Trials that have one of them, and whose person is a harness and needs another one.
    talking: BTreeSet<TrialKey>,
    /// When the newest ones were asked for, milliseconds since the epoch.
    recent: VecDeque<u64>,
    /// When the bucket is full again, microseconds since the epoch. Kept only under a limit.
    full_at_us: u64,
}

#[derive(Clone, Debug, Default)]
struct Model {
    /// Tokens of living leases.
    holders: BTreeSet<u64>,
    cut: Option<Cut>,
}

/// What is left of a limit after a refusal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    pub limit: u32,
    pub until_ms: u64,
}

impl ProviderLimits {
    fn interval_us(&self) -> u64 {
        (1e6 / self.create_per_second).ceil() as u64
    }

    fn fill(&self, full_at_us: u64, created_ms: u64) -> u64 {
        full_at_us.max(created_ms * 1_000) + self.interval_us()
    }

    /// When the bucket has one more to give, milliseconds since the epoch.
    fn opens_ms(&self, full_at_us: u64) -> u64 {
        let room = self.interval_us() * u64::from(self.create_burst.saturating_sub(1));
        full_at_us.saturating_sub(room).div_ceil(1_000)
    }
}

impl Cut {
    fn limit_at(self, now_ms: u64) -> u32 {
        let grown = now_ms.saturating_sub(self.until_ms) / RECOVERY_STEP_MS;
        self.limit.saturating_add(u32::try_from(grown).unwrap_or(u32::MAX))
    }
}

impl Admission {
    /// Puts limits in force. What was asked for lately counts.
    pub fn configure(&mut self, limits: Limits) {
        self.limits = limits;
        for (name, limits) in &self.limits.providers {
            if let Some(provider) = self.providers.get_mut(name) {
                provider.full_at_us = provider.recent.iter().fold(0, |full_at_us, at_ms| limits.fill(full_at_us, *at_ms));
            }
        }
    }

    /// A sandbox is in custody from here on.
    pub fn lives(&mut self, provider: &str, sandbox: &str) {
        self.provider(provider).living.insert(sandbox.to_owned());
    }

    /// A trial has a sandbox, and its person will need one, too.
    pub fn talks(&mut self, provider: &str, trial: TrialKey) {
        self.provider(provider).talking.insert(trial);
    }

    /// The trial has come to its end, or its sandbox is lost.
    pub fn talks_no_more(&mut self, trial: TrialKey) {
        for provider in self.providers.values_mut() {
            provider.talking.remove(&trial);
        }
    }

    /// One is to be made now.
    pub fn asked_for(&mut self, name: &str, at_ms: u64) {
        let limits = self.limits.providers.get(name).copied();
        let provider = self.provider(name);
        if provider.recent.len() >= MAX_CREATE_BURST as usize {
            provider.recent.pop_front();
        }
        provider.recent.push_back(at_ms);
        if let Some(limits) = limits {
            provider.full_at_us = limits.fill(provider.full_at_us, at_ms);
        }
    }

    fn provider(&mut self, name: &str) -> &mut Provider {
        self.providers.entry(name.to_owned()).or_default()
    }

    /// Somebody is making it.
    pub fn starting(&mut self, provider: &str, sandbox: &str) {
        if let Some(provider) = self.providers.get_mut(provider) {
            provider.starting.insert(sandbox.to_owned());
        }
    }

    /// It is there, or nobody is making it any more.
    pub fn started(&mut self, provider: &str, sandbox: &str) {
        if let Some(provider) = self.providers.get_mut(provider) {
            provider.starting.remove(sandbox);
        }
    }

    /// It is gone.
    pub fn gone(&mut self, provider: &str, sandbox: &str) {
        if let Some(provider) = self.providers.get_mut(provider) {
            provider.starting.remove(sandbox);
            provider.living.remove(sandbox);
        }
    }

    /// A lease of this token runs on the model key.
    pub fn hold(&mut self, model_key: &str, token: u64) {
        if !self.models.contains_key(model_key) {
            self.models.insert(model_key.to_owned(), Model::default());
        }
        if let Some(model) = self.models.get_mut(model_key) {
            model.holders.insert(token);
        }
    }

    /// And no longer does.
    pub fn release(&mut self, model_key: &str, token: u64) {
        if let Some(model) = self.models.get_mut(model_key) {
            model.holders.remove(&token);
            if model.holders.is_empty() && model.cut.is_none() {
                self.models.remove(model_key);
            }
        }
    }

    /// The model's provider has refused one of the holders. A burst of refusals is one: until its time is over, the limit is cut once.
    pub fn throttled(&mut self, model_key: &str, until_ms: u64, at_ms: u64) {
        self.models
            .retain(|_, model| !model.holders.is_empty() || model.cut.is_some_and(|cut| cut.limit_at(at_ms) < FORGOTTEN_LIMIT));
        let model = self.models.entry(model_key.to_owned()).or_default();
        let holders = u32::try_from(model.holders.len()).unwrap_or(u32::MAX);
        let limit = match model.cut {
            Some(cut) if at_ms < cut.until_ms => cut.limit,
            Some(cut) => holders.min(cut.limit_at(at_ms)) / 2,
            None => holders / 2,
        };
        let until_ms = model.cut.map_or(until_ms, |cut| cut.until_ms.max(until_ms));
        model.cut = Some(Cut {
            limit: limit.max(1),
            until_ms,
        });
    }

    /// Whether one more sandbox of the provider may be asked for: for a trial, or for a judge or a person (`answers`).
    pub fn provider_open(&self, name: &str, answers: bool, now_ms: u64) -> bool {
        let Some(limits) = self.limits.providers.get(name) else {
            return true;
        };
        let Some(provider) = self.providers.get(name) else { return true };
        // Trials wait in their sandboxes for people who need sandboxes of their own. One place stays free for these, or all would wait for all;
        // and where there is but one place, there are two for this.
        let silent = provider.talking.is_empty() || faults::active(Fault::NoPlaceForPeople);
        let places = match (silent, answers) {
            (true, _) => limits.max_living,
            (false, true) => limits.max_living.max(2),
            (false, false) => limits.max_living.saturating_sub(1),
        };
        provider.starting.len() < limits.max_starting as usize
            && provider.living.len() < places as usize
            && limits.opens_ms(provider.full_at_us) <= now_ms
    }

    /// Whether one more trial may run on the model key.
    pub fn model_open(&self, model_key: &str, now_ms: u64) -> bool {
        let configured = self.limits.models.get(model_key).copied().unwrap_or(u32::MAX);
        let Some(model) = self.models.get(model_key) else {
            return configured > 0;
        };
        let cut = model.cut.map_or(u32::MAX, |cut| cut.limit_at(now_ms));
        model.holders.len() < configured.min(cut) as usize
    }

    /// When time alone opens something that is closed at `now_ms`.
    pub fn next_opening_ms(&self, now_ms: u64) -> Option<u64> {
        let buckets = self.limits.providers.iter().filter_map(|(name, limits)| {
            let opens_ms = limits.opens_ms(self.providers.get(name)?.full_at_us);
            (opens_ms > now_ms).then_some(opens_ms)
        });
        let models = self.models.iter().filter(|(name, _)| !self.model_open(name, now_ms));
        let steps = models.filter_map(|(_, model)| {
            let until_ms = model.cut?.until_ms;
            let grown = now_ms.saturating_sub(until_ms) / RECOVERY_STEP_MS;
            Some(until_ms + (grown + 1) * RECOVERY_STEP_MS)
        });
        buckets.chain(steps).min()
    }

    /// When the newest sandboxes of each provider were asked for: what a bucket must know after the log's records are gone.
    pub fn recent(&self) -> impl Iterator<Item = (&str, &VecDeque<u64>)> {
        self.providers.iter().map(|(name, provider)| (name.as_str(), &provider.recent))
    }

    /// Takes back what [`Admission::recent`] gave, before limits are put in force.
    pub fn restore_recent(&mut self, name: &str, recent_ms: &[u64]) {
        self.provider(name).recent = recent_ms.iter().copied().collect();
    }

    /// Model keys whose provider has refused.
    pub fn cuts(&self) -> impl Iterator<Item = (&str, Cut)> {
        self.models.iter().filter_map(|(name, model)| Some((name.as_str(), model.cut?)))
    }

    /// Takes back what [`Admission::cuts`] gave.
    pub fn restore_cut(&mut self, model_key: &str, cut: Cut) {
        self.models.entry(model_key.to_owned()).or_default().cut = Some(cut);
    }

    /// Sandboxes of a provider: being made, and in custody.
    pub fn counts(&self, provider: &str) -> (usize, usize) {
        self.providers
            .get(provider)
            .map_or((0, 0), |provider| (provider.starting.len(), provider.living.len()))
    }

    /// Trials that run on a model key.
    pub fn holders(&self, model_key: &str) -> usize {
        self.models.get(model_key).map_or(0, |model| model.holders.len())
    }
}
