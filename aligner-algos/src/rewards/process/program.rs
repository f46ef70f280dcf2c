//! A running program: what is said to it, what it says, and its end.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aligner_core::{Error, Result};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use super::ProcessConfig;

/// Longest line that is read, in bytes.
pub(super) const MOST_LINE_BYTES: usize = 16 << 20;
/// Lines that are read ahead.
const AHEAD_LINES: usize = 1024;
/// Lines of the standard error that are kept for the report of its end.
const LAST_WORDS_LINES: usize = 8;
/// How long a program may take to end by itself once its output has ended.
const GRACE: Duration = Duration::from_secs(1);

/// What a program has said.
#[derive(Debug)]
pub(super) enum Said {
    /// A line, with its number from 1.
    Line(usize, String),
    /// A line, with its number, that is longer than is read.
    TooLong(usize),
    /// Its output has ended.
    Ended,
    /// Nothing, up to the deadline.
    Nothing,
}

/// A child process in a group of its own, with threads that write to it and read from it: so that neither side ever
/// waits for the other with full pipes, and waiting can end.
#[derive(Debug)]
pub(super) struct Program {
    child: Child,
    group: Option<Pid>,
    to_write: Sender<String>,
    heard: Receiver<Said>,
    errors: Option<JoinHandle<()>>,
    last_words: Arc<Mutex<VecDeque<String>>>,
}

impl Program {
    pub(super) fn start(config: &ProcessConfig) -> Result<Self> {
        let name = config.command.join(" ");
        let mut command = Command::new(&config.command[0]);
        command.args(&config.command[1..]).envs(&config.env).process_group(0);
        if let Some(directory) = &config.directory {
            command.current_dir(directory);
        }
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let failed = |cause| Error::Invalid(format!("the program `{name}` could not be started: {cause}"));
        let mut child = piped.spawn().map_err(failed)?;
        let group = Pid::from_raw(child.id() as i32);
        let (to_write, lines_in) = channel::<String>();
        let (lines_out, heard) = sync_channel(AHEAD_LINES);
        if let Some(mut input) = child.stdin.take() {
            // It ends when the program does not read any more, or when this value is dropped.
            std::thread::spawn(move || {
                while let Ok(lines) = lines_in.recv() {
                    if input.write_all(lines.as_bytes()).and_then(|()| input.flush()).is_err() {
                        return;
                    }
                }
            });
        }
        if let Some(output) = child.stdout.take() {
            std::thread::spawn(move || read_output(output, &lines_out));
        }
        let last_words = Arc::new(Mutex::new(VecDeque::new()));
        let errors = child.stderr.take().map(|errors| {
            let last_words = Arc::clone(&last_words);
            std::thread::spawn(move || log_errors(errors, &name, &last_words))
        });
        Ok(Self { child, group, to_write, heard, errors, last_words })
    }

    /// Hands over lines to be written; returns at once.
    pub(super) fn say(&self, lines: String) {
        // Where the writer has ended the program has too: reading from it tells.
        let _ = self.to_write.send(lines);
    }

    /// The next line that is not blank.
    pub(super) fn hear(&self, deadline: Instant) -> Said {
        match self.heard.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(said) => said,
            Err(RecvTimeoutError::Timeout) => Said::Nothing,
            Err(RecvTimeoutError::Disconnected) => Said::Ended,
        }
    }

    /// How a program ended that has closed its output, and the last that it wrote to its standard error.
    pub(super) fn end(&mut self) -> String {
        let until = Instant::now() + GRACE;
        while !self.has_exited() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        let status = self.kill().map_or_else(|error| error.to_string(), |status| status.to_string());
        // The thread has a little more to read; one that a stray child holds up is not waited for.
        while self.errors.as_ref().is_some_and(|thread| !thread.is_finished()) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        let last_words = self.last_words.lock().unwrap_or_else(PoisonError::into_inner);
        if last_words.is_empty() {
            return status;
        }
        let lines: Vec<&str> = last_words.iter().map(String::as_str).collect();
        format!("{status}, saying {:?}", lines.join("\n"))
    }

    /// Whether it has exited, without forgetting it: its number stays its own until [`Self::kill`].
    fn has_exited(&self) -> bool {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let exited = |group| waitid(WaitId::Pid(group), options).is_ok_and(|status| status.is_none());
        !self.group.is_some_and(exited)
    }

    /// Kills it and all of its group.
    fn kill(&mut self) -> std::io::Result<std::process::ExitStatus> {
        if let Some(group) = self.group.take() {
            // An error says that the group is empty already.
            let _ = kill_process_group(group, Signal::KILL);
        }
        self.child.wait()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if let Err(error) = self.kill() {
            tracing::warn!(%error, "a reward's program could not be waited for");
        }
    }
}

/// Passes on the lines of the standard output.
fn read_output(output: ChildStdout, lines: &SyncSender<Said>) {
    let mut output = BufReader::new(output);
    for number in 1.. {
        let mut line = Vec::new();
        let read = (&mut output).take(MOST_LINE_BYTES as u64 + 1).read_until(b'\n', &mut line);
        let said = match read {
            Ok(0) | Err(_) => return,
            Ok(len) if len > MOST_LINE_BYTES => Said::TooLong(number),
            Ok(_) if line.trim_ascii().is_empty() => continue,
            Ok(_) => Said::Line(number, String::from_utf8_lossy(line.trim_ascii()).into_owned()),
        };
        if lines.send(said).is_err() {
            return;
        }
    }
}

/// Logs the lines of the standard error, and keeps the last ones.
fn log_errors(errors: ChildStderr, name: &str, last_words: &Mutex<VecDeque<String>>) {
    let mut errors = BufReader::new(errors);
    let mut line = Vec::new();
    while let Ok(1..) = (&mut errors).take(MOST_LINE_BYTES as u64).read_until(b'\n', &mut line) {
        let text = String::from_utf8_lossy(line.trim_ascii_end()).into_owned();
        tracing::info!(program = name, "{text}");
        let mut last_words = last_words.lock().unwrap_or_else(PoisonError::into_inner);
        last_words.push_back(text);
        if last_words.len() > LAST_WORDS_LINES {
            last_words.pop_front();
        }
        line.clear();
    }
}
