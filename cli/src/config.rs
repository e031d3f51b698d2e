//! Where the value of a flag comes from: the command line, else its variable, else the configuration file, else its default.
//!
//! Variables and file entries become flags at the end of the command line, so all three are read, checked and refused in one way.

use std::{collections::BTreeMap, ffi::OsString, fs, path::Path};

use clap::{Arg, ArgMatches, Command, CommandFactory as _, FromArgMatches as _, parser::ValueSource};

use crate::{Failure, options::Cli};

/// The whole command, every flag with its variable in the help.
pub(crate) fn command() -> Command {
    fn with_variables(command: Command) -> Command {
        let command = command.mut_args(|arg| match arg.get_long() {
            Some(long) if !is_builtin(&arg) => {
                let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
                let help = format!("{help} [variable: {}]", variable(long));
                arg.help(help)
            }
            _ => arg,
        });
        command.mut_subcommands(with_variables)
    }
    with_variables(Cli::command())
}

fn is_builtin(arg: &Arg) -> bool {
    matches!(arg.get_id().as_str(), "help" | "version")
}

/// The variable of a flag.
fn variable(long: &str) -> String {
    format!("EVALGRID_{}", long.replace('-', "_").to_uppercase())
}

/// Variables of the project's own that are no flag's: of its tests and runs, and those that it gives to git in a sandbox.
const OTHER_VARIABLES: &[&str] = &[
    "EVALGRID_BIN",
    "EVALGRID_GIT_PASSWORD",
    "EVALGRID_GIT_USER",
    "EVALGRID_LONG",
    "EVALGRID_REQUIRE_DOCKER",
    "EVALGRID_SEED",
    "EVALGRID_SOURCE_REF",
    "EVALGRID_SOURCE_URL",
    "EVALGRID_UPDATE",
];

/// Variables that look like a flag's and are none's: most likely a slip.
pub(crate) fn unknown_variables(variables: &BTreeMap<String, OsString>) -> Vec<String> {
    let known: Vec<String> = flags(&command()).iter().map(|long| variable(long)).collect();
    let ours = variables.keys().filter(|name| name.starts_with("EVALGRID_"));
    ours.filter(|name| !known.contains(name) && !OTHER_VARIABLES.contains(&name.as_str()))
        .cloned()
        .collect()
}

/// What the command line, variables and file together say.
pub(crate) fn read(args: Vec<OsString>, variables: &BTreeMap<String, OsString>) -> Result<Cli, Failure> {
    let mut args = args;
    let matches = command().try_get_matches_from(&args).map_err(Failure::Clap)?;
    let from_variables = missing(&matches, |long| {
        let value = variables.get(&variable(long)).filter(|value| !value.is_empty())?;
        Some(value.clone())
    });
    let mut matches = append(&mut args, from_variables, variable)?;
    if let Some(path) = leaf(&matches).1.get_one::<std::path::PathBuf>("config").cloned() {
        let entries = file(&path)?;
        let from_file = missing(&matches, |long| entries.get(long).map(OsString::from));
        matches = append(&mut args, from_file, |long| format!("{}: {long}", path.display()))?;
    }
    Cli::from_arg_matches(&matches).map_err(Failure::Clap)
}

/// Puts the flags on the command line, one after the other, so that a value that does not fit is told with the place that it is from.
/// Before a `--`, behind which nothing is a flag.
fn append(args: &mut Vec<OsString>, flags: Vec<(String, OsString)>, place: impl Fn(&str) -> String) -> Result<ArgMatches, Failure> {
    let mut matches = command().try_get_matches_from(&*args).map_err(Failure::Clap)?;
    for (long, value) in flags {
        let mut flag = OsString::from(format!("--{long}="));
        flag.push(value);
        let end = args.iter().position(|arg| arg == "--").unwrap_or(args.len());
        args.insert(end, flag);
        matches = command()
            .try_get_matches_from(&*args)
            .map_err(|error| within(&place(&long), &long, &error))?;
    }
    Ok(matches)
}

