//! The bytes of one group: a checked header, then its records, compressed where that makes them smaller. Pure: bytes in, bytes out.
//!
//! Header, little-endian: magic `EGgr` (4), format level (2), flags (2), records (4), length of the records before compression (4),
//! length of the body (4), position of the first record (8), CRC32C of the body (4), CRC32C of all before it (4). The header's CRC
//! starts from the segment's seed, so bytes that a tenant put into a payload, or that an earlier use of the file left behind, can
//! never pass for a header. Its shape is the same in every format level; the level is about the body.
//!
//! A record: partition, sequence and payload length as varints, CRC32C of the payload (4), payload.

use super::{Record, RecordRef};

/// The newest format level that this version reads. A log is written at its own level, until `evalgrid upgrade finalize` raises that.
///
/// | level | new in it |
/// |---|---|
/// | 1 | |
/// | 2 | the log may begin behind a snapshot; a segment may have been another one before |
pub const FORMAT_LEVEL: u16 = 2;
/// Most records in one group: far more than queue up during one sync.
pub const MAX_GROUP_RECORDS: usize = 16_384;
/// Most bytes of one group before compression, [`RECORD_OVERHEAD`] included: a sync stays short, and a reader's memory bounded.
pub const MAX_GROUP_BYTES: usize = 8 * 1024 * 1024;
/// What a record costs beside its payload, at most: three varints (3 + 10 + 4 bytes) and its checksum.
pub const RECORD_OVERHEAD: usize = 21;

/// Length of a group's header in bytes.
pub(crate) const HEADER_BYTES: usize = 36;
const MAGIC: [u8; 4] = *b"EGgr";
const FLAG_ZSTD: u16 = 1;
/// Evidence and step results shrink well at any level; the committer's CPU is what is short.
const ZSTD_LEVEL: i32 = 1;

/// Encodes groups into a buffer that it keeps.
pub(crate) struct Encoder {
    level: u16,
    zstd: Option<zstd::bulk::Compressor<'static>>,
    plain: Vec<u8>,
    packed: Vec<u8>,
}

impl Encoder {
    /// For groups of this format level.
    pub(crate) fn new(level: u16) -> Encoder {
        // Without a compressor (no memory for one), groups are merely larger.
        Encoder {
            level,
            zstd: zstd::bulk::Compressor::new(ZSTD_LEVEL).ok(),
            plain: Vec::new(),
            packed: Vec::new(),
        }
    }

    /// The frame of `records`, which the caller has checked against the limits.
    pub(crate) fn encode(&mut self, seed: u32, first_position: u64, records: &[Record]) -> &[u8] {
        self.plain.clear();
        self.plain.resize(HEADER_BYTES, 0);
        for record in records {
            encode_record(&mut self.plain, record);
        }
        let plain_length = self.plain.len() - HEADER_BYTES;
        // One byte less than it has now: "smaller" and "fits" are the same question.
        self.packed.resize(HEADER_BYTES + plain_length.saturating_sub(1), 0);
        let packed_length = match &mut self.zstd {
            Some(zstd) => zstd
                .compress_to_buffer(&self.plain[HEADER_BYTES..], &mut self.packed[HEADER_BYTES..])
                .ok(),
            None => None,
        };
        let (flags, frame) = match packed_length {
            Some(length) => (FLAG_ZSTD, &mut self.packed[..HEADER_BYTES + length]),
            None => (0, &mut self.plain[..]),
        };
        let (header, body) = frame.split_at_mut(HEADER_BYTES);
        let body_crc = crc32c::crc32c(body);
        header[0..4].copy_from_slice(&MAGIC);
        header[4..6].copy_from_slice(&self.level.to_le_bytes());
        header[6..8].copy_from_slice(&flags.to_le_bytes());
        header[8..12].copy_from_slice(&(records.len() as u32).to_le_bytes());
        header[12..16].copy_from_slice(&(plain_length as u32).to_le_bytes());
        header[16..20].copy_from_slice(&(body.len() as u32).to_le_bytes());
        header[20..28].copy_from_slice(&first_position.to_le_bytes());
        header[28..32].copy_from_slice(&body_crc.to_le_bytes());
        let header_crc = crc32c::crc32c_append(seed, &header[..32]);
        header[32..36].copy_from_slice(&header_crc.to_le_bytes());
        frame
    }
}

/// Encoded bytes of the records before compression, at most.
pub(crate) fn size_bound(records: &[Record]) -> usize {
    records.iter().fold(0, |sum, record| {
        sum.saturating_add(record.payload.len()).saturating_add(RECORD_OVERHEAD)
    })
}

