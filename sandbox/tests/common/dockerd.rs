//! A Docker daemon of the tests' own (those of whole servers include this file, too): on a private socket, in namespaces of its own, with images made from this machine's files. Nothing of
//! it is left when the test process has ended, however that came about.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
    process::{Command, Stdio},
    sync::OnceLock,
    time::{Duration, Instant},
};

/// A daemon starts within a second, on an idle machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// The image that most tests use: bash and what their scripts call.
pub const IMAGE: &str = "evalgrid-test/tools:1";
/// An image with nothing in it but one empty folder.
pub const EMPTY_IMAGE: &str = "evalgrid-test/empty:1";
const TOOLS: &str = "bash sh perl echo pwd cat ls env printf head tail sleep stat sed find grep sort setsid mkfifo ps readlink touch chmod mkdir rm \
rmdir ln wc id hostname true false seq kill date cut tr dd mv cp ip getent curl";

/// Ends dockerd, and everything in its namespaces, when the pipe on stdin is closed. Then it clears up.
const GUARDIAN: &str = r#"
folder=$1 parent=$2
mkdir "$folder/disk" && mount -t tmpfs -o size=32m tmpfs "$folder/disk"
unshare --mount --pid --fork --kill-child --propagation slave --mount-proc dockerd --data-root "$folder/data" --exec-root "$folder/exec" \
  --pidfile "$folder/pid" --host "unix://$folder/docker.sock" --cgroup-parent "/$parent" --iptables=false --ip6tables=false \
  --ip-forward=false --bridge=none < /dev/null > "$folder/log" 2>&1 &
unshare=$!
read -r _
kill -KILL $(cat "/proc/$unshare/task/$unshare/children")
wait "$unshare"
umount "$folder/disk"
for _ in 1 2 3 4 5; do
  find /sys/fs/cgroup -depth -type d -path "*/$parent*" -exec rmdir {} + && rm -rf "$folder" && break
  sleep 0.2
done
"#;

/// A running daemon.
pub struct Dockerd {
    pub folder: PathBuf,
    /// A file system of 32 MiB that the daemon sees too.
    pub disk: PathBuf,
    pub socket: PathBuf,
}

/// The daemon of this test process. `None`, and a loud word about it, where none can be had; that is a failure with `EVALGRID_REQUIRE_DOCKER=1`.
pub fn dockerd() -> Option<&'static Dockerd> {
    static DOCKERD: OnceLock<Result<Dockerd, String>> = OnceLock::new();
    match DOCKERD.get_or_init(start) {
        Ok(dockerd) => Some(dockerd),
        Err(reason) => {
            let required = std::env::var("EVALGRID_REQUIRE_DOCKER").is_ok_and(|v| v == "1");
            assert!(!required, "no Docker daemon, and EVALGRID_REQUIRE_DOCKER=1: {reason}");
            eprintln!("SKIPPED: the Docker part of this test, for there is no daemon: {reason}");
            None
        }
    }
}

