//! Gradients for more tensors than a kernel takes.
//!
//! Burn's nodes have a fixed number of parents, and a mixture has hundreds of weights. Here they hang on a chain
//! of nodes that compute nothing: the operation takes the chain's end as one input, leaves the weights' gradients
//! in a cell as its backward pass runs, and each node of the chain, whose turn comes after, hands them on.

use std::sync::{Arc, Mutex};

use burn::tensor::Tensor;

use super::kernel::{Grad, INPUTS, Kernel, NO_GRADS, run};

/// Where an operation leaves the gradients of tied tensors, in their order.
#[derive(Debug, Clone, Default)]
pub(super) struct Left(Arc<Mutex<Vec<Option<Vec<f32>>>>>);

impl Left {
    /// Leaves all gradients.
    pub(super) fn leave(&self, gradients: Vec<Vec<f32>>) {
        if let Ok(mut left) = self.0.lock() {
            *left = gradients.into_iter().map(Some).collect();
        }
    }

    fn take(&self, at: usize) -> Option<Vec<f32>> {
        self.0.lock().ok()?.get_mut(at)?.take()
    }
}

/// Ties tensors of the CPU device into one input `[1]` of an operation, which is tracked where one of them is.
pub(super) fn tie(tensors: &[Tensor<1>], left: &Left) -> Tensor<1> {
    let mut end: Option<Tensor<1>> = None;
    for (at, part) in tensors.chunks(INPUTS - 1).enumerate() {
        let knot = Knot { first: at * (INPUTS - 1), count: part.len(), left: left.clone() };
        let inputs = part.iter().cloned().chain(end.take());
        end = Some(run(knot, inputs.map(Tensor::into_dispatch).collect()));
    }
    end.unwrap_or_else(|| Tensor::zeros([1], &burn::tensor::Device::flex()))
}

#[derive(Debug)]
struct Knot {
    first: usize,
    count: usize,
    left: Left,
}

impl Kernel for Knot {
    fn shape(&self) -> Vec<usize> {
        vec![1]
    }

    fn forward(&self, _: &[&[f32]]) -> Vec<f32> {
        vec![0.0]
    }

    fn backward(&self, inputs: &[&[f32]], _: &[f32], _: &[f32], wanted: [bool; INPUTS]) -> [Grad; INPUTS] {
        let mut grads = NO_GRADS;
        for (at, grad) in grads.iter_mut().enumerate().take(self.count) {
            let own = self.left.take(self.first + at);
            if let Some(own) = own.filter(|_| wanted[at]) {
                *grad = Grad::Data(own);
            }
        }
        if inputs.len() > self.count {
            // The next knot's turn comes with a gradient, whatever it is.
            grads[self.count] = Grad::Data(vec![0.0]);
        }
        grads
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::host::to_vec;
    use crate::ops::testing::leaf;

    /// Sums its first input; its other gradients are their places.
    #[derive(Debug)]
    struct Places {
        count: usize,
        left: Left,
    }

    impl Kernel for Places {
        fn shape(&self) -> Vec<usize> {
            vec![1]
        }

        fn forward(&self, inputs: &[&[f32]]) -> Vec<f32> {
            vec![inputs[0].iter().sum()]
        }

        fn backward(
            &self,
            inputs: &[&[f32]],
            _: &[f32],
            grad: &[f32],
            wanted: [bool; INPUTS],
        ) -> [Grad; INPUTS] {
            assert!(wanted[1], "the tie is tracked");
            self.left.leave((0..self.count).map(|at| vec![at as f32 * grad[0]; 2]).collect());
            let mut grads = NO_GRADS;
            grads[0] = Grad::Data(vec![grad[0]; inputs[0].len()]);
            grads[1] = Grad::Data(vec![0.0]);
            grads
        }
    }

    #[test]
    fn each_of_many_tensors_gets_its_own_gradient_also_through_other_operations() {
        let x: Tensor<1> = leaf([3], 1);
        let leaves: Vec<Tensor<1>> = (0..13).map(|at| leaf([2], at)).collect();
        // Not leaves themselves: the gradients go on.
        let weights: Vec<Tensor<1>> = leaves.iter().map(|leaf| leaf.clone() * 2.0).collect();
        let left = Left::default();
        let tied = tie(&weights, &left);
        let kernel = Places { count: weights.len(), left };
        let out: Tensor<1> = run(kernel, vec![x.clone().into_dispatch(), tied.into_dispatch()]);
        let grads = (out * 3.0).sum().backward();
        assert_eq!(to_vec(&x.grad(&grads).unwrap()), [3.0; 3]);
        for (at, leaf) in leaves.iter().enumerate() {
            assert_eq!(to_vec(&leaf.grad(&grads).unwrap()), [6.0 * at as f32; 2], "tensor {at}");
        }
    }
}
