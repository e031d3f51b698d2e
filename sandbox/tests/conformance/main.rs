//! What every provider must do, tried on each of them.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

#[path = "../common/mod.rs"]
mod common;
mod faults;
mod files;

use std::{
    collections::BTreeMap,
    fs,
    time::{Duration, Instant},
};

use common::*;
use evalgrid_sandbox::*;
use faults::*;
use files::*;

/// One test per provider and behaviour.
macro_rules! conformance {
    ($($name:ident)*) => {
        mod process {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name(super::World::new(super::make_process, &format!("p-{}", stringify!($name)))).await;
            })*
        }
        mod bubblewrap {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name(super::World::new(super::make_bubblewrap, &format!("b-{}", stringify!($name)))).await;
            })*
        }
        mod docker {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                if super::dockerd::dockerd().is_some() {
                    super::$name(super::World::new(super::make_docker, &format!("d-{}", stringify!($name)))).await;
                }
            })*
        }
    };
}

conformance! {
    environment_arrives_unchanged
    what_cannot_be_started_is_an_error_that_names_it
    ends_of_commands
    output_is_kept_byte_for_byte
    a_silent_step_makes_no_file
    much_output_does_not_stop_a_step
    output_beyond_the_head_keeps_its_tail
    a_daemon_that_holds_stdout_does_not_hold_the_step
    a_time_limit_beats_an_ignored_sigterm
    grace_lets_a_tree_end_by_itself
    kill_ends_a_step
    a_fork_bomb_is_held_and_dead_afterwards
    remains_of_a_fork_bomb_do_not_stop_the_next_step
    memory_is_limited_and_reported
    a_deleted_workspace_comes_back
    a_step_runs_once
    another_executor_takes_over
    a_dead_supervisor_is_lost_and_its_finished_steps_are_not
    files_go_in_and_out
    files_come_back_byte_for_byte
    symlinks_lead_nowhere
    shared_files_are_read_only_and_replaced_as_a_whole
    tools_are_seen_by_the_living_too
    destroy_leaves_nothing
    destroy_of_half_made_and_rebooted_sandboxes
    lifetime_ends_a_sandbox
    creating_twice_is_refused
    a_sandbox_that_dies_is_lost_and_says_how
    a_full_disk_is_named
    an_agent_that_shuts_itself_out
}

async fn environment_arrives_unchanged(world: World) {
    let sandbox = world.create().await;
    let values = [
        "line one\nline two\n",
        "\"double\" 'single' `back`",
        "$(touch pwned) ${HOME} \\n",
        "ünïcode ☃",
        "",
        " = ",
    ];
    let mut env: BTreeMap<String, String> = values
        .iter()
        .enumerate()
        .map(|(i, v)| (format!("VALUE_{i}"), (*v).to_owned()))
        .collect();
    env.extend((0..300).map(|i| (format!("MANY_{i}"), format!("{i}"))));
    let exit = sandbox
        .run(&StepCommand {
            env: env.clone(),
            ..command("env", &["env", "-0"])
        })
        .await
        .unwrap();
    assert_eq!(exit.code, 0, "{}", stderr(&exit));
    let seen: BTreeMap<String, String> = stdout(&exit)
        .split_terminator('\0')
        .map(|v| v.split_once('=').unwrap())
        .map(|(n, v)| (n.to_owned(), v.to_owned()))
        .collect();
    let home = sandbox.home().to_owned();
    for (name, value) in [("HOME", home.clone()), ("LANG", "C.UTF-8".to_owned())] {
        assert_eq!(seen[name], value);
    }
    assert!(seen["PATH"].starts_with(&format!("{home}/.local/bin:/")), "{}", seen["PATH"]);
    assert!(seen.contains_key("TMPDIR"));
    let given: BTreeMap<_, _> = seen
        .into_iter()
        .filter(|(n, _)| !["HOME", "PATH", "TMPDIR", "LANG"].contains(&n.as_str()))
        .collect();
    assert_eq!(given, env);
    // Arguments too, and nothing is a shell's business.
    let exit = sandbox
        .run(&command("args", &["printf", "%s|", values[0], values[1], values[2], values[4]]))
        .await
        .unwrap();
    assert_eq!(stdout(&exit), format!("{}|{}|{}||", values[0], values[1], values[2]));
    // Where it runs, and what it is given.
    let script = r#"pwd; echo "$HOME"; cat; touch "$TMPDIR/x" "$HOME/y" z && grep -h Sig[BI] /proc/self/status"#;
    let exit = sandbox.run(&bash("place", script)).await.unwrap();
    let text = stdout(&exit);
    assert_eq!(exit.code, 0, "{text}{}", stderr(&exit));
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(&lines[..2], [sandbox.workspace(), sandbox.home()], "{text}{}", stderr(&exit));
    assert_eq!(lines[2], "SigBlk:\t0000000000000000");
    assert!(!world.folder().join("workspace/pwned").exists());
    // Nothing of ours is open: 3 is the folder that `ls` reads.
    let exit = sandbox.run(&bash("open", "exec ls /proc/self/fd")).await.unwrap();
    assert_eq!(stdout(&exit), "0\n1\n2\n3\n");
    assert!(world.folder().join("workspace/z").exists() && world.folder().join("home/y").exists());
    world.destroy().await;
}

