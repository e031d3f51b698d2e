//! Reading a log: every check in one pass, and the one decision that matters, between a torn tail and damage.
//!
//! The committer has one group in flight. So whatever a crash does, it leaves whole groups and, at the very end of the last segment,
//! at most one group that is not: that one was never acknowledged, and is cut. A bad place with a later header behind it, or in an
//! earlier segment, is something else: what was durable is gone, and only a person may decide what to do.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::error::{BoxError, LogError};
use super::frame::{self, Decoder, FORMAT_LEVEL};
use super::segment::{self, SEGMENT_BYTES};
use super::{Replay, Sequences, Snapshot, snapshot};

/// What was found when a log was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Position of the last whole record; 0 in a new log.
    pub position: u64,
    /// Position of the snapshot that reading began with.
    pub snapshot: Option<u64>,
    /// The format level that the log is written at: that of its last segment.
    pub level: u16,
    /// Snapshots that are damaged, each with the reason; reading began with an older one, or without.
    pub skipped_snapshots: Vec<String>,
    /// Damaged places that do no harm, since the snapshot reflects what was there.
    pub passed_damage: Vec<String>,
    /// The first position that is still there as a record (or would be, in a log that has none).
    pub first_position: u64,
    /// Records that were read and handed on: those behind the snapshot.
    pub records: u64,
    /// Whole groups in the segments that were read.
    pub groups: u64,
    /// Bytes of these groups and of the segments' headers, on disk.
    pub bytes: u64,
    /// Segment files that are there. Those wholly before the snapshot's position are not read.
    pub segments: u64,
    /// Bytes of a group that a crash left unfinished at the end; never acknowledged. Opening cuts them, offline reading only counts.
    pub torn_bytes: u64,
}

/// Where the last segment ends, and what its owner needs to go on.
#[derive(Debug)]
pub(super) struct Tail {
    pub(super) path: PathBuf,
    pub(super) first_position: u64,
    /// None where the file is too short for a header: nothing can be in it, and it is made anew.
    pub(super) header: Option<segment::Header>,
    /// End of the last whole group.
    pub(super) end: u64,
    /// The last whole group and where it lies, if there is one in this segment.
    pub(super) last_group: Option<(u64, Vec<u8>)>,
}

/// What is in a log's folder, beside the records.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// That of the last segment; there is none in an empty log.
    pub(super) tail: Option<Tail>,
    /// The segments by their first position, in order.
    pub(super) segments: Vec<(u64, PathBuf)>,
    /// Positions of the usable snapshots, oldest first.
    pub(super) snapshots: Vec<u64>,
}

/// Reads a log. After an error, what was found up to there can still be asked for.
pub(super) struct Reader {
    pub(super) recovery: Recovery,
    pub(super) sequences: Sequences,
    /// Bytes of the groups that the snapshot does not wholly reflect.
    pub(super) since_snapshot: u64,
    /// Up to here a snapshot reflects the records; they are not handed on.
    reflected: u64,
    /// The log's beginning is gone, so a partition's first record may have any sequence.
    headless: bool,
    decoder: Decoder,
    buffer: Vec<u8>,
}

