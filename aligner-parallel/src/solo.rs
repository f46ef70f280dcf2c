//! The communicator of one rank.

use std::sync::Arc;

use aligner_core::{Communicator, Error, Phase, Reduce, Result, Tensor};

/// The only rank of its group: every collective returns what it was given.
///
/// Calls that no rank could make sense of are errors here too, so that a program which runs alone
/// does not fail first on many ranks.
#[derive(Debug, Clone, Copy, Default)]
pub struct Solo;

impl Solo {
    fn error(phase: Phase, message: &str) -> Error {
        Error::Invalid(format!("rank 0 of 1, {}: {message}", phase.name))
    }

    fn check_rank(rank: usize, operation: &str, phase: Phase) -> Result<()> {
        if rank == 0 {
            return Ok(());
        }
        Err(Self::error(phase, &format!("{operation} names rank {rank}, but there is only rank 0")))
    }
}

impl Communicator for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn all_reduce(&self, values: Tensor<1>, _op: Reduce, _phase: Phase) -> Result<Tensor<1>> {
        Ok(values)
    }

    fn all_reduce_host(&self, _values: &mut [f64], _op: Reduce, _phase: Phase) -> Result<()> {
        Ok(())
    }

    fn all_gather(&self, values: Tensor<1>, _phase: Phase) -> Result<Tensor<1>> {
        Ok(values)
    }

    fn reduce_scatter(&self, values: Tensor<1>, _phase: Phase) -> Result<Tensor<1>> {
        Ok(values)
    }

    fn broadcast(&self, values: Tensor<1>, root: usize, phase: Phase) -> Result<Tensor<1>> {
        Self::check_rank(root, "broadcast", phase)?;
        Ok(values)
    }

    fn all_to_all(&self, parts: Vec<Tensor<1>>, phase: Phase) -> Result<Vec<Tensor<1>>> {
        if parts.len() == 1 {
            return Ok(parts);
        }
        Err(Self::error(phase, &format!("all_to_all takes 1 part, one for each rank; got {}", parts.len())))
    }

    fn send(&self, _values: Tensor<1>, to: usize, phase: Phase) -> Result<()> {
        Self::check_rank(to, "send", phase)?;
        Err(Self::error(phase, "send to itself; nobody would receive it"))
    }

    fn recv(&self, _elements: usize, from: usize, phase: Phase) -> Result<Tensor<1>> {
        Self::check_rank(from, "recv", phase)?;
        Err(Self::error(phase, "recv from itself; nobody has sent anything"))
    }

    fn split(&self, _color: usize, _key: usize, _phase: Phase) -> Result<Arc<dyn Communicator>> {
        Ok(Arc::new(Self))
    }
}

#[cfg(test)]
mod tests {
    use aligner_core::Device;

    use super::*;

    const PHASE: Phase = Phase::new("a test's phase");

    fn tensor() -> Tensor<1> {
        Tensor::from_floats([1.0, 2.0], &Device::flex())
    }

    fn values(tensor: Tensor<1>) -> Vec<f32> {
        tensor.into_data().try_into_vec().unwrap()
    }

    #[test]
    fn collectives_return_what_they_were_given() {
        assert_eq!((Solo.rank(), Solo.size(), Solo.is_main()), (0, 1, true));
        for op in [Reduce::Sum, Reduce::Max, Reduce::Mean] {
            assert_eq!(values(Solo.all_reduce(tensor(), op, PHASE).unwrap()), [1.0, 2.0]);
            let mut host = [4.0];
            Solo.all_reduce_host(&mut host, op, PHASE).unwrap();
            assert_eq!(host.map(f64::to_bits), [4.0f64.to_bits()]);
        }
        assert_eq!(values(Solo.all_gather(tensor(), PHASE).unwrap()), [1.0, 2.0]);
        assert_eq!(values(Solo.reduce_scatter(tensor(), PHASE).unwrap()), [1.0, 2.0]);
        assert_eq!(values(Solo.broadcast(tensor(), 0, PHASE).unwrap()), [1.0, 2.0]);
        let parts = Solo.all_to_all(vec![tensor()], PHASE).unwrap();
        assert_eq!(parts.into_iter().map(values).collect::<Vec<_>>(), [[1.0, 2.0]]);
        let parts = Solo.all_gather_uneven(tensor(), PHASE).unwrap();
        assert_eq!(parts.into_iter().map(values).collect::<Vec<_>>(), [[1.0, 2.0]]);
        Solo.barrier(PHASE).unwrap();
        let part = Solo.split(3, 0, PHASE).unwrap();
        assert_eq!((part.rank(), part.size()), (0, 1));
    }

    #[test]
    fn calls_to_ranks_that_do_not_exist_name_the_phase() {
        let messages = [
            Solo.broadcast(tensor(), 1, PHASE).unwrap_err(),
            Solo.send(tensor(), 3, PHASE).unwrap_err(),
            Solo.recv(2, 0, PHASE).unwrap_err(),
            Solo.send(tensor(), 0, PHASE).unwrap_err(),
            Solo.all_to_all(vec![tensor(), tensor()], PHASE).unwrap_err(),
            Solo.all_to_all(Vec::new(), PHASE).unwrap_err(),
        ];
        for message in messages.map(|error| error.to_string()) {
            assert!(message.contains("a test's phase") && message.contains("rank 0 of 1"), "{message}");
        }
    }
}
