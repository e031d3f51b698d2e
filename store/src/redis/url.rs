//! Where Redis is: one server, a set of sentinels that know the server, or some nodes of a cluster.

use std::fmt;
use std::str::FromStr;

use percent_encoding::percent_decode_str;

/// Most addresses in one URL: every one of them may be tried within one deadline.
const MAX_NODES: usize = 16;
const DEFAULT_PORT: u16 = 6379;
const DEFAULT_SENTINEL_PORT: u16 = 26379;

/// One server's address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) host: String,
    pub(super) port: u16,
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// How the server that holds a cell is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Topology {
    Single(Node),
    Sentinel { sentinels: Vec<Node>, master: String },
    Cluster(Vec<Node>),
}

/// The address of a Redis, with what it takes to log in. Prints without its password.
///
/// - `redis://[user[:password]@]host[:port][/database]`
/// - `redis-sentinel://[user[:password]@]host[:port],host[:port]/master-name[/database]`
/// - `redis-cluster://[user[:password]@]host[:port],host[:port]`
///
/// User and password are percent-encoded; they are for the servers, not for the sentinels.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisUrl {
    pub(super) topology: Topology,
    pub(super) user: Option<String>,
    pub(super) password: Option<String>,
    pub(super) database: i64,
}

/// A text that is no address of a Redis. Says nothing of the text itself, which may hold a password.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RedisUrlError {
    /// Not one of the three schemes.
    #[error("a Redis URL begins with redis://, redis-sentinel:// or redis-cluster://")]
    Scheme,
    /// An encrypted scheme, which this version does not speak.
    #[error("connections to Redis are not encrypted by Evalgrid: use a private network or a TLS proxy, and a scheme without the second s")]
    Tls,
    /// User or password is not percent-encoded UTF-8.
    #[error("user and password in a Redis URL must be percent-encoded UTF-8")]
    Credentials,
    /// No host, or one that cannot be one.
    #[error("a Redis URL needs a host, or several separated by commas, each as host, host:port or [address]:port")]
    Host,
    /// A port that is none.
    #[error("a port in a Redis URL is a number from 1 to 65535")]
    Port,
    /// Several hosts where one is meant.
    #[error("redis:// takes one host; for several use redis-sentinel:// or redis-cluster://")]
    ManyHosts,
    /// More addresses than can be tried in one deadline.
    #[error("a Redis URL takes at most {MAX_NODES} hosts")]
    TooManyHosts,
    /// No name of the master.
    #[error("redis-sentinel:// needs the master's name: redis-sentinel://host:26379/mymaster")]
    MasterName,
    /// A database that is no number.
    #[error("the database in a Redis URL is a number from 0 to 65535")]
    Database,
    /// Something behind the last part.
    #[error("a Redis URL has nothing behind its last part: no options, and no database in a cluster")]
    Trailing,
}

impl FromStr for RedisUrl {
    type Err = RedisUrlError;

    fn from_str(text: &str) -> Result<RedisUrl, RedisUrlError> {
        let (scheme, rest) = text.split_once("://").ok_or(RedisUrlError::Scheme)?;
        let default_port = match scheme {
            "redis" | "redis-cluster" => DEFAULT_PORT,
            "redis-sentinel" => DEFAULT_SENTINEL_PORT,
            "rediss" | "rediss-sentinel" | "rediss-cluster" => return Err(RedisUrlError::Tls),
            _ => return Err(RedisUrlError::Scheme),
        };
        // A password may hold anything but the characters that end it, so the last @ is the one.
        let (credentials, rest) = match rest.rsplit_once('@') {
            Some((credentials, rest)) => (Some(credentials), rest),
            None => (None, rest),
        };
        let (user, password) = credentials.map_or(Ok((None, None)), parse_credentials)?;
        let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
        if hosts.split(',').count() > MAX_NODES {
            return Err(RedisUrlError::TooManyHosts);
        }
        let mut nodes = hosts
            .split(',')
            .map(|host| parse_node(host, default_port))
            .collect::<Result<Vec<Node>, RedisUrlError>>()?;
        let (topology, database) = match scheme {
            "redis" => {
                let node = nodes.pop().ok_or(RedisUrlError::Host)?;
                if !nodes.is_empty() {
                    return Err(RedisUrlError::ManyHosts);
                }
                (Topology::Single(node), path)
            }
            "redis-sentinel" => {
                let (name, database) = path.split_once('/').unwrap_or((path, ""));
                let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
                if name.is_empty() || !name.bytes().all(allowed) {
                    return Err(RedisUrlError::MasterName);
                }
                let master = name.to_owned();
                (Topology::Sentinel { sentinels: nodes, master }, database)
            }
            _ if path.is_empty() => (Topology::Cluster(nodes), ""),
            _ => return Err(RedisUrlError::Trailing),
        };
        let database = match database {
            "" => 0,
            number => number.parse::<u16>().map_err(|_| RedisUrlError::Database)?.into(),
        };
        Ok(RedisUrl {
            topology,
            user,
            password,
            database,
        })
    }
}

