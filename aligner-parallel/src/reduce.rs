//! Sums and maxima of what several ranks brought, always in the order of ranks.

use aligner_core::Reduce;
use bytemuck::Pod;

use crate::call::Element;
use crate::part::Part;

/// A type that reductions work on.
trait Number: Pod + Send + Sync {
    fn add(self, other: Self) -> Self;
    /// The larger; not a number where either is not.
    fn larger(self, other: Self) -> Self;
    fn over(self, count: usize) -> Self;
}

macro_rules! number {
    ($float:ty) => {
        impl Number for $float {
            fn add(self, other: Self) -> Self {
                self + other
            }
            fn larger(self, other: Self) -> Self {
                if other > self || other.is_nan() { other } else { self }
            }
            fn over(self, count: usize) -> Self {
                self / count as Self
            }
        }
    };
}

number!(f32);
number!(f64);

/// Elements that are worked on at a time, so that a result stays in the cache while all ranks' are added.
const BLOCK: usize = 4096;

/// Combines equally long parts, one of each rank.
pub(crate) fn reduce_parts(parts: &[Part], element: Element, how: Reduce) -> Part {
    fn typed<N: Number>(parts: &[Part], how: Reduce) -> Part {
        Part::new(reduce(&parts.iter().map(Part::elements::<N>).collect::<Vec<_>>(), how))
    }
    match element {
        // Halves travel as f32.
        Element::F32 | Element::F16 | Element::Bf16 => typed::<f32>(parts, how),
        Element::F64 => typed::<f64>(parts, how),
    }
}

/// Combines equally long slices, one of each rank: ((first + second) + third) and so on.
fn reduce<N: Number>(ranks: &[&[N]], how: Reduce) -> Vec<N> {
    let mut out = ranks[0].to_vec();
    for (block, start) in out.chunks_mut(BLOCK).zip((0..).step_by(BLOCK)) {
        for rank in &ranks[1..] {
            let pairs = block.iter_mut().zip(&rank[start..]);
            match how {
                Reduce::Sum | Reduce::Mean => pairs.for_each(|(out, &value)| *out = out.add(value)),
                Reduce::Max => pairs.for_each(|(out, &value)| *out = out.larger(value)),
            }
        }
        if how == Reduce::Mean {
            for out in block {
                *out = out.over(ranks.len());
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_in_the_order_of_ranks() {
        // In f32, (1e8 + 1) - 1e8 is 0, and (1e8 - 1e8) + 1 is 1.
        assert_eq!(reduce(&[&[1e8f32], &[1.0], &[-1e8]], Reduce::Sum), [0.0]);
        assert_eq!(reduce(&[&[1e8f32], &[-1e8], &[1.0]], Reduce::Sum), [1.0]);
        assert_eq!(reduce(&[&[1.0f64, 2.0], &[2.0, 4.0]], Reduce::Mean), [1.5, 3.0]);
    }

    #[test]
    fn largest_is_not_a_number_where_any_is_not() {
        for ranks in [[&[f32::NAN, 1.0][..], &[2.0, 3.0]], [&[2.0, 1.0], &[f32::NAN, 3.0]]] {
            let largest = reduce(&ranks, Reduce::Max);
            assert!(largest[0].is_nan() && largest[1].to_bits() == 3.0f32.to_bits(), "{largest:?}");
        }
    }

    #[test]
    fn blocks_do_not_change_a_sum() {
        let values: Vec<f32> = (0..3 * BLOCK + 7).map(|i| i as f32).collect();
        let sum = reduce(&[&values[..], &values[..]], Reduce::Sum);
        assert!(sum.iter().enumerate().all(|(i, &v)| v.to_bits() == (2.0 * i as f32).to_bits()));
    }
}
