//! Which elements of each parameter every rank has.

use std::collections::HashSet;
use std::ops::Range;

use aligner_core::model::{ModelConfig, Splits, Stage};
use aligner_core::shard::Split;
use aligner_core::{Error, Result};

use crate::cut::{matrix_shape, share, shares, stage_names};
use crate::{Axis, Cut, Mesh};

/// A block of a parameter, which is seen as a matrix `[rows, columns]`, and where a rank keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tile {
    pub(super) rows: Range<usize>,
    pub(super) columns: Range<usize>,
    /// The place of its first element among the rank's.
    at: usize,
}

impl Tile {
    pub(super) fn elements(&self) -> usize {
        self.rows.len() * self.columns.len()
    }

    /// Whether it has all of a block.
    pub(super) fn has(&self, rows: &Range<usize>, columns: &Range<usize>) -> bool {
        let within = |own: &Range<usize>, part: &Range<usize>| own.start <= part.start && part.end <= own.end;
        within(&self.rows, rows) && within(&self.columns, columns)
    }

    /// The place of an element among the rank's.
    pub(super) fn place(&self, row: usize, column: usize) -> usize {
        self.at + (row - self.rows.start) * self.columns.len() + column - self.columns.start
    }

    /// Its elements at the places `own`, of a rank that keeps those alone: at most two broken rows, and whole ones.
    fn slice(&self, own: &Range<usize>) -> Vec<Self> {
        let width = self.columns.len();
        let (start, end) = (own.start.max(self.at), own.end.min(self.at + self.elements()));
        if start >= end {
            return Vec::new();
        }
        let mut tiles = Vec::new();
        let mut next = start - self.at;
        let end = end - self.at;
        while next < end {
            let (row, column) = (next / width, next % width);
            let whole = (end - next) / width;
            let (rows, len) =
                if column == 0 && whole > 0 { (whole, width) } else { (1, (width - column).min(end - next)) };
            let first = self.columns.start + column;
            let row = self.rows.start + row;
            let at = self.at + next - own.start;
            tiles.push(Self { rows: row..row + rows, columns: first..first + len, at });
            next += rows * len;
        }
        tiles
    }
}

/// A rank's part of a parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Held {
    shape: Vec<usize>,
    tiles: Vec<Tile>,
}

/// Where a model's parameters lie on the ranks of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Names and shapes of the whole model's parameters.
    params: Vec<(String, Vec<usize>)>,
    /// By rank and parameter.
    held: Vec<Vec<Option<Held>>>,
}

impl Layout {
    /// The layout of a model on a mesh that trains it. `params` are the names and shapes of the whole model's
    /// parameters, an adapter's among them.
    ///
    /// # Errors
    /// A mesh and a model that do not go together.
    pub fn training(
        params: &[(String, Vec<usize>)],
        config: &ModelConfig,
        mesh: Mesh,
        how: Cut,
    ) -> Result<Self> {
        mesh.check(config)?;
        let splits = Splits::new(config);
        let [tensor, depth, expert] =
            [Axis::Tensor, Axis::Pipeline, Axis::Expert].map(|axis| mesh.axis_size(axis));
        let of_rank = |rank: usize| {
            let place = mesh.coordinates(rank)?;
            let at = |axis: Axis| place[axis as usize];
            let experts = config.experts.as_ref().map(|all| share(all.count, at(Axis::Expert), expert));
            let stages = stages(config, (at(Axis::Pipeline), depth), how.chunks, experts.as_ref());
            let names: HashSet<&str> = stage_names(names(params), config, &stages).into_iter().collect();
            let sharing = how.share_parameters.then(|| mesh.group(rank, &crate::mesh::GRADIENTS));
            let sharing = sharing.transpose()?.unwrap_or_else(|| vec![rank]);
            let sharer = sharing.iter().position(|&one| one == rank).unwrap_or(0);
            let held = |(name, shape): &(String, Vec<usize>)| {
                let held = names.contains(name.as_str());
                held.then(|| {
                    cut(name, shape, &splits, (at(Axis::Tensor), tensor)).slice((sharer, sharing.len()))
                })
            };
            Ok(params.iter().map(held).collect())
        };
        let held = (0..mesh.size()).map(of_rank).collect::<Result<_>>()?;
        Ok(Self { params: params.to_vec(), held })
    }

