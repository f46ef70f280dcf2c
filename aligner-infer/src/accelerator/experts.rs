//! A mixture of experts on an accelerator. Which rows go where is decided on the host, from the router's logits;
//! the rows stay on the device.

use aligner_core::Result;
use aligner_core::model::Mixture;
use aligner_core::ops::Routes;
use aligner_core::ops::cube::{Buffer, gate_rows, gather_rows, scale_and_add, scatter_add};

use super::Pass;

impl Pass<'_> {
    /// The residual stream with what a mixture's experts make of `x` added to it, in the order of the experts.
    pub(super) fn mix_experts(
        &mut self,
        residual: Buffer<f32>,
        x: &Buffer<f32>,
        mixture: &Mixture,
    ) -> Result<Buffer<f32>> {
        let device = &self.own.device;
        let [logits] = self.products(x, [mixture.router], None)?;
        let logits = device.read(&logits)?;
        let routes = Routes::new(&logits, mixture.experts.len(), mixture.per_token)?;
        let mut weights = vec![0.0; routes.chosen.len()];
        routes.weights(&logits, mixture.normalized, &mut weights);
        let mut by_slot = vec![0.0; weights.len()];
        routes.slots.iter().zip(&weights).for_each(|(&slot, &weight)| by_slot[slot as usize] = weight);
        // A copy of one's own: what is given may be read elsewhere.
        let sum = scale_and_add(device, &residual, 1.0, None)?;
        let columns = x.len() / routes.routed().max(1);
        let mut first = 0;
        for (&[gate, up, down], &count) in mixture.experts.iter().zip(&routes.counts) {
            let slots = first..first + count;
            first += count;
            if count == 0 {
                continue;
            }
            let rows = device.upload(&routes.rows[slots.clone()]);
            let own = gather_rows(device, x, columns, &rows)?;
            let [gate, up] = self.products(&own, [gate, up], None)?;
            let inner = gate_rows(device, &gate, &up, mixture.activation)?;
            let [out] = self.products(&inner, [down], None)?;
            scatter_add(device, &sum, &out, &rows, &device.upload(&by_slot[slots]))?;
        }
        Ok(sum)
    }
}
