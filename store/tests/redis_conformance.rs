//! The log in Redis through the suite of all logs: one server, a cluster, and a server behind sentinels.
#![allow(clippy::unwrap_used)]

mod log_conformance;
mod redis_support;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use evalgrid_store::redis::{RedisStore, Tenure};
use evalgrid_store::{Log, LogError, Recovery};
use log_conformance::{Reopen, Visit, check_all};
use redis_support::{Cluster, Sentinels, Server, store};

/// A cell whose owner hands over before each opening.
struct Cell(RedisStore, Mutex<Option<Tenure>>);

impl Reopen for Cell {
    fn open(&self, visit: Visit<'_>) -> Result<(Box<dyn Log>, Recovery), LogError> {
        let mut owner = self.1.lock().unwrap();
        if let Some(tenure) = owner.take() {
            tenure.release().unwrap();
        }
        let (log, tenure) = self.0.follow().take("here:1", visit)?.unwrap();
        *owner = Some(tenure);
        let recovery = log.recovery().clone();
        Ok((Box::new(log), recovery))
    }
}

fn check(url: &str) {
    let cells = AtomicU64::new(0);
    check_all(&|| {
        let name = format!("cell-{}", cells.fetch_add(1, Ordering::Relaxed));
        Box::new(Cell(store(url, &name), Mutex::new(None)))
    });
}

#[test]
fn one_server_conforms() {
    check(&Server::start(&[]).url());
}

#[test]
fn a_cluster_conforms() {
    check(&Cluster::start().url());
}

#[test]
fn a_server_behind_sentinels_conforms() {
    check(&Sentinels::start().url());
}
