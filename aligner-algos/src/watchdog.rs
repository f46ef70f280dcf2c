//! Notices calls of somebody else's code that do not return.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// A time limit on calls of code that is not this crate's: an algorithm's, a reward's.
///
/// Nothing can end such a call from outside, so whoever waits for it waits on. What is called instead, on a thread of its own, will want to
/// say which call it was and to end the process.
#[derive(Clone)]
pub struct Watchdog {
    limit: Duration,
    hung: Arc<dyn Fn(&str) + Send + Sync>,
}

impl Watchdog {
    /// Calls `hung` with a line about each call that takes longer than `limit`.
    pub fn new(limit: Duration, hung: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self { limit, hung: Arc::new(hung) }
    }

    /// What `call` returns; `what` names it in the line about a call that hangs.
    pub fn watch<T>(&self, what: String, call: impl FnOnce() -> T) -> T {
        let (running, waiting) = channel::<()>();
        let Self { limit, hung } = self.clone();
        let watching = std::thread::Builder::new().name("watchdog".into()).spawn(move || {
            if waiting.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                hung(&format!("{what} has not returned within {} seconds", limit.as_secs_f64()));
            }
        });
        if let Err(error) = watching {
            tracing::warn!(%error, "a call goes unwatched, for no thread could be started");
        }
        let value = call();
        // A call that panics drops it too.
        drop(running);
        value
    }
}

impl std::fmt::Debug for Watchdog {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Watchdog").field("limit", &self.limit).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::Receiver;

    use super::*;

    fn watchdog(limit: Duration) -> (Watchdog, Receiver<String>) {
        let (tell, told) = channel();
        (Watchdog::new(limit, move |line| tell.send(line.to_owned()).expect("the test listens")), told)
    }

    #[test]
    fn a_call_that_does_not_return_is_told_of_while_it_lasts() {
        let (watchdog, told) = watchdog(Duration::from_millis(20));
        let line = watchdog.watch("`loss`".into(), || told.recv_timeout(Duration::from_secs(30)));
        assert_eq!(line.expect("told"), "`loss` has not returned within 0.02 seconds");
    }

    #[test]
    fn a_call_that_returns_or_panics_is_not_told_of() {
        let (watchdog, told) = watchdog(Duration::from_secs(30));
        assert_eq!(watchdog.watch("one".into(), || 7), 7);
        let panics = std::panic::AssertUnwindSafe(|| watchdog.watch("two".into(), || panic!("over")));
        std::panic::catch_unwind(panics).expect_err("a panic");
        drop(watchdog);
        // Both threads have ended, for nobody is left who could tell.
        told.recv_timeout(Duration::from_secs(25)).expect_err("nothing to tell");
    }
}
