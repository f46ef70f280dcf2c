//! Matrix products on slices, over all threads or on one: our own tiles where the processor has AVX2,
//! else `matrixmultiply`'s.

mod side;
#[cfg(target_arch = "x86_64")]
mod tiles;

use rayon::prelude::*;

use super::kernel::Shared;
pub(crate) use side::Side;

/// A matrix over a slice, with any strides.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mat<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Mat<'a> {
    /// A row-major matrix.
    pub(crate) fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// A matrix whose rows start `row_stride` elements apart.
    pub(crate) fn strided(data: &'a [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        let last = if rows == 0 || cols == 0 { 0 } else { (rows - 1) * row_stride + cols };
        assert!(last <= data.len(), "a {rows} x {cols} matrix over {} elements", data.len());
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// The transposed matrix.
    pub(crate) fn t(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }

    /// Rows `first..first + rows`.
    fn part(self, first: usize, rows: usize) -> Self {
        Self { data: &self.data[first * self.row_stride..], rows, ..self }
    }
}

/// What a product does with what the output holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Output {
    /// `C = A B`; the output may be unfilled.
    Overwrite,
    /// `C += A B`.
    Add,
}

impl Output {
    fn beta(self) -> f32 {
        match self {
            Self::Overwrite => 0.0,
            Self::Add => 1.0,
        }
    }
}

/// Products below this many multiplications run on the calling thread.
const SERIAL_BELOW: usize = 1 << 17;

/// `C (+)= alpha A B` on the calling thread, C with its own row stride.
pub(crate) fn gemm_serial(
    alpha: f32,
    a: Mat<'_>,
    b: Mat<'_>,
    c: &mut [f32],
    c_stride: usize,
    output: Output,
) {
    let extent = if a.rows == 0 { 0 } else { (a.rows - 1) * c_stride + b.cols };
    assert!(extent <= c.len(), "output of a matrix product");
    // SAFETY: the extent was checked, and C is borrowed mutably.
    unsafe { gemm_at(alpha, a, b, c.as_mut_ptr(), c_stride, output) }
}

