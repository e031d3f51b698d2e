//! Cutting texts whose lengths count in UTF-16 code units, never inside a character.

use std::borrow::Cow;

use crate::decode::utf16_len;

/// Cuts a text to at most `max` UTF-16 code units without splitting a character. True: it was cut.
pub fn cut(text: &mut String, max: usize) -> bool {
    let end = prefix(text, max).len();
    let longer = end < text.len();
    if longer {
        text.truncate(end);
        // A cut text keeps no more memory than it needs: there are thousands of them.
        text.shrink_to_fit();
    }
    longer
}

/// What stands in the place of the middle of a text has at most this many characters.
const MIDDLE_MARK: usize = 64;

/// The text, without its middle where it is longer than `max` UTF-16 code units: both ends tell more than one alone. `max` must be above 64.
pub(crate) fn cut_middle(text: &str, max: usize) -> Cow<'_, str> {
    let length = utf16_len(text);
    if length <= max {
        return Cow::Borrowed(text);
    }
    let half = (max - MIDDLE_MARK) / 2;
    let (start, end) = (prefix(text, half), suffix(text, half));
    let left_out = length - utf16_len(start) - utf16_len(end);
    Cow::Owned(format!("{start}\n[{left_out} characters were left out here]\n{end}"))
}

/// The longest beginning of at most `max` UTF-16 code units.
pub(crate) fn prefix(text: &str, max: usize) -> &str {
    let mut length = 0;
    let end = text.char_indices().find(|(_, c)| {
        length += c.len_utf16();
        length > max
    });
    end.map_or(text, |(end, _)| &text[..end])
}

fn suffix(text: &str, max: usize) -> &str {
    let mut length = 0;
    let before = text.char_indices().rev().find(|(_, c)| {
        length += c.len_utf16();
        length > max
    });
    before.map_or(text, |(at, c)| &text[at + c.len_utf8()..])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_middle_goes() {
        let long = format!("{}{}", "a".repeat(100), "é".repeat(100));
        let cut = format!("{}\n[152 characters were left out here]\n{}", "a".repeat(24), "é".repeat(24));
        for (text, max, expected) in [("", 100, ""), (&long, 200, &long), (&long, 112, &cut), ("🦀", 100, "🦀")] {
            assert_eq!(cut_middle(text, max), expected);
        }
    }

    proptest! {
        #[test]
        fn cuts_keep_their_limits(text in "(?s).{0,300}", max in 65usize..300) {
            let kept = cut_middle(&text, max);
            prop_assert!(utf16_len(&kept) <= max);
            prop_assert!(utf16_len(&text) > max || kept == text);
            let start = prefix(&text, max);
            prop_assert!(text.starts_with(start) && utf16_len(start) <= max && utf16_len(start) + 1 >= max.min(utf16_len(&text)));
        }
    }
}
