//! Compiles the .proto files with protox, so no `protoc` is needed, and keeps the descriptor set for gRPC reflection.

use std::{env, fs, path::PathBuf};

use prost::Message as _;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = [
        "evalgrid/v1/batch.proto",
        "evalgrid/v1/client.proto",
        "evalgrid/v1/runner.proto",
        "evalgrid/v1/worker.proto",
        "evalgrid/v1/organizations.proto",
        "evalgrid/log/v1/event.proto",
        "evalgrid/log/v1/snapshot.proto",
    ];
    for file in files {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(files, ["."])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        .bytes(".")
        // Few outcomes have one, and outcomes are kept and moved by the thousand.
        .boxed(".evalgrid.v1.TrialOutcome.user_spend")
        .compile_fds(descriptors)?;
    Ok(())
}
