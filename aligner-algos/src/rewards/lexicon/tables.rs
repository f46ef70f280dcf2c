//! VADER's tables: what words, boosters, negations and phrases are worth.

use std::collections::HashMap;
use std::sync::LazyLock;

/// What a degree adverb adds to the word that it goes with.
const BOOST: f64 = 0.293;

const WORDS: &str = include_str!("vader/lexicon.txt");
const EMOJI: &str = include_str!("vader/emoji.txt");

/// Valence of each lower-case word and emoticon, −4..4.
pub(super) static VALENCES: LazyLock<HashMap<&'static str, f64>> = LazyLock::new(|| {
    let pair = |line: &'static str| {
        let (word, valence) = line.split_once('\t')?;
        Some((word, valence.parse().ok()?))
    };
    WORDS.lines().filter_map(pair).collect()
});

/// What each emoji is called.
pub(super) static EMOJI_NAMES: LazyLock<HashMap<char, &'static str>> = LazyLock::new(|| {
    let pair = |line: &'static str| {
        let (emoji, name) = line.split_once('\t')?;
        Some((emoji.chars().next()?, name))
    };
    EMOJI.lines().filter_map(pair).collect()
});

/// What a degree adverb, or two words that are one, add to the strength of what follows.
pub(super) fn booster(words: &str) -> Option<f64> {
    if AMPLIFIERS.binary_search(&words).is_ok() {
        return Some(BOOST);
    }
    DAMPENERS.contains(&words).then_some(-BOOST)
}

/// Whether a lower-case word turns what follows into its opposite.
pub(super) fn negates(word: &str) -> bool {
    NEGATIONS.contains(&word) || word.contains("n't")
}

/// What a phrase is worth that its words do not tell.
pub(super) fn phrase(words: &str) -> Option<f64> {
    PHRASES.iter().find(|(phrase, _)| *phrase == words).map(|(_, valence)| *valence)
}

/// Sorted.
const AMPLIFIERS: &[&str] = &[
    "absolutely",
    "amazingly",
    "awfully",
    "completely",
    "considerable",
    "considerably",
    "decidedly",
    "deeply",
    "effing",
    "enormous",
    "enormously",
    "entirely",
    "especially",
    "exceptional",
    "exceptionally",
    "extreme",
    "extremely",
    "fabulously",
    "flippin",
    "flipping",
    "frackin",
    "fracking",
    "frickin",
    "fricking",
    "friggin",
    "frigging",
    "fuckin",
    "fucking",
    "fuggin",
    "fugging",
    "fully",
    "greatly",
    "hella",
    "highly",
    "hugely",
    "incredible",
    "incredibly",
    "intensely",
    "major",
    "majorly",
    "more",
    "most",
    "particularly",
    "purely",
    "quite",
    "really",
    "remarkably",
    "so",
    "substantially",
    "thoroughly",
    "total",
    "totally",
    "tremendous",
    "tremendously",
    "uber",
    "unbelievably",
    "unusually",
    "utter",
    "utterly",
    "very",
];

const DAMPENERS: &[&str] = &[
    "almost",
    "barely",
    "hardly",
    "just enough",
    "kind of",
    "kinda",
    "kindof",
    "kind-of",
    "less",
    "little",
    "marginal",
    "marginally",
    "occasional",
    "occasionally",
    "partly",
    "scarce",
    "scarcely",
    "slight",
    "slightly",
    "somewhat",
    "sort of",
    "sorta",
    "sortof",
    "sort-of",
];

const NEGATIONS: &[&str] = &[
    "aint", "arent", "cannot", "cant", "couldnt", "darent", "didnt", "doesnt", "dont", "hadnt", "hasnt",
    "havent", "isnt", "mightnt", "mustnt", "neither", "neednt", "never", "none", "nope", "nor", "not",
    "nothing", "nowhere", "oughtnt", "shant", "shouldnt", "uhuh", "wasnt", "werent", "uh-uh", "without",
    "wont", "wouldnt", "rarely", "seldom", "despite",
];

const PHRASES: &[(&str, f64)] = &[
    ("the shit", 3.0),
    ("the bomb", 3.0),
    ("bad ass", 1.5),
    ("badass", 1.5),
    ("bus stop", 0.0),
    ("yeah right", -2.0),
    ("kiss of death", -1.5),
    ("to die for", 3.0),
    ("beating heart", 3.5),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_the_files_is_read() {
        assert_eq!(VALENCES.len(), WORDS.lines().count());
        assert_eq!(EMOJI_NAMES.len(), EMOJI.lines().count());
        assert!(VALENCES.values().all(|valence| valence.abs() <= 4.0));
    }

    #[test]
    fn amplifiers_are_sorted() {
        assert!(AMPLIFIERS.is_sorted());
        assert_eq!(["very", "kind of", "good"].map(booster), [Some(BOOST), Some(-BOOST), None]);
    }
}
