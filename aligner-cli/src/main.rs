//! The `aligner` program.

use std::process::ExitCode;

use libmimalloc_sys::mi_option_set_default;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // A step asks for the same buffers as the step before. Memory that went back to the system in
    // between would come back as page faults; `MIMALLOC_PURGE_DELAY` still decides otherwise.
    // SAFETY: the call writes one integer of mimalloc's option table, before any thread starts.
    unsafe { mi_option_set_default(aligner_cli::MIMALLOC_PURGE_DELAY, -1) };
    aligner_cli::run(&aligner_cli::Registry::built_in())
}
