//! Two ranks that share a model on the device, in each way that there is, against one rank on the host.

use std::sync::Arc;

use aligner_core::model::CausalLm;
use aligner_core::ops::host::to_vec;
use aligner_core::optim::{AdamW, AdamWConfig, Optimizer as _};
use aligner_core::{
    Batch, Communicator, Device, Group, Needs, ParamSet, Phase, Policy as _, Reduce, Result, Sample,
};
use aligner_parallel::{Cut, Mesh, MeshAdamW, MeshComms, ParallelLm, PipelineSchedule, Solo, ThreadComm};
use serde_json::json;

use crate::gradients::{fresh, grown, loss, moved, relative};
use crate::training::{Place, SMALL_MEMORY};

/// Largest error of the loss and of the gradient's norm, and of log-probabilities and of a gradient over the largest
/// magnitude in its tensor.
const BOUND: f32 = 1e-4;

/// With a learning rate as large as this term of its denominator, and that far above any gradient, a step of `AdamW`
/// takes the gradient off the parameter: so what parameters have moved by tells of gradients and of optimizers both.
const STEP: f64 = 1e4;

/// A mesh, and how the model is cut on it.
struct Layout {
    name: &'static str,
    mesh: [usize; 5],
    cut: Cut,
    shard_optimizer: bool,
}

const CUT: Cut = Cut {
    sequence: false,
    schedule: PipelineSchedule::OneForwardOneBackward,
    chunks: 1,
    share_parameters: false,
};

const ONE: Layout = Layout { name: "one", mesh: [1; 5], cut: CUT, shard_optimizer: false };

const LAYOUTS: [Layout; 6] = [
    Layout { name: "cp", mesh: [1, 2, 1, 1, 1], ..ONE },
    Layout { name: "tp", mesh: [2, 1, 1, 1, 1], ..ONE },
    Layout { name: "tp, rows", mesh: [2, 1, 1, 1, 1], cut: Cut { sequence: true, ..CUT }, ..ONE },
    Layout { name: "pp", mesh: [1, 1, 1, 1, 2], ..ONE },
    Layout { name: "dp, optimizer", mesh: [1, 1, 1, 2, 1], shard_optimizer: true, ..ONE },
    Layout {
        name: "dp, parameters",
        mesh: [1, 1, 1, 2, 1],
        cut: Cut { share_parameters: true, ..CUT },
        ..ONE
    },
];

/// Of mixtures.
const EXPERTS: Layout = Layout { name: "ep", mesh: [1, 1, 2, 1, 1], ..ONE };

/// What a model says of a batch, and what a step comes to.
struct Outcome {
    logps: Vec<f32>,
    step: Option<Step>,
}

struct Step {
    loss: f64,
    norm: f64,
    /// By parameter: what it has moved by.
    moves: Vec<(String, Vec<f32>)>,
}

/// All layouts. Says whether each was within its bounds.
///
/// # Errors
/// A failure of the device.
pub(crate) fn check(model: &CausalLm, place: &Place) -> Result<bool> {
    let dense = compare(&grown(model.clone()), place, &LAYOUTS, true)?;
    if place.has_small_memory() {
        println!("{}", json!({"check": "two ranks share a mixture: its step", "not_run": SMALL_MEMORY}));
    }
    let mixture = compare(&fresh("mixtral")?, place, &[EXPERTS], !place.has_small_memory())?;
    Ok(dense && mixture)
}

fn compare(model: &CausalLm, place: &Place, layouts: &[Layout], with_step: bool) -> Result<bool> {
    let expected = outcome(model, &Device::flex(), &ONE, Arc::new(Solo), with_step)?;
    let mut all = true;
    for layout in layouts {
        let run = |comm: ThreadComm| {
            let comm = Arc::new(comm.on(place.device.clone()));
            outcome(model, &place.device, layout, comm, with_step)
        };
        for (rank, got) in ThreadComm::run(2, run).into_iter().enumerate() {
            all &= got?.is_close(&expected, layout.name, rank);
        }
    }
    Ok(all)
}

