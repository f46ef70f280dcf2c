//! The lengths of an adapted linear's rows (Liu et al. 2024, arXiv:2402.09353, equation 5).

use rayon::prelude::*;

use super::rows::Weight;

/// Rows of a linear, and the low-rank addition to them, in host memory.
#[derive(Debug, Clone, Copy)]
pub struct AdaptedRows<'a> {
    /// `[out, in]`.
    pub weight: Weight<'a>,
    /// `[rank, in]`.
    pub a: &'a [f32],
    /// `[out, rank]`.
    pub b: &'a [f32],
    /// What the addition is multiplied by.
    pub scale: f32,
    /// `[out, in]` of the weight.
    pub shape: [usize; 2],
}

impl AdaptedRows<'_> {
    /// Calls `read` with each row of `W + scale B A`, `[in]`, and gives what it says, in order.
    fn map<R: Send>(&self, read: impl Fn(&[f32]) -> R + Sync) -> Vec<R> {
        let [outputs, inputs] = self.shape;
        let rank = self.b.len() / outputs.max(1);
        let of_row = |row: &mut Vec<f32>, output: usize| {
            row.resize(inputs, 0.0);
            self.weight.unpack(output..output + 1, 0..inputs, row);
            for (b, a) in self.b[output * rank..][..rank].iter().zip(self.a.chunks_exact(inputs.max(1))) {
                let factor = self.scale * b;
                row.iter_mut().zip(a).for_each(|(value, a)| *value += factor * a);
            }
            read(row)
        };
        (0..outputs).into_par_iter().map_init(Vec::new, of_row).collect()
    }

    /// The Euclidean length of each row of `W + scale B A`, `[out]`; never 0, for it is divided by.
    pub fn lengths(&self) -> Vec<f32> {
        self.map(|row| {
            let squares: f64 = row.iter().map(|value| f64::from(*value).powi(2)).sum();
            (squares.sqrt() as f32).max(f32::MIN_POSITIVE)
        })
    }

    /// `W + scale B A`, `[out, in]`, each row multiplied by its gain where there are some.
    pub fn merged(&self, gains: Option<&[f32]>) -> Vec<f32> {
        let mut all = self.map(<[f32]>::to_vec).concat();
        if let Some(gains) = gains {
            let rows = all.chunks_exact_mut(self.shape[1].max(1)).zip(gains);
            rows.for_each(|(row, gain)| row.iter_mut().for_each(|value| *value *= gain));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows::F32;
    use super::*;

    #[test]
    fn rows_and_lengths_have_their_hand_computed_values() {
        // W = [[1, 2], [0, 4]], B A = [[3], [0]] [[1, 0.5]] = [[3, 1.5], [0, 0]], scale 2.
        let rows = AdaptedRows {
            weight: Weight::F32(F32::new(&[1.0, 2.0, 0.0, 4.0], 2, 2)),
            a: &[1.0, 0.5],
            b: &[3.0, 0.0],
            scale: 2.0,
            shape: [2, 2],
        };
        assert_eq!(rows.merged(None), [7.0, 5.0, 0.0, 4.0]);
        assert_eq!(rows.merged(Some(&[1.0, 0.5])), [7.0, 5.0, 0.0, 2.0]);
        let lengths = rows.lengths();
        assert!((lengths[0] - 74f32.sqrt()).abs() < 1e-6 && (lengths[1] - 4.0).abs() < 1e-6);
    }
}
