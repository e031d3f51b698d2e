//! Whether the model that an agent reports is the one that was asked for.
//!
//! The rule: a provider's prefix (`anthropic/`, `models/`), upper case, dots for dashes, the order of the name's parts, a context suffix (`[1m]`),
//! `-latest` and a date or three-digit build at the end (`-20251001`, `-2025-10-01`, `@20251001`, `-001`) make no difference. A name without
//! any digit is an alias (`sonnet`, `flash`): it stands for every model whose name has all of its parts; `default` and `auto` stand for any.

/// Are both the same model, by the rule above?
pub(crate) fn is_same(asked: &str, reported: &str) -> bool {
    let (asked, reported) = (parts(asked), parts(reported));
    if asked.is_empty() || asked == ["default"] || asked == ["auto"] {
        return true;
    }
    if !asked.iter().any(|part| part.bytes().any(|byte| byte.is_ascii_digit())) {
        return asked.iter().all(|part| reported.contains(part));
    }
    let sorted = |mut parts: Vec<String>| {
        parts.sort_unstable();
        parts
    };
    sorted(asked) == sorted(reported)
}

/// The parts of a name that tell models apart.
fn parts(name: &str) -> Vec<String> {
    let name = name.trim().to_lowercase();
    let name = name.rsplit('/').next().unwrap_or_default();
    let name = name.split('[').next().unwrap_or_default();
    let mut parts: Vec<String> = name
        .split(['-', '.', '@', ':', '_', ' '])
        .filter(|part| !part.is_empty())
        .map(str::to_owned)
        .collect();
    if parts.len() > 1 && parts.last().is_some_and(|last| last == "latest") {
        parts.pop();
    }
    let digits = |part: &String, length: usize| part.len() == length && part.bytes().all(|byte| byte.is_ascii_digit());
    match parts.as_slice() {
        [_, .., year, month, day] if digits(year, 4) && digits(month, 2) && digits(day, 2) => parts.truncate(parts.len() - 3),
        [_, .., last] if digits(last, 8) || digits(last, 3) => {
            parts.pop();
        }
        _ => {}
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_compared_by_the_rule() {
        for (asked, reported, same) in [
            ("gpt-5.5", "gpt-5.5", true),
            ("gpt-5.5", "gpt-5.5-2026-04-01", true),
            ("openai/gpt-5.5", "GPT-5.5", true),
            ("gpt-5.5", "gpt-5.5-mini", false),
            ("gpt-5.5", "gpt-5.4", false),
            ("anthropic/claude-sonnet-4.6", "claude-sonnet-4-6-20260217", true),
            ("claude-sonnet-4.6", "anthropic/claude-4.6-sonnet-20260217", true),
            ("claude-sonnet-4-6[1m]", "claude-sonnet-4-6", true),
            ("claude-sonnet-4-6", "claude-haiku-4-5", false),
            ("claude-opus-4@20250514", "claude-opus-4", true),
            ("sonnet", "claude-sonnet-4-6", true),
            ("sonnet", "claude-opus-4-6", false),
            ("default", "claude-opus-4-6", true),
            ("auto", "gemini-3-pro", true),
            ("gemini-2.5-flash", "models/gemini-2.5-flash-001", true),
            ("gemini-2.5-pro", "gemini-2.5-flash", false),
            ("gemini-3-pro-preview", "gemini-3-pro", false),
            ("qwen3-coder-plus-latest", "qwen3-coder-plus", true),
            ("fake-model", "fake-model", true),
            ("fake-model", "x", false),
            ("latest", "x-1", false),
            ("", "anything", true),
            ("gpt-5", "", false),
        ] {
            assert_eq!(is_same(asked, reported), same, "{asked} {reported}");
        }
    }
}
