//! Measures the log in Redis against a bare scripted `XADD` of the very same groups, turn by turn against one server: records per
//! second, and what a group takes.
//!
//! `cargo run --release -p evalgrid-store --example redis_append -- [seconds per case] [URL of a Redis that may be written to]`
//! Without a URL it starts a server of its own, with `appendfsync always`, in a temporary folder.
#![expect(clippy::disallowed_methods, reason = "it measures time")]

use std::error::Error;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use evalgrid_store::redis::{RedisLog, RedisOptions, RedisStore, Tenure};
use evalgrid_store::{Log, Record};
use redis::Connection;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const PAYLOAD: usize = 512;
/// What a committer's groups hold while it is busy.
const GROUPS: [usize; 3] = [16, 64, 256];
/// Each side gets many short turns, so that a slow moment of the machine hits both.
const TURNS: u32 = 20;
/// More would not fit into memory for long.
const MOST_GROUPS: usize = 2000;

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

/// A server that ends with the run.
struct Server {
    child: Child,
    _dir: tempfile::TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        // It is about to be thrown away; how it ends does not matter.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn start() -> Outcome<(Server, String)> {
    let dir = tempfile::tempdir_in(std::env::current_dir()?)?;
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    let child = Command::new("redis-server")
        .args([
            "--port",
            &port,
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "yes",
            "--appendfsync",
            "always",
        ])
        // A rewrite of the file in the background would hit one side only.
        .args(["--auto-aof-rewrite-percentage", "0", "--dir"])
        .arg(dir.path())
        .stdout(Stdio::null())
        .spawn()?;
    Ok((Server { child, _dir: dir }, format!("redis://127.0.0.1:{port}")))
}

fn connect(url: &str) -> Outcome<Connection> {
    let start = Instant::now();
    loop {
        match redis::Client::open(url)?.get_connection_with_timeout(Duration::from_secs(1)) {
            Ok(connection) => return Ok(connection),
            Err(error) if start.elapsed() > Duration::from_secs(10) => return Err(error.into()),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// What one side did in one turn.
struct Turn {
    times: Vec<Duration>,
    elapsed: Duration,
}

fn evalgrid(log: &mut RedisLog, sequence: &mut u64, size: usize, payloads: &[Bytes], time: Duration) -> Outcome<Turn> {
    let (start, mut times) = (Instant::now(), Vec::new());
    while start.elapsed() < time && times.len() < MOST_GROUPS {
        let group = (0..size).map(|_| {
            *sequence += 1;
            Record {
                partition: 0,
                sequence: *sequence,
                payload: payloads[*sequence as usize % payloads.len()].clone(),
            }
        });
        let group: Vec<Record> = group.collect();
        let asked = Instant::now();
        log.append(&group)?;
        times.push(asked.elapsed());
    }
    Ok(Turn {
        times,
        elapsed: start.elapsed(),
    })
}

fn bare(connection: &mut Connection, groups: &[(String, Vec<u8>)]) -> Outcome<Turn> {
    let script = redis::Script::new("return redis.call('XADD', KEYS[1], ARGV[1], 'g', ARGV[2])");
    script.load(connection)?;
    let (start, mut times) = (Instant::now(), Vec::new());
    for (id, group) in groups {
        let asked = Instant::now();
        script.key("bare").arg(id).arg(group).invoke::<String>(connection)?;
        times.push(asked.elapsed());
    }
    Ok(Turn {
        times,
        elapsed: start.elapsed(),
    })
}

/// The groups that the log has written since `from`, as they are stored.
fn written(connection: &mut Connection, from: u64) -> Outcome<Vec<(String, Vec<u8>)>> {
    type Entry = (String, Vec<(String, Vec<u8>)>);
    let mut groups: Vec<(String, Vec<u8>)> = Vec::new();
    let mut next = format!("({from}-0");
    loop {
        let page: Vec<Entry> = redis::cmd("XRANGE")
            .arg("evalgrid:{bench}:log")
            .arg(&next)
            .arg("+")
            .arg("COUNT")
            .arg(64)
            .query(connection)?;
        let Some((last, _)) = page.last() else { return Ok(groups) };
        next = format!("({last}");
        for (id, fields) in page {
            let group = fields.into_iter().find(|(name, _)| name == "g").ok_or("an entry without a group")?;
            groups.push((id, group.1));
        }
    }
}

fn take(url: &str) -> Outcome<(RedisLog, Tenure, RedisStore)> {
    let store = RedisStore::connect(url.parse()?, "bench", RedisOptions::default())?;
    println!("{}", store.durability());
    let (log, tenure) = store.follow().take("bench", |_| Ok(()))?.ok_or("somebody owns the cell `bench`")?;
    Ok((log, tenure, store))
}

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let time = Duration::from_secs_f64(arguments.next().map_or(Ok(6.0), |seconds| seconds.parse())?);
    let (_server, url) = match arguments.next() {
        Some(url) => (None, url),
        None => start().map(|(server, url)| (Some(server), url))?,
    };
    let mut connection = connect(&url)?;
    let (mut log, tenure, _store) = take(&url)?;
    let mut noise = Noise(1);
    let payloads: Vec<Bytes> = (0..4096).map(|_| noise.payload()).collect();
    let mut sequence = 0;
    for size in GROUPS {
        let (mut ours, mut theirs) = ((0.0, 0.0, Vec::new()), (0.0, 0.0, Vec::new()));
        for _ in 0..TURNS {
            let from = sequence;
            let turn = evalgrid(&mut log, &mut sequence, size, &payloads, time / TURNS)?;
            let groups = written(&mut connection, from)?;
            let reference = bare(&mut connection, &groups)?;
            for (sum, turn) in [(&mut ours, turn), (&mut theirs, reference)] {
                sum.0 += (turn.times.len() * size) as f64;
                sum.1 += turn.elapsed.as_secs_f64();
                sum.2.extend(turn.times);
            }
            redis::cmd("DEL").arg("bare").query::<u64>(&mut connection)?;
            redis::cmd("XTRIM")
                .arg("evalgrid:{bench}:log")
                .arg(&["MAXLEN", "1"])
                .query::<u64>(&mut connection)?;
        }
        let rate = |(records, seconds, _): &(f64, f64, Vec<Duration>)| records / seconds;
        for (name, side) in [("log", &mut ours), ("bare", &mut theirs)] {
            side.2.sort_unstable();
            let percentile = |percent: usize| side.2[(side.2.len() - 1) * percent / 100].as_secs_f64() * 1000.0;
            let (median, slow) = (percentile(50), percentile(99));
            println!(
                "{name:5} groups of {size:3}: {:8.0} records/s, p50 {median:6.2} ms, p99 {slow:6.2} ms",
                rate(side)
            );
        }
        println!("      ratio {:.2}", rate(&ours) / rate(&theirs));
    }
    tenure.release()?;
    Ok(())
}
