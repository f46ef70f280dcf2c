//! What tells the families apart, as data: the keys of their configuration, the names of their parameters,
//! and what their layers are made of. [`Decoder`](super::Decoder) does the rest.

use std::fmt;

use super::ModelConfig;
use super::config::Fields;
use super::exec::NormKind;
use super::families::FAMILIES;
use crate::ops::Activation;

/// A family of models; a file of `families` has one each.
pub struct Family {
    /// `model_type` in `config.json`.
    pub(crate) model_type: &'static str,
    /// The beginning of its classes' names in transformers: `Llama` of `LlamaForCausalLM`.
    pub(crate) class: &'static str,
    /// How its `config.json` is read.
    pub(crate) keys: Keys,
    /// What its layers are made of.
    pub(crate) parts: Parts,
    /// What GGUF files of it are like.
    pub(crate) gguf: InGguf,
}

impl Family {
    /// The family of a `model_type`.
    pub fn of(model_type: &str) -> Option<&'static Self> {
        FAMILIES.into_iter().find(|family| family.model_type == model_type)
    }

    /// What GGUF calls the number that is added in its norms, behind the architecture.
    pub(crate) fn gguf_epsilon(&self) -> &'static str {
        match self.parts.norm {
            NormKind::Layer => "attention.layer_norm_epsilon",
            NormKind::Rms | NormKind::RmsPlusOne => "attention.layer_norm_rms_epsilon",
        }
    }

    /// `model_type` in `config.json`.
    pub fn model_type(&self) -> &'static str {
        self.model_type
    }
}

impl fmt::Debug for Family {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.model_type)
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.model_type == other.model_type
    }
}

/// How a family's `config.json` is read. Llama's keys are the common ones.
#[derive(Clone, Copy)]
pub(crate) struct Keys {
    /// How its classes' names end that have a language-model head.
    pub(crate) language_class: &'static str,
    /// How those end that have a scalar head.
    pub(crate) score_class: &'static str,
    /// What its files leave out.
    pub(crate) defaults: Defaults,
    /// Common keys that it spells in another way: (Llama's, its own).
    pub(crate) spelling: &'static [(&'static str, &'static str)],
    /// Common keys that it does not have.
    pub(crate) absent: &'static [&'static str],
    /// Keys beside the common ones that `read` reads.
    pub(crate) own: &'static [&'static str],
    /// Reads what is not common to all, once the common keys are read.
    pub(crate) read: fn(&mut Fields<'_>, &mut ModelConfig),
}

/// What llama.cpp's converter makes of a family, where that does not follow from its parts.
#[derive(Clone, Copy)]
pub(crate) struct InGguf {
    /// `general.architecture`, which several families may share.
    pub(crate) architecture: &'static str,
    /// Whether the rows of queries and keys that are rotated together are neighbours, rather than in the two
    /// halves of a head.
    pub(crate) interleaved: bool,
    /// Flags of `config.json` that llama.cpp has in its code and not in files.
    pub(crate) flags: &'static [(&'static str, bool)],
    /// The number of layers of its one size whose scores are scaled by `hidden_size / num_attention_heads`. In
    /// all others it is by the heads' width, which `query_pre_attn_scalar` is then.
    pub(crate) wide_scores: Option<usize>,
}

impl InGguf {
    /// An architecture of its own without anything special.
    pub(crate) const fn plain(architecture: &'static str) -> Self {
        Self { architecture, interleaved: false, flags: &[], wide_scores: None }
    }
}

/// Values of keys that a file does not have.
#[derive(Clone, Copy)]
pub(crate) struct Defaults {
    pub(crate) norm_epsilon: f32,
    pub(crate) max_positions: usize,
    pub(crate) rope_theta: f32,
    /// Width of a head; none where it is `hidden_size / num_attention_heads`.
    pub(crate) head_dim: Option<usize>,
    pub(crate) tie_embeddings: bool,
}

/// What a family's models are made of, under which names. Names of a layer's parts stand behind
/// `<base>.<layers>.<index>.`, without `.weight` and `.bias`.
#[derive(Clone, Copy)]
pub(crate) struct Parts {
    /// What all names but the head's begin with: `model`.
    pub(crate) base: &'static str,
    /// The token embedding, behind the base.
    pub(crate) embedding: &'static str,
    /// Whether the embedding is multiplied by the root of its width.
    pub(crate) scaled_embedding: bool,
    /// Learned positions that are added to the embedding, behind the base.
    pub(crate) positions: Option<&'static str>,
    /// Whether heads are rotated by position.
    pub(crate) rotary: bool,
    /// The layers, behind the base.
    pub(crate) layers: &'static str,
    /// The norm after the last layer, behind the base.
    pub(crate) last_norm: &'static str,
    /// The kind of every norm.
    pub(crate) norm: NormKind,
    /// Norms around the attention.
    pub(crate) attention_norms: Around,
    /// Queries, keys and values.
    pub(crate) qkv: Qkv,
    /// Norms of queries and keys before their rotation.
    pub(crate) head_norms: Option<HeadNorms>,
    /// The attention's last linear.
    pub(crate) output: &'static str,
    /// Norms around the MLP, or around the mixture.
    pub(crate) mlp_norms: Around,
    /// The MLP of layers without experts.
    pub(crate) mlp: MlpNames,
    /// The mixture of layers with experts.
    pub(crate) experts: Option<ExpertNames>,
    /// Of the MLP's gate, or of its only inner linear.
    pub(crate) activation: Activation,
    /// Whether files have the linears' weights as `[in, out]`.
    pub(crate) transposed: bool,
    /// Ends of the names of tensors that files may have and that are no parameters.
    pub(crate) buffers: &'static [&'static str],
}

/// A block's norms: of what it reads, and of what it adds to the residual stream.
#[derive(Clone, Copy)]
pub(crate) struct Around {
    pub(crate) before: Option<&'static str>,
    pub(crate) after: Option<&'static str>,
}

/// The linears of queries, keys and values.
#[derive(Clone, Copy)]
pub(crate) enum Qkv {
    /// One for each.
    Apart([&'static str; 3]),
    /// One whose outputs are those of the three, one after the other.
    Fused(&'static str),
}

/// Norms of queries and keys.
#[derive(Clone, Copy)]
pub(crate) struct HeadNorms {
    pub(crate) query: &'static str,
    pub(crate) key: &'static str,
    /// Whether all heads are one row, rather than each a row of its own.
    pub(crate) whole_width: bool,
}

/// The linears of a dense MLP.
#[derive(Clone, Copy)]
pub(crate) enum MlpNames {
    /// `down(act(gate x) * up x)`: gate, up, down.
    Gated([&'static str; 3]),
    /// The same, where one linear has the outputs of gate and then of up: `gate_up`, down.
    Fused([&'static str; 2]),
    /// `down(act(up x))`: up, down.
    Plain([&'static str; 2]),
}

/// A mixture of gated experts.
#[derive(Clone, Copy)]
pub(crate) struct ExpertNames {
    /// The linear whose outputs choose the experts.
    pub(crate) router: &'static str,
    /// What an expert's names begin with, before its number.
    pub(crate) experts: &'static str,
    /// Gate, up and down, behind the number.
    pub(crate) linears: [&'static str; 3],
    /// The expert that every token has.
    pub(crate) shared: Option<SharedNames>,
}

/// An expert for every token, with a gate on what it adds.
#[derive(Clone, Copy)]
pub(crate) struct SharedNames {
    /// Gate, up and down.
    pub(crate) linears: [&'static str; 3],
    /// The linear whose only output opens it, through a sigmoid.
    pub(crate) opening: &'static str,
}
