//! Measures the log against a bare file, in one run on one disk: the rate and latency at which N clients get records acknowledged by one
//! committer, what the device has to write for them, and how fast a log is read again. A log on fresh segments is one that is never cut;
//! one on recycled segments takes a (small) snapshot per segment and is cut behind it, as it goes.
//!
//! `cargo run --release -p evalgrid-store --example group_commit -- [folder] [seconds per case]`
#![expect(clippy::disallowed_methods, reason = "it measures time")]

use std::error::Error;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use bytes::Bytes;
use evalgrid_store::log::{FileLog, Log, LogOptions, Record, Replay, Snapshot};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const KINDS: [&str; 3] = ["bare", "fresh", "recycled"];
const PAYLOAD: usize = 512;
/// Most records in a group, as a committer would bound it.
const GROUP: usize = 1024;

/// What a committer writes groups to.
trait Sink: Send {
    fn commit(&mut self, records: &[Record]) -> Outcome<()>;
}

/// Never cut: every segment is a new file.
struct Fresh(FileLog);

impl Sink for Fresh {
    fn commit(&mut self, records: &[Record]) -> Outcome<()> {
        Ok(self.0.append(records)?)
    }
}

/// Small enough that a case of a few seconds uses several.
const SEGMENT: u64 = 16 * 1024 * 1024;

/// In its steady state: each segment was another one before.
struct Recycled {
    log: FileLog,
    position: u64,
}

impl Recycled {
    fn prepare(dir: &Path) -> Outcome<Recycled> {
        let log = open_log(dir)?;
        let mut sink = Recycled { log, position: 0 };
        let mut noise = Noise(7);
        for first in (1..=6 * SEGMENT / PAYLOAD as u64).step_by(GROUP) {
            // In a partition of its own, so that the numbers of the measured records begin with 1.
            let group = (first..first + GROUP as u64).map(|sequence| Record {
                partition: 1,
                sequence,
                payload: noise.payload(),
            });
            sink.commit(&group.collect::<Vec<_>>())?;
        }
        Ok(sink)
    }
}

impl Sink for Recycled {
    fn commit(&mut self, records: &[Record]) -> Outcome<()> {
        self.log.append(records)?;
        self.position += records.len() as u64;
        if self.log.bytes_since_snapshot() >= SEGMENT {
            // Nobody reads it again.
            self.log.snapshots().save(&Snapshot {
                position: self.position,
                sequences: Vec::new(),
                payload: Bytes::new(),
            })?;
            self.log.cut(self.position)?;
        }
        Ok(())
    }
}

fn open_log(dir: &Path) -> Outcome<FileLog> {
    let options = LogOptions {
        segment_bytes: SEGMENT,
        ..LogOptions::default()
    };
    Ok(FileLog::open(dir, options, |_| Ok(()))?.0)
}

/// The reference: payloads one after another, and a sync.
struct Bare(File, Vec<u8>);

impl Sink for Bare {
    fn commit(&mut self, records: &[Record]) -> Outcome<()> {
        self.1.clear();
        records.iter().for_each(|record| self.1.extend_from_slice(&record.payload));
        self.0.write_all(&self.1)?;
        Ok(self.0.sync_data()?)
    }
}

fn open(kind: &str, dir: &Path) -> Outcome<Box<dyn Sink>> {
    fs::create_dir_all(dir)?;
    Ok(match kind {
        "fresh" => Box::new(Fresh(open_log(dir)?)),
        "recycled" => Box::new(Recycled::prepare(dir)?),
        _ => Box::new(Bare(File::create(dir.join("bare"))?, Vec::new())),
    })
}

/// Bytes that do not compress, so that nothing is flattered.
struct Noise(u64);

impl Noise {
    fn payload(&mut self) -> Bytes {
        let words = std::iter::repeat_with(|| {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (self.0 ^ self.0 >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9).to_le_bytes()
        });
        words.take(PAYLOAD / 8).flatten().collect::<Vec<u8>>().into()
    }
}

/// Bytes written to the device under `dir` since it was started.
fn device_bytes(dir: &Path) -> Outcome<u64> {
    let device = fs::metadata(dir)?.dev();
    let (major, minor) = ((device >> 8 & 0xfff).to_string(), (device & 0xff).to_string());
    let stats = fs::read_to_string("/proc/diskstats")?;
    let fields = stats.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let sectors = fields
        .into_iter()
        .find(|fields| fields[0] == major && fields[1] == minor)
        .map(|fields| fields[9].parse::<u64>());
    Ok(sectors.ok_or("the folder is on no block device of its own")?? * 512)
}

type Request = (Bytes, SyncSender<()>);

/// The committer: takes what has queued, numbers it, writes it as one group, answers everyone. Returns records and groups.
fn commit_all(sink: &mut dyn Sink, requests: &Receiver<Request>) -> Outcome<(u64, u64)> {
    let (mut sequence, mut groups) = (0, 0);
    while let Ok(first) = requests.recv() {
        let (mut records, mut answers) = (Vec::new(), Vec::new());
        for (payload, answer) in std::iter::once(first).chain(requests.try_iter()).take(GROUP) {
            sequence += 1;
            records.push(Record {
                partition: 0,
                sequence,
                payload,
            });
            answers.push(answer);
        }
        sink.commit(&records)?;
        groups += 1;
        for answer in answers {
            // A client that is gone needs no answer.
            let _ = answer.send(());
        }
    }
    Ok((sequence, groups))
}

