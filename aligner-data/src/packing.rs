//! Which sequences share a token budget.

use std::collections::BTreeSet;

/// Bins of indices into `lengths`, each of at most `budget` tokens.
///
/// Best-fit decreasing: the longest first, each into the fullest bin that still takes it, ties by
/// index; `O(n log n)`, and the same bins for the same lengths. A sequence longer than the budget
/// gets a bin of its own, for the caller to split or refuse. Bins come in the order in which they
/// were opened, and the indices in each ascend.
///
/// ```
/// use aligner_data::packing::best_fit_decreasing;
///
/// assert_eq!(best_fit_decreasing(&[3, 5, 4, 2], 7), [vec![1, 3], vec![0, 2]]);
/// ```
pub fn best_fit_decreasing(lengths: &[usize], budget: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by_key(|&index| (std::cmp::Reverse(lengths[index]), index));
    let mut bins: Vec<Vec<usize>> = Vec::new();
    // Room left and bin, so that the first entry with enough room is the fullest bin that fits.
    let mut open: BTreeSet<(usize, usize)> = BTreeSet::new();
    for index in order {
        let length = lengths[index];
        let fitting = open.range((length, 0)..).next().copied();
        let (room, bin) = fitting.unwrap_or((budget, bins.len()));
        if !open.remove(&(room, bin)) {
            bins.push(Vec::new());
        }
        bins[bin].push(index);
        open.insert((room.saturating_sub(length), bin));
    }
    for bin in &mut bins {
        bin.sort_unstable();
    }
    bins
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_sequence_over_the_budget_stands_alone() {
        assert_eq!(best_fit_decreasing(&[9, 1, 4], 4), [vec![0], vec![2], vec![1]]);
        assert_eq!(best_fit_decreasing(&[], 4), Vec::<Vec<usize>>::new());
    }

    #[test]
    fn the_fullest_bin_that_fits_is_chosen() {
        // After 6 and 5, the 4 fits both bins of 10: best fit takes the one with 6 in it.
        assert_eq!(best_fit_decreasing(&[6, 5, 4], 10), [vec![0, 2], vec![1]]);
    }

    #[test]
    fn many_equal_lengths_fill_whole_bins() {
        let bins = best_fit_decreasing(&vec![256; 100_000], 2048);
        assert_eq!(bins.len(), 12_500);
        assert!(bins.iter().all(|bin| bin.len() == 8));
    }

    proptest! {
        #[test]
        fn all_are_placed_once_and_no_bin_overflows(
            lengths in prop::collection::vec(0_usize..300, 0..200),
            budget in 1_usize..256,
        ) {
            let bins = best_fit_decreasing(&lengths, budget);
            let mut placed: Vec<usize> = bins.concat();
            placed.sort_unstable();
            prop_assert_eq!(placed, (0..lengths.len()).collect::<Vec<_>>());
            for bin in &bins {
                let used: usize = bin.iter().map(|&index| lengths[index]).sum();
                let placed = bin.iter().filter(|&&index| lengths[index] > 0).count();
                prop_assert!(used <= budget || placed == 1, "{} tokens in {:?}", used, bin);
            }
        }

        /// No two bins could have been one: the least that best fit promises.
        #[test]
        fn no_two_bins_fit_in_one(
            lengths in prop::collection::vec(1_usize..100, 0..100),
            budget in 100_usize..256,
        ) {
            let bins = best_fit_decreasing(&lengths, budget);
            let used: Vec<usize> = bins.iter().map(|bin| bin.iter().map(|&at| lengths[at]).sum()).collect();
            for (at, a) in used.iter().enumerate() {
                prop_assert!(used[at + 1..].iter().all(|b| a + b > budget));
            }
        }
    }
}
