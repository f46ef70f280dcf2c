//! `aligner merge`: a base and its adapter as one plain model.

use std::path::{Path, PathBuf};

use aligner_core::model::CausalLm;
use aligner_core::ops::host::to_vec;
use aligner_core::weights::{Checkpoint, SaveDtype};
use aligner_core::{Batch, Error, Group, Needs, Policy as _, Result, Sample, Segment};
use anyhow::ensure;

use crate::Usage;
use crate::progress::{Count, result};
use crate::rundir::write_directory;
use crate::wire::{self, LoadedModel, PROBE};

/// Add a low-rank adapter to its base's weights, write a plain model, and compare its logits.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The base: a model's directory or a `.gguf` file.
    base: PathBuf,
    /// The adapter, a directory as PEFT writes it.
    adapter: PathBuf,
    /// Where the model goes; the directory is made.
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// Number type of the file.
    #[arg(long, default_value = "f32")]
    dtype: Dtype,
    /// Most that a logit may differ from that of base and adapter, as a share of the largest logit; by
    /// default 1e-4 for f32, 2e-2 for f16 and 1e-1 for bf16.
    #[arg(long)]
    limit: Option<f32>,
    /// A directory with `tokenizer.json` or `tokenizer.model`, where the base has none.
    #[arg(long)]
    tokenizer: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Dtype {
    F32,
    Bf16,
    F16,
}

impl Dtype {
    fn save(self) -> SaveDtype {
        match self {
            Self::F32 => SaveDtype::F32,
            Self::Bf16 => SaveDtype::Bf16,
            Self::F16 => SaveDtype::F16,
        }
    }

    /// What rounding of this type may do to a logit, as a share of the largest.
    fn limit(self) -> f32 {
        match self {
            Self::F32 => 1e-4,
            Self::Bf16 => 1e-1,
            Self::F16 => 2e-2,
        }
    }
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Arguments { base, adapter, output, dtype, tokenizer, .. } = arguments;
    let limit = arguments.limit.unwrap_or(dtype.limit());
    ensure!(limit >= 0.0, Usage(format!("--limit: expected 0 or more, got {limit}")));
    ensure!(!output.exists(), Usage(format!("--output: {} is there already", output.display())));
    let model = LoadedModel::open(base, tokenizer.as_deref(), Some(adapter))?;
    model.adapter.as_ref().map(wire::tell_trained_on);
    let loading = Count::start("merging", 0);
    let adapted = model.policy(&wire::device("cpu")?)?;
    let merged = adapted.merged()?;
    let mut tokens = model.tokenizer.encode(PROBE)?;
    tokens.truncate(adapted.config().max_positions);
    let expected = outputs(&adapted, &tokens)?;
    let mut gap = Gap::default();
    write_directory(output, |dir| {
        let parts = (merged.config(), merged.params());
        wire::save_files(dir, parts, base, &model.tokenizer, dtype.save())?;
        gap = Gap::of(&written(dir, &merged, &tokens)?, &expected);
        gap.check(limit)
    })?;
    drop(loading);
    let (place, count) = (output.display(), tokens.len());
    result(&format!(
        "model       {place}\ndifference  {:.2e} at most, of outputs up to {:.4} ({count} tokens)",
        gap.largest, gap.scale
    ));
    Ok(())
}

/// The outputs of the model that was written.
fn written(dir: &Path, merged: &CausalLm, tokens: &[u32]) -> Result<Vec<f32>> {
    outputs(&CausalLm::load(&Checkpoint::open(dir)?, merged.device())?, tokens)
}

/// Logits after each token, or the scores of the text.
fn outputs(model: &CausalLm, tokens: &[u32]) -> Result<Vec<f32>> {
    if model.config().num_labels.is_some() {
        let group = Group::single("probe", Sample::response(tokens, &[]));
        let out = model.forward(&Batch::collate([&group])?, Needs::SCORES)?;
        return Ok(to_vec(out.scores()?));
    }
    let positions: Vec<u32> = (0..tokens.len() as u32).collect();
    let segment = Segment { start: 0, len: tokens.len(), position: 0, parent: None };
    let layout = model.layout(&positions, &[segment])?;
    Ok(to_vec(&model.logits(model.hidden(tokens, &layout)?)?))
}

/// How far two sets of outputs are from each other.
#[derive(Debug, Default)]
struct Gap {
    largest: f32,
    /// The largest magnitude of what is expected.
    scale: f32,
}

impl Gap {
    fn of(got: &[f32], expected: &[f32]) -> Self {
        let most = |values: &mut dyn Iterator<Item = f32>| {
            values.fold(
                0.0,
                |most: f32, value| if value.abs() > most || value.is_nan() { value.abs() } else { most },
            )
        };
        Self {
            largest: most(&mut got.iter().zip(expected).map(|(got, expected)| got - expected)),
            scale: most(&mut expected.iter().copied()),
        }
    }

    fn check(&self, limit: f32) -> Result<()> {
        let share = self.largest / self.scale.max(f32::MIN_POSITIVE);
        if share <= limit {
            return Ok(());
        }
        Err(Error::Invalid(format!(
            "nothing is written: the merged model's outputs differ from those of base and adapter by {:.2e}, {share:.2e} of \
             the largest, more than {limit:.0e}; `--limit` sets another bound",
            self.largest
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_is_held_to_the_outputs_scale_and_a_nan_to_nothing() {
        let gap = Gap::of(&[1.0, -8.0], &[1.5, -10.0]);
        assert!(gap.check(0.21).is_ok());
        assert!(gap.check(0.19).unwrap_err().to_string().contains("2.00e-1 of the largest"));
        assert!(Gap::of(&[f32::NAN, 1.0], &[1.0, 1.0]).check(1e9).is_err());
    }
}
