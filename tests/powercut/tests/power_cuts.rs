//! The power is cut at seeded random moments under load: what was acknowledged is there afterwards, nothing is there twice, every batch ends.
//!
//! A failure prints its seed; `EVALGRID_SEED=n` chooses one, `EVALGRID_LONG=1` cuts ten times as often. Where there is no root, no `/dev/fuse` or
//! no loop device the tests fail and say what to do; `EVALGRID_SKIP_POWERCUT=1` leaves them out.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use evalgrid_powercut::{
    facts::{self, Key, Ledger},
    host,
    load::Load,
    log,
    site::{Site, seed},
    volatile::Cut,
};
use evalgrid_tests::counter::Counter;
use rand::Rng as _;
use serde_json::json;

const DISK: &str = env!("CARGO_BIN_EXE_evalgrid-volatile-disk");
/// A start of the server, replay included, on a busy machine.
const START_LIMIT: Duration = Duration::from_secs(60);
/// Until all batches have ended.
const PATIENCE: Duration = Duration::from_secs(300);
/// After so many lives comes one that ends while the server still starts.
const EARLY_EVERY: u32 = 4;
/// Facts that are asked for after each cut; the log is searched for all of them, and the end of the test asks for all of them. Else a hundred
/// cuts take hours.
const NEWEST: usize = 60;
/// With how many cuts a store that does not sync must be found out.
const CUTS_TO_FIND_OUT: u32 = 5;

fn cuts() -> u32 {
    match std::env::var_os("EVALGRID_LONG") {
        Some(_) => 100,
        None => 10,
    }
}

/// All roles on one machine, and its clients.
struct Service {
    site: Site,
    load: Load,
}

impl Service {
    /// Installed and running, with two organizations.
    async fn new(name: &str, seed: u64) -> Service {
        let site = Site::new(DISK, name, seed);
        let load = Load {
            server: site.server.clone(),
            ledger: Arc::new(Ledger::default()),
            counter: Counter::start().await,
            seed,
        };
        let mut service = Service { site, load };
        service.boot();
        let first = service.ready().await.expect("the first start succeeds");
        service.load.ledger.key(first);
        service.load.new_key("second").await.unwrap();
        service
    }

    fn boot(&mut self) {
        let http = self.site.server.http.clone();
        let more = "--slots 6 --enable-process-sandbox --lease 5s --sandbox-map process=process";
        let arguments: Vec<&str> = ["--http", &http].into_iter().chain(more.split(' ')).collect();
        self.site.boot("serve", &arguments);
    }

