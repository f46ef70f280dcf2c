//! A layer: an attention, then an MLP or a mixture of experts, each between norms and added to the residual
//! stream.

use crate::Result;
use crate::model::exec::{Exec, Linear, Mixture, Norm};
use crate::ops::{Activation, AttentionShape};

/// The parameters of a layer, and what is done with them.
#[derive(Debug, Clone)]
pub(super) struct Layer {
    pub(super) attention: Attention,
    pub(super) mlp: Mlp,
}

#[derive(Debug, Clone)]
pub(super) struct Attention {
    pub(super) norms: Around,
    pub(super) qkv: Qkv,
    /// Of queries and keys.
    pub(super) head_norms: Option<[Norm; 2]>,
    /// Which of the decoder's frequencies rotate the heads.
    pub(super) rope: Option<usize>,
    pub(super) shape: AttentionShape,
    pub(super) output: Linear,
}

/// A block's norms: of what it reads, and of what it adds to the residual stream.
#[derive(Debug, Clone, Copy)]
pub(super) struct Around {
    pub(super) before: Option<Norm>,
    pub(super) after: Option<Norm>,
}

#[derive(Debug, Clone)]
pub(super) enum Qkv {
    Apart([Linear; 3]),
    /// One linear, with the columns of each.
    Fused(Linear, [usize; 3]),
}

#[derive(Debug, Clone)]
pub(super) struct Mlp {
    pub(super) norms: Around,
    pub(super) activation: Activation,
    pub(super) kind: MlpKind,
}

#[derive(Debug, Clone)]
pub(super) enum MlpKind {
    /// Gate, up, down.
    Gated([Linear; 3]),
    /// Gate and up in one linear, with the columns of each; down.
    Fused([Linear; 2], [usize; 2]),
    /// Up, down.
    Plain([Linear; 2]),
    /// Experts of which each token has a few, and one that every token has.
    Mixture(Mixture, Option<Shared>),
}

/// The expert that every token has.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shared {
    /// Gate, up, down.
    pub(super) linears: [Linear; 3],
    /// Its only output opens the expert, through a sigmoid.
    pub(super) opening: Linear,
}

impl Layer {
    pub(super) fn run<E: Exec>(&self, exec: &mut E, index: usize, x: E::Rows) -> Result<E::Rows> {
        let x = self.attention.run(exec, index, x)?;
        self.mlp.run(exec, x)
    }
}

impl Attention {
    fn run<E: Exec>(&self, exec: &mut E, index: usize, x: E::Rows) -> Result<E::Rows> {
        let entered = exec.enter(&x, self.norms.before)?;
        let [mut q, mut k, v] = match self.qkv {
            Qkv::Apart(linears) => exec.linears(entered, linears)?,
            Qkv::Fused(linear, columns) => {
                let [all] = exec.linears(entered, [linear])?;
                exec.split(all, columns)?
            }
        };
        if let Some([of_q, of_k]) = self.head_norms {
            (q, k) = (exec.norm(q, of_q)?, exec.norm(k, of_k)?);
        }
        if let Some(rope) = self.rope {
            (q, k) = (exec.rotate(q, rope)?, exec.rotate(k, rope)?);
        }
        let attended = exec.attend(index, [q, k, v], self.shape)?;
        exec.exit(x, attended, self.output, self.norms.after)
    }
}

impl Mlp {
    fn run<E: Exec>(&self, exec: &mut E, x: E::Rows) -> Result<E::Rows> {
        let entered = exec.enter(&x, self.norms.before)?;
        let (inner, down) = match &self.kind {
            MlpKind::Mixture(mixture, shared) => {
                let x = exec.mix(x, &entered, mixture)?;
                let Some(Shared { linears: [gate, up, down], opening }) = *shared else { return Ok(x) };
                let [gate, up, opening] = exec.linears(entered, [gate, up, opening])?;
                // Opened before its last linear, which has no bias: the same as after it.
                let inner = exec.gate(gate, up, self.activation)?;
                let inner = exec.open(inner, opening)?;
                return exec.exit(x, inner, down, None);
            }
            &MlpKind::Gated([gate, up, down]) => {
                let [gate, up] = exec.linears(entered, [gate, up])?;
                (exec.gate(gate, up, self.activation)?, down)
            }
            &MlpKind::Fused([both, down], columns) => {
                let [both] = exec.linears(entered, [both])?;
                let [gate, up] = exec.split(both, columns)?;
                (exec.gate(gate, up, self.activation)?, down)
            }
            &MlpKind::Plain([up, down]) => {
                let [up] = exec.linears(entered, [up])?;
                (exec.activate(up, self.activation)?, down)
            }
        };
        exec.exit(x, inner, down, self.norms.after)
    }
}
