//! Ranks as processes of this machine, which this one starts and waits for.

use std::io::Read;
use std::net::TcpListener;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, ChildStderr, Command, ExitCode, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

use crate::interrupt::{EXIT_CODE, is_ignored};
use crate::progress::{say, verbose};
use crate::train;

/// Between two looks at the processes.
const PAUSE: Duration = Duration::from_millis(20);

/// How long the others may take to say whom they miss, once one has failed.
const GRACE: Duration = Duration::from_secs(5);

/// Of what a rank says, as much as is kept.
const KEPT_BYTES: usize = 1 << 16;

/// What the error of ranks that did not meet has in it. One such error is every rank's.
const DID_NOT_MEET: &str = "\nlast operations:";

/// Trains on so many ranks, a process each.
pub(super) fn run(ranks: usize, train: &train::Arguments) -> anyhow::Result<ExitCode> {
    let signals = Signals::listen()?;
    let mut processes = Processes::start(ranks, train)?;
    processes.wait(&signals);
    Ok(processes.tell())
}

/// Signals that came to this process. The ranks are in process groups of their own, so that each signal of a
/// terminal reaches them once.
struct Signals(Vec<(Signal, Arc<AtomicBool>)>);

impl Signals {
    fn listen() -> std::io::Result<Self> {
        let mut signals = Vec::new();
        for (number, signal) in [(SIGINT, Signal::INT), (SIGTERM, Signal::TERM), (SIGHUP, Signal::HUP)] {
            if number == SIGHUP && is_ignored(number) {
                continue;
            }
            let came = Arc::new(AtomicBool::new(false));
            flag::register(number, came.clone())?;
            signals.push((signal, came));
        }
        Ok(Self(signals))
    }

    /// Those that came since the last call.
    fn take(&self) -> impl Iterator<Item = Signal> {
        self.0.iter().filter(|(_, came)| came.swap(false, Ordering::Relaxed)).map(|&(signal, _)| signal)
    }
}

/// One rank.
struct Process {
    child: Child,
    /// What it says to standard error, but for rank 0, which says it to the user.
    said: Option<Heard>,
    ended: Option<ExitStatus>,
    /// Whether this process has killed it.
    is_killed: bool,
}

/// All ranks; those that still run when it is dropped are killed.
struct Processes {
    ranks: Vec<Process>,
    /// Ranks that failed by themselves, in the order in which it was seen.
    failed: Vec<usize>,
}

