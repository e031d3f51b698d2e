//! What sandboxes may reach: everything, nothing, or a list.
//!
//! With a list, a sandbox has a network namespace of its own with nothing but a loopback in it. There each listed host has an address, its
//! name in `/etc/hosts`, and a listening socket for each of its ports. Who connects there is led to the real host by the gate (`gate.rs`),
//! which is a process outside. Nothing else is reachable, no name server either.

use std::{
    fmt,
    net::{Ipv4Addr, SocketAddrV4},
    str::FromStr,
};

use serde::{Deserialize, Serialize};

/// Each needs a socket, and a message carries at most 253 of those.
pub const MOST_ENDPOINTS: usize = 64;

/// What sandboxes may reach. As text: `host`, `off`, or `allow=HOST:PORT,…`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Network {
    /// All that this machine reaches.
    #[default]
    Host,
    /// Nothing.
    Off,
    /// These, and nothing else. One to 64.
    Allow(Vec<Endpoint>),
}

/// A host, by name, and a port of it. As text: `HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// A name; or an IPv4 address of this machine's loopback, which is reached under the same address.
    pub host: String,
    /// TCP.
    pub port: u16,
}

/// Text that is no network setting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NetworkError {
    /// None of the three forms.
    #[error("expected host, off, or allow=HOST:PORT,…")]
    Form,
    /// A member of the list.
    #[error("{0:?} is not HOST:PORT")]
    Endpoint(String),
    /// Inside, only names can be led elsewhere.
    #[error("{0:?}: give the host's name; of addresses only those that begin with 127. can be allowed")]
    Address(String),
    /// Too many.
    #[error("at most {MOST_ENDPOINTS} can be allowed")]
    TooMany,
}

impl Endpoint {
    /// Its address where that is fixed.
    fn own_address(&self) -> Option<Ipv4Addr> {
        match self.host.as_str() {
            "localhost" => Some(Ipv4Addr::LOCALHOST),
            host => host.parse().ok(),
        }
    }
}

impl FromStr for Endpoint {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, NetworkError> {
        let wrong = || NetworkError::Endpoint(text.to_owned());
        let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
        let port = port.parse().ok().filter(|port| *port != 0).ok_or_else(wrong)?;
        // It goes into a hosts file.
        let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
        if host.is_empty() || host.len() > 253 || !host.bytes().all(plain) {
            // An IPv6 address, most likely.
            return Err(if host.contains(':') {
                NetworkError::Address(host.to_owned())
            } else {
                wrong()
            });
        }
        let endpoint = Self {
            host: host.to_ascii_lowercase(),
            port,
        };
        match endpoint.own_address() {
            Some(address) if !address.is_loopback() => Err(NetworkError::Address(host.to_owned())),
            _ => Ok(endpoint),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

impl FromStr for Network {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, NetworkError> {
        match text {
            "host" => Ok(Self::Host),
            "off" => Ok(Self::Off),
            _ => {
                let list = text.strip_prefix("allow=").ok_or(NetworkError::Form)?;
                let mut endpoints: Vec<Endpoint> = Vec::new();
                for endpoint in list.split(',') {
                    let endpoint = endpoint.trim().parse()?;
                    if !endpoints.contains(&endpoint) {
                        endpoints.push(endpoint);
                    }
                }
                if endpoints.len() > MOST_ENDPOINTS {
                    return Err(NetworkError::TooMany);
                }
                Ok(Self::Allow(endpoints))
            }
        }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Off => f.write_str("off"),
            Self::Allow(endpoints) => {
                let list: Vec<String> = endpoints.iter().map(ToString::to_string).collect();
                write!(f, "allow={}", list.join(","))
            }
        }
    }
}

impl Network {
    /// What is allowed one by one.
    pub(crate) fn endpoints(&self) -> &[Endpoint] {
        match self {
            Self::Host | Self::Off => &[],
            Self::Allow(endpoints) => endpoints,
        }
    }

    /// Where each endpoint is found inside, in their order.
    pub(crate) fn listen(&self) -> Vec<SocketAddrV4> {
        let endpoints = self.endpoints();
        let number = |host: &str| endpoints.iter().position(|e| e.host == host).unwrap_or(0);
        let address = |e: &Endpoint| {
            e.own_address()
                .unwrap_or_else(|| Ipv4Addr::new(127, 1, 0, number(&e.host) as u8 + 1))
        };
        endpoints.iter().map(|e| SocketAddrV4::new(address(e), e.port)).collect()
    }

    /// The hosts file inside, where a list says what it must hold.
    pub(crate) fn hosts(&self) -> Option<String> {
        let Self::Allow(endpoints) = self else { return None };
        let mut text = "127.0.0.1 localhost sandbox\n".to_owned();
        let mut named = Vec::new();
        for (endpoint, address) in endpoints.iter().zip(self.listen()) {
            if endpoint.own_address().is_none() && !named.contains(&&endpoint.host) {
                named.push(&endpoint.host);
                text.push_str(&format!("{} {}\n", address.ip(), endpoint.host));
            }
        }
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn text_and_back() {
        for (text, expected) in [
            ("host", Ok("host")),
            ("off", Ok("off")),
            ("allow=api.example.com:443", Ok("allow=api.example.com:443")),
            (
                "allow=API.example.com:443, localhost:80,api.example.com:443",
                Ok("allow=api.example.com:443,localhost:80"),
            ),
            ("allow=127.0.0.1:9", Ok("allow=127.0.0.1:9")),
            ("on", Err(NetworkError::Form)),
            ("allow=", Err(NetworkError::Endpoint(String::new()))),
            ("allow=a", Err(NetworkError::Endpoint("a".into()))),
            ("allow=a:0", Err(NetworkError::Endpoint("a:0".into()))),
            ("allow=a:65536", Err(NetworkError::Endpoint("a:65536".into()))),
            ("allow=a b:1", Err(NetworkError::Endpoint("a b:1".into()))),
            ("allow=a\n:1", Err(NetworkError::Endpoint("a\n:1".into()))),
            ("allow=10.0.0.1:1", Err(NetworkError::Address("10.0.0.1".into()))),
            ("allow=169.254.169.254:80", Err(NetworkError::Address("169.254.169.254".into()))),
            ("allow=[::1]:1", Err(NetworkError::Address("[::1]".into()))),
        ] {
            let parsed = text.parse::<Network>().map(|n| n.to_string());
            assert_eq!(parsed, expected.map(str::to_owned), "{text:?}");
        }
        let many = |n: usize| format!("allow={}", (1..=n).map(|i| format!("h:{i}")).collect::<Vec<_>>().join(","));
        assert!(many(MOST_ENDPOINTS).parse::<Network>().is_ok());
        assert_eq!(many(MOST_ENDPOINTS + 1).parse::<Network>(), Err(NetworkError::TooMany));
    }

    #[test]
    fn every_host_has_one_address() {
        let network: Network = "allow=a.org:443,b.org:443,a.org:80,127.0.0.2:7,localhost:8".parse().unwrap();
        let listen: Vec<String> = network.listen().iter().map(ToString::to_string).collect();
        assert_eq!(
            listen,
            ["127.1.0.1:443", "127.1.0.2:443", "127.1.0.1:80", "127.0.0.2:7", "127.0.0.1:8"]
        );
        assert_eq!(
            network.hosts().unwrap(),
            "127.0.0.1 localhost sandbox\n127.1.0.1 a.org\n127.1.0.2 b.org\n"
        );
        assert_eq!((Network::Off.hosts(), Network::Host.listen()), (None, Vec::new()));
    }
}
