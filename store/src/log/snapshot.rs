//! A snapshot as a file beside the segments: its bytes, its name, how it is made durable, and which one a log is opened from.
//!
//! The file is written under another name, synced and renamed: under its own name it is whole, or damaged by something that no crash
//! can do. Its payload is compressed in chunks of bounded size, so that neither side needs it twice in memory.
//!
//! Little-endian: magic (8), format level (2), zeros (2), position (8), number of sequences (4), length of the payload (8), the
//! sequences (8 each), CRC32C of all before it (4). Then chunks: length before compression (4), stored length (4), CRC32C (4) of
//! these two and the stored bytes, which starts from the CRC32C before it, and the stored bytes; equal lengths mean that the chunk
//! is not compressed. The header's shape is the same in every level; the level is about all that follows it and about the payload.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use bytes::Bytes;

use super::error::LogError;
use super::{FORMAT_LEVEL, Recovery, Snapshot};
use crate::disk;

/// Largest payload of a snapshot: a hundred times what the state of a busy cell takes, and still fits into a server's memory.
pub const MAX_SNAPSHOT_BYTES: u64 = 1 << 30;
/// Most sequences: one for each partition that there can be.
const MAX_SEQUENCES: usize = 1 << 16;
/// A chunk before compression: big enough to compress well, small enough to be read without trusting the file for more.
const CHUNK_BYTES: usize = 1 << 20;
const ZSTD_LEVEL: i32 = 1;
const HEADER_BYTES: usize = 32;
const CHUNK_HEADER_BYTES: usize = 12;
const MAGIC: [u8; 8] = *b"EGlogsnp";
const PREFIX: &str = "snapshot-";
const UNFINISHED: &str = "snapshot.new";

/// The path of the snapshot at `position`.
pub(super) fn path(dir: &Path, position: u64) -> PathBuf {
    dir.join(format!("{PREFIX}{position:020}"))
}

/// The snapshots in `dir`, oldest first.
pub(super) fn list(dir: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    disk::list_numbered(dir, |name| name.strip_prefix(PREFIX))
}

/// Makes the snapshot durable under its name.
pub(super) fn save(dir: &Path, level: u16, snapshot: &Snapshot) -> io::Result<()> {
    let unfinished = dir.join(UNFINISHED);
    disk::step()?;
    let mut file = BufWriter::new(File::create(&unfinished)?);
    encode(&mut file, level, snapshot)?;
    disk::step()?;
    file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
    disk::step()?;
    fs::rename(&unfinished, path(dir, snapshot.position))?;
    disk::step()?;
    disk::sync_dir(dir)
}

/// Removes what a crash during [`save`] left behind.
pub(super) fn remove_unfinished(dir: &Path) -> io::Result<()> {
    disk::remove_if_there(&dir.join(UNFINISHED))
}

/// The snapshot's bytes.
pub(crate) fn encode(out: &mut impl Write, level: u16, snapshot: &Snapshot) -> io::Result<()> {
    let mut header = Vec::with_capacity(HEADER_BYTES + snapshot.sequences.len() * 8 + 4);
    header.extend_from_slice(&MAGIC);
    header.extend_from_slice(&level.to_le_bytes());
    header.extend_from_slice(&[0; 2]);
    header.extend_from_slice(&snapshot.position.to_le_bytes());
    header.extend_from_slice(&(snapshot.sequences.len() as u32).to_le_bytes());
    header.extend_from_slice(&(snapshot.payload.len() as u64).to_le_bytes());
    for sequence in &snapshot.sequences {
        header.extend_from_slice(&sequence.to_le_bytes());
    }
    let mut crc = crc32c::crc32c(&header);
    header.extend_from_slice(&crc.to_le_bytes());
    out.write_all(&header)?;
    let mut zstd = zstd::bulk::Compressor::new(ZSTD_LEVEL)?;
    let mut packed = vec![0; CHUNK_BYTES];
    for plain in snapshot.payload.chunks(CHUNK_BYTES) {
        // Room for one byte less than there is: "smaller" and "fits" are the same question.
        let stored = match zstd.compress_to_buffer(plain, &mut packed[..plain.len() - 1]) {
            Ok(length) => &packed[..length],
            Err(_) => plain,
        };
        let mut head = [0; CHUNK_HEADER_BYTES];
        head[..4].copy_from_slice(&(plain.len() as u32).to_le_bytes());
        head[4..8].copy_from_slice(&(stored.len() as u32).to_le_bytes());
        crc = crc32c::crc32c_append(crc32c::crc32c_append(crc, &head[..8]), stored);
        head[8..].copy_from_slice(&crc.to_le_bytes());
        out.write_all(&head)?;
        out.write_all(stored)?;
    }
    Ok(())
}

/// Why a snapshot cannot be used.
#[derive(Debug)]
pub(crate) enum Unusable {
    Damaged(String),
    Newer(u16),
    Io(io::Error),
}

impl From<io::Error> for Unusable {
    fn from(error: io::Error) -> Unusable {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Unusable::Damaged("it ends too early".to_owned()),
            _ => Unusable::Io(error),
        }
    }
}

/// Reads and checks the snapshot at `path`, which must be the one at `position`.
pub(super) fn load(path: &Path, position: u64) -> Result<Snapshot, Unusable> {
    let snapshot = decode(&mut BufReader::new(File::open(path)?))?;
    match snapshot.position == position {
        true => Ok(snapshot),
        false => Err(Unusable::Damaged(format!("it says that it is of position {}", snapshot.position))),
    }
}

