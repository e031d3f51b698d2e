//! Starts bubblewrap with our init inside.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::net::UnixStream,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use rustix::process::Pid;

use super::{
    inner::{Inner, Life, ORDER_PATIENCE},
    output,
};
use crate::{
    cgroup::Group,
    gate::{self, Gate},
    helpers,
    inner_protocol::{Channel, HOME, INIT_PATH, InitOptions, Report, SHARE, TOOLS, WORKSPACE},
    layout::Layout,
    network::Network,
    protocol::Bubblewrap,
    sys::{self, Prepare},
};

/// How long bubblewrap may take until our init speaks. Measured: 15 to 30 ms; a machine under full load takes seconds.
const START_PATIENCE: Duration = Duration::from_secs(20);

/// Starts bubblewrap inside `group` and waits for the init.
pub fn start(spec: &Bubblewrap, layout: &Layout, group: &Group, most_processes: Option<u32>) -> io::Result<Inner> {
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_write_timeout(Some(ORDER_PATIENCE))?;
    let (complaints, complaints_end) = output::pipe()?;
    if let Some(hosts) = spec.network.hosts() {
        fs::write(layout.hosts(), hosts)?;
    }
    let mut command = Command::new(&spec.program);
    arguments(&mut command, spec, layout);
    let options = InitOptions {
        most_processes,
        show_network: !spec.network.endpoints().is_empty(),
        ..InitOptions::default()
    };
    command.arg(serde_json::to_string(&options)?);
    command
        .env_clear()
        .stdin(Stdio::from(std::os::fd::OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .stderr(complaints_end);
    // `--die-with-parent` means the thread that started it: this process has only one.
    let prepare = Prepare {
        new_session: true,
        die_with_parent: false,
        first_out_of_memory: true,
        join: group.doors()?,
    };
    sys::prepare(&mut command, prepare);
    let child = command
        .spawn()
        .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", spec.program.display())))?;
    // The command holds the other end of the pair, whose closing must be seen.
    drop(command);
    let life = Life::Child {
        pid: Pid::from_raw(child.id() as i32),
        complaints,
    };
    let mut channel = Channel::new(ours);
    match channel.wait::<Report>(START_PATIENCE) {
        Ok(Report::Ready) => {}
        Ok(other) => return Err(io::Error::other(format!("the init said {other:?} instead of Ready"))),
        Err(e) => {
            let said = life.complaint();
            return Err(io::Error::other(if said.is_empty() {
                format!("no word from inside: {e}")
            } else {
                said
            }));
        }
    }
    let gate = match channel.take_descriptor() {
        Some(namespace) => {
            let listeners = gate::listen_in(&namespace, &spec.network.listen())?;
            Gate::start(&spec.executable, &spec.network, listeners)?
        }
        None => None,
    };
    Ok(Inner::new(&BTreeMap::new(), channel, life, gate))
}

/// The command line.
fn arguments(command: &mut Command, spec: &Bubblewrap, layout: &Layout) {
    inside(command, spec, layout);
    command.args(["--as-pid-1", "--", INIT_PATH, helpers::INIT]);
}

/// A shell for a person, in namespaces of its own over the same folders. It reads none of the files by which an agent could give it orders, and has
/// no hold on the person's terminal.
pub fn shell(spec: &Bubblewrap, layout: &Layout) -> Command {
    let mut command = Command::new(&spec.program);
    inside(&mut command, spec, layout);
    command.args(["--", "/bin/bash", "--norc", "--noprofile", "-i"]);
    let path = format!("/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:{HOME}/.local/bin");
    let own = [
        ("HOME", HOME),
        ("PATH", path.as_str()),
        ("TMPDIR", "/tmp"),
        ("LANG", "C.UTF-8"),
        ("PS1", "sandbox:\\w$ "),
    ];
    command
        .env_clear()
        .envs(own)
        .envs(std::env::var_os("TERM").map(|term| ("TERM", term)));
    command
}

/// Namespaces and mounts. Every mount costs about 0.1 ms, so `/etc` is one prepared folder rather than twenty files.
fn inside(command: &mut Command, spec: &Bubblewrap, layout: &Layout) {
    command.args([
        "--unshare-user",
        "--unshare-pid",
        "--unshare-uts",
        "--unshare-ipc",
        "--unshare-cgroup-try",
    ]);
    if spec.network != Network::Host {
        command.arg("--unshare-net");
    }
    command.args(["--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--cap-drop", "ALL"]);
    command.args(["--die-with-parent", "--new-session"]);
    command.args(["--ro-bind", "/usr", "/usr"]);
    for name in ["/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"] {
        let path = Path::new(name);
        match fs::read_link(path) {
            Ok(target) => command.arg("--symlink").arg(target).arg(name),
            Err(_) if path.is_dir() => command.args(["--ro-bind", name, name]),
            Err(_) => command,
        };
    }
    if Path::new("/opt").is_dir() {
        command.args(["--ro-bind", "/opt", "/opt"]);
    }
    command.arg("--ro-bind").arg(&spec.etc).arg("/etc");
    if !spec.network.endpoints().is_empty() {
        command.arg("--ro-bind").arg(layout.hosts()).arg("/etc/hosts");
    }
    command.args([
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--dir",
        "/run",
        "--dir",
        "/var",
        "--symlink",
        "/tmp",
        "/var/tmp",
    ]);
    command.arg("--bind").arg(layout.tmp()).arg("/tmp");
    command.arg("--bind").arg(layout.home()).arg(HOME);
    command.arg("--bind").arg(layout.workspace()).arg(WORKSPACE);
    command.arg("--ro-bind").arg(&spec.executable).arg(INIT_PATH);
    command.arg("--ro-bind").arg(&spec.share).arg(SHARE);
    command.arg("--ro-bind").arg(&spec.tools).arg(TOOLS);
    command.args(["--remount-ro", "/", "--chdir", WORKSPACE]);
}
