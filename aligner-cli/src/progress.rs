//! What the user sees while something runs: a bar on a terminal, plain lines elsewhere. All of it
//! goes to standard error; results go to standard output.

use std::cell::Cell;
use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use tracing_subscriber::EnvFilter;

/// The bar that is on the screen, so that log lines go above it.
static BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);
static COLOUR: OnceLock<bool> = OnceLock::new();

/// How much more the user wants to hear.
static VERBOSE: OnceLock<u8> = OnceLock::new();

/// How often the user asked for more, as [`start_log`] was told.
pub(crate) fn verbose() -> u8 {
    VERBOSE.get().copied().unwrap_or(0)
}

/// Starts logging to standard error.
pub(crate) fn start_log(verbose: u8) {
    let _ = VERBOSE.set(verbose);
    let default = match verbose {
        0 => "warn,aligner=info",
        1 => "info,aligner=debug",
        _ => "trace",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| AboveBar)
        .with_ansi(io::stderr().is_terminal() && colour_wanted())
        .with_target(false)
        .log_internal_errors(false)
        .without_time();
    // A second start, as in tests that run in one process, keeps the first.
    let _ = log.try_init();
}

/// Whether standard output takes colours.
pub(crate) fn colour() -> bool {
    *COLOUR.get_or_init(|| io::stdout().is_terminal() && colour_wanted())
}

fn colour_wanted() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

thread_local! {
    /// Whether this thread is a rank that says nothing, since another one does.
    static HUSHED: Cell<bool> = const { Cell::new(false) };
}

/// Says nothing more from this thread, or speaks again.
pub(crate) fn hush(hushed: bool) {
    HUSHED.set(hushed);
}

/// A line on standard error, above the bar if there is one.
pub(crate) fn say(line: &str) {
    // One write call: the bar is drawn again after each.
    let _ = AboveBar.write_all(format!("{line}\n").as_bytes());
}

/// Set where a result could not be written: the program must not end as if it had been.
static RESULT_LOST: OnceLock<String> = OnceLock::new();

/// A result on standard output; a reader that has gone away is no error of ours.
pub(crate) fn result(text: &str) {
    let mut out = io::stdout().lock();
    let written = writeln!(out, "{text}").and_then(|()| out.flush());
    if let Err(error) = written
        && error.kind() != io::ErrorKind::BrokenPipe
    {
        let _ = RESULT_LOST.set(format!("standard output: {error}"));
    }
}

/// Why a result was lost, if one was.
pub(crate) fn lost_result() -> Option<&'static str> {
    RESULT_LOST.get().map(String::as_str)
}

struct AboveBar;

impl Write for AboveBar {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if HUSHED.get() {
            return Ok(bytes.len());
        }
        let bar = BAR.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let write = || io::stderr().write_all(bytes);
        // A reader of the log that has gone away must not end a training run.
        let _ = bar.map_or_else(write, |bar| bar.suspend(write));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let _ = io::stderr().flush();
        Ok(())
    }
}

/// Progress of the optimizer's steps.
#[derive(Debug)]
pub(crate) struct Steps {
    bar: Option<ProgressBar>,
    /// What is shown of each step.
    what: &'static str,
    total: u64,
    started: Instant,
    first: u64,
    last_line: Option<Instant>,
}

/// Plain lines come no more often than this, except for the first and the last.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

impl Steps {
    /// Starts at step `first` of `total`; `what` names the value that is shown of each.
    pub(crate) fn start(what: &'static str, first: u64, total: u64) -> Self {
        let bar = (io::stderr().is_terminal() && !HUSHED.get()).then(|| {
            let bar = ProgressBar::new(total).with_position(first).with_style(style());
            bar.reset_eta();
            bar.enable_steady_tick(Duration::from_millis(250));
            bar
        });
        if bar.is_some() {
            BAR.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&bar);
        }
        Self { bar, what, total, started: Instant::now(), first, last_line: None }
    }

    /// Shows that `step` is done.
    pub(crate) fn done(&mut self, step: u64, value: f64, tokens_per_second: f64) {
        let what = self.what;
        if let Some(bar) = &self.bar {
            bar.set_message(format!("{what} {value:.4}  {tokens_per_second:.0} tokens/s"));
            bar.set_position(step);
            return;
        }
        let due = self.last_line.is_none_or(|at| at.elapsed() >= LINE_INTERVAL);
        if due || step == self.total {
            let left = self
                .started
                .elapsed()
                .div_f64((step - self.first).max(1) as f64)
                .mul_f64((self.total - step) as f64);
            say(&format!(
                "step {step}/{}  {what} {value:.4}  {tokens_per_second:.0} tokens/s  {} left",
                self.total,
                clock(left)
            ));
            self.last_line = Some(Instant::now());
        }
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            *BAR.lock().unwrap_or_else(PoisonError::into_inner) = None;
            bar.finish_and_clear();
        }
    }
}