fn outcome(
    model: &CausalLm,
    device: &Device,
    layout: &Layout,
    comm: Arc<dyn Communicator>,
    with_step: bool,
) -> Result<Outcome> {
    let comms = MeshComms::new(Mesh::new(layout.mesh)?, comm)?;
    let mut policy = ParallelLm::new(&moved(model, device)?, &comms, layout.cut)?;
    let both = batches()?;
    let logps = to_vec(policy.forward(&both[0], Needs::NOTHING)?.logps()?);
    if !with_step {
        return Ok(Outcome { logps, step: None });
    }
    let batches = comms.batches();
    let micro: Vec<Batch> = both.into_iter().skip(batches.rank()).step_by(batches.size()).collect();
    let mut gradients = policy.accumulate(&micro, Needs::NOTHING, &loss)?;
    let mut sum = [gradients.loss_sum];
    batches.all_reduce_host(&mut sum, Reduce::Sum, Phase::new("loss of a check"))?;
    let config = AdamWConfig { eps: STEP, ..AdamWConfig::default() };
    let mut optimizer = MeshAdamW::new(&policy, AdamW::new(config)?, layout.shard_optimizer)?;
    let norm = optimizer.sum(policy.params(), &mut gradients.values)?;
    optimizer.step(policy.params_mut(), &gradients.values, STEP, 1.0)?;
    let moves = moves(model.params(), &policy.whole()?);
    Ok(Outcome { logps, step: Some(Step { loss: sum[0], norm, moves }) })
}

/// Two answers to one prompt, and a text, all long enough that each rank has several rows of each.
fn batches() -> Result<[Batch; 2]> {
    let tokens = |count: u32, step: u32| (0..count).map(|at| 5 + at * step % 100).collect::<Vec<u32>>();
    let prompt = tokens(16, 7);
    let answers = [tokens(16, 11), tokens(24, 13)].map(|answer| Sample::response(&prompt, &answer));
    let pair = Group { id: "pair".into(), samples: answers.into(), ..Group::default() };
    let text = tokens(32, 31);
    let text = Group::single("text", Sample::new(text.clone(), vec![true; text.len()]));
    Ok([Batch::collate([&pair])?, Batch::collate([&text])?])
}

fn moves(before: &ParamSet, after: &ParamSet) -> Vec<(String, Vec<f32>)> {
    let moved = |(before, after): (&[f32], &[f32])| before.iter().zip(after).map(|(a, b)| a - b).collect();
    (before.iter().zip(after.iter()))
        .map(|(before, after)| (after.name.clone(), moved((&to_vec(&before.value), &to_vec(&after.value)))))
        .collect()
}

impl Outcome {
    fn is_close(&self, expected: &Self, name: &str, rank: usize) -> bool {
        let of_logps = relative_of(&self.logps, &expected.logps);
        let mut line = json!({"check": "two ranks share a model", "mesh": name, "rank": rank, "relative_error_of_logps": of_logps});
        let mut errors = vec![of_logps];
        if let (Some(own), Some(expected)) = (&self.step, &expected.step) {
            let part = |got: f64, expected: f64| ((got - expected).abs() / expected.abs()) as f32;
            let (of_loss, of_norm) = (part(own.loss, expected.loss), part(own.norm, expected.norm));
            let (worst, parameter) = own.worst(expected);
            errors.extend([of_loss, of_norm, worst]);
            line["relative_error"] = worst.into();
            line["of"] = parameter.into();
            line["relative_error_of_loss"] = of_loss.into();
            line["relative_error_of_norm"] = of_norm.into();
        }
        // What is not a number is below no bound.
        let ok = errors.iter().all(|&error| error < BOUND);
        line["ok"] = ok.into();
        println!("{line}");
        ok
    }
}

impl Step {
    /// The largest error of any gradient, with its parameter.
    fn worst<'a>(&self, expected: &'a Self) -> (f32, &'a str) {
        let mut worst = (if self.moves.len() == expected.moves.len() { 0.0 } else { f32::INFINITY }, "");
        for ((own_name, own), (name, expected)) in self.moves.iter().zip(&expected.moves) {
            let error = if own_name == name { relative_of(own, expected) } else { f32::INFINITY };
            if error > worst.0 {
                worst = (error, name);
            }
        }
        worst
    }
}

/// As [`relative`], where there may be another number of values.
fn relative_of(got: &[f32], expected: &[f32]) -> f32 {
    if got.len() == expected.len() { relative(got, expected) } else { f32::INFINITY }
}
