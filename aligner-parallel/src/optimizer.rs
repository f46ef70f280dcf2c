//! `AdamW` over the ranks of a mesh, with its state whole on every data-parallel rank or shared out
//! (`ZeRO` stage 1, Rajbhandari et al. 2020, arXiv:1910.02054; Megatron-LM's distributed optimizer).

mod shares;

use std::collections::BTreeMap;
use std::sync::Arc;

use aligner_core::optim::{AdamW, Norm, Optimizer, OptimizerState, global_norm};
use aligner_core::weights::UnreadTensor;
use aligner_core::{Device, Error, Param, ParamSet, Phase, Policy, Reduce, Result, Tensor};

use crate::cut::own_ranges;
use crate::flat::all_reduce_together;
use crate::parts::SharedOut;
use crate::pieces::Pieces;
use crate::{Axis, ParallelLm};
use shares::{Named, Shares};

const GRADIENTS: Phase = Phase::new("sums of gradients");
const NORM: Phase = Phase::new("norm of the gradient");

/// `AdamW` of one rank of a mesh, on its part of the model.
pub struct MeshAdamW {
    pieces: Arc<Pieces>,
    adamw: AdamW,
    state: Held,
}

/// What a data-parallel rank keeps of the optimizer's state.
enum Held {
    /// That of all parameters of its part of the model.
    All,
    /// That of a part of them, which it updates for the others (stage 1).
    Shares(Shares),
    /// That of the elements that it has: parameters are shared out themselves (stage 3).
    Own(SharedOut),
}

impl MeshAdamW {
    /// An optimizer that has seen no gradient, for the parameters of a policy of these pieces.
    ///
    /// With `shared`, each data-parallel rank keeps the moments of a part of the parameters, updates that
    /// part, and gets the others' from them. Where the policy's parameters are shared out, so are the moments.
    ///
    /// # Errors
    /// [`Error::Invalid`] where moments are to be shared out, and experts are.
    pub fn new(policy: &ParallelLm, adamw: AdamW, shared: bool) -> Result<Self> {
        let mesh = policy.pieces().comms().mesh();
        if shared && mesh.axis_size(Axis::Expert) > 1 {
            return Err(Error::Invalid("an optimizer is not shared out where experts are (ep)".into()));
        }
        let ranks = policy.pieces().comms().gradients();
        let state = match policy.shared_out() {
            Some(how) => Held::Own(how.clone()),
            None if shared && ranks.size() > 1 => Held::Shares(Shares::new(policy.params(), ranks.clone())),
            None => Held::All,
        };
        Ok(Self { pieces: policy.pieces().clone(), adamw, state })
    }

    /// Elements whose moments this rank keeps, of these parameters.
    pub fn elements(&self, params: &ParamSet) -> usize {
        match &self.state {
            Held::Shares(shares) => shares.elements(),
            Held::All | Held::Own(_) => params.elements(true),
        }
    }

    /// The moments of this rank's part of the model, from what each rank has of them.
    fn assemble(&self, how: &SharedOut, params: &ParamSet) -> Result<Vec<Named>> {
        let all: Vec<&Param> = params.iter().collect();
        let place: BTreeMap<String, usize> = (self.adamw.kinds().iter())
            .flat_map(|kind| {
                all.iter().enumerate().map(move |(at, param)| (format!("{kind}.{}", param.name), at))
            })
            .collect();
        let whole = self.adamw.tensors(params).into_iter().map(|(name, _, tensor)| {
            let at = place[&name];
            Ok((name, how.shape(at).to_vec(), Tensor::cat(how.assemble(&[at], vec![tensor])?, 0)))
        });
        whole.collect()
    }

    /// The whole of a state's tensor, cut like the parameter `name`, from this rank's part.
    fn join(&self, name: &str, own: Option<&Tensor<1>>) -> Result<(Vec<usize>, Tensor<1>)> {
        let shape = self.pieces.shape(name).unwrap_or_default().to_vec();
        let values = self.pieces.join(name, &shape, own)?;
        Ok((shape, Tensor::from_floats(values.as_slice(), &Device::flex())))
    }
}

