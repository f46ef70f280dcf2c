//! Every family's loss and gradients on the device against the host's, in f32 and with products in bf16.

use aligner_core::model::{CausalLm, ModelConfig};
use aligner_core::ops::host::to_vec;
use aligner_core::{
    Batch, Device, Error, Forward, Gradients, Group, LossOutput, Needs, ParamSet, Policy as _, Result,
    Sample, Tensor,
};
use serde_json::json;

use crate::training::{Place, SMALL_MEMORY};

/// Configurations of small models, one of each family: those of the golden models.
const CONFIGS: [(&str, &str); 12] = [
    ("llama", include_str!("../../../tests/golden/models/llama_bias_mha/config.json")),
    ("qwen2", include_str!("../../../tests/golden/models/qwen2/config.json")),
    ("qwen3", include_str!("../../../tests/golden/models/qwen3/config.json")),
    ("qwen2_moe", include_str!("../../../tests/golden/models/qwen2_moe/config.json")),
    ("qwen3_moe", include_str!("../../../tests/golden/models/qwen3_moe/config.json")),
    ("mistral", include_str!("../../../tests/golden/models/mistral_sw/config.json")),
    ("mixtral", include_str!("../../../tests/golden/models/mixtral/config.json")),
    ("gemma2", include_str!("../../../tests/golden/models/gemma2/config.json")),
    ("gemma3", include_str!("../../../tests/golden/models/gemma3/config.json")),
    ("gpt2", include_str!("../../../tests/golden/models/gpt2/config.json")),
    ("phi3", include_str!("../../../tests/golden/models/phi3/config.json")),
    ("olmo2", include_str!("../../../tests/golden/models/olmo2/config.json")),
];

/// Fresh matrices are so small that attention hardly sees its scores; these are as large as trained ones.
const SCALE: f32 = 4.0;

/// Largest error of a gradient over the largest magnitude in its tensor: in f32, and with products in bf16, whose
/// operands have 8 bits.
const BOUNDS: [f32; 2] = [1e-3, 0.1];

/// Two answers to one prompt, and a text that is longer than the windows of the models that have one.
fn batch() -> Result<Batch> {
    let answers = [vec![17, 9, 100, 44], vec![5, 6]].map(|answer| Sample::response(&[8, 120, 7], &answer));
    let pair = Group { id: "pair".into(), samples: answers.into(), ..Group::default() };
    let long: Vec<u32> = (0..14).map(|at| 3 + at * 23 % 100).collect();
    let text = Group::single("text", Sample::new(long.clone(), vec![true; long.len()]));
    Batch::collate([&pair, &text])
}

/// A loss in which no two targets count alike.
pub(crate) fn loss(out: &Forward, batch: &Batch) -> Result<LossOutput> {
    let weights: Vec<f32> = (0..batch.targets.len()).map(|at| 0.5 + (at as f32 * 0.37).sin()).collect();
    let weights = Tensor::from_floats(weights.as_slice(), &out.logps()?.device());
    Ok(LossOutput::new((out.logps()?.clone() * weights).sum()))
}

/// A small model of a family.
///
/// # Errors
/// An unknown family.
pub(crate) fn fresh(family: &str) -> Result<CausalLm> {
    let unknown = || Error::setting("family", format!("no model of a {family} is at hand"));
    let (_, config) = CONFIGS.iter().find(|(name, _)| *name == family).ok_or_else(unknown)?;
    let config =
        serde_json::from_str(config).map_err(|error| Error::Invalid(format!("{family}: {error}")))?;
    let config = ModelConfig::from_json(family.as_ref(), &config)?;
    Ok(grown(CausalLm::init(config, 1, &Device::flex())?))
}

/// The same model with larger matrices.
pub(crate) fn grown(mut model: CausalLm) -> CausalLm {
    for param in model.params_mut().iter_mut().filter(|param| param.shape.len() > 1) {
        param.value = param.value.clone() * SCALE;
    }
    model
}

/// The same model on another device.
pub(crate) fn moved(model: &CausalLm, device: &Device) -> Result<CausalLm> {
    let mut params = ParamSet::default();
    for param in model.params().iter() {
        params.insert_data(&param.name, &param.shape, to_vec(&param.value), device)?;
    }
    CausalLm::new(model.config().clone(), params, device)
}

/// The largest error of any gradient, relative to the largest magnitude in its tensor, with its parameter.
fn worst(model: &CausalLm, got: &Gradients, expected: &Gradients) -> (f32, String) {
    let mut worst = (0.0, String::new());
    for ((param, got), expected) in model.params().iter().zip(&got.values).zip(&expected.values) {
        let error = match (got, expected) {
            (None, None) => 0.0,
            (Some(got), Some(expected)) => relative(&to_vec(got), &to_vec(expected)),
            _ => f32::INFINITY,
        };
        if error > worst.0 {
            worst = (error, param.name.clone());
        }
    }
    worst
}

/// The largest error over the largest magnitude that is expected.
pub(crate) fn relative(got: &[f32], expected: &[f32]) -> f32 {
    let largest = expected.iter().fold(1e-6f32, |most, value| most.max(value.abs()));
    let gaps = got.iter().zip(expected).map(|(a, b)| (a - b).abs());
    let gap = gaps.map(|gap| if gap.is_finite() { gap } else { f32::INFINITY }).fold(0.0, f32::max);
    gap / largest
}

/// All families, with each kind of products. Says whether each was within its bounds.
///
/// # Errors
/// A failure of the device.
pub(crate) fn check(place: &Place) -> Result<bool> {
    let mut all = true;
    for (name, _) in CONFIGS {
        let host = fresh(name)?;
        if place.has_small_memory() && host.config().experts.is_some() {
            println!("{}", json!({"check": "gradients", "family": name, "not_run": SMALL_MEMORY}));
            continue;
        }
        let expected = host.accumulate(&[batch()?], Needs::NOTHING, &loss)?;
        let mut there = moved(&host, &place.device)?;
        for (products, bound) in place.products().iter().zip(BOUNDS) {
            there.set_bf16_products(*products == "bf16");
            let got = there.accumulate(&[batch()?], Needs::NOTHING, &loss)?;
            let of_loss = (got.loss_sum - expected.loss_sum).abs() / expected.loss_sum.abs();
            let (error, parameter) = worst(&host, &got, &expected);
            let ok = error < bound && of_loss < f64::from(bound) / 10.0;
            all &= ok;
            println!(
                "{}",
                json!({
                    "check": "gradients", "family": name, "products": products, "relative_error": error,
                    "of": parameter, "relative_error_of_loss": of_loss, "ok": ok,
                })
            );
        }
    }
    Ok(all)
}
