//! The workspace after a turn against how it was before: what has changed, and the texts of it, redacted before anything is cut.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    path::Path,
    time::Duration,
};

use evalgrid_domain::{
    changes::{ChangeFilter, ChangeKind, ContentKind, FileChange, FileSide, FileType, TurnChanges},
    coverage::Channel,
    limits::{MAX_DIFF_BYTES, MAX_DIFFED_FILE_BYTES, MAX_TURN_CHANGES, MAX_TURN_CONTENT_BYTES, MAX_TURN_DIFF_BYTES},
    redact::{Redactor, assigns_password},
};
use sha2::{Digest as _, Sha256};
use similar::TextDiff;
use tokio::time::Instant;

use super::{
    base::{self, Contents},
    scan::{self, Entry, Kind, ScanError},
};

/// Making the diffs of one turn. After that they are coarse, but still right.
const DIFF_TIME: Duration = Duration::from_secs(5);
/// Lines around a change.
const CONTEXT_LINES: usize = 3;
/// Paths that one reason names.
const NAMED_PATHS: usize = 3;

/// What is known of a file's content.
enum Content {
    Known(Vec<u8>),
    /// It is too large, or the room is used up.
    TooLarge,
    Unreadable,
    /// A symlink, a pipe; or there is no file.
    None,
}

struct Found {
    change: FileChange,
    /// Of a file on one side only, which may be one half of a rename.
    print: Option<Print>,
}

/// What two files have in common that are one file under two names.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Print {
    /// Content that was looked at.
    Content([u8; 32]),
    /// Content that was not: inode, size, and the time of its last change.
    Inode(u64, u64, i64),
}

/// A turn that has changed nothing.
pub(super) fn nothing(turn: u32) -> TurnChanges {
    TurnChanges {
        turn,
        ..TurnChanges::default()
    }
}

/// Looks at the workspace after a turn.
pub(super) fn compare(
    sandbox: &Path,
    turn: u32,
    filter: &ChangeFilter,
    redactor: &Redactor,
    deadline: Instant,
) -> Result<TurnChanges, ScanError> {
    let Some(base) = base::read(sandbox, turn)? else {
        return Ok(nothing(turn));
    };
    let mut comparison = Comparison {
        contents: Contents::open(sandbox)?,
        redactor,
        content_room: MAX_TURN_CONTENT_BYTES,
        diff_room: MAX_TURN_DIFF_BYTES,
        diff_deadline: None,
        found: Vec::new(),
        unread: Vec::new(),
        uncompared: 0,
        untold: 0,
    };
    let base_hidden = base.hidden;
    let mut before: HashMap<Vec<u8>, Entry> = base.entries.into_iter().map(|entry| (entry.path.clone(), entry)).collect();
    let blind = scan::walk(sandbox, filter, deadline, &mut |folder, name, entry| {
        let old = before.remove(&entry.path);
        // What lies in a folder that could not be read before is not new.
        if old.is_some() || !is_below(&entry.path, &base_hidden) {
            comparison.visit(old, entry, &mut |limit| scan::read(folder, name, limit))?;
        }
        Ok(())
    })?;
    // In the order of their paths, so that the same turn gives the same changes.
    let gone: BTreeMap<_, _> = before.into_iter().filter(|(path, _)| !is_below(path, &blind.hidden)).collect();
    for old in gone.into_values() {
        comparison.deleted(old)?;
    }
    Ok(comparison.finish(turn, &base_hidden, &blind))
}

fn is_below(path: &[u8], folders: &[Vec<u8>]) -> bool {
    folders
        .iter()
        .any(|folder| folder.is_empty() || path.strip_prefix(folder.as_slice()).is_some_and(|rest| rest.starts_with(b"/")))
}

type Read<'a> = &'a mut dyn FnMut(u64) -> io::Result<Option<Vec<u8>>>;

struct Comparison<'a> {
    contents: Contents,
    redactor: &'a Redactor,
    content_room: u64,
    diff_room: usize,
    diff_deadline: Option<Instant>,
    found: Vec<Found>,
    /// Changed, and not to be read.
    unread: Vec<Vec<u8>>,
    /// Large files with another time and the same size.
    uncompared: u64,
    /// Changes whose texts had no room.
    untold: u64,
}