fn encode_record(out: &mut Vec<u8>, record: &Record) {
    put_varint(out, u64::from(record.partition));
    put_varint(out, record.sequence);
    put_varint(out, record.payload.len() as u64);
    out.extend_from_slice(&crc32c::crc32c(&record.payload).to_le_bytes());
    out.extend_from_slice(&record.payload);
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// A group's header whose checksum is right: it was written by an owner of this very segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Header {
    pub(crate) level: u16,
    flags: u16,
    pub(crate) records: u32,
    plain_length: u32,
    pub(crate) body_length: u32,
    pub(crate) first_position: u64,
    body_crc: u32,
}

impl Header {
    /// The header at the start of `bytes`, if there is a whole one.
    pub(crate) fn read(seed: u32, bytes: &[u8]) -> Option<Header> {
        let header = bytes.first_chunk::<HEADER_BYTES>()?;
        let u16_at = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        let u32_at = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        if header[..4] != MAGIC || u32_at(32) != crc32c::crc32c_append(seed, &header[..32]) {
            return None;
        }
        Some(Header {
            level: u16_at(4),
            flags: u16_at(6),
            records: u32_at(8),
            plain_length: u32_at(12),
            body_length: u32_at(16),
            first_position: u64::from(u32_at(20)) | u64::from(u32_at(24)) << 32,
            body_crc: u32_at(28),
        })
    }

    /// The first header in `bytes` that `counts`, at any offset.
    pub(crate) fn find(seed: u32, bytes: &[u8], counts: impl Fn(&Header) -> bool) -> Option<(usize, Header)> {
        memchr::memmem::find_iter(bytes, &MAGIC).find_map(|at| Some((at, Header::read(seed, &bytes[at..]).filter(&counts)?)))
    }

    /// The body, if `bytes` (what follows the header) holds all of it and its checksum is right.
    pub(crate) fn body<'a>(&self, bytes: &'a [u8]) -> Option<&'a [u8]> {
        let body = bytes.get(..usize::try_from(self.body_length).ok()?)?;
        (crc32c::crc32c(body) == self.body_crc).then_some(body)
    }
}

/// Decodes bodies, with a buffer that it keeps.
pub(crate) struct Decoder {
    zstd: Option<zstd::bulk::Decompressor<'static>>,
    plain: Vec<u8>,
}

impl Decoder {
    pub(crate) fn new() -> Decoder {
        Decoder {
            zstd: zstd::bulk::Decompressor::new().ok(),
            plain: Vec::new(),
        }
    }

    /// The records of a checked body. Every record is taken from checked bytes or not at all.
    pub(crate) fn decode<'a>(&'a mut self, header: &Header, body: &'a [u8]) -> Result<Records<'a>, &'static str> {
        let plain_length = header.plain_length as usize;
        if plain_length > MAX_GROUP_BYTES || header.records as usize > MAX_GROUP_RECORDS || header.records == 0 {
            return Err("a group's header is over the limits");
        }
        let plain = match header.flags {
            0 if body.len() == plain_length => body,
            FLAG_ZSTD => {
                // The buffer is as long as the header says, so a body that unfolds to more is an error, not memory.
                self.plain.resize(plain_length, 0);
                let zstd = self.zstd.as_mut().ok_or("no memory for a decompressor")?;
                match zstd.decompress_to_buffer(body, &mut self.plain[..]) {
                    Ok(length) if length == plain_length => &self.plain[..],
                    _ => return Err("a group does not decompress to the length that it states"),
                }
            }
            _ => return Err("a group's flags and lengths contradict each other"),
        };
        Ok(Records {
            rest: plain,
            left: header.records,
        })
    }
}

/// The records of one group, in order.
pub(crate) struct Records<'a> {
    rest: &'a [u8],
    left: u32,
}

impl<'a> Iterator for Records<'a> {
    type Item = Result<RecordRef<'a>, &'static str>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 {
            let trailing = !self.rest.is_empty();
            self.rest = &[];
            return trailing.then_some(Err("a group has bytes after its last record"));
        }
        self.left -= 1;
        let record = self.take_record();
        if record.is_none() {
            (self.rest, self.left) = (&[], 0);
        }
        Some(record.ok_or("a record is malformed or its checksum is wrong"))
    }
}

