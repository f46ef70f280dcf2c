//! How ranks are laid out over the kinds of parallelism.

mod comms;
mod fit;

use std::fmt;

use aligner_core::{Error, Result};

pub(crate) use comms::GRADIENTS;
pub use comms::MeshComms;

/// One kind of parallelism.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Each matrix is split over these ranks; they talk most, so they are neighbours.
    Tensor,
    /// Each sequence is split over these ranks.
    Context,
    /// Experts are split over these ranks, and batches too: to all other weights it is a data axis.
    Expert,
    /// Batches are split over these ranks.
    Data,
    /// Layers are split over these ranks; they talk least, so they are farthest apart.
    Pipeline,
}

impl Axis {
    /// All axes, the one whose ranks are neighbours first.
    pub const ALL: [Self; 5] = [Self::Tensor, Self::Context, Self::Expert, Self::Data, Self::Pipeline];

    /// The axis's key in a run file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tensor => "tp",
            Self::Context => "cp",
            Self::Expert => "ep",
            Self::Data => "dp",
            Self::Pipeline => "pp",
        }
    }
}

/// Ranks in a grid: their number is the product of the axes' sizes.
///
/// Ranks count fastest along [`Axis::Tensor`], then context, expert, data and pipeline: the order
/// tp-cp-ep-dp-pp of Megatron, which keeps the ranks that talk most on one machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mesh {
    /// Sizes in the order of [`Axis::ALL`].
    sizes: [usize; 5],
}

impl Mesh {
    /// The mesh of a single rank.
    pub const fn one() -> Self {
        Self { sizes: [1; 5] }
    }

    /// A mesh with these sizes in the order of [`Axis::ALL`].
    ///
    /// # Errors
    /// A size of 0, or more ranks than can be counted.
    pub fn new(sizes: [usize; 5]) -> Result<Self> {
        if let Some(at) = sizes.iter().position(|&size| size == 0) {
            return Err(Error::setting(Axis::ALL[at].name(), "expected at least 1, got 0"));
        }
        if sizes.iter().try_fold(1usize, |ranks, &size| ranks.checked_mul(size)).is_none() {
            return Err(Error::Invalid(format!("a mesh of {sizes:?} has too many ranks")));
        }
        Ok(Self { sizes })
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.sizes.iter().product()
    }

    /// How many ranks lie along an axis.
    pub fn axis_size(&self, axis: Axis) -> usize {
        self.sizes[axis as usize]
    }

    /// A rank's place along each axis, in the order of [`Axis::ALL`].
    ///
    /// # Errors
    /// A rank that the mesh does not have.
    pub fn coordinates(&self, rank: usize) -> Result<[usize; 5]> {
        if rank >= self.size() {
            return Err(Error::Invalid(format!("rank {rank} is not in a mesh of {} ranks", self.size())));
        }
        let mut rest = rank;
        Ok(self.sizes.map(|size| {
            let at = rest % size;
            rest /= size;
            at
        }))
    }

    /// The rank at these coordinates, the inverse of [`Mesh::coordinates`].
    ///
    /// # Errors
    /// A coordinate outside its axis.
    pub fn rank(&self, coordinates: [usize; 5]) -> Result<usize> {
        let mut rank = 0;
        for axis in Axis::ALL.into_iter().rev() {
            let (at, size) = (coordinates[axis as usize], self.axis_size(axis));
            if at >= size {
                return Err(Error::Invalid(format!("{} {at} is outside its axis of {size}", axis.name())));
            }
            rank = rank * size + at;
        }
        Ok(rank)
    }

