//! Failovers: to a replica that lags, by sentinels, of a cluster's slot; and servers that would lose what they acknowledge.
#![allow(clippy::unwrap_used)]

mod redis_support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use evalgrid_store::redis::{Fsync, Loss, RedisError, RedisOptions, RedisStore};
use evalgrid_store::{Log, LogError};
use redis_support::proxy::Proxy;
use redis_support::{Cluster, Owned, Seen, Sentinels, Server, read, record, store, store_with, take, take_by, wait_for};

fn with_lease(seconds: u64) -> RedisOptions {
    RedisOptions {
        lease: Duration::from_secs(seconds),
        ..RedisOptions::default()
    }
}

fn history(server: &Server) -> String {
    server.call(&["HGET", "evalgrid:{cell}:owner", "history"])
}

/// An owner whose master died with more records than its replica has, and that replica in its place.
struct LaggingFailover {
    replica: Server,
    proxy: Proxy,
    owner_store: RedisStore,
    owned: Owned,
}

impl LaggingFailover {
    fn new(kept: usize, lost: usize) -> LaggingFailover {
        let (mut master, replica) = (Server::start(&[]), Server::start(&[]));
        let proxy = Proxy::to(master.port);
        let owner_store = store_with(&proxy.url(), "cell", with_lease(3));
        let (mut owned, _) = take(&owner_store);
        (0..kept).for_each(|at| owned.append(&format!("kept {at}")).unwrap());
        replica.replicate(&master);
        // The replica has heard nothing since.
        replica.call::<String>(&["REPLICAOF", "NO", "ONE"]);
        (0..lost).for_each(|at| owned.append(&format!("lost {at}")).unwrap());
        proxy.point_to(replica.port);
        master.kill();
        LaggingFailover {
            replica,
            proxy,
            owner_store,
            owned,
        }
    }
}

/// catalogue 49: what was lost all the same is told.
#[test]
fn a_failover_to_a_lagging_replica_is_noticed_by_all_who_saw_what_is_gone() {
    let mut over = LaggingFailover::new(10, 3);
    // A standby that saw nothing of what is lost.
    let mut ignorant = store(&over.proxy.url(), "cell").follow();
    let mut ignorant_seen = Seen::default();
    let found = wait_for("the replica", || ignorant.poll(ignorant_seen.visit()).ok());
    assert_eq!((found.position, found.loss), (10, None));

    // The owner may not write over the hole.
    let before = history(&over.replica);
    match over.owned.append("over the hole") {
        Err(LogError::Fenced { reason }) => assert!(reason.contains("ends at position 10"), "{reason}"),
        other => panic!("{other:?}"),
    }
    assert!(!over.owned.tenure.holds());
    assert_eq!(over.replica.call::<u64>(&["XLEN", "evalgrid:{cell}:log"]), 10);

    // Its process goes on as a standby, reports what is lost, and may take over again.
    let (mut again, losses) = take(&over.owner_store);
    let losses: Vec<Loss> = losses.iter().filter_map(|followed| followed.loss).collect();
    assert_eq!(losses, [Loss { from: 11, to: 13 }]);
    assert_eq!(again.seen.payloads.len(), 10);
    let after = history(&over.replica);
    assert_ne!(before, after);
    assert_eq!(again.log.history(), after);
    again.append("new 11").unwrap();
    again.append("new 12").unwrap();
    let found = ignorant.poll(ignorant_seen.visit()).unwrap();
    assert_eq!((found.position, found.loss, found.free), (12, None, false));
    assert_eq!(ignorant_seen, again.seen);
    assert_eq!(read(&over.replica.url(), "cell"), again.seen);
}

