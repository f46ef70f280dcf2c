//! The `aligner` program.

use std::process::ExitCode;

use libmimalloc_sys::{mi_option_set_default, mi_option_t};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// `mi_option_purge_delay` of mimalloc.h, which the bindings leave out.
const PURGE_DELAY: mi_option_t = 15;

fn main() -> ExitCode {
    // A step asks for the same buffers as the step before. Memory that went back to the system in
    // between would come back as page faults; `MIMALLOC_PURGE_DELAY` still decides otherwise.
    // SAFETY: the call writes one integer of mimalloc's option table, before any thread starts.
    unsafe { mi_option_set_default(PURGE_DELAY, -1) };
    aligner_cli::run(&aligner_cli::Registry::built_in())
}
