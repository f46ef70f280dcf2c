//! Nodes, ranks and links, and what collectives cost on them.

use std::collections::BTreeSet;

use aligner_core::Result;
use serde::Deserialize;

use crate::mesh::{Axis, Mesh};

/// A link between two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// What one rank sends in a second, while it receives as much.
    pub bytes_per_sec: f64,
    /// From the beginning of a message without content to its arrival.
    pub latency_secs: f64,
}

/// What ranks reach of what their hardware could do.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rates {
    /// Of the peak FLOP/s, in forward and backward passes.
    pub train: f64,
    /// Of the peak FLOP/s, in forward passes over whole sequences: scores and prompts.
    pub score: f64,
    /// Of the bandwidth of memory, in decode passes.
    pub decode: f64,
    /// Seconds of a decode pass besides: scheduling, launches, sampling.
    pub pass_secs: f64,
    /// Of the time of the passes beside it, in which data-parallel communication is hidden.
    pub overlap: f64,
}

impl Default for Rates {
    /// Fitted to a published run of 8 GPUs ([`published`](super::published)); `decode` and `overlap` are assumptions.
    fn default() -> Self {
        Self { train: 0.34, score: 0.35, decode: 0.8, pass_secs: 0.007, overlap: 0.8 }
    }
}

/// A cluster of equal nodes. Without settings, nodes of 8 H100 SXM with `NVLink` 4 and 400 Gbit/s a GPU between nodes, by
/// their data sheets.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cluster {
    /// How many.
    pub nodes: usize,
    /// On each.
    pub ranks_per_node: usize,
    /// FLOP/s of a rank in the type that it computes in.
    pub peak_flops: f64,
    /// Of a rank.
    pub memory_bytes: f64,
    /// What a rank reads of its memory in a second.
    pub memory_bytes_per_sec: f64,
    /// Inside a node.
    pub intra: Link,
    /// Between nodes, of each rank.
    pub inter: Link,
    /// What is reached of it.
    pub rates: Rates,
}

impl Default for Cluster {
    fn default() -> Self {
        Self {
            nodes: 1,
            ranks_per_node: 8,
            peak_flops: 989e12,
            memory_bytes: 80e9,
            memory_bytes_per_sec: 3.35e12,
            intra: Link { bytes_per_sec: 450e9, latency_secs: 3e-6 },
            inter: Link { bytes_per_sec: 50e9, latency_secs: 10e-6 },
            rates: Rates::default(),
        }
    }
}

/// How the ranks of a group lie on nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spread {
    /// Of the group, on each node.
    pub per_node: usize,
    /// Over which it lies.
    pub nodes: usize,
}

impl Cluster {
    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.nodes * self.ranks_per_node
    }

    /// Every number that cannot be.
    pub fn check(&self) -> Vec<String> {
        let counts = [("nodes", self.nodes), ("ranks_per_node", self.ranks_per_node)];
        let zero = counts.into_iter().filter(|&(_, count)| count == 0);
        let mut problems: Vec<String> =
            zero.map(|(key, _)| format!("cluster.{key}: expected at least 1, got 0")).collect();
        let above = [
            ("peak_flops", self.peak_flops),
            ("memory_bytes", self.memory_bytes),
            ("memory_bytes_per_sec", self.memory_bytes_per_sec),
            ("intra.bytes_per_sec", self.intra.bytes_per_sec),
            ("inter.bytes_per_sec", self.inter.bytes_per_sec),
        ];
        let rates = &self.rates;
        let times = [
            ("intra.latency_secs", self.intra.latency_secs),
            ("inter.latency_secs", self.inter.latency_secs),
            ("rates.pass_secs", rates.pass_secs),
        ];
        let shares =
            [("rates.train", rates.train), ("rates.score", rates.score), ("rates.decode", rates.decode)];
        let mut bad = |key: &str, right: bool, wanted: &str, value: f64| {
            if !right {
                problems.push(format!("cluster.{key}: expected {wanted}, got {value}"));
            }
        };
        for (key, value) in above {
            bad(key, value.is_finite() && value > 0.0, "a number above 0", value);
        }
        for (key, value) in times {
            bad(key, value.is_finite() && value >= 0.0, "seconds, 0 or more", value);
        }
        for (key, value) in shares {
            bad(key, value > 0.0 && value <= 1.0, "a share above 0 and at most 1", value);
        }
        bad("rates.overlap", (0.0..=1.0).contains(&rates.overlap), "a share from 0 to 1", rates.overlap);
        problems
    }

    /// How the group of rank 0 along these axes lies; the others lie alike where the mesh divides the nodes.
    ///
    /// # Errors
    /// Never, as a mesh has a rank 0.
    pub fn spread(&self, mesh: &Mesh, axes: &[Axis]) -> Result<Spread> {
        let group = mesh.group(0, axes)?;
        let nodes: BTreeSet<usize> = group.iter().map(|rank| rank / self.ranks_per_node).collect();
        Ok(Spread { per_node: group.len().div_ceil(nodes.len()), nodes: nodes.len() })
    }

    /// Seconds in which each rank of a group gets all of `bytes`, of which each has a part: over rings, first between
    /// the ranks of the same place on each node, then inside the nodes. A reduce-scatter takes as long.
    pub fn all_gather(&self, group: Spread, bytes: f64) -> f64 {
        let of_place = bytes / group.per_node as f64;
        ring(self.inter, group.nodes, of_place) + ring(self.intra, group.per_node, bytes)
    }

    /// Seconds in which `bytes` of each rank of a group are summed for all: a reduce-scatter and an all-gather.
    pub fn all_reduce(&self, group: Spread, bytes: f64) -> f64 {
        2.0 * self.all_gather(group, bytes)
    }

    /// Seconds in which a message to the next rank of a group arrives.
    pub fn send(&self, group: Spread, bytes: f64) -> f64 {
        let link = if group.nodes > 1 { self.inter } else { self.intra };
        link.latency_secs + bytes / link.bytes_per_sec
    }
}

