//! The sections of a run file that belong to the program; the others stand beside their code.

use std::path::{Path, PathBuf};

use aligner_algos::{LearnerConfig, PreflightConfig, RolloutConfig, ValueLossConfig, WarningsConfig};
use aligner_core::weights::SaveDtype;
use aligner_data::DatasetConfig;
use serde::{Deserialize, Serialize};

use super::lora::LoraSection;
use super::mesh::MeshSection;
use super::read::ReadElsewhere;

/// A whole run file.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// What is trained.
    pub model: ModelConfig,
    /// What it is trained on.
    pub data: DataConfig,
    /// `[algorithm.NAME]`: read by the registry's entry of that name.
    #[serde(skip_serializing)]
    #[expect(dead_code, reason = "the registry reads the section itself")]
    algorithm: ReadElsewhere,
    /// The frozen model that DPO and its kin measure against.
    #[serde(default)]
    pub reference: ReferenceConfig,
    /// How it is trained.
    #[serde(default)]
    pub learner: LearnerConfig,
    /// How an algorithm that learns from its own samples draws them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollout: Option<RolloutConfig>,
    /// `[reward.NAME]`: what the samples are worth; read by the registry's reward of that kind.
    #[serde(default, skip_serializing)]
    #[expect(dead_code, reason = "the registry reads the section itself")]
    reward: ReadElsewhere,
    /// The model that learns what a state is worth, where the algorithm asks for values.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub critic: Option<CriticConfig>,
    /// When a run that learns from its own samples warns, and when it ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warnings: Option<WarningsConfig>,
    /// How several ranks share the work.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mesh: Option<MeshSection>,
    /// What the checks before step 1 hold the run to.
    #[serde(default)]
    pub preflight: PreflightConfig,
    /// How long, where to, and what is kept.
    pub run: RunSection,
}

impl RunConfig {
    /// The files and directories that a run reads, by key.
    pub(crate) fn inputs(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let always = [("model.path", &self.model.path), ("data.train.path", &self.data.train.path)];
        let optional = [
            ("model.tokenizer", self.model.tokenizer.as_ref()),
            ("data.eval.path", self.data.eval.as_ref().map(|rows| &rows.path)),
            ("reference.path", self.reference.path.as_ref()),
            ("critic.path", self.critic.as_ref().and_then(|critic| critic.path.as_ref())),
            ("critic.lora.path", self.critic.as_ref().and_then(|critic| critic.lora.as_ref()?.path.as_ref())),
            ("model.lora.path", self.model.lora.as_ref().and_then(|lora| lora.path.as_ref())),
        ];
        let given = optional.into_iter().filter_map(|(key, path)| Some((key, path?)));
        always.into_iter().chain(given).map(|(key, path)| (key, path.as_path()))
    }

    /// Whether training multiplies matrices in bf16.
    pub(crate) fn is_in_bf16(&self) -> bool {
        self.model.precision == Precision::Bf16
    }

    /// The CUDA device of the rank that is number `local` on its machine, where ranks have one each.
    pub(crate) fn cuda_of_rank(&self, local: usize) -> Option<usize> {
        (self.model.device == "cuda").then_some(local)
    }

    /// Whether the policy is its reference at the start: the model itself, or the model without its adapter,
    /// where that is fresh.
    pub(crate) fn starts_at_reference(&self) -> bool {
        self.reference.path.is_none() && self.model.lora.as_ref().is_none_or(|lora| lora.path.is_none())
    }
}

/// `[model]`: the policy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// A directory with `config.json` and weights, or a `.gguf` file.
    pub path: PathBuf,
    /// A directory with `tokenizer.json` or `tokenizer.model`, where the model's own has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    /// What computes: `cpu`, or `cuda` and `cuda:N` in a build with that feature.
    #[serde(default = "cpu")]
    pub device: String,
    /// What matrices are multiplied in, in training.
    #[serde(default)]
    pub precision: Precision,
    /// A low-rank adapter, which is trained in place of the weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<LoraSection>,
}

/// `model.precision`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Everything in f32.
    #[default]
    F32,
    /// Products in bf16; weights, gradients, sums and everything between products in f32.
    Bf16,
}

fn cpu() -> String {
    "cpu".into()
}