impl Processes {
    fn start(ranks: usize, train: &train::Arguments) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("cannot find this program")?;
        // The port is free again once it is known; rank 0 takes it.
        let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let port = port.context("no port for the ranks")?.port().to_string();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mut started = Self { ranks: Vec::new(), failed: Vec::new() };
        for rank in 0..ranks {
            let mut command = Command::new(&program);
            command.args(train.to_words()).args((0..verbose()).map(|_| "-v"));
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
            command.env("WORLD_SIZE", ranks.to_string()).env("RANK", rank.to_string());
            command.env("LOCAL_RANK", rank.to_string());
            if std::env::var_os("RAYON_NUM_THREADS").is_none() {
                // Each has its share of the cores.
                command.env("RAYON_NUM_THREADS", (cores / ranks).max(1).to_string());
            }
            command.stdin(Stdio::null()).process_group(0);
            if rank > 0 {
                command.stdout(Stdio::null()).stderr(Stdio::piped());
            }
            let mut child = command.spawn().with_context(|| format!("cannot start rank {rank}"))?;
            let said = child.stderr.take().map(Heard::of);
            started.ranks.push(Process { child, said, ended: None, is_killed: false });
        }
        Ok(started)
    }

    /// Waits until all have ended; ends the others where one has failed.
    fn wait(&mut self, signals: &Signals) {
        let mut failing = None;
        while !self.look() {
            for signal in signals.take() {
                self.send(signal);
            }
            if !self.failed.is_empty() && failing.get_or_insert_with(Instant::now).elapsed() > GRACE {
                self.kill();
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Notes who has ended; says whether all have.
    fn look(&mut self) -> bool {
        for (rank, process) in self.ranks.iter_mut().enumerate() {
            if process.ended.is_some() {
                continue;
            }
            process.ended = process.child.try_wait().ok().flatten();
            let is_well = |status: ExitStatus| status.success() || status.code() == Some(EXIT_CODE.into());
            if process.ended.is_some_and(|status| !is_well(status)) && !process.is_killed {
                self.failed.push(rank);
            }
        }
        self.ranks.iter().all(|process| process.ended.is_some())
    }

    fn send(&self, signal: Signal) {
        for process in self.ranks.iter().filter(|process| process.ended.is_none()) {
            // One that has just ended needs none.
            let _ = kill_process(Pid::from_child(&process.child), signal);
        }
    }

    fn kill(&mut self) {
        for process in self.ranks.iter_mut().filter(|process| process.ended.is_none()) {
            process.is_killed = true;
            let _ = process.child.kill();
        }
    }

    /// Says what went wrong, and with which code this process ends.
    fn tell(mut self) -> ExitCode {
        let mut code = None;
        // Rank 0 has said it already.
        let mut told = self.failed.iter().any(|&rank| rank == 0 && self.ranks[0].code().is_some());
        let mut texts: Vec<String> = Vec::new();
        for rank in std::mem::take(&mut self.failed) {
            let of_rank = self.ranks[rank].code();
            code.get_or_insert(of_rank.unwrap_or(1));
            let text = match of_rank {
                None => self.ranks[rank].ended.and_then(|status| status.signal()).map_or_else(
                    || "ended in an unknown way".into(),
                    |signal| format!("the process was ended by signal {signal}"),
                ),
                Some(code) => match self.said(rank) {
                    // Rank 0's.
                    None => continue,
                    Some(text) if text.is_empty() && told => continue,
                    Some(text) if text.is_empty() => format!("the process ended with code {code}"),
                    Some(text) => text,
                },
            };
            let is_every_rank_s = text.contains(DID_NOT_MEET);
            if (is_every_rank_s && told) || texts.contains(&text) {
                continue;
            }
            told |= is_every_rank_s;
            say(&format!("error: rank {rank}: {text}"));
            texts.push(text);
        }
        let of_main = self.ranks[0].code().unwrap_or(1);
        ExitCode::from(code.unwrap_or(of_main))
    }

    /// What a rank said last, without what tells that it is the rank's; none of rank 0.
    fn said(&mut self, rank: usize) -> Option<String> {
        let of = format!("error: rank {rank} of {}: ", self.ranks.len());
        let text = self.ranks[rank].said.take()?.text();
        let text = text.trim();
        Some(text.strip_prefix(&of).or(text.strip_prefix("error: ")).unwrap_or(text).to_owned())
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        self.kill();
        for process in &mut self.ranks {
            let _ = process.child.wait();
        }
    }
}

impl Process {
    /// Its exit code; none where a signal has ended it.
    fn code(&self) -> Option<u8> {
        self.ended.and_then(|status| status.code()).map(|code| code as u8)
    }
}

/// The last of what a process says.
struct Heard {
    kept: Arc<Mutex<Vec<u8>>>,
    listener: JoinHandle<()>,
}

impl Heard {
    fn of(mut stderr: ChildStderr) -> Self {
        let kept = Arc::new(Mutex::new(Vec::new()));
        let shared = kept.clone();
        let listener = std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // An end that is an error is one too.
            while let Ok(bytes @ 1..) = stderr.read(&mut buffer) {
                let mut kept = shared.lock().unwrap_or_else(PoisonError::into_inner);
                kept.extend_from_slice(&buffer[..bytes]);
                let surplus = kept.len().saturating_sub(KEPT_BYTES);
                kept.drain(..surplus);
            }
        });
        Self { kept, listener }
    }

    /// All of it, once the process has ended. What it started may hold its standard error still, and is not
    /// waited for.
    fn text(&self) -> String {
        let since = Instant::now();
        while !self.listener.is_finished() && since.elapsed() < Duration::from_secs(1) {
            std::thread::sleep(PAUSE);
        }
        String::from_utf8_lossy(&self.kept.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }
}
