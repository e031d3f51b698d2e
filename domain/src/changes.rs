//! What an agent did to the files of its workspace, turn by turn.

use std::sync::{Arc, LazyLock};

use ignore::gitignore::{Gitignore, GitignoreBuilder};
use serde::{Deserialize, Serialize};

use crate::{coverage::Channel, names::names, request::DiffRules};

/// The changes of one turn. Windows of several turns are never merged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TurnChanges {
    /// From 1.
    pub turn: u32,
    /// Sorted by path.
    pub changes: Vec<FileChange>,
    /// Whether that is all. An empty list says "nothing changed" only where this is complete.
    pub coverage: Channel,
    /// Changes beyond the limit, which are not listed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub omitted: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// One file that is not what it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FileChange {
    /// Below the workspace; bytes that are no UTF-8 are replaced.
    pub path: String,
    /// What happened to it.
    pub kind: ChangeKind,
    /// Its path before, where it was renamed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// As it was; absent where it is new.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<FileSide>,
    /// As it is; absent where it is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<FileSide>,
    /// What is told of its content.
    pub content: ContentKind,
    /// With `text`: the unified diff, without a head, redacted. With `cut`: its beginning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diff: Option<String>,
}

/// A file on one side of a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FileSide {
    /// What it is.
    #[serde(rename = "type")]
    pub file_type: FileType,
    /// Four octal digits.
    pub mode: String,
    /// Bytes; of a symlink, of its target.
    pub byte_size: u64,
    /// Where a symlink points to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
}

names!(
    /// What happened to a file.
    ChangeKind {
        /// It is new.
        Added = "added",
        /// Its content, its mode or its type is another.
        Modified = "modified",
        /// It is gone.
        Deleted = "deleted",
        /// It has another path, and the same content.
        Renamed = "renamed",
    }
);

names!(
    /// What a file is.
    FileType {
        /// A regular file.
        File = "file",
        /// A symlink.
        Symlink = "symlink",
        /// A pipe, a socket or a device.
        Other = "other",
    }
);

names!(
    /// What is told of the content of a changed file.
    ContentKind {
        /// Its diff.
        Text = "text",
        /// The beginning of its diff: the rest is over a limit.
        Cut = "cut",
        /// It is no text.
        Binary = "binary",
        /// It is the same.
        Same = "same",
        /// Nothing: a side of it is larger than what is looked at, or the turn's room for texts was used up.
        TooLarge = "tooLarge",
        /// Nothing: it still shows what looks like a password, as an artifact would.
        Withheld = "withheld",
        /// Nothing: a side of it could not be read.
        Unreadable = "unreadable",
        /// It has none that could be told: a symlink, a pipe.
        None = "none",
    }
);

/// Folders that are never an agent's work unless a case includes them: version control, what package managers and builds make, our own. Only
/// folders: a script that is called `build` is work.
const DEFAULTS: &[&str] = &[
    "node_modules/",
    ".next/",
    "dist/",
    "build/",
    ".turbo/",
    ".niceeval/",
    "coverage/",
    ".cache/",
    ".pnpm-store/",
    ".npm/",
    ".yarn/",
    "*venv*/",
    "__pycache__/",
    // A file in worktrees and submodules.
    ".git",
    "/.sphynx/",
];

static DEFAULT: LazyLock<Arc<ChangeFilter>> = LazyLock::new(|| Arc::new(ChangeFilter::compile(&DiffRules::default())));

/// Whether a text is a pattern of a `.gitignore` file.
pub fn is_pattern(text: &str) -> bool {
    !text.contains(char::is_control) && GitignoreBuilder::new("").add_line(None, text).is_ok()
}

/// Decides which paths of a workspace are looked at. Made from a case's rules before its first turn, so nothing that an agent writes changes it.
#[derive(Clone, Debug)]
pub struct ChangeFilter {
    ignore: Gitignore,
    /// None: nothing is included.
    include: Option<Includes>,
}

#[derive(Clone, Debug)]
struct Includes {
    patterns: Gitignore,
    /// The fixed beginnings of those patterns that are anchored, as path segments.
    anchored: Vec<Vec<String>>,
    /// There are patterns that match at any depth.
    anywhere: bool,
}

/// What the filter says of a path, for what lies below it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    ignored: bool,
    included: bool,
}

impl Seen {
    /// It is looked at.
    pub fn counts(self) -> bool {
        self.included || !self.ignored
    }
}

impl ChangeFilter {
    /// The filter of a case.
    pub fn new(rules: Option<&DiffRules>) -> Arc<Self> {
        match rules {
            None => DEFAULT.clone(),
            Some(rules) => Arc::new(Self::compile(rules)),
        }
    }

    fn compile(rules: &DiffRules) -> Self {
        let defaults = DEFAULTS.iter().copied();
        let include = (!rules.include.is_empty()).then(|| {
            let fixed = |pattern: &String| {
                let pattern = pattern.trim_end_matches('/');
                pattern.contains('/').then(|| {
                    let segments = pattern.split('/').filter(|segment| !segment.is_empty());
                    let fixed = segments.take_while(|segment| !segment.contains(['*', '?', '[', '\\', '!']));
                    fixed.map(str::to_owned).collect::<Vec<_>>()
                })
            };
            let beginnings: Vec<_> = rules.include.iter().map(fixed).collect();
            Includes {
                patterns: patterns(rules.include.iter().map(String::as_str)),
                anywhere: beginnings.contains(&None),
                anchored: beginnings.into_iter().flatten().collect(),
            }
        });
        Self {
            ignore: patterns(defaults.chain(rules.ignore.iter().map(String::as_str))),
            include,
        }
    }

