//! `AdamW`: one fused pass over each parameter, its gradient and its moments.

use std::collections::BTreeMap;

use burn::tensor::{Tensor, TensorData};
use serde::{Deserialize, Serialize};

use super::kernel::{Coefficients, update};
use crate::weights::UnreadTensor;
use crate::{Error, Param, ParamSet, Result};

/// Hyper-parameters of [`AdamW`] that stay the same over a run; defaults as in `torch.optim.AdamW`,
/// but for the decay, which is off.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdamWConfig {
    /// Decay rates of the first and the second moment.
    pub betas: (f64, f64),
    /// Added to the root of the second moment: keeps a parameter that has seen no gradient still.
    pub eps: f64,
    /// Share of a weight that is taken off a step, times the learning rate.
    pub weight_decay: f64,
    /// Whether norms and biases (parameters of rank 1) decay too.
    pub decay_vectors: bool,
    /// Whether the largest second moment seen so far is used (Reddi et al. 2018, algorithm 2).
    pub amsgrad: bool,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.0, decay_vectors: false, amsgrad: false }
    }
}

/// What the optimizer keeps for one parameter.
#[derive(Debug, Clone)]
struct Moments {
    /// Updates that the parameter has had; its bias correction counts only those.
    steps: u64,
    /// Mean of gradients, `[elements]`.
    first: Tensor<1>,
    /// Mean of squared gradients, `[elements]`.
    second: Tensor<1>,
    /// Largest `second` so far, `[elements]`.
    largest: Option<Tensor<1>>,
}

/// Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2), moments in f32.
///
/// A parameter is written in place unless another handle shares it: then it is copied first, and
/// the other handle keeps the old version.
#[derive(Debug, Clone)]
pub struct AdamW {
    config: AdamWConfig,
    moments: Vec<Option<Moments>>,
}

impl AdamW {
    /// An optimizer that has seen no gradient.
    ///
    /// # Errors
    /// Hyper-parameters outside of their ranges.
    pub fn new(config: AdamWConfig) -> Result<Self> {
        let AdamWConfig { betas: (first, second), eps, weight_decay, .. } = config;
        for (key, beta) in [("betas[0]", first), ("betas[1]", second)] {
            if !(0.0..1.0).contains(&beta) {
                return Err(Error::setting(key, format!("must be at least 0 and below 1, got {beta}")));
            }
        }
        for (key, value) in [("eps", eps), ("weight_decay", weight_decay)] {
            if !(value.is_finite() && value >= 0.0) {
                return Err(Error::setting(key, format!("must be finite and not negative, got {value}")));
            }
        }
        Ok(Self { config, moments: Vec::new() })
    }

    /// Moves `params` against `grads`, each `[elements]` and multiplied by `scale` on the way in.
    ///
    /// A parameter without a gradient is left alone, as are its moments. `scale` carries the
    /// division by the step's count and the clipping, so that neither costs a pass.
    ///
    /// # Errors
    /// Another number of gradients than of parameters, or a gradient of another size. Nothing has
    /// moved then.
    pub fn step(
        &mut self,
        params: &mut ParamSet,
        grads: &[Option<Tensor<1>>],
        learning_rate: f64,
        scale: f64,
    ) -> Result<()> {
        check(params, grads)?;
        self.moments.resize(params.len(), None);
        for ((param, grad), moments) in params.iter_mut().zip(grads).zip(&mut self.moments) {
            let Some(grad) = grad.as_ref().filter(|_| param.trainable) else { continue };
            let moments = moments.get_or_insert_with(|| Moments::zeros(grad, self.config.amsgrad));
            moments.steps += 1;
            let coefficients = self.config.coefficients(param, moments.steps, learning_rate, scale);
            let Moments { first, second, largest, .. } = moments;
            update(&mut param.value, grad, (first, second, largest.as_mut()), &coefficients);
        }
        Ok(())
    }

