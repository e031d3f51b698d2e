//! Providers of models that are called directly: what serves a simulated person, and where it is.
//!
//! All of them serve chat completions at `BASE/chat/completions`; OpenAI serves its responses API at `BASE/responses`, too.

use std::collections::BTreeMap;

/// The variable by which the operator names another model for simulated people (contract 2.6).
pub const USER_MODEL_VARIABLE: &str = "SPHYNX_USER_MODEL";

/// A provider of models.
#[derive(Debug, PartialEq, Eq)]
pub struct Provider {
    /// As it stands before the `/` of a model's name.
    pub id: &'static str,
    /// The variable that holds its key (contract 2.9).
    pub key: &'static str,
    /// Where it is, with its version.
    pub base_url: &'static str,
    /// The variable by which the operator names a server of his own.
    pub base_url_variable: &'static str,
    /// What comes behind the operator's URL: the harnesses that read the same variable put the version there themselves.
    suffix: &'static str,
}

/// The table of those whose own variables hold the whole URL.
const fn provider(id: &'static str, key: &'static str, base_url: &'static str, base_url_variable: &'static str) -> Provider {
    Provider {
        id,
        key,
        base_url,
        base_url_variable,
        suffix: "",
    }
}

/// All providers, in the order in which their keys are looked for where a model's name says nothing of its provider (documented).
pub static PROVIDERS: [Provider; 8] = [
    provider("openai", "OPENAI_API_KEY", "https://api.openai.com/v1", "OPENAI_BASE_URL"),
    Provider {
        id: "anthropic",
        key: "ANTHROPIC_API_KEY",
        base_url: "https://api.anthropic.com/v1",
        base_url_variable: "ANTHROPIC_BASE_URL",
        suffix: "/v1",
    },
    Provider {
        id: "google",
        key: "GEMINI_API_KEY",
        base_url: "https://generativelanguage.googleapis.com/v1beta/openai",
        base_url_variable: "GOOGLE_GEMINI_BASE_URL",
        suffix: "/v1beta/openai",
    },
    provider("xai", "XAI_API_KEY", "https://api.x.ai/v1", "XAI_BASE_URL"),
    provider("moonshotai", "MOONSHOT_API_KEY", "https://api.moonshot.ai/v1", "MOONSHOT_BASE_URL"),
    provider("deepseek", "DEEPSEEK_API_KEY", "https://api.deepseek.com/v1", "DEEPSEEK_BASE_URL"),
    provider("groq", "GROQ_API_KEY", "https://api.groq.com/openai/v1", "GROQ_BASE_URL"),
    provider(
        "openrouter",
        "OPENROUTER_API_KEY",
        "https://openrouter.ai/api/v1",
        "OPENROUTER_BASE_URL",
    ),
];

/// The provider of that id.
pub fn named(id: &str) -> Option<&'static Provider> {
    PROVIDERS.iter().find(|provider| provider.id == id)
}

impl Provider {
    /// Its credential: `apiKey`, and `baseUrl` without a slash at its end, which is always there. The name of the variable that is missing otherwise.
    pub fn credential(&self, variables: &BTreeMap<String, String>) -> Result<BTreeMap<String, String>, &'static str> {
        let key = variables.get(self.key).ok_or(self.key)?;
        let base_url = match variables.get(self.base_url_variable) {
            Some(url) => format!("{}{}", url.trim_end_matches('/'), self.suffix),
            None => self.base_url.to_owned(),
        };
        Ok([("apiKey".to_owned(), key.clone()), ("baseUrl".to_owned(), base_url)].into())
    }
}

/// Who serves a model, under which name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Its key is there.
    pub provider: &'static Provider,
    /// As the provider spells it.
    pub model: String,
}

/// The key of a model's provider is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", crate::credential::missing_for(.provider, .variable))]
pub struct Missing {
    /// Whose key.
    pub provider: &'static str,
    /// What should hold it.
    pub variable: &'static str,
}

