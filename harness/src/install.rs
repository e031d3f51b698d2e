//! What each agent needs on a host: which package in which version, where its program lies, and how the version is read.
//!
//! Only facts are here: the executor installs, once per host, and shows the folder to sandboxes read-only.

use crate::{HarnessError, Setting};

/// One agent's program, pinned to the version that its driver was written and tested against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Install {
    /// As in a variant.
    pub name: &'static str,
    /// Exactly this one; empty where there is no package to pin.
    pub version: &'static str,
    /// Where it comes from.
    pub source: Source,
    /// The program, below the install's folder; empty for [`Source::Configured`].
    pub program: &'static str,
    /// Arguments that make the program print its version and change nothing.
    pub version_args: &'static [&'static str],
    /// The program is JavaScript: the sandbox must have a `node` in its `PATH`.
    pub node: bool,
}

/// Where a program comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// `npm install PACKAGE@VERSION` in the install's folder. The packages' own install scripts put native programs in place.
    Npm {
        /// The package.
        package: &'static str,
    },
    /// A virtual environment in the install's folder, with `PACKAGE==VERSION` in it.
    PyPi {
        /// The package.
        package: &'static str,
        /// The oldest Python that it runs with: minor version of Python 3.
        python_minor: u32,
    },
    /// There is no package: the operator names the program.
    Configured,
}

impl Install {
    /// The install's folder, below the tools' folder.
    pub fn folder(&self) -> String {
        format!("{}-{}", self.name, self.version)
    }

    /// The version in what the program printed: the first word that is numbers and dots, whatever comes before or behind it.
    pub fn version_in<'a>(&self, printed: &'a str) -> Option<&'a str> {
        printed.split(|c: char| c.is_whitespace() || c == '/').find_map(|word| {
            let word = word.strip_prefix('v').unwrap_or(word);
            let mut parts = word.split('.');
            let number = |part: Option<&str>| part.is_some_and(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()));
            (number(parts.next()) && number(parts.next())).then_some(word)
        })
    }

    /// The program's path inside the sandbox.
    pub fn program(&self, setting: &Setting) -> Result<String, HarnessError> {
        match (&setting.program, self.source) {
            (Some(program), _) => Ok(program.clone()),
            (None, Source::Configured) => Err(HarnessError::NoProgram(self.name)),
            (None, _) => Ok(format!("{}/{}/{}", setting.tools, self.folder(), self.program)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found_in_what_programs_print() {
        let install = Install {
            name: "x",
            version: "1.2.3",
            source: Source::Configured,
            program: "",
            version_args: &[],
            node: false,
        };
        for (printed, expected) in [
            ("codex-cli 0.171.0\n", Some("0.171.0")),
            ("2.1.197 (Claude Code)\n", Some("2.1.197")),
            ("warning: something\nv1.18.33\n", Some("1.18.33")),
            ("bub/0.4.1rc2", Some("0.4.1rc2")),
            ("usage: bub", None),
            ("12 ..", None),
            ("", None),
        ] {
            assert_eq!(install.version_in(printed), expected, "{printed}");
        }
    }
}