    /// The ranks that differ from `rank` along these axes alone, itself among them, in ascending order.
    ///
    /// ```
    /// use aligner_parallel::{Axis, Mesh};
    ///
    /// let mesh = Mesh::new([2, 1, 1, 2, 2])?;
    /// assert_eq!(mesh.group(5, &[Axis::Tensor])?, [4, 5]);
    /// assert_eq!(mesh.group(5, &[Axis::Data, Axis::Pipeline])?, [1, 3, 5, 7]);
    /// # Ok::<(), aligner_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// A rank that the mesh does not have.
    pub fn group(&self, rank: usize, axes: &[Axis]) -> Result<Vec<usize>> {
        let first = self.first(rank, axes)?;
        let mut ranks = vec![first];
        let mut stride = 1;
        for axis in Axis::ALL {
            let size = self.axis_size(axis);
            if axes.contains(&axis) {
                // Axes come in the order in which ranks count, so the list stays in ascending order.
                let steps = (0..size).map(|step| step * stride);
                ranks = steps.flat_map(|step| ranks.iter().map(move |&rank| rank + step)).collect();
            }
            stride *= size;
        }
        Ok(ranks)
    }

    /// The first rank of a group; it tells groups along the same axes apart.
    fn first(&self, rank: usize, axes: &[Axis]) -> Result<usize> {
        let mut coordinates = self.coordinates(rank)?;
        for &axis in axes {
            coordinates[axis as usize] = 0;
        }
        self.rank(coordinates)
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes = Axis::ALL.map(|axis| format!("{}={}", axis.name(), self.axis_size(axis)));
        f.write_str(&axes.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mesh_of_one_has_rank_zero_everywhere() {
        let mesh = Mesh::one();
        assert_eq!((mesh.size(), mesh.coordinates(0).unwrap()), (1, [0; 5]));
        assert!(mesh.coordinates(1).is_err());
    }

    #[test]
    fn ranks_count_along_tensor_first_and_pipeline_last() {
        let mesh = Mesh::new([2, 1, 1, 3, 2]).unwrap();
        assert_eq!((mesh.size(), mesh.axis_size(Axis::Data)), (12, 3));
        assert_eq!(mesh.coordinates(1).unwrap(), [1, 0, 0, 0, 0]);
        assert_eq!(mesh.coordinates(2).unwrap(), [0, 0, 0, 1, 0]);
        assert_eq!(mesh.coordinates(6).unwrap(), [0, 0, 0, 0, 1]);
        for rank in 0..12 {
            assert_eq!(mesh.rank(mesh.coordinates(rank).unwrap()).unwrap(), rank);
        }
    }

    #[test]
    fn groups_along_any_axes_part_the_ranks() {
        let mesh = Mesh::new([2, 3, 1, 2, 2]).unwrap();
        for set in 0..1 << Axis::ALL.len() {
            let axes: Vec<Axis> =
                Axis::ALL.into_iter().filter(|&axis| set & 1 << axis as usize != 0).collect();
            let size: usize = axes.iter().map(|&axis| mesh.axis_size(axis)).product();
            let mut seen = vec![0; mesh.size()];
            for rank in 0..mesh.size() {
                let group = mesh.group(rank, &axes).unwrap();
                assert!(
                    group.len() == size && group.is_sorted() && group.contains(&rank),
                    "{axes:?}: {group:?}"
                );
                for &other in &group {
                    seen[other] += 1;
                    assert_eq!(mesh.group(other, &axes).unwrap(), group, "{axes:?}");
                    let (own, others) = (mesh.coordinates(rank).unwrap(), mesh.coordinates(other).unwrap());
                    let differ =
                        Axis::ALL.into_iter().filter(|&axis| own[axis as usize] != others[axis as usize]);
                    assert!(
                        differ.into_iter().all(|axis| axes.contains(&axis)),
                        "{axes:?}: {rank} and {other}"
                    );
                }
            }
            assert!(seen.iter().all(|&times| times == size), "{axes:?}: {seen:?}");
        }
        assert!(mesh.group(24, &[]).is_err());
    }

    #[test]
    fn impossible_sizes_and_coordinates_are_errors() {
        assert!(Mesh::new([1, 1, 1, 0, 1]).unwrap_err().to_string().contains("dp"));
        assert!(Mesh::new([usize::MAX, 2, 1, 1, 1]).is_err());
        let message = Mesh::one().rank([0, 0, 0, 0, 1]).unwrap_err().to_string();
        assert!(message.contains("pp 1"), "{message}");
    }
}
