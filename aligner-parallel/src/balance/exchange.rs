//! Samples on their way to the ranks that learn from them.

use aligner_core::{Error, Result};

use super::longest_first;

/// A group of samples, on the rank that drew it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// The rank that has it.
    pub rank: usize,
    /// Its tokens, as a packed batch counts them.
    pub tokens: usize,
    /// What it takes to send it.
    pub bytes: usize,
}

/// A group that goes to another rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// Which group.
    pub group: usize,
    /// The rank that has it.
    pub from: usize,
    /// The rank that learns from it.
    pub to: usize,
    /// What it takes to send it.
    pub bytes: usize,
}

/// What every rank learns from, and what it has to get for that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rebalanced {
    /// By rank: its micro-batches, each of these groups. There are equally many on every rank, as a pipeline needs; a
    /// rank that has fewer groups than that has empty ones.
    pub micro_batches: Vec<Vec<Vec<usize>>>,
    /// Who sends what to whom, in the order of groups.
    pub moves: Vec<Move>,
}

impl Rebalanced {
    /// By rank: the tokens that it learns from.
    pub fn tokens(&self, groups: &[Held]) -> Vec<usize> {
        let of_rank =
            |micros: &Vec<Vec<usize>>| micros.iter().flatten().map(|&group| groups[group].tokens).sum();
        self.micro_batches.iter().map(of_rank).collect()
    }
}

/// Gives each of `ranks` about as many tokens, in micro-batches of at most `budget` tokens whose number is the same
/// on every rank and a multiple of `multiple`. Groups stand in the order of their prompts, on every rank the same, so
/// all ranks find the same, and no rank has to tell another.
///
/// [`longest_first`] says which groups go together. Ranks are alike, so it is free which of them gets which part: the
/// one that has most of its bytes already. A group above the budget has a micro-batch of its own.
///
/// # Errors
/// No ranks, a budget or multiple of 0, and a group on a rank that does not exist.
pub fn rebalance(groups: &[Held], ranks: usize, budget: usize, multiple: usize) -> Result<Rebalanced> {
    for (key, value) in [("ranks", ranks), ("budget", budget), ("multiple", multiple)] {
        if value == 0 {
            return Err(Error::setting(key, "expected at least 1, got 0"));
        }
    }
    if let Some((group, held)) = groups.iter().enumerate().find(|(_, held)| held.rank >= ranks) {
        return Err(Error::Invalid(format!("group {group} lies on rank {} of {ranks}", held.rank)));
    }
    let tokens: Vec<usize> = groups.iter().map(|held| held.tokens).collect();
    let parts = place(groups, longest_first(&tokens, ranks));
    let micro_batches = pack(&tokens, &parts, budget, multiple);
    let mut moves: Vec<Move> = Vec::new();
    for (to, part) in parts.iter().enumerate() {
        let moving = part.iter().filter(|&&group| groups[group].rank != to);
        moves.extend(moving.map(|&group| {
            let Held { rank: from, bytes, .. } = groups[group];
            Move { group, from, to, bytes }
        }));
    }
    moves.sort_by_key(|step| step.group);
    Ok(Rebalanced { micro_batches, moves })
}

/// The parts in the order of ranks, so that few bytes travel: the largest share that a rank has comes first.
fn place(groups: &[Held], parts: Vec<Vec<usize>>) -> Vec<Vec<usize>> {
    let ranks = parts.len();
    let mut shares = Vec::new();
    for (at, part) in parts.iter().enumerate() {
        let mut bytes = vec![0; ranks];
        for &group in part {
            bytes[groups[group].rank] += groups[group].bytes;
        }
        shares
            .extend(bytes.into_iter().enumerate().map(|(rank, bytes)| (std::cmp::Reverse(bytes), at, rank)));
    }
    shares.sort_unstable();
    let (mut placed, mut owner) = (vec![false; ranks], vec![None; ranks]);
    for (_, part, rank) in shares {
        if !placed[part] && owner[rank].is_none() {
            (placed[part], owner[rank]) = (true, Some(part));
        }
    }
    let mut parts = parts;
    owner.into_iter().flatten().map(|part| std::mem::take(&mut parts[part])).collect()
}

/// The least number of micro-batches in which every rank's part fits, and each rank's in that many.
fn pack(tokens: &[usize], parts: &[Vec<usize>], budget: usize, multiple: usize) -> Vec<Vec<Vec<usize>>> {
    let weights = |part: &Vec<usize>| part.iter().map(|&group| tokens[group]).collect::<Vec<_>>();
    let fits = |part: &Vec<usize>, count: usize| {
        let weights = weights(part);
        let within =
            |bin: &Vec<usize>| bin.len() < 2 || bin.iter().map(|&at| weights[at]).sum::<usize>() <= budget;
        longest_first(&weights, count).iter().all(within)
    };
    let filled =
        |part: &Vec<usize>| weights(part).iter().map(|&weight| weight.clamp(1, budget)).sum::<usize>();
    let least = parts.iter().map(filled).max().unwrap_or(0).div_ceil(budget).next_multiple_of(multiple);
    // With a micro-batch for each group all parts fit.
    let most = parts.iter().map(Vec::len).max().unwrap_or(0).next_multiple_of(multiple);
    let counts = (least..=most).step_by(multiple);
    let count = counts.into_iter().find(|&count| parts.iter().all(|part| fits(part, count))).unwrap_or(most);
    let split = |part: &Vec<usize>| {
        let bins = longest_first(&weights(part), count);
        bins.into_iter().map(|bin| bin.into_iter().map(|at| part[at]).collect()).collect()
    };
    parts.iter().map(split).collect()
}

