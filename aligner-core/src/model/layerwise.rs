//! Gradient checkpointing by layer: only the residual stream between layers is kept, and each layer's
//! activations are computed again as its backward pass comes.

use burn::tensor::Tensor;

use super::CausalLm;
use super::exec::Tensors;
use super::llama::Layout;
use crate::policy::finite_sum;
use crate::{Batch, Gradients, LossFn, Needs, ParamSet, Policy, Result};

/// As `Policy::accumulate`, at the memory of one layer's activations.
pub(super) fn accumulate(
    model: &CausalLm,
    micro: &[Batch],
    needs: Needs,
    loss: &LossFn<'_>,
) -> Result<Gradients> {
    let mut all = Gradients::default();
    for batch in micro {
        let work = model.work(batch)?;
        let (body, layout) = (model.body(), &work.layout);
        // x[i] is the input of layer i, without a graph.
        let mut x = vec![body.embed(model.params(), &work.tokens, model.shard())?];
        for index in body.layers() {
            let input = x[x.len() - 1].clone();
            x.push(body.layer(&mut tensors(model, layout), index, input)?);
        }
        let mut sums = vec![None; model.params().len()];

        let top = Piece::new(model, x.pop());
        let hidden = body.norm(top.model.params(), top.input())?;
        let out = loss(&top.model.read(hidden, &work, batch, needs)?, batch)?;
        let loss_sum = finite_sum(&out.sum, batch)?;
        let mut of_x = top.backward(&out.sum, &mut sums);

        for index in body.layers().rev() {
            let stage = Piece::new(model, x.pop());
            let output = body.layer(&mut tensors(&stage.model, layout), index, stage.input())?;
            of_x = stage.backward(&seeded(output, of_x), &mut sums);
        }
        // A frozen embedding has no graph to go back through.
        if model.params().get(body.embedding_id()?).trainable {
            let bottom = Piece::new(model, None);
            let output = body.embed(bottom.model.params(), &work.tokens, model.shard())?;
            bottom.backward(&seeded(output, of_x), &mut sums);
        }
        all.add(sums, loss_sum, &out.metrics);
    }
    Ok(all)
}

fn tensors<'a>(model: &'a CausalLm, layout: &'a Layout) -> Tensors<'a> {
    Tensors::new(model.params(), layout, model.shard(), model.config().num_layers)
}

/// A scalar whose gradient with respect to `output` is `grad`.
fn seeded(output: Tensor<2>, grad: Option<Tensor<2>>) -> Tensor<1> {
    match grad {
        Some(grad) => (output * Tensor::from_inner(grad)).sum(),
        // Nothing above uses the output: its gradient is zero.
        None => (output * 0.0).sum(),
    }
}

/// A part of the model with a graph of its own.
struct Piece {
    model: CausalLm,
    x: Option<Tensor<2>>,
}

impl Piece {
    fn new(model: &CausalLm, x: Option<Tensor<2>>) -> Self {
        Self { model: model.tracked(), x: x.map(|x| Tensor::from_inner(x).require_grad()) }
    }

    fn input(&self) -> Tensor<2> {
        self.x.clone().expect("every stage above the embedding has an input")
    }

    /// Adds the gradients of this stage's parameters to `sums`; returns that of its input.
    fn backward(&self, scalar: &Tensor<1>, sums: &mut [Option<Tensor<1>>]) -> Option<Tensor<2>> {
        let mut grads = scalar.backward();
        let params: &ParamSet = self.model.params();
        for (param, sum) in params.iter().zip(sums) {
            if let Some(grad) = param.value.grad_remove(&mut grads) {
                *sum = Some(match sum.take() {
                    Some(sum) => sum + grad,
                    None => grad,
                });
            }
        }
        self.x.as_ref()?.grad_remove(&mut grads)
    }
}