impl Optimizer for MeshAdamW {
    fn sum(&mut self, params: &ParamSet, gradients: &mut Vec<Option<Tensor<1>>>) -> Result<f64> {
        gradients.resize(params.len(), None);
        let ranks = self.pieces.comms().gradients();
        let sharing = match &self.state {
            Held::Shares(shares) => {
                *gradients = shares.reduce(params, gradients)?;
                ranks.size()
            }
            Held::All => {
                let splits = self.pieces.splits();
                let is_expert = |param: &Param| splits.is_expert(&param.name);
                let dense = |param: &Param| !is_expert(param);
                all_reduce_together(ranks.as_ref(), gradients, params, dense, GRADIENTS)?;
                let alike = self.pieces.comms().expert_gradients();
                all_reduce_together(alike.as_ref(), gradients, params, is_expert, GRADIENTS)?;
                1
            }
            // They were summed layer by layer.
            Held::Own(how) => how.ranks(),
        };
        // Each element counts once: on each of its ranks, by the share of one.
        let mut square = [0.0];
        for (param, gradient) in params.iter().zip(gradients.iter()) {
            let Some(gradient) = gradient else { continue };
            let norm = global_norm(std::slice::from_ref(&Some(gradient.clone())), Norm::L2);
            square[0] += norm * norm * sharing as f64 / self.pieces.copies(param) as f64;
        }
        self.pieces.comms().all().all_reduce_host(&mut square, Reduce::Sum, NORM)?;
        Ok(square[0].sqrt())
    }

    fn step(
        &mut self,
        params: &mut ParamSet,
        gradients: &[Option<Tensor<1>>],
        learning_rate: f64,
        scale: f64,
    ) -> Result<()> {
        let Held::Shares(shares) = &self.state else {
            return self.adamw.step(params, gradients, learning_rate, scale);
        };
        let (mut own, gradients) = (shares.own(params)?, shares.of_own(gradients));
        self.adamw.step(&mut own, &gradients, learning_rate, scale)?;
        shares.spread(&own, params)
    }

    fn state(&self, params: &ParamSet) -> Result<OptimizerState> {
        let (own_tensors, own_steps) = match &self.state {
            Held::All => (self.adamw.tensors(params), self.adamw.steps(params)),
            Held::Own(how) => (self.assemble(how, params)?, self.adamw.steps(params)),
            Held::Shares(shares) => {
                let own = shares.own(params)?;
                shares.gather(
                    params,
                    self.adamw.kinds(),
                    self.adamw.tensors(&own),
                    &self.adamw.steps(&own),
                )?
            }
        };
        let mut state = OptimizerState::default();
        let mine: BTreeMap<String, Tensor<1>> =
            own_tensors.into_iter().map(|(name, _, tensor)| (name, tensor)).collect();
        // Ranks of other stages have other parameters: all ask for those of the whole model, in its order.
        for (name, _) in self.pieces.names() {
            let steps = self.pieces.agree(own_steps.get(name).copied())?;
            let Some(steps) = steps else { continue };
            state.steps.insert(name.clone(), steps);
            for kind in self.adamw.kinds() {
                let full = format!("{kind}.{name}");
                let (shape, tensor) = self.join(name, mine.get(&full))?;
                state.tensors.push((full, shape, tensor));
            }
        }
        Ok(state)
    }

    fn restore(
        &mut self,
        params: &ParamSet,
        tensors: BTreeMap<String, UnreadTensor>,
        steps: &BTreeMap<String, u64>,
    ) -> Result<()> {
        let tensor = self.pieces.comms().along(Axis::Tensor);
        let mut own = BTreeMap::new();
        for (full, (shape, unread)) in tensors {
            let (kind, name) = full.split_once('.').unwrap_or((&full, ""));
            let Some(whole) = self.pieces.shape(name) else {
                return Err(Error::Invalid(format!(
                    "optimizer state: {kind}.{name} belongs to no parameter of the model"
                )));
            };
            if whole != shape {
                return Err(Error::shape(full.as_str(), format!("{whole:?}"), &shape));
            }
            if params.by_name(name).is_none() {
                continue;
            }
            let (shape, ranges) =
                own_ranges(name, &shape, self.pieces.splits(), tensor.rank(), tensor.size());
            own.insert(full, (shape, unread.part(&ranges)));
        }
        let steps: BTreeMap<String, u64> = steps
            .iter()
            .filter(|(name, _)| params.by_name(name).is_some())
            .map(|(n, s)| (n.clone(), *s))
            .collect();
        match &self.state {
            Held::All => self.adamw.restore(params, own, &steps),
            Held::Own(how) => {
                for (at, param) in params.iter().enumerate() {
                    for kind in self.adamw.kinds() {
                        if let Some(whole) = own.get_mut(&format!("{kind}.{}", param.name)) {
                            *whole = how.part(param, at, &whole.1);
                        }
                    }
                }
                self.adamw.restore(params, own, &steps)
            }
            Held::Shares(shares) => {
                let set = shares.own(params)?;
                let (own, steps) = shares.pick(params, self.adamw.kinds(), &own, &steps);
                self.adamw.restore(&set, own, &steps)
            }
        }
    }
}
