//! Ranks whose tensors lie on the device: two that share out batches, and NCCL with one.

use std::sync::Arc;

use aligner_algos::{Learner, Sft, SftConfig, TrainingRanks};
use aligner_core::model::CausalLm;
use aligner_core::optim::AdamW;
use aligner_core::{Metrics, Result};
use aligner_parallel::{Cut, Mesh, MeshAdamW, MeshComms, ParallelLm, ThreadComm};
use serde_json::json;

use crate::gradients::moved;
use crate::training::{Amount, Place, is_close, settings, sft, texts};

/// Two steps of SFT by two threads on one device, which meet over the host's memory, against those of one rank here.
///
/// # Errors
/// A failure of the device.
pub(crate) fn check(model: &CausalLm, place: &Place, amount: Amount) -> Result<bool> {
    let (expected, _) = sft(model, amount, 2)?;
    let got = ThreadComm::run(2, |comm| steps(model, place, amount, comm));
    let mut all = true;
    for (rank, got) in got.into_iter().enumerate() {
        let got = got?;
        let losses: Vec<[f64; 2]> = got
            .iter()
            .zip(&expected)
            .filter_map(|(got, expected)| Some([got.get("loss")?, expected.get("loss")?]))
            .collect();
        let ok = losses.len() == 2 && losses.iter().all(|&[got, expected]| is_close(got, expected));
        println!("{}", json!({"check": "two ranks (dp)", "rank": rank, "loss": losses, "ok": ok}));
        all &= ok;
    }
    Ok(all)
}

fn steps(model: &CausalLm, place: &Place, amount: Amount, comm: ThreadComm) -> Result<Vec<Metrics>> {
    let comms = MeshComms::new(Mesh::new([1, 1, 1, 2, 1])?, Arc::new(comm))?;
    let policy = ParallelLm::new(&moved(model, &place.device)?, &comms, Cut::default())?;
    let (config, batches) = (settings(), comms.batches().clone());
    let optimizer = MeshAdamW::new(&policy, AdamW::new(config.adamw())?, false)?;
    let ranks = TrainingRanks { all: comms.all().clone(), batches: batches.clone() };
    let mut learner = Learner::on_ranks(Box::new(policy), config, 100, ranks, Box::new(optimizer))?;
    let own = || texts(amount, model).into_iter().skip(batches.rank()).step_by(2).collect();
    let sft = Sft::new(SftConfig::default());
    (0..2).map(|_| learner.step(&sft, own())).collect()
}

/// NCCL with one rank: a sum and an exchange of a tensor on the device give it back.
///
/// # Errors
/// A failure of the device.
#[cfg(feature = "nccl")]
pub(crate) fn check_nccl(place: &Place) -> Result<bool> {
    use aligner_core::ops::host::to_vec;
    use aligner_core::{Communicator as _, Error, Phase, Reduce, Tensor};
    use aligner_infer::EngineDevice;
    use aligner_parallel::NcclComm;

    const PHASE: Phase = Phase::new("checking NCCL");
    let EngineDevice::Cuda(index) = place.engine else { return Ok(true) };
    let values: Vec<f32> = (0..1 << 20).map(|at| at as f32 * 0.5).collect();
    let done = ThreadComm::run(1, |comm| {
        let comm = NcclComm::on_cuda(comm, index)?;
        let own = || Tensor::<1>::from_floats(values.as_slice(), &place.device);
        let sum = comm.all_reduce(own(), Reduce::Sum, PHASE)?;
        let back = comm.all_to_all(vec![own()], PHASE)?.remove(0);
        Ok(to_vec(&sum) == values && to_vec(&back) == values)
    });
    let ok = match done.into_iter().next().unwrap_or(Ok(false)) {
        // What is not there is no failure.
        Err(error @ Error::Setting { .. }) => {
            println!("{}", json!({"check": "nccl", "not_run": error.to_string()}));
            return Ok(true);
        }
        done => done?,
    };
    println!("{}", json!({"check": "nccl", "ranks": 1, "ok": ok}));
    Ok(ok)
}

/// Without the feature there is nothing to check.
#[cfg(not(feature = "nccl"))]
pub(crate) fn check_nccl(_: &Place) -> Result<bool> {
    println!("{}", json!({"check": "nccl", "not_run": "this program was built without the feature `nccl`"}));
    Ok(true)
}
