//! Which rows see which keys: whole runs of earlier rows, and their own run up to themselves.

use std::ops::Range;

use super::ancestors;
use crate::Segment;

/// A run of query rows with the key rows that they see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// The rows of q.
    pub queries: Range<usize>,
    /// The first one's position in its sequence.
    pub position: usize,
    /// Rows of k and v that all of them see, or as much of them as is in their window.
    pub seen: Vec<Keys>,
    /// Where in k and v their own rows begin: each query sees those up to its own.
    pub own: Option<usize>,
}

/// Consecutive rows of k and v.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keys {
    /// The rows.
    pub rows: Range<usize>,
    /// The first one's position in its sequence.
    pub position: usize,
}

/// The runs of an attention. Runs that share keys are in one tree, in any order: trees are computed
/// beside each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Runs by tree; together they have each row of q once.
    pub trees: Vec<Vec<Run>>,
    /// Rows of q.
    pub queries: usize,
    /// Rows of k and v.
    pub keys: usize,
}

impl Plan {
    /// A packed batch: each segment sees its ancestors, and itself up to each row.
    pub fn new(segments: &[Segment]) -> Self {
        let mut trees = vec![Vec::new(); trees(segments).iter().max().map_or(0, |last| last + 1)];
        for (index, tree) in self::trees(segments).into_iter().enumerate() {
            let keys = |at: usize| Keys { rows: segments[at].rows(), position: segments[at].position };
            let seen = ancestors(segments, index).into_iter().map(keys).collect();
            let Keys { rows: queries, position } = keys(index);
            trees[tree].push(Run { own: Some(queries.start), queries, position, seen });
        }
        let tokens = segments.iter().map(|segment| segment.len).sum();
        Self { trees, queries: tokens, keys: tokens }
    }
}

/// The tree of each segment: a prompt and everything that continues it have the same, counted from 0.
pub fn trees(segments: &[Segment]) -> Vec<usize> {
    let mut tree_of = Vec::with_capacity(segments.len());
    let mut trees = 0;
    for segment in segments {
        let tree = segment.parent.map_or(trees, |parent| tree_of[parent]);
        tree_of.push(tree);
        trees = trees.max(tree + 1);
    }
    tree_of
}
