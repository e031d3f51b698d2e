//! What can go wrong between us and Redis, told apart by whether trying again can help.

use std::time::Duration;

use redis::Value;

use super::url::RedisUrlError;
use crate::log::LogError;

/// Why Redis could not be used.
#[derive(Debug, thiserror::Error)]
pub enum RedisError {
    /// The URL is none.
    #[error(transparent)]
    Url(#[from] RedisUrlError),
    /// Not a cell's name.
    #[error("a cell's name is 1 to 32 of a-z, 0-9 and -")]
    Cell,
    /// A lease that could not be kept.
    #[error("a lease must last from 500 ms to 60 s, not {0:?}")]
    Lease(Duration),
    /// No connection, or it broke. What was asked may have been done.
    #[error("no answer from Redis at {node}: {reason}")]
    Connection {
        /// Which server.
        node: String,
        /// What went wrong.
        reason: String,
    },
    /// It does not take our user and password.
    #[error("Redis at {node} refused the user or the password of its URL")]
    Login {
        /// Which server.
        node: String,
    },
    /// Nobody says which server is the master.
    #[error("no server holds the cell now: {reason}")]
    NoMaster {
        /// What was asked, and what was answered.
        reason: String,
    },
    /// The server refused. Nothing was done.
    #[error("Redis at {node} refused: {code} {message}")]
    Refused {
        /// Which server.
        node: String,
        /// Its code, as `OOM`.
        code: String,
        /// Its text.
        message: String,
    },
    /// The server is not what it was said to be.
    #[error("Redis at {node} is a {role}, not a master; it takes no records")]
    NotMaster {
        /// Which server.
        node: String,
        /// What it says that it is.
        role: String,
    },
    /// Written, but on fewer servers than asked for.
    #[error("{reached} of {wanted} replicas confirmed in time")]
    Short {
        /// Replicas that confirmed; -1 where the master itself had not synced.
        reached: i64,
        /// Replicas that were asked for.
        wanted: u32,
    },
    /// An answer of a shape that this version does not know.
    #[error("Redis at {node} answered {what} in an unknown way; is it Redis 6.2 or newer?")]
    Answer {
        /// Which server.
        node: String,
        /// To what.
        what: &'static str,
    },
    /// A setting under which acknowledged records could vanish.
    #[error("Redis at {node} has `{setting} {found}`: {why}; set `{setting} {wanted}`")]
    Setting {
        /// Which server.
        node: String,
        /// The setting's name in redis.conf.
        setting: &'static str,
        /// Its value.
        found: String,
        /// The value that it must have.
        wanted: &'static str,
        /// What would go wrong.
        why: &'static str,
    },
    /// Settings cannot be read, and nobody vouched for them.
    #[error(
        "Redis at {node} does not show its settings ({reason}): if it keeps what it acknowledges (append-only file, no eviction), say so with --redis-assume-durable"
    )]
    Hidden {
        /// Which server.
        node: String,
        /// Its answer to `CONFIG GET`.
        reason: String,
    },
    /// Too old.
    #[error("Redis at {node} is version {found}; 6.2 is the oldest that works")]
    Old {
        /// Which server.
        node: String,
        /// Its version.
        found: String,
    },
    /// What is stored is not what was stored.
    #[error("the cell's data in Redis is damaged at {place}: {reason}")]
    Damaged {
        /// Where: a key and a position.
        place: String,
        /// What is wrong.
        reason: String,
    },
}

/// Refusals that pass by themselves, or with another server: waiting and asking anew can help.
const PASSING: &[&str] = &[
    "BUSY",
    "LOADING",
    "READONLY",
    "MOVED",
    "ASK",
    "TRYAGAIN",
    "CLUSTERDOWN",
    "MASTERDOWN",
    "NOREPLICAS",
    "MISCONF",
    "OOM",
    "UNKILLABLE",
];
/// Refusals after which another server may be the right one.
const ELSEWHERE: &[&str] = &["READONLY", "MOVED", "ASK", "CLUSTERDOWN", "MASTERDOWN"];

impl RedisError {
    /// Whether the same call can succeed a moment later.
    pub fn passes(&self) -> bool {
        match self {
            RedisError::Connection { .. } | RedisError::NoMaster { .. } | RedisError::NotMaster { .. } | RedisError::Short { .. } => true,
            RedisError::Refused { code, .. } => PASSING.contains(&code.as_str()),
            _ => false,
        }
    }

    /// Whether the connection that gave this answer is the wrong one from now on.
    pub(super) fn is_elsewhere(&self) -> bool {
        match self {
            RedisError::Connection { .. } | RedisError::NoMaster { .. } | RedisError::NotMaster { .. } => true,
            RedisError::Refused { code, .. } => ELSEWHERE.contains(&code.as_str()),
            _ => false,
        }
    }

    /// Whether the server does not know the script (any more).
    pub(super) fn is_unknown_script(&self) -> bool {
        matches!(self, RedisError::Refused { code, .. } if code == "NOSCRIPT")
    }
}

/// The value, unless it is the server's refusal.
pub(super) fn accepted(node: &str, value: Value) -> Result<Value, RedisError> {
    match value {
        Value::ServerError(error) => Err(RedisError::Refused {
            node: node.to_owned(),
            code: error.code().to_owned(),
            message: error.details().unwrap_or_default().to_owned(),
        }),
        value => Ok(value),
    }
}

impl From<RedisError> for LogError {
    fn from(error: RedisError) -> LogError {
        LogError::Redis(Box::new(error))
    }
}
