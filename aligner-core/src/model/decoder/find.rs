//! Finding a model's parameters in a set, by the names that its family gives them.

use std::ops::Range;

use super::Decoder;
use super::layer::{Around, Attention, Layer, Mlp, MlpKind, Qkv, Shared};
use crate::model::exec::{Linear, Mixture, Norm, NormKind};
use crate::model::family::{self, ExpertNames, MlpNames};
use crate::model::lora::{self, Adapter, Lora};
use crate::model::parameters::{layer_name, outer_name};
use crate::model::{ExpertsConfig, ModelConfig, Stage};
use crate::{Error, ParamId, ParamSet, Result};

impl Decoder {
    /// Finds the parameters of a stage in `params`, and those of the configuration's adapter.
    ///
    /// # Errors
    /// [`Error::Invalid`] names a parameter that is absent.
    pub fn new(config: &ModelConfig, params: &ParamSet, stage: &Stage) -> Result<Self> {
        let (find, parts) = (Find { config, params, experts: stage.experts.clone() }, &config.family.parts);
        let ropes = [Some(config.rope), config.local_rope].into_iter().flatten();
        let ropes = ropes.filter(|_| parts.rotary).map(|rope| rope.frequencies(config.head_dim));
        let weight = |part: &str| find.id(&format!("{}.weight", outer_name(config, part)));
        let is_tied = config.tie_embeddings && config.num_labels.is_none();
        let has_table = stage.first || (stage.last && is_tied);
        Ok(Self {
            frequencies: ropes.collect(),
            embed: has_table.then(|| weight(parts.embedding)).transpose()?,
            positions: parts.positions.filter(|_| stage.first).map(weight).transpose()?,
            layers: stage.layers.clone().map(|index| find.layer(index)).collect::<Result<_>>()?,
            first_layer: stage.layers.start,
            norm: stage.last.then(|| find.norm(&outer_name(config, parts.last_norm))).transpose()?,
            config: config.clone(),
        })
    }
}

struct Find<'a> {
    config: &'a ModelConfig,
    params: &'a ParamSet,
    /// Those that are here; none where all are.
    experts: Option<Range<usize>>,
}

