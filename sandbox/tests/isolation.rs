//! What a process inside bubblewrap can see and do, and what it cannot.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod common;

use common::*;
use evalgrid_sandbox::*;

#[tokio::test]
async fn nothing_of_the_host_is_in_reach() {
    let world = World::new(make_bubblewrap, "isolation");
    let sandbox = world.create().await;
    let root = world.root.path().display().to_string();
    for (i, (script, expected)) in [
        (
            "ls /etc/shadow /etc/ssh /root /sys /boot /mnt /srv 2>/dev/null; echo none",
            "none\n",
        ),
        (&format!("ls {root} 2>/dev/null; echo none"), "none\n"),
        (
            "id -u; id -g; id -un; hostname; echo $HOME",
            "1000\n1000\nagent\nsandbox\n/home/agent\n",
        ),
        (
            "for f in /usr/x /etc/x /x /opt/x /run/x /run/evalgrid/init; do : > $f; done 2>/dev/null; ls /x /usr/x 2>/dev/null; echo none",
            "none\n",
        ),
        (
            ": > /tmp/a && : > /var/tmp/b && : > /dev/shm/c && : > ~/d && : > /workspace/e && echo written",
            "written\n",
        ),
        (
            "grep -h -e CapEff -e NoNewPrivs /proc/self/status",
            "CapEff:\t0000000000000000\nNoNewPrivs:\t1\n",
        ),
        // The init is out of reach, and so is what it has open.
        (
            "kill -9 1; kill -STOP 1; (readlink /proc/1/fd/* /proc/1/exe; cat /proc/1/fd/* /proc/1/environ) 2>/dev/null; echo none",
            "none\n",
        ),
        ("ls -d /proc/[0-9]* | wc -l", "4\n"),
        (
            "[ $(ps -o sid= $$) = $$ ] && (: < /dev/tty) 2>/dev/null || echo no terminal",
            "no terminal\n",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let exit = sandbox.run(&bash(&format!("look.{i}"), script)).await.unwrap();
        assert_eq!(stdout(&exit), expected, "{script}: {}", stderr(&exit));
    }
    world.destroy().await;
}

#[tokio::test]
async fn the_network_can_be_off() {
    for (network, others) in [
        (Network::Host, std::fs::read_to_string("/proc/net/dev").unwrap().lines().count() - 3),
        (Network::Off, 0),
    ] {
        let root = tempfile::tempdir().unwrap();
        let options = BubblewrapOptions {
            network: network.clone(),
            ..Default::default()
        };
        let provider = BubblewrapProvider::new(root.path(), helper(), options).unwrap();
        let limits = Limits {
            memory_bytes: 256 << 20,
            pids: 50,
        };
        let spec = SandboxSpec {
            name: format!("network-{network}"),
            token: 1,
            lifetime: PATIENCE,
            limits,
            base: None,
        };
        let sandbox = provider.create(&spec).await.unwrap();
        let exit = sandbox
            .run(&bash("look", "tail -n +3 /proc/net/dev | grep -vc ' lo:'"))
            .await
            .unwrap();
        assert_eq!(stdout(&exit), format!("{others}\n"));
        provider.destroy(&spec.name).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_network_can_be_a_list() {
    check_allowed_network(&|root, network| {
        let options = BubblewrapOptions {
            network,
            ..Default::default()
        };
        std::sync::Arc::new(BubblewrapProvider::new(root.join("bubblewrap"), helper(), options).unwrap())
    })
    .await;
}

#[tokio::test]
async fn probe_tells_why() {
    let root = tempfile::tempdir().unwrap();
    let provider = BubblewrapProvider::new(root.path(), helper(), BubblewrapOptions::default()).unwrap();
    assert_eq!(provider.probe().await, Ok(()));
    let missing = BubblewrapOptions {
        program: "no-such-bwrap".into(),
        network: Network::Host,
    };
    let error = BubblewrapProvider::new(root.path(), helper(), missing)
        .map(|_| ())
        .unwrap_err()
        .to_string();
    assert!(error.contains("no-such-bwrap is not installed"), "{error}");
    // A program that is not bubblewrap.
    let wrong = BubblewrapOptions {
        program: "/bin/false".into(),
        network: Network::Host,
    };
    let provider = BubblewrapProvider::new(root.path(), helper(), wrong).unwrap();
    assert!(provider.probe().await.is_err());
    assert_eq!(provider.list().await.unwrap(), Vec::<String>::new());
    // An executable without the helpers.
    let provider = ProcessProvider::new(root.path().join("p"), Some("/bin/true".into())).unwrap();
    let limits = Limits {
        memory_bytes: 1 << 28,
        pids: 50,
    };
    let spec = SandboxSpec {
        name: "x".into(),
        token: 1,
        lifetime: PATIENCE,
        limits,
        base: None,
    };
    let error = provider.create(&spec).await.map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("does not serve sandbox-zygote"), "{error}");
}

#[tokio::test]
async fn a_killed_zygote_is_replaced_and_supervisors_do_not_mind() {
    let world = World::new(make_process, "zygote");
    let sandbox = world.create().await;
    let zygotes = marked(&format!(".zygote-{}-", std::process::id()));
    let supervisor = world.supervisor();
    let of_this_root: Vec<i32> = marked(&world.root.path().display().to_string())
        .intersection(&zygotes)
        .copied()
        .filter(|p| *p != supervisor)
        .collect();
    assert_eq!(of_this_root.len(), 1);
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(of_this_root[0]).unwrap(),
        rustix::process::Signal::KILL,
    )
    .unwrap();
    assert_eq!(sandbox.run(&bash("still", "exit 3")).await.unwrap().code, 3);
    let spec = SandboxSpec {
        name: "second".into(),
        ..world.spec()
    };
    assert_eq!(
        world
            .provider
            .create(&spec)
            .await
            .unwrap()
            .run(&bash("new", "exit 4"))
            .await
            .unwrap()
            .code,
        4
    );
    world.provider.destroy("second").await.unwrap();
    world.destroy().await;
}

#[tokio::test]
async fn shared_files_cannot_be_changed_from_inside() {
    let world = World::new(make_bubblewrap, "shared");
    world.provider.share(&[("tool".to_owned(), b"text".to_vec())]).unwrap();
    let sandbox = world.create().await;
    let folder = sandbox.shared();
    let script = format!(
        "cd {folder}; (chmod 777 . tool; echo x > tool; rm -f tool ../current; : > new; ln -sfn /etc ../current; : > ../new) 2>/dev/null; cat {folder}/*; ls {folder} {folder}/.."
    );
    let exit = sandbox.run(&bash("change", &script)).await.unwrap();
    assert_eq!(stdout(&exit), format!("text{folder}:\ntool\n\n{folder}/..:\na\ncurrent\n"));
    world.destroy().await;
}
