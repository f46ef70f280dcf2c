//! Token embedding: rows of a table, with a dense gradient.

use burn::tensor::Tensor;

use super::index::index;
use super::kernel::{Grad, INPUTS, Kernel, NO_GRADS, on_host, run, unfilled};
use super::simd::add;
use crate::{Error, Result};

/// Rows `ids` of `weight` `[vocab, hidden]`: `[ids, hidden]`.
///
/// # Errors
/// [`Error::Invalid`] names the first id past the vocabulary.
pub fn embedding(weight: Tensor<2>, ids: &[u32]) -> Result<Tensor<2>> {
    let [vocab, hidden] = weight.dims();
    if let Some(at) = ids.iter().position(|&id| id as usize >= vocab) {
        let id = ids[at];
        return Err(Error::Invalid(format!(
            "token {at} of the batch is {id}, but the vocabulary has {vocab}"
        )));
    }
    if !on_host(&weight) {
        return Ok(reference(weight, ids));
    }
    Ok(run(Embedding { ids: ids.to_vec(), hidden }, vec![weight.into_dispatch()]))
}

/// The composition of Burn operations.
pub fn reference(weight: Tensor<2>, ids: &[u32]) -> Tensor<2> {
    let ids = index(ids, &weight.device());
    weight.select(0, ids)
}

#[derive(Debug)]
struct Embedding {
    ids: Vec<u32>,
    hidden: usize,
}

impl Embedding {
    fn row(&self, id: u32) -> std::ops::Range<usize> {
        let start = id as usize * self.hidden;
        start..start + self.hidden
    }
}

impl Kernel for Embedding {
    fn shape(&self) -> Vec<usize> {
        vec![self.ids.len(), self.hidden]
    }

    fn forward(&self, inputs: &[&[f32]]) -> Vec<f32> {
        let mut out = unfilled(self.ids.len() * self.hidden);
        for (out, &id) in out.chunks_exact_mut(self.hidden).zip(&self.ids) {
            out.copy_from_slice(&inputs[0][self.row(id)]);
        }
        out
    }

    fn backward(&self, inputs: &[&[f32]], _: &[f32], grad: &[f32], _: [bool; INPUTS]) -> [Grad; INPUTS] {
        let mut of_weight = vec![0.0; inputs[0].len()];
        for (grad, &id) in grad.chunks_exact(self.hidden).zip(&self.ids) {
            add(&mut of_weight[self.row(id)], grad);
        }
        let mut grads = NO_GRADS;
        grads[0] = Grad::Data(of_weight);
        grads
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{leaf, relative_error, weighted_sum};

    #[test]
    fn repeated_ids_add_their_gradients() {
        let weight = leaf([6, 4], 1);
        let ids = [5, 0, 5, 5];
        let fused = embedding(weight.clone(), &ids).unwrap();
        let plain = reference(weight.clone(), &ids);
        assert!(relative_error(&fused, &plain) < 1e-7);
        let of_fused = weight.grad(&weighted_sum(fused, 2).backward()).unwrap();
        let of_plain = weight.grad(&weighted_sum(plain, 2).backward()).unwrap();
        assert!(relative_error(&of_fused, &of_plain) < 1e-6);
    }

    #[test]
    fn an_id_past_the_vocabulary_is_named() {
        let message = embedding(leaf([6, 4], 1), &[1, 6]).unwrap_err().to_string();
        assert!(message.contains("token 1") && message.contains('6'), "{message}");
    }
}
