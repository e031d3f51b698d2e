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
use super::{RecordRef, Sequences};

/// What was found when a log was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Whole records, which is also the position of the last one.
    pub records: u64,
    /// Whole groups.
    pub groups: u64,
    /// Bytes of the whole groups and of the segments' headers, on disk.
    pub bytes: u64,
    /// Segment files.
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
    pub(super) seed: Option<u32>,
    /// End of the last whole group.
    pub(super) end: u64,
    /// The last whole group and where it lies, if there is one in this segment.
    pub(super) last_group: Option<(u64, Vec<u8>)>,
}

/// Reads a log. After an error, what was found up to there can still be asked for.
pub(super) struct Reader {
    pub(super) recovery: Recovery,
    pub(super) sequences: Sequences,
    decoder: Decoder,
    buffer: Vec<u8>,
}

/// Takes the records while a log is read: position, record.
pub(super) type Visit<'a> = &'a mut dyn FnMut(u64, RecordRef<'_>) -> Result<(), BoxError>;

impl Reader {
    pub(super) fn new() -> Reader {
        Reader {
            recovery: Recovery::default(),
            sequences: Sequences::default(),
            decoder: Decoder::new(),
            buffer: Vec::new(),
        }
    }

    /// Reads every segment in `dir`. The tail is that of the last one; there is none in an empty log.
    pub(super) fn read(&mut self, dir: &Path, visit: Visit<'_>) -> Result<Option<Tail>, LogError> {
        let segments = segment::list(dir).map_err(LogError::io("list the segments in", dir))?;
        let mut tail = None;
        for (index, (first_position, path)) in segments.iter().enumerate() {
            let expected = self.recovery.records + 1;
            if *first_position != expected {
                return Err(corrupt(
                    path,
                    0,
                    format!("it begins at position {first_position}, but the log before it ends before {expected}"),
                ));
            }
            let last = index + 1 == segments.len();
            // The buffer is lent out, so that the records can borrow from it while the rest of the reader works.
            let mut buffer = std::mem::take(&mut self.buffer);
            load(path, &mut buffer)?;
            tail = Some(self.read_segment(path, *first_position, &buffer, last, visit)?);
            self.buffer = buffer;
        }
        Ok(tail)
    }

    fn read_segment(&mut self, path: &Path, first_position: u64, bytes: &[u8], last: bool, visit: Visit<'_>) -> Result<Tail, LogError> {
        self.recovery.segments += 1;
        let mut tail = Tail {
            path: path.to_owned(),
            first_position,
            seed: None,
            end: 0,
            last_group: None,
        };
        let Some(header) = bytes.first_chunk() else {
            if !last {
                return Err(corrupt(path, 0, "it is shorter than a segment's header"));
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
        let seed = header.seed();
        tail.seed = Some(seed);

        let mut at = segment::HEADER_BYTES;
        let mut last_group = None;
        let torn = loop {
            let rest = &bytes[at..];
            let header = frame::Header::read(seed, rest);
            if let Some(header) = &header {
                // Checked before the body: a newer level may have another kind of body, and must not pass for a torn group.
                check_level(path, at, header.level)?;
                if header.first_position != self.recovery.records + 1 {
                    let reason = format!(
                        "a group begins at position {}, not {}",
                        header.first_position,
                        self.recovery.records + 1
                    );
                    return Err(corrupt(path, at, reason));
                }
                if let Some(body) = header.body(&rest[frame::HEADER_BYTES..]) {
                    self.read_group(path, at, header, body, visit)?;
                    let length = frame::HEADER_BYTES + body.len();
                    last_group = Some((at, length));
                    at += length;
                    continue;
                }
            }
            let written = written_length(rest);
            if written == 0 {
                break 0;
            }
            if !last {
                return Err(corrupt(path, at, "a group is damaged, and there are later segments"));
            }
            if let Some((offset, later)) = frame::Header::find(seed, &rest[1..written]) {
                let reason = format!(
                    "a group is damaged, and position {} follows at byte {}",
                    later.first_position,
                    at + 1 + offset
                );
                return Err(corrupt(path, at, reason));
            }
            break written;
        };
        self.recovery.bytes += at as u64;
        self.recovery.torn_bytes += torn as u64;
        tail.end = at as u64;
        tail.last_group = last_group
            .filter(|_| last)
            .map(|(start, length)| (start as u64, bytes[start..start + length].to_vec()));
        Ok(tail)
    }

    fn read_group(&mut self, path: &Path, at: usize, header: &frame::Header, body: &[u8], visit: Visit<'_>) -> Result<(), LogError> {
        let records = self.decoder.decode(header, body).map_err(|reason| corrupt(path, at, reason))?;
        for record in records {
            let record = record.map_err(|reason| corrupt(path, at, reason))?;
            self.sequences.advance(record.partition, record.sequence).map_err(|expected| {
                corrupt(
                    path,
                    at,
                    format!("partition {} goes on with {}, not {expected}", record.partition, record.sequence),
                )
            })?;
            self.recovery.records += 1;
            let position = self.recovery.records;
            visit(position, record).map_err(|source| LogError::Refused { position, source })?;
        }
        self.recovery.groups += 1;
        Ok(())
    }
}

/// Reads a whole segment; it is never longer than [`SEGMENT_BYTES`].
fn load(path: &Path, buffer: &mut Vec<u8>) -> Result<(), LogError> {
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