type Credentials = (Option<String>, Option<String>);

fn parse_credentials(text: &str) -> Result<Credentials, RedisUrlError> {
    let decode = |part: &str| match percent_decode_str(part).decode_utf8() {
        Ok(part) if part.contains('\0') => Err(RedisUrlError::Credentials),
        Ok(part) if part.is_empty() => Ok(None),
        Ok(part) => Ok(Some(part.into_owned())),
        Err(_) => Err(RedisUrlError::Credentials),
    };
    match text.split_once(':') {
        Some((user, password)) => Ok((decode(user)?, decode(password)?)),
        None => Ok((decode(text)?, None)),
    }
}

fn parse_node(text: &str, default_port: u16) -> Result<Node, RedisUrlError> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']').ok_or(RedisUrlError::Host)?;
            let port = match rest {
                "" => None,
                rest => Some(rest.strip_prefix(':').ok_or(RedisUrlError::Host)?),
            };
            (host, port)
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:".contains(&byte);
    if host.is_empty() || !host.bytes().all(allowed) {
        return Err(RedisUrlError::Host);
    }
    let port = match port {
        None => default_port,
        Some(port) => port.parse().ok().filter(|port| *port > 0).ok_or(RedisUrlError::Port)?,
    };
    let host = host.to_owned();
    Ok(Node { host, port })
}

impl fmt::Display for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, nodes, master) = match &self.topology {
            Topology::Single(node) => ("redis", std::slice::from_ref(node), None),
            Topology::Sentinel { sentinels, master } => ("redis-sentinel", &sentinels[..], Some(master)),
            Topology::Cluster(nodes) => ("redis-cluster", &nodes[..], None),
        };
        write!(f, "{scheme}://")?;
        if self.user.is_some() || self.password.is_some() {
            f.write_str(self.user.as_deref().unwrap_or_default())?;
            f.write_str(if self.password.is_some() { ":***@" } else { "@" })?;
        }
        for (index, node) in nodes.iter().enumerate() {
            write!(f, "{}{node}", if index > 0 { "," } else { "" })?;
        }
        if let Some(master) = master {
            write!(f, "/{master}")?;
        }
        match self.database {
            0 => Ok(()),
            database => write!(f, "/{database}"),
        }
    }
}

impl fmt::Debug for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RedisUrl({self})")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn urls() {
        let check = |text: &str, printed: Result<&str, RedisUrlError>| {
            let parsed = text.parse::<RedisUrl>();
            assert_eq!(
                parsed.as_ref().map(RedisUrl::to_string).map_err(|error| *error),
                printed.map(str::to_owned),
                "{text}"
            );
            if let Ok(url) = parsed {
                assert!(!format!("{url:?} {url}").contains("s3cret"), "{text}");
            }
        };
        check("redis://h", Ok("redis://h:6379"));
        check("redis://127.0.0.1:7000/3", Ok("redis://127.0.0.1:7000/3"));
        check("redis://[::1]:7000", Ok("redis://[::1]:7000"));
        check("redis://[::1]", Ok("redis://[::1]:6379"));
        check("redis://:s3cret@h", Ok("redis://:***@h:6379"));
        check("redis://me:s3cret%40%2F@h", Ok("redis://me:***@h:6379"));
        check("redis://me:s3cret@x@h", Ok("redis://me:***@h:6379"));
        check("redis://me@h", Ok("redis://me@h:6379"));
        check("redis-sentinel://a,b:7/mymaster", Ok("redis-sentinel://a:26379,b:7/mymaster"));
        check("redis-sentinel://a/m/2", Ok("redis-sentinel://a:26379/m/2"));
        check("redis-cluster://a:1,b:2,c:3", Ok("redis-cluster://a:1,b:2,c:3"));
        for (text, error) in [
            ("", RedisUrlError::Scheme),
            ("http://h", RedisUrlError::Scheme),
            ("rediss://h", RedisUrlError::Tls),
            ("redis://", RedisUrlError::Host),
            ("redis://a b", RedisUrlError::Host),
            ("redis://[::1", RedisUrlError::Host),
            ("redis://h?x=y", RedisUrlError::Host),
            ("redis://h:0", RedisUrlError::Port),
            ("redis://h:70000", RedisUrlError::Port),
            ("redis://h:6379/x", RedisUrlError::Database),
            ("redis://h/-1", RedisUrlError::Database),
            ("redis://a,b", RedisUrlError::ManyHosts),
            ("redis://me:%ff@h", RedisUrlError::Credentials),
            ("redis-sentinel://a,b", RedisUrlError::MasterName),
            ("redis-cluster://a/1", RedisUrlError::Trailing),
            (&format!("redis-cluster://{}", ["h"; 17].join(",")), RedisUrlError::TooManyHosts),
        ] {
            check(text, Err(error));
        }
        let url: RedisUrl = "redis://me:s3cret%40%2F@h".parse().unwrap();
        assert_eq!((url.user.as_deref(), url.password.as_deref()), (Some("me"), Some("s3cret@/")));
    }
}
