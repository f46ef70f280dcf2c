//! `cargo xtask nccl`: ranks with NCCL on host memory, by a library of our own in its place.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result};

use crate::cube::succeed;
use crate::workspace;

pub(crate) fn run() -> Result<()> {
    let root = workspace::root();
    let place = root.join("target/nccl");
    fs::create_dir_all(&place).with_context(|| format!("cannot make {}", place.display()))?;
    let mut compile = Command::new("rustc");
    compile.args([
        "--edition=2024",
        "--crate-type=cdylib",
        "--crate-name=nccl",
        "-Copt-level=2",
        "-Cpanic=abort",
    ]);
    compile.arg("-o").arg(place.join("libnccl.so")).arg("aligner-parallel/tests/nccl/mock.rs");
    succeed(compile.current_dir(&root))?;
    let mut test = Command::new("cargo");
    test.args([
        "test",
        "--release",
        "--workspace",
        "--features",
        "aligner-parallel/nccl-host",
        "--test",
        "nccl",
    ]);
    succeed(test.current_dir(&root).env("LD_LIBRARY_PATH", &place))
}
