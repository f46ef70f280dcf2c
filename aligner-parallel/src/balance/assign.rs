//! Which of several ranks gets which items.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// Items `range` of `count` for each of `ranks` in turn, as many as of any other, or one more.
pub fn contiguous(count: usize, ranks: usize) -> Vec<Range<usize>> {
    (0..ranks).map(|rank| rank * count / ranks..(rank + 1) * count / ranks).collect()
}

/// By rank: the items that it gets, in ascending order, so that the sums of `weights` are about equal.
///
/// The heaviest item comes first, and each goes to the rank that has least so far (Graham 1969, "Bounds on
/// multiprocessing timing anomalies": the largest sum is at most 4/3 - 1/(3 ranks) of the least possible one). Of
/// equal items the one before comes first, and of equal ranks too, so everyone who knows the weights finds the same.
///
/// ```
/// use aligner_parallel::balance::longest_first;
///
/// assert_eq!(longest_first(&[7, 3, 5, 6, 3], 2), [vec![0, 1, 4], vec![2, 3]]);
/// ```
pub fn longest_first(weights: &[usize], ranks: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by_key(|&item| Reverse(weights[item]));
    let mut loads: BinaryHeap<Reverse<(usize, usize)>> = (0..ranks).map(|rank| Reverse((0, rank))).collect();
    let mut assigned = vec![Vec::new(); ranks];
    for item in order {
        let Some(Reverse((load, rank))) = loads.pop() else { break };
        assigned[rank].push(item);
        loads.push(Reverse((load + weights[item], rank)));
    }
    for items in &mut assigned {
        items.sort_unstable();
    }
    assigned
}

/// The largest sum of weights that a rank has.
pub fn most_tokens(weights: &[usize], assigned: &[Vec<usize>]) -> usize {
    let load = |items: &Vec<usize>| items.iter().map(|&item| weights[item]).sum::<usize>();
    assigned.iter().map(load).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use aligner_core::rng::Rng;

    use super::*;

    /// The least possible largest sum, by trying everything.
    fn optimum(weights: &[usize], loads: &mut [usize]) -> usize {
        let Some((&first, rest)) = weights.split_first() else {
            return loads.iter().copied().max().unwrap_or(0);
        };
        let mut best = usize::MAX;
        for rank in 0..loads.len() {
            // Ranks that have nothing yet are all alike.
            if rank > 0 && loads[rank - 1] == 0 {
                break;
            }
            loads[rank] += first;
            best = best.min(optimum(rest, loads));
            loads[rank] -= first;
        }
        best
    }

    #[test]
    fn contiguous_parts_cover_all_and_differ_by_one() {
        for (count, ranks) in (0..30).flat_map(|count| (1..9).map(move |ranks| (count, ranks))) {
            let parts = contiguous(count, ranks);
            let all: Vec<usize> = parts.iter().cloned().flatten().collect();
            assert_eq!(all, (0..count).collect::<Vec<_>>());
            let sizes = || parts.iter().map(Range::len);
            assert!(sizes().max().unwrap() - sizes().min().unwrap() <= 1, "{parts:?}");
        }
    }

    #[test]
    fn largest_sum_is_within_grahams_bound_of_the_optimum() {
        for seed in 0..300 {
            let rng = Rng::new(&[seed]);
            let (count, ranks) = (1 + rng.below(0, 9) as usize, 1 + rng.below(1, 4) as usize);
            let weights: Vec<usize> =
                (0..count).map(|at| 1 + rng.below(2 + at as u64, 40) as usize).collect();
            let assigned = longest_first(&weights, ranks);
            let mut items: Vec<usize> = assigned.iter().flatten().copied().collect();
            items.sort_unstable();
            assert_eq!(items, (0..count).collect::<Vec<_>>(), "each item once");
            let best = optimum(&weights, &mut vec![0; ranks]);
            let most = most_tokens(&weights, &assigned);
            // most <= (4/3 - 1/(3 ranks)) best, in whole numbers.
            assert!(3 * ranks * most <= (4 * ranks - 1) * best, "{weights:?} on {ranks}: {most} of {best}");
        }
    }

    #[test]
    fn grahams_worst_case_is_met() {
        // On 2 ranks, 3 3 2 2 2: 7 where 6 is possible, 7/6 = 4/3 - 1/6.
        let weights = [3, 3, 2, 2, 2];
        assert_eq!(most_tokens(&weights, &longest_first(&weights, 2)), 7);
        assert_eq!(optimum(&weights, &mut [0, 0]), 6);
    }

    #[test]
    fn ties_go_to_the_first() {
        assert_eq!(longest_first(&[5; 5], 3), [vec![0, 3], vec![1, 4], vec![2]]);
        assert!(longest_first(&[], 2).iter().all(Vec::is_empty));
    }
}
