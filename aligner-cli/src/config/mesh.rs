//! `[mesh]`: how the ranks of a run share the work.

use aligner_core::{Error, Phase, Result};
use aligner_parallel::balance::Split;
use aligner_parallel::{Cut, Mesh, PipelineSchedule};
use serde::{Deserialize, Serialize};

/// `[mesh]`: the sizes of the axes, and how the model is cut along them. One rank without it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MeshSection {
    /// Ranks that share each matrix: tensor parallelism.
    pub tp: usize,
    /// Ranks that share each sequence: context parallelism.
    pub cp: usize,
    /// Ranks that share the experts, and have batches of their own.
    pub ep: usize,
    /// Ranks with batches of their own: data parallelism. By default what the other axes leave.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dp: Option<usize>,
    /// Ranks that share the layers: pipeline parallelism.
    pub pp: usize,
    /// How the prompts of a step are given to the ranks that draw responses.
    pub prompts: Split,
    /// Seconds that ranks wait for each other, in any one exchange, before they name who is missing and end.
    pub deadline_secs: f64,
    /// Whether norms work on parts of the rows, where `tp` is above 1.
    pub sequence_parallel: bool,
    /// The order of the pipeline's passes.
    pub schedule: PipelineSchedule,
    /// Parts of the depth for each pipeline rank; above 1 with the schedule `interleaved` alone.
    pub chunks: usize,
    /// Whether each data-parallel rank keeps a part of the optimizer's state (`ZeRO` stage 1).
    pub shard_optimizer: bool,
    /// Whether each data-parallel rank keeps a part of the parameters, too (`ZeRO` stage 3): they are gathered by
    /// layer, and activations are computed again.
    pub shard_parameters: bool,
}

impl Default for MeshSection {
    fn default() -> Self {
        Self {
            tp: 1,
            cp: 1,
            ep: 1,
            dp: None,
            pp: 1,
            prompts: Split::default(),
            deadline_secs: Phase::DEADLINE.as_secs_f64(),
            sequence_parallel: false,
            schedule: PipelineSchedule::default(),
            chunks: 1,
            shard_optimizer: false,
            shard_parameters: false,
        }
    }
}

impl MeshSection {
    /// The mesh of `ranks` ranks.
    ///
    /// # Errors
    /// [`Error::Setting`] where the axes make another number of ranks.
    pub fn mesh(&self, ranks: usize) -> Result<Mesh> {
        let others = [self.tp, self.cp, self.ep, self.pp].into_iter().fold(1, usize::saturating_mul);
        let dp = match self.dp {
            Some(dp) => dp,
            None if others > 0 && ranks.is_multiple_of(others) => ranks / others,
            None => 1,
        };
        let mesh = Mesh::new([self.tp, self.cp, self.ep, dp, self.pp])?;
        if mesh.size() != ranks {
            let size = mesh.size();
            let message = format!(
                "{mesh} is a mesh of {size} ranks, but {ranks} run; start it with `aligner launch --ranks {size} train …`"
            );
            return Err(Error::setting("mesh", message));
        }
        Ok(mesh)
    }

    /// How the model is cut.
    pub fn cut(&self) -> Cut {
        Cut {
            sequence: self.sequence_parallel,
            schedule: self.schedule,
            chunks: self.chunks,
            share_parameters: self.shard_parameters,
        }
    }

    /// What is wrong with the section, by key.
    pub(super) fn errors(&self) -> Vec<Error> {
        let sizes = [
            ("tp", self.tp),
            ("cp", self.cp),
            ("ep", self.ep),
            ("dp", self.dp.unwrap_or(1)),
            ("pp", self.pp),
            ("chunks", self.chunks),
        ];
        let mut errors: Vec<Error> = (sizes.into_iter())
            .filter(|(_, size)| *size == 0)
            .map(|(key, _)| Error::setting(key, "expected at least 1, got 0"))
            .collect();
        if !(0.1..=1e9).contains(&self.deadline_secs) {
            let message = format!("expected a number of seconds from 0.1 to 1e9, got {}", self.deadline_secs);
            errors.push(Error::setting("deadline_secs", message));
        }
        if errors.is_empty() && self.pp > 1 {
            // As many micro-batches as fit: their number hangs on the data.
            let problems = self.schedule.check(self.pp, self.pp, self.chunks);
            errors.extend(problems.into_iter().map(|problem| Error::setting("schedule", problem)));
        } else if self.chunks > 1 {
            errors.push(Error::setting("chunks", "above 1, but there is no pipeline: pp is 1"));
        }
        if self.shard_parameters && self.pp > 1 {
            errors.push(Error::setting("shard_parameters", "not where there is a pipeline: pp is above 1"));
        }
        for (key, is_set) in
            [("shard_optimizer", self.shard_optimizer), ("shard_parameters", self.shard_parameters)]
        {
            if is_set && self.ep > 1 {
                errors.push(Error::setting(key, "not where experts are shared: ep is above 1"));
            }
        }
        errors
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_parallel_ranks_are_what_is_left() {
        let section = MeshSection { tp: 2, ..MeshSection::default() };
        assert_eq!(section.mesh(6).unwrap(), Mesh::new([2, 1, 1, 3, 1]).unwrap());
        let message = section.mesh(5).unwrap_err().to_string();
        assert!(message.contains("2 ranks, but 5 run") && message.contains("--ranks 2"), "{message}");
    }

    #[test]
    fn every_error_has_its_key() {
        let section = MeshSection { tp: 0, chunks: 0, deadline_secs: f64::NAN, ..MeshSection::default() };
        let messages: Vec<String> = section.errors().iter().map(ToString::to_string).collect();
        assert!(messages[0].starts_with("tp") && messages[1].starts_with("chunks"), "{messages:?}");
        assert!(messages[2].starts_with("deadline_secs"), "{messages:?}");
        let section = MeshSection { pp: 2, chunks: 2, ..MeshSection::default() };
        assert!(section.errors()[0].to_string().starts_with("schedule"));
    }
}