fn clients(kind: &str, dir: &Path, clients: usize, time: Duration) -> Outcome<()> {
    let mut sink = open(kind, dir)?;
    let (send, receive) = sync_channel::<Request>(clients);
    let before = device_bytes(dir)?;
    let start = Instant::now();
    let committer = std::thread::spawn(move || commit_all(&mut *sink, &receive));
    let threads: Vec<_> = (0..clients)
        .map(|client| {
            let send = send.clone();
            std::thread::spawn(move || {
                let (answer, answered) = sync_channel(1);
                let mut noise = Noise(client as u64);
                let mut latencies = Vec::new();
                while start.elapsed() < time {
                    let payload = noise.payload();
                    let asked = Instant::now();
                    if send.send((payload, answer.clone())).is_err() || answered.recv().is_err() {
                        break;
                    }
                    latencies.push(asked.elapsed());
                }
                latencies
            })
        })
        .collect();
    drop(send);
    let mut latencies: Vec<Duration> = Vec::new();
    for thread in threads {
        latencies.extend(thread.join().map_err(|_| "a client panicked")?);
    }
    let (records, groups) = committer.join().map_err(|_| "the committer panicked")??;
    let seconds = start.elapsed().as_secs_f64();
    let device = device_bytes(dir)? - before;
    latencies.sort_unstable();
    let percentile = |percent: usize| latencies[(latencies.len() - 1) * percent / 100].as_secs_f64() * 1000.0;
    println!(
        "{kind:9} {clients:4} clients  {:8.0} records/s  {:6.0} groups/s  p50 {:6.2} ms  p99 {:6.2} ms  {:7.0} device bytes per 12 records",
        records as f64 / seconds,
        groups as f64 / seconds,
        percentile(50),
        percentile(99),
        device as f64 * 12.0 / records as f64,
    );
    Ok(())
}

/// Slices that the measuring of groups is cut into. The kinds take turns, so that what else the disk does hits all of them.
const SLICES: u32 = 24;

/// Groups of one size, without clients: what the log itself costs. Medians of the slices.
fn groups(kinds: &[&str], dirs: &[PathBuf], size: usize, time: Duration) -> Outcome<()> {
    let mut noise = Noise(size as u64);
    let payloads: Vec<Bytes> = (0..1000).map(|_| noise.payload()).collect();
    let mut sinks = Vec::new();
    for (kind, dir) in kinds.iter().zip(dirs) {
        sinks.push((open(kind, dir)?, 0u64, Vec::new()));
    }
    for _ in 0..SLICES {
        for ((sink, sequence, slices), dir) in sinks.iter_mut().zip(dirs) {
            let (before, first) = (device_bytes(dir)?, *sequence);
            let start = Instant::now();
            while start.elapsed() < time / SLICES {
                let records = std::iter::repeat_with(|| {
                    *sequence += 1;
                    Record {
                        partition: 0,
                        sequence: *sequence,
                        payload: payloads[*sequence as usize % payloads.len()].clone(),
                    }
                });
                sink.commit(&records.take(size).collect::<Vec<_>>())?;
            }
            let (records, seconds) = ((*sequence - first) as f64, start.elapsed().as_secs_f64());
            slices.push((records / seconds, (device_bytes(dir)? - before) as f64 * 12.0 / records));
        }
    }
    for (kind, (_, _, slices)) in kinds.iter().zip(sinks) {
        let (mut rates, mut bytes): (Vec<f64>, Vec<f64>) = slices.into_iter().unzip();
        rates.sort_by(f64::total_cmp);
        bytes.sort_by(f64::total_cmp);
        let middle = SLICES as usize / 2;
        println!(
            "{kind:9} groups of {size:3}  {:8.0} records/s  {:6.0} groups/s  {:7.0} device bytes per 12 records",
            rates[middle],
            rates[middle] / size as f64,
            bytes[middle],
        );
    }
    Ok(())
}

fn recovery(dir: &Path, records: u64) -> Outcome<()> {
    let mut log = FileLog::open(dir, LogOptions::default(), |_| Ok(()))?.0;
    let mut noise = Noise(1);
    for first in (1..=records).step_by(100) {
        let group = (first..first + 100).map(|sequence| Record {
            partition: 0,
            sequence,
            payload: noise.payload(),
        });
        log.append(&group.collect::<Vec<_>>())?;
    }
    drop(log);
    let start = Instant::now();
    let mut bytes = 0;
    let (_log, recovery) = FileLog::open(dir, LogOptions::default(), |replay| {
        if let Replay::Record(_, record) = replay {
            bytes += record.payload.len();
        }
        Ok(())
    })?;
    println!(
        "opened {} records of {PAYLOAD} B again in {:.2} s: {recovery:?}",
        recovery.records,
        start.elapsed().as_secs_f64()
    );
    Ok(())
}

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let dir = PathBuf::from(arguments.next().unwrap_or_else(|| "target/group_commit".to_owned()));
    let time = Duration::from_secs_f64(arguments.next().map_or(Ok(3.0), |seconds| seconds.parse())?);
    let fresh = |name: &str| -> Outcome<PathBuf> {
        let dir = dir.join(name);
        if dir.exists() {
            fs::remove_dir_all(&dir)?;
        }
        fs::create_dir_all(&dir)?;
        rustix::fs::sync();
        Ok(dir)
    };
    for size in [1, 4, 16, 64, 256] {
        let dirs = KINDS.iter().map(|kind| fresh(kind)).collect::<Outcome<Vec<_>>>()?;
        groups(&KINDS, &dirs, size, time)?;
    }
    for count in [1, 16, 256] {
        for kind in KINDS.iter().chain(&KINDS) {
            clients(kind, &fresh(kind)?, count, time)?;
        }
    }
    recovery(&fresh("recovery")?, 1_000_000)?;
    fs::remove_dir_all(&dir)?;
    Ok(())
}
