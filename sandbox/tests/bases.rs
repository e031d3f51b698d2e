//! Sandboxes made from a base, by overlayfs where this runs as root, and by copying.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod common;

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use common::*;
use evalgrid_sandbox::*;
use rustix::process::{Pid, Signal, kill_process};

fn copying_process(root: &Path) -> Arc<dyn SandboxProvider> {
    Arc::new(ProcessProvider::new(root.join("process"), helper()).unwrap().with_copied_bases())
}

fn copying_bubblewrap(root: &Path) -> Arc<dyn SandboxProvider> {
    let provider = BubblewrapProvider::new(root.join("bubblewrap"), helper(), BubblewrapOptions::default()).unwrap();
    Arc::new(provider.with_copied_bases())
}

/// Every way to make a sandbox from a base; how many mounts that takes.
fn ways() -> Vec<(&'static str, Make, usize)> {
    let mut ways: Vec<(&str, Make, usize)> = vec![("process-copy", copying_process, 0), ("bubblewrap-copy", copying_bubblewrap, 0)];
    if dockerd::dockerd().is_some() {
        ways.push(("docker", make_docker, 0));
    }
    if rustix::process::geteuid().is_root() {
        ways.extend(makers().map(|(name, make)| (name, make, 2)));
    } else {
        eprintln!("SKIPPED: overlayfs, which needs root");
    }
    ways
}

/// Mounts below a folder.
fn mounts_below(folder: &Path) -> usize {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    mounts
        .lines()
        .filter(|line| line.contains(&format!("{}/", folder.display())))
        .count()
}

/// Every file below a folder: path, mode, content.
fn listing(folder: &Path) -> Vec<(PathBuf, u32, Vec<u8>)> {
    let (mut open, mut found) = (vec![folder.to_owned()], Vec::new());
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let metadata = path.symlink_metadata().unwrap();
            let content = if metadata.is_file() { fs::read(&path).unwrap() } else { Vec::new() };
            if metadata.is_dir() {
                open.push(path.clone());
            }
            found.push((path, metadata.mode(), content));
        }
    }
    found.sort();
    found
}

async fn run(sandbox: &dyn Sandbox, step: &str, script: &str) -> String {
    let exit = sandbox.run(&bash(step, &format!("set -e; {script}"))).await.unwrap();
    assert_eq!(exit.code, 0, "{script}: {}", stderr(&exit));
    stdout(&exit)
}

/// A base that was made in a sandbox, which is gone.
async fn made(world: &World) -> PathBuf {
    let sandbox = world.create().await;
    let fill = "mkdir -p src/deep ~/.tool; echo one > src/deep/file; ln src/deep/file linked; ln -s src short; echo no > gone; \
                printf '#!/bin/sh\\necho tool\\n' > ~/.tool/run; chmod 755 ~/.tool/run; echo key > ~/.key; chmod 600 ~/.key; chmod 711 ~";
    run(sandbox.as_ref(), "fill", fill).await;
    let base = world.root.path().join("base");
    let bytes = sandbox.save_base(&base, &["home/.key".into()], 1 << 20).await.unwrap();
    assert!((20..100).contains(&bytes), "{bytes}");
    assert!(!base.join("home/.key").exists() && base.join("home/.tool/run").exists());
    world.destroy().await;
    base
}

