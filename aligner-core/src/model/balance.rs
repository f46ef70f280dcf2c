//! The loss on an uneven use of a mixture's experts (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6), as
//! transformers' `load_balancing_loss_func` has it: over the rows of all layers together.

use burn::tensor::{Tensor, TensorData, activation};

/// What the layers that ran say of their experts.
#[derive(Debug, Clone, Default)]
pub(crate) struct Balance {
    /// The sums of the experts' probabilities over each layer's rows, `[1, experts]`.
    probabilities: Vec<Tensor<2>>,
    /// How many rows each expert has had in all layers.
    counts: Vec<usize>,
    /// Rows of all layers.
    rows: usize,
}

impl Balance {
    /// Adds a layer's router, `[rows, experts]`, and the rows that each expert had of it.
    pub(crate) fn add(&mut self, logits: Tensor<2>, counts: &[usize]) {
        self.rows += logits.dims()[0];
        self.counts.resize(counts.len(), 0);
        self.counts.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        self.probabilities.push(activation::softmax(logits, 1).sum_dim(0));
    }

    /// The loss, a scalar: `experts * sum_e (rows of e / rows) (mean probability of e)`, which is the number of
    /// experts of a row where all are used alike. None where no layer has a mixture.
    pub(crate) fn loss(&self) -> Option<Tensor<1>> {
        let whole = self.probabilities.iter().cloned().reduce(|sum, layer| sum + layer)?;
        Some(uneven(&whole, &self.counts, self.rows))
    }

    /// This part's share of the loss of a whole that has such counts and rows: shares add up, in value and
    /// gradient.
    pub(crate) fn share(&self, whole: &Self) -> Option<Tensor<1>> {
        let own = self.probabilities.iter().cloned().reduce(|sum, layer| sum + layer)?;
        Some(uneven(&own, &whole.counts, whole.rows))
    }

    /// The parts of a batch that ran one after the other, as one.
    pub(crate) fn extend(&mut self, other: &Self) {
        self.rows += other.rows;
        self.counts.resize(other.counts.len().max(self.counts.len()), 0);
        self.counts.iter_mut().zip(&other.counts).for_each(|(sum, count)| *sum += count);
        self.probabilities.extend(other.probabilities.iter().cloned());
    }
}

/// The loss of experts that had `counts` of `rows`, whose probabilities add up to `sums` `[1, experts]`.
fn uneven(sums: &Tensor<2>, counts: &[usize], rows: usize) -> Tensor<1> {
    let rows = rows.max(1) as f64;
    let scale = |&count: &usize| (counts.len() as f64 * count as f64 / (rows * rows)) as f32;
    let scales = TensorData::new(counts.iter().map(scale).collect::<Vec<f32>>(), [1, counts.len()]);
    (sums.clone() * Tensor::from_data(scales, &sums.device())).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::host::to_vec;
    use crate::ops::testing::leaf;

    #[test]
    fn an_even_use_costs_the_experts_of_a_row_and_one_expert_for_all_costs_all() {
        let device = burn::tensor::Device::flex();
        let mut even = Balance::default();
        even.add(Tensor::zeros([6, 3], &device), &[4, 4, 4]);
        assert!((to_vec(&even.loss().unwrap())[0] - 2.0).abs() < 1e-6);
        let mut one = Balance::default();
        one.add(Tensor::from_floats([[50.0, 0.0, 0.0]], &device), &[1, 0, 0]);
        assert!((to_vec(&one.loss().unwrap())[0] - 3.0).abs() < 1e-6);
        assert!(Balance::default().loss().is_none());
    }

    #[test]
    fn shares_of_layers_add_up_to_the_loss() {
        let (mut whole, mut sum) = (Balance::default(), 0.0);
        let layers = [(leaf([5, 3], 1), [1, 2, 2]), (leaf([5, 3], 2), [5, 0, 0])];
        let parts = layers.map(|(logits, counts)| {
            let mut part = Balance::default();
            part.add(logits.inner(), &counts);
            whole.extend(&part);
            part
        });
        for part in parts {
            sum += to_vec(&part.share(&whole).unwrap())[0];
        }
        assert!((to_vec(&whole.loss().unwrap())[0] - sum).abs() < 1e-6);
    }
}
