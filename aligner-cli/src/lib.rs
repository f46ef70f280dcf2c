//! The command line of Aligner, as a library: a binary of your own reuses all of it with
//! algorithms of its own.
//!
//! ```no_run
//! use aligner_cli::Registry;
//!
//! fn main() -> std::process::ExitCode {
//!     aligner_cli::run(&Registry::built_in()) // .with("mine", |config| Ok(Mine(config)))
//! }
//! ```

mod arguments;
mod chat;
mod check_algorithm;
mod completions;
mod config;
mod convert;
mod eval;
mod evaluate;
mod fetch;
mod generate;
mod hang;
mod inspect;
mod interrupt;
mod launch;
mod merge;
mod plan;
mod progress;
mod ranks;
mod registry;
mod report;
mod rundir;
pub mod serve;
mod simulate;
mod train;
mod wire;

use std::ffi::OsString;
use std::process::ExitCode;

pub use config::{
    CriticConfig, DataConfig, LoraSection, MeshSection, ModelConfig, Precision, ReferenceConfig, Run,
    RunConfig, RunSection,
};
pub use registry::Registry;
pub use report::Report;
pub use rundir::{Answer, Drawn, Record};
pub use train::{Outcome, train};

/// `mi_option_purge_delay` of mimalloc.h, which the bindings leave out: for how many milliseconds freed
/// memory is kept before it goes back to the system. A binary that sets it to -1 keeps it.
pub const MIMALLOC_PURGE_DELAY: i32 = 15;

/// Makes the calling thread one of the pool that runs the kernels, for a program that trains and does
/// nothing beside: a kernel then starts at once, without waking another thread. Later calls, and calls
/// after the pool was used, change nothing.
pub fn join_thread_pool() {
    // The only error is a pool that is there already.
    let _ = rayon::ThreadPoolBuilder::new().use_current_thread().build_global();
}

/// A mistake in what the user asked for: exit code 2, and the message alone is printed.
#[derive(Debug)]
pub struct Usage(pub String);

impl std::fmt::Display for Usage {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// Runs the program with the process's own arguments: 0 is success, 1 a failed run, 2 a mistake in
/// the arguments or the run file, 130 an interrupted run that can be resumed.
pub fn run(registry: &Registry) -> ExitCode {
    run_from(std::env::args_os(), registry)
}

/// Runs the program as [`run`] does, with other arguments; the first is the program's name.
pub fn run_from(arguments: impl IntoIterator<Item = OsString>, registry: &Registry) -> ExitCode {
    let arguments = match arguments::parse(arguments) {
        Ok(arguments) => arguments,
        Err(error) => {
            // Help and version come this way too, with code 0; a closed pipe is no reason to fail.
            let _ = error.print();
            return ExitCode::from(error.exit_code() as u8);
        }
    };
    progress::start_log(arguments.verbose);
    match arguments.command.run(registry) {
        Ok(code) => match progress::lost_result() {
            None => code,
            Some(lost) => {
                progress::say(&format!("error: {lost}"));
                ExitCode::FAILURE
            }
        },
        Err(error) => {
            let code = if error.is::<Usage>() { 2 } else { 1 };
            progress::say(&format!("error: {error:#}"));
            ExitCode::from(code)
        }
    }
}