fn based(world: &World, base: &Path, number: usize) -> SandboxSpec {
    SandboxSpec {
        name: format!("{}-{number}", world.name),
        base: Some(base.to_owned()),
        ..world.spec()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_sandbox_has_the_base_for_itself() {
    for (way, make, mounts) in ways() {
        let world = World::new(make, &format!("bases-{way}"));
        let base = made(&world).await;
        let before = listing(&base);
        let (first, second) = (based(&world, &base, 1), based(&world, &base, 2));
        let one = world.provider.create(&first).await.unwrap();
        let two = world.provider.create(&second).await.unwrap();
        assert_eq!(one.base(), Some(base.as_path()));
        assert_eq!(mounts_below(world.root.path()), 2 * mounts, "{way}");
        let look = "~/.tool/run; cat src/deep/file short/deep/file linked gone; stat -c %a ~ .; ls ~/.key 2>&1 || true";
        let seen = run(one.as_ref(), "look", look).await;
        assert!(seen.starts_with("tool\none\none\none\nno\n711\n755\n"), "{way}: {seen}");
        assert_eq!(run(two.as_ref(), "look", look).await.lines().count(), seen.lines().count());
        // Changes, deletions, and a folder that takes another's name.
        let change = "echo two > src/deep/file; rm gone; mv src moved; mkdir src; echo new > src/other; echo x > ~/.tool/run; cat linked";
        assert_eq!(run(one.as_ref(), "change", change).await, "two\n", "{way}: a hard link is one file");
        assert_eq!(
            run(one.as_ref(), "again", "cat moved/deep/file; ls src; ls gone 2>/dev/null || echo no").await,
            "two\nother\nno\n"
        );
        assert_eq!(
            run(two.as_ref(), "still", "cat src/deep/file linked gone; ~/.tool/run").await,
            "one\none\nno\ntool\n"
        );
        // The executor's hands are in the same files.
        assert_eq!(read(one.as_ref(), "moved/deep/file").await, Some("two\n".into()));
        assert_eq!(read(one.as_ref(), "gone").await, None);
        two.write_files(Base::Home, &[(".key".into(), b"own".to_vec())], true)
            .await
            .unwrap();
        assert_eq!(run(two.as_ref(), "key", "cat ~/.key; stat -c %a ~/.key").await, "own600\n");
        run(two.as_ref(), "wipe", "rm -rf \"$PWD\" 2>/dev/null || true; cd; rm -rf ~/.tool").await;
        two.ensure_workspace().await.unwrap();
        assert_eq!(run(two.as_ref(), "empty", "ls -A; ls -A ~").await, ".key\n");
        assert_eq!(listing(&base), before, "{way}");
        // Who comes after a crash finds it all.
        let successor = (world.make)(world.root.path());
        assert_eq!(successor.bases_in_use().unwrap(), [base.clone()].into());
        let taken = successor.attach(&first.name, 6).await.unwrap();
        assert_eq!(taken.base(), Some(base.as_path()));
        assert_eq!(run(taken.as_ref(), "after", "cat moved/deep/file").await, "two\n");
        for spec in [&first, &second] {
            world.provider.destroy(&spec.name).await.unwrap();
        }
        assert_eq!(world.provider.bases_in_use().unwrap(), Default::default());
        assert_eq!((mounts_below(world.root.path()), listing(&base)), (0, before), "{way}");
    }
}

/// A file of the workspace, as the executor sees it.
async fn read(sandbox: &dyn Sandbox, path: &str) -> Option<String> {
    let found = sandbox.read_file(Base::Workspace, path, 100).await.unwrap();
    found.map(|bytes| String::from_utf8(bytes).unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_happens_nothing_is_left() {
    let mut tasks = tokio::task::JoinSet::new();
    for (way, make, mounts) in ways() {
        tasks.spawn(check_end(way, make, mounts));
    }
    while let Some(result) = tasks.join_next().await {
        result.unwrap();
    }
}

async fn check_end(way: &str, make: Make, mounts: usize) {
    let world = World::new(make, &format!("bases-end-{way}"));
    let base = made(&world).await;
    let before = listing(&base);
    let folder = |spec: &SandboxSpec| world.folder().parent().unwrap().join(&spec.name);
    let supervisor = |spec: &SandboxSpec| {
        let journal = fs::read_to_string(folder(spec).join("journal")).unwrap();
        let made: serde_json::Value = serde_json::from_str(journal.lines().next().unwrap()).unwrap();
        Pid::from_raw(made["Made"]["supervisor"].as_i64().unwrap() as i32).unwrap()
    };
    // Mounts are what can be left where a folder was deleted or moved.
    let cases: &[&str] = match mounts {
        0 => &["killed", "busy", "not whole"],
        _ => &["killed", "busy", "not whole", "deleted", "moved"],
    };
    for (number, case) in cases.iter().enumerate() {
        let spec = based(&world, &base, number);
        let sandbox = world.provider.create(&spec).await.unwrap();
        run(sandbox.as_ref(), "work", "rm gone; echo mine > mine").await;
        match *case {
            "killed" => kill_process(supervisor(&spec), Signal::KILL).unwrap(),
            "busy" => {
                // Somebody looks into it.
                let _looking = fs::File::open(folder(&spec).join("workspace/mine")).unwrap();
                world.provider.destroy(&spec.name).await.unwrap();
            }
            "deleted" => {
                // All that `rm -rf` gets of a folder with mounts in it.
                for file in ["journal", "control"] {
                    fs::remove_file(folder(&spec).join(file)).unwrap();
                }
                until("the supervisor unmounts", || mounts_below(world.root.path()) == 0).await;
            }
            "moved" => {
                let elsewhere = world.root.path().join(format!("elsewhere-{way}"));
                fs::rename(folder(&spec), &elsewhere).unwrap();
                until("the supervisor unmounts", || mounts_below(world.root.path()) == 0).await;
            }
            _ => {
                match mounts {
                    0 => fs::remove_file(folder(&spec).join("filled")).unwrap(),
                    _ => rustix::mount::unmount(folder(&spec).join("home"), rustix::mount::UnmountFlags::DETACH).unwrap(),
                }
                let error = world.provider.attach(&spec.name, 6).await.map(|_| ()).unwrap_err();
                assert!(
                    matches!(&error, SandboxError::Lost { reason, .. } if reason.contains("not all there")),
                    "{error}"
                );
            }
        }
        world.provider.destroy(&spec.name).await.unwrap();
        assert!(!folder(&spec).exists(), "{way} {case}");
        assert_eq!(
            (mounts_below(world.root.path()), listing(&base)),
            (0, before.clone()),
            "{way} {case}"
        );
    }
    // One that cannot be made.
    let spec = based(&world, &world.root.path().join("nowhere"), 9);
    let error = world.provider.create(&spec).await.map(|_| ()).unwrap_err();
    assert!(
        matches!(&error, SandboxError::Create { reason, .. } if reason.contains("nowhere") || reason.contains("No such file")),
        "{error}"
    );
    world.destroy().await;
    assert_eq!(mounts_below(world.root.path()), 0, "{way}");
    assert_eq!(cgroups(&spec.name).len(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_base_is_whole_or_not_there() {
    for (provider, make) in makers() {
        let world = World::new(make, &format!("bases-save-{provider}"));
        let sandbox = world.create().await;
        run(sandbox.as_ref(), "fill", "for i in {1..2000}; do echo $i > $i; done").await;
        let base = world.root.path().join("base");
        let error = sandbox.save_base(&base, &[], 100).await.unwrap_err();
        assert!(error.to_string().contains("it is too big"), "{error}");
        assert!(!base.exists());
        // Whoever wanted it is gone.
        let saving = sandbox.save_base(&base, &[], 1 << 20);
        assert!(tokio::time::timeout(std::time::Duration::from_millis(1), saving).await.is_err());
        until("the half-made base goes", || !base.exists()).await;
        sandbox.save_base(&base, &[], 1 << 20).await.unwrap();
        assert_eq!(listing(&base).len(), 2_002);
        // It is never written over.
        assert!(sandbox.save_base(&base, &[], 1 << 20).await.is_err());
        world.destroy().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_tell_whether_they_left_something_running() {
    for (provider, make) in makers() {
        let world = World::new(make, &format!("bases-left-{provider}"));
        let sandbox = world.create().await;
        for (step, script, left) in [
            ("plain", "true", false),
            ("pipe", "seq 100000 | sort -R | tail -n 1 >/dev/null", false),
            ("daemon", "setsid sleep 1000 & true", true),
            ("later", "true", true),
        ] {
            assert_eq!(
                sandbox.run(&bash(step, script)).await.unwrap().left_running,
                left,
                "{provider} {step}"
            );
        }
        world.destroy().await;
    }
}