/// Who serves a simulated person's model. What stands before the first `/` is a provider where it is a known one. Any other name is OpenAI's, or
/// belongs to the first provider whose key is there.
pub fn route(model: &str, variables: &BTreeMap<String, String>) -> Result<Route, Missing> {
    let prefixed = model.split_once('/').and_then(|(id, model)| Some((named(id)?, model)));
    let has_key = |provider: &&Provider| variables.contains_key(provider.key);
    let (provider, model) = prefixed.unwrap_or_else(|| (PROVIDERS.iter().find(has_key).unwrap_or(&PROVIDERS[0]), model));
    match has_key(&provider) {
        true => Ok(Route {
            provider,
            model: model.to_owned(),
        }),
        false => Err(Missing {
            provider: provider.id,
            variable: provider.key,
        }),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn variables(set: &[(&str, &str)]) -> BTreeMap<String, String> {
        set.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn models_find_their_provider() {
        fn check(model: &str, keys: &[&str], expected: Result<(&str, &str), &str>) {
            let keys: Vec<_> = keys.iter().map(|key| (*key, "k")).collect();
            let route = route(model, &variables(&keys));
            let found = match &route {
                Ok(route) => Ok((route.provider.id, route.model.as_str())),
                Err(missing) => Err(missing.variable),
            };
            assert_eq!(found, expected, "{model}");
        }
        check("gpt-5.4-mini", &["OPENAI_API_KEY"], Ok(("openai", "gpt-5.4-mini")));
        check("gpt-5.4-mini", &[], Err("OPENAI_API_KEY"));
        check("openai/gpt-5", &["OPENAI_API_KEY"], Ok(("openai", "gpt-5")));
        check("openai/gpt-5", &["GROQ_API_KEY"], Err("OPENAI_API_KEY"));
        check("google/gemini-3", &["GEMINI_API_KEY"], Ok(("google", "gemini-3")));
        check("moonshotai/k2", &["OPENAI_API_KEY"], Err("MOONSHOT_API_KEY"));
        check(
            "openrouter/openai/gpt-5",
            &["OPENROUTER_API_KEY"],
            Ok(("openrouter", "openai/gpt-5")),
        );
        check("meta/llama", &["OPENAI_API_KEY"], Ok(("openai", "meta/llama")));
        check("meta/llama", &["OPENROUTER_API_KEY"], Ok(("openrouter", "meta/llama")));
        check("small", &["GROQ_API_KEY", "XAI_API_KEY"], Ok(("xai", "small")));
        check("small", &["GROQ_API_KEY", "OPENAI_API_KEY"], Ok(("openai", "small")));
        check("OpenAI/gpt-5", &["OPENAI_API_KEY"], Ok(("openai", "OpenAI/gpt-5")));
        check("small", &["AI_GATEWAY_API_KEY"], Err("OPENAI_API_KEY"));
        assert_eq!(
            route("xai/grok", &variables(&[])).unwrap_err().to_string(),
            "Set XAI_API_KEY in Settings > Environment to run xai (on this server: in the scheduler's own environment)"
        );
    }

    #[test]
    fn credentials_say_where_the_provider_is() {
        fn check(id: &str, set: &[(&str, &str)], expected: Result<&str, &'static str>) {
            let credential = named(id).unwrap().credential(&variables(set));
            let expected = expected.map(|url| variables(&[("apiKey", "k"), ("baseUrl", url)]));
            assert_eq!(credential, expected, "{id} {set:?}");
        }
        check("openai", &[("OPENAI_API_KEY", "k")], Ok("https://api.openai.com/v1"));
        check(
            "openai",
            &[("OPENAI_API_KEY", "k"), ("OPENAI_BASE_URL", "http://h:1/v1/")],
            Ok("http://h:1/v1"),
        );
        check("openai", &[("OPENAI_BASE_URL", "http://h:1/v1")], Err("OPENAI_API_KEY"));
        check(
            "anthropic",
            &[("ANTHROPIC_API_KEY", "k"), ("ANTHROPIC_BASE_URL", "http://h:1")],
            Ok("http://h:1/v1"),
        );
        check(
            "google",
            &[("GEMINI_API_KEY", "k"), ("GOOGLE_GEMINI_BASE_URL", "http://h:1/")],
            Ok("http://h:1/v1beta/openai"),
        );
        check("groq", &[("GROQ_API_KEY", "k")], Ok("https://api.groq.com/openai/v1"));
        check("xai", &[("XAI_API_KEY", "k"), ("XAI_BASE_URL", "http://h/x")], Ok("http://h/x"));
    }

    #[test]
    fn the_table_is_sound() {
        for (at, provider) in PROVIDERS.iter().enumerate() {
            assert_eq!(named(provider.id).map(|found| found.id), Some(provider.id));
            assert!(
                PROVIDERS[..at]
                    .iter()
                    .all(|other| other.key != provider.key && other.base_url_variable != provider.base_url_variable)
            );
            assert!(provider.base_url.starts_with("https://") && !provider.base_url.ends_with('/'));
            assert!(provider.base_url.ends_with(provider.suffix));
        }
        assert_eq!(named("other"), None);
    }
}
