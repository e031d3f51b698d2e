//! The model server as a program, for work by hand: prints its address and serves until it is stopped.

use std::{future, path::PathBuf, process::ExitCode};

use clap::Parser;
use evalgrid_modelserver::ModelServer;

/// A model server for trying things without a key, and for tests: it does what the lines of a prompt say.
#[derive(Parser)]
#[command(after_help = include_str!("../help.txt"))]
struct Options {
    /// Where to listen; port 0 takes any free one. Example: --listen 127.0.0.1:18080
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: String,
    /// A Unix socket to listen on as well.
    #[arg(long)]
    socket: Option<PathBuf>,
}

#[tokio::main]
async fn main() -> ExitCode {
    let options = Options::parse();
    match ModelServer::start(&options.listen, options.socket.as_deref()).await {
        Ok(server) => {
            println!("http://{}", server.address());
            future::pending().await
        }
        Err(error) => {
            eprintln!("evalgrid-modelserver: {}: {error}", options.listen);
            ExitCode::FAILURE
        }
    }
}