async fn what_cannot_be_started_is_an_error_that_names_it(world: World) {
    let sandbox = world.create().await;
    let long = "x".repeat(150_000);
    let with_env = |name: &str, value: &str| StepCommand {
        env: [(name.into(), value.into())].into(),
        ..command("s", &["true"])
    };
    for (step, expected) in [
        (command("s", &["echo", "a", &long]), "argv[2] is 150000 bytes long"),
        (with_env("BIG", &long), "env[\"BIG\"]"),
        (with_env("A=B", ""), "\"A=B\""),
        (with_env("", ""), "\"\""),
        (with_env("ZERO", "a\0b"), "zero byte"),
        (command("s", &["a\0b"]), "argv[0]"),
        (command("s", &[]), "argv is empty"),
        (command("../s", &["true"]), "\"../s\""),
        (
            command(
                "s",
                &["echo"]
                    .into_iter()
                    .chain(std::iter::repeat_n("y".repeat(100_000).as_str(), 70))
                    .collect::<Vec<_>>(),
            ),
            "7000",
        ),
    ] {
        match sandbox.run(&step).await {
            Err(SandboxError::Operation { reason, .. }) if reason.contains(expected) || expected == "7000" => {}
            other => panic!("{expected}: {other:?}"),
        }
    }
    // None of that used the name up.
    assert_eq!(sandbox.run(&command("s", &["true"])).await.unwrap().code, 0);
    let fits = "x".repeat(131_071);
    assert_eq!(sandbox.run(&command("fits", &["true", &fits])).await.unwrap().code, 0);
    world.destroy().await;
}

