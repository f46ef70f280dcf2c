//! Scores by a program in any language, over JSON lines.

mod program;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use aligner_core::{Error, Result, Reward, Sample, Score};
use serde::{Deserialize, Serialize};

use super::protocol::Answers;
use super::{names_only, seconds};
use program::{Program, Said};

/// Settings of [`ProcessReward`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProcessConfig {
    /// The program and its arguments; no shell reads them.
    pub command: Vec<String>,
    /// How many copies of it run at once and share a batch.
    pub workers: usize,
    /// Longest time for a batch, in seconds; a program that takes longer is killed.
    pub timeout_secs: f64,
    /// What a program may take longer for the batch that it is started for, in seconds.
    pub startup_secs: f64,
    /// How often in a row, without a batch that is finished, a program that ends is started again.
    pub max_restarts: usize,
    /// Whether requests carry the sample's token ids, and the mask of the response's.
    pub send_tokens: bool,
    /// Where it runs; the directory of this program, if not set.
    pub directory: Option<PathBuf>,
    /// Environment variables that it gets beside this program's. They may be secrets: written out, they are their names.
    #[serde(serialize_with = "names_only", skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
}

impl Default for ProcessConfig {
    fn default() -> Self {
        Self {
            command: Vec::new(),
            workers: 1,
            timeout_secs: 60.0,
            startup_secs: 60.0,
            max_restarts: 3,
            send_tokens: false,
            directory: None,
            env: BTreeMap::new(),
        }
    }
}

/// A program that reads requests from its standard input and writes scores to its standard output, one JSON object
/// a line: `docs/rewards.md` describes both.
///
/// It is started with the first batch and kept for the next ones. When it ends, it is started again and asked for
/// what it has not answered. What it writes to its standard error is logged. When this reward is dropped it is killed,
/// with all processes that it has started and that have not left its process group.
#[derive(Debug)]
pub struct ProcessReward {
    config: ProcessConfig,
    limit: Duration,
    startup: Duration,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    workers: Vec<Worker>,
    /// Ids are given once in the reward's life, so that no late answer is taken for another sample's.
    next_id: u64,
}

/// A place for a copy of the program.
#[derive(Debug, Default)]
struct Worker {
    program: Option<Program>,
    restarts: usize,
}

impl ProcessReward {
    /// The reward with these settings; starts nothing.
    ///
    /// # Errors
    /// [`Error::Setting`] for no command, no worker, and times that are not above 0.
    pub fn new(config: ProcessConfig) -> Result<Self> {
        if config.command.first().is_none_or(String::is_empty) {
            return Err(Error::setting("command", "must name a program"));
        }
        if !(1..=1024).contains(&config.workers) {
            return Err(Error::setting("workers", format!("must be from 1 to 1024, got {}", config.workers)));
        }
        let limit = seconds("timeout_secs", config.timeout_secs)?;
        let startup = seconds("startup_secs", config.startup_secs)?;
        let workers = (0..config.workers).map(|_| Worker::default()).collect();
        Ok(Self { config, limit, startup, state: Mutex::new(State { workers, next_id: 0 }) })
    }

    /// Scores some of the batch's samples with one worker.
    fn ask(&self, worker: &mut Worker, mut answers: Answers<'_>) -> Result<Vec<Score>> {
        let asked = self.ask_until_complete(worker, &mut answers);
        if asked.is_err() {
            // Whatever state it is in: the next batch begins with a new one.
            worker.program = None;
        } else {
            worker.restarts = 0;
        }
        asked?;
        answers.into_scores()
    }

    fn ask_until_complete(&self, worker: &mut Worker, answers: &mut Answers<'_>) -> Result<()> {
        let started = Instant::now();
        let mut limit = self.limit;
        while !answers.are_complete() {
            let program = match &mut worker.program {
                Some(program) => program,
                empty => {
                    limit = self.limit + self.startup;
                    empty.insert(Program::start(&self.config)?)
                }
            };
            program.say(answers.requests(self.config.send_tokens));
            if self.listen(program, answers, started, limit)? {
                continue;
            }
            let ended = program.end();
            worker.program = None;
            if worker.restarts >= self.config.max_restarts {
                worker.restarts = 0;
                return Err(self.error(&format!(
                    "ended ({ended}) without a score for {}; started again {} times",
                    answers.missing(),
                    self.config.max_restarts
                )));
            }
            worker.restarts += 1;
            tracing::warn!(program = self.config.command[0], %ended, "a reward's program ended; starting it again");
        }
        Ok(())
    }

    /// Takes answers until all have come; false where the program ended before.
    fn listen(
        &self,
        program: &mut Program,
        answers: &mut Answers<'_>,
        started: Instant,
        limit: Duration,
    ) -> Result<bool> {
        while !answers.are_complete() {
            match program.hear(started + limit) {
                Said::Line(number, line) => answers
                    .take(&line)
                    .map_err(|message| self.error(&format!("line {number} of its output {message}")))?,
                Said::TooLong(number) => {
                    return Err(self.error(&format!(
                        "line {number} of its output is over {} bytes long",
                        program::MOST_LINE_BYTES
                    )));
                }
                Said::Ended => return Ok(false),
                Said::Nothing => {
                    return Err(self.error(&format!(
                        "gave no score for {} within {} seconds and was killed; does it flush its output after each line?",
                        answers.missing(),
                        limit.as_secs_f64()
                    )));
                }
            }
        }
        Ok(true)
    }

    fn error(&self, message: &str) -> Error {
        Error::Invalid(format!("the program `{}` {message}", self.config.command.join(" ")))
    }
}

impl Reward for ProcessReward {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State { workers, next_id } = &mut *state;
        // Neighbours are often answers to one prompt, of like difficulty: so they are dealt out in turn.
        let dealt: Vec<Vec<usize>> = (0..workers.len().min(samples.len()))
            .map(|worker| (worker..samples.len()).step_by(workers.len()).collect())
            .collect();
        let results: Vec<Result<Vec<Score>>> = std::thread::scope(|scope| {
            let mut running = Vec::new();
            for (worker, places) in workers.iter_mut().zip(&dealt) {
                let answers = Answers::new(samples, places, *next_id);
                *next_id += places.len() as u64;
                running.push(scope.spawn(move || self.ask(worker, answers)));
            }
            let panicked = |_| Err(Error::Invalid("a thread that asks a reward's program panicked".into()));
            running.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect()
        });
        let mut scores = vec![Score::None; samples.len()];
        for (places, result) in dealt.iter().zip(results) {
            for (&place, score) in places.iter().zip(result?) {
                scores[place] = score;
            }
        }
        Ok(scores)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_cannot_work_are_named() {
        let refused = |config| ProcessReward::new(config).expect_err("no reward").to_string();
        let base = || ProcessConfig { command: vec!["true".into()], ..ProcessConfig::default() };
        assert!(refused(ProcessConfig::default()).starts_with("command: "));
        assert!(refused(ProcessConfig { workers: 0, ..base() }).starts_with("workers: "));
        for secs in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(refused(ProcessConfig { timeout_secs: secs, ..base() }).starts_with("timeout_secs: "));
            assert!(refused(ProcessConfig { startup_secs: secs, ..base() }).starts_with("startup_secs: "));
        }
    }
}