#[cfg(test)]
mod tests {
    use aligner_core::rng::Rng;

    use super::*;

    fn drawn(seed: u64) -> (Vec<Held>, usize, usize, usize) {
        let rng = Rng::new(&[seed]);
        let (ranks, count) = (1 + rng.below(0, 6) as usize, rng.below(1, 60) as usize);
        let group = |at: usize| {
            let tokens = (5.0 + rng.normal(10 + at as u64)).exp() as usize + 1;
            Held { rank: rng.below(1000 + at as u64, ranks as u64) as usize, tokens, bytes: 12 * tokens }
        };
        ((0..count).map(group).collect(), ranks, 600, 1 + rng.below(2, 3) as usize)
    }

    #[test]
    fn each_group_is_learned_from_once_where_it_is_or_goes_to() {
        for seed in 0..200 {
            let (groups, ranks, budget, multiple) = drawn(seed);
            let done = rebalance(&groups, ranks, budget, multiple).unwrap();
            assert_eq!(
                done,
                rebalance(&groups, ranks, budget, multiple).unwrap(),
                "it is the same each time"
            );
            let mut at: Vec<usize> = groups.iter().map(|held| held.rank).collect();
            for step in &done.moves {
                assert_eq!((step.from, step.bytes), (at[step.group], groups[step.group].bytes));
                assert_ne!(step.from, step.to);
                at[step.group] = step.to;
            }
            let mut seen = vec![0; groups.len()];
            for (rank, micros) in done.micro_batches.iter().enumerate() {
                for &group in micros.iter().flatten() {
                    seen[group] += 1;
                    assert_eq!(at[group], rank, "seed {seed}: group {group}");
                }
            }
            assert!(seen.iter().all(|&times| times == 1), "seed {seed}: {seen:?}");
        }
    }

    #[test]
    fn micro_batches_are_equally_many_and_within_the_budget() {
        for seed in 0..200 {
            let (groups, ranks, budget, multiple) = drawn(seed);
            let done = rebalance(&groups, ranks, budget, multiple).unwrap();
            let count = done.micro_batches[0].len();
            assert!(count.is_multiple_of(multiple), "seed {seed}: {count}");
            for micros in &done.micro_batches {
                assert_eq!(micros.len(), count);
                for micro in micros {
                    let tokens: usize = micro.iter().map(|&group| groups[group].tokens).sum();
                    assert!(tokens <= budget || micro.len() == 1, "seed {seed}: {tokens} of {micro:?}");
                }
            }
        }
    }

    #[test]
    fn ranks_get_about_as_many_tokens() {
        for seed in 0..200 {
            let (groups, ranks, budget, _) = drawn(seed);
            let tokens = rebalance(&groups, ranks, budget, 1).unwrap().tokens(&groups);
            let all: usize = tokens.iter().sum();
            let longest = groups.iter().map(|held| held.tokens).max().unwrap_or(0);
            // The last group that the fullest rank got found it with at most the mean.
            assert!(tokens.iter().all(|&own| own <= all / ranks + longest), "seed {seed}: {tokens:?}");
        }
    }

    #[test]
    fn balanced_groups_stay_where_they_are() {
        let held = |rank, tokens| Held { rank, tokens, bytes: tokens };
        let groups = [held(1, 9), held(0, 8), held(1, 1), held(0, 2)];
        let done = rebalance(&groups, 2, 100, 1).unwrap();
        assert_eq!((done.moves, done.micro_batches), (vec![], vec![vec![vec![1, 3]], vec![vec![0, 2]]]));
    }

    #[test]
    fn what_cannot_be_is_named() {
        let group = [Held { rank: 2, tokens: 1, bytes: 1 }];
        assert_eq!(rebalance(&group, 2, 1, 1).unwrap_err().to_string(), "group 0 lies on rank 2 of 2");
        assert!(rebalance(&[], 0, 1, 1).unwrap_err().to_string().contains("ranks"));
        assert!(rebalance(&[], 1, 0, 1).unwrap_err().to_string().contains("budget"));
        assert_eq!(rebalance(&[], 2, 1, 1).unwrap().micro_batches, [Vec::<Vec<usize>>::new(), vec![]]);
    }
}
