//! Seeded permutations, the same on every machine and in every version.

use aligner_core::rng::{scaled, split_mix};

/// The numbers below `len` in an order that the seed decides (Fisher–Yates).
pub(crate) fn permutation(len: usize, seed: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..len).collect();
    for (draw, at) in (1..len).rev().enumerate() {
        order.swap(at, scaled(split_mix(seed, draw as u64), at as u64 + 1) as usize);
    }
    order
}

/// A seed for each epoch that is unlike those of other epochs and other seeds.
pub(crate) fn epoch_seed(seed: u64, epoch: u64) -> u64 {
    split_mix(split_mix(seed, 0) ^ epoch, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permutation_has_every_number_once_and_is_the_seeds_own() {
        let order = permutation(1000, 7);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..1000).collect::<Vec<_>>());
        assert_eq!(order, permutation(1000, 7));
        assert_ne!(order, permutation(1000, 8));
        assert_ne!(epoch_seed(7, 1), epoch_seed(8, 0));
    }

    #[test]
    fn the_order_never_changes_between_versions() {
        // A resumed run must see the rows that the interrupted one would have seen.
        assert_eq!(permutation(8, 42), [4, 3, 2, 0, 7, 6, 1, 5]);
    }

    #[test]
    fn first_places_are_spread_evenly() {
        let mut counts = [0_usize; 8];
        for seed in 0..8000 {
            counts[permutation(8, epoch_seed(3, seed))[0]] += 1;
        }
        // Expected 1000 each with a standard deviation of 30.
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
    }
}
