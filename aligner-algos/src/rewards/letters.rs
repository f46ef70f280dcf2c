//! Capitals and small letters, as Python's `isupper` and `islower` tell them.

/// Whether a text has capitals, and no letter with case that is none.
pub(super) fn is_capitals(text: &str) -> bool {
    text.chars().any(char::is_uppercase)
        && !text.chars().any(|symbol| symbol.is_lowercase() || is_digraph(symbol))
}

/// Whether a text has small letters, and no letter with case that is none.
pub(super) fn is_small(text: &str) -> bool {
    text.chars().any(char::is_lowercase)
        && !text.chars().any(|symbol| symbol.is_uppercase() || is_digraph(symbol))
}

/// A letter that is a capital and a small one at once, such as `ǅ`.
fn is_digraph(symbol: char) -> bool {
    !symbol.is_uppercase() && !symbol.is_lowercase() && !symbol.to_lowercase().eq([symbol])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_without_case_and_signs_do_not_matter() {
        assert_eq!(
            ["A 1!", "ÄÖ", "Ab", "1", "ǅ", "A漢"].map(is_capitals),
            [true, true, false, false, false, true]
        );
        assert_eq!(
            ["a 1!", "äö", "Ab", "1", "aǅ", "a漢"].map(is_small),
            [true, true, false, false, false, true]
        );
    }
}
