//! What shares a base with what, and what becomes of bases.
#![allow(clippy::unwrap_used)]

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    path::PathBuf,
    sync::{Arc, Mutex},
};

use async_trait::async_trait;
use evalgrid_domain::request::decode_start;
use evalgrid_proto::v1::Lease;
use evalgrid_sandbox::{BaseSupport, Sandbox, SandboxError, SandboxName, SandboxProvider, SandboxSpec};
use serde_json::{Value, json};

use super::{
    Keys, hex,
    store::{Bases, Found, Key, Pin},
};

/// Says which bases sandboxes use.
#[derive(Default)]
struct Users(Mutex<BTreeSet<PathBuf>>);

#[async_trait]
impl SandboxProvider for Users {
    fn name(&self) -> &'static str {
        "users"
    }
    async fn create(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError> {
        self.attach(&spec.name, 0).await
    }
    async fn attach(&self, name: &str, _: u64) -> Result<Box<dyn Sandbox>, SandboxError> {
        Err(SandboxError::Lost {
            name: name.to_owned(),
            reason: "never made".into(),
        })
    }
    async fn list(&self) -> Result<Vec<SandboxName>, SandboxError> {
        Ok(Vec::new())
    }
    fn share(&self, _: &[(String, Vec<u8>)]) -> Result<(), SandboxError> {
        Ok(())
    }
    fn bases_in_use(&self) -> Result<BTreeSet<PathBuf>, SandboxError> {
        Ok(self.0.lock().unwrap().clone())
    }
    async fn destroy(&self, _: &str) -> Result<(), SandboxError> {
        Ok(())
    }
}

struct World {
    folder: tempfile::TempDir,
    users: Arc<Users>,
}

impl World {
    fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
            users: Arc::default(),
        }
    }

    /// As a process that starts on the folder.
    fn open(&self, boot_id: &str) -> Arc<Bases> {
        let users: Arc<dyn SandboxProvider> = self.users.clone();
        Bases::open(self.folder.path(), boot_id, &BTreeMap::from([("users", users)])).unwrap()
    }

    /// What is in the folder.
    fn names(&self) -> usize {
        fs::read_dir(self.folder.path().join("bases")).unwrap().count() - 1
    }
}

fn key(name: &str) -> Key {
    hex(name.as_bytes())
}

/// Makes a base of so many bytes, as it says.
fn make(bases: &Arc<Bases>, name: &str, bytes: u64) {
    let Found::Nobody(mut maker) = bases.find(&key(name)) else {
        panic!("{name} is there, or hopeless")
    };
    fs::create_dir(maker.staging()).unwrap();
    maker.finish(bytes, None, false, BTreeMap::new()).unwrap();
}

fn pin(bases: &Arc<Bases>, name: &str) -> Option<Pin> {
    match bases.find(&key(name)) {
        Found::Base(pin) => Some(pin),
        _ => None,
    }
}

#[tokio::test]
async fn the_longest_unused_go_but_none_that_is_used() {
    let world = World::new();
    let bases = world.open("boot");
    let large = 6 << 30;
    make(&bases, "pinned", large);
    let pinned = pin(&bases, "pinned").unwrap();
    make(&bases, "mounted", large);
    let mounted = pin(&bases, "mounted").unwrap().folder.clone();
    world.users.0.lock().unwrap().insert(mounted.clone());
    make(&bases, "old", large);
    bases.collect();
    assert_eq!(world.names(), 3);
    // The clock that says what was used last counts milliseconds.
    std::thread::sleep(std::time::Duration::from_millis(5));
    make(&bases, "new", large);
    bases.collect();
    assert_eq!(world.names(), 3);
    assert!(pin(&bases, "old").is_none() && pin(&bases, "mounted").is_some() && pin(&bases, "new").is_some());
    // However long unused: what is used stays, and so the newest one goes.
    make(&bases, "newest", large);
    std::thread::sleep(std::time::Duration::from_millis(5));
    drop(pin(&bases, "newest"));
    bases.collect();
    assert!(pin(&bases, "new").is_none() && pinned.folder.exists() && mounted.exists());
    for number in 0..70 {
        make(&bases, &number.to_string(), 1);
    }
    drop(pinned);
    bases.collect();
    assert_eq!(world.names(), 64);
    assert!(mounted.exists());
}

