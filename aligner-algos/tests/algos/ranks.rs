//! Ranks as threads: the least communicator that a learner needs.

use std::sync::{Arc, Barrier, Mutex};

use aligner_core::ops::host::to_vec;
use aligner_core::{Communicator, Error, Phase, Reduce, Result, Tensor};

struct Meeting {
    slots: Mutex<Vec<Vec<f64>>>,
    barrier: Barrier,
}

/// One rank of a group of threads.
pub(crate) struct ThreadRank {
    rank: usize,
    size: usize,
    meeting: Arc<Meeting>,
}

/// A group of `size` ranks.
pub(crate) fn group(size: usize) -> Vec<Arc<ThreadRank>> {
    let meeting =
        Arc::new(Meeting { slots: Mutex::new(vec![Vec::new(); size]), barrier: Barrier::new(size) });
    (0..size).map(|rank| Arc::new(ThreadRank { rank, size, meeting: meeting.clone() })).collect()
}

/// A rank alone.
pub(crate) fn alone() -> Arc<ThreadRank> {
    group(1).remove(0)
}

impl ThreadRank {
    fn reduce(&self, values: Vec<f64>, op: Reduce) -> Vec<f64> {
        self.meeting.slots.lock().unwrap()[self.rank] = values;
        self.meeting.barrier.wait();
        let all = self.meeting.slots.lock().unwrap().clone();
        self.meeting.barrier.wait();
        assert!(all.iter().all(|values| values.len() == all[0].len()), "ranks disagree on a size");
        let combine = |one: Vec<f64>, other: &Vec<f64>| {
            let pairs = one.into_iter().zip(other);
            pairs.map(|(a, &b)| if op == Reduce::Sum { a + b } else { a.max(b) }).collect()
        };
        all[1..].iter().fold(all[0].clone(), combine)
    }
}

fn not_here<T>() -> Result<T> {
    Err(Error::Invalid("the learner is not expected to call this".into()))
}

impl Communicator for ThreadRank {
    fn rank(&self) -> usize {
        self.rank
    }
    fn size(&self) -> usize {
        self.size
    }
    fn all_reduce(&self, values: Tensor<1>, op: Reduce, _: Phase) -> Result<Tensor<1>> {
        let own = to_vec(&values).into_iter().map(f64::from).collect();
        let sum: Vec<f32> = self.reduce(own, op).into_iter().map(|v| v as f32).collect();
        Ok(Tensor::from_floats(sum.as_slice(), &values.device()))
    }
    fn all_reduce_host(&self, values: &mut [f64], op: Reduce, _: Phase) -> Result<()> {
        let sum = self.reduce(values.to_vec(), op);
        values.copy_from_slice(&sum);
        Ok(())
    }
    fn all_gather(&self, _: Tensor<1>, _: Phase) -> Result<Tensor<1>> {
        not_here()
    }
    fn reduce_scatter(&self, _: Tensor<1>, _: Phase) -> Result<Tensor<1>> {
        not_here()
    }
    fn broadcast(&self, _: Tensor<1>, _: usize, _: Phase) -> Result<Tensor<1>> {
        not_here()
    }
    fn all_to_all(&self, _: Vec<Tensor<1>>, _: Phase) -> Result<Vec<Tensor<1>>> {
        not_here()
    }
    fn send(&self, _: Tensor<1>, _: usize, _: Phase) -> Result<()> {
        not_here()
    }
    fn recv(&self, _: usize, _: usize, _: Phase) -> Result<Tensor<1>> {
        not_here()
    }
}