fn start() -> Result<Dockerd, String> {
    let folder = tempfile::tempdir().map_err(|e| e.to_string())?.keep();
    let socket = folder.join("docker.sock");
    let parent = format!("evalgrid-test-{}", std::process::id());
    // The system's programs are not on the path of everybody.
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let mut guardian = Command::new("bash")
        .args(["-c", GUARDIAN, "guardian"])
        .arg(&folder)
        .arg(&parent)
        .env("PATH", path)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|e| format!("bash: {e}"))?;
    // Closed by the end of this process.
    std::mem::forget(guardian.stdin.take());
    let dockerd = Dockerd {
        disk: folder.join("disk"),
        folder,
        socket,
    };
    let until = Instant::now() + PATIENCE;
    while !dockerd.ask("GET", "/_ping", &[]).is_ok_and(|(status, _)| status == 200) {
        let log = std::fs::read_to_string(dockerd.folder.join("log")).unwrap_or_default();
        // It says so at once where it is not installed or may not do what it must.
        let failed = [
            "failed to start",
            "No such file",
            "Operation not permitted",
            "needs to be started with root",
        ];
        if Instant::now() > until || failed.iter().any(|f| log.contains(f)) {
            return Err(format!(
                "dockerd does not start: {}",
                log.lines().last().unwrap_or("it says nothing")
            ));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    dockerd.import(IMAGE, &tools("")?, "ENV%20PATH%3D%2Fusr%2Fbin")?;
    dockerd.import(EMPTY_IMAGE, "mkdir empty", "ENV%20PATH%3D%2Fusr%2Fbin")?;
    Ok(dockerd)
}

/// A script that fills the working folder with the tools, further programs of this machine, and the libraries that they need.
pub fn tools(more: &str) -> Result<String, String> {
    Ok(format!(
        r#"mkdir -p usr/bin usr/lib usr/lib64 usr/sbin tmp etc proc dev sys run
for d in bin lib lib64 sbin; do ln -s usr/$d $d; done
for t in {TOOLS} {more}; do p=$(PATH=$PATH:/usr/sbin:/sbin type -P $t) && cp -L "$p" usr/bin/; done
ldd usr/bin/* 2>/dev/null | grep -o '/[^ ]*' | grep -v : | sort -u | while read -r l; do
  r=$(readlink -f "$(dirname "$l")"); mkdir -p ".$r"; cp -L "$l" ".$r/"
done
cp -L /usr/lib/*/libnss_files.so* usr/lib/ 2>/dev/null; printf 'hosts: files dns\n' > etc/nsswitch.conf"#
    ))
}

impl Dockerd {
    /// One request, past the client that is being tested. Status and body.
    pub fn ask(&self, method: &str, path: &str, body: &[u8]) -> Result<(u16, String), String> {
        let ask = || -> std::io::Result<Vec<u8>> {
            let mut stream = UnixStream::connect(&self.socket)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            let length = body.len();
            // Archives are taken under any name.
            write!(
                stream,
                "{method} {path} HTTP/1.0\r\nHost: docker\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
            )?;
            // The daemon does not read an archive's padding, and resets the connection for it after it has answered.
            let written = stream.write_all(body);
            let mut answer = Vec::new();
            let read = stream.read_to_end(&mut answer);
            match answer.is_empty() {
                true => written.and(read.map(|_| answer)),
                false => Ok(answer),
            }
        };
        let answer = String::from_utf8_lossy(&ask().map_err(|e| e.to_string())?).into_owned();
        let (head, body) = answer.split_once("\r\n\r\n").ok_or("no HTTP")?;
        let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).ok_or("no status")?;
        Ok((status, body.to_owned()))
    }

    /// Makes an image of what a bash script puts into an empty folder.
    pub fn import(&self, image: &str, script: &str, changes: &str) -> Result<(), String> {
        let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
        let run = |command: &mut Command| {
            let output = command
                .current_dir(&folder)
                .stdin(Stdio::null())
                .output()
                .map_err(|e| e.to_string())?;
            match output.status.success() {
                true => Ok(output.stdout),
                false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
            }
        };
        run(Command::new("bash").args(["-c", script]))?;
        let archive = run(Command::new("tar").args(["-c", "."]))?;
        let (repo, tag) = image.split_once(':').ok_or("an image without a tag")?;
        let path = format!("/images/create?fromSrc=-&repo={repo}&tag={tag}&changes={changes}");
        match self.ask("POST", &path, &archive)? {
            (200, body) if !body.contains("\"error\"") => Ok(()),
            (status, body) => Err(format!("{status}: {body}")),
        }
    }

    /// Names of all containers.
    pub fn containers(&self) -> Vec<String> {
        let (status, body) = self.ask("GET", "/containers/json?all=1", &[]).unwrap();
        assert_eq!(status, 200, "{body}");
        let list: serde_json::Value = serde_json::from_str(&body).unwrap();
        let names = list.as_array().unwrap().iter();
        names
            .map(|c| c["Names"][0].as_str().unwrap().trim_start_matches('/').to_owned())
            .collect()
    }
}
