//! The merges that follow from the pieces' scores.

use std::collections::HashMap;

use serde_json::{Value, json};

use crate::tokenizer::vocabulary::{NORMAL, Vocabulary};

/// The longest token that is taken apart, in characters: the work grows with the square.
const LONGEST: usize = 256;

/// Every way to make a normal token of two others, the token with the best score first: the order in which
/// `SentencePiece` merges, and transformers' conversion of it.
pub(super) fn merges(vocabulary: Vocabulary<'_>, scores: &[f64]) -> Value {
    let tokens = vocabulary.tokens;
    let normal: HashMap<&str, usize> = vocabulary.of_kind(NORMAL).map(|(id, token)| (token, id)).collect();
    let mut found = Vec::new();
    for ((id, token), &score) in tokens.iter().enumerate().zip(scores) {
        if vocabulary.kind(id) != NORMAL || token.chars().count() > LONGEST {
            continue;
        }
        let splits = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        let known = splits.filter_map(|(left, right)| Some((*normal.get(left)?, *normal.get(right)?)));
        let mut known: Vec<_> = known.map(|(left, right)| (score, left, right)).collect();
        known.sort_by_key(|&(_, left, right)| (left, right));
        found.extend(known);
    }
    let length = |id: usize| tokens[id].chars().count();
    found.sort_by(|a, b| {
        let by_score = b.0.total_cmp(&a.0);
        by_score.then_with(|| (length(b.1), length(b.2)).cmp(&(length(a.1), length(a.2))))
    });
    found.into_iter().map(|(_, left, right)| json!([tokens[left], tokens[right]])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merged(tokens: &[&str], types: &[i64], scores: &[f64]) -> Value {
        let tokens: Vec<String> = tokens.iter().map(ToString::to_string).collect();
        merges(Vocabulary { tokens: &tokens, types }, scores)
    }

    #[test]
    fn merges_come_best_score_first_then_longest_left_part() {
        let scores = [-9.0, -9.0, -9.0, -1.0, -2.0, -0.5];
        let expected = json!([["ab", "c"], ["a", "bc"], ["a", "b"], ["b", "c"]]);
        assert_eq!(merged(&["a", "b", "c", "ab", "bc", "abc"], &[], &scores), expected);
    }

    #[test]
    fn scores_that_are_no_numbers_do_not_break_the_sort() {
        let merges = merged(&["a", "aa", "aaa"], &[], &[f64::NAN, f64::NAN, 0.0]);
        assert_eq!(merges.as_array().map(Vec::len), Some(3));
    }

    #[test]
    fn only_normal_pieces_are_merged() {
        let types = [NORMAL, NORMAL, 4, NORMAL];
        assert_eq!(merged(&["a", "b", "ab", "aba"], &types, &[0.0; 4]), json!([]));
    }
}