    /// `path` is relative to the workspace; `above` is what was said of the folder that it lies in.
    pub fn look(&self, path: &std::path::Path, is_folder: bool, above: Seen) -> Seen {
        Seen {
            ignored: above.ignored || self.ignore.matched(path, is_folder).is_ignore(),
            included: above.included
                || self
                    .include
                    .as_ref()
                    .is_some_and(|include| include.patterns.matched(path, is_folder).is_ignore()),
        }
    }

    /// Whether anything below a folder may count.
    pub fn enters(&self, path: &std::path::Path, seen: Seen) -> bool {
        let below = |include: &Includes| {
            include.anywhere
                || include.anchored.iter().any(|beginning| {
                    // One is the beginning of the other.
                    let segments = path.iter().map(|segment| segment.to_str());
                    beginning
                        .iter()
                        .zip(segments)
                        .all(|(fixed, segment)| segment == Some(fixed.as_str()))
                })
        };
        seen.counts() || self.include.as_ref().is_some_and(below)
    }
}

fn patterns<'a>(lines: impl Iterator<Item = &'a str>) -> Gitignore {
    let mut builder = GitignoreBuilder::new("");
    for line in lines {
        // A start with a bad pattern is refused. One that comes from elsewhere all the same matches nothing.
        let _ = builder.add_line(None, line);
    }
    builder.build().unwrap_or_else(|_| Gitignore::empty())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Walks down to a path as a scan does: `true` where it is reached and counts.
    fn counts(filter: &ChangeFilter, path: &str) -> bool {
        let (folders, name) = path.rsplit_once('/').map_or(("", path), |(folders, name)| (folders, name));
        let mut seen = Seen::default();
        let mut at = String::new();
        for folder in folders.split('/').filter(|folder| !folder.is_empty()) {
            at = if at.is_empty() {
                folder.to_owned()
            } else {
                format!("{at}/{folder}")
            };
            seen = filter.look(Path::new(&at), true, seen);
            if !filter.enters(Path::new(&at), seen) {
                return false;
            }
        }
        let full = if at.is_empty() { name.to_owned() } else { format!("{at}/{name}") };
        filter.look(Path::new(&full), false, seen).counts()
    }

    #[test]
    fn what_counts() {
        fn check(ignore: &[&str], include: &[&str], expected: &[(&str, bool)]) {
            let list = |patterns: &[&str]| patterns.iter().map(|pattern| (*pattern).to_owned()).collect();
            let filter = ChangeFilter::new(Some(&DiffRules {
                ignore: list(ignore),
                include: list(include),
            }));
            for (path, counted) in expected {
                assert_eq!(counts(&filter, path), *counted, "{path} with {ignore:?} and {include:?}");
            }
        }
        check(
            &[],
            &[],
            &[
                ("a.txt", true),
                ("src/deep/er/x.rs", true),
                (".gitignore", true),
                (".git", false),
                (".git/config", false),
                ("vendor/x/.git/HEAD", false),
                ("node_modules/a/b.js", false),
                ("web/node_modules/a.js", false),
                ("build", true),
                ("build/out.js", false),
                ("dist/x", false),
                ("my-venv-3/lib/x.py", false),
                (".venv/x", false),
                ("a/__pycache__/x.pyc", false),
                (".sphynx/api/calls.jsonl", false),
                ("deep/.sphynx/x", true),
            ],
        );
        check(
            &["fixtures/**", "*.log", "/top", "data/"],
            &[],
            &[
                ("fixtures/a", false),
                ("x/fixtures/a", true),
                ("a/b/c.log", false),
                ("top", false),
                ("a/top", true),
                ("x/data/y", false),
                ("data", true),
            ],
        );
        check(
            &["*.log"],
            &["node_modules/some-pkg/**", "keep.log", "/dist/*.js"],
            &[
                ("node_modules/some-pkg/lib/x.js", true),
                ("node_modules/other/x.js", false),
                ("a/keep.log", true),
                ("a/other.log", false),
                ("dist/x.js", true),
                ("dist/x.css", false),
                ("dist/deep/x.js", false),
                // A name that is included at any depth opens every folder.
                ("node_modules/other/keep.log", true),
            ],
        );
        check(&["!build/"], &[], &[("build/x", true), ("dist/x", false)]);
        let plain = ChangeFilter::new(None);
        assert!(counts(&plain, "a") && !counts(&plain, "node_modules/x"));
        let anchored = ChangeFilter::new(Some(&DiffRules {
            include: vec!["node_modules/some-pkg/**".into()],
            ..DiffRules::default()
        }));
        for (folder, enters) in [
            ("node_modules", true),
            ("node_modules/some-pkg", true),
            ("node_modules/other", false),
        ] {
            let seen = Seen {
                ignored: true,
                included: false,
            };
            assert_eq!(anchored.enters(Path::new(folder), seen), enters, "{folder}");
        }
        let patterns = [("a/**/b", true), ("[z-a]", false), ("a\nb", false), ("{a,b", false), ("# no", true)];
        for (pattern, good) in patterns {
            assert_eq!(is_pattern(pattern), good, "{pattern:?}");
        }
    }
}
