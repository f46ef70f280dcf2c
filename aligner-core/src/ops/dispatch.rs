//! Rows to their experts' slots, and back as weighted sums.

use std::sync::Arc;

use burn::tensor::Tensor;
use rayon::prelude::*;

use super::Routes;
use super::index::index;
use super::kernel::{Grad, INPUTS, Kernel, NO_GRADS, Shared, on_host, run, unfilled};
use super::simd::{add, dot, vectorized};
use crate::{Error, Result};

/// Each row of `x` `[rows, hidden]` in the slots of its experts: `[rows * per_row, hidden]`, sorted by expert.
///
/// # Errors
/// [`Error::Shape`] where `x` does not have the routes' rows.
pub fn dispatch(x: Tensor<2>, routes: &Arc<Routes>) -> Result<Tensor<2>> {
    let [rows, hidden] = x.dims();
    if rows != routes.routed() {
        return Err(Error::shape("rows for experts", format!("[{}, hidden]", routes.routed()), &x.dims()));
    }
    if !on_host(&x) {
        let rows = index(&routes.rows, &x.device());
        return Ok(x.select(0, rows));
    }
    Ok(run(Dispatch { routes: routes.clone(), hidden }, vec![x.into_dispatch()]))
}

/// The weighted sum of what each row's experts gave, plus `residual` `[rows, hidden]`: `slots` is
/// `[rows * per_row, hidden]` as [`dispatch`] orders them, `weights` is `[rows, per_row]`.
///
/// A row's experts are added in the order of its choice, whatever the other rows chose.
///
/// # Errors
/// [`Error::Shape`] where the operands are not those of the routes.
pub fn combine(
    slots: Tensor<2>,
    weights: Tensor<2>,
    residual: Option<Tensor<2>>,
    routes: &Arc<Routes>,
) -> Result<Tensor<2>> {
    let (rows, hidden) = (routes.routed(), slots.dims()[1]);
    for (what, got, expected) in [
        ("slots of experts", slots.dims(), [routes.rows.len(), hidden]),
        ("weights of experts", weights.dims(), [rows, routes.per_row]),
        ("residual of experts", residual.as_ref().map_or([rows, hidden], Tensor::dims), [rows, hidden]),
    ] {
        if got != expected {
            return Err(Error::shape(what, format!("{expected:?}"), &got));
        }
    }
    if !on_host(&slots) {
        return Ok(reference(slots, weights, residual, routes));
    }
    let kernel = Combine { routes: routes.clone(), hidden };
    let mut operands = vec![slots.into_dispatch(), weights.into_dispatch()];
    operands.extend(residual.map(Tensor::into_dispatch));
    Ok(run(kernel, operands))
}

/// The composition of Burn operations.
pub fn reference(
    slots: Tensor<2>,
    weights: Tensor<2>,
    residual: Option<Tensor<2>>,
    routes: &Routes,
) -> Tensor<2> {
    let (rows, hidden, each) = (routes.routed(), slots.dims()[1], routes.per_row);
    let own = index(&routes.slots, &slots.device());
    let own = slots.select(0, own).reshape([rows, each, hidden]);
    let sum = (own * weights.unsqueeze_dim::<3>(2)).sum_dim(1).reshape([rows, hidden]);
    match residual {
        Some(residual) => sum + residual,
        None => sum,
    }
}

#[derive(Debug)]
struct Dispatch {
    routes: Arc<Routes>,
    hidden: usize,
}

impl Kernel for Dispatch {
    fn shape(&self) -> Vec<usize> {
        vec![self.routes.rows.len(), self.hidden]
    }

    fn forward(&self, inputs: &[&[f32]]) -> Vec<f32> {
        let mut out = unfilled(self.routes.rows.len() * self.hidden);
        out.par_chunks_mut(self.hidden.max(1)).zip(&self.routes.rows).for_each(|(out, &row)| {
            out.copy_from_slice(&inputs[0][row as usize * self.hidden..][..self.hidden]);
        });
        out
    }

    fn backward(&self, inputs: &[&[f32]], _: &[f32], grad: &[f32], _: [bool; INPUTS]) -> [Grad; INPUTS] {
        let mut of_x = vec![0.0; inputs[0].len()];
        (of_x
            .par_chunks_mut(self.hidden.max(1))
            .zip(self.routes.slots.par_chunks_exact(self.routes.per_row)))
        .for_each(|(of_x, slots)| {
            for &slot in slots {
                add(of_x, &grad[slot as usize * self.hidden..][..self.hidden]);
            }
        });
        let mut grads = NO_GRADS;
        grads[0] = Grad::Data(of_x);
        grads
    }
}