impl<'a> Records<'a> {
    fn take_record(&mut self) -> Option<RecordRef<'a>> {
        let partition = u16::try_from(self.take_varint()?).ok()?;
        let sequence = self.take_varint()?;
        let length = usize::try_from(self.take_varint()?).ok()?;
        let (crc, rest) = self.rest.split_first_chunk::<4>()?;
        let (payload, rest) = rest.split_at_checked(length)?;
        self.rest = rest;
        (crc32c::crc32c(payload) == u32::from_le_bytes(*crc)).then_some(RecordRef {
            partition,
            sequence,
            payload,
        })
    }

    fn take_varint(&mut self) -> Option<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.rest.split_first()?;
            self.rest = rest;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                return None;
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;

    fn decode_all(frame: &[u8], seed: u32) -> Result<Vec<Record>, &'static str> {
        let header = Header::read(seed, frame).ok_or("no header")?;
        let body = header.body(&frame[HEADER_BYTES..]).ok_or("no body")?;
        let mut decoder = Decoder::new();
        decoder
            .decode(&header, body)?
            .map(|record| record.map(RecordRef::to_record))
            .collect()
    }

    /// Makes both checksums right again, as a defect in the writer (or an attacker with the seed) would.
    fn sign(frame: &mut [u8], seed: u32) {
        let body_crc = crc32c::crc32c(&frame[HEADER_BYTES..]);
        frame[28..32].copy_from_slice(&body_crc.to_le_bytes());
        let header_crc = crc32c::crc32c_append(seed, &frame[..32]);
        frame[32..36].copy_from_slice(&header_crc.to_le_bytes());
    }

    fn records() -> impl Strategy<Value = Vec<Record>> {
        let payload = prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..300),
            (any::<u8>(), 0..5000usize).prop_map(|(byte, length)| vec![byte; length])
        ];
        let record = (any::<u16>(), any::<u64>(), payload);
        let record = record.prop_map(|(partition, sequence, payload)| Record {
            partition,
            sequence,
            payload: Bytes::from(payload),
        });
        proptest::collection::vec(record, 1..20)
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(records in records(), seed: u32, position: u64) {
            let mut encoder = Encoder::new(FORMAT_LEVEL);
            let frame = encoder.encode(seed, position, &records);
            prop_assert!(frame.len() <= HEADER_BYTES + size_bound(&records));
            prop_assert_eq!(decode_all(frame, seed).unwrap(), records);
            prop_assert!(Header::read(seed ^ 1, frame).is_none(), "a header of another segment must not pass");
        }

        #[test]
        fn a_signed_lie_is_an_error_or_whole_records(records in records(), seed: u32, at: usize, mask in 1..=255u8) {
            let mut encoder = Encoder::new(FORMAT_LEVEL);
            let mut frame = encoder.encode(seed, 1, &records).to_vec();
            let at = at % frame.len();
            frame[at] ^= mask;
            sign(&mut frame, seed);
            let _ = decode_all(&frame, seed);
        }

        #[test]
        fn any_bytes_are_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200), seed: u32) {
            prop_assert!(decode_all(&bytes, seed).is_err());
            prop_assert!(Header::find(seed, &bytes, |_| true).is_none());
            let records = Records { rest: &bytes, left: 3 };
            prop_assert!(records.count() <= 3);
        }
    }

    #[test]
    fn varints() {
        for value in [0, 1, 127, 128, 16_383, 16_384, u64::from(u32::MAX), u64::MAX - 1, u64::MAX] {
            let mut bytes = Vec::new();
            put_varint(&mut bytes, value);
            assert_eq!(Records { rest: &bytes, left: 1 }.take_varint(), Some(value));
        }
        for bad in [
            &[0xff; 10][..],
            &[0x80; 9],
            &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2],
            &[],
        ] {
            assert_eq!(Records { rest: bad, left: 1 }.take_varint(), None, "{bad:?}");
        }
    }

    #[test]
    fn a_bomb_is_refused() {
        let bomb = zstd::bulk::compress(&vec![0; 64 * 1024 * 1024], 1).unwrap();
        for stated in [10u32, MAX_GROUP_BYTES as u32, MAX_GROUP_BYTES as u32 + 1, u32::MAX] {
            let mut frame = vec![0; HEADER_BYTES];
            frame[..4].copy_from_slice(&MAGIC);
            frame[4] = 1;
            frame[6] = FLAG_ZSTD as u8;
            frame[8] = 1;
            frame[12..16].copy_from_slice(&stated.to_le_bytes());
            frame[16..20].copy_from_slice(&(bomb.len() as u32).to_le_bytes());
            frame.extend_from_slice(&bomb);
            sign(&mut frame, 7);
            assert!(decode_all(&frame, 7).is_err(), "{stated}");
        }
    }
}