/// `[data]`: rows to train on and rows held out.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// The rows to train on.
    pub train: DatasetConfig,
    /// Held-out rows of their own; without it, `train.holdout` rows are held out of `train`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval: Option<DatasetConfig>,
    /// Whether training rows are shuffled anew for each epoch.
    #[serde(default = "yes")]
    pub shuffle: bool,
}

/// `[reference]`: read where the algorithm asks for the reference's log-probabilities.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReferenceConfig {
    /// Another model than `model.path`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// Whether log-probabilities are computed once for each row and kept.
    pub cache: bool,
    /// Where they are kept, for several runs to share; in the run directory by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_file: Option<PathBuf>,
}

impl Default for ReferenceConfig {
    fn default() -> Self {
        Self { path: None, cache: true, cache_file: None }
    }
}

/// `[critic]`: its start and how it learns.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CriticConfig {
    /// The model that it starts from: a reward model with one output, or a language model, which gets a new
    /// head. By default `model.path`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// A low-rank adapter that is trained, with the new head, in place of its weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<LoraSection>,
    /// The loss of its values.
    pub loss: ValueLossConfig,
    /// Its own learner.
    pub learner: LearnerConfig,
}

impl Default for CriticConfig {
    fn default() -> Self {
        // 9e-6 as in NeMo-Aligner and OpenRLHF.
        let learner = LearnerConfig { learning_rate: 9e-6, ..LearnerConfig::default() };
        Self { path: None, lora: None, loss: ValueLossConfig::default(), learner }
    }
}

/// `[run]`: length, place, and what is written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunSection {
    /// The run's directory; it is made.
    pub dir: PathBuf,
    /// Seeds the order of rows and new heads; `holdout_seed` of the data decides which rows are held out. 1234, as in NeMo-Aligner.
    #[serde(default = "default_seed")]
    pub seed: u64,
    /// Optimizer steps; this or `epochs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<usize>,
    /// Passes over the training rows; this or `steps`. Without either, one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epochs: Option<f64>,
    /// Groups a step: rows for SFT, pairs for preferences, prompts for what learns from its own samples.
    #[serde(default = "default_batch_size")]
    pub batch_size: usize,
    /// Steps between evaluations on held-out rows; 0 is at the start and the end only.
    #[serde(default)]
    pub eval_every: usize,
    /// Steps between checkpoints; 0 is at the end only. Where `eval_every` is on, held-out rows are
    /// measured before each, so that the best one is known.
    #[serde(default)]
    pub save_every: usize,
    /// Checkpoints that are kept beside the best one.
    #[serde(default = "default_keep_last")]
    pub keep_last: usize,
    /// Held-out prompts that are answered before and after.
    #[serde(default = "default_sample_prompts")]
    pub sample_prompts: usize,
    /// Most tokens of such an answer.
    #[serde(default = "default_sample_tokens")]
    pub sample_tokens: usize,
    /// Steps between those whose samples are kept, with their rewards, in `rollouts.jsonl`; 0 is never.
    #[serde(default = "default_rollouts_every")]
    pub rollouts_every: usize,
    /// Groups that are kept of such a step.
    #[serde(default = "default_rollout_groups")]
    pub rollout_groups: usize,
    /// Whether the checks before step 1 run.
    #[serde(default = "yes")]
    pub preflight: bool,
    /// Longest time, in seconds, of a call of the algorithm's `credit` or `loss`, or of a reward that has no limit of its
    /// own; a call that takes longer ends the program. 0 is off.
    #[serde(default = "default_call_timeout_secs")]
    pub call_timeout_secs: f64,
    /// Number type of the final model's file.
    #[serde(default = "f32")]
    pub save_dtype: SaveDtype,
}

fn f32() -> SaveDtype {
    SaveDtype::F32
}

fn yes() -> bool {
    true
}

fn default_seed() -> u64 {
    1234
}

fn default_batch_size() -> usize {
    8
}

fn default_rollouts_every() -> usize {
    10
}

fn default_rollout_groups() -> usize {
    2
}

fn default_call_timeout_secs() -> f64 {
    600.0
}

fn default_keep_last() -> usize {
    2
}

fn default_sample_prompts() -> usize {
    3
}

fn default_sample_tokens() -> usize {
    64
}
