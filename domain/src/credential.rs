//! Which variables hold the credential of a harness, and the fields under which a client receives them (contract 2.9).

use std::collections::BTreeMap;

use crate::request::Harness;

/// How a harness signs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Method {
    /// `api-key`, or `none` where the harness has no key.
    pub id: &'static str,
    /// (variable, field of the credential). The first is the key itself, which must be set; the others may be.
    pub fields: &'static [(&'static str, &'static str)],
}

/// How a harness signs in by variables. Every base URL is the operator's way to a model server of his own.
pub fn method(harness: Harness) -> Method {
    let fields: &[(&str, &str)] = match harness {
        Harness::Command => {
            return Method { id: "none", fields: &[] };
        }
        Harness::Claude => &[("ANTHROPIC_API_KEY", "apiKey"), ("ANTHROPIC_BASE_URL", "baseUrl")],
        Harness::Codex => &[("OPENAI_API_KEY", "apiKey"), ("OPENAI_BASE_URL", "baseUrl")],
        Harness::Fx => &[("AI_GATEWAY_API_KEY", "apiKey")],
        Harness::Gemini => &[("GEMINI_API_KEY", "apiKey"), ("GOOGLE_GEMINI_BASE_URL", "baseUrl")],
        Harness::Cursor => &[("CURSOR_API_KEY", "apiKey")],
        Harness::Qwen => &[("DASHSCOPE_API_KEY", "apiKey"), ("QWEN_BASE_URL", "baseUrl")],
        // Ours: in the public API these sign in with subscriptions only, which this server has none of.
        Harness::Opencode => &[("OPENCODE_API_KEY", "apiKey"), ("OPENCODE_BASE_URL", "baseUrl")],
        Harness::Pi => &[("PI_API_KEY", "apiKey"), ("PI_BASE_URL", "baseUrl")],
        Harness::Bub => &[("BUB_API_KEY", "apiKey"), ("BUB_API_BASE", "baseUrl")],
    };
    Method { id: "api-key", fields }
}

/// The documented text of a credential that is not there.
pub fn missing(harness: Harness, variable: &str) -> String {
    missing_for(harness.name(), variable)
}

/// As [`missing`], of a harness or a provider.
pub fn missing_for(answerer: &str, variable: &str) -> String {
    format!("Set {variable} in Settings > Environment to run {answerer} (on this server: in the scheduler's own environment)")
}

impl Method {
    /// The credential's fields, from variables; the name of the one that is missing otherwise.
    pub fn values(&self, variables: &BTreeMap<String, String>) -> Result<BTreeMap<String, String>, &'static str> {
        if let Some((name, _)) = self.fields.first()
            && !variables.contains_key(*name)
        {
            return Err(name);
        }
        let set = self
            .fields
            .iter()
            .filter_map(|(name, field)| Some(((*field).to_owned(), variables.get(*name)?.clone())));
        Ok(set.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_come_from_variables() {
        let check = |harness: Harness, variables: &[(&str, &str)], expected: Result<&[(&str, &str)], &'static str>| {
            let variables = variables
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect();
            let expected = expected.map(|values| values.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect());
            assert_eq!(method(harness).values(&variables), expected, "{harness:?}");
        };
        check(Harness::Command, &[], Ok(&[]));
        check(Harness::Claude, &[], Err("ANTHROPIC_API_KEY"));
        check(
            Harness::Claude,
            &[("ANTHROPIC_API_KEY", "k"), ("OPENAI_API_KEY", "o")],
            Ok(&[("apiKey", "k")]),
        );
        check(Harness::Qwen, &[("DASHSCOPE_API_KEY", "k")], Ok(&[("apiKey", "k")]));
        check(
            Harness::Qwen,
            &[("DASHSCOPE_API_KEY", "k"), ("QWEN_BASE_URL", "u")],
            Ok(&[("apiKey", "k"), ("baseUrl", "u")]),
        );
        check(Harness::Qwen, &[("QWEN_BASE_URL", "u")], Err("DASHSCOPE_API_KEY"));
        check(Harness::Pi, &[], Err("PI_API_KEY"));
    }
}
