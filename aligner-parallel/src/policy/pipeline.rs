//! A pipeline's passes: each rank works through its list of the schedule.

use std::collections::HashMap;
use std::sync::Arc;

use aligner_core::model::{CausalLm, Work};
use aligner_core::ops::host::without_graph;
use aligner_core::{
    Batch, Communicator, Error, Forward, Gradients, LossFn, Metrics, Needs, Phase, Policy, Result, Tensor,
    finite_sum,
};

use super::ParallelLm;
use super::forwarded;
use crate::{PipelineSchedule, Task};

const FORWARD: Phase = Phase::new("activations to the next stage");
const BACKWARD: Phase = Phase::new("gradients to the stage before");

/// The stages and the order of their passes.
#[derive(Clone)]
pub(super) struct Pipeline {
    /// Activations and gradients both: each comes in the order in which it is used.
    depth: Arc<dyn Communicator>,
    schedule: PipelineSchedule,
    chunks: usize,
}

/// A forward pass whose backward pass is to come.
struct Held {
    model: CausalLm,
    /// What the stage before gave.
    x: Option<Tensor<2>>,
    end: End,
}

/// What a forward pass has come to.
enum End {
    /// The residual stream, for the next stage.
    Stream(Tensor<2>),
    /// The loss, on the last stage.
    Loss(Tensor<1>),
    /// Its gradients are 0.
    Failed,
}

/// One step's passes on one rank.
struct Passes<'a> {
    pipeline: &'a Pipeline,
    policy: &'a ParallelLm,
    micro: &'a [Batch],
    works: Vec<Work>,
    needs: Needs,
    loss: &'a LossFn<'a>,
    held: HashMap<(usize, usize), Held>,
    gradients: Gradients,
    /// The first failure. The passes go on with zeros, since the other stages wait for what comes of them.
    failure: Option<Error>,
}

impl Pipeline {
    pub(super) fn new(
        depth: &Arc<dyn Communicator>,
        schedule: PipelineSchedule,
        chunks: usize,
    ) -> Result<Self> {
        let problems = schedule.check(depth.size(), depth.size(), chunks);
        if !problems.is_empty() {
            return Err(Error::Invalid(problems.join("; ")));
        }
        Ok(Self { depth: depth.clone(), schedule, chunks })
    }

    fn stages(&self) -> usize {
        self.depth.size()
    }

    fn rank(&self) -> usize {
        self.depth.rank()
    }

    /// The place of a chunk in the model's depth, and how many there are.
    fn place(&self, chunk: usize) -> (usize, usize) {
        (chunk * self.stages() + self.rank(), self.chunks * self.stages())
    }

    fn next(&self) -> usize {
        (self.rank() + 1) % self.stages()
    }

    fn previous(&self) -> usize {
        (self.rank() + self.stages() - 1) % self.stages()
    }

    /// A residual stream, or its gradient, where the policy computes.
    fn receive(&self, policy: &ParallelLm, from: usize, work: &Work, phase: Phase) -> Result<Tensor<2>> {
        let shape = policy.stream_shape(work);
        let values = self.depth.recv(shape[0] * shape[1], from, phase)?;
        Ok(values.to_device(&policy.params.device()).reshape(shape))
    }

    /// A batch's values, on every stage.
    pub(super) fn forward(&self, policy: &ParallelLm, batch: &Batch, needs: Needs) -> Result<Forward> {
        let work = policy.work(batch)?;
        let mut read = None;
        for chunk in 0..self.chunks {
            let (place, places) = self.place(chunk);
            let model = policy.part(chunk);
            let x = (place > 0).then(|| self.receive(policy, self.previous(), &work, FORWARD));
            let out = model.through(&work, x.transpose()?)?;
            if place + 1 == places {
                read = Some(model.read(out, &work, batch, needs));
            } else {
                self.depth.send(without_graph(&out), self.next(), FORWARD)?;
            }
        }
        forwarded::share(self.depth.as_ref(), read, policy, batch, needs)
    }

