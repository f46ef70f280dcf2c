//! The ranks of a run in its rollout loop: who draws which responses, and who learns from which.
//!
//! For generation all ranks are so many data-parallel ones, each with the whole weights. Draws are keyed by seed,
//! step, prompt and sample, so a response is the same whichever rank draws it, and only the time hangs on who does.

use std::sync::Arc;
use std::time::Duration;

use aligner_core::{Communicator, Error, Group, Metrics, Phase, Result, Sample};
use aligner_parallel::balance::{LengthHistory, PromptServer, Split, longest_first};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

const SAMPLES: Phase = Phase::new("samples of all ranks");

/// One rank of several that draw a step's samples together.
pub struct Crew {
    /// All of them.
    all: Arc<dyn Communicator>,
    /// This one with those that learn from other groups.
    batches: Arc<dyn Communicator>,
    split: Split,
    /// How long the responses to each prompt were.
    history: LengthHistory,
    /// Times that prompts were given out.
    rounds: u64,
}

/// What a rank has drawn in a round, and how it went.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct Share {
    /// Scored groups with their prompts' places in the round.
    pub(super) groups: Vec<(usize, Group)>,
    pub(super) metrics: Metrics,
    pub(super) generating: Duration,
}

impl Crew {
    /// This rank among `all`, of which those of `batches` learn from other groups than it; the others share its model,
    /// and with it the groups.
    pub fn new(all: Arc<dyn Communicator>, batches: Arc<dyn Communicator>, split: Split) -> Self {
        Self { all, batches, split, history: LengthHistory::default(), rounds: 0 }
    }

    /// Calls `draw` with what gives out the prompts of a round, whose ids are the same on all ranks.
    pub(super) fn round<T>(
        &mut self,
        prompts: &[String],
        draw: impl FnOnce(&mut PromptServer<'_>) -> T,
    ) -> T {
        let mut server =
            PromptServer::new(self.all.as_ref(), self.rounds, prompts, &self.history, self.split);
        self.rounds += 1;
        draw(&mut server)
    }

    /// What all ranks have drawn, on each of them, in the order of the prompts. The seconds are those of the slowest,
    /// and `sampling/idle` says which part of them the ranks waited for it on average.
    pub(super) fn together(&mut self, own: &Share) -> Result<Share> {
        let all: Vec<Share> = gathered(self.all.as_ref(), own)?;
        let ranks = all.len() as f64;
        let (mut whole, mut busy) = (Share::default(), Duration::ZERO);
        for Share { groups, metrics, generating } in all {
            whole.groups.extend(groups);
            whole.metrics.merge(&metrics);
            whole.generating = whole.generating.max(generating);
            busy += generating;
        }
        whole.groups.sort_by_key(|(place, _)| *place);
        for (_, group) in &whole.groups {
            let tokens: usize = group.samples.iter().map(Sample::targets).sum();
            self.history.observe(&group.id, tokens as f64 / group.samples.len().max(1) as f64);
        }
        let most = whole.generating.as_secs_f64() * ranks;
        if most > 0.0 {
            whole.metrics.set("sampling/idle", 1.0 - busy.as_secs_f64() / most);
        }
        Ok(whole)
    }

    /// Of a step's groups, those that this rank learns from: each of the ranks with batches of its own gets about as
    /// many tokens as any other.
    pub(super) fn learned_here(&self, groups: Vec<Group>) -> Vec<Group> {
        let tokens: Vec<usize> = groups.iter().map(Group::packed_tokens).collect();
        let parts = longest_first(&tokens, self.batches.size());
        let own = &parts[self.batches.rank()];
        let is_own = |(at, group)| own.binary_search(&at).is_ok().then_some(group);
        groups.into_iter().enumerate().filter_map(is_own).collect()
    }

    /// The groups that all ranks have learned from, on each of them.
    pub(super) fn learned_anywhere(&self, own: &[Group]) -> Result<Vec<Group>> {
        Ok(gathered::<Vec<Group>>(self.batches.as_ref(), own)?.concat())
    }
}

/// What every rank has, in the order of ranks.
fn gathered<T: DeserializeOwned>(comm: &dyn Communicator, own: &(impl Serialize + ?Sized)) -> Result<Vec<T>> {
    let garbled = |error: serde_json::Error| Error::Invalid(format!("samples of another rank: {error}"));
    let bytes = serde_json::to_vec(own).map_err(garbled)?;
    let all = comm.all_gather_bytes(&bytes, SAMPLES)?;
    all.iter().map(|bytes| serde_json::from_slice(bytes).map_err(garbled)).collect()
}
