//! Automation: `cargo xtask test` does everything that a change must pass, and installs what that needs.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::Instant,
};

/// What the tests run: real programs, from Debian's packages.
const PROGRAMS: &[(&str, &str)] = &[
    ("bwrap", "bubblewrap"),
    ("git", "git"),
    ("bash", "bash"),
    ("zsh", "zsh"),
    ("redis-server", "redis-server"),
    ("redis-sentinel", "redis-sentinel"),
    // For the agents, and for the bundles of validators and mocks.
    ("node", "nodejs"),
    ("npm", "npm"),
    // For the power cuts.
    ("mkfs.ext4", "e2fsprogs"),
    ("losetup", "mount"),
    ("unshare", "util-linux"),
    // Docker sandboxes: the tests run a daemon of their own.
    ("dockerd", "docker.io"),
    ("tar", "tar"),
];

/// The agents that tests run, as `evalgrid harness install` knows them. Bub is another one: it needs a Python that Debian 12 does not have.
const AGENTS: &[&str] = &["codex", "claude", "gemini", "opencode", "qwen", "pi"];

const USAGE: &str = "\
cargo xtask test [--long]   install what tests need, check format and lints, build, run every test
                            (--long: more seeds, more kills; about an hour)
                            The power cuts need root, /dev/fuse and loop devices; EVALGRID_SKIP_POWERCUT=1 leaves them out.
                            The Docker tests start a daemon of their own; where none can be, they say that they are skipped, unless
                            EVALGRID_REQUIRE_DOCKER=1 makes that a failure.
cargo xtask install         only install what tests need";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["test"] => install().and_then(|()| test(false)),
        ["test", "--long"] => install().and_then(|()| test(true)),
        ["install"] => install().and_then(|()| agents()),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("xtask: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn on_path(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    // Debian keeps the system's programs out of the path of ordinary users.
    let system = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    env::split_paths(&path).chain(system).any(|folder| folder.join(program).is_file())
}

fn install() -> Result<(), String> {
    let missing: Vec<&str> = PROGRAMS
        .iter()
        .filter(|(program, _)| !on_path(program))
        .map(|(_, package)| *package)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let list = missing.join(" ");
    if !on_path("apt-get") {
        return Err(format!(
            "please install {list} with your system's package manager, then run this again"
        ));
    }
    let sudo: &[&str] = if is_root() { &[] } else { &["sudo"] };
    println!("installing {list}");
    let apt = |words: &[&str]| {
        let line = [
            sudo,
            &[
                "env",
                "DEBIAN_FRONTEND=noninteractive",
                "apt-get",
                "-o",
                "DPkg::Lock::Timeout=240",
                "-q",
            ],
            words,
        ]
        .concat();
        run(&line, &[])
    };
    apt(&["update"])?;
    apt(&[&["install", "-y", "--no-install-recommends"], missing.as_slice()].concat())
}

/// Installs the agents where `tests/tests/agents.rs` looks for them: outside the build's folder, so that they are fetched once per machine.
fn agents() -> Result<(), String> {
    let tools = env::var_os("EVALGRID_TEST_TOOLS").map(PathBuf::from);
    let tools = tools.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache/evalgrid/tools")));
    let tools = tools.ok_or("set HOME, or EVALGRID_TEST_TOOLS: agents are installed there")?;
    let tools = tools.to_string_lossy();
    let install = |names: &[&str]| {
        let line = [
            "cargo",
            "run",
            "--quiet",
            "--locked",
            "--package",
            "evalgrid-cli",
            "--",
            "harness",
            "install",
            "--tools",
            &tools,
        ];
        run(&[line.as_slice(), names].concat(), &[])
    };
    install(AGENTS)?;
    if let Err(problem) = install(&["bub"]) {
        println!("bub's tests are left out: {problem}");
    }
    Ok(())
}

fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout == b"0\n")
}

fn test(long: bool) -> Result<(), String> {
    let long: &[(&str, &str)] = if long { &[("EVALGRID_LONG", "1")] } else { &[] };
    run(&["cargo", "fmt", "--all", "--check"], &[])?;
    run(
        &[
            "cargo",
            "clippy",
            "--workspace",
            "--all-targets",
            "--locked",
            "--",
            "-D",
            "warnings",
        ],
        &[],
    )?;
    if on_path("cargo-deny") {
        run(&["cargo", "deny", "check", "bans", "licenses", "sources"], &[])?;
    }
    // The end-to-end tests drive the real binary, which nothing else in the test build asks for.
    run(&["cargo", "build", "--locked", "--package", "evalgrid-cli"], &[])?;
    agents()?;
    run(
        &["cargo", "test", "--workspace", "--exclude", "evalgrid-simulation", "--locked"],
        long,
    )?;
    // By a call of its own: it turns on deliberate defects, which cargo would otherwise build into everything.
    run(
        &["cargo", "test", "--package", "evalgrid-simulation", "--locked", "--", "--nocapture"],
        long,
    )
}

/// Runs a command in the workspace's root; shows how long it took.
fn run(line: &[&str], variables: &[(&str, &str)]) -> Result<(), String> {
    let text = line.join(" ");
    println!("$ {text}");
    let [program, arguments @ ..] = line else { return Ok(()) };
    #[expect(clippy::disallowed_methods, reason = "a person wants to know how long it took")]
    let began = Instant::now();
    let mut command = Command::new(program);
    command.args(arguments).envs(variables.iter().copied()).current_dir(root());
    let status = command
        .status()
        .map_err(|error| format!("`{text}` could not be started: {error}"))?;
    println!("  {:.0} s", began.elapsed().as_secs_f64());
    match status.success() {
        true => Ok(()),
        false => Err(format!("`{text}` failed")),
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .map_or_else(|| PathBuf::from("."), Path::to_owned)
}
