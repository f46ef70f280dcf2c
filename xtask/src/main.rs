//! Chores of the workspace: `cargo xtask ci | tidy | assets | bench | curves | cube | fuzz | gpu | hosts | nccl | demo-model`.
#![expect(clippy::print_stdout, reason = "a chore reports to the terminal")]

mod assets;
mod bench;
mod ci;
mod cube;
mod curves;
mod demo;
mod fuzz;
mod gpu;
mod hosts;
mod nccl;
mod picture;
mod tidy;
mod workspace;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Chores of the Aligner workspace")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Everything that a change must pass, each step timed.
    Ci(ci::Options),
    /// The house rules that no compiler checks: crate arrows, versions, file lengths, panics.
    Tidy,
    /// Fetch the real model and data that examples and tests can use, with checked hashes.
    Assets(assets::Options),
    /// Training steps beside `PyTorch`'s (needs a Python with torch and transformers), or a step of PPO beside slower forms of itself.
    Bench(bench::Options),
    /// Draw what runs measured over their steps.
    Curves(curves::Options),
    /// The accelerator kernels, and the engine on them, on this machine's processor; slow, needs Debian's LLVM.
    Cube(cube::Options),
    /// Hostile files for the loaders; needs a nightly compiler and cargo-fuzz, and compiles everything once more.
    Fuzz(fuzz::Options),
    /// An archive that checks and times generation on a CUDA device; slow to build.
    Gpu(gpu::Options),
    /// A run over two machines, which are network namespaces of this one; needs root and Open MPI.
    Hosts(hosts::Options),
    /// Ranks with NCCL, by a library in its place that works on host memory; compiles the ranks once more.
    Nccl,
    /// Write the demo's text, tokenizer and data sets, and train its tiny model.
    DemoModel(demo::Options),
}

fn main() -> Result<()> {
    match Arguments::parse().task {
        Task::Ci(options) => ci::run(&options),
        Task::Tidy => tidy::run(),
        Task::Assets(options) => assets::run(&options),
        Task::Bench(options) => bench::run(&options),
        Task::Curves(options) => curves::run(&options),
        Task::Cube(options) => cube::run(&options),
        Task::Fuzz(options) => fuzz::run(&options),
        Task::Gpu(options) => gpu::run(&options),
        Task::Hosts(options) => hosts::run(&options),
        Task::Nccl => nccl::run(),
        Task::DemoModel(options) => demo::run(&options),
    }
}
