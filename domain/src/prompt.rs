//! Filling in a prompt's placeholders.
//!
//! A placeholder is `{{ name }}`, with or without inner spaces; a name begins with a letter, then letters, digits, `_` or `.`. A name without
//! a value stays as it is written. One pass: what a value holds is not looked at again.

use std::collections::BTreeMap;

/// The prompt with its variables filled in.
pub fn render(template: &str, variables: &BTreeMap<String, String>) -> String {
    let mut text = String::with_capacity(template.len());
    each_part(template, variables, |part| text.push_str(part));
    text
}

/// The bytes of what [`render`] would give, without making it.
pub fn rendered_len(template: &str, variables: &BTreeMap<String, String>) -> usize {
    let mut length = 0;
    each_part(template, variables, |part| length += part.len());
    length
}

fn each_part<'a>(template: &'a str, variables: &'a BTreeMap<String, String>, mut part: impl FnMut(&'a str)) {
    let mut rest = template;
    while let Some(start) = rest.find("{{") {
        part(&rest[..start]);
        rest = &rest[start..];
        let known = placeholder(rest).and_then(|(name, end)| Some((variables.get(name)?, end)));
        match known {
            Some((value, end)) => {
                part(value);
                rest = &rest[end..];
            }
            // Only one brace on: `{{{ name }}` holds a placeholder from its second brace.
            None => {
                part("{");
                rest = &rest[1..];
            }
        }
    }
    part(rest);
}

/// The name of the placeholder that `text` begins with, and where it ends.
fn placeholder(text: &str) -> Option<(&str, usize)> {
    let inner = text.strip_prefix("{{")?.trim_start_matches(is_space);
    let end = inner
        .find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '.'))
        .unwrap_or(inner.len());
    let (name, after) = inner.split_at(end);
    let after = after.trim_start_matches(is_space).strip_prefix("}}")?;
    name.starts_with(|c: char| c.is_ascii_alphabetic())
        .then_some((name, text.len() - after.len()))
}

fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\r' | '\n')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn variables() -> BTreeMap<String, String> {
        [("a", "1"), ("user.name", "Ann"), ("x_2", "{{ a }}"), ("empty", "")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into()
    }

    #[test]
    fn renders() {
        for (template, expected) in [
            ("", ""),
            ("no names", "no names"),
            ("{{a}}{{ a }}{{   a\t}}", "111"),
            ("Hi {{ user.name }}!", "Hi Ann!"),
            ("{{ x_2 }}", "{{ a }}"),
            ("<{{ empty }}>", "<>"),
            ("{{ b }} {{ a", "{{ b }} {{ a"),
            ("{{{ a }}}", "{1}"),
            ("{{{{a}}}}", "{{1}}"),
            ("{{ 1a }} {{ .a }} {{}} {{ a b }}", "{{ 1a }} {{ .a }} {{}} {{ a b }}"),
            ("é{{ é }}{{a}}é", "é{{ é }}1é"),
        ] {
            assert_eq!(render(template, &variables()), expected, "{template}");
            assert_eq!(rendered_len(template, &variables()), expected.len(), "{template}");
        }
    }

    proptest! {
        #[test]
        fn without_variables_nothing_changes(template in "[{} a.é]{0,40}") {
            prop_assert_eq!(render(&template, &BTreeMap::new()), template);
        }
    }
}
