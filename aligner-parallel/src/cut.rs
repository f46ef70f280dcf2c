//! Cutting a model's parameters for the ranks of a mesh, and putting them together again.

use std::ops::Range;
use std::sync::Arc;

use aligner_core::model::{Adapter, Llama, ModelConfig, Stage};
use aligner_core::ops::host::with_slice;
use aligner_core::shard::Split;
use aligner_core::{Device, Error, Param, ParamSet, Result, Tensor};
use burn::tensor::TensorData;

/// The part of `len` things that is rank `rank`'s, of `ranks`: parts differ by at most one.
pub(crate) fn share(len: usize, rank: usize, ranks: usize) -> Range<usize> {
    rank * len / ranks..(rank + 1) * len / ranks
}

/// The shape of the model that one of `ranks` tensor-parallel ranks computes.
///
/// # Errors
/// Heads or MLP that do not divide; an adapter that cannot be split.
pub(crate) fn rank_config(config: &ModelConfig, ranks: usize) -> Result<ModelConfig> {
    let mut own = config.clone();
    if ranks == 1 {
        return Ok(own);
    }
    let cuts = [
        ("num_attention_heads", &mut own.num_heads),
        ("num_key_value_heads", &mut own.num_kv_heads),
        ("intermediate_size", &mut own.intermediate_size),
    ];
    for (key, size) in cuts {
        if !size.is_multiple_of(ranks) {
            return Err(Error::Invalid(format!("tp={ranks} does not divide {key}={size}")));
        }
        *size /= ranks;
    }
    if let Some(adapter) = &config.adapter {
        if adapter.config.dora {
            return Err(Error::Invalid("a DoRA adapter cannot be split over tp ranks".into()));
        }
        if adapter.config.dropout > 0.0 {
            return Err(Error::Invalid("an adapter with dropout cannot be split over tp ranks".into()));
        }
        own.adapter = None;
        own.adapter = Some(Arc::new(Adapter::new(adapter.config.clone(), &own)?));
    }
    Ok(own)
}

/// The parameters of a stage, of which this is one tensor-parallel rank of several.
pub(crate) fn cut(whole: &ParamSet, names: &[String], rank: usize, ranks: usize) -> Result<ParamSet> {
    let mut own = ParamSet::default();
    for name in names {
        let param =
            whole.by_name(name).ok_or_else(|| Error::Invalid(format!("the parameters lack {name}")))?;
        let (shape, value) = cut_param(param, rank, ranks);
        own.insert(name.as_str(), &shape, value)?;
        if let Some(added) = own.iter_mut().last() {
            added.trainable = param.trainable;
        }
    }
    Ok(own)
}

/// One rank's part of a parameter.
fn cut_param(param: &Param, rank: usize, ranks: usize) -> (Vec<usize>, Tensor<1>) {
    if ranks == 1 || !matches!(Llama::split(&param.name), Split::Outputs | Split::Inputs) {
        return (param.shape.clone(), param.value.clone());
    }
    let (shape, values) =
        with_slice(&param.value, |values| cut_values(&param.name, &param.shape, values, rank, ranks));
    let len = values.len();
    (shape, Tensor::from_data(TensorData::new(values, [len]), &param.value.device()))
}

/// One rank's part of the elements of a tensor that is cut like the parameter `name`, with its shape.
pub(crate) fn cut_values(
    name: &str,
    whole: &[usize],
    values: &[f32],
    rank: usize,
    ranks: usize,
) -> (Vec<usize>, Vec<f32>) {
    let [rows, columns] = matrix_shape(whole);
    let mut shape = whole.to_vec();
    match Llama::split(name) {
        Split::Outputs => {
            let own = share(rows, rank, ranks);
            shape[0] = own.len();
            (shape, values[own.start * columns..own.end * columns].to_vec())
        }
        Split::Inputs => {
            let own = share(columns, rank, ranks);
            shape[1] = own.len();
            (shape, values.chunks_exact(columns).flat_map(|row| &row[own.clone()]).copied().collect())
        }
        Split::Whole | Split::Stream | Split::Inside => (shape, values.to_vec()),
    }
}

/// The whole of a parameter from its parts, in the order of ranks.
pub(crate) fn join(name: &str, whole: &[usize], parts: &[Vec<f32>]) -> Vec<f32> {
    match Llama::split(name) {
        Split::Whole | Split::Stream | Split::Inside => parts.first().cloned().unwrap_or_default(),
        Split::Outputs => parts.concat(),
        Split::Inputs => {
            let [rows, columns] = matrix_shape(whole);
            let ranks = parts.len();
            let mut all = Vec::with_capacity(rows * columns);
            for row in 0..rows {
                for (rank, part) in parts.iter().enumerate() {
                    let width = share(columns, rank, ranks).len();
                    all.extend_from_slice(&part[row * width..][..width]);
                }
            }
            all
        }
    }
}

fn matrix_shape(shape: &[usize]) -> [usize; 2] {
    let rows = shape.first().copied().unwrap_or(1);
    [rows, shape.iter().skip(1).product()]
}

/// Names of a stage's parameters, an adapter's among them, in the whole model's order.
pub(crate) fn stage_names(whole: &ParamSet, config: &ModelConfig, stages: &[Stage]) -> Vec<String> {
    let base: Vec<String> =
        stages.iter().flat_map(|stage| stage.parameters(config)).map(|(name, _)| name).collect();
    let held = |name: &str| {
        base.iter().any(|own| own == name)
            || (Adapter::owns(name)
                && aligner_core::model::layer_of(name)
                    .is_some_and(|layer| stages.iter().any(|stage| stage.layers.contains(&layer))))
    };
    whole.iter().map(|param| &param.name).filter(|name| held(name)).cloned().collect()
}

/// A tensor of zeros like a parameter.
pub(crate) fn zeros(param: &Param, device: &Device) -> Tensor<1> {
    Tensor::zeros([param.elements()], device)
}

#[cfg(test)]
mod tests {
    use aligner_core::ops::host::to_vec;

    use super::*;

    #[test]
    fn parts_of_a_parameter_are_the_whole_of_it() {
        for (name, shape) in [
            ("model.layers.0.self_attn.q_proj.weight", vec![6, 4]),
            ("model.layers.0.self_attn.q_proj.bias", vec![6]),
            ("model.layers.0.mlp.down_proj.weight", vec![4, 7]),
            ("model.embed_tokens.weight", vec![11, 3]),
            ("model.norm.weight", vec![4]),
            ("model.layers.0.mlp.down_proj.lora_A.weight", vec![2, 6]),
            ("model.layers.0.mlp.down_proj.lora_B.weight", vec![4, 2]),
        ] {
            let elements: usize = shape.iter().product();
            let mut params = ParamSet::default();
            let values: Vec<f32> = (0..elements).map(|i| i as f32).collect();
            params.insert_data(name, &shape, values.clone(), &Device::flex()).unwrap();
            for ranks in 1..=3 {
                let parts = (0..ranks).map(|rank| {
                    let own = cut(&params, &[name.to_string()], rank, ranks).unwrap();
                    let param = own.by_name(name).unwrap();
                    assert_eq!(param.value.dims(), [param.elements()]);
                    to_vec(&param.value)
                });
                assert_eq!(join(name, &shape, &parts.collect::<Vec<_>>()), values, "{name} of {ranks}");
            }
        }
    }
}
