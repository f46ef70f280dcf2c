//! Gradient checkpointing by layer: only the residual stream between layers is kept, and each layer's
//! activations are computed again as its backward pass comes.

use burn::tensor::Tensor;

use super::CausalLm;
use super::balance::Balance;
use super::causal_lm::Work;
use super::decoder::Layout;
use super::exec::Tensors;
use super::stage::layer_of;
use crate::policy::finite_sum;
use crate::{
    Batch, EachForward, Error, Forward, Gradients, LossFn, Metrics, Needs, ParamSet, Policy, Result,
};

/// A part of a model whose parameters are used together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// A layer.
    Layer(usize),
    /// Embedding, final norm and head.
    Ends,
}

impl Part {
    /// Whether a parameter, by its name, belongs to it.
    pub fn has(self, name: &str) -> bool {
        match self {
            Self::Layer(index) => layer_of(name) == Some(index),
            Self::Ends => layer_of(name).is_none(),
        }
    }
}

/// Where the parameters of a model's parts are while they are not used, and where their gradients go.
///
/// Ranks that share them call these together: [`accumulate_by_parts`] does so in the same order on all.
pub trait PartSource {
    /// A set in which the part's parameters are whole.
    ///
    /// # Errors
    /// A failed collective.
    fn gather(&self, part: Part) -> Result<ParamSet>;

    /// Takes the part's gradients, in the set's order, and returns what this rank keeps of them.
    ///
    /// # Errors
    /// A failed collective.
    fn reduce(&self, part: Part, gradients: Vec<Option<Tensor<1>>>) -> Result<Vec<Option<Tensor<1>>>>;

    /// How many passes there are, where this rank has `own` micro-batches.
    ///
    /// # Errors
    /// A failed collective.
    fn passes(&self, own: usize) -> Result<usize>;
}

/// All parameters are here.
struct Resident<'a>(&'a ParamSet);

impl PartSource for Resident<'_> {
    fn gather(&self, _: Part) -> Result<ParamSet> {
        Ok(self.0.clone())
    }

    fn reduce(&self, _: Part, gradients: Vec<Option<Tensor<1>>>) -> Result<Vec<Option<Tensor<1>>>> {
        Ok(gradients)
    }

    fn passes(&self, own: usize) -> Result<usize> {
        Ok(own)
    }
}

/// As `Policy::accumulate`, at the memory of one layer's activations.
pub(super) fn accumulate(
    model: &CausalLm,
    micro: &[Batch],
    needs: Needs,
    loss: &LossFn<'_>,
) -> Result<Gradients> {
    accumulate_by_parts(model, &Resident(model.params()), micro, needs, loss)
}

/// As [`Policy::accumulate`], at the memory of one layer's activations and, with `source`, of one layer's
/// parameters (Rajbhandari et al. 2020, arXiv:1910.02054, stage 3).
///
/// # Errors
/// As [`Policy::accumulate`]. A rank whose loss fails takes part to the end.
pub fn accumulate_by_parts(
    model: &CausalLm,
    source: &dyn PartSource,
    micro: &[Batch],
    needs: Needs,
    loss: &LossFn<'_>,
) -> Result<Gradients> {
    let mut all = Gradients::default();
    let mut failure = None;
    for at in 0..source.passes(micro.len())? {
        let mut pass = Pass {
            model,
            source,
            sums: Vec::new(),
            loss_sum: 0.0,
            metrics: Metrics::default(),
            balance: Balance::default(),
        };
        let batch = micro.get(at).filter(|_| failure.is_none());
        failure = failure.or(pass.run(batch, needs, loss)?);
        all.add(pass.sums, pass.loss_sum, &pass.metrics);
    }
    failure.map_or(Ok(all), Err)
}

/// As [`Policy::forward_each`] without a graph, at the memory of one layer's parameters.
///
/// # Errors
/// As [`Policy::forward_each`]. A rank where `each` fails takes part to the end.
pub fn forward_each_by_parts(
    model: &CausalLm,
    source: &dyn PartSource,
    batches: &[Batch],
    needs: Needs,
    each: &mut EachForward<'_>,
) -> Result<()> {
    let mut done = Ok(());
    for at in 0..source.passes(batches.len())? {
        let batch = batches.get(at).filter(|_| done.is_ok());
        if let Some(out) = forward_by_parts(model, source, batch, needs)? {
            done = each(at, out);
        }
    }
    done
}

/// One pass; without a batch, this rank only takes part in what others do.
fn forward_by_parts(
    model: &CausalLm,
    source: &dyn PartSource,
    batch: Option<&Batch>,
    needs: Needs,
) -> Result<Option<Forward>> {
    let work = batch.map(|batch| Ok::<_, Error>((model.work(batch)?, batch))).transpose()?;
    let ends = model.on(source.gather(Part::Ends)?);
    let body = model.body();
    let embed = |(work, _): &(Work, _)| body.embed(ends.params(), &work.tokens, &work.layout, model.shard());
    let mut x = work.as_ref().map(embed).transpose()?;
    for index in body.layers() {
        let part = model.on(source.gather(Part::Layer(index))?);
        if let (Some((work, _)), Some(input)) = (&work, x.take()) {
            x = Some(body.layer(&mut tensors(&part, &work.layout), index, input)?);
        }
    }
    let (Some((work, batch)), Some(x)) = (work, x) else { return Ok(None) };
    ends.read(body.norm(ends.params(), x)?, &work, batch, needs).map(Some)
}

/// One micro-batch forth and back.
struct Pass<'a> {
    model: &'a CausalLm,
    source: &'a dyn PartSource,
    sums: Vec<Option<Tensor<1>>>,
    loss_sum: f64,
    metrics: Metrics,
    /// How evenly the experts of all layers are used, where the model asks for it.
    balance: Balance,
}