#[test]
fn a_standby_notices_positions_that_were_written_again() {
    // `rewritten`: how many records the next owner appends before the standby looks: less than, as many as, and more than were lost.
    for rewritten in [0, 1, 3, 7] {
        let (mut master, replica) = (Server::start(&[]), Server::start(&[]));
        let proxy = Proxy::to(master.port);
        let (mut owned, _) = take(&store_with(&proxy.url(), "cell", with_lease(2)));
        let mut standby = store(&proxy.url(), "cell").follow();
        let mut seen = Seen::default();
        (0..5).for_each(|_| owned.append("kept").unwrap());
        standby.poll(seen.visit()).unwrap();
        replica.replicate(&master);
        replica.call::<String>(&["REPLICAOF", "NO", "ONE"]);
        (0..3).for_each(|_| owned.append("lost").unwrap());
        standby.poll(seen.visit()).unwrap();
        assert_eq!(seen, owned.seen);
        proxy.point_to(replica.port);
        master.kill();
        drop(owned);

        let first_history = history(&replica);
        let (mut next, losses) = take(&store_with(&replica.url(), "cell", with_lease(5)));
        assert_eq!((next.seen.payloads.len(), losses.len()), (5, 0), "this one cannot know");
        for _ in 0..rewritten {
            // Groups of two, so that ends of groups fall elsewhere.
            let sequence = next.seen.payloads.len() as u64 + 1;
            next.log
                .append(&[record(sequence, "other"), record(sequence + 1, "other")])
                .unwrap();
            next.seen.payloads.extend(["other".to_owned(), "other".to_owned()]);
        }
        let found = wait_for("the replica", || standby.poll(|_| panic!("nothing may be handed on")).ok());
        assert_eq!(found.loss, Some(Loss { from: 6, to: 8 }), "{rewritten}");
        assert!(!found.free);
        assert_ne!(history(&replica), first_history);
        // It begins anew, and the owner learns of the new history with its next renewal.
        let mut seen = Seen::default();
        assert_eq!(standby.poll(seen.visit()).unwrap().loss, None);
        assert_eq!(seen, next.seen);
        wait_for("the owner to learn", || (next.log.history() == history(&replica)).then_some(()));
        assert!(next.tenure.holds());
    }
}

#[test]
fn an_idle_owner_learns_of_a_loss_and_steps_down() {
    let over = LaggingFailover::new(2, 2);
    let reason = wait_for("the tenure to end", || over.owned.tenure.lost().borrow().clone());
    assert!(!over.owned.tenure.holds());
    assert!(
        reason.contains("ends at position 2, but 4 was acknowledged") || reason.contains("gone"),
        "{reason}"
    );
}

#[test]
fn an_emptied_cell_is_a_loss() {
    let server = Server::start(&[]);
    let cell = store_with(&server.url(), "cell", with_lease(3));
    let (mut owned, _) = take(&cell);
    (0..3).for_each(|_| owned.append("lost").unwrap());
    server.call::<String>(&["FLUSHALL"]);
    assert!(matches!(owned.append("new"), Err(LogError::Fenced { .. })));
    let (mut owned, losses) = take(&cell);
    assert_eq!(losses[0].loss, Some(Loss { from: 1, to: 3 }));
    owned.append("new").unwrap();
    assert_eq!(read(&server.url(), "cell").payloads, ["new"]);
}

/// catalogue 45: nobody has to be woken to go on with the new master.
#[test]
fn sentinels_fail_over_without_loss_of_what_was_replicated() {
    let mut set = Sentinels::start();
    let (mut owned, _) = take(&store_with(&set.url(), "cell", with_lease(20)));
    let mut standby = store(&set.url(), "cell").follow();
    let mut seen = Seen::default();
    (0..5).for_each(|_| owned.append("kept").unwrap());
    standby.poll(seen.visit()).unwrap();
    let (first, rest) = set.servers.split_at_mut(1);
    let (master, replica) = (&mut first[0], &rest[0]);
    wait_for("the replica to have it all", || {
        (replica.info("replication", "slave_repl_offset") == master.info("replication", "master_repl_offset")).then_some(())
    });
    master.kill();
    // The owner finds the new master within its lease, and goes on.
    owned.append("after").unwrap();
    assert_eq!(replica.info("replication", "role"), "master");
    wait_for("the standby to find it, too", || {
        standby
            .poll(seen.visit())
            .ok()
            .filter(|followed| followed.position == 6 && followed.loss.is_none())
    });
    assert_eq!(seen, owned.seen);
    assert!(owned.tenure.holds());
}

