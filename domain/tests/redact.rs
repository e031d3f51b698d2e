//! Redaction: each shape, what is not one, exact values, and that a cut leaves no piece of a secret.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use evalgrid_domain::{
    evidence::cut,
    redact::{REDACTED, Redactor, is_secret_variable, is_token_shaped},
};
use serde_json::json;

fn check(redactor: &Redactor, text: &str, expected: &str) {
    let clean = redactor.text(text);
    assert_eq!(clean, expected, "{text}");
    assert_eq!(redactor.text(&clean), expected, "twice: {text}");
}

#[test]
fn shapes() {
    let shapes = Redactor::default();
    let (a10, a16, a20, a35) = ("a".repeat(10), "a".repeat(16), "a".repeat(20), "a".repeat(35));
    let (upper, jwt) = ("A1".repeat(8), format!("eyJ{a10}.{a10}.{a10}-_"));
    for secret in [
        format!("sk-{a20}1"),
        format!("sk-proj-{a20}_1-x"),
        format!("sk_live_{a10}"),
        format!("sk_test_{a10}"),
        format!("rk_live_{a10}"),
        format!("rk_test_{a10}"),
        "am_sk_x".to_owned(),
        format!("anp_{a16}"),
        format!("ghp_{a20}"),
        format!("gho_{a20}"),
        format!("ghu_{a20}"),
        format!("ghs_{a20}"),
        format!("ghr_{a20}"),
        format!("github_pat_{a20}"),
        format!("xoxb-{a10}"),
        format!("xoxe-{a10}"),
        format!("AKIA{upper}"),
        format!("ASIA{upper}"),
        format!("AIza{a35}"),
        jwt.clone(),
    ] {
        for (before, after) in [
            ("", ""),
            (" ", " "),
            ("\"", "\""),
            ("key=", ";"),
            ("\n", "\n"),
            ("\\n", "\\n"),
            ("%3D", "&"),
            ("\x1b[31m", "\x1b[0m"),
            ("é", "é"),
            ("\\u001b[1;31m", ""),
        ] {
            check(&shapes, &format!("{before}{secret}{after}"), &format!("{before}{REDACTED}{after}"));
        }
        // Part of a longer word.
        for before in ["x", "9", "_", "-", "31m"] {
            let text = format!("{before}{secret}");
            check(&shapes, &text, &text);
        }
        // One character short is no secret, nor is half of it.
        check(&shapes, &secret[..secret.len() / 2], &secret[..secret.len() / 2]);
    }
    for text in [
        "".to_owned(),
        format!("sk-{a20}"),
        "sk-1".to_owned(),
        format!("sk_live_{}", &a10[1..]),
        "am_sk_".to_owned(),
        format!("anp_{}", &a16[1..]),
        format!("ghp_{}", &a20[1..]),
        format!("ghx_{a20}"),
        format!("github_pat_{}", &a20[1..]),
        format!("xoxz-{a10}"),
        format!("AKIA{}", &upper[1..]),
        format!("AKIA{}", "a".repeat(16)),
        format!("AIza{}", &a35[1..]),
        "eyJabcde.aaaaaaaa".to_owned(),
        "eyJabcde.aaaaaaaa.aaaaaaa".to_owned(),
        "task-force of risk-averse masks".to_owned(),
        "Bearer of good news, with 12 apples".to_owned(),
        "Bearer short1".to_owned(),
        format!("Bearer {a20}"),
        "https://host/path:x@y".to_owned(),
        "https://user@host".to_owned(),
        "https://user:@host".to_owned(),
        "://user:pw@host".to_owned(),
        "-----BEGIN CERTIFICATE-----\nMII\n-----END CERTIFICATE-----".to_owned(),
    ] {
        check(&shapes, &text, &text);
    }
}

