//! One instruction of format.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::rules;
use super::sentences::sentences;
use super::words::capital_words;
use crate::rewards::letters::{is_capitals, is_small};

/// How a count is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Relation {
    /// Fewer than the number.
    #[serde(rename = "less than")]
    LessThan,
    /// The number, or more.
    #[serde(rename = "at least")]
    AtLeast,
}

impl Relation {
    fn holds(self, count: usize, limit: usize) -> bool {
        match self {
            Self::LessThan => count < limit,
            Self::AtLeast => count >= limit,
        }
    }
}

/// An instruction, with the names that `IFEval` has for it and for what it asks.
///
/// Keywords are taken as they are, not as patterns, and in any case of their letters. The two checks of the case of
/// all letters look at the letters alone; `IFEval`'s also want the response to be English.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
#[expect(missing_docs, reason = "the fields are described with their variants")]
pub enum Check {
    /// All `keywords` occur.
    Existence { keywords: Vec<String> },
    /// `keyword` occurs less than, or at least, `frequency` times.
    Frequency { keyword: String, frequency: usize, relation: Relation },
    /// None of `forbidden_words` occurs as a word.
    ForbiddenWords { forbidden_words: Vec<String> },
    /// `letter` occurs less than, or at least, `let_frequency` times, in either case.
    LetterFrequency { letter: char, let_frequency: usize, let_relation: Relation },
    /// Less than, or at least, `num_sentences` sentences.
    NumberSentences { num_sentences: usize, relation: Relation },
    /// `num_paragraphs` paragraphs, with `***` between them.
    NumberParagraphs { num_paragraphs: usize },
    /// Less than, or at least, `num_words` words.
    NumberWords { num_words: usize, relation: Relation },
    /// `num_paragraphs` paragraphs, with an empty line between them, of which number `nth_paragraph` (from 1) begins
    /// with `first_word`.
    NthParagraphFirstWord { num_paragraphs: usize, nth_paragraph: usize, first_word: String },
    /// At least `num_placeholders` placeholders, such as `[address]`.
    NumberPlaceholders { num_placeholders: usize },
    /// A postscript that begins with `postscript_marker`: `P.S.`, `P.P.S`, or another.
    Postscript { postscript_marker: String },
    /// Exactly `num_bullets` lines that begin with `*` or `-`.
    NumberBulletLists { num_bullets: usize },
    /// One of "My answer is yes.", "My answer is no.", "My answer is maybe.".
    ConstrainedResponse {},
    /// At least `num_highlights` parts such as `*this*`; `**this**` counts as two.
    NumberHighlightedSections { num_highlights: usize },
    /// At least `num_sections` sections, such as `Section 1` for a `section_spliter` of `Section`.
    MultipleSections { section_spliter: String, num_sections: usize },
    /// All of it is JSON, possibly between lines of three backticks.
    JsonFormat {},
    /// A title such as `<<this>>`.
    Title {},
    /// A line begins with `starter`.
    ConstrainedStart { starter: String },
    /// Two different answers, with `******` between them.
    TwoResponses {},
    /// It begins with `prompt_to_repeat`, or with the prompt itself where that is not set.
    RepeatPrompt {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        prompt_to_repeat: Option<String>,
    },
    /// It ends with `end_phrase`.
    EndChecker { end_phrase: String },
    /// Less than, or at least, `capital_frequency` words in capitals.
    CapitalWordFrequency { capital_frequency: usize, capital_relation: Relation },
    /// All letters are capitals.
    EnglishCapital {},
    /// No letter is a capital.
    EnglishLowercase {},
    /// No comma.
    NoComma {},
    /// Double quotes around all of it.
    Quotation {},
}

