//! Installs with a package manager that does what the test says, and counts.
#![allow(clippy::unwrap_used)]

use std::os::unix::fs::PermissionsExt as _;

use super::*;

/// Nothing here takes longer, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

static AGENT: Install = Install {
    name: "codex",
    version: "1.2.3",
    source: Source::Npm { package: "@some/agent" },
    program: "node_modules/.bin/agent",
    version_args: &["--version"],
    node: false,
};
static JAVASCRIPT: Install = Install {
    name: "gemini",
    node: true,
    ..AGENT
};
static PYTHON: Install = Install {
    name: "bub",
    source: Source::PyPi {
        package: "bub",
        python_minor: 99,
    },
    ..AGENT
};
static CONFIGURED: Install = Install {
    name: "cursor",
    version: "",
    source: Source::Configured,
    program: "",
    version_args: &[],
    node: false,
};

/// A host with a package manager, and the folder of its tools.
struct World {
    root: tempfile::TempDir,
}

impl World {
    fn new() -> World {
        let world = World {
            root: tempfile::tempdir().unwrap(),
        };
        fs::create_dir(world.root.path().join("bin")).unwrap();
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn program(&self, name: &str, script: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        // Another thread's child may hold the file open for writing for a moment, and then it cannot be started; a renamed one is nobody's.
        let fresh = self.path("fresh");
        fs::write(&fresh, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&fresh, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(fresh, &path).unwrap();
        path
    }

    /// An npm that runs this, and then installs an agent that prints `version`.
    fn npm(&self, script: &str, version: &str) {
        let root = self.root.path().display();
        self.program(
            "bin/npm",
            &format!(
                "echo \"$@\" >> {root}/npm.calls; env > {root}/npm.env\n{script}\nmkdir -p node_modules/.bin\n\
                 printf '#!/bin/sh\\necho run >> {root}/agent.runs\\necho agent {version}\\n' > node_modules/.bin/agent\n\
                 chmod +x node_modules/.bin/agent"
            ),
        );
    }

    fn tools(&self) -> Tools {
        self.tools_with(&[], false)
    }

    fn tools_with(&self, binaries: &[(&str, &Path)], any_version: bool) -> Tools {
        let options = ToolOptions {
            folder: self.path("tools"),
            binaries: binaries
                .iter()
                .map(|(name, path)| ((*name).to_owned(), path.to_path_buf()))
                .collect(),
            any_version,
        };
        let mut path = self.path("bin").into_os_string();
        path.push(":/usr/bin:/bin");
        // The machine's own npm is not what is tested.
        let mut tools = Tools::with_path(options, path).unwrap();
        tools.host.deadline = Duration::from_secs(20);
        tools
    }

    fn calls(&self, of: &str) -> usize {
        fs::read_to_string(self.path(of)).map_or(0, |text| text.lines().count())
    }

    /// What is in the tools folder, locks apart.
    fn found(&self) -> Vec<String> {
        let names = fs::read_dir(self.path("tools"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.filter(|name| !name.starts_with(".lock")).collect();
        names.sort();
        names
    }
}

async fn ready(tools: &Tools, install: &'static Install) -> Result<(), String> {
    let ready = tokio::time::timeout(PATIENCE, tools.ready(install)).await.unwrap();
    ready.map_err(|error| error.to_string())
}

#[tokio::test]
async fn one_install_for_all_trials_of_all_executors() {
    let world = World::new();
    world.npm("sleep 0.2", "1.2.3");
    // What a killed install has left.
    fs::create_dir_all(world.path("tools/.stage-codex-1.2.3/node_modules/.bin/agent/deep")).unwrap();
    let (one, other) = (world.tools(), world.tools());
    assert_eq!((one.state(&AGENT), one.is_ready(&AGENT)), (ToolState::Missing, false));
    let flights = (0..10).map(|number| ready(if number % 2 == 0 { &one } else { &other }, &AGENT));
    assert_eq!(futures::future::join_all(flights).await, vec![Ok(()); 10]);
    assert_eq!(fs::read_to_string(world.path("npm.calls")).unwrap().lines().count(), 1);
    assert!(
        fs::read_to_string(world.path("npm.calls"))
            .unwrap()
            .trim_end()
            .ends_with("@some/agent@1.2.3")
    );
    assert_eq!(world.found(), ["codex-1.2.3"]);
    assert!(one.is_ready(&AGENT));
    assert_eq!(one.state(&AGENT), ToolState::Installed(one.folder().join("codex-1.2.3")));
    assert_eq!(one.program(&AGENT, "/inside"), None);
    // The package manager runs other people's scripts: it sees nothing of this process's environment but what it needs.
    let variables = fs::read_to_string(world.path("npm.env")).unwrap();
    assert!(!variables.contains("CARGO"), "{variables}");
    // A later executor believes it, without starting anything.
    let runs = world.calls("agent.runs");
    let later = world.tools();
    assert_eq!(ready(&later, &AGENT).await, Ok(()));
    assert_eq!((world.calls("npm.calls"), world.calls("agent.runs")), (1, runs));
    // Somebody has deleted it under a running executor: it comes back.
    fs::remove_dir_all(world.path("tools/codex-1.2.3")).unwrap();
    assert!(!later.is_ready(&AGENT));
    assert_eq!(ready(&later, &AGENT).await, Ok(()));
    assert_eq!(world.calls("npm.calls"), 2);
}

#[tokio::test]
async fn failures_are_told_and_kept() {
    let check = async |script: &str, version: &str, install: &'static Install, calls: usize, expected: Result<(), &str>| {
        let world = World::new();
        world.npm(script, version);
        if install.node {
            fs::remove_file(world.path("bin/npm")).unwrap();
        }
        let mut tools = world.tools();
        tools.host.path = world.path("bin").into_os_string();
        tools.host.path.push(":/bin");
        if install.node {
            tools.host.path = world.path("bin").into_os_string();
            world.program("bin/npm", "exit 0");
        }
        tools.host.deadline = Duration::from_secs(2);
        for _ in 0..2 {
            match (ready(&tools, install).await, expected) {
                (Ok(()), Ok(())) => {}
                (Err(error), Err(expected)) => assert!(error.contains(expected), "{script}: {error}"),
                (got, _) => panic!("{script}: {got:?}"),
            }
        }
        assert_eq!(world.calls("npm.calls"), calls, "{script}");
        let there: &[&str] = if expected.is_ok() { &["codex-1.2.3"] } else { &[] };
        assert_eq!(world.found(), there, "{script}");
    };
    // Registries fail for moments.
    check("test -e ../../once || { : > ../../once; exit 1; }", "1.2.3", &AGENT, 2, Ok(())).await;
    let e404 =
        "echo noise >&2; echo 'npm error code E404' >&2; echo 'npm error 404 Not Found - GET https://me:pass@registry/x' >&2; exit 1";
    let told = "@some/agent@1.2.3 could not be installed: code E404; 404 Not Found";
    check(e404, "1.2.3", &AGENT, 2, Err(told)).await;
    check(
        "exit 3",
        "1.2.3",
        &AGENT,
        2,
        Err("could not be installed: it failed without a word"),
    )
    .await;
    check(
        "true",
        "1.2.4",
        &AGENT,
        2,
        Err("prints the version 1.2.4, and only 1.2.3 was tested"),
    )
    .await;
    check("true", "x", &AGENT, 2, Err("it does not tell its version")).await;
    check("sleep 1000 & sleep 1000", "1.2.3", &AGENT, 2, Err("took longer than 2 s")).await;
    check("true", "1.2.3", &JAVASCRIPT, 0, Err("node is not installed on this host")).await;
    check(
        "true",
        "1.2.3",
        &PYTHON,
        0,
        Err("needs Python 3.99 or newer, and this host has none"),
    )
    .await;
    check("true", "1.2.3", &CONFIGURED, 0, Err("--harness-binary cursor=PATH")).await;
}

/// Without a registry the operator puts the folder there, or names a program.
#[tokio::test]
async fn what_the_operator_brings() {
    let world = World::new();
    let agent = |version: &str| format!("echo {version}");
    world.program("tools/codex-1.2.3/node_modules/.bin/agent", &agent("1.2.3"));
    assert_eq!(ready(&world.tools(), &AGENT).await, Ok(()));
    world.program("tools/codex-1.2.3/node_modules/.bin/agent", &agent("1.3.0"));
    fs::remove_file(world.path("tools/codex-1.2.3").join(MARK)).unwrap();
    assert!(
        ready(&world.tools(), &AGENT)
            .await
            .unwrap_err()
            .contains("prints the version 1.3.0")
    );

    let check = async |path: &Path, any: bool, inside: &str, expected: Result<(), &str>| {
        let tools = world.tools_with(&[("codex", path)], any);
        assert_eq!(tools.program(&AGENT, "/inside").as_deref(), Some(inside));
        assert_eq!(tools.state(&AGENT), ToolState::Own(path.to_owned()));
        match (ready(&tools, &AGENT).await, expected) {
            (Ok(()), Ok(())) => assert!(tools.is_ready(&AGENT)),
            (Err(error), Err(expected)) => assert!(error.contains(expected), "{error}"),
            (got, _) => panic!("{}: {got:?}", path.display()),
        }
    };
    let refused = Err("only 1.2.3 was tested; --harness-any-version takes it all the same");
    let right = world.program("mine/agent", &agent("1.2.3"));
    check(&right, false, "/inside/own/codex/agent", Ok(())).await;
    let newer = world.program("mine/newer", &agent("2.0.0"));
    check(&newer, false, "/inside/own/codex/newer", refused).await;
    check(&newer, true, "/inside/own/codex/newer", Ok(())).await;
    let here = world.program("tools/mine", &agent("1.2.3"));
    check(&here, false, "/inside/mine", Ok(())).await;
    check(Path::new("/usr/bin/env"), true, "/usr/bin/env", Ok(())).await;

    for (path, expected) in [
        ("/nowhere", "No such file"),
        ("/etc/passwd", "not a program"),
        ("/usr", "not a program"),
    ] {
        let options = ToolOptions {
            folder: world.path("tools"),
            binaries: [("cursor".to_owned(), path.into())].into(),
            any_version: false,
        };
        let error = Tools::with_path(options, OsString::new()).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(expected) && error.starts_with(path), "{error}");
    }
    let cursor = world.tools_with(&[("cursor", &right)], false);
    assert_eq!(ready(&cursor, &CONFIGURED).await, Ok(()));
    assert_eq!(world.tools().state(&CONFIGURED), ToolState::NoProgram);
}