#[tokio::test]
async fn what_a_process_finds_at_its_start() {
    let world = World::new();
    let bases = world.open("boot");
    make(&bases, "whole", 1);
    let folder = pin(&bases, "whole").unwrap().folder.clone();
    // Killed between the staging and the renaming, and before anything was in it.
    for name in ["half", "empty"] {
        let Found::Nobody(mut maker) = bases.find(&key(name)) else {
            panic!()
        };
        let staging = maker.staging();
        fs::create_dir(&staging).unwrap();
        if name == "half" {
            fs::copy(folder.join("base.json"), staging.join("base.json")).unwrap();
        }
        bases.collect();
        assert!(staging.exists(), "it is being made");
        std::mem::forget(maker);
    }
    drop(bases);
    assert_eq!(world.names(), 3);
    let bases = world.open("boot");
    assert_eq!(world.names(), 1);
    assert_eq!(pin(&bases, "whole").unwrap().folder, folder);
    assert!(bases.of_sandbox(&folder).is_some() && bases.of_sandbox(&folder.with_extension("x")).is_none());
    bases.remember(&key("ref"), &"a".repeat(40)).unwrap();
    bases.remember(&key("ref"), &"b".repeat(40)).unwrap();
    assert_eq!(world.open("boot").commit(&key("ref")), Some("a".repeat(40)), "the first counts");
    // A power cut may have left anything in the files, and nothing lives any more.
    assert!(pin(&world.open("next boot"), "whole").is_none());
    assert_eq!(world.names(), 0);
}

#[tokio::test]
async fn nobody_waits_in_vain_for_ever() {
    let world = World::new();
    let bases = world.open("boot");
    for _ in 0..2 {
        let Found::Nobody(maker) = bases.find(&key("fails")) else {
            panic!()
        };
        let Found::Making(mut making) = bases.find(&key("fails")) else {
            panic!()
        };
        drop(maker);
        assert!(making.changed().await.is_err());
    }
    assert!(matches!(bases.find(&key("fails")), Found::Hopeless));
    // A base that no sandbox could be made from counts as a failure, and is removed when nobody uses it.
    make(&bases, "broken", 1);
    let broken = pin(&bases, "broken").unwrap();
    broken.distrust();
    broken.distrust();
    bases.collect();
    assert_eq!(world.names(), 1);
    drop(broken);
    bases.collect();
    assert_eq!(world.names(), 0);
    make(&bases, "broken", 1);
    assert!(pin(&bases, "broken").is_some());
}

/// A start request with a repository, an install and two trials, after `change`.
fn keys(bases: &Arc<Bases>, change: impl Fn(&mut Value, &mut Lease)) -> Option<Keys> {
    let mut request = json!({
        "suite": { "id": "s", "prompt": "p" },
        "cases": [{ "id": "c", "verify": "true", "source": { "kind": "repo", "url": "https://h/x.git", "ref": "main" } }],
        "variants": [{ "harness": "command", "model": "m", "sandbox": "process",
            "profile": { "name": "p", "files": { "home/a": "1" }, "env": { "A": "1" }, "run": "true", "install": "make" } }],
        "trials": 2,
    });
    let mut lease = Lease {
        organization_id: "org_a".into(),
        provider: "bubblewrap".into(),
        batch_id: "batch_a".into(),
        variables: HashMap::new(),
        ..Lease::default()
    };
    change(&mut request, &mut lease);
    let request = decode_start(&request).unwrap_or_else(|issues| panic!("{issues:?}"));
    let support = BaseSupport {
        most_bytes: 1,
        environment: (lease.provider != "process").then(|| "this host".into()),
    };
    Keys::new(bases, &lease, &request, &support)
}

