//! Runs one turn of an agent by hand, exactly as its driver says, and prints what the driver reads out of it.
//!
//! `cargo run -p evalgrid-harness --example drive -- HARNESS FOLDER PROMPT [name=value…]`: FOLDER gets a `home` and a `workspace`; names are
//! `tools`, `program`, `model`, `key`, `url`, `purpose` (`words`), `system`, `session`, `limit` (seconds), `keep` (a file for the raw output), and `home/…` or
//! `workspace/…` for files of a profile.

use std::{
    collections::BTreeMap,
    error::Error,
    fs::{self, File},
    io::Read as _,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use evalgrid_harness::{Place, ProfileFiles, Purpose, Setting, Turn, TurnOutput, by_name};

/// When no limit is given.
const LIMIT: Duration = Duration::from_secs(60);
/// How often the agent is looked at.
const PAUSE: Duration = Duration::from_millis(20);

#[expect(clippy::disallowed_methods, reason = "an I/O edge: how long an agent took")]
fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name, folder, prompt, options @ ..] = arguments.as_slice() else {
        return Err("HARNESS FOLDER PROMPT [name=value…]".into());
    };
    let options: BTreeMap<&str, &str> = options.iter().filter_map(|option| option.split_once('=')).collect();
    let text = |name: &str| options.get(name).map(|value| (*value).to_owned());
    let harness = by_name(name).ok_or("no such harness")?;
    let files = |base: &str| {
        let found = options
            .iter()
            .filter_map(|(name, value)| Some((name.strip_prefix(base)?.to_owned(), (*value).to_owned())));
        found.collect::<BTreeMap<_, _>>()
    };
    let profile = ProfileFiles {
        home: files("home/"),
        workspace: files("workspace/"),
    };
    let credential = [("apiKey", text("key").or(Some("k".into()))), ("baseUrl", text("url"))];
    fs::create_dir_all(folder)?;
    let folder = fs::canonicalize(folder)?;
    let below = |name: &str| folder.join(name).to_string_lossy().into_owned();
    let setting = Setting {
        purpose: match options.get("purpose") {
            Some(&"words") => Purpose::Words,
            _ => Purpose::Work,
        },
        home: below("home"),
        workspace: below("workspace"),
        tools: text("tools").unwrap_or_default(),
        program: text("program"),
        model: text("model").unwrap_or_else(|| "fake-model".into()),
        credential: credential
            .into_iter()
            .filter_map(|(name, value)| Some((name.to_owned(), value?)))
            .collect(),
        profile: (!profile.home.is_empty() || !profile.workspace.is_empty()).then_some(profile.clone()),
        system_prompt: text("system"),
        ..Setting::default()
    };
    let write = |base: &str, path: &str, content: &[u8]| -> Result<(), Box<dyn Error>> {
        let path = Path::new(base).join(path);
        fs::create_dir_all(path.parent().ok_or("no folder")?)?;
        Ok(fs::write(path, content)?)
    };
    fs::create_dir_all(&setting.home)?;
    fs::create_dir_all(&setting.workspace)?;
    for (base, files) in [(&setting.home, &profile.home), (&setting.workspace, &profile.workspace)] {
        for (path, content) in files {
            write(base, path, content.as_bytes())?;
        }
    }
    for file in harness.files(&setting) {
        let (base, own) = match file.place {
            Place::Home => (&setting.home, &profile.home),
            _ => (&setting.workspace, &profile.workspace),
        };
        if file.prepend {
            let there = fs::read(Path::new(base).join(&file.path)).unwrap_or_default();
            write(base, &file.path, &[file.content, there].concat())?;
        } else if !own.contains_key(&file.path) {
            write(base, &file.path, &file.content)?;
        }
    }
    let session = text("session");
    let turn = Turn {
        number: 1,
        prompt,
        session_id: session.as_deref(),
        deadline_ms: 0,
    };
    let command = harness.turn(&setting, &turn)?;
    for file in &command.files {
        write(&setting.home, &file.path, &file.content)?;
    }
    let limit = options
        .get("limit")
        .and_then(|limit| limit.parse().ok())
        .map_or(LIMIT, Duration::from_secs);
    let started = Instant::now();
    let mut child = Command::new(&command.argv[0])
        .args(&command.argv[1..])
        .env_clear()
        .envs([
            ("PATH", "/usr/local/bin:/usr/bin:/bin"),
            ("HOME", &setting.home),
            ("TMPDIR", "/tmp"),
            ("LANG", "C.UTF-8"),
        ])
        .envs(&command.env)
        .current_dir(&setting.workspace)
        .stdin(Stdio::null())
        .stdout(File::create(folder.join("stdout"))?)
        .stderr(File::create(folder.join("stderr"))?)
        .spawn()?;
    let (status, timed_out) = loop {
        if let Some(status) = child.try_wait()? {
            break (status, false);
        }
        if started.elapsed() > limit {
            child.kill()?;
            break (child.wait()?, true);
        }
        std::thread::sleep(PAUSE);
    };
    let mut stderr = String::new();
    File::open(folder.join("stderr"))?.read_to_string(&mut stderr)?;
    if let Some(keep) = options.get("keep") {
        fs::copy(folder.join("stdout"), keep)?;
    }
    let output = TurnOutput {
        stdout: &mut File::open(folder.join("stdout"))?,
        stdout_tail: None,
        stdout_times: &mut std::io::empty(),
        stderr: &stderr,
        trace: b"",
        exit_code: status.code().unwrap_or(-1),
        timed_out,
        finished_at_ms: SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis() as u64,
        model: &setting.model,
        earlier: None,
    };
    let end = harness.read(output, &mut |event| println!("{event:?}"))?;
    println!("{end:#?}");
    println!("{status}, after {:?}", started.elapsed());
    Ok(())
}
