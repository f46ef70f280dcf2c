//! From prompts to groups of scored samples.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use aligner_core::{Detokenize, Engine, Error, Group, Metrics, Prompt, Result, Sample, Sampling};
use aligner_parallel::balance::PromptServer;

use super::crew::{Crew, Share};
use super::generate::{Open, generate};
use super::scoring::Scorer;
use super::{RolloutConfig, Watch};

/// Where prompts come from: as many as are asked for.
pub type Prompts<'a> = dyn FnMut(usize) -> Result<Vec<Prompt>> + Send + 'a;

/// Draws samples and has them scored.
pub(super) struct Collector {
    pub(super) config: RolloutConfig,
    pub(super) sampling: Sampling,
    pub(super) engine: Box<dyn Engine + Send>,
    pub(super) rewards: Scorer,
    pub(super) text: Arc<dyn Detokenize>,
    /// Prompts whose responses are not all complete, from the step before.
    pub(super) carried: Vec<Open>,
    pub(super) watch: Box<Watch>,
    /// The ranks that draw together.
    pub(super) crew: Option<Crew>,
}

/// The samples of one step, with what was logged on the way.
#[derive(Debug, Clone, Default)]
pub(super) struct Rollout {
    pub(super) groups: Vec<Group>,
    pub(super) metrics: Metrics,
    pub(super) generating: Duration,
    /// What scoring took beyond the end of generation.
    pub(super) scoring: Duration,
}

/// What a round of drawing gave.
#[derive(Default)]
struct Drawn {
    /// Scored groups with their prompts' places, in order.
    scored: Vec<(usize, Group, Metrics)>,
    /// Prompts that are not complete.
    open: Vec<Open>,
    /// What drawing alone took.
    generating: Duration,
}

impl Collector {
    /// Draws and scores the samples of one step: `wanted` groups, or fewer where rewards leave some out.
    pub(super) fn collect(&mut self, wanted: usize, born: u64, prompts: &mut Prompts<'_>) -> Result<Rollout> {
        let mut rollout = Rollout::default();
        let rounds = if self.config.dynamic_sampling { self.config.max_rounds } else { 1 };
        for round in 0..rounds {
            let missing = wanted - rollout.groups.len();
            let spare = if round == 0 { self.config.oversampling } else { 0 };
            let more = (missing + spare).saturating_sub(self.carried.len());
            let new = prompts(more)?.into_iter();
            let mut open = std::mem::take(&mut self.carried);
            open.extend(new.map(|prompt| Open::new(prompt, born, self.config.num_generations)));
            self.round(open, missing, &mut rollout)?;
            if rollout.groups.len() >= wanted {
                return Ok(rollout);
            }
        }
        if self.config.dynamic_sampling {
            let (kept, rounds) = (rollout.groups.len(), self.config.max_rounds);
            tracing::warn!("{kept} of {wanted} groups have unequal rewards after {rounds} rounds");
        }
        Ok(rollout)
    }

    /// One scored response to each prompt, whatever its reward.
    pub(super) fn held_out(&mut self, prompts: Vec<Prompt>) -> Result<Vec<Group>> {
        let wanted = prompts.len();
        // A step that no training step is: the same draws each time.
        let open = prompts.into_iter().map(|prompt| Open::new(prompt, u64::MAX, 1)).collect();
        let drawn = self.draw(open, wanted)?;
        let groups = drawn.scored.into_iter().map(|(place, group, _)| (place, group)).collect();
        let own = Share { groups, ..Share::default() };
        Ok(of_all(self.crew.as_mut(), own)?.groups.into_iter().map(|(_, group)| group).collect())
    }

    /// Draws until `wanted` of the open prompts are complete, and adds those that can be learned from.
    fn round(&mut self, open: Vec<Open>, wanted: usize, rollout: &mut Rollout) -> Result<()> {
        let began = Instant::now();
        let drawn = self.draw(open, wanted)?;
        self.carried = drawn.open;
        let mut own = Share { generating: drawn.generating, ..Share::default() };
        for (place, group, metrics) in drawn.scored {
            own.metrics.merge(&metrics);
            let kept = self.is_kept(&group);
            own.metrics.add("frac_groups_kept", f64::from(u8::from(kept)), 1.0);
            own.groups.extend(kept.then_some((place, group)));
        }
        let all = of_all(self.crew.as_mut(), own)?;
        rollout.generating += all.generating;
        rollout.scoring += began.elapsed().saturating_sub(all.generating);
        rollout.metrics.merge(&all.metrics);
        rollout.groups.extend(all.groups.into_iter().map(|(_, group)| group));
        Ok(())
    }

    /// Draws until `wanted` of the open prompts are complete, where ranks share them those of this rank, and has these
    /// scored.
    fn draw(&mut self, mut open: Vec<Open>, wanted: usize) -> Result<Drawn> {
        let Self { sampling, engine, rewards, text, watch, crew, .. } = self;
        let ids: Vec<String> = open.iter().map(|one| one.id().to_owned()).collect();
        let began = Instant::now();
        let (complete, waiting) = channel::<(usize, Group)>();
        let (scored, generating) = std::thread::scope(|threads| {
            // One group at a time: what a reward sees together does not depend on the clock.
            let scorer = threads.spawn(move || {
                let mut scored = Vec::new();
                for (at, mut group) in waiting {
                    let metrics = rewards.score(&mut group)?;
                    scored.push((at, group, metrics));
                }
                scored.sort_by_key(|(at, ..)| *at);
                Ok(scored)
            });
            let mut send = |at: usize, one: &Open| {
                // A scorer that failed has hung up; its error is the one to report.
                let _ = complete.send((at, one.group(text.as_ref(), &sampling.stop_tokens)));
            };
            let mut generate = |server: Option<&mut PromptServer<'_>>| {
                generate(engine.as_mut(), sampling, &mut open, wanted, server, &mut send, watch)
            };
            let generated = match crew {
                Some(crew) => crew.round(&ids, |server| generate(Some(server))),
                None => generate(None),
            };
            let generating = began.elapsed();
            drop(complete);
            let scored: Result<Vec<_>> =
                scorer.join().unwrap_or_else(|_| Err(Error::Invalid("the scoring thread panicked".into())));
            // A reward that fails is why what comes after it was drawn for nothing: its error comes first.
            (scored.and_then(|scored| generated.map(|()| scored)), generating)
        });
        let mut taken = vec![false; open.len()];
        let scored = scored?;
        for (at, ..) in &scored {
            taken[*at] = true;
        }
        // Where ranks share prompts, what is left are the others'.
        let open = if crew.is_some() { Vec::new() } else { open };
        let open = open.into_iter().zip(taken).filter(|(_, taken)| !taken).map(|(one, _)| one).collect();
        Ok(Drawn { scored, open, generating })
    }

    /// Whether a group is learned from: it has samples that can be compared, and rewards that differ where
    /// that is asked for.
    fn is_kept(&self, group: &Group) -> bool {
        let worth = |sample: &Sample| Some(sample.reward? + sample.token_rewards.iter().sum::<f32>());
        let mut rewards = group.samples.iter().filter_map(worth);
        let Some(first) = rewards.next() else { return false };
        let comparable = self.config.num_generations == 1 || group.samples.len() > 1;
        comparable
            && (!self.config.dynamic_sampling || rewards.any(|reward| reward.total_cmp(&first).is_ne()))
    }
}

/// What all ranks have drawn that share prompts; the rank's own where none do.
fn of_all(crew: Option<&mut Crew>, own: Share) -> Result<Share> {
    match crew {
        Some(crew) => crew.together(&own),
        None => Ok(own),
    }
}