/// The error without what speaks of a flag that nobody wrote.
fn within(place: &str, long: &str, error: &clap::Error) -> Failure {
    let text = error.to_string();
    let mut lines = text.lines();
    let mut what = lines.next().unwrap_or_default().trim_start_matches("error: ").to_owned();
    if let Some(start) = what.find(&format!(" for '--{long}"))
        && let Some(end) = what[start + 6..].find('\'')
    {
        what.replace_range(start..start + 6 + end + 1, "");
    }
    if let Some(values) = lines.next().map(str::trim).filter(|line| line.starts_with("[possible values")) {
        what.push_str(&format!(" {values}"));
    }
    Failure::usage(format!("{place}: {what}"), "Correct it, or see --help for what the flag takes.")
}

/// The chosen subcommand's path and matches.
fn leaf(matches: &ArgMatches) -> (Vec<&str>, &ArgMatches) {
    let (mut path, mut matches) = (Vec::new(), matches);
    while let Some((name, inner)) = matches.subcommand() {
        path.push(name);
        matches = inner;
    }
    (path, matches)
}

/// Name and value of each flag of the chosen command that the command line does not have and `find` knows.
fn missing(matches: &ArgMatches, find: impl Fn(&str) -> Option<OsString>) -> Vec<(String, OsString)> {
    let (path, matches) = leaf(matches);
    let mut root = command();
    root.build();
    let mut chosen = &root;
    for name in path {
        chosen = chosen.find_subcommand(name).unwrap_or(chosen);
    }
    let mut flags = Vec::new();
    for arg in chosen.get_arguments().filter(|arg| !is_builtin(arg)) {
        let Some(long) = arg.get_long() else { continue };
        if matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine) {
            continue;
        }
        if let Some(value) = find(long) {
            flags.push((long.to_owned(), value));
        }
    }
    flags
}

/// The file's entries as texts. A key that is no flag of any command is a mistake, one of another command is not.
fn file(path: &Path) -> Result<BTreeMap<String, String>, Failure> {
    let shown = path.display();
    let text = fs::read_to_string(path)
        .map_err(|error| Failure::usage(format!("{shown}: {error}"), "Name another configuration file with --config."))?;
    let table: toml::Table = text
        .parse()
        .map_err(|error| Failure::usage(format!("{shown}: {error}"), "It must be TOML: name = value."))?;
    let known = flags(&command());
    let unknown: Vec<_> = table
        .keys()
        .filter(|key| !known.contains(key) || *key == "config")
        .map(String::as_str)
        .collect();
    if !unknown.is_empty() {
        return Err(Failure::usage(
            format!("{shown}: unknown keys: {}", unknown.join(", ")),
            "Keys are the names of flags without the hyphens in front; see --help.",
        ));
    }
    let text = |key: &str, value: &toml::Value| {
        one(value).ok_or_else(|| Failure::usage(format!("{shown}: {key}: neither a value nor a list"), "See --help."))
    };
    table.iter().map(|(key, value)| Ok((key.clone(), text(key, value)?))).collect()
}

fn one(value: &toml::Value) -> Option<String> {
    match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Float(number) => Some(number.to_string()),
        toml::Value::Boolean(yes) => Some(yes.to_string()),
        toml::Value::Array(values) => values.iter().map(one).collect::<Option<Vec<_>>>().map(|values| values.join(",")),
        toml::Value::Datetime(_) | toml::Value::Table(_) => None,
    }
}

