//! The engine that answers, and the flags that shape it.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use aligner_core::Error;
use aligner_core::model::CausalLm;
use aligner_core::weights::Checkpoint;
use aligner_data::Tokenizer;
use aligner_infer::{CacheSize, EngineConfig, PackedKind, PagedEngine, Speculation};

use super::{LoadedModel, device};
use crate::Usage;
use crate::progress::say;

/// How the engine runs, shared by the commands that answer.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct EngineFlags {
    /// Memory for keys and values: bytes as in 512MiB or 2GiB, or a part of what is free as in 30%.
    #[arg(long, value_name = "SIZE", default_value = "30%")]
    cache: Cache,
    /// The weights to answer with: the model's own, or a smaller copy that answers faster and slightly
    /// differently.
    #[arg(long, value_name = "KIND", default_value = "f32")]
    weights: Precision,
    /// Tokens that are guessed and checked in one pass; no answer changes. Guesses come from the text so
    /// far, or from --draft-model; 0 is off.
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    speculate: usize,
    /// A smaller model of the same vocabulary that guesses; a directory or a `.gguf` file.
    #[arg(long, value_name = "MODEL", requires = "speculate")]
    draft_model: Option<PathBuf>,
}

/// The longest run of tokens that is looked up in the text so far.
const LOOKED_UP: usize = 3;

#[derive(Debug, Clone, Copy, PartialEq)]
struct Cache(CacheSize);

impl FromStr for Cache {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("expected a size as in `512MiB`, `2GiB` or `30%`, got `{text}`");
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let number: f64 = number.parse().map_err(|_| expected())?;
        let factor = match unit.trim() {
            "%" if number > 0.0 && number <= 100.0 => {
                return Ok(Self(CacheSize::Share((number / 100.0) as f32)));
            }
            "" | "B" => 1.0,
            "KB" => 1e3,
            "MB" => 1e6,
            "GB" => 1e9,
            "KiB" => 1024.0,
            "MiB" => 1024.0 * 1024.0,
            "GiB" => 1024.0 * 1024.0 * 1024.0,
            _ => return Err(expected()),
        };
        Ok(Self(CacheSize::Bytes((number * factor) as usize)))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, clap::ValueEnum)]
enum Precision {
    F32,
    Bf16,
    Int8,
    Int4,
    Nf4,
}

impl Precision {
    fn packed(self) -> Option<PackedKind> {
        match self {
            Self::F32 => None,
            Self::Bf16 => Some(PackedKind::Bf16),
            Self::Int8 => Some(PackedKind::Int8),
            Self::Int4 => Some(PackedKind::Int4),
            Self::Nf4 => Some(PackedKind::Nf4),
        }
    }
}

/// A text that the model's own log-probabilities are compared on where its weights are smaller.
pub(crate) const PROBE: &str = "The harbour was quiet in the morning. Two boats had come in with the tide, and the men \
    were mending nets on the wall. \"How many did you count?\" she asked. He counted again: 17 crates, 3 \
    barrels, and one letter for the captain, who would not be back before Thursday.";

impl EngineFlags {
    /// The engine of a model; tells what smaller weights cost and change.
    ///
    /// # Errors
    /// Too little memory for a cache, a model with a scalar head, a draft of another vocabulary.
    pub(crate) fn engine(&self, model: &LoadedModel) -> anyhow::Result<PagedEngine> {
        let tokens = self.speculate;
        let speculation = match &self.draft_model {
            _ if tokens == 0 => None,
            Some(path) => {
                if let Some(message) = crate::config::not_a_model(path) {
                    return Err(Usage(format!("--draft-model: {message}")).into());
                }
                let model = Box::new(CausalLm::load(&Checkpoint::open(path)?, &device("cpu")?)?);
                Some(Speculation::Draft { model, tokens })
            }
            None => Some(Speculation::Ngram { max_n: LOOKED_UP, tokens }),
        };
        let config = EngineConfig {
            cache: self.cache.0,
            packed: self.weights.packed(),
            speculation,
            ..EngineConfig::default()
        };
        let mut engine = engine(model.policy(&device("cpu")?)?, &model.tokenizer, config)?;
        for (name, file) in &model.named {
            engine.add_adapter(name, file)?;
        }
        if self.weights != Precision::F32 {
            self.report(&engine, &model.tokenizer)?;
        }
        Ok(engine)
    }

    fn report(&self, engine: &PagedEngine, tokenizer: &Tokenizer) -> anyhow::Result<()> {
        let (bytes, elapsed) = engine.packed();
        let gap = engine.logp_gap(&tokenizer.encode(PROBE)?)?;
        say(&format!(
            "weights {:?}: {:.0} MiB beside the model's own, made in {:.2} s; log-probabilities differ by \
             {:.4} in the mean, {:.4} at most (nats, {} tokens)",
            self.weights,
            bytes as f64 / f64::from(1 << 20),
            elapsed.as_secs_f64(),
            gap.mean,
            gap.largest,
            gap.tokens
        ));
        Ok(())
    }
}

/// An engine that answers with `model`.
///
/// # Errors
/// Too little memory for a cache, a model with a scalar head.
pub(crate) fn engine(
    model: CausalLm,
    tokenizer: &Tokenizer,
    config: EngineConfig,
) -> anyhow::Result<PagedEngine> {
    let engine = PagedEngine::new(model, config).map_err(|error| match error {
        Error::Setting { .. } => Usage(error.to_string()).into(),
        error => anyhow::Error::from(error),
    })?;
    Ok(engine.with_text(Arc::new(tokenizer.clone())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_bytes_or_a_share() {
        let of = |text: &str| text.parse::<Cache>().map(|cache| cache.0);
        assert_eq!(of("30%"), Ok(CacheSize::Share(0.3)));
        assert_eq!(of("512MiB"), Ok(CacheSize::Bytes(512 << 20)));
        assert_eq!(of("1.5GB"), Ok(CacheSize::Bytes(1_500_000_000)));
        assert_eq!(of("4096"), Ok(CacheSize::Bytes(4096)));
        for wrong in ["", "x", "-1GiB", "0%", "101%", "5 gigs", "1..2MB"] {
            assert!(of(wrong).unwrap_err().contains("512MiB"), "{wrong}");
        }
    }
}