/// As [`gemm_serial`], where other tasks write between the rows of C.
///
/// # Safety
/// C has `a.rows` rows of `b.cols` elements, `c_stride` apart, that nobody else touches meanwhile.
pub(crate) unsafe fn gemm_at(
    alpha: f32,
    a: Mat<'_>,
    b: Mat<'_>,
    c: *mut f32,
    c_stride: usize,
    output: Output,
) {
    assert_eq!(a.cols, b.rows, "inner dimensions of a matrix product");
    if a.rows == 0 || b.cols == 0 {
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if tiles::available() && a.cols > 0 {
        // SAFETY: the caller's promise covers the whole extent; tiles write only their own elements.
        let c = unsafe { Shared::from_raw(c, (a.rows - 1) * c_stride + b.cols) };
        return tiles::gemm(a, b.into(), tiles::Target { c, stride: c_stride, output, alpha }, false);
    }
    // SAFETY: strides and sizes of A and B were checked when the views were made, C is the caller's.
    unsafe {
        matrixmultiply::sgemm(
            a.rows,
            a.cols,
            b.cols,
            alpha,
            a.data.as_ptr(),
            a.row_stride as isize,
            a.col_stride as isize,
            b.data.as_ptr(),
            b.row_stride as isize,
            b.col_stride as isize,
            output.beta(),
            c,
            c_stride as isize,
            1,
        );
    }
}

/// `C (+)= A B` over all threads; C is row-major. Each element's order of summation is fixed: it
/// depends neither on the number of threads nor on the other rows, so that log-probabilities do not
/// depend on how samples were spread over batches.
pub(crate) fn gemm<'b>(a: Mat<'_>, b: impl Into<Side<'b>>, c: &mut [f32], output: Output) {
    let side: Side<'b> = b.into();
    let [inner, n] = side.shape();
    assert_eq!(a.cols, inner, "inner dimensions of a matrix product");
    let (m, k) = (a.rows, a.cols);
    assert_eq!(c.len(), m * n, "output of a matrix product");
    if k == 0 {
        // An empty sum: nothing below would write it.
        if output == Output::Overwrite {
            c.fill(0.0);
        }
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if tiles::available() {
        let target = tiles::Target { c: Shared::new(c), stride: n, output, alpha: 1.0 };
        return tiles::gemm(a, side, target, m * n * k >= SERIAL_BELOW);
    }
    let b = match side {
        Side::Values(values) => values,
        Side::Packed { .. } => return gemm_blocks(a, side, c, output),
    };
    if m * n * k < SERIAL_BELOW {
        return gemm_serial(1.0, a, b, c, n, output);
    }
    let tasks = rayon::current_num_threads() * 2;
    // Both are split along their longer side, in whole register tiles.
    let (row_step, col_step) = if m >= n { (step(m, tasks), n) } else { (m, step(n, tasks)) };
    let grid: Vec<(usize, usize)> = (0..m)
        .step_by(row_step)
        .flat_map(|row| (0..n).step_by(col_step).map(move |col| (row, col)))
        .collect();
    let shared = Shared::new(c);
    grid.into_par_iter().for_each(|(row, col)| {
        let (rows, cols) = (row_step.min(m - row), col_step.min(n - col));
        let c = shared.at(row * n + col, (rows - 1) * n + cols);
        // SAFETY: no other task has these rows and columns.
        unsafe { gemm_at(1.0, a.part(row, rows), b.t().part(col, cols).t(), c, n, output) };
    });
}

/// Columns of a packed weight that are unpacked at a time, where there are no tiles that do it.
const BLOCK_COLUMNS: usize = 64;

/// [`gemm`] by blocks of columns of B.
fn gemm_blocks(a: Mat<'_>, b: Side<'_>, c: &mut [f32], output: Output) {
    let [inner, n] = b.shape();
    let (m, shared) = (a.rows, Shared::new(c));
    if m == 0 || n == 0 {
        return;
    }
    (0..n.div_ceil(BLOCK_COLUMNS)).into_par_iter().for_each(|block| {
        let first = block * BLOCK_COLUMNS;
        let columns = BLOCK_COLUMNS.min(n - first);
        let c = shared.at(first, (m - 1) * n + columns);
        // SAFETY: no other task has these columns.
        b.block(0..inner, first..first + columns, |b| unsafe { gemm_at(1.0, a, b, c, n, output) });
    });
}

fn step(len: usize, tasks: usize) -> usize {
    len.div_ceil(tasks).next_multiple_of(16).min(len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::values;

    fn plain(a: Mat<'_>, b: Mat<'_>) -> Vec<f32> {
        let mut c = Vec::new();
        for row in 0..a.rows {
            for col in 0..b.cols {
                let term = |i: usize| {
                    let x = a.data[row * a.row_stride + i * a.col_stride];
                    f64::from(x) * f64::from(b.data[i * b.row_stride + col * b.col_stride])
                };
                c.push((0..a.cols).map(term).sum::<f64>() as f32);
            }
        }
        c
    }

    #[test]
    fn a_tiled_row_is_bitwise_the_same_in_any_company() {
        let (m, k, n) = (301, 300, 190);
        let (x, y) = (values(m * k, 1), values(k * n, 2));
        let weight = Mat::new(&y, n, k).t();
        let mut all = vec![0.0; m * n];
        gemm(Mat::new(&x, m, k), weight, &mut all, Output::Overwrite);
        for (first, rows) in [(0, 1), (7, 3), (100, 20), (290, 11)] {
            let mut some = vec![0.0; rows * n];
            gemm(Mat::new(&x[first * k..][..rows * k], rows, k), weight, &mut some, Output::Overwrite);
            assert_eq!(some, all[first * n..][..rows * n], "{rows} rows from {first}");
        }
    }

    #[test]
    fn products_match_the_plain_ones() {
        for (m, k, n) in [(1, 33, 70), (3, 300, 900), (5, 64, 64), (130, 70, 300), (300, 200, 90)] {
            let (x, y) = (values(m * k, 1), values(k * n, 2));
            for (a, b) in [
                (Mat::new(&x, m, k), Mat::new(&y, k, n)),
                (Mat::new(&x, m, k), Mat::new(&y, n, k).t()),
                (Mat::new(&x, k, m).t(), Mat::new(&y, k, n)),
            ] {
                let expected = plain(a, b);
                let mut c = vec![1.0; m * n];
                gemm(a, b, &mut c, Output::Add);
                for (got, expected) in c.iter().zip(&expected) {
                    assert!((got - expected - 1.0).abs() < 1e-4, "{m}x{k}x{n}: {got} {expected}");
                }
                gemm(a, b, &mut c, Output::Overwrite);
                assert!(c.iter().zip(&expected).all(|(got, expected)| (got - expected).abs() < 1e-4));
            }
        }
    }
}
