//! Cutting a model's parameters for the ranks of a mesh, and putting them together again.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use aligner_core::model::{Adapter, ModelConfig, Splits, Stage, layer_of};
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
    if config.norms_all_heads() {
        let message = format!(
            "a {} norms all its heads together: they cannot be split over tp ranks",
            config.model_type()
        );
        return Err(Error::Invalid(message));
    }
    let mut cuts = vec![
        ("num_attention_heads", &mut own.num_heads),
        ("num_key_value_heads", &mut own.num_kv_heads),
        ("intermediate_size", &mut own.intermediate_size),
    ];
    if let Some(experts) = &mut own.experts {
        cuts.push(("moe_intermediate_size", &mut experts.intermediate_size));
        let shared = experts.shared_intermediate_size.as_mut();
        cuts.extend(shared.map(|size| ("shared_expert_intermediate_size", size)));
    }
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
pub(crate) fn cut(
    whole: &ParamSet,
    names: &[&str],
    splits: &Splits,
    rank: usize,
    ranks: usize,
) -> Result<ParamSet> {
    let mut own = ParamSet::default();
    for name in names {
        let param =
            whole.by_name(name).ok_or_else(|| Error::Invalid(format!("the parameters lack {name}")))?;
        if param.packed.is_some() {
            own.share(param)?;
            continue;
        }
        if let Some(unread) = &param.unread {
            let (shape, ranges) = own_ranges(name, &param.shape, splits, rank, ranks);
            own.insert_unread(*name, &shape, unread.part(&ranges), &param.value.device())?;
            continue;
        }
        let (shape, value) = cut_param(param, splits, rank, ranks);
        own.insert(*name, &shape, value)?;
        if let Some(added) = own.iter_mut().last() {
            added.trainable = param.trainable;
        }
    }
    Ok(own)
}

/// One rank's part of a parameter.
fn cut_param(param: &Param, splits: &Splits, rank: usize, ranks: usize) -> (Vec<usize>, Tensor<1>) {
    if ranks == 1 || !matches!(splits.of(&param.name), Split::Outputs | Split::Inputs) {
        return (param.shape.clone(), param.value.clone());
    }
    let (shape, values) = with_slice(&param.value, |values| {
        cut_values(&param.name, (&param.shape, values), splits, rank, ranks)
    });
    let len = values.len();
    (shape, Tensor::from_data(TensorData::new(values, [len]), &param.value.device()))
}

/// Which elements of a tensor that is cut like the parameter `name` are one rank's, in order, and the shape that they have.
pub(crate) fn own_ranges(
    name: &str,
    whole: &[usize],
    splits: &Splits,
    rank: usize,
    ranks: usize,
) -> (Vec<usize>, Vec<Range<usize>>) {
    let [rows, columns] = matrix_shape(whole);
    let mut shape = whole.to_vec();
    match splits.of(name) {
        Split::Outputs => {
            let own = shares(rows, splits.fused(name), rank, ranks);
            shape[0] = own.iter().map(ExactSizeIterator::len).sum();
            (shape, own.into_iter().map(|rows| rows.start * columns..rows.end * columns).collect())
        }
        Split::Inputs => {
            let own = share(columns, rank, ranks);
            shape[1] = own.len();
            (shape, (0..rows).map(|row| row * columns + own.start..row * columns + own.end).collect())
        }
        Split::Whole | Split::Stream | Split::Inside => (shape, std::iter::once(0..rows * columns).collect()),
    }
}

/// One rank's part of the elements of a tensor that is cut like the parameter `name`, with its shape.
pub(crate) fn cut_values(
    name: &str,
    (whole, values): (&[usize], &[f32]),
    splits: &Splits,
    rank: usize,
    ranks: usize,
) -> (Vec<usize>, Vec<f32>) {
    let (shape, own) = own_ranges(name, whole, splits, rank, ranks);
    (shape, own.into_iter().flat_map(|range| &values[range]).copied().collect())
}

/// A rank's part of the outputs of a linear, of each of those that are fused in it.
pub(crate) fn shares(rows: usize, fused: &[usize], rank: usize, ranks: usize) -> Vec<Range<usize>> {
    let all = [rows];
    let parts = if fused.is_empty() { &all } else { fused };
    let part = |start: &mut usize, &len: &usize| {
        let own = share(len, rank, ranks);
        let own = *start + own.start..*start + own.end;
        *start += len;
        Some(own)
    };
    parts.iter().scan(0, part).collect()
}

