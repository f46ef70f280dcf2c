//! What the last stage alone knows, for the others.

use aligner_core::metrics::Kind;
use aligner_core::ops::host::to_vec;
use aligner_core::{
    Batch, Communicator, Error, Forward, Gradients, Metrics, Needs, Phase, Policy as _, Reduce, Result,
    Tensor,
};

use super::ParallelLm;

const VALUES: Phase = Phase::new("values from the last stage");
const SUMS: Phase = Phase::new("loss and metrics from the last stage");

/// Gives the last stage's values, `read` there, to all stages.
///
/// # Errors
/// That of the last stage; what the communicator reports.
pub(super) fn share(
    depth: &dyn Communicator,
    read: Option<Result<Forward>>,
    policy: &ParallelLm,
    batch: &Batch,
    needs: Needs,
) -> Result<Forward> {
    let mut failed = [f64::from(u8::from(matches!(read, Some(Err(_)))))];
    depth.all_reduce_host(&mut failed, Reduce::Max, VALUES)?;
    let own = read.transpose()?;
    if failed[0] > 0.0 {
        return Err(Error::Invalid("the last stage of the pipeline failed; see its error".into()));
    }
    let (targets, sequences) = (batch.targets.len(), batch.sequences.len());
    let labels = policy.config().num_labels.unwrap_or(0);
    let is_wanted = |need| labels > 0 && needs.contains(need);
    let (scores, values) = (is_wanted(Needs::SCORES), is_wanted(Needs::VALUES));
    let elements = match labels {
        0 => 3 * targets,
        _ => usize::from(scores) * sequences * labels + usize::from(values) * targets,
    };
    let packed = own.map_or_else(
        || vec![0.0; elements],
        |own| {
            let columns = [own.logps, own.entropy, own.correct, own.scores.map(flat), own.values];
            columns.into_iter().flatten().flat_map(|column| to_vec(&column)).collect()
        },
    );
    let packed = Tensor::<1>::from_floats(packed.as_slice(), &policy.params().device());
    let all = depth.broadcast(packed, depth.size() - 1, VALUES)?;
    let mut at = 0;
    let mut take = |len: usize| {
        at += len;
        all.clone().narrow(0, at - len, len)
    };
    let mut out = Forward::default();
    if labels == 0 {
        out.logps = Some(take(targets));
        out.entropy = Some(take(targets));
        out.correct = Some(take(targets));
    }
    if scores {
        out.scores = Some(take(sequences * labels).reshape([sequences, labels]));
    }
    if values {
        out.values = Some(take(targets));
    }
    Ok(out)
}

fn flat(scores: Tensor<2>) -> Tensor<1> {
    let elements = scores.dims().iter().product::<usize>();
    scores.reshape([elements])
}

/// Gives the last stage's loss and metrics to all stages.
///
/// # Errors
/// `failure`, this stage's own; that another one failed; what the communicator reports.
pub(super) fn share_sums(
    depth: &dyn Communicator,
    gradients: &mut Gradients,
    failure: Option<Error>,
) -> Result<()> {
    let mut failed = [f64::from(u8::from(failure.is_some()))];
    depth.all_reduce_host(&mut failed, Reduce::Max, SUMS)?;
    if let Some(error) = failure {
        return Err(error);
    }
    if failed[0] > 0.0 {
        return Err(Error::Invalid("another stage of the pipeline failed; see its error".into()));
    }
    let is_last = depth.rank() + 1 == depth.size();
    let own = if is_last { encode(gradients) } else { Vec::new() };
    let mut len = [own.len() as f64];
    depth.all_reduce_host(&mut len, Reduce::Max, SUMS)?;
    let mut all = own;
    all.resize(len[0] as usize, 0.0);
    depth.all_reduce_host(&mut all, Reduce::Sum, SUMS)?;
    if !is_last {
        decode(&all, gradients)?;
    }
    Ok(())
}

/// The loss, then each metric: the length of its name, the name's bytes, its kind, sum and weight.
fn encode(gradients: &Gradients) -> Vec<f64> {
    let mut all = vec![gradients.loss_sum];
    for (name, kind, (sum, weight)) in gradients.metrics.parts() {
        all.push(name.len() as f64);
        all.extend(name.bytes().map(f64::from));
        let kind = match kind {
            Kind::Mean => 0.0,
            Kind::Max => 1.0,
            Kind::Min => 2.0,
        };
        all.extend([kind, sum, weight]);
    }
    all
}

fn decode(all: &[f64], gradients: &mut Gradients) -> Result<()> {
    let garbled = || Error::Invalid("the last stage's metrics came garbled".into());
    let mut rest = all.iter().copied();
    let mut next = || rest.next().ok_or_else(garbled);
    gradients.loss_sum = next()?;
    let mut metrics = Metrics::default();
    while let Ok(len) = next() {
        let name = (0..len as usize).map(|_| Ok(next()? as u8)).collect::<Result<Vec<u8>>>()?;
        let name = String::from_utf8(name).map_err(|_| garbled())?;
        let (kind, sum, weight) = (next()? as u8, next()?, next()?);
        match kind {
            0 => metrics.add(name, sum, weight),
            1 => metrics.add_max(name, sum),
            _ => metrics.add_min(name, sum),
        }
    }
    gradients.metrics = metrics;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_come_back_as_they_went() {
        let mut own = Gradients { loss_sum: 2.5, ..Gradients::default() };
        own.metrics.add("accuracy", 3.0, 4.0);
        own.metrics.add_max("longest é", 7.0);
        own.metrics.add_min("least", -1.0);
        let mut other = Gradients::default();
        decode(&encode(&own), &mut other).unwrap();
        assert_eq!((other.loss_sum, encode(&other)), (2.5, encode(&own)));
        assert!(decode(&encode(&own)[..9], &mut other).is_err());
    }
}
