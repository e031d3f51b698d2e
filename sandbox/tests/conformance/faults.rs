//! What goes wrong, and the words for it: each fault has its own.

use std::{fs, path::Path};

use evalgrid_sandbox::*;
use rustix::{
    mount::{MountFlags, UnmountFlags, mount, unmount},
    process::{Pid, Signal, kill_process},
};

use crate::common::{dockerd::dockerd, *};

/// Somebody outside kills what holds the sandbox.
pub async fn a_sandbox_that_dies_is_lost_and_says_how(world: World) {
    let sandbox = world.create().await;
    let kill = |pid: i32| kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    let step = bash("agent", ": > started; sleep 1000");
    let (lost, expected) = tokio::join!(sandbox.run(&step), async {
        until("the agent runs", || world.folder().join("workspace/started").exists()).await;
        let supervisor = world.supervisor();
        match world.provider.name() {
            "process" => {
                kill(supervisor);
                "its supervisor does not answer"
            }
            "bubblewrap" => {
                let children = fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children")).unwrap();
                kill(children.trim().parse().unwrap());
                "bubblewrap"
            }
            _ => {
                let container = container(&world);
                let (status, body) = dockerd()
                    .unwrap()
                    .ask("POST", &format!("/containers/{container}/kill"), &[])
                    .unwrap();
                assert_eq!(status, 204, "{body}");
                "the container has ended: the container ended with status 137"
            }
        }
    });
    let check = |result: Result<StepExit, SandboxError>| match result {
        Err(SandboxError::Lost { reason, .. }) => assert!(reason.contains(expected), "{reason}"),
        other => panic!("{other:?}"),
    };
    check(lost);
    // Whoever asks later hears the same.
    check(sandbox.run(&bash("later", "true")).await);
    world.destroy().await;
}

/// The container of a world's sandbox.
fn container(world: &World) -> String {
    let names = dockerd().unwrap().containers().into_iter();
    let mut ours = names.filter(|name| name.ends_with(&format!("-{}", world.name)));
    ours.next().unwrap()
}

/// A small file system over a folder, for as long as this lives.
struct SmallDisk<'a>(&'a Path);

impl Drop for SmallDisk<'_> {
    fn drop(&mut self) {
        let _ = unmount(self.0, UnmountFlags::DETACH);
    }
}

/// An agent fills the disk.
pub async fn a_full_disk_is_named(world: World) {
    let World {
        root,
        make,
        name,
        provider,
    } = world;
    // What is mounted now, a daemon that runs already does not see.
    let (disk, _disk) = match provider.name() {
        "docker" => (dockerd().unwrap().disk.clone(), None),
        _ => {
            if mount("tmpfs", root.path(), "tmpfs", MountFlags::empty(), Some(c"size=32m")).is_err() {
                eprintln!("SKIPPED: only root can make a small disk");
                return;
            }
            (root.path().to_owned(), Some(SmallDisk(root.path())))
        }
    };
    let small = tempfile::tempdir_in(disk).unwrap();
    let world = World {
        provider: make(small.path()),
        root: small,
        make,
        name,
    };
    let sandbox = world.create().await;
    let filled = sandbox.run(&bash("fill", "head -c 100000000 /dev/zero > big; exit 4")).await;
    let text = filled.unwrap_err().to_string();
    assert!(text.contains("No space left on device"), "{text}");
    let written = sandbox
        .write_files(Base::Workspace, &[("more".to_owned(), vec![1; 100_000])], false)
        .await;
    let text = written.unwrap_err().to_string();
    assert!(text.contains("more: No space left on device"), "{text}");
    // With room again, all is well again.
    fs::remove_file(world.folder().join("workspace/big")).unwrap();
    assert_eq!(sandbox.run(&bash("after", "exit 5")).await.unwrap().code, 5);
    world.destroy().await;
}

/// An agent takes its own rights away, deletes its home, kills all that it may.
pub async fn an_agent_that_shuts_itself_out(world: World) {
    let sandbox = world.create().await;
    let is_isolated = world.provider.name() != "process";
    let close = format!("rm -rf ~ 2> /dev/null; chmod 000 {} ~ 2> /dev/null; true", sandbox.workspace());
    assert_eq!(sandbox.run(&bash("close", &close)).await.unwrap().code, 0);
    let shut = sandbox.run(&bash("shut", "true")).await;
    match shut {
        Err(SandboxError::Operation { reason, .. }) => {
            assert!(reason.contains("the workspace cannot be entered: Permission denied"), "{reason}")
        }
        // A bare process of root may go anywhere.
        Ok(_) => assert!(!is_isolated),
        Err(other) => panic!("{other}"),
    }
    sandbox.ensure_workspace().await.unwrap();
    let exit = sandbox
        .run(&bash("open", ": > ~/a && : > b && ls ~ . | grep -c '^[ab]$'"))
        .await
        .unwrap();
    assert_eq!((exit.code, stdout(&exit).as_str()), (0, "2\n"), "{}", stderr(&exit));
    if is_isolated {
        // A step that kills everybody it may kill, itself included, and spares only the init, who is out of its reach.
        let exit = sandbox.run(&bash("kill", "sleep 1000 & kill -9 1 -1; kill -9 $$")).await.unwrap();
        assert_eq!(exit.code, 137);
        assert_eq!(sandbox.run(&bash("alive", "exit 6")).await.unwrap().code, 6);
    }
    world.destroy().await;
}
