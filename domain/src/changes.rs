//! What an agent did to the files of its workspace, turn by turn.

use serde::{Deserialize, Serialize};

use crate::{coverage::Channel, names::names};

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
        /// Nothing: a side of it could not be read.
        Unreadable = "unreadable",
        /// It has none that could be told: a symlink, a pipe.
        None = "none",
    }
);
