//! Texts that assign a password: what no shape and no known value finds.

/// Words that end the name of a password.
const WORDS: &[&str] = &["password", "passwd", "passphrase", "pwd"];
/// Values that are no passwords: nothing, names of types, what stands in the place of one.
const HARMLESS: &[&str] = &[
    "null",
    "none",
    "nil",
    "undefined",
    "true",
    "false",
    "string",
    "str",
    "text",
    "varchar",
    "bool",
    "boolean",
    "any",
    "bytes",
    "required",
    "optional",
    "redacted",
];

/// Whether a text still holds something that looks like a password assignment: `DB_PASSWORD=x1`, `"password": "x1"`, `pwd := 'x1'`. What is looked up
/// (`password = getpass()`, `PASSWORD=$SECRET`) and names of types are none. Linear in the text.
pub fn assigns_password(text: &str) -> bool {
    let lower = text.to_ascii_lowercase();
    WORDS.iter().any(|word| {
        let mut found = lower.match_indices(word);
        found.any(|(at, word)| is_assignment(&lower[at + word.len()..]))
    })
}

/// `rest` follows the name, in lower case.
fn is_assignment(rest: &str) -> bool {
    let rest = rest.strip_prefix(['"', '\'', '`']).unwrap_or(rest).trim_start_matches([' ', '\t']);
    let value = match rest.strip_prefix(":=").or(rest.strip_prefix("=>")) {
        Some(value) => value,
        None => match rest.strip_prefix(['=', ':']) {
            // A comparison; a path of a module.
            Some(value) if !value.starts_with(['=', ':']) => value,
            _ => return false,
        },
    };
    let value = value.trim_start_matches([' ', '\t']);
    if let Some(quote) = value.chars().next().filter(|quote| matches!(quote, '"' | '\'' | '`')) {
        let value = &value[1..];
        return is_literal(&value[..value.find([quote, '\n']).unwrap_or(value.len())]);
    }
    let end = value
        .find([' ', '\t', '\n', '\r', ',', ';', '}', ')', ']', '|', '?'])
        .unwrap_or(value.len());
    let value = &value[..end];
    // Code that gets it from somewhere.
    !value.contains(['(', '.']) && is_literal(value)
}

fn is_literal(value: &str) -> bool {
    !value.is_empty()
        && !value.starts_with(['$', '<', '{', '%', '[', '*', '&'])
        && !HARMLESS.contains(&value)
        && !value.chars().all(|c| matches!(c, 'x' | '.' | '*' | '-' | '_'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_looks_like_a_password() {
        for (text, assigns) in [
            ("", false),
            ("the password is needed", false),
            ("PASSWORD=hunter2", true),
            ("DB_PASSWORD = secret\n", true),
            ("{\"password\": \"hunter2\"}", true),
            ("  password: hunter2", true),
            ("userPassword := `a b`", true),
            ("'pwd' => 'x1'", true),
            ("passphrase='x1'", true),
            ("password: \"\"", false),
            ("password:\n  next", false),
            ("password: string;", false),
            ("password == other", false),
            ("password::Hash", false),
            ("password = getpass()", false),
            ("password=os.environ['X']", false),
            ("PASSWORD=$SECRET", false),
            ("PASSWORD=${SECRET}", false),
            ("password: <your password>", false),
            ("password: [redacted]", false),
            ("password=\"[redacted]\"", false),
            ("password_hash = 'x1'", false),
            ("password=****", false),
            ("é password='é1'", true),
        ] {
            assert_eq!(assigns_password(text), assigns, "{text:?}");
        }
    }
}