/// Names of the flags of all commands.
fn flags(command: &Command) -> Vec<String> {
    let own = command
        .get_arguments()
        .filter(|arg| !is_builtin(arg))
        .filter_map(|arg| arg.get_long());
    let mut names: Vec<_> = own.map(str::to_owned).collect();
    names.extend(command.get_subcommands().flat_map(flags));
    names
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::options;

    fn read_with(args: &str, variables: &[(&str, &str)], file: Option<&str>) -> Result<Cli, Failure> {
        let mut args: Vec<OsString> = args.split_whitespace().map(OsString::from).collect();
        args.insert(0, "evalgrid".into());
        let folder = tempfile::tempdir().unwrap();
        if let Some(text) = file {
            let path = folder.path().join("evalgrid.toml");
            fs::write(&path, text).unwrap();
            args.push("--config".into());
            args.push(path.into());
        }
        let variables = variables
            .iter()
            .map(|(name, value)| ((*name).to_owned(), OsString::from(value)))
            .collect();
        read(args, &variables)
    }

    #[test]
    fn a_flag_outranks_a_variable_outranks_the_file() {
        fn check(args: &str, variables: &[(&str, &str)], file: Option<&str>, expected: (&str, Option<u32>, bool, &str)) {
            let cli = read_with(args, variables, file).unwrap();
            let options::Command::Serve(serve) = cli.command else {
                panic!("{args}")
            };
            let got = (
                serve.data.data.to_str().unwrap(),
                serve.executor.slots,
                serve.executor.sandboxes.enable_process_sandbox,
                cli.global.log.as_str(),
            );
            assert_eq!(got, expected, "{args} {variables:?} {file:?}");
        }
        let all = "data = 'f'\nslots = 3\nenable-process-sandbox = true\nlog = 'warn'";
        check("serve", &[], None, ("evalgrid-data", None, false, "info"));
        check("serve", &[], Some(all), ("f", Some(3), true, "warn"));
        check(
            "serve",
            &[("EVALGRID_DATA", "v"), ("EVALGRID_SLOTS", "2")],
            Some(all),
            ("v", Some(2), true, "warn"),
        );
        check(
            "serve --data a --slots 1",
            &[("EVALGRID_DATA", "v"), ("EVALGRID_SLOTS", "2")],
            Some(all),
            ("a", Some(1), true, "warn"),
        );
        check(
            "serve --enable-process-sandbox=false",
            &[],
            Some(all),
            ("f", Some(3), false, "warn"),
        );
        check("serve --enable-process-sandbox", &[], None, ("evalgrid-data", None, true, "info"));
        check(
            "serve",
            &[("EVALGRID_ENABLE_PROCESS_SANDBOX", "0")],
            Some(all),
            ("f", Some(3), false, "warn"),
        );
        check(
            "serve",
            &[("EVALGRID_ENABLE_PROCESS_SANDBOX", "yes")],
            None,
            ("evalgrid-data", None, true, "info"),
        );
        check(
            "--log debug serve",
            &[("EVALGRID_LOG", "trace")],
            Some(all),
            ("f", Some(3), true, "debug"),
        );
        check("serve", &[("EVALGRID_LOG", "trace")], Some(all), ("f", Some(3), true, "trace"));
        check(
            "serve",
            &[("EVALGRID_DATA", "")],
            Some("# nothing"),
            ("evalgrid-data", None, false, "info"),
        );
        // Keys of other commands may stand in the file, too.
        check(
            "serve",
            &[],
            Some("limit = 5\nslots = '4'"),
            ("evalgrid-data", Some(4), false, "info"),
        );
    }

    #[test]
    fn the_file_may_be_named_by_a_variable() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.toml");
        fs::write(&path, "data = 'named'").unwrap();
        let variables = [("EVALGRID_CONFIG", path.to_str().unwrap())];
        let options::Command::Serve(serve) = read_with("serve", &variables, None).unwrap().command else {
            panic!()
        };
        assert_eq!(serve.data.data.to_str(), Some("named"));
    }

    #[test]
    fn lists_and_what_follows_two_hyphens() {
        let file = "permissions = ['evals:read', 'evals:write']\norg = 'acme'";
        let options::Command::Keys(options::Keys::Create { org, permissions, .. }) =
            read_with("keys create", &[], Some(file)).unwrap().command
        else {
            panic!()
        };
        assert_eq!((org.as_str(), permissions.join("+")), ("acme", "evals:read+evals:write".into()));
        let options::Command::Batch(options::Batch::Watch { id, client, .. }) =
            read_with("batch watch -- --odd-id", &[("EVALGRID_DATA", "d")], None)
                .unwrap()
                .command
        else {
            panic!()
        };
        assert_eq!((id.as_str(), client.data.data.to_str()), ("--odd-id", Some("d")));
        let map = "sandbox-map = ['e2b=process', 'modal=process']";
        let options::Command::Scheduler(role) = read_with("scheduler", &[], Some(map)).unwrap().command else {
            panic!()
        };
        assert_eq!(role.scheduler.sandbox_map.len(), 2);
    }

    #[test]
    fn mistakes_say_where_they_are() {
        fn check(args: &str, variables: &[(&str, &str)], file: Option<&str>, words: &[&str]) {
            let failure = read_with(args, variables, file).unwrap_err();
            let text = failure.to_string();
            assert_eq!(failure.code(), 2, "{text}");
            for word in words {
                assert!(text.contains(word), "{word:?} is not in {text:?}");
            }
        }
        check("serve --slots many", &[], None, &["--slots", "many"]);
        check(
            "serve",
            &[("EVALGRID_SLOTS", "many")],
            None,
            &["EVALGRID_SLOTS: invalid value 'many': "],
        );
        check(
            "serve",
            &[],
            Some("slots = 'many'"),
            &["evalgrid.toml: slots: invalid value 'many': "],
        );
        check("serve", &[], Some("slots = 0"), &["evalgrid.toml: slots: invalid value '0': "]);
        check("serve", &[], Some("slot = 1\ndate = 'x'"), &["unknown keys", "slot", "date"]);
        check("serve", &[], Some("config = 'other.toml'"), &["unknown keys", "config"]);
        check("serve", &[], Some("slots = "), &["evalgrid.toml: "]);
        check("serve", &[], Some("[slots]\na = 1"), &["slots", "neither"]);
        check("serve --config /nowhere/at/all.toml", &[], None, &["/nowhere/at/all.toml"]);
        check("server", &[], None, &["server"]);
        // The one that is wrong is named, not its neighbours.
        let two = [("EVALGRID_DATA", "d"), ("EVALGRID_LOG_FORMAT", "xml"), ("EVALGRID_SLOTS", "2")];
        check(
            "serve",
            &two,
            None,
            &["EVALGRID_LOG_FORMAT: invalid value 'xml' [possible values: text, json]"],
        );
        check(
            "serve",
            &[("EVALGRID_LEASE", "soon")],
            None,
            &["EVALGRID_LEASE: invalid value 'soon': "],
        );
    }

    #[test]
    fn variables_of_no_flag_are_found() {
        let names = [
            "EVALGRID_SLOT",
            "EVALGRID_SLOTS",
            "EVALGRID_SEED",
            "EVALGRID_API_KEY",
            "EVALGRID_",
            "PATH",
        ];
        let variables = names.iter().map(|name| ((*name).to_owned(), OsString::from("x"))).collect();
        assert_eq!(unknown_variables(&variables), ["EVALGRID_", "EVALGRID_SLOT"]);
    }

    /// Every command's help, as in `tests/help.txt`. To write that file anew: `EVALGRID_UPDATE=1 cargo test -p evalgrid-cli help`.
    #[test]
    fn help_is_as_on_record() {
        fn collect(command: &mut Command, text: &mut String) {
            let name = command.get_bin_name().unwrap_or("evalgrid").to_owned();
            text.push_str(&format!("=== {name}\n{}\n", command.render_long_help()));
            command
                .get_subcommands_mut()
                .filter(|inner| inner.get_name() != "help")
                .for_each(|inner| collect(inner, text));
        }
        let mut root = command().term_width(120);
        root.build();
        let mut text = String::new();
        collect(&mut root, &mut text);
        let record = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/help.txt");
        if std::env::var_os("EVALGRID_UPDATE").is_some() {
            fs::write(&record, &text).unwrap();
        }
        assert!(
            text == fs::read_to_string(&record).unwrap(),
            "the help has changed; see this test's comment"
        );
    }

    #[test]
    fn every_flag_shows_default_variable_and_example() {
        fn check(command: &Command, path: &str) {
            for arg in command.get_arguments().filter(|arg| !is_builtin(arg)) {
                let Some(long) = arg.get_long() else { continue };
                let help = arg.get_help().unwrap().to_string();
                assert!(help.contains(&format!("[variable: {}]", variable(long))), "{path} --{long}: {help}");
                assert!(help.contains("Example: "), "{path} --{long}: {help}");
                let default = !arg.get_default_values().is_empty() || help.contains("by default");
                assert!(default, "{path} --{long} says nothing of its default: {help}");
            }
            for inner in command.get_subcommands() {
                check(inner, &format!("{path} {}", inner.get_name()));
            }
        }
        let mut root = command();
        root.build();
        root.debug_assert();
        check(&command(), "evalgrid");
    }
}
