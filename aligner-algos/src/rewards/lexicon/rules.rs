//! VADER's rules: negation, degree, contrast, capitals, punctuation and phrases around the lexicon's words.
//!
//! They follow `vaderSentiment` 3.3.2 (MIT, by C.J. Hutto) to the letter, its accidents included: scores are
//! then those that others publish.

use super::tables::{EMOJI_NAMES, VALENCES, booster, negates, phrase};
use crate::rewards::letters::is_capitals;

/// What capitals add to a word among words that are not.
const CAPITALS: f64 = 0.733;
/// What a negation makes of a valence.
const NEGATION: f64 = -0.74;
/// Squeezes sums into −1..1: about the square of the largest sum to be expected.
const ALPHA: f64 = 15.0;

/// VADER's four numbers of a text, rounded as the original rounds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Polarity {
    /// Share of the text that is negative, 0..1, three digits.
    pub negative: f64,
    /// Share of the text that is neither, 0..1, three digits.
    pub neutral: f64,
    /// Share of the text that is positive, 0..1, three digits.
    pub positive: f64,
    /// The sum of valences, squeezed into −1..1, four digits.
    pub compound: f64,
}

/// The polarity of a text; all zeros where it has no word.
pub fn polarity(text: &str) -> Polarity {
    let text = with_emoji_named(text);
    let words = Words::of(&text);
    let mut valences: Vec<f64> = (0..words.as_written.len()).map(|at| words.valence(at)).collect();
    if valences.is_empty() {
        return Polarity::default();
    }
    words.contrast(&mut valences);
    shares(&valences, emphasis(&text))
}

/// Emojis replaced by their names, apart from what stands before them.
fn with_emoji_named(text: &str) -> String {
    let mut named = String::with_capacity(text.len());
    let mut after_space = true;
    for symbol in text.chars() {
        if let Some(name) = EMOJI_NAMES.get(&symbol) {
            if !after_space {
                named.push(' ');
            }
            named.push_str(name);
            after_space = false;
        } else {
            named.push(symbol);
            after_space = symbol == ' ';
        }
    }
    named
}

/// The words of a text, without the punctuation around them, emoticons kept.
struct Words<'t> {
    as_written: Vec<&'t str>,
    lower: Vec<String>,
    /// Whether some, but not all, are in capitals: only then do capitals stress.
    capitals_stress: bool,
}

