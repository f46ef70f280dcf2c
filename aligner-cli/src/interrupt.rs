//! Ctrl-C during a run: the first asks for a checkpoint, the second ends the program.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// Exit code of an interrupted run, as shells count it: 128 plus the signal's number.
pub(crate) const EXIT_CODE: u8 = 130;

/// Whether somebody asked the run to stop.
#[derive(Debug, Clone, Default)]
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Listens for SIGINT and SIGTERM from now on.
    pub(crate) fn listen() -> std::io::Result<Self> {
        let interrupt = Self::default();
        for signal in [SIGINT, SIGTERM] {
            // The order matters: the shutdown looks at the flag that the first signal has set.
            flag::register_conditional_shutdown(signal, EXIT_CODE.into(), Arc::clone(&interrupt.0))?;
            flag::register(signal, Arc::clone(&interrupt.0))?;
        }
        Ok(interrupt)
    }

    /// Whether a signal has come.
    pub(crate) fn asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