/// (n - 1) α + (n - 1) / n · S / β, with α and β of the link (Thakur, Rabenseifner and Gropp 2005, section 4).
fn ring(link: Link, ranks: usize, bytes: f64) -> f64 {
    let steps = ranks.saturating_sub(1) as f64;
    steps * link.latency_secs + steps / ranks.max(1) as f64 * bytes / link.bytes_per_sec
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-12 * b.abs()
    }

    #[test]
    fn ring_of_a_node_is_the_textbook_formula() {
        let cluster = Cluster::default();
        let group = Spread { per_node: 8, nodes: 1 };
        // 2 (n - 1) α + 2 (n - 1) / n · S / β.
        let expected = 14.0 * 3e-6 + 1.75 * 1e9 / 450e9;
        assert!(close(cluster.all_reduce(group, 1e9), expected));
        assert!(cluster.all_reduce(Spread { per_node: 1, nodes: 1 }, 1e9).abs() < 1e-15);
    }

    #[test]
    fn groups_lie_where_the_mesh_puts_them() {
        let cluster = Cluster { nodes: 8, ..Cluster::default() };
        let mesh = Mesh::new([4, 1, 1, 4, 4]).unwrap();
        let spread = |axes: &[Axis]| cluster.spread(&mesh, axes).unwrap();
        assert_eq!(spread(&[Axis::Tensor]), Spread { per_node: 4, nodes: 1 });
        assert_eq!(spread(&[Axis::Data]), Spread { per_node: 2, nodes: 2 });
        assert_eq!(spread(&[Axis::Pipeline]), Spread { per_node: 1, nodes: 4 });
        // Half of the bytes travel between the two nodes, over each of the two places.
        let expected = 10e-6 + 0.5 * 0.5e9 / 50e9 + 3e-6 + 0.5 * 1e9 / 450e9;
        assert!(close(cluster.all_gather(spread(&[Axis::Data]), 1e9), expected));
    }

    #[test]
    fn numbers_that_cannot_be_are_all_named() {
        let rates = Rates { train: 0.0, overlap: 1.5, ..Rates::default() };
        let link = Link { bytes_per_sec: 0.0, latency_secs: -1.0 };
        let cluster = Cluster { nodes: 0, peak_flops: f64::NAN, inter: link, rates, ..Cluster::default() };
        let problems = cluster.check();
        assert_eq!(problems.len(), 6, "{problems:?}");
        for key in [
            "nodes",
            "peak_flops",
            "inter.bytes_per_sec",
            "inter.latency_secs",
            "rates.train",
            "rates.overlap",
        ] {
            assert!(problems.iter().any(|problem| problem.starts_with(&format!("cluster.{key}:"))), "{key}");
        }
        assert!(Cluster::default().check().is_empty());
    }
}
