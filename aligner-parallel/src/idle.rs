//! What a thread does while there is nothing to do.

use std::time::Duration;

/// Gives way while there is nothing to do: for a moment at once, then for longer and longer.
#[derive(Debug, Default)]
pub(crate) struct Idle {
    rests: u32,
}

impl Idle {
    pub(crate) fn rest(&mut self) {
        self.rests += 1;
        if self.rests < 200 {
            std::thread::yield_now();
        } else {
            // 10 µs at first, at most half a millisecond.
            std::thread::sleep(Duration::from_micros(u64::from(self.rests / 20).min(500)));
        }
    }
}
