//! The only rollout loop: prompts, responses, rewards, credit, updates, refit.

mod collect;
mod config;
mod crew;
mod critic;
mod generate;
mod learn;
mod measures;
mod score_log;
mod scoring;
mod state;
mod warnings;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use aligner_core::{Algorithm, Detokenize, Engine, Error, Group, Metrics, Result};

use crate::learner::Learner;
use crate::reference::Reference;
use crate::rewards::RewardParts;
use collect::{Collector, Rollout};
use learn::{Learned, Teacher};
use scoring::Scorer;

pub use collect::Prompts;
pub use config::{AdaptiveKlConfig, EngineWeights, OldLogps, RolloutConfig};
pub use crew::Crew;
pub use critic::Critic;
pub use measures::divergence;
pub use score_log::ScoreFiles;
pub use state::OnlineState;
pub use warnings::{Warning, WarningKind, Warnings, WarningsConfig};

/// Is told how far a phase of a step is: its name, what is done, and all there is.
pub type Watch = dyn FnMut(&'static str, usize, usize) + Send;

/// Trains a policy on its own samples: each step draws responses, has them scored, and learns from them.
///
/// With the same seed and rewards that depend on the sample alone, a run is bitwise the same each time, also
/// one that is killed and continued from [`Online::state`].
pub struct Online {
    collector: Collector,
    teacher: Teacher,
    /// Steps that were asked for: ahead of those that were learned by what waits.
    born: u64,
    /// Scored samples that wait, the oldest first.
    waiting: VecDeque<Vec<Group>>,
}

/// The parts of a rollout loop beside the learner.
pub struct OnlineParts {
    /// Draws the responses, with the learner's weights.
    pub engine: Box<dyn Engine + Send>,
    /// Scores them.
    pub rewards: RewardParts,
    /// Where scores are kept as soon as they are known, so that a run that is killed and goes on asks no reward twice.
    pub score_log: Option<ScoreFiles>,
    /// Gives responses their text.
    pub text: Arc<dyn Detokenize>,
    /// Tokens that end a response.
    pub stop_tokens: Vec<u32>,
    /// The frozen policy, where the algorithm asks for it.
    pub reference: Option<Reference>,
    /// The critic, where the algorithm asks for values.
    pub critic: Option<Critic>,
    /// Is told how far a step is.
    pub watch: Box<Watch>,
    /// The ranks that draw a step's samples together, where there are several.
    pub crew: Option<Crew>,
}

/// What one step did.
#[derive(Debug, Clone)]
pub struct Iteration {
    /// Of rewards, responses, credit and updates; seconds of each phase as `timing_s/…`.
    pub metrics: Metrics,
    /// The samples that were learned from, with rewards and credit.
    pub groups: Vec<Group>,
}

impl Online {
    /// A loop before its first step.
    ///
    /// # Errors
    /// [`Error::Setting`] for settings out of range, and for those that several ranks cannot share.
    pub fn new(config: RolloutConfig, parts: OnlineParts, seed: u64) -> Result<Self> {
        if let Some(error) = config.errors().into_iter().next() {
            return Err(error);
        }
        let OnlineParts { engine, rewards, score_log, text, stop_tokens, reference, critic, watch, crew } =
            parts;
        if let Some(key) = crew.as_ref().and_then(|_| config.alone().first().copied()) {
            return Err(Error::setting(key, "not where several ranks draw together"));
        }
        let kl = config.kl_controller()?;
        let sampling = config.sampling(seed, stop_tokens);
        let teacher = Teacher { config: config.clone(), reference, critic, kl, seed, step: 0 };
        let rewards = Scorer::new(rewards, score_log.as_ref())?;
        let collector =
            Collector { config, sampling, engine, rewards, text, carried: Vec::new(), watch, crew };
        Ok(Self { collector, teacher, born: 0, waiting: VecDeque::new() })
    }

    /// Steps that were learned.
    pub fn steps(&self) -> u64 {
        self.teacher.step
    }

    /// The critic, where there is one.
    pub fn critic(&self) -> Option<&Critic> {
        self.teacher.critic.as_ref()
    }

    /// One step: `wanted` prompts answered and scored, and what `algorithm` learns from them.
    ///
    /// Where ranks draw together, `wanted` counts those of all of them, and `prompts` gives all of them the same.
    ///
    /// # Errors
    /// What engine, rewards, algorithm or learner cannot do.
    pub fn step(
        &mut self,
        algorithm: &dyn Algorithm,
        learner: &mut Learner,
        wanted: usize,
        prompts: &mut Prompts<'_>,
    ) -> Result<Iteration> {
        let began = Instant::now();
        while self.waiting.len() < self.collector.config.max_staleness {
            let rollout = self.collector.collect(wanted, self.born, prompts)?;
            self.born += 1;
            self.waiting.push_back(rollout.groups);
        }
        let (rollout, learned) = if let Some(groups) = self.waiting.pop_front() {
            self.learn_beside(algorithm, learner, groups, wanted, prompts)?
        } else {
            let mut rollout = self.collector.collect(wanted, self.born, prompts)?;
            let groups = std::mem::take(&mut rollout.groups);
            let groups = match &self.collector.crew {
                Some(crew) => crew.learned_here(groups),
                None => groups,
            };
            (rollout, self.teacher.learn(algorithm, learner, groups)?)
        };
        self.born += 1;
        let refitting = Instant::now();
        self.collector.engine.refit(&learner.policy().whole()?, learner.steps())?;
        let refit = refitting.elapsed();
        self.teacher.step += 1;
        let Learned { mut metrics, groups, judging, updating } = learned;
        metrics.merge(&rollout.metrics);
        for (name, time) in [
            ("generate", rollout.generating),
            ("score", rollout.scoring),
            ("logprobs", judging),
            ("learn", updating),
            ("refit", refit),
            ("step", began.elapsed()),
        ] {
            metrics.set(format!("timing_s/{name}"), time.as_secs_f64());
        }
        Ok(Iteration { metrics, groups })
    }

    /// Draws the samples of a later step on a thread of their own, with the weights as they are, while `groups`
    /// are learned from.
    fn learn_beside(
        &mut self,
        algorithm: &dyn Algorithm,
        learner: &mut Learner,
        groups: Vec<Group>,
        wanted: usize,
        prompts: &mut Prompts<'_>,
    ) -> Result<(Rollout, Learned)> {
        let Self { collector, teacher, born, .. } = self;
        let born = *born;
        let (mut rollout, learned) = std::thread::scope(|threads| {
            let drawing = threads.spawn(move || collector.collect(wanted, born, prompts));
            let learned = teacher.learn(algorithm, learner, groups);
            let panicked = || Err(Error::Invalid("the thread that draws samples panicked".into()));
            let rollout = drawing.join().unwrap_or_else(|_| panicked());
            rollout.and_then(|rollout| Ok((rollout, learned?)))
        })?;
        self.waiting.push_back(std::mem::take(&mut rollout.groups));
        Ok((rollout, learned))
    }

    /// The groups that all ranks have learned from in a step, of which this rank has `own`. Ranks that draw together
    /// call it together.
    ///
    /// # Errors
    /// A failed collective.
    pub fn of_all_ranks(&self, own: Vec<Group>) -> Result<Vec<Group>> {
        match &self.collector.crew {
            Some(crew) => crew.learned_anywhere(&own),
            None => Ok(own),
        }
    }

    /// Responses of the policy as it is to held-out prompts, scored: one response each, with the draws' keys of
    /// step `u64::MAX`, so that each time is asked the same. The reference, where there is one, judges them too.
    /// Ranks that draw together call it together, with the same prompts, and each gets the responses to all.
    ///
    /// # Errors
    /// What engine, rewards and reference cannot do.
    pub fn evaluate(&mut self, prompts: Vec<aligner_core::Prompt>) -> Result<Vec<Group>> {
        let mut groups = self.collector.held_out(prompts)?;
        if let Some(reference) = &mut self.teacher.reference {
            reference.fill(&mut groups)?;
        }
        Ok(groups)
    }
}
