//! One rank's part of a model, as a policy: all ranks together compute what one rank would.

mod forwarded;
mod idle;
mod pipeline;

use std::sync::Arc;

use aligner_core::model::{
    CausalLm, ModelConfig, Splits, Stage, Work, accumulate_by_parts, forward_each_by_parts,
};
use aligner_core::shard::Split;
use aligner_core::{
    Batch, Communicator, EachForward, Error, Forward, Gradients, LossFn, Needs, Param, ParamSet, Phase,
    Policy, Result,
};

use crate::cut::{cut, rank_config, stage_names};
use crate::expert::ExpertRanks;
use crate::flat::all_reduce_together;
use crate::parts::{Gathering, SharedOut};
use crate::pieces::Pieces;
use crate::reshard::{BUCKET_BYTES, Layout, Reshard, stages};
use crate::tensor::Seams;
use crate::{Axis, Mesh, MeshComms, PipelineSchedule};
use idle::{idle_batch, is_idle, nothing};
use pipeline::Pipeline;

const SHARED: Phase = Phase::new("gradients of parameters that ranks share");
const TIES: Phase = Phase::new("forming the group of a tied embedding");

/// How a model is cut, beside the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cut {
    /// Whether norms work on parts of the rows, where matrices are split (Korthikanti et al. 2022).
    pub sequence: bool,
    /// The order of a pipeline's passes.
    pub schedule: PipelineSchedule,
    /// Parts of the depth that each pipeline rank has; more than 1 with the interleaved schedule alone.
    pub chunks: usize,
    /// Whether data-parallel ranks share out the parameters, and gather them by layer.
    pub share_parameters: bool,
}

/// A rank's part of a language model, or of a scalar model on the same body, on a mesh.
///
/// All ranks of a data-parallel group, those that differ along `tp`, `cp` and `pp`, pass the same batches and
/// get the same values. Gradients are those of this rank's own parameters, and still to be summed over
/// [`MeshComms::gradients`].
#[derive(Clone)]
pub struct ParallelLm {
    /// The whole model's shape.
    config: Arc<ModelConfig>,
    pieces: Arc<Pieces>,
    /// This rank's parts of the depth, without parameters.
    parts: Vec<CausalLm>,
    params: ParamSet,
    comms: MeshComms,
    /// The first and the last pipeline rank, where they share an embedding and this is one of them.
    ties: Option<Arc<dyn Communicator>>,
    pipeline: Option<Pipeline>,
    shared_out: Option<SharedOut>,
    experts: ExpertRanks,
    /// The way to a whole model on every rank.
    refit: Arc<Reshard>,
    sequence: bool,
}