#[test]
fn a_cell_follows_its_slot_through_a_cluster() {
    let cluster = Cluster::start();
    let (mut owned, _) = take(&store_with(&cluster.url(), "cell", with_lease(20)));
    let mut standby = store(&cluster.url(), "cell").follow();
    let mut seen = Seen::default();
    (0..5).for_each(|_| owned.append("here").unwrap());
    standby.poll(seen.visit()).unwrap();
    let slot = cluster.0[0].call::<u64>(&["CLUSTER", "KEYSLOT", "{cell}"]).to_string();
    let ids: Vec<String> = cluster.0.iter().map(|node| node.call(&["CLUSTER", "MYID"])).collect();
    let count = |node: &Server| node.call::<u64>(&["CLUSTER", "COUNTKEYSINSLOT", &slot]);
    let from = (0..3).find(|at| count(&cluster.0[*at]) > 0).unwrap();
    let to = (from + 1) % 3;
    let (source, target) = (&cluster.0[from], &cluster.0[to]);
    target.call::<String>(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &ids[from]]);
    source.call::<String>(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &ids[to]]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Key by key, so that for a while the cell is in neither place.
            let keys: Vec<String> = source.call(&["CLUSTER", "GETKEYSINSLOT", &slot, "10"]);
            for key in keys {
                source.call::<String>(&["MIGRATE", "127.0.0.1", &target.port.to_string(), &key, "0", "5000"]);
                std::thread::sleep(Duration::from_millis(150));
            }
            for node in [target, source, &cluster.0[(from + 2) % 3]] {
                node.call::<String>(&["CLUSTER", "SETSLOT", &slot, "NODE", &ids[to]]);
            }
        });
        for _ in 0..200 {
            owned.append("on the move").unwrap();
        }
        wait_for("the slot to have moved", || (count(source) == 0).then_some(()));
        owned.append("there").unwrap();
    });
    wait_for("the standby to find it", || {
        standby.poll(seen.visit()).ok().filter(|followed| followed.position == 206)
    });
    assert_eq!(seen, owned.seen);
    assert_eq!(count(target), 3);
}

/// catalogue 49: as far as it was asked for.
#[test]
fn a_group_counts_only_once_replicas_have_it() {
    let master = Server::start(&[]);
    let mut replica = Server::start(&["--replicaof", "127.0.0.1", &master.port.to_string()]);
    wait_for("the replica", || {
        (replica.info("replication", "master_link_status") == "up").then_some(())
    });
    let options = RedisOptions {
        replicas: 1,
        ..with_lease(20)
    };
    let cell = store_with(&master.url(), "cell", options);
    assert_eq!((cell.durability().replicas, cell.durability().connected_replicas), (1, 1));
    let (mut owned, _) = take(&cell);
    owned.append("one").unwrap();
    assert_eq!(replica.call::<u64>(&["XLEN", "evalgrid:{cell}:log"]), 1);
    replica.freeze(true);
    let resumed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The master has the group and still counts the replica, and `WAIT` on a new connection would ask for nothing.
            wait_for("the group on the master", || {
                (master.call::<u64>(&["XLEN", "evalgrid:{cell}:log"]) == 2).then_some(())
            });
            master.call::<u64>(&["CLIENT", "KILL", "TYPE", "normal"]);
            std::thread::sleep(Duration::from_millis(1500));
            resumed.store(true, Ordering::SeqCst);
            replica.freeze(false);
        });
        owned.append("two").unwrap();
        assert!(resumed.load(Ordering::SeqCst), "acknowledged before the replica had it");
    });
    assert_eq!(replica.call::<u64>(&["XLEN", "evalgrid:{cell}:log"]), 2);
    assert_eq!(read(&master.url(), "cell").payloads, ["one", "two"]);
    replica.kill();
    assert!(matches!(owned.append("three"), Err(LogError::Unknown { .. })));
    assert!(!owned.tenure.holds());
}