/// Progress of something that is counted and may take long: rows, groups. Where the steps' bar is on the
/// screen, it speaks there; of what is quick, no line is written.
#[derive(Debug)]
pub(crate) struct Count {
    what: &'static str,
    total: u64,
    started: Instant,
    last_line: Instant,
    /// A bar of its own.
    bar: Option<ProgressBar>,
}

impl Count {
    /// Begins to count `what` ("rows read") up to `total`; 0 is something that is not counted.
    pub(crate) fn start(what: &'static str, total: usize) -> Self {
        let total = total as u64;
        let mut shown = BAR.lock().unwrap_or_else(PoisonError::into_inner);
        let bar = (io::stderr().is_terminal() && shown.is_none() && !HUSHED.get()).then(|| {
            let counted = if total == 0 { ProgressStyle::default_spinner() } else { style() };
            let bar = ProgressBar::new(total).with_style(counted);
            bar.set_message(what);
            bar.enable_steady_tick(Duration::from_millis(250));
            bar
        });
        if bar.is_some() {
            shown.clone_from(&bar);
        }
        let started = Instant::now();
        Self { what, total, started, last_line: started, bar }
    }

    /// Shows that `done` of them are done.
    pub(crate) fn done(&mut self, done: usize) {
        let done = done as u64;
        let steps = BAR.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        } else if HUSHED.get() {
            // Another rank counts.
        } else if let Some(bar) = steps {
            bar.set_message(format!("{} {done}/{}", self.what, self.total));
        } else if self.last_line.elapsed() >= LINE_INTERVAL && done < self.total {
            say(&self.line(done, self.started.elapsed()));
            self.last_line = Instant::now();
        }
    }

    fn line(&self, done: u64, elapsed: Duration) -> String {
        let left = elapsed.div_f64(done.max(1) as f64).mul_f64((self.total - done) as f64);
        format!("{} {done}/{}  {} left", self.what, self.total, clock(left))
    }
}

/// A phase of a step, whose counts come one after the other.
#[derive(Debug, Default)]
pub(crate) struct Phase {
    count: Option<Count>,
}

impl Phase {
    /// Shows that `done` of `all` are done.
    pub(crate) fn show(&mut self, what: &'static str, done: usize, all: usize) {
        if self.count.as_ref().is_none_or(|count| count.what != what || count.total != all as u64) {
            // The one before goes first: a bar is taken off the screen where it ends.
            self.count = None;
            self.count = Some(Count::start(what, all));
        }
        if let Some(count) = &mut self.count {
            count.done(done);
        }
        if done >= all {
            self.count = None;
        }
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            *BAR.lock().unwrap_or_else(PoisonError::into_inner) = None;
            bar.finish_and_clear();
        }
    }
}

fn style() -> ProgressStyle {
    ProgressStyle::with_template("{bar:28.blue} {pos}/{len}  {msg}  {eta} left")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// A duration as a clock shows it.
pub(crate) fn clock(duration: Duration) -> String {
    let secs = duration.as_secs();
    match (secs / 3600, secs / 60 % 60, secs % 60) {
        (0, 0, secs) => format!("{secs}s"),
        (0, minutes, secs) => format!("{minutes}m{secs:02}s"),
        (hours, minutes, _) => format!("{hours}h{minutes:02}m"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_short() {
        let shown = [59, 61, 3661].map(|secs| clock(Duration::from_secs(secs)));
        assert_eq!(shown, ["59s", "1m01s", "1h01m"]);
    }

    #[test]
    fn a_count_says_how_far_it_is_and_how_long_it_takes() {
        let count = Count::start("rows read", 300);
        assert_eq!(count.line(100, Duration::from_secs(30)), "rows read 100/300  1m00s left");
        assert_eq!(count.line(0, Duration::ZERO), "rows read 0/300  0s left");
    }
}
