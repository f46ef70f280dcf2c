//! `cargo xtask gpu`: the check of the accelerator kernels and the engine on a CUDA device, as one archive.
//!
//! The archive holds the program, the library of mathematical functions that CUDA's compiler links, and the
//! script that runs them: a machine with NVIDIA's driver needs nothing else, no toolkit and no network.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::cube::{self, succeed};
use crate::workspace;

/// What an archive may take to a machine that is lent for minutes.
const MOST_BYTES: u64 = 64 << 20;

/// The wheel that `libdevice.10.bc` comes in.
const WHEEL: &str = "nvidia-cuda-nvcc-cu12==12.9.86";

#[derive(Args)]
pub(crate) struct Options {
    /// Threads of the compiler.
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Where LLVM stands, for those who have it there: a directory as `XDG_DATA_HOME` names it.
    #[arg(long)]
    data_home: Option<PathBuf>,
    /// A Python with pip, which fetches NVIDIA's wheel.
    #[arg(long, default_value = "python3")]
    python: PathBuf,
    /// A `libdevice.10.bc` that is there already.
    #[arg(long)]
    libdevice: Option<PathBuf>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let root = workspace::root();
    let place = root.join("target/gpu");
    let bundle = place.join("check");
    if bundle.exists() {
        fs::remove_dir_all(&bundle).with_context(|| format!("cannot empty {}", bundle.display()))?;
    }
    let library = bundle.join("cuda/nvvm/libdevice");
    fs::create_dir_all(&library).with_context(|| format!("cannot make {}", library.display()))?;
    let libdevice = match &options.libdevice {
        Some(path) => path.clone(),
        None => fetch_libdevice(&options.python, &place)?,
    };
    copy(&libdevice, &library.join("libdevice.10.bc"))?;

    let mut build = cube::cargo("build", &cube::llvm(options.data_home.as_deref())?, options.jobs);
    succeed(build.arg("--example=check_accelerator"))?;
    let program = bundle.join("check_accelerator");
    copy(&cube::target().join("release/examples/check_accelerator"), &program)?;
    succeed(Command::new("strip").arg(&program))?;
    copy(&root.join("xtask/gpu/run.sh"), &bundle.join("run.sh"))?;

    let archive = place.join("check.tar.xz");
    succeed(Command::new("tar").args(["-C", &place.to_string_lossy(), "-cJf"]).arg(&archive).arg("check"))?;
    let bytes = fs::metadata(&archive)?.len();
    ensure!(bytes <= MOST_BYTES, "{} has {bytes} bytes, more than {MOST_BYTES}", archive.display());
    println!("{}: {bytes} bytes; on the GPU's machine:", archive.display());
    println!("tar -xJf check.tar.xz && check/run.sh 1b");
    Ok(())
}

/// Takes `libdevice.10.bc` out of NVIDIA's wheel.
fn fetch_libdevice(python: &Path, place: &Path) -> Result<PathBuf> {
    let unpacked = place.join("nvcc");
    let found = unpacked.join("nvidia/cuda_nvcc/nvvm/libdevice/libdevice.10.bc");
    if !found.is_file() {
        let mut pip = Command::new(python);
        pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target"]);
        succeed(pip.arg(&unpacked).arg(WHEEL))?;
    }
    ensure!(found.is_file(), "{WHEEL} has no {}", found.display());
    Ok(found)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}