impl ParallelLm {
    /// Cuts `model`, which every rank has whole, as the mesh asks. Of a model that has been opened and not read
    /// ([`CausalLm::open`]) each rank reads its own part.
    ///
    /// # Errors
    /// A model that the mesh does not divide, with all reasons; what the communicators report.
    pub fn new(model: &CausalLm, comms: &MeshComms, how: Cut) -> Result<Self> {
        let (mesh, config) = (comms.mesh(), model.config());
        mesh.check(config)?;
        check_balance(mesh, config)?;
        check_packed(mesh, model.params(), how)?;
        let chunks = how.chunks.max(1);
        let (depth, tensor) = (comms.along(Axis::Pipeline), comms.along(Axis::Tensor));
        let parts = depth.size() * chunks;
        if !config.num_layers.is_multiple_of(parts) {
            let layers = config.num_layers;
            return Err(Error::Invalid(format!(
                "{parts} parts of the depth (pp times chunks) do not divide num_hidden_layers={layers}"
            )));
        }
        let experts = ExpertRanks::new(comms.along(Axis::Expert).clone());
        let own_experts = config.experts.as_ref().map(|all| experts.share(all.count));
        let stages = stages(config, (depth.rank(), depth.size()), chunks, own_experts.as_ref());
        let names = model.params().iter().map(|param| param.name.as_str());
        let names = stage_names(names, config, &stages);
        let (splits, own) = (Splits::new(config), rank_config(config, tensor.size())?);
        let mut params = cut(model.params(), &names, &splits, tensor.rank(), tensor.size())?;
        let seams: Arc<Seams> = Arc::new(Seams::new(
            tensor.clone(),
            comms.along(Axis::Context).clone(),
            experts.clone(),
            how.sequence,
            config.vocab_size,
        ));
        let part = |stage: &Stage| {
            let part = model.reshaped(own.clone(), params.clone(), stage.clone())?;
            Ok(part.with_shard(seams.clone()).on(ParamSet::default()))
        };
        let is_tied = config.tie_embeddings && config.num_labels.is_none() && depth.size() > 1;
        let ties = is_tied.then(|| {
            let is_end = depth.rank() == 0 || depth.rank() + 1 == depth.size();
            let group = depth.split(usize::from(is_end), depth.rank(), TIES)?;
            Ok::<_, Error>(is_end.then_some(group))
        });
        let pipeline = (depth.size() > 1).then(|| Pipeline::new(depth, how.schedule, chunks)).transpose()?;
        let parts = stages.iter().map(part).collect::<Result<_>>()?;
        let mut shared_out = None;
        if how.share_parameters && experts.size() > 1 {
            return Err(Error::Invalid("parameters are not shared out where experts are (ep)".into()));
        }
        if how.share_parameters && comms.gradients().size() > 1 {
            if pipeline.is_some() {
                return Err(Error::Invalid(
                    "parameters are not shared out where there is a pipeline (pp)".into(),
                ));
            }
            let (shared, own) = SharedOut::new(&params, comms.gradients().clone())?;
            (shared_out, params) = (Some(shared), own);
        }
        params.read_in()?;
        let whole: Vec<(String, Vec<usize>)> =
            model.params().iter().map(|param| (param.name.clone(), param.shape.clone())).collect();
        let trained = Layout::training(&whole, config, mesh, how)?;
        let generating = Layout::replicas(&whole, config, mesh.size(), 1)?;
        Ok(Self {
            shared_out,
            experts,
            refit: Arc::new(Reshard::new(trained, generating, BUCKET_BYTES)?),
            config: Arc::new(config.clone()),
            pieces: Arc::new(Pieces::new(whole, splits, comms, is_tied)),
            parts,
            params,
            comms: comms.clone(),
            ties: ties.transpose()?.flatten(),
            pipeline,
            sequence: how.sequence && tensor.size() > 1,
        })
    }

    /// The whole model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Where this rank's parameters lie in the whole model's.
    pub fn pieces(&self) -> &Arc<Pieces> {
        &self.pieces
    }

    /// How the parameters are shared out, if they are.
    pub(crate) fn shared_out(&self) -> Option<&SharedOut> {
        self.shared_out.as_ref()
    }

    /// What a pass over `batch` works on, the same on every stage.
    fn work(&self, batch: &Batch) -> Result<Work> {
        let vocab = self.config.vocab_size;
        if let Some(token) = batch.tokens.iter().find(|&&token| token as usize >= vocab) {
            return Err(Error::Invalid(format!("token {token} is out of range: there are {vocab}")));
        }
        self.parts[0].work(batch)
    }

    /// The residual stream between stages, `[rows, hidden]`.
    fn stream_shape(&self, work: &Work) -> [usize; 2] {
        let ranks = if self.sequence { self.comms.along(Axis::Tensor).size() } else { 1 };
        [work.tokens().div_ceil(ranks), self.config.hidden_size]
    }

    /// The rank's part at a place of its depth, on its parameters.
    fn part(&self, chunk: usize) -> CausalLm {
        self.parts[chunk].on(self.params.clone())
    }

    /// Adds up the gradients of parameters that several ranks of a model have.
    fn share(&self, gradients: &mut Gradients) -> Result<()> {
        gradients.values.resize(self.params.len(), None);
        let is_partial = |param: &Param| match self.pieces.splits().of(&param.name) {
            Split::Inside => true,
            Split::Stream => self.sequence,
            Split::Whole | Split::Outputs | Split::Inputs => false,
        };
        let tensor = self.comms.along(Axis::Tensor);
        all_reduce_together(tensor.as_ref(), &mut gradients.values, &self.params, is_partial, SHARED)?;
        if let Some(ties) = &self.ties {
            let is_tied = |param: &Param| param.name == self.pieces.splits().embedding();
            all_reduce_together(ties.as_ref(), &mut gradients.values, &self.params, is_tied, SHARED)?;
        }
        Ok(())
    }
}

impl Policy for ParallelLm {
    fn forward(&self, batch: &Batch, needs: Needs) -> Result<Forward> {
        match (&self.pipeline, &self.shared_out) {
            (Some(pipeline), _) => pipeline.forward(self, batch, needs),
            (None, Some(_)) => {
                let mut said = None;
                self.forward_each(std::slice::from_ref(batch), needs, &mut |_, out| {
                    said = Some(out);
                    Ok(())
                })?;
                said.ok_or_else(|| Error::Invalid("the pass over the batch said nothing".into()))
            }
            (None, None) => self.part(0).forward(batch, needs),
        }
    }