async fn ends_of_commands(world: World) {
    let sandbox = world.create().await;
    sandbox
        .write_files(Base::Workspace, &[("plain".into(), b"text".to_vec())], false)
        .await
        .unwrap();
    for (i, (argv, code)) in [
        (&["true"][..], 0),
        (&["bash", "-c", "exit 3"], 3),
        (&["bash", "-c", "exit 255"], 255),
        (&["bash", "-c", "kill -9 $$"], 137),
        (&["bash", "-c", "kill -15 $$"], 143),
        (&["bash", "-c", "read x"], 1),
        (&["no-such-program"], 127),
        (&["/no/such/program"], 127),
        (&["./plain"], 126),
        (&["/usr"], 126),
        (
            &["bash", "-c", "[ ! -t 0 ] && [ $(readlink /proc/self/fd/0) = /dev/null ] && exit 9"],
            9,
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let exit = sandbox.run(&command(&format!("step.{i}"), argv)).await.unwrap();
        assert_eq!((exit.code, exit.timed_out), (code, false), "{argv:?} {}", stderr(&exit));
        assert!(exit.started_at_ms <= exit.finished_at_ms && exit.started_at_ms > 1_600_000_000_000);
        assert_eq!(!stderr(&exit).is_empty(), code == 126 || code == 127, "{argv:?}");
    }
    world.destroy().await;
}

async fn output_is_kept_byte_for_byte(world: World) {
    let sandbox = world.create().await;
    let script = r#"for i in {0..255}; do printf "\x$(printf %x $i)"; done; head -c 300000 /dev/zero; printf 'err\xff' >&2"#;
    let exit = sandbox.run(&bash("binary", script)).await.unwrap();
    let bytes = fs::read(&exit.output.stdout).unwrap();
    // Bash itself drops nothing but what it cannot print: zero through printf works.
    assert_eq!(bytes[..256], (0..=255).collect::<Vec<u8>>()[..]);
    assert_eq!(bytes.len(), 300_256);
    assert_eq!((exit.output.stdout_bytes, exit.output.stdout_tail), (300_256, None));
    assert_eq!(fs::read(&exit.output.stderr).unwrap(), b"err\xff");
    let times = fs::read(&exit.output.stdout_times).unwrap();
    let numbers: Vec<u64> = times.chunks_exact(8).map(|c| u64::from_le_bytes(c.try_into().unwrap())).collect();
    let pairs: Vec<&[u64]> = numbers.chunks_exact(2).collect();
    assert_eq!(pairs.last().unwrap()[0], 300_256);
    assert!(pairs.windows(2).all(|w| w[0][0] < w[1][0] && w[0][1] <= w[1][1]));
    assert!(pairs.iter().all(|p| (exit.started_at_ms..=exit.finished_at_ms).contains(&p[1])));
    world.destroy().await;
}

async fn a_silent_step_makes_no_file(world: World) {
    let sandbox = world.create().await;
    let names = || {
        let entries = fs::read_dir(world.folder()).unwrap();
        let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let exit = sandbox.run(&command("silent", &["true"])).await.unwrap();
    assert_eq!(names(), ["control", "home", "journal", "tmp", "workspace"]);
    for path in [&exit.output.stdout, &exit.output.stdout_times, &exit.output.stderr] {
        assert_eq!(fs::read(path).unwrap(), b"");
    }
    sandbox.run(&bash("loud", "echo out")).await.unwrap();
    sandbox.run(&bash("wrong", "echo err >&2")).await.unwrap();
    let expected = [
        "control",
        "home",
        "journal",
        "loud.stdout",
        "loud.stdout.times",
        "tmp",
        "workspace",
        "wrong.stderr",
    ];
    assert_eq!(names(), expected);
    world.destroy().await;
}

async fn much_output_does_not_stop_a_step(world: World) {
    let sandbox = world.create().await;
    let exit = sandbox
        .run(&bash("much", "head -c 200000000 /dev/zero; head -c 3000000 /dev/zero >&2"))
        .await
        .unwrap();
    assert_eq!((exit.code, exit.output.stdout_bytes), (0, 200_000_000));
    assert_eq!(fs::metadata(&exit.output.stdout).unwrap().len(), 200_000_000);
    assert_eq!(fs::metadata(&exit.output.stderr).unwrap().len(), STDERR_LIMIT);
    world.destroy().await;
}

async fn output_beyond_the_head_keeps_its_tail(world: World) {
    let sandbox = world.create().await;
    let script = format!("head -c {} /dev/zero; printf last", STDOUT_HEAD_LIMIT + 10);
    let exit = sandbox.run(&bash("more", &script)).await.unwrap();
    assert_eq!(exit.output.stdout_bytes, STDOUT_HEAD_LIMIT + 14);
    assert_eq!(fs::metadata(&exit.output.stdout).unwrap().len(), STDOUT_HEAD_LIMIT);
    let tail = fs::read(exit.output.stdout_tail.unwrap()).unwrap();
    assert_eq!(tail.len(), STDOUT_TAIL_LIMIT);
    assert!(tail.ends_with(b"\0\0last"));
    world.destroy().await;
}

async fn a_daemon_that_holds_stdout_does_not_hold_the_step(world: World) {
    let sandbox = world.create().await;
    let script = "(trap '' PIPE HUP; while :; do echo noise; echo noise >&2; : > alive; sleep 0.01; done) & echo early; exit 4";
    let begun = Instant::now();
    let exit = sandbox.run(&bash("daemon", script)).await.unwrap();
    assert_eq!(exit.code, 4);
    assert!(begun.elapsed() < Duration::from_secs(20));
    assert!(stdout(&exit).starts_with("early") || stdout(&exit).contains("\nearly\n"));
    // It goes on living, though nobody reads what it writes, and does not disturb later steps.
    let alive = world.folder().join("workspace/alive");
    for i in 0..3 {
        let _ = fs::remove_file(&alive);
        until("the daemon writes", || alive.exists()).await;
        assert_eq!(
            stdout(&sandbox.run(&bash(&format!("later.{i}"), "echo only this")).await.unwrap()),
            "only this\n"
        );
    }
    world.destroy().await;
}

async fn a_time_limit_beats_an_ignored_sigterm(world: World) {
    let sandbox = world.create().await;
    let mark = format!("MARK={}", world.name);
    let script =
        "trap '' TERM; (trap '' TERM; setsid bash -c 'trap \"\" TERM; while :; do sleep 1; done') & echo begun; while :; do sleep 1; done";
    let step = StepCommand {
        time_limit: Duration::from_millis(300),
        env: [("MARK".into(), world.name.clone())].into(),
        ..bash("stubborn", script)
    };
    let begun = Instant::now();
    let exit = sandbox.run(&step).await.unwrap();
    assert!(exit.timed_out && exit.code == 137, "{exit:?}");
    assert!(
        begun.elapsed() >= Duration::from_millis(2300) && begun.elapsed() < Duration::from_secs(20),
        "{:?}",
        begun.elapsed()
    );
    assert_eq!(stdout(&exit), "begun\n");
    assert_eq!(marked(&mark).len(), 0);
    // The sandbox itself is fine.
    assert_eq!(sandbox.run(&bash("after", "exit 5")).await.unwrap().code, 5);
    world.destroy().await;
}

async fn grace_lets_a_tree_end_by_itself(world: World) {
    let sandbox = world.create().await;
    // The parent dies at once, its child needs a moment to say good-bye.
    let script = "bash -c 'trap \"sleep 0.3; echo bye > bye; exit\" TERM; echo up; while :; do sleep 0.05; done' & wait";
    let begun = Instant::now();
    let exit = sandbox
        .run(&StepCommand {
            time_limit: Duration::from_millis(700),
            ..bash("polite", script)
        })
        .await
        .unwrap();
    assert!(exit.timed_out && exit.code == 143, "{exit:?}");
    assert!(
        begun.elapsed() < Duration::from_millis(2600),
        "the grace ends when all are gone: {:?}",
        begun.elapsed()
    );
    assert_eq!(fs::read_to_string(world.folder().join("workspace/bye")).unwrap(), "bye\n");
    world.destroy().await;
}

async fn kill_ends_a_step(world: World) {
    let sandbox = world.create().await;
    sandbox.kill("never-started").await.unwrap();
    let step = bash("long", "sleep 1000 & : > started; wait");
    let started = world.folder().join("workspace/started");
    let (exit, ()) = tokio::join!(sandbox.run(&step), async {
        until("the step runs", || started.exists()).await;
        sandbox.kill("other").await.unwrap();
        sandbox.kill("long").await.unwrap();
        sandbox.kill("long").await.unwrap();
    });
    let exit = exit.unwrap();
    assert_eq!((exit.code, exit.timed_out), (143, false));
    world.destroy().await;
}

async fn a_fork_bomb_is_held_and_dead_afterwards(world: World) {
    let sandbox = world.create().await;
    let mark = format!("MARK={}", world.name);
    let script = ":(){ :|:& }; : ; while :; do sleep 0.1; done";
    let env = [("MARK".into(), world.name.clone())].into();
    let step = StepCommand {
        time_limit: Duration::from_secs(2),
        env,
        ..bash("bomb", script)
    };
    let (exit, most) = tokio::join!(sandbox.run(&step), async {
        let mut most = 0;
        for _ in 0..15 {
            most = most.max(marked(&mark).len());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        most
    });
    let exit = exit.unwrap();
    assert!(exit.timed_out, "{exit:?}");
    assert!((50..=100).contains(&most), "{most} processes");
    assert_eq!(marked(&mark).len(), 0);
    assert_eq!(sandbox.run(&bash("after", "exit 6")).await.unwrap().code, 6);
    world.destroy().await;
}

async fn remains_of_a_fork_bomb_do_not_stop_the_next_step(world: World) {
    let sandbox = world.create().await;
    // The shell that throws it is gone at once: the step is over and was not timed out.
    let exit = sandbox.run(&bash("bomb", "bomb() { bomb | bomb & }; bomb; sleep 1")).await.unwrap();
    assert!(!exit.timed_out);
    let exit = sandbox
        .run(&bash("check", "for i in 1 2 3 4 5; do /bin/true || exit 1; done; echo decided"))
        .await
        .unwrap();
    assert_eq!((exit.code, stdout(&exit).as_str()), (0, "decided\n"));
    world.destroy().await;
}

async fn memory_is_limited_and_reported(world: World) {
    let sandbox = world.create().await;
    let greedy = r#"perl -e '$x = "a" x (1500 * 1024 * 1024); print "got it"'; exit 0"#;
    let exit = sandbox.run(&bash("greedy", greedy)).await.unwrap();
    assert!(exit.out_of_memory, "{exit:?}");
    assert_eq!(stdout(&exit), "");
    let exit = sandbox.run(&bash("modest", "echo fine")).await.unwrap();
    assert!(!exit.out_of_memory && exit.code == 0);
    world.destroy().await;
}

async fn a_deleted_workspace_comes_back(world: World) {
    let sandbox = world.create().await;
    let inside = sandbox.workspace().to_owned();
    sandbox
        .run(&bash("delete", &format!("touch file .hidden; cd /; rm -rf {inside}; true")))
        .await
        .unwrap();
    sandbox.ensure_workspace().await.unwrap();
    let exit = sandbox.run(&bash("look", "ls -A; pwd")).await.unwrap();
    assert_eq!(stdout(&exit), format!("{inside}\n"), "{}", stderr(&exit));
    // Something else in its place. (Bubblewrap's cannot be replaced from inside.)
    sandbox
        .run(&bash("replace", &format!("cd /; rmdir {inside} && ln -s /etc {inside}")))
        .await
        .unwrap();
    sandbox.ensure_workspace().await.unwrap();
    let exit = sandbox.run(&bash("look.again", "ls -A; pwd -P")).await.unwrap();
    assert_eq!(stdout(&exit), format!("{inside}\n"));
    world.destroy().await;
}

async fn a_step_runs_once(world: World) {
    let sandbox = world.create().await;
    let other = world.provider.attach(&world.name, 5).await.unwrap();
    let step = bash("once", "echo run >> count; sleep 0.2; cat count");
    let (a, b) = tokio::join!(sandbox.run(&step), other.run(&step));
    assert_eq!(a.as_ref().unwrap(), b.as_ref().unwrap());
    assert_eq!(stdout(&a.unwrap()), "run\n");
    // Afterwards too, whatever the command is now.
    let again = sandbox.run(&bash("once", "echo different")).await.unwrap();
    assert_eq!((stdout(&again).as_str(), &again), ("run\n", &b.unwrap()));
    // One at a time.
    let slow = bash("slow", ": > slow; sleep 0.5");
    let (slow, refused) = tokio::join!(sandbox.run(&slow), async {
        until("it runs", || world.folder().join("workspace/slow").exists()).await;
        other.run(&bash("second", "true")).await
    });
    assert_eq!(slow.unwrap().code, 0);
    assert!(
        matches!(&refused, Err(SandboxError::Operation { reason, .. }) if reason.contains("slow")),
        "{refused:?}"
    );
    world.destroy().await;
}

async fn another_executor_takes_over(world: World) {
    let sandbox = world.create().await;
    let step = bash("agent", "echo $$ > pid; while [ ! -e go ]; do sleep 0.02; done; echo $$; exit 7");
    let pid = world.folder().join("workspace/pid");
    // The first executor loses interest in the middle.
    tokio::select! {
        exit = sandbox.run(&step) => panic!("{exit:?}"),
        () = until("the agent runs", || pid.exists()) => {}
    }
    // Another one, with a zygote of its own; the first and its zygote go away.
    let second = (world.make)(world.root.path());
    let taken = second.attach(&world.name, 9).await.unwrap();
    assert!(matches!(
        sandbox.kill("agent").await,
        Err(SandboxError::Fenced { current: 9, ours: 5 })
    ));
    assert!(matches!(
        sandbox.run(&step).await,
        Err(SandboxError::Fenced { current: 9, ours: 5 })
    ));
    assert!(matches!(
        second.attach(&world.name, 8).await,
        Err(SandboxError::Fenced { current: 9, ours: 8 })
    ));
    drop(sandbox);
    let World { root, provider, name, .. } = world;
    drop(provider);
    fs::write(root.path().join(second.name()).join(&name).join("workspace/go"), "").unwrap();
    let exit = taken.run(&step).await.unwrap();
    assert_eq!((exit.code, stdout(&exit)), (7, fs::read_to_string(pid).unwrap()));
    let meta = fs::read_to_string(root.path().join(second.name()).join(&name).join("journal")).unwrap();
    assert!(meta.contains("{\"Token\":9}"), "{meta}");
    second.destroy(&name).await.unwrap();
    assert!(matches!(taken.run(&bash("late", "true")).await, Err(SandboxError::Lost { .. })));
}

async fn a_dead_supervisor_is_lost_and_its_finished_steps_are_not(world: World) {
    let sandbox = world.create().await;
    let first = bash("first", "echo done");
    let finished = sandbox.run(&first).await.unwrap();
    let mark = format!("MARK={}", world.name);
    let env: BTreeMap<_, _> = [("MARK".into(), world.name.clone())].into();
    let second = StepCommand {
        env,
        ..bash("second", "setsid sleep 1000 & : > started; wait")
    };
    let started = world.folder().join("workspace/started");
    let (lost, ()) = tokio::join!(sandbox.run(&second), async {
        until("the step runs", || started.exists()).await;
        rustix::process::kill_process(
            rustix::process::Pid::from_raw(world.supervisor()).unwrap(),
            rustix::process::Signal::KILL,
        )
        .unwrap();
    });
    assert!(matches!(&lost, Err(SandboxError::Lost { .. })), "{lost:?}");
    assert!(matches!(sandbox.run(&second).await, Err(SandboxError::Lost { .. })));
    assert!(matches!(
        world.provider.attach(&world.name, 6).await,
        Err(SandboxError::Lost { .. })
    ));
    assert_eq!(sandbox.run(&first).await.unwrap(), finished);
    assert_eq!(stdout(&finished), "done\n");
    assert_eq!(world.provider.list().await.unwrap(), std::slice::from_ref(&world.name));
    world.destroy().await;
    assert_eq!((marked(&mark).len(), cgroups(&world.name).len()), (0, 0));
}

async fn tools_are_seen_by_the_living_too(world: World) {
    let sandbox = world.create().await;
    let script = format!("cat {0}/*/it; (echo x > {0}/new && rm {0}/new) 2>/dev/null", sandbox.tools());
    assert_eq!(stdout(&sandbox.run(&bash("nothing", &script)).await.unwrap()), "");
    // Installed while it lives.
    let folder = world.root.path().join("tools/agent-1.0");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("it"), "text").unwrap();
    let exit = sandbox.run(&bash("one", &script)).await.unwrap();
    let changed = exit.code == 0;
    assert_eq!((stdout(&exit).as_str(), changed), ("text", sandbox.home() != "/home/agent"));
    world.destroy().await;
}

async fn destroy_leaves_nothing(world: World) {
    let mark = format!("MARK={}", world.name);
    let sandbox = world.create().await;
    let script = "mkdir -p deep/er; touch deep/er/file; chmod 000 deep/er deep; chmod 500 ~; (setsid sleep 1000 &); (trap '' TERM; sleep 1000) & disown";
    sandbox
        .run(&StepCommand {
            env: [("MARK".into(), world.name.clone())].into(),
            ..bash("mess", script)
        })
        .await
        .unwrap();
    assert!(!marked(&mark).is_empty());
    let folder = world.folder().to_string_lossy().into_owned();
    // And while a step is running.
    let step = bash("running", ": > /tmp/x; sleep 1000");
    let (lost, ()) = tokio::join!(sandbox.run(&step), async {
        until("the step runs", || {
            fs::read_to_string(world.folder().join("journal")).is_ok_and(|j| j.contains("{\"Started\":\"running\"}"))
        })
        .await;
        world.destroy().await;
    });
    assert!(matches!(lost, Err(SandboxError::Lost { .. })), "{lost:?}");
    assert_eq!(
        (
            marked(&mark).len(),
            marked(&folder).len(),
            cgroups(&world.name).len(),
            mounts(world.root.path())
        ),
        (0, 0, 0, 0)
    );
    world.provider.destroy("never-there").await.unwrap();
    world.provider.destroy("../not/a/name").await.unwrap();
}

async fn destroy_of_half_made_and_rebooted_sandboxes(world: World) {
    let root = world.root.path().join(world.provider.name());
    fs::create_dir_all(root.join("only-folder")).unwrap();
    fs::create_dir_all(root.join("no-meta/some/more")).unwrap();
    // From before a reboot: its ids mean nothing now, this test's own process among them.
    fs::create_dir_all(root.join("rebooted")).unwrap();
    let meta = serde_json::json!({
        "name": "rebooted", "provider": world.provider.name(), "supervisor": std::process::id(), "boot_id": "another", "created_at_ms": 1,
        "lifetime_ms": 1, "token": 1, "cgroups": ["/sys/fs/cgroup/pids/evalgrid-never"],
    });
    fs::write(root.join("rebooted/journal"), format!("{}\n", serde_json::json!({ "Made": meta }))).unwrap();
    assert_eq!(world.provider.list().await.unwrap(), ["no-meta", "only-folder", "rebooted"]);
    for name in ["only-folder", "no-meta", "rebooted"] {
        assert!(matches!(world.provider.attach(name, 1).await, Err(SandboxError::Lost { .. })));
        world.provider.destroy(name).await.unwrap();
    }
    assert_eq!(world.provider.list().await.unwrap(), Vec::<String>::new());
}

async fn lifetime_ends_a_sandbox(world: World) {
    let mark = format!("MARK={}", world.name);
    let spec = SandboxSpec {
        lifetime: Duration::from_millis(600),
        ..world.spec()
    };
    let sandbox = world.provider.create(&spec).await.unwrap();
    let env = [("MARK".into(), world.name.clone())].into();
    let result = sandbox
        .run(&StepCommand {
            env,
            ..bash("long", "trap '' TERM; setsid sleep 1000 & wait; sleep 1000")
        })
        .await;
    assert!(
        matches!(&result, Err(SandboxError::Lost { reason, .. }) if reason.contains("lifetime")),
        "{result:?}"
    );
    assert_eq!(marked(&mark).len(), 0);
    until("the supervisor exits", || {
        !fs::exists(format!("/proc/{}", world.supervisor())).unwrap()
    })
    .await;
    let attached = world.provider.attach(&world.name, 6).await.map(|_| ());
    assert!(
        matches!(&attached, Err(SandboxError::Lost { reason, .. }) if reason.contains("lifetime")),
        "{attached:?}"
    );
    assert!(world.folder().join("workspace").exists());
    assert_eq!(cgroups(&world.name).len(), 0);
    world.destroy().await;
}

async fn creating_twice_is_refused(world: World) {
    let sandbox = world.create().await;
    let second = world.provider.create(&world.spec()).await.map(|_| ());
    assert!(matches!(second, Err(SandboxError::Create { .. })), "{second:?}");
    assert_eq!(sandbox.run(&command("still-there", &["true"])).await.unwrap().code, 0);
    let bad = world
        .provider
        .create(&SandboxSpec {
            name: "No/Name".into(),
            ..world.spec()
        })
        .await
        .map(|_| ());
    assert!(matches!(bad, Err(SandboxError::Create { .. })));
    world.destroy().await;
}