    /// First parts of the names of the tensors that it keeps for each parameter.
    pub fn kinds(&self) -> &'static [&'static str] {
        if self.config.amsgrad { &KINDS } else { &KINDS[..2] }
    }

    /// The moments as named tensors with their parameters' shapes, for a checkpoint.
    ///
    /// Names are those of torch's optimizer state before the parameter's own: `exp_avg.`,
    /// `exp_avg_sq.` and `max_exp_avg_sq.`.
    pub fn tensors(&self, params: &ParamSet) -> Vec<(String, Vec<usize>, Tensor<1>)> {
        let mut tensors = Vec::new();
        for (param, moments) in params.iter().zip(&self.moments) {
            let Some(moments) = moments else { continue };
            let all = [Some(&moments.first), Some(&moments.second), moments.largest.as_ref()];
            for (kind, tensor) in KINDS.iter().zip(all) {
                let Some(tensor) = tensor else { continue };
                tensors.push((format!("{kind}.{}", param.name), param.shape.clone(), tensor.clone()));
            }
        }
        tensors
    }

    /// How many updates each parameter has had; one that has had none is absent.
    pub fn steps(&self, params: &ParamSet) -> BTreeMap<String, u64> {
        let moments = self.moments.iter().map(|m| m.as_ref().map(|m| m.steps));
        params.iter().zip(moments).filter_map(|(param, steps)| Some((param.name.clone(), steps?))).collect()
    }

    /// Takes over the moments and counts that [`AdamW::tensors`] and [`AdamW::steps`] gave.
    ///
    /// # Errors
    /// A tensor that is absent, not one of these parameters', or of another shape. The optimizer is
    /// then as it was.
    pub fn restore(
        &mut self,
        params: &ParamSet,
        mut tensors: BTreeMap<String, UnreadTensor>,
        steps: &BTreeMap<String, u64>,
    ) -> Result<()> {
        let restored = params.iter().map(|param| match steps.get(&param.name) {
            Some(&steps) => Moments::take(param, steps, self.config.amsgrad, &mut tensors).map(Some),
            None => Ok(None),
        });
        let restored = restored.collect::<Result<Vec<_>>>()?;
        if let Some(name) = tensors.keys().next() {
            return Err(Error::Invalid(format!(
                "optimizer state: {name} belongs to no parameter of the model"
            )));
        }
        self.moments = restored;
        Ok(())
    }
}

/// First parts of the names of the state's tensors.
const KINDS: [&str; 3] = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"];

impl AdamWConfig {
    fn coefficients(&self, param: &Param, steps: u64, learning_rate: f64, scale: f64) -> Coefficients {
        let (first, second) = self.betas;
        // Past i32::MAX steps the power is 0 to any precision.
        let steps = i32::try_from(steps).unwrap_or(i32::MAX);
        let decays = self.decay_vectors || param.shape.len() > 1;
        let decay = if decays { self.weight_decay } else { 0.0 };
        Coefficients {
            scale: scale as f32,
            keep: (1.0 - learning_rate * decay) as f32,
            first_new: (1.0 - first) as f32,
            second_old: second as f32,
            second_new: (1.0 - second) as f32,
            rate: (learning_rate / (1.0 - first.powi(steps))) as f32,
            second_correction: (1.0 - second.powi(steps)).sqrt() as f32,
            eps: self.eps as f32,
        }
    }
}

impl Moments {
    fn zeros(like: &Tensor<1>, amsgrad: bool) -> Self {
        let zeros = || Tensor::zeros(like.dims(), &like.device());
        Self { steps: 0, first: zeros(), second: zeros(), largest: amsgrad.then(zeros) }
    }

    fn take(
        param: &Param,
        steps: u64,
        amsgrad: bool,
        tensors: &mut BTreeMap<String, UnreadTensor>,
    ) -> Result<Self> {
        let mut take = |kind: &str| {
            let name = format!("{kind}.{}", param.name);
            let (shape, unread) = tensors
                .remove(&name)
                .ok_or_else(|| Error::Invalid(format!("optimizer state: {name} is absent")))?;
            if shape != param.shape || unread.len() != param.elements() {
                return Err(Error::shape(name, format!("{:?}", param.shape), &shape));
            }
            let values = unread.read()?;
            Ok(Tensor::from_data(TensorData::from(values.as_slice()), &param.value.device()))
        };
        let [first, second, largest] = KINDS;
        let largest = if amsgrad { Some(take(largest)?) } else { None };
        Ok(Self { steps, first: take(first)?, second: take(second)?, largest })
    }
}