/// The whole of a parameter from its parts, in the order of ranks.
pub(crate) fn join(name: &str, whole: &[usize], splits: &Splits, parts: &[Vec<f32>]) -> Vec<f32> {
    match splits.of(name) {
        Split::Whole | Split::Stream | Split::Inside => parts.first().cloned().unwrap_or_default(),
        Split::Outputs => {
            let [rows, columns] = matrix_shape(whole);
            let mut all = vec![0.0; rows * columns];
            for (rank, part) in parts.iter().enumerate() {
                let mut first = 0;
                for own in shares(rows, splits.fused(name), rank, parts.len()) {
                    let len = own.len() * columns;
                    all[own.start * columns..own.end * columns].copy_from_slice(&part[first..first + len]);
                    first += len;
                }
            }
            all
        }
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

pub(crate) fn matrix_shape(shape: &[usize]) -> [usize; 2] {
    let rows = shape.first().copied().unwrap_or(1);
    [rows, shape.iter().skip(1).product()]
}

/// Of the whole model's `names`, an adapter's among them, those of some stages, in their order.
pub(crate) fn stage_names<'a>(
    names: impl Iterator<Item = &'a str>,
    config: &ModelConfig,
    stages: &[Stage],
) -> Vec<&'a str> {
    let base: HashSet<String> =
        stages.iter().flat_map(|stage| stage.parameters(config)).map(|spec| spec.name).collect();
    let is_here = |layer: usize| stages.iter().any(|stage| stage.layers.contains(&layer));
    let held =
        |name: &str| base.contains(name) || (Adapter::owns(name) && layer_of(name).is_some_and(is_here));
    names.filter(|name| held(name)).collect()
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
        let config = |model_type: &str| {
            let json = serde_json::json!({
                "model_type": model_type, "vocab_size": 11, "hidden_size": 4, "intermediate_size": 6,
                "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 2,
                "attention_bias": model_type == "llama",
            });
            ModelConfig::from_json("tiny".as_ref(), &json).unwrap()
        };
        let llama = Splits::new(&config("llama"));
        for (name, shape) in [
            ("model.layers.0.self_attn.q_proj.weight", vec![6, 4]),
            ("model.layers.0.self_attn.q_proj.bias", vec![6]),
            ("model.layers.0.mlp.down_proj.weight", vec![4, 7]),
            ("model.embed_tokens.weight", vec![11, 3]),
            ("model.norm.weight", vec![4]),
            ("model.layers.0.mlp.down_proj.lora_A.weight", vec![2, 6]),
            ("model.layers.0.mlp.down_proj.lora_B.weight", vec![4, 2]),
        ] {
            check_parts(&llama, name, &shape);
        }
        let phi3 = Splits::new(&config("phi3"));
        // Queries of 12, keys and values of 6 each: ranks have a part of all three.
        let name = "model.layers.0.self_attn.qkv_proj.weight";
        assert_eq!(phi3.fused(name), [12, 6, 6]);
        check_parts(&phi3, name, &[24, 4]);
        check_parts(&phi3, "model.layers.0.self_attn.qkv_proj.lora_B.weight", &[24, 2]);
        let values: Vec<f32> = (0..24).map(|row| row as f32).collect();
        let (shape, own) = cut_values(name, (&[24, 1], &values), &phi3, 1, 3);
        assert_eq!((shape, own), (vec![8, 1], vec![4.0, 5.0, 6.0, 7.0, 14.0, 15.0, 20.0, 21.0]));
    }

    fn check_parts(splits: &Splits, name: &str, shape: &[usize]) {
        let elements: usize = shape.iter().product();
        let mut params = ParamSet::default();
        let values: Vec<f32> = (0..elements).map(|i| i as f32).collect();
        params.insert_data(name, shape, values.clone(), &Device::flex()).unwrap();
        for ranks in 1..=3 {
            let parts = (0..ranks).map(|rank| {
                let own = cut(&params, &[name], splits, rank, ranks).unwrap();
                let param = own.by_name(name).unwrap();
                assert_eq!(param.value.dims(), [param.elements()]);
                to_vec(&param.value)
            });
            let parts = parts.collect::<Vec<_>>();
            assert_eq!(join(name, shape, splits, &parts), values, "{name} of {ranks}");
        }
    }
}