    /// The gradients of this rank's parameters over all micro-batches.
    pub(super) fn accumulate(
        &self,
        policy: &ParallelLm,
        micro: &[Batch],
        needs: Needs,
        loss: &LossFn<'_>,
    ) -> Result<Gradients> {
        // What is wrong with a batch is so on every stage, so all of them stop here.
        let works = micro.iter().map(|batch| policy.work(batch)).collect::<Result<Vec<_>>>()?;
        let padded = micro.len().next_multiple_of(self.stages());
        let tasks = self.schedule.tasks(self.stages(), padded.max(self.stages()), self.chunks)?;
        let mut passes = Passes {
            pipeline: self,
            policy,
            micro,
            works,
            needs,
            loss,
            held: HashMap::new(),
            gradients: Gradients { values: vec![None; policy.params.len()], ..Gradients::default() },
            failure: None,
        };
        for &task in &tasks[self.rank()] {
            match task {
                // The schedule has whole rounds of micro-batches; every rank leaves out those that there are not.
                Task::Forward { micro: at, .. } | Task::Backward { micro: at, .. } if at >= micro.len() => {}
                Task::Forward { chunk, micro } => passes.forward(chunk, micro)?,
                Task::Backward { chunk, micro } => passes.backward(chunk, micro)?,
            }
        }
        let Passes { mut gradients, failure, .. } = passes;
        forwarded::share_sums(self.depth.as_ref(), &mut gradients, failure)?;
        Ok(gradients)
    }
}

impl Passes<'_> {
    fn forward(&mut self, chunk: usize, micro: usize) -> Result<()> {
        let Self { pipeline, policy, .. } = *self;
        let (place, places) = pipeline.place(chunk);
        let (work, batch) = (&self.works[micro], &self.micro[micro]);
        let x = (place > 0).then(|| pipeline.receive(policy, pipeline.previous(), work, FORWARD));
        let x = x.transpose()?.map(|x| Tensor::from_inner(x).require_grad());
        let model = policy.part(chunk).in_training().tracked();
        let out = model.through(work, x.clone())?;
        let end = if place + 1 == places {
            let loss = model.read(out, work, batch, self.needs).and_then(|out| (self.loss)(&out, batch));
            let loss = loss.and_then(|loss| Ok((finite_sum(&loss.sum, batch)?, loss)));
            loss.map(|(sum, loss)| {
                self.gradients.loss_sum += sum;
                self.gradients.metrics.merge(&loss.metrics);
                End::Loss(loss.sum)
            })
        } else {
            pipeline.depth.send(without_graph(&out), pipeline.next(), FORWARD)?;
            Ok(End::Stream(out))
        };
        let end = end.unwrap_or_else(|error| {
            self.failure.get_or_insert(error);
            End::Failed
        });
        self.held.insert((chunk, micro), Held { model, x, end });
        Ok(())
    }

    fn backward(&mut self, chunk: usize, micro: usize) -> Result<()> {
        let Self { pipeline, policy, .. } = *self;
        let work = &self.works[micro];
        let Some(Held { model, x, end }) = self.held.remove(&(chunk, micro)) else {
            return Err(Error::Invalid(format!(
                "no forward pass of micro-batch {micro} came before its backward"
            )));
        };
        let scalar = match end {
            End::Loss(sum) => Some(sum),
            End::Failed => None,
            End::Stream(out) => {
                let grad = pipeline.receive(policy, pipeline.next(), work, BACKWARD)?;
                Some((out * Tensor::from_inner(grad)).sum())
            }
        };
        let mut of_x = None;
        if let Some(scalar) = scalar {
            let mut grads = scalar.backward();
            let values = model.params().iter().map(|param| param.value.grad_remove(&mut grads)).collect();
            self.gradients.add(values, 0.0, &Metrics::default());
            of_x = x.as_ref().and_then(|x| x.grad_remove(&mut grads));
        }
        if x.is_some() {
            let zeros = || Tensor::zeros(policy.stream_shape(work), &policy.params.device());
            let of_x = of_x.unwrap_or_else(zeros);
            pipeline.depth.send(without_graph(&of_x), pipeline.previous(), BACKWARD)?;
        }
        Ok(())
    }
}
