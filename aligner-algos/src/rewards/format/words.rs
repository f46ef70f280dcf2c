//! The words of a sentence: NLTK's `NLTKWordTokenizer`, which splits off punctuation and contractions as the Penn
//! Treebank does.

use std::sync::LazyLock;

use ::regex::Regex;

use super::sentences::sentences;
use crate::rewards::letters::is_capitals;

type Step = (Regex, &'static str);

/// Patterns and what they become, in order; the first two are the tokenizer's opening quotes and punctuation, the
/// third follows when the sentence has been padded with space.
static STEPS: LazyLock<[Vec<Step>; 3]> = LazyLock::new(|| {
    let compile = |steps: &[(&str, &'static str)]| -> Vec<Step> {
        let compile =
            |&(pattern, with): &(&str, &'static str)| (Regex::new(pattern).expect("a valid pattern"), with);
        steps.iter().map(compile).collect()
    };
    [compile(OPENING), compile(PUNCTUATION), compile(CLOSING)]
});

const OPENING: &[(&str, &str)] =
    &[("([«“‘„]|`+)", " $1 "), ("^\"", "``"), ("(``)", " $1 "), (r#"([ (\[{<])("|'{2})"#, "$1 `` ")];

const PUNCTUATION: &[(&str, &str)] = &[
    (r#"([^.])(\.)([\])}>"'»”’ ]*)\s*$"#, "$1 $2 $3 "),
    (r"([:,])([^\d])", " $1 $2"),
    (r"([:,])$", " $1 "),
    (r"\.{2,}", " $0 "),
    (r"[;@#$%&]", " $0 "),
    (r"[\u{2012}-\u{2015}]", " $0 "),
    (r#"([^.])(\.)([\])}>"']*)\s*$"#, "$1 $2$3 "),
    (r"[?!]", " $0 "),
    (r"([^'])' ", "$1 ' "),
    (r"[*]", " $0 "),
    (r"[\]\[(){}<>]", " $0 "),
    (r"--", " -- "),
];

const CLOSING: &[(&str, &str)] = &[
    ("([»”’])", " $1 "),
    ("''", " '' "),
    ("\"", " '' "),
    (r"\s+", " "),
    (r"([^' ])('[sS]|'[mM]|'[dD]|') ", "$1 $2 "),
    (r"([^' ])('ll|'LL|'re|'RE|'ve|'VE|n't|N'T) ", "$1 $2 "),
    (r"(?i)\b(can)(not)\b", " $1 $2 "),
    (r"(?i)\b(d)('ye)\b", " $1 $2 "),
    (r"(?i)\b(gim)(me)\b", " $1 $2 "),
    (r"(?i)\b(gon)(na)\b", " $1 $2 "),
    (r"(?i)\b(got)(ta)\b", " $1 $2 "),
    (r"(?i)\b(lem)(me)\b", " $1 $2 "),
    (r"(?i)\b(more)('n)\b", " $1 $2 "),
    (r"(?i)\b(wan)(na)\s", " $1 $2  "),
    (r"(?i) ('t)(is)\b", " $1 $2 "),
    (r"(?i) ('t)(was)\b", " $1 $2 "),
];

/// How many words of a text are in capitals.
pub(super) fn capital_words(text: &str) -> usize {
    let words = sentences(text).into_iter().flat_map(|sentence| words(&sentence));
    words.filter(|word| is_capitals(word)).count()
}

fn words(sentence: &str) -> Vec<String> {
    let [opening, punctuation, closing] = &*STEPS;
    let mut text = replaced(sentence.to_owned(), opening);
    text = with_quotes_apart(&text);
    text = replaced(text, punctuation);
    text = replaced(format!(" {text} "), closing);
    text.split_whitespace().map(str::to_owned).collect()
}

fn replaced(text: String, steps: &[Step]) -> String {
    steps.iter().fold(text, |text, (pattern, with)| pattern.replace_all(&text, *with).into_owned())
}

/// A space behind each single quote that opens a word and begins no contraction.
fn with_quotes_apart(text: &str) -> String {
    let is_word = |symbol: char| symbol.is_alphanumeric() || symbol == '_';
    let mut apart = String::with_capacity(text.len());
    let mut before = None;
    for (at, symbol) in text.char_indices() {
        apart.push(symbol);
        let rest = &text[at + symbol.len_utf8()..];
        if symbol == '\'' && !before.is_some_and(is_word) {
            let word: String = rest.chars().take_while(|symbol| is_word(*symbol)).collect();
            let contracts = ["re", "ve", "ll", "m", "t", "s", "d", "n"];
            if !word.is_empty() && !contracts.contains(&word.to_lowercase().as_str()) {
                apart.push(' ');
            }
        }
        before = Some(symbol);
    }
    apart
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn punctuation_and_contractions_are_split_off() {
        let text = "\"I CAN'T say,\" he said (in '96) -- that's $3.50, cannot...";
        let expected = [
            "``", "I", "CA", "N'T", "say", ",", "''", "he", "said", "(", "in", "'", "96", ")", "--", "that",
            "'s", "$", "3.50", ",", "can", "not", "...",
        ];
        assert_eq!(words(text), expected);
    }

    #[test]
    fn capitals_are_counted_by_word() {
        assert_eq!(capital_words("I SAID no. WELL-KNOWN U.S. FACTS, can't you SEE 7? I'M OK"), 9);
        assert_eq!(capital_words("nothing here"), 0);
    }
}
