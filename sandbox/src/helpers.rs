//! Entry points of the helper processes that providers start from the product's own executable.

use std::{ffi::OsString, path::Path, process::exit};

use crate::{gate, init, inner_protocol::InitOptions, zygote};

/// The hidden subcommand of the process that supervisors are forked from.
pub(crate) const ZYGOTE: &str = "sandbox-zygote";
/// The hidden subcommand of the first process inside a sandbox.
pub(crate) const INIT: &str = "sandbox-init";
/// The hidden subcommand of the process that leads connections out of a sandbox.
pub(crate) const GATE: &str = "sandbox-gate";

/// To be called first in `main`, while the process has one thread: if this process was started as one of our helpers (by its first
/// argument, `sandbox-zygote`, `sandbox-init` or `sandbox-gate`), runs that and never returns.
pub fn run_if_helper() {
    let mut args = std::env::args_os().skip(1);
    let first = args.next();
    if first.as_deref() == Some(ZYGOTE.as_ref()) {
        zygote_main(args);
    }
    if first.as_deref() == Some(INIT.as_ref()) {
        init_main(args);
    }
    if first.as_deref() == Some(GATE.as_ref()) {
        leave(GATE, gate::run());
    }
}

/// The zygote. `args` are those after `sandbox-zygote`: the provider's root folder and the name of the socket to make in it.
pub fn zygote_main(args: impl IntoIterator<Item = OsString>) -> ! {
    let mut args = args.into_iter();
    let (Some(root), Some(name)) = (args.next(), args.next().and_then(|n| n.into_string().ok())) else {
        eprintln!("{ZYGOTE} is started by evalgrid itself");
        exit(2);
    };
    leave(ZYGOTE, zygote::run(Path::new(&root), &name))
}

/// The init of a sandbox. `args` are those after `sandbox-init`: its options as JSON.
pub fn init_main(args: impl IntoIterator<Item = OsString>) -> ! {
    if std::process::id() != 1 {
        eprintln!("{INIT} is started by evalgrid itself");
        exit(2);
    }
    let options = args.into_iter().next().and_then(|text| text.into_string().ok());
    let options = options.ok_or(std::io::ErrorKind::InvalidInput.into());
    let options = options.and_then(|text| serde_json::from_str::<InitOptions>(&text).map_err(Into::into));
    leave(INIT, options.and_then(|options| init::run(&options)))
}

fn leave(what: &str, result: std::io::Result<()>) -> ! {
    match result {
        Ok(()) => exit(0),
        Err(e) => {
            eprintln!("{what}: {e}");
            exit(1)
        }
    }
}