    /// Replicas over `tensor` ranks each: a pipeline unfolded. With 1, every rank has the whole model.
    ///
    /// # Errors
    /// Ranks that do not divide.
    pub fn replicas(
        params: &[(String, Vec<usize>)],
        config: &ModelConfig,
        ranks: usize,
        tensor: usize,
    ) -> Result<Self> {
        if tensor == 0 || !ranks.is_multiple_of(tensor) {
            return Err(Error::Invalid(format!("replicas of {tensor} ranks do not divide {ranks}")));
        }
        let splits = Splits::new(config);
        let of_rank = |rank: usize| {
            let held = |(name, shape): &(String, Vec<usize>)| {
                Some(cut(name, shape, &splits, (rank % tensor, tensor)))
            };
            params.iter().map(held).collect()
        };
        Ok(Self { params: params.to_vec(), held: (0..ranks).map(of_rank).collect() })
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.held.len()
    }

    /// How many parameters there are.
    pub fn params(&self) -> usize {
        self.params.len()
    }

    /// A parameter's name.
    pub fn name(&self, param: usize) -> &str {
        &self.params[param].0
    }

    /// The elements of a whole parameter.
    pub(super) fn elements(&self, param: usize) -> usize {
        self.params[param].1.iter().product()
    }

    /// The shape of a rank's part of a parameter; none where it has nothing of it.
    pub fn shape(&self, rank: usize, param: usize) -> Option<&[usize]> {
        self.held[rank][param].as_ref().map(|held| held.shape.as_slice())
    }

    pub(super) fn tiles(&self, rank: usize, param: usize) -> &[Tile] {
        self.held[rank][param].as_ref().map_or(&[], |held| &held.tiles)
    }

    /// Whether they are about the same parameters, on as many ranks.
    pub(super) fn is_about(&self, other: &Self) -> bool {
        self.params == other.params && self.ranks() == other.ranks()
    }

    pub(super) fn is_held_like(&self, other: &Self) -> bool {
        self.held == other.held
    }
}

impl Held {
    /// One of `ranks` equal parts of the elements in their order.
    fn slice(self, (rank, ranks): (usize, usize)) -> Self {
        if ranks == 1 {
            return self;
        }
        let own = share(self.shape.iter().product(), rank, ranks);
        let mut shape = vec![1; self.shape.len()];
        if let Some(last) = shape.last_mut() {
            *last = own.len();
        }
        Self { shape, tiles: self.tiles.iter().flat_map(|tile| tile.slice(&own)).collect() }
    }
}

/// The parts of the depth of one pipeline rank.
pub(crate) fn stages(
    config: &ModelConfig,
    (rank, ranks): (usize, usize),
    chunks: usize,
    experts: Option<&Range<usize>>,
) -> Vec<Stage> {
    let chunks = chunks.max(1);
    let stage = |chunk: usize| {
        let stage = Stage::new(config, chunk * ranks + rank, ranks * chunks);
        experts.map_or(stage.clone(), |own| stage.with_experts(own.clone()))
    };
    (0..chunks).map(stage).collect()
}

fn names(params: &[(String, Vec<usize>)]) -> impl Iterator<Item = &str> {
    params.iter().map(|(name, _)| name.as_str())
}

/// A tensor-parallel rank's part of a parameter.
fn cut(name: &str, shape: &[usize], splits: &Splits, (rank, ranks): (usize, usize)) -> Held {
    let [rows, columns] = matrix_shape(shape);
    let mut own = shape.to_vec();
    let mut at = 0;
    let mut tile = |rows: Range<usize>, columns: Range<usize>| {
        let tile = Tile { rows, columns, at };
        at += tile.elements();
        tile
    };
    let tiles: Vec<Tile> = match splits.of(name) {
        Split::Outputs if ranks > 1 => {
            let parts = shares(rows, splits.fused(name), rank, ranks);
            own[0] = parts.iter().map(ExactSizeIterator::len).sum();
            parts.into_iter().map(|rows| tile(rows, 0..columns)).collect()
        }
        Split::Inputs if ranks > 1 => {
            let part = share(columns, rank, ranks);
            own[1] = part.len();
            vec![tile(0..rows, part)]
        }
        _ => vec![tile(0..rows, 0..columns)],
    };
    Held { shape: own, tiles: tiles.into_iter().filter(|tile| tile.elements() > 0).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_of_a_tile_have_its_elements_once_and_in_order() {
        let tile = Tile { rows: 2..7, columns: 3..7, at: 5 };
        let all: Vec<(usize, usize)> =
            (2..7).flat_map(|row| (3..7).map(move |column| (row, column))).collect();
        for ranks in 1..12 {
            let mut seen = Vec::new();
            for rank in 0..ranks {
                let own = share(30, rank, ranks);
                let tiles = tile.slice(&own);
                assert!(tiles.len() <= 3);
                for part in tiles {
                    for row in part.rows.clone() {
                        for column in part.columns.clone() {
                            assert_eq!(tile.place(row, column), own.start + part.place(row, column));
                            seen.push((row, column));
                        }
                    }
                }
            }
            assert_eq!(seen, all, "{ranks}");
        }
    }
}