#[test]
fn shapes_in_context() {
    let shapes = Redactor::default();
    let token = "abcdefgh12345678.x~y+z/==";
    let pem = "-----BEGIN RSA PRIVATE KEY-----\nMIIEabc+/=\n-----END RSA PRIVATE KEY-----";
    let open_pem = "-----BEGIN PRIVATE KEY-----\nMIIE\nabc";
    for (text, expected) in [
        (
            format!("Authorization: Bearer {token}\n"),
            "Authorization: Bearer [redacted]\n".to_owned(),
        ),
        (
            format!("{{\"authorization\":\"bearer {token}\"}}"),
            "{\"authorization\":\"bearer [redacted]\"}".to_owned(),
        ),
        (format!("BEARER \t{token},x"), "BEARER \t[redacted],x".to_owned()),
        ("postgres://user:p@ss/w".to_owned(), "postgres://user:[redacted]@ss/w".to_owned()),
        (
            "postgres://user:p@ss@host/db?x=1".to_owned(),
            "postgres://user:[redacted]@host/db?x=1".to_owned(),
        ),
        (
            "git clone https://x:letters@h/r.git".to_owned(),
            "git clone https://x:[redacted]@h/r.git".to_owned(),
        ),
        ("https://:secret@host".to_owned(), "https://:[redacted]@host".to_owned()),
        // The spaces of the block hide the URL until the block is gone.
        (
            format!("https://u:{open_pem}-----END PRIVATE KEY-----pw@h"),
            "https://u:[redacted]@h".to_owned(),
        ),
        (
            format!("https://ghp_{}:x-oauth-basic@h", "a".repeat(20)),
            "https://[redacted]:[redacted]@h".to_owned(),
        ),
        (format!("https://ghp_{}@h", "a".repeat(20)), "https://[redacted]@h".to_owned()),
        (format!("a\n{pem}\nb"), "a\n[redacted]\nb".to_owned()),
        (
            format!("{{\"k\":\"{}\"}}", pem.replace('\n', "\\n")),
            "{\"k\":\"[redacted]\"}".to_owned(),
        ),
        (format!("{pem}{pem}"), "[redacted][redacted]".to_owned()),
        (format!("{open_pem}\u{1} rest"), "[redacted]\u{1} rest".to_owned()),
        (
            "-----BEGIN PGP PRIVATE KEY BLOCK-----\nx!\n-----END PGP PRIVATE KEY BLOCK-----;".to_owned(),
            "[redacted];".to_owned(),
        ),
        (format!("{pem}sk-{}1", "a".repeat(20)), "[redacted][redacted]".to_owned()),
        (format!("AKIA{}_tail-x y", "A1".repeat(8)), "[redacted] y".to_owned()),
        (format!("ghp_{0} ghp_{0}", "a".repeat(20)), "[redacted] [redacted]".to_owned()),
    ] {
        check(&shapes, &text, &expected);
    }
}