impl Comparison<'_> {
    fn visit(&mut self, old: Option<Entry>, new: Entry, read: Read<'_>) -> io::Result<()> {
        let Some(old) = old else {
            let after = self.content(&new, read);
            let print = print(&new, &after);
            self.push(ChangeKind::Added, None, Some(new), Content::None, after, print);
            return Ok(());
        };
        if old.looks_like(&new) && !old.fresh {
            return Ok(());
        }
        if old.kind != new.kind || new.kind() != Kind::File {
            if old.kind != new.kind || old.target != new.target || old.mode != new.mode {
                let before = self.kept(&old)?;
                let after = self.content(&new, read);
                self.push(ChangeKind::Modified, Some(old), Some(new), before, after, None);
            }
            return Ok(());
        }
        let before = self.kept(&old)?;
        if old.looks_like(&new) && !matches!(before, Content::Known(_)) {
            return Ok(());
        }
        let after = self.content(&new, read);
        let same = match (&before, &after) {
            (Content::Known(before), Content::Known(after)) => before == after,
            // A file that was only moved, or whose permissions were changed, has the time of its last change still.
            _ if (old.size, old.mtime, old.inode) == (new.size, new.mtime, new.inode) => true,
            _ => {
                self.uncompared += u64::from(old.size == new.size);
                false
            }
        };
        if !same {
            self.push(ChangeKind::Modified, Some(old), Some(new), before, after, None);
        } else if old.mode != new.mode {
            let mut change = change(ChangeKind::Modified, Some(&old), Some(&new), self.redactor);
            change.content = ContentKind::Same;
            self.found.push(Found { change, print: None });
        }
        Ok(())
    }

    fn deleted(&mut self, old: Entry) -> io::Result<()> {
        let before = self.kept(&old)?;
        let print = print(&old, &before);
        self.push(ChangeKind::Deleted, Some(old), None, before, Content::None, print);
        Ok(())
    }

    /// Takes room for a content.
    fn take(&mut self, entry: &Entry) -> bool {
        let fits = entry.size <= MAX_DIFFED_FILE_BYTES && entry.size <= self.content_room;
        if fits {
            self.content_room -= entry.size;
        }
        fits
    }

    fn kept(&mut self, old: &Entry) -> io::Result<Content> {
        if old.kind() != Kind::File {
            return Ok(Content::None);
        }
        if !self.take(old) {
            return Ok(Content::TooLarge);
        }
        // Not kept, although small: it could not be read, or there was no room.
        Ok(self.contents.of(old)?.map_or(Content::TooLarge, Content::Known))
    }

    fn content(&mut self, new: &Entry, read: Read<'_>) -> Content {
        if new.kind() != Kind::File {
            return Content::None;
        }
        if !self.take(new) {
            return Content::TooLarge;
        }
        match read(MAX_DIFFED_FILE_BYTES) {
            Ok(Some(content)) => Content::Known(content),
            // It is being written, or has gone.
            Ok(None) => Content::TooLarge,
            Err(_) => {
                self.unread.push(new.path.clone());
                Content::Unreadable
            }
        }
    }

    fn push(&mut self, kind: ChangeKind, old: Option<Entry>, new: Option<Entry>, before: Content, after: Content, print: Option<Print>) {
        let mut change = change(kind, old.as_ref(), new.as_ref(), self.redactor);
        (change.content, change.diff) = self.told(&before, &after);
        self.found.push(Found { change, print });
    }

    fn told(&mut self, before: &Content, after: &Content) -> (ContentKind, Option<String>) {
        let (before, after): (&[u8], &[u8]) = match (before, after) {
            (Content::Unreadable, _) | (_, Content::Unreadable) => return (ContentKind::Unreadable, None),
            (Content::TooLarge, _) | (_, Content::TooLarge) => {
                self.untold += 1;
                return (ContentKind::TooLarge, None);
            }
            (Content::None, Content::None) => return (ContentKind::None, None),
            (Content::Known(before), Content::Known(after)) => (before, after),
            (Content::Known(before), Content::None) => (before, &[]),
            (Content::None, Content::Known(after)) => (&[], after),
        };
        let (Some(before), Some(after)) = (text(before), text(after)) else {
            return (ContentKind::Binary, None);
        };
        if self.diff_room == 0 {
            self.untold += 1;
            return (ContentKind::TooLarge, None);
        }
        // Whole texts: a secret may have several lines, and a diff would tear it apart.
        let (before, after) = (self.redactor.text(before), self.redactor.text(after));
        if [&before, &after].iter().any(|text| assigns_password(text)) {
            return (ContentKind::Withheld, None);
        }
        let deadline = *self.diff_deadline.get_or_insert_with(|| Instant::now() + DIFF_TIME);
        let diff = TextDiff::configure()
            .deadline(deadline.into_std())
            .diff_lines(before.as_ref(), after.as_ref());
        let mut diff = diff.unified_diff().context_radius(CONTEXT_LINES).to_string();
        // What the frame of a diff makes of several lines is looked at once more.
        self.redactor.string(&mut diff);
        let kind = match shorten(&mut diff, MAX_DIFF_BYTES.min(self.diff_room)) {
            true => ContentKind::Cut,
            false => ContentKind::Text,
        };
        self.diff_room -= diff.len();
        (kind, Some(diff))
    }

    fn finish(mut self, turn: u32, base_hidden: &[Vec<u8>], blind: &scan::Blind) -> TurnChanges {
        let mut changes = renamed(std::mem::take(&mut self.found));
        changes.sort_by(|one, other| one.path.cmp(&other.path));
        let omitted = changes.len().saturating_sub(MAX_TURN_CHANGES);
        changes.truncate(MAX_TURN_CHANGES);
        let mut reasons = Vec::new();
        if blind.gone {
            reasons.push("the workspace is no folder any more".to_owned());
        }
        if omitted > 0 {
            reasons.push(format!("{omitted} changes beyond the first {MAX_TURN_CHANGES} are not listed"));
        }
        let hidden: Vec<_> = base_hidden.iter().chain(&blind.hidden).collect();
        for (what, paths) in [
            ("could not be read, or lies too deep", hidden),
            ("could not be read", self.unread.iter().collect()),
            (
                "is a repository of its own, whose history is not looked at",
                blind.nested.iter().collect(),
            ),
        ] {
            reasons.extend(named(what, paths));
        }
        if self.uncompared > 0 {
            reasons.push(format!(
                "{} large files have another time and the same size; whether their contents differ is not known",
                self.uncompared
            ));
        }
        if self.untold > 0 {
            reasons.push(format!(
                "the contents of {} changed files are too large to be looked at",
                self.untold
            ));
        }
        let coverage = match reasons.is_empty() {
            true => Channel::Complete,
            false => Channel::partial(self.redactor.text(&format!("Turn {turn}: {}", reasons.join("; ")))),
        };
        TurnChanges {
            turn,
            changes,
            coverage,
            omitted: omitted as u64,
        }
    }
}

