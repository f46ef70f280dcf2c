//! Where a simulated step runs: a file of the cluster, and flags over it.

use std::path::{Path, PathBuf};

use aligner_core::model::ModelConfig;
use aligner_parallel::simulate::{Cluster, Job, Scenario, shape};
use aligner_parallel::{Axis, Mesh};
use anyhow::Context as _;
use serde::Deserialize;

use crate::Usage;
use crate::config::read_file;

/// Flags that say how many ranks there are and how they are laid out.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Place {
    /// Ranks of the simulated cluster: whole nodes, or fewer than one has.
    #[arg(long)]
    ranks: Option<usize>,
    /// Ranks that split matrices.
    #[arg(long)]
    tp: Option<usize>,
    /// Ranks that split sequences.
    #[arg(long)]
    cp: Option<usize>,
    /// Ranks that split batches; all that are left, where not given.
    #[arg(long)]
    dp: Option<usize>,
    /// Ranks that split layers.
    #[arg(long)]
    pp: Option<usize>,
    /// Override a key of the cluster's file, as in `--with job.max_running=64`; may be repeated.
    #[arg(long = "with", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
}

/// The file.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct File {
    cluster: Cluster,
    mesh: Sizes,
    model: Shape,
    job: Job,
}

/// `[mesh]`: ranks along each axis.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Sizes {
    tp: usize,
    cp: usize,
    dp: Option<usize>,
    pp: usize,
}

impl Default for Sizes {
    fn default() -> Self {
        Self { tp: 1, cp: 1, dp: None, pp: 1 }
    }
}

/// `[model]`: a name of a shape, or a `config.json` or its directory.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Shape {
    shape: Option<String>,
    path: Option<PathBuf>,
}

impl Place {
    /// Whether any of the flags was given.
    pub(crate) fn is_given(&self) -> bool {
        let sizes = [self.ranks, self.tp, self.cp, self.dp, self.pp];
        sizes.iter().any(Option::is_some) || !self.overrides.is_empty()
    }

    /// The step that the file and the flags describe, of `model` where that is given.
    ///
    /// # Errors
    /// Every mistake of the file at once, or every reason why the ranks cannot run it.
    pub(crate) fn scenario(
        &self,
        path: Option<&Path>,
        defaults: &[String],
        flags: &[String],
        model: Option<ModelConfig>,
    ) -> anyhow::Result<Scenario> {
        let axes = [("tp", self.tp), ("cp", self.cp), ("dp", self.dp), ("pp", self.pp)];
        let axes = axes.into_iter().filter_map(|(axis, size)| Some(format!("mesh.{axis}={}", size?)));
        let overrides: Vec<String> =
            flags.iter().cloned().chain(axes).chain(self.overrides.clone()).collect();
        let File { mut cluster, mesh, model: section, job } = read_file(path, defaults, &overrides)?;
        if let Some(ranks) = self.ranks {
            spread(&mut cluster, ranks)?;
        }
        let Sizes { tp, cp, dp, pp } = mesh;
        let learning = cluster.nodes.saturating_sub(job.critic_nodes) * cluster.ranks_per_node;
        let dp = dp.unwrap_or_else(|| (learning / (tp * cp * pp).max(1)).max(1));
        let model = model.map_or_else(|| section.read(), Ok)?;
        let scenario = Scenario { cluster, mesh: Mesh::new([tp, cp, 1, dp, pp])?, model, job };
        let problems = scenario.check();
        if problems.is_empty() {
            return Ok(scenario);
        }
        Err(Usage(format!("this step cannot run on these ranks:\n  {}", problems.join("\n  "))).into())
    }
}

/// Sets how many nodes there are, for so many ranks in all.
fn spread(cluster: &mut Cluster, ranks: usize) -> anyhow::Result<()> {
    let each = cluster.ranks_per_node;
    if ranks < each {
        (cluster.nodes, cluster.ranks_per_node) = (1, ranks);
        return Ok(());
    }
    if each == 0 || !ranks.is_multiple_of(each) {
        return Err(Usage(format!("--ranks: expected whole nodes of {each} ranks, got {ranks}")).into());
    }
    cluster.nodes = ranks / each;
    Ok(())
}

