//! Output as lines: split wherever the bytes were, never fatal, never more than one line in memory.

use std::io::{self, BufReader, Read};

use evalgrid_domain::limits::MAX_OUTPUT_LINE_BYTES;

/// A buffer that grew for one long line is given back above this.
const KEPT_BUFFER_BYTES: usize = 1 << 20;
/// Bytes per read: one system call each.
const READ_BYTES: usize = 64 << 10;

/// Splits a stream into lines, without their line feeds. Lines over [`MAX_OUTPUT_LINE_BYTES`] are dropped and counted.
#[derive(Default)]
pub struct LineReader {
    partial: Vec<u8>,
    /// Everything up to the next line feed is dropped.
    skipping: bool,
    offset: u64,
    dropped: u64,
}

impl LineReader {
    /// Takes the next bytes. `line` gets each line that ends in them, and the offset just behind it.
    pub fn push(&mut self, mut bytes: &[u8], line: &mut dyn FnMut(&[u8], u64)) {
        while let Some(length) = memchr::memchr(b'\n', bytes) {
            let (part, rest) = (&bytes[..length], &bytes[length + 1..]);
            self.offset += length as u64 + 1;
            self.end_line(part, line);
            bytes = rest;
        }
        self.offset += bytes.len() as u64;
        if self.skipping {
            return;
        }
        if self.partial.len() + bytes.len() > MAX_OUTPUT_LINE_BYTES {
            self.drop_line();
            self.skipping = true;
        } else {
            self.partial.extend_from_slice(bytes);
        }
    }

    /// The stream has ended: a last line without a line feed counts too.
    pub fn finish(&mut self, line: &mut dyn FnMut(&[u8], u64)) {
        if !self.partial.is_empty() {
            self.end_line(b"", line);
        }
    }

    /// Bytes are missing from here to `offset`: the line that was cut is dropped, and so is what follows up to its end.
    pub fn jump(&mut self, offset: u64) {
        self.clear();
        self.skipping = true;
        self.offset = offset;
    }

    /// How many lines were dropped.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// How many bytes have gone by.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    fn end_line(&mut self, part: &[u8], line: &mut dyn FnMut(&[u8], u64)) {
        if self.skipping {
            self.skipping = false;
        } else if self.partial.len() + part.len() > MAX_OUTPUT_LINE_BYTES {
            self.drop_line();
        } else if self.partial.is_empty() {
            line(part, self.offset);
        } else {
            self.partial.extend_from_slice(part);
            line(&self.partial, self.offset);
            self.clear();
        }
    }

    fn drop_line(&mut self) {
        self.dropped += 1;
        self.clear();
    }

    fn clear(&mut self) {
        self.partial.clear();
        self.partial.shrink_to(KEPT_BUFFER_BYTES);
    }
}

/// Lines of an output whose middle may be missing.
pub struct Lines {
    reader: LineReader,
    /// Bytes between head and tail that were not kept.
    missing: u64,
}

impl Lines {
    /// Reads `head`, then `tail`, which begins at the given offset of the whole output.
    pub fn read(head: &mut dyn Read, tail: Option<(&mut dyn Read, u64)>, line: &mut dyn FnMut(&[u8], u64)) -> io::Result<Self> {
        let mut lines = Self {
            reader: LineReader::default(),
            missing: 0,
        };
        lines.drain(head, line)?;
        if let Some((tail, start)) = tail {
            let end_of_head = lines.reader.offset();
            if start > end_of_head {
                lines.missing = start - end_of_head;
                lines.reader.jump(start);
            } else {
                // The two overlap: what the head had is not read twice.
                io::copy(&mut tail.take(end_of_head - start), &mut io::sink())?;
            }
            lines.drain(tail, line)?;
        }
        lines.reader.finish(line);
        Ok(lines)
    }

    /// Was anything lost?
    pub fn lost(&self) -> bool {
        self.missing > 0 || self.reader.dropped() > 0
    }

    /// What was lost, for people.
    pub fn diagnostics(&self) -> Vec<String> {
        let mut found = Vec::new();
        if self.missing > 0 {
            found.push(format!("{} bytes in the middle of the agent's output were not kept", self.missing));
        }
        let too_long = self.reader.dropped();
        if too_long > 0 {
            found.push(format!(
                "{too_long} lines of the agent's output were over {} MiB and were dropped",
                MAX_OUTPUT_LINE_BYTES >> 20
            ));
        }
        found
    }

    fn drain(&mut self, from: &mut dyn Read, line: &mut dyn FnMut(&[u8], u64)) -> io::Result<()> {
        let mut buffer = vec![0; READ_BYTES];
        loop {
            match from.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(count) => self.reader.push(&buffer[..count], line),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// When bytes arrived: pairs of little-endian u64, the offset of the end of a chunk and milliseconds since the epoch, both growing.
pub struct Arrivals<R: Read> {
    pairs: BufReader<R>,
    current: Option<(u64, u64)>,
    fallback: u64,
}

impl<R: Read> Arrivals<R> {
    /// `fallback` is the time of bytes that no pair tells of.
    pub fn new(pairs: R, fallback: u64) -> Self {
        let mut arrivals = Self {
            pairs: BufReader::new(pairs),
            current: None,
            fallback,
        };
        arrivals.current = arrivals.next_pair();
        arrivals
    }

    /// When the byte just before `offset` arrived. Offsets must not go back. Unreadable times cost times, nothing else.
    pub fn at(&mut self, offset: u64) -> u64 {
        while let Some((end, at)) = self.current {
            if end >= offset {
                return at;
            }
            self.current = self.next_pair();
        }
        self.fallback
    }

    fn next_pair(&mut self) -> Option<(u64, u64)> {
        let mut pair = [0; 16];
        self.pairs.read_exact(&mut pair).ok()?;
        let (end, at) = pair.split_at(8);
        Some((u64::from_le_bytes(end.try_into().ok()?), u64::from_le_bytes(at.try_into().ok()?)))
    }
}
