//! A repository to clone: what may be cloned, and how, without a password in any command line or in the workspace.

use std::collections::BTreeMap;

/// What git may speak. `ext::` and the like run programs.
const PROTOCOLS: &str = "http:https:ssh:git:file";

/// A repository and what to check out of it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Repository {
    /// Without user and password where git would show them.
    url: String,
    credentials: Option<(String, String)>,
    reference: Option<String>,
}

impl Repository {
    /// `owner/repo` means GitHub. A plain path of the host is refused; `file://` works where the sandbox can see it.
    pub(crate) fn parse(url: &str, reference: Option<&str>) -> Result<Self, &'static str> {
        if url.contains(char::is_control) || reference.is_some_and(|reference| reference.contains(char::is_control)) {
            return Err("it has control characters");
        }
        if reference.is_some_and(|reference| reference.starts_with('-') || reference.is_empty()) {
            return Err("its ref is not the name of a branch, tag or commit");
        }
        let reference = reference.map(str::to_owned);
        let plain = |url: String| {
            Ok(Self {
                url,
                credentials: None,
                reference: reference.clone(),
            })
        };
        let Some((scheme, rest)) = url.split_once("://") else {
            return match shorthand(url) {
                Some(repository) => plain(format!("https://github.com/{repository}.git")),
                None if is_scp_like(url) => plain(url.to_owned()),
                None => Err("it is not a URL"),
            };
        };
        match scheme {
            "http" | "https" => {
                let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
                let Some((user_info, host)) = authority.rsplit_once('@') else {
                    return plain(url.to_owned());
                };
                let (user, password) = user_info.split_once(':').unwrap_or((user_info, ""));
                let credentials = (percent_decode(user), percent_decode(password));
                if [&credentials.0, &credentials.1].iter().any(|part| part.contains(char::is_control)) {
                    return Err("its user or password has control characters");
                }
                Ok(Self {
                    url: format!("{scheme}://{host}{path}"),
                    credentials: Some(credentials),
                    reference,
                })
            }
            "ssh" | "git" | "file" => plain(url.to_owned()),
            _ => Err("its scheme is not one of https, http, ssh, git and file"),
        }
    }

    /// For `bash -c` in the empty workspace; its output is the commit. A commit that no branch holds is fetched by its name. Where the trials
    /// of a batch are at a `commit`, the branch is set back to it, as far as it can still be had.
    pub(crate) fn script(&self, commit: Option<&str>) -> String {
        let mut script = r#"git clone --quiet --no-recurse-submodules -- "$EVALGRID_SOURCE_URL" . || exit
"#
        .to_owned();
        if self.reference.is_some() {
            script += r#"git checkout --quiet "$EVALGRID_SOURCE_REF" -- 2>/dev/null ||
    { git fetch --quiet origin "$EVALGRID_SOURCE_REF" && git checkout --quiet FETCH_HEAD --; } || exit
"#;
        }
        if commit.is_some() {
            script += r#"[ "$(git rev-parse HEAD)" = "$EVALGRID_SOURCE_COMMIT" ] ||
    git reset --quiet --hard "$EVALGRID_SOURCE_COMMIT" 2>/dev/null ||
    { git fetch --quiet origin "$EVALGRID_SOURCE_COMMIT" && git reset --quiet --hard FETCH_HEAD; } 2>/dev/null
"#;
        }
        // An empty repository has none.
        script += "git rev-parse --verify --quiet HEAD\nexit 0";
        script
    }

    /// For the script. Git asks the helper for user and password; they are nowhere else.
    pub(crate) fn env(&self, commit: Option<&str>) -> BTreeMap<String, String> {
        let mut env = vec![
            ("EVALGRID_SOURCE_URL", self.url.clone()),
            ("GIT_TERMINAL_PROMPT", "0".into()),
            ("GIT_ASKPASS", "true".into()),
            ("GIT_SSH_COMMAND", "ssh -oBatchMode=yes -oStrictHostKeyChecking=accept-new".into()),
            ("GIT_ALLOW_PROTOCOL", PROTOCOLS.into()),
            // Its messages are read.
            ("LC_ALL", "C".into()),
            // Nothing of git is to go on in the background when the script is through.
            ("GIT_CONFIG_KEY_0", "maintenance.auto".into()),
            ("GIT_CONFIG_VALUE_0", "false".into()),
            ("GIT_CONFIG_KEY_1", "gc.auto".into()),
            ("GIT_CONFIG_VALUE_1", "0".into()),
            ("GIT_CONFIG_COUNT", if self.credentials.is_some() { "3" } else { "2" }.into()),
        ];
        if let Some(commit) = commit {
            env.push(("EVALGRID_SOURCE_COMMIT", commit.to_owned()));
        }
        if let Some(reference) = &self.reference {
            env.push(("EVALGRID_SOURCE_REF", reference.clone()));
        }
        if let Some((user, password)) = &self.credentials {
            let helper = r#"!f() { printf 'username=%s\npassword=%s\n' "$EVALGRID_GIT_USER" "$EVALGRID_GIT_PASSWORD"; }; f"#;
            env.extend([
                ("EVALGRID_GIT_USER", user.clone()),
                ("EVALGRID_GIT_PASSWORD", password.clone()),
                ("GIT_CONFIG_KEY_2", "credential.helper".into()),
                ("GIT_CONFIG_VALUE_2", helper.into()),
            ]);
        }
        env.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    /// To be redacted. A token may stand in the place of the user.
    pub(crate) fn password(&self) -> Vec<&str> {
        match &self.credentials {
            Some((user, password)) if password.is_empty() => vec![user],
            Some((_, password)) => vec![password],
            None => Vec::new(),
        }
    }
}

