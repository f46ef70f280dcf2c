//! `aligner check-algorithm`: what every algorithm has to hold, tried on a small table of logits.

use aligner_algos::check::{AlgorithmReport, check_algorithm};
use aligner_core::rng::Rng;
use aligner_core::{Group, Sample};
use aligner_data::Kind;

use crate::arguments::RunFile;
use crate::progress::result;
use crate::{Registry, Run, hang};

/// Most seconds of a call, where the run file does not say less: those of the check take milliseconds.
const LIMIT_SECS: f64 = 60.0;

/// Check a run file's algorithm: that its gradient is the derivative of its loss, and that neither micro-batches
/// nor ranks nor samples without a target change it. Reads no model and no data.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    file: RunFile,
}

pub(crate) fn run(arguments: &Arguments, registry: &Registry) -> anyhow::Result<()> {
    let mut run = arguments.file.load(registry)?;
    let limit = Some(run.config.run.call_timeout_secs).filter(|secs| *secs > 0.0);
    run.watchdog = hang::watchdog(limit.map_or(LIMIT_SECS, |secs| secs.min(LIMIT_SECS)));
    let AlgorithmReport {
        loss,
        finite_difference_error,
        micro_batch_error,
        two_rank_error,
        empty_sample_error,
    } = check_algorithm(&run.guarded("the check"), &groups(&run))?;
    result(&format!(
        "algorithm                `{}` holds\n\
         loss                     {loss:.6}\n\
         against differences      {finite_difference_error:.1e}\n\
         micro-batches            {micro_batch_error:.1e}\n\
         two ranks                {two_rank_error:.1e}\n\
         samples without target   {empty_sample_error:.1e}",
        run.name
    ));
    Ok(())
}

/// Groups of the shape that the algorithm takes: four responses with rewards where it draws its own samples, pairs of
/// preferences, else single samples.
fn groups(run: &Run) -> Vec<Group> {
    let responses = match run.kind {
        _ if run.online => 4,
        Some(Kind::Preference) => 2,
        _ => 1,
    };
    let group = |at: u64| {
        let rng = Rng::new(&[at]);
        let sample = |index: u64| {
            let len = 1 + rng.below(3 * index, 5);
            let token = |place: u64| 3 + rng.below(100 * (index + 1) + place, 7) as u32;
            let mut sample = Sample::response(&[1, 2], &(0..len).map(token).collect::<Vec<_>>());
            sample.reward = run.online.then(|| rng.uniform(3 * index + 1) as f32);
            sample.ended = run.online.then_some(true);
            sample
        };
        Group { id: format!("group {at}"), samples: (0..responses).map(sample).collect(), ..Group::default() }
    };
    (0..6).map(group).collect()
}