/// The gradients of what the loss sees: of the last layer's output, and of the loss on an uneven use of experts.
struct OfTop {
    x: Option<Tensor<2>>,
    uneven: Option<Tensor<1>>,
}

impl Pass<'_> {
    /// Without a batch, or where its loss has failed, this rank only takes part in what others do. Returns
    /// that failure.
    fn run(&mut self, batch: Option<&Batch>, needs: Needs, loss: &LossFn<'_>) -> Result<Option<Error>> {
        let Self { model, source, .. } = *self;
        let body = model.body();
        let weight = model.balance_loss();
        let work = |batch| {
            let mut work = model.work(batch)?;
            work.layout.balance = weight.is_some();
            Ok::<_, Error>((work, batch))
        };
        let work = batch.map(work).transpose()?;
        let ends = model.on(source.gather(Part::Ends)?);
        // x[i] is the input of layer i, without a graph.
        let mut x = Vec::new();
        if let Some((work, _)) = &work {
            x.push(body.embed(ends.params(), &work.tokens, &work.layout, model.shard())?);
        }
        for index in body.layers() {
            let part = model.on(source.gather(Part::Layer(index))?);
            if let (Some((work, _)), Some(input)) = (&work, x.last().cloned()) {
                let mut exec = tensors(&part, &work.layout);
                x.push(body.layer(&mut exec, index, input)?);
                exec.balance().into_iter().for_each(|layer| self.balance.extend(layer));
            }
        }
        let mut of_ends = vec![None; model.params().len()];
        let top = work
            .as_ref()
            .map(|(work, batch)| self.top(&ends, (work, batch), x.pop(), needs, (loss, &mut of_ends)));
        let (top, failure) = match top {
            Some(Ok(top)) => (Some(top), None),
            Some(Err(error)) => (None, Some(error)),
            None => (None, None),
        };
        let (mut of_x, of_uneven) = top.map_or((None, None), |top| (Some(top.x), top.uneven));
        for index in body.layers().rev() {
            let part = model.on(source.gather(Part::Layer(index))?);
            let mut of_layer = vec![None; model.params().len()];
            if let (Some((work, _)), Some(above)) = (&work, of_x.take()) {
                let piece = Piece::new(&part, x.pop());
                let mut exec = tensors(&piece.model, &work.layout);
                let mut scalar = seeded(body.layer(&mut exec, index, piece.input())?, above);
                let share = exec.balance().and_then(|layer| layer.share(&self.balance));
                if let (Some(share), Some(weight), Some(of)) = (share, weight, &of_uneven) {
                    scalar = scalar + share * weight * Tensor::from_inner(of.clone());
                }
                of_x = Some(piece.backward(&scalar, &mut of_layer, None).x);
            }
            self.keep(source.reduce(Part::Layer(index), of_layer)?);
        }
        // A frozen embedding has no graph to go back through.
        let is_trained = ends.params().get(body.embedding_id()?).trainable;
        if let (Some((work, _)), Some(above), true) = (&work, of_x, is_trained) {
            let bottom = Piece::new(&ends, None);
            let output = body.embed(bottom.model.params(), &work.tokens, &work.layout, model.shard())?;
            bottom.backward(&seeded(output, above), &mut of_ends, None);
        }
        self.keep(source.reduce(Part::Ends, of_ends)?);
        Ok(failure)
    }

    /// Final norm, heads and loss.
    fn top(
        &mut self,
        ends: &CausalLm,
        (work, batch): (&Work, &Batch),
        x: Option<Tensor<2>>,
        needs: Needs,
        (loss, sums): (&LossFn<'_>, &mut [Option<Tensor<1>>]),
    ) -> Result<OfTop> {
        let top = Piece::new(ends, x);
        let hidden = self.model.body().norm(top.model.params(), top.input())?;
        let mut forward = top.model.read(hidden, work, batch, needs)?;
        let weighted = self.balance.loss().zip(self.model.balance_loss());
        // A leaf: what comes to it goes on to each layer's share.
        let uneven = weighted.map(|(loss, weight)| Tensor::from_inner(loss * weight).require_grad());
        forward.balance_loss.clone_from(&uneven);
        let out = loss(&forward, batch)?;
        self.loss_sum += finite_sum(&out.sum, batch)?;
        self.metrics.merge(&out.metrics);
        Ok(top.backward(&out.sum, sums, uneven.as_ref()))
    }

    fn keep(&mut self, kept: Vec<Option<Tensor<1>>>) {
        self.sums.resize(kept.len(), None);
        add(&mut self.sums, kept);
    }
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

fn add(sums: &mut [Option<Tensor<1>>], more: impl IntoIterator<Item = Option<Tensor<1>>>) {
    for (sum, more) in sums.iter_mut().zip(more) {
        *sum = match (sum.take(), more) {
            (Some(sum), Some(more)) => Some(sum + more),
            (one, other) => one.or(other),
        };
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
        self.x.clone().expect("every piece above the embedding has an input")
    }

    /// Adds the gradients of this piece's parameters to `sums`; returns those of its input and of `uneven`.
    fn backward(
        &self,
        scalar: &Tensor<1>,
        sums: &mut [Option<Tensor<1>>],
        uneven: Option<&Tensor<1>>,
    ) -> OfTop {
        let mut grads = scalar.backward();
        add(sums, self.model.params().iter().map(|param| param.value.grad_remove(&mut grads)));
        OfTop {
            x: self.x.as_ref().and_then(|x| x.grad_remove(&mut grads)),
            uneven: uneven.and_then(|uneven| uneven.grad_remove(&mut grads)),
        }
    }
}