    fn forward_each(&self, batches: &[Batch], needs: Needs, each: &mut EachForward<'_>) -> Result<()> {
        match &self.shared_out {
            Some(how) if self.pipeline.is_none() => {
                let source = Gathering { how, own: &self.params };
                forward_each_by_parts(&self.part(0), &source, batches, needs, each)
            }
            _ => {
                let mut done = Ok(());
                let idle = idle_batch(self.comms.mesh());
                for at in 0..self.experts.most(batches.len())? {
                    let batch = batches.get(at).filter(|_| done.is_ok());
                    let out = self.forward(batch.unwrap_or(&idle), needs)?;
                    if batch.is_some() {
                        done = each(at, out);
                    }
                }
                done
            }
        }
    }

    fn needs_others(&self) -> bool {
        self.shared_out.is_some() || self.experts.size() > 1
    }

    fn params(&self) -> &ParamSet {
        &self.params
    }

    fn params_mut(&mut self) -> &mut ParamSet {
        &mut self.params
    }

    fn whole(&self) -> Result<ParamSet> {
        if self.refit.is_nothing() {
            return Ok(self.params.clone());
        }
        self.refit.carry(self.comms.all().as_ref(), &self.params)
    }

    fn with_params(&self, params: ParamSet) -> Box<dyn Policy> {
        Box::new(Self { params, ..self.clone() })
    }

    fn begin_step(&mut self, step: u64) {
        self.parts.iter_mut().for_each(|part| part.begin_step(step));
    }

    fn accumulate(&self, micro: &[Batch], needs: Needs, loss: &LossFn<'_>) -> Result<Gradients> {
        // Experts are asked as often by each rank as by any.
        let most = self.experts.most(micro.len())?;
        let padded: Vec<Batch>;
        let micro = if most == micro.len() {
            micro
        } else {
            let idle = idle_batch(self.comms.mesh());
            padded = micro.iter().cloned().chain(std::iter::repeat(idle)).take(most).collect();
            &padded
        };
        let loss: &LossFn<'_> =
            &|out, batch| if is_idle(batch) { Ok(nothing(out)) } else { loss(out, batch) };
        let result = match (&self.pipeline, &self.shared_out) {
            (Some(pipeline), _) => pipeline.accumulate(self, micro, needs, loss),
            (None, Some(how)) => {
                let source = Gathering { how, own: &self.params };
                accumulate_by_parts(&self.part(0).in_training(), &source, micro, needs, loss)
            }
            (None, None) => self.part(0).accumulate(micro, needs, loss),
        };
        // A rank that has failed still takes part: the others would wait for it.
        let (mut gradients, failure) = match result {
            Ok(gradients) => (gradients, None),
            Err(error @ Error::Collective(_)) => return Err(error),
            Err(error) => (Gradients::default(), Some(error)),
        };
        self.share(&mut gradients)?;
        failure.map_or(Ok(gradients), Err)
    }
}

/// Weights in few bits are whole on every rank.
fn check_packed(mesh: Mesh, params: &ParamSet, how: Cut) -> Result<()> {
    let Some(param) = params.first_packed() else { return Ok(()) };
    let cuts = [Axis::Tensor, Axis::Expert, Axis::Pipeline].iter().any(|&axis| mesh.axis_size(axis) > 1);
    if !cuts && !how.share_parameters {
        return Ok(());
    }
    let message = "is held in few bits: it is whole on every rank, without tp, ep, pp and shard_parameters";
    Err(Error::Invalid(format!("{} {message}", param.name)))
}

/// A loss on the use of experts is over all rows of a batch in all layers: no rank may lack some of them.
fn check_balance(mesh: Mesh, config: &ModelConfig) -> Result<()> {
    let weight = config.experts.as_ref().and_then(|experts| experts.balance_loss);
    let cutting =
        [Axis::Tensor, Axis::Context, Axis::Pipeline].into_iter().find(|&axis| mesh.axis_size(axis) > 1);
    match cutting.filter(|_| weight.is_some()) {
        None => Ok(()),
        Some(axis) => Err(Error::Invalid(format!(
            "a loss on the use of experts cannot be split over {} ranks: turn output_router_logits off",
            axis.name()
        ))),
    }
}
