//! The engine's settings.

use aligner_core::model::{CausalLm, ModelConfig, ParamSpec, Role};
use aligner_core::ops::rows::{PAGE, PackedKind};
use aligner_core::shard::Split;
use aligner_core::{Error, Result};

use crate::host::Store;

/// How the engine runs.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Where it computes.
    pub device: EngineDevice,
    /// Size of the key-value cache.
    pub cache: CacheSize,
    /// Most tokens in one pass through the model; longer prompts are computed in chunks.
    pub max_batch_tokens: usize,
    /// Most requests that run at the same time.
    pub max_running: usize,
    /// Whether prompts that begin alike are computed once.
    pub prefix_cache: bool,
    /// What a refit does to the requests that run.
    pub in_flight: InFlight,
    /// A smaller copy of the weights to generate with; none generates with the trainer's own.
    pub packed: Option<PackedKind>,
    /// Tokens that are proposed and checked in one pass.
    pub speculation: Option<Speculation>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            device: EngineDevice::default(),
            cache: CacheSize::default(),
            max_batch_tokens: 512,
            max_running: 256,
            prefix_cache: true,
            in_flight: InFlight::Continue,
            packed: None,
            speculation: None,
        }
    }
}

/// Where the engine computes. Parameters that lie elsewhere are converted, at the start and at each refit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum EngineDevice {
    /// Where the parameters lie: on their CUDA device, or on the host.
    #[default]
    Parameters,
    /// On the host.
    Host,
    /// On a CUDA device.
    Cuda(usize),
    /// On `CubeCL`'s runtime for processors: slow, to test the kernels.
    CubeCpu,
}

/// Size of the key-value cache.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum CacheSize {
    /// In bytes.
    Bytes(usize),
    /// As a part of the memory that is free when the engine starts.
    Share(f32),
    /// As many pages as these tokens fill.
    Tokens(usize),
}

impl Default for CacheSize {
    fn default() -> Self {
        Self::Share(0.3)
    }
}

/// What a refit does to the requests that run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InFlight {
    /// They go on with the new weights; their tokens so far are computed again.
    Continue,
    /// They end on the weights that they began with, which are kept for so long.
    Finish,
}

/// Where proposals come from. A proposal changes no sample: it is kept where the draw would have been
/// the same token.
#[derive(Debug, Clone)]
pub enum Speculation {
    /// What followed the last occurrence of the text's last few tokens (Saxena 2023, prompt lookup).
    Ngram {
        /// Most tokens that are looked up.
        max_n: usize,
        /// Most tokens that are proposed.
        tokens: usize,
    },
    /// A smaller model with the same vocabulary (Leviathan et al. 2023, arXiv:2211.17192); it draws with
    /// the request's own random numbers.
    Draft {
        /// The model.
        model: Box<CausalLm>,
        /// Most tokens that are proposed.
        tokens: usize,
    },
}

impl EngineConfig {
    /// Checks every range.
    pub(crate) fn check(&self) -> Result<()> {
        if self.max_batch_tokens == 0 {
            return Err(Error::setting("max_batch_tokens", "expected at least 1"));
        }
        if self.max_running == 0 {
            return Err(Error::setting("max_running", "expected at least 1"));
        }
        if let CacheSize::Share(share) = self.cache
            && !(share > 0.0 && share <= 1.0)
        {
            return Err(Error::setting("cache", format!("expected a share above 0, at most 1, got {share}")));
        }
        Ok(())
    }

    /// How many pages the cache of a model has: what its size allows, and no more than `max_running`
    /// sequences of the model's whole context can fill.
    pub fn pages(&self, config: &ModelConfig) -> usize {
        let bytes = match self.cache {
            CacheSize::Bytes(bytes) => bytes,
            CacheSize::Share(share) => (free_memory() as f64 * f64::from(share)) as usize,
            CacheSize::Tokens(tokens) => tokens.div_ceil(PAGE).saturating_mul(Self::page_bytes(config)),
        };
        let most = config.max_positions.div_ceil(PAGE).saturating_add(1).saturating_mul(self.max_running);
        (bytes / Self::page_bytes(config).max(1)).min(most)
    }

    /// Bytes of the smaller copy of a model's weights; 0 where there is none.
    pub fn packed_bytes(&self, config: &ModelConfig) -> usize {
        let Some(kind) = self.packed else { return 0 };
        let bytes = |spec: ParamSpec| {
            let is_head = matches!(spec.role, Role::Head | Role::Embedding);
            let kind = if is_head { kind.of_head() } else { kind };
            kind.bytes(spec.shape.iter().product())
        };
        copied(config).map(bytes).sum()
    }

    /// Bytes of a page, [`PAGE`] tokens, in all layers.
    pub fn page_bytes(config: &ModelConfig) -> usize {
        Store::page_bytes(config)
    }
}

/// The parameters of which an engine makes smaller copies: the base's matrices, but for an embedding that is no
/// head, and for routers, where rounding would choose other experts.
pub(crate) fn copied(config: &ModelConfig) -> impl Iterator<Item = ParamSpec> {
    let has_copy = |spec: &ParamSpec| match spec.role {
        Role::Embedding => {
            config.tie_embeddings && config.num_labels.is_none() && spec.split == Split::Outputs
        }
        Role::Router => false,
        _ => true,
    };
    CausalLm::parameters(config).into_iter().filter(move |spec| spec.shape.len() == 2 && has_copy(spec))
}

/// Bytes that the system can give without swapping; 2 GiB where it does not say.
fn free_memory() -> usize {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<usize>().ok());
    kib.map_or(2 << 30, |kib| kib.saturating_mul(1024))
}
