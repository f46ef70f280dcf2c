//! What happens where code of the user's does not return.

use std::time::Duration;

use aligner_algos::Watchdog;

use crate::progress::say;

/// A limit on the time of such calls, in seconds; none where it is 0. A call that takes longer ends the program with code 1.
///
/// A thread cannot be ended from outside, and nothing can be saved in the middle of a step. The newest checkpoint, the log of
/// every step before this one and the scores that are known are on disk: each is written at once.
pub(crate) fn watchdog(limit_secs: f64) -> Option<Watchdog> {
    let ends = |line: &str| {
        say(&format!("error: {line}, so the program ends; run.call_timeout_secs is the limit"));
        std::process::exit(1);
    };
    (limit_secs > 0.0).then(|| Watchdog::new(Duration::from_secs_f64(limit_secs), ends))
}