impl Shape {
    fn read(&self) -> anyhow::Result<ModelConfig> {
        match (&self.shape, &self.path) {
            (_, Some(path)) => {
                let file = if path.is_dir() { path.join("config.json") } else { path.clone() };
                Ok(ModelConfig::from_file(&file)?)
            }
            (Some(name), None) => Ok(shape(name).map_err(|error| Usage(error.to_string()))?),
            (None, None) => Err(Usage("model: expected a `shape` or a `path`".into())).context("no model"),
        }
    }
}

/// The lines above a prediction: of what it is one.
pub(crate) fn heading(scenario: &Scenario) -> String {
    let Scenario { cluster, mesh, model, job } = scenario;
    format!(
        "predicted  for         {:.1} M parameters on {} x {} ranks: {mesh}, {} x {} parts of layers, {}\n\
         predicted  step        {:?}: {} sequences in updates of {}\n",
        model.num_params() as f64 / 1e6,
        cluster.nodes,
        cluster.ranks_per_node,
        mesh.axis_size(Axis::Pipeline),
        job.chunks,
        job.schedule.name(),
        job.algorithm,
        job.samples(),
        job.batch_sequences.min(job.samples())
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scenario(place: &Place, flags: &[&str]) -> Result<Scenario, String> {
        let flags: Vec<String> = flags.iter().map(ToString::to_string).collect();
        let defaults = ["model.shape=llama3-70b".to_string()];
        place.scenario(None, &defaults, &flags, None).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn flags_lay_ranks_out_and_the_rest_is_data_parallel() {
        let place = Place { ranks: Some(1024), tp: Some(8), pp: Some(4), ..Place::default() };
        let found = scenario(&place, &["job.prompts=128"]).unwrap();
        assert_eq!((found.cluster.nodes, found.mesh.axis_size(Axis::Data)), (128, 32));
        assert_eq!(found.mesh.size(), 1024);
        assert!(heading(&found).lines().all(|line| line.starts_with("predicted")));
        let few = Place { ranks: Some(4), tp: Some(4), ..Place::default() };
        assert_eq!(scenario(&few, &[]).unwrap().cluster.ranks_per_node, 4);
    }

    #[test]
    fn all_reasons_are_told_at_once() {
        let place = Place { ranks: Some(64), tp: Some(6), pp: Some(3), ..Place::default() };
        let message = scenario(&place, &["job.zero_stage=7"]).unwrap_err();
        for part in
            ["tp 6 does not divide num_attention_heads 64", "pp 3 does not divide", "zero_stage", "64"]
        {
            assert!(message.contains(part), "no `{part}` in {message}");
        }
    }

    #[test]
    fn mistakes_of_the_file_are_told_at_once() {
        let message = scenario(&Place::default(), &["cluster.nodse=2", "job.prompts=many"]).unwrap_err();
        assert!(message.contains("nodse") && message.contains("job.prompts"), "{message}");
        let message = scenario(&Place { ranks: Some(20), ..Place::default() }, &[]).unwrap_err();
        assert_eq!(message, "--ranks: expected whole nodes of 8 ranks, got 20");
        let message = scenario(&Place::default(), &["model.shape=gpt"]).unwrap_err();
        assert!(message.contains("llama3-8b, llama3-70b, llama3-405b, got gpt"), "{message}");
    }

    #[test]
    fn what_the_file_says_goes_before_a_default() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cluster.toml");
        std::fs::write(&path, "[cluster]\nnodes = 2\n[model]\nshape = \"llama3-8b\"\n[mesh]\ntp = 2\n")
            .unwrap();
        let defaults = ["model.shape=llama3-70b".to_string(), "job.prompts=32".to_string()];
        let found = Place::default().scenario(Some(&path), &defaults, &[], None).unwrap();
        assert_eq!((found.model.num_layers, found.job.prompts), (32, 32));
        assert_eq!(found.mesh.axis_size(Axis::Data), 8);
    }
}
