//! Models that can be asked for, by harness: what `evals.models.list` answers.
//!
//! The names are those that the pinned version of each agent knows itself (harness/src). A list for people who choose, never a rule: a variant's
//! model goes to the agent as it stands, and a model server of one's own has names of its own.

use crate::request::Harness;

const OPENAI: &[&str] = &[
    "gpt-6.2-sol",
    "gpt-6.1-sol",
    "gpt-6.1-terra",
    "gpt-6-sol",
    "gpt-6-luna",
    "gpt-5.6-sol",
    "gpt-5.6-terra",
    "gpt-5.6-luna",
    "gpt-5.5",
];
const ANTHROPIC: &[&str] = &[
    "claude-sonnet-5",
    "claude-opus-4-8",
    "claude-opus-4-7",
    "claude-opus-4-6",
    "claude-sonnet-4-6",
    "claude-haiku-4-5",
];
const GOOGLE: &[&str] = &[
    "gemini-3.1-pro-preview",
    "gemini-3-pro-preview",
    "gemini-3-flash-preview",
    "gemini-2.5-pro",
    "gemini-2.5-flash",
    "gemini-2.5-flash-lite",
];
const QWEN: &[&str] = &["qwen3.6-plus", "qwen3.5-plus", "qwen3-coder-plus", "qwen3-coder-next"];

/// A model as a client sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CatalogueModel {
    /// What a variant's `model` says.
    pub id: String,
    /// For people.
    pub display_name: String,
    /// Who makes it.
    pub vendor: &'static str,
}

/// The models of a harness whose id or name holds `query`, in whatever case; all where it is empty. None for `command`, whose models are its own.
pub fn catalogue(harness: Harness, query: &str) -> Vec<CatalogueModel> {
    // Some agents are one vendor's; the others take any, with the vendor before the name.
    let (vendors, separator): (&[(&'static str, &[&'static str])], Option<&str>) = match harness {
        Harness::Codex => (&[("openai", OPENAI)], None),
        Harness::Claude => (&[("anthropic", ANTHROPIC)], None),
        Harness::Gemini => (&[("google", GOOGLE)], None),
        Harness::Qwen => (&[("qwen", QWEN)], None),
        Harness::Opencode | Harness::Pi => (&[("anthropic", ANTHROPIC), ("google", GOOGLE), ("openai", OPENAI)], Some("/")),
        Harness::Bub => (&[("anthropic", ANTHROPIC), ("google", GOOGLE), ("openai", OPENAI)], Some(":")),
        Harness::Cursor | Harness::Fx | Harness::Command => (&[], None),
    };
    let models = vendors
        .iter()
        .flat_map(|(vendor, names)| names.iter().map(move |name| (*vendor, *name)));
    let shown = models.map(|(vendor, name)| CatalogueModel {
        id: separator.map_or_else(|| name.to_owned(), |separator| format!("{vendor}{separator}{name}")),
        display_name: display_name(name),
        vendor,
    });
    let query = query.trim().to_lowercase();
    shown
        .filter(|model| model.id.contains(&query) || model.display_name.to_lowercase().contains(&query))
        .collect()
}

/// `claude-sonnet-5` as `Claude Sonnet 5`.
fn display_name(name: &str) -> String {
    let words = name.split('-').map(|word| match word {
        "gpt" => "GPT".to_owned(),
        _ => {
            let mut letters = word.chars();
            letters
                .next()
                .map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
        }
    });
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_by_harness() {
        let check = |harness: Harness, query: &str, expected: &[&str]| {
            let found = catalogue(harness, query);
            assert_eq!(
                found.iter().map(|model| model.id.as_str()).collect::<Vec<_>>(),
                expected,
                "{harness:?} {query:?}"
            );
        };
        check(Harness::Claude, "sonnet", &["claude-sonnet-5", "claude-sonnet-4-6"]);
        check(Harness::Claude, " Claude SONNET 5 ", &["claude-sonnet-5"]);
        check(Harness::Opencode, "sonnet-5", &["anthropic/claude-sonnet-5"]);
        check(Harness::Bub, "gpt-5.5", &["openai:gpt-5.5"]);
        check(Harness::Codex, "claude", &[]);
        check(Harness::Command, "", &[]);
        assert!(catalogue(Harness::Gemini, "").len() > 3);
        assert_eq!(display_name("gpt-5.6-sol"), "GPT 5.6 Sol");
    }
}
