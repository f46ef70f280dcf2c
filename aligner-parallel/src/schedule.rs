//! Pipeline schedules as data: what each rank computes, in which order.
//!
//! The layers are cut into `stages * chunks` parts. Chunk c of rank r is part `c * stages + r`, so that
//! a micro-batch goes once around the ranks for each chunk (Narayanan et al. 2021, section 2.2).
//! A rank works through its list from the front: it receives what a task needs, waiting for it, computes,
//! and sends the result without waiting. Every list here goes through in that way.
//!
//! What a rank receives from another comes in the order in which the other has sent it, activations and
//! gradients alike: one channel for each pair of ranks is enough. On a single rank, what a part gives is
//! handed to the next one in memory.

use aligner_core::{Error, Result};

/// What a rank computes at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Task {
    /// A micro-batch through one of the rank's chunks.
    Forward {
        /// Which of the rank's chunks, from 0.
        chunk: usize,
        /// Which micro-batch, from 0.
        micro: usize,
    },
    /// The gradients of the same.
    Backward {
        /// Which of the rank's chunks, from 0.
        chunk: usize,
        /// Which micro-batch, from 0.
        micro: usize,
    },
}

/// The order of forward and backward passes in a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PipelineSchedule {
    /// All forward passes, then all backward passes (Huang et al. 2019).
    #[serde(rename = "gpipe")]
    GPipe,
    /// One forward, one backward, once the pipeline is full (Narayanan et al. 2019, `PipeDream`-Flush).
    #[default]
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// The same with several chunks a rank, which makes the bubble as many times smaller and asks for as many times
    /// the messages (Narayanan et al. 2021, section 2.2; the order of Megatron-LM, with groups of `stages`).
    Interleaved,
}

impl PipelineSchedule {
    /// By rank: what it computes, in order.
    ///
    /// ```
    /// use aligner_parallel::{PipelineSchedule, Task};
    ///
    /// let ranks = PipelineSchedule::OneForwardOneBackward.tasks(2, 2, 1)?;
    /// let (forward, backward) =
    ///     (|micro| Task::Forward { chunk: 0, micro }, |micro| Task::Backward { chunk: 0, micro });
    /// assert_eq!(ranks[0], [forward(0), forward(1), backward(0), backward(1)]);
    /// assert_eq!(ranks[1], [forward(0), backward(0), forward(1), backward(1)]);
    /// # Ok::<(), aligner_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// What [`PipelineSchedule::check`] says.
    pub fn tasks(self, stages: usize, micros: usize, chunks: usize) -> Result<Vec<Vec<Task>>> {
        let problems = self.check(stages, micros, chunks);
        if !problems.is_empty() {
            return Err(Error::Invalid(problems.join("; ")));
        }
        Ok((0..stages).map(|rank| self.of_rank(rank, stages, micros, chunks)).collect())
    }

    /// Every reason why there is no such schedule; empty where there is one.
    pub fn check(self, stages: usize, micros: usize, chunks: usize) -> Vec<String> {
        let name = self.name();
        let mut problems = Vec::new();
        for (what, count) in [("stages", stages), ("micro-batches", micros), ("chunks", chunks)] {
            if count == 0 {
                problems.push(format!("a pipeline needs at least one of its {what}, got 0"));
            }
        }
        let interleaved = self == Self::Interleaved;
        if interleaved && chunks == 1 {
            problems.push(format!("the schedule {name} needs at least 2 chunks a rank, got 1"));
        }
        if interleaved && stages > 0 && !micros.is_multiple_of(stages) {
            let wanted = format!("a multiple of the {stages} stages as micro-batches");
            problems.push(format!("the schedule {name} needs {wanted}, got {micros}"));
        }
        if !interleaved && chunks > 1 {
            problems.push(format!("the schedule {name} has 1 chunk a rank, got {chunks}"));
        }
        problems
    }

    /// The name in a run file.
    pub fn name(self) -> &'static str {
        match self {
            Self::GPipe => "gpipe",
            Self::OneForwardOneBackward => "1f1b",
            Self::Interleaved => "interleaved",
        }
    }

    /// The most forward passes of chunks whose activations a rank holds at once.
    pub fn in_flight(self, rank: usize, stages: usize, micros: usize, chunks: usize) -> usize {
        let bound = match self {
            Self::GPipe => micros,
            _ => self.warm_up(rank, stages, micros, chunks) + 1,
        };
        bound.min(micros * chunks)
    }

    /// Forward passes before the first backward pass, without the one that it follows.
    fn warm_up(self, rank: usize, stages: usize, micros: usize, chunks: usize) -> usize {
        let behind = stages - rank - 1;
        let passes = match self {
            Self::GPipe => micros,
            Self::OneForwardOneBackward => behind,
            Self::Interleaved => 2 * behind + (chunks - 1) * stages,
        };
        passes.min(micros * chunks)
    }

    fn of_rank(self, rank: usize, stages: usize, micros: usize, chunks: usize) -> Vec<Task> {
        let passes = micros * chunks;
        let forward = |pass| {
            let (chunk, micro) = place(pass, stages, chunks);
            Task::Forward { chunk, micro }
        };
        // Backward passes take the same micro-batches through the chunks from the last to the first.
        let backward = |pass| {
            let (chunk, micro) = place(pass, stages, chunks);
            Task::Backward { chunk: chunks - 1 - chunk, micro }
        };
        let warm_up = self.warm_up(rank, stages, micros, chunks);
        let mut tasks: Vec<Task> = (0..warm_up).map(forward).collect();
        for pass in warm_up..passes {
            tasks.extend([forward(pass), backward(pass - warm_up)]);
        }
        tasks.extend((passes - warm_up..passes).map(backward));
        tasks
    }
}

/// The chunk and micro-batch of a pass: as many micro-batches as there are stages go through the first chunk, then
/// through the second, and so on; then come the next ones.
fn place(pass: usize, stages: usize, chunks: usize) -> (usize, usize) {
    if chunks == 1 {
        return (0, pass);
    }
    let (group, inside) = (pass / (stages * chunks), pass % (stages * chunks));
    (inside / stages, group * stages + inside % stages)
}