/// `owner/repo`, as GitHub names them.
fn shorthand(url: &str) -> Option<&str> {
    let name = |text: &str| {
        !text.is_empty() && !text.starts_with(['.', '-']) && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
    };
    let (owner, repository) = url.split_once('/')?;
    (name(owner) && name(repository)).then(|| url.strip_suffix(".git").unwrap_or(url))
}

/// `git@host:path`.
fn is_scp_like(url: &str) -> bool {
    let Some((host, path)) = url.split_once(':') else { return false };
    !host.is_empty() && !host.contains('/') && !host.starts_with('-') && !path.is_empty() && !path.starts_with([':', '-'])
}

fn percent_decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((byte, after)) = rest.split_first() {
        let escape = (*byte == b'%')
            .then(|| after.get(..2))
            .flatten()
            .and_then(|hex| std::str::from_utf8(hex).ok());
        match escape.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(decoded) => {
                bytes.push(decoded);
                rest = &after[2..];
            }
            None => {
                bytes.push(*byte);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_may_be_cloned() {
        type Found<'a> = Result<(&'a str, Option<(&'a str, &'a str)>), &'a str>;
        fn check(url: &str, expected: Found<'_>) {
            let parsed = Repository::parse(url, None);
            let found = parsed.as_ref().map(|repository| {
                let credentials = repository
                    .credentials
                    .as_ref()
                    .map(|(user, password)| (user.as_str(), password.as_str()));
                (repository.url.as_str(), credentials)
            });
            assert_eq!(found.map_err(|reason| *reason), expected, "{url}");
        }
        check("acme/api", Ok(("https://github.com/acme/api.git", None)));
        check("acme/api.git", Ok(("https://github.com/acme/api.git", None)));
        check("https://h/x.git", Ok(("https://h/x.git", None)));
        check(
            "https://me:p%40ss%2Fw@h:8443/x?y=@",
            Ok(("https://h:8443/x?y=@", Some(("me", "p@ss/w")))),
        );
        check("https://token@h/x", Ok(("https://h/x", Some(("token", "")))));
        check("https://a@b:c@h/x", Ok(("https://h/x", Some(("a@b", "c")))));
        check("ssh://git@h/x", Ok(("ssh://git@h/x", None)));
        check("git@github.com:acme/api.git", Ok(("git@github.com:acme/api.git", None)));
        check("file:///srv/x.git", Ok(("file:///srv/x.git", None)));
        for path in [
            "/etc",
            "./x",
            "../x",
            "~/x",
            "a/b/c",
            "",
            "x",
            "-x/y",
            "ext::sh -c id",
            "--upload-pack=x:y",
            "h:-x",
        ] {
            check(path, Err("it is not a URL"));
        }
        check("ext://x", Err("its scheme is not one of https, http, ssh, git and file"));
        check("https://h/x\n", Err("it has control characters"));
        check("https://u:a%0Ab@h/x", Err("its user or password has control characters"));
        for reference in ["-x", ""] {
            assert_eq!(
                Repository::parse("a/b", Some(reference)),
                Err("its ref is not the name of a branch, tag or commit")
            );
        }
    }

    #[test]
    fn no_password_in_a_command_line() {
        let repository = Repository::parse("https://me:secret-word@h/x", Some("main")).unwrap();
        assert!(!repository.script(None).contains("secret-word") && !repository.env(None)["EVALGRID_SOURCE_URL"].contains("secret-word"));
        assert_eq!(repository.password(), ["secret-word"]);
    }

    #[test]
    fn broken_escapes_stay() {
        for (text, decoded) in [
            ("%", "%"),
            ("%4", "%4"),
            ("%zz", "%zz"),
            ("%41%", "A%"),
            ("%é", "%é"),
            ("%ff", "\u{fffd}"),
        ] {
            assert_eq!(percent_decode(text), decoded);
        }
    }
}