#[derive(Debug)]
struct Combine {
    routes: Arc<Routes>,
    hidden: usize,
}

vectorized! {
    /// `sum += weight values`.
    pub fn add_scaled(sum: &mut [f32], weight: f32, values: &[f32]) {
        for (sum, value) in sum.iter_mut().zip(values) {
            *sum += weight * value;
        }
    }
}

vectorized! {
    fn scale(out: &mut [f32], weight: f32, values: &[f32]) {
        for (out, value) in out.iter_mut().zip(values) {
            *out = weight * value;
        }
    }
}

impl Kernel for Combine {
    fn shape(&self) -> Vec<usize> {
        vec![self.routes.routed(), self.hidden]
    }

    fn forward(&self, inputs: &[&[f32]]) -> Vec<f32> {
        let (values, weights, each) = (inputs[0], inputs[1], self.routes.per_row);
        let mut out = match inputs.get(2) {
            Some(residual) => residual.to_vec(),
            None => vec![0.0; self.routes.routed() * self.hidden],
        };
        (out.par_chunks_mut(self.hidden.max(1)).zip(weights.par_chunks_exact(each)))
            .zip(self.routes.slots.par_chunks_exact(each))
            .for_each(|((out, weights), slots)| {
                for (&weight, &slot) in weights.iter().zip(slots) {
                    add_scaled(out, weight, &values[slot as usize * self.hidden..][..self.hidden]);
                }
            });
        out
    }

    fn backward(&self, inputs: &[&[f32]], _: &[f32], grad: &[f32], _: [bool; INPUTS]) -> [Grad; INPUTS] {
        let (values, weights, each) = (inputs[0], inputs[1], self.routes.per_row);
        let (mut of_values, mut of_weights) = (unfilled(values.len()), unfilled(weights.len()));
        let shared = Shared::new(&mut of_values);
        (of_weights.par_chunks_exact_mut(each).zip(weights.par_chunks_exact(each)))
            .zip(self.routes.slots.par_chunks_exact(each).zip(grad.par_chunks_exact(self.hidden.max(1))))
            .for_each(|((of_weights, weights), (slots, grad))| {
                for ((of_weight, &weight), &slot) in of_weights.iter_mut().zip(weights).zip(slots) {
                    let start = slot as usize * self.hidden;
                    *of_weight = dot(grad, &values[start..][..self.hidden]);
                    // SAFETY: a slot is one row's choice, so no other task has it.
                    scale(unsafe { shared.part(start, self.hidden) }, weight, grad);
                }
            });
        let mut grads = NO_GRADS;
        grads[0] = Grad::Data(of_values);
        grads[1] = Grad::Data(of_weights);
        if inputs.len() > 2 {
            grads[2] = Grad::Same;
        }
        grads
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{leaf, relative_error, values, weighted_sum};

    #[test]
    fn values_and_gradients_match_the_composition() {
        for (rows, experts, each, with_residual) in [(1, 3, 2, false), (70, 5, 3, true)] {
            let routes = Arc::new(Routes::new(&values(rows * experts, 9), experts, each).unwrap());
            let (x, weights, residual) = (leaf([rows, 37], 1), leaf([rows, each], 2), leaf([rows, 37], 3));
            let residual_of = || with_residual.then(|| residual.clone());
            let sent = dispatch(x.clone(), &routes).unwrap();
            let fused = combine(sent.clone() * 2.0, weights.clone(), residual_of(), &routes).unwrap();
            let plain_sent = x.clone().select(0, index(&routes.rows, &x.device()));
            let plain = reference(plain_sent.clone() * 2.0, weights.clone(), residual_of(), &routes);
            assert!(relative_error(&sent, &plain_sent) < 1e-7);
            assert!(relative_error(&fused, &plain) < 1e-6);
            let of_fused = weighted_sum(fused, 4).backward();
            let of_plain = weighted_sum(plain, 4).backward();
            for input in [&x, &weights].into_iter().chain(with_residual.then_some(&residual)) {
                let (got, expected) = (input.grad(&of_fused).unwrap(), input.grad(&of_plain).unwrap());
                assert!(relative_error(&got, &expected) < 2e-6);
            }
        }
    }

    #[test]
    fn operands_of_other_routes_are_refused() {
        let routes = Arc::new(Routes::new(&values(8, 1), 4, 2).unwrap());
        assert!(dispatch(leaf([3, 4], 1), &routes).unwrap_err().to_string().contains("[2, hidden]"));
        let combined = combine(leaf([4, 4], 1), leaf([2, 3], 2), None, &routes);
        assert!(combined.unwrap_err().to_string().contains("weights"));
    }
}