impl Check {
    /// The check of an `IFEval` row's instruction, such as `keywords:existence`, and its `kwargs`; none where there is
    /// no such check.
    ///
    /// # Errors
    /// What is wrong with the `kwargs`.
    pub fn of_ifeval(id: &str, kwargs: &Value) -> Result<Option<Self>, String> {
        let kind = id.rsplit(':').next().unwrap_or(id);
        let Some(kwargs) = kwargs.as_object() else {
            return Err(format!("its `kwargs` are no table: {kwargs}"));
        };
        // Tables of the data set hold every instruction's settings, those of others null, and counts with a point.
        let set = kwargs.iter().filter(|(_, value)| !value.is_null());
        let mut table: Map<String, Value> = set.map(|(key, value)| (key.clone(), whole(value))).collect();
        table.insert("kind".into(), kind.into());
        match serde_json::from_value::<Self>(Value::Object(table)) {
            Ok(check) => check.validate().map(|()| Some(check)),
            Err(error) if error.to_string().contains("unknown variant") => Ok(None),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Whether the instruction can be followed at all.
    pub(super) fn validate(&self) -> Result<(), String> {
        let empty = match self {
            Self::Existence { keywords: words } | Self::ForbiddenWords { forbidden_words: words } => {
                words.is_empty() || words.iter().any(String::is_empty)
            }
            Self::Frequency { keyword: text, .. }
            | Self::NthParagraphFirstWord { first_word: text, .. }
            | Self::Postscript { postscript_marker: text }
            | Self::MultipleSections { section_spliter: text, .. }
            | Self::ConstrainedStart { starter: text }
            | Self::EndChecker { end_phrase: text }
            | Self::RepeatPrompt { prompt_to_repeat: Some(text) } => text.trim().is_empty(),
            _ => false,
        };
        if empty {
            return Err("a text that it asks for is empty".into());
        }
        match self {
            Self::NthParagraphFirstWord { num_paragraphs, nth_paragraph, .. }
                if !(1..=*num_paragraphs).contains(nth_paragraph) =>
            {
                Err(format!("`nth_paragraph` must be from 1 to {num_paragraphs}, got {nth_paragraph}"))
            }
            Self::LetterFrequency { letter, .. } if !letter.is_alphabetic() => {
                Err(format!("`letter` must be a letter, got {letter:?}"))
            }
            _ => Ok(()),
        }
    }

    /// Whether a response to `prompt` follows it.
    pub fn is_followed(&self, text: &str, prompt: &str) -> bool {
        match self {
            Self::Existence { keywords } => keywords.iter().all(|word| rules::occurrences(text, word) > 0),
            Self::Frequency { keyword, frequency, relation } => {
                relation.holds(rules::occurrences(text, keyword.trim()), *frequency)
            }
            Self::ForbiddenWords { forbidden_words } => {
                !forbidden_words.iter().any(|word| rules::has_word(text, word))
            }
            Self::LetterFrequency { letter, let_frequency, let_relation } => {
                let_relation.holds(rules::occurrences(text, &letter.to_string()), *let_frequency)
            }
            Self::NumberSentences { num_sentences, relation } => {
                relation.holds(sentences(text).len(), *num_sentences)
            }
            Self::NumberParagraphs { num_paragraphs } => {
                rules::divided_paragraphs(text) == Some(*num_paragraphs)
            }
            Self::NumberWords { num_words, relation } => relation.holds(rules::words(text), *num_words),
            Self::NthParagraphFirstWord { num_paragraphs, nth_paragraph, first_word } => {
                rules::paragraph_begins(text, *num_paragraphs, *nth_paragraph, first_word)
            }
            Self::NumberPlaceholders { num_placeholders } => rules::placeholders(text) >= *num_placeholders,
            Self::Postscript { postscript_marker } => rules::has_postscript(text, postscript_marker.trim()),
            Self::NumberBulletLists { num_bullets } => rules::bullets(text) == *num_bullets,
            Self::ConstrainedResponse {} => rules::is_constrained(text),
            Self::NumberHighlightedSections { num_highlights } => rules::highlights(text) >= *num_highlights,
            Self::MultipleSections { section_spliter, num_sections } => {
                rules::sections(text, section_spliter.trim()) >= *num_sections
            }
            Self::JsonFormat {} => rules::is_json(text),
            Self::Title {} => rules::has_title(text),
            Self::ConstrainedStart { starter } => {
                text.lines().any(|line| line.trim_start().starts_with(starter.trim()))
            }
            Self::TwoResponses {} => rules::are_two(text),
            Self::RepeatPrompt { prompt_to_repeat } => {
                let repeated = prompt_to_repeat.as_deref().unwrap_or(prompt).trim().to_lowercase();
                text.trim().to_lowercase().starts_with(&repeated)
            }
            Self::EndChecker { end_phrase } => {
                let text = text.trim().trim_matches('"').to_lowercase();
                text.ends_with(&end_phrase.trim().to_lowercase())
            }
            Self::CapitalWordFrequency { capital_frequency, capital_relation } => {
                capital_relation.holds(capital_words(text), *capital_frequency)
            }
            Self::EnglishCapital {} => is_capitals(text),
            Self::EnglishLowercase {} => is_small(text),
            Self::NoComma {} => !text.contains(','),
            Self::Quotation {} => {
                let text = text.trim();
                text.len() > 1 && text.starts_with('"') && text.ends_with('"')
            }
        }
    }
}

/// A whole number without its point.
fn whole(value: &Value) -> Value {
    match value.as_f64() {
        Some(number) if value.is_f64() && number.fract() == 0.0 && number.abs() < 1e15 => {
            (number as i64).into()
        }
        _ => value.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_table_with_a_misspelt_key_is_refused_by_name() {
        let read = |table: Value| serde_json::from_value::<Check>(table);
        let check = read(json!({"kind": "number_words", "num_words": 3, "relation": "less than"}));
        assert_eq!(
            check.expect("a check"),
            Check::NumberWords { num_words: 3, relation: Relation::LessThan }
        );
        for table in [
            json!({"kind": "no_comma", "num_wrods": 3}),
            json!({"kind": "number_words", "num_words": 3, "relation": "less than", "num_wrods": 3}),
            json!({"kind": "repeat_prompt", "num_wrods": "a"}),
        ] {
            let message = read(table).expect_err("a misspelt key").to_string();
            assert!(message.contains("num_wrods"), "{message}");
        }
        assert!(read(json!({"kind": "no_comas"})).expect_err("no check").to_string().contains("no_comas"));
    }

    #[test]
    fn checks_survive_toml_and_json() {
        let checks = [
            Check::NoComma {},
            Check::RepeatPrompt { prompt_to_repeat: None },
            Check::LetterFrequency { letter: 'x', let_frequency: 2, let_relation: Relation::AtLeast },
        ];
        for check in checks {
            let text = serde_json::to_string(&check).expect("a table");
            assert_eq!(serde_json::from_str::<Check>(&text).expect("its own"), check);
        }
    }

    #[test]
    fn what_cannot_be_followed_is_told() {
        let refused = |id, kwargs| Check::of_ifeval(id, &kwargs).expect_err("cannot be followed");
        assert!(refused("keywords:existence", json!({"keywords": []})).contains("empty"));
        let frequency = json!({"letter": "!", "let_frequency": 1, "let_relation": "at least"});
        assert!(refused("keywords:letter_frequency", frequency).contains("`letter`"));
        let paragraph = json!({"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "so"});
        assert!(refused("length_constraints:nth_paragraph_first_word", paragraph).contains("nth_paragraph"));
        assert!(refused("punctuation:no_comma", json!(7)).contains("kwargs"));
        assert_eq!(Check::of_ifeval("language:response_language", &json!({"language": "de"})), Ok(None));
    }
}