/// Reads and checks a snapshot's bytes.
pub(crate) fn decode(input: &mut impl Read) -> Result<Snapshot, Unusable> {
    let damaged = |reason: &str| Unusable::Damaged(reason.to_owned());
    let mut header = vec![0; HEADER_BYTES];
    input.read_exact(&mut header)?;
    let u32_at = |bytes: &[u8], at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let u64_at = |bytes: &[u8], at: usize| u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32;
    let (level, position) = (u16::from_le_bytes([header[8], header[9]]), u64_at(&header, 12));
    let (count, length) = (u32_at(&header, 20) as usize, u64_at(&header, 24));
    if header[..8] != MAGIC || count > MAX_SEQUENCES || length > MAX_SNAPSHOT_BYTES || level == 0 {
        return Err(damaged("it does not begin with a snapshot's header"));
    }
    header.resize(HEADER_BYTES + count * 8, 0);
    input.read_exact(&mut header[HEADER_BYTES..])?;
    let mut crc = crc32c::crc32c(&header);
    let mut stored_crc = [0; 4];
    input.read_exact(&mut stored_crc)?;
    if crc != u32::from_le_bytes(stored_crc) {
        return Err(damaged("the checksum of its header is wrong"));
    }
    if level > FORMAT_LEVEL {
        return Err(Unusable::Newer(level));
    }
    let sequences = (0..count).map(|index| u64_at(&header, HEADER_BYTES + index * 8)).collect();
    let mut zstd = zstd::bulk::Decompressor::new()?;
    let (mut payload, mut stored, mut plain) = (Vec::new(), Vec::new(), vec![0; CHUNK_BYTES]);
    while (payload.len() as u64) < length {
        let mut head = [0; CHUNK_HEADER_BYTES];
        input.read_exact(&mut head)?;
        let (plain_length, stored_length) = (u32_at(&head, 0) as usize, u32_at(&head, 4) as usize);
        if plain_length == 0 || plain_length > CHUNK_BYTES || stored_length > plain_length || (payload.len() + plain_length) as u64 > length
        {
            return Err(damaged("the lengths of a chunk contradict each other"));
        }
        stored.resize(stored_length, 0);
        input.read_exact(&mut stored)?;
        crc = crc32c::crc32c_append(crc32c::crc32c_append(crc, &head[..8]), &stored);
        if crc != u32_at(&head, 8) {
            return Err(damaged("the checksum of a chunk is wrong"));
        }
        if stored_length == plain_length {
            payload.extend_from_slice(&stored);
        } else {
            match zstd.decompress_to_buffer(&stored, &mut plain[..plain_length]) {
                Ok(written) if written == plain_length => payload.extend_from_slice(&plain[..plain_length]),
                _ => return Err(damaged("a chunk does not decompress to the length that it states")),
            }
        }
    }
    if input.read(&mut [0])? != 0 {
        return Err(damaged("it has bytes after its last chunk"));
    }
    Ok(Snapshot {
        position,
        sequences,
        payload: Bytes::from(payload),
    })
}

/// The newest intact snapshot of those in `list`. Damaged ones are noted in `recovery`; a newer format is an error, since the
/// log behind an older snapshot would look whole and be out of date.
pub(super) fn newest(list: &[(u64, PathBuf)], recovery: &mut Recovery) -> Result<Option<Snapshot>, LogError> {
    for (position, path) in list.iter().rev() {
        match load(path, *position) {
            Ok(snapshot) => return Ok(Some(snapshot)),
            Err(unusable) => skip(path, unusable, recovery)?,
        }
    }
    Ok(None)
}

/// Notes a damaged snapshot; what is not merely damaged is an error.
pub(super) fn skip(path: &Path, unusable: Unusable, recovery: &mut Recovery) -> Result<(), LogError> {
    match unusable {
        Unusable::Damaged(reason) => {
            recovery.skipped_snapshots.push(format!("{}: {reason}", path.display()));
            Ok(())
        }
        Unusable::Newer(found) => Err(LogError::NewerFormat {
            segment: path.to_owned(),
            offset: 0,
            found,
            supported: FORMAT_LEVEL,
        }),
        Unusable::Io(error) => Err(LogError::io("read", path)(error)),
    }
}

/// Refuses a snapshot over the limits, or one that does not follow the last or reflects what is not durable yet.
pub(crate) fn check(snapshot: &Snapshot, last: u64, durable: u64) -> Result<(), LogError> {
    let reason = if snapshot.position <= last {
        format!("the newest one is at position {last} already")
    } else if snapshot.position > durable {
        format!("the log is durable up to position {durable} only")
    } else if snapshot.payload.len() as u64 > MAX_SNAPSHOT_BYTES || snapshot.sequences.len() > MAX_SEQUENCES {
        let (bytes, sequences) = (snapshot.payload.len(), snapshot.sequences.len());
        format!("{bytes} bytes and {sequences} sequences are over the limit of {MAX_SNAPSHOT_BYTES} bytes and {MAX_SEQUENCES} sequences")
    } else {
        return Ok(());
    };
    let position = snapshot.position;
    Err(LogError::SnapshotRefused { position, reason })
}
