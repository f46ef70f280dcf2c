//! `[model.lora]`: a low-rank adapter that is trained in place of the model's own weights.

use std::collections::BTreeMap;
use std::path::PathBuf;

use aligner_algos::EngineWeights;
use aligner_core::model::{LoraConfig, Targets};
use aligner_core::weights::AdapterCheckpoint;
use serde::{Deserialize, Serialize};

/// The section. What is not set has PEFT's default or, with `path`, is what the adapter's files say.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LoraSection {
    /// An adapter to start from, a directory as PEFT writes it; without it, the adapter is fresh.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// Rank; 8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub r: Option<usize>,
    /// The addition is scaled by `alpha / r`; 8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alpha: Option<f64>,
    /// Names of linears, or `all-linear`; `q_proj` and `v_proj`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub targets: Option<Targets>,
    /// Whether the scale is `alpha / sqrt(r)`; no.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rslora: Option<bool>,
    /// Whether the lengths of rows are trained apart; no.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dora: Option<bool>,
    /// Share of what the adapter sees that is dropped in training; 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropout: Option<f64>,
    /// How the frozen linears of the layers are held: `f32`, or in fewer bits (`QLoRA`); `f32`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base: Option<EngineWeights>,
    /// Modules that are trained in full beside the adapter; none but a score head.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub modules_to_save: Vec<String>,
    /// Other ranks by name of linear.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub rank_pattern: BTreeMap<String, usize>,
    /// Other alphas by name of linear.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub alpha_pattern: BTreeMap<String, f64>,
}

impl LoraSection {
    /// The settings of a fresh adapter.
    pub(crate) fn config(&self) -> LoraConfig {
        let base = LoraConfig::default();
        LoraConfig {
            r: self.r.unwrap_or(base.r),
            alpha: self.alpha.unwrap_or(base.alpha),
            targets: self.targets.clone().unwrap_or(base.targets),
            rslora: self.rslora.unwrap_or(base.rslora),
            dropout: self.dropout.unwrap_or(base.dropout),
            dora: self.dora.unwrap_or(base.dora),
            rank_pattern: self.rank_pattern.clone().into_iter().collect(),
            alpha_pattern: self.alpha_pattern.clone().into_iter().collect(),
            modules_to_save: self.modules_to_save.clone(),
        }
    }

    /// How the frozen linears are held.
    pub(crate) fn base(&self) -> EngineWeights {
        self.base.unwrap_or_default()
    }

    /// The same with the defaults written out.
    pub(super) fn filled(&self) -> Self {
        let base = Some(self.base());
        if self.path.is_some() {
            return Self { base, ..self.clone() };
        }
        let LoraConfig { r, alpha, targets, rslora, dropout, dora, .. } = self.config();
        Self {
            r: Some(r),
            alpha: Some(alpha),
            targets: Some(targets),
            rslora: Some(rslora),
            dora: Some(dora),
            dropout: Some(dropout),
            base,
            ..self.clone()
        }
    }

    /// Everything that is wrong with the values alone, by key.
    pub(super) fn problems(&self) -> Vec<(&'static str, String)> {
        let mut problems = Vec::new();
        let Some(path) = &self.path else { return problems };
        if !AdapterCheckpoint::is_adapter(path) {
            problems.push(("path", format!("{}: no adapter_config.json there", path.display())));
        }
        let own = [
            ("r", self.r.is_some()),
            ("alpha", self.alpha.is_some()),
            ("targets", self.targets.is_some()),
            ("rslora", self.rslora.is_some()),
            ("dora", self.dora.is_some()),
            ("modules_to_save", !self.modules_to_save.is_empty()),
            ("rank_pattern", !self.rank_pattern.is_empty()),
            ("alpha_pattern", !self.alpha_pattern.is_empty()),
        ];
        let set = own.iter().filter(|(_, is_set)| *is_set);
        problems.extend(set.map(|(key, _)| (*key, "comes from the adapter that `path` names".to_string())));
        problems
    }
}
