//! One file of the log: its name, its header, how it comes to be, and how it is found again.
//!
//! A segment is named by the position of its first record. It is created under another name, given its whole size and its header,
//! synced and renamed, so a crash never leaves half of one. Its space is reserved ahead (`fallocate`): a full disk is met between
//! groups. The rest of a fresh segment reads as zeros.
//!
//! A segment that is cut becomes a spare, and later another segment under a header with a new nonce. Its blocks are written already,
//! so a sync has no size and no extent to note in the file system's journal. What follows its last group is bytes of its former use:
//! their headers do not pass under the new nonce, and their positions are lower than any that the segment can hold.
//!
//! Header, little-endian: magic (8), format level (2), flags (2), position of the first record (8), nonce (8), CRC32C of all
//! before it (4). The header's own shape is the same in every level.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::FallocateFlags;
use rustix::rand::GetRandomFlags;

use super::frame::{self, MAX_GROUP_BYTES};
use crate::disk;

/// Size of a segment: a second's work at full load, small enough to read in one piece and to be dropped as a whole.
pub const SEGMENT_BYTES: u64 = 64 * 1024 * 1024;

/// Length of a segment's header in bytes.
pub(super) const HEADER_BYTES: usize = 32;
const MAGIC: [u8; 8] = *b"EGlogseg";
const SUFFIX: &str = ".log";
const UNFINISHED: &str = "next.new";
/// Cut segments that are kept to be used again. One is used while the next is filled; two bridge a snapshot that comes late.
pub(super) const SPARES: [&str; 2] = ["spare-1", "spare-2"];
const FLAG_RECYCLED: u16 = 1;

const _: () = assert!((HEADER_BYTES + frame::HEADER_BYTES + MAX_GROUP_BYTES) as u64 <= SEGMENT_BYTES);

/// What a segment says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) level: u16,
    /// The file was another segment before: what follows the last group is no sign of anything.
    pub(super) recycled: bool,
    pub(super) first_position: u64,
    /// Random. No payload can contain a header that passes in this segment, since its author did not know this number.
    pub(super) nonce: [u8; 8],
}

impl Header {
    fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&self.level.to_le_bytes());
        bytes[10..12].copy_from_slice(&(u16::from(self.recycled) * FLAG_RECYCLED).to_le_bytes());
        bytes[12..20].copy_from_slice(&self.first_position.to_le_bytes());
        bytes[20..28].copy_from_slice(&self.nonce);
        let crc = crc32c::crc32c(&bytes[..28]);
        bytes[28..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// The header, if magic and checksum are right.
    pub(super) fn read(bytes: &[u8; HEADER_BYTES]) -> Option<Header> {
        let level = u16::from_le_bytes([bytes[8], bytes[9]]);
        let first_position = u64::from_le_bytes(*bytes[12..].first_chunk()?);
        let header = Header {
            level,
            recycled: u16::from_le_bytes([bytes[10], bytes[11]]) & FLAG_RECYCLED != 0,
            first_position,
            nonce: *bytes[20..].first_chunk()?,
        };
        let crc = u32::from_le_bytes(*bytes[28..].first_chunk()?);
        (bytes[..8] == MAGIC && crc == crc32c::crc32c(&bytes[..28])).then_some(header)
    }

    /// What the checksums of this segment's groups start from.
    pub(super) fn seed(&self) -> u32 {
        crc32c::crc32c(&self.nonce)
    }
}

/// Whether a file that is shorter than a header can be the beginning of one.
pub(super) fn may_begin(bytes: &[u8]) -> bool {
    bytes.iter().zip(MAGIC).all(|(found, expected)| *found == expected)
}

/// The path of the segment that begins at `first_position`.
pub(super) fn path(dir: &Path, first_position: u64) -> PathBuf {
    dir.join(format!("{first_position:020}{SUFFIX}"))
}

/// The segments in `dir`, in order.
pub(super) fn list(dir: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    disk::list_numbered(dir, |name| name.strip_suffix(SUFFIX))
}

/// Creates the segment durably, in place of one of the same name, from a spare of the same size where there is one.
pub(super) fn create(dir: &Path, level: u16, first_position: u64, bytes: u64) -> io::Result<(File, Header)> {
    let spare = find_spare(dir, bytes)?;
    let mut nonce = [0; 8];
    if rustix::rand::getrandom(&mut nonce, GetRandomFlags::empty())? != nonce.len() {
        return Err(io::Error::other("the kernel gave too few random bytes"));
    }
    let header = Header {
        level,
        recycled: spare.is_some(),
        first_position,
        nonce,
    };
    disk::step()?;
    let (unfinished, file) = match spare {
        Some(spare) => spare,
        None => {
            let path = dir.join(UNFINISHED);
            let file = OpenOptions::new().create(true).truncate(true).read(true).write(true).open(&path)?;
            reserve(&file, bytes)?;
            (path, file)
        }
    };
    disk::step()?;
    file.write_all_at(&header.encode(), 0)?;
    disk::step()?;
    file.sync_all()?;
    disk::step()?;
    fs::rename(&unfinished, path(dir, first_position))?;
    disk::step()?;
    disk::sync_dir(dir)?;
    Ok((file, header))
}

/// A spare of that size. One of another size, as after a change of options, is no use any more and is removed.
fn find_spare(dir: &Path, bytes: u64) -> io::Result<Option<(PathBuf, File)>> {
    for path in SPARES.map(|name| dir.join(name)) {
        match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(file) if file.metadata()?.len() == bytes => return Ok(Some((path, file))),
            Ok(_) => disk::remove_if_there(&path)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Takes the segment out of the log, durably: as a spare where one is wanted, for good where not.
pub(super) fn retire(dir: &Path, first_position: u64, bytes: u64) -> io::Result<()> {
    let path = path(dir, first_position);
    let wanted = match fs::metadata(&path)?.len() == bytes {
        true => SPARES.iter().map(|name| dir.join(name)).find(|spare| !spare.exists()),
        false => None,
    };
    disk::step()?;
    match wanted {
        Some(spare) => fs::rename(&path, spare)?,
        None => fs::remove_file(&path)?,
    }
    disk::step()?;
    disk::sync_dir(dir)
}

/// Gives the file its whole size. A file system that cannot do so gets a file that grows: correct, and somewhat slower.
pub(super) fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) | Ok(()) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Removes what a crash during [`create`] left behind.
pub(super) fn remove_unfinished(dir: &Path) -> io::Result<()> {
    disk::remove_if_there(&dir.join(UNFINISHED))
}
