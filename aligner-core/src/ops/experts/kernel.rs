//! The CPU kernel: experts are tasks, and large products of one expert spread over threads themselves.

use std::sync::{Arc, OnceLock};

use rayon::prelude::*;

use crate::ops::WeightOperand;
use crate::ops::gate::{self, Activation};
use crate::ops::gemm::{Mat, Output, Side, gemm};
use crate::ops::host::HostTensor;
use crate::ops::kernel::{Grad, INPUTS, Kernel, NO_GRADS, unfilled};
use crate::ops::rows::PackedWeight;
use crate::ops::tie::Left;

#[derive(Debug)]
pub(super) struct Experts {
    hidden: usize,
    width: usize,
    /// Rows of each expert.
    counts: Vec<usize>,
    /// Gate, up and down of each expert, by handle.
    weights: Vec<Handle>,
    activation: Activation,
    /// Where the gradients of the weights go.
    left: Left,
    /// The outputs of gate and up, `[slots, width]` each; written by the forward pass.
    inner: OnceLock<[Vec<f32>; 2]>,
}

#[derive(Debug)]
enum Handle {
    Values(HostTensor),
    Packed(Arc<PackedWeight>),
}

impl Handle {
    fn side(&self, shape: [usize; 2]) -> Side<'_> {
        match self {
            Self::Values(values) => Mat::new(values.as_slice(), shape[0], shape[1]).into(),
            Self::Packed(packed) => Side::packed(packed.view()),
        }
    }
}

/// One expert's part of the work.
struct Task<'a> {
    /// Gate, up and down.
    weights: [Side<'a>; 3],
    rows: usize,
    x: &'a [f32],
}

impl Experts {
    pub(super) fn new(
        [hidden, width]: [usize; 2],
        counts: &[usize],
        weights: &[WeightOperand<1>],
        activation: Activation,
        left: Left,
    ) -> Self {
        let handle = |weight: &WeightOperand<1>| match weight {
            WeightOperand::Values(values) => Handle::Values(HostTensor::without_graph(values)),
            WeightOperand::Packed(packed) => Handle::Packed(packed.clone()),
        };
        let weights = weights.iter().map(handle).collect();
        Self { hidden, width, counts: counts.to_vec(), weights, activation, left, inner: OnceLock::new() }
    }

    /// The experts with their rows of `x`, those without rows too.
    fn tasks<'a>(&'a self, x: &'a [f32]) -> Vec<Task<'a>> {
        let parts = split(x, &self.counts, self.hidden);
        let weights = self.weights.as_chunks::<3>().0;
        let (hidden, width) = (self.hidden, self.width);
        let task = |((x, [gate, up, down]), &rows): ((&'a [f32], &'a [Handle; 3]), &usize)| Task {
            weights: [gate.side([width, hidden]), up.side([width, hidden]), down.side([hidden, width])],
            rows,
            x,
        };
        parts.into_iter().zip(weights).zip(&self.counts).map(task).collect()
    }

    fn forward_one(&self, task: &Task<'_>, [gate, up, out]: [&mut [f32]; 3]) {
        let (rows, hidden, width) = (task.rows, self.hidden, self.width);
        let [of_gate, of_up, of_down] = task.weights;
        let x = Mat::new(task.x, rows, hidden);
        gemm(x, of_gate.t(), gate, Output::Overwrite);
        gemm(x, of_up.t(), up, Output::Overwrite);
        let mut product = gate.to_vec();
        gate::forward_in_place(&mut product, up, self.activation);
        gemm(Mat::new(&product, rows, width), of_down.t(), out, Output::Overwrite);
    }

