//! Ctrl-C during a run: the first asks for a checkpoint, the second ends the program.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

/// Exit code of an interrupted run, as shells count it: 128 plus the signal's number.
pub(crate) const EXIT_CODE: u8 = 130;

/// Whether somebody asked the run to stop.
#[derive(Debug, Clone, Default)]
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Listens from now on for SIGINT, SIGTERM, and SIGHUP, which comes when a terminal goes away.
    pub(crate) fn listen() -> std::io::Result<Self> {
        let interrupt = Self::default();
        for signal in [SIGINT, SIGTERM] {
            // The order matters: the shutdown looks at the flag that the first signal has set.
            flag::register_conditional_shutdown(signal, EXIT_CODE.into(), Arc::clone(&interrupt.0))?;
            flag::register(signal, Arc::clone(&interrupt.0))?;
        }
        // Shell and kernel both send it when a terminal goes away: a second one is no impatience. Under
        // `nohup` it is ignored, and stays so.
        if !is_ignored(SIGHUP) {
            flag::register(SIGHUP, Arc::clone(&interrupt.0))?;
        }
        Ok(interrupt)
    }

    /// Whether a signal has come.
    pub(crate) fn asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Whether the program was started with `signal` ignored; where the system does not tell, it is taken for
/// ignored.
pub(crate) fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    ignored(&status).is_none_or(|mask| (mask >> (signal - 1)) & 1 == 1)
}

/// The mask of ignored signals in a process's status as Linux shows it: bit 0 is signal 1.
fn ignored(status: &str) -> Option<u64> {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(mask.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_of_ignored_signals_is_read_from_the_status() {
        assert_eq!(ignored("Name:\tx\nSigIgn:\t0000000000001001\nSigCgt:\t0\n"), Some(0x1001));
        assert_eq!(ignored("Name:\tx\n"), None);
    }
}