#[test]
fn exact_values() {
    let redactor = Redactor::new(["pass/word \"é\"\nx", "pass/word", "word-longer", "short", "  trimmed-value\n"]);
    for (text, expected) in [
        ("pass/word \"é\"\nx", "[redacted]"),
        (r#"{"a":"pass/word \"é\"\nx"}"#, r#"{"a":"[redacted]"}"#),
        (r#"pass\/word \"é\"\nx"#, "[redacted]"),
        (r#"pass/word \"\u00e9\"\nx"#, "[redacted]"),
        (r#"pass/word \\\"é\\\"\\nx"#, "[redacted]"),
        // Overlapping values go as one: nothing of either is left.
        ("pass/word-longer", "[redacted]"),
        ("xpass/wordx", "x[redacted]x"),
        ("pass/wordpass/word", "[redacted][redacted]"),
        ("short", "short"),
        ("trimmed-value", "[redacted]"),
        ("pass/wor", "pass/wor"),
    ] {
        check(&redactor, text, expected);
    }
    // Of a value with several lines each is secret too: keys are often shown line by line.
    let lines = Redactor::new(["first-line-of-it\nshort\nsecond-line-of-it"]);
    check(&lines, "a first-line-of-it b", "a [redacted] b");
    check(&lines, "second-line-of-it and short", "[redacted] and short");
    check(
        &Redactor::new(["redacted", "[redacted]", "x[redacted]x"]),
        "redacted [redacted]",
        "redacted [redacted]",
    );
}

#[test]
fn a_redactor_does_not_tell() {
    assert_eq!(format!("{:?}", Redactor::new(["secret-value"])), "Redactor { .. }");
}

#[test]
fn values_that_are_json_or_urls() {
    let nested = r#"{"auth_mode":"apikey","tokens":{"id":"first-secret","list":["second-secret","no"]},"n":12345678}"#;
    let redactor = Redactor::new([
        nested,
        "postgres://user:p%40ss-word@db.example/app?sslmode=require&token=abcd1234abcd1234",
        "mysql://root:letters@h/x",
    ]);
    for (text, expected) in [
        ("first-secret second-secret apikey no", "[redacted] [redacted] apikey no"),
        (nested, "[redacted]"),
        ("db.example sslmode=require user", "db.example sslmode=require user"),
        ("p%40ss-word p@ss-word abcd1234abcd1234", "[redacted] [redacted] [redacted]"),
        ("letters", "letters"),
        ("root h/x", "root h/x"),
    ] {
        check(&redactor, text, expected);
    }
}

#[test]
fn json_values() {
    let redactor = Redactor::new(["secret-value"]);
    let mut value = json!({"a": ["secret-value", 1, null, true], "secret-value": {"b": "x secret-value"}, "c": "clean"});
    redactor.json(&mut value);
    assert_eq!(
        value,
        json!({"a": ["[redacted]", 1, null, true], "[redacted]": {"b": "x [redacted]"}, "c": "clean"})
    );
}

#[test]
fn secret_variables() {
    for name in [
        "API_KEY",
        "APIKEY",
        "GITHUB_TOKEN",
        "DB_PASSWORD",
        "PWD",
        "SENTRY_DSN",
        "NPM_AUTH",
        "MY_PAT",
        "session",
    ] {
        assert!(is_secret_variable(name, "x"), "{name}");
    }
    for (name, value) in [
        ("HOME", "/root/abcdefgh12345678"),
        ("KEYBOARD", "de"),
        ("PATH", "/usr/bin"),
        ("TOKENS", "5"),
        ("LANG", "C.UTF-8"),
    ] {
        assert!(!is_secret_variable(name, value), "{name}");
    }
    assert!(is_secret_variable("PLAIN", "abcdefgh12345678"));
    for value in [
        "abcdefgh1234567",
        "abcdefghijklmnop",
        "1234567890123456",
        "./abcdefgh12345678",
        "~/abcdefgh12345678",
        "abcd efgh 12345678",
    ] {
        assert!(!is_token_shaped(value), "{value}");
    }
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the test is about real time")]
fn hostile_texts_take_linear_time() {
    let redactor = Redactor::new(["aaaaaaaaaaaaaaaa", "aaaaaaaab", "secret-value"]);
    // Each would be quadratic for a search that restarts after every candidate. 1 MiB squared is many minutes; linear is far below a second.
    for unit in [
        "a",
        "sk-",
        "sk-a ",
        "sk-aaaaaaaaaaaaaaaaaaaa.",
        "eyJ",
        "eyJaaaaaaaa.",
        "Bearer ",
        "bearer aaaaaaaaaaaaaaaaaaaa ",
        "a://",
        "a://b:",
        "a://b:c",
        "://a:@",
        "-----BEGIN PRIVATE KEY-----",
        "-----BEGIN ",
        "-----",
        "-----BEGIN PRIVATE KEY-----!",
        "-----END ",
        "\\n",
        "%3D",
        "\x1b[1m",
        "31;",
        "é",
        "AKIAAAAAAAAAAAAAAAAA",
    ] {
        let text = unit.repeat((1 << 20) / unit.len());
        let started = Instant::now();
        redactor.text(&text);
        assert!(started.elapsed() < Duration::from_secs(10), "{unit:?}: {:?}", started.elapsed());
    }
}

mod properties {
    use proptest::prelude::*;

    use super::*;

    fn pieces() -> impl Strategy<Value = String> {
        let known = prop::sample::select(vec![
            "sk-aaaaaaaaaaaaaaaaaaaa1",
            "AKIAAAAAAAAAAAAAAAA1",
            "ghp_aaaaaaaaaaaaaaaaaaaa",
            "eyJaaaaaaaa.bbbbbbbb.cccccccc",
            "Bearer ",
            "abcdefgh12345678",
            "https://",
            "u:",
            "pw@",
            "-----BEGIN PRIVATE KEY-----",
            "-----END PRIVATE KEY-----",
            "am_sk_x",
            "Zecret#Value",
            "#Valuezzzz",
            "\\n",
            "\x1b[31m",
            "[redacted]",
            "-",
            "_",
            ".",
            "/",
            "é",
            " ",
            "\n",
            "%20",
        ]);
        prop::collection::vec(prop_oneof![4 => known.prop_map(str::to_owned), 1 => "\\PC{0,3}"], 0..12).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]
        #[test]
        fn twice_is_once(text in pieces()) {
            let redactor = Redactor::new(["Zecret#Value", "#Valuezzzz"]);
            let once = redactor.text(&text).into_owned();
            let twice = redactor.text(&once).into_owned();
            prop_assert_eq!(twice, once, "{:?}", text);
        }

        #[test]
        fn no_cut_leaves_a_piece(before in "[a-z \"]{0,30}", after in "[a-z \"]{0,30}", at in 0usize..80) {
            // Of characters that nothing else here has, so that any piece would be seen.
            let redactor = Redactor::new(["QXQ\"ZQX/ZZ"]);
            for form in ["QXQ\"ZQX/ZZ", "QXQ\\\"ZQX/ZZ", "QXQ\\\"ZQX\\/ZZ", "QXQ\\\\\\\"ZQX/ZZ"] {
                let mut text = format!("{before}{form}{after}");
                redactor.string(&mut text);
                prop_assert_eq!(&text, &format!("{before}{REDACTED}{after}"));
                cut(&mut text, at);
                prop_assert!(!text.contains(['Q', 'X', 'Z']));
            }
        }

        #[test]
        fn cuts_never_split_a_character(text in "[a-zé€😀]{0,40}", max in 0usize..40) {
            let mut short = text.clone();
            let was_cut = cut(&mut short, max);
            let length = short.encode_utf16().count();
            prop_assert!(text.starts_with(&short) && length <= max);
            prop_assert_eq!(was_cut, short.len() < text.len());
            prop_assert!(!was_cut || length + 2 > max);
        }
    }
}