    /// The gradients of gate, up and down where they are wanted; that of the rows into `of_x`.
    fn backward_one(
        &self,
        task: &Task<'_>,
        [gate, up, grad]: [&[f32]; 3],
        of_x: &mut [f32],
        wanted: [bool; 2],
    ) -> [Vec<f32>; 3] {
        let (rows, hidden, width) = (task.rows, self.hidden, self.width);
        let [by_gate, by_up, by_down] = task.weights;
        let matrix = Mat::new(grad, rows, hidden);
        let mut of_product = unfilled(rows * width);
        gemm(matrix, by_down, &mut of_product, Output::Overwrite);
        let (mut of_gate, mut of_up) = (unfilled(rows * width), unfilled(rows * width));
        gate::backward(gate, up, &of_product, self.activation, &mut of_gate, &mut of_up);
        let [of_gate, of_up] = [&of_gate, &of_up].map(|of| Mat::new(of, rows, width));
        if wanted[0] {
            gemm(of_gate, by_gate, of_x, Output::Overwrite);
            gemm(of_up, by_up, of_x, Output::Add);
        }
        if !wanted[1] {
            return [const { Vec::new() }; 3];
        }
        let mut product = gate.to_vec();
        gate::forward_in_place(&mut product, up, self.activation);
        let x = Mat::new(task.x, rows, hidden);
        let mut grads = [(); 3].map(|()| unfilled(width * hidden));
        let [gate, up, down] = &mut grads;
        gemm(of_gate.t(), x, gate, Output::Overwrite);
        gemm(of_up.t(), x, up, Output::Overwrite);
        gemm(matrix.t(), Mat::new(&product, rows, width), down, Output::Overwrite);
        grads
    }
}

/// The rows of each expert.
fn split<'a>(mut values: &'a [f32], counts: &[usize], columns: usize) -> Vec<&'a [f32]> {
    let part = |&count: &usize| {
        let (part, rest) = values.split_at(count * columns);
        values = rest;
        part
    };
    counts.iter().map(part).collect()
}

fn split_mut<'a>(mut values: &'a mut [f32], counts: &[usize], columns: usize) -> Vec<&'a mut [f32]> {
    let part = |&count: &usize| {
        let (part, rest) = std::mem::take(&mut values).split_at_mut(count * columns);
        values = rest;
        part
    };
    counts.iter().map(part).collect()
}

impl Kernel for Experts {
    fn shape(&self) -> Vec<usize> {
        vec![self.counts.iter().sum(), self.hidden]
    }

    fn forward(&self, inputs: &[&[f32]]) -> Vec<f32> {
        let slots = self.counts.iter().sum::<usize>();
        let mut inner = [(); 2].map(|()| unfilled(slots * self.width));
        let mut out = unfilled(slots * self.hidden);
        let [gate, up] = inner.each_mut().map(|inner| split_mut(inner, &self.counts, self.width));
        let outs = split_mut(&mut out, &self.counts, self.hidden);
        let work: Vec<_> =
            self.tasks(inputs[0]).into_iter().zip(gate.into_iter().zip(up).zip(outs)).collect();
        work.into_par_iter()
            .filter(|(task, _)| task.rows > 0)
            .for_each(|(task, ((gate, up), out))| self.forward_one(&task, [gate, up, out]));
        // A kernel object serves one call, so the cell is empty.
        let _ = self.inner.set(inner);
        out
    }

    fn backward(&self, inputs: &[&[f32]], _: &[f32], grad: &[f32], wanted: [bool; INPUTS]) -> [Grad; INPUTS] {
        let [gate, up] = self.inner.get().expect("the forward pass ran first");
        let mut of_x = unfilled(if wanted[0] { inputs[0].len() } else { 0 });
        let columns = if wanted[0] { self.hidden } else { 0 };
        let of_rows = split_mut(&mut of_x, &self.counts, columns);
        let [gate, up] = [gate, up].map(|inner| split(inner, &self.counts, self.width));
        let grads = split(grad, &self.counts, self.hidden);
        let inner = gate.into_iter().zip(up).zip(grads);
        let work: Vec<_> = self.tasks(inputs[0]).into_iter().zip(inner).zip(of_rows).collect();
        let of_weights = work.into_par_iter().map(|((task, ((gate, up), grad)), of_x)| {
            if task.rows == 0 {
                let elements = if wanted[1] { self.width * self.hidden } else { 0 };
                return [(); 3].map(|()| vec![0.0; elements]);
            }
            self.backward_one(&task, [gate, up, grad], of_x, [wanted[0], wanted[1]])
        });
        let of_weights: Vec<[Vec<f32>; 3]> = of_weights.collect();
        let mut grads = NO_GRADS;
        if wanted[0] {
            grads[0] = Grad::Data(of_x);
        }
        if wanted[1] {
            self.left.leave(of_weights.into_iter().flatten().collect());
            grads[1] = Grad::Data(vec![0.0]);
        }
        grads
    }
}