fn check(params: &ParamSet, grads: &[Option<Tensor<1>>]) -> Result<()> {
    if grads.len() != params.len() {
        return Err(Error::shape("gradients", format!("[{}] parameters", params.len()), &[grads.len()]));
    }
    for (param, grad) in params.iter().zip(grads) {
        if let Some(dims) = grad.as_ref().map(Tensor::dims).filter(|dims| *dims != [param.elements()]) {
            let what = format!("gradient of {}", param.name);
            return Err(Error::shape(what, format!("[{}]", param.elements()), &dims));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::host::with_slice;
    use crate::weights::Unread;
    use burn::tensor::Device;

    fn params() -> ParamSet {
        let device = Device::flex();
        let mut params = ParamSet::default();
        params.insert_data("weight", &[1, 2], vec![1.0, -2.0], &device).expect("new");
        params.insert_data("norm", &[2], vec![1.0, 1.0], &device).expect("new");
        params
    }

    #[expect(clippy::unnecessary_wraps, reason = "a gradient as the optimizer takes it")]
    fn vector(values: [f32; 2]) -> Option<Tensor<1>> {
        Some(Tensor::from_floats(values, &Device::flex()))
    }

    fn values(params: &ParamSet, name: &str) -> Vec<f32> {
        with_slice(&params.by_name(name).expect("present").value, <[f32]>::to_vec)
    }

    fn adamw(config: AdamWConfig) -> AdamW {
        AdamW::new(config).expect("valid")
    }

    #[test]
    fn the_first_step_moves_by_the_rate_against_the_sign() {
        let (mut params, mut optimizer) = (params(), adamw(AdamWConfig::default()));
        optimizer.step(&mut params, &[vector([4.0, -0.5]), None], 0.1, 1.0).expect("same shapes");
        let moved = values(&params, "weight");
        assert!((moved[0] - 0.9).abs() < 1e-6 && (moved[1] + 1.9).abs() < 1e-6, "{moved:?}");
        assert_eq!(values(&params, "norm"), [1.0, 1.0]);
    }

    #[test]
    fn decay_spares_norms_and_biases() {
        let config = AdamWConfig { weight_decay: 0.5, ..AdamWConfig::default() };
        let (mut params, mut optimizer) = (params(), adamw(config));
        let zero = [vector([0.0; 2]), vector([0.0; 2])];
        optimizer.step(&mut params, &zero, 0.1, 1.0).expect("same shapes");
        assert_eq!(values(&params, "norm"), [1.0, 1.0]);
        assert_eq!(values(&params, "weight"), [0.95, -1.9]);
    }

    #[test]
    fn a_handle_held_elsewhere_keeps_its_version() {
        let (mut params, mut optimizer) = (params(), adamw(AdamWConfig::default()));
        let engine = params.clone();
        optimizer.step(&mut params, &[vector([1.0, 1.0]), None], 0.1, 1.0).expect("same shapes");
        assert_eq!(values(&engine, "weight"), [1.0, -2.0]);
        assert_ne!(values(&params, "weight"), [1.0, -2.0]);
    }

    #[test]
    fn restored_moments_continue_bitwise() {
        let config = AdamWConfig { amsgrad: true, ..AdamWConfig::default() };
        let (mut params, mut optimizer) = (params(), adamw(config));
        let grads = [vector([0.3, -0.7]), None];
        optimizer.step(&mut params, &grads, 0.1, 1.0).expect("same shapes");
        let host = |(name, shape, tensor): (String, Vec<usize>, Tensor<1>)| {
            (name, (shape, Unread::held(with_slice(&tensor, <[f32]>::to_vec))))
        };
        let saved = optimizer.tensors(&params).into_iter().map(host).collect();
        let mut resumed = adamw(config);
        resumed.restore(&params, saved, &optimizer.steps(&params)).expect("its own state");
        let mut copy = params.clone();
        optimizer.step(&mut params, &grads, 0.1, 1.0).expect("same shapes");
        resumed.step(&mut copy, &grads, 0.1, 1.0).expect("same shapes");
        assert_eq!(values(&params, "weight"), values(&copy, "weight"));
    }

    #[test]
    fn state_of_another_model_is_refused() {
        let mut optimizer = adamw(AdamWConfig::default());
        let stray = BTreeMap::from([("exp_avg.other".to_string(), (vec![1], Unread::held(vec![0.0])))]);
        let message = optimizer.restore(&params(), stray, &BTreeMap::new()).expect_err("stray").to_string();
        assert!(message.contains("exp_avg.other"), "{message}");
        let steps = BTreeMap::from([("weight".to_string(), 3)]);
        let message = optimizer.restore(&params(), BTreeMap::new(), &steps).expect_err("absent").to_string();
        assert!(message.contains("exp_avg.weight"), "{message}");
    }

    #[test]
    fn a_gradient_of_another_size_moves_nothing() {
        let (mut params, mut optimizer) = (params(), adamw(AdamWConfig::default()));
        let wrong = [vector([1.0, 1.0]), Some(Tensor::from_floats([1.0], &Device::flex()))];
        let message = optimizer.step(&mut params, &wrong, 0.1, 1.0).expect_err("size").to_string();
        assert!(message.contains("norm"), "{message}");
        assert_eq!(values(&params, "weight"), [1.0, -2.0]);
    }
}
