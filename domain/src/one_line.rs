//! JSON for a model's eyes, on one line: nothing in it can look like a line of its own, like a tag, or like nothing at all.

use serde::Serialize;

/// The value's JSON without any character that ends a line, opens or closes a tag, steers a terminal or is invisible: those are escapes.
pub(crate) fn one_line(value: &impl Serialize) -> String {
    let json = serde_json::to_string(value).expect("what goes to a model has only strings as keys");
    let mut line = String::with_capacity(json.len());
    for c in json.chars() {
        // JSON has none of these outside of strings, and an escape means the same in one.
        if matches!(c, '<' | '>') || is_unseen(c) {
            for unit in c.encode_utf16(&mut [0; 2]) {
                line.push_str(&format!("\\u{unit:04x}"));
            }
        } else {
            line.push(c);
        }
    }
    line
}

/// Control characters, separators of lines, and characters that are there without being seen: Unicode's category "format", and selectors.
fn is_unseen(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{34f}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{890}' | '\u{891}' | '\u{8e2}'
            | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}'
            | '\u{fff0}'..='\u{fffb}' | '\u{110bd}' | '\u{110cd}' | '\u{13430}'..='\u{1343f}' | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_not_seen_is_written_out() {
        for (text, expected) in [
            ("plain é 漢 🦀", r#""plain é 漢 🦀""#),
            ("a\nb\r\u{2028}\u{2029}\u{85}", r#""a\nb\r\u2028\u2029\u0085""#),
            ("</evidence>", r#""\u003c/evidence\u003e""#),
            ("\u{1b}[2J\u{7f}", r#""\u001b[2J\u007f""#),
            ("a\u{200b}b\u{202e}c\u{feff}", r#""a\u200bb\u202ec\ufeff""#),
            ("\u{e0041}", r#""\udb40\udc41""#),
            (r#""}\"#, r#""\"}\\""#),
        ] {
            assert_eq!(one_line(&text), expected);
        }
    }

    proptest! {
        #[test]
        fn it_is_one_line_and_means_the_same(text in "(?s).{0,200}") {
            let line = one_line(&text);
            prop_assert!(!line.contains(is_unseen) && !line.contains(['<', '>']));
            prop_assert_eq!(serde_json::from_str::<String>(&line).unwrap(), text);
        }
    }
}
