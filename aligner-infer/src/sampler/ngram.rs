//! Proposals from the text so far.

/// Tokens further back are not searched, so that a proposal takes microseconds.
const LOOKBACK_TOKENS: usize = 16_384;

/// Proposes what followed the last occurrence of the text's own last tokens, as in prompt lookup
/// decoding: summaries and edits repeat their source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NgramProposer {
    /// Longest n-gram that is looked for; the longest that occurs decides.
    pub max_n: usize,
    /// Shortest n-gram that may decide, at least 1.
    pub min_n: usize,
    /// Most tokens of a proposal.
    pub tokens: usize,
}

impl NgramProposer {
    /// Fills `proposal` with what may follow `history`, prompt and response; empty where no n-gram
    /// recurs. A proposal that reaches the end of the history goes on as a repetition of itself.
    pub fn propose(&self, history: &[u32], proposal: &mut Vec<u32>) {
        proposal.clear();
        let Some(start) = self.continuation(history) else { return };
        for at in start..start + self.tokens {
            let token = history.get(at).or_else(|| proposal.get(at.wrapping_sub(history.len())));
            let Some(&token) = token else { break };
            proposal.push(token);
        }
    }

    /// Where the last occurrence of the longest n-gram ends.
    fn continuation(&self, history: &[u32]) -> Option<usize> {
        let oldest = history.len().saturating_sub(LOOKBACK_TOKENS);
        let (mut longest, mut best) = (self.min_n.max(1) - 1, None);
        for end in (oldest + 1..history.len()).rev() {
            let (there, here) = (history[..end].iter().rev(), history.iter().rev());
            let same = there.zip(here).take(self.max_n).take_while(|(a, b)| a == b).count();
            if same > longest {
                (longest, best) = (same, Some(end));
                if same == self.max_n {
                    break;
                }
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use aligner_core::rng::Rng;

    use super::*;

    fn proposed(proposer: NgramProposer, history: &[u32]) -> Vec<u32> {
        let mut proposal = vec![99];
        proposer.propose(history, &mut proposal);
        proposal
    }

    #[test]
    fn the_longest_match_wins_over_a_later_shorter_one() {
        let proposer = NgramProposer { max_n: 3, min_n: 1, tokens: 2 };
        assert_eq!(proposed(proposer, &[1, 2, 3, 7, 8, 3, 9, 9, 1, 2, 3]), [7, 8]);
        assert_eq!(proposed(proposer, &[5, 3, 7, 6, 3, 8, 4, 3]), [8, 4]);
    }

    #[test]
    fn too_short_matches_and_empty_histories_propose_nothing() {
        let proposer = NgramProposer { max_n: 3, min_n: 2, tokens: 2 };
        assert_eq!(proposed(proposer, &[5, 3, 7, 6, 3]), Vec::<u32>::new());
        assert_eq!(proposed(proposer, &[]), Vec::<u32>::new());
        assert_eq!(proposed(proposer, &[1]), Vec::<u32>::new());
        assert_eq!(proposed(NgramProposer { max_n: 0, ..proposer }, &[1, 1, 1]), Vec::<u32>::new());
    }

    #[test]
    fn a_repetition_goes_on() {
        let proposer = NgramProposer { max_n: 2, min_n: 1, tokens: 5 };
        assert_eq!(proposed(proposer, &[4, 1, 2, 1, 2]), [1, 2, 1, 2, 1]);
        assert_eq!(proposed(proposer, &[7, 7]), [7; 5]);
    }

    #[test]
    fn proposals_follow_the_last_longest_occurrence_in_random_text() {
        for seed in 0..300 {
            let rng = Rng::new(&[seed]);
            let len = 1 + rng.below(1000, 40);
            let history: Vec<u32> = (0..len).map(|i| rng.below(i, 3) as u32).collect();
            let proposer = NgramProposer { max_n: 4, min_n: 2, tokens: 1 };
            let ends_alike =
                |end: usize, n: usize| n <= end && history[..end].ends_with(&history[history.len() - n..]);
            let lengths = (proposer.min_n..=proposer.max_n.min(history.len())).rev();
            let expected = lengths
                .filter_map(|n| (1..history.len()).rev().find(|&end| ends_alike(end, n)))
                .map(|end| history[end])
                .next();
            assert_eq!(proposed(proposer, &history), expected.into_iter().collect::<Vec<_>>(), "{history:?}");
        }
    }
}
