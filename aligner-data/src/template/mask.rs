//! From spans of text to a mask of tokens.

use std::ops::Range;

/// Makes token offsets cover the text without holes: a gap before a token becomes the token's.
///
/// Byte-level post-processors may trim spaces off the offsets they report, which leaves a token of
/// spaces empty; the characters of one that several tokens share keep the same start.
pub(crate) fn fill_gaps(offsets: &[(usize, usize)]) -> Vec<Range<usize>> {
    let mut end_before = 0;
    offsets
        .iter()
        .map(|&(start, end)| {
            let filled = start.min(end_before)..end.max(start);
            end_before = end_before.max(filled.end);
            filled
        })
        .collect()
}

/// Marks each token that has a part in a span: also the one that straddles a span's edge, as it
/// cannot be produced by halves.
///
/// `tokens` are byte ranges in ascending order of their start, `spans` are ascending and disjoint.
pub(crate) fn mask_of(tokens: &[Range<usize>], spans: &[Range<usize>]) -> Vec<bool> {
    let mut current = 0;
    tokens
        .iter()
        .map(|token| {
            while spans.get(current).is_some_and(|span| span.end <= token.start) {
                current += 1;
            }
            // A token without text of its own, as a dummy prefix, goes with the text after it.
            let end = token.end.max(token.start + 1);
            spans.get(current).is_some_and(|span| span.start < end && !span.is_empty())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn trimmed_spaces_go_to_the_token_that_holds_them() {
        let filled = fill_gaps(&[(0, 2), (4, 4), (5, 8), (5, 8), (8, 9)]);
        assert_eq!(filled, [0..2, 2..4, 4..8, 5..8, 8..9]);
    }

    #[test]
    fn a_token_that_straddles_an_edge_is_marked() {
        let span = |range: Range<usize>| vec![range];
        assert_eq!(mask_of(&[0..3, 3..5, 5..6], &span(2..4)), [true, true, false]);
        assert_eq!(mask_of(&[0..3, 3..3, 3..5], &span(3..5)), [false, true, true]);
    }

    proptest! {
        /// Against the definition, token by token and span by span.
        #[test]
        fn a_token_is_marked_if_and_only_if_it_meets_a_span(
            lengths in prop::collection::vec(1_usize..5, 0..40),
            cuts in prop::collection::btree_set(0_usize..120, 0..12),
        ) {
            let mut at = 0;
            let tokens: Vec<_> = lengths.iter().map(|len| { at += len; at - len..at }).collect();
            let cuts: Vec<_> = cuts.into_iter().collect();
            let spans: Vec<_> = cuts.chunks_exact(2).map(|pair| pair[0]..pair[1]).collect();
            let expected: Vec<bool> = tokens
                .iter()
                .map(|token| token.clone().any(|byte| spans.iter().any(|span| span.contains(&byte))))
                .collect();
            prop_assert_eq!(mask_of(&tokens, &spans), expected);
        }

        #[test]
        fn filled_offsets_have_no_holes(trims in prop::collection::vec((1_usize..5, 0_usize..5), 1..30)) {
            let mut at = 0;
            let offsets: Vec<_> = trims.iter().map(|&(len, trim)| {
                at += len;
                (at - len + trim.min(len), at)
            }).collect();
            let filled = fill_gaps(&offsets);
            prop_assert_eq!(filled[0].start, 0);
            prop_assert!(filled.windows(2).all(|pair| pair[0].end == pair[1].start));
            prop_assert_eq!(filled.last().map(|range| range.end), Some(at));
        }
    }
}