/// Names a few of the paths.
fn named(what: &str, mut paths: Vec<&Vec<u8>>) -> Option<String> {
    paths.sort_unstable();
    paths.dedup();
    let shown: Vec<_> = paths
        .iter()
        .take(NAMED_PATHS)
        .map(|path| String::from_utf8_lossy(path).into_owned())
        .collect();
    let more = match paths.len().saturating_sub(NAMED_PATHS) {
        0 => String::new(),
        more => format!(" (and {more} more)"),
    };
    (!paths.is_empty()).then(|| format!("{}{more} {what}", shown.join(", ")))
}

/// Text for a diff: no zero byte, and UTF-8.
fn text(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok().filter(|text| !text.contains('\0'))
}

/// Cuts at the end of a line where there is one, else of a character. True: it was cut.
fn shorten(text: &mut String, max: usize) -> bool {
    if text.len() <= max {
        return false;
    }
    let end = (0..=max).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    let end = text[..end].rfind('\n').map_or(end, |line| line + 1);
    text.truncate(end);
    true
}

fn print(entry: &Entry, content: &Content) -> Option<Print> {
    match content {
        // Empty files are all alike.
        _ if entry.kind() != Kind::File || entry.size == 0 => None,
        Content::Known(content) => Some(Print::Content(Sha256::digest(content).into())),
        _ => Some(Print::Inode(entry.inode, entry.size, entry.mtime)),
    }
}

fn change(kind: ChangeKind, old: Option<&Entry>, new: Option<&Entry>, redactor: &Redactor) -> FileChange {
    let plain = |bytes: &[u8]| redactor.text(&String::from_utf8_lossy(bytes)).into_owned();
    let side = |entry: &Entry| FileSide {
        file_type: match entry.kind() {
            Kind::File => FileType::File,
            Kind::Symlink => FileType::Symlink,
            Kind::Other => FileType::Other,
        },
        mode: format!("{:04o}", entry.mode),
        byte_size: entry.size,
        target: (entry.kind() == Kind::Symlink).then(|| plain(&entry.target)),
    };
    FileChange {
        path: new.or(old).map(|entry| plain(&entry.path)).unwrap_or_default(),
        kind,
        from: None,
        before: old.map(side),
        after: new.map(side),
        content: ContentKind::None,
        diff: None,
    }
}

/// Joins what has gone and what is new where they are the same file.
fn renamed(found: Vec<Found>) -> Vec<FileChange> {
    let mut gone: HashMap<Print, Vec<usize>> = HashMap::new();
    for (index, found) in found.iter().enumerate().rev() {
        if let (ChangeKind::Deleted, Some(print)) = (found.change.kind, &found.print) {
            gone.entry(print.clone()).or_default().push(index);
        }
    }
    let mut pairs: HashMap<usize, usize> = HashMap::new();
    let mut taken = vec![false; found.len()];
    for (index, new) in found.iter().enumerate() {
        if let (ChangeKind::Added, Some(print)) = (new.change.kind, &new.print)
            && let Some(old) = gone.get_mut(print).and_then(Vec::pop)
        {
            pairs.insert(index, old);
            taken[old] = true;
        }
    }
    let olds: HashMap<usize, (String, Option<FileSide>)> = pairs
        .iter()
        .map(|(new, old)| (*new, (found[*old].change.path.clone(), found[*old].change.before.clone())))
        .collect();
    let keep = found.into_iter().enumerate().filter(|(index, _)| !taken[*index]);
    keep.map(|(index, found)| match olds.get(&index) {
        None => found.change,
        Some((from, before)) => FileChange {
            kind: ChangeKind::Renamed,
            from: Some(from.clone()),
            before: before.clone(),
            content: ContentKind::Same,
            diff: None,
            ..found.change
        },
    })
    .collect()
}
