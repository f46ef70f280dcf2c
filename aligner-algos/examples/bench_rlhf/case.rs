//! The two cases: a model, its prompts, and how long the answers are.

use std::path::Path;

use aligner_core::model::{CausalLm, ModelConfig};
use aligner_core::rng::Rng;
use aligner_core::weights::Checkpoint;
use aligner_core::{Device, Error, Prompt, Result};
use serde_json::json;

/// What a step answers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) prompts: usize,
    pub(crate) generations: usize,
    pub(crate) prompt_len: usize,
    /// One for each answer; their cut-off is what a static batch is as wide as.
    pub(crate) lengths: &'static [usize],
}

/// Lengths of 32 answers, log-normal and cut at 8 and 256: the ones of the other benchmarks.
const SMALL: Case = Case {
    name: "small",
    prompts: 8,
    generations: 4,
    prompt_len: 64,
    lengths: &[
        64, 81, 51, 31, 44, 29, 67, 187, 43, 39, 95, 85, 70, 30, 63, 112, 22, 44, 14, 23, 15, 53, 23, 80, 73,
        55, 9, 42, 62, 70, 19, 44,
    ],
};

/// The first eight of them, scaled to a longest of 32.
const SMOLLM2: Case = Case {
    name: "smollm2",
    prompts: 2,
    generations: 4,
    prompt_len: 64,
    lengths: &[11, 14, 9, 5, 8, 5, 11, 32],
};

/// Tokens of an answer in the step before the one that is measured.
const WARM_LENGTH: usize = 8;

impl Case {
    pub(crate) fn named(name: &str) -> Result<Self> {
        let known = [SMALL, SMOLLM2].into_iter().find(|case| case.name == name);
        known.ok_or_else(|| Error::Invalid(format!("{name}: expected small or smollm2")))
    }

    /// A copy of the model in memory of its own: `smollm2` is read from `path`, `small` is drawn at random with the
    /// shapes of `xtask/bench/data.py`.
    pub(crate) fn model(&self, path: &Path) -> Result<CausalLm> {
        if self.name == SMOLLM2.name {
            return CausalLm::load(&Checkpoint::open(path)?, &Device::flex());
        }
        let shapes = json!({
            "model_type": "llama", "vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 8,
            "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1376,
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
        });
        CausalLm::init(ModelConfig::from_json("small".as_ref(), &shapes)?, 20240, &Device::flex())
    }

    /// The prompt of this number, of random tokens.
    pub(crate) fn prompt(&self, number: u64, vocab: usize) -> Prompt {
        let rng = Rng::new(&[5, number]);
        let tokens = (0..self.prompt_len as u64).map(|at| 3 + rng.below(at, vocab as u64 - 3) as u32);
        Prompt { id: number.to_string(), tokens: tokens.collect(), metadata: serde_json::Value::Null }
    }

    /// Lengths of the answers of two steps: one prompt's short ones to warm up, then those that are measured.
    pub(crate) fn lengths(&self) -> [Vec<usize>; 2] {
        [vec![WARM_LENGTH; self.generations], self.lengths.to_vec()]
    }
}
