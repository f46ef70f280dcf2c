//! The update of one parameter, as a CPU kernel and as Burn operations.

use burn::tensor::Tensor;
use rayon::prelude::*;

use crate::ops::host::{update_slice, with_slice};
use crate::ops::kernel::on_host;
use crate::ops::simd::vectorized;

/// Elements that one task updates: four arrays of it fit the second-level cache.
const CHUNK: usize = 1 << 15;

/// One step's constants for one parameter.
#[derive(Debug, Clone, Copy)]
pub(super) struct Coefficients {
    /// Multiplies the gradient.
    pub scale: f32,
    /// What the decay leaves of the parameter.
    pub keep: f32,
    /// Weight of the new gradient in the first moment.
    pub first_new: f32,
    /// Weight of the old second moment.
    pub second_old: f32,
    /// Weight of the new squared gradient in the second moment.
    pub second_new: f32,
    /// Learning rate over the first moment's bias correction.
    pub rate: f32,
    /// Root of the second moment's bias correction.
    pub second_correction: f32,
    /// Added to the denominator.
    pub eps: f32,
}

/// First and second moment, and the largest second moment where it is kept; all `[elements]`.
pub(super) type MomentsMut<'a> = (&'a mut Tensor<1>, &'a mut Tensor<1>, Option<&'a mut Tensor<1>>);

/// Updates a parameter and its moments `[elements]` from its gradient `[elements]`.
pub(super) fn update(
    param: &mut Tensor<1>,
    grad: &Tensor<1>,
    (first, second, largest): MomentsMut<'_>,
    coefficients: &Coefficients,
) {
    if !on_host(param) || !on_host(grad) {
        return update_on_device(param, grad, (first, second, largest), coefficients);
    }
    with_slice(grad, |g| {
        update_slice(param, |p| {
            update_slice(first, |m| {
                update_slice(second, |v| match largest {
                    Some(largest) => update_slice(largest, |most| amsgrad(p, g, m, v, most, coefficients)),
                    None => in_chunks(p, g, m, v, coefficients),
                });
            });
        });
    });
}

fn in_chunks(p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], coefficients: &Coefficients) {
    if p.len() <= CHUNK {
        return fused(p, g, m, v, coefficients);
    }
    (p.par_chunks_mut(CHUNK), g.par_chunks(CHUNK), m.par_chunks_mut(CHUNK), v.par_chunks_mut(CHUNK))
        .into_par_iter()
        .for_each(|(p, g, m, v)| fused(p, g, m, v, coefficients));
}

vectorized! {
    /// The order of operations is torch's, so that trajectories agree to the last bits.
    fn fused(p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], c: &Coefficients) {
        for (((p, &g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
            let g = g * c.scale;
            *m += c.first_new * (g - *m);
            *v = *v * c.second_old + c.second_new * g * g;
            let denominator = v.sqrt() / c.second_correction + c.eps;
            *p = *p * c.keep - c.rate * *m / denominator;
        }
    }
}

/// The variant that few use: not worth a second vectorised body.
fn amsgrad(p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], most: &mut [f32], c: &Coefficients) {
    for ((((p, &g), m), v), most) in p.iter_mut().zip(g).zip(m).zip(v).zip(most) {
        let g = g * c.scale;
        *m += c.first_new * (g - *m);
        *v = *v * c.second_old + c.second_new * g * g;
        *most = most.max(*v);
        let denominator = most.sqrt() / c.second_correction + c.eps;
        *p = *p * c.keep - c.rate * *m / denominator;
    }
}

fn update_on_device(
    param: &mut Tensor<1>,
    grad: &Tensor<1>,
    (first, second, largest): MomentsMut<'_>,
    c: &Coefficients,
) {
    let g = grad.clone() * c.scale;
    *first = first.clone() + (g.clone() - first.clone()) * c.first_new;
    *second = second.clone() * c.second_old + g.square() * c.second_new;
    let denominator = match largest {
        Some(largest) => {
            *largest = largest.clone().max_pair(second.clone());
            largest.clone()
        }
        None => second.clone(),
    };
    let denominator = denominator.sqrt() / c.second_correction + c.eps;
    *param = param.clone() * c.keep - first.clone() * c.rate / denominator;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::host::to_vec;
    use burn::tensor::{Device, TensorData};

    const COEFFICIENTS: Coefficients = Coefficients {
        scale: 0.5,
        keep: 0.99,
        first_new: 0.1,
        second_old: 0.95,
        second_new: 0.05,
        rate: 0.02,
        second_correction: 0.4,
        eps: 1e-8,
    };

    /// A parameter, a gradient and three moments that span several chunks.
    fn tensors() -> [Tensor<1>; 5] {
        let len = 2 * CHUNK + 37;
        [0.1, 0.2, 0.3, 0.4, 0.5].map(|phase: f32| {
            let values: Vec<f32> = (0..len).map(|at| (at as f32 * phase).sin().abs() + 0.01).collect();
            Tensor::from_data(TensorData::from(values.as_slice()), &Device::flex())
        })
    }

    #[test]
    fn the_kernel_equals_burn_operations() {
        for with_largest in [false, true] {
            let [mut p, g, mut m, mut v, mut most] = tensors();
            update(&mut p, &g, (&mut m, &mut v, with_largest.then_some(&mut most)), &COEFFICIENTS);
            let [mut p2, g, mut m2, mut v2, mut most2] = tensors();
            let moments = (&mut m2, &mut v2, with_largest.then_some(&mut most2));
            update_on_device(&mut p2, &g, moments, &COEFFICIENTS);
            for (one, other) in [(p, p2), (m, m2), (v, v2), (most, most2)] {
                let gaps = to_vec(&one).into_iter().zip(to_vec(&other)).map(|(a, b)| (a - b).abs());
                assert!(gaps.fold(0.0, f32::max) < 1e-6);
            }
        }
    }

    #[test]
    fn the_update_is_in_place() {
        let [mut p, g, mut m, mut v, _] = tensors();
        let address = |tensor: &Tensor<1>| with_slice(tensor, |values| values.as_ptr() as usize);
        let before = [address(&p), address(&m), address(&v)];
        update(&mut p, &g, (&mut m, &mut v, None), &COEFFICIENTS);
        assert_eq!([address(&p), address(&m), address(&v)], before);
    }
}
