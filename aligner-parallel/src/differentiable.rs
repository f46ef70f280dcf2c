//! Collectives as differentiable operations: each with the one that carries its gradient back.
//!
//! The pairs are those of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al.
//! 2022, arXiv:2205.05198, section 4.2.2). Rows that do not divide by the ranks are padded with zeros.

use std::sync::Arc;

use aligner_core::ops::host::without_graph;
use aligner_core::ops::{external, index};
use aligner_core::{Communicator, Phase, Reduce, Result, Tensor};
use burn::tensor::IndexingUpdateOp;

use crate::flat::elements;

type Comm = Arc<dyn Communicator>;

const ENTER: Phase = Phase::new("gradients into a block");
const EXIT: Phase = Phase::new("sums out of a block");
const GATHER: Phase = Phase::new("rows into a block");
const SCATTER: Phase = Phase::new("sums of rows out of a block");

/// The identity; gradients add up over the ranks.
pub(crate) fn copy_in(x: Tensor<2>, comm: &Comm) -> Result<Tensor<2>> {
    let comm = comm.clone();
    apply(x, Ok, move |grad| comm.all_reduce(grad, Reduce::Sum, ENTER))
}

/// The sum over the ranks; each gets the gradient as it is.
pub(crate) fn sum_out(x: Tensor<2>, comm: &Comm) -> Result<Tensor<2>> {
    apply(x, |x| comm.all_reduce(x, Reduce::Sum, EXIT), Ok)
}

/// Every rank's rows, `[rows of a rank, columns]` to `[rows, columns]`; gradients add up, and go to the
/// ranks whose rows they are.
pub(crate) fn gather_rows(x: Tensor<2>, rows: usize, comm: &Comm) -> Result<Tensor<2>> {
    let columns = x.dims()[1];
    let back = comm.clone();
    apply(
        x,
        |x| Ok(resize(comm.all_gather(x, GATHER)?, rows * columns)),
        move |grad| back.reduce_scatter(resize(grad, share(rows, &back) * back.size() * columns), GATHER),
    )
}

/// Every rank's rows, for readers that are the same on all of them: each keeps its own rows' gradient.
pub(crate) fn gather_rows_to_all(x: Tensor<2>, rows: usize, comm: &Comm) -> Result<Tensor<2>> {
    let columns = x.dims()[1];
    let back = comm.clone();
    apply(
        x,
        |x| Ok(resize(comm.all_gather(x, GATHER)?, rows * columns)),
        move |grad| {
            let own = share(rows, &back);
            let all = resize(grad, own * back.size() * columns);
            let start = back.rank() * own * columns;
            Ok(elements(&all, start..start + own * columns))
        },
    )
}

/// The sum over the ranks, of which each keeps its rows: `[rows, columns]` to
/// `[rows of a rank, columns]`.
pub(crate) fn scatter_rows(x: Tensor<2>, comm: &Comm) -> Result<Tensor<2>> {
    let [rows, columns] = x.dims();
    let back = comm.clone();
    apply(
        x,
        |x| comm.reduce_scatter(resize(x, share(rows, comm) * comm.size() * columns), SCATTER),
        move |grad| Ok(resize(back.all_gather(grad, SCATTER)?, rows * columns)),
    )
}

/// Who reads rows that come from all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Readers {
    /// The same on all ranks: each keeps its own rows' gradient.
    Alike,
    /// Each rank's own: gradients add up.
    Own,
}

/// Every rank's rows in their places, `[own, columns]` to `[total, columns]`: the i-th row goes to `places[i]`, where no
/// other rank has one. Rows past `places` are dropped.
pub(crate) fn place_rows(
    x: Tensor<2>,
    places: &[u32],
    total: usize,
    readers: Readers,
    comm: &Comm,
    [there, back]: [Phase; 2],
) -> Result<Tensor<2>> {
    let [own, columns] = x.dims();
    let (places, ranks): (Arc<[u32]>, _) = (places.into(), comm.clone());
    let of_places = places.clone();
    let forward = |x: Tensor<1>| {
        let device = x.device();
        let mut all = Tensor::<2>::zeros([total, columns], &device);
        if !places.is_empty() {
            let rows = x.reshape([own, columns]).narrow(0, 0, places.len());
            all = all.select_assign(0, index(&places, &device), rows, IndexingUpdateOp::Add);
        }
        comm.all_reduce(all.reshape([total * columns]), Reduce::Sum, there)
    };
    let backward = move |grad: Tensor<1>| {
        let device = grad.device();
        let grad = match readers {
            Readers::Alike => grad,
            Readers::Own => ranks.all_reduce(grad, Reduce::Sum, back)?,
        };
        if of_places.is_empty() {
            return Ok(Tensor::zeros([own * columns], &device));
        }
        let rows = grad.reshape([total, columns]).select(0, index(&of_places, &device));
        Ok(resize(rows.reshape([of_places.len() * columns]), own * columns))
    };
    apply(x, forward, backward)
}

/// A rank's rows of `rows`, the last ones' padding among them.
fn share(rows: usize, comm: &Comm) -> usize {
    rows.div_ceil(comm.size())
}

/// The first `len` elements, with zeros where there are fewer.
fn resize(values: Tensor<1>, len: usize) -> Tensor<1> {
    let [own] = values.dims();
    match own.cmp(&len) {
        std::cmp::Ordering::Equal => values,
        std::cmp::Ordering::Greater => elements(&values, 0..len),
        std::cmp::Ordering::Less => {
            let zeros = Tensor::zeros([len - own], &values.device());
            Tensor::cat(vec![values, zeros], 0)
        }
    }
}

/// An operation on the elements of `x`, `[rows, columns]`, that keeps the number of columns.
///
/// Where a rank is missing in the backward pass the gradient is zero; the step's next collective fails
/// with the cause, since one failure is everyone's.
pub(crate) fn apply(
    x: Tensor<2>,
    forward: impl FnOnce(Tensor<1>) -> Result<Tensor<1>>,
    backward: impl Fn(Tensor<1>) -> Result<Tensor<1>> + Send + Sync + 'static,
) -> Result<Tensor<2>> {
    let columns = x.dims()[1];
    let out = forward(without_graph(&x))?;
    let shape = [out.dims()[0] / columns.max(1), columns];
    external(&[x], &out, shape, Box::new(move |grad| Ok(vec![backward(grad)?])))
}
