//! What only Docker can do wrong, and what a container is and is not given.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod common;

use std::{
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use common::{
    docker_options,
    dockerd::{Dockerd, EMPTY_IMAGE, IMAGE, dockerd},
    make_docker, *,
};
use evalgrid_sandbox::*;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
};

async fn open(root: &Path, options: DockerOptions) -> Result<DockerProvider, SandboxError> {
    DockerProvider::open(root.join("docker"), helper(), options).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_of_the_host_is_in_reach() {
    let Some(dockerd) = dockerd() else { return };
    let world = World::new(make_docker, "isolation");
    let sandbox = world.create().await;
    let root = world.root.path().display().to_string();
    for (i, (script, expected)) in [
        ("ls /home; ls -d /root /srv /work /var/lib 2>/dev/null; echo none", "agent\nnone\n"),
        (&*format!("ls {root} 2>/dev/null; echo none"), "none\n"),
        ("id -u; id -g; hostname; echo $HOME", "1000\n1000\nsandbox\n/home/agent\n"),
        (
            "for f in /usr/x /etc/x /x /opt/x /run/x /opt/evalgrid/evalgrid /run/evalgrid/door/x; do : > $f; done 2>/dev/null; ls /x /usr/x /run/evalgrid/door 2>/dev/null; echo none",
            "/run/evalgrid/door:\nnone\n",
        ),
        (
            ": > /tmp/a && : > /var/tmp/b && : > /dev/shm/c && : > ~/d && : > /workspace/e && echo written",
            "written\n",
        ),
        (
            "grep -h -e CapEff -e CapBnd -e NoNewPrivs -e Seccomp: /proc/self/status",
            "CapEff:\t0000000000000000\nCapBnd:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n",
        ),
        (
            "kill -9 1; kill -STOP 1; (readlink /proc/1/fd/* /proc/1/exe; cat /proc/1/fd/* /proc/1/environ) 2>/dev/null; echo none",
            "none\n",
        ),
        ("tail -n +3 /proc/net/dev | grep -vc ' lo:'", "0\n"),
        // Half of its memory: a full /tmp is told from too little memory.
        ("head -c 400000000 /dev/zero > /tmp/big; stat -c %s /tmp/big; rm /tmp/big", "268435456\n"),
    ]
    .into_iter()
    .enumerate()
    {
        let exit = sandbox.run(&bash(&format!("look.{i}"), script)).await.unwrap();
        assert_eq!(stdout(&exit), expected, "{script}: {}", stderr(&exit));
    }
    // As the daemon sees it.
    let name = dockerd.containers().into_iter().find(|n| n.ends_with("-isolation")).unwrap();
    let (_, body) = dockerd.ask("GET", &format!("/containers/{name}/json"), &[]).unwrap();
    let seen: serde_json::Value = serde_json::from_str(&body).unwrap();
    let host = &seen["HostConfig"];
    assert_eq!(
        (
            &host["Memory"],
            &host["MemorySwap"],
            &host["PidsLimit"],
            &host["AutoRemove"],
            &host["Privileged"]
        ),
        (
            &(512u64 << 20).into(),
            &(512u64 << 20).into(),
            &100.into(),
            &false.into(),
            &false.into()
        )
    );
    let labels = &seen["Config"]["Labels"];
    assert_eq!(
        (labels["evalgrid.sandbox"].as_str(), labels["evalgrid.token"].as_str()),
        (Some("isolation"), Some("5"))
    );
    world.destroy().await;
    assert!(!dockerd.containers().contains(&name));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_network_can_be_a_list() {
    let Some(dockerd) = dockerd() else { return };
    check_allowed_network(&|root, network| {
        let options = DockerOptions {
            network,
            ..docker_options(root, dockerd)
        };
        Arc::new(tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(open(root, options))).unwrap())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_used_is_refused_and_says_why() {
    let Some(dockerd) = dockerd() else { return };
    let root = tempfile::tempdir().unwrap();
    let dockerfile = root.path().join("Dockerfile");
    fs::write(&dockerfile, format!("FROM {IMAGE}\nNONSENSE\n")).unwrap();
    let ours = || docker_options(root.path(), dockerd);
    for (options, expected) in [
        (
            DockerOptions {
                socket: root.path().join("nobody"),
                ..ours()
            },
            "nobody answers at",
        ),
        (
            DockerOptions {
                image: DockerImage::Name("evalgrid-test/none:9".into()),
                ..ours()
            },
            "there is no image evalgrid-test/none:9",
        ),
        (
            DockerOptions {
                image: DockerImage::File(dockerfile),
                ..ours()
            },
            "NONSENSE",
        ),
        (
            DockerOptions {
                image: DockerImage::File("/no/such".into()),
                ..ours()
            },
            "/no/such: No such file",
        ),
        (
            DockerOptions {
                owner: "a/b".into(),
                ..ours()
            },
            "\"a/b\"",
        ),
    ] {
        let error = open(root.path(), options).await.map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
    }
    // Our init runs there, though there is nothing at all; what harnesses need is missing.
    let empty = DockerOptions {
        image: DockerImage::Name(EMPTY_IMAGE.into()),
        ..ours()
    };
    let provider = open(root.path(), empty).await.unwrap();
    assert_eq!(
        provider.probe().await,
        Err(format!("the image {EMPTY_IMAGE} has no /bin/bash, which harnesses need"))
    );
    assert_eq!(provider.list().await.unwrap(), Vec::<String>::new());
    assert_eq!(open(root.path(), ours()).await.unwrap().probe().await, Ok(()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dockerfile_is_built_once_and_its_settings_hold() {
    let Some(dockerd) = dockerd() else { return };
    let root = tempfile::tempdir().unwrap();
    let dockerfile = root.path().join("Dockerfile");
    let text = format!("FROM {IMAGE}\nENV COLOUR=blue PATH=/usr/bin:/bin:/from/image\nUSER 1234\n");
    fs::write(&dockerfile, &text).unwrap();
    let options = DockerOptions {
        image: DockerImage::File(dockerfile.clone()),
        cpus: Some(0.5),
        ..docker_options(root.path(), dockerd)
    };
    let built = || {
        let (_, body) = dockerd.ask("GET", "/images/json", &[]).unwrap();
        body.matches("evalgrid-built:").count()
    };
    let (first, second) = tokio::join!(open(root.path(), options.clone()), open(root.path(), options.clone()));
    assert_eq!(built(), 1);
    drop(second.unwrap());
    let world = World {
        provider: Arc::new(first.unwrap()),
        ..World::new(make_docker, "dockerfile")
    };
    let world = World { root, ..world };
    let sandbox = world.create().await;
    let exit = sandbox
        .run(&bash("look", "echo $COLOUR $(id -u); echo $PATH; : > ~/mine && : > mine"))
        .await
        .unwrap();
    // Whoever is not root runs everything as himself.
    let user = if rustix::process::geteuid().is_root() {
        1234
    } else {
        rustix::process::geteuid().as_raw()
    };
    let expected = format!("blue {user}\n/home/agent/.local/bin:/usr/bin:/bin:/from/image\n");
    assert_eq!((exit.code, stdout(&exit)), (0, expected), "{}", stderr(&exit));
    // What we write is the agent's.
    sandbox
        .write_files(Base::Home, &[("a/secret".into(), b"s".to_vec())], true)
        .await
        .unwrap();
    let exit = sandbox
        .run(&bash("use", "cat ~/a/secret && echo more >> ~/a/secret && : > ~/a/b && echo fine"))
        .await
        .unwrap();
    assert_eq!(stdout(&exit), "sfine\n", "{}", stderr(&exit));
    world.destroy().await;
    // The same content is there already, another is not.
    drop(open(world.root.path(), options.clone()).await.unwrap());
    assert_eq!(built(), 1);
    fs::write(&dockerfile, format!("{text}ENV COLOUR=red\n")).unwrap();
    drop(open(world.root.path(), options).await.unwrap());
    assert_eq!(built(), 2);
}

/// Stands between a provider and the daemon, and loses as many answers to "create a container" as it is told.
struct Proxy {
    lose: Arc<AtomicUsize>,
    socket: std::path::PathBuf,
    task: tokio::task::JoinHandle<()>,
}

impl Proxy {
    fn start(folder: &Path, dockerd: &Dockerd) -> Self {
        let (socket, to) = (folder.join("proxy.sock"), dockerd.socket.clone());
        let listener = UnixListener::bind(&socket).unwrap();
        let lose = Arc::new(AtomicUsize::new(0));
        let counter = lose.clone();
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let (to, counter) = (to.clone(), counter.clone());
                connections.spawn(async move {
                    if let Ok(daemon) = UnixStream::connect(to).await {
                        let _ = lead(client, daemon, &counter).await;
                    }
                });
            }
        });
        Self { lose, socket, task }
    }
}

async fn lead(mut client: UnixStream, mut daemon: UnixStream, lose: &AtomicUsize) -> std::io::Result<()> {
    let (mut up, mut down) = (vec![0; 65536], vec![0; 65536]);
    let mut creating = false;
    loop {
        tokio::select! {
            n = client.read(&mut up) => {
                let n = n?;
                if n == 0 { return Ok(()) }
                creating |= String::from_utf8_lossy(&up[..n]).contains("/containers/create?");
                daemon.write_all(&up[..n]).await?;
            }
            n = daemon.read(&mut down) => {
                let n = n?;
                // It has done what it was asked, and nobody hears of it.
                if n == 0 || std::mem::take(&mut creating) && lose.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok() {
                    return Ok(());
                }
                client.write_all(&down[..n]).await?;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_answers_and_a_lost_daemon_leak_nothing() {
    let Some(dockerd) = dockerd() else { return };
    let root = tempfile::tempdir().unwrap();
    let proxy = Proxy::start(root.path(), dockerd);
    let options = DockerOptions {
        socket: proxy.socket.clone(),
        ..docker_options(root.path(), dockerd)
    };
    let owner = options.owner.clone();
    let provider = open(root.path(), options).await.unwrap();
    let spec = |name: &str| SandboxSpec {
        name: name.into(),
        token: 1,
        lifetime: PATIENCE * 5,
        limits: Limits {
            memory_bytes: 256 << 20,
            pids: 50,
        },
        base: None,
    };
    let ours = || {
        let names = dockerd.containers().into_iter();
        names.filter(|name| name.contains(&owner)).count()
    };
    // Once or twice: found by its name, removed, made again. Three times: given up, and nothing is left.
    for (lost, is_made) in [(1, true), (2, true), (3, false)] {
        proxy.lose.store(lost, Ordering::Relaxed);
        let created = provider.create(&spec("again")).await;
        assert_eq!(
            (created.is_ok(), ours()),
            (is_made, usize::from(is_made)),
            "{lost} lost: {:?}",
            created.map(|_| ())
        );
        assert_eq!(proxy.lose.load(Ordering::Relaxed), 0);
        provider.destroy("again").await.unwrap();
        assert_eq!((ours(), provider.list().await.unwrap().len()), (0, 0));
    }
    // A folder that somebody has deleted: the label still tells.
    let sandbox = provider.create(&spec("deleted")).await.unwrap();
    fs::remove_dir_all(root.path().join("docker/deleted")).unwrap();
    assert_eq!(provider.list().await.unwrap(), ["deleted"]);
    provider.destroy("deleted").await.unwrap();
    assert_eq!((ours(), provider.list().await.unwrap().len()), (0, 0));
    drop(sandbox);
    // What has our name and not our label is not ours.
    let foreign = format!("evalgrid-{owner}-foreign");
    let body = format!("{{\"Image\":\"{IMAGE}\",\"Cmd\":[\"sleep\",\"1000\"]}}");
    let (status, said) = dockerd
        .ask("POST", &format!("/containers/create?name={foreign}"), body.as_bytes())
        .unwrap();
    assert_eq!(status, 201, "{said}");
    let error = provider.create(&spec("foreign")).await.map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("has not our label"), "{error}");
    assert!(provider.destroy("foreign").await.is_err());
    assert_eq!((ours(), provider.list().await.unwrap().len()), (1, 0));
    dockerd.ask("DELETE", &format!("/containers/{foreign}?force=1"), &[]).unwrap();
    // Without the daemon a sandbox goes on, is listed, and its end is not confirmed.
    let sandbox = provider.create(&spec("alone")).await.unwrap();
    proxy.task.abort();
    until("nobody listens", || std::os::unix::net::UnixStream::connect(&proxy.socket).is_err()).await;
    assert_eq!(sandbox.run(&bash("on", "exit 3")).await.unwrap().code, 3);
    assert_eq!(provider.list().await.unwrap(), ["alone"]);
    assert!(provider.destroy("alone").await.is_err());
    assert_eq!(provider.list().await.unwrap(), ["alone"]);
    fs::remove_file(&proxy.socket).unwrap();
    let _back = Proxy::start(root.path(), dockerd);
    provider.destroy("alone").await.unwrap();
    assert_eq!((ours(), provider.list().await.unwrap().len()), (0, 0));
}