impl<'t> Words<'t> {
    fn of(text: &'t str) -> Self {
        // The original also splits at the four ASCII separators, which Unicode does not count as space.
        let is_space = |symbol: char| symbol.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&symbol);
        let as_written: Vec<&str> =
            text.split(is_space).filter(|token| !token.is_empty()).map(without_punctuation).collect();
        let capitals = as_written.iter().filter(|word| is_capitals(word)).count();
        Self {
            lower: as_written.iter().map(|word| word.to_lowercase()).collect(),
            capitals_stress: 0 < capitals && capitals < as_written.len(),
            as_written,
        }
    }

    fn is(&self, at: usize, word: &str) -> bool {
        self.lower.get(at).is_some_and(|own| own == word)
    }

    fn known(&self, at: usize) -> Option<f64> {
        self.lower.get(at).and_then(|word| VALENCES.get(word.as_str())).copied()
    }

    fn stressed(&self, at: usize) -> bool {
        self.capitals_stress && is_capitals(self.as_written[at])
    }

    /// The valence of a word among its neighbours; 0 where the lexicon does not have it.
    fn valence(&self, at: usize) -> f64 {
        if booster(&self.lower[at]).is_some() || (self.is(at, "kind") && self.is(at + 1, "of")) {
            return 0.0;
        }
        let Some(own) = self.known(at) else { return 0.0 };
        let mut valence = self.of_its_own(at, own);
        for distance in 1..=at.min(3) {
            if self.known(at - distance).is_some() {
                continue;
            }
            valence += self.boost(at, distance, valence);
            valence *= self.negation(at, distance);
            if distance == 3 {
                valence = self.phrases(at, valence);
            }
        }
        if self.negated_by_least(at) { valence * NEGATION } else { valence }
    }

    /// The word's valence with a "no" before it, or as a "no" before another word, and its capitals.
    fn of_its_own(&self, at: usize, own: f64) -> f64 {
        let mut valence = own;
        if self.is(at, "no") && self.known(at + 1).is_some() {
            valence = 0.0;
        }
        let no_before = |distance: usize| at >= distance && self.is(at - distance, "no");
        let joined = || self.is(at - 1, "or") || self.is(at - 1, "nor");
        if no_before(1) || no_before(2) || (no_before(3) && joined()) {
            valence = own * NEGATION;
        }
        if self.stressed(at) {
            valence += if valence > 0.0 { CAPITALS } else { -CAPITALS };
        }
        valence
    }

    /// What the word `distance` before adds; less from further away.
    fn boost(&self, at: usize, distance: usize, valence: f64) -> f64 {
        let Some(mut boost) = booster(&self.lower[at - distance]) else { return 0.0 };
        if valence < 0.0 {
            boost = -boost;
        }
        if self.stressed(at - distance) {
            boost += if valence > 0.0 { CAPITALS } else { -CAPITALS };
        }
        boost * [1.0, 0.95, 0.9][distance - 1]
    }

    /// The factor of the word `distance` before, by the words between.
    fn negation(&self, at: usize, distance: usize) -> f64 {
        let so = |at: usize| self.is(at, "so") || self.is(at, "this");
        let before = at - distance;
        let (intensified, no_doubt) = match distance {
            1 => (false, false),
            2 => (
                self.is(before, "never") && so(at - 1),
                self.is(before, "without") && self.is(at - 1, "doubt"),
            ),
            _ => (
                (self.is(before, "never") && so(at - 2)) || so(at - 1),
                self.is(before, "without") && (self.is(at - 2, "doubt") || self.is(at - 1, "doubt")),
            ),
        };
        match (intensified, no_doubt) {
            (true, _) => 1.25,
            (_, true) => 1.0,
            _ if negates(&self.lower[before]) => NEGATION,
            _ => 1.0,
        }
    }

    /// Phrases around a word that has three before it: they replace its valence; then "kind of" and the like.
    fn phrases(&self, at: usize, mut valence: f64) -> f64 {
        let run = |from: usize, to: usize| self.lower[from..=to].join(" ");
        let one_before = run(at - 1, at);
        let two_before = run(at - 2, at);
        let [two_one, three_two_one, three_two] =
            [run(at - 2, at - 1), run(at - 3, at - 1), run(at - 3, at - 2)];
        let around = [&one_before, &two_before, &two_one, &three_two_one, &three_two];
        valence = around.into_iter().find_map(|words| phrase(words)).unwrap_or(valence);
        for ahead in [1, 2] {
            if at + ahead < self.lower.len() {
                valence = phrase(&run(at, at + ahead)).unwrap_or(valence);
            }
        }
        for words in [&three_two_one, &three_two, &two_one] {
            valence += booster(words).unwrap_or(0.0);
        }
        valence
    }

    /// "least" negates, "at least" and "very least" do not.
    fn negated_by_least(&self, at: usize) -> bool {
        at > 0 && self.is(at - 1, "least") && !(at > 1 && (self.is(at - 2, "at") || self.is(at - 2, "very")))
    }

    /// What stands before the first "but" counts half, what stands after it half as much again.
    ///
    /// The original looks each valence up by its value, so the first of equal ones is changed in place of
    /// the others, possibly twice.
    fn contrast(&self, valences: &mut [f64]) {
        let Some(but) = self.lower.iter().position(|word| word == "but") else { return };
        for at in 0..valences.len() {
            #[expect(clippy::float_cmp, reason = "looked up by value, as in the original")]
            let Some(first) = valences.iter().position(|&other| other == valences[at]) else { continue };
            match first.cmp(&but) {
                std::cmp::Ordering::Less => valences[first] *= 0.5,
                std::cmp::Ordering::Greater => valences[first] *= 1.5,
                std::cmp::Ordering::Equal => {}
            }
        }
    }
}

/// A token without the ASCII punctuation around it; what would be left of an emoticon is left whole.
fn without_punctuation(token: &str) -> &str {
    let stripped = token.trim_matches(|symbol: char| symbol.is_ascii_punctuation());
    if stripped.chars().count() <= 2 { token } else { stripped }
}

/// What exclamation and question marks add to the strength of the whole.
fn emphasis(text: &str) -> f64 {
    let exclamations = text.matches('!').count().min(4);
    let questions = match text.matches('?').count() {
        0 | 1 => 0.0,
        few @ 2..=3 => few as f64 * 0.18,
        _ => 0.96,
    };
    exclamations as f64 * 0.292 + questions
}

fn shares(valences: &[f64], emphasis: f64) -> Polarity {
    let mut sum: f64 = valences.iter().sum();
    if sum != 0.0 {
        sum += emphasis.copysign(sum);
    }
    // One more for each word, since words that are neither count one.
    let mut positive: f64 =
        valences.iter().filter(|&&valence| valence > 0.0).map(|valence| valence + 1.0).sum();
    let mut negative: f64 =
        valences.iter().filter(|&&valence| valence < 0.0).map(|valence| 1.0 - valence).sum();
    let neutral = valences.iter().filter(|&&valence| valence == 0.0).count() as f64;
    if positive > negative {
        positive += emphasis;
    } else if positive < negative {
        negative += emphasis;
    }
    let total = positive + negative + neutral;
    Polarity {
        negative: rounded(negative / total, 3),
        neutral: rounded(neutral / total, 3),
        positive: rounded(positive / total, 3),
        compound: rounded(sum / (sum * sum + ALPHA).sqrt(), 4),
    }
}

/// The nearest number of so many decimals, as the decimal that a reader sees.
fn rounded(value: f64, digits: usize) -> f64 {
    format!("{value:.digits$}").parse().unwrap_or(value)
}
