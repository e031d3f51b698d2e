//! What happens when somebody deletes, from outside, the folders that sandboxes and providers live in.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod common;

use std::fs;

use common::*;
use evalgrid_sandbox::*;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

/// An agent that neither ends by itself nor when it is asked to, with a daemon.
fn stubborn(mark: &str) -> StepCommand {
    StepCommand {
        env: [("MARK".into(), mark.into())].into(),
        ..bash("agent", "trap '' TERM; (setsid sleep 1000 &); while :; do sleep 1000; done")
    }
}

/// Creates a sandbox, runs [`stubborn`] in it, does `remove` to it meanwhile, and waits until nothing of it lives.
async fn check_end(world: &World, remove: impl FnOnce()) {
    let mark = format!("MARK={}", world.name);
    let sandbox = world.create().await;
    let (supervisor, folder) = (world.supervisor(), world.folder());
    let step = stubborn(&world.name);
    let (lost, ()) = tokio::join!(sandbox.run(&step), async {
        until("the agent runs", || marked(&mark).len() >= 3).await;
        remove();
    });
    assert!(
        matches!(&lost, Err(SandboxError::Lost { reason, .. }) if reason.contains("folder was deleted")),
        "{}: {lost:?}",
        world.name
    );
    until("the supervisor and bubblewrap end", || {
        !fs::exists(format!("/proc/{supervisor}")).unwrap() && marked(&folder.to_string_lossy()).is_empty()
    })
    .await;
    assert_eq!((marked(&mark).len(), cgroups(&world.name).len()), (0, 0), "{}", world.name);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_ends_with_its_folder() {
    let mut tasks = tokio::task::JoinSet::new();
    for (provider, make) in makers() {
        for case in ["folder", "journal", "moved", "root", "work"] {
            tasks.spawn(async move {
                let world = World::new(make, &format!("removal-{provider}-{case}"));
                let (folder, work) = (world.folder(), world.root.path().to_owned());
                let root = folder.parent().unwrap().to_owned();
                check_end(&world, || match case {
                    "folder" => fs::remove_dir_all(&folder).unwrap(),
                    // All that `rm -rf` gets where the agent goes on writing.
                    "journal" => ["journal", "control"].iter().for_each(|f| fs::remove_file(folder.join(f)).unwrap()),
                    "moved" => fs::rename(&folder, root.join("elsewhere")).unwrap(),
                    "root" => fs::remove_dir_all(&root).unwrap(),
                    _ => fs::remove_dir_all(&work).unwrap(),
                })
                .await;
                for name in world.provider.list().await.unwrap() {
                    world.provider.destroy(&name).await.unwrap();
                }
                world.destroy().await;
            });
        }
    }
    while let Some(result) = tasks.join_next().await {
        result.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_supervisor_without_its_journal_is_waited_for() {
    for (provider, make) in makers() {
        let world = World::new(make, &format!("removal-{provider}-wait"));
        let _sandbox = world.create().await;
        let supervisor = world.supervisor();
        for file in ["journal", "control"] {
            fs::remove_file(world.folder().join(file)).unwrap();
        }
        world.destroy().await;
        assert_eq!(cgroups(&world.name).len(), 0);
        until("the supervisor ends", || !fs::exists(format!("/proc/{supervisor}")).unwrap()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_root_comes_back_with_the_next_sandbox() {
    for (provider, make) in makers() {
        let world = World::new(make, &format!("removal-{provider}-root"));
        let root = world.folder().parent().unwrap().to_owned();
        world.provider.share(&[("old".to_owned(), b"old".to_vec())]).unwrap();
        world.provider.share(&[("deep/tool".to_owned(), b"text".to_vec())]).unwrap();
        let kill_zygote = || {
            for pid in marked(&root.to_string_lossy()) {
                let is_zygote = fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|c| c.contains("sandbox-zygote\0"));
                if is_zygote && let Some(pid) = Pid::from_raw(pid) {
                    // One that was replaced earlier may be ending by itself.
                    let _ = kill_process(pid, Signal::KILL);
                    // Until its socket is closed; reaping it is the provider's business.
                    let _ = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
                }
            }
        };
        let steps: [(&str, &dyn Fn()); 6] = [
            ("nothing", &|| {}),
            ("root", &|| fs::remove_dir_all(&root).unwrap()),
            ("work folder", &|| fs::remove_dir_all(world.root.path()).unwrap()),
            ("shared files", &|| fs::remove_dir_all(root.join(".share")).unwrap()),
            ("zygote", &kill_zygote),
            ("everything", &|| {
                kill_zygote();
                fs::remove_dir_all(&root).unwrap();
            }),
        ];
        for (what, remove) in steps {
            remove();
            assert_eq!(world.provider.list().await.unwrap(), Vec::<String>::new(), "{what}");
            let sandbox = world.create().await;
            let look = format!("cd -P {} && find . -type f && cat deep/tool && ls /etc/passwd", sandbox.shared());
            let exit = sandbox.run(&bash("look", &look)).await.unwrap();
            assert_eq!(
                stdout(&exit),
                "./deep/tool\ntext/etc/passwd\n",
                "{provider} {what}: {}",
                stderr(&exit)
            );
            world.destroy().await;
        }
        // Sharing brings it back too, and several sandboxes at once do not get into each other's way.
        fs::remove_dir_all(&root).unwrap();
        world.provider.share(&[("new".to_owned(), b"new".to_vec())]).unwrap();
        fs::remove_dir_all(&root).unwrap();
        let spec = |i: usize| SandboxSpec {
            name: format!("{}-{i}", world.name),
            ..world.spec()
        };
        let (specs, provider) = ([spec(0), spec(1), spec(2)], &world.provider);
        let created = tokio::join!(provider.create(&specs[0]), provider.create(&specs[1]), provider.create(&specs[2]));
        for sandbox in [created.0.unwrap(), created.1.unwrap(), created.2.unwrap()] {
            let exit = sandbox.run(&bash("look", &format!("cat {}/new", sandbox.shared()))).await.unwrap();
            assert_eq!(stdout(&exit), "new");
        }
        for spec in &specs {
            provider.destroy(&spec.name).await.unwrap();
        }
    }
}