    /// Waits until the server answers; what the first key opens. None if it does not answer.
    async fn ready(&self) -> Option<Key> {
        let server = &self.site.server;
        let end = Instant::now() + START_LIMIT;
        while Instant::now() < end {
            if let Ok(secret) = std::fs::read_to_string(server.data().join("api-key")) {
                let mut key = Key {
                    organization: String::new(),
                    secret: secret.trim().to_owned(),
                };
                if let Ok(known) = facts::post(server, &key, "auth.whoami", &json!({}), None).await {
                    key.organization = known["organization"]["id"].as_str().unwrap_or_default().to_owned();
                    return Some(key);
                }
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        None
    }

    /// One life: load until a random moment.
    async fn live(&mut self, life: u32) -> Cut {
        let mut clients = self.load.spawn(u64::from(life));
        self.pause(50..2500).await;
        let cut = self.site.cut();
        clients.shutdown().await;
        cut
    }

    /// One that is not even a whole start.
    async fn live_shortly(&mut self) -> Cut {
        self.site.cut();
        self.boot();
        self.pause(0..400).await;
        self.site.cut()
    }

    async fn pause(&mut self, milliseconds: std::ops::Range<u64>) {
        tokio::time::sleep(Duration::from_millis(self.site.rng.random_range(milliseconds))).await;
    }

    /// After a cut: starts the server again; everything that is not as it must be.
    async fn look_for_losses(&mut self) -> Vec<String> {
        let ledger = self.load.ledger.clone();
        let view = match log::read(&self.site.server.data()) {
            Ok(view) => view,
            Err(error) => return vec![error],
        };
        let mut wrong = ledger.missing_in_log(&view);
        self.boot();
        if self.ready().await.is_none() {
            wrong.push("the server does not come back".into());
            return wrong;
        }
        wrong.extend(ledger.missing_in_answers(&self.site.server, NEWEST).await);
        wrong.extend(ledger.missing_objects(&self.site.server, &view, false).await);
        wrong
    }

    /// Waits until every batch that was asked for has ended.
    async fn all_ended(&self) {
        let load = &self.load;
        evalgrid_tests::eventually("every batch has ended", PATIENCE, || async {
            for key in load.ledger.keys() {
                load.ask_again(&key).await.ok()?;
                load.look(&key).await.ok()?;
                let open = load.ledger.starts(&key.organization).iter().any(|start| start.batch.is_none());
                if open || !load.ledger.running(&key.organization).is_empty() {
                    return None;
                }
            }
            Some(())
        })
        .await;
    }

    /// Whether anything ran twice: a step in the same sandbox, or a trial after its verdict.
    fn ran_twice(&self) -> Vec<String> {
        let lines = self.load.counter.lines();
        let mut wrong: Vec<String> = Vec::new();
        wrong.extend(
            lines
                .iter()
                .filter(|(_, count)| **count > 1)
                .map(|(line, _)| format!("ran twice: {line}")),
        );
        for trial in self.load.ledger.trials() {
            let (id, sandbox) = (trial["id"].as_str().unwrap(), trial["sandboxId"].as_str().unwrap_or_default());
            let token = |sandbox: &str| sandbox.strip_prefix(id)?.strip_prefix('-')?.parse::<u64>().ok();
            let last = token(sandbox);
            let later = lines
                .keys()
                .filter_map(|line| line.split_once(' '))
                .filter(|(_, ran)| token(ran) > last);
            wrong.extend(later.map(|(step, ran)| format!("{step} in {ran}, after the verdict in {sandbox}")));
        }
        wrong
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_acknowledged_survives() {
    if host::skipped() {
        return;
    }
    let mut service = Service::new("survives", seed()).await;
    let (mut lost_blocks, mut took) = (Vec::new(), Vec::new());
    for life in 0..cuts() {
        let began = Instant::now();
        let cut = match life % EARLY_EVERY == EARLY_EVERY - 1 {
            true => service.live_shortly().await,
            false => service.live(life).await,
        };
        let wrong = service.look_for_losses().await;
        let size = service.load.ledger.size();
        println!("cut {life}: {cut:?}, {size:?}, {:.1?}", began.elapsed());
        assert!(wrong.is_empty(), "after cut {life}:\n{}", wrong.join("\n"));
        lost_blocks.push(cut.dropped + cut.torn);
        took.push(began.elapsed());
    }
    service.all_ended().await;
    let (server, ledger) = (service.site.server.clone(), service.load.ledger.clone());
    let mut wrong = ledger.missing_in_answers(&server, usize::MAX).await;
    wrong.extend(ledger.too_many(&server).await);
    wrong.extend(service.ran_twice());
    let left = || async { sandboxes(server.folder.as_path()).is_empty().then_some(()) };
    evalgrid_tests::eventually("no sandbox is left", PATIENCE, left).await;
    service.site.stop();
    let view = log::read(&server.data()).unwrap();
    wrong.extend(ledger.missing_in_log(&view));
    wrong.extend(view.custody.iter().map(|sandbox| format!("never destroyed: {sandbox}")));
    service.boot();
    service.ready().await.expect("the server starts again");
    wrong.extend(ledger.missing_objects(&server, &view, true).await);
    assert!(wrong.is_empty(), "at the end:\n{}", wrong.join("\n"));
    service.site.stop();
    service.site.disk.release();
    service.site.disk.check();

    let of = |kind: &str| view.objects.iter().filter(|(found, _, _)| *found == kind).count();
    let scored = ledger.trials().iter().filter(|trial| trial["status"] != "void").count();
    let size = ledger.size();
    println!("{} cuts, lost 0, twice 0: {size:?}, {scored} trials scored", cuts());
    println!(
        "objects read: {} requests, {} evidence, {} manifests",
        of("request"),
        of("evidence"),
        of("manifest")
    );
    let counts = service.site.disk.counts();
    took.sort_unstable();
    println!(
        "blocks lost or torn per cut: {lost_blocks:?}; {counts:?}; a cut takes {:.1?}",
        took[took.len() / 2]
    );
    // A test that saw nothing would prove nothing.
    assert!(
        scored > 0 && of("evidence") > 0 && of("manifest") > 0,
        "there was too little load to lose"
    );
    assert!(lost_blocks.iter().any(|blocks| *blocks > 0), "no cut lost a block");
}

/// The same harness over a store that only says that it syncs: the checks must find that out.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_does_not_sync_is_found_out() {
    if host::skipped() {
        return;
    }
    let mut service = Service::new("found-out", seed()).await;
    // What is installed was synced: what is lost are the facts, not the folder.
    service.site.stop();
    service.site.lie_about_syncs();
    service.boot();
    service.ready().await.expect("the server starts again");
    for life in 0..CUTS_TO_FIND_OUT {
        let mut clients = service.load.spawn(u64::from(life));
        let ledger = service.load.ledger.clone();
        let enough = || async { (ledger.size().trials > 0).then_some(()) };
        evalgrid_tests::eventually("a trial has a verdict", PATIENCE, enough).await;
        let cut = service.site.cut();
        clients.shutdown().await;
        let wrong = service.look_for_losses().await;
        println!("cut {life}: {cut:?}, {:?}: {} findings", ledger.size(), wrong.len());
        if let Some(first) = wrong.first() {
            println!("the first: {}", first.chars().take(300).collect::<String>());
            assert!(wrong.iter().any(|text| text.starts_with("lost")), "facts are missed: {wrong:?}");
            return;
        }
    }
    panic!("{CUTS_TO_FIND_OUT} cuts under a store that does not sync, and nothing was missed");
}

/// Folders of sandboxes, wherever the executor keeps them.
fn sandboxes(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let found = folders.flat_map(|entry| match entry.file_name().to_string_lossy().starts_with("trial_") {
        true => vec![entry.path()],
        false => sandboxes(&entry.path()),
    });
    found.collect()
}
