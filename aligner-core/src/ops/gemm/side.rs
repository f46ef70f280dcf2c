//! The right side of a product: values, or a packed weight of which blocks are unpacked as the product comes to them,
//! so that all of its values are never there at once.

use std::ops::Range;

use super::Mat;
use crate::ops::kernel::unfilled;
use crate::ops::rows::Weight;

/// The right side of a product.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Side<'a> {
    Values(Mat<'a>),
    /// A packed matrix, or its transposed.
    Packed {
        weight: Weight<'a>,
        is_transposed: bool,
    },
}

impl<'a> From<Mat<'a>> for Side<'a> {
    fn from(values: Mat<'a>) -> Self {
        Self::Values(values)
    }
}

impl<'a> Side<'a> {
    /// A packed weight `[out, in]`.
    pub(crate) fn packed(weight: Weight<'a>) -> Self {
        Self::Packed { weight, is_transposed: false }
    }

    /// The transposed matrix.
    pub(crate) fn t(self) -> Self {
        match self {
            Self::Values(values) => Self::Values(values.t()),
            Self::Packed { weight, is_transposed } => Self::Packed { weight, is_transposed: !is_transposed },
        }
    }

    /// Rows and columns.
    pub(super) fn shape(&self) -> [usize; 2] {
        match self {
            Self::Values(values) => [values.rows, values.cols],
            Self::Packed { weight, is_transposed } => {
                let [outputs, inputs] = weight.shape();
                if *is_transposed { [inputs, outputs] } else { [outputs, inputs] }
            }
        }
    }

    /// Calls `read` with the rows `inner` and the columns `columns`; their first ones are multiples of eight. A packed
    /// block is unpacked for the call.
    pub(super) fn block<R>(
        self,
        inner: Range<usize>,
        columns: Range<usize>,
        read: impl FnOnce(Mat<'_>) -> R,
    ) -> R {
        let (weight, is_transposed) = match self {
            Self::Values(values) => {
                return read(
                    values.part(inner.start, inner.len()).t().part(columns.start, columns.len()).t(),
                );
            }
            Self::Packed { weight, is_transposed } => (weight, is_transposed),
        };
        let mut block = unfilled(inner.len() * columns.len());
        let (depth, width) = (inner.len(), columns.len());
        if is_transposed {
            weight.unpack(columns, inner, &mut block);
            read(Mat::new(&block, width, depth).t())
        } else {
            weight.unpack(inner, columns, &mut block);
            read(Mat::new(&block, depth, width))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Output, gemm, gemm_blocks};
    use super::*;
    use crate::ops::rows::{PackedKind, PackedWeight};
    use crate::ops::testing::values;

    #[test]
    fn a_product_with_a_packed_weight_is_that_with_its_values_bit_for_bit() {
        for (rows, outputs, inputs) in [(1, 64, 64), (7, 70, 128), (130, 576, 192), (60, 1100, 576)] {
            let w = values(outputs * inputs, 2);
            let (x, y) = (values(rows * inputs, 1), values(rows * outputs, 3));
            for kind in [PackedKind::Bf16, PackedKind::Int8, PackedKind::Int4, PackedKind::Nf4] {
                let packed = PackedWeight::pack(&w, [outputs, inputs], kind);
                let unpacked = packed.unpacked();
                let plain = Side::Values(Mat::new(&unpacked, outputs, inputs));
                let side = Side::packed(packed.view());
                let run = |a: &[f32], columns: usize, b: Side<'_>, output: Output| {
                    let mut out = vec![0.5; rows * b.shape()[1]];
                    gemm(Mat::new(a, rows, columns), b, &mut out, output);
                    out
                };
                for output in [Output::Overwrite, Output::Add] {
                    assert_eq!(
                        run(&x, inputs, side.t(), output),
                        run(&x, inputs, plain.t(), output),
                        "{kind:?}"
                    );
                    assert_eq!(run(&y, outputs, side, output), run(&y, outputs, plain, output), "{kind:?}");
                }
            }
        }
    }

    #[test]
    fn products_by_blocks_of_columns_are_the_same_to_rounding() {
        let (rows, outputs, inputs) = (9, 130, 192);
        let (w, x) = (values(outputs * inputs, 2), values(rows * inputs, 1));
        let packed = PackedWeight::pack(&w, [outputs, inputs], PackedKind::Nf4);
        let (mut whole, mut blocks) = (vec![0.5; rows * outputs], vec![0.5; rows * outputs]);
        let side = Side::packed(packed.view()).t();
        gemm(Mat::new(&x, rows, inputs), side, &mut whole, Output::Add);
        gemm_blocks(Mat::new(&x, rows, inputs), side, &mut blocks, Output::Add);
        assert!(whole.iter().zip(&blocks).all(|(a, b)| (a - b).abs() < 1e-4));
    }
}
