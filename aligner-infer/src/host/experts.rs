//! A mixture of experts on host slices: rows sorted by expert, each expert's products over its own rows.

use std::ops::Range;

use aligner_core::Result;
use aligner_core::model::{Exec as _, Linear, Mixture};
use aligner_core::ops::Routes;
use aligner_core::ops::rows::add_scaled;

use super::{Pass, Rows};

impl Pass<'_> {
    /// Adds what a mixture's experts make of `x` to the residual stream: a row's experts in the order of its
    /// choice, whatever the other rows chose.
    pub(super) fn mix_experts(&mut self, mut residual: Rows, x: &Rows, mixture: &Mixture) -> Result<Rows> {
        let own = self.part(x, 0, x.columns);
        let [logits] = self.linears(own, [mixture.router])?;
        let routes = Routes::new(logits.values(), mixture.experts.len(), mixture.per_token)?;
        let mut weights = vec![0.0; routes.chosen.len()];
        routes.weights(logits.values(), mixture.normalized, &mut weights);
        self.recycle(logits);
        let mut made = self.rows(routes.rows.len(), x.columns);
        let mut first = 0;
        for (&expert, &count) in mixture.experts.iter().zip(&routes.counts) {
            let slots = first..first + count;
            first += count;
            if count > 0 {
                self.expert(x, &routes.rows[slots.clone()], expert, mixture, (&mut made, slots))?;
            }
        }
        let columns = x.columns;
        let rows = weights.chunks_exact(routes.per_row).zip(routes.slots.chunks_exact(routes.per_row));
        for (residual, (weights, slots)) in residual.values_mut().chunks_exact_mut(columns).zip(rows) {
            for (&weight, &slot) in weights.iter().zip(slots) {
                add_scaled(residual, weight, &made.values()[slot as usize * columns..][..columns]);
            }
        }
        self.recycle(made);
        Ok(residual)
    }

    /// One expert's products over some rows of `x`, into its slots.
    fn expert(
        &mut self,
        x: &Rows,
        rows: &[u32],
        [gate, up, down]: [Linear; 3],
        mixture: &Mixture,
        (made, slots): (&mut Rows, Range<usize>),
    ) -> Result<()> {
        let columns = x.columns;
        let mut own = self.rows(rows.len(), columns);
        for (own, &row) in own.values_mut().chunks_exact_mut(columns).zip(rows) {
            own.copy_from_slice(&x.values()[row as usize * columns..][..columns]);
        }
        let [gate, up] = self.linears(own, [gate, up])?;
        let inner = self.gate(gate, up, mixture.activation)?;
        let [out] = self.linears(inner, [down])?;
        made.values_mut()[slots.start * columns..slots.end * columns].copy_from_slice(out.values());
        self.recycle(out);
        Ok(())
    }
}
