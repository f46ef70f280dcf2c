//! Engines around the real one, or in its place, that do without what it saves.

use std::collections::{HashMap, VecDeque};

use aligner_core::model::{CausalLm, ModelConfig};
use aligner_core::weights::{Checkpoint, SaveDtype, save_model};
use aligner_core::{Device, Engine, EngineStats, Event, ParamSet, Request, RequestId, Result};
use tempfile::TempDir;

use crate::clock::{Clock, Phase};

/// An engine whose answers have lengths that are set from outside, timed.
pub(crate) struct Forced {
    pub(crate) engine: Box<dyn Engine + Send>,
    pub(crate) clock: Clock,
    /// Lengths of the answers of this step and of the next ones, in the order of the requests.
    pub(crate) lengths: VecDeque<Vec<usize>>,
    /// Whether every row runs until the longest is done, as in a batch that is a matrix.
    pub(crate) together: bool,
    asked: usize,
    wanted: HashMap<RequestId, usize>,
    computed: u64,
}

impl Forced {
    pub(crate) fn new(
        engine: Box<dyn Engine + Send>,
        clock: Clock,
        lengths: VecDeque<Vec<usize>>,
        together: bool,
    ) -> Self {
        Self { engine, clock, lengths, together, asked: 0, wanted: HashMap::new(), computed: 0 }
    }
}

impl Engine for Forced {
    fn submit(&mut self, mut request: Request) -> Result<RequestId> {
        self.clock.enter(Phase::Generation);
        let lengths = self.lengths.front().map_or(&[][..], Vec::as_slice);
        let own = lengths.get(self.asked).copied().unwrap_or(1);
        self.asked += 1;
        let longest = lengths.iter().copied().max().unwrap_or(1);
        request.sampling.max_tokens = if self.together { longest } else { own };
        let kept = request.prompt.tokens.len() + own;
        let id = self.engine.submit(request)?;
        self.wanted.insert(id, kept);
        Ok(id)
    }

    fn poll(&mut self) -> Result<Vec<Event>> {
        let mut events = self.engine.poll()?;
        for event in &mut events {
            if let Event::Finished { request, sample, .. } = event
                && let Some(kept) = self.wanted.remove(request)
            {
                sample.tokens.truncate(kept);
                sample.mask.truncate(kept);
                sample.logps.truncate(kept);
                sample.raw_logps.truncate(kept);
                sample.versions.truncate(kept);
            }
        }
        let computed = self.engine.stats().computed_tokens;
        self.clock.count(Phase::Generation, computed - self.computed);
        self.computed = computed;
        Ok(events)
    }

    fn cancel(&mut self, request: RequestId) -> bool {
        self.engine.cancel(request)
    }

    fn stats(&self) -> EngineStats {
        self.engine.stats()
    }

    /// The last thing in a step.
    fn refit(&mut self, params: &ParamSet, version: u64) -> Result<()> {
        self.clock.enter(Phase::Weights);
        self.engine.refit(params, version)?;
        self.clock.enter(Phase::Other);
        self.lengths.pop_front();
        self.asked = 0;
        Ok(())
    }
}

/// An engine with a copy of the weights of its own: new ones come by a file.
pub(crate) struct ByFile {
    pub(crate) engine: Box<dyn Engine + Send>,
    pub(crate) config: ModelConfig,
    pub(crate) folder: TempDir,
}

impl Engine for ByFile {
    fn submit(&mut self, request: Request) -> Result<RequestId> {
        self.engine.submit(request)
    }

    fn poll(&mut self) -> Result<Vec<Event>> {
        self.engine.poll()
    }

    fn cancel(&mut self, request: RequestId) -> bool {
        self.engine.cancel(request)
    }

    fn stats(&self) -> EngineStats {
        self.engine.stats()
    }

    fn refit(&mut self, params: &ParamSet, version: u64) -> Result<()> {
        save_model(self.folder.path(), &self.config, params, SaveDtype::F32)?;
        let read = CausalLm::load(&Checkpoint::open(self.folder.path())?, &Device::flex())?;
        self.engine.refit(aligner_core::Policy::params(&read), version)
    }
}
