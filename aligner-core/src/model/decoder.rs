//! A decoder-only transformer: the layers that a family describes, on any executor.

mod find;
mod layer;

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Tensor};

use super::ModelConfig;
use super::balance::Balance;
use super::exec::{Exec, Norm, Tensors};
use crate::ops::{Dropout, RotaryTable, embedding};
use crate::shard::Shard;
use crate::{Error, ParamId, ParamSet, Result, Segment};
use layer::Layer;

/// Where the pieces of a batch stand, shared by all layers.
#[derive(Debug, Clone)]
pub struct Layout {
    /// The packed segments.
    pub segments: Arc<[Segment]>,
    /// How many of the batch's rows are computed here.
    pub rows: usize,
    /// Position of each token in its sequence, `[tokens]`.
    pub positions: Arc<[u32]>,
    /// Rotary angles of the batch's positions: one table for each of [`Decoder::frequencies`].
    pub rotary: Vec<RotaryTable>,
    /// The rows whose final hidden states are asked for, ascending; absent, all. The last layer computes
    /// no more than these once it has attended.
    pub kept: Option<Arc<[u32]>>,
    /// What an adapter drops of each row; absent outside of training.
    pub dropout: Option<Dropout>,
    /// Whether it is noted how evenly experts are used.
    pub balance: bool,
    /// The type that matrices are multiplied in, where it is not that of the parameters.
    pub products: Option<DType>,
}

/// The structure of a stage of a model: which parameter of a set stands where.
#[derive(Debug, Clone)]
pub struct Decoder {
    config: ModelConfig,
    frequencies: Vec<Vec<f32>>,
    /// On the first stage, and on the last where it is the head.
    embed: Option<ParamId>,
    /// On the first stage.
    positions: Option<ParamId>,
    /// Those of the stage, the first of which is `first_layer`.
    layers: Vec<Layer>,
    first_layer: usize,
    /// On the last stage.
    norm: Option<Norm>,
}

impl Decoder {
    /// The layers that it has.
    pub fn layers(&self) -> Range<usize> {
        self.first_layer..self.first_layer + self.layers.len()
    }

    /// The norm after the last layer.
    ///
    /// # Errors
    /// [`Error::Invalid`] on a stage before the last.
    pub fn last_norm(&self) -> Result<Norm> {
        self.norm.ok_or_else(|| Error::Invalid("this stage of the model has no final norm".into()))
    }

    /// Rotary frequencies in radians per position, `[head_dim / 2]`: those of all layers, or those of layers
    /// that see everything and then those of local ones. Empty where heads are not rotated.
    pub fn frequencies(&self) -> &[Vec<f32>] {
        &self.frequencies
    }

    /// The embedding table's parameter, which a tied head shares.
    ///
    /// # Errors
    /// [`Error::Invalid`] on a stage that does not need it.
    pub fn embedding_id(&self) -> Result<ParamId> {
        self.embed.ok_or_else(|| Error::Invalid("this stage of the model has no embedding".into()))
    }

    /// The parameter of learned positions, `[positions, hidden]`.
    pub fn positions_id(&self) -> Option<ParamId> {
        self.positions
    }

    /// What rows of the embedding are multiplied by; none where by nothing.
    pub fn embedding_scale(&self) -> Option<f32> {
        let scaled = self.config.family.parts.scaled_embedding;
        scaled.then(|| (self.config.hidden_size as f32).sqrt())
    }

    /// Layout of a packed batch: `positions` is `[tokens]`.
    pub fn layout(&self, positions: &[u32], segments: Arc<[Segment]>) -> Layout {
        let table = |frequencies: &Vec<f32>| RotaryTable::new(positions, frequencies, 1.0);
        Layout {
            segments,
            rows: positions.len(),
            positions: positions.into(),
            rotary: self.frequencies.iter().map(table).collect(),
            kept: None,
            dropout: None,
            balance: false,
            products: None,
        }
    }

    /// Embeds token ids `[tokens]`, which stand as the layout says: `[tokens, hidden]`.
    ///
    /// # Errors
    /// An id past the vocabulary; a stage after the first; learned positions where ranks split the rows.
    pub fn embed(
        &self,
        params: &ParamSet,
        tokens: &[u32],
        layout: &Layout,
        shard: &dyn Shard,
    ) -> Result<Tensor<2>> {
        let mut x = shard.embed(params.matrix(self.embedding_id()?), tokens)?;
        if let Some(scale) = self.embedding_scale() {
            x = x * scale;
        }
        let Some(positions) = self.positions else { return Ok(x) };
        if shard.splits_stream() {
            let message =
                "a model with learned positions does not run with rows of the residual stream split";
            return Err(Error::Invalid(message.into()));
        }
        Ok(x + embedding(params.matrix(positions), &layout.positions)?)
    }

    /// Layer `index` of the stage on the residual stream, `[tokens, hidden]` to the same; the last one to the rows that
    /// the layout keeps.
    ///
    /// # Errors
    /// Those of `exec`.
    pub fn layer<E: Exec>(&self, exec: &mut E, index: usize, x: E::Rows) -> Result<E::Rows> {
        self.layers[index - self.first_layer].run(exec, index, x)
    }

    /// The final norm, `[tokens, hidden]` to the same.
    ///
    /// # Errors
    /// Shapes that do not fit; a stage before the last.
    pub fn norm(&self, params: &ParamSet, x: Tensor<2>) -> Result<Tensor<2>> {
        self.last_norm()?.of(params, x)
    }

    /// The stage's layers on the residual stream, `[tokens, hidden]` to the same, or to the kept rows.
    ///
    /// # Errors
    /// Those of the parts.
    pub fn run(
        &self,
        params: &ParamSet,
        x: Tensor<2>,
        layout: &Layout,
        shard: &dyn Shard,
    ) -> Result<Tensor<2>> {
        self.run_with_balance(params, x, layout, shard).map(|(x, _)| x)
    }

    /// The same, with how evenly the experts were used, where the layout asks for it.
    pub(super) fn run_with_balance(
        &self,
        params: &ParamSet,
        mut x: Tensor<2>,
        layout: &Layout,
        shard: &dyn Shard,
    ) -> Result<(Tensor<2>, Option<Balance>)> {
        let mut exec = Tensors::new(params, layout, shard, self.config.num_layers);
        for index in self.layers() {
            x = self.layer(&mut exec, index, x)?;
        }
        Ok((x, exec.balance().cloned()))
    }
}
