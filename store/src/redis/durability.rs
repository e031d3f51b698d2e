//! What a server really keeps: read from it, refused where acknowledged records could vanish, and printed for people.

use std::fmt;

use redis::{Cmd, Value, cmd};

use super::error::{RedisError, accepted};
use super::{RedisOptions, value};

/// The oldest version with all commands that are used (`XTRIM MINID`).
const OLDEST: (u32, u32) = (6, 2);

/// When the append-only file is synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fsync {
    /// Before each reply.
    Always,
    /// About once a second.
    EverySecond,
    /// Not to be learned from the server; the operator vouches for it.
    Unknown,
}

/// What the server gives, as it is configured now. Its `Display` is for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Durability {
    /// The server's version.
    pub version: String,
    /// When it syncs.
    pub fsync: Fsync,
    /// Whether each group waits for its sync to be confirmed (`WAITAOF`, from Redis 7.2 on).
    pub confirms_sync: bool,
    /// Replicas that confirm each group before it is acknowledged.
    pub replicas: u32,
    /// Replicas that were connected when it was asked.
    pub connected_replicas: u32,
}

impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Redis {}: ", self.version)?;
        match (self.fsync, self.confirms_sync) {
            (Fsync::Always, _) => f.write_str("acknowledged records survive kill -9 and a power cut of the master (appendfsync always)")?,
            (Fsync::EverySecond, true) => {
                f.write_str("acknowledged records survive kill -9 and a power cut of the master; each waits up to a second for its sync (appendfsync everysec with WAITAOF)")?;
            }
            (Fsync::EverySecond, false) => {
                f.write_str(
                    "kill -9 or a power cut of the master can lose about 2 seconds of acknowledged records (appendfsync everysec)",
                )?;
            }
            (Fsync::Unknown, _) => f.write_str(
                "what a crash of the master can lose is unknown: it does not show its settings, and the operator vouches for it",
            )?,
        }
        match self.replicas {
            0 => f.write_str("; a failover to a replica may lose acknowledged records; loss is detected and reported")?,
            count => {
                let place = if self.confirms_sync { "on disk" } else { "in memory" };
                let (verb, noun) = if count == 1 { ("has", "replica") } else { ("have", "replicas") };
                write!(
                    f,
                    "; {count} {noun} {verb} each acknowledged record {place}, so a failover to one of them loses none, and one to another replica may, which is detected and reported"
                )?;
                if self.connected_replicas < count {
                    write!(
                        f,
                        "; only {} connected now: nothing is acknowledged until there are {count}",
                        self.connected_replicas
                    )?;
                }
            }
        }
        Ok(())
    }
}

/// A field of an `INFO` text.
pub(super) fn info_field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.trim_end().strip_prefix(name)?.strip_prefix(':'))
}

type Calls<'a> = &'a mut dyn FnMut(&[Cmd]) -> Result<Vec<Value>, RedisError>;

/// Reads what the server is and how it is set, and refuses what could lose acknowledged records.
pub(super) fn examine(node: &str, options: &RedisOptions, calls: Calls<'_>) -> Result<Durability, RedisError> {
    let get = |name: &str| cmd("CONFIG").arg("GET").arg(name).clone();
    let answers = calls(&[
        cmd("INFO").arg("server").clone(),
        cmd("INFO").arg("replication").clone(),
        cmd("COMMAND").arg("INFO").arg("WAITAOF").clone(),
        get("maxmemory-policy"),
        get("appendonly"),
        get("appendfsync"),
        get("no-appendfsync-on-rewrite"),
    ])?;
    let [server, replication, waitaof, settings @ ..] = answers.as_slice() else {
        return Err(RedisError::Answer {
            node: node.to_owned(),
            what: "INFO",
        });
    };
    let unknown = |what| RedisError::Answer {
        node: node.to_owned(),
        what,
    };
    let server = value::text(server).ok_or_else(|| unknown("INFO server"))?;
    let version = info_field(server, "redis_version")
        .ok_or_else(|| unknown("INFO server"))?
        .to_owned();
    check_version(node, &version)?;
    let replication = value::text(replication).ok_or_else(|| unknown("INFO replication"))?;
    let connected = info_field(replication, "connected_slaves").and_then(|count| count.parse().ok());
    let known_command = value::items(waitaof).is_some_and(|found| found.first().is_some_and(|entry| value::items(entry).is_some()));
    let fsync = check_settings(node, options, settings)?;
    Ok(Durability {
        version,
        fsync,
        confirms_sync: known_command && fsync != Fsync::Unknown,
        replicas: options.replicas,
        connected_replicas: connected.unwrap_or(0),
    })
}

fn check_version(node: &str, version: &str) -> Result<(), RedisError> {
    let mut parts = version.split('.').map(|part| part.parse::<u32>().ok());
    match (parts.next().flatten(), parts.next().flatten()) {
        (Some(major), Some(minor)) if (major, minor) >= OLDEST => Ok(()),
        _ => Err(RedisError::Old {
            node: node.to_owned(),
            found: version.to_owned(),
        }),
    }
}

fn check_settings(node: &str, options: &RedisOptions, answers: &[Value]) -> Result<Fsync, RedisError> {
    let mut found = Vec::new();
    for answer in answers {
        let answer = match accepted(node, answer.clone()) {
            Ok(answer) => answer,
            Err(_) if options.assume_durable => return Ok(Fsync::Unknown),
            Err(RedisError::Refused { code, message, .. }) => {
                return Err(RedisError::Hidden {
                    node: node.to_owned(),
                    reason: format!("{code} {message}"),
                });
            }
            Err(error) => return Err(error),
        };
        match value::items(&answer) {
            Some([_, found_value]) => found.push(value::text(found_value).unwrap_or_default().to_owned()),
            _ if options.assume_durable => return Ok(Fsync::Unknown),
            _ => {
                return Err(RedisError::Hidden {
                    node: node.to_owned(),
                    reason: "an empty answer".to_owned(),
                });
            }
        }
    }
    let [policy, append_only, fsync, no_sync_on_rewrite] = found.as_slice() else {
        return Err(RedisError::Answer {
            node: node.to_owned(),
            what: "CONFIG GET",
        });
    };
    let refuse = |setting, found: &str, wanted, why| {
        Err(RedisError::Setting {
            node: node.to_owned(),
            setting,
            found: found.to_owned(),
            wanted,
            why,
        })
    };
    if policy != "noeviction" {
        return refuse(
            "maxmemory-policy",
            policy,
            "noeviction",
            "when memory runs short it would throw records away",
        );
    }
    if append_only != "yes" {
        return refuse("appendonly", append_only, "yes", "a restart would lose records");
    }
    if no_sync_on_rewrite != "no" {
        let why = "while its file is rewritten it would acknowledge records that are on no disk";
        return refuse("no-appendfsync-on-rewrite", no_sync_on_rewrite, "no", why);
    }
    match fsync.as_str() {
        "always" => Ok(Fsync::Always),
        "everysec" if options.allow_everysec => Ok(Fsync::EverySecond),
        "everysec" => {
            let why = "a crash would lose about 2 seconds of acknowledged records, unless you allow that (--redis-allow-everysec)";
            refuse("appendfsync", fsync, "always", why)
        }
        _ => refuse("appendfsync", fsync, "always", "a crash would lose acknowledged records"),
    }
}
