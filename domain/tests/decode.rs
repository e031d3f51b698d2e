//! Bytes to JSON: what is refused before a tree is built, and how lengths are counted.
#![allow(clippy::unwrap_used)]

use evalgrid_domain::{
    decode::{DecodeError, parse_json, utf16_len},
    limits::{MAX_JSON_DEPTH, MAX_JSON_VALUES},
};
use proptest::prelude::*;
use serde_json::{Value, json};

#[test]
fn documents() {
    for (text, expected) in [
        ("{}", json!({})),
        (" [1, 2.0, \"a\\u00e9\"] ", json!([1, 2.0, "aé"])),
        (r#"{"a":1,"a":2}"#, json!({"a": 2})),
        (r#"{"a":"[[[[{{{{\"]]"}"#, json!({"a": "[[[[{{{{\"]]"})),
        ("\"\\u0000\"", json!("\0")),
    ] {
        assert_eq!(parse_json(text.as_bytes(), 64).unwrap(), expected, "{text}");
    }
}

#[test]
fn not_json() {
    for text in [
        "",
        " ",
        "{",
        "[1,]",
        "{\"a\" 1}",
        "nul",
        "[1] 2",
        "'a'",
        "{\"a\":}",
        "\"\\ud800\"",
        "]]",
        "\u{feff}{}",
        "1e999",
        "\"",
        "\"a\nb\"",
    ] {
        let error = parse_json(text.as_bytes(), 64).unwrap_err();
        let DecodeError::NotJson { line, message, .. } = &error else {
            panic!("{text}: {error}")
        };
        assert!(*line <= 2 && !message.contains(" at line"), "{error}");
    }
    let error = parse_json(b"{\n  \"a\": x\n}", 64).unwrap_err().to_string();
    assert_eq!(error, "The body is not JSON: expected value at line 2, column 8");
    assert_eq!(parse_json(b"{\"a\":\"\xff\"}", 64), Err(DecodeError::NotUtf8 { offset: 6 }));
}

#[test]
fn depth_and_size() {
    let nested = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
    assert!(parse_json(nested(MAX_JSON_DEPTH).as_bytes(), MAX_JSON_DEPTH).is_ok());
    for depth in [MAX_JSON_DEPTH + 1, 10_000_000] {
        assert_eq!(
            parse_json(nested(depth).as_bytes(), MAX_JSON_DEPTH),
            Err(DecodeError::TooDeep { limit: 64 })
        );
        assert_eq!(
            parse_json("{\"a\":".repeat(depth).as_bytes(), MAX_JSON_DEPTH),
            Err(DecodeError::TooDeep { limit: 64 })
        );
    }
    let wide = format!("[{}0]", "0,".repeat(MAX_JSON_VALUES));
    assert_eq!(
        parse_json(wide.as_bytes(), MAX_JSON_DEPTH),
        Err(DecodeError::TooManyValues { limit: MAX_JSON_VALUES })
    );
}

#[test]
fn lengths_are_javascripts() {
    for (text, length) in [("", 0), ("a", 1), ("é", 1), ("€", 1), ("😀", 2), ("a😀é", 4)] {
        assert_eq!(utf16_len(text), length);
    }
}

proptest! {
    #[test]
    fn lengths(text in "\\PC{0,40}") {
        prop_assert_eq!(utf16_len(&text), text.encode_utf16().count());
    }

    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse_json(&bytes, 8);
    }

    #[test]
    fn accepts_what_serde_accepts(text in "[\\[\\]{}:,\"a1 \\\\]{0,40}") {
        let plain = serde_json::from_str::<Value>(&text).ok();
        prop_assert_eq!(parse_json(text.as_bytes(), 64).ok(), plain);
    }
}