/// Takes what is in a log while it is read.
pub(super) type Visit<'a> = &'a mut dyn FnMut(Replay<'_>) -> Result<(), BoxError>;

impl Reader {
    pub(super) fn new() -> Reader {
        Reader {
            recovery: Recovery::default(),
            sequences: Sequences::default(),
            since_snapshot: 0,
            reflected: 0,
            headless: false,
            decoder: Decoder::new(),
            buffer: Vec::new(),
        }
    }

    /// Reads what an owner needs to go on: the newest intact snapshot, and the records behind it.
    pub(super) fn read_tail(&mut self, dir: &Path, visit: Visit<'_>) -> Result<Found, LogError> {
        let segments = segment::list(dir).map_err(LogError::io("list the segments in", dir))?;
        let snapshots = snapshot::list(dir).map_err(LogError::io("list the snapshots in", dir))?;
        let newest = snapshot::newest(&snapshots, &mut self.recovery)?;
        self.check_reach(dir, &segments, newest.as_ref().map(|snapshot| snapshot.position))?;
        let mut needed = &segments[..];
        if let Some(snapshot) = &newest {
            let position = snapshot.position;
            self.begin_with(snapshot);
            let unneeded = segments.partition_point(|(first_position, _)| *first_position <= position + 1);
            needed = &segments[unneeded.saturating_sub(1)..];
            visit(Replay::Snapshot(snapshot)).map_err(|source| LogError::Refused { position, source })?;
        }
        let usable = newest.map_or(0, |snapshot| snapshot.position);
        let tail = self.read_segments(needed, visit)?;
        self.check_end(dir, usable)?;
        let snapshots = snapshots
            .into_iter()
            .map(|(position, _)| position)
            .filter(|position| *position <= usable);
        Ok(Found {
            tail,
            snapshots: snapshots.collect(),
            segments,
        })
    }

    /// Reads every record that is still there, whatever the snapshots reflect.
    pub(super) fn read_all(&mut self, dir: &Path, visit: Visit<'_>) -> Result<Found, LogError> {
        let segments = segment::list(dir).map_err(LogError::io("list the segments in", dir))?;
        self.note_segments(&segments);
        self.headless = self.recovery.first_position > 1;
        let tail = self.read_segments(&segments, visit)?;
        Ok(Found {
            tail,
            segments,
            snapshots: Vec::new(),
        })
    }

    /// Checks every snapshot, and that the newest intact one and the segments that were read make a whole log.
    pub(super) fn check_snapshots(&mut self, dir: &Path) -> Result<(), LogError> {
        let segments = segment::list(dir).map_err(LogError::io("list the segments in", dir))?;
        for (position, path) in snapshot::list(dir).map_err(LogError::io("list the snapshots in", dir))? {
            match snapshot::load(&path, position) {
                Ok(_) => self.recovery.snapshot = Some(position),
                Err(unusable) => snapshot::skip(&path, unusable, &mut self.recovery)?,
            }
        }
        self.check_reach(dir, &segments, self.recovery.snapshot)?;
        self.check_end(dir, self.recovery.snapshot.unwrap_or(0))
    }

    fn note_segments(&mut self, segments: &[(u64, PathBuf)]) {
        self.recovery.segments = segments.len() as u64;
        self.recovery.first_position = segments.first().map_or(1, |(first_position, _)| *first_position);
    }

    /// Begins behind `snapshot`, with what it says of the partitions.
    fn begin_with(&mut self, snapshot: &Snapshot) {
        self.recovery.snapshot = Some(snapshot.position);
        self.reflected = snapshot.position;
        self.sequences = Sequences(snapshot.sequences.clone());
    }

    /// No record between the snapshot (or the beginning) and the first segment may be missing.
    fn check_reach(&mut self, dir: &Path, segments: &[(u64, PathBuf)], snapshot: Option<u64>) -> Result<(), LogError> {
        self.note_segments(segments);
        let (reached, first) = (snapshot.unwrap_or(0), self.recovery.first_position);
        if first <= reached + 1 {
            return Ok(());
        }
        let mut what = format!(
            "positions {} to {} are missing: the first segment begins at {first}, and ",
            reached + 1,
            first - 1
        );
        match snapshot {
            Some(position) => what.push_str(&format!("the newest intact snapshot is at {position}")),
            None => what.push_str("there is no intact snapshot"),
        }
        for skipped in &self.recovery.skipped_snapshots {
            what.push_str(&format!("; damaged: {skipped}"));
        }
        let dir = dir.to_owned();
        Err(LogError::Missing { dir, what })
    }

    /// A snapshot is made of durable records only, so the log cannot end before it.
    fn check_end(&self, dir: &Path, snapshot: u64) -> Result<(), LogError> {
        let end = self.recovery.position;
        if snapshot <= end {
            return Ok(());
        }
        let what = format!(
            "a snapshot reflects position {snapshot}, but the segments end at {end}; `evalgrid log repair` can go on from the snapshot"
        );
        let dir = dir.to_owned();
        Err(LogError::Missing { dir, what })
    }

    fn read_segments(&mut self, segments: &[(u64, PathBuf)], visit: Visit<'_>) -> Result<Option<Tail>, LogError> {
        let mut tail = None;
        self.recovery.position = segments.first().map_or(0, |(first_position, _)| first_position - 1);
        for (index, (first_position, path)) in segments.iter().enumerate() {
            let expected = self.recovery.position + 1;
            if *first_position != expected {
                return Err(corrupt(
                    path,
                    0,
                    format!("it begins at position {first_position}, but the log before it ends before {expected}"),
                ));
            }
            let next = segments.get(index + 1).map(|(first_position, _)| *first_position);
            // The buffer is lent out, so that the records can borrow from it while the rest of the reader works.
            let mut buffer = std::mem::take(&mut self.buffer);
            load(path, &mut buffer)?;
            tail = Some(self.read_segment(path, *first_position, &buffer, next, visit)?);
            self.buffer = buffer;
        }
        Ok(tail)
    }

    /// Reads one segment; `next` is where the one after it begins, if it is not the last.
    fn read_segment(
        &mut self,
        path: &Path,
        first_position: u64,
        bytes: &[u8],
        next: Option<u64>,
        visit: Visit<'_>,
    ) -> Result<Tail, LogError> {
        let mut tail = Tail {
            path: path.to_owned(),
            first_position,
            header: None,
            end: 0,
            last_group: None,
        };
        let Some(header) = bytes.first_chunk() else {
            if next.is_some() {
                return Err(corrupt(path, 0, "it is shorter than a segment's header"));
            }
            // Ours, if a crash has cut it short, begins as a header does, or with zeros.
            if bytes.iter().any(|byte| *byte != 0) && !segment::may_begin(bytes) {
                return Err(corrupt(path, 0, "it does not begin with a segment's header"));
            }
            self.recovery.torn_bytes += bytes.len() as u64;
            return Ok(tail);
        };
        let header = segment::Header::read(header).ok_or_else(|| corrupt(path, 0, "it does not begin with a segment's header"))?;
        check_level(path, 0, header.level)?;
        if header.first_position != first_position {
            return Err(corrupt(
                path,
                0,
                format!("its header says that it begins at position {}", header.first_position),
            ));
        }
        tail.header = Some(header);
        self.recovery.level = header.level;
        let (seed, recycled) = (header.seed(), header.recycled);
        // Positions only grow, so a group of the file's former use can be told even if its checksum should fit by chance.
        let ours = |group: &frame::Header| !recycled || group.first_position >= first_position;

        let mut at = segment::HEADER_BYTES;
        let mut last_group = None;
        let torn = loop {
            let rest = &bytes[at..];
            let header = frame::Header::read(seed, rest).filter(ours);
            if let Some(header) = &header {
                // Checked before the body: a newer level may have another kind of body, and must not pass for a torn group.
                check_level(path, at, header.level)?;
                if header.first_position != self.recovery.position + 1 {
                    let reason = format!(
                        "a group begins at position {}, not {}",
                        header.first_position,
                        self.recovery.position + 1
                    );
                    return Err(corrupt(path, at, reason));
                }
                if let Some(body) = header.body(&rest[frame::HEADER_BYTES..]) {
                    let before = self.recovery.position;
                    self.read_group(path, at, header, body, visit).inspect_err(|_| {
                        // What is told of as whole ends with a whole group.
                        self.recovery.position = before;
                    })?;
                    let length = frame::HEADER_BYTES + body.len();
                    last_group = Some((at, length));
                    at += length;
                    continue;
                }
            }
            let written = if recycled { rest.len() } else { written_length(rest) };
            if written == 0 {
                break 0;
            }
            if let Some((offset, later)) = frame::Header::find(seed, &rest[1..written], ours) {
                let place = at + 1 + offset;
                if later.first_position <= self.recovery.position || later.first_position > self.reflected + 1 {
                    let reason = format!("a group is damaged, and position {} follows at byte {place}", later.first_position);
                    return Err(corrupt(path, at, reason));
                }
                self.recovery.passed_damage.push(format!(
                    "{} at byte {at}: positions {} to {} cannot be read",
                    path.display(),
                    self.recovery.position + 1,
                    later.first_position - 1
                ));
                self.recovery.position = later.first_position - 1;
                at = place;
                continue;
            }
            let torn = match header {
                Some(header) if recycled => rest.len().min(frame::HEADER_BYTES + header.body_length as usize),
                None if recycled => 0,
                _ => written,
            };
            if torn > 0 && next.is_some() {
                return Err(corrupt(path, at, "a group is damaged, and there are later segments"));
            }
            break torn;
        };
        let expected = self.recovery.position + 1;
        if let Some(next) = next.filter(|next| recycled && *next != expected) {
            let reason =
                format!("position {expected} should be here, or a segment that begins with it is missing before the one with {next}");
            return Err(corrupt(path, at, reason));
        }
        self.recovery.bytes += at as u64;
        self.recovery.torn_bytes += torn as u64;
        tail.end = at as u64;
        tail.last_group = last_group
            .filter(|_| next.is_none())
            .map(|(start, length)| (start as u64, bytes[start..start + length].to_vec()));
        Ok(tail)
    }

    fn read_group(&mut self, path: &Path, at: usize, header: &frame::Header, body: &[u8], visit: Visit<'_>) -> Result<(), LogError> {
        self.recovery.groups += 1;
        let last = self.recovery.position + u64::from(header.records);
        if last <= self.reflected {
            self.recovery.position = last;
            return Ok(());
        }
        self.since_snapshot += (frame::HEADER_BYTES + body.len()) as u64;
        let records = self.decoder.decode(header, body).map_err(|reason| corrupt(path, at, reason))?;
        for record in records {
            let record = record.map_err(|reason| corrupt(path, at, reason))?;
            self.recovery.position += 1;
            let position = self.recovery.position;
            // A snapshot may fall between the records of one group.
            if position <= self.reflected {
                continue;
            }
            match self.sequences.advance(record.partition, record.sequence) {
                Err(1) if self.headless && record.sequence > 0 => self.sequences.begin(record.partition, record.sequence),
                Err(expected) => {
                    let reason = format!("partition {} goes on with {}, not {expected}", record.partition, record.sequence);
                    return Err(corrupt(path, at, reason));
                }
                Ok(()) => {}
            }
            self.recovery.records += 1;
            visit(Replay::Record(position, record)).map_err(|source| LogError::Refused { position, source })?;
        }
        Ok(())
    }
}

/// Reads a whole segment; it is never longer than [`SEGMENT_BYTES`].
pub(super) fn load(path: &Path, buffer: &mut Vec<u8>) -> Result<(), LogError> {
    buffer.clear();
    let file = File::open(path).map_err(LogError::io("open", path))?;
    file.take(SEGMENT_BYTES + 1)
        .read_to_end(buffer)
        .map_err(LogError::io("read", path))?;
    if buffer.len() as u64 > SEGMENT_BYTES {
        return Err(corrupt(path, SEGMENT_BYTES as usize, "it is longer than a segment can be"));
    }
    Ok(())
}

fn check_level(path: &Path, at: usize, found: u16) -> Result<(), LogError> {
    match found {
        0 => Err(corrupt(path, at, "there is no format level 0")),
        1..=FORMAT_LEVEL => Ok(()),
        _ => Err(LogError::NewerFormat {
            segment: path.to_owned(),
            offset: at as u64,
            found,
            supported: FORMAT_LEVEL,
        }),
    }
}

fn corrupt(path: &Path, at: usize, reason: impl Into<String>) -> LogError {
    LogError::Corrupt {
        segment: path.to_owned(),
        offset: at as u64,
        reason: reason.into(),
    }
}

/// Length of `bytes` without the zeros at its end. Whole blocks are compared, since most of a young segment is zeros.
fn written_length(bytes: &[u8]) -> usize {
    const ZEROS: [u8; 4096] = [0; 4096];
    let mut length = bytes.len();
    while length > 0 {
        let block = length.min(ZEROS.len());
        if bytes[length - block..length] != ZEROS[..block] {
            return bytes[..length].iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        }
        length -= block;
    }
    0
}