impl Find<'_> {
    fn id(&self, name: &str) -> Result<ParamId> {
        self.params.id(name).ok_or_else(|| Error::Invalid(format!("the parameters lack {name}")))
    }

    fn norm(&self, name: &str) -> Result<Norm> {
        let (kind, epsilon) = (self.config.family.parts.norm, self.config.rms_norm_eps);
        let weight = self.id(&format!("{name}.weight"))?;
        let bias = (kind == NormKind::Layer).then(|| self.id(&format!("{name}.bias"))).transpose()?;
        Ok(Norm { weight, bias, kind, epsilon })
    }

    fn around(&self, index: usize, names: family::Around) -> Result<Around> {
        let norm = |name: Option<&str>| {
            name.map(|name| self.norm(&layer_name(self.config, index, name))).transpose()
        };
        Ok(Around { before: norm(names.before)?, after: norm(names.after)? })
    }

    /// A layer's linear with its bias, where it has one, and what an adapter adds to it.
    fn linear(&self, index: usize, part: &str, bias: bool) -> Result<Linear> {
        let name = layer_name(self.config, index, part);
        let weight = self.id(&format!("{name}.weight"))?;
        let bias = bias.then(|| self.id(&format!("{name}.bias"))).transpose()?;
        let lora = self.config.adapter.as_deref().map(|adapter| self.addition(adapter, &name));
        Ok(Linear { weight, bias, lora: lora.transpose()?.flatten() })
    }

    fn linears<const N: usize>(&self, index: usize, parts: [&str; N], bias: bool) -> Result<[Linear; N]> {
        let found = parts.iter().map(|part| self.linear(index, part, bias)).collect::<Result<Vec<_>>>()?;
        Ok(found.try_into().expect("one linear for each name"))
    }

    /// The addition to a linear; none where the adapter leaves it alone.
    fn addition(&self, adapter: &Adapter, linear: &str) -> Result<Option<Lora>> {
        let place = adapter.modules.iter().position(|module| module.name == linear);
        let Some(module) = place else { return Ok(None) };
        let part = |end: &str| self.id(&format!("{linear}{end}"));
        Ok(Some(Lora {
            a: part(lora::A)?,
            b: part(lora::B)?,
            magnitude: adapter.config.dora.then(|| part(lora::MAGNITUDE)).transpose()?,
            scale: adapter.modules[module].scale,
            module,
        }))
    }

    fn layer(&self, index: usize) -> Result<Layer> {
        Ok(Layer { attention: self.attention(index)?, mlp: self.mlp(index)? })
    }

    fn attention(&self, index: usize) -> Result<Attention> {
        let (config, parts) = (self.config, &self.config.family.parts);
        let [q, kv] = [config.num_heads, config.num_kv_heads].map(|heads| heads * config.head_dim);
        let qkv = match parts.qkv {
            family::Qkv::Apart(names) => Qkv::Apart(self.linears(index, names, config.attention_bias)?),
            family::Qkv::Fused(name) => {
                Qkv::Fused(self.linear(index, name, config.attention_bias)?, [q, kv, kv])
            }
        };
        let head_norm = |name: &str| self.norm(&layer_name(config, index, name));
        let head_norms =
            parts.head_norms.map(|names| Ok::<_, Error>([head_norm(names.query)?, head_norm(names.key)?]));
        let local = config.is_local(index) && config.local_rope.is_some();
        Ok(Attention {
            norms: self.around(index, parts.attention_norms)?,
            qkv,
            head_norms: head_norms.transpose()?,
            rope: parts.rotary.then_some(usize::from(local)),
            shape: config.layer_attention(index),
            output: self.linear(index, parts.output, config.output_bias)?,
        })
    }

    fn mlp(&self, index: usize) -> Result<Mlp> {
        let (config, parts) = (self.config, &self.config.family.parts);
        let (bias, width) = (config.mlp_bias, config.intermediate_size);
        let kind = match (&config.experts, &parts.experts, parts.mlp) {
            (Some(sizes), Some(names), _) if !sizes.is_dense(index) => self.mixture(index, sizes, names)?,
            (_, _, MlpNames::Gated(names)) => MlpKind::Gated(self.linears(index, names, bias)?),
            (_, _, MlpNames::Fused(names)) => {
                MlpKind::Fused(self.linears(index, names, bias)?, [width, width])
            }
            (_, _, MlpNames::Plain(names)) => MlpKind::Plain(self.linears(index, names, bias)?),
        };
        Ok(Mlp { norms: self.around(index, parts.mlp_norms)?, activation: parts.activation, kind })
    }

    fn mixture(&self, index: usize, sizes: &ExpertsConfig, names: &ExpertNames) -> Result<MlpKind> {
        let expert = |expert: usize| {
            let own = names.linears.map(|linear| format!("{}.{expert}.{linear}", names.experts));
            self.linears(index, own.each_ref().map(String::as_str), false)
        };
        let mixture = Mixture {
            router: self.linear(index, names.router, false)?,
            experts: self.experts.clone().unwrap_or(0..sizes.count).map(expert).collect::<Result<_>>()?,
            per_token: sizes.per_token,
            normalized: sizes.normalized,
            activation: self.config.family.parts.activation,
        };
        let shared = names.shared.filter(|_| sizes.shared_intermediate_size.is_some());
        let shared = shared.map(|names| {
            let linears = self.linears(index, names.linears, false)?;
            Ok::<_, Error>(Shared { linears, opening: self.linear(index, names.opening, false)? })
        });
        Ok(MlpKind::Mixture(mixture, shared.transpose()?))
    }
}