/// catalogue 48: one that evicts, among others.
#[test]
fn servers_that_would_lose_records_are_refused() {
    let server = Server::start(&[]);
    let connect = |url: &str, options: RedisOptions| RedisStore::connect(url.parse().unwrap(), "cell", options);
    let connect_here = |options: RedisOptions| connect(&server.url(), options);
    let set = |name: &str, value: &str| server.call::<String>(&["CONFIG", "SET", name, value]);
    let everysec = RedisOptions {
        allow_everysec: true,
        ..RedisOptions::default()
    };
    for (name, bad, good, option) in [
        ("maxmemory-policy", "allkeys-lru", "noeviction", RedisOptions::default()),
        ("maxmemory-policy", "volatile-ttl", "noeviction", RedisOptions::default()),
        ("appendonly", "no", "yes", everysec),
        ("no-appendfsync-on-rewrite", "yes", "no", everysec),
        ("appendfsync", "everysec", "always", RedisOptions::default()),
        ("appendfsync", "no", "always", everysec),
    ] {
        set(name, bad);
        match connect_here(option) {
            Err(RedisError::Setting {
                setting, found, wanted, ..
            }) => assert_eq!((setting, found.as_str(), wanted), (name, bad, good)),
            other => panic!("{name} {bad}: {:?}", other.map(|store| store.durability().clone())),
        }
        set(name, good);
        connect_here(option).unwrap();
    }
    let printed = |options| connect_here(options).unwrap().durability().to_string();
    let text = printed(RedisOptions::default());
    assert!(text.contains("survive kill -9 and a power cut"), "{text}");
    assert!(
        text.contains("a failover to a replica may lose acknowledged records; loss is detected and reported"),
        "{text}"
    );
    set("appendfsync", "everysec");
    let text = printed(everysec);
    let confirmed = connect_here(everysec).unwrap().durability().confirms_sync;
    let expected = if confirmed {
        "up to a second for its sync"
    } else {
        "about 2 seconds"
    };
    assert!(text.contains(expected), "{text}");
    set("appendfsync", "always");
    let text = printed(RedisOptions {
        replicas: 2,
        ..RedisOptions::default()
    });
    assert!(
        text.contains("2 replicas have each acknowledged record") && text.contains("only 0 connected"),
        "{text}"
    );

    // A user that may not read settings, with a password that is never printed.
    server.call::<String>(&["ACL", "SETUSER", "app", "on", ">s3cret", "~*", "&*", "+@all", "-config"]);
    let url = server.url().replace("redis://", "redis://app:s3cret@");
    let error = connect(&url, RedisOptions::default()).err().unwrap();
    assert!(matches!(error, RedisError::Hidden { .. }), "{error}");
    let assumed = RedisOptions {
        assume_durable: true,
        ..RedisOptions::default()
    };
    let hidden = connect(&url, assumed).unwrap();
    assert_eq!(hidden.durability().fsync, Fsync::Unknown);
    assert!(hidden.durability().to_string().contains("unknown"));
    take(&hidden).0.append("works").unwrap();
    let error = connect(&url.replace("s3cret", "wr0ng"), assumed).err().unwrap();
    assert!(!error.passes() && !error.to_string().contains("wr0ng"), "{error}");
    assert!(matches!(
        connect(
            &server.url(),
            RedisOptions {
                lease: Duration::from_millis(10),
                ..everysec
            }
        ),
        Err(RedisError::Lease(_))
    ));
    for name in ["", "A", "a_b", "a}", &"a".repeat(33)] {
        assert!(
            matches!(
                RedisStore::connect(server.url().parse().unwrap(), name, everysec),
                Err(RedisError::Cell)
            ),
            "{name}"
        );
    }

    // A replica is no place to begin, and a server that is promoted is examined like any other.
    let replica = Server::start(&["--appendonly", "no"]);
    replica.replicate(&server);
    assert!(matches!(connect(&replica.url(), everysec), Err(RedisError::NotMaster { .. })));
    let proxy = Proxy::to(server.port);
    server.call::<u64>(&["DEL", "evalgrid:{cell}:lease"]);
    let (mut owned, _) = take(&store_with(&proxy.url(), "cell", with_lease(20)));
    wait_for("the replica", || {
        (replica.call::<String>(&["HGET", "evalgrid:{cell}:owner", "epoch"]) == "2").then_some(())
    });
    replica.call::<String>(&["REPLICAOF", "NO", "ONE"]);
    proxy.point_to(replica.port);
    server.call::<u64>(&["CLIENT", "KILL", "TYPE", "normal"]);
    match owned.append("on a server that keeps nothing") {
        Err(LogError::Unknown { reason }) => assert!(reason.contains("appendonly"), "{reason}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(replica.call::<u64>(&["XLEN", "evalgrid:{cell}:log"]), 1);
}

/// catalogue 7, 50: what a server says of itself counts, before what it holds does.
#[test]
fn a_standby_does_not_follow_a_demoted_master() {
    let server = Server::start(&[]);
    let (owned, _) = take(&store(&server.url(), "cell"));
    let mut standby = store(&server.url(), "cell").follow();
    standby.poll(|_| Ok(())).unwrap();
    server.call::<String>(&["REPLICAOF", "127.0.0.1", "1"]);
    match standby.poll(|_| Ok(())) {
        Err(LogError::Redis(error)) => assert!(error.passes(), "{error}"),
        other => panic!("{other:?}"),
    }
    drop(owned);
    server.call::<String>(&["REPLICAOF", "NO", "ONE"]);
    let (mut owned, _) = take_by(&mut standby, Seen::default());
    owned.append("on").unwrap();
}
