//! Ctrl-C in a conversation: while the model answers it ends the answer, at the prompt the program.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::SIGINT;
use signal_hook::flag;

use crate::interrupt::EXIT_CODE;

/// What the signal does now, and whether it has come.
pub(super) struct Signals {
    at_prompt: Arc<AtomicBool>,
    came: Arc<AtomicBool>,
}

impl Signals {
    /// Listens from now on, at the prompt.
    pub(super) fn listen() -> std::io::Result<Self> {
        let signals = Self { at_prompt: Arc::new(AtomicBool::new(true)), came: Arc::default() };
        flag::register_conditional_shutdown(SIGINT, EXIT_CODE.into(), Arc::clone(&signals.at_prompt))?;
        flag::register(SIGINT, Arc::clone(&signals.came))?;
        Ok(signals)
    }

    /// From now on the model answers.
    pub(super) fn answering(&self) {
        self.came.store(false, Ordering::Release);
        self.at_prompt.store(false, Ordering::Release);
    }

    /// From now on the user is asked.
    pub(super) fn asking(&self) {
        self.at_prompt.store(true, Ordering::Release);
    }

    /// Whether the answer shall end.
    pub(super) fn came(&self) -> bool {
        self.came.load(Ordering::Acquire)
    }
}