#[tokio::test]
async fn what_shares_a_base_with_what() {
    let world = World::new();
    let bases = world.open("boot");
    let own = keys(&bases, |_, _| {}).unwrap();
    /// Whether it has the same commit look-up, source, installed as the plain one; `None`: it has none.
    type Same = (Option<bool>, Option<bool>, Option<bool>);
    let check = |what: &str, change: &dyn Fn(&mut Value, &mut Lease), same: Same| {
        let keys = keys(&bases, change).unwrap_or_else(|| panic!("{what}: nothing is shared"));
        let at = Some("c");
        let found: Same = (
            keys.reference.as_ref().map(|key| Some(key) == own.reference.as_ref()),
            keys.source(at).map(|key| Some(key) == own.source(at)),
            keys.installed(at).map(|key| Some(key) == own.installed(at)),
        );
        assert_eq!(found, same, "{what}");
    };
    let (yes, no) = (Some(true), Some(false));
    check("the same", &|_, _| {}, (yes, yes, yes));
    check("another batch", &|_, lease| lease.batch_id = "batch_b".into(), (no, yes, yes));
    check(
        "another organization",
        &|_, lease| lease.organization_id = "org_b".into(),
        (no, no, no),
    );
    check("another provider", &|_, lease| lease.provider = "docker".into(), (yes, no, no));
    check("no fixed paths", &|_, lease| lease.provider = "process".into(), (yes, no, None));
    check(
        "another model",
        &|request, _| request["variants"][0]["model"] = json!("n"),
        (yes, yes, yes),
    );
    check(
        "another harness",
        &|request, _| request["variants"][0]["harness"] = json!("codex"),
        (yes, yes, no),
    );
    for (field, value) in [
        ("install", json!("make all")),
        ("env", json!({ "A": "2" })),
        ("files", json!({ "home/a": "2" })),
        ("systemPrompt", json!("x")),
    ] {
        check(
            field,
            &|request, _| request["variants"][0]["profile"][field] = value.clone(),
            (yes, yes, no),
        );
    }
    check(
        "no install",
        &|request, _| drop(request["variants"][0]["profile"].as_object_mut().unwrap().remove("install")),
        (yes, yes, None),
    );
    check(
        "variables",
        &|request, _| request["variants"][0]["profile"]["variables"] = json!(["KEY"]),
        (yes, yes, None),
    );
    check(
        "a cache",
        &|request, _| request["cases"][0]["cache"] = json!({ "key": "k", "path": "target" }),
        (yes, yes, None),
    );
    let url = |url: &'static str| move |request: &mut Value, _: &mut Lease| request["cases"][0]["source"]["url"] = json!(url);
    check("another repository", &url("https://h/y.git"), (no, no, no));
    check("another password", &url("https://me:word@h/x.git"), (no, no, no));
    check(
        "a commit",
        &|request, _| request["cases"][0]["source"]["ref"] = json!("a".repeat(40)),
        (None, no, no),
    );
    let files = json!({ "kind": "files", "files": { "a": "1" } });
    check(
        "files",
        &|request, _| request["cases"][0]["source"] = files.clone(),
        (None, None, no),
    );
    check(
        "no source",
        &|request, _| request["cases"][0]["source"] = json!({ "kind": "empty" }),
        (None, None, no),
    );
    // A second case, or variant, shares what is the same for both.
    let more = |list: &'static str, change: &'static dyn Fn(&mut Value)| {
        move |request: &mut Value, _: &mut Lease| {
            request["trials"] = json!(1);
            let mut second = request[list][0].clone();
            change(&mut second);
            request[list].as_array_mut().unwrap().push(second);
        }
    };
    check("a case", &more("cases", &|case| case["id"] = json!("d")), (yes, yes, yes));
    check(
        "a model",
        &more("variants", &|variant| variant["model"] = json!("n")),
        (yes, yes, yes),
    );
    check(
        "an install",
        &more("variants", &|variant| variant["profile"]["install"] = json!("x")),
        (yes, yes, None),
    );
    // And what nobody shares is not kept.
    let none = |what: &str, change: &dyn Fn(&mut Value, &mut Lease)| assert!(keys(&bases, change).is_none(), "{what}");
    none("one trial", &|request, _| request["trials"] = json!(1));
    none(
        "other repositories",
        &more("cases", &|case| {
            case["id"] = json!("d");
            case["source"]["url"] = json!("https://h/y.git");
        }),
    );
    none("a scheduler that does not tell the batch", &|_, lease| {
        lease.batch_id = String::new()
    });
    none("nothing to clone", &url("ext::sh -c id"));
    // The commit is part of both.
    assert_ne!(own.source(Some("c")), own.source(Some("d")));
    assert_ne!(own.installed(Some("c")), own.installed(Some("d")));
}
